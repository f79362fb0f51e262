"""Tables for people: at most ten columns each, one unit a column, notes as numbered footnotes.

A cell has a number in the decimals of its column, words for a value, or words for a missing one. Notes that differ in
quantities only are one footnote, which states their range. Time, speed-up and efficiency also stand by GPUs and batch
size, as published reports print them.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pipeline.figures.intervals import ends_of
from pipeline.figures.notes import TEXT, Note, NoteKind
from pipeline.figures.pooling import group_pairs
from pipeline.plan.axes import REMEDIES
from pipeline.plan.model_names import short_model_name
from pipeline.plan.point_label import (
    ALL_REMEDIES,
    EFFORT_AXES,
    NAMED_LAST,
    Terms,
    axes_fixed_by_model,
    describe_axis,
    describe_point,
    distinguishing_axes,
    format_number,
    models_of,
    own_axes,
    words_of,
)
from pipeline.records.outcomes import CollectedOutcomes
from pipeline.report.claims import badge_of
from pipeline.report.plots import note_on_number
from pipeline.report.questions import FIGURE_NAMES, TABLES
from pipeline.report.table import (
    AXIS_HEADINGS,
    EFFICIENCY,
    EPOCH_TIME,
    FIGURES_NOT_STATED,
    NOT_STATED,
    SPEEDUP,
    Column,
    Range,
    Row,
    Table,
    Tables,
    View,
    name_texts,
    render_note,
)

STATUS_WORDS = {"oom": "OOM", "failed": "failed", "missing": "missing", "rejected": "rejected"}
MAX_LABEL = 44  # characters of a configuration in a cell
WORDS = FIGURE_NAMES | {"sw_power_cap": "$GPU at its power limit"}  # what notes name
MAX_BADGES = 3  # of a row
MAX_WORD = 20  # characters of a text that is its own badge; the footnote has the rest
OTHER_NAMES = {"gpu": "$GPU model", "options": "model options"}  # of axes that share a column
SEPARATOR = " · "  # between what all rows share
USUAL = "usual"  # the configuration whose every value is the most frequent one

Axes = Mapping[str, Any]


class DisplayColumn(NamedTuple):
    """A column of a table for people. `kind` is its class in the style sheet; `links` are addresses of its cells."""

    heading: str
    cells: Sequence[str]
    kind: Literal["number", "text", "line"] = "number"
    links: Sequence[str] = ()

    @property
    def width(self) -> int:
        """The characters of the column in Markdown."""
        return max(3, len(self.heading), *map(len, self.cells))


class DisplayTable(NamedTuple):
    """A table for people. `common` is what all rows share; `source` is the name of its table.

    A footnote is its badge and its text.
    """

    heading: str
    columns: Sequence[DisplayColumn]
    footnotes: Sequence[tuple[str, str]] = ()
    common: str = ""
    legend: str = ""
    source: str = ""
    is_folded: bool = False

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    @property
    def texts(self) -> list[list[str]]:
        """The cells by row, with badges in place of the numbers of notes."""
        columns = [
            [", ".join(badge for badge, _ in self.badges_of(cell)) for cell in column.cells]
            if column.heading == "note"
            else column.cells
            for column in self.columns
        ]
        return [*map(list, zip(*columns, strict=True))]

    def badges_of(self, numbers: str) -> list[tuple[str, str]]:
        """Return the badges for a cell with the numbers of notes, each with what it stands for; at most four."""
        own = [int(number) - 1 for number in numbers.split(", ") if number]
        found = [self.footnotes[number] for number in own[:MAX_BADGES]]
        rest = [self.footnotes[number][1] for number in own[MAX_BADGES:]]
        return found + ([(f"{len(rest)} more", "; ".join(rest))] if rest else [])


def name_columns(points: Sequence[Axes], varying: Sequence[str]) -> tuple[list[DisplayColumn], str]:
    """Return the columns that name the points, and what explains them.

    Strategy, GPUs and batch size have a column each; all else that varies shares one. Where that is too long it names
    what differs from the values that most points have.
    """
    own = [axis for axis in AXIS_HEADINGS if axis in varying]
    explained = []
    if {"strategy", "num_gpus", "remedies"} <= {*varying}:  # such a table lacks room: the number of GPUs may tell it
        places = {describe_point(point, ("strategy", "num_gpus")): point["num_gpus"] for point in points}
        if len(places) == len({*places.values()}):
            own.remove("strategy")
            explained.append(f"Strategies: {', '.join(places)}.")
    columns = [
        DisplayColumn(
            AXIS_HEADINGS[axis],
            [format_value(point[axis]) for point in points],
            "text" if axis == "strategy" else "number",
        )
        for axis in own
    ]
    others = [axis for axis in varying if axis not in AXIS_HEADINGS]
    fixed, models = axes_fixed_by_model(points, others), models_of(points)
    if fixed:
        others = [axis for axis in others if axis not in fixed]
        of_each = {point["model"]: describe_point(point, ["model", *fixed], models) for point in points}
        explained.append(f"Each model: {'; '.join(of_each.values())}.")
    if not others:
        return columns, " ".join(explained)
    heading = name_axis(others[0]) if len(others) == 1 else "configuration"
    names = [describe_point(point, others, models) for point in points]
    if max(map(len, names)) > MAX_LABEL:
        usual = {axis: Counter(repr(point[axis]) for point in points).most_common(1)[0][0] for axis in others}
        differing = [[axis for axis in others if repr(point[axis]) != usual[axis]] for point in points]
        names = [describe_point(point, own) if own else USUAL for point, own in zip(points, differing, strict=True)]
        values = {axis: next(point[axis] for point in points if repr(point[axis]) == usual[axis]) for axis in others}
        explained.append(f"Configurations name what differs from the {USUAL} one: {describe_point(values, others)}.")
    if any(ALL_REMEDIES in text for text in (*names, *explained)):
        explained.append(f"All remedies: {', '.join(REMEDIES)}.")
    return [*columns, DisplayColumn(heading, names, "text")], " ".join(explained)


def describe_common(points: Sequence[Axes], varying: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """Return what all rows share, each as `key: value`."""
    is_script = bool(points[0].get("script"))  # whose epochs are windows
    without = (*varying, *hidden, *(axis for axis in NAMED_LAST if axis != "epochs" or is_script))
    same = (axis for axis, value in points[0].items() if axis not in without and value not in (False, []))
    return describe_values(
        points[0], [axis for axis in same if all(point[axis] == points[0][axis] for point in points)]
    )


def describe_values(point: Axes, axes: Iterable[str]) -> list[str]:
    """Return the values of these axes that do not go without saying, each as `key: value`."""
    found = {axis: point[axis] for axis in own_axes(point, axes) if describe_axis(axis, point[axis])}
    return [f"{name_axis(axis)}: {describe_value(axis, value)}" for axis, value in found.items()]


def name_axis(axis: str) -> str:
    """Return an axis in words, without the unit of its values."""
    return AXIS_HEADINGS.get(axis) or OTHER_NAMES.get(axis) or Column(axis, "", "").name.removeprefix("num ")


def describe_value(axis: str, value: Any) -> str:
    """Return a value of an axis in words, with its unit and without the name of the axis."""
    if isinstance(value, bool | list | tuple):
        return "yes" if value is True else describe_axis(axis, value)
    words = words_of(axis)[1].get(value, "{}")
    text = format_value(short_model_name(value) if axis == "model" and value else value) if "{}" in words else words
    return f"{text} {Column(axis, '', '').unit}".rstrip()


def status_of(row: Row) -> str:
    """Return why a row has no main figure: its status, or that training diverged."""
    if row.figures.get("diverged_at_update") is not None:
        return f"diverged at update {row['diverged_at_update']}"
    return STATUS_WORDS.get(row.status, "")


def format_value(value: Any) -> str:
    """Return a value that is no measured number."""
    if isinstance(value, list):
        return " + ".join(map(str, value)) or "none"
    form = {int: ",", float: "g"}.get(type(value), "")
    return NOT_STATED if value is None else format(value, form)


def decimals_of(column: Column, rows: Sequence[Row]) -> int:
    """Return the decimals of a column: four digits of its smallest value, if its unit allows; none for counts."""
    known = [value for row in rows if isinstance(value := row[column.key], int | float)]
    sizes = [abs(column.factor * value) for value in known if value and math.isfinite(value)]
    if not sizes or (column.factor == 1 and all(isinstance(value, int) for value in known)):
        return 0
    most = column.max_decimals
    return min(max(max(most, 3) - math.floor(math.log10(min(sizes))), 0), most)


def display_column(column: Column, rows: Sequence[Row]) -> DisplayColumn:
    is_text, decimals = any(isinstance(row[column.key], str | list) for row in rows), decimals_of(column, rows)
    cells = [format_cell(column, row, decimals) for row in rows]
    return DisplayColumn(column.heading or column.name, cells, "text" if is_text else "number")


def format_cell(column: Column, row: Row, decimals: int) -> str:
    """Return the number, with its interval if the column shows it; empty if it is not known, and why if a note says.

    Minimum and maximum of one run are no interval. A number that noise hides is "<" and the largest that it
    may be: the noise, or the upper end of the interval.
    """
    value = row[column.key]
    if value is None:
        is_unstated = any(
            note.kind == FIGURES_NOT_STATED and column.key in note.values["figures"] for note in row.notes
        )
        return NOT_STATED if is_unstated else column.absent(row) if column.absent else ""
    if isinstance(value, str | list | bool):
        return column.words.get(str(value)) or format_value(value)
    noise, shown = getattr(value, "noise", None), column.factor * value
    if noise is not None:
        return f"<{column.factor * max(noise, ends_of(value)[1] or 0.0):.3g}"
    if column.is_set and isinstance(value, float) and column.factor == 1:
        return f"{value:.6g}"  # as it was set
    if not math.isfinite(shown) or abs(shown) >= 1e9:
        return f"{shown:.3g}"
    low, high = ends_of(value) if column.interval == "shown" else (None, None)
    smallest = 10**-decimals
    if 0 < shown < smallest / 2 and column.factor * (high or 0.0) < smallest:
        return f"<{smallest:.{decimals}f}"
    text, *ends = (
        format_number(column.factor * part, f",.{decimals}f") for part in (value, low, high) if part is not None
    )
    return f"{text} ({' to '.join(ends)})" if ends and not (row.n == 1 and low == high) else text


def number_notes(
    rows: Sequence[Row], hidden: Container[NoteKind] | None = ()
) -> tuple[list[tuple[str, str]], list[tuple[int, ...]], list[str]]:
    """Return the footnotes, each with its badge, the numbers of those of each row, and the notes that all rows share.

    The kinds of notes that are hidden are left out; None hides all.
    """
    shown = [[note for note in row.notes if hidden is not None and note.kind not in hidden] for row in rows]
    of_rows = [{note_key(note): note for note in notes} for notes in shown]
    groups = group_pairs(pair for notes in of_rows for pair in notes.items())
    texts = {key: render_note(merge_notes(notes), WORDS) for key, notes in groups.items()}
    shared = [texts.pop(key) for key, notes in groups.items() if len(notes) == len(rows) > 1]
    numbers = {key: number for number, key in enumerate(texts, start=1)}
    own = [tuple(sorted(numbers[key] for key in notes if key in numbers)) for notes in of_rows]
    return [(word_of(groups[key][0]), text) for key, text in texts.items()], own, shared


def word_of(note: Note) -> str:
    """Return the badge of a note in a table."""
    if note.is_of_baseline:
        return f"baseline {word_of(note._replace(is_of_baseline=False))}"
    if note.kind == TEXT:
        text = str(note.values["text"])
        return text if len(text) <= MAX_WORD else f"{text[: MAX_WORD - 3].rstrip()}..."
    return note.kind.word or badge_of(note) or note.kind.name.replace("_", " ")


def note_column(numbers: Sequence[Sequence[int]]) -> DisplayColumn:
    """Return the column with the numbers of each row's footnotes."""
    return DisplayColumn("note", [", ".join(map(str, own)) for own in numbers], "line")


