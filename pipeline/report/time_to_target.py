"""Time to a target: what each batch size needs to reach it, beside the smallest without remedies. Its table."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.figures.epoch_figures import all_windows, throttled_notes
from pipeline.figures.intervals import NOMINAL
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import REPEATS_NOT_OK, PooledPoint, group_pairs
from pipeline.figures.time_to_target import (
    Merit,
    cost_to_target,
    default_target,
    evaluated_records,
    final_merit,
    is_diverged,
    loss_ranges,
    merit_of,
    spread,
    study_baseline,
    throughput_per_gpu,
    timed_records,
)
from pipeline.plan.model_names import is_image_model
from pipeline.plan.point_label import describe_axis, format_number
from pipeline.plan.spec import POOLED_AXES, TARGET_MAY_DIFFER, alike_key, peak_learning_rate
from pipeline.records.record import Record
from pipeline.report.table import (
    GLOBAL_BATCH,
    LEARNING_RATE,
    MERIT,
    REMEDIES,
    STATUS,
    Column,
    Row,
    Table,
    View,
    key_without,
    make_row,
)
from pipeline.system.errors import pluralize

NEVER_REACHED = "never reached"


def has_merit(row: Row) -> bool:
    """True if a row is about another figure of merit than the test accuracy."""
    return row["target_merit"] is not None or bool(row.point and not merit_of([row.point]).is_accuracy)


def why_no_time(row: Row) -> str:
    """Return why a row has no time to the target: never reached, or its GPUs are of another model."""
    if row["reached"] == NEVER_REACHED:
        return "never"
    return "other $GPU" if row["reached"] and row["num_timed"] == 0 else ""


TO_TARGET = "Time is that of training up to the target; never: no seed reached it; other $GPU: see its note."
RATE = "The rate is the highest learning rate of the run."
OVER_SEEDS = (
    f"Medians over n seeds. In brackets: of six seeds or more the interval of the median ({NOMINAL}), of two to five "
    "seeds the lowest and the highest."
)
TIME_TO_TARGET = Table(
    "time_to_target",
    "Q4",
    (
        STATUS,
        REMEDIES,
        GLOBAL_BATCH,
        Column("epochs", "epochs", "Number of epochs asked for.", is_set=True),
        Column(
            "final_test_accuracy",
            "accuracy [%]",
            "Test accuracy after the last epoch.",
            decimals=1,
            interval="shown",
        ),
        Column(
            "final_merit",
            MERIT.heading,
            "An own model's figure of merit after the last epoch.",
            interval="shown",
        ),
        Column(
            "time_to_target_s",
            "time [s]",
            "Training time up to the end of that epoch, without evaluation.",
            interval="kept",
            absent=why_no_time,
        ),
        LEARNING_RATE,
        Column(
            "epochs_to_target",
            "epochs to target",
            "First epoch whose test accuracy, or merit, is the target or better.",
            decimals=2,
            interval="kept",
        ),
        Column("reached", "reached", "Number of seeds that reached the target, or never reached."),
        Column(
            "soonest",
            "soonest in",
            "The row reaches the target first, counted in these.",
            words={"GPU-seconds": "$GPU-seconds", "seconds and GPU-seconds": "seconds and $GPU-seconds"},
        ),
        Column("gpu_time_to_target_s", "$GPU-time [s]", "time_to_target_s x GPUs."),
        Column("target_accuracy", "target [%]", "Test accuracy to reach.", decimals=2, is_set=True),
        Column("target_merit", "target", "Figure of merit to reach.", decimals=4, is_set=True),
        Column("updates_to_target", "updates", "Updates up to the end of that epoch.", interval="kept"),
        Column("target_efficiency", "efficiency [%]", "throughput_efficiency x statistical_efficiency."),
        Column("throughput_efficiency", "", "Samples per second and GPU over the baseline's."),
        Column("statistical_efficiency", "", "Baseline's epochs_to_target over the row's."),
        Column("num_timed", "", "Number of seeds that the time is of: those on the GPU model of the baseline."),
        Column("is_baseline", "", "The target and the efficiencies of a study come from this row."),
    ),
    View(
        "Q4: final accuracy and time to target",
        f"Accuracy is of the test $images after the last epoch. {TO_TARGET} {RATE} {OVER_SEEDS} The target, unless "
        "--target-accuracy sets it, is 2 points below the final accuracy of the baseline: the smallest batch without "
        "remedies. Under a cosine schedule accuracy rises most at the end of a run, so the time also depends on the "
        "epochs asked for.",
        lambda rows: [row for row in rows if not has_merit(row) and is_image_model(row.axes.get("model"))],
        hidden_axes=("batch_size_per_gpu", "epochs", "reference_batch_size"),
        hidden_notes=(REPEATS_NOT_OK,),
        shows_n=True,
    ),
    View(
        "Q4: final accuracy of your model and time to target",
        f"Accuracy is what evaluate() returns after the last epoch. {TO_TARGET} {OVER_SEEDS} The target, unless "
        "--target-accuracy sets it, is 2 points below what the smallest batch reaches.",
        lambda rows: [row for row in rows if not has_merit(row) and not is_image_model(row.axes.get("model"))],
        hidden_axes=("batch_size_per_gpu", "epochs"),
        hidden_notes=(REPEATS_NOT_OK,),
        shows_n=True,
    ),
    View(
        f"Q4: final {MERIT.heading} and time to target",
        f"{TO_TARGET} {OVER_SEEDS} The target, unless --target-merit sets it, is 2 % worse than what the smallest "
        "batch reaches.",
        lambda rows: [row for row in rows if has_merit(row)],
        keys=(
            *(GLOBAL_BATCH.key, "epochs", "final_merit", "time_to_target_s", "epochs_to_target", "reached", "soonest"),
            *("gpu_time_to_target_s", "target_merit", "updates_to_target", "target_efficiency"),
        ),
        hidden_axes=("batch_size_per_gpu", "epochs"),
        hidden_notes=(REPEATS_NOT_OK,),
        shows_n=True,
    ),
)

DIVERGED = NoteKind("diverged", "{count} of {repeats} diverged", badge="diverged")

SEEDS_MISSING = NoteKind("seeds_missing", "no result of seed {seeds:list}")
REACHED_BY_SOME = NoteKind(
    "reached_by_some", "{reached} seeds reached the target", badge="{reached} seeds reach it", word="not every seed"
)
EQUAL_GLOBAL_BATCH = NoteKind(
    "equal_global_batch",
    "over the seeds, the ranges of the training loss of this row and of 1 $GPU with the same global "
    "batch overlap in {count} of {epochs} epochs",
)
NO_TARGET = NoteKind("no_target", "no target: the baseline has no final test accuracy, or it diverged")

SOONEST_BY = {"time_to_target_s": "seconds", "gpu_time_to_target_s": "GPU-seconds"}


class Targets(NamedTuple):
    """The targets of studies by accuracy, and by another merit; None: it follows from the baseline of each."""

    accuracy: float | None = None
    merit: float | None = None


FROM_BASELINE = Targets()


def time_to_target_rows(points: Sequence[PooledPoint], targets: Targets = FROM_BASELINE) -> list[Row]:
    """Return a row for each evaluated point of every study: alike trainings with more than one global batch size."""
    evaluated = [point for point in points if point.spec.evaluate and point.spec.is_whole_epoch]
    studies = group_pairs((alike_key(point.spec, TARGET_MAY_DIFFER), point) for point in evaluated).values()
    compared = [study for study in studies if len({point.spec.global_batch_size for point in study}) > 1]
    return [row for study in compared for row in study_rows(study, targets)]


def main_study(rows: Sequence[Row]) -> tuple[list[Row], Row | None]:
    """Return the rows of the most complete study, of several the first, and its baseline if it has one."""
    study = max(
        group_pairs((key_without(row, TARGET_MAY_DIFFER), row) for row in rows).values(), key=completeness, default=[]
    )
    return study, next((row for row in study if row["is_baseline"]), None)


def completeness(study: Sequence[Row]) -> int:
    """Return from 0 to 3 how much of a comparison has a result.

    1 for the baseline, and then 1 each for a larger batch without remedies and for one with them.
    """
    known = [row for row in study if final_of(row) is not None]
    baseline = next((row for row in known if row["is_baseline"]), None)
    if baseline is None:
        return 0
    larger = [bool(row["remedies"]) for row in known if row["global_batch_size"] > baseline["global_batch_size"]]
    return 1 + len(set(larger))


def final_of(row: Row) -> Any:
    """Return the accuracy of a row, or another merit, after the last epoch, with its ends; None without a result."""
    return row["final_merit"] if row["final_test_accuracy"] is None else row["final_test_accuracy"]


def format_target(row: Row) -> str:
    """Return the target of a row with its quantity: a merit, or an accuracy in per cent with one decimal or two."""
    if row["target_accuracy"] is None:
        return f"$merit {format_number(row['target_merit'], '.4g')}"
    return f"accuracy {format_number(row['target_accuracy'], '.2%').removesuffix('%').removesuffix('0')} %"


def describe_run(row: Row, rows: Sequence[Row]) -> str:
    """Return the batch of a run of a study, with strategy, GPUs, remedies and epochs where the runs differ in them."""
    remedies = describe_axis("remedies", row["remedies"]) if any(other["remedies"] for other in rows) else ""
    gpus = describe_axis("num_gpus", row["num_gpus"]) if len({other["num_gpus"] for other in rows}) > 1 else ""
    strategies = {other["strategy"] for other in rows if other["num_gpus"] > 1}
    strategy = row["strategy"] if row["num_gpus"] > 1 and len(strategies) > 1 else ""
    epochs = pluralize(row["epochs"], "epoch") if len({other["epochs"] for other in rows}) > 1 else ""
    return ", ".join(filter(None, (f"{row['global_batch_size']:,} $images a step", strategy, gpus, remedies, epochs)))


def study_rows(study: Sequence[PooledPoint], targets: Targets) -> list[Row]:
    """Return the rows of one study by global batch, with the soonest marked."""
    baseline, merit = study_baseline(study), merit_of(study)
    gpu = (baseline or study[0]).gpu  # times on other models do not compare
    target = targets.accuracy if merit.is_accuracy else targets.merit
    if target is None:
        target = default_target(baseline, merit)
    alone = {equal_batch_key(point): point for point in reversed(study) if point.spec.num_gpus == 1}
    ordered = sorted(study, key=study_order)
    rows = [target_row(point, baseline, merit, target, gpu, alone.get(equal_batch_key(point))) for point in ordered]
    for key, word in SOONEST_BY.items():
        if known := [row for row in rows if row[key] is not None]:
            soonest = min(known, key=lambda row: float(row[key]))
            soonest.figures["soonest"] = " and ".join(filter(None, (soonest["soonest"], word)))
    return rows


def study_order(point: PooledPoint) -> tuple[float, ...]:
    spec = point.spec
    return spec.global_batch_size, spec.num_gpus, spec.epochs, len(spec.remedies), peak_learning_rate(spec)


def target_row(
    point: PooledPoint,
    baseline: PooledPoint | None,
    merit: Merit,
    target: float | None,
    gpu: str,
    one: PooledPoint | None,
) -> Row:
    """Return the row of a point: its final merit, and what it needs to reach the target.

    Times are those on the model `gpu`. `one` is the same training on one GPU, with an equal global batch.
    """
    records, timed = evaluated_records(point), timed_records(point, gpu)
    final = spread([final_merit(record) for record in records])
    keys = ("final_test_accuracy", "target_accuracy") if merit.is_accuracy else ("final_merit", "target_merit")
    figures: dict[str, Any] = dict(zip(keys, (final, target), strict=True))
    num_diverged = sum(map(is_diverged, records))
    notes = [make_note(DIVERGED, count=num_diverged, repeats=len(records))] if num_diverged else []
    notes += [*missing_notes(point), *equal_batch_notes(point, one), *throttled_notes(all_windows(timed))]
    if target is None:
        notes.append(make_note(NO_TARGET))
    else:
        reaching, reaching_notes = reaching_figures(records, merit, target, timed, point.spec.num_gpus)
        figures |= reaching
        notes += reaching_notes
        if baseline:
            figures |= efficiencies(point, baseline, merit, target, gpu, figures["epochs_to_target"])
    row = make_row(
        TIME_TO_TARGET,
        point,
        n=len(records),
        num_timed=len(timed),
        remedies=list(point.spec.remedies),
        epochs=point.spec.epochs,
        is_baseline=point is baseline,
        learning_rate=peak_learning_rate(point.spec) if is_image_model(point.spec.model) else None,
        notes=notes,
        **figures,
    )
    row.axes["gpu"] = gpu or None
    return row


def reaching_figures(
    records: Sequence[Record], merit: Merit, target: float, timed: Sequence[Record], num_gpus: int
) -> tuple[dict[str, Any], list[Note]]:
    """Return what a point needs to reach the target: epochs and updates of all its runs, seconds of the timed ones.

    A note says so if some seeds miss the target. Without a result nothing is said of who reached it.
    """
    progress = [cost_to_target(record, target, merit) for record in records]
    epochs, time_s = spread([part.epochs for part in progress]), None
    if epochs is not None:  # else the times of a few would tell of what most do not reach
        time_s = spread([cost_to_target(run, target, merit).time_s for run in timed])
    num_reached, reached = sum(math.isfinite(part.epochs) for part in progress), None
    if records:
        reached = f"{num_reached} of {len(records)}" if num_reached else NEVER_REACHED
    figures = {
        "epochs_to_target": epochs,
        "updates_to_target": spread([part.updates for part in progress]),
        "time_to_target_s": time_s,
        "gpu_time_to_target_s": None if time_s is None else time_s.times(num_gpus),
        "reached": reached,
    }
    return figures, [make_note(REACHED_BY_SOME, reached=reached)] if 0 < num_reached < len(records) else []


def efficiencies(
    point: PooledPoint, baseline: PooledPoint, merit: Merit, target: float, gpu: str, epochs_to_target: float | None
) -> dict[str, float | None]:
    """Return throughput efficiency, statistical efficiency and their product, against the baseline."""
    ours, theirs = (throughput_per_gpu(part, gpu) for part in (point, baseline))
    throughput = ours / theirs if ours and theirs else None
    needed = spread([cost_to_target(record, target, merit).epochs for record in evaluated_records(baseline)])
    statistical = None
    if epochs_to_target is not None and needed is not None:
        statistical = needed / epochs_to_target
    product = throughput * statistical if throughput is not None and statistical is not None else None
    return {"throughput_efficiency": throughput, "statistical_efficiency": statistical, "target_efficiency": product}


def missing_notes(point: PooledPoint) -> list[Note]:
    """Return a note that names the seeds without a result, if the point has several."""
    absent = group_pairs((outcome.status, str(outcome.spec.seed)) for outcome in point.outcomes)
    seeds = [f"{', '.join(absent[status])} ({status})" for status in absent if status != "ok"]
    return [make_note(SEEDS_MISSING, seeds=seeds)] if seeds and len(point.outcomes) > 1 else []


def equal_batch_key(point: PooledPoint) -> tuple[Any, ...]:
    """Return what a point and the same training on one GPU have in common: the global batch and all else."""
    may_differ = ("strategy", "num_nodes", "num_gpus", "batch_size_per_gpu", *POOLED_AXES)
    return point.spec.global_batch_size, alike_key(point.spec, may_differ)


def equal_batch_notes(point: PooledPoint, one: PooledPoint | None) -> list[Note]:
    """Return a note that compares the loss curve of several GPUs with that of one GPU and the same global batch.

    At each epoch the ranges over the seeds meet or do not. None with fewer than two seeds of either.
    """
    if point.spec.num_gpus == 1 or one is None:
        return []
    ours, theirs = loss_ranges(point), loss_ranges(one)
    pairs = list(zip(ours, theirs, strict=False))
    meeting = sum(low <= other_high and other_low <= high for (low, high), (other_low, other_high) in pairs)
    return [make_note(EQUAL_GLOBAL_BATCH, count=meeting, epochs=len(pairs))] if pairs else []
