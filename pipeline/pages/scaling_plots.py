"""The plots of Q1, Q2 and the link: values of table rows against batch size, GPUs and message size."""

from collections.abc import Iterator, Sequence

from pipeline.experiment.point_label import EFFORT_AXES, describe_point, varying_axes
from pipeline.pages import plot_data
from pipeline.pages.plot_data import LinePanel, Plot, PlotSource, Point, Series, as_title, make_series
from pipeline.tables.columns import AXIS_HEADINGS, Row
from pipeline.tables.definitions import BUS_BANDWIDTH, EPOCH_TIME, GLOBAL_BATCH, MEMORY, SPEEDUP, THROUGHPUT

BATCH = "batch_size_per_gpu"
ISOLATED = "isolated all-reduce"


def batch_size_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q1: time, throughput and memory against batch size on one GPU."""
    rows = source.tables["Q1"]
    fitting = [row for row in rows if row.status == "ok"]
    largest = max((row[BATCH] for row in fitting), default=0)
    oom_from = min((row[BATCH] for row in rows if row.status == "oom" and row[BATCH] > largest), default=None)
    if len({*(row[BATCH] for row in fitting), oom_from} - {None}) < 2:  # one point is no curve
        return
    groups, note = plot_data.group_series(fitting, BATCH)
    shown = [(column.heading, make_series(groups, BATCH, column)) for column in (EPOCH_TIME, THROUGHPUT, MEMORY)]
    panels = tuple(
        LinePanel(as_title(heading), GLOBAL_BATCH.heading, lines, oom_from=oom_from)
        for heading, lines in shown
        if lines
    )
    if panels:
        yield Plot("q1", "Q1", "One GPU: time, throughput and memory against batch size", panels, note)


def speedup_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q2: speed-up with weak and with strong scaling."""
    for name, scaling, batch, fixed in (
        ("q2", "weak", BATCH, AXIS_HEADINGS[BATCH]),
        ("q2-strong", "strong", "global_batch_size", GLOBAL_BATCH.heading),
    ):
        rows = [row for row in source.tables["Q2"] if row["speedup"] is not None and row["num_gpus"] > 1]
        if rows := sorted((row for row in rows if row["scaling"] == scaling), key=lambda row: int(row[batch])):
            panels, note = speedup_panels(rows, batch, fixed)
            yield Plot(name, "Q2", f"Speed-up over one GPU, {scaling} scaling: {fixed} stay fixed", panels, note)


def speedup_panels(rows: Sequence[Row], batch: str, fixed: str) -> tuple[tuple[LinePanel, ...], str]:
    """Return speed-up against GPUs, a panel for each strategy; with one number of GPUs against the batch size.

    Return the note on the number of series too.
    """
    counts, strategies = ({row[axis] for row in rows} for axis in ("num_gpus", "strategy"))
    optional = (BATCH, *EFFORT_AXES)
    if len(counts) == 1:
        groups, note = plot_data.group_series(rows, batch, ("strategy",), optional)
        of_strategy = f"of {min(strategies)} " if len(strategies) == 1 else ""
        title = f"{as_title(SPEEDUP.heading)} {of_strategy}on {max(counts)} GPUs"
        return (LinePanel(title, fixed, make_series(groups, batch, SPEEDUP), ideal=lambda _: max(counts)),), note
    groups, note = plot_data.group_series(rows, "num_gpus", (batch,), optional, panel="strategy")
    panels = []
    for strategy in sorted(strategies):
        chosen = {label: [row for row in group if row["strategy"] == strategy] for label, group in groups.items()}
        lines = make_series(chosen, "num_gpus", SPEEDUP)
        from_one = tuple(line._replace(points=(Point(1, 1), *line.points)) for line in lines)
        title = f"{as_title(SPEEDUP.heading)} of {strategy}"
        panels.append(LinePanel(title, AXIS_HEADINGS["num_gpus"], from_one, "linear", ideal=float))
    return tuple(panels), note


def bandwidth_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q3.2: bus bandwidth against message size, of isolated all-reduces and of DDP's buckets.

    Of several all-reduces of one size the fastest is shown, of several buckets each.
    """
    kinds = {ISOLATED: source.tables["sweep"], "DDP's buckets": source.tables["bandwidth"]}
    known = {kind: [row for row in rows if row["busbw_gb_s"] is not None] for kind, rows in kinds.items()}
    rows = [row for found in known.values() for row in found]
    axes = ["num_gpus", *varying_axes([{"gpu": row["gpu"]} for row in rows])]
    lines = []
    for style, place in enumerate(sorted({(row["num_gpus"], row["gpu"] or "") for row in rows})):
        for kind, found in known.items():
            own = [row for row in found if (row["num_gpus"], row["gpu"] or "") == place]
            points = sorted({plot_data.make_point(row["num_bytes"], row, BUS_BANDWIDTH) for row in own})
            if is_isolated := kind == ISOLATED:
                points = list({point.x: point for point in points}.values())
            if points:
                label = f"{kind}, {describe_point(own[0].axes, axes)}"
                lines.append(Series(label, tuple(points), style % plot_data.MAX_SERIES, is_line=is_isolated))
    if lines:
        panel = LinePanel(as_title(BUS_BANDWIDTH.heading), "size of one all-reduce", tuple(lines), "bytes")
        yield Plot("q3-bandwidth", "Q3", "Bus bandwidth against message size", (panel,))
