import inspect
import re
from typing import Any

import pytest
from factories import ROOT, sentences

from pipeline.analysis.notes import make_note, text_note
from pipeline.experiment.spec import AXES
from pipeline.report import note_texts, row_types
from pipeline.report.build_tables import ROW_CLASSES
from pipeline.report.columns import AXIS_COLUMNS, COLUMNS, Column
from pipeline.report.display_cells import format_cell
from pipeline.report.row_types import Q1Row, figure_keys
from pipeline.report.table_definitions import EPOCH_TIME, TABLE_DEFINITIONS, Figure, TableDefinition
from pipeline.report.words import render_words

UNITS = {
    **{"_samples_per_s": "1/s", "_gb_s": "GB/s", "_us": "us", "_s": "s", "_gib": "GiB", "_j": "J", "_mhz": "MHz"},
    **{"_hours": "h", "_share": "1", "accuracy": "1", "speedup": "1"},
}
KINDS_MADE = re.compile(r'make_note\(\s*"(\w+)"(?: if [^"]+ else "(\w+)")?|(?:True|False): "(\w+)"')


@pytest.mark.parametrize("table", ROW_CLASSES)
def test_every_figure_of_a_table_is_a_declared_column_or_an_axis(table: str) -> None:
    assert set(figure_keys(ROW_CLASSES[table])) <= {*COLUMNS, *AXES}


def test_a_column_states_its_meaning_once() -> None:
    stated = re.findall(r"^    (\w+): Annotated", inspect.getsource(row_types), re.MULTILINE)
    assert len(stated) == len(set(stated)) > 100


def test_no_figure_that_states_a_meaning_is_an_axis() -> None:
    assert not COLUMNS.keys() & set(AXES)
    assert {axis.key for axis in AXIS_COLUMNS} <= {*AXES, "gpu"}


@pytest.mark.parametrize("column", [*COLUMNS.values(), *AXIS_COLUMNS], ids=lambda column: str(column.key))
def test_every_column_has_a_meaning_that_is_one_sentence(column: Column) -> None:
    assert column.meaning.endswith(".")
    assert ". " not in column.meaning


@pytest.mark.parametrize("column", COLUMNS.values(), ids=lambda column: str(column.key))
def test_the_unit_of_a_column_is_that_of_its_key(column: Column) -> None:
    unit = next((unit for suffix, unit in UNITS.items() if column.key.endswith(suffix)), None)
    assert unit in (None, column.unit)
    assert column.unit in ("", "1", "B") or unit is not None


@pytest.mark.parametrize("definition", TABLE_DEFINITIONS, ids=lambda definition: str(definition.heading))
def test_a_table_for_people_shows_columns_of_its_rows(definition: TableDefinition) -> None:
    keys = {key for figure in definition.figures for key in (figure.key, figure.over, figure.low, figure.high) if key}
    assert keys - {*AXES, "n"} <= set(figure_keys(ROW_CLASSES[definition.table]))


FACTORS: dict[str, dict[str, float]] = {
    "s": {"s": 1, "ms": 1e3, "us": 1e6},
    "B": {"MB": 1e-6},
    "J": {"mJ/image": 1e3},
    "1": {"%": 100, "points": 100, "": 1},
}


FIGURES = dict.fromkeys(figure for table in TABLE_DEFINITIONS for figure in table.figures)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: str(figure.heading))
def test_a_heading_states_the_unit_to_which_its_factor_leads(figure: Figure) -> None:
    column = COLUMNS.get(figure.key)
    (shown,) = re.findall(r"\[(.*)\]$", figure.heading) or [""]
    unit = "1" if figure.over else column.unit if column else ""
    if figure.key == "throughput_samples_per_s":
        assert (figure.heading, figure.factor) == ("images/s", 1)
    else:
        assert figure.factor == FACTORS.get(unit, {unit: 1})[shown.removeprefix("± ")]


def test_the_page_of_words_is_that_of_the_columns() -> None:
    page = (ROOT / "docs" / "words.md").read_text()
    assert page == render_words(page), "run make words"
    assert all(f"| `{key}` |" in page for key, column in COLUMNS.items() if not column.is_end)


def test_every_kind_of_note_that_is_made_has_a_sentence_and_none_is_left_over() -> None:
    sources = [*(ROOT / "pipeline" / "analysis").glob("*.py"), *(ROOT / "pipeline" / "report").glob("*_rows.py")]
    sources.append(ROOT / "pipeline" / "report" / "row_types.py")
    made = {kind for path in sources for found in KINDS_MADE.findall(path.read_text()) for kind in found if kind}
    assert made | {"text"} == note_texts.NOTE_TEXTS.keys()


def test_a_note_of_another_point_and_lists_are_written_out() -> None:
    drifted = make_note("drifted", what="epoch_time_s", drift=0.25)
    assert sentences([make_note("of_baseline", note=drifted), make_note("not_stated", figures=["a", "b"])]) == [
        "baseline: epoch_time_s drifted by +25.0 % during the measurement: its interval is too narrow",
        "not stated: a, b",
    ]
    (said,) = sentences([text_note("braces {stay} as they are")])
    assert said == "braces {stay} as they are"


def test_a_report_names_a_figure_as_its_heading_does_and_json_by_its_key() -> None:
    note = make_note("of_baseline", note=make_note("not_stated", figures=["data_time_s", "loss"]))
    assert note_texts.render_note(note, note_texts.FIGURE_WORDS) == "baseline: not stated: waiting for data, loss"
    assert note_texts.render_note(note) == "baseline: not stated: data_time_s, loss"
    headings = {heading.partition(" [")[0] for table in TABLE_DEFINITIONS for heading, *_ in table.figures}
    assert {*note_texts.FIGURE_WORDS.values()} - headings == {
        "step time",
        "steps",
        "bytes",
        "training time",
        "learning rate",
    }


def test_a_cell_is_not_stated_by_the_kind_of_its_note_and_not_by_its_words() -> None:
    point: dict[str, Any] = {"axes": {}, "global_batch_size": 128, "status": "ok"}
    stated = Q1Row(**point, notes=(make_note("not_stated", figures=["epoch_time_s"]),))
    quoted = Q1Row(**point, notes=(text_note("not stated: epoch_time_s"),))
    assert [format_cell(EPOCH_TIME, row, 0) for row in (stated, quoted)] == ["not stated", ""]
