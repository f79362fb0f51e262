"""The tables for people: how many columns they have, how wide they are, and what their notes and units say."""

import itertools
import re
from typing import Any

import pytest
from factories import assert_says, make_record, make_spec
from page_records import every_question
from rendered_tables import (
    PUBLISHED,
    assert_row,
    assert_said_once,
    build,
    cells,
    published_experiment,
    report,
    table_of,
)

from pipeline.figures.intervals import DRIFTED
from pipeline.figures.notes import OF_BASELINE, TEXT, make_note
from pipeline.plan.axes import REMEDIES, Remedy
from pipeline.plan.grid import expand_grid, shipped_grids
from pipeline.plan.spec import Spec
from pipeline.records.record import Record
from pipeline.report import display
from pipeline.report.display import MAX_COLUMNS, MAX_WIDTH, DisplayOptions, number_notes
from pipeline.report.markdown import render_experiment
from pipeline.report.questions import answers_of
from pipeline.report.table import Row


def tables_in(text: str) -> list[list[str]]:
    """The cells of the heading of every table."""
    heads = [line for line, below in itertools.pairwise(text.splitlines()) if re.match(r"\|:?-+", below)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in heads]


def assert_fits(text: str, width: int = MAX_WIDTH) -> None:
    command = r" *`ddpscale [^`]*`"  # to copy: never broken
    lines = [line for line in text.splitlines() if not re.fullmatch(command, line)]
    assert max(map(len, lines)) <= width
    for columns in tables_in(text):
        assert len(set(columns)) == len(columns) <= MAX_COLUMNS


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_report_of_a_published_experiment_fits_and_opens_with_its_answers(name: str) -> None:
    found = published_experiment(name)
    text = render_experiment(name, found.tables, found.collected, words="../docs/words.md")
    assert_fits(text)
    answers = answers_of(found.tables, found.collected.terms)
    asked = [answer.question for answer in answers for _ in answer.tiles]
    assert re.findall(r"^- \*\*(\w+)\*\* ", text, re.MULTILINE) == asked
    assert text.splitlines()[2].startswith(f"- **{asked[0]}** ")
    assert len(re.findall(r"^From \d+ records?: ", text, re.MULTILINE)) == 1


def published_report(name: str) -> str:
    found = published_experiment(name)
    return render_experiment(name, found.tables, found.collected)


def test_an_axis_of_one_strategy_is_named_in_its_rows_alone() -> None:
    rows = table_of(published_report("h100x2/strategies"), "Q3.1: communication of one step, measured")
    sharded = [("fsdp", f"reshard {reshard}") for reshard in ("blocks", "always", "never")]
    assert cells(rows, "strategy", "reshard") == [("ddp", ""), *sharded, ("zero1", "")]


def test_next_steps_are_of_the_points_where_one_was_found() -> None:
    steps = [
        row["next step"] for row in table_of(published_report("h100x2/captured"), "Next step of each configuration")
    ]
    assert [step.partition(" (")[0] for step in steps] == [
        *["a larger batch"] * 4,
        *["execution=compiled_graph"] * 4,
    ]


def test_tables_of_remedies_keep_accuracy_and_time_and_drop_the_strategy_that_gpus_tell() -> None:
    text = published_report("h200x2/q4")
    rows = table_of(text, "Q4: final accuracy")
    assert_row(rows[2], **{"GPUs": "2", "accuracy [%]": "65.1", "time [s]": "13.98"})
    assert ("strategy" in rows[0], "test accuracy [%]" in table_of(text, "Q4: first")[0]) == (False, True)
    assert " ".join(text.split()).count("Strategies: single 1 GPU, ddp 2 GPUs.") == 2
    assert "## Q3" not in text  # without a baseline a table of Q3 has no figure of its own


def test_rows_of_several_models_name_the_model_and_the_legend_what_its_points_share() -> None:
    text = published_report("h100/models")
    first, *_, last = table_of(text, "Q1: epoch time")
    assert (first["configuration"], last["configuration"]) == ("gpt, eager", "resnet18, compiled_graph")
    legend = "gpt, heads=12 layers=12 length=1024 vocabulary=50304 width=768, num_samples 240, contiguous"
    assert_says(" ".join(text.split()), f"Each model: {legend}")


def test_notes_on_exposed_communication_stand_only_where_it_is_shown() -> None:
    text = published_report("h200x4/communication-captured")
    assert_said_once(
        text, "two methods differ: trace 37 to 78 us exposed, step times 72 to 193; the trace is too short"
    )


def test_the_name_of_an_ingested_experiment_says_so() -> None:
    for name, title in (("a40-ddp", "# a40-ddp (ingested)"), ("h200x2/q4", "# h200x2/q4")):
        assert published_report(name).startswith(f"{title}\n")


