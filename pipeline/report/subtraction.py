"""Q3 by subtraction: computation against communication from epoch times alone. Its table."""

from typing import Any

from pipeline.figures import formulas, loader
from pipeline.figures.energy import clock_notes
from pipeline.figures.exposed_communication import (
    EXPOSURE_NEGATIVE,
    MEASURED_EXPOSURE_IS_NOISE,
    PointsByTraining,
    communications_of,
    exposed_time,
    is_within_noise,
    match_measured,
    untold_notes,
)
from pipeline.figures.intervals import Estimate, ends_of
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import OWN_COLLECTIVES, PooledPoint
from pipeline.figures.scaling import Baseline
from pipeline.plan.strategies import STRATEGIES
from pipeline.report.columns import (
    BASELINE,
    EPOCH_TIME,
    EXPOSED,
    PLACE,
)
from pipeline.report.link import MeasuredLinks, link_key
from pipeline.report.table import Column, Row, Table, View, make_row, sort_rows


def exposure_noise(row: Row) -> str:
    """Return the noise that hides a measured time below 0, which is no time; "" without such noise."""
    noises_s = (note.values["noise_s"] for note in row.notes if note.kind == MEASURED_EXPOSURE_IS_NOISE)
    return next((f"<{noise_s:.3g}" for noise_s in noises_s), "")


Q3 = Table(
    "Q3",
    "Q3",
    (
        *PLACE,
        EPOCH_TIME,
        Column("compute_time_subtraction_s", "T(1)/N [s]", "T(1)/N."),
        Column("comm_time_subtraction_s", "T(N) - T(1)/N [s]", "T(N) - T(1)/N.", interval="shown"),
        Column("comm_share_subtraction", "of the epoch [%]", "comm_time_subtraction_s/epoch_time_s."),
        EXPOSED._replace(heading="exposed, measured [s]", interval="kept", absent=exposure_noise),
        Column("bandwidth_subtraction_gb_s", "bandwidth [GB/s]", "ring_bytes_per_epoch over comm_time_subtraction_s."),
        Column("steps_per_epoch", "", "Steps of one epoch."),
        Column("ring_bytes_per_epoch", "", "steps x 2(N-1)/N x gradient bytes."),
        BASELINE,
    ),
    View(
        "Q3: computation against communication, estimated by subtraction",
        "Subtraction counts every cost that does not shrink with N as communication, waiting for data included.",
        lambda rows: sort_rows(rows) if any(row["compute_time_subtraction_s"] is not None for row in rows) else [],
    ),
)


SUBTRACTION_IS_NOISE = NoteKind(
    "subtraction_is_noise",
    "0 lies inside the interval of T(N) - T(1)/N: subtraction shows no communication",
    forbids=("comm_time_subtraction_s",),
)
SUBTRACTION_FAILS = NoteKind("subtraction_fails", "T(N) <= T(1)/N: subtraction cannot show the communication")
BANDWIDTH_ABOVE_LINK = NoteKind(
    "bandwidth_above_link",
    "bandwidth above the {link_gb_s:.0f} GB/s of the measured link: comm by subtraction is too short",
    forbids=("comm_time_subtraction_s",),
)
RING_ASSUMED = NoteKind("ring_assumed", "a ring is assumed, which DataParallel does not use")


def q3_row(point: PooledPoint, baseline: Baseline, measured: PointsByTraining, links: MeasuredLinks) -> Row:
    """Return a row of Q3: computation against communication by subtraction, over the whole epoch.

    Exposed communication comes from the matching point of `measured`: that of one step, times the steps. `links` tells
    if the bandwidth exceeds the link's own.
    """
    figures, subtraction_notes = subtraction_figures(point, baseline)
    is_of_loader = any(loader.is_loader_bound(part) for part in (point, baseline.point) if part)
    exposed, exposed_notes = exposed_per_epoch(point, measured)
    has_own = any(note.kind == OWN_COLLECTIVES for note in exposed_notes)
    # else it holds more than the ring: the wait for data, or collectives of the user's own
    comm_s = None if is_of_loader or has_own else figures["comm_time_subtraction_s"]
    rings, ring_notes = ring_figures(point, comm_s, links)
    notes = [*loader.loader_notes(point), *baseline.notes, *clock_notes(point)]
    notes += [*subtraction_notes, *ring_notes, *exposed_notes]
    strategy = baseline.point.spec.strategy if baseline.point else None
    figures |= {"epoch_time_s": point.epoch_time, "exposed_comm_time_s": exposed, "baseline": strategy}
    return make_row(Q3, point, notes, **figures, **rings)


