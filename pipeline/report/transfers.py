"""What one step sends, counted, and the parts of DataParallel's step."""

import statistics
from collections.abc import Sequence
from typing import get_args

from pipeline.figures import exposed_communication as exposure
from pipeline.figures.epoch_figures import timed_figures
from pipeline.figures.exposed_communication import (
    PointsByTraining,
    communications_of,
    training_key,
)
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.record import Measurement, Record, TransferKind
from pipeline.report.columns import (
    EPOCH_TIME,
    INTERVAL,
    INTERVAL_OVER,
    PLACE,
    PLAIN_STEP_TIME,
    RUN_SPREAD,
    STEP_TIME,
    TEST_ACCURACY,
)
from pipeline.report.q3 import time_notes
from pipeline.report.table import Column, Row, Table, View, make_row


def transfer(kind: str, what: str, heading: str) -> tuple[Column, Column]:
    """Return the bytes and the calls per step of one kind of transfer."""
    return (
        Column(f"{kind}_bytes_per_step", heading, f"Bytes per step of {what}."),
        Column(f"{kind}_calls_per_step", "", f"Calls per step that send {what}."),
    )


def split_part(part: str, meaning: str) -> Column:
    return Column(f"{part}_time_s", f"{part.replace('_', ' ')} [ms]", meaning)


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

SPLIT = Table(
    "split",
    "Q3",
    (
        *PLACE,
        STEP_TIME._replace(interval="kept"),
        split_part("scatter", "Time to distribute the inputs to the GPUs."),
        split_part("replicate", "Time to copy the module to every GPU."),
        split_part("parallel_forward", "Time of the forward pass on all GPUs."),
        split_part("gather", "Time to collect the outputs."),
        split_part("backward", "Backward pass and reduction onto the first GPU."),
        split_part("optimizer", "Time to update the weights."),
        Column("parts_time_s", "sum of parts [ms]", "Sum of the parts."),
        PLAIN_STEP_TIME,
        INTERVAL._replace(heading=""),
        INTERVAL_OVER,
        RUN_SPREAD._replace(heading=""),
    ),
    View(
        "Q3: DataParallel's step, part by part",
        "Every device is synchronized after each part, so their sum differs from the step.",
        is_folded=True,
    ),
)
KINDS: tuple[TransferKind, ...] = get_args(TransferKind)
SPLIT_PARTS = ("scatter", "replicate", "parallel_forward", "gather", "backward", "optimizer")


def split_row(point: PooledPoint) -> Row:
    """Return the row of DataParallel's step and of its parts, which are timed with a synchronization after each.

    The whole step is timed without these synchronizations.
    """
    found = communications_of(point.ok_records)
    parts = [part for communication in found for part in communication.split]
    times_ns = group_pairs((part.part, time_ns) for part in parts for time_ns in part.times_ns)
    medians_s = {name: statistics.median(part_ns) / 1e9 for name, part_ns in times_ns.items()}
    whole = exposure.whole_step(found)
    step = exposure.median_step_time(found, whole)
    return make_row(
        SPLIT,
        point,
        plain_step_time_s=exposure.median_step_time(found, "plain"),
        **timed_figures("step_time_s", step),
        **{f"{name}_time_s": medians_s.get(name) for name in SPLIT_PARTS},
        parts_time_s=sum(medians_s.values()) if medians_s else None,
        notes=time_notes(found, whole, step) if step is not None else [],
    )


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
    notes = [] if counted else exposure.job_notes(found)
    if match:
        notes += point.difference_notes("training", match)
    return make_row(
        TRANSFERS,
        point,
        **transfers,
        gradients_bytes_formula=formula_bytes(measured, "gradients", spec),
        parameters_bytes_formula=formula_bytes(measured, "parameters", spec),
        step_time_s=exposure.median_step_time(found, exposure.whole_step(found)),
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
