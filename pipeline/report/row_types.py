"""The rows of each table: one class for a table, with its figures as fields and the axes as a mapping.

A field's name is the key of its column in JSON and CSV. The fields stand in the order of the columns. A figure that
cannot be computed is None, and a note of the row says why.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from pipeline.analysis.intervals import IntervalBasis
from pipeline.analysis.notes import Note, make_note
from pipeline.analysis.pooling import PooledPoint
from pipeline.analysis.scaling import Scaling
from pipeline.report.note_texts import render_notes

STATED_FIGURES = ("epoch_time_s", "compute_time_s", "data_time_s", "peak_memory_gib")  # that a report may leave out


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The axes of a row, the number of runs that it pools, and its notes."""

    axes: dict[str, Any]
    n: int = 0
    notes: tuple[Note, ...] = ()

    def __getitem__(self, key: str) -> Any:
        """Return the value of a column or an axis."""
        if key == "note":
            return render_notes(self.notes)
        return self.axes[key] if key in self.axes else getattr(self, key)

    def flat(self) -> dict[str, Any]:
        """Return the row of JSON and CSV: axes, figures, n, note."""
        figures = {key: getattr(self, key) for key in figure_keys(type(self))}
        return {**self.axes, **figures, "n": self.n, "note": self["note"]}


def figure_keys(row_class: type[Row]) -> tuple[str, ...]:
    """Return the keys of a table's figures, in the order of JSON."""
    return row_class.__struct_fields__[len(Row.__struct_fields__) :]


class PointRow(Row, frozen=True, kw_only=True):
    """A row of one pooled point."""

    global_batch_size: int
    status: str


SomeRow = TypeVar("SomeRow", bound=PointRow)


def make_row(row_class: type[SomeRow], point: PooledPoint, notes: Sequence[Note] = (), **figures: Any) -> SomeRow:
    """Return the row of a point: its axes, status and notes, and the given figures."""
    notes = [*point.notes, *notes]
    absent = [key for key in STATED_FIGURES if key in figures and figures[key] is None]
    if absent and point.ok_records and not any(record.measured for record in point.ok_records):
        notes.append(make_note("not_stated", figures=absent))
    values = {axis: figures.get(axis) or getattr(point.spec, axis) for axis in point.axes}  # learning_rate: its peak
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

    epoch_time_s: float | None = None
    compute_time_s: float | None = None
    data_time_s: float | None = None
    throughput_samples_per_s: float | None = None
    peak_memory_gib: float | None = None
    epoch_time_low_s: float | None = None
    epoch_time_high_s: float | None = None
    noise_floor: float | None = None
    interval_over: IntervalBasis | None = None
    num_windows: int = 0
    run_spread_s: float | None = None
    num_workers_total: int | None = None
    data_share: float | None = None
    batch_wait_s: float | None = None
    is_loader_bound: bool | None = None


class Q1Row(TimedRow, frozen=True, kw_only=True):
    """Q1: epoch time against batch size, on one GPU."""

    energy_j: float | None = None
    energy_per_sample_j: float | None = None
    sm_clock_mhz: float | None = None
    host_cpu_share: float | None = None


class Q2Row(TimedRow, frozen=True, kw_only=True):
    """Q2: speed-up against one GPU."""

    scaling: Scaling
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    parallel_efficiency: float | None = None
    parallel_efficiency_low: float | None = None
    parallel_efficiency_high: float | None = None
    serial_fraction_karp_flatt: float | None = None
    baseline: str | None = None
    baseline_batch_size_per_gpu: int | None = None
    energy_j: float | None = None
    energy_per_sample_j: float | None = None
    sm_clock_mhz: float | None = None


class Q3Row(PointRow, frozen=True, kw_only=True):
    """Q3: computation against communication, by subtraction. Bytes and times are of one epoch."""

    epoch_time_s: float | None = None
    compute_time_subtraction_s: float | None = None
    comm_time_subtraction_s: float | None = None
    steps_per_epoch: int | None = None
    ring_bytes_per_epoch: int | None = None
    bandwidth_subtraction_gb_s: float | None = None
    exposed_comm_time_s: float | None = None
    exposed_comm_time_low_s: float | None = None
    exposed_comm_time_high_s: float | None = None
    baseline: str | None = None


class Q4Row(PointRow, frozen=True, kw_only=True):
    """Q4: loss and accuracy after one epoch."""

    remedies: list[str]
    epoch: int | None = None
    num_updates: int | None = None
    training_time_s: float | None = None
    learning_rate: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    diverged_at_update: int | None = None


class TimeToTargetRow(PointRow, frozen=True, kw_only=True):
    """Q4: what a global batch with its remedies needs to reach a test accuracy."""

    remedies: list[str]
    epochs: int
    learning_rate: float | None = None
    target_accuracy: float | None = None
    final_test_accuracy: float | None = None
    final_test_accuracy_low: float | None = None
    final_test_accuracy_high: float | None = None
    reached: str | None = None
    epochs_to_target: float | None = None
    epochs_to_target_low: float | None = None
    epochs_to_target_high: float | None = None
    updates_to_target: float | None = None
    updates_to_target_low: float | None = None
    updates_to_target_high: float | None = None
    time_to_target_s: float | None = None
    time_to_target_low_s: float | None = None
    time_to_target_high_s: float | None = None
    gpu_time_to_target_s: float | None = None
    throughput_efficiency: float | None = None
    statistical_efficiency: float | None = None
    target_efficiency: float | None = None
    soonest: str | None = None


class OomRow(PointRow, frozen=True, kw_only=True):
    """A point that ran out of memory."""

    reason: str
    max_steps: int | None = None


