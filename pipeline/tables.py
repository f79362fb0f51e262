"""The rows of Q1 to Q4: pooled records, derived figures, and a row for every point that has none.

Rows are plain dictionaries whose keys are the JSON contract; a figure that cannot be computed is None and
the row's `note` says why.
"""

import statistics
from collections.abc import Sequence

import msgspec

from pipeline import likeness, metrics
from pipeline.bandwidth_rows import bandwidth_rows, sweep_rows
from pipeline.baselines import Baseline, Scaling
from pipeline.cells import (
    Cell,
    drifted_notes,
    epoch_time_s_of,
    parts_notes,
    peak_memory_gib,
    pool,
    seconds,
    spread_of,
    thrash_notes,
)
from pipeline.communication_rows import exposed_row, num_rounds, split_row
from pipeline.cost import cost_rows
from pipeline.energy import energy_figures, energy_notes, host_cpu_share_of
from pipeline.exposure import communications, exposed_in, is_noise
from pipeline.measurement import Epoch
from pipeline.memory_rows import memory_row
from pipeline.outcomes import Outcome
from pipeline.prediction import Link
from pipeline.prediction_rows import prediction_rows
from pipeline.rows import Row, shown_axes, start_row
from pipeline.scaling import scaling_figures, strong_pairs, weak_pairs
from pipeline.schema import Record
from pipeline.spec import CAPTURED
from pipeline.transfer_rows import is_twin, transfer_row


class Tables(msgspec.Struct, frozen=True):
    """The rows of one experiment. Q2 holds all rows of weak scaling, then those of strong scaling."""

    Q1: list[Row]
    Q2: list[Row]
    Q3: list[Row]
    Q4: list[Row]
    oom: list[Row]
    communication: list[Row] = []
    bandwidth: list[Row] = []
    sweep: list[Row] = []
    transfers: list[Row] = []
    split: list[Row] = []
    prediction: list[Row] = []
    memory: list[Row] = []
    cost: list[Row] = []


def build_tables(outcomes: Sequence[Outcome], link: Link | None = None) -> Tables:
    """Every table of an experiment, rows in the order of the grid; `link` is what predictions are made for."""
    pooled = pool(outcomes)
    axes = shown_axes([cell.spec for cell in pooled])
    cells = [cell for cell in pooled if cell.spec.measure == "epochs"]
    measured = [cell for cell in pooled if cell.spec.measure == "communication"]
    ddp = [cell for cell in measured if cell.spec.strategy == "ddp"]
    plain = [cell for cell in cells if not cell.spec.remedies]
    weak = weak_pairs(plain)
    return Tables(
        Q1=[q1_row(cell, axes) for cell in plain if cell.spec.num_gpus == 1],
        Q2=[
            *(q2_row(cell, axes, baseline, "weak") for cell, baseline in weak),
            *(q2_row(cell, axes, baseline, "strong") for cell, baseline in strong_pairs(plain)),
        ],
        Q3=[q3_row(cell, axes, baseline, measured) for cell, baseline in weak if cell.spec.num_gpus > 1],
        Q4=[row for cell in cells for row in q4_rows(cell, axes)],
        oom=[oom_row(cell, axes) for cell in pooled if any(outcome.status == "oom" for outcome in cell.outcomes)],
        communication=[exposed_row(cell, axes) for cell in ddp],
        bandwidth=[row for cell in ddp for row in bandwidth_rows(cell, axes)],
        sweep=sweep_rows(ddp),
        transfers=[transfer_row(cell, axes, cells) for cell in measured],
        split=[split_row(cell, axes) for cell in measured if cell.spec.strategy == "dp"],
        prediction=prediction_rows(ddp, axes, link),
        memory=[memory_row(cell, axes) for cell in pooled if cell.spec.measure == "memory"],
        cost=cost_rows(outcomes),
    )


