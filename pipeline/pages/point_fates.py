"""The fate of every point, with links to its records and log, and the record behind a row of a table."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from pipeline.analysis.comparability import gpu_model
from pipeline.analysis.pooling import group_pairs
from pipeline.experiment.learning_rate import peak_learning_rate
from pipeline.experiment.outcomes import PointOutcome
from pipeline.experiment.point_label import NAMING_AXES, describe_point, models_of, varying_axes
from pipeline.experiment.record import Record
from pipeline.experiment.spec import AXES
from pipeline.pages.cells import named_axes
from pipeline.pages.display_tables import MAX_ROWS
from pipeline.tables.columns import Row


def list_fates(outcomes: Sequence[PointOutcome], folder: Path, logs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the fate of every point, with links from a page in `folder` to its records and log.

    Of more than MAX_ROWS points it leaves out ok ones.
    """
    if len(outcomes) > MAX_ROWS:
        ok = [outcome for outcome in outcomes if outcome.status == "ok"]
        outcomes = [*(outcome for outcome in outcomes if outcome.status != "ok"), *ok[:MAX_ROWS]]
    specs = [msgspec.structs.asdict(outcome.spec) for outcome in outcomes]
    axes = list(dict.fromkeys([*NAMING_AXES, *varying_axes(specs)]))
    fates, models = [], models_of(specs)
    for outcome, spec in zip(outcomes, specs, strict=True):
        run_id = outcome.spec.run_id()
        log = logs.get(run_id)
        fates.append(
            {
                "run_id": run_id,
                "label": describe_point(spec, axes, models),
                "status": outcome.status,
                "reason": outcome.reason,
                "records": link_records(outcome),
                "log": address_of(log, folder) if log and log.is_relative_to(folder) else "",
            }
        )
    return fates


def link_records(outcome: PointOutcome) -> list[tuple[str, str]]:
    """Return the name and the address of each record of the point, those that a later attempt replaced first."""
    attempts = [*outcome.superseded, *([outcome.record] if outcome.record else [])]
    is_only = len(attempts) == 1
    return [("record" if is_only else f"attempt {record.attempt}", record_address(record)) for record in attempts]


def record_links(outcomes: Sequence[PointOutcome]) -> Callable[[Row], str]:
    """Return a function for the address of the record that a table row stands for: of the point with the row's axes.

    Of several records it is the address of the point on this page; empty if there is none. The learning rate of a row
    is that of its point, or its peak where remedies change it.
    """

    @functools.cache
    def by_values(axes: tuple[str, ...]) -> dict[tuple[str, ...], list[PointOutcome]]:
        pairs = []
        for outcome in outcomes:
            spec = msgspec.structs.asdict(outcome.spec)
            peak = spec | {"learning_rate": peak_learning_rate(outcome.spec)}
            pairs += [(values, outcome) for values in {axis_values(spec, axes), axis_values(peak, axes)}]
        return group_pairs(pairs)

    def link_of(row: Row) -> str:
        wanted = {"remedies": []} | named_axes(row)
        gpu = wanted.pop("gpu", None) or ""
        wanted.pop("unit", None)
        axes = tuple(wanted)
        if not {*axes} <= {*AXES}:  # a row of sweeps is of no point
            return ""
        matches = by_values(axes).get(axis_values(wanted, axes), [])
        records = [outcome.record for outcome in matches if outcome.record]
        records = [record for record in records if gpu_model(record) in ("", gpu)] or records
        if len(records) == 1:
            return record_address(records[0])
        return f"#{matches[0].spec.run_id()}" if matches else ""

    return link_of


def axis_values(point: Mapping[str, Any], axes: Sequence[str]) -> tuple[str, ...]:
    values = (point[axis] for axis in axes)
    return tuple(repr(list(value) if isinstance(value, tuple) else value) for value in values)


def record_address(record: Record) -> str:
    """Return the address of a record, relative to the page."""
    return quote(f"records/{record.run_id}.{record.attempt}.json")


def address_of(path: Path, folder: Path) -> str:
    """Return the address of a file, relative to a page in the folder. Names need not be UTF-8."""
    return quote(os.fsencode(path.relative_to(folder)))
