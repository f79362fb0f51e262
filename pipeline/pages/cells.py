"""Cells of tables for people: numbers in the decimals of their column, words for values and for missing ones."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.analysis.intervals import ends_of
from pipeline.experiment.point_label import Processors, format_number, name_processors
from pipeline.tables.columns import NOT_STATED, Column
from pipeline.tables.row import Row

STATUS_WORDS = {"oom": "OOM", "failed": "failed", "missing": "missing", "rejected": "rejected"}


class Cell(NamedTuple):
    """A cell: its text, the address that it links to, and the numbers of its footnotes."""

    text: str
    is_number: bool = False
    href: str = ""
    footnotes: tuple[int, ...] = ()


class CellColumn(NamedTuple):
    """A column of a table for people: its heading and its cells."""

    heading: Cell
    cells: list[Cell]

    @property
    def width(self) -> int:
        """The characters of the column in Markdown."""
        return max(3, len(self.heading.text), *(len(cell.text) for cell in self.cells))


class DisplayTable(NamedTuple):
    """A table for people. `common` is what all rows share; `source` is the CSV file with every column."""

    heading: str
    columns: list[Cell]
    rows: list[list[Cell]]
    footnotes: list[str]
    common: str
    legend: str
    source: str
    is_folded: bool


def lay_out(
    columns: Sequence[CellColumn], heading: str, source: str, processors: Processors, **texts: Any
) -> DisplayTable:
    """Return the table of these columns, with the word for what its points ran on in every text."""

    def name(text: str) -> str:
        return name_processors(text, processors)

    return DisplayTable(
        heading=name(heading),
        columns=[column.heading._replace(text=name(column.heading.text)) for column in columns],
        rows=[list(cells) for cells in zip(*(column.cells for column in columns), strict=True)],
        footnotes=[name(note) for note in texts.get("footnotes", ())],
        common=name(texts.get("common", "")),
        legend=name(texts.get("legend", "")),
        source=f"{source.lower()}.csv",
        is_folded=texts.get("is_folded", False),
    )


def status_of(row: Row) -> str:
    """Return why a row has no main figure: its status, or that training diverged."""
    if row.figures.get("diverged_at_update") is not None:
        return f"diverged at update {row['diverged_at_update']}"
    return STATUS_WORDS.get(row.status, "")


def format_value(value: Any) -> str:
    """Return a value that is no measured number."""
    if isinstance(value, list):
        return " + ".join(map(str, value)) or "none"
    return f"{value:,}" if type(value) is int else NOT_STATED if value is None else str(value)


def decimals_of(column: Column, rows: Sequence[Row]) -> int:
    """Return the decimals of a column: four digits of its smallest value, if its unit allows; none for counts."""
    known = [row[column.key] for row in rows if row[column.key] is not None and not isinstance(row[column.key], str)]
    sizes = [abs(column.factor * value) for value in known if value and math.isfinite(value)]
    if not sizes or (column.factor == 1 and all(isinstance(value, int) for value in known)):
        return 0
    most = column.max_decimals
    return min(max(max(most, 3) - math.floor(math.log10(min(sizes))), 0), most)


def column_cells(column: Column, rows: Sequence[Row], is_full: bool = False) -> CellColumn:
    """Return the cells of a column; those of a full table have up to six digits."""
    is_number = not any(isinstance(row[column.key], str | list) for row in rows)
    decimals = None if is_full else decimals_of(column, rows)
    cells = [Cell(format_cell(column, row, decimals), is_number) for row in rows]
    return CellColumn(Cell(column.heading, is_number), cells)


def format_cell(column: Column, row: Row, decimals: int | None) -> str:
    """Return the number, with its interval if the column shows it; empty if it is not known, and why if a note says.

    Minimum and maximum of one run are no interval. A number that noise hides is "<" and the noise.
    """
    value = row[column.key]
    if value is None:
        is_unstated = any(note.kind == "not_stated" and column.key in note.values["figures"] for note in row.notes)
        return NOT_STATED if is_unstated else column.absent(row) if column.absent else ""
    if isinstance(value, str | list | bool):
        return column.words.get(str(value)) or format_value(value)
    noise, shown = getattr(value, "noise", None), column.factor * value
    if noise is not None and decimals is not None:
        return f"<{column.factor * noise:.3g}"
    if column.is_set and isinstance(value, float) and column.factor == 1:
        return f"{value:.6g}"  # as it was set
    if decimals is None or not math.isfinite(shown) or abs(shown) >= 1e9:
        return f"{shown:.6g}" if decimals is None else f"{shown:.3g}"
    if 0 < shown < 10**-decimals / 2:
        return f"<{10**-decimals:.{decimals}f}"
    low, high = ends_of(value) if column.shows_interval else (None, None)
    text, *ends = (
        format_number(column.factor * part, f",.{decimals}f") for part in (value, low, high) if part is not None
    )
    return f"{text} ({' to '.join(ends)})" if ends and not (row.n == 1 and low == high) else text
