"""What people read: columns, their width, notes and units, and the words of claims."""

import itertools
import re
from typing import Any

import msgspec
import pytest
from factories import ROOT, assert_says, make_record, make_script_spec, make_spec, sentences, timed
from rendered import (
    PUBLISHED,
    assert_row,
    assert_said_once,
    build,
    cells,
    every_question,
    published_experiment,
    published_tables,
    report,
    table_of,
)
from words_page import render_words

from pipeline.figures.epoch_figures import THROTTLED
from pipeline.figures.intervals import DRIFTED, Estimate
from pipeline.figures.notes import TEXT, make_note, text_note
from pipeline.figures.pooling import SHARED_NODE
from pipeline.figures.scaling import SUPERLINEAR_IS_NOISE
from pipeline.plan.axes import REMEDIES, Remedy
from pipeline.plan.grid import expand_grid, shipped_grids
from pipeline.plan.point_label import OF_GPUS
from pipeline.plan.spec import Spec
from pipeline.records.record import Record
from pipeline.report import display
from pipeline.report.claims import badge_of, badges_of, with_ends
from pipeline.report.display import (
    MAX_COLUMNS,
    MAX_WIDTH,
    DisplayColumn,
    DisplayOptions,
    describe_common,
    describe_omitted,
    format_cell,
    name_columns,
    number_notes,
    two_over_four,
)
from pipeline.report.markdown import render_experiment
from pipeline.report.memory import LARGEST_FITTING
from pipeline.report.q1 import Q1
from pipeline.report.questions import FIGURE_NAMES, TABLES, flatten_row
from pipeline.report.questions import answers_of as answers_of_tables
from pipeline.report.table import EPOCH_TIME, FACTORS, FIGURES_NOT_STATED, Column, Row, Table, render_note

COLUMNS = {(table.name, column.key): column for table in TABLES.values() for column in table.columns}


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: str(table.name))
def test_a_table_has_every_key_once_and_its_views_show_columns_with_a_heading(table: Table) -> None:
    keys = [key for column in table.columns for key in column.keys]
    assert len(keys) == len(set(keys))
    for view in table.views:
        assert all(table.column(key).heading for key in view.keys)
        shown = view.keys or [column.key for column in table.columns if column.heading]
        assert any(not table.column(key).is_set for key in shown)


def test_a_key_has_one_unit_and_one_meaning() -> None:
    declared = {(column.key, column.unit, column.meaning) for column in COLUMNS.values()}
    assert len({key for key, *_ in declared}) == len(declared) > 100


def test_a_figure_that_no_column_declares_is_refused_and_one_that_is_not_given_is_none() -> None:
    with pytest.raises(KeyError, match="table Q1 has no column epoch_tiem_s"):
        Q1.complete({"epoch_tiem_s": 1.0})
    flat = flatten_row(Row({"strategy": "single"}, Q1.complete({"epoch_time_s": 1.0})), Q1)
    assert_row(flat, strategy="single", epoch_time_s=1.0, epoch_time_low_s=None, peak_memory_gib=None, n=0)


def test_every_column_has_a_meaning_that_ends_in_a_full_stop() -> None:
    assert [column.key for column in COLUMNS.values() if not column.meaning.endswith(".")] == []


def test_a_heading_ends_in_the_unit_of_its_key_or_in_one_with_a_factor() -> None:
    shown = [column for column in COLUMNS.values() if "[" in column.heading]
    assert len(shown) > 50
    others = [column for column in shown if column.unit != column.shown_unit]
    assert [column.key for column in others if (column.unit, column.shown_unit) not in FACTORS] == []


