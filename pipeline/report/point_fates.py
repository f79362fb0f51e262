"""The fate of every point, with its records and log, and the point behind a row of a table."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from pipeline.experiment.learning_rate import peak_learning_rate
from pipeline.experiment.outcomes import PointOutcome
from pipeline.experiment.point_label import NAMING_AXES, describe_point, models_of, varying_axes
from pipeline.figures.comparability import gpu_model
from pipeline.figures.pooling import group_pairs
from pipeline.plan.axes import AXES
from pipeline.report.cells import named_axes
from pipeline.report.display_tables import MAX_ROWS
from pipeline.report.table import Row


def shown_outcomes(outcomes: Sequence[PointOutcome]) -> Sequence[PointOutcome]:
    """Return the points that the page lists. Of more than MAX_ROWS points it leaves out ok ones."""
    if len(outcomes) <= MAX_ROWS:
        return outcomes
    ok = [outcome for outcome in outcomes if outcome.status == "ok"]
    return [*(outcome for outcome in outcomes if outcome.status != "ok"), *ok[:MAX_ROWS]]


def list_fates(outcomes: Sequence[PointOutcome], folder: Path, logs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the fate of every point, with the paths in `folder` of its records and log.

    A record that a later attempt replaced comes first.
    """
    specs = [msgspec.structs.asdict(outcome.spec) for outcome in outcomes]
    axes = list(dict.fromkeys([*NAMING_AXES, *varying_axes(specs)]))
    fates, models = [], models_of(specs)
    for outcome, spec in zip(outcomes, specs, strict=True):
        run_id = outcome.spec.run_id()
        log = logs.get(run_id)
        attempts = [*outcome.superseded, *([outcome.record] if outcome.record else [])]
        fates.append(
            {
                "run_id": run_id,
                "label": describe_point(spec, axes, models),
                "status": outcome.status,
                "reason": outcome.reason,
                "records": [f"records/{record.run_id}.{record.attempt}.json" for record in attempts],
                "log": os.fsencode(log.relative_to(folder)).decode(errors="replace")
                if log and log.is_relative_to(folder)
                else "",
            }
        )
    return fates


def point_links(outcomes: Sequence[PointOutcome]) -> Callable[[Row], str]:
    """Return a function for the address on the page of the point that a table row stands for; "" if there is none.

    The learning rate of a row is that of its point, or its peak where remedies change it.
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
        found = [record.run_id for record in records] or [outcome.spec.run_id() for outcome in matches]
        return f"#{found[0]}" if found else ""

    return link_of


def axis_values(point: Mapping[str, Any], axes: Sequence[str]) -> tuple[str, ...]:
    values = (point[axis] for axis in axes)
    return tuple(repr(list(value) if isinstance(value, tuple) else value) for value in values)


def address_of(path: Path, folder: Path) -> str:
    """Return the address of a file, relative to a page in the folder. Names need not be UTF-8."""
    return quote(os.fsencode(path.relative_to(folder)))
