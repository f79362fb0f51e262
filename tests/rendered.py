"""Tables, plots and pages of made-up and of published records, and a table read back from a report."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from factories import (
    BUCKETS,
    ROOT,
    comm_point,
    make_communication_record,
    make_measurement,
    make_record,
    make_spec,
    measured,
    resolved,
    with_epochs,
    with_rank_epochs,
)

from pipeline.plan.axes import Remedy
from pipeline.plan.point_label import OF_GPUS, Terms
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, find_experiments
from pipeline.records.record import Environment, Gpu, Record, SweptCollective
from pipeline.records.store import RejectedFile
from pipeline.report.claims import Tile
from pipeline.report.collected import CollectedExperiment, collect_experiment
from pipeline.report.display import DisplayOptions
from pipeline.report.html import Pages, build_plots
from pipeline.report.markdown import render_experiment
from pipeline.report.plots import BarPanel, LinePanel, Plot, Series
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


ONE_GPU_S = {32: 12, 128: 5, 512: 4}  # epoch time by batch size
REMEDIES: tuple[tuple[Remedy, ...], ...] = ((), ("linear_scaling",), ("linear_scaling", "warmup"))
EVIL = '<script>alert("x")</script><img src=http://example.invalid/x.png>\u202e$\\frac{1}{2}$ ---'


PARTS = {"copy_ns": 0.1, "forward_ns": 0.3, "backward_ns": 0.5, "optimizer_ns": 0.1}  # of the time that computes


def timed_record(spec: Spec, time_s: float, **fields: float) -> Record:
    """A record whose timed epoch took so long, with every part of its steps."""
    record = make_record(spec, measurement=make_measurement(spec, (2 * time_s, time_s), **fields))
    return with_rank_epochs(
        record, lambda rank: {part: round(share * (rank.compute_time_ns or 0)) for part, share in PARTS.items()}
    )


def batch_records() -> list[Record]:
    """One GPU at three batch sizes, of which the next is out of memory."""
    timed = [timed_record(make_spec(batch_size_per_gpu=size), time_s) for size, time_s in ONE_GPU_S.items()]
    return [*timed, make_record(make_spec(batch_size_per_gpu=2048), status="oom", reason="out of GPU memory")]


def scaling_records(counts: Sequence[int] = (2, 4)) -> list[Record]:
    """DDP at the same batch sizes, 10 % slower than ideal."""
    return [
        timed_record(make_spec(strategy="ddp", num_gpus=count, batch_size_per_gpu=size), 1.1 * time_s / count)
        for count in counts
        for size, time_s in ONE_GPU_S.items()
    ]


def communication_records() -> list[Record]:
    """One DDP step with 40 us exposed, and a sweep over message sizes."""
    sweep = tuple(
        SweptCollective(
            num_bytes=size, operation="all_reduce", times_ns=(20_000 + size // 100,) * 6, is_bucket=size in BUCKETS
        )
        for size in (10_000, 1_000_000, *BUCKETS, 200_000_000)
    )
    return [make_communication_record(comm_point(), measured(38, 39, 40, 40, 41, 42, sweep=sweep))]


def remedy_records() -> list[Record]:
    """Four epochs with a small batch, and with a large one with and without remedies."""
    small = make_spec(batch_size_per_gpu=64, epochs=4, evaluate=True)
    large = [make_spec(batch_size_per_gpu=4096, epochs=4, evaluate=True, remedies=remedies) for remedies in REMEDIES]
    return [
        with_epochs(
            make_record(spec, (3.0, 2.0, 2.0, 2.0), loss=1.0),
            lambda epoch, lost=0.05 * rank: {"test_accuracy": 0.2 + 0.1 * epoch.epoch - lost},  # type: ignore[misc]
        )
        for rank, spec in enumerate([small, *large])
    ]


def every_question() -> list[Record]:
    return [*batch_records(), *scaling_records(), *communication_records(), *remedy_records()]


def hostile_records() -> list[Record]:
    place = Environment(gpus=(Gpu(name=EVIL),), torch=EVIL, git_commit=EVIL, cpu=EVIL, source=EVIL)
    return [
        make_record(environment=place),
        make_record(make_spec(batch_size_per_gpu=64), status="oom", reason=EVIL, environment=place),
        make_record(make_spec(batch_size_per_gpu=32), status="failed", reason=EVIL, environment=place),
    ]


def plots_of_records(*found: Record, terms: Terms = OF_GPUS) -> list[Plot]:
    outcomes = resolved(*found).outcomes
    return build_plots(build_tables(outcomes), terms)


def collected_in(
    folder: Path, *found: Record, missing: Sequence[Spec] = (), bad: Sequence[RejectedFile] = ()
) -> CollectedExperiment:
    """The experiment of these records, in a folder of its own."""
    collected = resolved(*found, missing=missing, bad=bad)
    folder.mkdir(parents=True, exist_ok=True)
    return CollectedExperiment(Experiment(folder), collected, build_tables(collected.outcomes))


def write_page(folder: Path, *found: Record, missing: Sequence[Spec] = (), name: str = "x") -> Path:
    """Write the page of these records, and return its path."""
    bad = [RejectedFile(Path("records") / "bad.json", None, name)]
    Pages(folder.parent, True).write(name, collected_in(folder, *found, missing=missing, bad=bad), {})
    return folder / "report.html"


def write_index(folder: Path, **found: Record) -> str:
    """Write the index over experiments of one record each, and return it."""
    pages = Pages(folder, True)
    for name, record in found.items():
        pages.write(name, collected_in(folder / name, record), {})
    pages.write_index()
    return (folder / "index.html").read_text()


def plots_of(*found: Record) -> dict[str, Plot]:
    return {plot.name: plot for plot in plots_of_records(*found)}


def line_panel(plot: Plot, index: int = 0) -> LinePanel:
    panel = plot.panels[index]
    assert isinstance(panel, LinePanel)
    return panel


def ys(line: Series) -> list[Any]:
    return [point.y for point in line.points]


def xs(line: Series) -> list[float]:
    return [point.x for point in line.points]


def labels(panel: LinePanel) -> list[str]:
    return [line.label for line in panel.series]


def bar_panel(plot: Plot) -> BarPanel:
    panel = plot.panels[0]
    assert isinstance(panel, BarPanel)
    return panel
