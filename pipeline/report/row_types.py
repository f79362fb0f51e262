"""The rows of each table: one class for a table, with its figures as fields and the axes as a mapping.

A field's name is the key of its column in JSON and CSV. The fields stand in the order of the columns. The first field
with a key states the unit and the meaning of that column; `columns` collects them. A figure that cannot be computed is
None, and a note of the row says why.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from pipeline.analysis.intervals import CONFIDENCE, NOMINAL, OF_FEWEST_VALUES, IntervalBasis, min_values
from pipeline.analysis.loader import MAX_DATA_SHARE
from pipeline.analysis.notes import Note, make_note
from pipeline.analysis.pooling import PooledPoint
from pipeline.analysis.scaling import Scaling
from pipeline.report.note_texts import render_notes

# figures that a published report may leave out
STATED_FIGURES = (
    *("epoch_time_s", "compute_time_s", "data_time_s", "peak_memory_gib", "training_time_s", "learning_rate"),
    *("throughput_samples_per_s", "steps_per_epoch", "ring_bytes_per_epoch", "num_updates"),
)


class Unit(str):
    """The unit of a column. A fraction has the unit 1."""


Seconds = Annotated[float | None, Unit("s")]
Microseconds = Annotated[float | None, Unit("us")]
Ratio = Annotated[float | None, Unit("1")]
Bytes = Annotated[float | None, Unit("B")]
Bandwidth = Annotated[float | None, Unit("GB/s")]
Joules = Annotated[float | None, Unit("J")]
Gibibytes = Annotated[float | None, Unit("GiB")]
Hours = Annotated[float | None, Unit("h")]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The axes of a row, the number of runs that it pools, and its notes."""

    axes: dict[str, Any]
    n: Annotated[int, "Number of runs that the row pools."] = 0
    notes: tuple[Note, ...] = ()

    def __getitem__(self, key: str) -> Any:
        """Return the value of a column or an axis."""
        if key == "note":
            return render_notes(self.notes)
        return self.axes[key] if key in self.axes else getattr(self, key)

    def has_note(self, kind: str) -> bool:
        """True if a note of the row, or one about its baseline, is of this kind."""
        return any(kind in (note.kind, inner_kind(note)) for note in self.notes)

    def flat(self) -> dict[str, Any]:
        """Return the row of JSON and CSV: axes, figures, n, note."""
        figures = {key: getattr(self, key) for key in figure_keys(type(self))}
        return {**self.axes, **figures, "n": self.n, "note": self["note"]}


def inner_kind(note: Note) -> str:
    """Return the kind of the note about another point that this note holds; "" if it holds none."""
    return note.values["note"].kind if note.kind == "of_baseline" else ""


def interval_keys(key: str) -> tuple[str, str]:
    """Return the keys of the ends of a figure's interval: epoch_time_low_s and epoch_time_high_s for epoch_time_s."""
    stem, unit = (key.removesuffix("_s"), "_s") if key.endswith("_s") else (key, "")
    return f"{stem}_low{unit}", f"{stem}_high{unit}"


def figure_keys(row_class: type[Row]) -> tuple[str, ...]:
    """Return the keys of a table's figures, in the order of JSON."""
    return row_class.__struct_fields__[len(Row.__struct_fields__) :]


class PointRow(Row, frozen=True, kw_only=True):
    """A row of one pooled point."""

    global_batch_size: Annotated[int, "Samples per step over all GPUs."]
    status: Annotated[str, "The status of the point: ok, oom, failed, rejected or missing."]


SomeRow = TypeVar("SomeRow", bound=PointRow)


def make_row(row_class: type[SomeRow], point: PooledPoint, notes: Sequence[Note] = (), **figures: Any) -> SomeRow:
    """Return the row of a point: its axes, status and notes, and the given figures."""
    notes = [*point.notes, *notes]
    absent = [key for key in STATED_FIGURES if key in figures and figures[key] is None]
    if absent and point.ok_records and not any(record.measured for record in point.ok_records):
        notes.append(make_note("not_stated", figures=absent))
    values = {axis: figures.get(axis) or getattr(point.spec, axis) for axis in point.axes}  # learning_rate: its peak
    values["gpu"] = point.gpu or None
    common: dict[str, Any] = {
        "axes": {axis: list(value) if isinstance(value, tuple) else value for axis, value in values.items()},
        "global_batch_size": point.spec.global_batch_size,
        "status": point.status,
        "n": len(point.ok_records),
        "notes": tuple(notes),
    }
    return row_class(**(common | figures))


