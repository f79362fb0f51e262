"""A record: the point, how its attempt ended, its environment, and raw values by epoch, rank, window and trial."""

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from pipeline.plan.axes import COMPILED_EXECUTIONS, Execution, NonNegativeInt, PositiveInt
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import VariantName as VariantName
from pipeline.system.errors import CONTROL_CHARACTER, NO_CONTROL_CHARACTERS
from pipeline.system.host import parse_timestamp

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
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
ScaleRule = Literal["largest_magnitude", "three_sigma", "percentile_99_9"]
ScaleGranularity = Literal["per_tensor", "per_channel"]  # of weights; activations always have one scale per tensor
QuantizationStage = Literal["fp32", "weights", "activations", "biases"]  # each includes those before it
HistogramTensor = Literal["weights", "before_relu", "after_relu"]
Better = Literal["higher", "lower"]  # of a figure of merit
TEST_ACCURACY = "test accuracy"  # the figure of merit of image models, from 0 to 1
Text = Annotated[str, msgspec.Meta(max_length=4000)]  # of messages: with whatever a process printed
MAX_SHORT_TEXT_CHARS = 400
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_SHORT_TEXT_CHARS, pattern=NO_CONTROL_CHARACTERS)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
PositiveNanoseconds = Annotated[int, msgspec.Meta(ge=1, le=2**62)]  # a measured time is never 0
UnitFraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
FlopsPerSample = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
WindowTimesNs = dict[str, list[list[int]]]  # wall times in ns: step name -> [window][rank]


def short_text(text: str) -> str:
    """Return a text of the operating system or a library as ShortText: without control characters, and cut."""
    return CONTROL_CHARACTER.sub(" ", text)[:MAX_SHORT_TEXT_CHARS]


class RecordStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of all parts of a record. The garbage collector skips it: collecting would take longer than reading."""


class RankEpoch(RecordStruct, frozen=True):
    """Times of one rank in one epoch, in nanoseconds; None means "not measured" or "not stated"."""

    rank: NonNegativeInt
    epoch_time_ns: PositiveNanoseconds | None = None
    compute_time_ns: Nanoseconds | None = None  # copy + forward + backward + optimizer
    copy_ns: Nanoseconds | None = None  # this and the next three are None if the whole step is one CUDA graph
    forward_ns: Nanoseconds | None = None
    backward_ns: Nanoseconds | None = None
    optimizer_ns: Nanoseconds | None = None
    data_time_ns: Nanoseconds | None = None  # the device was idle, waiting for data
    loader_wait_ns: Nanoseconds | None = None  # the host's wait for the loader, which may be hidden behind device work
    num_samples: NonNegativeInt | None = None  # images that the rank trained on; one seen twice counts twice
    started_unix_ns: Nanoseconds | None = None  # start of the epoch, to find its telemetry


class Epoch(RecordStruct, frozen=True):
    """One epoch: every rank's times, the loss, and the accuracy (from 0 to 1).

    Timings from elsewhere have None for what they do not state, updates and samples included.
    """

    epoch: PositiveInt  # counts from 1
    ranks: Annotated[tuple[RankEpoch, ...], msgspec.Meta(min_length=1)]
    num_updates: NonNegativeInt | None  # from the start of training to the end of this epoch
    num_samples: NonNegativeInt | None = None  # distinct samples over all ranks
    loss: float | None = None  # None if it was not finite; then `diverged_at_update` is set
    accuracy: UnitFraction | None = None
    test_loss: float | None = None
    test_accuracy: UnitFraction | None = None
    diverged_at_update: NonNegativeInt | None = None
    first_learning_rate: float | None = None  # of the first update; None: not known
    peak_learning_rate: float | None = None  # the largest of the epoch
    step_times_ns: tuple[Nanoseconds, ...] | None = None
    merit: float | None = None  # over the test set; test_accuracy if that is the figure of merit
    num_timed_updates: PositiveInt | None = None  # of a script, in the time of this epoch

    @property
    def merit_or_accuracy(self) -> float | None:
        """The figure of merit over the test set, whatever it is."""
        return self.merit if self.test_accuracy is None else self.test_accuracy

    @property
    def slowest_rank(self) -> RankEpoch | None:
        """The rank with the longest epoch time (used as the time of the epoch); None if no time was measured."""
        timed = [rank for rank in self.ranks if rank.epoch_time_ns is not None]
        return max(timed, key=lambda rank: rank.epoch_time_ns or 0, default=None)

    @property
    def time_ns(self) -> int:
        """The epoch time of the slowest rank; 0 if no time was measured."""
        return max(rank.epoch_time_ns or 0 for rank in self.ranks)


class DeviceMemory(RecordStruct, frozen=True):
    """Peak memory of one device of one rank, in bytes. On the CPU: the peak resident set size of the process."""

    rank: NonNegativeInt
    device: ShortText
    peak_allocated_bytes: NonNegativeInt
    # held by the process at its end or free: without other processes and CUDA itself, at most `memory_limit_gib`;
    # None on a CPU without a limit
    usable_bytes: NonNegativeInt | None
    peak_reserved_bytes: NonNegativeInt | None = None
    num_alloc_retries: NonNegativeInt | None = None


class StepSeries(RecordStruct, frozen=True):
    """The times of one step variant: wall time of each window and rank, [window][rank]."""

    variant: VariantName
    window_times_ns: tuple[tuple[PositiveNanoseconds, ...], ...]


class DelayedSteps(RecordStruct, frozen=True):
    """The times of the step while each collective takes `latency_s` and its bytes times `s_per_byte` longer.

    `delays_ns` is the sum of these delays in a step of rank 0, by window; `window_times_ns` as in StepSeries.
    """

    latency_s: NonNegativeFloat
    s_per_byte: NonNegativeFloat
    delays_ns: tuple[Nanoseconds, ...]
    window_times_ns: tuple[tuple[PositiveNanoseconds, ...], ...]


class Collective(RecordStruct, frozen=True):
    """One collective of the profiled steps. A profile lists collectives by start time."""

    kind: TransferKind
    operation: ShortText
    num_bytes: NonNegativeInt  # the size of one rank's input
    durations_ns: tuple[tuple[Nanoseconds, ...], ...] = ()  # [step][rank], with the rank's wait for the others


class Profile(RecordStruct, frozen=True):
    """Profiled steps, which are not timed. Each tuple of times has the device time of each rank over all steps.

    `comm_ns`: gradient reductions. `compute_ns`: all work except collectives. `overlap_ns`: both at once. Time with
    several kernels at once counts once. On the CPU compute is not traced: all but `comm_ns` are 0. `no_op_compute_ns`
    and `no_op_again_compute_ns`: `compute_ns` of equally many steps without gradient reductions (no-op hook), profiled
    before and after. They are empty if not recorded.
    """

    num_steps: PositiveInt
    collectives: tuple[Collective, ...]
    comm_ns: tuple[Nanoseconds, ...] = ()
    compute_ns: tuple[Nanoseconds, ...] = ()
    overlap_ns: tuple[Nanoseconds, ...] = ()
    no_op_compute_ns: tuple[Nanoseconds, ...] = ()
    no_op_again_compute_ns: tuple[Nanoseconds, ...] = ()

    def __post_init__(self) -> None:
        traced = (self.comm_ns, self.compute_ns, self.overlap_ns)
        added = (self.no_op_compute_ns, self.no_op_again_compute_ns)
        ranks = {len(total) for total in traced if any(traced)} | {len(total) for total in added if total}
        ranks |= {len(step) for collective in self.collectives for step in collective.durations_ns}
        steps = {len(collective.durations_ns) for collective in self.collectives}
        if len(ranks) > 1 or 0 in ranks or steps - {self.num_steps}:
            raise ValueError("a profile needs every rank in each total and step, and num_steps steps per collective")


class SweptCollective(RecordStruct, frozen=True):
    """An isolated collective of one size: of a gather the output, of every other operation the input."""

    num_bytes: PositiveInt
    operation: Operation
    times_ns: tuple[PositiveNanoseconds, ...] = ()  # slowest rank's time per call, by window; empty after an OOM
    is_bucket: bool = False  # a collective of the step has this operation and size


class Transfer(RecordStruct, frozen=True):
    """The data of one kind that one rank sends in one step, counted at run time, not computed by a formula."""

    kind: TransferKind
    calls_per_step: Annotated[float, msgspec.Meta(ge=0, le=2**40)]
    bytes_per_step: Annotated[float, msgspec.Meta(ge=0, le=2**50)]


class SplitPart(RecordStruct, frozen=True):
    """One part of a DataParallel step that synchronizes after each part. `times_ns`: mean per step, by window."""

    part: ShortText
    times_ns: Annotated[tuple[PositiveNanoseconds, ...], msgspec.Meta(min_length=1)]


class Communication(RecordStruct, frozen=True):
    """The raw result of `measure: communication` and `network`."""

    steps_per_window: PositiveInt
    series: tuple[StepSeries, ...]
    transfers: tuple[Transfer, ...] = ()
    profile: Profile | None = None
    sweep: tuple[SweptCollective, ...] = ()
    sweep_captured: bool | None = None  # True if the calls of the sweep ran as one CUDA graph; None without a sweep
    split: tuple[SplitPart, ...] = ()
    delayed: tuple[DelayedSteps, ...] = ()
    notes: tuple[Text, ...] = ()  # on parts that could not be measured, with the reason
    mistakes: tuple[Text, ...] = ()  # what a script sends without need, with the bytes and the cure
    # True: the step without collectives is without those of the user's code too; they count as communication
    counts_own: bool = False

    def __post_init__(self) -> None:
        windows = [series.window_times_ns for series in self.series]
        windows += [series.window_times_ns for series in self.delayed]
        rounds = {len(times_ns) for times_ns in (*windows, *(series.delays_ns for series in self.delayed))}
        ranks = {len(window) for times_ns in windows for window in times_ns}
        if len(rounds) > 1 or len(ranks) > 1 or 0 in rounds | ranks:
            raise ValueError("all variants need the same number of windows, and all windows the same ranks")
        if len({series.variant for series in self.series}) < len(self.series):
            raise ValueError("each variant may have only one series")
        if self.delayed and not any(series.variant.endswith("_again") for series in self.series):
            raise ValueError("steps with delays need the step without them, twice")


class MemoryTrial(RecordStruct, frozen=True):
    """One trial of a memory search, in its own processes, and the memory of the fullest device in bytes.

    On the CPU, memory counts from the moment when `memory_limit_gib` was set. It is None if the batch did not fit.
    """

    batch_size_per_gpu: PositiveInt
    fits: bool
    time_ns: Nanoseconds  # from the start of the processes to their end
    peak_allocated_bytes: NonNegativeInt | None = None
    peak_reserved_bytes: NonNegativeInt | None = None
    usable_bytes: NonNegativeInt | None = None
    num_alloc_retries: NonNegativeInt | None = None
    reason: Text | None = None  # of a failure other than an OOM

    @property
    def is_oom(self) -> bool:
        return not self.fits and self.reason is None


class Bracket(NamedTuple):
    """The largest batch that fits and the smallest that fails; None if there is no such trial."""

    fits: int | None
    fails: int | None


def bracket_of(trials: Sequence[MemoryTrial]) -> Bracket:
    """Return the bracket of the trials. A batch that fits counts only if no smaller one failed."""
    fails = min((trial.batch_size_per_gpu for trial in trials if not trial.fits), default=None)
    fitting = (trial.batch_size_per_gpu for trial in trials if trial.fits)
    return Bracket(max((size for size in fitting if fails is None or size < fails), default=None), fails)


class MemorySearch(RecordStruct, frozen=True):
    """The result of `measure: memory`: the trials in order, and three batch sizes per GPU that follow from them."""

    trials: tuple[MemoryTrial, ...]
    predicted: PositiveInt | None  # by the first straight line through two trials; None without one
    largest_fitting: PositiveInt
    smallest_failing: PositiveInt | None  # None if no trial failed

    def __post_init__(self) -> None:
        if (self.largest_fitting, self.smallest_failing) != bracket_of(self.trials):
            raise ValueError("largest_fitting and smallest_failing must be those of the trials")
        if self.predicted is not None and sum(trial.fits for trial in self.trials) < 2:
            raise ValueError("a prediction needs two trials that fit")


class StageResult(RecordStruct, frozen=True):
    """The test of one quantized network: correct answers, the same answers as fp32, and answers that are ties."""

    stage: QuantizationStage
    scale_rule: ScaleRule | None = None  # None: fp32
    granularity: ScaleGranularity | None = None
    num_correct: NonNegativeInt | None = None
    num_agreeing: NonNegativeInt | None = None
    num_ties: NonNegativeInt | None = None
    num_bytes: PositiveInt | None = None  # of weights, biases and scales
    problem: Text | None = None  # why the counts are None: no network, or its scores are not finite


class LayerScales(RecordStruct, frozen=True):
    """The scales of a layer with int8 activations, and the largest magnitudes of its integers."""

    layer: ShortText
    weight_scales: tuple[float, ...]
    input_scale: float
    output_scale: float
    max_weight: NonNegativeInt
    max_bias: NonNegativeInt
    max_accumulator: NonNegativeInt  # the largest sum that any int8 input could give, bias included


class NetworkScales(RecordStruct, frozen=True):
    """The scales of one fully quantized network, layer by layer."""

    scale_rule: ScaleRule
    granularity: ScaleGranularity
    layers: tuple[LayerScales, ...]


class Histogram(RecordStruct, frozen=True):
    """Counts of a tensor's values in bins of equal width from `low` to `high`; mean and standard deviation of all."""

    layer: ShortText
    tensor: HistogramTensor
    low: float
    high: float
    counts: tuple[NonNegativeInt, ...]
    mean: float
    sigma: float


