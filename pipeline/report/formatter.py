"""Fills the templates of notes with figures and lists."""

import string
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pipeline.figures.notes import Note
from pipeline.plan.point_label import Terms, format_number, in_terms
from pipeline.system.errors import shorten_list

MAX_LISTED_VALUES = 3
MAX_VALUE_CHARS = 40


class Range(NamedTuple):
    """The smallest and the largest value of a quantity, in notes that differ in it."""

    low: float
    high: float


class NoteFormatter(string.Formatter):
    """str.format with lists, names of figures and notes about another point."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self.words = words

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return one value as text."""
        if format_spec == "list":
            return ", ".join(value)
        if format_spec == "figures":
            return ", ".join(self.words.get(key, key) for key in ([value] if isinstance(value, str) else value))
        if format_spec == "short":
            return shorten_values(value)
        if format_spec == "mixed":
            return "; ".join(f"mixed {fact}: {shorten_values(values)}" for fact, values in value.items())
        if isinstance(value, Range):
            low, high = (self.format_field(end, format_spec) for end in value)
            return f"{low.removesuffix(' %')} to {high}"
        if isinstance(value, Note):
            return render_note(value, self.words)
        if isinstance(value, float) and format_spec:
            return format_number(value, format_spec).replace("%", " %")
        return str(super().format_field(value, format_spec))


def shorten_values(values: Collection[str]) -> str:
    """Return the first values in order, each cut to a few characters."""
    return shorten_list([value[:MAX_VALUE_CHARS] for value in sorted(values)], MAX_LISTED_VALUES)


def render_note(note: Note, words: Mapping[str, str] | None = None) -> str:
    """Return the sentence of a note, with `words` (by key) for the figures that it names."""
    return NoteFormatter(words or {}).vformat(note.kind.words, (), note.values)


def render_notes(notes: Iterable[Note], terms: Terms) -> str | None:
    """Return the sentences of a row's notes, joined; None without notes."""
    return in_terms("; ".join(map(render_note, notes)), terms) or None


def name_texts(part: Any, terms: Terms) -> Any:
    """Return a table, a plot or a part of one, with the word for what its points ran on in every text."""
    if isinstance(part, str):
        return in_terms(part, terms)
    if not isinstance(part, list | tuple):
        return part
    named = [name_texts(inner, terms) for inner in part]
    return type(part)(*named) if hasattr(part, "_fields") else tuple(named)
