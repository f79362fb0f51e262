"""The plots of made-up records."""

from typing import Any

from page_records import plots_of_records

from pipeline.records.record import Record
from pipeline.report.plots import BarPanel, LinePanel, Plot, Series


def plots_of(*found: Record) -> dict[str, Plot]:
    return {plot.name: plot for plot in plots_of_records(*found)}


def line_panel(plot: Plot, index: int = 0) -> LinePanel:
    panel = plot.panels[index]
    assert isinstance(panel, LinePanel)
    return panel


def ys(line: Series) -> list[Any]:
    return [point.y for point in line.points]


def xs(line: Series) -> list[float]:
    return [point.x for point in line.points]


def labels(panel: LinePanel) -> list[str]:
    return [line.label for line in panel.series]


def bar_panel(plot: Plot) -> BarPanel:
    panel = plot.panels[0]
    assert isinstance(panel, BarPanel)
    return panel
