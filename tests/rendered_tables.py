"""The tables and the report of records, and a table read back from a report."""

import re
from collections.abc import Sequence

from factories import ROOT

from pipeline.experiment.folder import Experiment
from pipeline.experiment.outcomes import resolve_outcomes
from pipeline.experiment.point_label import Processors
from pipeline.experiment.record import Record
from pipeline.experiment.record_store import RejectedFile
from pipeline.experiment.spec import Spec
from pipeline.report.answers import answer_questions
from pipeline.report.build_tables import Tables, build_tables
from pipeline.report.collect_experiment import collect_experiment
from pipeline.report.display_tables import DisplayOptions
from pipeline.report.markdown import render_experiment


def build(*found: Record, missing: Sequence[Spec] = (), target_accuracy: float | None = None) -> Tables:
    """The tables of an experiment that expects the records' points and the missing ones."""
    expected = dict.fromkeys([*(record.spec for record in found), *missing])
    return build_tables(resolve_outcomes(list(expected), found, []).outcomes, target_accuracy=target_accuracy)


def report(
    *found: Record,
    missing: Sequence[Spec] = (),
    bad: Sequence[RejectedFile] = (),
    name: str = "x",
    options: DisplayOptions | None = None,
) -> str:
    expected = dict.fromkeys([*(record.spec for record in found), *missing])
    collected = resolve_outcomes(list(expected), found, bad)
    return render_experiment(name, build_tables(collected.outcomes), collected, options)


def table_of(text: str, heading: str) -> list[dict[str, str]]:
    """The rows of one table by their header."""
    section = next(part for part in text.split("\n## ") if part.startswith(heading))
    header, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in (header, *rows)]
    return [dict(zip(split[0], cells, strict=True)) for cells in split[1:]]


def answers_of(*found: Record, missing: Sequence[Spec] = (), processors: Processors = "GPUs") -> dict[str, str]:
    return dict(answer_questions(build(*found, missing=missing), processors))


def published_answers(name: str) -> dict[str, str]:
    return dict(collect_experiment(Experiment(ROOT / "outputs" / name)).answers)
