"""The plots of int8: what each stage costs, and what the scales cover of every layer's weights and activations."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.experiment.point_label import EFFORT_AXES, describe_point, varying_axes
from pipeline.report.display_cells import CELL_WORDS
from pipeline.report.plot_data import (
    MAX_SERIES,
    REFERENCE,
    HistogramPanel,
    LinePanel,
    Plot,
    PlotSource,
    Point,
    Series,
    axes_of,
    axis_values,
    evenly,
    note_on_number,
)
from pipeline.report.row_types import Row
from pipeline.system.errors import pluralize

STAGES = {"weights": "weights", **CELL_WORDS["stage"]}
RULES = {"largest_magnitude": "largest magnitude", "three_sigma": "three sigma", "percentile_99_9": "99.9th percentile"}
GRANULARITIES = {"per_tensor": "One scale per tensor", "per_channel": "One scale per channel"}
HISTOGRAMS = {
    "weights": ("int8-weights", "Weights of every layer"),
    "before_relu": ("int8-before-relu", "Outputs of every layer before ReLU"),
    "after_relu": ("int8-after-relu", "Outputs of every layer after ReLU"),
}
SPACING = 0.05  # between the series of a stage: as wide as a marker, so that intervals do not hide each other
SMALL = 1 / 3  # of the largest change; series that stay below it have panels of their own


def int8_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield the change of accuracy by stage, and the histograms of one seed, by tensor."""
    rows = [row for row in source.tables.int8 if row.accuracy_change is not None]
    if rows:
        yield change_plot(rows)
    yield from histogram_plots(source.tables.int8_histograms)


def change_plot(rows: Sequence[Row]) -> Plot:
    """Return the change of test accuracy against fp32 by stage: a line for each scale rule, a panel a granularity.

    If one series hides how small the others are, these are shown again without it. All panels of a row have one range.
    """
    axes = varying_axes([row.axes for row in rows], without=EFFORT_AXES)
    named = [(", ".join(filter(None, (RULES[row["scale_rule"]], describe_point(row.axes, axes)))), row) for row in rows]
    labels = list(dict.fromkeys(label for label, _ in named))
    shown = evenly(labels, MAX_SERIES)
    lines: dict[str, list[Series]] = {granularity: [] for granularity in GRANULARITIES}
    for style, label in enumerate(shown):
        shift = SPACING * (style - (len(shown) - 1) / 2)
        for granularity, own in lines.items():
            wanted = [row for other, row in named if other == label and row["granularity"] == granularity]
            own += [Series(label, tuple(change_point(row, shift) for row in wanted), style)] if wanted else []
    reach = {label: max(abs(end) for own in lines.values() for end in ends_of(own, label)) for label in shown}
    small = [label for label in shown if reach[label] < SMALL * max(reach.values())]
    panels = [*change_panels(lines, shown, "change"), *change_panels(lines, small, "enlarged")]
    seeds = pluralize(max(row["n"] for row in rows), "seed")
    if any(row["accuracy_change_low"] is not None for row in rows):
        seeds += " with its interval"
    note = f"Median over {seeds}, each against its own network in fp32. Each stage includes those before it."
    note += f" Enlarged: only {', '.join(small)}." if small else ""
    note += f" {note_on_number(len(labels), MAX_SERIES, 'series')}"
    return Plot("int8", "int8", "Change of test accuracy in int8, by stage", tuple(panels), note.strip())


def change_panels(lines: Mapping[str, Sequence[Series]], labels: Sequence[str], what: str) -> Iterator[LinePanel]:
    """Yield a panel for each granularity with the series of these labels, all with the same range."""
    covers = tuple(end for own in lines.values() for label in labels for end in ends_of(own, label))
    reference = Series("fp32", (Point(-0.5, 0), Point(len(STAGES) - 0.5, 0)), REFERENCE)
    for name, title in GRANULARITIES.items():
        if shown := [line for line in lines[name] if line.label in labels]:
            named = (f"{title}: {what} [points]", "stage", (reference, *shown))
            yield LinePanel(*named, x_names=tuple(STAGES.values()), y_covers=covers)


def ends_of(lines: Sequence[Series], label: str) -> list[float]:
    """Return the values of the series with this label, and the ends of their intervals."""
    points = [point for line in lines if line.label == label for point in line.points]
    return [value for point in points for value in (point.y, point.low, point.high) if value is not None]


def change_point(row: Row, shift: float) -> Point:
    """Return the change of one row in percentage points, beside the position of its stage."""
    ends = (row["accuracy_change_low"], row["accuracy_change_high"])
    low, high = (None if end is None else 100 * end for end in ends)
    return Point(list(STAGES).index(row["stage"]) + shift, 100 * row["accuracy_change"], low, high)


def histogram_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Yield a plot for each kind of tensor, with a panel a layer; of several points the first counts."""
    axes = axes_of(rows)
    points = list(dict.fromkeys(axis_values(row, axes) for row in rows))
    rows = [row for row in rows if axis_values(row, axes) == points[0]]
    with_relu = {row["layer"] for row in rows if row["tensor"] == "after_relu"}
    for tensor, (name, title) in HISTOGRAMS.items():
        own = [row for row in rows if row["tensor"] == tensor]
        if own:
            shown = f"seed {own[0]['seed']}" + (f" of the first of {len(points)} points" if points[1:] else "")
            signs = "plus" if tensor == "after_relu" else "plus and minus"
            note = f"Number of values in a bin, logarithmic; {shown}. Dashed: mean {signs} 3 sigma. Solid: the "
            note += "largest magnitude."
            ends_in = with_relu if tensor == "before_relu" else {row["layer"] for row in own}
            panels = tuple(histogram_panel(row, row["layer"] in ends_in) for row in own)
            yield Plot(name, "int8", title, panels, note)


def histogram_panel(row: Row, has_relu: bool) -> HistogramPanel:
    """Return the panel of one row; of the last layer it says that no ReLU follows. After ReLU nothing is below 0."""
    title = f"{row['layer']}{'' if has_relu else ' (no ReLU)'}: {sum(row['counts']):,} values"
    ends: tuple[float, ...] = (row["three_sigma_low"], row["three_sigma_high"])
    ends = ends[1:] if row["tensor"] == "after_relu" else ends
    return HistogramPanel(title, row["low"], row["high"], tuple(row["counts"]), ends)
