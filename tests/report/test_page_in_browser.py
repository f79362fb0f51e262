"""report.html in a real browser: nothing but the page is asked for, both themes work, and it fits a phone."""

import itertools
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from browser import look_at, needs_chromium, needs_pdftotext, print_page
from factories import (
    INT8_RECORDS,
    assert_says,
    make_record,
    make_spec,
)
from rendered import EVIL, collected_in, every_question, hostile_records, write_index, write_page

from pipeline.records.record import Record
from pipeline.report.display import ON_PAGE, display_tables
from pipeline.report.html import Pages, slug_of
from pipeline.report.markdown import render_tabular

pytestmark = [pytest.mark.browser, needs_chromium]

PHONE, DESKTOP = 390, 1280
GROUNDS = {False: "rgb(255, 255, 255)", True: "rgb(20, 24, 28)"}
INKS = {False: {"rgb(26, 31, 36)", "rgb(89, 99, 110)"}, True: {"rgb(232, 235, 238)", "rgb(163, 173, 184)"}}
TABLE_HEADING = re.compile(
    r"(▸|▾|►|▼)?\s*(Q\d(\.\d)?|int8|All rows|Prediction|The memory boundary): (?!.*: \d+ rows?$)"
)
"""Of a table that is open; a closed one may stand alone."""
MIN_SCALE = 0.9  # of a plot, whose smallest letters have 10 px


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page") / "x", *every_question())


def assert_stands_alone(found: dict[str, Any], name: str = "report.html", width: int = DESKTOP) -> None:
    """Fail unless the page was shown without a complaint, asked for nothing else, and fits."""
    assert (found["console"], found["asked"], found["foreign"]) == ([], [f"/{name}"], 0)
    assert found["page_width"] <= width


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_a_page_in_both_themes_and_widths(tmp_path: Path, full_page: Path, width: int, is_dark: bool) -> None:
    found = look_at(full_page, tmp_path / "profile", width, is_dark)
    assert_stands_alone(found, width=width)
    assert found["background"] == GROUNDS[is_dark]
    assert len(found["alternatives"]) >= 9
    assert set(found["titles"]) <= INKS[is_dark]  # the style sheet colours each picture
    assert min(found["scales"]) >= MIN_SCALE
    assert all(any(character.isdigit() for character in text) for text in found["alternatives"])


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_page_of_int8_on_a_phone(tmp_path: Path, is_dark: bool) -> None:
    found = look_at(write_page(tmp_path / "x", *INT8_RECORDS), tmp_path / "profile", PHONE, is_dark)
    assert_stands_alone(found, width=PHONE)
    assert set(found["titles"]) <= INKS[is_dark]
    assert min(found["scales"]) >= MIN_SCALE
    assert len(found["alternatives"]) == 2


def test_each_link_of_a_page_alone_in_a_folder_leads_somewhere(tmp_path: Path, full_page: Path) -> None:
    alone = tmp_path / "mail" / "report.html"
    alone.parent.mkdir()
    shutil.copy(full_page, alone)
    found = look_at(alone, tmp_path / "profile")
    assert found["asked"] == ["/report.html"]
    names = {f"#{make_spec(batch_size_per_gpu=2048).run_id()}", "q1.csv"}
    assert names <= found["followed"].keys()
    assert [name for name, size in found["followed"].items() if not size] == []


def faults_of_print(sheets: list[list[str]]) -> list[str]:
    """What a print must not have: an empty sheet, one letter a line, a heading of a table at the end of a sheet."""
    found = [f"sheet {number} is empty" for number, lines in enumerate(sheets, 1) if not lines]
    pairs = (pair for lines in sheets for pair in itertools.pairwise(lines))
    found += [f"one letter a line: {pair}" for pair in pairs if all(len(line) == 1 and line.isalpha() for line in pair)]
    ends = [lines[-1] for lines in sheets if lines and TABLE_HEADING.match(lines[-1])]
    return found + [f"parted from its table: {line}" for line in ends]


