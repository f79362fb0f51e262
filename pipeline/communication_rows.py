"""The rows of what was measured of communication: step times, bandwidth, what travels, DataParallel's parts.

Keys are the JSON contract, times are of one step in seconds; a figure that cannot be computed is None and the
row's `note` says why.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline import likeness, metrics
from pipeline.cells import Cell, epoch_time_s_of
from pipeline.collectives import chosen
from pipeline.exposure import (
    Figure,
    busy_share,
    communications,
    difference,
    disagreement,
    drifted_exposure_notes,
    exposed_in,
    is_noise,
    profiled_s,
    step_time,
    step_times_s,
    traced_exposure_s,
)
from pipeline.intervals import drift_notes, pooled_notes, values_needed
from pipeline.measurement import AllReduce, Collective, Communication, TransferKind, Variant
from pipeline.rows import Row, start_row
from pipeline.schema import Record
from pipeline.spec import AXES, Spec

STEP_TIMES: dict[str, Variant] = {
    "plain_step_time_s": "plain",
    "ddp_one_step_time_s": "ddp_one",
    "no_sync_step_time_s": "no_sync",
    "no_op_hook_step_time_s": "no_op_hook",
    "step_time_s": "ddp",
}
KINDS: tuple[TransferKind, ...] = (
    "gradients",
    "buffers",
    "batchnorm_statistics",
    "parameters",
    "inputs",
    "outputs",
)
TRAINED_MAY_DIFFER = ("measure", "windows", "epochs", "input", "num_workers", "max_steps", "evaluate", "dataset")


class Place(NamedTuple):
    """Where collectives ran: one node's link is not that between nodes, and captured calls do not wait for the host."""

    device: str
    num_nodes: int
    num_gpus: int
    execution: str


def exposed_row(cell: Cell, axes: Sequence[str]) -> Row:
    """Q3.1, measured: DDP's step with and without its collectives, and what the link itself takes of it."""
    found = communications(cell.measured)
    times = {name: step_time(found, variant) for name, variant in STEP_TIMES.items()}
    (exposed, floor_s), overhead = exposed_in(found), difference(found, "no_op_hook", "no_sync")
    comm_s = profiled_s(found, ["gradients"]) or None  # a step without any all-reduce of gradients was misread
    traced_s = traced_exposure_s(found) if comm_s else None
    split = split_exposed(exposed, comm_s, floor_s)
    return start_row(
        cell,
        axes,
        **{name: figure.value_s if figure else None for name, figure in times.items()},
        noise_floor=step.noise_floor() if (step := times["step_time_s"]) else None,
        interval_over=step.over if step else None,
        **with_interval("exposed_comm_time", exposed),
        **with_interval("ddp_overhead_time", overhead),
        noise_floor_time_s=floor_s,
        comm_time_s=comm_s,
        **split,
        traced_exposed_comm_time_s=traced_s,
        buffer_comm_time_s=profiled_s(found, ["buffers", "batchnorm_statistics"]),
        straggler_wait_time_s=profiled_s(found, ["gradients"], waiting=True) if comm_s else None,
        num_windows=num_rounds(found),
        notes=exposed_notes(found, times["step_time_s"], exposed, floor_s, split, traced_s),
    )


def num_rounds(found: Sequence[Communication]) -> int:
    """Windows of each variant, over all records."""
    return sum(len(part.series[0].window_times_ns) for part in found if part.series)


def with_interval(name: str, figure: Figure | None) -> Row:
    """A figure under its name, and the ends of its interval."""
    interval = figure.interval if figure else None
    return {
        f"{name}_s": figure.value_s if figure else None,
        f"{name}_low_s": interval.low if interval else None,
        f"{name}_high_s": interval.high if interval else None,
    }


def split_exposed(exposed: Figure | None, comm_s: float | None, floor_s: float | None) -> Row:
    """The share of communication that compute hides; where more is exposed than the link takes, the host's cost.

    Neither where exposed communication is noise, and noise could hide all of it; nor where it is below 0 and no noise.
    """
    hidden = launch_s = None
    if exposed is not None and comm_s and not (is_noise(exposed, floor_s) and (floor_s or 0.0) >= comm_s):
        if exposed.value_s > comm_s:
            launch_s = exposed.value_s - comm_s
        elif exposed.value_s >= 0 or is_noise(exposed, floor_s):
            hidden = 1 - max(exposed.value_s, 0.0) / comm_s
    return {"hidden_share": hidden, "collective_launch_time_s": launch_s}


def exposed_notes(
    found: Sequence[Communication],
    step: Figure | None,
    exposed: Figure | None,
    floor_s: float | None,
    split: Row,
    traced_s: float | None,
) -> list[str]:
    """What the reader of a row must know of its figures."""
    notes = measured_notes(found)
    if any(part.profile and part.profile.collectives for part in found) and not profiled_s(found, ["gradients"]):
        notes.append("the profile shows no all-reduce of a bucket of gradients")
    if exposed is None or step is None:
        return notes
    if exposed.interval is None:
        notes.append(f"an interval needs {values_needed()} windows, got {num_rounds(found)}")
    notes += time_notes(found, "ddp", step) + drifted_exposure_notes(found)
    if is_noise(exposed, floor_s):
        notes.append("exposed communication lies inside the noise floor")
    elif exposed.value_s < 0:
        notes.append("DDP was faster than with the no-op hook, which nothing here explains")
    if split["collective_launch_time_s"] is not None:
        notes.append("more is exposed than the link takes: the rest is the host's cost of issuing collectives")
    reason = disagreement(exposed.value_s, traced_s, busy_share(found, step.value_s)) if traced_s is not None else None
    return [*notes, reason] if reason else notes


