"""The rows of Q1 to Q4 and of out-of-memory: one pooled point each, with its figures and notes."""

import statistics
from collections.abc import Sequence

from pipeline.analysis import comparability, formulas
from pipeline.analysis.energy import energy_figures, energy_notes, host_cpu_share_of
from pipeline.analysis.exposure import communications_of, exposed_communication, is_within_noise
from pipeline.analysis.pooling import (
    PooledPoint,
    median_window_s,
    record_peak_memory_gib,
)
from pipeline.analysis.scaling import Baseline, Scaling, scaling_figures
from pipeline.experiment.measurement import Epoch
from pipeline.experiment.record import Record
from pipeline.experiment.spec import CAPTURED_EXECUTIONS
from pipeline.report.communication_rows import is_same_point_trained, num_rounds
from pipeline.report.rows import Row, start_row


def time_figures(cell: PooledPoint) -> Row:
    """What Q1 and Q2 say of a cell's timed windows, and as `notes` what the reader must know of their interval."""
    epoch_time_s, spread = cell.median_epoch_time_s, cell.epoch_time_interval
    throughput = None
    if epoch_time_s is not None:
        throughput = formulas.throughput_samples_per_s(cell.spec.num_samples, epoch_time_s)
    return {
        "epoch_time_s": epoch_time_s,
        "compute_time_s": cell.median(median_window_s("compute_time_ns")),
        "data_time_s": cell.median(median_window_s("data_time_ns")),
        "throughput_samples_per_s": throughput,
        "peak_memory_gib": cell.median(record_peak_memory_gib),
        "epoch_time_low_s": spread.interval.low if spread.interval else None,
        "epoch_time_high_s": spread.interval.high if spread.interval else None,
        "noise_floor": spread.noise_floor(epoch_time_s),
        "interval_over": spread.over,
        "num_windows": spread.num_windows,
        "notes": [*spread.notes, *cell.epoch_time_drift_notes, *cell.parts_notes, *execution_notes(cell)],
    }


def execution_notes(cell: PooledPoint) -> list[str]:
    """What the reader must know of a step that the host did not issue operation by operation."""
    notes = []
    used = {record.measurement.execution_used for record in cell.ok_records if record.measurement} - {None}
    for execution in sorted(str(name) for name in used):
        if cell.spec.execution == "auto":
            notes.append(f"execution=auto used {execution}")
        if execution in CAPTURED_EXECUTIONS:
            notes.append(f"execution={execution}: the parts of a step are inside one graph")
    compile_time_s = cell.median(lambda record: record.measurement.compile_time_s if record.measurement else None)
    if compile_time_s is not None:
        notes.append(f"made ready in {compile_time_s:.1f} s before the clock")
    return notes


def q1_row(cell: PooledPoint, axes: Sequence[str]) -> Row:
    """Epoch time against batch size, on one GPU."""
    times = time_figures(cell)
    notes = [*times.pop("notes"), *energy_notes(cell), *cell.allocator_retry_notes]
    host = {"host_cpu_share": cell.median(host_cpu_share_of)}
    return start_row(cell, axes, **times, **energy_figures(cell), **host, notes=notes)


def q2_row(cell: PooledPoint, axes: Sequence[str], baseline: Baseline, scaling: Scaling) -> Row:
    """Speed-up against one GPU with the same batch: per GPU (weak scaling) or over all GPUs (strong scaling)."""
    times, gains = time_figures(cell), scaling_figures(cell, baseline, scaling)
    notes = [*times.pop("notes"), *gains.pop("notes"), *energy_notes(cell)]
    return start_row(cell, axes, **times, **gains, **energy_figures(cell), notes=notes)


