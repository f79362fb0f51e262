"""Tables for people: their columns, those that name the rows, the text of a cell, and footnotes.

A cell has a number in the decimals of its column, words for a value, or words for a missing one. Notes that differ in
quantities only are one footnote, which states their range.
"""

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pipeline.experiment import point_label
from pipeline.experiment.point_label import Terms, axes_fixed_by_model, describe_point, format_number, models_of
from pipeline.figures.intervals import ends_of
from pipeline.figures.notes import OF_BASELINE, TEXT, Note, NoteKind
from pipeline.figures.pooling import group_pairs
from pipeline.plan.axes import REMEDIES
from pipeline.report.claims import badge_of
from pipeline.report.table import AXIS_HEADINGS, FIGURES_NOT_STATED, NOT_STATED, Column, Row
from pipeline.report.tables import FIGURE_NAMES
from pipeline.report.words import Range, render_note

STATUS_WORDS = {"oom": "OOM", "failed": "failed", "missing": "missing", "rejected": "rejected"}
MAX_LABEL = 44  # characters of a configuration in a cell
WORDS = FIGURE_NAMES | {"sw_power_cap": "GPU at its power limit"}  # what notes name
MAX_WORD = 20  # characters of a short text that is its own badge
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

    `badges` has a word for each footnote.
    """

    heading: str
    columns: Sequence[DisplayColumn]
    footnotes: Sequence[str] = ()
    common: str = ""
    legend: str = ""
    source: str = ""
    is_folded: bool = False
    badges: Sequence[str] = ()

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


class Footnotes(NamedTuple):
    """The footnotes of a table with a word for each, the numbers of each row's, and the notes that all rows share."""

    texts: list[str]
    words: list[str]
    numbers: list[tuple[int, ...]]
    shared: list[str]


def name_texts(part: Any, terms: Terms) -> Any:
    """Return a table, a plot or a part of one, with the word for what its points ran on in every text."""
    if isinstance(part, str):
        return point_label.in_terms(part, terms)
    if not isinstance(part, list | tuple) or terms == Terms():
        return part
    named = [name_texts(inner, terms) for inner in part]
    return type(part)(*named) if hasattr(part, "_fields") else tuple(named)


def named_axes(row: Row) -> dict[str, Any]:
    """Return the axes of a row, with the remedies where they are a figure."""
    return row.axes | ({"remedies": row["remedies"]} if "remedies" in row.figures else {})


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
    heading = {"gpu": "GPU model"}.get(others[0], others[0]) if len(others) == 1 else "configuration"
    names = [describe_point(point, others, models) for point in points]
    if max(map(len, names)) > MAX_LABEL:
        usual = {axis: Counter(repr(point[axis]) for point in points).most_common(1)[0][0] for axis in others}
        differing = [[axis for axis in others if repr(point[axis]) != usual[axis]] for point in points]
        names = [describe_point(point, own) if own else USUAL for point, own in zip(points, differing, strict=True)]
        values = {axis: next(point[axis] for point in points if repr(point[axis]) == usual[axis]) for axis in others}
        explained.append(f"Configurations name what differs from the {USUAL} one: {describe_point(values, others)}.")
    if any(point_label.ALL_REMEDIES in text for text in (*names, *explained)):
        explained.append(f"All remedies: {', '.join(REMEDIES)}.")
    return [*columns, DisplayColumn(heading, names, "text")], " ".join(explained)


def describe_common(points: Sequence[Axes], varying: Sequence[str], hidden: Sequence[str]) -> str:
    """Return what all rows share, in words."""
    without = (*varying, *hidden, *(axis for axis in point_label.EFFORT_AXES if axis != "epochs"))
    same = (axis for axis, value in points[0].items() if axis not in without and value not in (False, []))
    return describe_point(points[0], [axis for axis in same if all(point[axis] == points[0][axis] for point in points)])


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


def display_column(column: Column, rows: Sequence[Row], is_full: bool = False) -> DisplayColumn:
    """Return a column of the rows; numbers of a full table have up to six digits."""
    is_text = any(isinstance(row[column.key], str | list) for row in rows)
    decimals = None if is_full else decimals_of(column, rows)
    cells = [format_cell(column, row, decimals) for row in rows]
    return DisplayColumn(column.heading, cells, "text" if is_text else "number")


def format_cell(column: Column, row: Row, decimals: int | None) -> str:
    """Return the number, with its interval if the column shows it; empty if it is not known, and why if a note says.

    Minimum and maximum of one run are no interval. A number that noise hides is "<" and the noise.
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
    if noise is not None and decimals is not None:
        return f"<{column.factor * noise:.3g}"
    if column.is_set and isinstance(value, float) and column.factor == 1:
        return f"{value:.6g}"  # as it was set
    if decimals is None or not math.isfinite(shown) or abs(shown) >= 1e9:
        return f"{shown:.6g}" if decimals is None else f"{shown:.3g}"
    if 0 < shown < 10**-decimals / 2:
        return f"<{10**-decimals:.{decimals}f}"
    low, high = ends_of(value) if column.interval == "shown" else (None, None)
    text, *ends = (
        format_number(column.factor * part, f",.{decimals}f") for part in (value, low, high) if part is not None
    )
    return f"{text} ({' to '.join(ends)})" if ends and not (row.n == 1 and low == high) else text


def number_notes(rows: Sequence[Row], hidden: Container[NoteKind] | None = ()) -> Footnotes:
    """Return the footnotes of the rows, without the kinds of notes that are hidden; None hides all."""
    shown = [[note for note in row.notes if hidden is not None and note.kind not in hidden] for row in rows]
    of_rows = [{note_key(note): note for note in notes} for notes in shown]
    groups = group_pairs(pair for notes in of_rows for pair in notes.items())
    texts = {key: render_note(merge_notes(notes), WORDS) for key, notes in groups.items()}
    shared = [texts.pop(key) for key, notes in groups.items() if len(notes) == len(rows) > 1]
    numbers = {key: number for number, key in enumerate(texts, start=1)}
    own = [tuple(sorted(numbers[key] for key in notes if key in numbers)) for notes in of_rows]
    return Footnotes(list(texts.values()), [word_of(groups[key][0]) for key in texts], own, shared)


def word_of(note: Note) -> str:
    """Return the badge of a note in a table."""
    if note.kind == OF_BASELINE:
        return f"baseline {word_of(note.values['note'])}"
    if note.kind == TEXT:
        return text if len(text := str(note.values["text"])) <= MAX_WORD else "note"
    return note.kind.word or badge_of(note) or note.kind.name.replace("_", " ")


def note_column(numbers: Sequence[Sequence[int]]) -> DisplayColumn:
    """Return the column with the numbers of each row's footnotes."""
    return DisplayColumn("note", [", ".join(map(str, own)) for own in numbers], "line")


def note_key(note: Note) -> str:
    """Return what notes of one footnote share: the kind and all values but quantities.

    A version, a rank or a seed is text, and no quantity.
    """
    return repr((note.kind, sorted((name, value_key(value)) for name, value in note.values.items())))


def value_key(value: Any) -> str:
    return note_key(value) if isinstance(value, Note) else "" if is_quantity(value) else repr(value)


def is_quantity(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merge_notes(notes: Sequence[Note]) -> Note:
    """Return one note of several that differ in quantities only, with the range of each."""
    return Note(notes[0].kind, {name: merge_values([note.values[name] for note in notes]) for name in notes[0].values})


def merge_values(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Note):
        return merge_notes(values)
    return Range(min(values), max(values)) if is_quantity(values[0]) and min(values) != max(values) else values[0]
