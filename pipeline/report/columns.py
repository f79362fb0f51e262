"""Columns: the key, unit and meaning of each, declared once for JSON, CSV and docs/words.md.

A row class in `row_types` has a field for each column. `table_definitions` chooses the figures of a table for people.
"""

from typing import NamedTuple

from pipeline.analysis.intervals import CONFIDENCE
from pipeline.analysis.loader import MAX_DATA_SHARE

NOT_STATED = "not stated"


class Column(NamedTuple):
    """One column of JSON and CSV. A fraction has the unit 1."""

    key: str
    meaning: str
    unit: str = ""


def seconds(key: str, meaning: str) -> Column:
    """Return a column of times."""
    return Column(key, meaning, "s")


def fraction(key: str, meaning: str) -> Column:
    """Return a column of fractions: 1 is 100 %."""
    return Column(key, meaning, "1")


def interval_keys(key: str) -> tuple[str, str]:
    """Return the keys of the ends of a figure's interval: epoch_time_low_s and epoch_time_high_s for epoch_time_s."""
    stem, unit = (key.removesuffix("_s"), "_s") if key.endswith("_s") else (key, "")
    return f"{stem}_low{unit}", f"{stem}_high{unit}"


def estimate(key: str, meaning: str, unit: str = "") -> tuple[Column, ...]:
    """Return the column of a figure, and those of the ends of its interval."""
    (low, high), end = interval_keys(key), f"end of the interval of {key}."
    return Column(key, meaning, unit), Column(low, f"Lower {end}", unit), Column(high, f"Upper {end}", unit)


def transfers(kind: str, what: str) -> tuple[Column, Column]:
    """Return two columns for one kind of data that a rank sends: calls per step and bytes per step."""
    calls = Column(f"{kind}_calls_per_step", f"Calls per step that send {what}.")
    return calls, Column(f"{kind}_bytes_per_step", f"Bytes per step of {what}.", "B")


