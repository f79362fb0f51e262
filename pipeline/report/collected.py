"""The outcomes and tables of one experiment from its folder, and the files of these tables."""

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from pipeline.figures.formulas import Link
from pipeline.plan.point_label import point_labels
from pipeline.plan.spec import Spec, without_repeat
from pipeline.records.folder import Experiment, is_experiment
from pipeline.records.outcomes import CollectedOutcomes, collect_outcomes
from pipeline.report.questions import build_tables, flatten
from pipeline.report.table import Row, Tables
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


def sibling_predictions(experiment: Experiment, own: Sequence[Row], predict_to: int | None) -> list[Row]:
    """Return its own predictions, then those of experiments in the same folder that measured communication."""
    rows, here = list(own), experiment.folder.resolve()
    paths = sorted(here.parent.iterdir()) if os.access(here.parent, os.R_OK) else []
    for path in (path for path in paths if path != here and is_experiment(path)):
        with contextlib.suppress(CommandError, OSError):
            manifest = Experiment(path).read_manifest()
            if manifest and any(spec.measure == "communication" for spec in manifest.points):
                rows += collect_experiment(Experiment(path), predict_to=predict_to).tables["prediction"]
    return rows


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
