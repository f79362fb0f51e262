"""The bandwidth limit of the link: isolated all-reduces of many sizes, timed in the same job as nccl-tests does.

Method: calls back to back on one buffer, wall time from synchronize to synchronize, divided by the number of calls
(nccl-tests, all_reduce_perf). The slowest rank's time counts. On GPUs the calls of a window are one CUDA graph, also
beside eager steps, since a small all-reduce takes less time than Python needs to issue it (all_reduce_perf -G).
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from pipeline.communication.interleaved_timing import time_window
from pipeline.experiment.measurement import AllReduce
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


def sweep_all_reduce(bucket_bytes: Iterable[int], rank: Rank) -> tuple[AllReduce, ...]:
    """Time all-reduces from 8 KiB up and at the bucket sizes, in float32 as gradients are. Called by all ranks."""
    buckets = set(bucket_bytes)
    sizes = sorted({*SWEEP_BYTES[rank.device.type], *buckets, sum(buckets)} - {0})
    with capture_stream(rank) as capture:
        return tuple(
            AllReduce(num_bytes=size, times_ns=time_all_reduce(size, rank, capture), is_bucket=size in buckets)
            for size in sizes
        )


@contextlib.contextmanager
def capture_stream(rank: Rank) -> Iterator[GraphCapturer | None]:
    """Enter a stream that can be captured and yield a capturer for it; None on the CPU."""
    if rank.device.type == "cpu":
        yield None
        return
    with on_new_stream(rank):
        yield graph_capturer()


def time_all_reduce(
    num_bytes: int, rank: Rank, capture: GraphCapturer | None = None, num_windows: int = NUM_WINDOWS
) -> tuple[int, ...]:
    """Return the slowest rank's time per call in ns, by window; empty if a rank has no memory for its buffer.

    The calls are captured if `capture` is given.
    """
    buffer = allocate_buffer(num_bytes, rank)
    if not all(process_group.all_gather(buffer is not None, bool)):  # all ranks must take part, or none
        return ()
    num_calls = CALLS_PER_WINDOW[rank.device.type] * (SMALL_FACTOR if num_bytes <= SMALL_BYTES else 1)

    def call_all() -> None:
        for _ in range(num_calls):
            dist.all_reduce(buffer)

    work = call_all if capture is None else warm_up_and_capture(call_all, 1, capture)
    time_window(work, WARM_UP_WINDOWS, rank)
    windows_ns = [time_window(work, 1, rank) for _ in range(num_windows)]
    slowest_ns = [max(ranks) for ranks in zip(*process_group.all_gather(windows_ns, list[int]), strict=True)]
    return tuple(round(window_ns / num_calls) for window_ns in slowest_ns)


def allocate_buffer(num_bytes: int, rank: Rank) -> torch.Tensor | None:
    """Return a buffer of zeros, whose sums stay finite; None if memory runs out."""
    try:
        return torch.zeros(num_bytes // 4, dtype=torch.float32, device=rank.device)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return None