def time_figures(cell: Cell) -> Row:
    """What Q1 and Q2 say of a cell's timed windows, and as `notes` what the reader must know of their interval."""
    epoch_time_s, spread = epoch_time_s_of(cell), spread_of(cell)
    throughput = None
    if epoch_time_s is not None:
        throughput = metrics.throughput_samples_per_s(cell.spec.num_samples, epoch_time_s)
    return {
        "epoch_time_s": epoch_time_s,
        "compute_time_s": cell.median(seconds("compute_time_ns")),
        "data_time_s": cell.median(seconds("data_time_ns")),
        "throughput_samples_per_s": throughput,
        "peak_memory_gib": cell.median(peak_memory_gib),
        "epoch_time_low_s": spread.interval.low if spread.interval else None,
        "epoch_time_high_s": spread.interval.high if spread.interval else None,
        "noise_floor": spread.noise_floor(epoch_time_s),
        "interval_over": spread.over,
        "num_windows": spread.num_windows,
        "notes": [*spread.notes, *drifted_notes(cell), *parts_notes(cell), *execution_notes(cell)],
    }


def execution_notes(cell: Cell) -> list[str]:
    """What the reader must know of a step that the host did not issue operation by operation."""
    notes = []
    used = {record.measurement.execution_used for record in cell.measured if record.measurement} - {None}
    for execution in sorted(str(name) for name in used):
        if cell.spec.execution == "auto":
            notes.append(f"execution=auto used {execution}")
        if execution in CAPTURED:
            notes.append(f"execution={execution}: the parts of a step are inside one graph")
    compile_time_s = cell.median(lambda record: record.measurement.compile_time_s if record.measurement else None)
    if compile_time_s is not None:
        notes.append(f"made ready in {compile_time_s:.1f} s before the clock")
    return notes


def q1_row(cell: Cell, axes: Sequence[str]) -> Row:
    """Epoch time against batch size, on one GPU."""
    times = time_figures(cell)
    notes = [*times.pop("notes"), *energy_notes(cell), *thrash_notes(cell)]
    host = {"host_cpu_share": cell.median(host_cpu_share_of)}
    return start_row(cell, axes, **times, **energy_figures(cell), **host, notes=notes)


def q2_row(cell: Cell, axes: Sequence[str], baseline: Baseline, scaling: Scaling) -> Row:
    """Speed-up against one GPU with the same batch: per GPU (weak scaling) or over all GPUs (strong scaling)."""
    times, gains = time_figures(cell), scaling_figures(cell, baseline, scaling)
    notes = [*times.pop("notes"), *gains.pop("notes"), *energy_notes(cell)]
    return start_row(cell, axes, **times, **gains, **energy_figures(cell), notes=notes)


def q3_row(cell: Cell, axes: Sequence[str], baseline: Baseline, measured: Sequence[Cell] = ()) -> Row:
    """Computation against communication by subtraction, over the whole epoch: bytes and time of the same span.

    Beside it exposed communication as the experiment's communication point measured it, steps x one step's.
    """
    time_s, num_gpus = epoch_time_s_of(cell), cell.spec.num_gpus
    compute_s = comm_s = bandwidth = num_bytes = None
    notes = [*baseline.notes]
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


def exposed_per_epoch(cell: Cell, measured: Sequence[Cell]) -> tuple[float | None, list[str]]:
    """Measured exposed communication over an epoch's steps, and what must be known of it.

    None where the experiment did not measure the point's; by the most rounds where it did so more than once.
    """
    twins = [other for other in measured if is_twin(cell.spec, other.spec)]
    twin = max(twins, key=lambda other: num_rounds(communications(other.measured)), default=None)
    exposed, floor_s = exposed_in(communications(twin.measured)) if twin else (None, None)
    if twin is None or exposed is None or not cell.spec.is_whole_epoch:
        return None, []
    notes = ["measured exposed communication lies inside its noise floor"] * is_noise(exposed, floor_s)
    notes += likeness.unlike("measured communication", twin.kinds, cell.kinds)
    return exposed.value_s * cell.spec.full_steps_per_epoch, notes


def ring_bytes_per_epoch(cell: Cell) -> int:
    """Bytes that a rank sends in an epoch of ring all-reduces of all gradients."""
    measurement = cell.measured[0].measurement
    assert measurement is not None, "an ok record has a measurement"
    spec = cell.spec
    return round(spec.full_steps_per_epoch * metrics.ring_bytes_per_step(measurement.gradient_bytes, spec.num_gpus))


def q4_rows(cell: Cell, axes: Sequence[str]) -> list[Row]:
    """A row for every epoch that has a loss; one row for a point with remedies that has none."""
    repeats: dict[int, list[Epoch]] = {}
    for epoch in (epoch for record in cell.measured for epoch in learnt_epochs(record)):
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
