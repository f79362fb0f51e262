"""The plots of Q1 to Q3.

Values of table rows against batch size, GPUs and message size; a step split by part of training, by exposed
communication, or by part of DataParallel.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.experiment.measurement import Operation
from pipeline.experiment.point_label import describe_point, models_of, varying_axes
from pipeline.figures import formulas
from pipeline.figures.exposed_communication import PointsByTraining, group_by_training
from pipeline.figures.pooling import PooledPoint, group_pairs, median_window_s, pool_outcomes
from pipeline.plan.strategies import STRATEGIES
from pipeline.report import plot_data
from pipeline.report.columns import BUS_BANDWIDTH
from pipeline.report.next_step import epoch_evidence
from pipeline.report.plot_data import BarPanel, LinePanel, Plot, PlotSource, Series, as_title
from pipeline.report.table import Row, axes_of

BATCH = "batch_size_per_gpu"
EXPOSED = "exposed communication"
RECORDED_PARTS = ("data_time_ns", "copy_ns", "forward_ns", "backward_ns", "optimizer_ns")
AT_PEAK, DATA, LAUNCHES, SLOWEST = (
    "computing at the peak",
    "waiting for data",
    "launches",
    "waiting for the slowest rank",
)
REST = ("the rest of computing", "computing, launches", "computing, launches, communication")
STYLES = {
    **{AT_PEAK: 0, REST[0]: 2, REST[1]: 2, REST[2]: 3, LAUNCHES: 3, EXPOSED: 1, SLOWEST: 6, DATA: 7, "optimizer": 5},
    "unexplained": 4,
}
"""The colour of each part, in the order of the parts in a bar. No bar has two parts of one colour."""

SHORT = {REST[0]: "computing", REST[1]: "computing", EXPOSED: "communication", SLOWEST: "slowest rank", DATA: "data"}
MIN_PART = 1e-4  # of the step: a smaller part is not drawn
MAX_BARS_A_PANEL = 8  # with more there is a panel for each strategy and number of GPUs
MEASURED_STYLES = {"all else": 0, EXPOSED: 1}
SPLIT_STYLES = {"scatter": 7, "replicate": 1, "parallel forward": 0, "gather": 3, "backward": 2, "optimizer": 5}

Steps = Sequence[tuple[Mapping[str, Any], Mapping[str, float]]]
"""The axes of each point, and the seconds of each part of its step."""


def bandwidth_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q3.2: bus bandwidth against message size, of isolated collectives and of DDP's buckets.

    Of several collectives of one kind and size the fastest is shown, of several buckets each.
    """
    kinds = {"isolated": source.tables["sweep"], "DDP's buckets": source.tables["bandwidth"]}
    known = {kind: [row for row in rows if row["busbw_gb_s"] is not None] for kind, rows in kinds.items()}
    rows = [row for found in known.values() for row in found]
    axes = ["num_gpus", *varying_axes([{"gpu": row["gpu"]} for row in rows])]
    lines = []
    for style, link in enumerate(sorted(set(map(link_of, rows)))):
        for kind, found in known.items():
            own = [row for row in found if link_of(row) == link]
            points = sorted({plot_data.make_point(row["num_bytes"], row, BUS_BANDWIDTH) for row in own})
            if is_isolated := kind == "isolated":
                points = list({point.x: point for point in points}.values())
            if points:
                named = describe_point(own[0].axes, ["operation"]) if is_isolated else ""
                label = f"{kind} {named}".strip() + f", {describe_point(own[0].axes, axes)}"
                lines.append(Series(label, tuple(points), style % plot_data.MAX_SERIES, is_line=is_isolated))
    if lines:
        panel = LinePanel(as_title(BUS_BANDWIDTH.heading), "size of one message", tuple(lines), "bytes")
        yield Plot("q3-bandwidth", "Q3", "Bus bandwidth against message size", (panel,))


def link_of(row: Row) -> tuple[int, str, Operation]:
    """Return what the row's bandwidth depends on: GPUs, their model, and the operation, all-reduce for a bucket."""
    return row["num_gpus"], row["gpu"] or "", row.axes.get("operation", "all_reduce")


