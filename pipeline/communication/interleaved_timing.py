"""Interleaved timing of several steps: each round has one window of each, so that drift affects all alike.

Method: a window is the wall time of some steps, from synchronize to synchronize, after a barrier.
"""

import math
import random
import time
from collections.abc import Callable, Mapping

from pipeline.experiment.measurement import WindowTimesNs
from pipeline.training import process_group
from pipeline.training.process_group import Rank
from pipeline.training.step import StepFunction

WARM_UP_STEPS_PER_VARIANT = 6  # DDP rebuilds its buckets after the first step; the allocator needs a few to settle
MIN_STEPS, MAX_STEPS = 5, 500
TARGET_WINDOW_S = 0.25


def time_window(step: StepFunction, num_steps: int, rank: Rank) -> int:
    """Return the wall time of `num_steps` steps on this rank, in ns. All ranks begin together."""
    process_group.barrier(rank)
    process_group.synchronize(rank)
    started_ns = time.perf_counter_ns()
    for _ in range(num_steps):
        step()
    process_group.synchronize(rank)
    return time.perf_counter_ns() - started_ns


def warm_up_and_size_windows(steps: Mapping[str, StepFunction], rank: Rank) -> int:
    """Run every step a few times. Return how many of the slowest fill a window of TARGET_WINDOW_S."""
    longest_ns = 0
    for step in steps.values():
        time_window(step, WARM_UP_STEPS_PER_VARIANT, rank)
        longest_ns = max(longest_ns, time_window(step, MIN_STEPS, rank))
    longest_ns = max(process_group.all_gather(longest_ns))
    num_steps = math.ceil(TARGET_WINDOW_S / (longest_ns / 1e9 / MIN_STEPS))
    return min(MAX_STEPS, max(MIN_STEPS, num_steps))


def time_interleaved(
    steps: Mapping[str, StepFunction],
    num_windows: int,
    steps_per_window: int,
    rank: Rank,
    is_precise_enough: Callable[[WindowTimesNs], bool] = lambda _: False,
) -> WindowTimesNs:
    """Time up to `num_windows` rounds with one window of each step. Return the windows of all ranks.

    Each round has a new random order, the same on every rank. After each round `is_precise_enough` gets all windows
    so far; if it returns True, timing ends.
    """
    order = list(steps)
    shuffle = random.Random(0).shuffle
    windows: WindowTimesNs = {name: [] for name in order}
    for _ in range(num_windows):
        shuffle(order)
        round_ns = {name: time_window(steps[name], steps_per_window, rank) for name in order}
        round_of_ranks = process_group.all_gather(round_ns)
        for name, of_step in windows.items():
            of_step.append([of_rank[name] for of_rank in round_of_ranks])
        if is_precise_enough(windows):
            break
    return windows
