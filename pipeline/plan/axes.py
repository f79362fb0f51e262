"""Every axis of a point, declared once: type, default, meaning, words for people, and where alike points may differ.

A new axis is a field of `Axes`. Grid files, `--set`, run ids, groups of alike points, labels, docs/grids.md and
docs/schema follow from its declaration.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from pipeline.plan.strategies import NAMED_STRATEGIES, STRATEGIES, StrategyName
from pipeline.system.errors import NO_CONTROL_CHARACTERS

Device = Literal["cuda", "cpu"]
Reshard = Literal["blocks", "always", "never"]
Compression = Literal["none", "bf16"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Input = Literal["dataloader", "synthetic", "gpu"]
MemoryLayout = Literal["contiguous", "channels_last"]
Execution = Literal["eager", "compile", "graph", "compiled_graph"]
COMPILED_EXECUTIONS: tuple[Execution, ...] = ("compile", "compiled_graph")
CAPTURED_EXECUTIONS: tuple[Execution, ...] = ("graph", "compiled_graph")
Dataset = Literal["cifar10", "imagefolder", "synthetic"]
Remedy = Literal["linear_scaling", "warmup", "zero_gamma", "no_bias_decay"]
REMEDIES: tuple[Remedy, ...] = get_args(Remedy)
Schedule = Literal["constant", "cosine"]
Measure = Literal["epochs", "communication", "memory", "quantize"]

ModelName = Annotated[str, msgspec.Meta(max_length=400, pattern=NO_CONTROL_CHARACTERS)]  # see model_name
ModelOption = Annotated[str, msgspec.Meta(max_length=400, pattern=NO_CONTROL_CHARACTERS)]  # `layers=4`
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
FractionBelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]

CIFAR10_SAMPLES = 50_000  # images of the training set
REFERENCE_GLOBAL_BATCH_SIZE = 128  # `learning_rate` is for this batch size, if no other is stated


class MayDiffer(enum.Flag):
    """The uses in which points that differ in an axis still count as alike. See `experiment.axis_groups`."""

    POOLED = enum.auto()
    """Repeats of one measurement: the tables pool them into one row."""
    BASELINE = enum.auto()
    """A point and its one-GPU baseline; their batch sizes are compared apart, by what the scaling fixes."""
    COST = enum.auto()
    """Points of equal cost: these axes change values, not the work."""
    COST_PER_SAMPLE = enum.auto()
    """Timed training without evaluation: its cost is proportional to the samples trained on."""
    COST_PER_STEP = enum.auto()
    """Likewise where the length of an epoch changes neither image decoding nor what is compiled or captured."""
    OOM = enum.auto()
    """A smaller batch that ran out of memory implies that a larger one does."""
    PEAK_MEMORY = enum.auto()
    """Peak memory scales with the batch size and does not depend on how long the point runs."""
    PREDICTION = enum.auto()
    """One series of measured steps, from which the step on more GPUs is predicted."""
    CHOICE = enum.auto()
    """Ways to train one model on one data set, of which the fastest is to be used."""
    TARGET = enum.auto()
    """Trainings of one model on one data set, compared by the time that they take to a target accuracy."""
    TRAINED = enum.auto()
    """A communication point and the training point beside it: the step is the same, its input and length are not."""
    PROCESS = enum.auto()
    """Points that one set of processes may run in turn: each point sets these anew."""


NOWHERE = MayDiffer(0)
BASELINE, CHOICE, TARGET, PROCESS = MayDiffer.BASELINE, MayDiffer.CHOICE, MayDiffer.TARGET, MayDiffer.PROCESS
TRAINED = MayDiffer.TRAINED | PROCESS  # input and length, which processes set anew
OF_STRATEGY = BASELINE | CHOICE | TARGET | PROCESS
REPEATED = MayDiffer.POOLED | MayDiffer.COST | MayDiffer.OOM | MayDiffer.PEAK_MEMORY | OF_STRATEGY


@dataclass(frozen=True)
class Axis:
    """The declaration of an axis, beside its type and default.

    `example` are words after --set that give the axis another value. `may_differ` are the uses in which points that
    differ in the axis are alike. `strategy` is the only one that has the axis. `of_images` marks an axis of image
    models alone, `changes_learning` one of a choice that may change what is learnt, beside the time.

    `words` are those for a value, where {} stands for it, and `values` those for single values; "" is the usual case,
    which needs no words.
    """

    meaning: str
    example: str
    may_differ: MayDiffer = NOWHERE
    strategy: StrategyName | None = None
    of_images: bool = False
    changes_learning: bool = False
    words: str = ""
    values: Mapping[Any, str] = field(default_factory=dict)


def axis(meaning: str, example: str, may_differ: MayDiffer = NOWHERE, **facts: Any) -> msgspec.Meta:
    """Return the annotation that declares a field of `Axes`; the schema has the meaning as its description."""
    return msgspec.Meta(description=meaning, extra={"axis": Axis(meaning, example, may_differ, **facts)})


class Axes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The axes of a point, in the order in which tables show them.

    A default never changes, and a new axis has the old behaviour as its default: the run id is a digest of the values
    that differ from their defaults, so old ids stay valid.

    `None` in `precision`, `input`, `num_workers`, `dataset` and `model` means "not stated". Only timings that were
    measured elsewhere may have None there.
    """

    strategy: Annotated[
        StrategyName,
        axis(
            f"Parallel strategy: {NAMED_STRATEGIES}; docs/strategies.md.",
            "strategy=ddp,fsdp num_gpus=2,4",
            BASELINE | CHOICE | TARGET,
            words="{}",
        ),
    ]
    num_gpus: Annotated[
        PositiveInt,
        axis(
            "GPUs over all nodes; processes where `device` is `cpu`.",
            "num_gpus=2 strategy=ddp,dp",
            BASELINE | MayDiffer.PREDICTION | CHOICE | TARGET,
            changes_learning=True,
            words="{} GPUs",
            values={1: "{} GPU"},
        ),
    ]
    batch_size_per_gpu: Annotated[
        PositiveInt,
        axis(
            "Samples of a step on each GPU; where `grad_accumulation` is above 1, of a pass.",
            "batch_size_per_gpu=64,256",
            MayDiffer.OOM | MayDiffer.PEAK_MEMORY | CHOICE | TARGET | PROCESS,
            changes_learning=True,
            words="{} per GPU",
        ),
    ]
    device: Annotated[
        Device,
        axis(
            "`cuda` or `cpu`; a grid may say `auto`: `cuda` where there is a GPU, else `cpu`.",
            "device=cpu strategy=ddp num_gpus=2",
            words="{}",
        ),
    ] = "cuda"
    num_nodes: Annotated[
        PositiveInt,
        axis(
            "Nodes over which the GPUs are divided equally.",
            "num_nodes=2 num_gpus=4 strategy=ddp",
            BASELINE | MayDiffer.PREDICTION | CHOICE | TARGET,
            words="{} nodes",
            values={1: "{} node"},
        ),
    ] = 1
    model: Annotated[
        ModelName | None,
        axis(
            "Model: `resnet18` or `lenet`; `torchvision:NAME`, a classification model at the size of its weights' "
            "images; `gpt`, a small decoder; `file.py:Class` or `package.module:Class`, your own (docs/workloads.md).",
            "model=torchvision:resnet50 dataset=imagefolder input=synthetic strategy=ddp num_gpus=2",
            words="{}",
        ),
    ] = "resnet18"
    options: Annotated[
        tuple[ModelOption, ...],
        axis(
            "Arguments of the constructor of the model's class, each given as `model.NAME`.",
            "model.layers=2,4 model=gpt input=synthetic strategy=ddp num_gpus=2",
        ),
    ] = ()
    dataset: Annotated[
        Dataset | None,
        axis(
            "Data set of image models: `cifar10`, `imagefolder` or `synthetic`.",
            "dataset=imagefolder",
            TRAINED,
            of_images=True,
            words="{}",
        ),
    ] = "cifar10"
    num_samples: Annotated[
        PositiveInt,
        axis("Training samples of an epoch.", "num_samples=40000", MayDiffer.COST_PER_STEP | CHOICE | TRAINED),
    ] = CIFAR10_SAMPLES
    input: Annotated[
        Input | None,
        axis(
            "Source of the training batches: `dataloader`; `gpu`, images that lie on the device, where each epoch is "
            "augmented inside the clock (also on `cpu`); `synthetic`, one batch that lies on the device.",
            "input=gpu",
            CHOICE | TRAINED,
            words="{}",
            values={"gpu": "images on the device"},
        ),
    ] = "dataloader"
    num_workers: Annotated[
        NonNegativeInt | None,
        axis("Workers of the DataLoader of each rank.", "num_workers=4,8", CHOICE | TRAINED, words="{} loader workers"),
    ] = 2
    precision: Annotated[
        Precision | None,
        axis(
            "Number format of the computation: `fp32`; `tf32`, PyTorch's default for convolutions (fp32 where a device "
            "has no TF32); `bf16`, autocast in training and TF32 in the test pass, refused below compute capability "
            "8.0; `fp16`, autocast with a scaled loss.",
            "precision=tf32,bf16",
            CHOICE | PROCESS,
            changes_learning=True,
            words="{}",
        ),
    ] = "tf32"
    epochs: Annotated[
        PositiveInt,
        axis(
            "Epochs of the run; the first only warms up.",
            "epochs=5",
            BASELINE | MayDiffer.COST_PER_SAMPLE | MayDiffer.PEAK_MEMORY | CHOICE | TARGET | TRAINED,
            words="{} epochs",
        ),
    ] = 2
    max_steps: Annotated[
        PositiveInt | None,
        axis(
            "Steps after which an epoch is cut off; a cut epoch has no epoch time. With `input: synthetic` the point "
            "is a probe: it asks what fits, so its batch may exceed the data set.",
            "max_steps=3 epochs=1 input=synthetic",
            MayDiffer.COST_PER_STEP | MayDiffer.PEAK_MEMORY | TRAINED,
            words="at most {} steps",
            values={None: ""},
        ),
    ] = None
    evaluate: Annotated[
        bool,
        axis(
            "Test loss and accuracy after each epoch; refused with `input: synthetic`, unless the data set is "
            "synthetic too.",
            "evaluate=true",
            TRAINED,
        ),
    ] = False
    learning_rate: Annotated[
        PositiveFloat,
        axis(
            "Learning rate at every batch size, unless `linear_scaling` multiplies it.",
            "learning_rate=0.05,0.1",
            MayDiffer.COST | TARGET | PROCESS,
            of_images=True,
            words="learning rate {}",
        ),
    ] = 0.1
    momentum: Annotated[FractionBelowOne, axis("Momentum of SGD.", "momentum=0.95", PROCESS, of_images=True)] = 0.9
    weight_decay: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1e6)],
        axis("Weight decay of SGD.", "weight_decay=1e-4", PROCESS, of_images=True),
    ] = 5e-4
    remedies: Annotated[
        tuple[Remedy, ...],
        axis(
            "Large-batch techniques, joined by `+`: `linear_scaling`, `warmup`, `zero_gamma` and `no_bias_decay` (no "
            "weight decay on BatchNorm and biases); docs/words.md.",
            "remedies=none,linear_scaling+warmup",
            TARGET | PROCESS,
            of_images=True,
        ),
    ] = ()
    warmup_epochs: Annotated[
        PositiveInt,
        axis(
            "Epochs over which `warmup` raises the learning rate.",
            "warmup_epochs=3 epochs=5 remedies=warmup",
            TARGET | PROCESS,
            of_images=True,
        ),
    ] = 2
    reference_batch_size: Annotated[
        PositiveInt,
        axis(
            "Global batch size of the learning rate: `linear_scaling` multiplies the rate by global batch / this.",
            "reference_batch_size=256 remedies=linear_scaling",
            MayDiffer.COST | TARGET | PROCESS,
            of_images=True,
            words="reference {}",
            values={REFERENCE_GLOBAL_BATCH_SIZE: ""},
        ),
    ] = REFERENCE_GLOBAL_BATCH_SIZE
    schedule: Annotated[
        Schedule,
        axis(
            "Learning rate after warm-up: `constant`, or `cosine`, which falls to 0 over the run.",
            "schedule=cosine",
            PROCESS,
            of_images=True,
        ),
    ] = "constant"
    nesterov: Annotated[bool, axis("Nesterov momentum.", "nesterov=true", PROCESS, of_images=True)] = False
    broadcast_buffers: Annotated[
        bool,
        axis(
            "DDP sends the buffers of rank 0, such as those of BatchNorm, to all ranks before each forward pass.",
            "broadcast_buffers=false",
            CHOICE | TARGET | PROCESS,
            changes_learning=True,
        ),
    ] = True
    sync_batchnorm: Annotated[
        bool,
        axis(
            "BatchNorm shares its statistics over the GPUs of DDP.",
            "sync_batchnorm=true strategy=ddp num_gpus=2",
            CHOICE | TARGET | PROCESS,
            changes_learning=True,
        ),
    ] = False
    bucket_cap_mb: Annotated[
        PositiveFloat | None,
        axis(
            "MiB of gradients in each all-reduce of DDP, at most; by default 25, in the first one 1.",
            "bucket_cap_mb=10,25,100",
            CHOICE | PROCESS,
            words="buckets of {} MiB",
            values={None: "default buckets"},
        ),
    ] = None
    gradient_as_bucket_view: Annotated[
        bool,
        axis(
            "Gradients are views of DDP's buckets, so they are not copied back.",
            "gradient_as_bucket_view=true",
            CHOICE | PROCESS,
        ),
    ] = False
    static_graph: Annotated[
        bool,
        axis(
            "DDP counts on the same graph in each step.",
            "static_graph=true strategy=ddp num_gpus=2",
            OF_STRATEGY,
            strategy="ddp",
        ),
    ] = False
    gradient_compression: Annotated[
        Compression,
        axis(
            "Number format of gradients in DDP's all-reduces: `none` changes nothing, `bf16` halves what they send.",
            "gradient_compression=bf16 strategy=ddp num_gpus=2",
            OF_STRATEGY,
            strategy="ddp",
            changes_learning=True,
            words="{} gradients",
            values={"none": ""},
        ),
    ] = "none"
    reshard: Annotated[
        Reshard,
        axis(
            "What FSDP frees after the forward pass: `blocks`, `always` or `never`; docs/strategies.md.",
            "reshard=blocks,always,never strategy=fsdp num_gpus=2",
            OF_STRATEGY,
            strategy="fsdp",
            values={"blocks": ""},
        ),
    ] = "blocks"
    grad_accumulation: Annotated[
        PositiveInt,
        axis(
            "Passes of `batch_size_per_gpu` samples for each update.",
            "grad_accumulation=2 num_samples=40960 batch_size_per_gpu=128",
            CHOICE | TARGET | PROCESS,
            changes_learning=True,
            words="{} passes an update",
            values={1: ""},
        ),
    ] = 1
    measure: Annotated[
        Measure,
        axis(
            "What is measured: `epochs`; `communication`, on two GPUs or more with `input: synthetic`; `memory`, the "
            "largest batch that fits; `quantize`, LeNet in int8 on one device (docs/int8.md).",
            "measure=communication input=synthetic strategy=ddp num_gpus=2",
            TRAINED,
            words="{}",
            values={"epochs": "timed epochs"},
        ),
    ] = "epochs"
    windows: Annotated[
        PositiveInt,
        axis(
            "Timed epochs, or rounds of timed steps, at most.",
            "windows=6 epochs=7",
            BASELINE | MayDiffer.COST_PER_SAMPLE | MayDiffer.PEAK_MEMORY | CHOICE | TRAINED,
            words="{} windows",
        ),
    ] = 1
    memory_limit_gib: Annotated[
        PositiveFloat | None,
        axis(
            "Memory limit of each process, so that any machine can play a smaller one.",
            "memory_limit_gib=16",
            PROCESS,
            words="limit {} GiB",
            values={None: "no memory limit"},
        ),
    ] = None
    layout: Annotated[
        MemoryLayout,
        axis(
            "Layout of images and weights in memory: `contiguous` or `channels_last`.",
            "layout=channels_last",
            CHOICE | PROCESS,
            words="{}",
        ),
    ] = "contiguous"
    fused_optimizer: Annotated[
        bool,
        axis(
            "The optimizer updates many parameters in a kernel.",
            "fused_optimizer=true",
            CHOICE | PROCESS,
            of_images=True,
        ),
    ] = False
    execution: Annotated[
        Literal[Execution, "auto"],
        axis(
            "Who issues a step: `eager`, the host, operation by operation; `compile`, the host with compiled kernels; "
            "`graph` and `compiled_graph`, one CUDA graph of either; `auto`, the last of these that is legal (on the "
            "CPU `eager`), which the record states.",
            "execution=compiled_graph strategy=ddp num_gpus=2",
            CHOICE | PROCESS,
            words="{}",
        ),
    ] = "eager"
    num_calibration_samples: Annotated[
        PositiveInt,
        axis(
            "Training images from which int8 activations get their scales.",
            "num_calibration_samples=400 measure=quantize strategy=single num_gpus=1 model=lenet precision=fp32 "
            "evaluate=true",
            of_images=True,
        ),
    ] = 1000
    seed: Annotated[
        NonNegativeInt,
        axis(
            "Seed of weights and data. Points that differ in it and in `repeat` alone are pooled: the tables show the "
            "median and n.",
            "seed=1",
            REPEATED,
        ),
    ] = 0
    repeat: Annotated[
        NonNegativeInt, axis("Number of a repeat of the point, pooled like `seed`.", "repeat=0,1,2", REPEATED)
    ] = 0


