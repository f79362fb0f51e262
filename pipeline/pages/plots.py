"""Plots as SVG: a picture of each panel for the page, in a light and a dark theme, and the whole plot as a file.

Imports matplotlib, so import it only where a plot is made. A picture is drawn once; `paint` puts in the colours.
"""

import base64
from collections.abc import Mapping
from typing import NamedTuple

from pipeline.pages.draw_panels import DARK, LIGHT, PLACEHOLDERS, WIDTH, draw, height_of
from pipeline.pages.plot_data import Panel, Plot

PANELS_IN_A_ROW = 3  # of a file; four stand in two rows of two


class Picture(NamedTuple):
    """A panel on the page: the addresses of its two themes, the text for those who do not see it, and its size."""

    light: str
    dark: str
    text: str
    width: int
    height: int


class RenderedPlot(NamedTuple):
    """A plot: its panels for the page, and the whole as a file."""

    plot: Plot
    panels: list[Picture]
    file: bytes


def render_plot(plot: Plot) -> RenderedPlot:
    """Return the plot as pictures for the page and as a file."""
    per_row = 2 if len(plot.panels) == 4 else PANELS_IN_A_ROW
    file = draw(plot.panels, plot.key(), per_row, title=plot.title)
    return RenderedPlot(plot, [render_panel(panel) for panel in plot.panels], paint(file, LIGHT).encode())


def render_panel(panel: Panel) -> Picture:
    """Return the picture of one panel."""
    drawn = draw([panel])
    light, dark = (data_address(paint(drawn, theme)) for theme in (LIGHT, DARK))
    return Picture(light, dark, f"{panel.title}. {panel.describe()}", WIDTH, height_of(panel))


def paint(drawn: str, theme: Mapping[str, str]) -> str:
    """Return an SVG with the colours of a theme in place of the placeholders."""
    for role, placeholder in PLACEHOLDERS.items():
        drawn = drawn.replace(placeholder, theme[role])
    return drawn


def data_address(svg: str) -> str:
    """Return an address that holds the picture itself, so that a page is one file."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
