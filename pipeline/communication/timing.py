"""Timing of steps by turns, and of isolated collectives: the bandwidth limit of the link.

Steps: each round has one window of each variant, so that drift affects all alike. After a barrier a window has a few
steps that are not timed, and then some that are. On GPUs events on the current stream mark the ends of the latter, so
that the host issues them without a pause.

Collectives of many sizes are timed in the same job as nccl-tests does: calls back to back on one buffer, wall time from
synchronize to synchronize, divided by the number of calls (all_reduce_perf). The slowest rank's time counts. On GPUs
the calls of a window are one CUDA graph, also beside eager steps, since a small all-reduce takes less time than Python
needs to issue it (all_reduce_perf -G).
"""

import contextlib
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
import torch.distributed as dist

from pipeline.figures.stopping_rule import LEAD_IN_STEPS, MAX_STEPS, MIN_STEPS, WINDOW_S
from pipeline.records.record import Operation, SweptCollective, WindowTimesNs
from pipeline.training import process_group
from pipeline.training.execution import GraphCapturer, graph_capturer, on_new_stream, warm_up_and_capture
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


KIB, MIB = 2**10, 2**20
SWEEP_BYTES = {
    "cuda": [8 * KIB * 4**power for power in range(8)] + [256 * MIB],  # 8 KiB to 128 MiB, and 256 MiB
    "cpu": [8 * KIB * 4**power for power in range(6)],  # to 8 MiB: from there gloo's time grows in proportion
}
NUM_WINDOWS = 7
WARM_UP_WINDOWS = 1
CALLS_PER_WINDOW = {"cuda": 20, "cpu": 3}
SMALL_BYTES, SMALL_FACTOR = 2 * MIB, 5  # small all-reduces: more calls per window


def sweep_collectives(called: Mapping[Operation, Collection[int]], rank: Rank) -> tuple[SweptCollective, ...]:
    """Time each operation of a step from 8 KiB up and at its sizes there, in float32. Called by all ranks."""
    with capture_stream(rank) as capture:
        return tuple(
            SweptCollective(
                num_bytes=size,
                operation=operation,
                times_ns=time_collective(size, rank, capture, operation=operation),
                is_bucket=size in sizes,
            )
            for operation, sizes in called.items()
            for size in sorted({*SWEEP_BYTES[rank.device.type], *sizes, sum(sizes)} - {0})
        )


@contextlib.contextmanager
def capture_stream(rank: Rank) -> Iterator[GraphCapturer | None]:
    """Enter a stream that can be captured and yield a capturer for it; None on the CPU."""
    if rank.device.type == "cpu":
        yield None
        return
    with on_new_stream(rank):
        yield graph_capturer()


def time_collective(
    num_bytes: int,
    rank: Rank,
    capture: GraphCapturer | None = None,
    num_windows: int = NUM_WINDOWS,
    operation: Operation = "all_reduce",
) -> tuple[int, ...]:
    """Return the slowest rank's time per call in ns, by window; empty if a rank has no memory for its buffer.

    The calls are captured if `capture` is given.
    """
    buffer = allocate_buffer(num_bytes, rank)
    if not all(process_group.all_gather(buffer is not None, bool)):  # all ranks must take part, or none
        return ()
    assert buffer is not None
    num_calls = CALLS_PER_WINDOW[rank.device.type] * (SMALL_FACTOR if num_bytes <= SMALL_BYTES else 1)
    call = prepare_call(operation, buffer, rank)

    def call_all() -> None:
        for _ in range(num_calls):
            call()

    work = call_all if capture is None else warm_up_and_capture(call_all, 1, capture)
    time_window(work, WARM_UP_WINDOWS, rank)
    windows_ns = [time_window(work, 1, rank) for _ in range(num_windows)]
    slowest_ns = [max(ranks) for ranks in zip(*process_group.all_gather(windows_ns, list[int]), strict=True)]
    return tuple(round(window_ns / num_calls) for window_ns in slowest_ns)


def prepare_call(operation: Operation, whole: torch.Tensor, rank: Rank) -> Callable[[], object]:
    """Return a call of the operation on a buffer; a gather fills it, and a scatter reduces it."""
    part = whole[: len(whole) // rank.world_size].clone()
    parts = whole[: len(part) * rank.world_size]
    calls: dict[Operation, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(parts, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, parts),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[operation]


def allocate_buffer(num_bytes: int, rank: Rank) -> torch.Tensor | None:
    """Return a buffer of zeros, whose sums stay finite; None if memory runs out."""
    try:
        return torch.zeros(num_bytes // 4, dtype=torch.float32, device=rank.device)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return None
