"""The rows of communication points: step times and their differences, transfers, the parts of DataParallel.

Times are of one step, in seconds.
"""

import statistics
from collections.abc import Sequence

from pipeline.analysis import comparability
from pipeline.analysis.exposed_communication import (
    MedianTime,
    TracedExposure,
    busy_share,
    communications_of,
    drifted_exposure_notes,
    explain_trace_disagreement,
    exposed_communication,
    is_within_noise,
    job_notes,
    median_difference,
    median_step_time,
    profiled_transfer_s,
    step_times_s,
    traced_exposure,
)
from pipeline.analysis.intervals import drift_notes, min_values, pooled_notes
from pipeline.analysis.notes import Note, make_note
from pipeline.analysis.pooling import PooledPoint
from pipeline.experiment.axis_groups import TRAINED_MAY_DIFFER, alike_key
from pipeline.experiment.measurement import Communication, TransferKind, VariantName
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Spec
from pipeline.report.row_types import CommunicationRow, SplitRow, TransferRow, make_row

Figures = dict[str, float | None]

STEP_TIMES: dict[str, VariantName] = {
    "plain_step_time_s": "plain",
    "ddp_one_step_time_s": "ddp_one",
    "no_sync_step_time_s": "no_sync",
    "no_op_hook_step_time_s": "no_op_hook",
    "step_time_s": "ddp",
}


def exposed_row(point: PooledPoint, axes: Sequence[str]) -> CommunicationRow:
    """Return a row of Q3.1: the step of DDP with and without its collectives, and the time of the transfers."""
    found = communications_of(point.ok_records)
    times = {name: median_step_time(found, variant) for name, variant in STEP_TIMES.items()}
    (exposed, floor_s), overhead = exposed_communication(found), median_difference(found, "no_op_hook", "no_sync")
    comm_s = (
        profiled_transfer_s(found, ["gradients"]) or None
    )  # 0: the trace does not name the all-reduces of gradients
    traced = traced_exposure(found) if comm_s else TracedExposure()
    split = split_exposed(exposed, comm_s, floor_s)
    return make_row(
        CommunicationRow,
        point,
        axes,
        **{name: figure.value_s if figure else None for name, figure in times.items()},
        noise_floor=step.noise_floor() if (step := times["step_time_s"]) else None,
        interval_over=step.basis if step else None,
        **with_interval("exposed_comm_time", exposed),
        **with_interval("ddp_overhead_time", overhead),
        noise_floor_time_s=floor_s,
        comm_time_s=comm_s,
        **split,
        traced_exposed_comm_time_s=traced.exposed_s,
        slowed_compute_time_s=traced.slowed_s,
        buffer_comm_time_s=profiled_transfer_s(found, ["buffers", "batchnorm_statistics"]),
        straggler_wait_time_s=profiled_transfer_s(found, ["gradients"], waiting=True) if comm_s else None,
        num_windows=num_rounds(found),
        notes=[
            *exposed_notes(found, times["step_time_s"], exposed, floor_s, split),
            *trace_disagreement_notes(point.spec, found, times["step_time_s"], exposed, traced),
        ],
    )


def num_rounds(found: Sequence[Communication]) -> int:
    """Return the number of windows of each variant, over all records."""
    return sum(len(part.series[0].window_times_ns) for part in found if part.series)


def with_interval(name: str, figure: MedianTime | None) -> Figures:
    """Return a figure in seconds and the ends of its interval, by column."""
    interval = figure.interval if figure else None
    return {
        f"{name}_s": figure.value_s if figure else None,
        f"{name}_low_s": interval.low if interval else None,
        f"{name}_high_s": interval.high if interval else None,
    }


def split_exposed(exposed: MedianTime | None, comm_s: float | None, floor_s: float | None) -> Figures:
    """Return the share of communication that compute hides, or the host's cost where exposed exceeds communication.

    Both are None where noise could hide all communication, and where exposed communication is negative beyond noise.
    """
    hidden = launch_s = None
    if exposed is not None and comm_s and not (is_within_noise(exposed, floor_s) and (floor_s or 0.0) >= comm_s):
        if exposed.value_s > comm_s:
            launch_s = exposed.value_s - comm_s
        elif exposed.value_s >= 0 or is_within_noise(exposed, floor_s):
            hidden = 1 - max(exposed.value_s, 0.0) / comm_s
    return {"hidden_share": hidden, "collective_launch_time_s": launch_s}


def exposed_notes(
    found: Sequence[Communication],
    step: MedianTime | None,
    exposed: MedianTime | None,
    floor_s: float | None,
    split: Figures,
) -> list[Note]:
    """Return the notes on a row's figures."""
    notes = job_notes(found)
    if any(part.profile and part.profile.collectives for part in found) and not profiled_transfer_s(
        found, ["gradients"]
    ):
        notes.append(make_note("no_bucket_profiled"))
    if exposed is None or step is None:
        return notes
    if exposed.interval is None:
        notes.append(make_note("too_few_windows", needed=min_values(), found=num_rounds(found)))
    notes += time_notes(found, "ddp", step) + drifted_exposure_notes(found)
    if is_within_noise(exposed, floor_s):
        notes.append(make_note("exposure_is_noise"))
    elif exposed.value_s < 0:
        notes.append(make_note("exposure_negative"))
    if split["collective_launch_time_s"] is not None:
        notes.append(make_note("launch_exposed"))
    return notes


