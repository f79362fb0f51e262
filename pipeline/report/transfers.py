"""The transfers of one step, counted: calls and bytes by kind."""

from collections.abc import Sequence
from typing import get_args

from pipeline.figures.exposed_communication import (
    PointsByTraining,
    communications_of,
    job_notes,
    median_step_time,
    training_key,
    whole_step,
)
from pipeline.figures.pooling import PooledPoint
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.record import Measurement, Record, TransferKind
from pipeline.report.columns import (
    EPOCH_TIME,
    PLACE,
    STEP_TIME,
    TEST_ACCURACY,
)
from pipeline.report.table import Column, Row, Table, View, make_row


def transfer(kind: str, what: str, heading: str) -> tuple[Column, Column]:
    """Return the bytes and the calls per step of one kind of transfer."""
    return (
        Column(f"{kind}_bytes_per_step", heading, f"Bytes per step of {what}."),
        Column(f"{kind}_calls_per_step", "", f"Calls per step that send {what}."),
    )


GRADIENTS, GRADIENT_CALLS = transfer("gradients", "gradients", "gradients [MB]")

TRANSFERS = Table(
    "transfers",
    "Q3",
    (
        *PLACE,
        GRADIENTS,
        GRADIENT_CALLS._replace(heading="calls", decimals=0),
        Column(
            "gradients_bytes_formula", "by formula [MB]", "Bytes of the model's gradients (x N-1 under DataParallel)."
        ),
        *transfer("buffers", "buffers", "buffers [MB]"),
        *transfer("batchnorm_statistics", "the statistics of synchronized batch norm", "batch norm [MB]"),
        *transfer("parameters", "parameters", "parameters [MB]"),
        Column(
            "parameters_bytes_formula",
            "parameters by formula [MB]",
            "Bytes that FSDP gathers (each unit, and again if the forward pass frees it) or ZeRO-1 broadcasts.",
        ),
        *transfer("inputs", "inputs", "inputs [MB]"),
        *transfer("outputs", "outputs", "outputs [MB]"),
        STEP_TIME._replace(heading=""),
        EPOCH_TIME._replace(heading=""),
        TEST_ACCURACY._replace(heading=""),
    ),
    View(
        "Q3: what travels in a step, counted",
        "What one rank gives to collectives (under DataParallel: what leaves a $GPU), counted by instruments. A "
        "ring sends 2(N-1)/N of it.",
        is_folded=True,
        hides_zeros=True,
    ),
)
KINDS: tuple[TransferKind, ...] = get_args(TransferKind)


def transfer_row(point: PooledPoint, trained: PointsByTraining) -> Row:
    """Return the calls and bytes of one step by kind. Epoch time and accuracy come from training the same point."""
    found, spec = communications_of(point.ok_records), point.spec
    counted = {transfer.kind: transfer for part in found for transfer in part.transfers}
    keys = [(kind, quantity) for kind in KINDS for quantity in ("calls_per_step", "bytes_per_step")]
    absent = 0.0 if counted else None
    transfers = {f"{kind}_{quantity}": getattr(counted.get(kind), quantity, absent) for kind, quantity in keys}
    measured = [record.measurement for record in point.ok_records if record.measurement]
    same = trained.get(training_key(point.gpu, point.spec), [])
    match = next((other for other in same if other.epoch_time is not None), None)  # a probe has no epoch time
    notes = [] if counted else job_notes(found)
    if match:
        notes += point.difference_notes("training", match)
    return make_row(
        TRANSFERS,
        point,
        **transfers,
        gradients_bytes_formula=formula_bytes(measured, "gradients", spec),
        parameters_bytes_formula=formula_bytes(measured, "parameters", spec),
        step_time_s=median_step_time(found, whole_step(found)),
        epoch_time_s=match.epoch_time if match else None,
        test_accuracy=match.median(last_test_accuracy) if match else None,
        notes=notes,
    )


def formula_bytes(measured: Sequence[Measurement], kind: TransferKind, spec: Spec) -> float | None:
    """Return the bytes of this kind in a step by formula; None without one, or if the model's size is unknown."""
    if not measured or measured[0].gradient_bytes is None:
        return None
    strategy = STRATEGIES[spec.strategy]
    by_formula = strategy.gradient_bytes if kind == "gradients" else strategy.parameter_bytes
    return by_formula(measured[0].gradient_bytes, measured[0].sharding, spec)


def last_test_accuracy(record: Record) -> float | None:
    epochs = record.measurement.epochs if record.measurement else ()
    return epochs[-1].test_accuracy if epochs else None
