"""Plots as numbers: their panels, series and bars. `draw` draws them, so nothing here needs matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from pipeline.figures.intervals import ends_of
from pipeline.figures.pooling import group_pairs
from pipeline.plan.point_label import (
    NAMED_LAST,
    axes_fixed_by_model,
    describe_point,
    distinguishing_axes,
    format_figure,
    models_of,
)
from pipeline.report.table import Column, Row

Item = TypeVar("Item")
Scale = Literal["linear", "log2", "log10", "bytes"]

MAX_SERIES = 8  # colours that one can tell apart
MAX_BARS = 20
MAX_POINTS = 60  # of a line: more cannot be seen, and make a page large
REFERENCE = -1  # the style of a series to compare with
MARKS = "●■▲◆▼✚✖⬢"  # the markers of series as characters, for the key of a page
PART_MARKS = "■▧▥▨▤▩▦▒"  # the hatches of parts of a bar, likewise
NO_BARS = "Without bars: no interval is known."
GREY = "○"  # the mark of points that no answer uses, in the key


class KeyEntry(NamedTuple):
    """One entry of a plot's key: its mark, the name of its colour in the style sheet, and its label."""

    mark: str
    role: str
    label: str


class Point(NamedTuple):
    """One point of a series, with the ends of its interval if it has one. A point with `flaw` is grey and hollow."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    flaw: str = ""  # why no answer uses it


class Series(NamedTuple):
    """A line through points. `style` chooses colour, marker and dashes; without `is_line` there are only markers."""

    label: str
    points: tuple[Point, ...]
    style: int = 0
    is_line: bool = True

    @property
    def mark(self) -> str:
        """The character that stands for the series in the key of a page."""
        return "◇" if not self.is_line else "┅" if self.style == REFERENCE else MARKS[self.style]

    def key_points(self) -> list[Point]:
        """Return the first, lowest, highest and last point, in order of x."""
        by_y = sorted(self.points, key=lambda point: point.y)
        return sorted({self.points[0], by_y[0], by_y[-1], self.points[-1]}, key=lambda point: point.x)


class LinePanel(NamedTuple):
    """Lines over one axis. From `oom_from` on nothing fits in memory; `ideal` is what perfect scaling would give.

    With `x_names` the x axis shows these names, at the positions 0, 1, 2 and so on, in place of numbers. The y axis
    covers `y_covers` too, so that it begins at 0, or panels have the same range.
    """

    title: str
    x_label: str
    series: tuple[Series, ...]
    x_scale: Scale = "log2"
    oom_from: float | None = None
    ideal: Callable[[float], float] | None = None
    x_names: tuple[str, ...] = ()
    y_covers: tuple[float, ...] = (0,)
    y_scale: Scale = "linear"

    @property
    def axis_label(self) -> str:
        """The label of the x axis, which says if the axis is logarithmic."""
        return self.x_label if self.x_scale == "linear" or self.x_names else f"{self.x_label}, logarithmic"

    @property
    def is_curve(self) -> bool:
        """True if the points have more than one place on the x axis."""
        return len({point.x for series in self.series for point in series.points}) > 1

    def describe(self) -> str:
        """Return what the panel shows, in numbers."""
        sentences = [f"{self.title} against {self.axis_label}."]
        for series in self.series:
            values = []
            for point in series.key_points():
                where = self.x_names[round(point.x)] if self.x_names else format_x(point.x, self.x_scale)
                values.append(f"{format_figure(point.y)} at {where}{f' ({point.flaw})' if point.flaw else ''}")
            sentences.append(f"{series.label or 'Measured'}: {', '.join(values)}.")
        if self.oom_from is not None:
            sentences.append(f"Out of memory from {format_x(self.oom_from, self.x_scale)} on.")
        return " ".join(sentences)


class BarPanel(NamedTuple):
    """Horizontal bars of equal length, split by part. `totals_ms` are the whole bars in milliseconds.

    The shares of a bar add up to 1. One below 0 is drawn to the left: then the others are too long by as much.
    """

    title: str
    bars: tuple[str, ...]
    totals_ms: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]  # the share of each part in every bar
    styles: Mapping[str, int]  # of each part, in the order of the parts in a bar
    short: Mapping[str, str]  # a shorter name of some parts

    def describe(self) -> str:
        """Return what the panel shows, in numbers."""
        sentences = [f"{self.title}."]
        for index, (bar, total) in enumerate(zip(self.bars, self.totals_ms, strict=True)):
            shares = [f"{part} {100 * values[index]:.0f} %" for part, values in self.parts.items() if values[index]]
            sentences.append(f"{bar}: {format_figure(total)} ms, of it {', '.join(shares)}.")
        return " ".join(sentences)


class HistogramPanel(NamedTuple):
    """Counts of values in bins of equal width from `low` to `high`, on a logarithmic axis, and two lines to compare."""

    title: str
    low: float
    high: float
    counts: tuple[int, ...]
    three_sigma: tuple[float, ...]  # the mean minus and plus 3 sigma

    @property
    def largest(self) -> float:
        """The value with the largest magnitude."""
        return max(self.low, self.high, key=abs)

    def describe(self) -> str:
        """Return what the panel shows, in numbers."""
        most = self.counts.index(max(self.counts))
        width = (self.high - self.low) / len(self.counts)
        ends = " to ".join(map(format_figure, self.three_sigma))
        return (
            f"{self.title}, from {format_figure(self.low)} to {format_figure(self.high)}, most often near "
            f"{format_figure(self.low + (most + 0.5) * width)}. Three sigma: {ends}."
        )


Panel = LinePanel | BarPanel | HistogramPanel


class Plot(NamedTuple):
    """One plot: panels that share a key. `name` is the name of its file."""

    name: str
    question: str
    title: str
    panels: tuple[Panel, ...]
    note: str = ""

    def key(self) -> list[KeyEntry]:
        """Return entries for series, parts and grey markers. The title names a single series, so it has no entry."""
        entries: dict[str, KeyEntry] = {}
        flaws: dict[str, None] = {}
        shown = {part for panel in self.panels if isinstance(panel, BarPanel) for part in panel.parts}
        for panel in self.panels:
            if isinstance(panel, BarPanel):
                styles = {part: style for part, style in panel.styles.items() if part in shown}
                entries |= {part: KeyEntry(PART_MARKS[at], role_of(at), part) for part, at in styles.items()}
            elif isinstance(panel, LinePanel):
                entries |= {line.label: KeyEntry(line.mark, role_of(line.style), line.label) for line in panel.series}
                flaws |= {point.flaw: None for line in panel.series for point in line.points if point.flaw}
        grey = [KeyEntry(GREY, role_of(REFERENCE), f"not used: {', '.join(flaws)}")] if flaws else []
        return (list(entries.values()) if len(entries) > 1 else []) + grey


class RenderedPlot(NamedTuple):
    """A plot, and its panels for the page: each an SVG in the colours of its style sheet."""

    plot: Plot
    pictures: list[str]


def keep_curves(plot: Plot) -> Plot:
    """Return a plot without lines of a single place, which a table shows better. Its note says if nothing has a bar."""
    panels = tuple(panel for panel in plot.panels if not isinstance(panel, LinePanel) or panel.is_curve)
    lines = [line for panel in panels if isinstance(panel, LinePanel) for line in panel.series if line.is_line]
    has_none = bool(lines) and all(point.low is None for line in lines for point in line.points)
    return plot._replace(panels=panels, note=" ".join(filter(None, (plot.note, NO_BARS if has_none else ""))))


def role_of(style: int) -> str:
    """Return the name of the colour of a series or part in the style sheet."""
    return "muted" if style == REFERENCE else f"s{style}"


def as_title(text: str) -> str:
    """Return a text, such as the heading of a column, with a capital."""
    start = 1 if text.startswith("$") else 0  # a placeholder has a form that begins a title
    return text[:start] + text[start].upper() + text[start + 1 :]


def label_axes(
    points: Sequence[Mapping[str, Any]], known: Sequence[str] = (), optional: Sequence[str] = NAMED_LAST
) -> list[str]:
    """Return the axes that tell the points apart beside the `known` ones, without what the name of a model tells."""
    axes = distinguishing_axes(points, known, optional)
    fixed = axes_fixed_by_model(points, axes)
    return [axis for axis in axes if axis not in fixed]


def group_series(
    rows: Sequence[Row], x: str, first: Sequence[str] = (), optional: Sequence[str] = NAMED_LAST, panel: str = ""
) -> tuple[dict[str, list[Row]], str]:
    """Return the rows of at most MAX_SERIES series by label, and a note if there are more.

    A label states the keys `first`, then the axes in which the rows differ. It leaves out x and `panel`, which gives
    each of its values a panel. It leaves out the axes in `optional` unless rows of one label would share an x in a
    panel.
    """
    known = [key for key in (x, panel, *first) if key]
    points = [row.axes | {key: row[key] for key in known} for row in rows]
    axes = [*first, *label_axes(points, known, optional)]
    models = models_of(points)
    groups = group_pairs((describe_point(point, axes, models), row) for point, row in zip(points, rows, strict=True))
    shown = {label: groups[label] for label in evenly(list(groups), MAX_SERIES)}
    return shown, note_on_number(len(groups), MAX_SERIES, "series")


def make_series(
    groups: Mapping[str, Sequence[Row]], x: str, column: Column, styles: Mapping[str, int] | None = None
) -> tuple[Series, ...]:
    """Return a series of the column for each group with values.

    If rows share an x, the last one counts. Of many places MAX_POINTS are drawn, evenly spread. Without `styles` a
    label has the same style in every column.
    """
    found = []
    for style, (label, rows) in enumerate(groups.items()):
        known = [row for row in rows if row[x] is not None and row[column.key] is not None]
        points = {row[x]: make_point(row[x], row, column) for row in known}
        if points:
            chosen = styles[label] if styles else style
            shown = evenly(sorted(points), MAX_POINTS)
            found.append(Series(label, tuple(points[place] for place in shown), chosen))
    return tuple(found)


def make_point(x: float, row: Row, column: Column) -> Point:
    """Return a row's value of the column, in the unit that people read."""
    low, high = (None if end is None else column.factor * end for end in ends_of(row[column.key]))
    return Point(x, column.factor * row[column.key], low, high, next(iter(row.flaws_of(column.key)), ""))


def note_on_number(number: int, most: int, what: str) -> str:
    """Return a note if only `most` of the `number` are shown, else nothing."""
    return f"{most:,} of {number:,} {what} are shown." if number > most else ""


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many items, spread over all of them, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def format_x(value: float, scale: Scale) -> str:
    """Return a position on the x axis as text."""
    if scale != "bytes":
        return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"
