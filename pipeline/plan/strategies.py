"""The strategies: what each one sends, keeps and is called. What it does with torch is in training/torch_strategies.py.

A strategy is one declaration here, and one class there. Every other module asks for its facts, never for its name.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from pipeline.plan.axes import Axes


class UnitBytes(Protocol):
    """The sizes of the units that are sharded one by one, as a record has them."""

    @property
    def num_units(self) -> int: ...
    @property
    def units_bytes(self) -> int: ...
    @property
    def largest_unit_bytes(self) -> int: ...
    @property
    def root_bytes(self) -> int: ...


Bytes = Callable[[int, UnitBytes | None, "Axes"], float | None]  # takes: bytes of the model's gradients
StateBytes = Callable[[int, int, UnitBytes | None, "Axes"], float | None]  # likewise, and of the optimizer's state


def all_bytes(model_bytes: int, units: UnitBytes | None, axes: "Axes") -> float:
    """Return the bytes of all gradients, which are those of all parameters."""
    return float(model_bytes)


def no_bytes(model_bytes: int, units: UnitBytes | None, axes: "Axes") -> None:
    """Return None: nothing travels."""


def bare_state(model_bytes: int, optimizer_bytes: int, units: UnitBytes | None, axes: "Axes") -> float:
    """Return the bytes of weights, gradients and the optimizer's state."""
    return float(2 * model_bytes + optimizer_bytes)


class Strategy(NamedTuple):
    """The facts of a strategy that need no torch. The defaults are those of the bare model on one GPU."""

    name: str
    words: str  # its name in a sentence
    title: str  # what torch or its authors call it
    simplicity: int  # of two that are as fast, the one with the lower number is recommended
    aliases: tuple[str, ...] = ()  # in files of timings: letters and digits, without the module of torch
    is_parallel: bool = True  # False: it uses one GPU alone
    is_distributed: bool = False  # each GPU has a process of its own; otherwise one process uses all GPUs
    shards_state: bool = False  # a GPU keeps a part of the optimizer's state
    shards_parameters: bool = False  # and of the parameters and their gradients
    replicates: bool = False  # groups of GPUs have copies, each sharded over its group
    is_eager_only: bool = False  # not tried compiled or captured
    syncs_batchnorm: bool = False  # tried with BatchNorm over all GPUs
    wrappers: tuple[str, ...] = ()  # classes of torch by which a script is seen to use it, of model or optimizer
    refuses: Mapping[str, str] = MappingProxyType({})  # axes that do not work with it -> the reason
    usual_in_bf16: Mapping[str, str] = MappingProxyType({})  # axes that a grid gets in bf16, unless it states them
    collectives: tuple[str, ...] = ()  # operations of a process group that it calls in a step
    collective_words: str = ""
    variants: tuple[str, ...] = ()  # steps that `measure: communication` times, in the order in which they are built
    no_op: str | None = None  # the variant whose collectives return at once; None: they cannot be left out
    saves_against: str = ""  # the strategy against whose memory its own is compared
    has_known_answers: bool = False  # the self-test knows what its collectives must cost
    selftest_model: Literal["resnet18", "gpt"] = "gpt"
    # by formula: bytes of gradients and of parameters that a rank gives to the others in an update, and a GPU's memory
    # for weights, gradients and the optimizer's state on the rank that has most, without that for samples
    gradient_bytes: Bytes = all_bytes
    parameter_bytes: Bytes = no_bytes
    state_bytes: StateBytes = bare_state

    @property
    def uses_threads(self) -> bool:
        """True if one process drives several GPUs, with a thread for each."""
        return self.is_parallel and not self.is_distributed

    @property
    def has_all_reduces_alone(self) -> bool:
        """True if all that it calls in a step are all-reduces of gradients."""
        return self.collectives == ("all_reduce",)

    @property
    def moves_gradients_alone(self) -> bool:
        """True if what it sends may be compared with a ring all-reduce of all gradients."""
        return not self.collectives or self.has_all_reduces_alone