def note_key(note: Note) -> str:
    """Return what notes of one footnote share: all but the values of quantities.

    A version, a rank or a seed is text, and no quantity.
    """
    values = {name: "" if is_quantity(value) else value for name, value in note.values.items()}
    return repr(note._replace(values=dict(sorted(values.items()))))


def is_quantity(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merge_notes(notes: Sequence[Note]) -> Note:
    """Return one note of several that differ in quantities only, with the range of each."""
    values = {name: merge_values([note.values[name] for note in notes]) for name in notes[0].values}
    return notes[0]._replace(values=values)


def merge_values(values: Sequence[Any]) -> Any:
    return Range(min(values), max(values)) if is_quantity(values[0]) and min(values) != max(values) else values[0]


TABLES_WITHOUT_REMEDIES = ("Q1", "Q2", "Q3")
REMEDIES_ELSEWHERE = "Runs with remedies are in the tables of Q4 only."
MAX_COLUMNS = 10
MAX_WIDTH = 120  # characters of a row in Markdown
CELL_MARGIN = 3  # of them for each cell: two spaces and a bar
MIN_MAIN_WIDTH = 20
MAX_ROWS_UNFOLDED = 40
MAX_ROWS = 10_000  # a page with more is slow; the CSV files have all
MAX_BATCH_SIZES = 14  # of one table by GPUs and batch size


class DisplayOptions(NamedTuple):
    """Options of the tables that are shown. `only` names one table.

    `link_of` gives the address of a row's point, `terms` the word for what the points ran on. The page groups the next
    steps, so it leaves their tables out.
    """

    max_width: int = MAX_WIDTH
    only: str = ""
    link_of: Callable[[Row], str] = lambda row: ""
    terms: Terms = Terms()
    has_next_steps: bool = True


MAX_TABLE_CHARS = 150  # of a row of a table on the page, which scrolls if the page is narrower
ON_PAGE = DisplayOptions(MAX_TABLE_CHARS, has_next_steps=False)


def display_tables(
    tables: Tables, collected: CollectedOutcomes, options: DisplayOptions
) -> Iterator[tuple[str, DisplayTable]]:
    """Yield the tables that have rows, in order, each with its question."""
    options = options._replace(terms=collected.terms)
    for table in TABLES.values():
        if options.only not in ("", table.name):
            continue
        whole = View(table.name, choose=list, keys=tuple(column.key for column in table.columns))
        for view in table.views or ([whole] if options.only else []):
            if view.is_of_next_steps and not options.has_next_steps:
                continue
            if table.name in TABLES_WITHOUT_REMEDIES and any(row["remedies"] for row in tables["Q4"]):
                view = view._replace(legend=f"{view.legend} {REMEDIES_ELSEWHERE}".strip())
            rows = view.choose(tables[table.name])
            shown = [build_table(table, view, rows, options)] if rows else []
            if table.name == "Q2" and view.heading == table.views[0].heading:
                shown += build_pivots(rows, is_stated=any(not record.measured for record in collected.records))
            yield from ((table.question, name_texts(part, collected.terms)) for part in shown)


def build_table(table: Table, view: View, all_rows: Sequence[Row], options: DisplayOptions) -> DisplayTable:
    """Return a table before its texts are named by the terms, with the columns that have room once they are."""
    rows = all_rows[:MAX_ROWS]
    points = [row.axes | ({"remedies": row["remedies"]} if "remedies" in row.figures else {}) for row in rows]
    varying = distinguishing_axes(points, view.hidden_axes)
    named, configurations = name_columns(points, varying)
    footnotes, numbers, shared = number_notes(rows, view.hidden_notes)
    columns = columns_to_show(table, view, rows)
    main = next(index for index, column in enumerate(columns) if not column.is_set)
    shown = [display_column(column, rows) for column in columns]
    shows_n = view.shows_n or any(row.n > 1 for row in rows)
    beside = [DisplayColumn("n", [f"{row.n:,}" for row in rows])] if shows_n else []
    beside += [note_column(numbers)] if footnotes else []
    always = [main, *telling_columns(columns, rows, named)]
    texts, names, others = ([*name_texts(part, options.terms)] for part in (shown, named, beside))
    if not fits([*names, *others, *(texts[index] for index in always)], options.max_width):
        named = [column._replace(heading=column.heading.removeprefix("$images ")) for column in named]
        names = name_texts(named, options.terms)
    room = options.max_width - table_width([*names, *others, *(texts[index] for index in always if index != main)])
    cells = [
        textwrap.shorten(text, max(MIN_MAIN_WIDTH, room - CELL_MARGIN), placeholder=" ...") or status_of(row)
        for text, row in zip(texts[main].cells, rows, strict=True)  # it may be a sentence
    ]
    shown[main] = shown[main]._replace(cells=cells, links=list(map(options.link_of, rows)))
    texts[main] = texts[main]._replace(cells=cells)
    kept = columns_that_fit(texts, [*names, *others], always, options.max_width)
    said, left_out = describe_omitted([column for index, column in enumerate(shown) if index not in kept])
    common = [*describe_common(points, varying, view.hidden_axes), *said, *shared]
    remarks = [columns[index].remark for index in kept]
    legend = (configurations, view.legend, *remarks, note_on_number(len(all_rows), MAX_ROWS, "rows"), left_out)
    return DisplayTable(
        view.heading,
        [*named, *(shown[index] for index in kept), *beside],
        footnotes,
        common=SEPARATOR.join(common),
        legend=" ".join(filter(None, legend)),
        source=table.name,
        is_folded=view.is_folded or len(rows) > MAX_ROWS_UNFOLDED,
    )


def columns_to_show(table: Table, view: View, rows: Sequence[Row]) -> list[Column]:
    """Return the columns of a view that say something, in order of weight."""
    wanted = [table.column(key) for key in view.keys] or [column for column in table.columns if column.heading]
    found = [column for column in wanted if is_known(column, rows, view.hides_zeros)]
    main = next(column for column in wanted if not column.is_set)
    return found if main in found else [main, *found]  # it holds the status and the footnotes


def is_known(column: Column, rows: Sequence[Row], hides_zeros: bool) -> bool:
    """True if some row has the figure and, if asked for, not 0; or if the column says why a row cannot have it."""
    values = [row[column.key] for row in rows]
    known = any(value is not None and (value or not hides_zeros) for value in values)
    return known or (column.absent is not None and any(map(column.absent, rows)))


def telling_columns(columns: Sequence[Column], rows: Sequence[Row], named: Sequence[DisplayColumn]) -> list[int]:
    """Return the columns that follow from the grid and without which two rows would look alike beside their names."""
    looks = [repr([column.cells[place] for column in named]) for place in range(len(rows))]
    found: list[int] = []
    for index, column in enumerate(columns):
        wider = [f"{look} {row[column.key]!r}" for look, row in zip(looks, rows, strict=True)]
        if column.is_set and len({*wider}) > len({*looks}):
            looks, found = wider, [*found, index]
    return found


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
    return len(columns) <= MAX_COLUMNS and table_width(columns) <= max_width


def table_width(columns: Sequence[DisplayColumn]) -> int:
    """Return the characters of a row in Markdown."""
    return sum(column.width for column in columns) + CELL_MARGIN * len(columns) + 1


def describe_omitted(columns: Sequence[DisplayColumn]) -> tuple[list[str], str]:
    """Return what omitted columns say if all rows have it, and the sentence that names the others."""
    said, others = [], []
    for column in columns:
        what, _, unit = column.heading.rstrip("]").partition(" [")
        texts = set(column.cells)
        if len(texts) == 1 and "" not in texts:
            parts = (f"{what}:", "±" if unit.startswith("±") else "", texts.pop(), unit.removeprefix("± "))
            said.append(" ".join(filter(None, parts)))
        else:
            others.append(what)
    return said, f"Not shown for lack of room: {', '.join(others)}." if others else ""


def build_pivots(rows: Sequence[Row], is_stated: bool) -> Iterator[DisplayTable]:
    """Yield time, speed-up and efficiency of rows of weak scaling by GPUs and batch size.

    For a report that was ingested (`is_stated`) also N x T(1)/T(N) and T(2)/T(4), its own terms.
    """
    sizes = sorted({row["batch_size_per_gpu"] for row in rows if row["num_gpus"] > 1 and row["baseline"]})
    if not 1 < len(sizes) <= MAX_BATCH_SIZES:
        return
    pivots = [(column, [(row, row[column.key]) for row in rows]) for column in (EPOCH_TIME, SPEEDUP, EFFICIENCY)]
    if is_stated:
        scaled = [(row, row["speedup"] and row["num_gpus"] * row["speedup"]) for row in rows]
        pivots += [
            (SPEEDUP._replace(heading="N x T(1)/T(N)"), scaled),
            (SPEEDUP._replace(heading="T(2)/T(4)"), two_over_four(rows)),
        ]
    for column, values in pivots:
        if all(value is None for _, value in values):
            continue
        wanted = [pair for pair in values if column is EPOCH_TIME or pair[0]["num_gpus"] > 1]
        yield pivot(column, [pair for pair in wanted if pair[0]["batch_size_per_gpu"] in sizes])


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
    decimals = 3 if column.key == "speedup" else decimals_of(column, rows)
    points: dict[str, Axes] = {}
    lines: dict[str, dict[int, str]] = {}
    for row, value in values:
        name = repr([row[axis] for axis in varying])
        known = "" if value is None else format_number(column.factor * value, f",.{decimals}f")
        text = status_of(row) if row["epoch_time_s"] is None else known
        points.setdefault(name, row.axes)
        lines.setdefault(name, {})[row["batch_size_per_gpu"]] = text
    columns, configurations = name_columns(list(points.values()), varying)
    for size in sorted({row["batch_size_per_gpu"] for row in rows}):
        columns.append(DisplayColumn(f"{size:,}", [line.get(size, "") for line in lines.values()]))
    heading = f"Q2: {column.heading} by $GPUs and $images per $GPU (weak scaling)"
    return DisplayTable(heading, columns, legend=configurations, source="Q2", is_folded=True)
