"""The plots of Q3 that split a step: by part of training, by exposed communication, by part of DataParallel."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pipeline.analysis.pooling import PooledPoint, group_pairs, median_window_s, pool_outcomes
from pipeline.experiment.point_label import describe_point, distinguishing_axes
from pipeline.experiment.spec import Strategy
from pipeline.pages.plot_data import MAX_BARS, BarPanel, Plot, PlotSource, evenly, note_on_number
from pipeline.tables.columns import axes_of

EXPOSED = "exposed communication"
BACKWARD_AND_MORE = "backward with communication"
RECORDED_PARTS = {
    "data": "data_time_ns",
    "copy": "copy_ns",
    "forward": "forward_ns",
    "backward": "backward_ns",
    "optimizer": "optimizer_ns",
}
STYLES = {"data": 7, "copy": 3, "forward": 0, "backward": 2, BACKWARD_AND_MORE: 4, EXPOSED: 1, "optimizer": 5}
"""The colour of each part, in the order of the parts in a bar."""

MAX_BARS_A_PANEL = 8  # with more there is a panel for each strategy and number of GPUs
MEASURED_STYLES = {"all else": 0, EXPOSED: 1}
SPLIT_STYLES = {"scatter": 7, "replicate": 1, "parallel forward": 0, "gather": 3, "backward": 2, "optimizer": 5}

Steps = Sequence[tuple[Mapping[str, Any], Mapping[str, float]]]
"""The axes of each point, and the seconds of each part of its step."""


def step_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q3: one step by part, of training points, of DDP's measured steps, and of DataParallel's."""
    for name, title, steps, styles in (
        ("q3", "Where the time of a training step goes", trained_steps(source), STYLES),
        ("q3-communication", "Communication in a step, data loading left out", measured_steps(source), MEASURED_STYLES),
        ("q3-dataparallel", "DataParallel's step, part by part", dataparallel_steps(source), SPLIT_STYLES),
    ):
        known = sorted((step for step in steps if sum(step[1].values()) > 0), key=lambda step: order_of(step[0]))
        if known:
            note = note_on_number(len(known), MAX_BARS, "points")
            axes = distinguishing_axes([row for row, _ in steps])
            shown = evenly(known, MAX_BARS)
            parts = group_pairs((order_of(step[0])[:2], step) for step in shown).values()
            panels = parts if len(shown) > MAX_BARS_A_PANEL else [shown]
            yield Plot(name, "Q3", title, tuple(make_bars(own, axes, styles) for own in panels), note)


def order_of(row: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return what sorts the bars: strategy, GPUs, batch size."""
    return get_args(Strategy).index(row["strategy"]), row["num_gpus"], row["batch_size_per_gpu"]


def make_bars(steps: Steps, axes: Sequence[str], styles: Mapping[str, int]) -> BarPanel:
    """Return a bar for each step by these axes of its point, with parts in the order of `styles`."""
    labels = tuple(describe_point(row, axes) or "every point" for row, _ in steps)
    totals = [sum(parts.values()) for _, parts in steps]
    shares = {
        part: tuple(parts.get(part, 0.0) / total for (_, parts), total in zip(steps, totals, strict=True))
        for part in styles
        if any(part in parts for _, parts in steps)
    }
    return BarPanel("Share of one step", labels, tuple(1e3 * total for total in totals), shares, styles)


def trained_steps(source: PlotSource) -> Steps:
    """Return the step of training points on one and on the most GPUs; nothing where all ran on one.

    Exposed communication is part of backward. It stands apart where it was measured.
    """
    plain = [p for p in pool_outcomes(source.outcomes) if p.spec.is_whole_epoch and not p.spec.remedies]
    most = max((point.spec.num_gpus for point in plain), default=1)
    exposed_s = {repr(row.axes): row["exposed_comm_time_s"] for row in source.tables["Q3"]}
    found = []
    for point in plain:
        if most > 1 and point.spec.num_gpus in (1, most) and (parts := parts_of_step(point)):
            axes = axes_of(point)
            epoch_s = exposed_s.get(repr(axes)) if point.spec.num_gpus > 1 else 0.0
            found.append((axes, separate_exposed(parts, epoch_s, point.spec.full_steps_per_epoch)))
    return found


def parts_of_step(point: PooledPoint) -> dict[str, float]:
    """Return the seconds of each part of one step, medians over runs; empty if a part was not measured."""
    totals = {part: point.median(median_window_s(field)) for part, field in RECORDED_PARTS.items()}
    known = {part: total / point.spec.full_steps_per_epoch for part, total in totals.items() if total is not None}
    return known if len(known) == len(totals) else {}


def separate_exposed(parts: Mapping[str, float], epoch_s: float | None, num_steps: int) -> dict[str, float]:
    """Return the parts with exposed communication taken out of backward; None: it was not measured."""
    step_s = None if epoch_s is None else max(epoch_s, 0.0) / num_steps
    if step_s is None or step_s > parts["backward"]:
        return {BACKWARD_AND_MORE if part == "backward" else part: value for part, value in parts.items()}
    return {**parts, "backward": parts["backward"] - step_s, EXPOSED: step_s} if step_s else dict(parts)


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
