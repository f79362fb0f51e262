"""Draws panels with matplotlib. Only this module imports it, so import it only where a plot is made.

Every role has a placeholder colour; `plots` replaces it by that of a theme.
"""

import io
import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache on stderr

import matplotlib  # noqa: E402 - after its logger is quiet
from matplotlib.artist import Artist  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from pipeline.experiment.point_label import format_figure  # noqa: E402
from pipeline.report.plot_data import (  # noqa: E402
    REFERENCE,
    BarPanel,
    HistogramPanel,
    KeyEntry,
    LinePanel,
    Panel,
    Point,
    Series,
    format_x,
)
from pipeline.system.errors import replace_control_characters  # noqa: E402

WIDTH, HEIGHT = 360, 250  # of a panel of lines, in px; it is as wide as a phone
HISTOGRAM_HEIGHT = 170
BAR_HEIGHT, BAR_MARGINS = 33, 54  # a bar with its label above it; title and axis
MARGINS = {LinePanel: (46, 12, 34, 40), BarPanel: (4, 12, 26, 26), HistogramPanel: (60, 12, 26, 22)}
"""Left, right, top and bottom of a panel, in px."""
GAP = 16  # between the panels of a file
MIN_COUNT = 0.7  # where the axis of a histogram begins, so that a count of 1 is seen
FONT_SIZE = 11
MAX_TICKS = 6
MAX_MARKERS = 40  # of a line; with more they touch
BUCKET = 3  # the marker of points without a line

SERIES_COLOURS = ("#4883e9", "#994702", "#1b9f89", "#5e2464", "#a68217", "#741d11", "#4e4fb0", "#5f626f")
"""For a light ground; the page's style sheet has the colours of both grounds too, for keys and states.

Searched for the largest smallest distance between two of them, for normal sight, protanopia and deuteranopia.
"""

SERIES_COLOURS_ON_DARK = ("#78a6fe", "#cf5805", "#b1e8bc", "#b1658c", "#e5c540", "#fe7467", "#816ada", "#acb9c3")
ROLES = ("--fg", "--muted", "--line", "--shade", "--bg", *(f"--s{index}" for index in range(len(SERIES_COLOURS))))
LIGHT = dict(zip(ROLES, ("#1a1f24", "#59636e", "#d5dade", "#f3e3df", "#ffffff", *SERIES_COLOURS), strict=True))
DARK = dict(zip(ROLES, ("#e8ebee", "#a3adb8", "#363d45", "#43292a", "#14181c", *SERIES_COLOURS_ON_DARK), strict=True))
PLACEHOLDERS = {role: f"#{index:06x}" for index, role in enumerate(ROLES, start=1)}  # SVG leaves out #000000
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
MARKS = "●■▲◆▼✚✖⬢"  # the same as characters, for the key of a page
DASHES: tuple[Any, ...] = ("-", "-", "-", "-", (0, (5, 2)), (0, (5, 2)), (0, (5, 2)), (0, (5, 2)))

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "plots",
    "font.size": FONT_SIZE,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a layout does not depend on the machine
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PLACEHOLDERS["--muted"],
    "axes.titlelocation": "left",
    "axes.titlesize": FONT_SIZE + 1,
    "axes.titleweight": "bold",
    "axes.titlecolor": PLACEHOLDERS["--fg"],
    "axes.labelcolor": PLACEHOLDERS["--muted"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": PLACEHOLDERS["--line"],
    "grid.linewidth": 0.8,
    "xtick.color": PLACEHOLDERS["--muted"],
    "ytick.color": PLACEHOLDERS["--muted"],
    "xtick.labelsize": FONT_SIZE - 1,
    "ytick.labelsize": FONT_SIZE - 1,
    "ytick.major.size": 0,
    "text.color": PLACEHOLDERS["--muted"],
    "figure.dpi": 72,
    "legend.labelcolor": PLACEHOLDERS["--fg"],
}
KEY_STYLE: dict[str, Any] = {"frameon": False, "borderpad": 0.2, "handlelength": 3, "columnspacing": 1.6}


def role_of(style: int) -> str:
    """Return the name of the colour of a series or part."""
    return "--muted" if style == REFERENCE else f"--s{style}"