def subtraction_figures(point: PooledPoint, baseline: Baseline) -> tuple[dict[str, Any], list[Note]]:
    """Return the figures of Q3 that follow from T(N) - T(1)/N, and the notes on them."""
    time_s, num_gpus = point.epoch_time, point.spec.num_gpus
    compute_s = comm_s = None
    notes: list[Note] = []
    if baseline.time_s is not None and time_s is not None:
        compute_s = formulas.compute_time_subtraction_s(baseline.time_s, num_gpus)
        value_s = formulas.comm_time_subtraction_s(baseline.time_s, time_s, num_gpus)
        if value_s is None:
            notes.append(make_note(SUBTRACTION_FAILS))
        else:
            comm_s = Estimate(value_s, *subtraction_ends_s(point, baseline))
            if comm_s.low is not None and comm_s.low <= 0:
                comm_s.noise = comm_s.high
                notes.append(make_note(SUBTRACTION_IS_NOISE))
    return {
        "compute_time_subtraction_s": compute_s,
        "comm_time_subtraction_s": comm_s,
        "comm_share_subtraction": comm_s.over(time_s) if comm_s is not None and time_s else None,
    }, notes


def ring_figures(point: PooledPoint, comm_s: float | None, links: MeasuredLinks) -> tuple[dict[str, Any], list[Note]]:
    """Return the steps of an epoch, the bytes that a GPU sends in their ring all-reduces, and the bandwidth of that.

    Notes say that a ring is only assumed, and that no link is so fast.
    """
    figures: dict[str, Any] = {"steps_per_epoch": None, "ring_bytes_per_epoch": None}
    if not point.spec.is_whole_epoch or point.num_samples is None:
        return figures, []
    figures["steps_per_epoch"] = point.spec.full_steps_per_epoch
    measurement = point.ok_records[0].measurement if point.ok_records else None
    strategy = STRATEGIES[point.spec.strategy]
    if measurement is None or measurement.gradient_bytes is None or not strategy.moves_gradients_alone:
        return figures, []
    num_sent = measurement.gradient_bytes // (2 if point.spec.gradient_compression == "bf16" else 1)
    step_bytes = formulas.ring_bytes_per_step(num_sent, point.spec.num_gpus)
    num_bytes = figures["ring_bytes_per_epoch"] = round(point.spec.full_steps_per_epoch * step_bytes)
    if comm_s is None:
        return figures, []
    bandwidth = figures["bandwidth_subtraction_gb_s"] = formulas.bandwidth_gb_s(num_bytes, comm_s)
    notes = [make_note(RING_ASSUMED)] if strategy.uses_threads else []
    link_gb_s = links.get(link_key(point.ok_records[0]))
    if link_gb_s is not None and bandwidth > link_gb_s:
        notes.append(make_note(BANDWIDTH_ABOVE_LINK, link_gb_s=link_gb_s))
    return figures, notes


def subtraction_ends_s(point: PooledPoint, baseline: Baseline) -> tuple[float, ...]:
    """Return the ends of the interval of T(N) - T(1)/N, from those of both times; none if one has no interval."""
    (low, high), (one_low, one_high) = ends_of(point.epoch_time), ends_of(baseline.time_s)
    if low is None or high is None or one_low is None or one_high is None:
        return ()
    return low - one_high / point.spec.num_gpus, high - one_low / point.spec.num_gpus


def exposed_per_epoch(point: PooledPoint, measured: PointsByTraining) -> tuple[Estimate | None, list[Note]]:
    """Return the measured exposed communication of an epoch's steps, and notes on it; None if no point matches.

    None too where the user's code calls collectives. A point on another GPU model does not match. If several points of
    `measured` match, the one with the most rounds counts. A negative difference is no time, so it is None.
    """
    match, untold = match_measured(point, measured), untold_notes(point, measured)
    exposed, floor_s = exposed_time(communications_of(match.ok_records)) if match else (None, None)
    has_own = any(note.kind == OWN_COLLECTIVES for note in untold)
    if match is None or exposed is None or not point.spec.is_whole_epoch or has_own:
        return None, untold
    num_steps, notes = point.spec.full_steps_per_epoch, untold
    time_s = exposed.times(num_steps) if exposed >= 0 else None
    if floor_s is not None and is_within_noise(exposed, floor_s):
        notes.append(make_note(MEASURED_EXPOSURE_IS_NOISE, noise_s=floor_s * num_steps))
        if time_s is not None:
            time_s.noise = floor_s * num_steps
    elif exposed < 0:
        notes.append(make_note(EXPOSURE_NEGATIVE))
    return time_s, [*notes, *point.difference_notes("measured communication", match)]
