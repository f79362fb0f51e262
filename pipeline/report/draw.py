"""Draws plots: a picture of each panel as SVG for the page, and the whole plot as files in SVG, PDF and PNG.

Only this module imports matplotlib, so import it only where a plot is made. Each role has a colour of its own, which
`inline` replaces by the role: on the page the style sheet colours a picture.
"""

import io
import logging
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache on stderr

import matplotlib  # noqa: E402 - after its logger is quiet
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FixedLocator, LogLocator, PercentFormatter  # noqa: E402

from pipeline.plan.point_label import format_figure  # noqa: E402
from pipeline.report.plots import (  # noqa: E402
    GREY,
    REFERENCE,
    BarPanel,
    HistogramPanel,
    KeyEntry,
    LinePanel,
    Panel,
    Plot,
    RenderedPlot,
    Series,
    format_x,
    role_of,
)
from pipeline.system.errors import replace_control_characters  # noqa: E402

WIDTH, HEIGHT = 380, 264  # of a panel of lines, in px; the page scales it to what a phone or a column has
HISTOGRAM_HEIGHT = 180
BAR_HEIGHT, BAR_MARGINS = 34, 64  # a bar with its label above it; title and axis
MIN_COUNT = 0.7  # where the axis of a histogram begins, so that a count of 1 is seen
KEY_HEIGHT = 18  # of a row of the key
FONT_SIZE = 11
MAX_TICKS = 6
MAX_WHOLE = 65  # a linear axis that ends below it has ticks at measured values
MAX_MARKERS = 40  # of a line; with more they touch
DPI = 200  # of a PNG
METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
"""Format -> what is left out of a file, so that equal plots are equal files."""

PANELS_IN_A_ROW = 3  # of a file; four stand in two rows of two

SERIES_COLOURS = ("#4883e9", "#994702", "#1b9f89", "#5e2464", "#a68217", "#741d11", "#4e4fb0", "#5f626f")
"""For a light ground; the page's style sheet has the colours of both grounds too, for keys and states.

Searched for the largest smallest distance between two of them, for normal sight, protanopia and deuteranopia.
"""

ROLES = ("--fg", "--muted", "--line", "--shade", "--bg", *(f"--s{index}" for index in range(len(SERIES_COLOURS))))
LIGHT = dict(zip(ROLES, ("#1a1f24", "#59636e", "#d5dade", "#f3e3df", "#ffffff", *SERIES_COLOURS), strict=True))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
HATCHES = ("", "\\\\\\\\", "||||", "////", "----", "xxxx", "++++", "x")  # as PART_MARKS
DASHED = (0, (3, 3))
BOLD_CHAR_PX = 7
LINES = 'stroke-linejoin="round" stroke-linecap="butt"'  # as matplotlib's style of all elements
PLACE = re.compile(r"-?\d+\.\d{2,}")
STYLE = re.compile(r"([\w-]+): ([^;]*);?")
HOLLOW: dict[str, Any] = {"markersize": 6, "markeredgewidth": 1.4, "markerfacecolor": LIGHT["--bg"]}

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "plots",
    "font.size": FONT_SIZE,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a layout does not depend on the machine
    "text.parse_math": False,
    "text.color": LIGHT["--muted"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT["--muted"],
    "axes.titlelocation": "left",
    "axes.titlesize": FONT_SIZE + 1,
    "axes.titleweight": "bold",
    "axes.titlecolor": LIGHT["--fg"],
    "axes.titlepad": 10,
    "axes.labelcolor": LIGHT["--muted"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.ymargin": 0.08,
    "grid.color": LIGHT["--line"],
    "xtick.color": LIGHT["--muted"],
    "ytick.color": LIGHT["--muted"],
    "xtick.labelsize": FONT_SIZE - 1,
    "ytick.labelsize": FONT_SIZE - 1,
    "ytick.major.size": 0,
    "hatch.linewidth": 0.7,
    "figure.dpi": 72,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.1,  # inches of 72 px
    "figure.constrained_layout.w_pad": 0.1,
    "figure.facecolor": LIGHT["--bg"],
    "legend.frameon": False,
    "legend.handlelength": 3,
    "legend.labelcolor": LIGHT["--fg"],
}


def render_files(plot: Plot, formats: Sequence[str]) -> dict[str, bytes]:
    """Return the whole plot as a file in each of these formats."""
    per_row = 2 if len(plot.panels) == 4 else PANELS_IN_A_ROW
    return draw(plot.panels, plot.key(), per_row, plot.title, formats)


def render_plot(plot: Plot) -> RenderedPlot:
    """Return the plot as pictures for the page."""
    return RenderedPlot(plot, [inline(panel) for panel in plot.panels])


def inline(panel: Panel) -> str:
    """Return a panel as an SVG element of the page, whose style sheet colours it.

    The content policy of the page allows no style of an element, so each becomes an attribute. Coordinates have a
    tenth of a point: more cannot be seen.
    """
    drawn = draw([panel])["svg"].decode()
    body = drawn[drawn.index("<defs>") : drawn.rindex("</svg>")]
    body = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'style="([^"]*)"', lambda found: STYLE.sub(r'\1="\2"', found[1]), body)
    tags = re.compile(r"<[^>]*>")  # not what people read: 0.25 stays
    body = tags.sub(lambda tag: PLACE.sub(lambda at: f"{float(at[0]):.1f}".removesuffix(".0"), tag[0]), body)
    body = re.sub(r' id="[a-z]+[\d._a-z]*_\d+"', "", body)  # nothing refers to them
    body = re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", body))
    (view,) = re.findall(r'viewBox="[^"]*"', drawn)
    for role, colour in LIGHT.items():
        body = body.replace(colour, f"var({role})")
    return f'<svg {view} aria-hidden="true" {LINES}>{body}</svg>'


