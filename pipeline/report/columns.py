"""Columns: the key, unit, format and meaning of each, declared once for JSON, CSV and the report.

A row class in `row_types` has a field for each column. `table_definitions` chooses the columns of a table for people.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from pipeline.analysis.intervals import CONFIDENCE
from pipeline.experiment.spec import AXES

NOT_STATED = "not stated"
ABSENT = "-"
LARGE_LOSS = 1e5  # losses from this value on are shown with an exponent

Format = Callable[[float], str]
Shown = Literal["if_known", "always", "if_not_zero"]


def format_general(value: float) -> str:
    """Return the number with up to six significant digits."""
    return f"{value:.6g}"


def format_ratio(value: float) -> str:
    """Return the number with three decimals."""
    return f"{value:.3f}"


def format_hundredths(value: float) -> str:
    """Return the number with two decimals."""
    return f"{value:.2f}"


def format_percent(value: float) -> str:
    """Return a fraction as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def format_accuracy(value: float) -> str:
    """Return a fraction as a percentage with two decimals."""
    return f"{100 * value:.2f} %"


def format_points(value: float) -> str:
    """Return a difference of fractions in percentage points, with its sign and two decimals."""
    return f"{100 * value:+.2f} points"


def format_error(value: float) -> str:
    """Return a fraction as a percentage with its sign and one decimal."""
    return f"{100 * value:+.1f} %"


def format_half_width(value: float) -> str:
    """Return a fraction as a percentage after the sign ±."""
    return f"±{100 * value:.1f} %"


