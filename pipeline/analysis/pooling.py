"""Cells: the outcomes that a table shows as one, their timed windows, and how far the median of these may be off."""

import functools
import operator
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from pipeline.analysis import comparability, formulas, intervals
from pipeline.analysis.intervals import Interval, IntervalBasis
from pipeline.experiment.measurement import Epoch, RankEpoch
from pipeline.experiment.outcomes import PointOutcome
from pipeline.experiment.record import Record
from pipeline.experiment.spec import AXES, Spec

Found = TypeVar("Found")

POOLED_AXES = ("repeat", "seed")
FIRST_TIMED_EPOCH = 2
MAX_PARTS_DEVIATION, MIN_PARTS_DEVIATION_NS = (
    0.01,
    1_000_000,
)  # of an epoch, how far its parts may miss it; less than 1 ms is no finding
STATUS_ORDER = ("ok", "oom", "failed", "rejected", "missing")
pooling_key = operator.attrgetter(*(axis for axis in AXES if axis not in POOLED_AXES))


def once_a_cell(find: Callable[["PooledPoint"], Found]) -> Callable[["PooledPoint"], Found]:
    """Remember what a function finds of a cell: a point stands in several tables, and beside its baseline."""

    @functools.wraps(find)
    def known(cell: "PooledPoint") -> Found:
        if find not in cell.known:
            cell.known[find] = find(cell)
        found: Found = cell.known[find]
        return found

    return known


@dataclass(frozen=True, eq=False)
class PooledPoint:
    """The outcomes that differ only in repeat and seed, and what their ok records have in common."""

    spec: Spec  # with repeat and seed at 0
    outcomes: list[PointOutcome]
    sources: frozenset[str] = frozenset()  # of all cells beside it
    known: dict[Callable[..., Any], Any] = field(default_factory=dict, repr=False)

    @property
    @once_a_cell
    def status(self) -> str:
        """ok where any is; else the first of oom, failed, rejected, missing that occurs."""
        present = {outcome.status for outcome in self.outcomes}
        return next(status for status in STATUS_ORDER if status in present)

    @property
    @once_a_cell
    def ok_records(self) -> list[Record]:
        """The ok records."""
        return [outcome.record for outcome in self.outcomes if outcome.record and outcome.status == "ok"]

    @property
    @once_a_cell
    def records_by_environment(self) -> list[Record]:
        """One ok record of each environment and precision: what likeness asks is the same for all of a kind."""
        return list({comparability.environment_key(record): record for record in self.ok_records}.values())

    def median(self, figure: Callable[[Record], float | None]) -> float | None:
        """The median over the ok records that have the figure; None where none has it."""
        if figure not in self.known:
            values = [value for record in self.ok_records if (value := figure(record)) is not None]
            self.known[figure] = statistics.median(values) if values else None
        found: float | None = self.known[figure]
        return found

    @once_a_cell
    def notes(self) -> list[str]:
        """Why the cell has no figures, or not as many as were asked for."""
        notes = []
        if self.status != "ok":
            notes += sorted({outcome.reason for outcome in self.outcomes if outcome.reason})
        elif len(self.ok_records) < len(self.outcomes):
            others = [outcome.status for outcome in self.outcomes if outcome.status != "ok"]
            notes.append(f"{len(others)} of {len(self.outcomes)} repeats: {', '.join(sorted(set(others)))}")
        if self.status == "ok" and self.spec.measure == "epochs" and median_epoch_time_s(self) is None:
            notes.append(explain_no_epoch_time(self.spec))
        return [
            *notes,
            *comparability.mixed_environment_notes(self.records_by_environment),
            *comparability.source_notes(self.records_by_environment, self.sources),
        ]


def pool_outcomes(outcomes: Iterable[PointOutcome]) -> list[PooledPoint]:
    """One cell for the outcomes that differ only in repeat and seed, in the order in which they first occur."""
    cells: dict[tuple[Any, ...], list[PointOutcome]] = {}
    sources = set()
    for outcome in outcomes:
        if outcome.record and outcome.status == "ok":
            sources |= comparability.distinct_values([outcome.record], comparability.COMPARED_FACTS["source"])
        cells.setdefault(pooling_key(outcome.spec), []).append(outcome)
    known = frozenset(sources)
    return [
        PooledPoint(msgspec.structs.replace(parts[0].spec, repeat=0, seed=0), parts, known) for parts in cells.values()
    ]


def timed_epochs(record: Record) -> list[Epoch]:
    """The windows that the tables report: whole epochs from the second on, as many as `windows` asks for.

    However many were run after them; fewer where the point stopped early.
    """
    if record.measurement is None or not record.spec.is_whole_epoch:
        return []
    last = FIRST_TIMED_EPOCH + record.spec.windows - 1
    return [epoch for epoch in record.measurement.epochs if FIRST_TIMED_EPOCH <= epoch.epoch <= last]