def step_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q3: one step by part, of training points, of DDP's measured steps, and of DataParallel's."""
    for name, title, steps, styles in (
        ("q3", "Where the time of a training step goes", trained_steps(source), STYLES),
        ("q3-communication", "Communication in a step, data loading left out", measured_steps(source), MEASURED_STYLES),
        ("q3-dataparallel", "DataParallel's step, part by part", dataparallel_steps(source), SPLIT_STYLES),
    ):
        known = sorted((step for step in steps if sum(step[1].values()) > 0), key=lambda step: order_of(step[0]))
        if known:
            note = plot_data.note_on_number(len(known), plot_data.MAX_BARS, "points")
            axes = plot_data.label_axes([row for row, _ in steps])
            shown = plot_data.evenly(known, plot_data.MAX_BARS)
            parts = group_pairs((order_of(step[0])[:2], step) for step in shown).values()
            panels = parts if len(shown) > MAX_BARS_A_PANEL else [shown]
            yield Plot(name, "Q3", title, tuple(make_bars(own, axes, styles) for own in panels), note)


def order_of(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return [*STRATEGIES].index(row["strategy"]), row["num_gpus"], row["batch_size_per_gpu"]


def make_bars(steps: Steps, axes: Sequence[str], styles: Mapping[str, int]) -> BarPanel:
    """Return a bar for each step by these axes of its point, with parts in the order of `styles`."""
    models = models_of(row for row, _ in steps)
    labels = tuple(describe_point(row, axes, models) or "every point" for row, _ in steps)
    totals = [sum(parts.values()) for _, parts in steps]
    shares = {
        part: tuple(parts.get(part, 0.0) / total for (_, parts), total in zip(steps, totals, strict=True))
        for part in styles
        if any(part in parts for _, parts in steps)
    }
    return BarPanel("Share of one step", labels, tuple(1e3 * total for total in totals), shares, styles, SHORT)


def trained_steps(source: PlotSource) -> Steps:
    """Return the step of training points on one and on the most GPUs; nothing where all ran on one."""
    points = pool_outcomes(source.outcomes)
    plain = [point for point in points if point.spec.is_whole_epoch and not point.spec.remedies]
    measured = group_by_training([point for point in points if point.spec.measure == "communication"])
    rows = {repr(row.axes): row for row in source.tables["Q2"]}
    most = max((point.spec.num_gpus for point in plain), default=1)
    shown = [(point, axes_of(point)) for point in plain if most > 1 and point.spec.num_gpus in (1, most)]
    return [(axes, parts_of_step(point, measured, rows.get(repr(axes)))) for point, axes in shown]


def parts_of_step(point: PooledPoint, measured: PointsByTraining, row: Row | None) -> dict[str, float]:
    """Return the seconds of each part of one step (docs/advice.md); empty if a part was not recorded.

    The parts come from several methods and are not fitted to the step: what they leave or count twice is "unexplained",
    which may be below 0.
    """
    totals = [point.median(median_window_s(field)) for field in RECORDED_PARTS]
    if point.epoch_time is None or row is None or None in totals:
        return {}
    data, *computing, optimizer = (total or 0.0 for total in totals)
    shares = epoch_evidence(point, measured).shares
    peak_flops = (row["peak_tflops"] or 0.0) * formulas.TERA * point.spec.num_gpus
    inside = {
        AT_PEAK: row["flops_per_sample"] * point.spec.num_samples / peak_flops if peak_flops else 0.0,
        LAUNCHES: max(shares.get("launches", 0.0), 0.0) * point.epoch_time,
        EXPOSED: shares.get("communication", 0.0) * point.epoch_time,
        SLOWEST: row["batch_wait_s"] or 0.0,
    }
    is_apart = "communication" in shares or point.spec.num_gpus == 1
    rest = REST[0 if "launches" in shares else 1] if is_apart else REST[2]
    parts = {**inside, rest: max(sum(computing) - sum(inside.values()), 0.0), DATA: data, "optimizer": optimizer}
    parts["unexplained"] = point.epoch_time - sum(parts.values())
    known = {part: time_s for part, time_s in parts.items() if abs(time_s) > MIN_PART * point.epoch_time}
    return {part: time_s / point.spec.full_steps_per_epoch for part, time_s in known.items()}


def measured_steps(source: PlotSource) -> Steps:
    """Return DDP's steps on synthetic images: exposed communication, and the rest."""
    steps = []
    for row in source.tables["communication"]:
        if row["step_time_s"] and row["exposed_comm_time_s"] is not None:
            exposed_s = min(max(row["exposed_comm_time_s"], 0.0), row["step_time_s"])
            steps.append((row.axes, {"all else": row["step_time_s"] - exposed_s, EXPOSED: exposed_s}))
    return steps


def dataparallel_steps(source: PlotSource) -> Steps:
    """Return DataParallel's steps. Devices are synchronized after each part, so their sum differs from the step."""
    keys = {part: f"{part.replace(' ', '_')}_time_s" for part in SPLIT_STYLES}
    known = [row for row in source.tables["split"] if all(row[key] is not None for key in keys.values())]
    return [(row.axes, {part: row[key] for part, key in keys.items()}) for row in known]
