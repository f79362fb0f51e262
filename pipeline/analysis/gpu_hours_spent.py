"""GPU-hours (process-hours on the CPU) spent on attempts, by their ending."""

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.analysis.exposed_communication import communications_of
from pipeline.analysis.neighbours import attempt_span
from pipeline.analysis.pooling import window_values_s
from pipeline.analysis.time_to_target import training_times_s
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Device

ENDINGS = ("ok_timed", "ok_other", "oom", "failed", "superseded")


class AttemptEnding(NamedTuple):
    """One attempt and its ending: its status, or `superseded`."""

    ending: str
    record: Record

    @property
    def is_implied(self) -> bool:
        """True if the attempt did not run: its OOM is implied."""
        return self.record.failure is not None and self.record.failure.kind == "implied_oom"


def hours_by_ending(attempts: Iterable[AttemptEnding]) -> dict[str, float]:
    """Return the allocated hours of the attempts by ending; attempts without times count 0."""
    hours = dict.fromkeys(ENDINGS, 0.0)
    for ending, record in attempts:
        allocated_h = allocated_hours(record)
        timed_h = min(timed_window_hours(record), allocated_h) if ending == "ok" else 0.0
        hours["ok_other" if ending == "ok" else ending] += allocated_h - timed_h
        hours["ok_timed"] += timed_h
    return hours


def hours_columns(device: Device, hours: float | None, suffix: str = "") -> dict[str, float | None]:
    """Return the hours in the column of the device: GPU-hours, or process-hours on the CPU."""
    return {
        f"gpu_hours{suffix}": hours if device == "cuda" else None,
        f"process_hours{suffix}": hours if device == "cpu" else None,
    }


def attempt_duration_s(record: Record) -> float | None:
    """Return the seconds from launch to record; None if the record has no times, or the end precedes the start."""
    span = attempt_span(record)
    return span.end - span.start if span else None


def allocated_hours(record: Record) -> float:
    """Return the hours of an attempt times the GPUs allocated to it."""
    return (attempt_duration_s(record) or 0.0) * (record.environment.num_gpus_allocated or record.spec.num_gpus) / 3600


def timed_window_hours(record: Record) -> float:
    """Return the hours in timed windows (epochs or communication series) times the GPUs used.

    Of a point that evaluates every epoch counts, as it does in the time to a target accuracy.
    """
    if record.spec.evaluate:
        times_s = training_times_s(record)
        return (times_s[-1] if times_s else 0.0) * record.spec.num_gpus / 3600
    series = (series for found in communications_of([record]) for series in found.series)
    windows_ns = [max(window) for part in series for window in part.window_times_ns]
    seconds = sum(window_values_s(record, "epoch_time_ns")) + sum(windows_ns) / 1e9
    return seconds * record.spec.num_gpus / 3600
