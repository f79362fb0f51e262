"""Plots as numbers: their panels, series and bars. `plots` draws them, so nothing here needs matplotlib."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from pipeline.experiment.outcomes import PointOutcome
from pipeline.experiment.point_label import EFFORT_AXES, Processors, describe_point, format_figure, varying_axes
from pipeline.experiment.spec import AXES
from pipeline.report.build_tables import Tables
from pipeline.report.row_types import Row

AnyRow = TypeVar("AnyRow", bound=Row)
AxisValues = tuple[str, ...]
Item = TypeVar("Item")
Scale = Literal["linear", "log2", "log10", "bytes"]

MAX_SERIES = 8  # colours that one can tell apart
MAX_BARS = 20
REFERENCE = -1  # the style of a series to compare with
LOADER_BOUND = "loader-bound"
HOLLOW_LABEL = f"{LOADER_BOUND}, the point or its baseline"


class PlotSource(NamedTuple):
    """The sources of plots: the tables, and the outcomes of the points."""

    tables: Tables
    outcomes: Sequence[PointOutcome]
    processors: Processors = "GPUs"


class Point(NamedTuple):
    """One point of a series, with the ends of its interval if it has one. A loader-bound point has a hollow marker."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    is_loader_bound: bool = False


class Series(NamedTuple):
    """A line through points. `style` chooses colour, marker and dashes; without `is_line` there are only markers."""

    label: str
    points: tuple[Point, ...]
    style: int = 0
    is_line: bool = True


class LinePanel(NamedTuple):
    """Lines over one axis. From `oom_from` on nothing fits in memory; `ideal` is what perfect scaling would give.

    With `x_names` the x axis shows these names, at the positions 0, 1, 2 and so on, in place of numbers. The y axis
    covers `y_covers` too, so that panels can have the same range. It begins at 0 if `from_zero`.
    """

    title: str
    x_label: str
    series: tuple[Series, ...]
    x_scale: Scale = "log2"
    oom_from: float | None = None
    ideal: Callable[[float], float] | None = None
    x_names: tuple[str, ...] = ()
    y_covers: tuple[float, ...] = ()
    from_zero: bool = True

    def describe(self) -> str:
        """Return what the panel shows, in numbers."""
        sentences = [f"{self.title} against {self.x_label}."]
        for series in self.series:
            values = [self.describe_point(point) for point in key_points(series)]
            sentences.append(f"{series.label or 'Measured'}: {', '.join(values)}.")
        if self.oom_from is not None:
            sentences.append(f"Out of memory from {format_x(self.oom_from, self.x_scale)} on.")
        return " ".join(sentences)

    def describe_point(self, point: Point) -> str:
        """Return the value of a point, its position, and if it is loader-bound."""
        where = self.x_names[round(point.x)] if self.x_names else format_x(point.x, self.x_scale)
        return f"{format_figure(point.y)} at {where}{f' ({LOADER_BOUND})' if point.is_loader_bound else ''}"


class BarPanel(NamedTuple):
    """Horizontal bars of equal length, split by part. `totals_ms` are the whole bars in milliseconds."""

    title: str
    bars: tuple[str, ...]
    totals_ms: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]  # the share of each part in every bar, from 0 to 1
    styles: Mapping[str, int]

    def describe(self) -> str:
        """Return what the panel shows, in numbers."""
        sentences = [f"{self.title}."]
        for index, (bar, total) in enumerate(zip(self.bars, self.totals_ms, strict=True)):
            shares = [f"{part} {100 * values[index]:.0f} %" for part, values in self.parts.items() if values[index] > 0]
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


class KeyEntry(NamedTuple):
    """One entry of a plot's key."""

    label: str
    style: int
    kind: Literal["line", "markers", "part", "hollow"]


