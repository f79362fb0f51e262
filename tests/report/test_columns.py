import re

import pytest
from factories import ROOT, sentences
from rendered_tables import assert_row
from words_page import render_words

from pipeline.figures.notes import OF_BASELINE, make_note, text_note
from pipeline.figures.scaling import SUPERLINEAR_IS_NOISE
from pipeline.report.display import format_cell
from pipeline.report.q1 import Q1
from pipeline.report.questions import FIGURE_NAMES, TABLES, flatten_row
from pipeline.report.table import FACTORS, FIGURES_NOT_STATED, Column, Row, Table, render_note

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


def test_every_kind_of_note_is_made_and_has_the_name_of_its_constant() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "pipeline").rglob("*.py"))
    declared = re.findall(r'^(\w+) = NoteKind\(\s*"(\w+)"', sources, re.MULTILINE)
    assert len(declared) > 60
    used = {*re.findall(r"\b[A-Z]\w+\b(?! = NoteKind)", sources)}
    for constant, name in declared:
        assert constant.endswith(name.upper())
        assert constant in used


def test_a_note_of_another_point_and_lists_are_written_out() -> None:
    noise = make_note(SUPERLINEAR_IS_NOISE, num_gpus=2)
    assert sentences([make_note(OF_BASELINE, note=noise), make_note(FIGURES_NOT_STATED, figures=["a", "b"])]) == [
        "baseline: the speed-up is above 2, which lies inside its interval: the noise is larger than the gap",
        "not stated: a, b",
    ]
    assert sentences([text_note("braces {stay} as they are")]) == ["braces {stay} as they are"]


def test_a_report_names_a_figure_as_its_heading_does_and_json_by_its_key() -> None:
    note = make_note(OF_BASELINE, note=make_note(FIGURES_NOT_STATED, figures=["training_time_s", "epoch_time_s"]))
    assert render_note(note, FIGURE_NAMES) == "baseline: not stated: training time, epoch time"
    assert render_note(note) == "baseline: not stated: training_time_s, epoch_time_s"


def test_a_cell_is_not_stated_by_the_kind_of_its_note_and_not_by_its_words() -> None:
    column, figures = Q1.column("epoch_time_s"), {"epoch_time_s": None}
    stated = Row({}, figures, notes=(make_note(FIGURES_NOT_STATED, figures=["epoch_time_s"]),))
    quoted = Row({}, figures, notes=(text_note("not stated: epoch_time_s"),))
    assert [format_cell(column, row, 0) for row in (stated, quoted)] == ["not stated", ""]
