"""The parts of a step: of training, of a measured step and of DataParallel's. A table and plots."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.figures.epoch_figures import timed_figures
from pipeline.figures.exposed_communication import (
    EXPOSURE_IS_NOISE,
    PointsByTraining,
    communications_of,
    group_by_training,
    median_step_time,
    whole_step,
)
from pipeline.figures.pooling import PooledPoint, group_pairs, median_window_s
from pipeline.plan.point_label import describe_point, models_of
from pipeline.plan.strategies import STRATEGIES
from pipeline.report.next_step import WRAPPER, epoch_evidence
from pipeline.report.plots import MAX_BARS, BarPanel, Plot, evenly, label_axes, note_on_number
from pipeline.report.q3 import time_notes
from pipeline.report.table import (
    INTERVAL,
    INTERVAL_OVER,
    PLACE,
    PLAIN_STEP_TIME,
    RUN_SPREAD,
    STEP_TIME,
    Column,
    Row,
    Rows,
    Table,
    Tables,
    View,
    make_row,
)


def split_part(part: str, meaning: str) -> Column:
    return Column(f"{part}_time_s", f"{part.replace('_', ' ')} [ms]", meaning)


SPLIT = Table(
    "split",
    "Q3",
    (
        *PLACE,
        STEP_TIME._replace(interval="kept"),
        split_part("scatter", "Time to distribute the inputs to the GPUs."),
        split_part("replicate", "Time to copy the module to every GPU."),
        split_part("parallel_forward", "Time of the forward pass on all GPUs."),
        split_part("gather", "Time to collect the outputs."),
        split_part("backward", "Backward pass and reduction onto the first GPU."),
        split_part("optimizer", "Time to update the weights."),
        Column("parts_time_s", "sum of parts [ms]", "Sum of the parts."),
        PLAIN_STEP_TIME,
        INTERVAL._replace(heading=""),
        INTERVAL_OVER,
        RUN_SPREAD._replace(heading=""),
    ),
    View(
        "Q3: DataParallel's step, part by part",
        "Every device is synchronized after each part, so their sum differs from the step.",
        is_folded=True,
    ),
)


def split_row(point: PooledPoint) -> Row:
    """Return the row of DataParallel's step and of its parts, which are timed with a synchronization after each.

    The whole step is timed without these synchronizations.
    """
    found = communications_of(point.ok_records)
    parts = [part for communication in found for part in communication.split]
    times_ns = group_pairs((part.part, time_ns) for part in parts for time_ns in part.times_ns)
    medians_s = {name: statistics.median(part_ns) / 1e9 for name, part_ns in times_ns.items()}
    whole = whole_step(found)
    step = median_step_time(found, whole)
    return make_row(
        SPLIT,
        point,
        plain_step_time_s=median_step_time(found, "plain"),
        **timed_figures("step_time_s", step),
        **{f"{name}_time_s": time_s for name, time_s in medians_s.items()},
        parts_time_s=sum(medians_s.values()) if medians_s else None,
        notes=time_notes(found, whole, step) if step is not None else [],
    )


BATCH = "batch_size_per_gpu"
EXPOSED_PART = "exposed communication"
RECORDED_PARTS = ("data_time_ns", "copy_ns", "forward_ns", "backward_ns", "optimizer_ns")
COMPUTE, NOT_SPLIT = "compute", "compute (cannot be split)"  # the second with launches, or communication too
DATA, LAUNCHES, SLOWEST = "waiting for data", "kernel launches", "waiting for the slowest rank"
STYLES = {
    **{COMPUTE: 0, NOT_SPLIT: 2, LAUNCHES: 3, EXPOSED_PART: 1, SLOWEST: 6, DATA: 7, "optimizer": 5},
    "unexplained": 4,
}
"""The colour of each part, in the order of the parts in a bar."""

SHORT = {
    NOT_SPLIT: "compute",
    LAUNCHES: "launches",
    EXPOSED_PART: "communication",
    SLOWEST: "slowest rank",
    DATA: "data",
}
MIN_PART = 1e-4  # of the step: a smaller part is not drawn
MAX_BARS_A_PANEL = 8  # with more there is a panel for each strategy and number of GPUs
OVERHEAD = "strategy overhead"
MEASURED_STYLES = {"all else": 0, OVERHEAD: 5, EXPOSED_PART: 1}
SPLIT_STYLES = {"scatter": 7, "replicate": 1, "parallel forward": 0, "gather": 3, "backward": 2, "optimizer": 5}

Steps = Sequence[tuple[Mapping[str, Any], Mapping[str, float]]]
"""The axes of each point, and the seconds of each part of its step; a step without parts has no bar."""


def step_plots(tables: Tables) -> Iterator[Plot]:
    """Yield Q3: one step by part, of training points, of DDP's measured steps, and of DataParallel's."""
    for name, title, steps, styles in (
        ("q3", "Where the time of a training step goes", trained_steps(tables), STYLES),
        (
            "q3-communication",
            "Communication in a step, data loading left out",
            measured_steps(tables["communication"]),
            MEASURED_STYLES,
        ),
        ("q3-dataparallel", "DataParallel's step, part by part", dataparallel_steps(tables["split"]), SPLIT_STYLES),
    ):
        known = sorted((step for step in steps if sum(step[1].values()) > 0), key=lambda step: order_of(step[0]))
        if known:
            note = note_on_number(len(known), MAX_BARS, "configurations")
            axes = label_axes([row for row, _ in steps])
            shown = evenly(known, MAX_BARS)
            if any(part < 0 for _, step in shown for part in step.values()):
                note = f"{note} A part below 0 says that the others are too long by as much.".strip()
            parts = group_pairs((order_of(step[0])[:2], step) for step in shown).values()
            panels = parts if len(shown) > MAX_BARS_A_PANEL else [shown]
            yield Plot(name, "Q3", title, tuple(make_bars(own, axes, styles) for own in panels), note)


def order_of(row: Row | Mapping[str, Any]) -> tuple[int, int, int]:
    return [*STRATEGIES].index(row["strategy"]), row["num_gpus"], row["batch_size_per_gpu"]


def make_bars(steps: Steps, axes: Sequence[str], styles: Mapping[str, int]) -> BarPanel:
    """Return a bar for each step by these axes of its point, with parts in the order of `styles`."""
    models = models_of(row for row, _ in steps)
    labels = tuple(describe_point(row, axes, models) or "every configuration" for row, _ in steps)
    totals = [sum(parts.values()) for _, parts in steps]
    shares = {
        part: tuple(parts.get(part, 0.0) / total for (_, parts), total in zip(steps, totals, strict=True))
        for part in styles
        if any(part in parts for _, parts in steps)
    }
    return BarPanel("Share of one step", labels, tuple(1e3 * total for total in totals), shares, styles, SHORT)


def trained_steps(tables: Tables) -> Steps:
    """Return the step of training points on one and on the most GPUs; nothing where all ran on one."""
    points = [(row, row.point) for row in tables["Q2"] if row.point and row["scaling"] == "weak"]
    whole = [(row, point) for row, point in points if point.spec.is_whole_epoch]
    measured = group_by_training([row.point for row in tables["transfers"] if row.point])
    most = max((row["num_gpus"] for row, _ in whole), default=1)
    shown = [(row, point) for row, point in whole if most > 1 and row["num_gpus"] in (1, most)]
    return [(row.axes, parts_of_step(row, point, measured)) for row, point in shown]


def parts_of_step(row: Row, point: PooledPoint, measured: PointsByTraining) -> dict[str, float]:
    """Return the seconds of each part of one step (docs/advice.md); empty if a part was not recorded.

    The parts come from several methods and are not fitted to the step: what they leave or count twice is "unexplained",
    which may be below 0.
    """
    totals = [point.median(median_window_s(field)) for field in RECORDED_PARTS]
    if point.epoch_time is None or None in totals:
        return {}
    data, *computing, optimizer = (total or 0.0 for total in totals)
    shares = epoch_evidence(point, measured).shares
    inside = {
        LAUNCHES: max(shares.get("launches", 0.0), 0.0) * point.epoch_time,
        EXPOSED_PART: shares.get("communication", 0.0) * point.epoch_time,
        SLOWEST: row["batch_wait_s"] or 0.0,
    }
    is_apart = "communication" in shares or point.spec.num_gpus == 1
    rest = COMPUTE if is_apart and "launches" in shares else NOT_SPLIT
    parts = {**inside, rest: max(sum(computing) - sum(inside.values()), 0.0), DATA: data, "optimizer": optimizer}
    parts["unexplained"] = point.epoch_time - sum(parts.values())
    known = {part: time_s for part, time_s in parts.items() if abs(time_s) > MIN_PART * point.epoch_time}
    return {part: time_s / point.steps_per_epoch for part, time_s in known.items()}


def measured_steps(rows: Rows) -> Steps:
    """Return the measured steps on synthetic images: exposed communication, and the rest; none within the noise.

    Strategy overhead is a part of all where the rules call it a limit of one; of none beside SyncBatchNorm.
    """
    told = [row for row in rows if is_told(row)]
    has_overhead = any(overhead_s(row) >= WRAPPER.threshold * row["step_time_s"] for row in told)
    steps: list[tuple[Mapping[str, Any], dict[str, float]]] = [(row.axes, {}) for row in rows if not is_told(row)]
    for row in told:
        exposed_s = min(max(row["exposed_comm_time_s"], 0.0), row["step_time_s"])
        parts = {"all else": row["step_time_s"] - exposed_s, EXPOSED_PART: exposed_s}
        if has_overhead:
            parts[OVERHEAD] = min(overhead_s(row), parts["all else"])
            parts["all else"] -= parts[OVERHEAD]
        steps.append((row.axes, parts))
    return steps


def is_told(row: Row) -> bool:
    """True if the exposed communication of a row is known, and not within the noise."""
    return row["exposed_comm_time_s"] is not None and not row.has_note(EXPOSURE_IS_NOISE)


def overhead_s(row: Row) -> float:
    """Return the strategy overhead of a step; 0 beside SyncBatchNorm, which it would hold, too."""
    return 0.0 if row.axes.get("sync_batchnorm") else max(float(row["wrapper_time_s"] or 0.0), 0.0)


def dataparallel_steps(rows: Rows) -> Steps:
    """Return DataParallel's steps. Devices are synchronized after each part, so their sum differs from the step."""
    keys = {part: f"{part.replace(' ', '_')}_time_s" for part in SPLIT_STYLES}
    known = [row for row in rows if all(row[key] is not None for key in keys.values())]
    return [(row.axes, {part: row[key] for part, key in keys.items()}) for row in known]
