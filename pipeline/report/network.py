"""Q3, a slower network: the step while each collective takes longer. Its table and plot."""

from collections.abc import Iterator

from pipeline.figures.delays import delayed_steps
from pipeline.figures.exposed_communication import (
    communications_of,
    job_notes,
    median_step_time,
    num_rounds,
    whole_step,
)
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.plan.point_label import describe_point, varying_axes
from pipeline.report.plots import LinePanel, Plot, PlotSource, as_title, make_series
from pipeline.report.table import NUM_WINDOWS, PLACE, STEP_TIME, Column, Row, Table, View, make_row

ADDED = Column("delay_time_s", "delays [ms]", "Sum of the delays of all collectives in a step, on rank 0.")
DELAYED = STEP_TIME._replace(interval="shown")

NETWORK = Table(
    "network",
    "Q3",
    (
        *PLACE,
        Column("added_latency_s", "each longer by [us]", "What each collective takes longer, whatever its size."),
        Column("added_bandwidth_gb_s", "at [GB/s]", "Each collective also takes its bytes over this longer."),
        ADDED,
        DELAYED,
        Column(
            "added_step_time_s",
            "step longer by [ms]",
            "The step with delays minus the mean of two without, by rounds.",
            interval="shown",
        ),
        Column(
            "hidden_delay_share",
            "hidden [%]",
            "1 - added_step_time_s/delay_time_s, cut to 0 to 1.",
            interval="kept",
            remark="Hidden is the share of the delays beside which the step computes.",
        ),
        NUM_WINDOWS,
    ),
    View(
        "Q3: a slower network, tried by delays",
        "Each collective takes longer, by an equal time or by its bytes over a bandwidth. A delay that computation "
        "hides costs nothing. Between two rows the step lies between theirs; beyond the last one it was not measured.",
    ),
)


def network_rows(point: PooledPoint) -> Iterator[Row]:
    """Yield the row of the step as it is, then one of each delay."""
    found = communications_of(point.ok_records)
    rounds, notes = num_rounds(found), job_notes(found)
    usual = median_step_time(found, whole_step(found))
    none_s = 0.0 if usual else None
    yield make_row(NETWORK, point, notes, delay_time_s=none_s, step_time_s=usual, num_windows=rounds)
    for step in delayed_steps(found):
        yield make_row(
            NETWORK,
            point,
            added_latency_s=step.latency_s or None,
            added_bandwidth_gb_s=1 / step.s_per_byte / 1e9 if step.s_per_byte else None,
            delay_time_s=step.added_s,
            step_time_s=step.step_s,
            added_step_time_s=step.longer_s,
            hidden_delay_share=step.hidden_share,
            num_windows=rounds,
        )


def network_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield the step against the delays that grow with the bytes of a collective."""
    rows = [row for row in source.tables["network"] if row["step_time_s"] is not None and not row["added_latency_s"]]
    axes = varying_axes([row.axes for row in rows])
    groups = group_pairs((describe_point(row.axes, axes), row) for row in rows)
    if groups:
        series = make_series(groups, "delay_time_s", DELAYED)
        panel = LinePanel(as_title(DELAYED.heading), "delays of a step [s]", series, "linear")
        yield Plot("q3-network", "Q3", "The step on a slower network", (panel,))