def size_of(panel: Panel) -> tuple[int, int]:
    """Return the width and height of a panel in px."""
    if isinstance(panel, BarPanel):
        return WIDTH, BAR_MARGINS + BAR_HEIGHT * len(panel.bars)
    return WIDTH, HEIGHT if isinstance(panel, LinePanel) else HISTOGRAM_HEIGHT


def draw(panels: Sequence[Panel], key: Sequence[KeyEntry] = (), per_row: int = 1, title: str = "") -> str:
    """Return the panels, in rows, as SVG in placeholder colours. A title brings a ground, a key and a description."""
    rows = [panels[start : start + per_row] for start in range(0, len(panels), per_row)]
    width = max(sum(size_of(panel)[0] for panel in row) + GAP * (len(row) - 1) for row in rows)
    heights = [max(size_of(panel)[1] for panel in row) for row in rows]
    columns = max(1, int(width // (44 + 6.5 * max((len(entry.label) for entry in key), default=0))))
    key_height = 12 + 18 * math.ceil(len(key) / columns) if key else 0
    height = sum(heights) + GAP * (len(rows) - 1) + key_height
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's fonts draw the text
        figure = Figure(figsize=(width / 72, height / 72), facecolor=PLACEHOLDERS["--bg"])
        figure.patch.set_visible(bool(title))
        y = height
        for row, row_height in zip(rows, heights, strict=True):
            for index, panel in enumerate(row):
                draw_panel(figure, panel, index * (WIDTH + GAP), y)
            y -= row_height + GAP
        if key:
            figure.legend(handles=[*map(handle_of, key)], loc="lower left", ncols=columns, **KEY_STYLE)
        picture = io.StringIO()
        said = {"Title": title, "Description": " ".join(panel.describe() for panel in panels)} if title else {}
        figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None} | said)
    return replace_control_characters(picture.getvalue(), by=" ")  # XML has no place for some


def draw_panel(figure: Figure, panel: Panel, x: float, y: float) -> None:
    """Draw a panel whose upper left corner lies at (x, y), in px from the lower left corner of the figure."""
    full_width, full_height = figure.get_size_inches() * 72
    width, height = size_of(panel)
    left, right, top, bottom = MARGINS[type(panel)]
    inner_width, inner_height = width - left - right, height - top - bottom
    place = (x + left) / full_width, (y - height + bottom) / full_height
    axes = figure.add_axes((*place, inner_width / full_width, inner_height / full_height))
    axes.patch.set_visible(False)
    if isinstance(panel, LinePanel):
        draw_lines(axes, panel)
    elif isinstance(panel, HistogramPanel):
        draw_histogram(axes, panel)
    else:
        draw_bars(axes, panel)
    axes.set_title(panel.title, pad=12 if isinstance(panel, LinePanel) else 8, x=(4 - left) / inner_width)


def mark_of(entry: KeyEntry) -> str:
    """Return the character that the key of a page shows before a label."""
    if entry.kind == "line":
        return "┅" if entry.style == REFERENCE else MARKS[entry.style]
    return {"markers": "◇", "part": "■", "hollow": "○"}[entry.kind]


def handle_of(entry: KeyEntry) -> Artist:
    """Return what the key of a file shows beside a label."""
    colour = PLACEHOLDERS[role_of(entry.style)]
    if entry.kind == "part":
        return Patch(color=colour, label=entry.label)
    is_line, is_reference = entry.kind == "line", entry.style == REFERENCE
    return Line2D(
        *([], []),
        color=colour,
        linewidth=2 if is_line else 0,
        linestyle=(0, (2, 2)) if is_reference else DASHES[entry.style],
        marker=""
        if is_line and is_reference
        else MARKERS[entry.style if is_line else BUCKET if entry.kind == "markers" else 0],
        markerfacecolor=colour if is_line else "none",
        label=entry.label,
    )