def result_of(spec: Spec) -> Record:
    """A record with the longest texts: every seventh point out of memory."""
    if spec.measure != "epochs":
        return make_record(spec, status="failed", reason="out of luck " * 20)
    if spec.batch_size_per_gpu > 8192:
        return make_record(spec, status="oom", reason="out of GPU memory " * 10)
    learnt: dict[str, Any] = {"loss": 1.2345, "accuracy": 0.5, "test_accuracy": 0.5, "test_loss": 2.0}
    return make_record(spec, [123.456] * spec.epochs, **learnt)


@pytest.mark.parametrize("name", shipped_grids())
def test_the_report_of_a_shipped_grid_fits(name: str) -> None:
    assert_fits(report(*map(result_of, expand_grid(name, has_gpus=True).points)))


def test_a_report_of_every_question_fits_a_narrow_terminal_as_far_as_one_figure_does() -> None:
    assert len(tables_in(report(*every_question()))) >= 8
    narrow = report(*every_question(), options=DisplayOptions(60))
    assert max(len(line) for line in narrow.splitlines() if line.startswith("|")) <= 100
    assert "Not shown for lack of room: " in narrow


def test_every_unit_stands_in_the_heading_and_in_no_cell() -> None:
    text = report(*every_question())
    rows = [row for heading in re.findall(r"\n## (Q\d.*)", text) for row in table_of(text, heading)]
    found = {cell for row in rows for column, cell in row.items() if "[" in column}
    bare = re.compile(r"([-\d.,]+|)( \([-\d.,]+ to [-\d.,]+\))?|OOM|not stated|never")
    assert {cell for cell in found if not bare.fullmatch(cell)} == set() != found


def test_a_long_configuration_names_what_differs_from_the_usual_one() -> None:
    learnt: dict[str, Any] = {"loss": 1.0, "test_accuracy": 0.5}
    remedies: tuple[tuple[Remedy, ...], ...] = (("linear_scaling", "warmup", "zero_gamma"), ())
    specs = [
        make_spec(batch_size_per_gpu=size, evaluate=True, remedies=those, nesterov=bool(those))
        for size in (128, 512)
        for those in remedies
    ]
    text = " ".join(report(*(make_record(spec, **learnt) for spec in specs)).split())
    usual = "linear_scaling + warmup + zero_gamma, nesterov"
    assert text.count(f"Configurations name what differs from the usual one: {usual}.") == 2
    assert {"| usual ", "| no remedies, no nesterov "} <= {f"| {cell.strip()} " for cell in text.split("|")}


BOTH_PROCESSES = [make_spec(device="cpu", strategy="ddp", num_gpus=num, batch_size_per_gpu=8) for num in (1, 2)]
OF_64_EACH = make_record(make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=64), (9, 5))
REASONS = ("rank 0: exit code 1", "rank 3: exit code 137")
WITH_REMEDIES = "Runs with remedies are in the tables of Q4 only."


@pytest.mark.parametrize(
    ("found", "words", "never"),
    [
        pytest.param(
            [make_record(make_spec(batch_size_per_gpu=128), (9, 8)), OF_64_EACH],
            ["## Q2: strong scaling"],
            ["## Q2: weak scaling"],
            id="without a speed-up a kind of scaling is left out where the other has them",
        ),
        pytest.param([OF_64_EACH], ["## Q2: weak scaling"], [], id="without a baseline the times stand there"),
        pytest.param(
            [make_record(spec) for spec in BOTH_PROCESSES],
            ["against one process with the per-process batch fixed"],
            ["GPU"],
            id="the tables of the CPU name no GPU",
        ),
        pytest.param(
            [make_record(), make_record(make_spec(remedies=("warmup",)), loss=1.0)],
            [WITH_REMEDIES],
            [],
            id="where runs with remedies stand",
        ),
        pytest.param([make_record()], [], ["Runs with remedies"], id="no runs with remedies"),
    ],
)
def test_what_the_tables_are_about(found: list[Record], words: list[str], never: list[str]) -> None:
    assert_said_once(report(*found), *words, never=never)


def test_all_remedies_have_one_name_and_the_table_says_which_they_are() -> None:
    specs = [make_spec(evaluate=True), make_spec(batch_size_per_gpu=512, evaluate=True, remedies=REMEDIES)]
    text = report(*(make_record(spec, loss=1.0, test_accuracy=0.5) for spec in specs))
    assert cells(table_of(text, "Q4: final accuracy"), "remedies") == [("no remedies",), ("all remedies",)]
    assert "All remedies: linear_scaling, warmup, zero_gamma, no_bias_decay." in " ".join(text.split())