@pytest.mark.parametrize(
    ("key", "heading", "unit", "factor", "decimals"),
    [
        ("step_time_s", "step [ms]", "s", 1000, 3),
        ("exposed_comm_time_s", "exposed [us]", "s", 1e6, 1),
        ("throughput_samples_per_s", "images/s", "1/s", 1, 3),
        ("num_bytes", "size [MB]", "B", 1e-6, 3),
        ("busbw_gb_s", "bandwidth [GB/s]", "GB/s", 1, 2),
        ("data_share", "waiting [%]", "", 100, 1),
        ("noise_floor", "interval [± %]", "", 100, 1),
        ("num_updates", "updates", "", 1, 3),
    ],
)
def test_the_unit_is_that_of_the_key_and_the_factor_leads_to_the_one_of_the_heading(
    key: str, heading: str, unit: str, factor: float, decimals: int
) -> None:
    column = Column(key, heading, "")
    assert (column.unit, column.factor, column.max_decimals) == (unit, factor, decimals)


def test_the_page_of_words_is_that_of_the_columns() -> None:
    page = (ROOT / "docs" / "words.md").read_text()
    assert page == render_words(page), "run make words"
    assert all(f"| `{key}` |" in page for _, key in COLUMNS)


def test_a_note_of_another_point_and_lists_are_written_out() -> None:
    noise = make_note(SUPERLINEAR_IS_NOISE, factor=2)
    assert sentences([noise._replace(is_of_baseline=True), make_note(FIGURES_NOT_STATED, figures=["a", "b"])]) == [
        "baseline: the speed-up is above 2, which lies inside its interval: the noise is larger than the gap",
        "not stated: a, b",
    ]
    assert sentences([text_note("braces {stay} as they are")]) == ["braces {stay} as they are"]


def test_a_column_of_one_axis_has_its_words_and_not_its_key() -> None:
    columns, _ = name_columns([{"num_nodes": 1}, {"num_nodes": 2}], ["num_nodes"])
    assert [(column.heading, column.cells) for column in columns] == [("nodes", ["1 node", "2 nodes"])]


def test_what_all_rows_share_has_its_sign_before_it_and_its_unit_behind() -> None:
    omitted = [DisplayColumn("interval [± %]", ["0.9", "0.9"]), DisplayColumn("step [ms]", ["5", "5"])]
    varying = DisplayColumn("samples/s", ["1", "2"])
    said = "Not shown for lack of room: samples/s."
    assert describe_omitted([*omitted, varying]) == (["interval: ± 0.9 %", "step: 5 ms"], said)


def test_a_report_names_a_figure_as_its_heading_does_and_json_by_its_key() -> None:
    note = make_note(FIGURES_NOT_STATED, figures=["training_time_s", "epoch_time_s"])._replace(is_of_baseline=True)
    assert render_note(note, FIGURE_NAMES) == "baseline: not stated: training time, epoch time"
    assert render_note(note) == "baseline: not stated: training_time_s, epoch_time_s"


def test_a_cell_is_not_stated_by_the_kind_of_its_note_and_not_by_its_words() -> None:
    column, figures = Q1.column("epoch_time_s"), {"epoch_time_s": None}
    stated = Row({}, figures, notes=(make_note(FIGURES_NOT_STATED, figures=["epoch_time_s"]),))
    quoted = Row({}, figures, notes=(text_note("not stated: epoch_time_s"),))
    assert [format_cell(column, row, 0) for row in (stated, quoted)] == ["not stated", ""]


@pytest.mark.parametrize(("high", "text"), [(None, "<0.2"), (0.1, "<0.2"), (0.3, "<0.3")])
def test_what_noise_hides_is_less_than_the_largest_that_it_may_be(high: float | None, text: str) -> None:
    row = Row({}, {"epoch_time_s": Estimate(0.05, -0.1, high, noise=0.2)})
    assert format_cell(EPOCH_TIME, row, 3) == text


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
    answers = answers_of_tables(found.tables, found.collected.terms)
    asked = [answer.question for answer in answers for _ in answer.tiles]
    assert re.findall(r"^- \*\*(\w+)\*\* ", text, re.MULTILINE) == asked
    assert text.splitlines()[2].startswith(f"- **{asked[0]}** ")
    assert len(re.findall(r"^From \d+ records?: ", text, re.MULTILINE)) == 1


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
    on_nodes = [timed(time_s, 64, num_gpus, num_nodes=nodes) for time_s, num_gpus, nodes in ((4, 2, 1), (2, 4, 2))]
    assert [ratio for _, ratio in two_over_four(build(*on_nodes)["Q2"])] == [None]


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
    notes = [note._replace(is_of_baseline=of_baseline) for note in notes]
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