def draw_lines(axes: Axes, panel: LinePanel) -> None:
    """Draw the series, then what stands beside them: the ideal, and where memory ends."""
    for series in panel.series:
        draw_series(axes, series)
    everything = [point for series in panel.series for point in series.points]
    positions = sorted({point.x for point in everything} | ({panel.oom_from} if panel.oom_from else set()))
    covers = [*panel.y_covers, 0] if panel.from_zero else [*panel.y_covers]
    top = max([point.high or point.y for point in everything] + covers)
    bottom = min([point.low or point.y for point in everything] + covers)
    if panel.ideal:
        top = max(top, *(panel.ideal(x) for x in positions))
        style: dict[str, Any] = {"color": PLACEHOLDERS["--muted"], "linewidth": 1, "dashes": (3, 3), "zorder": 1}
        ends = [positions[0], positions[-1]] if len(positions) > 1 else [positions[0] / 1.5, positions[0] * 1.5]
        axes.plot(ends, [panel.ideal(x) for x in ends], **style)
        is_flat = panel.ideal(ends[0]) == panel.ideal(ends[1])
        where: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "ha": "left" if is_flat else "right"}
        axes.annotate("ideal", (ends[0 if is_flat else 1], panel.ideal(ends[1])), **where)
    margin = 0.08 * (top - bottom)
    axes.set_ylim(bottom - margin if bottom else 0, top + margin or 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.locator_params(axis="y", nbins=5)
    axes.set_xlabel(panel.x_label)
    set_x_axis(axes, panel, positions)
    if panel.oom_from is not None:
        shade(axes, panel.oom_from, everything)


def set_x_axis(axes: Axes, panel: LinePanel, positions: Sequence[float]) -> None:
    """Set the scale, limits and ticks of the x axis: the measured values where they fit."""
    if panel.x_names:
        axes.set_xlim(-0.5, len(panel.x_names) - 0.5)
        axes.set_xticks(range(len(panel.x_names)), panel.x_names)
        return
    first, last = positions[0], positions[-1]
    if panel.x_scale == "linear":
        margin = (last - first) * 0.04 or 0.5
        axes.set_xlim(first - margin, last + margin)
        if len(positions) <= MAX_TICKS and last <= 64 and positions == [int(value) for value in positions]:
            axes.set_xticks(positions)
        else:
            axes.set_xlim(0, last + margin)
            axes.locator_params(axis="x", nbins=5)
    elif panel.x_scale in ("bytes", "log10"):
        axes.set_xscale("log")
        axes.set_xlim(first / 1.4, last * 1.4)
        powers = range(math.ceil(math.log10(first)), math.floor(math.log10(last)) + 1)
        ticks = [10.0**power for power in powers]
        axes.set_xticks(ticks[:: math.ceil(len(ticks) / MAX_TICKS)] or [first])
    else:
        axes.set_xscale("log", base=2)
        axes.set_xlim(first / 1.5, last * (2.5 if panel.oom_from else 1.5))  # room for the words in the shaded part
        axes.set_xticks(positions[:: math.ceil(len(positions) / MAX_TICKS)])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: format_x(value, panel.x_scale))


def draw_series(axes: Axes, series: Series) -> None:
    """Draw one series with its intervals. Many points have no markers; buckets and loader-bound points are hollow."""
    x, y = [point.x for point in series.points], [point.y for point in series.points]
    colour, is_reference = PLACEHOLDERS[role_of(series.style)], series.style == REFERENCE
    marker = "" if is_reference or len(x) > MAX_MARKERS else MARKERS[series.style]
    axes.plot(
        *(x, y),
        color=colour,
        linewidth=1.8 if series.is_line else 0,
        linestyle=(0, (2, 2)) if is_reference else DASHES[series.style],
        marker=marker if series.is_line else MARKERS[BUCKET],
        markersize=5 if series.is_line else 7,
        markerfacecolor=colour if series.is_line else "none",
        markeredgewidth=0 if series.is_line else 1.4,
        markeredgecolor=colour,
        zorder=3,
    )
    if marker and (hollow := [(point.x, point.y) for point in series.points if point.is_loader_bound]):
        ring: dict[str, Any] = {"markersize": 6, "markeredgewidth": 1.4, "markeredgecolor": colour, "zorder": 4}
        ring |= {"marker": MARKERS[series.style], "markerfacecolor": PLACEHOLDERS["--bg"], "linewidth": 0}
        axes.plot(*zip(*hollow, strict=True), **ring)
    for point in series.points:
        if point.low is not None and point.high is not None:
            axes.plot([point.x, point.x], [point.low, point.high], color=colour, linewidth=1, zorder=2)