@pytest.mark.parametrize(
    ("found", "footnotes", "numbers"),
    [
        pytest.param(
            [
                make_record(make_spec(batch_size_per_gpu=size, max_steps=steps, epochs=1, input="synthetic"), [1.0])
                for size, steps in ((32, 3), (64, 5))
            ],
            ["1. probe of 3 to 5 steps: it fits, and has no epoch time"],
            ["1", "1", ""],
            id="that differ in numbers only are one",
        ),
        pytest.param(
            [
                make_record(make_spec(batch_size_per_gpu=size), status="failed", reason=reason)
                for size, reason in zip((32, 64), REASONS, strict=True)
            ],
            [f"1. {REASONS[0]}", f"2. {REASONS[1]}"],
            ["1", "2", ""],
            id="that differ in names or versions are several",
        ),
    ],
)
def test_footnotes(found: list[Record], footnotes: list[str], numbers: list[str]) -> None:
    text = report(*found, make_record(make_spec(batch_size_per_gpu=128)))
    assert_says(text, *footnotes)
    assert [row["note"] for row in table_of(text, "Q1")] == numbers


def test_rows_stand_by_batch_size_whatever_the_order_of_the_grid() -> None:
    found = [
        make_record(make_spec(strategy=strategy, num_gpus=num_gpus, batch_size_per_gpu=size), (9, 8))
        for strategy, num_gpus in (("single", 1), ("ddp", 2))
        for size in (512, 32, 128)
    ]
    for heading in ("Q1", "Q3"):
        assert [row["images per GPU"] for row in table_of(report(*found), heading)] == ["32", "128", "512"]
    assert [row["batch_size_per_gpu"] for row in build(*found)["Q3"]] == [512, 32, 128]


def test_a_pivot_has_a_row_for_each_number_of_gpus_and_a_column_for_each_batch_size() -> None:
    text = report(*every_question())
    times = table_of(text, "Q2: epoch time [s] by GPUs and images per GPU")
    assert cells(times, "strategy", "GPUs") == [("single", "1"), ("ddp", "2"), ("ddp", "4")]
    assert_row(times[0], **{"32": "12.000", "128": "5.000", "512": "4.000"})
    assert [row["512"] for row in table_of(text, "Q2: speed-up by")] == ["1.818", "3.636"]  # 2/1.1, 4/1.1
    assert [row["512"] for row in table_of(text, "Q2: efficiency [%] by")] == ["90.9", "90.9"]
    assert "T(2)/T(4)" not in text


def test_an_ingested_report_is_also_shown_in_its_own_terms() -> None:
    found = [
        make_record(spec, (9.0, time_s), measured=False)
        for spec, time_s in (
            (make_spec(strategy="dp", num_gpus=num_gpus, batch_size_per_gpu=size), 8.0 / num_gpus + size / 64)
            for num_gpus in (1, 2, 4)
            for size in (32, 64)
        )
    ]
    assert "T(2)/T(4)" not in report(*(record for record in found if record.spec.num_gpus < 4))
    text = report(*found)
    assert cells(table_of(text, "Q2: T(2)/T(4) by"), "32", "64") == [("1.800", "1.667")]  # 4.5/2.5, 5/3
    assert cells(table_of(text, "Q2: N x T(1)/T(N) by"), "64") == [("3.600",), ("12.000",)]  # 2 x 9/5, 4 x 9/3


@pytest.mark.parametrize(
    ("drifts", "merged"),
    [
        ([0.25], "epoch time drifted by +25.0 % from"),
        ([0.25, -0.031], "epoch time drifted by -3.1 to +25.0 % from"),
    ],
)
@pytest.mark.parametrize("of_baseline", [False, True])
def test_merged_notes_state_the_range_of_their_quantities(drifts: list[float], merged: str, of_baseline: bool) -> None:
    notes = [make_note(DRIFTED, what="epoch_time_s", drift=drift) for drift in drifts]
    notes = [make_note(OF_BASELINE, note=note) for note in notes] if of_baseline else notes
    ((_, text),), numbers, shared = number_notes([Row({}, {}, 1, (note,)) for note in notes] + [Row({}, {})])
    assert text.startswith(f"baseline: {merged}" if of_baseline else merged)
    assert (numbers, shared) == ([(1,)] * len(drifts) + [()], [])


def test_points_past_the_largest_number_of_rows_are_cut_off_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert display.MAX_ROWS == 10_000
    monkeypatch.setattr(display, "MAX_ROWS", 100)
    found = [make_record(make_spec(batch_size_per_gpu=size)) for size in range(1, 103)]
    assert "100 of 102 rows are shown." in report(*found)


def test_a_long_text_is_a_badge_of_its_first_words_and_never_called_note() -> None:
    text = "no profile of this strategy: it calls its collectives itself"
    assert display.word_of(make_note(TEXT, text=text)) == "no profile of thi..."
    assert display.word_of(make_note(TEXT, text="stated elsewhere")) == "stated elsewhere"