class Quantization(RecordStruct, frozen=True):
    """The result of `measure: quantize`. `weights_sha256` is the digest of the .weights.npz beside the record."""

    weights_sha256: ShortText
    num_calibration_samples: PositiveInt
    num_test_samples: PositiveInt
    results: tuple[StageResult, ...]
    scales: tuple[NetworkScales, ...] = ()
    histograms: tuple[Histogram, ...] = ()


class Sharding(RecordStruct, frozen=True):
    """The units that FSDP shards one by one, in bytes before sharding, padded so that all ranks have equal shards.

    The root has all parameters that are in no unit.
    """

    num_units: NonNegativeInt  # without the root
    units_bytes: NonNegativeInt  # of all units
    largest_unit_bytes: NonNegativeInt
    root_bytes: NonNegativeInt


class ObservedScript(RecordStruct, frozen=True):
    """Properties of a user's script, seen in the optimizers, loaders and wrappers of rank 0; None: not seen."""

    command: tuple[Text, ...]  # with this point's values
    world_size: PositiveInt
    backend: ShortText | None = None
    wrappers: tuple[ShortText, ...] = ()  # classes that spread a model over ranks
    optimizers: tuple[ShortText, ...] = ()
    batch_size: PositiveInt | None = None  # of the first dimension of a batch of its loader, the most frequent one
    batches_per_update: NonNegativeFloat | None = None
    parameter_type: ShortText | None = None
    autocast: ShortText | None = None
    is_compiled: bool = False
    num_warm_up_updates: NonNegativeInt = 0
    has_launcher_variables: bool = True  # RANK and the like; False: one process, started as by hand