def shade(axes: Axes, start: float, measured: Sequence[Point]) -> None:
    """Shade where nothing fits in memory; the region begins between the last point and the first that fails."""
    last = max(point.x for point in measured)
    border = math.sqrt(start * last) if last > 0 else start
    right = axes.get_xlim()[1]
    axes.axvspan(border, right, color=PLACEHOLDERS["--shade"], linewidth=0, zorder=0)
    middle = math.sqrt(border * right)
    axes.annotate("out of\nmemory", (middle, 0.5), xycoords=("data", "axes fraction"), ha="center", va="center")


def draw_histogram(axes: Axes, panel: HistogramPanel) -> None:
    """Draw the counts on a logarithmic axis, dashed lines at three sigma and a solid one at the largest magnitude."""
    margin = (abs(panel.low) / 2 or 0.5) if panel.low == panel.high else 0  # one bin for a constant
    start, width = panel.low - margin, (panel.high - panel.low + 2 * margin) / len(panel.counts)
    edges = [start + index * width for index in range(len(panel.counts) + 1)]
    heights = [max(count, MIN_COUNT) for count in panel.counts]
    axes.stairs(heights, edges, baseline=MIN_COUNT, fill=True, color=PLACEHOLDERS["--s0"], linewidth=0)
    ends = [edges[0], edges[-1], *panel.three_sigma]
    margin = 0.03 * (max(ends) - min(ends))
    left, right = axes.set_xlim(min(ends) - margin, max(ends) + margin)
    largest = f"largest {format_figure(panel.largest)}"
    for x, text, height, role in (
        *((end, "", 1, "--s1") for end in panel.three_sigma[:-1]),
        (panel.three_sigma[-1], "3 sigma", 1, "--s1"),
        (panel.largest, largest, 0.8, "--fg"),
    ):
        style: dict[str, Any] = {"dashes": (3, 3)} if role == "--s1" else {}
        axes.axvline(x, color=PLACEHOLDERS[role], linewidth=1.2, **style)
        if text:
            is_left = x < (left + right) / 2
            where: dict[str, Any] = {"xytext": (3 if is_left else -3, 0), "textcoords": "offset points", "va": "top"}
            where |= {"ha": "left" if is_left else "right", "color": PLACEHOLDERS[role], "fontsize": FONT_SIZE - 1}
            ground = {"facecolor": PLACEHOLDERS["--bg"], "edgecolor": "none", "pad": 1}
            axes.annotate(text, (x, height), xycoords=("data", "axes fraction"), bbox=ground, **where)
    axes.set_yscale("log")
    axes.set_ylim(MIN_COUNT, MIN_COUNT * (max(heights) / MIN_COUNT) ** 1.35)  # room for the words
    powers = range(math.ceil(math.log10(max(heights))) + 1)
    axes.set_yticks([10.0**power for power in powers][:: math.ceil(len(powers) / 4)])
    axes.yaxis.set_major_formatter(lambda value, _: format_x(value, "linear"))
    axes.minorticks_off()
    axes.locator_params(axis="x", nbins=6)


def draw_bars(axes: Axes, panel: BarPanel) -> None:
    """Draw bars that are split by part, each with its name and its whole time above it."""
    rows = range(len(panel.bars))
    left = [0.0 for _ in rows]
    for part, shares in panel.parts.items():
        axes.barh(
            *(rows, shares),
            left=left,
            height=0.38,
            color=PLACEHOLDERS[role_of(panel.styles[part])],
            edgecolor=PLACEHOLDERS["--bg"],
            linewidth=0.8,
        )
        left = [before + share for before, share in zip(left, shares, strict=True)]
    for row, bar, total in zip(rows, panel.bars, panel.totals_ms, strict=True):
        above: dict[str, Any] = {
            "xytext": (0, 3),
            "textcoords": "offset points",
            "va": "bottom",
            "fontsize": FONT_SIZE - 1,
        }
        axes.annotate(bar, (0, row - 0.19), color=PLACEHOLDERS["--fg"], **above)
        axes.annotate(f"{format_figure(total)} ms", (1, row - 0.19), ha="right", **above)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(panel.bars) - 0.6, -0.8)
    axes.set_yticks([])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    first, *_, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
