"""The rows of Q1 to Q4: pooled records, derived figures, and a row for every point that has none.

Rows are plain dictionaries whose keys are the JSON contract; a figure that cannot be computed is None and
the row's `note` says why.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pipeline import metrics
from pipeline.cells import (
    POOLED_AXES,
    Baseline,
    Cell,
    epoch_time_s_of,
    find_baseline,
    index_baselines,
    peak_memory_gib,
    pool,
    seconds,
)
from pipeline.energy import energy_figures, energy_notes, host_cpu_share_of
from pipeline.outcomes import Outcome
from pipeline.schema import Epoch, Record
from pipeline.spec import AXES, Spec

Row = dict[str, Any]

STATED_FIGURES = ("epoch_time_s", "compute_time_s", "data_time_s", "peak_memory_gib")  # that a report may leave out
ALWAYS_SHOWN = ("strategy", "num_nodes", "num_gpus", "batch_size_per_gpu", "precision", "input")


class Tables(msgspec.Struct, frozen=True):
    """The rows of one experiment."""

    Q1: list[Row]
    Q2: list[Row]
    Q3: list[Row]
    Q4: list[Row]
    oom: list[Row]


def build_tables(outcomes: Sequence[Outcome]) -> Tables:
    """Every table of an experiment, rows in the order of the grid."""
    cells = pool(outcomes)
    axes = shown_axes(outcome.spec for outcome in outcomes)
    plain = [cell for cell in cells if not cell.spec.remedies]
    baselines = index_baselines(plain)
    return Tables(
        Q1=[q1_row(cell, axes) for cell in plain if cell.spec.num_gpus == 1],
        Q2=[q2_row(cell, axes, find_baseline(cell, baselines)) for cell in plain],
        Q3=[q3_row(cell, axes, find_baseline(cell, baselines)) for cell in plain if cell.spec.num_gpus > 1],
        Q4=[row for cell in cells for row in q4_rows(cell, axes)],
        oom=[oom_row(cell, axes) for cell in cells if any(outcome.status == "oom" for outcome in cell.outcomes)],
    )


def shown_axes(specs: Iterable[Spec]) -> list[str]:
    """The axes of every row: those always shown, and every other that varies in the experiment."""
    seen: dict[str, set[Any]] = {axis: set() for axis in AXES}
    for spec in specs:
        for axis in AXES:
            seen[axis].add(getattr(spec, axis))
    varying = [axis for axis in AXES if len(seen[axis]) > 1 and axis not in POOLED_AXES]
    return [*ALWAYS_SHOWN, *(axis for axis in varying if axis not in ALWAYS_SHOWN)]


def start_row(cell: Cell, axes: Sequence[str], **figures: Any) -> Row:
    """The axes, the status and the figures of a cell; `note` joins what figures give as `notes`."""
    notes = [*cell.notes(), *figures.pop("notes", [])]
    absent = [name for name, value in figures.items() if value is None and name in STATED_FIGURES]
    if absent and cell.measured and not any(record.measured for record in cell.measured):
        notes.append(f"not stated: {', '.join(absent)}")
    row: Row = {axis: to_json(getattr(cell.spec, axis)) for axis in axes}
    row["global_batch_size"] = cell.spec.global_batch_size
    row["status"] = cell.status
    row |= figures
    row["n"] = len(cell.measured)
    row["note"] = "; ".join(notes) or None
    return row


def to_json(value: Any) -> Any:
    """An axis's value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def time_figures(cell: Cell) -> Row:
    """What Q1 and Q2 say of a cell's timed epoch."""
    epoch_time_s = epoch_time_s_of(cell)
    throughput = None
    if epoch_time_s is not None:
        throughput = metrics.throughput_samples_per_s(cell.spec.num_samples, epoch_time_s)
    return {
        "epoch_time_s": epoch_time_s,
        "compute_time_s": cell.median(seconds("compute_time_ns")),
        "data_time_s": cell.median(seconds("data_time_ns")),
        "throughput_samples_per_s": throughput,
        "peak_memory_gib": cell.median(peak_memory_gib),
    }


def q1_row(cell: Cell, axes: Sequence[str]) -> Row:
    """Epoch time against batch size, on one GPU."""
    figures = time_figures(cell) | energy_figures(cell) | {"host_cpu_share": cell.median(host_cpu_share_of)}
    return start_row(cell, axes, **figures, notes=energy_notes(cell))


def q2_row(cell: Cell, axes: Sequence[str], baseline: Baseline) -> Row:
    """Speed-up against one GPU with the same per-GPU batch."""
    figures = time_figures(cell)
    time_s = figures["epoch_time_s"]
    speedup = None
    if time_s is not None and baseline.time_s is not None:
        speedup = metrics.speedup(baseline.time_s, time_s)
    return start_row(
        cell,
        axes,
        **figures,
        scaling="weak",
        speedup=speedup,
        parallel_efficiency=None if speedup is None else metrics.parallel_efficiency(speedup, cell.spec.num_gpus),
        baseline=baseline.strategy,
        **energy_figures(cell),
        notes=[*([baseline.note] if baseline.note and cell.spec.num_gpus > 1 else []), *energy_notes(cell)],
    )


