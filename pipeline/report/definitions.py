"""Every table: its columns, and how people see it. JSON and CSV have all columns in this order, reports what fits."""

from collections.abc import Callable

from pipeline.figures.exposed_communication import MEASURED_EXPOSURE_IS_NOISE, OF_MEASURED_EXPOSURE
from pipeline.figures.intervals import NOMINAL, OF_FEWEST_VALUES, min_values
from pipeline.figures.late_rank import LATE_RANK
from pipeline.figures.pooling import REPEATS_NOT_OK, group_pairs
from pipeline.plan.model_name import is_image_model
from pipeline.report.columns import (
    BASELINE,
    BUS_BANDWIDTH,
    COMM_TIME,
    EFFICIENCY,
    EPOCH_TIME,
    EXPOSED,
    GLOBAL_BATCH,
    INTERVAL,
    INTERVAL_OVER,
    LEARNING_RATE,
    MERIT,
    NUM_BYTES,
    NUM_WINDOWS,
    PLACE,
    PLAIN_STEP_TIME,
    PREDICTION_ERROR,
    REMEDIES,
    RUN_SPREAD,
    SPEEDUP,
    STATUS,
    STEP_TIME,
    TEST_ACCURACY,
)
from pipeline.report.next_step import ADVICE, NEXT_STEP, NEXT_STEP_KEYS, has_next_step
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


def exposure_noise(row: Row) -> str:
    """Return the noise that hides a measured time below 0, which is no time; "" without such noise."""
    noises_s = (note.values["noise_s"] for note in row.notes if note.kind == MEASURED_EXPOSURE_IS_NOISE)
    return next((f"<{noise_s:.3g}" for noise_s in noises_s), "")


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


def transfer(kind: str, what: str, heading: str) -> tuple[Column, Column]:
    """Return the bytes and the calls per step of one kind of transfer."""
    return (
        Column(f"{kind}_bytes_per_step", heading, f"Bytes per step of {what}."),
        Column(f"{kind}_calls_per_step", "", f"Calls per step that send {what}."),
    )


def split_part(part: str, meaning: str) -> Column:
    return Column(f"{part}_time_s", f"{part.replace('_', ' ')} [ms]", meaning)


GRADIENTS, GRADIENT_CALLS = transfer("gradients", "gradients", "gradients [MB]")

