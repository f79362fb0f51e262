"""The plots of int8: what each stage costs, and what the scales cover of every layer's weights and activations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.analysis.pooling import group_pairs
from pipeline.pages import plot_data
from pipeline.pages.plot_data import REFERENCE, HistogramPanel, LinePanel, Plot, PlotSource, Point, Series
from pipeline.system.errors import pluralize
from pipeline.tables.columns import Row
from pipeline.tables.definitions import STAGE_WORDS, TABLES

CHANGE = TABLES["int8"].column("accuracy_change")
STAGES = {"weights": "weights", **STAGE_WORDS}
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
    rows = [row for row in source.tables["int8"] if row[CHANGE.key] is not None]
    if rows:
        yield change_plot(rows)
    yield from histogram_plots(source.tables["int8_histograms"])


def change_plot(rows: Sequence[Row]) -> Plot:
    """Return the change of test accuracy against fp32 by stage: a line for each scale rule, a panel a granularity.

    If one series hides how small the others are, these are shown again without it. All panels of a row have one range.
    """
    groups, left_out = plot_data.group_series(rows, "stage", first=("scale_rule",), panel="granularity")
    lines: dict[str, list[Series]] = {granularity: [] for granularity in GRANULARITIES}
    for style, (label, of_label) in enumerate(groups.items()):
        shift = SPACING * (style - (len(groups) - 1) / 2)
        for granularity, own in lines.items():
            wanted = [row for row in of_label if row["granularity"] == granularity]
            places = [list(STAGES).index(row["stage"]) + shift for row in wanted]
            points = tuple(plot_data.make_point(x, row, CHANGE) for x, row in zip(places, wanted, strict=True))
            own += [Series(label, points, style)] if points else []
    every = [line for own in lines.values() for line in own]
    reach = {label: max(map(abs, ends_of(line for line in every if line.label == label))) for label in groups}
    small = [label for label in groups if reach[label] < SMALL * max(reach.values())]
    panels = [*change_panels(lines, [*groups], CHANGE.name), *change_panels(lines, small, "enlarged")]
    has_intervals = any(point.low is not None and point.high is not None for line in every for point in line.points)
    note = (
        f"Median over {pluralize(max(row['n'] for row in rows), 'seed')}{' with its interval' * has_intervals}, each "
        "against its own network in fp32. Each stage includes those before it."
    )
    note += f" Enlarged: only {', '.join(small)}." if small else ""
    title = "Change of test accuracy in int8, by stage"
    return Plot("int8", "int8", title, tuple(panels), f"{note} {left_out}".rstrip())


def change_panels(lines: Mapping[str, Sequence[Series]], labels: Sequence[str], name: str) -> Iterator[LinePanel]:
    """Yield a panel for each granularity with the series of these labels, all with the same range."""
    chosen = {granularity: [line for line in own if line.label in labels] for granularity, own in lines.items()}
    covers = tuple(end for own in chosen.values() for end in ends_of(own))
    reference = Series("fp32", (Point(-0.5, 0), Point(len(STAGES) - 0.5, 0)), REFERENCE)
    for granularity, own in chosen.items():
        if own:
            title = f"{GRANULARITIES[granularity]}: {CHANGE.heading.replace(CHANGE.name, name)}"
            yield LinePanel(title, "stage", (reference, *own), x_names=tuple(STAGES.values()), y_covers=covers)


def ends_of(lines: Iterable[Series]) -> list[float]:
    """Return the values of the series, and the ends of their intervals."""
    points = [point for line in lines for point in line.points]
    return [value for point in points for value in (point.y, point.low, point.high) if value is not None]


def histogram_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Yield a plot for each kind of tensor, with a panel a layer; of several points the first counts."""
    points = group_pairs((repr(row.axes), row) for row in rows)
    rows = next(iter(points.values()), [])
    with_relu = {row["layer"] for row in rows if row["tensor"] == "after_relu"}
    for tensor, (name, title) in HISTOGRAMS.items():
        own = [row for row in rows if row["tensor"] == tensor]
        if own:
            shown = f"seed {own[0]['seed']}" + (f" of the first of {len(points)} points" if len(points) > 1 else "")
            signs = "plus" if tensor == "after_relu" else "plus and minus"
            note = f"Number of values in a bin, logarithmic; {shown}. Dashed: mean {signs} 3 sigma. Solid: the "
            note += "largest magnitude."
            ends_in = with_relu if tensor == "before_relu" else {row["layer"] for row in own}
            yield Plot(name, "int8", title, tuple(histogram_panel(row, row["layer"] in ends_in) for row in own), note)


def histogram_panel(row: Row, has_relu: bool) -> HistogramPanel:
    """Return the panel of one row; of the last layer it says that no ReLU follows. After ReLU nothing is below 0."""
    title = f"{row['layer']}{'' if has_relu else ' (no ReLU)'}: {sum(row['counts']):,} values"
    ends = (row["three_sigma_low"], row["three_sigma_high"])[row["tensor"] == "after_relu" :]
    return HistogramPanel(title, row["low"], row["high"], tuple(row["counts"]), ends)
