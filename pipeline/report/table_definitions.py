"""The report's tables for people: whose rows each shows, its heading, its columns, and how to read them."""

from typing import NamedTuple

from pipeline.analysis.intervals import CONFIDENCE
from pipeline.analysis.scaling import Scaling
from pipeline.experiment.spec import FIRST_TIMED_EPOCH

TIMES = ("epoch_time_s", "noise_floor", "interval_over")
GAINS = ("speedup", "parallel_efficiency")
ENERGY = ("energy_j", "energy_per_sample_j", "sm_clock_mhz")


class TableDefinition(NamedTuple):
    """A table of the report: whose rows it shows, its heading, its figures in order, and how to read them."""

    table: str
    heading: str
    figures: tuple[str, ...]
    legend: str
    scaling: Scaling | None = None
    windows: str = f"timed epochs, from epoch {FIRST_TIMED_EPOCH} on"
    hidden: tuple[str, ...] = ()  # axes that would mislead a person here


WINDOWS_OF_STEPS = "windows of steps"

TABLE_DEFINITIONS = (
    TableDefinition(
        "Q1",
        "Q1: epoch time against batch size, one GPU",
        (
            *(*TIMES, "compute_time_s", "data_time_s", "throughput_samples_per_s", "peak_memory_gib"),
            *(*ENERGY, "host_cpu_share"),
        ),
        "epoch_time_s with data loading, compute_time_s without; peak_memory_gib of "
        "the fullest GPU, on the CPU of the largest process.",
    ),
    TableDefinition(
        "memory",
        "The memory boundary",
        (
            "largest_batch_size_per_gpu",
            "smallest_failing_batch_size_per_gpu",
            "peak_memory_gib",
            "head_room_gib",
            "predicted_batch_size_per_gpu",
            "prediction_error",
            "num_trials",
            "num_ooms",
            "search_time_s",
        ),
        "The largest batch that fits, within 1 %: three full steps of synthetic images, each trial in new processes. "
        "peak_memory_gib is its fullest GPU's, head_room_gib what that leaves of the memory the process could have "
        "(on the CPU both count from where memory_limit_gib was set). prediction_error is the first prediction's, "
        "from a line through two small trials. num_ooms leaves out trials that failed otherwise, which the note names "
        "and which may be the smallest that fails. search_time_s holds all trials and the starts of their processes.",
        hidden=("batch_size_per_gpu",),
    ),
    TableDefinition(
        "Q2",
        "Q2: weak scaling, speed-up against one GPU with the per-GPU batch fixed",
        (*TIMES, "throughput_samples_per_s", *GAINS, "baseline", *ENERGY),
        "speedup = T(1)/T(N) for an epoch of the same samples; parallel_efficiency = speedup/N. Every row has its "
        "baseline's batch_size_per_gpu; the global batch grows with N: this is not strong scaling.",
        "weak",
    ),
    TableDefinition(
        "Q2",
        "Q2: strong scaling, global batch fixed",
        (
            *("global_batch_size", *TIMES, "throughput_samples_per_s", *GAINS),
            *("serial_fraction_karp_flatt", "baseline", *ENERGY),
        ),
        "speedup = T(1)/T(N); parallel_efficiency = speedup/N. Every row has its baseline's global_batch_size, which "
        "one GPU runs alone; the per-GPU batch shrinks with N. serial_fraction_karp_flatt = (1/S - 1/N)/(1 - 1/N) for "
        "N > 1.",
        "strong",
    ),
    TableDefinition(
        "Q3",
        "Q3: computation against communication, estimated by subtraction",
        (
            "epoch_time_s",
            "compute_time_subtraction_s",
            "comm_time_subtraction_s",
            "steps_per_epoch",
            "ring_bytes_per_epoch",
            "bandwidth_subtraction_gb_s",
            "exposed_comm_time_s",
            "baseline",
        ),
        "compute = T(1)/N and comm = T(N) - T(1)/N, so every cost that does not divide by N counts as communication. "
        "Bytes and time are those of the whole epoch: steps x 2(N-1)/N x gradient bytes.",
    ),
    TableDefinition(
        "communication",
        "Q3.1: five step times",
        (
            *("plain_step_time_s", "ddp_one_step_time_s", "no_sync_step_time_s", "no_op_hook_step_time_s"),
            *("step_time_s", "noise_floor"),
        ),
        "One training step, synthetic images, the slowest rank: the bare module; DDP on one GPU; DDP on N that "
        "reduces nothing (no_sync); with a no-op communication hook (hooks and bucket copies run); and as it trains. "
        "Windows of each in turn, in one process group on the same GPUs.",
        windows=WINDOWS_OF_STEPS,
    ),
    TableDefinition(
        "communication",
        "Q3.1: communication of one step, measured",
        (
            "step_time_s",
            "exposed_comm_time_s",
            "exposed_comm_time_low_s",
            "exposed_comm_time_high_s",
            "noise_floor_time_s",
            "comm_time_s",
            "hidden_share",
            "collective_launch_time_s",
            "straggler_wait_time_s",
            "buffer_comm_time_s",
            "traced_exposed_comm_time_s",
            "slowed_compute_time_s",
            "ddp_overhead_time_s",
        ),
        "exposed_comm_time_s = DDP less no-op hook, the median over rounds with its interval from low to high; "
        "noise_floor_time_s is how far the interval of two equal series of DDP reaches. comm_time_s sums the buckets' "
        "shortest all-reduce over ranks, straggler_wait_time_s what the mean rank's takes longer, both from profiled "
        "steps. hidden_share = 1 - exposed/comm; where exposed is more, the rest is collective_launch_time_s; neither "
        "is known where the noise floor could hide all of comm_time_s. traced_exposed_comm_time_s is the second way: "
        "all-reduce that no compute kernel covers, nor a gap of at most 5 us between two, plus slowed_compute_time_s, "
        "how much longer kernels take than with the no-op hook (profiled before and after), of the rank where the sum "
        "is least; without the latter it is what no kernel covers, gaps or not. "
        "ddp_overhead_time_s = no-op hook less no_sync, which leaves out the broadcast of buffers too.",
        windows=WINDOWS_OF_STEPS,
    ),
    TableDefinition(
        "bandwidth",
        "Q3.2: bandwidth of the gradients' buckets, and how much of the link that is",
        ("bucket", "num_bytes", "comm_time_s", "busbw_gb_s", "peak_busbw_gb_s", "link_share"),
        "busbw = S/t x 2(N-1)/N (nccl-tests) with t the shortest all-reduce over ranks in training; the peak is that "
        "of an isolated all-reduce of the same size in the same job.",
    ),
    TableDefinition(
        "sweep",
        "Q3.2: the link's own limit, isolated all-reduces",
        ("num_bytes", "time_s", "algbw_gb_s", "busbw_gb_s"),
        "algbw = S/t, busbw = S/t x 2(N-1)/N; t is the slowest rank's time a call. execution is that of the calls.",
        windows="windows of calls",
    ),
    TableDefinition(
        "transfers",
        "Q3: what travels in a step, counted",
        (
            "gradients_calls_per_step",
            "gradients_bytes_per_step",
            "gradients_bytes_formula",
            "buffers_calls_per_step",
            "buffers_bytes_per_step",
            "batchnorm_statistics_calls_per_step",
            "batchnorm_statistics_bytes_per_step",
            "parameters_calls_per_step",
            "parameters_bytes_per_step",
            "inputs_bytes_per_step",
            "outputs_bytes_per_step",
            "step_time_s",
            "epoch_time_s",
            "test_accuracy",
        ),
        "Calls and bytes that one rank hands in (under DataParallel: that leave a GPU), seen by instruments; the "
        "formula is the model's gradients (x N-1 under DataParallel). epoch_time_s and test_accuracy are those of the "
        "point that trained with the same axes, where the experiment has one.",
    ),
    TableDefinition(
        "split",
        "Q3: DataParallel's step, part by part",
        (
            "plain_step_time_s",
            "step_time_s",
            "noise_floor",
            "scatter_time_s",
            "replicate_time_s",
            "parallel_forward_time_s",
            "gather_time_s",
            "backward_time_s",
            "optimizer_time_s",
            "parts_time_s",
        ),
        "plain is the bare module on one GPU with that GPU's share of the batch. Every device is synchronized after "
        "each part, so the parts sum to more than the step. backward holds the reduction onto the first GPU.",
    ),
    TableDefinition(
        "prediction",
        "Prediction: weak scaling on more GPUs",
        (
            "num_gpus",
            "from_num_gpus",
            "latency_us",
            "link_gb_s",
            "fit_worst_error",
            "predicted_step_time_low_s",
            "predicted_step_time_s",
            "predicted_parallel_efficiency",
            "predicted_parallel_efficiency_high",
            "measured_step_time_s",
            "prediction_error",
        ),
        "Not measured. Assumes one ring over equal links, t = 2(N-1) latency + 2(N-1)/N S/bandwidth, fitted to the "
        "sweep on from_num_gpus GPUs (fit_worst_error: the worst size), that what all-reduces take longer is not "
        "hidden at all (low and high: hidden as long as they are no longer than the step), and that the rest stays as "
        "it was on from_num_gpus. Efficiency against one GPU alone. Rows with a measured step test the model.",
    ),
    TableDefinition(
        "Q4",
        "Q4: loss and accuracy by epoch",
        ("remedies", "epoch", "num_updates", "loss", "accuracy", "test_loss", "test_accuracy"),
        "loss and accuracy are of the training set as it was seen; num_updates counts from the start.",
    ),
    TableDefinition(
        "cost",
        "Cost: what the attempts took, by how they ended",
        ("ending", "gpu_hours", "process_hours", "allocated_share"),
        "From each launch to its record, times the GPUs allocated (processes, on the CPU), of n attempts; those that "
        "left no record are not counted. ok_timed is the timed windows on the GPUs used, ok_other all else that "
        "ok attempts took: start-up, warm-up, evaluation, GPUs not used.",
    ),
)


LEGENDS = {
    "energy_j": "energy_j of all GPUs used, without the host; sm_clock_mhz of the slowest GPU.",
    "num_windows": "Times are medians over num_windows {windows}.",
    "noise_floor": f"interval is the half-width over the median of the time's {100 * CONFIDENCE:.0f} % interval "
    "(order statistics of the median): the noise floor of the same point run twice. It is over repeats (new processes) "
    "or windows (of one process).",
}
"""What is said only where a table has the column."""
