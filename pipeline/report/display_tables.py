"""Builds the tables for people: at most ten columns each, one unit a column, notes as numbered footnotes.

Time, speed-up and efficiency also stand by GPUs and batch size, as published reports print them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pipeline.experiment.outcomes import CollectedOutcomes
from pipeline.experiment.point_label import EFFORT_AXES, Terms, distinguishing_axes, format_number
from pipeline.report import cells
from pipeline.report.cells import DisplayColumn, DisplayTable
from pipeline.report.columns import EFFICIENCY, EPOCH_TIME, SPEEDUP
from pipeline.report.plot_data import note_on_number
from pipeline.report.table import Column, Row, Table, Tables, View
from pipeline.report.tables import TABLES

TABLES_WITHOUT_REMEDIES = ("Q1", "Q2", "Q3")
REMEDIES_ELSEWHERE = "Runs with remedies are in the tables of Q4 only."
MAX_COLUMNS = 10
MAX_WIDTH = 120  # characters of a row in Markdown
MAX_ROWS_UNFOLDED = 40
MAX_ROWS = 10_000  # a page with more is slow; the CSV files have all
MAX_BATCH_SIZES = 7  # of one table by GPUs and batch size
N_TIMES_SPEEDUP = SPEEDUP._replace(heading="N x T(1)/T(N)")
TWO_OVER_FOUR = SPEEDUP._replace(heading="T(2)/T(4)")


class DisplayOptions(NamedTuple):
    """Options of the tables that are shown. `only` names one table; with `is_full` it has every column, however wide.

    `link_of` gives the address of a row's point, `terms` the word for what the points ran on.
    """

    max_width: int = MAX_WIDTH
    only: str = ""
    is_full: bool = False
    link_of: Callable[[Row], str] = lambda row: ""
    terms: Terms = Terms()


def display_tables(
    tables: Tables, collected: CollectedOutcomes, options: DisplayOptions
) -> Iterator[tuple[str, DisplayTable]]:
    """Yield the tables that have rows, in order, each with its question."""
    options = options._replace(is_full=options.is_full or options.only == "oom", terms=collected.terms)
    for table in TABLES.values():
        if options.only not in ("", table.name):
            continue
        for view in [View(table.name, choose=list)] if options.is_full else table.views:
            if table.name in TABLES_WITHOUT_REMEDIES and any(row["remedies"] for row in tables["Q4"]):
                view = view._replace(legend=f"{view.legend} {REMEDIES_ELSEWHERE}".strip())
            shown = []
            if rows := view.choose(tables[table.name]):
                shown.append(build_table(table, view, rows, options))
            if table.name == "Q2" and view.heading == table.views[0].heading:
                is_stated = any(not record.measured for record in collected.records)
                shown += build_pivots(rows, is_stated)
            yield from ((table.question, cells.name_texts(part, collected.terms)) for part in shown)


def build_table(table: Table, view: View, all_rows: Sequence[Row], options: DisplayOptions) -> DisplayTable:
    """Return a table before its texts are named by the terms, with the columns that have room once they are."""
    rows = all_rows[:MAX_ROWS]
    points = [cells.named_axes(row) for row in rows]
    varying = distinguishing_axes(points, view.hidden_axes)
    if options.is_full:
        by_key = ((axis, [cells.format_value(point[axis]) for point in points]) for axis in varying)
        named, configurations = [DisplayColumn(axis, values, "text") for axis, values in by_key], ""
    else:
        named, configurations = cells.name_columns(points, varying)
    notes = cells.number_notes(rows, view.hidden_notes)
    columns = columns_to_show(table, view, rows, options.is_full)
    main = next((index for index, column in enumerate(columns) if not column.is_set), 0)
    shown = [cells.display_column(column, rows, options.is_full) for column in columns]
    texts = [text or cells.status_of(row) for text, row in zip(shown[main].cells, rows, strict=True)]
    shown[main] = shown[main]._replace(cells=texts, links=list(map(options.link_of, rows)))
    shows_n = view.shows_n or any(row.n > 1 for row in rows)
    beside = [DisplayColumn("n", [f"{row.n:,}" for row in rows])] if shows_n else []
    beside += [cells.note_column(notes.numbers)] if notes.texts else []
    kept = [*range(len(columns))]
    if not options.is_full:
        always = [index for index, column in enumerate(columns) if index == main or tells_apart(column, rows)]
        texts, *texts_beside = (cells.name_texts(part, options.terms) for part in (shown, named, beside))
        least = [column for part in texts_beside for column in part] + [texts[index] for index in always]
        if not fits(least, options.max_width):
            named = [column._replace(heading=column.heading.removeprefix("images ")) for column in named]
            texts_beside[0] = cells.name_texts(named, options.terms)
        kept = columns_that_fit(texts, [*texts_beside[0], *texts_beside[1]], always, options.max_width)
    said, left_out = describe_omitted([column for index, column in enumerate(shown) if index not in kept])
    common = [cells.describe_common(points, varying, view.hidden_axes), *said, *notes.shared]
    remarks = [columns[index].remark for index in kept]
    legend = (configurations, view.legend, *remarks, note_on_number(len(all_rows), MAX_ROWS, "rows"), left_out)
    return DisplayTable(
        view.heading,
        [*named, *(shown[index] for index in kept), *beside],
        notes.texts,
        common="; ".join(filter(None, common)),
        legend=" ".join(filter(None, legend)),
        source=table.name,
        is_folded=view.is_folded or len(rows) > MAX_ROWS_UNFOLDED,
        badges=notes.words,
    )


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
    columns: Sequence[DisplayColumn], beside: Sequence[DisplayColumn], always: Sequence[int], max_width: int
) -> list[int]:
    """Return the indices of the columns to show: `always`, then others in order while they fit."""
    kept = [*always]
    for index in range(len(columns)):
        wider = sorted({*kept, index})
        kept = wider if fits([*beside, *(columns[place] for place in wider)], max_width) else kept
    return kept


def fits(columns: Sequence[DisplayColumn], max_width: int) -> bool:
    widths = [column.width for column in columns]
    return len(widths) <= MAX_COLUMNS and sum(widths) + 3 * len(widths) + 1 <= max_width


def describe_omitted(columns: Sequence[DisplayColumn]) -> tuple[list[str], str]:
    """Return what omitted columns say if all rows have it, and the sentence that names the others."""
    said, others = [], []
    for column in columns:
        what, _, unit = column.heading.partition(" [")
        texts = set(column.cells)
        if len(texts) == 1 and "" not in texts:
            said.append(" ".join(filter(None, (what, *texts, unit.rstrip("]")))))
        else:
            others.append(what)
    return said, f"Not shown for lack of room: {', '.join(others)}." if others else ""


def build_pivots(rows: Sequence[Row], is_stated: bool) -> Iterator[DisplayTable]:
    """Yield time, speed-up and efficiency of rows of weak scaling by GPUs and batch size.

    For a report that was ingested (`is_stated`) also N x T(1)/T(N) and T(2)/T(4), its own terms.
    """
    sizes = sorted({row["batch_size_per_gpu"] for row in rows if row["num_gpus"] > 1 and row["baseline"]})
    if not 1 < len(sizes) <= 2 * MAX_BATCH_SIZES:
        return
    pivots = [(column, [(row, row[column.key]) for row in rows]) for column in (EPOCH_TIME, SPEEDUP, EFFICIENCY)]
    if is_stated:
        scaled = [(row, row["speedup"] and row["num_gpus"] * row["speedup"]) for row in rows]
        pivots += [(N_TIMES_SPEEDUP, scaled), (TWO_OVER_FOUR, two_over_four(rows))]
    for column, values in pivots:
        if all(value is None for _, value in values):
            continue
        wanted = [pair for pair in values if column is EPOCH_TIME or pair[0]["num_gpus"] > 1]
        for first in range(0, len(sizes), MAX_BATCH_SIZES):
            shown = sizes[first : first + MAX_BATCH_SIZES]
            if part := [pair for pair in wanted if pair[0]["batch_size_per_gpu"] in shown]:
                yield pivot(column, part)


def two_over_four(rows: Sequence[Row]) -> list[tuple[Row, float | None]]:
    """Return T(2)/T(4) of the rows on four GPUs; None without a row on two."""

    def key(row: Row) -> str:
        return repr({axis: value for axis, value in row.axes.items() if axis not in EFFORT_AXES} | {"num_gpus": 2})

    on_two = {key(row): row["epoch_time_s"] for row in rows if row["num_gpus"] == 2}
    on_four = [(row, on_two.get(key(row)), row["epoch_time_s"]) for row in rows if row["num_gpus"] == 4]
    return [(row, two_s / four_s if two_s and four_s else None) for row, two_s, four_s in on_four]


def pivot(column: Column, values: Sequence[tuple[Row, float | None]]) -> DisplayTable:
    """Return one figure by batch size (columns) and by all else that varies (rows)."""
    rows = [row for row, _ in values]
    found = distinguishing_axes([row.axes for row in rows], known=("batch_size_per_gpu",))
    varying = [axis for axis in rows[0].axes if axis == "num_gpus" or axis in found]
    decimals = 3 if column.key == "speedup" else cells.decimals_of(column, rows)
    points: dict[str, cells.Axes] = {}
    lines: dict[str, dict[int, str]] = {}
    for row, value in values:
        name = repr([row[axis] for axis in varying])
        known = "" if value is None else format_number(column.factor * value, f",.{decimals}f")
        text = cells.status_of(row) if row["epoch_time_s"] is None else known
        points.setdefault(name, row.axes)
        lines.setdefault(name, {})[row["batch_size_per_gpu"]] = text
    columns, configurations = cells.name_columns(list(points.values()), varying)
    for size in sorted({row["batch_size_per_gpu"] for row in rows}):
        columns.append(DisplayColumn(f"{size:,}", [line.get(size, "") for line in lines.values()]))
    heading = f"Q2: {column.heading} by GPUs and images per GPU (weak scaling)"
    return DisplayTable(heading, columns, legend=configurations, source="Q2", is_folded=True)
