"""The claims of Q3: what communication costs, as measured and by subtraction."""

from collections.abc import Sequence
from typing import Any

from pipeline.analysis.intervals import ends_of
from pipeline.answers import claims
from pipeline.answers.claims import NO_RESULT, Claim, badges_of, where_of
from pipeline.tables.build_tables import Tables
from pipeline.tables.columns import Row


def communication_claims(tables: Tables) -> list[Claim]:
    """Return the largest measured share of exposed communication, and beside it the share that subtraction gives."""
    rows = tables["communication"]
    measured = [row for row in rows if row["exposed_comm_share"] is not None]
    known = [row for row in tables["Q3"] if row["comm_share_subtraction"] is not None]
    subtracted = [row for row in known if claims.is_fit_for_answer(row, "comm_time_subtraction_s")]
    if measured:
        most = max(row["num_gpus"] for row in measured)
        on_most = [row for row in measured if row["num_gpus"] == most]
        compared = compare_subtraction([row for row in subtracted if row["num_gpus"] == most], subtracted)
        claim = measured_claim(on_most, measured, compared)
        return [claim if known else claim._replace(command=claims.grid_command("q3"))]
    if subtracted:
        most_by = max(subtracted, key=lambda row: float(row["comm_share_subtraction"]))
        values = {
            "share": float(most_by["comm_share_subtraction"]),
            "where": where_of(most_by, subtracted, also="num_gpus"),
        }
        return [Claim("Q3", "subtracted", values, badges_of(most_by), claims.grid_command("communication"))]
    if lost := [row for row in rows if row.status in NO_RESULT]:
        return [claims.no_result("Q3", "points that measure communication", lost)]
    why = "no point on several GPUs measures communication"
    if known:
        why += ", and subtraction fails, counts waiting for data or shows no more than noise"
    return [claims.not_answered("Q3", why, "communication")]


def measured_claim(rows: Sequence[Row], measured: Sequence[Row], compared: dict[str, Any]) -> Claim:
    """Return the largest and the smallest share of communication in these rows, and how many rows show none."""
    noisy, negative = ([row for row in rows if row.has_note(f"exposure_{kind}")] for kind in ("is_noise", "negative"))
    told = [row for row in rows if not row.has_note("exposure_is_noise", "exposure_negative")]
    parts = []
    if noisy:
        noise = max(row["noise_floor_time_s"] / row["step_time_s"] for row in noisy)
        parts.append(f"{len(noisy)} show no more than their noise, up to {100 * noise:.1f} % of the step")
    if negative:
        parts.append(f"in {len(negative)} DDP was faster than without all-reduces, and the records do not say why")
    unclear, common = " and ".join(parts), {"num_gpus": rows[0]["num_gpus"], "count": len(rows), **compared}
    if not told:
        return Claim("Q3", "exposed_unclear", common | {"unclear": unclear})
    worst, best = (choose(told, key=lambda row: float(row["exposed_comm_share"])) for choose in (max, min))
    values = {
        "exposed_us": 1e6 * worst["exposed_comm_time_s"],
        "step_ms": 1e3 * worst["step_time_s"],
        "share": worst["exposed_comm_share"],
        "where": where_of(worst, measured),
        "smallest": best["exposed_comm_share"],
        "unclear": unclear or "all are above the noise",
    }
    return Claim("Q3", "exposed" if len(rows) > 1 else "exposed_alone", common | values, badges_of(worst))


def compare_subtraction(rows: Sequence[Row], subtracted: Sequence[Row]) -> dict[str, Any]:
    """Return the largest share by subtraction where a share that can be was measured too; {} without such a row.

    Epoch and communication were measured apart, so the noise of one may make a share above 1.
    """
    both = [row for row in rows if row["exposed_comm_time_s"] is not None]
    possible = [row for row in both if (ends_of(row["exposed_comm_time_s"])[0] or 0.0) <= row["epoch_time_s"]]
    possible = [row for row in possible if row["exposed_comm_time_s"] <= row["epoch_time_s"]]
    if not possible:
        return {}
    row = max(possible, key=lambda row: float(row["comm_share_subtraction"]))
    return {
        "subtracted": float(row["comm_share_subtraction"]),
        "measured": float(row["exposed_comm_time_s"]) / row["epoch_time_s"],
        "subtracted_where": where_of(row, subtracted),
    }
