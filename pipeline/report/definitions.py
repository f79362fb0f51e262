"""Every table: its columns, and how people see it. JSON and CSV have all columns in this order, reports what fits."""

from collections.abc import Callable

from pipeline.figures.intervals import NOMINAL, OF_FEWEST_VALUES, min_values
from pipeline.figures.pooling import REPEATS_NOT_OK, group_pairs
from pipeline.plan.model_name import is_image_model
from pipeline.report.columns import (
    EFFICIENCY,
    GLOBAL_BATCH,
    LEARNING_RATE,
    MERIT,
    PLACE,
    REMEDIES,
    SPEEDUP,
    STATUS,
    TEST_ACCURACY,
)
from pipeline.report.table import FIGURES_NOT_STATED, Column, Row, Rows, Table, View, sort_rows

NEVER_REACHED = "never reached"
STAGE_WORDS = {"activations": "+ activations", "biases": "+ biases (all)"}
ENDING_WORDS = {
    "ok_timed": "ok: timed",
    "ok_other": "ok: start-up and other",
    "oom": "out of memory",
    "superseded": "replaced by a later attempt",
}


def first_and_last_epochs(rows: Rows) -> Rows:
    """Return the rows of each point's first and last epoch, in order; none if the points were timed alone.

    Without a test, a remedy or a loss that diverged, a loss of the first epochs answers nothing.
    """
    if not any(map(is_about_learning, rows)):
        return []
    by_point = group_pairs((repr((row.axes, row["remedies"])), row) for row in sort_rows(rows))
    return [row for own in by_point.values() for row in own[:1] + own[1:][-1:]]


def is_about_learning(row: Row) -> bool:
    """True if the row has a test, remedies or a loss that diverged, or if it was stated elsewhere, without a rate."""
    tested = any(row[key] is not None for key in ("test_accuracy", "merit", "test_loss"))
    return tested or bool(row["remedies"]) or row["diverged_at_update"] is not None or row.has_note(FIGURES_NOT_STATED)


def epochs_of(*, with_merit: bool) -> Callable[[Rows], Rows]:
    """Return the choice of epochs of the models that have another merit than the test accuracy, or that have none."""

    def choose(rows: Rows) -> Rows:
        models = {row.axes.get("model") for row in rows if row["merit"] is not None}
        return first_and_last_epochs([row for row in rows if (row.axes.get("model") in models) == with_merit])

    return choose


def is_input_known(row: Row) -> bool:
    """True for what was measured here; an ingested table does not state its images."""
    return row.axes.get("input", "") is not None


def has_merit(row: Row) -> bool:
    """True if a row is about another figure of merit than the test accuracy."""
    return row["final_merit"] is not None or row["target_merit"] is not None


def why_no_time(row: Row) -> str:
    """Return why a row has no time to the target: never reached, or its GPUs are of another model."""
    if row["reached"] == NEVER_REACHED:
        return "never"
    return "other GPU" if row["reached"] and row["num_timed"] == 0 else ""


EPOCH = Column("epoch", "epoch", "The epoch, counted from 1.", is_set=True)
STAGE = Column(
    "stage",
    "stage",
    "Stage: fp32, then int8 weights, then int8 activations too, then int32 biases too.",
    is_set=True,
    words=STAGE_WORDS,
)
SCALE_RULE = Column(
    "scale_rule",
    "scale",
    "Magnitude that becomes 127: the largest, |mean| + 3 sigma, or the 99.9th percentile.",
    is_set=True,
)
GRANULARITY = Column(
    "granularity", "one scale per", "Scales of the weights: one per tensor, or one per output channel.", is_set=True
)

Q4 = Table(
    "Q4",
    "Q4",
    (
        *PLACE,
        REMEDIES,
        EPOCH,
        Column("loss", "loss", "Mean loss of the training samples, measured during training.", decimals=4),
        TEST_ACCURACY,
        Column(
            "accuracy",
            "training accuracy [%]",
            "Accuracy on the training samples, measured during training.",
            decimals=2,
        ),
        MERIT,
        Column("num_updates", "updates", "Updates of the weights since the start."),
        Column("test_loss", "test loss", "Loss over the test set.", decimals=4),
        LEARNING_RATE._replace(heading=""),
        Column("training_time_s", "", "Sum of epoch_time_s since the start, without evaluation."),
        Column("diverged_at_update", "", "First update whose loss was not finite."),
    ),
    View(
        "Q4: loss and accuracy by epoch",
        "The table shows the first and the last epoch of each point. Loss and training accuracy are of augmented "
        "images, during the epoch.",
        lambda rows: [row for row in epochs_of(with_merit=False)(rows) if is_input_known(row)],
        hidden_axes=("gpu",),
    ),
    View(
        "Q4: stated loss and accuracy by epoch",
        "The table shows the first and the last epoch of each point. The source does not state of which images loss "
        "and accuracy are.",
        lambda rows: [row for row in epochs_of(with_merit=False)(rows) if not is_input_known(row)],
        hidden_axes=("gpu",),
    ),
    View(
        f"Q4: loss and {MERIT.heading} by epoch",
        "The table shows the first and the last epoch of each point. Loss is of training samples, during the epoch.",
        epochs_of(with_merit=True),
        hidden_axes=("gpu",),
    ),
)