class TimedRow(PointRow, frozen=True, kw_only=True):
    """A row with the epoch time of a point and its interval."""

    epoch_time_s: Annotated[Seconds, "Time of one epoch with data loading, on the slowest rank."] = None
    compute_time_s: Annotated[
        Seconds, "Epoch time without data loading; under DDP it holds the wait for the slowest rank's batch."
    ] = None
    data_time_s: Annotated[Seconds, "Part of the epoch time that is data loading."] = None
    throughput_samples_per_s: Annotated[float | None, Unit("1/s"), "Training samples per second."] = None
    peak_memory_gib: Annotated[Gibibytes, "Fullest GPU, or largest process on the CPU."] = None
    epoch_time_low_s: Seconds = None
    epoch_time_high_s: Seconds = None
    noise_floor: Annotated[Ratio, "Half the width of the interval over the median."] = None
    interval_over: Annotated[
        IntervalBasis | None,
        f"What the median's interval from low to high (order statistics, {NOMINAL}, for {min_values()} values "
        f"{100 * OF_FEWEST_VALUES:.1f} %) is computed from: windows tell how well it is known within one run, repeats "
        "between runs (new processes).",
    ] = None
    num_windows: Annotated[int, "Number of windows; each time is the median over them."] = 0
    run_spread_s: Annotated[Seconds, "Largest less smallest median of the n runs, each in new processes."] = None
    num_workers_total: Annotated[int | None, "Loader workers of all ranks together."] = None
    data_share: Annotated[
        Ratio,
        "data_time_s/epoch_time_s: in this share of the epoch the GPU waits for data (input: gpu: prepares it).",
    ] = None
    batch_wait_s: Annotated[
        Seconds,
        "Lower bound of the part of compute_time_s in which a rank waits for another rank's batch: the longest data "
        "time of a rank less data_time_s.",
    ] = None
    is_loader_bound: Annotated[
        bool | None,
        f"True if a GPU waits for the loader in more than {100 * MAX_DATA_SHARE:g} % of the epoch (data_time_s and "
        "batch_wait_s together).",
    ] = None


class Q1Row(TimedRow, frozen=True, kw_only=True):
    """Q1: epoch time against batch size, on one GPU."""

    energy_j: Annotated[Joules, "Energy of all GPUs used, without the host."] = None
    energy_per_sample_j: Annotated[Joules, "Energy per training sample."] = None
    sm_clock_mhz: Annotated[float | None, Unit("MHz"), "Clock of the slowest GPU."] = None
    host_cpu_share: Annotated[Ratio, "Busy share of the CPUs of the busiest node, cut to 0 to 1."] = None


class Q2Row(TimedRow, frozen=True, kw_only=True):
    """Q2: speed-up against one GPU."""

    scaling: Annotated[Scaling, "The batch that stays fixed as GPUs are added: weak (per GPU) or strong (global)."]
    speedup: Annotated[
        Ratio,
        "T(1)/T(N) for the same samples; its interval holds the true ratio with at least "
        f"{100 * (2 * CONFIDENCE - 1):g} %, that of {min_values()} values with {100 * (2 * OF_FEWEST_VALUES - 1):g} %.",
    ] = None
    speedup_low: Ratio = None
    speedup_high: Ratio = None
    parallel_efficiency: Annotated[Ratio, "speedup/N."] = None
    parallel_efficiency_low: Ratio = None
    parallel_efficiency_high: Ratio = None
    serial_fraction_karp_flatt: Annotated[Ratio, "(1/S - 1/N)/(1 - 1/N) for N > 1."] = None
    baseline: Annotated[str | None, "Strategy of the one-GPU point that the row is compared with."] = None
    baseline_batch_size_per_gpu: Annotated[int | None, "Batch size per GPU of the baseline point."] = None
    energy_j: Joules = None
    energy_per_sample_j: Joules = None
    sm_clock_mhz: float | None = None


