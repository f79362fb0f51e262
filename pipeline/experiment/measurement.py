"""What a record holds of measurements: raw values only, by epoch, rank, window and trial; and what was sampled."""

from typing import Annotated, Literal

import msgspec

from pipeline.experiment.spec import Execution, NonNegativeInt, PositiveInt

VariantName = Literal["plain", "ddp_one", "ddp", "ddp_again", "no_op_hook", "no_sync", "dp", "dp_again"]
TransferKind = Literal["gradients", "buffers", "batchnorm_statistics", "parameters", "inputs", "outputs"]
EnergyMethod = Literal["counter", "power"]
ThrottleReason = Literal[
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake",
    "board_limit",
    "reliability",
    "other",
]
Text = Annotated[str, msgspec.Meta(max_length=4000)]
ShortText = Annotated[str, msgspec.Meta(max_length=400)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
PositiveNanoseconds = Annotated[int, msgspec.Meta(ge=1, le=2**62)]  # nanoseconds; nothing takes no time
UnitFraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
WindowTimesNs = dict[str, list[list[int]]]  # wall time of each window in ns, [window][rank], by name of the step


class RecordStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Without garbage collection: records are trees, and collecting 100,000 of them again and again takes longer
    than to read them."""


class RankEpoch(RecordStruct, frozen=True):
    """One rank's clock over one epoch, in nanoseconds; None is "not measured" (or "not stated").

    `compute_time_ns` is copy + forward + backward + optimizer; `data_time_ns` is the time the device lay
    idle for data; `loader_wait_ns` is the host's wait for the loader, which the device may not have noticed.
    All parts are None where the whole step is one CUDA graph.
    """

    rank: NonNegativeInt
    epoch_time_ns: PositiveNanoseconds | None = None
    compute_time_ns: Nanoseconds | None = None
    copy_ns: Nanoseconds | None = None
    forward_ns: Nanoseconds | None = None
    backward_ns: Nanoseconds | None = None
    optimizer_ns: Nanoseconds | None = None
    data_time_ns: Nanoseconds | None = None
    loader_wait_ns: Nanoseconds | None = None
    num_samples: NonNegativeInt | None = None
    started_unix_ns: Nanoseconds | None = None  # where telemetry finds the window


class Epoch(RecordStruct, frozen=True):
    """One epoch: every rank's clock, and what was learnt. Accuracies are fractions; `epoch` counts from 1.

    `num_updates` counts from the start of training to the end of this epoch. `loss` is None with
    `diverged_at_update` set where it was not finite. `num_samples` counts distinct samples over all ranks.
    """

    epoch: PositiveInt
    ranks: Annotated[tuple[RankEpoch, ...], msgspec.Meta(min_length=1)]
    num_updates: NonNegativeInt
    num_samples: NonNegativeInt | None = None
    loss: float | None = None
    accuracy: UnitFraction | None = None
    test_loss: float | None = None
    test_accuracy: UnitFraction | None = None
    diverged_at_update: NonNegativeInt | None = None
    step_times_ns: tuple[Nanoseconds, ...] | None = None

    @property
    def slowest_rank(self) -> RankEpoch | None:
        """The rank whose clock is the epoch's; None where no time was measured."""
        timed = [rank for rank in self.ranks if rank.epoch_time_ns is not None]
        if len(timed) == 1:
            return timed[0]
        return max(timed, key=lambda rank: rank.epoch_time_ns or 0, default=None)


class DeviceMemory(RecordStruct, frozen=True):
    """Peak memory of one device of one rank, in bytes; on the CPU the process's peak resident set.

    `usable_bytes` is what the process held at its end and what it could still get: the card less its other users
    and CUDA's own, or `memory_limit_gib`. None on a CPU without that limit.
    """

    rank: NonNegativeInt
    device: ShortText
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt | None = None
    num_alloc_retries: NonNegativeInt | None = None
    usable_bytes: NonNegativeInt | None = None


class StepSeries(RecordStruct, frozen=True):
    """The step times of one variant of the model: wall time of each window by rank, [window][rank]."""

    variant: VariantName
    window_times_ns: tuple[tuple[PositiveNanoseconds, ...], ...]


class Collective(RecordStruct, frozen=True):
    """One collective at its place in a profiled step; its durations are [step][rank], in issue order.

    `num_bytes` is what one rank hands in. A rank's duration includes its wait for the others.
    """

    kind: TransferKind
    operation: ShortText
    num_bytes: NonNegativeInt
    durations_ns: tuple[tuple[Nanoseconds, ...], ...] = ()


class Profile(RecordStruct, frozen=True):
    """A profiled pass, apart from timed steps. Per rank, over all its steps, unions of intervals on the device.

    `comm_ns` is of the reductions of gradients, `compute_ns` of all work but collectives, `overlap_ns` of both at
    once, `covered_ns` of reductions beside such work or in a short gap between its kernels (trace.LAUNCH_GAP_US); on
    the CPU, where compute is not traced, all but `comm_ns` are 0. `quiet_compute_ns` is `compute_ns` of as many steps
    with the no-op hook, which reduce no gradients, profiled before, and `quiet_again_compute_ns` after. The last three
    are empty where not recorded.
    """

    num_steps: PositiveInt
    collectives: tuple[Collective, ...]
    comm_ns: tuple[Nanoseconds, ...] = ()
    compute_ns: tuple[Nanoseconds, ...] = ()
    overlap_ns: tuple[Nanoseconds, ...] = ()
    covered_ns: tuple[Nanoseconds, ...] = ()
    quiet_compute_ns: tuple[Nanoseconds, ...] = ()
    quiet_again_compute_ns: tuple[Nanoseconds, ...] = ()

    def __post_init__(self) -> None:
        traced = (self.comm_ns, self.compute_ns, self.overlap_ns)
        added = (self.covered_ns, self.quiet_compute_ns, self.quiet_again_compute_ns)
        ranks = {len(total) for total in traced if any(traced)} | {len(total) for total in added if total}
        ranks |= {len(step) for collective in self.collectives for step in collective.durations_ns}
        steps = {len(collective.durations_ns) for collective in self.collectives}
        if len(ranks) > 1 or 0 in ranks or steps - {self.num_steps}:
            raise ValueError("a profile needs every rank in every total, and in every step of every collective")


class AllReduce(RecordStruct, frozen=True):
    """An isolated all-reduce of one size: the slowest rank's time a call, by window; none where memory ended."""

    num_bytes: PositiveInt
    times_ns: tuple[PositiveNanoseconds, ...] = ()
    is_bucket: bool = False


class Transfer(RecordStruct, frozen=True):
    """What one rank hands to the others in one step, by kind: counted, not computed."""

    kind: TransferKind
    calls_per_step: Annotated[float, msgspec.Meta(ge=0, le=2**40)]
    bytes_per_step: Annotated[float, msgspec.Meta(ge=0, le=2**50)]


class SplitPart(RecordStruct, frozen=True):
    """One part of a DataParallel step that is synchronized after every part: mean time a step, by window."""

    part: ShortText
    times_ns: Annotated[tuple[PositiveNanoseconds, ...], msgspec.Meta(min_length=1)]


class Communication(RecordStruct, frozen=True):
    """What `measure: communication` found, raw; `notes` says what could not be measured and why.

    `sweep_captured` says whether the sweep's calls were one CUDA graph. None where there was no sweep, and in earlier
    records, where they were beside captured steps alone.
    """

    steps_per_window: PositiveInt
    series: tuple[StepSeries, ...]
    transfers: tuple[Transfer, ...] = ()
    profile: Profile | None = None
    sweep: tuple[AllReduce, ...] = ()
    sweep_captured: bool | None = None
    split: tuple[SplitPart, ...] = ()
    notes: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        rounds = {len(series.window_times_ns) for series in self.series}
        ranks = {len(window) for series in self.series for window in series.window_times_ns}
        if len(rounds) > 1 or len(ranks) > 1 or 0 in rounds | ranks:
            raise ValueError("every variant needs as many windows as the others, each with every rank")
        if len({series.variant for series in self.series}) < len(self.series):
            raise ValueError("a variant has one series")


class MemoryTrial(RecordStruct, frozen=True):
    """One trial of a search, in processes of its own, and the memory of the fullest device of any rank, in bytes.

    On the CPU both peak and usable count from where `memory_limit_gib` was set. None where it did not fit; `reason`
    says why where that was no out-of-memory (since schema 9).
    """

    batch_size_per_gpu: PositiveInt
    fits: bool
    time_ns: Nanoseconds  # from starting the processes to their end
    peak_allocated_bytes: NonNegativeInt | None = None
    peak_reserved_bytes: NonNegativeInt | None = None
    usable_bytes: NonNegativeInt | None = None
    num_alloc_retries: NonNegativeInt | None = None
    reason: Text | None = None

    @property
    def is_oom(self) -> bool:
        """Whether memory ran out: it did not fit, and did not fail otherwise."""
        return not self.fits and self.reason is None


class MemorySearch(RecordStruct, frozen=True):
    """What `measure: memory` found: the trials in order, and three numbers of samples a GPU that follow from them.

    `predicted` is what the line through the first two runs said; None where no two gave a line before the end.
    `smallest_failing` is None where the search ended before anything failed.
    """

    trials: tuple[MemoryTrial, ...]
    predicted: PositiveInt | None
    largest_fitting: PositiveInt
    smallest_failing: PositiveInt | None


class Measurement(RecordStruct, frozen=True):
    """What a point that ended well measured; raw values only, everything claimed is computed from them.

    `num_points_before` is how many points the same processes ran before this one. `compile_time_s` is the slowest
    rank's wall time of compiling and capturing, before the clock; `captured_batch_sizes` are those with a CUDA graph
    of their own.
    """

    epochs: tuple[Epoch, ...]
    num_parameters: PositiveInt
    gradient_bytes: PositiveInt
    memory: tuple[DeviceMemory, ...] = ()
    num_points_before: NonNegativeInt = 0
    precision_used: ShortText | None = None
    cudnn_benchmark: bool | None = None
    num_threads: PositiveInt | None = None
    execution_used: Execution | None = None
    compile_time_s: NonNegativeFloat | None = None
    captured_batch_sizes: tuple[PositiveInt, ...] = ()
    communication: Communication | None = None
    memory_search: MemorySearch | None = None


class GpuWindow(RecordStruct, frozen=True):
    """One GPU while its rank's epoch was timed; `gpu` is its place in `environment.gpus`. None is "not measured".

    `num_samples` lie inside the window. `energy_j` is the board's: by its own energy counter, or by integrating
    the power that was sampled. On Ampere and later the driver gives power as its mean over the last second.
    `throttle_reasons` are those seen in any sample, without the harmless (an idle GPU, clocks set by hand).
    """

    epoch: PositiveInt
    gpu: NonNegativeInt
    num_samples: NonNegativeInt
    median_sm_clock_mhz: NonNegativeFloat | None = None
    min_sm_clock_mhz: NonNegativeFloat | None = None
    mean_power_w: NonNegativeFloat | None = None
    max_temperature_c: NonNegativeFloat | None = None
    throttle_reasons: tuple[ThrottleReason, ...] | None = None
    energy_j: NonNegativeFloat | None = None
    energy_method: EnergyMethod | None = None


class HostWindow(RecordStruct, frozen=True):
    """One node's CPUs while its first rank's epoch was timed: the busy share of all of them, other jobs' work too."""

    epoch: PositiveInt
    node: NonNegativeInt
    num_samples: NonNegativeInt
    cpu_share: UnitFraction | None = None


class Telemetry(RecordStruct, frozen=True):
    """What a process of its own sampled beside the ranks, by epoch; `notes` says what is missing and why."""

    interval_s: NonNegativeFloat
    gpus: tuple[GpuWindow, ...] = ()
    hosts: tuple[HostWindow, ...] = ()
    notes: tuple[ShortText, ...] = ()