class Plot(NamedTuple):
    """One plot: panels that share a key. `name` is the name of its file. The page folds up plots without `is_main`."""

    name: str
    question: str
    title: str
    panels: tuple[Panel, ...]
    note: str = ""
    is_main: bool = True

    def key(self) -> list[KeyEntry]:
        """Return entries for series, parts and hollow markers. The title names a single series, so it has no entry."""
        entries: dict[str, KeyEntry] = {}
        for panel in self.panels:
            if isinstance(panel, BarPanel):
                entries |= {part: KeyEntry(part, panel.styles[part], "part") for part in panel.parts}
            elif isinstance(panel, LinePanel):
                for line in panel.series:
                    entries[line.label] = KeyEntry(line.label, line.style, "line" if line.is_line else "markers")
        lines = [line for panel in self.panels if isinstance(panel, LinePanel) for line in panel.series]
        hollow = any(point.is_loader_bound for line in lines for point in line.points)
        found = list(entries.values()) if len(entries) > 1 else []
        return [*found, KeyEntry(HOLLOW_LABEL, REFERENCE, "hollow")] if hollow else found


def group_series(
    rows: Sequence[AnyRow], x_axis: str, without: Sequence[str] = (), first: Sequence[str] = (), panel: str = ""
) -> dict[str, list[AnyRow]]:
    """Group rows into series, by label. A label states the keys `first`, then the axes in which the rows differ.

    It leaves out x, the axes in `without` and `panel`, which gives each of its values a panel. It leaves out
    EFFORT_AXES unless rows of one label would share an x in a panel.
    """

    def position(row: AnyRow) -> tuple[Any, Any]:
        return row[x_axis], row[panel] if panel else None

    groups: dict[str, list[AnyRow]] = {}
    for effort in (EFFORT_AXES, ()):
        own = [row.axes for row in rows]
        axes = [*first, *varying_axes(own, without=(x_axis, panel, *without, *first, *effort))]
        groups = defaultdict(list)
        for row in rows:
            groups[describe_point(row.axes | {key: row[key] for key in first}, axes)].append(row)
        if all(len(set(map(position, members))) == len(members) for members in groups.values()):
            break
    return groups


def make_series(
    groups: Mapping[str, Sequence[Row]], x: str, y: str, low: str = "", high: str = ""
) -> tuple[Series, ...]:
    """Return a series for each group with values, at most MAX_SERIES. If rows share an x, the last one counts.

    `low` and `high` are the keys of the ends of the interval. The style of a label is the same for every y.
    """
    found = []
    for style, label in enumerate(evenly(list(groups), MAX_SERIES)):
        known = [row for row in groups[label] if row[y] is not None]
        points = {
            row[x]: Point(
                row[x], row[y], row[low] if low else None, row[high] if high else None, row.has_note("loader_bound")
            )
            for row in known
        }
        if points:
            found.append(Series(label, tuple(points[position] for position in sorted(points)), style))
    return tuple(found)


def note_on_number(number: int, most: int, what: str) -> str:
    """Return a note if only `most` of the `number` are shown, else nothing."""
    return f"{most:,} of {number:,} {what} are shown." if number > most else ""


def join_notes(*notes: str) -> str:
    """Return the notes of a plot as one text; some may be empty."""
    return " ".join(filter(None, notes))


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many items, spread over all of them, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def key_points(series: Series) -> list[Point]:
    """Return the first, lowest, highest and last point of a series, in order of x."""
    by_y = sorted(series.points, key=lambda point: point.y)
    return sorted({series.points[0], by_y[0], by_y[-1], series.points[-1]}, key=lambda point: point.x)


def format_x(value: float, scale: Scale) -> str:
    """Return a position on the x axis as text."""
    if scale != "bytes":
        return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def axis_values(point: Row | Mapping[str, Any] | PointOutcome, axes: Sequence[str]) -> AxisValues:
    """Return the values of these axes. A row and the outcome of its point give the same, so one finds the other."""
    if isinstance(point, PointOutcome):
        values = (getattr(point.spec, axis) for axis in axes)
        return tuple(repr(list(value) if isinstance(value, tuple) else value) for value in values)
    return tuple(repr(point[axis]) for axis in axes)


def axes_of(rows: Sequence[Row]) -> list[str]:
    """Return the axes of the points of these rows."""
    return [axis for axis in AXES if rows and axis in rows[0].axes]
