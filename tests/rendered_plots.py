"""The plots of made-up records."""

from page_records import (
    plot_source,
)

from pipeline.pages.html_page import build_plots
from pipeline.pages.plot_data import (
    LinePanel,
    Plot,
)


def plots_of(*found: object) -> dict[str, Plot]:
    return {plot.name: plot for plot in build_plots(plot_source(*found))}  # type: ignore[arg-type]


def line_panel(plot: Plot, index: int = 0) -> LinePanel:
    panel = plot.panels[index]
    assert isinstance(panel, LinePanel)
    return panel