class CommunicationRow(PointRow, frozen=True, kw_only=True):
    """Q3.1: the time of one step with and without its collectives."""

    plain_step_time_s: float | None = None
    ddp_one_step_time_s: float | None = None
    no_sync_step_time_s: float | None = None
    no_op_hook_step_time_s: float | None = None
    step_time_s: float | None = None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    noise_floor: float | None = None
    interval_over: IntervalBasis | None = None
    exposed_comm_time_s: float | None = None
    exposed_comm_time_low_s: float | None = None
    exposed_comm_time_high_s: float | None = None
    collectives_time_s: float | None = None
    collectives_time_low_s: float | None = None
    collectives_time_high_s: float | None = None
    ddp_overhead_time_s: float | None = None
    ddp_overhead_time_low_s: float | None = None
    ddp_overhead_time_high_s: float | None = None
    noise_floor_time_s: float | None = None
    comm_time_s: float | None = None
    hidden_share: float | None = None
    hidden_share_low: float | None = None
    hidden_share_high: float | None = None
    collective_launch_time_s: float | None = None
    traced_exposed_comm_time_s: float | None = None
    slowed_compute_time_s: float | None = None
    buffer_comm_time_s: float | None = None
    straggler_wait_time_s: float | None = None
    num_windows: int = 0
    run_spread_s: float | None = None
    exposed_comm_time_run_spread_s: float | None = None


class BandwidthRow(PointRow, frozen=True, kw_only=True):
    """Q3.2: one bucket of gradients."""

    bucket: int
    num_bytes: int
    comm_time_s: float | None = None
    busbw_gb_s: float | None = None
    peak_busbw_gb_s: float | None = None
    link_share: float | None = None


class SweepRow(Row, frozen=True, kw_only=True):
    """Q3.2: isolated all-reduces of one size."""

    num_bytes: int
    status: str
    time_s: float | None = None
    algbw_gb_s: float | None = None
    busbw_gb_s: float | None = None
    num_windows: int = 0


class TransferRow(PointRow, frozen=True, kw_only=True):
    """Q3: calls and bytes of one step, by kind."""

    gradients_calls_per_step: float | None = None
    gradients_bytes_per_step: float | None = None
    buffers_calls_per_step: float | None = None
    buffers_bytes_per_step: float | None = None
    batchnorm_statistics_calls_per_step: float | None = None
    batchnorm_statistics_bytes_per_step: float | None = None
    parameters_calls_per_step: float | None = None
    parameters_bytes_per_step: float | None = None
    inputs_calls_per_step: float | None = None
    inputs_bytes_per_step: float | None = None
    outputs_calls_per_step: float | None = None
    outputs_bytes_per_step: float | None = None
    gradients_bytes_formula: float | None = None
    step_time_s: float | None = None
    epoch_time_s: float | None = None
    test_accuracy: float | None = None


class SplitRow(PointRow, frozen=True, kw_only=True):
    """Q3: the parts of DataParallel's step."""

    plain_step_time_s: float | None = None
    step_time_s: float | None = None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    noise_floor: float | None = None
    interval_over: IntervalBasis | None = None
    run_spread_s: float | None = None
    scatter_time_s: float | None = None
    replicate_time_s: float | None = None
    parallel_forward_time_s: float | None = None
    gather_time_s: float | None = None
    backward_time_s: float | None = None
    optimizer_time_s: float | None = None
    parts_time_s: float | None = None


class PredictionRow(PointRow, frozen=True, kw_only=True):
    """The step time on another number of GPUs, as the ring model predicts it."""

    from_num_gpus: int
    latency_us: float | None = None
    link_gb_s: float | None = None
    fit_worst_error: float | None = None
    predicted_step_time_low_s: float | None = None
    predicted_step_time_s: float | None = None
    predicted_parallel_efficiency: float | None = None
    predicted_parallel_efficiency_high: float | None = None
    measured_step_time_s: float | None = None
    prediction_error: float | None = None


class MemoryRow(PointRow, frozen=True, kw_only=True):
    """The memory boundary of one point."""

    largest_batch_size_per_gpu: int | None = None
    smallest_failing_batch_size_per_gpu: int | None = None
    peak_memory_gib: float | None = None
    head_room_gib: float | None = None
    predicted_batch_size_per_gpu: int | None = None
    prediction_error: float | None = None
    num_trials: int | None = None
    num_ooms: int | None = None
    search_time_s: float | None = None


class Int8Row(PointRow, frozen=True, kw_only=True):
    """int8: the test accuracy of one stage and scale, over seeds."""

    stage: str | None = None
    scale_rule: str | None = None
    granularity: str | None = None
    test_accuracy: float | None = None
    test_accuracy_low: float | None = None
    test_accuracy_high: float | None = None
    accuracy_change: float | None = None
    accuracy_change_low: float | None = None
    accuracy_change_high: float | None = None
    mean_accuracy_change: float | None = None
    agreement: float | None = None
    tie_share: float | None = None
    network_bytes: int | None = None


class Int8HistogramRow(PointRow, frozen=True, kw_only=True):
    """int8: the histogram of a layer's weights, or of its outputs before or after ReLU, of one seed."""

    seed: int
    layer: str
    tensor: str
    low: float
    high: float
    mean: float
    sigma: float
    three_sigma_low: float
    three_sigma_high: float
    counts: list[int]


class CostRow(Row, frozen=True, kw_only=True):
    """Cost: the hours of the attempts that ended in one way."""

    ending: str
    gpu_hours: float | None = None
    process_hours: float | None = None
    allocated_share: float | None = None
