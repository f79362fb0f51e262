"""Comparisons of two experiments, in Markdown and in JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from pipeline.figures import comparison as compared
from pipeline.figures import intervals
from pipeline.figures.comparability import COMPARED_FACTS, fact_values
from pipeline.figures.comparison import HARDWARE_FACTS, ComparedPoint, Comparison, TimedSide, Verdict
from pipeline.figures.energy import clock_notes
from pipeline.plan.point_label import NAMING_AXES, Terms, describe_point, distinguishing_axes, point_labels
from pipeline.report.claims import badge_of
from pipeline.report.display import STATUS_WORDS, DisplayColumn, DisplayTable, name_columns, name_texts, note_column
from pipeline.report.formatter import render_notes
from pipeline.report.markdown import escape_markdown, render_table
from pipeline.report.table import NOT_STATED
from pipeline.system.errors import pluralize

ABSENT = "-"
SUMMARY_FACTS = ("GPU", "torch", "driver")


TIMES = {"epoch_time_s": ("Epoch time", "s"), "step_time_s": ("Step time", "us")}
"""Kind of time -> the heading of its table, and the unit of its columns."""


def render_comparison(name: str, folders: tuple[str, str], comparison: Comparison) -> str:
    """Return the comparison of two experiments in Markdown: what differs first, then a row for each point."""
    parts = [f"# {escape_markdown(name)}", render_sides(folders, comparison), render_differences(comparison)]
    for key, (heading, unit) in TIMES.items():
        if points := [point for point in comparison.points if compared.time_key(point.spec) == key]:
            parts.append(render_points(heading, unit, points))
    return "\n\n".join(parts) + "\n"


def render_sides(folders: tuple[str, str], comparison: Comparison) -> str:
    """Return a line for each side: its folder, hardware and versions."""
    lines = []
    sides = ([point.a for point in comparison.points], [point.b for point in comparison.points])
    for letter, folder, side in zip("AB", folders, sides, strict=True):
        records = [record for part in side for record in part.point.ok_records]
        values = {fact: " and ".join(fact_values(COMPARED_FACTS[fact], records)) for fact in SUMMARY_FACTS}
        hardware = values.pop("GPU") or " and ".join(fact_values(HARDWARE_FACTS["CPU"], records))
        versions = [f"{fact} {value}" for fact, value in values.items() if value]
        what = ", ".join([hardware or f"hardware {NOT_STATED}", *versions])
        lines.append(f"- {letter}: {escape_markdown(folder)}: {escape_markdown(what)}")
    return "\n".join(lines)


def render_differences(comparison: Comparison) -> str:
    """Return a line for each fact in which the two differ, and the number of points that only one of them has."""
    differences = {fact: tuple(map(" and ".join, sides)) for fact, sides in comparison.differences.items()}
    lines = [f"- {fact}: {a} in A, {b} in B" for fact, (a, b) in differences.items()]
    for letter, alone in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if alone:
            lines.append(f"- {pluralize(len(alone), 'point')} only in {letter}")
    if not lines:
        return "No difference is recorded in hardware, versions and settings."
    return "Differs:\n\n" + "\n".join(map(escape_markdown, lines))


def render_points(heading: str, unit: str, points: Sequence[ComparedPoint]) -> str:
    axes = [msgspec.structs.asdict(point.spec) for point in points]
    varying = distinguishing_axes(axes)
    named, configurations = name_columns(axes, varying)
    badges = [badges_of_sides(point) for point in points]
    footnotes = list(dict.fromkeys(badge for own in badges for badge in own))
    ratios = [ABSENT if point.ratio is None else f"{point.ratio:.3f}" for point in points]
    ends = [f"{point.interval.low:.4f} to {point.interval.high:.4f}" if point.interval else ABSENT for point in points]
    columns = [
        *named,
        DisplayColumn(f"A [{unit}]", [format_time(point.a, unit) for point in points]),
        DisplayColumn(f"B [{unit}]", [format_time(point.b, unit) for point in points]),
        DisplayColumn("B / A", ratios),
        DisplayColumn("interval", ends, "text"),
        DisplayColumn("verdict", [point.verdict for point in points], "text"),
    ]
    if footnotes:
        columns.append(note_column([[footnotes.index(badge) + 1 for badge in own] for own in badges]))
    common = describe_point(axes[0], [axis for axis in NAMING_AXES if axis not in varying])
    legend = " ".join(filter(None, [configurations, *explain_intervals(points)]))
    return render_table(name_texts(DisplayTable(heading, columns, footnotes, common, legend), Terms()))


def format_time(side: TimedSide, unit: str) -> str:
    """Return the median time, or why there is none."""
    if side.time is None:
        return STATUS_WORDS.get(side.point.status, ABSENT)
    return f"{1e6 * side.time:,.1f}" if unit == "us" else f"{side.time:.3f}" if side.time >= 0.1 else f"{side.time:.3g}"


def badges_of_sides(point: ComparedPoint) -> list[str]:
    """Return what a reader must know beside the times, and of which side."""
    a, b = (
        dict.fromkeys(filter(None, map(badge_of, (*side.point.notes, *side.notes, *clock_notes(side.point)))))
        for side in (point.a, point.b)
    )
    sides = {badge: " and ".join(letter for letter, own in (("A", a), ("B", b)) if badge in own) for badge in a | b}
    return [f"{letters} {badge}" for badge, letters in sides.items()]


def explain_intervals(points: Sequence[ComparedPoint]) -> list[str]:
    """Return the sentences below a table: how far to trust the intervals, and what a verdict needs."""
    lines, needed = [], intervals.min_values()
    if coverages := [point.interval.coverage for point in points if point.interval and point.is_between_runs]:
        text = "An interval over repeats contains the true ratio with a probability of at least"
        lines.append(f"{text} {100 * min(coverages):.1f} %.")
    if any(point.verdict in ("slower", "faster") for point in points):
        moved = f"{100 * compared.SITTING_DEVIATION:g} % (standard deviation, on H100s)"
        lines.append(f"Another sitting alone moves a time by {moved}, so a verdict on less may be of the sitting.")
    over_windows = sum(point.interval is not None and not point.is_between_runs for point in points)
    if over_windows:
        of_points = pluralize(over_windows, "point")
        lines.append(f"Intervals over the windows of a run ({of_points}) leave out changes from run to run.")
        lines.append(f"A verdict needs {needed} repeats on both sides.")
    if any(point.verdict == "no interval" for point in points):
        lines.append(f"An interval needs {needed} windows in a run, or {needed} repeats, on both sides.")
    return lines


def summarize(points: Sequence[ComparedPoint], fail_above: float | None, allow_unchecked: bool) -> list[str]:
    """Return the sentences at the end: the number of points by verdict, and those beyond the limit."""
    counts = Counter(point.verdict for point in points)
    listed = ", ".join(f"{counts[word]} {word}" for word in get_args(Verdict) if counts[word])
    sentences = [f"{pluralize(len(points), 'point')}: {listed}."]
    if fail_above is not None:
        slower = sum(point.is_slower_by(fail_above) for point in points)
        known = sum(point.is_between_runs for point in points)
        verb = "is" if known == 1 else "are"
        of_known = f"{slower} of {pluralize(known, 'point')} with a verdict"
        sentences.append(f"{of_known} {verb} slower than the limit of {100 * fail_above:g} %.")
        if unchecked := sum(point.is_unchecked for point in points):
            verb = "was" if unchecked == 1 else "were"
            sentences.append(f"{pluralize(unchecked, 'point')} without a verdict {verb} not checked.")
    if lost := sum(point.is_lost for point in points):
        sentences.append(f"{pluralize(lost, 'point')} ok in A but not in B.")
    if compared.is_failing(points, fail_above, allow_unchecked):
        sentences.append("Exit code 1.")
    return sentences


def name_unchecked(comparisons: Mapping[str, Comparison]) -> list[str]:
    """Return the names of the points that a limit cannot be checked for, each with its experiment and in quotes."""
    names = []
    for name, comparison in comparisons.items():
        labels = point_labels([point.spec for point in comparison.points])
        unchecked = [point.spec.run_id() for point in comparison.points if point.is_unchecked]
        names += [f'"{name}: {labels[run_id]}"' for run_id in unchecked]
    return names


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as `--json` prints it."""
    return {
        "differences": {fact: {"a": a, "b": b} for fact, (a, b) in comparison.differences.items()},
        "points": [point_as_json(point) for point in comparison.points],
        "only_in_a": [spec.run_id() for spec in comparison.only_in_a],
        "only_in_b": [spec.run_id() for spec in comparison.only_in_b],
    }


def point_as_json(point: ComparedPoint) -> dict[str, Any]:
    """Return one point: its axes, both medians with their intervals in seconds, the ratio and the verdict.

    `is_unchecked` is true where a limit cannot be checked (see ComparedPoint).
    """
    low, high, coverage = point.interval[:3] if point.interval else (None, None, None)
    return {
        "run_id": point.spec.run_id(),
        "axes": msgspec.to_builtins(point.spec),
        "time": compared.time_key(point.spec),
        "a": side_as_json(point.a),
        "b": side_as_json(point.b),
        "ratio": point.ratio,
        "ratio_low": low,
        "ratio_high": high,
        "coverage": coverage,
        "verdict": point.verdict,
        "is_unchecked": point.is_unchecked,
    }


def side_as_json(side: TimedSide) -> dict[str, Any]:
    """Return the median of one side, its interval and what that is computed from."""
    low_s, high_s = intervals.ends_of(side.time)
    return {
        "status": side.point.status,
        "time_s": None if side.time is None else float(side.time),
        "low_s": low_s,
        "high_s": high_s,
        "interval_over": None if side.time is None else side.time.basis,
        "n": len(side.point.ok_records),
        "note": render_notes(side.notes),
    }
