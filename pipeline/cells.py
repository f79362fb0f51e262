"""Cells: the outcomes that a table shows as one, their timed epoch, and the one-GPU cell they are compared with."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from pipeline import metrics
from pipeline.outcomes import Outcome
from pipeline.schema import Epoch, RankEpoch, Record
from pipeline.spec import AXES, Spec

POOLED_AXES = ("repeat", "seed")
BASELINE_MAY_DIFFER = ("strategy", "num_nodes", "num_gpus", "epochs", *POOLED_AXES)
TIMED_EPOCH = 2
STATUS_ORDER = ("ok", "oom", "failed", "rejected", "missing")


class Cell(NamedTuple):
    """The outcomes that differ only in repeat and seed, and what their ok records have in common."""

    spec: Spec  # with repeat and seed at 0
    outcomes: list[Outcome]

    @property
    def status(self) -> str:
        """ok where any is; else the first of oom, failed, rejected, missing that occurs."""
        present = {outcome.status for outcome in self.outcomes}
        return next(status for status in STATUS_ORDER if status in present)

    @property
    def measured(self) -> list[Record]:
        """The ok records."""
        return [outcome.record for outcome in self.outcomes if outcome.record and outcome.status == "ok"]

    def median(self, figure: Callable[[Record], float | None]) -> float | None:
        """The median over the ok records that have the figure; None where none has it."""
        values = [value for record in self.measured if (value := figure(record)) is not None]
        return statistics.median(values) if values else None

    def notes(self) -> list[str]:
        """Why the cell has no figures, or not as many as were asked for."""
        notes = []
        if self.status != "ok":
            notes += sorted({outcome.reason for outcome in self.outcomes if outcome.reason})
        elif len(self.measured) < len(self.outcomes):
            others = [outcome.status for outcome in self.outcomes if outcome.status != "ok"]
            notes.append(f"{len(others)} of {len(self.outcomes)} repeats: {', '.join(sorted(set(others)))}")
        if self.status == "ok" and epoch_time_s_of(self) is None:
            notes.append(no_epoch_time(self.spec))
        return notes


def pool(outcomes: Iterable[Outcome]) -> list[Cell]:
    """One cell for the outcomes that differ only in repeat and seed, in the order in which they first occur."""
    cells: dict[Spec, list[Outcome]] = {}
    for outcome in outcomes:
        cells.setdefault(msgspec.structs.replace(outcome.spec, repeat=0, seed=0), []).append(outcome)
    return [Cell(spec, parts) for spec, parts in cells.items()]


def timed_epoch(record: Record) -> Epoch | None:
    """The epoch that the tables report: the second, whole, however many were run."""
    if record.measurement is None or not record.spec.is_whole_epoch:
        return None
    return next((epoch for epoch in record.measurement.epochs if epoch.epoch == TIMED_EPOCH), None)


def slowest_rank(record: Record) -> RankEpoch | None:
    """The rank whose clock is the epoch's; None where no time was measured."""
    epoch = timed_epoch(record)
    timed = [rank for rank in epoch.ranks if rank.epoch_time_ns is not None] if epoch else []
    return max(timed, key=lambda rank: rank.epoch_time_ns or 0, default=None)


def seconds(field: str) -> Callable[[Record], float | None]:
    """A figure of the slowest rank's epoch, in seconds, from its field in nanoseconds."""

    def figure(record: Record) -> float | None:
        rank = slowest_rank(record)
        value = getattr(rank, field) if rank else None
        return None if value is None else value / 1e9

    return figure


def epoch_time_s_of(cell: Cell) -> float | None:
    """The cell's epoch time; None where it has none."""
    return cell.median(seconds("epoch_time_ns"))


def no_epoch_time(spec: Spec) -> str:
    """Why an ok point has no epoch time."""
    if spec.is_probe:
        return f"probe of {spec.steps_per_epoch} steps: it fits, and has no epoch time"
    if not spec.is_whole_epoch:
        return f"epochs end after {spec.steps_per_epoch} of {spec.full_steps_per_epoch} steps: no epoch time"
    if spec.epochs < TIMED_EPOCH:
        return "epoch 1 warms up and epoch 2 was not run: no epoch time"
    return "epoch 2 not stated"


def peak_memory_gib(record: Record) -> float | None:
    """The fullest device's peak, in GiB."""
    memory = record.measurement.memory if record.measurement else ()
    return max(part.peak_allocated_bytes for part in memory) / metrics.GIB if memory else None


def baseline_key(spec: Spec) -> tuple[Any, ...]:
    """What a point and its baseline have in common: every axis that they may not differ in."""
    return tuple(getattr(spec, axis) for axis in AXES if axis not in BASELINE_MAY_DIFFER)


def index_baselines(cells: Iterable[Cell]) -> dict[tuple[Any, ...], list[Cell]]:
    """The N=1 cells by what they share with the points they are a baseline of."""
    index: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if cell.spec.num_gpus == 1:
            index.setdefault(baseline_key(cell.spec), []).append(cell)
    return index


class Baseline(NamedTuple):
    """The time on one GPU that a cell is compared with, and whose; or why there is none."""

    time_s: float | None
    strategy: str | None
    note: str | None


def find_baseline(cell: Cell, baselines: dict[tuple[Any, ...], list[Cell]]) -> Baseline:
    """The N=1 cell of the same strategy, else of `single`; one that has a time before one that has none.

    Of several the one with as many epochs.
    """
    order = {strategy: place for place, strategy in enumerate(dict.fromkeys((cell.spec.strategy, "single")))}
    candidates = [other for other in baselines.get(baseline_key(cell.spec), []) if other.spec.strategy in order]
    if not candidates:
        return Baseline(None, None, "no baseline: the experiment has no point on 1 GPU with these axes")

    def preference(other: Cell) -> tuple[bool, int, bool]:
        return epoch_time_s_of(other) is None, order[other.spec.strategy], other.spec.epochs != cell.spec.epochs

    best = min(candidates, key=preference)
    time_s = epoch_time_s_of(best)
    note = None if time_s is not None else f"no baseline: {best.spec.strategy} on 1 is {why_untimed(best)}"
    return Baseline(time_s, best.spec.strategy, note)


def why_untimed(cell: Cell) -> str:
    """A baseline's state in a word."""
    return "not timed" if cell.status == "ok" else cell.status
