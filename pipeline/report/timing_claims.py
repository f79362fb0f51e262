"""The claims of Q1, the batch that keeps one GPU busy, of Q2, how much faster several are, and of Q3, communication."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.experiment.axis_groups import BASELINE_MAY_DIFFER, TRAINED_MAY_DIFFER
from pipeline.experiment.point_label import varying_axes
from pipeline.figures.exposed_communication import EXPOSURE_IS_NOISE, EXPOSURE_NEGATIVE, STEP_DIFFERS
from pipeline.figures.intervals import ends_of
from pipeline.figures.loader import LOADER_BOUND, MAX_DATA_SHARE
from pipeline.figures.pooling import OWN_COLLECTIVES, SHARED_NODE
from pipeline.figures.scaling import NO_DIFFERENCE, SUPERLINEAR
from pipeline.plan.strategies import STRATEGIES
from pipeline.report import claims
from pipeline.report.claims import (
    BOUNDARY_FOUND,
    EXPOSED_ALONE,
    EXPOSED_SHARE,
    EXPOSED_UNCLEAR,
    FASTEST_BATCH,
    FIRST_OOM,
    MEMORY_ALL_FIT,
    NO_OOM,
    NO_RESULT,
    NO_SPEEDUP,
    ONLY_BATCH,
    SMALLEST_OOM,
    SPEEDUP_IN_PART,
    SPEEDUP_SHOWN,
    SUBTRACTED,
    Claim,
    badges_of,
    where_of,
)
from pipeline.report.next_step import limit_words
from pipeline.report.table import Row, Tables
from pipeline.report.words import ClaimFormatter
from pipeline.system.errors import pluralize

WAITS = f"a GPU waits for data in more than {100 * MAX_DATA_SHARE:.0f} % of the epoch, there or on the baseline"
SHARED = "other points ran on the node of a point or of its baseline at the same time"
ABOVE_N = "the efficiency is above 1, which noise or a slow baseline can cause"
WITHOUT_LOADER, ALONE = "--set input=gpu", "--exclusive"
WAIT_NOT_STATED = "the wait for data is not stated"
OWN = "the model or its loss calls collectives itself, in every measured step"


def batch_size_claims(tables: Tables) -> list[Claim]:
    """Return the batch size with the highest throughput on one GPU, and the first that runs out of memory."""
    rows, memory = tables["Q1"], memory_claim(tables)
    timed = [row for row in rows if row["epoch_time_s"]]
    lost = [row for row in rows if row.status in NO_RESULT]
    if not timed:
        speed = claims.not_answered("Q1", "no epoch was timed on one GPU", "q1")
        if lost:
            speed = claims.no_result("Q1", "points on one GPU", lost)
        return [memory, speed] if memory.kind != NO_OOM else [speed]
    best = max(timed, key=lambda row: (row["throughput_items_per_s"] or 0.0, -row["epoch_time_s"]))
    sizes, throughput = {row["global_batch_size"] for row in timed}, best["throughput_items_per_s"]
    alike = [row for row in timed if row["global_batch_size"] != best["global_batch_size"]]
    alike = [row for row in alike if not claims.differing_axes(row, best)]
    ties = list({row["global_batch_size"]: row for row in reversed(claims.not_told_apart(best, alike))}.values())[::-1]
    is_fastest = all(claims.is_shown_slower(best, row) for row in timed if row is not best)
    unclear = ("points without a result",) if {row["global_batch_size"] for row in lost} - sizes else ()
    values = {
        "batch": best["global_batch_size"],
        "throughput": "images/s not stated" if throughput is None else f"{throughput:,.0f} images/s",
        "epoch_time": best["epoch_time_s"],
        "where": where_of(best, timed, "batch_size_per_gpu"),
        "place": "is fastest" if is_fastest else "has the shortest epoch",
        "rivals": claims.name_ties(best, ties, lambda row: f"{row['global_batch_size']:,}") or None,
    }
    kind = FASTEST_BATCH if len(sizes) > 1 else ONLY_BATCH
    return [Claim("Q1", kind, values, badges_of(best, *unclear)), memory]


def memory_claim(tables: Tables) -> Claim:
    """Return the first batch size that runs out of memory on one GPU, or on each of several if one was not tried."""
    searched = [row for row in tables["memory"] if row["largest_batch_size_per_gpu"] is not None]
    alone = [row for row in searched if row["num_gpus"] == 1]
    if searched:
        best = alone[0] if alone else max(searched, key=lambda row: int(row["largest_batch_size_per_gpu"]))
        fails = best["smallest_failing_batch_size_per_gpu"]
        each = "" if alone else f" on each of {best['num_gpus']} GPUs"
        where = where_of(best, alone or searched, "batch_size_per_gpu")
        values = {"fits": best["largest_batch_size_per_gpu"], "fails": fails, "each": each, "where": where}
        return Claim("Q1", MEMORY_ALL_FIT if fails is None else BOUNDARY_FOUND, values, badges_of(best))
    lost = [row for row in tables["Q1"] if row.status == "oom"]
    fitting = [row for row in tables["Q1"] if row.status == "ok"]
    if lost:
        first = min(lost, key=lambda row: int(row["global_batch_size"]))
        size = first["global_batch_size"]
        alike = [row["global_batch_size"] for row in fitting if not claims.differing_axes(row, first)]
        smaller = max((other for other in alike if other < size), default=None)
        named = claims.describe_own(first, tables["Q1"], "batch_size_per_gpu")
        values = {"fails": size, "fits": smaller, "where": f" ({named})" if named else ""}
        return Claim("Q1", SMALLEST_OOM if smaller is None else FIRST_OOM, values)
    largest = max((row["global_batch_size"] for row in fitting), default=None)
    return Claim("Q1", NO_OOM, {"fits": largest}, command=claims.grid_command("memory"))


def speedup_claims(tables: Tables) -> list[Claim]:
    """Return speed-up and efficiency at the largest N that has a row which can be used."""
    rows = tables["Q2"]
    several = [row for row in rows if row["num_gpus"] > 1]
    timed = [row for row in several if row["speedup"] is not None]
    if not timed and (lost := lost_scaling(rows)):
        return [claims.no_result("Q2", "points", lost)]
    if not timed:
        why = "no point on several GPUs" + " has a timed one on one GPU to compare with" * bool(several)
        return [claims.not_answered("Q2", why, "scaling", is_asked=bool(several))]
    fit = usable_rows(rows)
    unknown = () if fit else ("wait for data not stated",)
    fit = fit or usable_rows(rows, is_loader_bound=None)
    used = {id(row) for row in fit}
    reasons = Counter(reason_left_out(row) for row in timed if id(row) not in used)
    why = "; ".join(f"{reason} ({count})" if len(reasons) > 1 else reason for reason, count in reasons.items())
    if not fit:
        largest = " and ".join(describe_speedup(row, timed, fit) for row in largest_of_each(timed))
        cannot = f"of {len(timed)} rows with a speed-up {reasons.total()} cannot be used: {why}; the largest: {largest}"
        options = {WAITS: WITHOUT_LOADER, SHARED: ALONE}
        cures = [option for reason, option in options.items() if reason in reasons] or ["--repeats 3"]
        grid = " ".join(["scaling", *cures])
        return [claims.not_answered("Q2", cannot, grid, is_asked=True)]
    most = max(row["num_gpus"] for row in fit)
    best = max((row for row in fit if row["num_gpus"] == most), key=usefulness)
    low, high = ends_of(best["speedup"])
    beyond = max(row["num_gpus"] for row in timed)
    larger = largest_of_each([row for row in timed if row["speedup"] > best["speedup"]])
    elsewhere = [f"{row['speedup']:.2f}" for row in larger]
    values = {
        "num_gpus": most,
        "strategy": STRATEGIES[best["strategy"]].words,
        "speedup": best["speedup"],
        "against_best": against_best(best, rows),
        "low": low,
        "high": high,
        "efficiency": float(best["parallel_efficiency"]),
        "scaling": best["scaling"],
        "where": where_of(best, fit, "strategy"),
        "beyond": f"; on {beyond} GPUs none can be used" if beyond > most else "",
        "left_out": reasons.total() or None,
        "timed": len(timed),
        "why": why,
        "larger": f"; larger elsewhere: {', '.join(elsewhere)}" if larger else "",
        "closing": closing_words(best, larger, timed, fit),
    }
    badges = badges_of(best, *unknown)
    if best["speedup"] > most:
        return [Claim("Q2", SPEEDUP_IN_PART, values, badges)]
    if best.has_note(NO_DIFFERENCE):
        return [Claim("Q2", NO_SPEEDUP, values, tuple(badge for badge in badges if badge != NO_DIFFERENCE.badge))]
    return [Claim("Q2", SPEEDUP_SHOWN, values, badges)]


def against_best(row: Row, rows: Sequence[Row]) -> str:
    """Return the speed-up over one GPU at its best batch size; "" if that is the baseline's, or is not known."""
    may_differ = (*BASELINE_MAY_DIFFER, "batch_size_per_gpu", "num_samples")
    alone = [one for one in rows if one["num_gpus"] == 1 and one["epoch_time_s"] and one["strategy"] == row["baseline"]]
    fit = [one for one in alone if not one.has_note(LOADER_BOUND, SHARED_NODE)]
    alike = [one for one in fit if not varying_axes([one.axes, row.axes], may_differ)]
    best = min(alike, key=claims.sample_time, default=None)
    if best is None or best["batch_size_per_gpu"] == row["baseline_batch_size_per_gpu"]:
        return ""
    speedup = claims.sample_time(best) / claims.sample_time(row)
    return f", and {speedup:.2f} times as fast as one at its best batch of {best['batch_size_per_gpu']:,}"