COMMUNICATION = Table(
    "communication",
    "Q3",
    (
        *PLACE,
        STEP_TIME._replace(interval="kept"),
        EXPOSED,
        Column("exposed_comm_share", "of step [%]", "exposed_comm_time_s/step_time_s.", interval="kept"),
        Column(
            "hidden_share",
            "hidden [%]",
            "1 - exposed/comm; not stated where exposed is not larger than the noise. Its interval is computed from "
            "that of exposed_comm_time_s; both ends are cut to 0 to 1.",
            interval="kept",
            remark="Hidden is a share of the collectives' time.",
        ),
        Column(
            "collective_launch_time_s",
            "launch [us]",
            "exposed - comm where the whole interval of exposed lies above comm.",
        ),
        Column(
            "noise_floor_time_s",
            "noise [us]",
            "Larger absolute end of the interval of the step minus an equal one.",
            remark="Exposed time below the noise says nothing.",
        ),
        COMM_TIME,
        Column(
            "ddp_overhead_time_s",
            "DDP's overhead [us]",
            "No-op hook minus no_sync, which broadcasts no buffers.",
            interval="kept",
        ),
        PLAIN_STEP_TIME,
        Column("ddp_one_step_time_s", "DDP on one [ms]", "DDP on one GPU."),
        Column("no_sync_step_time_s", "no_sync [ms]", "DDP on N GPUs without any reduction (no_sync)."),
        Column(
            "no_op_hook_step_time_s",
            "reference [ms]",
            "The step whose collectives return at once. DDP: with a no-op hook, so hooks and bucket copies alone.",
        ),
        Column(
            "wrapper_time_s",
            "",
            "The step whose collectives return at once, minus the bare module's: hooks, copies, shards, less what a "
            "sharded optimizer saves.",
            interval="kept",
        ),
        Column(
            "collectives_time_s",
            "",
            "DDP minus DDP whose collectives return at once: the time that all collectives add to the step, with the "
            "broadcast of buffers and the wait for the slowest rank.",
            interval="kept",
        ),
        Column(
            "traced_exposed_comm_time_s",
            "",
            "From the profile, on the rank with the smallest sum: time of collectives outside kernels, also in gaps "
            "between them, plus slowed_compute_time_s where it is known; notes say where the trace is too long or too "
            "short.",
        ),
        Column("slowed_compute_time_s", "", "Kernel time of the step minus that without collectives (profiled twice)."),
        Column("buffer_comm_time_s", "", "Time of the collectives for buffers and batch-norm statistics."),
        Column(
            "straggler_wait_time_s",
            "",
            "Mean time of the ranks in a collective minus the shortest, summed: one late rank may count in each.",
        ),
        INTERVAL._replace(heading=""),
        INTERVAL_OVER,
        NUM_WINDOWS,
        RUN_SPREAD._replace(heading=""),
        Column("exposed_comm_time_run_spread_s", "", "run_spread_s of exposed_comm_time_s."),
        Column("late_rank", "", "Rank for which the others wait in most profiled steps."),
        Column("late_rank_wait_time_s", "", "Time of a step that the mean other rank waits for it."),
        *NEXT_STEP,
    ),
    View(
        "Q3.1: communication of one step, measured",
        "Exposed communication is not hidden behind computation: the step less the same step without communication.",
        keys=(
            *("step_time_s", "exposed_comm_time_s", "exposed_comm_share", "hidden_share"),
            *("collective_launch_time_s", "noise_floor_time_s", "comm_time_s", "ddp_overhead_time_s"),
        ),
    ),
    View(
        "Q3.1: five step times",
        "One training step on synthetic images, on the slowest rank; windows of each in turn on the same GPUs. "
        "`step` is that of the strategy, `reference` the same whose collectives return at once (DDP: those of "
        "gradients, by a no-op hook). The table above has medians of differences between neighbouring windows, not "
        "differences of these medians.",
        keys=(
            *("plain_step_time_s", "ddp_one_step_time_s", "no_sync_step_time_s", "no_op_hook_step_time_s"),
            "step_time_s",
        ),
        hidden_notes=(*OF_MEASURED_EXPOSURE, LATE_RANK),
        is_folded=True,
    ),
    View("Next step of each measured step", ADVICE, has_next_step, NEXT_STEP_KEYS, hidden_notes=None),
)

Q3 = Table(
    "Q3",
    "Q3",
    (
        *PLACE,
        EPOCH_TIME,
        Column("compute_time_subtraction_s", "T(1)/N [s]", "T(1)/N."),
        Column("comm_time_subtraction_s", "T(N) - T(1)/N [s]", "T(N) - T(1)/N.", interval="shown"),
        Column("comm_share_subtraction", "of the epoch [%]", "comm_time_subtraction_s/epoch_time_s."),
        EXPOSED._replace(heading="exposed, measured [s]", interval="kept", absent=exposure_noise),
        Column("bandwidth_subtraction_gb_s", "bandwidth [GB/s]", "ring_bytes_per_epoch over comm_time_subtraction_s."),
        Column("steps_per_epoch", "", "Steps of one epoch."),
        Column("ring_bytes_per_epoch", "", "steps x 2(N-1)/N x gradient bytes."),
        BASELINE,
    ),
    View(
        "Q3: computation against communication, estimated by subtraction",
        "Subtraction counts every cost that does not shrink with N as communication, waiting for data included.",
        lambda rows: sort_rows(rows) if any(row["compute_time_subtraction_s"] is not None for row in rows) else [],
    ),
)

BANDWIDTH = Table(
    "bandwidth",
    "Q3",
    (
        *PLACE,
        Column("bucket", "bucket", "Number of the bucket, in the order of the collectives.", is_set=True),
        NUM_BYTES,
        COMM_TIME._replace(heading="time [us]"),
        BUS_BANDWIDTH,
        Column(
            "peak_busbw_gb_s", "isolated [GB/s]", "busbw_gb_s of an isolated all-reduce of that size in the same job."
        ),
        Column("link_share", "of isolated [%]", "busbw_gb_s over peak_busbw_gb_s."),
    ),
    View(
        "Q3.2: bandwidth of the gradients' buckets, and how much of the link that is",
        "Bus bandwidth is size/time x 2(N-1)/N, as in nccl-tests; isolated: an all-reduce of that size by itself.",
        is_folded=True,
    ),
)