class Q3Row(PointRow, frozen=True, kw_only=True):
    """Q3: computation against communication, by subtraction. Bytes and times are of one epoch."""

    epoch_time_s: Seconds = None
    compute_time_subtraction_s: Annotated[Seconds, "T(1)/N."] = None
    comm_time_subtraction_s: Annotated[Seconds, "T(N) - T(1)/N."] = None
    comm_time_subtraction_low_s: Seconds = None
    comm_time_subtraction_high_s: Seconds = None
    steps_per_epoch: Annotated[int | None, "Steps of one epoch."] = None
    ring_bytes_per_epoch: Annotated[int | None, Unit("B"), "steps x 2(N-1)/N x gradient bytes."] = None
    bandwidth_subtraction_gb_s: Annotated[Bandwidth, "ring_bytes_per_epoch over comm_time_subtraction_s."] = None
    exposed_comm_time_s: Seconds = None
    exposed_comm_time_low_s: Seconds = None
    exposed_comm_time_high_s: Seconds = None
    baseline: str | None = None


class Q4Row(PointRow, frozen=True, kw_only=True):
    """Q4: loss and accuracy after one epoch."""

    remedies: list[str]
    epoch: Annotated[int | None, "The epoch, counted from 1."] = None
    num_updates: Annotated[int | None, "Updates of the weights since the start."] = None
    training_time_s: Annotated[Seconds, "Sum of epoch_time_s since the start, without evaluation."] = None
    learning_rate: float | None = None
    loss: Annotated[float | None, "Mean loss of the training samples, measured during training."] = None
    accuracy: Annotated[Ratio, "Accuracy on the training samples, measured during training."] = None
    test_loss: Annotated[float | None, "Loss over the test set."] = None
    test_accuracy: Annotated[Ratio, "Accuracy over the test set."] = None
    diverged_at_update: Annotated[int | None, "First update whose loss was not finite."] = None


NEVER_REACHED = "never reached"


class TimeToTargetRow(PointRow, frozen=True, kw_only=True):
    """Q4: what a global batch with its remedies needs to reach a test accuracy."""

    remedies: list[str]
    epochs: int
    is_baseline: Annotated[bool, "The target and the efficiencies of a study come from this row."] = False
    learning_rate: float | None = None
    target_accuracy: Annotated[Ratio, "Test accuracy to reach."] = None
    final_test_accuracy: Annotated[Ratio, "Test accuracy after the last epoch."] = None
    final_test_accuracy_low: Ratio = None
    final_test_accuracy_high: Ratio = None
    reached: Annotated[str | None, "Number of seeds that reached the target, or never reached."] = None
    epochs_to_target: Annotated[float | None, "First epoch whose test accuracy is the target or more."] = None
    epochs_to_target_low: float | None = None
    epochs_to_target_high: float | None = None
    updates_to_target: Annotated[float | None, "Updates up to the end of that epoch."] = None
    updates_to_target_low: float | None = None
    updates_to_target_high: float | None = None
    time_to_target_s: Annotated[Seconds, "Training time up to the end of that epoch, without evaluation."] = None
    num_timed: Annotated[int, "Number of seeds that the time is of: those on the GPU model of the baseline."] = 0
    time_to_target_low_s: Seconds = None
    time_to_target_high_s: Seconds = None
    gpu_time_to_target_s: Annotated[Seconds, "time_to_target_s x GPUs."] = None
    throughput_efficiency: Annotated[Ratio, "Samples per second and GPU over the baseline's."] = None
    statistical_efficiency: Annotated[Ratio, "Baseline's epochs_to_target over the row's."] = None
    target_efficiency: Annotated[Ratio, "throughput_efficiency x statistical_efficiency."] = None
    soonest: Annotated[str | None, "The row reaches the target first, counted in these."] = None


