"""Footnotes of a table: notes that differ in quantities only are one footnote, which states their range."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.analysis.notes import Note
from pipeline.analysis.pooling import group_pairs
from pipeline.tables.columns import Row
from pipeline.tables.definitions import FIGURE_NAMES
from pipeline.tables.note_texts import Range, render_note


class Footnotes(NamedTuple):
    """The footnotes of a table, the numbers of each row's, and the notes that all of several rows share."""

    texts: list[str]
    numbers: list[tuple[int, ...]]
    shared: list[str]


def number_notes(rows: Sequence[Row], hidden: tuple[str, ...] = ()) -> Footnotes:
    """Return the footnotes of the rows, without the kinds of notes that begin with one of `hidden`."""
    of_rows = [{note_key(note): note for note in row.notes if not note.kind.startswith(hidden)} for row in rows]
    groups = group_pairs(pair for notes in of_rows for pair in notes.items())
    texts = {key: render_note(merge_notes(notes), FIGURE_NAMES) for key, notes in groups.items()}
    shared = [texts.pop(key) for key, notes in groups.items() if len(notes) == len(rows) > 1]
    numbers = {key: number for number, key in enumerate(texts, start=1)}
    own = [tuple(sorted(numbers[key] for key in notes if key in numbers)) for notes in of_rows]
    return Footnotes(list(texts.values()), own, shared)


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
    values = {name: merge_values([note.values[name] for note in notes]) for name in notes[0].values}
    return Note(notes[0].kind, values)


def merge_values(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Note):
        return merge_notes(values)
    return Range(min(values), max(values)) if is_quantity(values[0]) and min(values) != max(values) else values[0]
