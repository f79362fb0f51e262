"""Comparisons of two experiments: in Markdown, in JSON, and as a page that lays them side by side."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from pipeline.figures import intervals
from pipeline.figures.comparability import COMPARED_FACTS, fact_values
from pipeline.figures.comparison import (
    HARDWARE_FACTS,
    SITTING_DEVIATION,
    ComparedPoint,
    Comparison,
    TimedSide,
    Verdict,
    time_key,
)
from pipeline.figures.epoch_figures import clock_notes
from pipeline.figures.intervals import Estimate
from pipeline.figures.pooling import group_pairs
from pipeline.plan import point_label
from pipeline.plan.point_label import NAMING_AXES, Terms, describe_point, distinguishing_axes, models_of, point_labels
from pipeline.records.outcomes import ITEMS
from pipeline.report.claims import badge_of
from pipeline.report.display import (
    SEPARATOR,
    STATUS_WORDS,
    DisplayColumn,
    DisplayTable,
    describe_values,
    name_columns,
    note_column,
)
from pipeline.report.html import render_template
from pipeline.report.markdown import escape_markdown, render_table
from pipeline.report.plots import (
    REFERENCE,
    LinePanel,
    Plot,
    Point,
    RenderedPlot,
    Series,
    as_title,
    evenly,
    group_series,
    label_axes,
    make_series,
    note_on_number,
)
from pipeline.report.table import AXIS_HEADINGS, NOT_STATED, Column, Row, name_texts, render_notes
from pipeline.system.errors import pluralize

ABSENT = "-"
SAME_TIME = 0.005  # a smaller difference is none to speak of
NO_DIFFERENCE = "No difference is recorded in hardware, versions and settings."
SUMMARY_FACTS = ("GPU", "torch", "driver")


TIMES = {"epoch_time_s": ("Epoch time", "s"), "step_time_s": ("Step time", "us")}
"""Kind of time -> the heading of its table, and the unit of its columns."""


Pairs = Mapping[str, tuple[tuple[str, str], Comparison]]
"""Name of an experiment -> the folders of A and B, and their comparison."""


class SideFacts(NamedTuple):
    """One of the two experiments: its letter, its folder, what it ran on, and its versions."""

    letter: str
    folder: str
    hardware: str
    versions: dict[str, str]


def render_comparison(name: str, folders: tuple[str, str], comparison: Comparison) -> str:
    """Return the comparison of two experiments in Markdown: the answer, what differs, then a row for each point."""
    sides = "\n".join(map(render_side, facts_of_sides(folders, comparison)))
    answer = f"**{escape_markdown(headline_of(comparison.points))}**"
    parts = [f"# {escape_markdown(name)}", answer, sides, render_differences(comparison)]
    return "\n\n".join([*parts, *map(render_table, tables_of(comparison))]) + "\n"


def headline_of(points: Sequence[ComparedPoint]) -> str:
    """Return how much faster B is, by the median and the range of the configurations, and what the verdicts are."""
    whole = [point for point in points if time_key(point.spec) == "epoch_time_s" and point.ratio]
    timed = whole or [point for point in points if point.ratio]
    if not timed:
        return "No configuration has a time in both."
    ratios = sorted(point.ratio for point in timed if point.ratio)
    ratio, number = statistics.median(ratios), pluralize(len(ratios), "configuration")
    is_longer = ratio >= 1 + SAME_TIME
    ends = (ratios[0], ratios[-1]) if is_longer else (1 / ratios[-1], 1 / ratios[0])
    spread = f"{' to '.join(dict.fromkeys(f'{end:.3g}' for end in ends))} times as {'long' if is_longer else 'fast'}"
    over = f"median of {number}, {spread}" if len(ratios) > 1 else "one configuration"
    if all(abs(one - 1) < SAME_TIME for one in ratios):
        said = f"B is as fast as A within {100 * SAME_TIME:g} %"
    elif abs(ratio - 1) < SAME_TIME:
        said, over = f"B is {spread}", number
    else:
        said = f"B is {1 / ratio:.3g} times as fast" if ratio < 1 else f"B takes {ratio:.3g} times as long"
    counts = Counter(point.verdict for point in timed if point.is_between_runs)
    known = ", ".join(f"{counts[word]} {word}" for word in get_args(Verdict) if counts[word])
    verdict = f"verdict: {known}" if known else "no verdict: that needs six runs"
    return f"{said} ({over}); {verdict}"


def facts_of_sides(folders: tuple[str, str], comparison: Comparison) -> list[SideFacts]:
    """Return what A and B are: folder, hardware and versions."""
    found = []
    sides = ([point.a for point in comparison.points], [point.b for point in comparison.points])
    for letter, folder, side in zip("AB", folders, sides, strict=True):
        records = [record for part in side for record in part.point.ok_records]
        values = {fact: " and ".join(fact_values(COMPARED_FACTS[fact], records)) for fact in SUMMARY_FACTS}
        hardware = values.pop("GPU") or " and ".join(fact_values(HARDWARE_FACTS["CPU"], records))
        versions = {fact: value for fact, value in values.items() if value}
        found.append(SideFacts(letter, folder, hardware or f"hardware {NOT_STATED}", versions))
    return found


def render_side(side: SideFacts) -> str:
    what = ", ".join([side.hardware, *(f"{fact} {value}" for fact, value in side.versions.items())])
    return f"- {side.letter}: {escape_markdown(side.folder)}: {escape_markdown(what)}"


def differences_of(comparison: Comparison) -> dict[str, str]:
    """Return each fact in which the two differ, with both values, and the number of points that only one has."""
    said = {fact: f"{', '.join(a)} in A; {', '.join(b)} in B" for fact, (a, b) in comparison.differences.items()}
    alone = {"A": comparison.only_in_a, "B": comparison.only_in_b}
    return said | {
        f"only in {letter}": pluralize(len(specs), "configuration") for letter, specs in alone.items() if specs
    }


def render_differences(comparison: Comparison) -> str:
    differences = differences_of(comparison)
    if not differences:
        return NO_DIFFERENCE
    return "Differs:\n\n" + "\n".join(f"- {escape_markdown(f'{fact}: {said}')}" for fact, said in differences.items())


def terms_of(comparison: Comparison) -> Terms:
    on_cpu = {point.spec.device for point in comparison.points} == {"cpu"}
    units = {point.a.point.unit for point in comparison.points}
    return Terms("processes" if on_cpu else "GPUs", units.pop() if len(units) == 1 else ITEMS)


def tables_of(comparison: Comparison) -> list[DisplayTable]:
    """Return a table for each kind of time, with a row for each point, by GPUs and batch size."""
    found = []
    ordered = sorted(comparison.points, key=lambda point: [point.axes.get(axis) for axis in reversed(X_AXES)])
    for key, (heading, unit) in TIMES.items():
        if points := [point for point in ordered if time_key(point.spec) == key]:
            found.append(name_texts(table_of_points(heading, unit, points), terms_of(comparison)))
    return found


def table_of_points(heading: str, unit: str, points: Sequence[ComparedPoint]) -> DisplayTable:
    axes = [point.axes for point in points]
    varying = distinguishing_axes(axes)
    named, configurations = name_columns(axes, varying)
    badges = [badges_of_sides(point) for point in points]
    every = dict.fromkeys(badge for own in badges for badge in own)
    shared = [badge for badge in every if len(badges) > 1 and all(badge in own for own in badges)]
    footnotes = [badge for badge in every if badge not in shared]
    ratios = [ABSENT if point.ratio is None else f"{point.ratio:.3f}" for point in points]
    ends = [f"{point.interval.low:.4f} to {point.interval.high:.4f}" if point.interval else ABSENT for point in points]
    columns = [
        *named,
        DisplayColumn(f"A [{unit}]", [format_time(point.a, unit) for point in points]),
        DisplayColumn(f"B [{unit}]", [format_time(point.b, unit) for point in points]),
        DisplayColumn("B / A", ratios),
    ]
    if {*ends} != {ABSENT}:
        columns.append(DisplayColumn("interval", ends, "text"))
    columns.append(DisplayColumn("verdict", [point.verdict for point in points], "text"))
    if footnotes:
        numbers = [[footnotes.index(badge) + 1 for badge in own if badge in footnotes] for own in badges]
        columns.append(note_column(numbers))
    same = describe_values(axes[0], [axis for axis in NAMING_AXES if axis in axes[0] and axis not in varying])
    legend = " ".join(filter(None, [configurations, *explain_intervals(points)]))
    return DisplayTable(
        heading, columns, [(badge, badge) for badge in footnotes], SEPARATOR.join([*same, *shared]), legend
    )


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
    if any(point.is_per_sample for point in points):
        lines.append("B / A is of the time of a sample, since the epochs have other numbers of them.")
    if coverages := [point.interval.coverage for point in points if point.interval and point.is_between_runs]:
        least = f"{100 * min(coverages):.1f} %"
        lines.append(f"An interval over repeats contains the true ratio with a probability of at least {least}.")
    if any(point.verdict in ("slower", "faster") for point in points):
        moved = f"{100 * SITTING_DEVIATION:g} % (standard deviation, on H100s)"
        lines.append(f"Another sitting alone moves a time by {moved}, so a verdict on less may be of the sitting.")
    if over_windows := sum(point.interval is not None and not point.is_between_runs for point in points):
        of_points = pluralize(over_windows, "configuration")
        lines += [
            f"Intervals over the windows of a run ({of_points}) leave out changes from run to run.",
            f"A verdict needs {needed} repeats on both sides.",
        ]
    if any(point.verdict == "no interval" for point in points):
        lines.append(f"An interval needs {needed} windows in a run, or {needed} repeats, on both sides.")
    return lines


def summarize(points: Sequence[ComparedPoint], fail_above: float | None) -> list[str]:
    """Return the sentences at the end: the number of points by verdict, and those beyond the limit."""
    counts = Counter(point.verdict for point in points)
    listed = ", ".join(f"{counts[word]} {word}" for word in get_args(Verdict) if counts[word])
    sentences = [f"{pluralize(len(points), 'configuration')}: {listed}."]
    if fail_above is not None:
        slower = sum(point.is_slower_by(fail_above) for point in points)
        known = sum(point.is_between_runs for point in points)
        verb = "is" if known == 1 else "are"
        of_known = f"{slower} of {pluralize(known, 'configuration')} with a verdict"
        sentences.append(f"{of_known} {verb} slower than the limit of {100 * fail_above:g} %.")
        if unchecked := sum(point.is_unchecked(fail_above) for point in points):
            verb = "was" if unchecked == 1 else "were"
            sentences.append(
                f"{pluralize(unchecked, 'configuration')} {verb} not checked (no verdict, or noisier than the limit)."
            )
    if lost := sum(point.is_lost for point in points):
        sentences.append(f"{pluralize(lost, 'configuration')} ok in A but not in B.")
    return sentences


def name_unchecked(comparisons: Mapping[str, Comparison], fail_above: float | None) -> list[str]:
    """Return the names of the points that the limit cannot be checked for, each with its experiment and in quotes."""
    names = []
    for name, comparison in comparisons.items():
        labels = point_labels([point.spec for point in comparison.points])
        unchecked = [point.spec.run_id() for point in comparison.points if point.is_unchecked(fail_above)]
        names += [f'"{name}: {labels[run_id]}"' for run_id in unchecked]
    return names


def comparison_as_json(comparison: Comparison, fail_above: float | None = None) -> dict[str, Any]:
    """Return the comparison as `--json` prints it."""
    return {
        "differences": {fact: {"a": a, "b": b} for fact, (a, b) in comparison.differences.items()},
        "points": [point_as_json(point, fail_above) for point in comparison.points],
        "only_in_a": [spec.run_id() for spec in comparison.only_in_a],
        "only_in_b": [spec.run_id() for spec in comparison.only_in_b],
    }


def point_as_json(point: ComparedPoint, fail_above: float | None) -> dict[str, Any]:
    """Return one point: its axes, both medians with their intervals in seconds, the ratio and the verdict.

    `is_unchecked` is true where the limit cannot be checked (see ComparedPoint).
    """
    low, high, coverage = point.interval[:3] if point.interval else (None, None, None)
    return {
        "run_id": point.spec.run_id(),
        "axes": msgspec.to_builtins(point.spec),
        "time": time_key(point.spec),
        "a": side_as_json(point.a),
        "b": side_as_json(point.b),
        "ratio": point.ratio,
        "ratio_low": low,
        "ratio_high": high,
        "coverage": coverage,
        "verdict": point.verdict,
        "is_unchecked": point.is_unchecked(fail_above),
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
        "note": render_notes(side.notes, point_label.terms_of(msgspec.structs.asdict(side.point.spec))),
    }


FASTER = Column("times_as_fast", "B, times as fast as A", "Time in A divided by that in B.")
TIME_COLUMNS = {
    "epoch_time_s": Column("time_s", "epoch time [s]", "Median epoch time."),
    "step_time_s": Column("time_s", "step [ms]", "Median step time."),
}
MAX_PANELS = 6
X_AXES = ("batch_size_per_gpu", "num_gpus")  # the first that varies


def render_page(pairs: Pairs) -> str:
    """Return the page of one comparison or more."""
    sections = [
        {
            "name": name,
            "headline": headline_of(comparison.points),
            "sides": facts_of_sides(folders, comparison),
            "differences": differences_of(comparison),
            "figures": draw(comparison),
            "tables": tables_of(comparison),
        }
        for name, (folders, comparison) in pairs.items()
    ]
    points = [point for _, comparison in pairs.values() for point in comparison.points]
    said = {"title": ", ".join(pairs), "headline": headline_of(points)}
    return render_template("compare.html.j2", said, sections=sections)


def draw(comparison: Comparison) -> Sequence[RenderedPlot]:
    """Return the plots; none if neither batch size nor the number of GPUs varies."""
    plots = [plot for key in TIME_COLUMNS for plot in plots_of(key, comparison.points)]
    if not plots:
        return ()
    from pipeline.report.draw import render_plot

    return [render_plot(name_texts(plot, terms_of(comparison))) for plot in plots]


def plots_of(key: str, points: Sequence[ComparedPoint]) -> list[Plot]:
    """Return how much faster B is, and both times, over the axis that varies."""
    timed = [point for point in points if time_key(point.spec) == key and point.ratio]
    x = next((axis for axis in X_AXES if len({point.axes.get(axis) for point in timed}) > 1), "")
    if not x:
        return []
    rows = [ratio_row(point) for point in timed]
    groups, note = group_series(rows, x)
    places = [row[x] for row in rows]
    even = Series("as fast", (Point(min(places), 1), Point(max(places), 1)), REFERENCE)
    axis = AXIS_HEADINGS[x]
    groups = {label or "B": own for label, own in groups.items()}
    faster = LinePanel(FASTER.heading, axis, (*make_series(groups, x, FASTER), even), y_covers=(0, 1))
    what = TIME_COLUMNS[key].heading.partition(" [")[0]
    panels = time_panels(timed, x, TIME_COLUMNS[key])
    shown = evenly(panels, MAX_PANELS)
    return [
        Plot(f"compare-{key}", "", f"Speed of B against A, by {what}", (faster,), note),
        Plot(
            f"compare-{key}-sides",
            "",
            f"{as_title(what)} of A and B",
            tuple(shown),
            note_on_number(len(panels), MAX_PANELS, "panels"),
        ),
    ]


def time_panels(points: Sequence[ComparedPoint], x: str, column: Column) -> list[LinePanel]:
    """Return a panel for each configuration but its x, with a line for A and one for B."""
    axes = [point.axes for point in points]
    others, models = label_axes(axes, (x,)), models_of(axes)
    labels = [describe_point(row, others, models) for row in axes]
    panels = []
    for label, own in group_pairs(zip(labels, points, strict=True)).items():
        groups = {"A": [time_row(one, one.a) for one in own], "B": [time_row(one, one.b) for one in own]}
        title = f"{label}: {column.heading}" if label else as_title(column.heading)
        panels.append(LinePanel(title, AXIS_HEADINGS[x], make_series(groups, x, column)))
    return panels


def ratio_row(point: ComparedPoint) -> Row:
    assert point.ratio
    ends = (1 / point.interval.high, 1 / point.interval.low) if point.interval else (None, None)
    return Row(point.axes, {FASTER.key: Estimate(1 / point.ratio, *ends)})


def time_row(point: ComparedPoint, side: TimedSide) -> Row:
    return Row(point.axes, {"time_s": side.time})
