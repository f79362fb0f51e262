"""Builds the tables for people: at most ten columns each, one unit a column, notes as numbered footnotes."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.analysis.notes import Note
from pipeline.experiment.outcomes import CollectedOutcomes
from pipeline.experiment.point_label import ALL_REMEDIES, Processors
from pipeline.experiment.spec import REMEDIES
from pipeline.report.build_tables import ROW_CLASSES, Tables
from pipeline.report.display_cells import Cell, DisplayTable, decimals_of, figure_cells, status_of
from pipeline.report.display_labels import (
    Column,
    ReportWords,
    describe_common,
    full_columns,
    label_columns,
    naming_axes,
    remedies_of,
    shorten_labels,
    without_strategy,
)
from pipeline.report.note_texts import FIGURE_WORDS, render_note
from pipeline.report.pivot_tables import build_pivots
from pipeline.report.plot_data import note_on_number
from pipeline.report.row_types import Row
from pipeline.report.table_definitions import (
    PIVOTS_AFTER,
    TABLE_DEFINITIONS,
    TARGET_HEADING,
    Figure,
    TableDefinition,
    full_definition,
)

TABLES_WITHOUT_REMEDIES = ("Q1", "Q2", "Q3")
REMEDIES_ELSEWHERE = "Runs with remedies are in the tables of Q4 only."
STATED_KEYS = {"global_batch_size", "num_gpus", "from_num_gpus", "bucket", "num_bytes", "epoch", "epochs"}
STATED_KEYS |= {"num_updates", "learning_rate", "stage", "scale_rule", "granularity"}
"""Figures that follow from the grid, and were not measured."""

NAMING_KEYS = {"global_batch_size", "epoch"}  # figures without which rows cannot be told apart
NUMBER = re.compile(r"(?<![\w.^/-])[+-]?\d[\d,]*(?:\.\d+)?(?![\w.,]*\w)")
MAX_COLUMNS = 10
MAX_WIDTH = 120  # characters of a row in Markdown
MAX_ROWS_UNFOLDED = 40
MAX_ROWS = 10_000  # a page with more is slow; the CSV files have all


NotePattern = tuple[Any, ...]


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
    points = [row.axes if definition.is_full else row.axes | remedies_of(row) for row in rows]
    varying, strategies = naming_axes(points, definition.hidden), ""
    if not definition.is_full:
        varying, strategies = without_strategy(points, varying)
    main = main_figure(definition.figures)
    figures = [figure for figure in definition.figures if is_shown(figure, rows, definition.hides_zeros)]
    if main not in figures:  # it holds the status and the footnotes
        figures.insert(0, main)
    footnotes, numbers, shared_notes = number_notes(rows, definition.without_notes)
    named, configurations = name_rows(definition, rows, points, varying, words)
    shown = [figure_column(figure, rows, definition.is_full) for figure in figures]
    if main in figures:
        place = figures.index(main)
        shown[place] = linked_column(shown[place], rows, numbers, options)
    repeats = count_column(definition, figures, rows)
    most = math.inf if definition.is_full else options.max_width
    taken = [*map(width_of, (*named, *repeats)), *([width_of(note_column(numbers))] if any(numbers) else [])]
    always = [index for index, figure in enumerate(figures) if figure is main or figure.key in NAMING_KEYS]
    kept = columns_that_fit([width_of(column) for column in shown], always, taken, most)
    columns = [*named, *(shown[index] for index in kept), *repeats]
    omitted = [column for index, column in enumerate(shown) if index not in kept]
    headings = ", ".join(heading.text.partition(" [")[0] for heading, _ in omitted)
    room = f"Not shown for lack of room: {headings}." if omitted else ""
    shared = [describe_common(points, varying, definition.hidden), strategies, describe_target(omitted), *shared_notes]
    common = "; ".join(filter(None, shared))
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


def tell_apart(named: list[Column], figures: Sequence[Figure], rows: Sequence[Row]) -> list[Column]:
    """Return the columns that name the rows, with the learning rate in the last where rows of a name differ in it."""
    if not named or all(figure.key != "learning_rate" for figure in figures):
        return named
    names = [(*(cells[place].text for _, cells in named), row["global_batch_size"]) for place, row in enumerate(rows)]
    rates: dict[Any, set[Any]] = {}
    for name, row in zip(names, rows, strict=True):
        rates.setdefault(name, set()).add(row["learning_rate"])
    *others, (heading, cells) = named
    told = [
        cell._replace(text=f"{cell.text}, rate {row['learning_rate']:.3g}") if len(rates[name]) > 1 else cell
        for cell, name, row in zip(cells, names, rows, strict=True)
    ]
    return [*others, (heading, told)]


def describe_target(omitted: Sequence[Column]) -> str:
    """Return the target accuracy in words if its column was left out and all rows have the same; else nothing."""
    targets = {cell.text for heading, cells in omitted if heading.text == TARGET_HEADING for cell in cells}
    return f"target {targets.pop()} %" if len(targets) == 1 else ""


def name_rows(
    definition: TableDefinition,
    rows: Sequence[Row],
    points: Sequence[Mapping[str, Any]],
    varying: Sequence[str],
    words: ReportWords,
) -> tuple[list[Column], str]:
    """Return the columns that name the rows, and the sentences that explain their labels."""
    if definition.is_full:
        return full_columns(points, varying), ""
    columns = tell_apart(label_columns(points, varying, words), definition.figures, rows)
    named, explained = shorten_labels(columns, words)
    texts = (explained, *(cell.text for _, cells in named for cell in cells))
    if any(ALL_REMEDIES in text for text in texts):
        explained = f"{explained} All remedies: {', '.join(REMEDIES)}.".strip()
    return named, explained


def figure_column(figure: Figure, rows: Sequence[Row], is_full: bool) -> Column:
    """Return the column of a figure, with every digit if `is_full`."""
    cells = figure_cells(figure, rows, None if is_full else decimals_of(figure, rows))
    return Cell(figure.heading, cells[0].is_number), cells


def linked_column(
    column: Column, rows: Sequence[Row], numbers: Sequence[tuple[int, ...]], options: DisplayOptions
) -> Column:
    """Return the column of the main figure: with the row's status where it has none, its record and its footnotes."""
    heading, cells = column
    return heading, [
        Cell(cell.text or status_of(row), cell.is_number, options.link_of(row), noted)
        for cell, row, noted in zip(cells, rows, numbers, strict=True)
    ]


