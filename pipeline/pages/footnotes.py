"""Footnotes of a table: notes that differ in quantities only are one footnote, which states their range."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.analysis.notes import Note
from pipeline.tables.definitions import FIGURE_NAMES
from pipeline.tables.note_texts import Range, render_note
from pipeline.tables.row import Row


class Footnotes(NamedTuple):
    """The footnotes of a table, the numbers of each row's, and the notes that all of several rows share."""

    texts: list[str]
    numbers: list[tuple[int, ...]]
    shared: list[str]


def number_notes(rows: Sequence[Row], hidden: tuple[str, ...] = ()) -> Footnotes:
    """Return the footnotes of the rows, without the kinds of notes that begin with one of `hidden`."""
    groups: dict[str, list[Note]] = {}
    of_rows = []
    for row in rows:
        notes = (
            {note_key(note): note for note in row.notes if not note.kind.startswith(hidden)}
            if hidden
            else {note_key(note): note for note in row.notes}
        )
        of_rows.append(notes.keys())
        for key, note in notes.items():
            groups.setdefault(key, []).append(note)
    texts = {key: render_note(merge_notes(notes), FIGURE_NAMES) for key, notes in groups.items()}
    shared = [key for key in groups if len(rows) > 1 and all(key in keys for keys in of_rows)]
    numbers = {key: number for number, key in enumerate((key for key in groups if key not in shared), start=1)}
    own = [tuple(sorted(numbers[key] for key in keys if key in numbers)) for keys in of_rows]
    return Footnotes([texts[key] for key in numbers], own, [texts[key] for key in shared])


def note_key(note: Note) -> str:
    """Return what notes of one footnote share: the kind and all values but quantities."""
    return repr((note.kind, sorted((name, value_key(value)) for name, value in note.values.items())))


def value_key(value: Any) -> str:
    """Return a value as part of that key; a version, a rank or a seed is text, and no quantity."""
    return note_key(value) if isinstance(value, Note) else "" if is_quantity(value) else repr(value)


def is_quantity(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merge_notes(notes: Sequence[Note]) -> Note:
    """Return one note of several that differ in quantities only, with the range of each."""
    values = {name: [note.values[name] for note in notes] for name in notes[0].values}
    return Note(notes[0].kind, {name: merge_values(found) for name, found in values.items()})


def merge_values(values: Sequence[Any]) -> Any:
    """Return the value that all share, the range of quantities, or the merged note about another point."""
    if isinstance(values[0], Note):
        return merge_notes(values)
    return Range(min(values), max(values)) if is_quantity(values[0]) and min(values) != max(values) else values[0]