TO_TARGET = "Time is that of training up to the target; never: no seed reached it; other GPU: see its note."
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
        Column("soonest", "soonest in", "The row reaches the target first, counted in these."),
        Column("gpu_time_to_target_s", "GPU-time [s]", "time_to_target_s x GPUs."),
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
        f"Accuracy is of the test images after the last epoch. {TO_TARGET} {RATE} {OVER_SEEDS} The target, unless "
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

INT8 = Table(
    "int8",
    "int8",
    (
        *PLACE,
        STAGE,
        SCALE_RULE,
        GRANULARITY,
        TEST_ACCURACY._replace(interval="shown"),
        Column(
            "accuracy_change",
            "change [points]",
            "Accuracy minus fp32 of the same seed, median over seeds.",
            interval="shown",
        ),
        Column("agreement", "same class as fp32 [%]", "Share of test images that get the same class as in fp32."),
        Column("tie_share", "ties [%]", "Share of test images whose highest score several classes have."),
        Column("network_bytes", "size [MB]", "Bytes of weights, biases and scales."),
        Column("mean_accuracy_change", "", "Mean over seeds of accuracy minus fp32."),
    ),
    View(
        "int8: test accuracy after quantization",
        f"Medians over n seeds with their interval ({NOMINAL}, for {min_values()} seeds "
        f"{100 * OF_FEWEST_VALUES:.1f} %). Each stage includes those before it: weights in int8, activations in "
        "int8 with scales from training images, biases in int32.",
        keys=("stage", "scale_rule", "granularity", "test_accuracy", "accuracy_change"),
        shows_n=True,
    ),
    View(
        "int8: agreement with fp32, and size",
        "Ties are test images whose highest score several classes share. The size counts weights, biases and scales.",
        keys=("stage", "scale_rule", "granularity", "agreement", "tie_share", "network_bytes"),
        shows_n=True,
    ),
)

INT8_HISTOGRAMS = Table(
    "int8_histograms",
    "",
    (
        *PLACE,
        Column("seed", "", "Seed of the run."),
        Column("layer", "", "Layer of the network."),
        Column("tensor", "", "Values that the histogram counts: weights, or fp32 outputs before or after ReLU."),
        Column("low", "", "Smallest value, where the first bin begins."),
        Column("high", "", "Largest value, where the last bin ends."),
        Column("mean", "", "Mean of the values."),
        Column("sigma", "", "Standard deviation of the values."),
        Column("three_sigma_low", "", "Mean minus three sigma."),
        Column("three_sigma_high", "", "Mean plus three sigma."),
        Column("counts", "", "Number of values in each bin of equal width."),
    ),
)

COST = Table(
    "cost",
    "",
    (
        Column(
            "ending",
            "ending",
            "How the attempts ended; ok attempts are split into timed windows (ok_timed) and the rest.",
            words=ENDING_WORDS,
        ),
        Column("gpu_hours", "GPU-hours [h]", "Hours from launch to record, times the GPUs allocated."),
        Column("process_hours", "process-hours [h]", "Hours from launch to record, times the processes."),
        Column("allocated_share", "of all [%]", "Share of all hours allocated on the device."),
    ),
    View(
        "Cost: what the attempts took, by how they ended",
        "Hours from each launch to its record, times the GPUs allocated; n counts attempts. The attempts that "
        "ended ok have two rows: their timed windows on the GPUs used (every epoch of a point that evaluates), and "
        "all else: start-up, warm-up, evaluation, unused GPUs.",
        lambda rows: [row for row in rows if row.n or row.notes],
        shows_n=True,
    ),
)
PROPOSAL = Table(
    "proposal",
    "",
    (
        *PLACE,
        EFFICIENCY._replace(interval="shown"),
        SPEEDUP,
        Column("gpu_hours", "GPU-hours [h]", "GPUs x wall_hours.", interval="shown"),
        Column("energy_kwh", "energy [kWh]", "Energy of all GPUs, without the host."),
        Column("wall_hours", "time [h]", "Time of the samples, at the time of an epoch for those of one."),
        Column(
            "no_change_gpu_hours", "no change [h]", "GPU-hours if a step takes as long as on the most measured GPUs."
        ),
        Column("none_hidden_gpu_hours", "none hidden [h]", "The same, with the longer all-reduces of the ring model."),
    ),
    View("Weak scaling: every GPU keeps its batch"),
    View("Strong scaling: the images a step stay the same", hidden_axes=("batch_size_per_gpu",)),
    View(
        "Beyond what was measured: GPU-hours of two models, without an interval",
        keys=("gpu_hours", "no_change_gpu_hours", "none_hidden_gpu_hours"),
    ),
)
"""The tables of `proposal`, which are on its own page alone."""