def height_of(panel: Panel) -> int:
    """Return the height of a panel in px."""
    if isinstance(panel, BarPanel):
        return BAR_MARGINS + BAR_HEIGHT * len(panel.bars)
    return HEIGHT if isinstance(panel, LinePanel) else HISTOGRAM_HEIGHT


def draw(
    panels: Sequence[Panel],
    key: Sequence[KeyEntry] = (),
    per_row: int = 1,
    title: str = "",
    formats: Sequence[str] = ("svg",),
) -> dict[str, bytes]:
    """Return the panels, in rows, in each format. A title brings a ground, a key and a description."""
    columns = min(per_row, len(panels))
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [max(height_of(panel) for panel in row) for row in rows]
    key_columns = max(1, int(columns * WIDTH // (44 + 6.5 * max((len(entry.label) for entry in key), default=0))))
    key_height = KEY_HEIGHT * math.ceil(len(key) / key_columns)
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's fonts draw the text
        figure = Figure(figsize=(columns * WIDTH / 72, (sum(heights) + key_height) / 72))
        grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(grid[divmod(index, columns)])
            axes.set_title(panel.title)
            if isinstance(panel, LinePanel):
                draw_lines(axes, panel)
            elif isinstance(panel, HistogramPanel):
                draw_histogram(axes, panel)
            else:
                draw_bars(axes, panel, num_rows=(heights[index // columns] - BAR_MARGINS) / BAR_HEIGHT)
        if key:
            pairs = (pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True))
            handles = {label: handle for handle, label in pairs}
            chosen = {entry.label: GREY if entry.mark == GREY else entry.label for entry in key}
            known = {label: handles[name] for label, name in chosen.items() if name in handles}
            figure.legend(known.values(), known.keys(), loc="outside lower left", ncols=key_columns)
        said = {"Title": title, "Description": " ".join(panel.describe() for panel in panels)} if title else {}
        return {name: save(figure, name, said) for name in formats}


def save(figure: Figure, name: str, said: Mapping[str, str]) -> bytes:
    """Return a figure in a format."""
    picture = io.BytesIO()
    known = said if name != "pdf" else {key: text for key, text in said.items() if key == "Title"}
    figure.savefig(picture, format=name, metadata={**METADATA[name], **known}, transparent=not said, dpi=DPI)
    # XML has no place for some characters
    return (
        replace_control_characters(picture.getvalue().decode(), by=" ").encode()
        if name == "svg"
        else picture.getvalue()
    )


def draw_lines(axes: Axes, panel: LinePanel) -> None:
    """Draw the series, where memory ends, and the ideal."""
    if panel.x_scale != "linear" and not panel.x_names:
        axes.set_xscale("log", base=2 if panel.x_scale == "log2" else 10)
    for series in panel.series:
        draw_series(axes, series)
    axes.set_xlabel(panel.axis_label)
    set_x_ticks(axes, panel)
    if panel.oom_from is not None:
        shade_from(axes, panel.oom_from, last=axes.dataLim.xmax)
    if panel.y_scale == "log2":
        axes.set_yscale("log", base=2)
    if panel.ideal:
        ends = axes.dataLim.intervalx
        ideal = [panel.ideal(x) for x in ends]
        axes.plot(ends, ideal, color=LIGHT["--muted"], linewidth=1, linestyle=DASHED, zorder=1, scalex=False)
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate("ideal", (ends[1], ideal[1]), (4, 0), **beside)  # right of the axes, where nothing is drawn
    if panel.y_scale == "linear":
        axes.update_datalim([(axes.dataLim.xmin, y) for y in panel.y_covers])
        axes.locator_params(axis="y", nbins=5)
    axes.autoscale_view(scalex=False)
    if axes.dataLim.ymin == 0:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.10g}")


def set_x_ticks(axes: Axes, panel: LinePanel) -> None:
    """Set the ticks of the x axis: names, the measured values if they fit, else round values."""
    if panel.x_names:
        axes.set_xlim(-0.5, len(panel.x_names) - 0.5)
        axes.set_xticks(range(len(panel.x_names)), panel.x_names)
        return
    places = sorted({point.x for series in panel.series for point in series.points} | {panel.oom_from or 1} - {1})
    if panel.x_scale in ("log10", "bytes"):
        axes.xaxis.set_major_locator(LogLocator(numticks=MAX_TICKS))
    elif panel.x_scale == "log2" or (len(places) <= MAX_TICKS and set(places) <= {*range(MAX_WHOLE)}):
        axes.xaxis.set_major_locator(FixedLocator(places, MAX_TICKS))
    else:
        axes.locator_params(axis="x", nbins=MAX_TICKS)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: format_x(value, panel.x_scale))


def draw_series(axes: Axes, series: Series) -> None:
    """Draw one series with its intervals. Many points have no markers; buckets are hollow, unusable points grey too."""
    colour = LIGHT[f"--{role_of(series.style)}"]
    looks: dict[str, Any] = {"linestyle": "-" if series.style < len(MARKERS) / 2 else (0, (5, 2))}
    if series.style == REFERENCE:
        looks = {"linestyle": (0, (2, 2)), "marker": "" if len(series.points) > 1 else "_", "markersize": 12}
    elif not series.is_line:
        looks = {"linestyle": "none", "marker": "D", "markersize": 7, "markerfacecolor": "none"}
    elif len(series.points) <= MAX_MARKERS:
        looks |= {"marker": MARKERS[series.style], "markersize": 5}
    x, y, *_ = zip(*series.points, strict=True)
    axes.plot(x, y, color=colour, linewidth=1.8, label=series.label, zorder=3, **looks)
    for point in series.points:
        if point.flaw:
            grey: dict[str, Any] = {"color": LIGHT["--muted"], **HOLLOW}
            axes.plot(point.x, point.y, MARKERS[series.style], zorder=4, **grey)
            axes.plot([], [], MARKERS[0], label=GREY, **grey)
        if point.low is not None and point.high is not None:
            axes.vlines(point.x, point.low, point.high, color=colour, linewidth=1, zorder=2)


def shade_from(axes: Axes, start: float, last: float) -> None:
    """Shade where nothing fits in memory; the region begins between the last point and the first that fails."""
    border, right = math.sqrt(start * last), 2.5 * start  # room for the words
    axes.axvspan(border, right, color=LIGHT["--shade"], linewidth=0, zorder=0)
    middle = math.sqrt(border * right)
    axes.annotate("out of\nmemory", (middle, 0.5), xycoords=("data", "axes fraction"), ha="center", va="center")
    axes.set_xlim(right=right)


def draw_histogram(axes: Axes, panel: HistogramPanel) -> None:
    """Draw the counts on a logarithmic axis, dashed lines at three sigma and a solid one at the largest magnitude."""
    margin = (abs(panel.low) / 2 or 0.5) if panel.low == panel.high else 0  # one bin for a constant
    edges = np.linspace(panel.low - margin, panel.high + margin, len(panel.counts) + 1)
    heights = np.maximum(panel.counts, MIN_COUNT)
    axes.set_yscale("log")
    axes.stairs(heights, edges, baseline=MIN_COUNT, fill=True, color=LIGHT["--s0"], linewidth=0)
    lines: list[tuple[float, str, str, Any]] = [
        *((end, "3 sigma", "--s1", DASHED) for end in panel.three_sigma),
        (panel.largest, f"largest {format_figure(panel.largest)}", "--fg", "-"),
    ]
    for x, _, role, dashes in lines:
        axes.axvline(x, color=LIGHT[role], linewidth=1.2, linestyle=dashes)
    middle = sum(axes.get_xlim()) / 2
    for (x, text, role, _), height in zip(lines[-2:], (1, 0.8), strict=True):
        axes.annotate(
            *(text, (x, height), (3 if x < middle else -3, 0), ("data", "axes fraction"), "offset points"),
            ha="left" if x < middle else "right",
            va="top",
            color=LIGHT[role],
            fontsize=FONT_SIZE - 1,
            bbox={"facecolor": LIGHT["--bg"], "edgecolor": "none", "pad": 1},
        )
    axes.set_ylim(MIN_COUNT, MIN_COUNT * (max(heights) / MIN_COUNT) ** 1.35)  # room for the words
    axes.yaxis.set_major_locator(LogLocator(numticks=4))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.locator_params(axis="x", nbins=MAX_TICKS)


def draw_bars(axes: Axes, panel: BarPanel, num_rows: float) -> None:
    """Draw bars that are split by part, each with its name and its whole time above it, and room for `num_rows`.

    A part that has room for its name has it inside. Hatches tell parts apart in a print without colours.
    """
    left = np.zeros(len(panel.bars))
    inside: dict[str, Any] = {"fontsize": FONT_SIZE - 1, "fontweight": "bold"}
    for part, shares in panel.parts.items():
        colour = LIGHT[f"--{role_of(panel.styles[part])}"]
        looks: dict[str, Any] = {"height": 0.42, "edgecolor": LIGHT["--bg"], "linewidth": 0.8}
        looks["hatch"] = HATCHES[panel.styles[part]]
        names = [name for name in (part, panel.short.get(part)) if name]
        starts = np.where(np.asarray(shares) < 0, 0, left)
        axes.barh(range(len(panel.bars)), shares, left=starts, color=colour, label=part, **looks)
        for row, share in enumerate(shares):
            texts = (f"{name} {100 * share:.0f} %" for name in names)
            if text := next((text for text in texts if BOLD_CHAR_PX * len(text) < share * (WIDTH - 40)), ""):
                middle = (starts[row] + share / 2, row)
                ground = {"facecolor": colour, "edgecolor": "none", "pad": 0.5}
                axes.annotate(text, middle, ha="center", va="center", color=LIGHT["--bg"], bbox=ground, **inside)
        left += np.maximum(shares, 0)
    above: dict[str, Any] = {"xytext": (0, 3), "va": "bottom", "textcoords": "offset points", "fontsize": FONT_SIZE - 1}
    for row, (bar, total) in enumerate(zip(panel.bars, panel.totals_ms, strict=True)):
        axes.annotate(bar, (0, row - 0.19), color=LIGHT["--fg"], **above)
        axes.annotate(f"{format_figure(total)} ms", (1, row - 0.19), ha="right", **above)
    lowest = min((share for shares in panel.parts.values() for share in shares), default=0)
    axes.set(
        xlim=(min(lowest, 0), max(1, *left)), ylim=(num_rows - 0.6, -0.8), yticks=[], xticks=[0, 0.25, 0.5, 0.75, 1]
    )
    axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