def largest_of_each(rows: Sequence[Row]) -> list[Row]:
    """Return the row with the largest speed-up of weak scaling, and that of strong scaling, if there are any."""
    by_scaling = ([row for row in rows if row["scaling"] == scaling] for scaling in ("weak", "strong"))
    return [max(own, key=lambda row: float(row["speedup"])) for own in by_scaling if own]


def closing_words(best: Row, larger: Sequence[Row], timed: Sequence[Row], fit: Sequence[Row]) -> str | None:
    """Return which speed-ups are larger than that of the answer; without any the next step, None if nothing limits."""
    if larger:
        tried = any(row.axes.get("input") == "gpu" or row.axes.get("device") == "cpu" for row in timed)
        waits = any(reason_left_out(row) == WAITS for row in larger)
        is_elsewhere = all(row["batch_size_per_gpu"] != best["batch_size_per_gpu"] for row in larger)
        return claims.LARGER.format(
            elsewhere=" at other batch sizes" if is_elsewhere else "",
            larger=" and ".join(describe_speedup(row, timed, fit) for row in larger),
            cure=f"; {WITHOUT_LOADER} measures without the loader" if waits and not tried else "",
        )
    limit = limit_words(best)
    return limit and claims.LIMIT_AND_STEP.format(limit=limit, next_step=best["next_step"])


