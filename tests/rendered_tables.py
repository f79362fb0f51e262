"""The tables and the report of records, and a table read back from a report."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from factories import ROOT, resolved

from pipeline.plan.point_label import Terms
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, find_experiments
from pipeline.records.record import Record
from pipeline.records.store import RejectedFile
from pipeline.report.claims import Tile
from pipeline.report.collected import CollectedExperiment, collect_experiment
from pipeline.report.display import DisplayOptions
from pipeline.report.markdown import render_experiment
from pipeline.report.questions import Answer, answer_questions, build_tables
from pipeline.report.table import Row, Tables

Answers = dict[str, list[Tile]]


def build(*found: Record, missing: Sequence[Spec] = (), **options: Any) -> Tables:
    """The tables of an experiment that expects the records' points and the missing ones."""
    return build_tables(resolved(*found, missing=missing).outcomes, **options)


def report(
    *found: Record,
    missing: Sequence[Spec] = (),
    bad: Sequence[RejectedFile] = (),
    name: str = "x",
    options: DisplayOptions | None = None,
) -> str:
    collected = resolved(*found, missing=missing, bad=bad)
    return render_experiment(name, build_tables(collected.outcomes), collected, options)


def cells(rows: Iterable[Row | Mapping[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """Those figures of every row."""
    return [tuple(row[key] for key in keys) for row in rows]


def row_of(rows: Iterable[Row], **wanted: Any) -> Row:
    """The one row with these axes and figures; in Q2 that of weak scaling unless another is wanted."""
    (row,) = (
        row
        for row in rows
        if row.figures.get("scaling") in (None, wanted.get("scaling", "weak"))
        and all(row[key] == value for key, value in wanted.items())
    )
    return row


def assert_row(row: Row | Mapping[str, Any], *in_note: str, **expected: Any) -> None:
    """Fail unless the row has these figures, numbers to six digits, and these words in its note."""
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert [word for word in in_note if word not in (row["note"] or "")] == []


def assert_said_once(text: str, *words: str, never: Sequence[str] = ()) -> None:
    """Fail unless the text holds each of the words once, and none of `never`, however its lines are broken."""
    said = " ".join(text.split())
    counts = {word: said.count(word) for word in (*words, *never)}
    assert counts == dict.fromkeys(words, 1) | dict.fromkeys(never, 0), said


def table_of(text: str, heading: str) -> list[dict[str, str]]:
    """The rows of one table by their header."""
    section = next(part for part in text.split("\n## ") if part.startswith(heading))
    header, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in (header, *rows)]
    return [dict(zip(split[0], cells, strict=True)) for cells in split[1:]]


def claims_of(*found: Record, missing: Sequence[Spec] = ()) -> Answers:
    return answer_questions(build(*found, missing=missing))


IN_IMAGES = Terms()


def said(answers: Answers, terms: Terms = IN_IMAGES) -> dict[str, str]:
    """The words of each answer, with the command that comes next."""
    found = [Answer(question, claims, terms) for question, claims in answers.items()]
    return {
        answer.question: f"{' '.join(tile.text for tile in answer.tiles)} {answer.command}".strip() for answer in found
    }


def answers_of(*found: Record, missing: Sequence[Spec] = (), terms: Terms = IN_IMAGES) -> dict[str, str]:
    return said(claims_of(*found, missing=missing), terms)


PUBLISHED = tuple(find_experiments(ROOT / "published"))
"""Names of the published experiments."""


@functools.cache
def published_experiment(name: str) -> CollectedExperiment:
    """Return a published experiment, collected once: only read it."""
    return collect_experiment(Experiment(ROOT / "published" / name))


def published_tables(name: str) -> Tables:
    return published_experiment(name).tables


def published_claims(name: str) -> Answers:
    return answer_questions(published_tables(name))
