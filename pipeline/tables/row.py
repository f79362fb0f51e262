"""The rows of tables: axes, figures by the keys of their columns, the number of pooled runs, and notes."""

from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.analysis.notes import Note, make_note
from pipeline.analysis.pooling import PooledPoint
from pipeline.tables.columns import Table
from pipeline.tables.note_texts import render_notes

# figures that a published report may leave out
STATED_FIGURES = (
    *("epoch_time_s", "compute_time_s", "data_time_s", "peak_memory_gib", "training_time_s", "learning_rate"),
    *("throughput_samples_per_s", "steps_per_epoch", "ring_bytes_per_epoch", "num_updates"),
)


class Row(msgspec.Struct, frozen=True):
    """One row: the axes of its point, figures by key, the number of runs that it pools, and notes.

    A figure that cannot be computed is None, and a note says why.
    """

    axes: dict[str, Any]
    figures: dict[str, Any]
    n: int = 0
    notes: tuple[Note, ...] = ()

    def __getitem__(self, key: str) -> Any:
        """Return the value of an axis, a figure, n, or the note in words. Raises KeyError."""
        if key == "note":
            return render_notes(self.notes)
        return self.n if key == "n" else self.axes[key] if key in self.axes else self.figures[key]

    @property
    def status(self) -> str:
        """The status of the point; a row of no single point is ok."""
        return str(self.figures.get("status", "ok"))

    def has_note(self, *kinds: str) -> bool:
        """True if a note of the row, or one about its baseline, is of one of these kinds."""
        return any(kind_of(note) in kinds for note in self.notes)


def kind_of(note: Note) -> str:
    """Return the kind of a note; for a note about the baseline that of the note inside."""
    return kind_of(note.values["note"]) if note.kind == "of_baseline" else note.kind


def make_row(table: Table, point: PooledPoint, notes: Sequence[Note] = (), **figures: Any) -> Row:
    """Return the row of a point in a table: its axes, status and notes, and the given figures. Raises KeyError."""
    notes = [*point.notes, *notes]
    absent = [key for key in STATED_FIGURES if key in figures and figures[key] is None]
    if absent and point.ok_records and not any(record.measured for record in point.ok_records):
        notes.append(make_note("not_stated", figures=absent))
    axes = axes_of(point)
    axes |= {axis: figures[axis] for axis in axes if figures.get(axis)}  # of the learning rate its peak
    n = figures.pop("n", len(point.ok_records))
    common = {"global_batch_size": point.spec.global_batch_size, "status": point.status}
    return Row(axes, table.complete(common | figures), n, tuple(notes))


def axes_of(point: PooledPoint) -> dict[str, Any]:
    """Return the axes of a point as rows have them, with the GPU model."""
    axes = {axis: getattr(point.spec, axis) for axis in point.axes} | {"gpu": point.gpu or None}
    return {axis: list(value) if isinstance(value, tuple) else value for axis, value in axes.items()}