def q3_row(cell: PooledPoint, axes: Sequence[str], baseline: Baseline, measured: Sequence[PooledPoint] = ()) -> Row:
    """Computation against communication by subtraction, over the whole epoch: bytes and time of the same span.

    Beside it exposed communication as the experiment's communication point measured it, steps x one step's.
    """
    time_s, num_gpus = cell.median_epoch_time_s, cell.spec.num_gpus
    compute_s = comm_s = bandwidth = num_bytes = None
    notes = [*baseline.notes]
    if cell.ok_records and cell.spec.is_whole_epoch:
        num_bytes = ring_bytes_per_epoch(cell)
    if baseline.time_s is not None and time_s is not None:
        compute_s = formulas.compute_time_subtraction_s(baseline.time_s, num_gpus)
        comm_s = formulas.comm_time_subtraction_s(baseline.time_s, time_s, num_gpus)
        if comm_s is None:
            notes.append("T(N) <= T(1)/N: subtraction cannot see the communication")
    if comm_s is not None and num_bytes is not None:
        bandwidth = formulas.bandwidth_gb_s(num_bytes, comm_s)
        if cell.spec.strategy == "dp":
            notes.append("a ring is assumed, which DataParallel does not use")
    exposed_s, exposed_notes = exposed_per_epoch(cell, measured)
    return start_row(
        cell,
        axes,
        epoch_time_s=time_s,
        compute_time_subtraction_s=compute_s,
        comm_time_subtraction_s=comm_s,
        steps_per_epoch=cell.spec.full_steps_per_epoch if cell.spec.is_whole_epoch else None,
        ring_bytes_per_epoch=num_bytes,
        bandwidth_subtraction_gb_s=bandwidth,
        exposed_comm_time_s=exposed_s,
        baseline=baseline.strategy,
        notes=notes + exposed_notes,
    )


def exposed_per_epoch(cell: PooledPoint, measured: Sequence[PooledPoint]) -> tuple[float | None, list[str]]:
    """Measured exposed communication over an epoch's steps, and what must be known of it.

    None where the experiment did not measure the point's; by the most rounds where it did so more than once.
    """
    twins = [other for other in measured if is_same_point_trained(cell.spec, other.spec)]
    twin = max(twins, key=lambda other: num_rounds(communications_of(other.ok_records)), default=None)
    exposed, floor_s = exposed_communication(communications_of(twin.ok_records)) if twin else (None, None)
    if twin is None or exposed is None or not cell.spec.is_whole_epoch:
        return None, []
    notes = ["measured exposed communication lies inside its noise floor"] * is_within_noise(exposed, floor_s)
    notes += comparability.environment_difference_notes(
        "measured communication", twin.records_by_environment, cell.records_by_environment
    )
    return exposed.value_s * cell.spec.full_steps_per_epoch, notes


def ring_bytes_per_epoch(cell: PooledPoint) -> int:
    """Bytes that a rank sends in an epoch of ring all-reduces of all gradients."""
    measurement = cell.ok_records[0].measurement
    assert measurement is not None, "an ok record has a measurement"
    spec = cell.spec
    return round(spec.full_steps_per_epoch * formulas.ring_bytes_per_step(measurement.gradient_bytes, spec.num_gpus))


def q4_rows(cell: PooledPoint, axes: Sequence[str]) -> list[Row]:
    """A row for every epoch that has a loss; one row for a point with remedies that has none."""
    repeats: dict[int, list[Epoch]] = {}
    for epoch in (epoch for record in cell.ok_records for epoch in learnt_epochs(record)):
        repeats.setdefault(epoch.epoch, []).append(epoch)
    rows = [q4_row(cell, axes, epochs) for _, epochs in sorted(repeats.items())]
    if not rows and cell.spec.remedies:
        empty = dict.fromkeys(("epoch", "num_updates", "loss", "accuracy", "test_loss", "test_accuracy"))
        rows.append(start_row(cell, axes, remedies=list(cell.spec.remedies), **empty, diverged_at_update=None))
    return rows


def learnt_epochs(record: Record) -> list[Epoch]:
    """The epochs with a loss; one that was not finite is a loss too."""
    epochs = record.measurement.epochs if record.measurement and not record.spec.is_probe else ()
    return [epoch for epoch in epochs if epoch.loss is not None or epoch.diverged_at_update is not None]


def q4_row(cell: PooledPoint, axes: Sequence[str], epochs: Sequence[Epoch]) -> Row:
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


def oom_row(cell: PooledPoint, axes: Sequence[str]) -> Row:
    """A point that ran out of memory."""
    records = [outcome.record for outcome in cell.outcomes if outcome.record and outcome.status == "oom"]
    reasons = sorted({record.reason for record in records})
    row = start_row(cell, axes, reason="; ".join(reasons), max_steps=cell.spec.max_steps)
    return row | {"status": "oom", "n": len(records)}