FIGURE_COLUMNS = (
    # all tables
    Column("global_batch_size", "Samples per step over all GPUs."),
    Column("status", "The status of the point: ok, oom, failed, rejected or missing."),
    Column("n", "Number of runs that the row pools."),
    Column("note", "Facts that a reader needs to judge the row."),
    Column("num_windows", "Number of windows; each time is the median over them."),
    fraction("noise_floor", "Half the width of the interval over the median."),
    Column(
        "interval_over",
        f"What the median's interval from low to high (order statistics, nominally {100 * CONFIDENCE:g} %, for six "
        "values 96.9 %) is computed from: windows tell how well it is known within one run, repeats between runs "
        "(new processes).",
    ),
    seconds("run_spread_s", "Largest less smallest median of the n runs, each in new processes."),
    Column("reason", "Why the point ran out of memory."),
    # epochs: times, throughput, memory, energy
    *estimate("epoch_time_s", "Time of one epoch with data loading, on the slowest rank.", "s"),
    seconds(
        "compute_time_s", "Epoch time without data loading; under DDP it holds the wait for the slowest rank's batch."
    ),
    seconds("data_time_s", "Part of the epoch time that is data loading."),
    seconds(
        "batch_wait_s",
        "Least part of compute_time_s that is waiting for another rank's batch: the longest data time of a rank less "
        "data_time_s (more if ranks are late in turn, which sums over an epoch do not show).",
    ),
    fraction(
        "data_share",
        "data_time_s/epoch_time_s: in this share of the epoch the GPU waits for data (input: gpu: prepares it).",
    ),
    Column("num_workers_total", "Loader workers of all ranks together."),
    Column(
        "is_loader_bound",
        f"True if a GPU waits for the loader in more than {100 * MAX_DATA_SHARE:g} % of the epoch (data_time_s and "
        "batch_wait_s together).",
    ),
    Column("throughput_samples_per_s", "Training samples per second.", "1/s"),
    Column("peak_memory_gib", "Fullest GPU, or largest process on the CPU.", "GiB"),
    Column("energy_j", "Energy of all GPUs used, without the host.", "J"),
    Column("energy_per_sample_j", "Energy per training sample.", "J"),
    Column("sm_clock_mhz", "Clock of the slowest GPU.", "MHz"),
    fraction("host_cpu_share", "Busy share of the CPUs of the busiest node."),
    # weak and strong scaling
    Column("scaling", "The batch that stays fixed as GPUs are added: weak (per GPU) or strong (global)."),
    *estimate("speedup", "T(1)/T(N) for the same samples.", "1"),
    *estimate("parallel_efficiency", "speedup/N.", "1"),
    fraction("serial_fraction_karp_flatt", "(1/S - 1/N)/(1 - 1/N) for N > 1."),
    Column("baseline", "Strategy of the one-GPU point that the row is compared with."),
    Column("baseline_batch_size_per_gpu", "Batch size per GPU of the baseline point."),
    # communication by subtraction
    seconds("compute_time_subtraction_s", "T(1)/N."),
    seconds("comm_time_subtraction_s", "T(N) - T(1)/N."),
    Column("steps_per_epoch", "Steps of one epoch."),
    Column("ring_bytes_per_epoch", "steps x 2(N-1)/N x gradient bytes.", "B"),
    Column("bandwidth_subtraction_gb_s", "ring_bytes_per_epoch over comm_time_subtraction_s.", "GB/s"),
    # loss and accuracy
    Column("epoch", "The epoch, counted from 1."),
    Column("num_updates", "Updates of the weights since the start."),
    Column("loss", "Mean loss of the training samples, measured during training."),
    fraction("accuracy", "Accuracy on the training samples, measured during training."),
    Column("test_loss", "Loss over the test set."),
    fraction("test_accuracy", "Accuracy over the test set."),
    Column("diverged_at_update", "First update whose loss was not finite."),
    seconds("training_time_s", "Sum of epoch_time_s since the start, without evaluation."),
    # time to target
    fraction("target_accuracy", "Test accuracy to reach."),
    *estimate("final_test_accuracy", "Test accuracy after the last epoch.", "1"),
    Column("reached", "Number of seeds that reached the target, or never reached."),
    *estimate("epochs_to_target", "First epoch whose test accuracy is the target or more."),
    *estimate("updates_to_target", "Updates up to the end of that epoch."),
    *estimate("time_to_target_s", "Training time up to the end of that epoch, without evaluation.", "s"),
    seconds("gpu_time_to_target_s", "time_to_target_s x GPUs."),
    fraction("throughput_efficiency", "Samples per second and GPU over the baseline's."),
    fraction("statistical_efficiency", "Baseline's epochs_to_target over the row's."),
    fraction("target_efficiency", "throughput_efficiency x statistical_efficiency."),
    Column("soonest", "The row reaches the target first, counted in these."),
    # step times and their differences
    seconds("plain_step_time_s", "Model without DDP on one GPU, with one GPU's share of the batch."),
    seconds("ddp_one_step_time_s", "DDP on one GPU."),
    seconds("no_sync_step_time_s", "DDP on N GPUs without any reduction (no_sync)."),
    seconds("no_op_hook_step_time_s", "DDP with a no-op hook: hooks and bucket copies alone."),
    *estimate("step_time_s", "One training step, on the slowest rank.", "s"),
    *estimate(
        "exposed_comm_time_s",
        "DDP minus no-op hook, gradients alone (both sides broadcast buffers); the interval is given by low and high.",
        "s",
    ),
    *estimate(
        "collectives_time_s",
        "DDP minus DDP whose collectives return at once: the time that all collectives add to the step, with the "
        "broadcast of buffers and the wait for the slowest rank.",
        "s",
    ),
    seconds("exposed_comm_time_run_spread_s", "run_spread_s of exposed_comm_time_s."),
    seconds("noise_floor_time_s", "Larger absolute end of the interval of DDP minus an equal DDP."),
    seconds("comm_time_s", "Shortest time of each all-reduce over ranks, summed over buckets."),
    fraction("hidden_share", "1 - exposed/comm."),
    fraction("hidden_share_low", "Lower end of the interval of hidden_share, from that of exposed_comm_time_s."),
    fraction("hidden_share_high", "Upper end of the interval of hidden_share."),
    seconds("collective_launch_time_s", "exposed - comm where that is above 0."),
    seconds(
        "straggler_wait_time_s",
        "Mean all-reduce time of the ranks minus the shortest, summed over buckets: one late rank may count in each.",
    ),
    seconds("buffer_comm_time_s", "Time of the collectives for buffers and batch-norm statistics."),
    seconds(
        "traced_exposed_comm_time_s",
        "Upper bound from the profile, on the rank with the smallest sum: all-reduce time outside kernels, also in the "
        "gaps between them, plus slowed_compute_time_s where it is known.",
    ),
    seconds("slowed_compute_time_s", "DDP's kernel time minus the no-op hook's (profiled twice)."),
    *estimate("ddp_overhead_time_s", "No-op hook minus no_sync, which broadcasts no buffers.", "s"),
    # bandwidth of all-reduces
    Column("bucket", "Number of the bucket, in the order of the collectives."),
    Column("num_bytes", "Bytes of one all-reduce (S).", "B"),
    seconds("time_s", "Time of one call, on the slowest rank."),
    Column("algbw_gb_s", "S/t.", "GB/s"),
    Column("busbw_gb_s", "S/t x 2(N-1)/N (nccl-tests).", "GB/s"),
    Column("peak_busbw_gb_s", "busbw_gb_s of an isolated all-reduce of that size in the same job.", "GB/s"),
    fraction("link_share", "busbw_gb_s over peak_busbw_gb_s."),
    # transfers of a step
    *transfers("gradients", "gradients"),
    Column("gradients_bytes_formula", "Bytes of the model's gradients (x N-1 under DataParallel).", "B"),
    *transfers("buffers", "buffers"),
    *transfers("batchnorm_statistics", "the statistics of synchronized batch norm"),
    *transfers("parameters", "parameters"),
    *transfers("inputs", "inputs"),
    *transfers("outputs", "outputs"),
    # the parts of DataParallel's step
    seconds("scatter_time_s", "Time to distribute the inputs to the GPUs."),
    seconds("replicate_time_s", "Time to copy the module to every GPU."),
    seconds("parallel_forward_time_s", "Time of the forward pass on all GPUs."),
    seconds("gather_time_s", "Time to collect the outputs."),
    seconds("backward_time_s", "Backward pass and reduction onto the first GPU."),
    seconds("optimizer_time_s", "Time to update the weights."),
    seconds("parts_time_s", "Sum of the parts."),
    # the prediction
    Column("from_num_gpus", "Number of GPUs whose measurements the prediction uses."),
    Column("latency_us", "Latency of one hop, for messages of the size of the buckets.", "us"),
    Column("link_gb_s", "Bandwidth of one link.", "GB/s"),
    fraction("fit_worst_error", "Largest relative error of the fit, over its sizes."),
    seconds("predicted_step_time_low_s", "Step time if compute hides the extra all-reduce time."),
    seconds("predicted_step_time_s", "Step time if compute hides none of the extra all-reduce time."),
    fraction("predicted_parallel_efficiency", "Time on one GPU alone over predicted_step_time_s."),
    fraction("predicted_parallel_efficiency_high", "Time on one GPU alone over predicted_step_time_low_s."),
    seconds("measured_step_time_s", "Step time that was measured on that number of GPUs."),
    fraction("prediction_error", "Predicted value divided by the measured value, minus 1."),
    # the memory boundary
    Column("largest_batch_size_per_gpu", "Largest batch size per GPU that fits."),
    Column("smallest_failing_batch_size_per_gpu", "Smallest batch size per GPU that failed, for any reason."),
    Column("head_room_gib", "Fullest GPU: usable memory minus peak.", "GiB"),
    Column("predicted_batch_size_per_gpu", "First prediction, from a line through two trials."),
    Column("num_trials", "Trials of the search."),
    Column("num_ooms", "Trials that ran out of memory; the note lists other failures."),
    seconds("search_time_s", "Time of all trials, including process start."),
    # int8
    Column("stage", "Stage: fp32, then int8 weights, then int8 activations too, then int32 biases too."),
    Column("scale_rule", "Magnitude that becomes 127: the largest, |mean| + 3 sigma, or the 99.9th percentile."),
    Column("granularity", "Scales of the weights: one per tensor, or one per output channel."),
    fraction("test_accuracy_low", "Lower end of the interval of test_accuracy."),
    fraction("test_accuracy_high", "Upper end of the interval of test_accuracy."),
    *estimate("accuracy_change", "Accuracy minus fp32 of the same seed, median over seeds.", "1"),
    fraction("mean_accuracy_change", "Mean over seeds of accuracy minus fp32."),
    fraction("agreement", "Share of test images that get the same class as in fp32."),
    fraction("tie_share", "Share of test images whose highest score several classes have."),
    Column("network_bytes", "Bytes of weights, biases and scales.", "B"),
    Column("layer", "Layer of the network."),
    Column("tensor", "Values that the histogram counts: weights, or fp32 outputs before or after ReLU."),
    Column("low", "Smallest value, where the first bin begins."),
    Column("high", "Largest value, where the last bin ends."),
    Column("mean", "Mean of the values."),
    Column("sigma", "Standard deviation of the values."),
    Column("three_sigma_low", "Mean minus three sigma."),
    Column("three_sigma_high", "Mean plus three sigma."),
    Column("counts", "Number of values in each bin of equal width."),
    # cost
    Column("ending", "How the attempts ended; ok attempts are split into timed windows (ok_timed) and the rest."),
    Column("gpu_hours", "Hours from launch to record, times the GPUs allocated.", "h"),
    Column("process_hours", "Hours from launch to record, times the processes.", "h"),
    fraction("allocated_share", "Share of all hours allocated on the device."),
)

AXIS_COLUMNS = (
    Column("strategy", "Parallel strategy."),
    Column("precision", "Number format of the computation."),
    Column("input", "Source of the training images."),
    Column("dataset", "Data set."),
    Column("model", "Model."),
    Column("remedies", "Remedies for training with large batches."),
    Column("learning_rate", "Learning rate; in the tables of Q4 the largest of the run, after scaling."),
    Column("max_steps", "Steps after which an epoch is cut off."),
    Column("memory_limit_gib", "Limit of the memory of each process.", "GiB"),
    Column("bucket_cap_mb", "Largest size of a bucket of gradients.", "MiB"),
)
"""The axes that are not plain counts or switches; `Spec` documents all."""

COLUMNS = {column.key: column for column in FIGURE_COLUMNS}
"""All columns except the axes, by key."""
