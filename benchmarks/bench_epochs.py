"""Training epochs of several contenders by turns in one process, raw: what the GPU benchmark is made of."""

import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from pipeline.plan.axes import CAPTURED_EXECUTIONS
from pipeline.plan.spec import Spec
from pipeline.training import process_group
from pipeline.training.execution import choose_execution, prepare_step
from pipeline.training.loop import build_batches, build_model, run_epoch, set_precision
from pipeline.workloads.find import Sources

NUM_WINDOWS = 6


class Window(NamedTuple):
    """One epoch: the slowest rank's wall time, and the mean loss over the steps of rank 0."""

    time_s: float
    loss: float


class Contender(NamedTuple):
    """A way to train for an epoch; `run` counts epochs from 1 and `spec` is what a point of ours would say."""

    name: str
    spec: Spec
    run: Callable[[int], Window]
    compile_time_s: float | None = None


class Row(msgspec.Struct):
    """The times of a contender: the windows after the first epoch, which warmed up."""

    section: str
    name: str
    spec: Spec
    windows_s: list[float]
    losses: list[float]
    compile_time_s: float | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.windows_s)


def ours(name: str, spec: Spec, rank: process_group.Rank, data: Path | None) -> Contender:
    """The tool's own training loop, as a point of that spec runs it, on a stream of its own where that is captured."""
    set_precision(spec)
    execution = choose_execution(spec, rank)
    workload, model = build_model(spec, rank, Sources(data), execution)
    batches = build_batches(workload, spec, rank)
    stream = torch.cuda.Stream(rank.device) if execution in CAPTURED_EXECUTIONS else None  # entered in every epoch
    process_group.synchronize(rank)
    with torch.cuda.stream(stream):
        ready = prepare_step(execution, model, workload, spec, rank)
    is_tuned = torch.backends.cudnn.benchmark

    def run(number: int) -> Window:
        set_precision(spec)
        torch.backends.cudnn.benchmark = is_tuned
        with torch.cuda.stream(stream):
            series = run_epoch(number, spec, rank, workload, batches, ready.step)
        times_ns = process_group.all_gather(series.times.epoch_time_ns or 0, int)
        return Window(max(times_ns) / 1e9, statistics.fmean(series.losses))

    return Contender(name, spec, run, ready.compile_time_s)


def by_turns(section: str, contenders: Sequence[Contender], num_windows: int = NUM_WINDOWS) -> list[Row]:
    """An epoch of each to warm up, then one of each in turn, their order shuffled anew each round."""
    rows = {
        contender.name: Row(section, contender.name, contender.spec, [], [], contender.compile_time_s)
        for contender in contenders
    }
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for number in range(1, num_windows + 2):
        shuffle(order)
        for contender in order:
            window = contender.run(number)
            rows[contender.name].losses.append(window.loss)
            if number > 1:
                rows[contender.name].windows_s.append(window.time_s)
    return list(rows.values())
