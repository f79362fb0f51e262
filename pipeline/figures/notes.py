"""Notes: facts that a reader needs to judge a row. Each kind is declared in the module that finds its cause."""

from typing import Any, NamedTuple


class NoteKind(NamedTuple):
    """A kind of note: its name, and templates that `report.table` fills with the values of a note.

    `words` is the sentence. `badge` stands beside an answer about the row. `word` stands in a table; if it is empty,
    the badge does, or else the name. No answer uses the figures that the note `forbids`.
    """

    name: str
    words: str
    badge: str = ""
    word: str = ""
    forbids: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The kind in a word or two, without the values of a note."""
        return self.word or self.badge or self.name.replace("_", " ")


class Note(NamedTuple):
    """A fact about a row, or about its baseline."""

    kind: NoteKind
    values: dict[str, Any]
    is_of_baseline: bool = False


TEXT = NoteKind("text", "{text}")


def make_note(kind: NoteKind, **values: Any) -> Note:
    """Return a note of that kind."""
    return Note(kind, values)


def text_note(text: str) -> Note:
    """Return a note whose sentence comes from a record."""
    return Note(TEXT, {"text": text})