def time_notes(found: Sequence[Communication], variant: Variant, step: Figure) -> list[str]:
    """What the reader must know of the interval of a variant's step time."""
    by_repeat = [times_s for part in found if (times_s := step_times_s(part, variant))]
    drifted = drift_notes("step_time_s", by_repeat) if step.over == "windows" else []
    return pooled_notes(by_repeat, step.over) + drifted


def measured_notes(found: Sequence[Communication]) -> list[str]:
    """What the jobs themselves said that they could not measure."""
    return list(dict.fromkeys(note for part in found for note in part.notes))


def bandwidth_rows(cell: Cell, axes: Sequence[str]) -> list[Row]:
    """Q3.2: each bucket's bus bandwidth in training, that of an isolated all-reduce of its size, and the share."""
    found = communications(cell.measured)
    buckets: dict[tuple[int, int], list[Collective]] = {}  # repeats need not have the same ones
    for profile in (part.profile for part in found if part.profile):
        for number, collective in enumerate(chosen(profile, ["gradients"]), 1):
            buckets.setdefault((number, collective.num_bytes), []).append(collective)
    return [
        bandwidth_row(cell, axes, number, seen, isolated_s(found, num_bytes))
        for (number, num_bytes), seen in sorted(buckets.items())
    ]


def bandwidth_row(
    cell: Cell, axes: Sequence[str], bucket: int, seen: Sequence[Collective], alone_s: float | None
) -> Row:
    """One bucket; its duration is the shortest over ranks, the median over steps."""
    duration_s = statistics.median(min(ranks) for part in seen for ranks in part.durations_ns) / 1e9
    num_bytes, num_ranks = seen[0].num_bytes, cell.spec.world_size
    achieved = metrics.busbw_gb_s(num_bytes, duration_s, num_ranks) if duration_s else None
    peak = metrics.busbw_gb_s(num_bytes, alone_s, num_ranks) if alone_s else None
    share = achieved / peak if achieved and peak else None
    notes = [] if peak else ["no isolated all-reduce of this size was timed"]
    if share is not None and share > 1:
        notes.append("the isolated all-reduces waited for the host: the link's limit lies higher")
    return start_row(
        cell,
        axes,
        bucket=bucket,
        num_bytes=num_bytes,
        comm_time_s=duration_s,
        busbw_gb_s=achieved,
        peak_busbw_gb_s=peak,
        link_share=share,
        notes=notes,
    )


def isolated_s(found: Sequence[Communication], num_bytes: int) -> float | None:
    """An isolated all-reduce of that size in the same jobs: the median over windows."""
    times_ns = [time for part in found for size in part.sweep if size.num_bytes == num_bytes for time in size.times_ns]
    return statistics.median(times_ns) / 1e9 if times_ns else None


def sweep_rows(cells: Iterable[Cell]) -> list[Row]:
    """The link's own limit by place and size, over all points that swept there."""
    sweeps: dict[tuple[Place, int], list[tuple[Record, AllReduce]]] = {}
    for record in (record for cell in cells for record in cell.measured):
        for size in (size for part in communications([record]) for size in part.sweep):
            sweeps.setdefault((place_of(record), size.num_bytes), []).append((record, size))
    return [sweep_row(*key, found) for key, found in sorted(sweeps.items())]


def place_of(record: Record) -> Place:
    """Where a record's collectives ran, and whether they were captured."""
    spec, used = record.spec, record.measurement.execution_used if record.measurement else None
    return Place(spec.device, spec.num_nodes, spec.num_gpus, used or spec.execution)


def sweep_row(place: Place, num_bytes: int, found: Sequence[tuple[Record, AllReduce]]) -> Row:
    """One size, `n` the jobs that timed it; without figures where its buffer did not fit."""
    times_ns = [time_ns for _, part in found for time_ns in part.times_ns]
    time_s = statistics.median(times_ns) / 1e9 if times_ns else None
    notes = likeness.mixtures([record for record, part in found if part.times_ns])
    return {
        **place._asdict(),
        "num_bytes": num_bytes,
        "status": "ok" if times_ns else "oom",
        "time_s": time_s,
        "algbw_gb_s": metrics.algbw_gb_s(num_bytes, time_s) if time_s else None,
        "busbw_gb_s": metrics.busbw_gb_s(num_bytes, time_s, place.num_gpus) if time_s else None,
        "num_windows": len(times_ns),
        "n": sum(bool(part.times_ns) for _, part in found),
        "note": "; ".join(notes) or None if times_ns else "no memory for the buffer on some rank",
    }


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


def split_row(cell: Cell, axes: Sequence[str]) -> Row:
    """DataParallel's parts, each synchronized, and the step that overlaps some of them."""
    found = communications(cell.measured)
    parts: dict[str, list[int]] = {}
    for part in (part for communication in found for part in communication.split):
        parts.setdefault(part.part, []).extend(part.times_ns)
    medians = {f"{name}_time_s": statistics.median(times_ns) / 1e9 for name, times_ns in parts.items()}
    step, plain = step_time(found, "dp"), step_time(found, "plain")
    return start_row(
        cell,
        axes,
        plain_step_time_s=plain.value_s if plain else None,
        step_time_s=step.value_s if step else None,
        noise_floor=step.noise_floor() if step else None,
        interval_over=step.over if step else None,
        **{name: medians.get(name) for name in SPLIT_TIMES},
        parts_time_s=sum(medians.values()) if medians else None,
        notes=time_notes(found, "dp", step) if step else [],
    )


SPLIT_TIMES = tuple(
    f"{part}_time_s" for part in ("scatter", "replicate", "parallel_forward", "gather", "backward", "optimizer")
)
