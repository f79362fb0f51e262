"""Notes: facts that a reader needs to judge a row, as a kind and its values. The report writes their sentences."""

from typing import Any, NamedTuple


class Note(NamedTuple):
    """A fact about a row. `pipeline.tables.note_texts` has a sentence for every kind."""

    kind: str
    values: dict[str, Any]


def make_note(kind: str, **values: Any) -> Note:
    """Return a note of that kind."""
    return Note(kind, values)


def text_note(text: str) -> Note:
    """Return a note whose sentence comes from a record."""
    return Note("text", {"text": text})
