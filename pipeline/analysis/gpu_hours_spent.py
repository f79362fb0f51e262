"""GPU-hours (process-hours on the CPU) that attempts took, by how they ended."""

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from pipeline.analysis.pooling import window_values_s
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Device

ENDINGS = ("ok_timed", "ok_other", "oom", "failed", "superseded")


class AttemptEnding(NamedTuple):
    """One attempt and the word of what became of it: its status, or `superseded`."""

    ending: str
    record: Record

    @property
    def is_implied(self) -> bool:
        """Whether it was not run at all."""
        return self.record.failure is not None and self.record.failure.kind == "implied_oom"


def hours_by_ending(attempts: Iterable[AttemptEnding]) -> dict[str, float]:
    """What the attempts took of all that was allocated to them, as far as their times are known."""
    hours = dict.fromkeys(ENDINGS, 0.0)
    for ending, record in attempts:
        allocated_h = allocated_hours(record)
        timed_h = min(timed_window_hours(record), allocated_h) if ending == "ok" else 0.0
        hours["ok_other" if ending == "ok" else ending] += allocated_h - timed_h
        hours["ok_timed"] += timed_h
    return hours


def hours_columns(device: Device, hours: float | None, suffix: str = "") -> dict[str, float | None]:
    """Hours under the name of what was held: GPUs, or processes on the CPU."""
    return {
        f"gpu_hours{suffix}": hours if device == "cuda" else None,
        f"process_hours{suffix}": hours if device == "cpu" else None,
    }


def attempt_duration_s(record: Record) -> float | None:
    """Seconds from a launch to its record, to the second; None where the record does not say, or the clock was set."""
    try:
        start, end = datetime.fromisoformat(record.started_at or ""), datetime.fromisoformat(record.ended_at or "")
        return (end - start).total_seconds() if end >= start else None
    except (ValueError, TypeError):  # no time, or one with a zone and one without
        return None


def allocated_hours(record: Record) -> float:
    """What an attempt took of all that was allocated to it."""
    return (attempt_duration_s(record) or 0.0) * (record.environment.num_gpus_allocated or record.spec.num_gpus) / 3600


def timed_window_hours(record: Record) -> float:
    """What the timed windows of an attempt took of the GPUs used: epochs, or the series of communication."""
    communication = record.measurement.communication if record.measurement else None
    series = communication.series if communication else ()
    windows_ns = [max(window) for part in series for window in part.window_times_ns if window]
    seconds = sum(window_values_s(record, "epoch_time_ns")) + sum(windows_ns) / 1e9
    return seconds * record.spec.num_gpus / 3600