def count_column(definition: TableDefinition, figures: Sequence[Figure], rows: Sequence[Row]) -> list[Column]:
    """Return the column n, the number of pooled runs; none where the figures hold it or all rows have one."""
    is_shown_already = any(figure.key == "n" for figure in figures)
    if is_shown_already or not (definition.is_over_seeds or any(row.n > 1 for row in rows)):
        return []
    return [(Cell("n", True), [Cell(f"{row.n}", True) for row in rows])]


def columns_that_fit(widths: Sequence[int], always: Sequence[int], taken: Sequence[int], max_width: float) -> list[int]:
    """Return the places of the columns that there is room for beside those `taken`: `always`, then the first ones."""
    kept = [*always]
    for index in range(len(widths)):
        wider = sorted({*kept, index})
        kept = wider if fits([*taken, *(widths[place] for place in wider)], max_width) else kept
    return kept


def is_shown(figure: Figure, rows: Sequence[Row], hides_zeros: bool) -> bool:
    """True if the figure is known for some row, and, if asked for, is not 0; or if it is named as absent or noise."""
    known = any(row[figure.key] is not None and (row[figure.key] or not hides_zeros) for row in rows)
    is_noise = any(figure.noise_of(row) is not None for row in rows)
    return known or is_noise or (figure.absent is not None and any(map(figure.absent, rows)))


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

    Notes that differ in quantities only are one footnote, which states their range. Those whose kind begins with one
    of `without` are left out.
    """
    noted = ([note for note in row.notes if not note.kind.startswith(without)] for row in rows)
    found = [[(note_pattern(note), render_note(note, FIGURE_WORDS)) for note in notes] for notes in noted]
    texts: dict[NotePattern, list[str]] = {}
    for pattern, text in (pair for notes in found for pair in notes):
        texts.setdefault(pattern, []).append(text)
    patterns = [{pattern for pattern, _ in notes} for notes in found]
    shared = set.intersection(*patterns) if len(rows) > 1 else set()
    numbers = {pattern: number for number, pattern in enumerate((key for key in texts if key not in shared), 1)}
    merged = {pattern: merge_texts(same) for pattern, same in texts.items()}
    of_rows = [tuple(sorted(numbers[pattern] for pattern in own if pattern in numbers)) for own in patterns]
    said_once = [text for pattern, text in merged.items() if pattern in shared]
    return [merged[pattern] for pattern in numbers], of_rows, said_once


def note_pattern(note: Note) -> NotePattern:
    """Return what notes of one footnote share: their sentence without numbers, and all values but quantities.

    A version, a rank or a seed is text, and no quantity.
    """
    fixed = {
        name: note_pattern(value) if isinstance(value, Note) else repr(value)
        for name, value in note.values.items()
        if not isinstance(value, int | float)
    }
    return NUMBER.sub("#", render_note(note, FIGURE_WORDS)), note.kind, *sorted(fixed.items())


def merge_texts(texts: Iterable[str]) -> str:
    """Return the one sentence of several that differ in numbers only: with the smallest and the largest of each."""
    distinct = list(dict.fromkeys(texts))
    columns = zip(*(NUMBER.findall(text) for text in distinct), strict=True)
    ends = iter([sorted(set(column), key=lambda number: float(number.replace(",", ""))) for column in columns])

    def give_range(match: re.Match[str]) -> str:
        values = next(ends)
        return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"

    return NUMBER.sub(give_range, distinct[0])


def main_figure(figures: Sequence[Figure]) -> Figure:
    """Return the figure that links to the record and holds the status: the first that was measured."""
    return next((figure for figure in figures if figure.key not in STATED_KEYS), figures[0])