def q3_row(cell: Cell, axes: Sequence[str], baseline: Baseline) -> Row:
    """Computation against communication by subtraction, over the whole epoch: bytes and time of the same span."""
    time_s, num_gpus = epoch_time_s_of(cell), cell.spec.num_gpus
    compute_s = comm_s = bandwidth = num_bytes = None
    notes = [baseline.note] if baseline.note else []
    if cell.measured and cell.spec.is_whole_epoch:
        num_bytes = ring_bytes_per_epoch(cell)
    if baseline.time_s is not None and time_s is not None:
        compute_s = metrics.compute_time_subtraction_s(baseline.time_s, num_gpus)
        comm_s = metrics.comm_time_subtraction_s(baseline.time_s, time_s, num_gpus)
        if comm_s is None:
            notes.append("T(N) <= T(1)/N: subtraction cannot see the communication")
    if comm_s is not None and num_bytes is not None:
        bandwidth = metrics.bandwidth_gb_s(num_bytes, comm_s)
        if cell.spec.strategy == "dp":
            notes.append("a ring is assumed, which DataParallel does not use")
    return start_row(
        cell,
        axes,
        epoch_time_s=time_s,
        compute_time_subtraction_s=compute_s,
        comm_time_subtraction_s=comm_s,
        steps_per_epoch=cell.spec.full_steps_per_epoch if cell.spec.is_whole_epoch else None,
        ring_bytes_per_epoch=num_bytes,
        bandwidth_subtraction_gb_s=bandwidth,
        baseline=baseline.strategy,
        notes=notes,
    )


def ring_bytes_per_epoch(cell: Cell) -> int:
    """Bytes that a rank sends in an epoch of ring all-reduces of all gradients."""
    measurement = cell.measured[0].measurement
    assert measurement is not None, "an ok record has a measurement"
    spec = cell.spec
    steps = metrics.steps_per_epoch(spec.num_samples, spec.num_gpus, spec.batch_size_per_gpu)
    return round(steps * metrics.ring_bytes_per_step(measurement.gradient_bytes, spec.num_gpus))


def q4_rows(cell: Cell, axes: Sequence[str]) -> list[Row]:
    """A row for every epoch that has a loss; one row for a point with remedies that has none."""
    rows = []
    for number in sorted({epoch.epoch for record in cell.measured for epoch in learnt_epochs(record)}):
        epochs = [epoch for record in cell.measured for epoch in learnt_epochs(record) if epoch.epoch == number]
        rows.append(q4_row(cell, axes, epochs))
    if not rows and cell.spec.remedies:
        empty = dict.fromkeys(("epoch", "num_updates", "loss", "accuracy", "test_loss", "test_accuracy"))
        rows.append(start_row(cell, axes, remedies=list(cell.spec.remedies), **empty, diverged_at_update=None))
    return rows


def learnt_epochs(record: Record) -> list[Epoch]:
    """The epochs with a loss; one that was not finite is a loss too."""
    epochs = record.measurement.epochs if record.measurement and not record.spec.is_probe else ()
    return [epoch for epoch in epochs if epoch.loss is not None or epoch.diverged_at_update is not None]


def q4_row(cell: Cell, axes: Sequence[str], epochs: Sequence[Epoch]) -> Row:
    """Medians over the repeats of one epoch; a loss that diverged is None with the update at which it did."""
    diverged = [epoch.diverged_at_update for epoch in epochs if epoch.diverged_at_update is not None]

    def median(field: str) -> float | None:
        values = [value for epoch in epochs if (value := getattr(epoch, field)) is not None]
        return statistics.median(values) if values else None

    row = start_row(
        cell,
        axes,
        remedies=list(cell.spec.remedies),
        epoch=epochs[0].epoch,
        num_updates=epochs[0].num_updates,
        loss=median("loss"),
        accuracy=median("accuracy"),
        test_loss=median("test_loss"),
        test_accuracy=median("test_accuracy"),
        diverged_at_update=min(diverged, default=None),
        notes=[f"{len(diverged)} of {len(epochs)} diverged"] if diverged else [],
    )
    return row | {"n": len(epochs)}


def oom_row(cell: Cell, axes: Sequence[str]) -> Row:
    """A point that ran out of memory."""
    records = [outcome.record for outcome in cell.outcomes if outcome.record and outcome.status == "oom"]
    reasons = sorted({record.reason for record in records})
    row = start_row(cell, axes, reason="; ".join(reasons), max_steps=cell.spec.max_steps)
    return row | {"status": "oom", "n": len(records)}