AXIS_DEFAULTS: dict[str, Any] = {found.name: found.default for found in msgspec.structs.fields(Axes)}
AXES: tuple[str, ...] = tuple(AXIS_DEFAULTS)
"""Every axis a grid may name, in the order in which tables show them."""
AXIS_TYPES: dict[str, Any] = {found.name: found.type for found in msgspec.structs.fields(Axes)}


def declaration_of(annotated: Any) -> Axis:
    """Return the declaration in the annotated type of a field."""
    extras = [part.extra for part in annotated.__metadata__ if part.extra]
    found: Axis = extras[-1]["axis"]
    return found


def leaves_of(axis_type: Any) -> list[Any]:
    """Return the plain types, and the values of fixed sets, that the type of an axis is made of."""
    if get_origin(axis_type) is Annotated:
        return leaves_of(get_args(axis_type)[0])
    return [leaf for part in get_args(axis_type) for leaf in leaves_of(part)] or [axis_type]


DECLARED: dict[str, Axis] = {name: declaration_of(annotated) for name, annotated in AXIS_TYPES.items()}
FLOAT_AXES = tuple(name for name, axis_type in AXIS_TYPES.items() if float in leaves_of(axis_type))
IMAGE_AXES = tuple(name for name, axis in DECLARED.items() if axis.of_images)
"""Axes of image models alone."""
STRATEGY_AXES = tuple(
    name for strategy in reversed(STRATEGIES) for name, axis in DECLARED.items() if axis.strategy == strategy
)
"""Axes of one strategy alone."""


def axes_that(use: MayDiffer) -> tuple[str, ...]:
    """Return the axes in which alike points may differ in this use."""
    return tuple(name for name, axis in DECLARED.items() if use in axis.may_differ)
