"""Builds the tables for people: at most ten columns each, one unit a column, notes as numbered footnotes."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.experiment.outcomes import CollectedOutcomes
from pipeline.experiment.point_label import EFFORT_AXES, Processors, describe_point, name_processors, varying_axes
from pipeline.report.build_tables import ROW_CLASSES, Tables
from pipeline.report.display_cells import (
    Cell,
    decimals_of,
    figure_cells,
    format_axis,
    status_of,
)
from pipeline.report.note_texts import FIGURE_WORDS, render_note
from pipeline.report.plot_data import note_on_number
from pipeline.report.row_types import Row
from pipeline.report.table_definitions import (
    EFFICIENCY,
    EPOCH_TIME,
    PIVOTS_AFTER,
    SPEEDUP,
    TABLE_DEFINITIONS,
    Figure,
    TableDefinition,
    full_definition,
    scaled,
)

TABLES_WITHOUT_REMEDIES = ("Q1", "Q2", "Q3")
REMEDIES_ELSEWHERE = "Runs with remedies are in the tables of Q4 only."
OWN_COLUMNS = {"strategy": "strategy", "num_gpus": "GPUs", "batch_size_per_gpu": "images per GPU"}
"""Axes that have a column if they vary; the others share one."""

STATED_KEYS = {"global_batch_size", "num_gpus", "from_num_gpus", "bucket", "num_bytes", "epoch", "epochs"}
STATED_KEYS |= {"num_updates", "learning_rate"}
"""Figures that follow from the grid, and were not measured."""

NUMBER = re.compile(r"(?<![\w.^/-])[+-]?\d[\d,]*(?:\.\d+)?(?![\w.,]*\w)")
MAX_COLUMNS = 10
MAX_WIDTH = 120  # characters of a row in Markdown
MAX_LABEL = 44  # characters of a configuration in a cell
MAX_LABEL_BESIDE_OTHERS = 24  # the same where a table names some below it, since those need room for figures
MAX_BATCH_SIZES = 7  # of one table by GPUs and batch size
MAX_ROWS_UNFOLDED = 40
MAX_ROWS = 10_000  # a page with more is slow; the CSV files have all


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


Column = tuple[Cell, list[Cell]]  # its heading and its cells


class ReportWords(NamedTuple):
    """The words of one report: what its points ran on, and a label for each configuration that is too long."""

    processors: Processors
    labels: dict[str, str]

    def name(self, text: str) -> str:
        """Return a text about GPUs with the word for what the points ran on."""
        return name_processors(text, self.processors)

    def label(self, configuration: str) -> str:
        """Return the label of a configuration: c1, c2, ... The same one in every table of the report."""
        return self.labels.setdefault(configuration, f"c{len(self.labels) + 1}")

    def name_definition(self, definition: TableDefinition) -> TableDefinition:
        """Return the definition with its texts in these words."""
        figures = tuple(
            figure._replace(heading=self.name(figure.heading), remark=self.name(figure.remark))
            for figure in definition.figures
        )
        heading, legend = self.name(definition.heading), self.name(definition.legend)
        return definition._replace(heading=heading, legend=legend, figures=figures)


class DisplayOptions(NamedTuple):
    """Options of the tables that are shown. `only` names one table; with `is_full` it has every column, however wide.

    `link_of` gives the address of a row's record.
    """

    max_width: int = MAX_WIDTH
    only: str = ""
    is_full: bool = False
    link_of: Callable[[Row], str] = lambda row: ""


def display_tables(
    tables: Tables, collected: CollectedOutcomes, options: DisplayOptions
) -> Iterator[tuple[str, DisplayTable]]:
    """Yield the tables that have rows, in order, each with its question."""
    words = ReportWords(processors_of(collected), {})
    has_remedies = any(row.remedies for row in tables.Q4)
    definitions: Iterable[TableDefinition] = TABLE_DEFINITIONS
    if options.is_full or options.only == "oom":
        definitions = (full_definition(name, row_class) for name, row_class in ROW_CLASSES.items())
    for definition in definitions:
        if options.only not in ("", definition.table):
            continue
        named = words.name_definition(definition)
        if has_remedies and definition.table in TABLES_WITHOUT_REMEDIES:
            named = named._replace(legend=f"{named.legend} {REMEDIES_ELSEWHERE}".strip())
        if table := build_table(named, getattr(tables, definition.table), options, words):
            yield definition.question, table
        if definition.heading == PIVOTS_AFTER:
            is_stated = any(outcome.record and not outcome.record.measured for outcome in collected.outcomes)
            yield from ((definition.question, pivot) for pivot in build_pivots(tables.Q2, is_stated, words))


def processors_of(collected: CollectedOutcomes) -> Processors:
    """Return what the points run on: GPUs, or processes if all are of the CPU."""
    devices = {outcome.spec.device for outcome in collected.outcomes}
    return "processes" if devices == {"cpu"} else "GPUs"


def build_table(
    definition: TableDefinition,
    all_rows: Sequence[Row],
    options: DisplayOptions,
    words: ReportWords,
) -> DisplayTable | None:
    """Return one table, None if it has no rows."""
    chosen = definition.choose(all_rows)
    rows = chosen[:MAX_ROWS]
    if not rows:
        return None
    points = [row.axes | remedies_of(row) for row in rows]
    varying, strategies = without_strategy(points, naming_axes(points, definition.hidden))
    main = main_figure(definition.figures)
    figures = [figure for figure in definition.figures if is_shown(figure, rows, definition.hides_zeros)]
    if main not in figures and any(map(status_of, rows)):
        figures.insert(0, main)
    footnotes, numbers, shared_notes = number_notes(rows, definition.without_notes)
    named, configurations = full_columns(points, varying), ""
    if not definition.is_full:
        named, configurations = shorten_labels(label_columns(points, varying, words), words)
    shown = []
    for figure in figures:
        cells = figure_cells(figure, rows, None if definition.is_full else decimals_of(figure, rows))
        if figure is main:
            cells = [
                Cell(cell.text or status_of(row), cell.is_number, options.link_of(row), noted)
                for cell, row, noted in zip(cells, rows, numbers, strict=True)
            ]
        shown.append((Cell(figure.heading, cells[0].is_number), cells))
    repeats: list[Column] = []
    has_n = any(figure.key == "n" for figure in figures)
    if not has_n and (definition.is_over_seeds or any(row.n > 1 for row in rows)):
        repeats = [(Cell("n", True), [Cell(f"{row.n}", True) for row in rows])]
    most = math.inf if definition.is_full else options.max_width
    taken = [*map(width_of, (*named, *repeats)), *([width_of(note_column(numbers))] if any(numbers) else [])]
    widths = [width_of(column) for column in shown]
    kept = [index for index, figure in enumerate(figures) if figure is main]
    for index in range(len(shown)):
        wider = sorted({*kept, index})
        kept = wider if fits([*taken, *(widths[place] for place in wider)], most) else kept
    columns = [*named, *(shown[index] for index in kept), *repeats]
    common = "; ".join(filter(None, [describe_common(points, varying, definition.hidden), strategies, *shared_notes]))
    omitted = ", ".join(column[0].text.partition(" [")[0] for index, column in enumerate(shown) if index not in kept)
    room = f"Not shown for lack of room: {omitted}." if omitted else ""
    remarks = [figure.remark for figure in figures]
    legend = (configurations, definition.legend, *remarks, note_on_number(len(chosen), MAX_ROWS, "rows"), room)
    return DisplayTable(
        heading=definition.heading,
        columns=[heading for heading, _ in columns],
        rows=[list(cells) for cells in zip(*(cells for _, cells in columns), strict=True)],
        footnotes=[words.name(note) for note in footnotes],
        common=words.name(common),
        legend=" ".join(filter(None, legend)),
        source=f"{definition.table.lower()}.csv",
        is_folded=definition.is_folded or len(rows) > MAX_ROWS_UNFOLDED,
    )


def is_shown(figure: Figure, rows: Sequence[Row], hides_zeros: bool) -> bool:
    """True if the figure is known for some row, and, if asked for, is not 0; or if it is named as absent."""
    known = any(row[figure.key] is not None and (row[figure.key] or not hides_zeros) for row in rows)
    return known or (figure.absent is not None and any(map(figure.absent, rows)))


def build_pivots(all_rows: Sequence[Row], is_stated: bool, words: ReportWords) -> list[DisplayTable]:
    """Return time, speed-up and efficiency of weak scaling by GPUs and batch size, as published reports print them.

    For a report that was ingested (`is_stated`) also T(2)/T(4) and N x T(1)/T(N), its own terms.
    """
    rows = scaled("weak", "batch_size_per_gpu")(all_rows)
    compared = {row["batch_size_per_gpu"] for row in rows if row["num_gpus"] > 1 and row["baseline"]}
    sizes = sorted(compared)
    if not 1 < len(sizes) <= 2 * MAX_BATCH_SIZES:
        return []
    figures = (EPOCH_TIME, SPEEDUP, EFFICIENCY)
    shown = [(figure, {id(row): figure.value(row) for row in rows}) for figure in figures]
    if is_stated:
        shown += [(Figure("N x T(1)/T(N)", "speedup"), {id(row): scaled_speedup(row) for row in rows})]
        shown += [(Figure("T(2)/T(4)", "speedup"), two_over_four(rows))]
    tables = []
    for figure, values in shown:
        is_known = any(value is not None for value in values.values())
        wanted = [row for row in rows if id(row) in values and (row["num_gpus"] > 1 or figure is EPOCH_TIME)]
        wanted = wanted if is_known else []
        for first in range(0, len(sizes), MAX_BATCH_SIZES):
            part = [row for row in wanted if row["batch_size_per_gpu"] in sizes[first : first + MAX_BATCH_SIZES]]
            if part:
                tables.append(pivot(figure, values, part, words))
    return tables


def scaled_speedup(row: Row) -> float | None:
    """Return N x T(1)/T(N)."""
    return row["num_gpus"] * row["speedup"] if row["speedup"] is not None else None


def two_over_four(rows: Sequence[Row]) -> dict[int, float | None]:
    """Return T(2)/T(4) of the rows on four GPUs that have one on two, by the row's id."""

    def key(row: Row, num_gpus: int) -> str:
        return repr(
            {axis: value for axis, value in row.axes.items() if axis not in EFFORT_AXES} | {"num_gpus": num_gpus}
        )

    times = {key(row, row["num_gpus"]): row["epoch_time_s"] for row in rows}
    found = {id(row): (times.get(key(row, 2)), row["epoch_time_s"]) for row in rows if row["num_gpus"] == 4}
    return {row: on_two / on_four for row, (on_two, on_four) in found.items() if on_two and on_four}