def gradients_of_replicas(model_bytes: int, units: UnitBytes | None, axes: "Axes") -> float:
    """Return the bytes that all GPUs but the first send to it."""
    return model_bytes * (axes.num_gpus - 1)


SHARE_OF_FP32 = {"none": 1.0, "fp32": 1.0, "bf16": 0.5}  # of bytes


def gradients_in_buckets(model_bytes: int, units: UnitBytes | None, axes: "Axes") -> float:
    """Return the bytes of all buckets as they are sent."""
    return model_bytes * SHARE_OF_FP32[axes.gradient_compression]


def bucket_state(model_bytes: int, optimizer_bytes: int, units: UnitBytes | None, axes: "Axes") -> float:
    """Return the bytes of a rank: gradients are there twice, in buckets and beside them, unless they are views."""
    return float(model_bytes * (2 if axes.gradient_as_bucket_view else 3) + optimizer_bytes)


def reduced_bytes(model_bytes: int, units: UnitBytes | None, axes: "Axes") -> float | None:
    """Return the input of the reduce-scatters in an update, and that of the all-reduces of shards between copies.

    A group of one GPU calls nothing. None if the units are not known.
    """
    if units is None:
        return None
    whole = (units.units_bytes + units.root_bytes) * SHARE_OF_FP32[axes.reduce_dtype]
    between_copies = whole / axes.num_shards if axes.num_shards < axes.num_gpus else 0
    return between_copies + (whole if axes.num_shards > 1 else 0)


def gathered_bytes(model_bytes: int, units: UnitBytes | None, axes: "Axes") -> float | None:
    """Return the output of the all-gathers in an update: once a pass, and again if the forward pass frees it."""
    if units is None:
        return None
    if axes.num_shards == 1:
        return 0.0
    in_units = units.units_bytes * (1 if axes.reshard == "never" else 2)
    in_root = units.root_bytes * (2 if axes.reshard == "always" else 1)
    return (in_units + in_root) * axes.grad_accumulation * SHARE_OF_FP32[axes.param_dtype]


def sharded_state(model_bytes: int, optimizer_bytes: int, units: UnitBytes | None, axes: "Axes") -> float | None:
    """Return the bytes of a rank: shards of all unless the host has them, the root if it is not freed, units in flight.

    In flight are three: two gathered units and the gradients of one; or of the two one, and a copy of these gradients
    that is reduced. None if the units are not known, or each GPU has a whole copy.
    """
    if units is None or axes.num_shards == 1:
        return None
    gathered, reduced = SHARE_OF_FP32[axes.param_dtype], SHARE_OF_FP32[axes.reduce_dtype]
    shards = 0.0 if axes.cpu_offload else 2 * model_bytes / axes.num_shards + optimizer_bytes
    root = units.root_bytes * gathered
    if axes.reshard == "never":
        return shards + units.units_bytes * gathered + root + (gathered + reduced) * units.largest_unit_bytes
    in_flight = (2 * gathered + max(gathered, reduced)) * (units.largest_unit_bytes or units.root_bytes)
    return shards + in_flight + (root if units.num_units and axes.reshard == "blocks" else 0)


