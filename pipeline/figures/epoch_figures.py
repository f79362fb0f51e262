"""The figures of a point over its timed windows: its loader, compute rate, energy and clocks, and notes on them.

A rank's data time is the time that it waits for its own batch. Ranks that synchronize in every step also wait until the
last rank has its batch. They do so inside a collective, so that this second wait is part of their compute time.

The compute rate is in TFLOP/s of a GPU; MFU is its share of the GPU's peak at the precision that computed. The FLOPs of
a sample stand in the record. All functions are pure functions of records. Times are in seconds.
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from pipeline.figures import formulas
from pipeline.figures.formulas import median_of_known
from pipeline.figures.intervals import Estimate, median_time
from pipeline.figures.notes import Note, NoteKind, make_note, text_note
from pipeline.figures.pooling import (
    PooledPoint,
    group_pairs,
    median_window_s,
    per_epoch,
    record_peak_memory_gib,
    timed_epochs,
    update_times_s,
)
from pipeline.plan.axes import CAPTURED_EXECUTIONS
from pipeline.plan.spec import Spec
from pipeline.records.record import Epoch, GpuWindow, Record

LOADER_BOUND = NoteKind(
    "loader_bound",
    "loader-bound: the $GPU that waits longest waits for data in {share:.0%} of the epoch",
    badge="waits for data {share:.0%}",
    word="loader-bound",
    forbids=("speedup", "comm_time_subtraction_s"),
)

MAX_DATA_SHARE = 0.1  # of an epoch; above it the point measures the loader


def total_workers(spec: Spec) -> int | None:
    """Return the loader workers of all ranks (0: the ranks load images themselves); None if no loader or not stated."""
    return spec.num_workers * spec.world_size if spec.input == "dataloader" and spec.num_workers is not None else None


def batch_wait_s(epoch: Epoch) -> float | None:
    """Return a lower bound of the time that the slowest rank waits for the batches of other ranks in an epoch.

    The slowest rank has the longest epoch time. The bound is the longest data time of any rank minus the data time of
    the slowest rank. The true wait is longer if different ranks are late in different steps: records hold only sums
    over the epoch. None if fewer than two ranks have a data time, or if the slowest has none.
    """
    own = epoch.slowest_rank
    known = [rank.data_time_ns for rank in epoch.ranks if rank.data_time_ns is not None]
    if own is None or own.data_time_ns is None or len(known) < 2:
        return None
    return (max(known) - own.data_time_ns) / 1e9


def median_batch_wait_s(record: Record) -> float | None:
    """Return the median of `batch_wait_s` over the timed epochs of a record."""
    waits_s = [(epoch, batch_wait_s(epoch)) for epoch in timed_epochs(record)]
    return median_of_known(wait_s * per_epoch(record, epoch) for epoch, wait_s in waits_s if wait_s is not None)


def longest_data_share(point: PooledPoint) -> float | None:
    """Return data time plus batch wait as a share of the epoch time, medians of each; None if not known.

    It is the share in which the GPU that waits longest has no data: the one figure of tables, notes and answers.
    """
    data_s, time_s = point.median(median_window_s("data_time_ns")), point.epoch_time
    if data_s is None or not time_s:
        return None
    return (data_s + (point.median(median_batch_wait_s) or 0.0)) / time_s


def is_loader_bound(point: PooledPoint) -> bool | None:
    """True if a GPU waits for the loader in more than MAX_DATA_SHARE of the epoch; None if that is not known.

    False without a loader: the device then prepares its batches itself, and data time is that work.
    """
    if point.spec.input in ("gpu", "synthetic"):
        return False
    share = longest_data_share(point)
    return None if share is None else share > MAX_DATA_SHARE


def loader_notes(point: PooledPoint) -> list[Note]:
    """Return a note if the point is loader-bound."""
    return [make_note(LOADER_BOUND, share=longest_data_share(point))] if is_loader_bound(point) else []


MFU_PEAK = NoteKind("mfu_peak", "MFU is of {peak} TFLOP/s in {precision} ({source})", word="MFU peak")
NO_PEAK = NoteKind("no_peak", "no MFU: no peak of {gpu} in {precision} is known; collect --peak-tflops states one")

HOPPER_SXM = {"bf16": 989.0, "fp16": 989.0, "tf32": 494.0, "fp32": 67.0}
VENDOR = r"(NVIDIA |Tesla )?"  # that some drivers put before the name
PEAKS = {
    r"V100-SXM2-(16|32)GB": {"fp16": 125.0, "fp32": 15.7},
    r"V100-PCIE-(16|32)GB": {"fp16": 112.0, "fp32": 14.0},
    r"A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    r"A100-SXM4-[48]0GB|A100-PCIE-40GB|A100 80GB PCIe": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5},
    r"T4": {"fp16": 65.0, "fp32": 8.1},
    r"A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    r"L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    r"L40S": {"bf16": 362.05, "fp16": 362.05, "tf32": 183.0, "fp32": 91.6},
    r"GeForce RTX 4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},
    r"B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0, "fp32": 75.0},
    r"H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.0},
    r"H100 80GB HBM3": HOPPER_SXM,
    r"H200": HOPPER_SXM,
}
"""Dense peaks in TFLOP/s by the name that the driver reports, from NVIDIA's data sheets; docs/mfu.md names them.

