"""The link's own limit: isolated all-reduces of many sizes in the same job, timed as nccl-tests does.

Method: calls back to back on one buffer, wall time from synchronize to synchronize, divided by the calls
(nccl-tests, all_reduce_perf); the slowest rank's time counts.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from pipeline import distributed
from pipeline.distributed import Rank
from pipeline.interleave import time_window
from pipeline.measurement import AllReduce

KIB, MIB = 2**10, 2**20
SIZES = {
    "cuda": [8 * KIB * 4**power for power in range(8)] + [256 * MIB],  # 8 KiB to 128 MiB, and 256 MiB
    "cpu": [8 * KIB * 4**power for power in range(6)],  # to 8 MiB: gloo's time only grows in proportion from there
}
NUM_WINDOWS = 7
WARM_UP_CALLS = 3
CALLS_PER_WINDOW = {"cuda": 20, "cpu": 3}
SMALL_BYTES, SMALL_FACTOR = 2 * MIB, 5  # short calls need more of them to fill a window


def sweep_all_reduce(bucket_bytes: Iterable[int], rank: Rank) -> tuple[AllReduce, ...]:
    """All-reduces from 8 KiB up and at the sizes of real buckets; called by all ranks, in float32 as gradients are."""
    buckets = set(bucket_bytes)
    sizes = sorted({*SIZES[rank.device.type], *buckets, sum(buckets)} - {0})
    return tuple(time_all_reduce(num_bytes, num_bytes in buckets, rank) for num_bytes in sizes)


def time_all_reduce(num_bytes: int, is_bucket: bool, rank: Rank) -> AllReduce:
    """One size; without times where a rank has no memory for its buffer."""
    buffer = allocate(num_bytes, rank)
    if not all(distributed.gather(buffer is not None)):  # all ranks take part or none does
        return AllReduce(num_bytes=num_bytes, is_bucket=is_bucket)

    def call() -> None:
        dist.all_reduce(buffer)

    num_calls = CALLS_PER_WINDOW[rank.device.type] * (SMALL_FACTOR if num_bytes <= SMALL_BYTES else 1)
    time_window(call, WARM_UP_CALLS, rank)
    windows_ns = [time_window(call, num_calls, rank) for _ in range(NUM_WINDOWS)]
    slowest_ns = [max(ranks) for ranks in zip(*distributed.gather(windows_ns), strict=True)]
    return AllReduce(
        num_bytes=num_bytes,
        is_bucket=is_bucket,
        times_ns=tuple(round(window_ns / num_calls) for window_ns in slowest_ns),
    )


def allocate(num_bytes: int, rank: Rank) -> torch.Tensor | None:
    """A buffer of zeros (sums of them stay finite), or None where memory ends."""
    try:
        return torch.zeros(num_bytes // 4, dtype=torch.float32, device=rank.device)
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return None