SINGLE = Strategy(
    name="single",
    words="SINGLE",
    title="one GPU",
    simplicity=0,
    aliases=("singlegpu", "1gpu"),
    is_parallel=False,
)
DATAPARALLEL = Strategy(
    name="dp",
    words="DP",
    title="DataParallel",
    simplicity=100,
    aliases=("dataparallel",),
    refuses=dict.fromkeys(("compile", "activation_checkpointing"), "it copies the blocks in each step"),
    variants=("plain", "dp", "dp_again"),
    gradient_bytes=gradients_of_replicas,
    state_bytes=lambda model_bytes, optimizer_bytes, units, axes: None,  # GPUs differ
)
DDP = Strategy(
    name="ddp",
    words="DDP",
    title="DistributedDataParallel",
    wrappers=("DistributedDataParallel",),
    simplicity=10,
    aliases=("distributeddataparallel",),
    is_distributed=True,
    syncs_batchnorm=True,
    collectives=("all_reduce",),
    collective_words="all-reduces of gradients",
    # As in training, DDP over all ranks comes first. `ddp_one` comes last, because it uses a second NCCL communicator.
    # A DDP that is warmed up after `ddp_one` has shorter gaps between its kernels, by 0.6 ms in a step of 27.5 ms on
    # two H100s (512 per GPU, TF32).
    variants=("ddp", "ddp_again", "no_op_hook", "no_collectives", "no_sync", "plain", "ddp_one"),
    no_op="no_op_hook",
    has_known_answers=True,
    selftest_model="resnet18",
    gradient_bytes=gradients_in_buckets,
    state_bytes=bucket_state,
)
FSDP = Strategy(
    name="fsdp",
    words="FSDP",
    title="FSDP2",
    wrappers=("FSDPModule", "FullyShardedDataParallel"),
    simplicity=30,
    aliases=("fullyshardeddataparallel", "fsdp2"),
    is_distributed=True,
    shards_state=True,
    shards_parameters=True,
    is_eager_only=True,
    refuses={
        "layout": "channels_last weights cannot be sharded",
        "fused_optimizer": "SGD has no fused update of shards",
        "broadcast_buffers": "it never broadcasts buffers",
        "bucket_cap_mb": "it has no buckets",
        "gradient_as_bucket_view": "it has no buckets",
        "evaluate": "no rank has the whole model",
    },
    usual_in_bf16={"param_dtype": "bf16"},
    collectives=("all_gather", "reduce_scatter"),
    collective_words="all-gathers and reduce-scatters",
    variants=("fsdp", "fsdp_again", "no_op", "plain"),
    no_op="no_op",
    saves_against="ddp",
    gradient_bytes=reduced_bytes,
    parameter_bytes=gathered_bytes,
    state_bytes=sharded_state,
)
HSDP = FSDP._replace(
    name="hsdp",
    words="HSDP",
    title="FSDP2 in groups of GPUs, with a copy of the model in each",
    simplicity=40,
    aliases=("hybridshardeddataparallel",),
    replicates=True,
    collectives=("all_gather", "reduce_scatter", "all_reduce"),
    collective_words="all-gathers and reduce-scatters in groups and all-reduces between them",
    variants=("hsdp", "hsdp_again", "no_op", "plain"),
)
ZERO1 = Strategy(
    name="zero1",
    words="ZeRO-1",
    title="ZeRO-1 around DDP",
    simplicity=20,
    aliases=("zeroredundancyoptimizer",),
    is_distributed=True,
    wrappers=("ZeroRedundancyOptimizer",),
    shards_state=True,
    is_eager_only=True,
    collectives=("all_reduce", "broadcast"),
    collective_words="all-reduces and broadcasts",
    variants=("zero1", "zero1_again", "no_op", "plain"),
    no_op="no_op",
    saves_against="ddp",
    parameter_bytes=all_bytes,
    state_bytes=bucket_state,
)

STRATEGIES = {one.name: one for one in (SINGLE, DATAPARALLEL, DDP, FSDP, HSDP, ZERO1)}
"""Every strategy by its name, in the order in which help names them."""

*OTHERS, LAST = (f"`{one.name}` ({one.title})" for one in STRATEGIES.values())
NAMED_STRATEGIES = f"{', '.join(OTHERS)} or {LAST}"

VARIANT_NAMES = tuple(dict.fromkeys(name for one in STRATEGIES.values() for name in one.variants))

if TYPE_CHECKING:
    StrategyName = str
    VariantName = str
else:
    StrategyName = Literal[tuple(STRATEGIES)]
    VariantName = Literal[VARIANT_NAMES]
