"""Columns: the key, unit, format and meaning of each, declared once for JSON, CSV and the report.

A row class in `row_types` has a field for each column. `table_definitions` chooses the columns of a table for people.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from pipeline.analysis.intervals import CONFIDENCE
from pipeline.analysis.loader import MAX_DATA_SHARE
from pipeline.experiment.spec import AXES

NOT_STATED = "not stated"
ABSENT = "-"
LARGE_LOSS = 1e5  # losses from this value on are shown with an exponent

Format = Callable[[float], str]


def percentage(template: str) -> Format:
    """Return a format that writes a fraction as a percentage, with its number in the form of `template`."""
    return lambda value: f"{template.format(100 * value)} %"


six_digits: Format = "{:.6g}".format
three_decimals: Format = "{:.3f}".format
two_decimals: Format = "{:.2f}".format
three_digits: Format = "{:.3g}".format
whole_number: Format = "{:,.0f}".format
format_percent, format_accuracy = percentage("{:.1f}"), percentage("{:.2f}")
format_error = percentage("{:+.1f}")


def format_points(value: float) -> str:
    """Return a difference of fractions in percentage points."""
    return f"{100 * value:+.2f} points"


def format_amount(value: float) -> str:
    """Return three significant digits below 100, else a whole number."""
    return three_digits(value) if value < 100 else whole_number(value)


def format_count(value: float) -> str:
    """Return up to six significant digits below 1000, else a whole number."""
    return six_digits(value) if value < 1000 else whole_number(value)


def format_seconds(value: float) -> str:
    """Return seconds, or microseconds below 0.1 s."""
    return three_decimals(value) if abs(value) >= 0.1 else f"{1e6 * value:,.1f} us"


def format_bound(value: float) -> str:
    """Return seconds with one decimal more than `format_seconds`: an interval may be narrow."""
    return f"{value:.4f}" if abs(value) >= 0.1 else f"{1e6 * value:,.2f} us"


def format_loss(value: float) -> str:
    """Return a loss with four decimals, or with an exponent from LARGE_LOSS on."""
    return f"{value:.4f}" if abs(value) < LARGE_LOSS else f"{value:.1e}"


class Column(NamedTuple):
    """One column: its key in JSON and CSV, and its format and meaning in the report."""

    key: str
    meaning: str
    unit: str = ""
    format: Format = six_digits
    absent: str = ABSENT  # the text of a cell without a value
    alignment: Literal["left", "right"] = "right"
    show: Literal["if_known", "always", "if_not_zero"] = "if_known"  # when the report shows the column
    is_explained: bool = False  # the report's legend includes the meaning
    has_status: bool = False  # a cell without a value shows the status of its point


def seconds(key: str, meaning: str, **options: Any) -> Column:
    """Return a column of times."""
    return Column(key, meaning, "s", format_seconds, **options)


def fraction(key: str, meaning: str, form: Format = format_percent, **options: Any) -> Column:
    """Return a column of fractions: 1 is 100 %."""
    return Column(key, meaning, "1", form, **options)


def words(key: str, meaning: str, absent: str = ABSENT) -> Column:
    """Return a column of text."""
    return Column(key, meaning, absent=absent, alignment="left")


def transfers(kind: str, what: str, **options: Any) -> tuple[Column, Column]:
    """Return two columns for one kind of data that a rank sends: calls per step and bytes per step."""
    calls = Column(f"{kind}_calls_per_step", f"Calls per step that send {what}.", "", format_count, **options)
    return calls, Column(f"{kind}_bytes_per_step", f"Bytes per step of {what}.", "B", format_count, **options)


FIGURE_COLUMNS = (
    # all tables
    Column("global_batch_size", "Samples per step over all GPUs."),
    words("status", "The status of the point: ok, oom, failed, rejected or missing."),
    Column("n", "Number of runs that the row pools."),
    words("note", "Facts that a reader needs to judge the row.", absent=""),
    Column("num_windows", "Number of windows; each time is the median over them."),
    fraction("noise_floor", "Half the width of the interval over the median."),
    Column(
        "interval_over",
        f"What the median's interval from low to high (order statistics, nominally {100 * CONFIDENCE:g} %, for six "
        "values 96.9 %) is computed from: windows tell how well it is known within one run, repeats between runs "
        "(new processes).",
        alignment="left",
        is_explained=True,
    ),
    seconds(
        "run_spread_s",
        "Largest less smallest median of the n runs, each in new processes.",
        is_explained=True,
    ),
    words("reason", "Why the point ran out of memory."),
    # epochs: times, throughput, memory, energy
    seconds(
        "epoch_time_s", "Time of one epoch with data loading, on the slowest rank.", show="always", has_status=True
    ),
    Column("epoch_time_low_s", "Lower end of the interval of epoch_time_s.", "s", format_bound),
    Column("epoch_time_high_s", "Upper end of the interval of epoch_time_s.", "s", format_bound),
    seconds(
        "compute_time_s",
        "Epoch time without data loading; under DDP it holds the wait for the slowest rank's batch.",
        show="always",
        is_explained=True,
    ),
    seconds("data_time_s", "Part of the epoch time that is data loading.", show="always"),
    seconds(
        "batch_wait_s",
        "Least part of compute_time_s that is waiting for another rank's batch: the longest data time of a rank less "
        "data_time_s (more if ranks are late in turn, which sums over an epoch do not show).",
        is_explained=True,
    ),
    fraction(
        "data_share",
        "data_time_s/epoch_time_s: in this share of the epoch the GPU waits for data (input: gpu: prepares it).",
        is_explained=True,
    ),
    Column("num_workers_total", "Loader workers of all ranks together.", is_explained=True),
    words(
        "is_loader_bound",
        f"True if a GPU waits for the loader in more than {100 * MAX_DATA_SHARE:g} % of the epoch (data_time_s and "
        "batch_wait_s together).",
    ),
    Column("throughput_samples_per_s", "Training samples per second.", "1/s", whole_number),
    Column("peak_memory_gib", "Fullest GPU, or largest process on the CPU.", "GiB", two_decimals, is_explained=True),
    Column("energy_j", "Energy of all GPUs used, without the host.", "J", format_amount, is_explained=True),
    Column("energy_per_sample_j", "Energy per training sample.", "J", format_amount),
    Column("sm_clock_mhz", "Clock of the slowest GPU.", "MHz", "{:.0f}".format, is_explained=True),
    fraction("host_cpu_share", "Busy share of the CPUs of the busiest node."),
    # weak and strong scaling
    words("scaling", "The batch that stays fixed as GPUs are added: weak (per GPU) or strong (global)."),
    Column("speedup", "T(1)/T(N) for the same samples.", "1", three_decimals, is_explained=True),
    Column("speedup_low", "Lower end of the interval of speedup.", "1", three_decimals),
    Column("speedup_high", "Upper end of the interval of speedup.", "1", three_decimals),
    fraction("parallel_efficiency", "speedup/N.", is_explained=True),
    fraction("parallel_efficiency_low", "Lower end of the interval of parallel_efficiency."),
    fraction("parallel_efficiency_high", "Upper end of the interval of parallel_efficiency."),
    fraction("serial_fraction_karp_flatt", "(1/S - 1/N)/(1 - 1/N) for N > 1.", three_decimals, is_explained=True),
    words("baseline", "Strategy of the one-GPU point that the row is compared with."),
    Column("baseline_batch_size_per_gpu", "Batch size per GPU of the baseline point."),
    # communication by subtraction
    seconds("compute_time_subtraction_s", "T(1)/N.", show="always", is_explained=True),
    seconds("comm_time_subtraction_s", "T(N) - T(1)/N.", show="always", is_explained=True),
    Column("steps_per_epoch", "Steps of one epoch."),
    Column("ring_bytes_per_epoch", "steps x 2(N-1)/N x gradient bytes.", "B", format_count, is_explained=True),
    Column("bandwidth_subtraction_gb_s", "ring_bytes_per_epoch over comm_time_subtraction_s.", "GB/s", three_digits),
    # loss and accuracy
    Column("epoch", "The epoch, counted from 1.", has_status=True),
    Column("num_updates", "Updates of the weights since the start."),
    Column("loss", "Mean loss of the training samples, measured during training.", "", format_loss),
    fraction("accuracy", "Accuracy on the training samples, measured during training.", format_accuracy),
    Column("test_loss", "Loss over the test set.", "", format_loss),
    fraction("test_accuracy", "Accuracy over the test set.", format_accuracy),
    Column("diverged_at_update", "First update whose loss was not finite."),
    seconds("training_time_s", "Sum of epoch_time_s since the start, without evaluation."),
    # time to target
    fraction("target_accuracy", "Test accuracy to reach.", format_accuracy, show="always"),
    fraction("final_test_accuracy", "Test accuracy after the last epoch.", format_accuracy, has_status=True),
    fraction("final_test_accuracy_low", "Lower end of the interval of final_test_accuracy.", format_accuracy),
    fraction("final_test_accuracy_high", "Upper end of the interval of final_test_accuracy.", format_accuracy),
    words("reached", "Number of seeds that reached the target, or never reached."),
    Column("epochs_to_target", "First epoch whose test accuracy is the target or more."),
    Column("epochs_to_target_low", "Lower end of the interval of epochs_to_target."),
    Column("epochs_to_target_high", "Upper end of the interval of epochs_to_target."),
    Column("updates_to_target", "Updates up to the end of that epoch.", "", format_count),
    Column("updates_to_target_low", "Lower end of the interval of updates_to_target.", "", format_count),
    Column("updates_to_target_high", "Upper end of the interval of updates_to_target.", "", format_count),
    seconds("time_to_target_s", "Training time up to the end of that epoch, without evaluation.", is_explained=True),
    seconds("time_to_target_low_s", "Lower end of the interval of time_to_target_s."),
    seconds("time_to_target_high_s", "Upper end of the interval of time_to_target_s."),
    seconds("gpu_time_to_target_s", "time_to_target_s x GPUs."),
    fraction("throughput_efficiency", "Samples per second and GPU over the baseline's.", is_explained=True),
    fraction("statistical_efficiency", "Baseline's epochs_to_target over the row's.", is_explained=True),
    fraction("target_efficiency", "throughput_efficiency x statistical_efficiency.", is_explained=True),
    words("soonest", "The row reaches the target first, counted in these.", absent=""),
    # step times and their differences
    seconds("plain_step_time_s", "Model without DDP on one GPU, with one GPU's share of the batch.", has_status=True),
    seconds("ddp_one_step_time_s", "DDP on one GPU."),
    seconds("no_sync_step_time_s", "DDP on N GPUs without any reduction (no_sync).", is_explained=True),
    seconds("no_op_hook_step_time_s", "DDP with a no-op hook: hooks and bucket copies alone.", is_explained=True),
    seconds("step_time_s", "One training step, on the slowest rank.", has_status=True),
    Column("step_time_low_s", "Lower end of the interval of step_time_s.", "s", format_bound),
    Column("step_time_high_s", "Upper end of the interval of step_time_s.", "s", format_bound),
    seconds(
        "exposed_comm_time_s",
        "DDP minus no-op hook, gradients alone (both sides broadcast buffers); the interval is given by low and high.",
        is_explained=True,
    ),
    seconds("exposed_comm_time_low_s", "Lower end of the interval of exposed_comm_time_s."),
    seconds("exposed_comm_time_high_s", "Upper end of the interval of exposed_comm_time_s."),
    seconds(
        "collectives_time_s",
        "DDP minus DDP whose collectives return at once: the time that all collectives add to the step, with the "
        "broadcast of buffers and the wait for the slowest rank.",
        is_explained=True,
    ),
    seconds("collectives_time_low_s", "Lower end of the interval of collectives_time_s."),
    seconds("collectives_time_high_s", "Upper end of the interval of collectives_time_s."),
    seconds("exposed_comm_time_run_spread_s", "run_spread_s of exposed_comm_time_s."),
    seconds("noise_floor_time_s", "Larger absolute end of the interval of DDP minus an equal DDP.", is_explained=True),
    seconds("comm_time_s", "Shortest time of each all-reduce over ranks, summed over buckets.", is_explained=True),
    fraction("hidden_share", "1 - exposed/comm.", is_explained=True),
    fraction("hidden_share_low", "Lower end of the interval of hidden_share, from that of exposed_comm_time_s."),
    fraction("hidden_share_high", "Upper end of the interval of hidden_share."),
    seconds("collective_launch_time_s", "exposed - comm where that is above 0.", is_explained=True),
    seconds(
        "straggler_wait_time_s",
        "Mean all-reduce time of the ranks minus the shortest, summed over buckets: one late rank may count in each.",
        is_explained=True,
    ),
    seconds("buffer_comm_time_s", "Time of the collectives for buffers and batch-norm statistics."),
    seconds(
        "traced_exposed_comm_time_s",
        "Upper bound from the profile, on the rank with the smallest sum: all-reduce time outside kernels, also in the "
        "gaps between them, plus slowed_compute_time_s where it is known.",
        is_explained=True,
    ),
    seconds("slowed_compute_time_s", "DDP's kernel time minus the no-op hook's (profiled twice).", is_explained=True),
    seconds("ddp_overhead_time_s", "No-op hook minus no_sync, which broadcasts no buffers.", is_explained=True),
    seconds("ddp_overhead_time_low_s", "Lower end of the interval of ddp_overhead_time_s."),
    seconds("ddp_overhead_time_high_s", "Upper end of the interval of ddp_overhead_time_s."),
    # bandwidth of all-reduces
    Column("bucket", "Number of the bucket, in the order of the collectives."),
    Column("num_bytes", "Bytes of one all-reduce (S).", "B"),
    seconds("time_s", "Time of one call, on the slowest rank.", has_status=True),
    Column("algbw_gb_s", "S/t.", "GB/s", three_digits, is_explained=True),
    Column("busbw_gb_s", "S/t x 2(N-1)/N (nccl-tests).", "GB/s", three_digits, is_explained=True),
    Column(
        "peak_busbw_gb_s",
        "busbw_gb_s of an isolated all-reduce of that size in the same job.",
        "GB/s",
        three_digits,
        is_explained=True,
    ),
    fraction("link_share", "busbw_gb_s over peak_busbw_gb_s."),
    # transfers of a step
    *transfers("gradients", "gradients", has_status=True),
    Column("gradients_bytes_formula", "Bytes of the model's gradients (x N-1 under DataParallel).", "B", format_count),
    *transfers("buffers", "buffers"),
    *transfers("batchnorm_statistics", "the statistics of synchronized batch norm", show="if_not_zero"),
    *transfers("parameters", "parameters", show="if_not_zero"),
    *transfers("inputs", "inputs", show="if_not_zero"),
    *transfers("outputs", "outputs", show="if_not_zero"),
    # the parts of DataParallel's step
    seconds("scatter_time_s", "Time to distribute the inputs to the GPUs."),
    seconds("replicate_time_s", "Time to copy the module to every GPU."),
    seconds("parallel_forward_time_s", "Time of the forward pass on all GPUs."),
    seconds("gather_time_s", "Time to collect the outputs."),
    seconds("backward_time_s", "Backward pass and reduction onto the first GPU.", is_explained=True),
    seconds("optimizer_time_s", "Time to update the weights."),
    seconds("parts_time_s", "Sum of the parts."),
    # the prediction
    Column("from_num_gpus", "Number of GPUs whose measurements the prediction uses."),
    Column("latency_us", "Latency of one hop, for messages of the size of the buckets.", "us", two_decimals),
    Column("link_gb_s", "Bandwidth of one link.", "GB/s", three_digits),
    fraction("fit_worst_error", "Largest relative error of the fit, over its sizes.", format_error, is_explained=True),
    seconds("predicted_step_time_low_s", "Step time if compute hides the extra all-reduce time."),
    seconds("predicted_step_time_s", "Step time if compute hides none of the extra all-reduce time."),
    fraction("predicted_parallel_efficiency", "Time on one GPU alone over predicted_step_time_s."),
    fraction("predicted_parallel_efficiency_high", "Time on one GPU alone over predicted_step_time_low_s."),
    seconds("measured_step_time_s", "Step time that was measured on that number of GPUs."),
    fraction("prediction_error", "Predicted value divided by the measured value, minus 1.", format_error),
    # the memory boundary
    Column("largest_batch_size_per_gpu", "Largest batch size per GPU that fits.", has_status=True),
    Column("smallest_failing_batch_size_per_gpu", "Smallest batch size per GPU that failed, for any reason."),
    Column("head_room_gib", "Fullest GPU: usable memory minus peak.", "GiB", two_decimals, is_explained=True),
    Column("predicted_batch_size_per_gpu", "First prediction, from a line through two trials.", is_explained=True),
    Column("num_trials", "Trials of the search."),
    Column("num_ooms", "Trials that ran out of memory; the note lists other failures.", is_explained=True),
    seconds("search_time_s", "Time of all trials, including process start.", is_explained=True),
    # int8
    Column(
        "stage",
        "Stage: fp32, then int8 weights, then int8 activations too, then int32 biases too.",
        alignment="left",
        has_status=True,
    ),
    words("scale_rule", "Magnitude that becomes 127: the largest, |mean| + 3 sigma, or the 99.9th percentile."),
    words("granularity", "Scales of the weights: one per tensor, or one per output channel."),
    fraction("test_accuracy_low", "Lower end of the interval of test_accuracy.", format_accuracy),
    fraction("test_accuracy_high", "Upper end of the interval of test_accuracy.", format_accuracy),
    fraction(
        "accuracy_change", "Accuracy minus fp32 of the same seed, median over seeds.", format_points, is_explained=True
    ),
    fraction("accuracy_change_low", "Lower end of the interval of accuracy_change.", format_points),
    fraction("accuracy_change_high", "Upper end of the interval of accuracy_change.", format_points),
    fraction("mean_accuracy_change", "Mean over seeds of accuracy minus fp32.", format_points),
    fraction(
        "agreement", "Share of test images that get the same class as in fp32.", format_accuracy, is_explained=True
    ),
    fraction("tie_share", "Share of test images whose highest score several classes have."),
    Column("network_bytes", "Bytes of weights, biases and scales.", "B", format_count, is_explained=True),
    words("layer", "Layer of the network."),
    words("tensor", "Values that the histogram counts: weights, or fp32 outputs before or after ReLU."),
    Column("low", "Smallest value, where the first bin begins."),
    Column("high", "Largest value, where the last bin ends."),
    Column("mean", "Mean of the values."),
    Column("sigma", "Standard deviation of the values."),
    Column("three_sigma_low", "Mean minus three sigma."),
    Column("three_sigma_high", "Mean plus three sigma."),
    Column("counts", "Number of values in each bin of equal width."),
    # cost
    words("ending", "How the attempts ended; ok attempts are split into timed windows (ok_timed) and the rest."),
    Column("gpu_hours", "Hours from launch to record, times the GPUs allocated.", "h", format_amount),
    Column("process_hours", "Hours from launch to record, times the processes.", "h", format_amount),
    fraction("allocated_share", "Share of all hours allocated on the device."),
)

SPECIAL_AXES = (
    words("strategy", "Parallel strategy.", NOT_STATED),
    words("precision", "Number format of the computation.", NOT_STATED),
    words("input", "Source of the training images.", NOT_STATED),
    words("dataset", "Data set.", NOT_STATED),
    words("model", "Model.", NOT_STATED),
    words("remedies", "Remedies for training with large batches.", NOT_STATED),
    Column("learning_rate", "Learning rate; in the tables of Q4 the largest of the run, after scaling."),
    Column("max_steps", "Steps after which an epoch is cut off.", absent="whole epoch"),
    Column("memory_limit_gib", "Limit of the memory of each process.", "GiB", two_decimals, absent="none"),
    Column("bucket_cap_mb", "Largest size of a bucket of gradients.", "MiB", absent="default"),
)

COLUMNS = {column.key: column for column in FIGURE_COLUMNS}
"""All columns except the axes, by key."""

AXIS_COLUMNS = {axis: Column(axis, "", absent=NOT_STATED) for axis in AXES} | {axis.key: axis for axis in SPECIAL_AXES}
"""Every axis of the grid as a column; `Spec` documents their meanings."""

ALL_COLUMNS = AXIS_COLUMNS | COLUMNS