def format_amount(value: float) -> str:
    """Return three significant digits below 100, else a whole number."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def format_count(value: float) -> str:
    """Return up to six significant digits below 1000, else a whole number."""
    return f"{value:,.6g}" if value < 1000 else f"{value:,.0f}"


def format_seconds(value: float) -> str:
    """Return seconds, or microseconds below 0.1 s."""
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{1e6 * value:,.1f} us"


def format_loss(value: float) -> str:
    """Return a loss with four decimals, or with an exponent from LARGE_LOSS on."""
    return f"{value:.4f}" if abs(value) < LARGE_LOSS else f"{value:.1e}"


class Column(NamedTuple):
    """One column: its key in JSON and CSV, and its heading, format and meaning in the report."""

    key: str
    meaning: str
    unit: str = ""
    format: Format = format_general
    absent: str = ABSENT  # the text of the cell if the value is None
    alignment: Literal["left", "right"] = "right"
    shown: Shown = "if_known"  # in the report; "always": even if no row has a value
    is_explained: bool = False  # the report's legend includes the meaning
    has_status: bool = False  # if a point has no value, its cell shows its status
    other_heading: str = ""

    @property
    def heading(self) -> str:
        """The heading in the report."""
        return self.other_heading or self.key


def seconds(key: str, meaning: str, shown: Shown = "if_known", explained: bool = False, status: bool = False) -> Column:
    """Return a column of times."""
    return Column(key, meaning, "s", format_seconds, shown=shown, is_explained=explained, has_status=status)


def fraction(key: str, meaning: str, form: Format = format_percent, explained: bool = False) -> Column:
    """Return a column of fractions: 1 is 100 %."""
    return Column(key, meaning, "1", form, is_explained=explained)


def number(key: str, meaning: str, unit: str = "", form: Format = format_general, explained: bool = False) -> Column:
    """Return a column of numbers in `unit`, or of counts if `unit` is empty."""
    return Column(key, meaning, unit, form, is_explained=explained)


def words(key: str, meaning: str, absent: str = ABSENT) -> Column:
    """Return a column of text."""
    return Column(key, meaning, absent=absent, alignment="left")


def transfers(kind: str, what: str, shown: Shown = "if_known", has_status: bool = False) -> tuple[Column, Column]:
    """Return two columns for one kind of data that a rank sends: calls per step and bytes per step."""
    calls = Column(f"{kind}_calls_per_step", f"Calls per step that send {what}.", "", format_count, shown=shown)
    num_bytes = Column(f"{kind}_bytes_per_step", f"Bytes per step of {what}.", "B", format_count, shown=shown)
    return calls._replace(has_status=has_status), num_bytes


GENERAL_COLUMNS = (
    number("global_batch_size", "Samples per step over all GPUs."),
    words("status", "The status of the point: ok, oom, failed, rejected or missing."),
    number("n", "Number of runs that the row pools."),
    words("note", "Facts that a reader needs to judge the row.", absent=""),
    number("num_windows", "Number of windows; each time is the median over them."),
    Column(
        "noise_floor",
        f"Relative half-width of the median's {100 * CONFIDENCE:.0f} % interval (order statistics): how well it is "
        "known within one run (over windows) or between runs (over repeats, new processes).",
        "1",
        format_half_width,
        is_explained=True,
        other_heading="interval",
    ),
    words("interval_over", "The values that the interval is computed from: windows or repeats."),
    words("reason", "Why the point ran out of memory."),
)

EPOCH_COLUMNS = (
    seconds("epoch_time_s", "Time of one epoch with data loading, on the slowest rank.", "always", status=True),
    seconds("epoch_time_low_s", "Lower end of the interval of epoch_time_s."),
    seconds("epoch_time_high_s", "Upper end of the interval of epoch_time_s."),
    seconds("compute_time_s", "Epoch time without data loading.", "always", explained=True),
    seconds("data_time_s", "Part of the epoch time that is data loading.", "always"),
    number("throughput_samples_per_s", "Training samples per second.", "1/s", lambda value: f"{value:,.0f}"),
    number("peak_memory_gib", "Of the fullest GPU; on the CPU: largest process.", "GiB", format_hundredths, True),
    number("energy_j", "Energy of all GPUs used, without the host.", "J", format_amount, explained=True),
    number("energy_per_sample_j", "Energy per training sample.", "J", format_amount),
    number("sm_clock_mhz", "Clock of the slowest GPU.", "MHz", lambda value: f"{value:.0f}", explained=True),
    fraction("host_cpu_share", "Busy share of the CPUs of the busiest node."),
)

SCALING_COLUMNS = (
    words("scaling", "The batch that stays fixed as GPUs are added: weak (per GPU) or strong (global)."),
    number("speedup", "T(1)/T(N) for the same samples.", "1", format_ratio, explained=True),
    number("speedup_low", "Lower end of the interval of speedup.", "1", format_ratio),
    number("speedup_high", "Upper end of the interval of speedup.", "1", format_ratio),
    fraction("parallel_efficiency", "speedup/N.", explained=True),
    fraction("parallel_efficiency_low", "Lower end of the interval of parallel_efficiency."),
    fraction("parallel_efficiency_high", "Upper end of the interval of parallel_efficiency."),
    fraction("serial_fraction_karp_flatt", "(1/S - 1/N)/(1 - 1/N) for N > 1.", format_ratio, explained=True),
    words("baseline", "Strategy of the one-GPU point that the row is compared with."),
    number("baseline_batch_size_per_gpu", "Batch size per GPU of the baseline point."),
)

SUBTRACTION_COLUMNS = (
    seconds("compute_time_subtraction_s", "T(1)/N.", "always", explained=True),
    seconds("comm_time_subtraction_s", "T(N) - T(1)/N.", "always", explained=True),
    number("steps_per_epoch", "Steps of one epoch."),
    number("ring_bytes_per_epoch", "steps x 2(N-1)/N x gradient bytes.", "B", format_count, explained=True),
    number("bandwidth_subtraction_gb_s", "ring_bytes_per_epoch over comm_time_subtraction_s.", "GB/s", "{:.3g}".format),
)

LEARNING_COLUMNS = (
    Column("epoch", "The epoch, counted from 1.", has_status=True),
    number("num_updates", "Updates of the weights since the start."),
    number("loss", "Mean loss of the training samples, measured during training.", "", format_loss),
    fraction("accuracy", "Accuracy on the training samples, measured during training.", format_accuracy),
    number("test_loss", "Loss over the test set.", "", format_loss),
    fraction("test_accuracy", "Accuracy over the test set.", format_accuracy),
    number("diverged_at_update", "First update whose loss was not finite."),
)

STEP_COLUMNS = (
    seconds("plain_step_time_s", "Model without DDP on one GPU, with one GPU's share of the batch.", status=True),
    seconds("ddp_one_step_time_s", "DDP on one GPU."),
    seconds("no_sync_step_time_s", "DDP on N GPUs without any reduction (no_sync).", explained=True),
    seconds("no_op_hook_step_time_s", "DDP with a no-op hook: hooks and bucket copies alone.", explained=True),
    seconds("step_time_s", "One training step, on the slowest rank.", status=True),
    seconds("exposed_comm_time_s", "DDP minus no-op hook; the interval is given by low and high.", explained=True),
    seconds("exposed_comm_time_low_s", "Lower end of the interval of exposed_comm_time_s."),
    seconds("exposed_comm_time_high_s", "Upper end of the interval of exposed_comm_time_s."),
    seconds("noise_floor_time_s", "Larger absolute end of the interval of DDP minus DDP again.", explained=True),
    seconds("comm_time_s", "Shortest time of each all-reduce over ranks, summed over buckets.", explained=True),
    fraction("hidden_share", "1 - exposed/comm.", explained=True),
    seconds("collective_launch_time_s", "exposed - comm where that is above 0.", explained=True),
    seconds("straggler_wait_time_s", "Mean all-reduce time of the ranks minus the shortest.", explained=True),
    seconds("buffer_comm_time_s", "Time of the collectives for buffers and batch-norm statistics."),
    seconds(
        "traced_exposed_comm_time_s",
        "From the profile: all-reduce time outside kernels and outside gaps of up to 5 us between two, plus "
        "slowed_compute_time_s, on the rank with the smallest sum; without the latter, gaps count as exposed.",
        explained=True,
    ),
    seconds("slowed_compute_time_s", "DDP's kernel time minus the no-op hook's (profiled twice).", explained=True),
    seconds("ddp_overhead_time_s", "No-op hook less no_sync; the latter broadcasts no buffers.", explained=True),
    seconds("ddp_overhead_time_low_s", "Lower end of the interval of ddp_overhead_time_s."),
    seconds("ddp_overhead_time_high_s", "Upper end of the interval of ddp_overhead_time_s."),
)

LINK_COLUMNS = (
    number("bucket", "Number of the bucket, in the order of the collectives."),
    number("num_bytes", "Bytes of one all-reduce (S).", "B"),
    seconds("time_s", "Time of one call, on the slowest rank.", status=True),
    number("algbw_gb_s", "S/t.", "GB/s", "{:.3g}".format, explained=True),
    number("busbw_gb_s", "S/t x 2(N-1)/N (nccl-tests).", "GB/s", "{:.3g}".format, explained=True),
    number(
        "peak_busbw_gb_s", "busbw_gb_s of an isolated all-reduce of that size in the same job.", "GB/s", "{:.3g}".format
    )._replace(is_explained=True),
    fraction("link_share", "busbw_gb_s over peak_busbw_gb_s."),
)

TRANSFER_COLUMNS = (
    *transfers("gradients", "gradients", has_status=True),
    number("gradients_bytes_formula", "Bytes of the model's gradients (x N-1 under DataParallel).", "B", format_count),
    *transfers("buffers", "buffers"),
    *transfers("batchnorm_statistics", "the statistics of synchronized batch norm", "if_not_zero"),
    *transfers("parameters", "parameters", "if_not_zero"),
    *transfers("inputs", "inputs", "if_not_zero"),
    *transfers("outputs", "outputs", "if_not_zero"),
)

SPLIT_COLUMNS = (
    seconds("scatter_time_s", "Time to distribute the inputs to the GPUs."),
    seconds("replicate_time_s", "Time to copy the module to every GPU."),
    seconds("parallel_forward_time_s", "Time of the forward pass on all GPUs."),
    seconds("gather_time_s", "Time to collect the outputs."),
    seconds("backward_time_s", "Backward pass and reduction onto the first GPU.", explained=True),
    seconds("optimizer_time_s", "Time to update the weights."),
    seconds("parts_time_s", "Sum of the parts."),
)

PREDICTION_COLUMNS = (
    number("from_num_gpus", "Number of GPUs whose measurements the prediction uses."),
    number("latency_us", "Latency of one hop.", "us", format_hundredths),
    number("link_gb_s", "Bandwidth of one link.", "GB/s", "{:.3g}".format),
    fraction("fit_worst_error", "Largest relative error of the fit, over sizes.", format_error, explained=True),
    seconds("predicted_step_time_low_s", "Step time if compute hides the extra all-reduce time."),
    seconds("predicted_step_time_s", "Step time if compute hides none of the extra all-reduce time."),
    fraction("predicted_parallel_efficiency", "Time on one GPU alone over predicted_step_time_s."),
    fraction("predicted_parallel_efficiency_high", "Time on one GPU alone over predicted_step_time_low_s."),
    seconds("measured_step_time_s", "Step time that was measured on that number of GPUs."),
    fraction("prediction_error", "Predicted value divided by the measured value, minus 1.", format_error),
)

MEMORY_COLUMNS = (
    Column("largest_batch_size_per_gpu", "Largest batch size per GPU that fits.", has_status=True),
    number("smallest_failing_batch_size_per_gpu", "Smallest batch size per GPU that failed, for any reason."),
    number("head_room_gib", "Fullest GPU: usable memory minus peak.", "GiB", format_hundredths, explained=True),
    number("predicted_batch_size_per_gpu", "First prediction, from a line through two trials.", explained=True),
    number("num_trials", "Trials of the search."),
    number("num_ooms", "Trials that ran out of memory; the note lists other failures.", explained=True),
    seconds("search_time_s", "Time of all trials, including process start.", explained=True),
)

INT8_COLUMNS = (
    words("stage", "Stage: fp32, then int8 weights, then int8 activations too, then int32 biases too.")._replace(
        has_status=True
    ),
    words("scale_rule", "Magnitude that becomes 127: the largest, |mean| + 3 sigma, or the 99.9th percentile."),
    words("granularity", "Scales of the weights: one per tensor, or one per output channel."),
    fraction("test_accuracy_low", "Lower end of the interval of test_accuracy.", format_accuracy),
    fraction("test_accuracy_high", "Upper end of the interval of test_accuracy.", format_accuracy),
    fraction("accuracy_change", "Accuracy minus fp32 of the same seed, median over seeds.", format_points, True),
    fraction("accuracy_change_low", "Lower end of the interval of accuracy_change.", format_points),
    fraction("accuracy_change_high", "Upper end of the interval of accuracy_change.", format_points),
    fraction("mean_accuracy_change", "Mean over seeds of accuracy minus fp32.", format_points),
    fraction("agreement", "Share of test images that get the same class as in fp32.", format_accuracy, True),
    fraction("tie_share", "Share of test images whose highest score several classes have."),
    number("network_bytes", "Bytes of weights, biases and scales.", "B", format_count, explained=True),
    words("layer", "Layer of the network."),
    words("tensor", "Values that the histogram counts: weights, or fp32 outputs before or after ReLU."),
    number("low", "Smallest value, where the first bin begins."),
    number("high", "Largest value, where the last bin ends."),
    number("mean", "Mean of the values."),
    number("sigma", "Standard deviation of the values."),
    number("three_sigma_low", "Mean minus three sigma."),
    number("three_sigma_high", "Mean plus three sigma."),
    number("counts", "Number of values in each bin of equal width."),
)

COST_COLUMNS = (
    words("ending", "How the attempts ended; ok attempts are split into timed windows (ok_timed) and the rest."),
    number("gpu_hours", "Hours from launch to record, times the GPUs allocated.", "h", format_amount),
    number("process_hours", "Hours from launch to record, times the processes.", "h", format_amount),
    fraction("allocated_share", "Share of all hours allocated on the device."),
)

SPECIAL_AXES = (
    words("strategy", "Parallel strategy.", NOT_STATED),
    words("precision", "Number format of the computation.", NOT_STATED),
    words("input", "Source of the training images.", NOT_STATED),
    words("dataset", "Data set.", NOT_STATED),
    words("model", "Model.", NOT_STATED),
    words("remedies", "Remedies for training with large batches.", NOT_STATED),
    Column("max_steps", "Steps after which an epoch is cut off.", absent="whole epoch"),
    Column("memory_limit_gib", "Limit of the memory of each process.", "GiB", format_hundredths, absent="none"),
    Column("bucket_cap_mb", "Largest size of a bucket of gradients.", "MiB", absent="default"),
)

COLUMNS = {
    column.key: column
    for columns in (
        *(GENERAL_COLUMNS, EPOCH_COLUMNS, SCALING_COLUMNS, SUBTRACTION_COLUMNS, LEARNING_COLUMNS, STEP_COLUMNS),
        *(LINK_COLUMNS, TRANSFER_COLUMNS, SPLIT_COLUMNS, PREDICTION_COLUMNS, MEMORY_COLUMNS, COST_COLUMNS),
        INT8_COLUMNS,
    )
    for column in columns
}
"""All columns except the axes, by key."""

AXIS_COLUMNS = {axis: Column(axis, "", absent=NOT_STATED) for axis in AXES} | {axis.key: axis for axis in SPECIAL_AXES}
"""Every axis of the grid as a column; `Spec` documents their meanings."""

ALL_COLUMNS = AXIS_COLUMNS | COLUMNS