def pivot(figure: Figure, values: Mapping[int, float | None], rows: Sequence[Row], words: ReportWords) -> DisplayTable:
    """Return one figure by batch size (columns) and by all else that varies (rows). `values` are by row id."""
    points = [row.axes for row in rows]
    found = naming_axes(points, hidden=("batch_size_per_gpu",))
    varying = [axis for axis in points[0] if axis == "num_gpus" or axis in found]
    sizes = sorted({row["batch_size_per_gpu"] for row in rows})
    lines: dict[str, dict[int, str]] = {}
    first: dict[str, Mapping[str, Any]] = {}
    decimals = 3 if figure.key == "speedup" else decimals_of(figure, rows)
    for row, point in zip(rows, points, strict=True):
        name = repr([point[axis] for axis in varying])
        value = values[id(row)]
        text = status_of(row) if row["epoch_time_s"] is None else "" if value is None else f"{value:,.{decimals}f}"
        first.setdefault(name, point)
        lines.setdefault(name, {})[row["batch_size_per_gpu"]] = text
    named, configurations = shorten_labels(label_columns(list(first.values()), varying, words), words)
    named += [(Cell(f"{size:,}", True), [Cell(line.get(size, ""), True) for line in lines.values()]) for size in sizes]
    return DisplayTable(
        heading=words.name(f"Q2: {figure.heading} by GPUs and images per GPU (weak scaling)"),
        columns=[heading for heading, _ in named],
        rows=[list(cells) for cells in zip(*(cells for _, cells in named), strict=True)],
        footnotes=[],
        common="",
        legend=configurations,
        source="q2.csv",
        is_folded=False,
    )


