"""The loader's part in an epoch: its workers, and how long the GPUs wait for its batches.

The time that a rank waits for its own batch is its data time. Where ranks synchronize in every step, they also wait for
the batch of the slowest rank, inside their collectives: that wait is part of their compute time. Pure functions of
records; times in seconds.
"""

from pipeline.analysis.formulas import median_of_known
from pipeline.analysis.notes import Note, make_note
from pipeline.analysis.pooling import PooledPoint, median_window_s, timed_epochs
from pipeline.experiment.measurement import Epoch
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Spec

MAX_DATA_SHARE = 0.1  # of an epoch; above it the point measures the loader


def total_workers(spec: Spec) -> int | None:
    """Return the loader workers of all processes (0: the processes load); None without a loader, or not stated."""
    return spec.num_workers * spec.world_size if spec.input == "dataloader" and spec.num_workers is not None else None


def batch_wait_s(epoch: Epoch) -> float | None:
    """Return at least how long the slowest rank waits in an epoch for the batches of the others; None for one rank.

    It is the longest data time of a rank less its own. The true wait is longer if ranks are late in turn: records hold
    sums over the epoch, and the sum of each step's longest is at least the longest sum.
    """
    own = epoch.slowest_rank
    known = [rank.data_time_ns for rank in epoch.ranks if rank.data_time_ns is not None]
    if own is None or own.data_time_ns is None or len(known) < 2:
        return None
    return (max(known) - own.data_time_ns) / 1e9


def median_batch_wait_s(record: Record) -> float | None:
    """Return the median of `batch_wait_s` over the timed epochs of a record."""
    return median_of_known(map(batch_wait_s, timed_epochs(record)))


def longest_data_share(point: PooledPoint) -> float | None:
    """Return the share of the epoch in which the GPU that waits longest waits for its data; None if not known."""
    data_s, time_s = point.median(median_window_s("data_time_ns")), point.median_epoch_time_s
    if data_s is None or not time_s:
        return None
    return (data_s + (point.median(median_batch_wait_s) or 0.0)) / time_s


def is_loader_bound(point: PooledPoint) -> bool | None:
    """True if a GPU waits for the loader in more than MAX_DATA_SHARE of the epoch; None if that is not known.

    False without a loader: what then counts as data time is the device's own work.
    """
    if point.spec.input in ("gpu", "synthetic"):
        return False
    share = longest_data_share(point)
    return None if share is None else share > MAX_DATA_SHARE


def loader_notes(point: PooledPoint) -> list[Note]:
    """Return a note if the point is loader-bound."""
    return [make_note("loader_bound", share=longest_data_share(point))] if is_loader_bound(point) else []
