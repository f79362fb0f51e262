"""The claim about int8: what it changes in accuracy and bytes."""

from collections.abc import Sequence

from pipeline.analysis.intervals import Estimate, ends_of
from pipeline.answers.claims import Claim, describe_own
from pipeline.system.errors import pluralize
from pipeline.tables.columns import Row


def int8_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return what int8 changes in accuracy and bytes: every tensor in int8, one scale a tensor by its largest value."""
    usual = ("biases", "largest_magnitude", "per_tensor")
    full = [row for row in rows if (row["stage"], row["scale_rule"], row["granularity"]) == usual]
    row = max(full, key=lambda row: (row["accuracy_change"] is not None, row.n), default=None)
    before = next((other for other in rows if row and other["stage"] == "fp32" and other.axes == row.axes), None)
    if row is None or row["accuracy_change"] is None or before is None:
        why = next((str(row["note"]).rstrip(".") for row in full if row["note"]), "").replace("`", "'")  # no command
        problem = f"no network was quantized in full ({why})" if why else "no quantized network was tested"
        return [Claim("int8", "not_answered", {"why": problem})]
    change = row["accuracy_change"]
    low, high = ends_of(change)
    ends = (low, high) if low is not None and high is not None else ()
    values = {
        "which": f" ({describe_own(row, full)})" if len(full) > 1 else "",
        "change": Estimate(100 * change, *(100 * end for end in ends)),
        "fp32": float(before["test_accuracy"]),
        "seeds": f"n = {pluralize(row.n, 'seed')}",
        "num_bytes": row["network_bytes"] or 0,
        "num_bytes_fp32": before["network_bytes"] or 0,
    }
    return [Claim("int8", "int8", values, ("no change shown",) if ends and ends[0] <= 0 <= ends[1] else ())]
