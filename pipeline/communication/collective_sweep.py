"""The bandwidth limit of the link: isolated collectives of many sizes, timed in the same job as nccl-tests does.

Method: calls back to back on one buffer, wall time from synchronize to synchronize, divided by the number of calls
(nccl-tests, all_reduce_perf). The slowest rank's time counts. On GPUs the calls of a window are one CUDA graph, also
beside eager steps, since a small all-reduce takes less time than Python needs to issue it (all_reduce_perf -G).
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
import torch.distributed as dist

from pipeline.communication.interleaved_timing import time_window
from pipeline.experiment.measurement import Operation, SweptCollective
from pipeline.training import process_group
from pipeline.training.cuda_graph import GraphCapturer, graph_capturer, on_new_stream, warm_up_and_capture
from pipeline.training.process_group import Rank

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