SWEEP = Table(
    "sweep",
    "Q3",
    (
        STATUS,
        NUM_BYTES,
        Column("time_s", "time [us]", "Time of one call, on the slowest rank."),
        Column("algbw_gb_s", "algorithm bandwidth [GB/s]", "S/t."),
        BUS_BANDWIDTH,
        NUM_WINDOWS,
    ),
    View(
        "Q3.2: the link's own limit, isolated collectives",
        "Times of a call on the slowest rank; n counts sweeps.",
        shows_n=True,
        is_folded=True,
    ),
)

TRANSFERS = Table(
    "transfers",
    "Q3",
    (
        *PLACE,
        GRADIENTS,
        GRADIENT_CALLS._replace(heading="calls", decimals=0),
        Column(
            "gradients_bytes_formula", "by formula [MB]", "Bytes of the model's gradients (x N-1 under DataParallel)."
        ),
        *transfer("buffers", "buffers", "buffers [MB]"),
        *transfer("batchnorm_statistics", "the statistics of synchronized batch norm", "batch norm [MB]"),
        *transfer("parameters", "parameters", "parameters [MB]"),
        Column(
            "parameters_bytes_formula",
            "parameters by formula [MB]",
            "Bytes that FSDP gathers (each unit, and again if the forward pass frees it) or ZeRO-1 broadcasts.",
        ),
        *transfer("inputs", "inputs", "inputs [MB]"),
        *transfer("outputs", "outputs", "outputs [MB]"),
        STEP_TIME._replace(heading=""),
        EPOCH_TIME._replace(heading=""),
        TEST_ACCURACY._replace(heading=""),
    ),
    View(
        "Q3: what travels in a step, counted",
        "What one rank gives to collectives (under DataParallel: what leaves a GPU), counted by instruments. A "
        "ring sends 2(N-1)/N of it.",
        is_folded=True,
        hides_zeros=True,
    ),
)

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

PREDICTION = Table(
    "prediction",
    "Q3",
    (
        *PLACE,
        Column("from_num_gpus", "from", "Number of GPUs whose measurements the prediction uses.", is_set=True),
        Column(
            "predicted_step_time_s",
            "none hidden [ms]",
            "Step time if compute hides none of the extra all-reduce time; no upper bound.",
            decimals=1,
        ),
        PREDICTION_ERROR,
        Column("no_change_step_time_s", "no change [ms]", "Step time as measured on from_num_gpus: nothing is added."),
        Column("no_change_error", "its error [%]", "no_change_step_time_s divided by measured_step_time_s, minus 1."),
        Column("measured_step_time_s", "measured [ms]", "Step time that was measured on that number of GPUs."),
        Column(
            "predicted_parallel_efficiency",
            "none hidden efficiency [%]",
            "Time on one GPU alone over predicted_step_time_s.",
            decimals=0,
        ),
        Column(
            "all_hidden_step_time_s",
            "all hidden [ms]",
            "Step time if compute hides the extra all-reduce time; no lower bound.",
            decimals=1,
        ),
        Column(
            "all_hidden_parallel_efficiency",
            "all hidden efficiency [%]",
            "Time on one GPU alone over all_hidden_step_time_s.",
            decimals=0,
        ),
        Column("latency_us", "", "Latency of one hop, for messages of the size of the buckets."),
        Column("link_gb_s", "", "Bandwidth of one link."),
        Column("fit_worst_error", "", "Largest relative error of the fit, over the sizes that it is fitted to."),
    ),
    View(
        "Prediction: weak scaling on more GPUs",
        "Extrapolated from steps and all-reduces on as many GPUs as stand under `from`. Only rows with a measured "
        "step were tested; nothing beyond. The model is one ring over equal links, t = 2(N-1) latency + 2(N-1)/N "
        "S/bandwidth, fitted to the all-reduces of DDP alone. None hidden: the step grows by all that all-reduces take "
        "longer. No change: the step takes as long as on those. All hidden: likewise, while all-reduces take no "
        "longer than the step. None of them is a bound. Each error is that of the column before it. Efficiency is "
        "against one GPU.",
        lambda rows: sorted(rows, key=lambda row: int(row["batch_size_per_gpu"])),
        is_folded=True,
    ),
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