class Measurement(RecordStruct, frozen=True):
    """The raw values of an ok attempt; every reported figure is computed from them."""

    epochs: tuple[Epoch, ...]
    num_parameters: PositiveInt | None  # None if timings from elsewhere do not state it
    gradient_bytes: PositiveInt | None  # likewise
    memory: tuple[DeviceMemory, ...] = ()
    num_points_before: NonNegativeInt = 0  # that the same processes ran before this one
    precision_used: ShortText | None = None
    cudnn_benchmark: bool | None = None
    num_threads: PositiveInt | None = None
    execution_used: Execution | None = None
    compile_time_s: NonNegativeFloat | None = None  # slowest rank's wall time to compile and capture, before the clock
    captured_batch_sizes: tuple[PositiveInt, ...] = ()  # each has its own CUDA graph
    communication: Communication | None = None
    memory_search: MemorySearch | None = None
    quantization: Quantization | None = None
    unit: ShortText = "images"  # of an item
    items_per_sample: PositiveInt = 1
    merit: ShortText | None = None  # the name of the figure of merit; None: none, or not stated
    better: Better = "higher"  # figures of merit
    sharding: Sharding | None = None  # of FSDP
    optimizer_bytes: NonNegativeInt | None = None  # the optimizer's state on the rank that has most
    flops_per_sample: FlopsPerSample | None = None  # forward and backward pass
    flops_note: ShortText | None = None  # operations that the count lacks, or why there is none
    own_collectives: tuple[ShortText, ...] = ()  # operations that the user's code calls in a step
    script: ObservedScript | None = None


