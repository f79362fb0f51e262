"""The outcomes and tables of one experiment from its folder, and the files of these tables."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.figures.intervals import ends_of
from pipeline.figures.pooling import group_pairs
from pipeline.figures.ring_model import Link
from pipeline.plan.axes import AXES
from pipeline.plan.point_label import point_labels
from pipeline.plan.spec import POOLED_AXES, Spec, without_repeat
from pipeline.records.folder import Experiment, is_experiment
from pipeline.records.outcomes import CollectedOutcomes, collect_outcomes
from pipeline.report.q4 import EPOCH
from pipeline.report.questions import TABLES, build_tables, flatten
from pipeline.report.table import Column, Row, Table, Tables
from pipeline.report.time_to_target import FROM_BASELINE, Targets
from pipeline.system import files
from pipeline.system.errors import CommandError, replace_control_characters


@dataclass(frozen=True, eq=False)
class CollectedExperiment:
    """An experiment, the outcomes of its points, and its tables."""

    experiment: Experiment
    collected: CollectedOutcomes
    tables: Tables

    @cached_property
    def labels(self) -> dict[Spec, str]:
        """Return the label of each configuration, by its spec with repeat and seed at 0."""
        specs = list(dict.fromkeys(without_repeat(outcome.spec) for outcome in self.collected.outcomes))
        return dict(zip(specs, point_labels(specs).values(), strict=True))

    @cached_property
    def content(self) -> dict[str, Any]:
        """Return the rows of the tables and the coverage, as JSON has them."""
        return {**flatten(self.tables), "coverage": msgspec.to_builtins(self.collected.coverage)}


def collect_experiment(
    experiment: Experiment,
    link: Link | None = None,
    targets: Targets = FROM_BASELINE,
    predict_to: int | None = None,
    peak_tflops: float | None = None,
) -> CollectedExperiment:
    """Return the outcomes and tables of one experiment. Raises CommandError."""
    collected = collect_outcomes(experiment)
    tables = build_tables(collected.outcomes, link, targets, predict_to, peak_tflops)
    return CollectedExperiment(experiment, collected, tables)


def siblings_of(experiment: Experiment) -> list[Path]:
    """Return the other experiments in the same folder; none if it may be entered and not listed."""
    own = experiment.folder.resolve()
    try:
        return [path for path in sorted(own.parent.iterdir()) if path != own and is_experiment(path)]
    except OSError:
        return []


def sibling_predictions(experiment: Experiment, own: Sequence[Row], predict_to: int | None) -> list[Row]:
    """Return its own predictions, then those of experiments in the same folder that measured communication."""
    rows = list(own)
    for path in siblings_of(experiment):
        with contextlib.suppress(CommandError, OSError):
            manifest = Experiment(path).read_manifest()
            if manifest and any(spec.measure == "communication" for spec in manifest.points):
                rows += collect_experiment(Experiment(path), predict_to=predict_to).tables["prediction"]
    return rows


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
        label = ", ".join(filter(None, (found.labels[spec], gpu if is_split else "")))
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


FlatRows = Sequence[Mapping[str, Any]]

FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r]")  # a spreadsheet runs a cell that begins so
NOT_ASCII = re.compile(r"[^\n -~]")


def write_tables(found: CollectedExperiment, report: str) -> None:
    """Write report.md, tables.json, and a CSV for each table that has rows; remove the others. Raises OSError."""
    experiment, content = found.experiment, found.content
    texts = {name: csv_text(content.get(name, ())) for name in found.tables}
    files.update_file(experiment.report, report.encode())
    files.update_file(experiment.folder / "tables.json", indented_json(content))
    for name, text in texts.items():
        path = experiment.folder / f"{name.lower()}.csv"
        if text:
            files.update_file(path, text.encode())
        else:
            path.unlink(missing_ok=True)


def indented_json(value: object) -> bytes:
    """Return the value as JSON in ASCII, one space a level: other characters could control a terminal."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
    return NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text).encode() + b"\n"


def one_csv(rows_by_experiment: Mapping[str, FlatRows]) -> str:
    """Return the rows of one table as CSV, of several experiments with the name of each in front."""
    if len(rows_by_experiment) == 1:
        return csv_text(*rows_by_experiment.values())
    return csv_text([{"experiment": name, **row} for name, rows in rows_by_experiment.items() for row in rows])


def csv_text(rows: FlatRows) -> str:
    """Return rows as CSV, with a header; empty without rows."""
    import pandas  # takes half a second, and JSON does not need it

    inert = [{column: inert_cell(value) for column, value in row.items()} for row in rows]
    return pandas.DataFrame(inert, dtype=object).to_csv(index=False, lineterminator="\n") if inert else ""


def inert_cell(value: Any) -> Any:
    """Return the value of a CSV cell. A quote before a formula makes a spreadsheet show it as text.

    Carriage returns become line feeds: the CSV writer does not quote them, and readers would start a new row. Other
    control characters are replaced, because CSV cannot escape them. A list is JSON.
    """
    if isinstance(value, list):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    one_row = replace_control_characters(value.replace("\r\n", "\n").replace("\r", "\n"))
    return f"'{one_row}" if FORMULA.match(value) else one_row