class OomRow(PointRow, frozen=True, kw_only=True):
    """A point that ran out of memory."""

    reason: Annotated[str, "Why the point ran out of memory."]
    max_steps: int | None = None


class CommunicationRow(PointRow, frozen=True, kw_only=True):
    """Q3.1: the time of one step with and without its collectives."""

    plain_step_time_s: Annotated[Seconds, "Model without DDP on one GPU, with one GPU's share of the batch."] = None
    ddp_one_step_time_s: Annotated[Seconds, "DDP on one GPU."] = None
    no_sync_step_time_s: Annotated[Seconds, "DDP on N GPUs without any reduction (no_sync)."] = None
    no_op_hook_step_time_s: Annotated[Seconds, "DDP with a no-op hook: hooks and bucket copies alone."] = None
    step_time_s: Annotated[Seconds, "One training step, on the slowest rank."] = None
    step_time_low_s: Seconds = None
    step_time_high_s: Seconds = None
    noise_floor: Ratio = None
    interval_over: IntervalBasis | None = None
    exposed_comm_time_s: Annotated[
        Seconds,
        "DDP minus no-op hook, gradients alone (both sides broadcast buffers); the interval is given by low and high.",
    ] = None
    exposed_comm_time_low_s: Seconds = None
    exposed_comm_time_high_s: Seconds = None
    collectives_time_s: Annotated[
        Seconds,
        "DDP minus DDP whose collectives return at once: the time that all collectives add to the step, with the "
        "broadcast of buffers and the wait for the slowest rank.",
    ] = None
    collectives_time_low_s: Seconds = None
    collectives_time_high_s: Seconds = None
    ddp_overhead_time_s: Annotated[Seconds, "No-op hook minus no_sync, which broadcasts no buffers."] = None
    ddp_overhead_time_low_s: Seconds = None
    ddp_overhead_time_high_s: Seconds = None
    noise_floor_time_s: Annotated[Seconds, "Larger absolute end of the interval of DDP minus an equal DDP."] = None
    comm_time_s: Annotated[Seconds, "Shortest time of each all-reduce over ranks, summed over buckets."] = None
    hidden_share: Annotated[Ratio, "1 - exposed/comm; not stated where exposed is not larger than the noise."] = None
    hidden_share_low: Annotated[
        Ratio,
        "Lower end of the interval of hidden_share, from that of exposed_comm_time_s; both ends are cut to 0 to 1.",
    ] = None
    hidden_share_high: Ratio = None
    collective_launch_time_s: Annotated[Seconds, "exposed - comm where that is above 0."] = None
    traced_exposed_comm_time_s: Annotated[
        Seconds,
        "From the profile, on the rank with the smallest sum: all-reduce time outside kernels, also in gaps between "
        "them, plus slowed_compute_time_s where it is known; notes say where the trace is too long or too short.",
    ] = None
    slowed_compute_time_s: Annotated[Seconds, "DDP's kernel time minus the no-op hook's (profiled twice)."] = None
    buffer_comm_time_s: Annotated[Seconds, "Time of the collectives for buffers and batch-norm statistics."] = None
    straggler_wait_time_s: Annotated[
        Seconds,
        "Mean all-reduce time of the ranks minus the shortest, summed over buckets: one late rank may count in each.",
    ] = None
    num_windows: int = 0
    run_spread_s: Seconds = None
    exposed_comm_time_run_spread_s: Annotated[Seconds, "run_spread_s of exposed_comm_time_s."] = None


class BandwidthRow(PointRow, frozen=True, kw_only=True):
    """Q3.2: one bucket of gradients."""

    bucket: Annotated[int, "Number of the bucket, in the order of the collectives."]
    num_bytes: Annotated[int, Unit("B"), "Bytes of one all-reduce (S)."]
    comm_time_s: Seconds = None
    busbw_gb_s: Annotated[Bandwidth, "S/t x 2(N-1)/N (nccl-tests)."] = None
    peak_busbw_gb_s: Annotated[Bandwidth, "busbw_gb_s of an isolated all-reduce of that size in the same job."] = None
    link_share: Annotated[Ratio, "busbw_gb_s over peak_busbw_gb_s."] = None