def window_values_s(record: Record, field: str) -> list[float]:
    """A figure of each window's slowest rank, in seconds, from its field in nanoseconds; none where not measured."""
    slowest = [epoch.slowest_rank for epoch in timed_epochs(record)]
    values = [getattr(rank, field) for rank in slowest if rank]
    return [value / 1e9 for value in values if value is not None]


@functools.cache  # one function a field, so that a cell knows its median again
def median_window_s(field: str) -> Callable[[Record], float | None]:
    """A figure in seconds, from its field in nanoseconds: the median over a record's windows of the slowest rank."""

    def figure(record: Record) -> float | None:
        values = window_values_s(record, field)
        return statistics.median(values) if values else None

    return figure


@once_a_cell
def epoch_times_s(cell: PooledPoint) -> list[list[float]]:
    """The epoch times of each repeat that has some, one a window."""
    return [values for record in cell.ok_records if (values := window_values_s(record, "epoch_time_ns"))]


@once_a_cell
def median_epoch_time_s(cell: PooledPoint) -> float | None:
    """The cell's epoch time, the median over its repeats; None where it has none."""
    medians = [statistics.median(values) for values in epoch_times_s(cell)]
    return statistics.median(medians) if medians else None


def explain_no_epoch_time(spec: Spec) -> str:
    """Why an ok point has no epoch time."""
    if spec.is_probe:
        return f"probe of {spec.steps_per_epoch} steps: it fits, and has no epoch time"
    if not spec.is_whole_epoch:
        return f"epochs end after {spec.steps_per_epoch} of {spec.full_steps_per_epoch} steps: no epoch time"
    if spec.epochs < FIRST_TIMED_EPOCH:
        return "epoch 1 warms up and epoch 2 was not run: no epoch time"
    return "epoch 2 not stated"


def record_peak_memory_gib(record: Record) -> float | None:
    """The fullest device's peak, in GiB."""
    memory = record.measurement.memory if record.measurement else ()
    return max(part.peak_allocated_bytes for part in memory) / formulas.GIB if memory else None


@once_a_cell
def parts_notes(cell: PooledPoint) -> list[str]:
    """That the parts of some window do not add up to its time, which one clock's would."""
    slowest = [epoch.slowest_rank for record in cell.ok_records for epoch in timed_epochs(record)]
    shares = [parts_share(rank) for rank in slowest if rank]
    worst = max(shares, key=lambda share: abs(share - 1), default=1)
    return [f"the parts of an epoch add up to {worst:,.1%} of its time"] if abs(worst - 1) > MAX_PARTS_DEVIATION else []


def parts_share(rank: RankEpoch) -> float:
    """The sum of an epoch's parts over its time; 1 where either is not stated, or they differ by next to nothing."""
    time_ns, compute_ns, data_ns = rank.epoch_time_ns, rank.compute_time_ns, rank.data_time_ns
    if (
        not time_ns
        or compute_ns is None
        or data_ns is None
        or abs(compute_ns + data_ns - time_ns) <= MIN_PARTS_DEVIATION_NS
    ):
        return 1.0
    return (compute_ns + data_ns) / time_ns


def allocator_retry_notes(cell: PooledPoint) -> list[str]:
    """That the allocator had to give cached memory back and ask again, which costs time: memory is about to end."""
    memory = [part for record in cell.ok_records if record.measurement for part in record.measurement.memory]
    retries = max((part.num_alloc_retries or 0 for part in memory), default=0)
    return [f"allocator thrash: {retries} {'retry' if retries == 1 else 'retries'}"] if retries else []


class EpochTimeInterval(NamedTuple):
    """The interval of a cell's epoch time in seconds and what it is over; or why there is none."""

    interval: Interval | None
    over: IntervalBasis | None
    num_windows: int
    notes: list[str]

    def noise_floor(self, time_s: float | None) -> float | None:
        """The half-width over the median: what two runs of the same thing (A/A) may differ by without any cause."""
        return intervals.relative_half_width(self.interval, time_s) if self.interval and time_s is not None else None


@once_a_cell
def epoch_time_interval(cell: PooledPoint) -> EpochTimeInterval:
    """The interval of the cell's epoch time over its repeats or windows, and what the reader must know of it."""
    by_repeat = epoch_times_s(cell)
    interval, over = intervals.interval_by_repeat(by_repeat)
    num_windows = sum(map(len, by_repeat))
    notes = intervals.pooled_notes(by_repeat, over)
    if interval is None and num_windows and (cell.spec.windows > 1 or len(cell.outcomes) > 1):
        notes.append(f"an interval needs {intervals.min_values()} windows or repeats, got {num_windows}")
    return EpochTimeInterval(interval, over, num_windows, notes)


@once_a_cell
def epoch_time_drift_notes(cell: PooledPoint) -> list[str]:
    """That the epoch time drifted in windows that an interval rests on."""
    return (
        intervals.drift_notes("epoch_time_s", epoch_times_s(cell))
        if epoch_time_interval(cell).over == "windows"
        else []
    )
