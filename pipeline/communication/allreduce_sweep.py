"""The link's own limit: isolated all-reduces of many sizes in the same job, timed as nccl-tests does.

Method: calls back to back on one buffer, wall time from synchronize to synchronize, divided by the calls
(nccl-tests, all_reduce_perf); the slowest rank's time counts. On GPUs a window's calls are one CUDA graph, whatever the
steps are: small ones take less time than Python needs to issue them (all_reduce_perf -G).
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from pipeline.communication.interleaved_timing import time_window
from pipeline.experiment.measurement import AllReduce
from pipeline.training import process_group
from pipeline.training.cuda_graph import GraphCapturer, graph_capturer, on_stream, warm_up_and_capture
from pipeline.training.process_group import Rank

KIB, MIB = 2**10, 2**20
SWEEP_BYTES = {
    "cuda": [8 * KIB * 4**power for power in range(8)] + [256 * MIB],  # 8 KiB to 128 MiB, and 256 MiB
    "cpu": [8 * KIB * 4**power for power in range(6)],  # to 8 MiB: gloo's time only grows in proportion from there
}
NUM_WINDOWS = 7
WARM_UP_WINDOWS = 1
CALLS_PER_WINDOW = {"cuda": 20, "cpu": 3}
SMALL_BYTES, SMALL_FACTOR = 2 * MIB, 5  # short calls need more of them to fill a window


def sweep_all_reduce(bucket_bytes: Iterable[int], rank: Rank) -> tuple[AllReduce, ...]:
    """All-reduces from 8 KiB up and at the sizes of real buckets; called by all ranks, in float32 as gradients are."""
    buckets = set(bucket_bytes)
    sizes = sorted({*SWEEP_BYTES[rank.device.type], *buckets, sum(buckets)} - {0})
    with capture_stream(rank) as record:
        return tuple(time_all_reduce(num_bytes, num_bytes in buckets, rank, record) for num_bytes in sizes)


@contextlib.contextmanager
def capture_stream(rank: Rank) -> Iterator[GraphCapturer | None]:
    """A recorder for what is issued inside, on a stream that can be captured; None on the CPU."""
    if not is_sweep_captured(rank):
        yield None
        return
    with on_stream(torch.cuda.Stream(rank.device), rank):
        yield graph_capturer()


def is_sweep_captured(rank: Rank) -> bool:
    """Whether a sweep captures its calls."""
    return rank.device.type == "cuda"


def time_all_reduce(num_bytes: int, is_bucket: bool, rank: Rank, record: GraphCapturer | None = None) -> AllReduce:
    """One size, captured where there is a recorder; without times where a rank has no memory for its buffer."""
    buffer = allocate_buffer(num_bytes, rank)
    if not all(process_group.all_gather(buffer is not None)):  # all ranks take part or none does
        return AllReduce(num_bytes=num_bytes, is_bucket=is_bucket)
    num_calls = CALLS_PER_WINDOW[rank.device.type] * (SMALL_FACTOR if num_bytes <= SMALL_BYTES else 1)

    def call_all() -> None:
        for _ in range(num_calls):
            dist.all_reduce(buffer)

    work = call_all if record is None else warm_up_and_capture(call_all, 1, record)
    time_window(work, WARM_UP_WINDOWS, rank)
    windows_ns = [time_window(work, 1, rank) for _ in range(NUM_WINDOWS)]
    slowest_ns = [max(ranks) for ranks in zip(*process_group.all_gather(windows_ns), strict=True)]
    return AllReduce(
        num_bytes=num_bytes,
        is_bucket=is_bucket,
        times_ns=tuple(round(window_ns / num_calls) for window_ns in slowest_ns),
    )


def allocate_buffer(num_bytes: int, rank: Rank) -> torch.Tensor | None:
    """A buffer of zeros (sums of them stay finite), or None where memory ends."""
    try:
        return torch.zeros(num_bytes // 4, dtype=torch.float32, device=rank.device)
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return None
