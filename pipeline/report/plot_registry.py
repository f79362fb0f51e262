"""Every plot of the report. A new one is a function from `PlotSource` to plots, added to `PLOTS`."""

from collections.abc import Callable, Iterable

from pipeline.experiment.point_label import Processors, name_processors
from pipeline.report.accuracy_plots import accuracy_plots, final_accuracy_plots
from pipeline.report.int8_plots import int8_plots
from pipeline.report.plot_data import LinePanel, Panel, Plot, PlotSource
from pipeline.report.scaling_plots import bandwidth_plots, batch_size_plots, speedup_plots
from pipeline.report.step_plots import step_plots

PLOTS: tuple[Callable[[PlotSource], Iterable[Plot]], ...] = (
    batch_size_plots,
    speedup_plots,
    step_plots,
    bandwidth_plots,
    final_accuracy_plots,
    accuracy_plots,
    int8_plots,
)


def build_plots(source: PlotSource) -> list[Plot]:
    """Return every plot for which there are values, in the order of the questions."""
    return [name_plot(plot, source.processors) for build in PLOTS for plot in build(source)]


def name_plot(plot: Plot, processors: Processors) -> Plot:
    """Return the plot with the word for what its points ran on in every text."""
    if processors == "GPUs":
        return plot
    title, note = name_processors(plot.title, processors), name_processors(plot.note, processors)
    return plot._replace(title=title, note=note, panels=tuple(name_panel(panel, processors) for panel in plot.panels))


def name_panel(panel: Panel, processors: Processors) -> Panel:
    """Return the panel with the word for what its points ran on in every text."""
    title = name_processors(panel.title, processors)
    if not isinstance(panel, LinePanel):
        return panel._replace(title=title)
    lines = tuple(line._replace(label=name_processors(line.label, processors)) for line in panel.series)
    return panel._replace(title=title, x_label=name_processors(panel.x_label, processors), series=lines)
