"""The fate of every point, with links to its records and log, and the record behind a row of a table."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from pipeline.analysis.comparability import gpu_model
from pipeline.experiment.learning_rate import peak_learning_rate
from pipeline.experiment.outcomes import PointOutcome
from pipeline.experiment.point_label import describe_point, varying_axes
from pipeline.experiment.record import Record
from pipeline.pages.cells import named_axes
from pipeline.pages.display_tables import MAX_ROWS
from pipeline.tables.row import Row


class Fate(NamedTuple):
    """The fate of one point."""

    run_id: str
    label: str
    status: str
    reason: str
    records: list[tuple[str, str]]
    log: str


def build_fates(outcomes: Sequence[PointOutcome], folder: Path, logs: Mapping[str, Path]) -> list[Fate]:
    """Return the fate of every point, with links from a page in `folder` to its records and log.

    Of more than MAX_ROWS points it leaves out ok ones.
    """
    if len(outcomes) > MAX_ROWS:
        ok = [outcome for outcome in outcomes if outcome.status == "ok"]
        outcomes = [*(outcome for outcome in outcomes if outcome.status != "ok"), *ok[:MAX_ROWS]]
    specs = [msgspec.structs.asdict(outcome.spec) for outcome in outcomes]
    axes = list(dict.fromkeys(["strategy", "num_gpus", "batch_size_per_gpu", *varying_axes(specs)]))
    fates = []
    for outcome, spec in zip(outcomes, specs, strict=True):
        run_id = outcome.spec.run_id()
        log = logs.get(run_id)
        address = address_of(log, folder) if log and log.is_relative_to(folder) else ""
        records = link_records(outcome)
        fates.append(Fate(run_id, describe_point(spec, axes), outcome.status, outcome.reason, records, address))
    return fates


def link_records(outcome: PointOutcome) -> list[tuple[str, str]]:
    """Return the name and the address of each record of the point, those that a later attempt replaced first."""
    attempts = [*outcome.superseded, *([outcome.record] if outcome.record else [])]
    is_only = len(attempts) == 1
    return [("record" if is_only else f"attempt {record.attempt}", record_address(record)) for record in attempts]


class RecordLinks:
    """Finds the record that a table row stands for: the point with the row's axes.

    The learning rate of a row is that of its point, or its peak where remedies change it.
    """

    def __init__(self, outcomes: Sequence[PointOutcome]) -> None:
        self.outcomes = outcomes
        self.found: dict[tuple[str, ...], dict[tuple[str, ...], list[PointOutcome]]] = {}

    def of(self, row: Row) -> str:
        """Return the address of the row's record; of several, that of the point on this page. Empty: there is none."""
        wanted = {"remedies": []} | named_axes(row)
        gpu = wanted.pop("gpu", None) or ""
        axes = tuple(wanted)
        if axes not in self.found:
            self.found[axes] = defaultdict(list)
            for outcome in self.outcomes:
                spec = msgspec.structs.asdict(outcome.spec)
                own = {axis: list(value) if isinstance(value, tuple) else value for axis, value in spec.items()}
                peak = own | {"learning_rate": peak_learning_rate(outcome.spec)}
                for values in {axis_values(own, axes), axis_values(peak, axes)}:
                    self.found[axes][values].append(outcome)
        matches = self.found[axes].get(axis_values(wanted, axes), [])
        records = [outcome.record for outcome in matches if outcome.record]
        records = [record for record in records if gpu_model(record) in ("", gpu)] or records
        if len(records) == 1:
            return record_address(records[0])
        return f"#{matches[0].spec.run_id()}" if matches else ""


def axis_values(point: Mapping[str, Any], axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(repr(point[axis]) for axis in axes)


def record_address(record: Record) -> str:
    """Return the address of a record, relative to the page."""
    return quote(f"records/{record.run_id}.{record.attempt}.json")


def address_of(path: Path, folder: Path) -> str:
    """Return the address of a file, relative to a page in the folder. Names need not be UTF-8."""
    return quote(os.fsencode(path.relative_to(folder)))
