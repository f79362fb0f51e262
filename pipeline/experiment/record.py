"""The schema of a record: the point, how the attempt ended, and its environment. Figures are in `measurement`."""

import functools
import re
from typing import Literal

import msgspec

from pipeline.experiment.measurement import Measurement, RecordStruct, ShortText, Telemetry, Text
from pipeline.experiment.spec import Spec
from pipeline.plan.axes import COMPILED_EXECUTIONS, NonNegativeInt
from pipeline.system.host import parse_timestamp

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
    """One GPU. `memory_of_others_bytes` is the memory held by other processes at the start (None: not known)."""

    name: ShortText
    node: ShortText | None = None
    uuid: ShortText | None = None
    memory_bytes: NonNegativeInt | None = None
    memory_of_others_bytes: NonNegativeInt | None = None


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
        if measurement.num_parameters is None or measurement.gradient_bytes is None:
            raise ValueError("a measured point has num_parameters and gradient_bytes")
        if [epoch.epoch for epoch in epochs] != list(range(1, len(epochs) + 1)):
            raise ValueError("epochs count from 1, one after another")
        if spec.measure in ("epochs", "quantize") and not spec.min_epochs <= len(epochs) <= spec.epochs:
            raise ValueError(f"the point has at least {spec.min_epochs} of {spec.epochs} epochs, and not {len(epochs)}")
        for epoch in epochs:
            if [clock.rank for clock in epoch.ranks] != ranks or any(not clock.epoch_time_ns for clock in epoch.ranks):
                raise ValueError(f"epoch {epoch.epoch} needs the time of each of {len(ranks)} ranks, in their order")
            if epoch.num_updates != epoch.epoch * spec.steps_per_epoch:
                raise ValueError(f"epoch {epoch.epoch} cannot end after {epoch.num_updates} updates")
        for series in measurement.communication.series if measurement.communication else ():
            if any(len(window) != len(ranks) for window in series.window_times_ns):
                raise ValueError(f"every window of {series.variant} needs the times of {len(ranks)} ranks")

    @property
    def timing_variables(self) -> dict[str, str]:
        """The variables that may have changed a time of this record: not NCCL's on one GPU, or CUDA's on a CPU."""
        return {name: value for name, value in self.environment.variables.items() if self.may_depend_on(name)}

    def may_depend_on(self, variable: str) -> bool:
        """True if the variable may change the times of such a point."""
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
