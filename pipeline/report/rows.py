"""What every row of every table begins with: its axes, its state, and the notes of its cell."""

from collections.abc import Sequence
from typing import Any

from pipeline.analysis.pooling import PooledPoint
from pipeline.experiment.axis_groups import POOLED_AXES
from pipeline.experiment.spec import AXES, Spec

Row = dict[str, Any]

STATED_FIGURES = ("epoch_time_s", "compute_time_s", "data_time_s", "peak_memory_gib")  # that a report may leave out
ALWAYS_SHOWN = ("strategy", "num_nodes", "num_gpus", "batch_size_per_gpu", "precision", "input")


def shown_axes(pooled: Sequence[Spec]) -> list[str]:
    """The axes of every row: those always shown, and every other that varies in the experiment."""
    varying = [axis for axis in AXES if len({getattr(spec, axis) for spec in pooled}) > 1 and axis not in POOLED_AXES]
    return [*ALWAYS_SHOWN, *(axis for axis in varying if axis not in ALWAYS_SHOWN)]


def start_row(cell: PooledPoint, axes: Sequence[str], **figures: Any) -> Row:
    """The axes, the status and the figures of a cell; `note` joins what figures give as `notes`."""
    notes = [*cell.notes, *figures.pop("notes", [])]
    absent = [name for name, value in figures.items() if value is None and name in STATED_FIGURES]
    if absent and cell.ok_records and not any(record.measured for record in cell.ok_records):
        notes.append(f"not stated: {', '.join(absent)}")
    row: Row = {axis: to_json(getattr(cell.spec, axis)) for axis in axes}
    row["global_batch_size"] = cell.spec.global_batch_size
    row["status"] = cell.status
    row |= figures
    row["n"] = len(cell.ok_records)
    row["note"] = "; ".join(notes) or None
    return row


def to_json(value: Any) -> Any:
    """An axis's value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value
