"""The loader's part in an epoch: its workers, and how long the GPUs wait for its batches.

A rank's data time is the time that it waits for its own batch. Ranks that synchronize in every step also wait until the
last rank has its batch. They do so inside a collective, so that this second wait is part of their compute time. All
functions are pure functions of records. Times are in seconds.
"""

from pipeline.figures.formulas import median_of_known
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, median_window_s, per_epoch, timed_epochs
from pipeline.plan.spec import Spec
from pipeline.records.record import Epoch, Record

LOADER_BOUND = NoteKind(
    "loader_bound",
    "loader-bound: the $GPU that waits longest waits for data in {share:.0%} of the epoch",
    badge="waits for data {share:.0%}",
    word="loader-bound",
    forbids=("speedup", "comm_time_subtraction_s"),
)

MAX_DATA_SHARE = 0.1  # of an epoch; above it the point measures the loader


def total_workers(spec: Spec) -> int | None:
    """Return the loader workers of all ranks (0: the ranks load images themselves); None if no loader or not stated."""
    return spec.num_workers * spec.world_size if spec.input == "dataloader" and spec.num_workers is not None else None


def batch_wait_s(epoch: Epoch) -> float | None:
    """Return a lower bound of the time that the slowest rank waits for the batches of other ranks in an epoch.

    The slowest rank has the longest epoch time. The bound is the longest data time of any rank minus the data time of
    the slowest rank. The true wait is longer if different ranks are late in different steps: records hold only sums
    over the epoch. None if fewer than two ranks have a data time, or if the slowest has none.
    """
    own = epoch.slowest_rank
    known = [rank.data_time_ns for rank in epoch.ranks if rank.data_time_ns is not None]
    if own is None or own.data_time_ns is None or len(known) < 2:
        return None
    return (max(known) - own.data_time_ns) / 1e9


def median_batch_wait_s(record: Record) -> float | None:
    """Return the median of `batch_wait_s` over the timed epochs of a record."""
    waits_s = [(epoch, batch_wait_s(epoch)) for epoch in timed_epochs(record)]
    return median_of_known(wait_s * per_epoch(record, epoch) for epoch, wait_s in waits_s if wait_s is not None)


def longest_data_share(point: PooledPoint) -> float | None:
    """Return data time plus batch wait as a share of the epoch time, medians of each; None if not known.

    It is the share in which the GPU that waits longest has no data: the one figure of tables, notes and answers.
    """
    data_s, time_s = point.median(median_window_s("data_time_ns")), point.epoch_time
    if data_s is None or not time_s:
        return None
    return (data_s + (point.median(median_batch_wait_s) or 0.0)) / time_s


def is_loader_bound(point: PooledPoint) -> bool | None:
    """True if a GPU waits for the loader in more than MAX_DATA_SHARE of the epoch; None if that is not known.

    False without a loader: the device then prepares its batches itself, and data time is that work.
    """
    if point.spec.input in ("gpu", "synthetic"):
        return False
    share = longest_data_share(point)
    return None if share is None else share > MAX_DATA_SHARE


def loader_notes(point: PooledPoint) -> list[Note]:
    """Return a note if the point is loader-bound."""
    return [make_note(LOADER_BOUND, share=longest_data_share(point))] if is_loader_bound(point) else []
