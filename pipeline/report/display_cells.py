"""Cells of a table: numbers in the decimals of their column, axes, and the words for a value or a missing one."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.experiment.point_label import format_number
from pipeline.report.columns import NOT_STATED
from pipeline.report.row_types import Row
from pipeline.report.table_definitions import Figure

STATUS_WORDS = {"oom": "OOM", "failed": "failed", "missing": "missing", "rejected": "rejected"}
CELL_WORDS = {
    "ending": {
        "ok_timed": "ok: timed",
        "ok_other": "ok: start-up and other",
        "oom": "out of memory",
        "superseded": "replaced by a later attempt",
    },
    "stage": {"activations": "+ activations", "biases": "+ biases (all)"},
}
"""Key of a figure -> the words for its values."""
MAX_DECIMALS = {"loss": 4, "accuracy": 2, "target": 2, "%": 1, "images/s": 1, "[us]": 1, "[GiB]": 2, "[GB/s]": 2}
"""By part of the heading; 3 for others."""

PREDICTED_DECIMALS = {
    "predicted_step": 1,
    "all_hidden_step": 1,
    "predicted_parallel": 0,
    "all_hidden_parallel": 0,
}
"""By the beginning of the key."""


class Cell(NamedTuple):
    """A cell: its text, the address that it links to, and the numbers of its footnotes."""

    text: str
    is_number: bool = False
    href: str = ""
    footnotes: tuple[int, ...] = ()


class DisplayTable(NamedTuple):
    """A table for people. `common` is what all rows share; `source` is the CSV file with every column."""

    heading: str
    columns: list[Cell]
    rows: list[list[Cell]]
    footnotes: list[str]
    common: str
    legend: str
    source: str
    is_folded: bool


def status_of(row: Row) -> str:
    """Return why a row has no main figure: its status, or that training diverged."""
    if getattr(row, "diverged_at_update", None) is not None:
        return f"diverged at update {row['diverged_at_update']}"
    return STATUS_WORDS.get(getattr(row, "status", "ok"), "")


def format_axis(value: Any) -> str:
    """Return an axis's value in its own column."""
    if isinstance(value, list):
        return " + ".join(map(str, value)) or "none"
    return f"{value:,}" if type(value) is int else NOT_STATED if value is None else str(value)


def decimals_of(figure: Figure, rows: Sequence[Row]) -> int:
    """Return the decimals of a column: four digits of its smallest value, if its unit allows; none for counts."""
    known = [row for row in rows if row[figure.key] is not None and not isinstance(row[figure.key], str)]
    values = [abs(value) for row in known if (value := figure.value(row)) and math.isfinite(value)]
    is_count = "_calls_" in figure.key or (
        figure.factor == 1 and all(isinstance(row[figure.key], int) for row in known)
    )
    if is_count or not values:
        return 0
    if figure.key == "learning_rate":  # as it was set
        return max(len(f"{value:.9f}".rstrip("0").partition(".")[2]) for value in values)
    limits = [most for start, most in PREDICTED_DECIMALS.items() if figure.key.startswith(start)]
    most = next(iter([*limits, *(most for unit, most in MAX_DECIMALS.items() if unit in figure.heading)]), 3)
    return min(max(max(most, 3) - math.floor(math.log10(min(values))), 0), most)


def figure_cells(figure: Figure, rows: Sequence[Row], decimals: int | None) -> list[Cell]:
    """Return the cells of one figure. Without decimals they have up to six digits, and no interval."""
    is_number = not any(isinstance(row[figure.key], str | list) for row in rows)
    return [Cell(format_cell(figure, row, decimals), is_number) for row in rows]


def format_cell(figure: Figure, row: Row, decimals: int | None) -> str:
    """Return the number, with its interval if the figure has one; empty if it is not known, and why if a note says.

    Minimum and maximum of one run are no interval. A number that noise hides is "<" and the noise.
    """
    raw = row[figure.key]
    if raw is None and any(note.kind == "not_stated" and figure.key in note.values["figures"] for note in row.notes):
        return NOT_STATED
    if isinstance(raw, str | list | bool):
        words = CELL_WORDS.get(figure.key, {}) if decimals is not None else {}
        return words.get(str(raw)) or format_axis(raw)
    value, noise = figure.value(row), figure.noise_of(row)
    if noise is not None and decimals is not None:
        return f"<{noise:.3g}"
    if value is None:
        return figure.absent(row) if figure.absent else ""
    if decimals is None or not math.isfinite(value) or abs(value) >= 1e9:
        return f"{value:.6g}" if decimals is None else f"{value:.3g}"
    least = 10**-decimals
    if figure.key == "noise_floor" and 0 < value < least / 2:
        return f"<{least:.{decimals}f}"
    spec = f",.{decimals}f"
    text = format_number(value, spec)
    low, high = (figure.value(row, key) if key else None for key in (figure.low, figure.high))
    if low is None or high is None or (row.n == 1 and low == high):
        return text
    return f"{text} ({format_number(low, spec)} to {format_number(high, spec)})"
