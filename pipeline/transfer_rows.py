"""The rows of the ledger: what travels in a step by kind, counted, beside the point that trained with the same axes."""

from collections.abc import Sequence

from pipeline import likeness
from pipeline.cells import Cell, epoch_time_s_of
from pipeline.exposure import communications, measured_notes, step_time
from pipeline.measurement import TransferKind
from pipeline.rows import Row, start_row
from pipeline.schema import Record
from pipeline.spec import AXES, Spec

KINDS: tuple[TransferKind, ...] = (
    "gradients",
    "buffers",
    "batchnorm_statistics",
    "parameters",
    "inputs",
    "outputs",
)
TRAINED_MAY_DIFFER = ("measure", "windows", "epochs", "input", "num_workers", "max_steps", "evaluate", "dataset")


def transfer_row(cell: Cell, axes: Sequence[str], trained: Sequence[Cell]) -> Row:
    """The ledger: what a rank hands on in a step, by kind, beside the formula; time and accuracy where trained too."""
    found = communications(cell.measured)
    counted = {transfer.kind: transfer for part in found for transfer in part.transfers}
    figures: Row = {}
    for kind in KINDS:
        transfer = counted.get(kind)
        absent = 0.0 if counted else None
        figures[f"{kind}_calls_per_step"] = transfer.calls_per_step if transfer else absent
        figures[f"{kind}_bytes_per_step"] = transfer.bytes_per_step if transfer else absent
    gradient_bytes = next((record.measurement.gradient_bytes for record in cell.measured if record.measurement), None)
    replicas = cell.spec.num_gpus - 1 if cell.spec.strategy == "dp" else 1
    step = step_time(found, "ddp" if cell.spec.strategy == "ddp" else "dp")
    twins = [other for other in trained if is_twin(other.spec, cell.spec)]
    twin = next((other for other in twins if epoch_time_s_of(other) is not None), None)  # a probe has no epoch time
    notes = [] if counted else measured_notes(found)
    return start_row(
        cell,
        axes,
        **figures,
        gradients_bytes_formula=None if gradient_bytes is None else float(gradient_bytes * replicas),
        step_time_s=step.value_s if step else None,
        epoch_time_s=epoch_time_s_of(twin) if twin else None,
        test_accuracy=twin.median(last_test_accuracy) if twin else None,
        notes=notes + (likeness.unlike("training", twin.kinds, cell.kinds) if twin else []),
    )


def last_test_accuracy(record: Record) -> float | None:
    """Test accuracy after the last epoch."""
    epochs = record.measurement.epochs if record.measurement else ()
    return epochs[-1].test_accuracy if epochs else None


def is_twin(trained: Spec, measured: Spec) -> bool:
    """Whether a trained point is the measured one, but for how it was measured."""
    return all(getattr(trained, axis) == getattr(measured, axis) for axis in AXES if axis not in TRAINED_MAY_DIFFER)