def naming_axes(points: Sequence[Mapping[str, Any]], hidden: Sequence[str]) -> list[str]:
    """Return the axes that name the points: those that vary, length and place of a run only where points need them."""
    every, plain = varying_axes(points), varying_axes(points, without=EFFORT_AXES)
    numbers = [len({repr([point[axis] for axis in axes]) for point in points}) for axes in (plain, every)]
    return [axis for axis in (plain if numbers[0] == numbers[1] else every) if axis not in hidden]


def without_strategy(points: Sequence[Mapping[str, Any]], varying: list[str]) -> tuple[list[str], str]:
    """Return the axes that name the points, and in words the strategies where the number of GPUs tells them.

    Tables with remedies lack room, so there the strategy loses its column if each number of GPUs has one strategy.
    """
    if not {"strategy", "num_gpus", "remedies"} <= {*varying}:
        return varying, ""
    names = {describe_point(point, ("strategy", "num_gpus")): point["num_gpus"] for point in points}
    is_told = len(names) == len({*names.values()})
    return ([axis for axis in varying if axis != "strategy"], " or ".join(names)) if is_told else (varying, "")


def label_columns(points: Sequence[Mapping[str, Any]], varying: Sequence[str], words: ReportWords) -> list[Column]:
    """Return the columns that name the points: strategy, GPUs and batch size, and one for all else that varies."""
    own = [axis for axis in OWN_COLUMNS if axis in varying]
    others = [axis for axis in varying if axis not in OWN_COLUMNS]
    columns: list[Column] = []
    for axis in own:
        is_number = axis != "strategy"
        cells = [Cell(format_axis(point[axis]), is_number) for point in points]
        columns.append((Cell(words.name(OWN_COLUMNS[axis]), is_number), cells))
    if others:
        heading = others[0] if len(others) == 1 else "configuration"
        named = (describe_point(point, others) or format_axis(point[others[0]]) for point in points)
        columns.append((Cell(heading), [Cell(words.name(name)) for name in named]))
    return columns


