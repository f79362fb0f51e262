"""The answer about int8: what it changes in accuracy and bytes."""

from collections.abc import Sequence

from pipeline.experiment.point_label import format_number
from pipeline.report.answer_words import describe_own, percent
from pipeline.report.row_types import Int8Row
from pipeline.system.errors import pluralize


def answer_int8(rows: Sequence[Int8Row]) -> str:
    """Return what int8 changes in accuracy and bytes: every tensor in int8, one scale a tensor by its largest value."""
    usual = ("largest_magnitude", "per_tensor")
    full = [row for row in rows if row.stage == "biases" and (row.scale_rule, row.granularity) == usual]
    row = max(full, key=lambda row: (row.accuracy_change is not None, row.n), default=None)
    before = next((other for other in rows if row and other.stage == "fp32" and other.axes == row.axes), None)
    if row is None or row.accuracy_change is None or before is None:
        why = next((str(row["note"]).rstrip(".") for row in full if row["note"]), "").replace("`", "'")  # no command
        if why:
            return f"Not answered here: no network was quantized in full ({why})."
        return "Not answered here: no quantized network was tested; `status` of this folder has the reasons."
    low, high = row.accuracy_change_low, row.accuracy_change_high
    which = f" ({describe_own(row, full)})" if len(full) > 1 else ""
    ends = f"interval {points(low)} to {points(high)}, " if low is not None and high is not None else ""
    unclear = (
        " 0 lies inside the interval: a change is neither shown nor excluded."
        if ends and (low or 0) <= 0 <= (high or 0)
        else ""
    )
    return (
        f"With the whole network in int8{which} test accuracy changes by {points(row.accuracy_change)} points "
        f"({ends}from {percent(before.test_accuracy, 1)} in fp32, n = {pluralize(row.n, 'seed')}).{unclear} The "
        f"network takes {row.network_bytes or 0:,} of {before.network_bytes or 0:,} bytes."
    )


def points(change: float) -> str:
    """Return the change of a fraction in percentage points."""
    return format_number(change, "+.2%").removesuffix("%")
