"""Energy, clocks and throttling of a point's GPUs, and the load of its CPUs, over the timed epochs."""

import statistics
from collections.abc import Iterable, Sequence

from pipeline.figures import formulas
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, group_pairs, per_epoch, timed_epochs
from pipeline.records.record import GpuWindow, Record

THROTTLED = NoteKind("throttled", "throttled: {reasons:figures}", word="throttled")
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
    loss = clock_loss(windows)
    known = {} if loss is None else {"below": loss}
    return [make_note(THROTTLED, reasons=reasons, **known)] if reasons else []


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
    return set(note.values["reasons"]) <= POWER_LIMITS and note.values.get("below", 0.0) > MIN_CLOCK_LOSS


def all_windows(records: Iterable[Record]) -> list[GpuWindow]:
    """Return the telemetry of every sampled GPU over all epochs of the records."""
    return [window for record in records if record.telemetry for window in record.telemetry.gpus]


def timed_windows(record: Record) -> Sequence[GpuWindow]:
    timed = {epoch.epoch for epoch in timed_epochs(record)}
    return [window for window in (record.telemetry.gpus if record.telemetry else ()) if window.epoch in timed]


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
    timed = {epoch.epoch for epoch in timed_epochs(record)}
    hosts = record.telemetry.hosts if record.telemetry else ()
    return max((host.cpu_share for host in hosts if host.epoch in timed and host.cpu_share is not None), default=None)
