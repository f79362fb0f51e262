"""The figures of a point over its timed windows, and the notes on them."""

from typing import Any

from pipeline.figures import formulas, loader
from pipeline.figures.compute_rate import compute_rate_figures
from pipeline.figures.energy import energy_figures
from pipeline.figures.intervals import Estimate
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, median_window_s, record_peak_memory_gib
from pipeline.plan.axes import CAPTURED_EXECUTIONS

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
    data_time_s = point.median(median_window_s("data_time_ns"))
    throughput = items_per_s = None
    if epoch_time_s is not None and point.num_samples is not None:
        throughput = point.num_samples / epoch_time_s
        items_per_s = throughput * (point.items_per_sample or 1)
    return {
        **timed_figures("epoch_time_s", epoch_time_s),
        "update_time_s": point.update_time,
        **energy_figures(point),
        **compute_rate_figures(point, peak_tflops),
        "compute_time_s": point.median(median_window_s("compute_time_ns")),
        "data_time_s": data_time_s,
        "throughput_samples_per_s": throughput,
        "throughput_items_per_s": items_per_s,
        "peak_memory_gib": point.median(record_peak_memory_gib),
        "num_windows": sum(map(len, point.epoch_times_s)),
        "num_workers_total": loader.total_workers(point.spec),
        "data_share": loader.longest_data_share(point),
        "batch_wait_s": point.median(loader.median_batch_wait_s),
        "is_loader_bound": loader.is_loader_bound(point),
    }


def time_notes(point: PooledPoint) -> list[Note]:
    """Return the notes on these figures, last those on a step that was compiled or captured."""
    notes = [*loader.loader_notes(point), *point.interval_notes, *point.epoch_time_drift_notes]
    notes += [*point.long_window_notes, *point.parts_notes]
    used = {record.measurement.execution_used for record in point.ok_records if record.measurement} - {None}
    for execution in sorted(str(name) for name in used):
        if point.spec.execution == "auto":
            notes.append(make_note(EXECUTION_CHOSEN, execution=execution))
        if execution in CAPTURED_EXECUTIONS:
            notes.append(make_note(EXECUTION_CAPTURED, execution=execution))
    compile_time_s = point.median(lambda record: record.measurement.compile_time_s if record.measurement else None)
    if compile_time_s is not None:
        notes.append(make_note(COMPILE_TIME, time_s=compile_time_s))
    return notes + point.rounding_notes