def describe_speedup(row: Row, timed: Sequence[Row], fit: Sequence[Row]) -> str:
    """Return a speed-up with its configuration; of one that is left out also that of the same without the loader."""
    shown = [ClaimFormatter({}).format_field(other["speedup"], "digits") for other in (row, *twins_of(row, fit)[:1])]
    beside = ["not used"] if fit and all(row is not other for other in fit) else []
    beside += [f"{without_loader} without the loader" for without_loader in shown[1:] if beside]
    said = f" ({'; '.join(beside)})" if beside else ""
    return f"{shown[0]} with {claims.describe_own(row, timed, also='num_gpus')}, {row['scaling']} scaling{said}"


def twins_of(row: Row, fit: Sequence[Row]) -> list[Row]:
    """Return the fit rows that differ from a row in the input alone."""
    alike = (other for other in fit if other is not row and other["scaling"] == row["scaling"])
    return [other for other in alike if not varying_axes([row.axes, other.axes], ("input", "num_workers"))]


def usable_rows(rows: Sequence[Row], is_loader_bound: bool | None = False) -> list[Row]:
    """Return the rows on several GPUs with a fit speed-up that are not loader-bound; None: where that is not known."""
    several = [row for row in rows if row["num_gpus"] > 1 and row["is_loader_bound"] is is_loader_bound]
    return [row for row in several if claims.is_fit_for_answer(row, "speedup")]


def usefulness(row: Row) -> tuple[bool, float, float]:
    """Return the sort key of a usable row: weak scaling first, then the speed-up up to N, then its lower end."""
    return row["scaling"] == "weak", min(row["speedup"], row["num_gpus"]), ends_of(row["speedup"])[0] or 0.0


