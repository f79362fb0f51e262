"""Several steps timed side by side: window after window of each in turn, so that drift falls on all alike.

Method: every window is wall time from synchronize to synchronize after a barrier, and holds nothing but steps.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

from pipeline.training import process_group
from pipeline.training.process_group import Rank

WARM_UP_STEPS_PER_VARIANT = 6  # DDP rebuilds its buckets after the first, and the allocator settles
MIN_STEPS, MAX_STEPS = 5, 500
TARGET_WINDOW_S = 0.25

WindowTimesNs = dict[str, list[list[int]]]  # nanoseconds, [window][rank], by name
StepFunction = Callable[[], object]
IsPreciseEnough = Callable[[WindowTimesNs], bool]


def time_window(step: StepFunction, num_steps: int, rank: Rank) -> int:
    """Wall time of so many steps on this rank, in ns; all ranks begin together."""
    process_group.barrier(rank)
    process_group.synchronize(rank)
    started_ns = time.perf_counter_ns()
    for _ in range(num_steps):
        step()
    process_group.synchronize(rank)
    return time.perf_counter_ns() - started_ns


def warm_up_and_size_windows(steps: Mapping[str, StepFunction], rank: Rank) -> int:
    """Run every step a few times, and return how many fill a window of the target's length for the slowest."""
    longest_ns = 0
    for step in steps.values():
        time_window(step, WARM_UP_STEPS_PER_VARIANT, rank)
        longest_ns = max(longest_ns, time_window(step, MIN_STEPS, rank))
    longest_ns = max(process_group.all_gather(longest_ns))
    wanted = math.ceil(TARGET_WINDOW_S / (longest_ns / 1e9 / MIN_STEPS))
    return min(MAX_STEPS, max(MIN_STEPS, wanted))


def time_interleaved(
    steps: Mapping[str, StepFunction],
    num_windows: int,
    steps_per_window: int,
    rank: Rank,
    is_precise_enough: IsPreciseEnough = lambda _: False,
) -> WindowTimesNs:
    """So many windows of each step in turn, their order shuffled anew each round and alike on every rank.

    Fewer where they are settled before: asked after each round, of every rank's windows.
    """
    order = list(steps)
    shuffle = random.Random(0).shuffle
    windows: WindowTimesNs = {name: [] for name in order}
    for _ in range(num_windows):
        shuffle(order)
        round_ns = {name: time_window(steps[name], steps_per_window, rank) for name in order}
        for name, values in times_by_name(process_group.all_gather(round_ns)).items():
            windows[name].append(values)
        if is_precise_enough(windows):
            break
    return windows


def times_by_name(rounds: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Every rank's round -> the ranks' times by name."""
    return {name: [part[name] for part in rounds] for name in rounds[0]}
