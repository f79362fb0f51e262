"""The tables of the report: the heading, columns and legend of each. `columns` declares the columns themselves."""

from typing import NamedTuple

from pipeline.analysis.scaling import Scaling
from pipeline.experiment.spec import FIRST_TIMED_EPOCH
from pipeline.report import row_types
from pipeline.report.row_types import own_figures

TIMES = ("epoch_time_s", "epoch_time_low_s", "epoch_time_high_s", "interval_over", "run_spread_s")
STEP_TIMES = ("step_time_s", "step_time_low_s", "step_time_high_s", "interval_over", "run_spread_s")
PARTS = ("compute_time_s", "data_time_s")
LOADER = ("num_workers_total", "data_share")
SPEEDS = (*TIMES, *LOADER, "batch_wait_s", "throughput_samples_per_s", "speedup", "parallel_efficiency")
ENERGY = ("energy_j", "energy_per_sample_j", "sm_clock_mhz")


class TableDefinition(NamedTuple):
    """A table of the report. Its legend says what the meanings of its columns do not."""

    table: str  # the field of `Tables` that holds its rows
    heading: str
    figures: tuple[str, ...]  # keys of columns, in order
    legend: str = ""
    scaling: Scaling | None = None
    windows: str = f"timed epochs, from epoch {FIRST_TIMED_EPOCH} on"
    hidden: tuple[str, ...] = ()  # axes that would mislead a person here
    optional: tuple[str, ...] = ()  # columns that are left out without values, although others always show them


WINDOWS_OF_STEPS = "windows of steps"