@needs_pdftotext
def test_a_print_has_no_empty_sheet_no_broken_legend_and_no_lonely_heading(tmp_path: Path, full_page: Path) -> None:
    sheets = print_page(full_page, tmp_path)
    assert len(sheets) > 3
    assert faults_of_print(sheets) == []
    for label in ("isolated all-reduce, 2 GPUs", "DDP's buckets, 2 GPUs"):  # of a legend, each on one line
        assert any(label in line for lines in sheets for line in lines)


@needs_pdftotext
def test_the_print_would_tell(tmp_path: Path) -> None:
    """A legend of no width, an empty sheet, and a heading at the end of a sheet."""
    page, sheet = tmp_path / "bad.html", '<p style="break-after:page">'
    page.write_text(f'<p style="width:1px;overflow-wrap:anywhere">ddp{sheet}{sheet}&nbsp;{sheet}Q2: a table{sheet}end')
    assert [fault.partition(":")[0] for fault in faults_of_print(print_page(page, tmp_path))] == [
        *("sheet 2 is empty", "one letter a line", "one letter a line", "parted from its table")
    ]


def test_a_hostile_name_shows_as_text(tmp_path: Path) -> None:
    found = look_at(write_page(tmp_path / "x", *hostile_records(), name=EVIL), tmp_path / "profile")
    assert_stands_alone(found)
    assert EVIL.replace("\u202e", " ") in found["text"]


@pytest.mark.parametrize("records", [every_question(), hostile_records()], ids=["every question", "hostile"])
def test_the_page_copies_tables_as_collect_prints_them(tmp_path: Path, records: list[Record]) -> None:
    found = collected_in(tmp_path / "x", *records)
    copied = look_at(write_page(tmp_path / "x", *records), tmp_path / "profile")["latex"]
    tables = [table for _, table in display_tables(found.tables, found.collected, ON_PAGE)]
    printed = {slug_of(table.heading): render_tabular(table) for table in tables}
    assert len(printed) == len(tables)
    assert copied
    assert {name: text for name, text in copied.items() if name and text != printed[name]} == {}
    assert any("note" in text.splitlines()[2] for text in copied.values())


def test_two_thousand_points_stay_usable(tmp_path: Path) -> None:
    """20 batch sizes x 100 learning rates: written in seconds, a few megabytes, and shown in seconds."""
    sizes, rates = range(1, 21), range(1, 101)
    specs = [make_spec(batch_size_per_gpu=32 * size, learning_rate=rate / 100) for rate in rates for size in sizes]
    found_records = collected_in(tmp_path / "x", *map(make_record, specs))
    started_s = time.monotonic()
    Pages(tmp_path, False).write("x", found_records, {})
    written_s = time.monotonic()
    page = tmp_path / "x" / "report.html"
    assert page.stat().st_size < 4_000_000
    found = look_at(page, tmp_path / "profile", PHONE)
    assert max(written_s - started_s, time.monotonic() - written_s) < 20
    assert found["num_rows"] >= 4000
    assert found["height"] < 10_000  # long tables are folded up
    assert found["page_width"] <= PHONE


def test_the_index_fits_a_phone_and_names_every_experiment(tmp_path: Path) -> None:
    names = ("one", "two" * 40)
    write_index(tmp_path, **dict.fromkeys(names, make_record()))
    found = look_at(tmp_path / "index.html", tmp_path / "profile", PHONE)
    assert_stands_alone(found, "index.html", PHONE)
    assert_says(found["text"], *names)


def test_the_browser_would_tell(tmp_path: Path) -> None:
    """A page with a script, a remote image, and a wide table: what the other tests look for is seen."""
    page = tmp_path / "bad.html"
    page.write_text(
        '<a href="#x"></a><a href="x.csv"></a><script>console.error("x")</script><img src="http://example.invalid/x.png"><pre>'
        + "wide " * 200
    )
    found = look_at(page, tmp_path / "profile", PHONE)
    assert (len(found["console"]), "http://example.invalid/x.png" in found["asked"], found["foreign"]) == (1, True, 1)
    assert found["page_width"] > PHONE
    assert found["followed"] == {"#x": 0, "x.csv": 0}