Where a data sheet gives figures with sparsity alone (L4, B200) the dense ones are half. Matrix products accumulate in
fp32. A name must match as a whole: a part of a GPU (MIG) and other variants (NVL, V100S, A10G) have other peaks.
"""


class Peak(NamedTuple):
    """The peak of one GPU in TFLOP/s, and who says so."""

    tflops: float
    source: Literal["data sheet", "stated"]


def find_peak(gpu: str, precision: str, stated_tflops: float | None = None) -> Peak | None:
    """Return the stated peak, else that of the data sheet; None for an unknown GPU, or one without this precision."""
    if stated_tflops is not None:
        return Peak(stated_tflops, "stated")
    tflops = peaks_of(gpu).get(precision)
    return None if tflops is None else Peak(tflops, "data sheet")


def peaks_of(gpu: str) -> dict[str, float]:
    """Return the peaks of a GPU by the name that the driver reports; none of an unknown one."""
    return next((peaks for name, peaks in PEAKS.items() if re.fullmatch(f"{VENDOR}({name})", gpu)), {})


def precision_of(point: PooledPoint) -> str:
    """Return the precision that computed; "" if the records do not state one, or differ in it."""
    used = {measurement.precision_used for measurement in point.measurements} - {None}
    return str(*used) if len(used) == 1 else ""


def shown_precision(point: PooledPoint) -> str | None:
    """Return the precision that computed, else the one that was asked for; where there is no TF32 that is fp32."""
    has_tf32 = point.spec.device == "cuda" and "tf32" in (peaks_of(point.gpu) or ("tf32",))
    asked = "fp32" if point.spec.precision == "tf32" and not has_tf32 else point.spec.precision
    return precision_of(point) or asked


def compute_rate_figures(point: PooledPoint, stated_tflops: float | None = None) -> dict[str, Any]:
    """Return the columns of FLOPs, with the interval that follows from the epoch time's; None where they are not known.

    The peak is left out where there is no rate to compare with it.
    """
    flops = median_of_known(measurement.flops_per_sample for measurement in point.measurements)
    time_s = point.epoch_time
    if flops is None or time_s is None or point.num_samples is None:
        return {"flops_per_sample": flops}
    tera = flops * point.num_samples / point.spec.num_gpus / formulas.TERA
    ends = (None if end is None else tera / end for end in (time_s.high, time_s.low))
    rate = Estimate(tera / time_s, *ends)
    peak = find_peak(point.gpu, precision_of(point), stated_tflops)
    return {
        "flops_per_sample": flops,
        "tflops_per_gpu": rate,
        "mfu": rate.over(peak.tflops) if peak else None,
        "peak_tflops": peak.tflops if peak else None,
        "peak_source": peak.source if peak else None,
    }


def compute_rate_notes(point: PooledPoint, stated_tflops: float | None = None) -> list[Note]:
    """Return notes on the peak of MFU or on a GPU without one, and on what the count of FLOPs lacks."""
    found = {measurement.flops_note for measurement in point.measurements} - {None}
    notes = [text_note(str(note)) for note in sorted(map(str, found))]
    figures = compute_rate_figures(point, stated_tflops)
    precision = precision_of(point) or "a precision that was not seen"
    if figures.get("mfu") is not None:
        peak, source = figures["peak_tflops"], figures["peak_source"]
        notes.append(make_note(MFU_PEAK, peak=f"{peak:g}", precision=precision, source=source))
    elif figures.get("tflops_per_gpu") is not None and point.gpu:
        notes.append(make_note(NO_PEAK, gpu=point.gpu, precision=precision))
    return notes


THROTTLED = NoteKind("throttled", "throttled: {reasons:figures}", badge="clocks lowered", word="throttled")
NO_ENERGY = NoteKind(
    "no_energy", "no energy: {samples} samples of a $GPU in the window are too few, or a $GPU was not sampled"
)

POWER_LIMITS = {"sw_power_cap", "hw_power_brake"}  # reasons for lowered clocks
MIN_CLOCK_LOSS = 0.03


def energy_figures(point: PooledPoint) -> dict[str, float | None]:
    """Return the energy columns of Q1 and Q2. Energy is that of all GPUs used, without host and switches."""
    energy_j = point.median(energy_j_of)
    per_sample_j = None if energy_j is None else energy_j / point.spec.num_samples
    return {
        "energy_j": energy_j,
        "energy_per_sample_j": per_sample_j,
        "energy_per_item_j": per_sample_j and per_sample_j / (point.items_per_sample or 1),
        "sm_clock_mhz": point.median(sm_clock_mhz_of),
    }


def energy_notes(point: PooledPoint) -> list[Note]:
    """Return notes on lowered clocks, and on energy that is missing although GPUs were sampled."""
    windows = [window for record in point.ok_records for window in timed_windows(record)]
    notes = clock_notes(point)
    if windows and point.median(energy_j_of) is None:
        notes.append(make_note(NO_ENERGY, samples=min(window.num_telemetry_samples for window in windows)))
    return notes


def clock_notes(point: PooledPoint) -> list[Note]:
    """Return a note if clocks were lowered during the timed epochs."""
    return throttled_notes([window for record in point.ok_records for window in timed_windows(record)])


def throttled_notes(windows: Sequence[GpuWindow]) -> list[Note]:
    """Return a note with the reasons for which clocks were lowered in these windows, if any, and by how much."""
    reasons = sorted({reason for window in windows for reason in window.throttle_reasons or ()})
    return [make_note(THROTTLED, reasons=reasons, below=clock_loss(windows))] if reasons else []


def clock_loss(windows: Iterable[GpuWindow]) -> float | None:
    """Return how far the clock of the slowest GPU is below its highest, as a share; None if not known."""
    shares = group_pairs(
        (window.gpu, window.median_sm_clock_mhz / window.highest_sm_clock_mhz)
        for window in windows
        if window.highest_sm_clock_mhz and window.median_sm_clock_mhz is not None
    )
    slowest = min(map(statistics.median, shares.values()), default=None)
    return None if slowest is None else 1 - slowest


def is_power_limited(note: Note) -> bool:
    """True if the power limit alone lowered the clock, and by more than MIN_CLOCK_LOSS: a smaller loss costs little."""
    return set(note.values["reasons"]) <= POWER_LIMITS and (note.values["below"] or 0.0) > MIN_CLOCK_LOSS


def all_windows(records: Iterable[Record]) -> list[GpuWindow]:
    """Return the telemetry of every sampled GPU over all epochs of the records."""
    return [window for record in records if record.telemetry for window in record.telemetry.gpus]


def timed_windows(record: Record) -> Sequence[GpuWindow]:
    windows = record.telemetry.gpus if record.telemetry else ()
    return [window for window in windows if window.epoch in record.spec.timed_epochs]


def energy_j_of(record: Record) -> float | None:
    """Return the energy of all GPUs used in an epoch: the median over those in which every GPU has one, else None."""
    known = ((window.epoch, window.energy_j) for window in timed_windows(record))
    by_epoch = group_pairs((epoch, energy_j) for epoch, energy_j in known if energy_j is not None)
    num_gpus = len(record.environment.gpus)
    whole = {epoch.epoch: per_epoch(record, epoch) for epoch in timed_epochs(record)}
    return formulas.median_of_known(
        sum(energies) * whole[number] for number, energies in by_epoch.items() if len(energies) == num_gpus
    )


def sm_clock_mhz_of(record: Record) -> float | None:
    """Return the median clock of the slowest GPU, for which the others wait."""
    clocks = (window.median_sm_clock_mhz for window in timed_windows(record))
    return min((clock for clock in clocks if clock is not None), default=None)


def host_cpu_share_of(record: Record) -> float | None:
    """Return the busy share of the CPUs of the busiest node in a timed epoch."""
    hosts, timed = record.telemetry.hosts if record.telemetry else (), record.spec.timed_epochs
    return max((host.cpu_share for host in hosts if host.epoch in timed and host.cpu_share is not None), default=None)


EXECUTION_CHOSEN = NoteKind("execution_chosen", "execution=auto used {execution}")
EXECUTION_CAPTURED = NoteKind(
    "execution_captured", "execution={execution}: one graph is the whole step, so its parts have no times"
)
COMPILE_TIME = NoteKind("compile_time", "compiling or capturing took {time_s:.1f} s, before the clock started")


def timed_figures(key: str, time: Estimate | None) -> dict[str, Any]:
    """Return the columns of a row's main time: the time, its interval and the interval's basis, and the run spread."""
    if time is None:
        return {key: None}
    spread_s = formulas.run_spread(time.run_medians)
    return {key: time, "noise_floor": time.relative_half_width, "interval_over": time.basis, "run_spread_s": spread_s}


def time_figures(point: PooledPoint, peak_tflops: float | None) -> dict[str, Any]:
    """Return the figures of Q1 and Q2 over a point's timed windows, their energy and their FLOPs."""
    epoch_time_s = point.epoch_time
    throughput = items_per_s = None
    if epoch_time_s is not None and point.num_samples is not None:
        throughput = point.num_samples / epoch_time_s
        items_per_s = throughput * (point.items_per_sample or 1)
    return {
        **timed_figures("epoch_time_s", epoch_time_s),
        "update_time_s": median_time([*map(update_times_s, point.ok_records)]),
        **energy_figures(point),
        **compute_rate_figures(point, peak_tflops),
        "compute_time_s": point.median(median_window_s("compute_time_ns")),
        "data_time_s": point.median(median_window_s("data_time_ns")),
        "throughput_samples_per_s": throughput,
        "throughput_items_per_s": items_per_s,
        "peak_memory_gib": point.median(record_peak_memory_gib),
        "num_windows": sum(map(len, point.epoch_times_s)),
        "num_workers_total": total_workers(point.spec),
        "data_share": longest_data_share(point),
        "batch_wait_s": point.median(median_batch_wait_s),
        "is_loader_bound": is_loader_bound(point),
    }


def executions_used(point: PooledPoint) -> list[str]:
    """Return how its steps were executed, as its records say; empty if none does."""
    used = {measurement.execution_used for measurement in point.measurements}
    return sorted(execution for execution in used if execution is not None)


def time_notes(point: PooledPoint) -> list[Note]:
    """Return the notes on these figures, last those on a step that was compiled or captured."""
    notes = [*loader_notes(point), *point.interval_notes, *point.epoch_time_drift_notes]
    notes += [*point.long_update_notes, *point.parts_notes]
    for execution in executions_used(point):
        if point.spec.execution == "auto":
            notes.append(make_note(EXECUTION_CHOSEN, execution=execution))
        if execution in CAPTURED_EXECUTIONS:
            notes.append(make_note(EXECUTION_CAPTURED, execution=execution))
    compile_time_s = median_of_known(measurement.compile_time_s for measurement in point.measurements)
    if compile_time_s is not None:
        notes.append(make_note(COMPILE_TIME, time_s=compile_time_s))
    return notes + point.rounding_notes