TABLE_DEFINITIONS = (
    TableDefinition(
        "Q1",
        "Q1: epoch time against batch size, one GPU",
        (*TIMES, *PARTS, *LOADER, "throughput_samples_per_s", "peak_memory_gib", *ENERGY, "host_cpu_share"),
    ),
    TableDefinition(
        "memory",
        "The memory boundary",
        own_figures(row_types.MemoryRow),
        "The largest batch that fits, within 1 %: three full steps of synthetic images, each trial in new processes. "
        "On the CPU memory counts from where memory_limit_gib was set.",
        hidden=("batch_size_per_gpu",),
    ),
    TableDefinition(
        "Q2",
        "Q2: weak scaling, speed-up against one GPU with the per-GPU batch fixed",
        (*SPEEDS, "baseline", *ENERGY),
        "Every row has its baseline's batch_size_per_gpu; the global batch grows with N: this is not strong scaling.",
        "weak",
    ),
    TableDefinition(
        "Q2",
        "Q2: strong scaling, global batch fixed",
        ("global_batch_size", *SPEEDS, "serial_fraction_karp_flatt", "baseline", *ENERGY),
        "Every row has its baseline's global_batch_size, which one GPU runs alone; the per-GPU batch shrinks with N.",
        "strong",
    ),
    TableDefinition(
        "Q3",
        "Q3: computation against communication, estimated by subtraction",
        own_figures(row_types.Q3Row),
        "Every cost that does not divide by N counts as communication. Figures are of the whole epoch; "
        "exposed_comm_time_s is that of a step of the communication point with the same axes, times the epoch's steps.",
    ),
    TableDefinition(
        "communication",
        "Q3.1: five step times",
        (
            *("plain_step_time_s", "ddp_one_step_time_s", "no_sync_step_time_s", "no_op_hook_step_time_s"),
            *STEP_TIMES,
        ),
        "One training step on synthetic images, on the slowest rank. Windows of each in turn, in one process group on "
        "the same GPUs.",
        windows=WINDOWS_OF_STEPS,
    ),
    TableDefinition(
        "communication",
        "Q3.1: communication of one step, measured",
        (
            *("step_time_s", "exposed_comm_time_s", "exposed_comm_time_low_s", "exposed_comm_time_high_s"),
            *("collectives_time_s", "collectives_time_low_s", "collectives_time_high_s"),
            *("exposed_comm_time_run_spread_s", "noise_floor_time_s", "comm_time_s"),
            *("hidden_share", "hidden_share_low", "hidden_share_high"),
            *("collective_launch_time_s", "straggler_wait_time_s", "buffer_comm_time_s", "traced_exposed_comm_time_s"),
            *("slowed_compute_time_s", "ddp_overhead_time_s"),
        ),
        "Differences are medians over rounds; comm and straggler times are from profiled steps. Neither hidden_share "
        "nor collective_launch_time_s is known where the noise floor could hide all of comm_time_s.",
        windows=WINDOWS_OF_STEPS,
    ),
    TableDefinition(
        "bandwidth",
        "Q3.2: bandwidth of the gradients' buckets, and how much of the link that is",
        own_figures(row_types.BandwidthRow),
        "S is num_bytes, t comm_time_s.",
    ),
    TableDefinition(
        "sweep",
        "Q3.2: the link's own limit, isolated all-reduces",
        ("num_bytes", "time_s", "algbw_gb_s", "busbw_gb_s"),
        "S is num_bytes, t the time of a call on the slowest rank. execution is that of the calls.",
        windows="windows of calls",
    ),
    TableDefinition(
        "transfers",
        "Q3: what travels in a step, counted",
        (
            *("gradients_calls_per_step", "gradients_bytes_per_step", "gradients_bytes_formula"),
            *("buffers_calls_per_step", "buffers_bytes_per_step"),
            *("batchnorm_statistics_calls_per_step", "batchnorm_statistics_bytes_per_step"),
            *("parameters_calls_per_step", "parameters_bytes_per_step"),
            *("inputs_bytes_per_step", "outputs_bytes_per_step", "step_time_s", "epoch_time_s", "test_accuracy"),
        ),
        "Calls and bytes that one rank sends (under DataParallel: that leave a GPU), counted by instruments. The "
        "formula is the model's gradients (x N-1 under DataParallel). epoch_time_s and test_accuracy are of the "
        "point that trained with the same axes, if any.",
        optional=("epoch_time_s",),
    ),
    TableDefinition(
        "split",
        "Q3: DataParallel's step, part by part",
        own_figures(row_types.SplitRow, but="noise_floor"),
        "plain is the bare module on one GPU with that GPU's share of the batch. Every device is synchronized after "
        "each part, so the parts sum to more than the step.",
    ),
    TableDefinition(
        "prediction",
        "Prediction: weak scaling on more GPUs",
        ("num_gpus", *own_figures(row_types.PredictionRow)),
        "Not measured. The model is one ring over equal links, t = 2(N-1) latency + 2(N-1)/N S/bandwidth. Bandwidth is "
        "fitted to the sweep from a quarter of the smallest bucket on, latency to smaller messages. No extra "
        "all-reduce time is hidden (low and high: hidden while all-reduces take no longer than the step); the rest of "
        "the step stays as on from_num_gpus. Efficiency is against one GPU alone. Rows with a measured step test the "
        "model.",
    ),
    TableDefinition(
        "Q4",
        "Q4: loss and accuracy by epoch",
        own_figures(row_types.Q4Row, but="diverged_at_update"),
        "loss and accuracy are of the training set as it was seen; num_updates and training_time_s count from the "
        "start. Runs of more than ten epochs show their last one: all stand in the CSV file and the JSON.",
    ),
    TableDefinition(
        "time_to_target",
        "Q4: time to target",
        (
            *("global_batch_size", "remedies", "epochs", "learning_rate", "target_accuracy"),
            *("final_test_accuracy", "final_test_accuracy_low", "final_test_accuracy_high"),
            *("reached", "epochs_to_target", "updates_to_target"),
            *("time_to_target_s", "time_to_target_low_s", "time_to_target_high_s", "gpu_time_to_target_s"),
            *("throughput_efficiency", "statistical_efficiency", "target_efficiency", "soonest"),
        ),
        "Medians over seeds. low and high are the interval (nominally 97.5 %, for six seeds 96.9 %), of fewer than six "
        "seeds the minimum and maximum. The baseline is the smallest global batch without remedies. Under a cosine "
        "schedule accuracy rises most at the end of a run, so the time also depends on the epochs that were asked for.",
        hidden=("batch_size_per_gpu",),
    ),
    TableDefinition(
        "int8",
        "int8: test accuracy after quantization",
        (
            *("stage", "scale_rule", "granularity", "test_accuracy", "test_accuracy_low", "test_accuracy_high"),
            *("accuracy_change", "accuracy_change_low", "accuracy_change_high", "agreement", "network_bytes"),
        ),
        "Medians over n seeds, low and high their interval (nominally 97.5 %, for six seeds 96.9 %). Each stage "
        "includes those before it: weights in int8, activations in int8 with scales from training images, biases in "
        "int32.",
    ),
    TableDefinition(
        "cost",
        "Cost: what the attempts took, by how they ended",
        own_figures(row_types.CostRow),
        "From each launch to its record, times the GPUs allocated (processes, on the CPU), of n attempts; attempts "
        "without a record are not counted. ok_timed is the timed windows on the GPUs used, ok_other the rest of ok "
        "attempts: start-up, warm-up, evaluation, unused GPUs.",
    ),
)
