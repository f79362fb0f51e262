"""The words that the answers share: figures, their intervals, the rows they come from and what weakens them."""

import math
from collections.abc import Iterable, Sequence

from pipeline.analysis.notes import Note
from pipeline.experiment.point_label import EFFORT_AXES, describe_point, format_number, varying_axes
from pipeline.report.note_texts import NoteFormatter
from pipeline.report.row_types import Row
from pipeline.system.errors import pluralize

WEAKENING_NOTES = {
    "shared_node": "shared its node",
    "other_shared_node": "{what} shared its node",
    "drifted": "drifted by {drift:+.1%}",
    "drifted_in_repeats": "drifted by {drift:+.1%}",
    "exposure_drifted": "exposed communication drifted",
    "throttled": "throttled",
    "diverged": "{count} of {repeats} diverged",
    "other_node": "{what} on another node",
    "other_boot": "{what} on another boot",
    "other_gpu": "{what} on another GPU",
    "other_fact": "{what} with another {fact}",
    "baseline_runs": "baseline n = {n}",
    "no_difference": "no difference is shown",
    "superlinear_is_noise": "the noise is larger than the gap to {num_gpus}",
    "exposure_may_be_zero": "0 lies inside the interval",
}
"""Kind of note -> the words for it in an answer."""

NO_RESULT = ("failed", "missing", "rejected")  # the status of a point to run again
PART = "\n"  # between the parts of a long answer, of which a report makes a list; a last part may be a hint
RUN = "run `python -m pipeline.submit --grid {}`"  # the cure in a sentence; {} is a grid


def submit_again(rows: Iterable[Row]) -> str:
    """Return the cure for rows without a result."""
    failed = any(row["status"] == "failed" for row in rows)
    return f"run the same submit command again{' with --rerun failed' if failed else ''}"


def without_hint(answer: str) -> str:
    """Return an answer on one line, without a further part that names a command to run."""
    first, *others = answer.split(PART)
    return " ".join([first, *(part for part in others if "`" not in part)])


def not_answered(why: str, grid: str) -> str:
    """Return the sentence for a question without an answer: `why`, and the command that runs `grid` to get one."""
    return f"Not answered here: {why}; {RUN.format(grid)}."


def percent(fraction: float | None, decimals: int = 0) -> str:
    """Return a fraction in per cent."""
    return format_number(fraction or 0.0, f".{decimals}%").replace("%", " %")


def between(low: float, high: float) -> str:
    """Return two fractions in per cent."""
    return f"{percent(low, 1).removesuffix(' %')} to {percent(high, 1)}"


def figure_of(row: Row, figure: str, unit: str = "") -> str:
    """Return a figure with the decimals of its interval."""
    return format_number(row[figure + unit], f",.{num_decimals(row, figure, unit)}f")


def interval_of(row: Row, figure: str, unit: str = "", name: str = "interval", one_basis: bool = True) -> str:
    """Return the interval of a figure in words; empty if it has none.

    `one_basis` says whether both sides of a ratio have intervals over the same kind of values; if not, none is named.
    """
    low, high = row[f"{figure}_low{unit}"], row[f"{figure}_high{unit}"]
    if low is None or high is None:
        return ""
    spec = f",.{num_decimals(row, figure, unit)}f"
    basis = basis_of(row) if one_basis else ""
    return f"{name} {format_number(low, spec)} to {format_number(high, spec)}{unit.replace('_', ' ')}{basis}, "


def possible_part(value: float | None, low: float | None, most: float) -> tuple[float, float] | None:
    """Return the part of a figure's interval that can be, if the figure itself is above the most that can be."""
    return (low, most) if value is not None and low is not None and low <= most < value else None


def num_decimals(row: Row, figure: str, unit: str) -> int:
    """Return the decimals for three digits of a figure above 0, and up to three more that tell its ends apart."""
    least = max(0, 2 - math.floor(math.log10(row[figure + unit])))
    low, high = row[f"{figure}_low{unit}"], row[f"{figure}_high{unit}"]
    if low is None or high is None:
        return least
    specs = {more: f".{more}f" for more in range(least, least + 4)}
    apart = (more for more, spec in specs.items() if format_number(low, spec) != format_number(high, spec))
    return next(apart, least)


def basis_of(row: Row) -> str:
    """Return in words what the row's interval is computed from; empty if it has none."""
    of_windows = "within one run" if row.n == 1 else "within runs"
    return {"windows": f" {of_windows}", "repeats": " between runs"}.get(row["interval_over"], "")


def source_of(row: Row, rows: Sequence[Row], but: str = "", also: str = "") -> str:
    """Return in words the row that a figure comes from (see describe_own), its n, and what weakens the figure.

    An answer takes the best row with its weak points, and no other row in its place: so a reader finds in the table the
    figure that the answer is about.
    """
    said = [describe_own(row, rows, but, also), *([f"n = {pluralize(row.n, 'run')}"] if row.n else [])]
    weak = sorted(dict.fromkeys(map(weakness_of, row.notes)), key=lambda words: words.startswith("baseline"))
    return ", ".join(filter(None, [*said, *weak]))


def weakness_of(note: Note) -> str:
    """Return the words of a note that weakens a figure; empty for another note."""
    if note.kind == "of_baseline":
        inner = weakness_of(note.values["note"])
        return f"baseline {inner}" if inner else ""
    return NoteFormatter({}).vformat(WEAKENING_NOTES.get(note.kind, ""), (), note.values)


def describe_own(row: Row, rows: Sequence[Row], but: str = "", also: str = "") -> str:
    """Return the row's strategy and batch size, the axes in which the rows differ, and the axis `also`, without `but`.

    The strategy `single` goes without saying.
    """
    varying = varying_axes([other.axes for other in rows], without=("num_gpus", *EFFORT_AXES))
    nodes = varying_axes([{"num_nodes": other["num_nodes"]} for other in rows])
    named = {"strategy", "batch_size_per_gpu", *varying, *nodes, also} - {but}
    if row["strategy"] == "single":
        named.discard("strategy")
    return describe_point(row.axes, [axis for axis in row.axes if axis in named])
