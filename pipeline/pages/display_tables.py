"""Builds the tables for people: at most ten columns each, one unit a column, notes as numbered footnotes."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pipeline.experiment.outcomes import CollectedOutcomes
from pipeline.experiment.point_label import Processors, distinguishing_axes
from pipeline.pages.cells import Cell, CellColumn, DisplayTable, column_cells, format_value, lay_out, status_of
from pipeline.pages.footnotes import number_notes
from pipeline.pages.pivot_tables import build_pivots
from pipeline.pages.plot_data import note_on_number
from pipeline.pages.row_names import describe_common, name_columns, named_axes
from pipeline.tables.build_tables import Tables
from pipeline.tables.columns import Column, Table, View
from pipeline.tables.definitions import TABLES, in_order_of_grid
from pipeline.tables.row import Row

TABLES_WITHOUT_REMEDIES = ("Q1", "Q2", "Q3")
REMEDIES_ELSEWHERE = "Runs with remedies are in the tables of Q4 only."
MAX_COLUMNS = 10
MAX_WIDTH = 120  # characters of a row in Markdown
MAX_ROWS_UNFOLDED = 40
MAX_ROWS = 10_000  # a page with more is slow; the CSV files have all


class DisplayOptions(NamedTuple):
    """Options of the tables that are shown. `only` names one table; with `is_full` it has every column, however wide.

    `link_of` gives the address of a row's record.
    """

    max_width: int = MAX_WIDTH
    only: str = ""
    is_full: bool = False
    link_of: Callable[[Row], str] = lambda row: ""


class Report(NamedTuple):
    """What the tables of one report share: the options, the word for GPUs, and the labels of configurations."""

    options: DisplayOptions
    processors: Processors
    labels: dict[str, str]


def display_tables(
    tables: Tables, collected: CollectedOutcomes, options: DisplayOptions
) -> Iterator[tuple[str, DisplayTable]]:
    """Yield the tables that have rows, in order, each with its question."""
    is_full = options.is_full or options.only == "oom"
    report = Report(options._replace(is_full=is_full), collected.processors, {})
    has_remedies = any(row["remedies"] for row in tables["Q4"])
    for table in TABLES.values():
        if options.only not in ("", table.name):
            continue
        for view in [View(table.name, choose=in_order_of_grid)] if is_full else table.views:
            if has_remedies and table.name in TABLES_WITHOUT_REMEDIES:
                view = view._replace(legend=f"{view.legend} {REMEDIES_ELSEWHERE}".strip())
            if rows := view.choose(tables[table.name]):
                yield table.question, build_table(table, view, rows, report)
            if table.name == "Q2" and view.heading == table.views[0].heading:
                is_stated = any(outcome.record and not outcome.record.measured for outcome in collected.outcomes)
                pivots = build_pivots(rows, is_stated, report.processors, report.labels)
                yield from ((table.question, pivot) for pivot in pivots)


def build_table(table: Table, view: View, all_rows: Sequence[Row], report: Report) -> DisplayTable:
    """Return one view of a table."""
    rows, options = all_rows[:MAX_ROWS], report.options
    points = [named_axes(row) for row in rows]
    varying = distinguishing_axes(points, view.hidden_axes)
    if options.is_full:
        named, configurations = [axis_column(axis, rows) for axis in varying], ""
    else:
        named, configurations = name_columns(points, varying, report.labels)
    notes = number_notes(rows, view.hidden_notes)
    columns = columns_to_show(table, view, rows, options.is_full)
    main = next((column for column in columns if not column.is_set), columns[0])
    shown = [column_cells(column, rows, options.is_full) for column in columns]
    place = columns.index(main)
    shown[place] = shown[place]._replace(
        cells=[
            Cell(cell.text or status_of(row), cell.is_number, options.link_of(row), noted)
            for cell, row, noted in zip(shown[place].cells, rows, notes.numbers, strict=True)
        ]
    )
    if all(column.key != "n" for column in columns) and (view.is_over_seeds or any(row.n > 1 for row in rows)):
        named_last = [CellColumn(Cell("n", True), [Cell(f"{row.n}", True) for row in rows])]
    else:
        named_last = []
    numbers = [Cell(", ".join(map(str, noted))) for noted in notes.numbers]
    beside = [*named, *named_last, *([CellColumn(Cell("note"), numbers)] if notes.texts else [])]
    always = [index for index, column in enumerate(columns) if column is main or tells_apart(column, rows)]
    room = math.inf if options.is_full else options.max_width
    kept = columns_that_fit(shown, always, beside, room)
    omitted = [column for index, column in enumerate(shown) if index not in kept]
    said, left_out = describe_omitted(omitted)
    common = [describe_common(points, varying, view.hidden_axes), *said, *notes.shared]
    remarks = [columns[index].remark for index in kept]
    legend = (configurations, view.legend, *remarks, note_on_number(len(all_rows), MAX_ROWS, "rows"), left_out)
    return lay_out(
        [*named, *(shown[index] for index in kept), *named_last],
        view.heading,
        table.name,
        report.processors,
        footnotes=notes.texts,
        common="; ".join(filter(None, common)),
        legend=" ".join(filter(None, legend)),
        is_folded=view.is_folded or len(rows) > MAX_ROWS_UNFOLDED,
    )


def axis_column(axis: str, rows: Sequence[Row]) -> CellColumn:
    """Return the column of an axis by its key, for a full table."""
    return CellColumn(Cell(axis), [Cell(format_value(named_axes(row)[axis])) for row in rows])


def columns_to_show(table: Table, view: View, rows: Sequence[Row], is_full: bool) -> list[Column]:
    """Return the columns of a view that say something, in order of weight; of a full table all, by their keys."""
    if is_full:
        return [
            Column(column.key, f"{column.key} [{column.unit}]" if column.unit else column.key, "", is_set=column.is_set)
            for column in table.columns
            if column.key not in rows[0].axes and column.key != "remedies"
        ]
    wanted = [table.column(key) for key in view.keys] or [column for column in table.columns if column.heading]
    found = [column for column in wanted if is_known(column, rows, view.hides_zeros)]
    main = next((column for column in wanted if not column.is_set), wanted[0])
    return found if main in found else [main, *found]  # it holds the status and the footnotes


def is_known(column: Column, rows: Sequence[Row], hides_zeros: bool) -> bool:
    """True if some row has the figure and, if asked for, not 0; or if the column says why a row cannot have it."""
    values = [row[column.key] for row in rows]
    known = any(value is not None and (value or not hides_zeros) for value in values)
    return known or (column.absent is not None and any(map(column.absent, rows)))


def tells_apart(column: Column, rows: Sequence[Row]) -> bool:
    """True for a figure that follows from the grid and differs between rows: without it they cannot be told apart."""
    return column.is_set and len({repr(row[column.key]) for row in rows}) > 1


def columns_that_fit(
    columns: Sequence[CellColumn], always: Sequence[int], beside: Sequence[CellColumn], max_width: float
) -> list[int]:
    """Return the indices of the columns to show: `always`, then others in order while they fit."""
    kept = [*always]
    for index in range(len(columns)):
        wider = sorted({*kept, index})
        widths = [column.width for column in (*beside, *(columns[place] for place in wider))]
        fits = len(widths) <= MAX_COLUMNS and sum(widths) + 3 * len(widths) + 1 <= max_width
        kept = wider if fits or max_width == math.inf else kept
    return kept


def describe_omitted(columns: Sequence[CellColumn]) -> tuple[list[str], str]:
    """Return what omitted columns say if all rows have it, and the sentence that names the others."""
    said, others = [], []
    for heading, cells in columns:
        what, _, unit = heading.text.partition(" [")
        texts = {cell.text for cell in cells}
        if len(texts) == 1 and "" not in texts:
            said.append(" ".join(filter(None, (what, *texts, unit.rstrip("]")))))
        else:
            others.append(what)
    return said, f"Not shown for lack of room: {', '.join(others)}." if others else ""
