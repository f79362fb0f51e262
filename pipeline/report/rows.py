"""Rows of one pooled point: their axes, their status, and the notes that every table gives the point."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pipeline.analysis.notes import Note, make_note
from pipeline.analysis.pooling import PooledPoint
from pipeline.experiment.axis_groups import POOLED_AXES
from pipeline.experiment.spec import AXES, Spec
from pipeline.report.row_types import PointRow

SomeRow = TypeVar("SomeRow", bound=PointRow)

STATED_FIGURES = ("epoch_time_s", "compute_time_s", "data_time_s", "peak_memory_gib")  # that a report may leave out
ALWAYS_SHOWN = ("strategy", "num_nodes", "num_gpus", "batch_size_per_gpu", "precision", "input")


def shown_axes(pooled: Sequence[Spec]) -> list[str]:
    """Return the axes of every row: those always shown, then the others that vary in the experiment."""
    varying = [axis for axis in AXES if len({getattr(spec, axis) for spec in pooled}) > 1 and axis not in POOLED_AXES]
    return [*ALWAYS_SHOWN, *(axis for axis in varying if axis not in ALWAYS_SHOWN)]


def make_row(
    row_class: type[SomeRow],
    point: PooledPoint,
    axes: Sequence[str],
    notes: Sequence[Note] = (),
    **figures: Any,
) -> SomeRow:
    """Return a point's row: its axes, status and notes, and the given figures."""
    notes = [*point.notes, *notes]
    absent = [name for name, value in figures.items() if value is None and name in STATED_FIGURES]
    if absent and point.ok_records and not any(record.measured for record in point.ok_records):
        notes.append(make_note("not_stated", figures=absent))
    values = {axis: to_json(getattr(point.spec, axis)) for axis in axes}
    common: dict[str, Any] = {
        "global_batch_size": point.spec.global_batch_size,
        "status": point.status,
        "n": len(point.ok_records),
    }
    return row_class(axes=values, notes=tuple(notes), **(common | figures))


def to_json(value: Any) -> Any:
    """Return the value of an axis as JSON has it."""
    return list(value) if isinstance(value, tuple) else value