@pytest.mark.parametrize(
    ("figure", "spec", "shown"),
    [
        (Estimate(2.133, 2.0, 2.3), "digits", "2.13 (2.00 to 2.30)"),
        (Estimate(2.133), "digits", "2.13"),
        (Estimate(2.1331, 2.1329, 2.1334), "digits", "2.1331 (2.1329 to 2.1334)"),  # as many as tell the ends apart
        (Estimate(0.9802, 0.9801, 0.9803), ".0%", "98.02 % (98.01 to 98.03 %)"),
        (Estimate(2.0, 2.0, 2.0 + 1e-9), "digits", "2.00 (2.00 to 2.00)"),
        (Estimate(2.0, 2.0, 2.0), "digits", "2.00 (2.00 to 2.00)"),
        (Estimate(2.0, 2.0, None), "digits", "2.00"),
        (1234.5, "digits", "1,235"),
        (2.7, "digits", "2.70"),
        (0.0123, "digits", "0.0123"),
        (Estimate(0.0336, 0.0331, 0.0349), ".1%", "3.4 % (3.3 to 3.5 %)"),
        (0.5295, ".1%", "53.0 %"),
    ],
)
def test_a_figure_has_its_interval_and_three_digits(figure: float, spec: str, shown: str) -> None:
    assert with_ends(figure, spec) == shown


def test_every_published_answer_is_a_figure_or_says_why_there_is_none_in_at_most_two_sentences() -> None:
    for name in PUBLISHED:
        for tile in (tile for answer in answers_of_tables(published_tables(name), OF_GPUS) for tile in answer.tiles):
            assert tile.label
            assert tile.figure or tile.line
            assert len(re.findall(r"\.(?: |$)", tile.text)) <= 2, tile.text


CAPPED = "power-limited, clock 5 % below its maximum"


def test_badges_stand_once_and_those_of_the_baseline_last() -> None:
    capped = make_note(THROTTLED, reasons=["sw_power_cap"], below=0.0512)
    notes = (capped._replace(is_of_baseline=True), capped, make_note(SHARED_NODE, others=2), capped)
    badges = badges_of(Row({}, {}, 1, notes))
    assert badges == ("one run", CAPPED, "shared node", f"baseline {CAPPED}")
    tile = LARGEST_FITTING._replace(figure="512", badges=badges[:2]).in_words_of(OF_GPUS)
    assert (
        tile.text
        == f"Largest batch that fits: 512 images, the largest that was tried; more may fit; one run; {CAPPED}."
    )


@pytest.mark.parametrize(
    ("reasons", "below", "badge"),
    [
        (["sw_power_cap"], 0.0512, CAPPED),
        (["sw_power_cap"], 0.03, ""),  # the clock says that it costs next to nothing
        (["sw_power_cap"], None, ""),
        (["sw_power_cap", "sw_thermal_slowdown"], 0.0512, "clocks lowered"),
        (["hw_thermal_slowdown"], 0.0, "clocks lowered"),
    ],
)
def test_lowered_clocks_are_called_the_power_limit_only_where_that_is_the_reason_and_costs_time(
    reasons: list[str], below: float | None, badge: str
) -> None:
    assert badge_of(make_note(THROTTLED, reasons=reasons, below=below)) == badge


def test_an_interval_within_several_runs_is_a_badge() -> None:
    assert badges_of(Row({}, {"interval_over": "windows"}, 3)) == ("range within the runs",)
    assert badges_of(Row({}, {"interval_over": "repeats"}, 6)) == ()


def test_the_windows_of_a_script_are_not_called_its_epochs() -> None:
    script, own = make_script_spec(), make_spec()
    common = [describe_common([msgspec.structs.asdict(spec)], (), ()) for spec in (script, own)]
    assert [any(part.startswith("epochs:") for part in parts) for parts in common] == [False, True]