class SweepRow(Row, frozen=True, kw_only=True):
    """Q3.2: isolated all-reduces of one size."""

    num_bytes: int
    status: str
    time_s: Annotated[Seconds, "Time of one call, on the slowest rank."] = None
    algbw_gb_s: Annotated[Bandwidth, "S/t."] = None
    busbw_gb_s: Bandwidth = None
    num_windows: int = 0


class TransferRow(PointRow, frozen=True, kw_only=True):
    """Q3: calls and bytes of one step, by kind."""

    gradients_calls_per_step: Annotated[float | None, "Calls per step that send gradients."] = None
    gradients_bytes_per_step: Annotated[Bytes, "Bytes per step of gradients."] = None
    buffers_calls_per_step: Annotated[float | None, "Calls per step that send buffers."] = None
    buffers_bytes_per_step: Annotated[Bytes, "Bytes per step of buffers."] = None
    batchnorm_statistics_calls_per_step: Annotated[
        float | None, "Calls per step that send the statistics of synchronized batch norm."
    ] = None
    batchnorm_statistics_bytes_per_step: Annotated[
        Bytes, "Bytes per step of the statistics of synchronized batch norm."
    ] = None
    parameters_calls_per_step: Annotated[float | None, "Calls per step that send parameters."] = None
    parameters_bytes_per_step: Annotated[Bytes, "Bytes per step of parameters."] = None
    inputs_calls_per_step: Annotated[float | None, "Calls per step that send inputs."] = None
    inputs_bytes_per_step: Annotated[Bytes, "Bytes per step of inputs."] = None
    outputs_calls_per_step: Annotated[float | None, "Calls per step that send outputs."] = None
    outputs_bytes_per_step: Annotated[Bytes, "Bytes per step of outputs."] = None
    gradients_bytes_formula: Annotated[Bytes, "Bytes of the model's gradients (x N-1 under DataParallel)."] = None
    step_time_s: Seconds = None
    epoch_time_s: Seconds = None
    test_accuracy: Ratio = None


class SplitRow(PointRow, frozen=True, kw_only=True):
    """Q3: the parts of DataParallel's step."""

    plain_step_time_s: Seconds = None
    step_time_s: Seconds = None
    step_time_low_s: Seconds = None
    step_time_high_s: Seconds = None
    noise_floor: Ratio = None
    interval_over: IntervalBasis | None = None
    run_spread_s: Seconds = None
    scatter_time_s: Annotated[Seconds, "Time to distribute the inputs to the GPUs."] = None
    replicate_time_s: Annotated[Seconds, "Time to copy the module to every GPU."] = None
    parallel_forward_time_s: Annotated[Seconds, "Time of the forward pass on all GPUs."] = None
    gather_time_s: Annotated[Seconds, "Time to collect the outputs."] = None
    backward_time_s: Annotated[Seconds, "Backward pass and reduction onto the first GPU."] = None
    optimizer_time_s: Annotated[Seconds, "Time to update the weights."] = None
    parts_time_s: Annotated[Seconds, "Sum of the parts."] = None


class PredictionRow(PointRow, frozen=True, kw_only=True):
    """The step time on another number of GPUs, as the ring model predicts it."""

    from_num_gpus: Annotated[int, "Number of GPUs whose measurements the prediction uses."]
    latency_us: Annotated[Microseconds, "Latency of one hop, for messages of the size of the buckets."] = None
    link_gb_s: Annotated[Bandwidth, "Bandwidth of one link."] = None
    fit_worst_error: Annotated[Ratio, "Largest relative error of the fit, over the sizes that it is fitted to."] = None
    predicted_step_time_s: Annotated[
        Seconds, "Step time if compute hides none of the extra all-reduce time; no upper bound."
    ] = None
    no_change_step_time_s: Annotated[Seconds, "Step time as measured on from_num_gpus: nothing is added."] = None
    all_hidden_step_time_s: Annotated[
        Seconds, "Step time if compute hides the extra all-reduce time; no lower bound."
    ] = None
    predicted_parallel_efficiency: Annotated[Ratio, "Time on one GPU alone over predicted_step_time_s."] = None
    all_hidden_parallel_efficiency: Annotated[Ratio, "Time on one GPU alone over all_hidden_step_time_s."] = None
    measured_step_time_s: Annotated[Seconds, "Step time that was measured on that number of GPUs."] = None
    prediction_error: Annotated[Ratio, "Predicted value divided by the measured value, minus 1."] = None
    no_change_error: Annotated[Ratio, "no_change_step_time_s divided by measured_step_time_s, minus 1."] = None