class GpuWindow(RecordStruct, frozen=True):
    """Telemetry of one GPU during one epoch. None means "not measured"."""

    epoch: PositiveInt
    gpu: NonNegativeInt  # its index in `environment.gpus`
    num_telemetry_samples: NonNegativeInt = msgspec.field(name="num_samples")
    median_sm_clock_mhz: NonNegativeFloat | None = None
    min_sm_clock_mhz: NonNegativeFloat | None = None
    highest_sm_clock_mhz: NonNegativeFloat | None = None  # that this GPU can reach, as its driver says
    mean_power_w: NonNegativeFloat | None = None
    max_temperature_c: NonNegativeFloat | None = None
    throttle_reasons: tuple[ThrottleReason, ...] | None = (
        None  # in any sample, without harmless ones (idle, set clocks)
    )
    # of the board: its energy counter, or sampled power integrated (from Ampere on, the mean power of the last second)
    energy_j: NonNegativeFloat | None = None
    energy_method: EnergyMethod | None = None


class HostWindow(RecordStruct, frozen=True):
    """Telemetry of one node during its first rank's epoch: the busy share of all its CPUs, other jobs included."""

    epoch: PositiveInt
    node: NonNegativeInt
    num_telemetry_samples: NonNegativeInt = msgspec.field(name="num_samples")
    cpu_share: UnitFraction | None = None


class Telemetry(RecordStruct, frozen=True):
    """Telemetry of GPUs and nodes by epoch, from a separate process; `notes` say what is missing and why."""

    interval_s: NonNegativeFloat
    gpus: tuple[GpuWindow, ...] = ()
    hosts: tuple[HostWindow, ...] = ()
    notes: tuple[ShortText, ...] = ()


SCHEMA_VERSION: Literal[1] = 1
FORMER_VERSIONS = range(2, 16)  # numbers that were in use before 1: the next version is 16

