"""Interleaved timing of several steps: each round has one window of each, so that drift affects all alike.

Method: after a barrier a window has a few steps that are not timed, and then some that are. On GPUs events on the
current stream mark the ends of the latter, so that the host issues them without a pause.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from pipeline.experiment.measurement import WindowTimesNs
from pipeline.figures.stopping_rule import LEAD_IN_STEPS, MAX_STEPS, MIN_STEPS, WINDOW_S
from pipeline.training import process_group
from pipeline.training.process_group import Rank
from pipeline.training.step import StepFunction

WARM_UP_STEPS_PER_VARIANT = 6  # DDP rebuilds its buckets after the first step; the allocator needs a few to settle


def time_window(work: StepFunction, num_calls: int, rank: Rank) -> int:
    """Return the wall time of `num_calls` calls on this rank, in ns, from an idle device until it is idle again.

    All ranks begin together.
    """
    process_group.barrier(rank)
    process_group.synchronize(rank)
    return time_on_host(work, num_calls, rank)


def time_steps(step: StepFunction, num_steps: int, rank: Rank, num_lead_in_steps: int = LEAD_IN_STEPS) -> int:
    """Return the time of `num_steps` steps on this rank, in ns, after some that are not timed.

    All ranks begin together. The device is idle after the barrier, so the first step takes as long as the host needs to
    issue it; in training the host is ahead. Without the lead-in its extra time, a few ms, would count in every variant.
    """
    process_group.barrier(rank)
    process_group.synchronize(rank)
    for _ in range(num_lead_in_steps):
        step()
    return time_on_device(step, num_steps, rank) if rank.device.type == "cuda" else time_on_host(step, num_steps, rank)


def time_on_host(work: StepFunction, num_calls: int, rank: Rank) -> int:
    """Return the time of the calls by the host's clock, in ns, until the device is idle."""
    started_ns = time.perf_counter_ns()
    for _ in range(num_calls):
        work()
    process_group.synchronize(rank)
    return time.perf_counter_ns() - started_ns


def time_on_device(work: StepFunction, num_calls: int, rank: Rank) -> int:
    """Return the time between events around the calls on the current stream, in ns. The host does not wait before."""
    stream = torch.cuda.current_stream(rank.device)
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record(stream)
    for _ in range(num_calls):
        work()
    ended.record(stream)
    process_group.synchronize(rank)
    time_ms: float = started.elapsed_time(ended)
    return round(time_ms * 1e6)


def warm_up_and_size_windows(steps: Mapping[str, StepFunction], rank: Rank) -> int:
    """Run every step a few times. Return how many of the slowest fill a window of WINDOW_S."""
    slowest_ns = max(time_steps(step, MIN_STEPS, rank, WARM_UP_STEPS_PER_VARIANT) for step in steps.values())
    longest_ns = max(process_group.all_gather(slowest_ns, int))
    num_steps = math.ceil(WINDOW_S / (longest_ns / 1e9 / MIN_STEPS))
    return min(MAX_STEPS, max(MIN_STEPS, num_steps))


def time_rounds(timers: Mapping[str, Callable[[], int]], num_windows: Mapping[str, int]) -> Iterator[WindowTimesNs]:
    """Time rounds with one window of each series. Yield the windows of all ranks so far after each round.

    `timers` time one window on this rank, in ns. A series takes part in the first rounds, as many as its number of
    windows. Each round has a new random order, the same on every rank. All ranks must stop after the same round.
    """
    order = list(timers)
    shuffle = random.Random(0).shuffle
    windows: WindowTimesNs = {name: [] for name in order}
    for done in range(max(num_windows.values())):
        shuffle(order)
        round_ns = {name: timers[name]() for name in order if done < num_windows[name]}
        round_of_ranks = process_group.all_gather(round_ns, dict[str, int])
        for name in round_ns:
            windows[name].append([of_rank[name] for of_rank in round_of_ranks])
        yield windows