class MemoryRow(PointRow, frozen=True, kw_only=True):
    """The memory boundary of one point."""

    largest_batch_size_per_gpu: Annotated[int | None, "Largest batch size per GPU that fits."] = None
    smallest_failing_batch_size_per_gpu: Annotated[
        int | None, "Smallest batch size per GPU that failed, for any reason."
    ] = None
    peak_memory_gib: Gibibytes = None
    head_room_gib: Annotated[Gibibytes, "Fullest GPU: usable memory minus peak."] = None
    predicted_batch_size_per_gpu: Annotated[int | None, "First prediction, from a line through two trials."] = None
    prediction_error: Ratio = None
    num_trials: Annotated[int | None, "Trials of the search."] = None
    num_ooms: Annotated[int | None, "Trials that ran out of memory; the note lists other failures."] = None
    search_time_s: Annotated[Seconds, "Time of all trials, including process start."] = None


class Int8Row(PointRow, frozen=True, kw_only=True):
    """int8: the test accuracy of one stage and scale, over seeds."""

    stage: Annotated[
        str | None, "Stage: fp32, then int8 weights, then int8 activations too, then int32 biases too."
    ] = None
    scale_rule: Annotated[
        str | None, "Magnitude that becomes 127: the largest, |mean| + 3 sigma, or the 99.9th percentile."
    ] = None
    granularity: Annotated[str | None, "Scales of the weights: one per tensor, or one per output channel."] = None
    test_accuracy: Ratio = None
    test_accuracy_low: Annotated[Ratio, "Lower end of the interval of test_accuracy."] = None
    test_accuracy_high: Annotated[Ratio, "Upper end of the interval of test_accuracy."] = None
    accuracy_change: Annotated[Ratio, "Accuracy minus fp32 of the same seed, median over seeds."] = None
    accuracy_change_low: Ratio = None
    accuracy_change_high: Ratio = None
    mean_accuracy_change: Annotated[Ratio, "Mean over seeds of accuracy minus fp32."] = None
    agreement: Annotated[Ratio, "Share of test images that get the same class as in fp32."] = None
    tie_share: Annotated[Ratio, "Share of test images whose highest score several classes have."] = None
    network_bytes: Annotated[int | None, Unit("B"), "Bytes of weights, biases and scales."] = None


class Int8HistogramRow(PointRow, frozen=True, kw_only=True):
    """int8: the histogram of a layer's weights, or of its outputs before or after ReLU, of one seed."""

    seed: int
    layer: Annotated[str, "Layer of the network."]
    tensor: Annotated[str, "Values that the histogram counts: weights, or fp32 outputs before or after ReLU."]
    low: Annotated[float, "Smallest value, where the first bin begins."]
    high: Annotated[float, "Largest value, where the last bin ends."]
    mean: Annotated[float, "Mean of the values."]
    sigma: Annotated[float, "Standard deviation of the values."]
    three_sigma_low: Annotated[float, "Mean minus three sigma."]
    three_sigma_high: Annotated[float, "Mean plus three sigma."]
    counts: Annotated[list[int], "Number of values in each bin of equal width."]


class CostRow(Row, frozen=True, kw_only=True):
    """Cost: the hours of the attempts that ended in one way."""

    ending: Annotated[str, "How the attempts ended; ok attempts are split into timed windows (ok_timed) and the rest."]
    gpu_hours: Annotated[Hours, "Hours from launch to record, times the GPUs allocated."] = None
    process_hours: Annotated[Hours, "Hours from launch to record, times the processes."] = None
    allocated_share: Annotated[Ratio, "Share of all hours allocated on the device."] = None
