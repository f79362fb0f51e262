"""Every plot of the report. A new one is a function from `PlotSource` to plots, added to `PLOTS`."""

from collections.abc import Callable, Iterable

from pipeline.pages.accuracy_plots import accuracy_plots, final_accuracy_plots
from pipeline.pages.cells import name_texts
from pipeline.pages.int8_plots import int8_plots
from pipeline.pages.plot_data import Plot, PlotSource
from pipeline.pages.scaling_plots import bandwidth_plots, batch_size_plots, speedup_plots
from pipeline.pages.step_plots import step_plots

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
    return [name_texts(plot, source.processors) for build in PLOTS for plot in build(source)]