def lost_scaling(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose missing result leaves Q2 without an answer: on several GPUs, or else baselines of such."""
    several = [row for row in rows if row["num_gpus"] > 1]
    lost = [row for row in rows if row.status in NO_RESULT]
    return lost if any(row.status == "ok" for row in several) else [row for row in lost if row["num_gpus"] > 1]


def reason_left_out(row: Row) -> str:
    if row.figures.get("is_loader_bound") or row.has_note(LOADER_BOUND):
        return WAITS
    if row.has_note(SHARED_NODE):
        return SHARED
    return ABOVE_N if row.has_note(SUPERLINEAR) else WAIT_NOT_STATED


def communication_claims(tables: Tables) -> list[Claim]:
    """Return the largest measured share of exposed communication, and beside it the share that subtraction gives."""
    rows = tables["communication"]
    measured = [row for row in rows if row["exposed_comm_share"] is not None]
    known = [row for row in tables["Q3"] if row["comm_share_subtraction"] is not None]
    subtracted = [row for row in known if claims.is_fit_for_answer(row, "comm_time_subtraction_s")]
    if measured:
        most = max(row["num_gpus"] for row in measured)
        on_most = [row for row in measured if row["num_gpus"] == most]
        compared = compare_subtraction([row for row in subtracted if row["num_gpus"] == most], subtracted, on_most)
        claim = measured_claim(on_most, measured, compared)
        return [claim if known else claim._replace(command=claims.grid_command("q3"))]
    own = any(row.has_note(OWN_COLLECTIVES) for row in (*rows, *tables["Q3"]))
    if subtracted:
        most_by = max(subtracted, key=lambda row: float(row["comm_share_subtraction"]))
        where = where_of(most_by, subtracted, also="num_gpus")
        values = {"share": float(most_by["comm_share_subtraction"]), "where": where, "unmeasured": OWN if own else None}
        command = "" if own else claims.grid_command("communication")
        return [Claim("Q3", SUBTRACTED, values, badges_of(most_by), command)]
    if own:
        return [claims.not_answered("Q3", OWN, "communication", is_asked=True)._replace(command="")]
    if lost := [row for row in rows if row.status in NO_RESULT]:
        return [claims.no_result("Q3", "points that measure communication", lost)]
    why = "no point on several GPUs measures communication"
    if known:
        why += ", and subtraction fails, counts waiting for data or shows no more than noise"
    return [claims.not_answered("Q3", why, "communication", is_asked=bool(known))]


def measured_claim(rows: Sequence[Row], measured: Sequence[Row], compared: dict[str, Any]) -> Claim:
    """Return the largest and the smallest share of communication in these rows, and how many rows show none."""
    noisy, negative = ([row for row in rows if row.has_note(kind)] for kind in (EXPOSURE_IS_NOISE, EXPOSURE_NEGATIVE))
    told = [row for row in rows if not row.has_note(EXPOSURE_IS_NOISE, EXPOSURE_NEGATIVE)]
    parts = []

    def show(some: Sequence[Row]) -> str:
        which = "the one point" if len(rows) == 1 else f"{len(some)} of {len(rows)} points"
        return f"{which} show{'s' if len(some) == 1 else ''}"

    if noisy:
        noise = max(row["noise_floor_time_s"] / row["step_time_s"] for row in noisy)
        parts.append(f"{show(noisy)} no more than the noise, up to {100 * noise:.1f} % of the step")
    if negative:
        parts.append(f"{show(negative)} a step faster than without its collectives, and the records do not say why")
    unclear, common = " and ".join(parts), {"num_gpus": rows[0]["num_gpus"], "count": len(rows), **compared}
    if not told:
        return Claim("Q3", EXPOSED_UNCLEAR, common | {"unclear": unclear})
    worst, best = (choose(told, key=lambda row: float(row["exposed_comm_share"])) for choose in (max, min))
    values = {
        "collectives": STRATEGIES[worst["strategy"]].collective_words,
        "exposed_us": 1e6 * worst["exposed_comm_time_s"],
        "step_ms": 1e3 * worst["step_time_s"],
        "share": worst["exposed_comm_share"],
        "where": where_of(worst, measured),
        "rivals": rivals_of_share(worst, told),
        "smallest": best["exposed_comm_share"],
        "unclear": unclear or ("all are above the noise" if len(told) > 1 else None),
    }
    return Claim("Q3", EXPOSED_SHARE if len(told) > 1 else EXPOSED_ALONE, common | values, badges_of(worst))


def rivals_of_share(worst: Row, told: Sequence[Row]) -> str:
    """Return how many other shares have an interval that meets that of the largest; "" without any."""
    low, _ = ends_of(worst["exposed_comm_share"])
    ends = [ends_of(row["exposed_comm_share"])[1] for row in told if row is not worst]
    count = sum(low is not None and end is not None and end >= low for end in ends)
    return f" (not told apart from {pluralize(count, 'other')})" if count else ""


def compare_subtraction(rows: Sequence[Row], subtracted: Sequence[Row], measured: Sequence[Row]) -> dict[str, Any]:
    """Return the largest share by subtraction, and the share of the step that was measured of the same point.

    {} without such a row. Epoch and communication were measured apart, so the noise of one may make a share above 1;
    where their steps differ by more than noise, nothing is compared.
    """
    both = [row for row in rows if row["exposed_comm_time_s"] is not None and not row.has_note(STEP_DIFFERS)]
    possible = [row for row in both if row["exposed_comm_time_s"] <= row["epoch_time_s"]]
    if not possible:
        return {}
    row = max(possible, key=lambda row: float(row["comm_share_subtraction"]))
    alike = [one for one in measured if not varying_axes([one.axes, row.axes], TRAINED_MAY_DIFFER)]
    share = max(alike, key=lambda one: int(one["num_windows"] or 0))["exposed_comm_share"]
    return {
        "subtracted": float(row["comm_share_subtraction"]),
        "measured": float(share),
        "subtracted_where": where_of(row, subtracted),
    }
