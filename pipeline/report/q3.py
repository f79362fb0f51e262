"""Q3, communication: what it costs a step, measured, and what subtraction of epoch times says. Tables and answer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pipeline.figures import epoch_figures, formulas
from pipeline.figures.epoch_figures import clock_notes, timed_figures
from pipeline.figures.exposed_communication import (
    CALLED,
    EXPOSURE_IS_NOISE,
    EXPOSURE_MAY_BE_ZERO,
    EXPOSURE_NEGATIVE,
    LAUNCH_EXPOSED,
    MEASURED_EXPOSURE_IS_NOISE,
    NO_BUCKET_PROFILED,
    NO_OP,
    OF_MEASURED_EXPOSURE,
    STEP_DIFFERS,
    PointsByTraining,
    TracedExposure,
    busy_share,
    communications_of,
    drifted_exposure_notes,
    explain_trace_disagreement,
    exposed_share,
    exposed_time,
    is_within_noise,
    job_notes,
    match_measured,
    median_difference,
    median_step_time,
    num_rounds,
    profiled_transfer_s,
    step_times_s,
    traced_exposure,
    untold_notes,
    whole_step,
    wrapper_time,
)
from pipeline.figures.intervals import Estimate, drift_notes, ends_of, min_values, pooled_notes
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import OWN_COLLECTIVES, PooledPoint
from pipeline.figures.scaling import Baseline
from pipeline.figures.straggler import LATE_RANK, MIN_LATE_SHARE, find_late_rank
from pipeline.plan.point_label import varying_axes
from pipeline.plan.spec import TRAINED_MAY_DIFFER
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.record import Communication, VariantName
from pipeline.report.claims import (
    NO_RESULT,
    Tile,
    badges_of,
    describe_own,
    figure_of,
    grid_command,
    is_fit_for_answer,
    no_result,
    not_answered,
    where_of,
)
from pipeline.report.link import MeasuredLinks, link_key
from pipeline.report.next_step import NEXT_STEP, next_step_view
from pipeline.report.table import (
    BASELINE,
    COMM_TIME,
    EPOCH_TIME,
    EXPOSED,
    INTERVAL,
    INTERVAL_OVER,
    NUM_WINDOWS,
    PLACE,
    PLAIN_STEP_TIME,
    RUN_SPREAD,
    STEP_TIME,
    Column,
    Row,
    Table,
    Tables,
    View,
    make_row,
    sort_rows,
)

COMMUNICATION = Table(
    "communication",
    "Q3",
    (
        *PLACE,
        STEP_TIME._replace(interval="kept"),
        EXPOSED,
        Column("exposed_comm_share", "of step [%]", "Median of exposed/step in each round.", interval="kept"),
        Column(
            "hidden_share",
            "hidden [%]",
            "1 - exposed/comm; not stated where exposed is not larger than the noise. Its interval is computed from "
            "that of exposed_comm_time_s; both ends are cut to 0 to 1.",
            interval="kept",
            remark="Hidden is a share of the collectives' time.",
        ),
        Column(
            "collective_launch_time_s",
            "launch [us]",
            "exposed - comm where the whole interval of exposed lies above comm.",
        ),
        Column(
            "noise_floor_time_s",
            "noise [us]",
            "Larger absolute end of the interval of the step minus an equal one.",
            remark="Exposed time below the noise says nothing.",
        ),
        COMM_TIME,
        Column(
            "ddp_overhead_time_s",
            "DDP's overhead [us]",
            "No-op hook minus no_sync, which broadcasts no buffers.",
            interval="kept",
        ),
        PLAIN_STEP_TIME,
        Column("ddp_one_step_time_s", "DDP on one [ms]", "DDP on one GPU."),
        Column("no_sync_step_time_s", "no_sync [ms]", "DDP on N GPUs without any reduction (no_sync)."),
        Column(
            "no_op_hook_step_time_s",
            "reference [ms]",
            "The step whose collectives return at once. DDP: with a no-op hook, so hooks and bucket copies alone.",
        ),
        Column(
            "wrapper_time_s",
            "",
            "The step whose collectives return at once, minus the bare module's: hooks, copies, shards, less what a "
            "sharded optimizer saves.",
            interval="kept",
        ),
        Column(
            "collectives_time_s",
            "",
            "DDP minus DDP whose collectives return at once: the time that all collectives add to the step, with the "
            "broadcast of buffers and the wait for the slowest rank.",
            interval="kept",
        ),
        Column(
            "traced_exposed_comm_time_s",
            "",
            "From the profile, on the rank with the smallest sum: time of collectives outside kernels, also in gaps "
            "between them, plus slowed_compute_time_s where it is known; notes say where the trace is too long or too "
            "short.",
        ),
        Column("slowed_compute_time_s", "", "Kernel time of the step minus that without collectives (profiled twice)."),
        Column("buffer_comm_time_s", "", "Time of the collectives for buffers and batch-norm statistics."),
        Column(
            "straggler_wait_time_s",
            "",
            "Mean time of the ranks in a collective minus the shortest, summed: one straggler may count in each.",
        ),
        INTERVAL._replace(heading=""),
        INTERVAL_OVER,
        NUM_WINDOWS,
        RUN_SPREAD._replace(heading=""),
        Column("exposed_comm_time_run_spread_s", "", "run_spread_s of exposed_comm_time_s."),
        Column("late_rank", "", "Rank for which the others wait in most profiled steps."),
        Column("late_rank_wait_time_s", "", "Time of a step that the mean other rank waits for it."),
        *NEXT_STEP,
    ),
    View(
        "Q3.1: communication of one step, measured",
        "Exposed communication is not hidden behind computation: the step less the same step without communication.",
        keys=(
            *("step_time_s", "exposed_comm_time_s", "exposed_comm_share", "hidden_share"),
            *("collective_launch_time_s", "noise_floor_time_s", "comm_time_s", "ddp_overhead_time_s"),
        ),
    ),
    View(
        "Q3.1: the step times behind it",
        "One training step on the slowest rank; windows of each in turn on the same $GPUs. The step is that of the "
        "strategy, the reference the same whose collectives return at once (of DDP those of gradients). The table "
        "above has medians of differences between neighbouring windows, not differences of these medians.",
        keys=(
            *("plain_step_time_s", "ddp_one_step_time_s", "no_sync_step_time_s", "no_op_hook_step_time_s"),
            "step_time_s",
        ),
        hidden_notes=(*OF_MEASURED_EXPOSURE, LATE_RANK),
        is_folded=True,
    ),
    next_step_view("Next step of each measured step"),
)

TOO_FEW_WINDOWS = NoteKind("too_few_windows", "an interval needs {needed} windows, got {found}")

COMPARED_STEPS: tuple[VariantName, ...] = ("plain", "ddp_one", "no_sync")  # beside the step of the strategy


def exposed_row(point: PooledPoint, advice: Mapping[str, Any] = MappingProxyType({})) -> Row:
    """Return a row of Q3.1: the step with and without its collectives, and the time of the transfers."""
    found, late = communications_of(point.ok_records), find_late_rank(point.ok_records)
    whole = whole_step(found)
    told = found  # whose differences and profile show the communication
    if point.own_collectives:
        told, late = [], None
    no_op = NO_OP.get(whole, "no_op_hook")
    step, overhead = median_step_time(found, whole), median_difference(told, "no_op_hook", "no_sync")
    exposed, floor_s = exposed_time(told)
    # None, not 0, if the trace does not name the collectives
    comm_s = profiled_transfer_s(told, CALLED) or None
    traced = traced_exposure(told) if comm_s else TracedExposure()
    split = split_exposed(exposed, comm_s, floor_s)
    share = exposed_share(told)
    if share is not None and exposed is not None and step and floor_s is not None and is_within_noise(exposed, floor_s):
        share.noise = floor_s / step
    named = [late.note()] if late and step and late.wait_s > MIN_LATE_SHARE * step else []
    return make_row(
        COMMUNICATION,
        point,
        **{f"{name}_step_time_s": median_step_time(found, name) for name in COMPARED_STEPS},
        no_op_hook_step_time_s=median_step_time(found, no_op),
        wrapper_time_s=wrapper_time(told),
        **timed_figures("step_time_s", step),
        exposed_comm_time_s=exposed,
        exposed_comm_share=share,
        collectives_time_s=median_difference(told, whole, "no_collectives"),
        ddp_overhead_time_s=overhead,
        exposed_comm_time_run_spread_s=formulas.run_spread(exposed.run_medians) if exposed is not None else None,
        noise_floor_time_s=floor_s,
        comm_time_s=comm_s,
        **split,
        traced_exposed_comm_time_s=traced.exposed_s,
        slowed_compute_time_s=traced.slowed_s,
        buffer_comm_time_s=profiled_transfer_s(told, ["buffers", "batchnorm_statistics"]),
        straggler_wait_time_s=profiled_transfer_s(told, CALLED, waiting=True) if comm_s else None,
        num_windows=num_rounds(found),
        late_rank=late.rank if late else None,
        late_rank_wait_time_s=late.wait_s if late else None,
        **advice,
        notes=[*exposed_notes(point, step, exposed, floor_s, split["collective_launch_time_s"], traced), *named],
    )


def split_exposed(exposed: Estimate | None, comm_s: float | None, floor_s: float | None) -> dict[str, float | None]:
    """Return the share of communication that compute hides. If more is exposed than `comm_s`, return the launch time.

    The launch time is exposed communication minus `comm_s`, a cost of the host. It is None if the interval of exposed
    communication reaches down to `comm_s`. Both are None if exposed communication is noise or negative. The interval of
    the share is computed from that of exposed communication, limited to the range from 0 to `comm_s`. It takes `comm_s`
    as exact.
    """
    hidden = launch_s = None
    if exposed is not None and exposed >= 0 and comm_s and not is_within_noise(exposed, floor_s):
        if exposed > comm_s:
            launch_s = exposed - comm_s if exposed.low is not None and exposed.low > comm_s else None
        else:
            ends_s = (end_s for end_s in (exposed.high, exposed.low) if end_s is not None)
            ends = (1 - min(max(end_s, 0.0), comm_s) / comm_s for end_s in ends_s)
            hidden = Estimate(1 - exposed / comm_s, *ends)
    return {"hidden_share": hidden, "collective_launch_time_s": launch_s}


def exposed_notes(
    point: PooledPoint,
    step: Estimate | None,
    exposed: Estimate | None,
    floor_s: float | None,
    launch_s: float | None,
    traced: TracedExposure,
) -> list[Note]:
    """Return the notes on step times and on exposed communication."""
    found = communications_of(point.ok_records)
    notes = [*point.own_collectives_notes, *job_notes(found)]
    if profiled_transfer_s(found, CALLED) == 0:
        notes.append(make_note(NO_BUCKET_PROFILED))
    if exposed is None or step is None:
        return notes
    if exposed.interval is None:
        notes.append(make_note(TOO_FEW_WINDOWS, needed=min_values(), found=num_rounds(found)))
    notes += time_notes(found, whole_step(found), step) + drifted_exposure_notes(found)
    if is_within_noise(exposed, floor_s):
        notes.append(make_note(EXPOSURE_IS_NOISE))
    elif exposed < 0:
        notes.append(make_note(EXPOSURE_NEGATIVE))
    elif exposed.interval and exposed.interval.contains(0):
        notes.append(make_note(EXPOSURE_MAY_BE_ZERO))
    if launch_s is not None:
        notes.append(make_note(LAUNCH_EXPOSED))
    # a CUDA-graph step does not wait for the host
    busy = None if point.spec.is_captured else busy_share(found, step)
    disagreement = explain_trace_disagreement(exposed, traced, busy)
    return [*notes, disagreement] if disagreement else notes


def time_notes(found: Sequence[Communication], variant: VariantName, step: Estimate) -> list[Note]:
    by_repeat = [times_s for part in found if (times_s := step_times_s(part, variant))]
    return pooled_notes(by_repeat, step.basis) + drift_notes("step_time_s", by_repeat)


BY_SUBTRACTION = "Subtraction counts every cost that does not shrink with N"
OWN = "the model or its loss calls collectives itself, in every measured step"


def communication_claims(tables: Tables) -> list[Tile]:
    """Return the largest measured share of exposed communication, and beside it the share that subtraction gives."""
    rows = tables["communication"]
    measured = [row for row in rows if row["exposed_comm_share"] is not None]
    known = [row for row in tables["Q3"] if row["comm_share_subtraction"] is not None]
    subtracted = [row for row in known if is_fit_for_answer(row, "comm_time_subtraction_s")]
    fit = [row for row in measured if is_fit_for_answer(row, "exposed_comm_share")]
    flaws = Counter(flaw for row in measured for flaw in row.flaws_of("exposed_comm_share")[:1])
    why = ", ".join(f"{count} with {flaw}" for flaw, count in flaws.items())
    left_out = f"{flaws.total()} of {len(measured)} measured shares left out: {why}" if flaws else ""
    if fit:
        most = max(row["num_gpus"] for row in fit)
        on_most = [row for row in fit if row["num_gpus"] == most]
        compared = compare_subtraction([row for row in subtracted if row["num_gpus"] == most], on_most)
        return [measured_claim(on_most, fit, remarks=[compared, left_out])]
    own = any(row.has_note(OWN_COLLECTIVES) for row in (*rows, *tables["Q3"]))
    if subtracted:
        most_by = max(subtracted, key=lambda row: float(row["comm_share_subtraction"]))
        tile = Tile(
            "Communication, by subtraction",
            *figure_of(float(most_by["comm_share_subtraction"]), ".0%", "of the epoch"),
            line="not measured",
            more=where_of(most_by, subtracted, also="num_gpus").removeprefix(", "),
            warning="; ".join(filter(None, [BY_SUBTRACTION, OWN if own else "", left_out])),
            badges=badges_of(most_by),
            command="" if own else grid_command("communication"),
        )
        return [tile]
    if measured:
        return [not_answered(f"no measured share can be used: {why}", "communication", is_asked=True)]
    if own:
        return [not_answered(OWN, "communication", is_asked=True)._replace(command="")]
    if lost := [row for row in rows if row.status in NO_RESULT]:
        return [no_result("configurations that measure communication", lost)]
    unusable = ", ".join(sorted({flaw for row in known for flaw in row.flaws_of("comm_time_subtraction_s")}))
    unfit = f", and no subtraction of epoch times can be used ({unusable})" if unusable else ""
    return [not_answered(f"not measured on several $GPUs{unfit}", "communication", is_asked=bool(known))]


def measured_claim(rows: Sequence[Row], measured: Sequence[Row], remarks: Sequence[str]) -> Tile:
    """Return the largest and the smallest share of communication in these rows, and how many rows show none."""
    noisy, negative = ([row for row in rows if row.has_note(kind)] for kind in (EXPOSURE_IS_NOISE, EXPOSURE_NEGATIVE))
    told = [row for row in rows if not row.has_note(EXPOSURE_IS_NOISE, EXPOSURE_NEGATIVE)]
    parts = [*remarks]
    if noisy:
        shares = ((row["noise_floor_time_s"] / row["step_time_s"], row["exposed_comm_share"].high) for row in noisy)
        noise = max(share or 0.0 for both in shares for share in both)
        parts.append(f"{len(noisy)} of {len(rows)} are within the noise, at most {100 * noise:.1f} % of the step")
    if negative:
        parts.append(f"{len(negative)} of {len(rows)} show a step faster than without its collectives")
    where = f"on {rows[0]['num_gpus']} $GPUs"
    why = f"{'hidden by noise' if noisy else 'none shown'} {where}"
    tile = Tile("Exposed communication", line=why, warning="; ".join(filter(None, parts)))
    if not told:
        return tile
    worst, best = (choose(told, key=lambda row: float(row["exposed_comm_share"])) for choose in (max, min))
    of_many = f"; the largest of {len(told)}, the smallest is {100 * best['exposed_comm_share']:.1f} %"
    number, unit, interval = figure_of(worst["exposed_comm_share"], ".1%", "of the step")
    times = f"{1e6 * worst['exposed_comm_time_s']:,.0f} us of {1e3 * worst['step_time_s']:,.2f} ms"
    of_script = "all its collectives" if worst.axes.get("script") else ""  # those of its own model and loss, too
    collectives = of_script or STRATEGIES[worst["strategy"]].collective_words
    more = f"{times} for {collectives}{where_of(worst, measured)}{of_many if len(told) > 1 else ''}"
    return tile._replace(figure=number, unit=unit, interval=interval, line=where, more=more, badges=badges_of(worst))


def compare_subtraction(rows: Sequence[Row], measured: Sequence[Row]) -> str:
    """Return the largest share by subtraction beside the share of the step that was measured of the same point.

    "" without such a row. Epoch and communication were measured apart, so the noise of one may make a share above 1;
    where their steps differ by more than noise, or what was measured is noise, nothing is compared.
    """
    untold = (STEP_DIFFERS, MEASURED_EXPOSURE_IS_NOISE)
    both = [row for row in rows if row["exposed_comm_time_s"] is not None and not row.has_note(*untold)]
    possible = [row for row in both if row["exposed_comm_time_s"] <= row["epoch_time_s"]]
    pairs = [(row, one) for row in possible for one in measured if is_same_training(row, one)]
    if not pairs:
        return ""
    row, one = max(pairs, key=lambda pair: (float(pair[0]["comm_share_subtraction"]), int(pair[1]["num_windows"])))
    share, measured_share = (100 * float(part) for part in (row["comm_share_subtraction"], one["exposed_comm_share"]))
    where = f"{describe_own(one, measured)} ({measured_share:.1f} % measured)"
    fewer = "one $GPU has a cost that several have not, or it is noise"
    why = "it counts every loss" if share >= measured_share else fewer
    return f"Subtraction gives {share:.1f} % of the epoch, {where}: {why}"


def is_same_training(row: Row, measured: Row) -> bool:
    """True if the axes of both are those of one training. Its precision is the one that computed in each run."""
    return not varying_axes([row.axes, measured.axes], TRAINED_MAY_DIFFER)


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
    is_of_loader = any(epoch_figures.is_loader_bound(part) for part in (point, baseline.point) if part)
    exposed, exposed_notes = exposed_per_epoch(point, measured)
    has_own = any(note.kind == OWN_COLLECTIVES for note in exposed_notes)
    # else it holds more than the ring: the wait for data, or collectives of the user's own
    comm_s = None if is_of_loader or has_own else figures["comm_time_subtraction_s"]
    rings, ring_notes = ring_figures(point, comm_s, links)
    notes = [
        *(*epoch_figures.loader_notes(point), *baseline.notes, *clock_notes(point)),
        *(*subtraction_notes, *ring_notes, *exposed_notes),
    ]
    strategy = baseline.point.spec.strategy if baseline.point else None
    figures |= {"epoch_time_s": point.epoch_time, "exposed_comm_time_s": exposed, "baseline": strategy}
    return make_row(Q3, point, notes, **figures, **rings)


def subtraction_figures(point: PooledPoint, baseline: Baseline) -> tuple[dict[str, Any], list[Note]]:
    """Return the figures of Q3 that follow from T(N) - T(1)/N, and the notes on them."""
    time_s, num_gpus = point.epoch_time, point.spec.num_gpus
    compute_s = comm_s = share = None
    notes: list[Note] = []
    if baseline.time_s is not None and time_s is not None:
        compute_s = float(baseline.time_s / num_gpus)  # as if the work were divided perfectly
        if time_s <= compute_s:
            notes.append(make_note(SUBTRACTION_FAILS))
        else:
            ends_s, share_ends = subtraction_ends(time_s, baseline.time_s, num_gpus)
            comm_s, share = Estimate(time_s - compute_s, *ends_s), Estimate(1 - compute_s / time_s, *share_ends)
            if comm_s.low is not None and comm_s.low <= 0:
                comm_s.noise, share.noise = comm_s.high, share.high
                notes.append(make_note(SUBTRACTION_IS_NOISE))
    return {
        "compute_time_subtraction_s": compute_s,
        "comm_time_subtraction_s": comm_s,
        "comm_share_subtraction": share,
    }, notes


def ring_figures(
    point: PooledPoint, comm_s: Estimate | None, links: MeasuredLinks
) -> tuple[dict[str, Any], list[Note]]:
    """Return the steps of an epoch, the bytes that a GPU sends in their ring all-reduces, and the bandwidth of that.

    Where noise hides the time there is none. Notes say that a ring is only assumed, and that no link is so fast.
    """
    figures: dict[str, Any] = {"steps_per_epoch": None, "ring_bytes_per_epoch": None}
    if not point.spec.is_whole_epoch or point.num_samples is None:
        return figures, []
    figures["steps_per_epoch"] = point.steps_per_epoch
    measurement = point.ok_records[0].measurement if point.ok_records else None
    strategy = STRATEGIES[point.spec.strategy]
    if measurement is None or measurement.gradient_bytes is None or not strategy.moves_gradients_alone:
        return figures, []
    num_sent = measurement.gradient_bytes // (2 if point.spec.gradient_compression == "bf16" else 1)
    step_bytes = formulas.ring_bytes_per_step(num_sent, point.spec.num_gpus)
    num_bytes = figures["ring_bytes_per_epoch"] = round(point.steps_per_epoch * step_bytes)
    if comm_s is None or comm_s.noise is not None:
        return figures, []
    bandwidth = figures["bandwidth_subtraction_gb_s"] = formulas.bandwidth_gb_s(num_bytes, comm_s)
    notes = [make_note(RING_ASSUMED)] if strategy.uses_threads else []
    link_gb_s = links.get(link_key(point.ok_records[0]))
    if link_gb_s is not None and bandwidth > link_gb_s:
        notes.append(make_note(BANDWIDTH_ABOVE_LINK, link_gb_s=link_gb_s))
    return figures, notes


def subtraction_ends(time: Estimate, one: Estimate, num_gpus: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the ends of T(N) - T(1)/N, and of it as a share of T(N), from those of both; none if one has none."""
    (low, high), (one_low, one_high) = ends_of(time), ends_of(one)
    if low is None or high is None or one_low is None or one_high is None:
        return (), ()
    least_s, most_s = one_low / num_gpus, one_high / num_gpus
    return (low - most_s, high - least_s), (1 - most_s / low, 1 - least_s / high)


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
    num_steps, notes = point.steps_per_epoch, untold
    time_s = exposed.times(num_steps) if exposed >= 0 else None
    if floor_s is not None and is_within_noise(exposed, floor_s):
        noise_s = max(floor_s, exposed.high or 0.0) * num_steps
        notes.append(make_note(MEASURED_EXPOSURE_IS_NOISE, noise_s=noise_s))
        if time_s is not None:
            time_s.noise = noise_s
    elif exposed < 0:
        notes.append(make_note(EXPOSURE_NEGATIVE))
    return time_s, [*notes, *point.difference_notes("measured communication", match)]
