"""The plots of Q1, Q2 and the link: values of table rows against batch size, GPUs and message size."""

from collections.abc import Iterator, Sequence

from pipeline.experiment.point_label import describe_point, varying_axes
from pipeline.report.plot_data import (
    MAX_SERIES,
    LinePanel,
    Plot,
    PlotSource,
    Point,
    Series,
    group_series,
    make_series,
    note_on_number,
)
from pipeline.report.row_types import BandwidthRow, Q2Row, Row, SweepRow, interval_keys


def batch_size_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q1: time, throughput and memory against batch size on one GPU."""
    rows = source.tables.Q1
    groups = group_series([row for row in rows if row.status == "ok"], "batch_size_per_gpu")
    fitting = [row["batch_size_per_gpu"] for members in groups.values() for row in members]
    failing = [row["batch_size_per_gpu"] for row in rows if row["status"] == "oom"]
    oom_from = min((size for size in failing if size > max(fitting, default=0)), default=None)
    if len({*fitting, oom_from} - {None}) < 2:  # one point is no curve
        return
    shown = {
        "Epoch time [s]": ("epoch_time_s", *interval_keys("epoch_time_s")),
        "Throughput [images/s]": ("throughput_samples_per_s",),
        "Peak memory [GiB]": ("peak_memory_gib",),
    }
    panels = []
    for title, keys in shown.items():
        lines = make_series(groups, "batch_size_per_gpu", *keys)
        panels += [LinePanel(title, "images a step", lines, oom_from=oom_from)] if lines else []
    if panels:
        title = "One GPU: time, throughput and memory against batch size"
        yield Plot("q1", "Q1", title, tuple(panels), note_on_number(len(groups), MAX_SERIES, "series"))


def speedup_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q2: speed-up with weak and with strong scaling."""
    rows = [row for row in source.tables.Q2 if row.speedup is not None and row["num_gpus"] > 1]
    for name, scaling, batch, fixed in (
        ("q2", "weak", "batch_size_per_gpu", "images per GPU"),
        ("q2-strong", "strong", "global_batch_size", "images a step"),
    ):
        scaled = [row for row in rows if row.scaling == scaling]
        if scaled:
            panels, num_series = speedup_panels(scaled, batch, fixed)
            note = note_on_number(num_series, MAX_SERIES, "series")
            yield Plot(name, "Q2", f"Speed-up over one GPU, {scaling} scaling: {fixed} stay fixed", panels, note)


def speedup_panels(rows: Sequence[Q2Row], batch: str, fixed: str) -> tuple[tuple[LinePanel, ...], int]:
    """Return speed-up against GPUs, a panel for each strategy; with one number of GPUs against the batch size.

    Return the number of series too, also of those that a panel has no room for.
    """
    counts = {row["num_gpus"] for row in rows}
    interval = ("speedup", *interval_keys("speedup"))
    if len(counts) == 1:
        groups = group_series(rows, batch, without=("batch_size_per_gpu",), first=("strategy",))
        strategies = {row["strategy"] for row in rows}
        title = f"Speed-up {f'of {min(strategies)} ' if len(strategies) == 1 else ''}on {max(counts)} GPUs"
        panel = LinePanel(title, fixed, make_series(groups, batch, *interval), ideal=lambda _: max(counts))
        return (panel,), len(groups)
    sizes = sorted(rows, key=lambda row: row[batch])
    groups = group_series(sizes, "num_gpus", without=("batch_size_per_gpu",), first=(batch,), panel="strategy")
    panels = []
    for strategy in sorted({row["strategy"] for row in rows}):
        chosen = {label: [row for row in group if row["strategy"] == strategy] for label, group in groups.items()}
        lines = [
            line._replace(points=(Point(1, 1), *line.points)) for line in make_series(chosen, "num_gpus", *interval)
        ]
        panels.append(LinePanel(f"Speed-up of {strategy}", "GPUs", tuple(lines), "linear", ideal=float))
    return tuple(panels), len(groups)


def bandwidth_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q3.2: bus bandwidth against message size, of isolated all-reduces and of DDP's buckets."""
    tables = source.tables
    rows: list[Row] = [row for row in (*tables.sweep, *tables.bandwidth) if row["busbw_gb_s"] is not None]
    axes = varying_axes([{"num_gpus": row["num_gpus"], "gpu": row["gpu"]} for row in rows])
    lines = []
    for style, place in enumerate(sorted({(row["num_gpus"], row["gpu"] or "") for row in rows})):
        own = [row for row in rows if (row["num_gpus"], row["gpu"] or "") == place]
        named = describe_point(own[0].axes, ["num_gpus", *(axis for axis in axes if axis == "gpu")])
        for label, row_class, is_line in (
            (f"isolated all-reduce, {named}", SweepRow, True),
            (f"DDP's buckets, {named}", BandwidthRow, False),
        ):
            points = bandwidth_points([row for row in own if isinstance(row, row_class)], is_line)
            lines += [Series(label, points, style % MAX_SERIES, is_line)] if points else []
    if lines:
        panel = LinePanel("Bus bandwidth [GB/s]", "size of one all-reduce", tuple(lines), "bytes")
        yield Plot("q3-bandwidth", "Q3", "Bus bandwidth against message size", (panel,))


def bandwidth_points(rows: Sequence[Row], once_a_size: bool) -> tuple[Point, ...]:
    """Return bandwidth by size; of several values of one size the highest if there is one point a size."""
    points = sorted({Point(row["num_bytes"], row["busbw_gb_s"]) for row in rows})
    return tuple({point.x: point for point in points}.values()) if once_a_size else tuple(points)
