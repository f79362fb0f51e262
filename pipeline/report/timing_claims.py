"""The claims of Q1, the batch that keeps one GPU busy, of Q2, how much faster several are, and of Q3, communication."""

from collections.abc import Sequence
from typing import Any

from pipeline.experiment.axis_groups import TRAINED_MAY_DIFFER
from pipeline.experiment.point_label import varying_axes
from pipeline.figures.exposed_communication import EXPOSURE_IS_NOISE, EXPOSURE_NEGATIVE, STEP_DIFFERS
from pipeline.figures.intervals import ends_of
from pipeline.figures.pooling import OWN_COLLECTIVES
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
    ONLY_BATCH,
    SMALLEST_OOM,
    SUBTRACTED,
    Claim,
    badges_of,
    where_of,
)
from pipeline.report.table import Row, Tables
from pipeline.system.errors import pluralize

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
