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
    EXPOSED_ALONE,
    EXPOSED_SHARE,
    EXPOSED_UNCLEAR,
    NO_RESULT,
    SUBTRACTED,
    Claim,
    badges_of,
    where_of,
)
from pipeline.report.table import Row, Tables
from pipeline.system.errors import pluralize

OWN = "the model or its loss calls collectives itself, in every measured step"


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
