"""A page that lays two experiments side by side: the answer, both sides, what differs, plots and tables."""

from collections.abc import Sequence

from pipeline.figures.comparison import ComparedPoint, Comparison, TimedSide, time_key
from pipeline.figures.intervals import Estimate
from pipeline.figures.pooling import group_pairs
from pipeline.plan.point_label import describe_point, models_of
from pipeline.report.compare import Pairs, differences_of, facts_of_sides, headline_of, range_of, tables_of, terms_of
from pipeline.report.html import render_template
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
from pipeline.report.table import AXIS_HEADINGS, Column, Row, name_texts

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
    said = {"title": ", ".join(pairs), "headline": headline_of(points), "range": range_of(points)}
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
    labels = [describe_point(row, others, models) if others else "" for row in axes]
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