MAX_STEP_TIMES = 40_000  # over all epochs; a longer series is stored in the .steps.npz only
MAX_RANK_EPOCHS = 1_000  # epochs x ranks; with more there is no space for step times
MODEL_ALONE = "the model alone does not fit"  # begins the message of an out of memory before the first batch
MAX_MESSAGE_CHARS = 3900  # of a failure; the rest of Text is left for a prefix
# Variables of libraries that may change a time, by prefix -> what a point must use for it. The longest prefix decides.
VariableUse = Literal["any", "gpu", "processes", "gpus", "compiler"]
PREFIXES_BY_USE: dict[VariableUse, str] = {
    "any": "ATEN_ BLIS_ DNNL_ GLIBC_TUNABLES GOMP_ KMP_ LD_PRELOAD MALLOC_ MKL_ OMP_ ONEDNN_ OPENBLAS_ PYTORCH_ TORCH_",
    "gpu": "CUBLASLT_ CUBLAS_ CUDA_ CUDNN_ NVIDIA_TF32_OVERRIDE PYTORCH_CUDA_ TORCH_CUBLASLT_ TORCH_CUDNN_",
    "processes": "FI_ GLOO_ IBV_ MLX5_ PSM2_ PSM3_ RDMAV_ TORCH_DISTRIBUTED_ TORCH_GLOO_ UCX_",
    "gpus": "NCCL_ TORCH_NCCL_ TORCH_SYMM_MEM_",
    "compiler": "TORCHDYNAMO_ TORCHINDUCTOR_ TORCH_COMPILE_ TRITON_",
}
USE_BY_PREFIX = {prefix: use for use, prefixes in PREFIXES_BY_USE.items() for prefix in prefixes.split()}
# recorded, and never compared: messages, versions, builds, which GPUs, what torch or this pipeline itself sets, and
# the number of threads, which is a fact of its own
NEUTRAL_VARIABLE = re.compile(
    r"NCCL_DEBUG\w*|\w+_VERSION|\w+_ARCH_LIST|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|MODULE_LOADING)|OMP_NUM_THREADS"
    r"|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)

Status = Literal["ok", "oom", "failed"]
FailureKind = Literal[
    "cuda_oom",
    "host_oom",
    "stated_oom",
    "implied_oom",
    "gpu_shared",
    "unsupported_gpu",
    "exception",
    "signal",
    "exit",
    "collective",
    "timeout",
]


class Failure(RecordStruct, frozen=True):
    """The failure of an attempt, and the rank and node where it happened."""

    kind: FailureKind
    message: Text
    rank: NonNegativeInt | None = None
    node: ShortText | None = None
    exit_code: int | None = None
    memory_of_others_bytes: tuple[NonNegativeInt | None, ...] = ()  # on each GPU of the rank after an OOM


class Gpu(RecordStruct, frozen=True):
    """One GPU. `memory_of_others_bytes` is what other processes held at the start, of a script at its end, if known."""

    name: ShortText
    node: ShortText | None = None
    uuid: ShortText | None = None
    memory_bytes: NonNegativeInt | None = None
    memory_of_others_bytes: NonNegativeInt | None = None


class Link(RecordStruct, frozen=True):
    """Pairs of ranks (sender, receiver) that NCCL has connected in one way, as its log states it."""

    pairs: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    transport: ShortText  # P2P, SHM, NET/Socket, NET/IB, or a plugin's: NET/AWS Libfabric
    num_channels: PositiveInt
    device: ShortText | None = None  # of the sender's network: eth0, mlx5_0:1/IB
    gpudirect: bool = False  # the network reads and writes the memory of GPUs


class NetworkDevice(RecordStruct, frozen=True):
    """A network interface that is up, or a port for RDMA, named as NCCL does: mlx5_0:1/IB."""

    node: ShortText
    name: ShortText
    gbit_per_s: NonNegativeFloat | None = None
    is_rdma: bool = False
    is_up: bool = True


class Binding(RecordStruct, frozen=True):
    """The CPUs on which a rank may run, their NUMA nodes, and that of its GPU (None: not known)."""

    rank: NonNegativeInt
    cpus: ShortText  # 0-15,32-47
    numa_nodes: tuple[NonNegativeInt, ...] = ()
    gpu_numa_node: NonNegativeInt | None = None


class Environment(RecordStruct, frozen=True):
    """The hardware, software and variables of an attempt; not part of the run id."""

    gpus: tuple[Gpu, ...] = ()
    num_gpus_allocated: NonNegativeInt | None = None
    nodes: tuple[ShortText, ...] = ()
    boot_ids: tuple[ShortText, ...] = ()
    cpu: ShortText | None = None
    num_cpus: NonNegativeInt | None = None
    driver: ShortText | None = None
    cuda: ShortText | None = None
    cudnn: ShortText | None = None
    nccl: ShortText | None = None
    torch: ShortText | None = None
    torchvision: ShortText | None = None
    python: ShortText | None = None
    pipeline: ShortText | None = None
    git_commit: ShortText | None = None  # of the code that the ranks imported
    git_dirty: bool | None = None
    source_digest: ShortText | None = None  # likewise
    source_changed: bool | None = None  # its files were edited before the end
    sm_clock_mhz: NonNegativeInt | None = None
    slurm: dict[ShortText, ShortText] = msgspec.field(default_factory=dict)
    variables: dict[ShortText, ShortText] = msgspec.field(default_factory=dict)  # of libraries
    model_digest: ShortText | None = None  # of the modules of the user's model
    model_commit: ShortText | None = None  # of their repository
    model_dirty: bool | None = None  # one of them differs from it
    model_changed: bool | None = None  # the file of the model was edited after it was submitted
    data: ShortText | None = None
    source: ShortText | None = None
    unlike_nodes: dict[ShortText, ShortText] = msgspec.field(default_factory=dict)  # in what they differ from the first
    links: tuple[Link, ...] = ()
    gpu_paths: dict[ShortText, ShortText] = msgspec.field(default_factory=dict)  # of nvidia-smi, by GPUs: 0-1: NV4
    network_devices: tuple[NetworkDevice, ...] = ()
    bindings: tuple[Binding, ...] = ()


class Record(RecordStruct, frozen=True):
    """One attempt. Raises ValueError if status and content contradict each other."""

    schema_version: Literal[1]
    run_id: ShortText
    attempt: NonNegativeInt
    spec: Spec
    status: Status
    reason: Text
    launch_id: ShortText  # of the launch that ran it
    measured: bool = True  # False: timings measured elsewhere, brought in by ingest
    measurement: Measurement | None = None
    failure: Failure | None = None
    environment: Environment = Environment()
    telemetry: Telemetry | None = None
    started_at: ShortText | None = None  # in UTC, only used for the cost
    ended_at: ShortText | None = None

    def __post_init__(self) -> None:
        if self.run_id != self.spec.run_id():
            raise ValueError(f"run_id {self.run_id} does not match its spec, which digests to {self.spec.run_id()}")
        if (self.status == "ok") != (self.measurement is not None):
            raise ValueError("status 'ok' and a measurement must come together")
        if (self.status == "ok") != (self.failure is None):
            raise ValueError("a status other than 'ok' and a failure must come together")
        for time in (self.started_at, self.ended_at):
            if time is not None:
                parse_timestamp(time)
        if self.measured and self.measurement:
            self._check_measurement(self.measurement)

    def _check_measurement(self, measurement: Measurement) -> None:
        spec, epochs, ranks = self.spec, measurement.epochs, list(range(self.spec.world_size))
        is_counted = measurement.num_parameters is not None and measurement.gradient_bytes is not None
        if not is_counted and not spec.script:  # a script without an optimizer of torch shows none
            raise ValueError("a measured configuration has num_parameters and gradient_bytes")
        if [epoch.epoch for epoch in epochs] != list(range(1, len(epochs) + 1)):
            raise ValueError("epochs count from 1, one after another")
        if spec.measure in ("epochs", "quantize") and not spec.min_epochs <= len(epochs) <= spec.epochs:
            raise ValueError(
                f"the configuration has at least {spec.min_epochs} of {spec.epochs} epochs, and not {len(epochs)}"
            )
        for epoch in epochs:
            if [clock.rank for clock in epoch.ranks] != ranks or any(not clock.epoch_time_ns for clock in epoch.ranks):
                raise ValueError(f"epoch {epoch.epoch} needs the time of each of {len(ranks)} ranks, in their order")
            if not spec.script and epoch.num_updates != epoch.epoch * spec.steps_per_epoch:
                raise ValueError(f"epoch {epoch.epoch} cannot end after {epoch.num_updates} updates")
        for series in measurement.communication.series if measurement.communication else ():
            if any(len(window) != len(ranks) for window in series.window_times_ns):
                raise ValueError(f"every window of {series.variant} needs the times of {len(ranks)} ranks")

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """The epochs that were measured; none of a record that is not ok."""
        return self.measurement.epochs if self.measurement else ()

    @property
    def communication(self) -> Communication | None:
        """The communication that was measured, if it was."""
        return self.measurement.communication if self.measurement else None

    def may_depend_on(self, variable: str) -> bool:
        """True if the variable may change the times of such a point: not NCCL's on one GPU, or CUDA's on a CPU."""
        use = variable_use(variable)
        if use is None or NEUTRAL_VARIABLE.fullmatch(variable):
            return False
        executed = (self.measurement and self.measurement.execution_used) or self.spec.execution
        return {
            "any": True,
            "gpu": self.spec.device == "cuda",
            "processes": self.spec.num_gpus > 1,
            "gpus": self.spec.num_gpus > 1 and self.spec.device == "cuda",
            "compiler": executed in (*COMPILED_EXECUTIONS, "auto"),
        }[use]

    def status_line(self) -> str:
        return f"{self.status}: {self.reason}" if self.reason else self.status


@functools.cache
def variable_use(variable: str) -> VariableUse | None:
    """Return what a point must use for the variable to change its time; None if it is of no library listed here."""
    prefix = max(filter(variable.startswith, USE_BY_PREFIX), key=len, default=None)
    return USE_BY_PREFIX[prefix] if prefix else None