def shorten_labels(columns: Sequence[Column], words: ReportWords) -> tuple[list[Column], str]:
    """Return the columns with labels for long configurations, if one is too long, and a sentence that explains them."""
    *others, (heading, cells) = columns or [(Cell(""), [])]
    if max((len(cell.text) for cell in cells), default=0) <= MAX_LABEL:
        return list(columns), ""
    long = {cell.text for cell in cells if len(cell.text) > MAX_LABEL_BESIDE_OTHERS}
    labels = [words.label(cell.text) if cell.text in long else cell.text for cell in cells]
    explained = "; ".join(f"{label} = {text}" for text, label in words.labels.items() if text in long)
    return [*others, (heading, [Cell(label) for label in labels])], f"Configurations: {explained}."


def full_columns(points: Sequence[Mapping[str, Any]], varying: Sequence[str]) -> list[Column]:
    """Return a column for each axis that varies, by its key."""
    return [(Cell(axis), [Cell(format_axis(point[axis])) for point in points]) for axis in varying]


def width_of(column: Column) -> int:
    """Return the characters of a column in Markdown."""
    heading, cells = column
    return max(3, len(heading.text), *(len(cell.text) for cell in cells))


def note_column(numbers: Iterable[Sequence[int]]) -> Column:
    """Return the column with the numbers of each row's footnotes."""
    return Cell("note"), [Cell(", ".join(map(str, noted))) for noted in numbers]


def fits(widths: Sequence[int], max_width: float) -> bool:
    """True if a table with columns of these widths is neither too long nor too wide."""
    return max_width == math.inf or (len(widths) <= MAX_COLUMNS and sum(widths) + 3 * len(widths) + 1 <= max_width)


def number_notes(
    rows: Sequence[Row], without: tuple[str, ...] = ()
) -> tuple[list[str], list[tuple[int, ...]], list[str]]:
    """Return the footnotes, the numbers of each row's, and the notes that all of several rows share.

    Notes that differ in numbers only are one footnote, which states their range. Those whose kind begins with one of
    `without` are left out.
    """
    said = (
        [render_note(note, FIGURE_WORDS) for note in row.notes if not note.kind.startswith(without)] for row in rows
    )
    found = [[(NUMBER.sub("#", text), text) for text in texts] for texts in said]
    texts: dict[str, list[str]] = {}
    for pattern, text in (pair for notes in found for pair in notes):
        texts.setdefault(pattern, []).append(text)
    patterns = [{pattern for pattern, _ in notes} for notes in found]
    shared = set.intersection(*patterns) if len(rows) > 1 else set()
    numbers = {pattern: number for number, pattern in enumerate((key for key in texts if key not in shared), 1)}
    merged = {pattern: merge_texts(same) for pattern, same in texts.items()}
    of_rows = [tuple(sorted(numbers[pattern] for pattern in own if pattern in numbers)) for own in patterns]
    said_once = [text for pattern, text in merged.items() if pattern in shared]
    return [merged[pattern] for pattern in numbers], of_rows, said_once


def merge_texts(texts: Iterable[str]) -> str:
    """Return the one sentence of several that differ in numbers only: with the smallest and the largest of each."""
    distinct = list(dict.fromkeys(texts))
    columns = zip(*(NUMBER.findall(text) for text in distinct), strict=True)
    ends = iter([sorted(set(column), key=lambda number: float(number.replace(",", ""))) for column in columns])

    def give_range(match: re.Match[str]) -> str:
        values = next(ends)
        return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"

    return NUMBER.sub(give_range, distinct[0])


def remedies_of(row: Row) -> dict[str, Any]:
    """Return the remedies as an axis, for the rows that have them as a figure."""
    return {"remedies": row["remedies"]} if "remedies" in type(row).__struct_fields__ else {}


def main_figure(figures: Sequence[Figure]) -> Figure:
    """Return the figure that links to the record and holds the status: the first that was measured."""
    return next((figure for figure in figures if figure.key not in STATED_KEYS), figures[0])


def describe_common(points: Sequence[Mapping[str, Any]], varying: Sequence[str], hidden: Sequence[str]) -> str:
    """Return what all rows share, in words."""
    without = (*varying, *hidden, *(axis for axis in EFFORT_AXES if axis != "epochs"))
    same = (axis for axis, value in points[0].items() if axis not in without and value not in (False, []))
    return describe_point(points[0], [axis for axis in same if all(point[axis] == points[0][axis] for point in points)])
