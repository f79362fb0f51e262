"""The cost of the clock's marks, for the self-test: pairs of windows of the training loop, with marks and without."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from pipeline.communication.interleaved_timing import TARGET_WINDOW_S
from pipeline.communication.selftest_findings import (
    CLOCK_PAIR_SHARES,
    count_windows,
    is_clock_cost_precise_enough,
)
from pipeline.data.batches import SyntheticBatches
from pipeline.experiment.spec import Spec
from pipeline.training import process_group
from pipeline.training.loop import run_epoch
from pipeline.training.models import build_model
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep
from pipeline.training.step_timer import StepTimer, UnmarkedTimer

MIN_STEPS, MAX_STEPS = 10, 200  # of a window of the large batch


class ClockWindows(NamedTuple):
    """Wall times of the training loop by window, with the clock's marks and without."""

    marked_ns: list[int]
    unmarked_ns: list[int]
    parts_share: list[float]  # the sum of the parts over the wall time


def measure_clock_cost(name: str, spec: Spec, rank: Rank) -> ClockWindows:
    """Time the training loop with and without marks, in pairs of windows. `name` is that of the batch.

    A step of the large batch is bound by the device: windows of many steps, until the cost is precise enough. A step of
    the small batch is bound by the host, whose speed changes by 10 % within a second: windows of one step each.
    """
    epoch = msgspec.structs.replace(spec, measure="epochs", windows=1, epochs=1)
    step = EagerStep(build_model(spec.model or "resnet18", num_classes=10).to(rank.device), epoch, rank)
    batches = SyntheticBatches(epoch, rank.shard)

    def run(num_steps: int, clock: type[StepTimer]) -> tuple[int, float]:
        series = run_epoch(1, msgspec.structs.replace(epoch, max_steps=num_steps), rank, batches, step, clock)
        wall_ns = series.times.epoch_time_ns or 1
        return wall_ns, float(series.parts_ns.sum()) / wall_ns

    def is_precise_enough(windows: ClockWindows) -> bool:
        return name == "large" and is_clock_cost_precise_enough(name, windows.marked_ns, windows.unmarked_ns)

    run(MIN_STEPS, StepTimer)
    wall_ns = max(process_group.all_gather(run(MIN_STEPS, UnmarkedTimer)[0], int))
    num_steps = max(MIN_STEPS, min(MAX_STEPS, math.ceil(TARGET_WINDOW_S / (wall_ns / MIN_STEPS / 1e9))))
    num_pairs = count_windows(CLOCK_PAIR_SHARES, spec.windows)[name]
    return time_clock_pairs(partial(run, 1 if name == "small" else num_steps), num_pairs, is_precise_enough, rank)


def time_clock_pairs(
    run: Callable[[type[StepTimer]], tuple[int, float]],
    num_pairs: int,
    is_precise_enough: Callable[[ClockWindows], bool],
    rank: Rank,
) -> ClockWindows:
    """Time up to `num_pairs` pairs of windows, one with marks and one without, in random order.

    `run` returns the wall time of a window in ns, and the sum of the parts over it.
    """
    windows = ClockWindows([], [], [])
    order: list[type[StepTimer]] = [StepTimer, UnmarkedTimer]
    shuffle = random.Random(0).shuffle
    for _ in range(num_pairs):
        shuffle(order)
        pair = {clock: run(clock) for clock in order}
        by_rank = process_group.all_gather((pair[StepTimer][0], pair[UnmarkedTimer][0]), tuple[int, int])
        marked_ns, unmarked_ns = map(max, zip(*by_rank, strict=True))
        windows.marked_ns.append(marked_ns)
        windows.unmarked_ns.append(unmarked_ns)
        windows.parts_share.append(pair[StepTimer][1])
        if is_precise_enough(windows):
            break
    return windows
