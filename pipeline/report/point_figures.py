"""The figures of every point with their intervals, from the rows of its tables: what `export` gives to trackers."""

from typing import Any, NamedTuple

from pipeline.experiment.axis_groups import POOLED_AXES, without_repeat
from pipeline.experiment.point_label import point_labels
from pipeline.experiment.spec import Spec
from pipeline.figures.intervals import ends_of
from pipeline.figures.pooling import group_pairs
from pipeline.plan.axes import AXES
from pipeline.report.collect_experiment import CollectedExperiment
from pipeline.report.q4 import EPOCH
from pipeline.report.table import Column, Row, Table
from pipeline.report.tables import TABLES

NAMING_COLUMNS = ("scaling", "bucket", "stage", "scale_rule", "granularity")
"""Columns that tell the rows of one point in one table apart, beside its epochs."""


class Figure(NamedTuple):
    """One number of a point. `table` names the table, and the row in it if a point has several."""

    table: str
    column: Column
    value: float
    n: int
    epoch: int | None = None

    @property
    def named_values(self) -> dict[str, float]:
        """The value and the ends of its interval, under the keys of CSV and JSON."""
        values = zip(self.column.keys, (self.value, *ends_of(self.value)), strict=False)
        return {f"{self.table}/{key}": float(value) for key, value in values if value is not None}


class PointFigures(NamedTuple):
    """A point, its name for people, its status, the sentences on it, and its figures.

    Repeats are pooled, so the run id is that of repeat 0 and seed 0. A point on several GPU models has one for each.
    """

    run_id: str
    label: str
    spec: Spec
    gpu: str
    status: str
    notes: list[str]
    figures: list[Figure]

    @property
    def parameters(self) -> dict[str, Any]:
        """The axes of the point and its GPU model, without repeat and seed, which are pooled."""
        axes = {axis: getattr(self.spec, axis) for axis in AXES if axis not in POOLED_AXES}
        return axes | ({"gpu": self.gpu} if self.gpu else {})


def figures_by_point(found: CollectedExperiment) -> list[PointFigures]:
    """Return the figures of each point with a record, in the order of the tables. Nothing is computed anew."""
    labels = point_labels(list(dict.fromkeys(without_repeat(part.spec) for part in found.collected.outcomes)))
    tables = [(TABLES[name], row) for name, rows in found.tables.items() for row in rows if TABLES[name].question]
    rows_by_point = group_pairs(((row.spec, row.axes["gpu"] or ""), (table, row)) for table, row in tables if row.spec)
    has_models = group_pairs((spec, gpu) for spec, gpu in rows_by_point)
    points = []
    for (spec, gpu), rows in rows_by_point.items():
        status = next((row.status for table, row in rows if "status" in row.figures), "ok")
        if status in ("missing", "rejected"):
            continue
        is_split = len(has_models[spec]) > 1
        run_id = f"{spec.run_id()}-{'-'.join(gpu.lower().split())}" if is_split else spec.run_id()
        label = ", ".join(filter(None, (labels.get(spec.run_id(), spec.run_id()), gpu if is_split else "")))
        notes = dict.fromkeys(note for _, row in rows if (note := row["note"]))
        figures = [figure for table, row in rows for figure in figures_of(table, row, spec)]
        points.append(PointFigures(run_id, label, spec, gpu, status, list(notes), figures))
    return points


def figures_of(table: Table, row: Row, spec: Spec) -> list[Figure]:
    """Return the measured numbers of a row."""
    keys = [key for key in NAMING_COLUMNS if key in row.figures]
    parts = [f"{key} {row[key]}" if isinstance(row[key], int) else str(row[key]) for key in keys]
    if row["num_gpus"] != spec.num_gpus:  # a prediction
        parts.append(f"{row['num_gpus']} GPUs")
    name, epoch = "/".join((table.name, *parts)), row.figures.get(EPOCH.key)
    return [
        Figure(name, column, value, row.n, epoch)
        for column in table.columns
        if not column.is_set and isinstance(value := row[column.key], int | float) and not isinstance(value, bool)
    ]