def trace_disagreement_notes(
    spec: Spec,
    found: Sequence[Communication],
    step: MedianTime | None,
    exposed: MedianTime | None,
    traced: TracedExposure,
) -> list[Note]:
    """Return a note if step times and trace disagree on exposed communication. A captured step waits for no host."""
    if step is None or exposed is None:
        return []
    busy = None if spec.is_captured else busy_share(found, step.value_s)
    reason = explain_trace_disagreement(exposed.value_s, traced, busy)
    return [reason] if reason else []


def time_notes(found: Sequence[Communication], variant: VariantName, step: MedianTime) -> list[Note]:
    """Return the notes on the interval of a variant's step time."""
    by_repeat = [times_s for part in found if (times_s := step_times_s(part, variant))]
    drifted = drift_notes("step_time_s", by_repeat) if step.basis == "windows" else []
    return pooled_notes(by_repeat, step.basis) + drifted


def split_row(point: PooledPoint, axes: Sequence[str]) -> SplitRow:
    """Return the row of DataParallel's step and its parts; each part is synchronized, the step overlaps some."""
    found = communications_of(point.ok_records)
    parts: dict[str, list[int]] = {}
    for part in (part for communication in found for part in communication.split):
        parts.setdefault(part.part, []).extend(part.times_ns)
    medians = {f"{name}_time_s": statistics.median(times_ns) / 1e9 for name, times_ns in parts.items()}
    step, plain = median_step_time(found, "dp"), median_step_time(found, "plain")
    return make_row(
        SplitRow,
        point,
        axes,
        plain_step_time_s=plain.value_s if plain else None,
        step_time_s=step.value_s if step else None,
        noise_floor=step.noise_floor() if step else None,
        interval_over=step.basis if step else None,
        **{name: medians.get(name) for name in SPLIT_TIMES},
        parts_time_s=sum(medians.values()) if medians else None,
        notes=time_notes(found, "dp", step) if step else [],
    )


SPLIT_TIMES = tuple(
    f"{part}_time_s" for part in ("scatter", "replicate", "parallel_forward", "gather", "backward", "optimizer")
)


KINDS: tuple[TransferKind, ...] = (
    "gradients",
    "buffers",
    "batchnorm_statistics",
    "parameters",
    "inputs",
    "outputs",
)


def transfer_row(point: PooledPoint, axes: Sequence[str], trained: Sequence[PooledPoint]) -> TransferRow:
    """Return a row of calls and bytes of one step by kind; epoch time and accuracy if the point was trained too."""
    found = communications_of(point.ok_records)
    counted = {transfer.kind: transfer for part in found for transfer in part.transfers}
    figures: Figures = {}
    for kind in KINDS:
        transfer = counted.get(kind)
        absent = 0.0 if counted else None
        figures[f"{kind}_calls_per_step"] = transfer.calls_per_step if transfer else absent
        figures[f"{kind}_bytes_per_step"] = transfer.bytes_per_step if transfer else absent
    gradient_bytes = next(
        (record.measurement.gradient_bytes for record in point.ok_records if record.measurement), None
    )
    replicas = point.spec.num_gpus - 1 if point.spec.strategy == "dp" else 1
    step = median_step_time(found, "ddp" if point.spec.strategy == "ddp" else "dp")
    matches = [other for other in trained if is_same_point_trained(other.spec, point.spec)]
    match = next(
        (other for other in matches if other.median_epoch_time_s is not None), None
    )  # a probe has no epoch time
    notes = [] if counted else job_notes(found)
    return make_row(
        TransferRow,
        point,
        axes,
        **figures,
        gradients_bytes_formula=None if gradient_bytes is None else float(gradient_bytes * replicas),
        step_time_s=step.value_s if step else None,
        epoch_time_s=match.median_epoch_time_s if match else None,
        test_accuracy=match.median(last_test_accuracy) if match else None,
        notes=notes
        + (
            comparability.environment_difference_notes(
                "training", match.records_by_environment, point.records_by_environment
            )
            if match
            else []
        ),
    )


def last_test_accuracy(record: Record) -> float | None:
    """Return the test accuracy after the last epoch."""
    epochs = record.measurement.epochs if record.measurement else ()
    return epochs[-1].test_accuracy if epochs else None


def is_same_point_trained(trained: Spec, measured: Spec) -> bool:
    """Return True if two points differ only in how they were measured."""
    return alike_key(trained, TRAINED_MAY_DIFFER) == alike_key(measured, TRAINED_MAY_DIFFER)
