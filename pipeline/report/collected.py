"""The outcomes and tables of one experiment: from its folder, as files, and as DataFrames for `ddpscale.load`."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.figures.formulas import Link
from pipeline.figures.pooling import group_pairs, pool_outcomes
from pipeline.plan.axes import AXES
from pipeline.plan.point_label import point_labels
from pipeline.plan.spec import POOLED_AXES, Spec, without_repeat
from pipeline.records.folder import Experiment, is_experiment, require_experiments
from pipeline.records.outcomes import CollectedOutcomes, collect_outcomes
from pipeline.records.record import Record
from pipeline.report.q1 import Q1, q1_row
from pipeline.report.questions import TABLES, build_tables, flatten, flatten_row
from pipeline.report.table import EFFICIENCY, SPEEDUP, Row, Tables, axes_of
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


if TYPE_CHECKING:
    from pandas import DataFrame

FlatRow = dict[str, Any]
RowsOf = Callable[[CollectedExperiment], Iterable[FlatRow]]

OF_ONE_CONFIGURATION = ("Q2", "communication", "split", "memory", "time_to_target")
"""Tables with one row for a configuration, of its own records; Q2 may have one for weak and one for strong scaling."""

STRONG = {key: f"strong_{key}" for column in (SPEEDUP, EFFICIENCY) for key in column.keys}

NAMES = ("experiment", "configuration")
COLUMNS = (*Q1.columns, *(column for name in OF_ONE_CONFIGURATION for column in TABLES[name].columns))
FIGURES = [key for column in COLUMNS for key in column.keys if key not in (*AXES, "status", "scaling")]
CONFIGURATION_COLUMNS = (
    *(*NAMES, "status", "reason", "n", *(axis for axis in AXES if axis not in POOLED_AXES), "gpu", "unit"),
    *(*dict.fromkeys(FIGURES), *STRONG.values(), "note"),
)
TIMES = {
    f"{name}_time_s": key
    for name, key in (("epoch", "epoch_time_ns"), ("compute", "compute_time_ns"), ("data", "data_time_ns"))
} | {f"{part}_time_s": f"{part}_ns" for part in ("copy", "forward", "backward", "optimizer", "loader_wait")}
"""Column of the epochs -> field of a rank's epoch."""
LEARNT = (
    *("num_updates", "num_samples", "loss", "accuracy", "test_loss", "test_accuracy", "merit", "diverged_at_update"),
    *("first_learning_rate", "peak_learning_rate"),
)
RUN = (*NAMES, "run_id", "repeat", "seed")
EPOCH_COLUMNS = (*RUN, "epoch", "is_timed", *TIMES, *LEARNT)
STEP_COLUMNS = (*RUN, "epoch", "step", "step_time_s")


@dataclass(frozen=True, repr=False)
class Frames:
    """Experiments as DataFrames, which the columns `experiment` and `configuration` join.

    Names of columns end in their unit; a fraction or a count has none. The figures are those of collect, and
    docs/words.md has their meaning.
    """

    experiments: dict[str, CollectedExperiment]

    def __repr__(self) -> str:
        return f"configurations, epochs, steps and tables of {', '.join(self.experiments)}"

    @cached_property
    def configurations(self) -> "DataFrame":
        """A row for each configuration: status, axes, and figures over its n runs. One on two GPU models has two.

        `speedup` is that of weak scaling, `strong_speedup` that of strong scaling.
        """
        return self._frame(configuration_rows, CONFIGURATION_COLUMNS)

    @cached_property
    def epochs(self) -> "DataFrame":
        """A row for each epoch of each run. Times are those of the slowest rank."""
        return self._frame(epoch_rows, EPOCH_COLUMNS)

    @cached_property
    def steps(self) -> "DataFrame":
        """A row for each step of each run, on rank 0, with its wait for data."""
        return self._frame(step_rows, STEP_COLUMNS)

    @cached_property
    def tables(self) -> "dict[str, DataFrame]":
        """Every table by name, as its CSV has it."""
        return {name: self._frame(rows_of_table(name)) for name in TABLES}

    def _frame(self, rows_of: RowsOf, columns: tuple[str, ...] | None = None) -> "DataFrame":
        """Return the rows of all experiments. A list becomes a tuple, which pandas can group by."""
        from pandas import DataFrame  # takes half a second

        rows = [{"experiment": name, **row} for name, found in self.experiments.items() for row in rows_of(found)]
        hashable = [{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()} for row in rows]
        return DataFrame(hashable, columns=columns and [*columns])


def rows_of_table(name: str) -> RowsOf:
    return lambda found: found.content.get(name, ())


def load_frames(folder: str | Path) -> Frames:
    """Return the experiments at or under a folder. Raises CommandError if there is none, or if one cannot be read."""
    return Frames({name: collect_experiment(found) for name, found in require_experiments(Path(folder)).items()})


def configuration_rows(found: CollectedExperiment) -> Iterator[FlatRow]:
    rows = [(TABLES[name], row) for name in OF_ONE_CONFIGURATION for row in found.tables[name]]
    by_point = group_pairs((row.point and (row.point.spec, row.point.gpu), (table, row)) for table, row in rows)
    for point in pool_outcomes(found.collected.outcomes):
        own = by_point.get((point.spec, point.gpu), [])
        if point.spec.measure == "epochs":  # the table Q1 has those on one GPU, without remedies
            own = [(Q1, q1_row(point)), *own]
        figures: dict[str, Any] = {}
        for table, row in own:
            flat = flatten_row(row, table)
            if flat.get("scaling") == "strong":
                flat = {name: flat[key] for key, name in STRONG.items()}
            figures |= {key: value for key, value in flat.items() if figures.get(key) is None}
        reasons = dict.fromkeys(outcome.reason for outcome in point.outcomes if outcome.reason)
        notes = dict.fromkeys(row["note"] for _, row in own if row["note"])
        yield {
            **figures,
            **msgspec.structs.asdict(point.spec),
            **axes_of(point),
            "configuration": found.labels[point.spec],
            "status": point.status,
            "reason": "; ".join(reasons),
            "n": len(point.ok_records),
            "note": "; ".join(notes),
        }


def epoch_rows(found: CollectedExperiment) -> Iterator[FlatRow]:
    for run, record in runs_of(found):
        for epoch in record.epochs:
            slowest = epoch.slowest_rank
            yield {
                **run,
                "epoch": epoch.epoch,
                "is_timed": epoch.epoch in record.spec.timed_epochs,
                **{name: seconds(getattr(slowest, key, None)) for name, key in TIMES.items()},
                **{key: getattr(epoch, key) for key in LEARNT},
            }


def step_rows(found: CollectedExperiment) -> Iterator[FlatRow]:
    for run, record in runs_of(found):
        for epoch in record.epochs:
            for step, time_ns in enumerate(epoch.step_times_ns or (), 1):
                yield {**run, "epoch": epoch.epoch, "step": step, "step_time_s": seconds(time_ns)}


def runs_of(found: CollectedExperiment) -> Iterator[tuple[FlatRow, Record]]:
    """Yield what names each run, and its record."""
    for outcome in found.collected.outcomes:
        if outcome.record:
            names = {"configuration": found.labels[without_repeat(outcome.spec)], "run_id": outcome.record.run_id}
            yield {**names, "repeat": outcome.spec.repeat, "seed": outcome.spec.seed}, outcome.record


def seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e9
