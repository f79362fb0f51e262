"""Every axis of a point, declared once, and what the axes of a point refuse.

A new axis is a field of `Axes`: type, default, meaning, words for people, and where alike points may differ. Grid
files, `--set`, run ids, groups of alike points, labels, docs/grids.md and docs/schema follow from its declaration.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from pipeline.plan.model_names import BUILT_IN_MODELS, CIFAR_MODELS, TORCHVISION, is_image_model
from pipeline.plan.script import check_script_axes
from pipeline.plan.strategies import NAMED_STRATEGIES, STRATEGIES, Strategy, StrategyName
from pipeline.system.errors import NO_CONTROL_CHARACTERS


class MayDiffer(enum.Flag):
    """The uses in which points that differ in an axis still count as alike. See `plan.spec`."""

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


@dataclass(frozen=True)
class Axis:
    """The declaration of an axis, beside its type and default.

    `example` are words after --set that give the axis another value. `may_differ` are the uses in which points that
    differ in the axis are alike. `strategies` are those that have the axis, if not all do. `of_images` marks an axis of
    image models alone, `changes_learning` one of a choice that may change what is learnt, beside the time.

    `words` are those for a value, where {} stands for it, and `values` those for single values; "" is the usual case,
    which needs no words.
    """

    meaning: str
    example: str
    may_differ: MayDiffer = NOWHERE
    strategies: tuple[StrategyName, ...] = ()
    of_images: bool = False
    changes_learning: bool = False
    words: str = ""
    values: Mapping[Any, str] = field(default_factory=dict)


def declare(meaning: str, example: str, may_differ: MayDiffer = NOWHERE, **facts: Any) -> msgspec.Meta:
    """Return the annotation that declares a field of `Axes`; the schema has the meaning as its description."""
    return msgspec.Meta(description=meaning, extra={"axis": Axis(meaning, example, may_differ, **facts)})


def leaves_of(axis_type: Any) -> list[Any]:
    """Return the plain types, and the values of fixed sets, that the type of an axis is made of."""
    if get_origin(axis_type) is Annotated:
        return leaves_of(get_args(axis_type)[0])
    return [leaf for part in get_args(axis_type) for leaf in leaves_of(part)] or [axis_type]


Device = Literal["cuda", "cpu"]
Reshard = Literal["blocks", "always", "never"]
Compression = Literal["none", "bf16"]
ShardFormat = Literal["fp32", "bf16"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Input = Literal["dataloader", "synthetic", "gpu"]
MemoryLayout = Literal["contiguous", "channels_last"]
Parts = Literal["none", "blocks"]
NumaBinding = Literal["none", "gpu"]
Execution = Literal["eager", "compile", "graph", "compiled_graph"]
COMPILED_EXECUTIONS: tuple[Execution, ...] = ("compile", "compiled_graph")
CAPTURED_EXECUTIONS: tuple[Execution, ...] = ("graph", "compiled_graph")
Dataset = Literal["cifar10", "imagefolder", "synthetic"]
Remedy = Literal["linear_scaling", "warmup", "zero_gamma", "no_bias_decay"]
REMEDIES: tuple[Remedy, ...] = get_args(Remedy)
Schedule = Literal["constant", "cosine"]
Measure = Literal["epochs", "communication", "network", "memory", "quantize"]

ModelName = Annotated[str, msgspec.Meta(max_length=400, pattern=NO_CONTROL_CHARACTERS)]  # see model_name
ScriptCommand = Annotated[str, msgspec.Meta(max_length=4000, pattern=NO_CONTROL_CHARACTERS)]
OptimizerName = Annotated[str, msgspec.Meta(max_length=200, pattern=r"\A\w+\Z")]
ModelOption = Annotated[str, msgspec.Meta(max_length=400, pattern=NO_CONTROL_CHARACTERS)]  # `layers=4`
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Flops = Annotated[float, msgspec.Meta(ge=1, le=2**62)]
FractionBelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]

CIFAR10_SAMPLES = 50_000  # images of the training set
REFERENCE_GLOBAL_BATCH_SIZE = 128  # `learning_rate` is for this batch size, if no other is stated


NUM_WARM_UP_EPOCHS = 1  # first epochs of a run, never reported: caches fill, kernels are chosen and compiled
NUM_TRIAL_STEPS = 3  # in a trial of a memory search; not 1, because the first step creates the optimizer's state

BASELINE, CHOICE, TARGET, PROCESS = MayDiffer.BASELINE, MayDiffer.CHOICE, MayDiffer.TARGET, MayDiffer.PROCESS
TRAINED = MayDiffer.TRAINED | PROCESS  # input and length, which processes set anew
OF_STRATEGY = BASELINE | CHOICE | TARGET | PROCESS
REPEATED = MayDiffer.POOLED | MayDiffer.COST | MayDiffer.OOM | MayDiffer.PEAK_MEMORY | OF_STRATEGY


class Axes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The axes of a point, in the order in which tables show them.

    A default never changes, and a new axis has the old behaviour as its default: the run id is a digest of the values
    that differ from their defaults, so old ids stay valid.

    `None` in `precision`, `input`, `num_workers`, `dataset` and `model` means "not stated". Only timings that were
    measured elsewhere may have None there.

    Raises ValueError if the axes contradict each other.
    """

    strategy: Annotated[
        StrategyName,
        declare(
            f"Parallel strategy: {NAMED_STRATEGIES}; docs/strategies.md.",
            "strategy=ddp,fsdp num_gpus=2,4",
            BASELINE | CHOICE | TARGET,
            words="{}",
        ),
    ]
    num_gpus: Annotated[
        PositiveInt,
        declare(
            "GPUs over all nodes; processes where `device` is `cpu`.",
            "num_gpus=2 strategy=ddp,dp",
            BASELINE | MayDiffer.PREDICTION | CHOICE | TARGET,
            changes_learning=True,
            words="{} $GPUs",
            values={1: "{} $GPU"},
        ),
    ]
    batch_size_per_gpu: Annotated[
        PositiveInt,
        declare(
            "Samples of a step on each GPU; where `grad_accumulation` is above 1, of a pass.",
            "batch_size_per_gpu=64,256",
            MayDiffer.OOM | MayDiffer.PEAK_MEMORY | CHOICE | TARGET | PROCESS,
            changes_learning=True,
            words="{} per $GPU",
        ),
    ]
    device: Annotated[
        Device,
        declare(
            "`cuda` or `cpu`; a grid may say `auto`: `cuda` where the partition has a GPU (without Slurm: this "
            "machine), else `cpu`.",
            "device=cpu strategy=ddp num_gpus=2",
            words="{}",
        ),
    ] = "cuda"
    num_nodes: Annotated[
        PositiveInt,
        declare(
            "Nodes over which the GPUs are divided equally; a grid may give `gpus_per_node` in place of `num_gpus`. "
            "With --set configurations of one process stay on one node.",
            "num_nodes=1,2 gpus_per_node=2 strategy=ddp",
            BASELINE | MayDiffer.PREDICTION | CHOICE | TARGET,
            words="{} nodes",
            values={1: "{} node"},
        ),
    ] = 1
    model: Annotated[
        ModelName | None,
        declare(
            "Model: `resnet18` or `lenet`; `torchvision:NAME`, a classification model at the size of its weights' "
            "images; `gpt`, a small decoder; `file.py:Class` or `package.module:Class`, your own (docs/workloads.md).",
            "model=torchvision:resnet50 dataset=imagefolder input=synthetic strategy=ddp num_gpus=2",
            words="{}",
        ),
    ] = "resnet18"
    options: Annotated[
        tuple[ModelOption, ...],
        declare(
            "Arguments of the constructor of the model's class, each given as `model.NAME`.",
            "model.layers=2,4 model=gpt input=synthetic strategy=ddp num_gpus=2",
        ),
    ] = ()
    dataset: Annotated[
        Dataset | None,
        declare(
            "Data set of image models: `cifar10`, `imagefolder` or `synthetic`.",
            "dataset=imagefolder",
            TRAINED,
            of_images=True,
            words="{}",
        ),
    ] = "cifar10"
    num_samples: Annotated[
        PositiveInt,
        declare("Training samples of an epoch.", "num_samples=40000", MayDiffer.COST_PER_STEP | CHOICE | TRAINED),
    ] = CIFAR10_SAMPLES
    input: Annotated[
        Input | None,
        declare(
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
        declare(
            "Workers of the DataLoader of each rank.", "num_workers=4,8", CHOICE | TRAINED, words="{} loader workers"
        ),
    ] = 2
    precision: Annotated[
        Precision | None,
        declare(
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
        declare(
            "Epochs of the run; the first only warms up.",
            "epochs=5",
            BASELINE | MayDiffer.COST_PER_SAMPLE | MayDiffer.PEAK_MEMORY | CHOICE | TARGET | TRAINED,
            words="{} epochs",
        ),
    ] = 2
    max_steps: Annotated[
        PositiveInt | None,
        declare(
            "Steps after which an epoch is cut off; a cut epoch has no epoch time. With `input: synthetic` the "
            "configuration is a probe: it asks what fits, so its batch may exceed the data set.",
            "max_steps=3 epochs=1 input=synthetic",
            MayDiffer.COST_PER_STEP | MayDiffer.PEAK_MEMORY | TRAINED,
            words="at most {} steps",
            values={None: ""},
        ),
    ] = None
    evaluate: Annotated[
        bool,
        declare(
            "Test loss and accuracy after each epoch; refused with `input: synthetic`, unless the data set is "
            "synthetic too.",
            "evaluate=true",
            TRAINED,
        ),
    ] = False
    learning_rate: Annotated[
        PositiveFloat,
        declare(
            "Learning rate at every batch size, unless `linear_scaling` multiplies it.",
            "learning_rate=0.05,0.1",
            MayDiffer.COST | TARGET | PROCESS,
            of_images=True,
            words="learning rate {}",
        ),
    ] = 0.1
    momentum: Annotated[FractionBelowOne, declare("Momentum of SGD.", "momentum=0.95", PROCESS, of_images=True)] = 0.9
    weight_decay: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1e6)],
        declare("Weight decay of SGD.", "weight_decay=1e-4", PROCESS, of_images=True),
    ] = 5e-4
    remedies: Annotated[
        tuple[Remedy, ...],
        declare(
            "Large-batch techniques, joined by `+`: `linear_scaling`, `warmup`, `zero_gamma` and `no_bias_decay` (no "
            "weight decay on BatchNorm and biases); docs/words.md.",
            "remedies=none,linear_scaling+warmup",
            TARGET | PROCESS,
            of_images=True,
        ),
    ] = ()
    warmup_epochs: Annotated[
        PositiveInt,
        declare(
            "Epochs over which `warmup` raises the learning rate.",
            "warmup_epochs=3 epochs=5 remedies=warmup",
            TARGET | PROCESS,
            of_images=True,
        ),
    ] = 2
    reference_batch_size: Annotated[
        PositiveInt,
        declare(
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
        declare(
            "Learning rate after warm-up: `constant`, or `cosine`, which falls to 0 over the run.",
            "schedule=cosine",
            PROCESS,
            of_images=True,
        ),
    ] = "constant"
    nesterov: Annotated[bool, declare("Nesterov momentum.", "nesterov=true", PROCESS, of_images=True)] = False
    broadcast_buffers: Annotated[
        bool,
        declare(
            "DDP sends the buffers of rank 0, such as those of BatchNorm, to all ranks before each forward pass.",
            "broadcast_buffers=false",
            CHOICE | TARGET | PROCESS,
            changes_learning=True,
        ),
    ] = True
    sync_batchnorm: Annotated[
        bool,
        declare(
            "BatchNorm shares its statistics over the GPUs of DDP.",
            "sync_batchnorm=true strategy=ddp num_gpus=2",
            CHOICE | TARGET | PROCESS,
            changes_learning=True,
        ),
    ] = False
    bucket_cap_mb: Annotated[
        PositiveFloat | None,
        declare(
            "MiB of gradients in each all-reduce of DDP, at most; by default 25, in the first one 1.",
            "bucket_cap_mb=10,25,100",
            CHOICE | PROCESS,
            words="buckets of {} MiB",
            values={None: "default buckets"},
        ),
    ] = None
    gradient_as_bucket_view: Annotated[
        bool,
        declare(
            "Gradients are views of DDP's buckets, so they are not copied back.",
            "gradient_as_bucket_view=true",
            CHOICE | PROCESS,
        ),
    ] = False
    static_graph: Annotated[
        bool,
        declare(
            "DDP counts on the same graph in each step.",
            "static_graph=true strategy=ddp num_gpus=2",
            OF_STRATEGY,
            strategies=("ddp",),
        ),
    ] = False
    gradient_compression: Annotated[
        Compression,
        declare(
            "Number format of gradients in DDP's all-reduces: `none` changes nothing, `bf16` halves what they send.",
            "gradient_compression=bf16 strategy=ddp num_gpus=2",
            OF_STRATEGY,
            strategies=("ddp",),
            changes_learning=True,
            words="{} gradients",
            values={"none": ""},
        ),
    ] = "none"
    reshard: Annotated[
        Reshard,
        declare(
            "What FSDP frees after the forward pass: `blocks`, `always` or `never`; docs/strategies.md.",
            "reshard=blocks,always,never strategy=fsdp num_gpus=2",
            OF_STRATEGY,
            strategies=("fsdp", "hsdp"),
            values={"blocks": ""},
        ),
    ] = "blocks"
    shard_size: Annotated[
        PositiveInt | None,
        declare(
            "GPUs that share one copy of the model with HSDP (default: those of a node). Gradients are reduced between "
            "the copies.",
            "shard_size=2 strategy=hsdp num_gpus=4",
            OF_STRATEGY,
            strategies=("hsdp",),
            words="shards over {}",
            values={None: "shards over a node"},
        ),
    ] = None
    param_dtype: Annotated[
        ShardFormat,
        declare(
            "Number format in which FSDP gathers weights: `fp32`, which autocast casts later; `bf16`, which the model "
            "computes with, and the loss in fp32. A grid in `precision: bf16` that does not state it gets `bf16`, but "
            "for models of images.",
            "param_dtype=bf16 precision=bf16 model=lenet strategy=fsdp num_gpus=2",
            OF_STRATEGY,
            strategies=("fsdp", "hsdp"),
            changes_learning=True,
            values={"fp32": "fp32 gathers", "bf16": "bf16 gathers"},
        ),
    ] = "fp32"
    reduce_dtype: Annotated[
        ShardFormat,
        declare(
            "Number format of gradients in FSDP's reduce-scatters: `fp32`, or `bf16`, which halves what they send.",
            "reduce_dtype=bf16 strategy=fsdp num_gpus=2",
            OF_STRATEGY,
            strategies=("fsdp", "hsdp"),
            changes_learning=True,
            words="{} gradients",
            values={"fp32": ""},
        ),
    ] = "fp32"
    cpu_offload: Annotated[
        bool,
        declare(
            "FSDP keeps its shards of weights, gradients and the optimizer's state in the host's memory, where the "
            "update is computed.",
            "cpu_offload=true strategy=fsdp num_gpus=2",
            BASELINE | CHOICE | TARGET,
            strategies=("fsdp", "hsdp"),
        ),
    ] = False
    grad_accumulation: Annotated[
        PositiveInt,
        declare(
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
        declare(
            "What is measured: `epochs`; `communication`, on two GPUs or more with `input: synthetic` or a script; "
            "`network`, there too, the step while each collective takes longer; `memory`, the largest batch that fits; "
            "`quantize`, LeNet in int8 on one device (docs/int8.md).",
            "measure=communication input=synthetic strategy=ddp num_gpus=2",
            TRAINED,
            words="{}",
            values={"epochs": "timed epochs"},
        ),
    ] = "epochs"
    windows: Annotated[
        PositiveInt,
        declare(
            "Timed epochs, or rounds of timed steps, at most.",
            "windows=6 epochs=7",
            BASELINE | MayDiffer.COST_PER_SAMPLE | MayDiffer.PEAK_MEMORY | CHOICE | TRAINED,
            words="{} windows",
        ),
    ] = 1
    memory_limit_gib: Annotated[
        PositiveFloat | None,
        declare(
            "Memory limit of each process, so that any machine can play a smaller one.",
            "memory_limit_gib=16",
            PROCESS,
            words="limit {} GiB",
            values={None: "no memory limit"},
        ),
    ] = None
    layout: Annotated[
        MemoryLayout,
        declare(
            "Layout of images and weights in memory: `contiguous` or `channels_last`.",
            "layout=channels_last",
            CHOICE | PROCESS,
            words="{}",
        ),
    ] = "contiguous"
    fused_optimizer: Annotated[
        bool,
        declare(
            "The optimizer updates many parameters in a kernel.",
            "fused_optimizer=true",
            CHOICE | PROCESS,
            of_images=True,
        ),
    ] = False
    execution: Annotated[
        Literal[Execution, "auto"],
        declare(
            "Who issues a step: `eager`, the host, operation by operation; `compile`, the host with compiled kernels; "
            "`graph` and `compiled_graph`, one CUDA graph of either; `auto`, the last of these that is legal (on the "
            "CPU `eager`), which the record states.",
            "execution=compiled_graph strategy=ddp num_gpus=2",
            CHOICE | PROCESS,
            words="{}",
        ),
    ] = "eager"
    compile: Annotated[
        Parts,
        declare(
            "Parts of the model that are compiled alone in an eager step: `none`, or `blocks`, each unit of "
            "`shard_units`, before it is wrapped or sharded.",
            "compile=blocks model=gpt input=synthetic strategy=ddp num_gpus=2",
            CHOICE | PROCESS,
            words="compiled {}",
            values={"none": "eager blocks"},
        ),
    ] = "none"
    activation_checkpointing: Annotated[
        Parts,
        declare(
            "Parts of the model whose activations are computed again in the backward pass, and not kept: `none`, or "
            "`blocks`, each unit of `shard_units`.",
            "activation_checkpointing=blocks model=gpt input=synthetic strategy=ddp num_gpus=2",
            CHOICE | PROCESS,
            words="checkpointed {}",
            values={"none": "activations kept"},
        ),
    ] = "none"
    numa_binding: Annotated[
        NumaBinding,
        declare(
            "CPUs that each rank of a GPU may use: `none`, all of the job; `gpu`, those on the NUMA node of its GPU.",
            "numa_binding=none,gpu strategy=ddp num_gpus=2",
            CHOICE,
            words="CPUs of the $GPU's NUMA node",
            values={"none": ""},
        ),
    ] = "none"
    num_calibration_samples: Annotated[
        PositiveInt,
        declare(
            "Training images from which int8 activations get their scales.",
            "num_calibration_samples=400 measure=quantize strategy=single num_gpus=1 model=lenet precision=fp32 "
            "evaluate=true",
            of_images=True,
        ),
    ] = 1000
    script: Annotated[
        ScriptCommand | None,
        declare(
            "Your own training script, unchanged: `train.py ARGUMENTS` or `-m package.train ARGUMENTS`. `{name}` in it "
            "stands for an axis, as in `--batch-size {batch_size_per_gpu}`, and `{model.NAME}` for an option; "
            "docs/script.md.",
            "script=docs/examples/script/train.py strategy=ddp num_gpus=2 batch_size_per_gpu=64",
        ),
    ] = None
    warmup_updates: Annotated[
        PositiveInt,
        declare(
            "First updates of a script, which are not timed; more while something compiles or takes new memory.",
            "warmup_updates=20 script=docs/examples/script/train.py strategy=ddp num_gpus=2 batch_size_per_gpu=64",
            BASELINE | CHOICE | MayDiffer.COST | MayDiffer.TRAINED,
        ),
    ] = 10
    updates: Annotated[
        PositiveInt,
        declare(
            "Timed updates of a script, at most; fewer once the time is precise enough. With `measure: communication` "
            "those with communication.",
            "updates=60 script=docs/examples/script/train.py strategy=ddp num_gpus=2 batch_size_per_gpu=64",
            BASELINE | CHOICE | MayDiffer.COST | MayDiffer.TRAINED,
        ),
    ] = 600
    update_by: Annotated[
        OptimizerName | None,
        declare(
            "The optimizer whose steps are the updates of a script: its class, or its number by their first steps; the "
            "first by default.",
            "update_by=2 script=docs/examples/script/train.py strategy=ddp num_gpus=2 batch_size_per_gpu=64",
            words="updates of {}",
            values={None: ""},
        ),
    ] = None
    stated_flops_per_sample: Annotated[
        Flops | None,
        declare(
            "FLOPs of the forward and backward pass of a sample, for MFU, where a script is not counted; docs/mfu.md.",
            "stated_flops_per_sample=1e12 script=docs/examples/script/train.py strategy=ddp num_gpus=2 "
            "batch_size_per_gpu=64",
            BASELINE | CHOICE | MayDiffer.COST | MayDiffer.OOM | MayDiffer.PEAK_MEMORY | MayDiffer.TRAINED,
        ),
    ] = None
    seed: Annotated[
        NonNegativeInt,
        declare(
            "Seed of weights and data. Configurations that differ in it and in `repeat` alone are pooled: the tables "
            "show the median and n.",
            "seed=1",
            REPEATED,
        ),
    ] = 0
    repeat: Annotated[
        NonNegativeInt,
        declare("Number of a repeat of the configuration, pooled like `seed`.", "repeat=0,1,2", REPEATED),
    ] = 0

    def __post_init__(self) -> None:
        for axis in FLOAT_AXES:  # 1 and 1.0 are the same point, and so are 0.0 and -0.0
            if (value := getattr(self, axis)) is not None:
                msgspec.structs.force_setattr(self, axis, float(value) + 0.0)
        remedies = tuple(sorted(self.remedies, key=REMEDIES.index))
        msgspec.structs.force_setattr(self, "remedies", remedies)
        msgspec.structs.force_setattr(self, "options", tuple(sorted(self.options)))
        self._check_shape()
        self._check_strategy()
        self._check_model()
        self._check_input()
        self._check_training()
        self._check_measure()
        check_script_axes(self, AXIS_DEFAULTS)
        if self.execution != "auto" and (problem := self.execution_problem(self.execution)):
            raise ValueError(problem)

    def _check_shape(self) -> None:
        if not self.facts.is_parallel and self.num_gpus != 1:
            raise ValueError(f"strategy={self.strategy!r} needs num_gpus=1, got {self.num_gpus}; use 'dp' or 'ddp'.")
        if self.num_gpus % self.num_nodes:
            raise ValueError(
                f"num_gpus={self.num_gpus} is the total over nodes and must be a multiple of "
                f"num_nodes={self.num_nodes}; correct one, or let a grid give gpus_per_node in place of num_gpus."
            )
        if self.num_nodes > 1 and not self.is_distributed:
            raise ValueError(
                f"strategy={self.strategy!r} runs in one process on one node; use 'ddp' for num_nodes={self.num_nodes}."
            )
        if self.device == "cpu" and self.facts.uses_threads:
            raise ValueError(
                f"strategy={self.strategy!r} needs device='cuda': without GPUs DataParallel runs the bare module and "
                "its times would be wrong; use 'ddp'."
            )
        if self.device == "cpu" and self.numa_binding != "none":
            raise ValueError("numa_binding='gpu' binds ranks to the CPUs beside their GPUs; leave it out.")

    def _check_strategy(self) -> None:
        for axis in STRATEGY_AXES:
            strategies = DECLARED[axis].strategies
            if self.strategy not in strategies and getattr(self, axis) != AXIS_DEFAULTS[axis]:
                named = " or ".join(map(repr, strategies))
                raise ValueError(
                    f"{axis}={getattr(self, axis)!r} is an axis of strategy={named}, got {self.strategy!r}; "
                    "leave it out."
                )
        if self.static_graph and self.grad_accumulation > 1:
            raise ValueError(
                "static_graph=true does not work with grad_accumulation: DDP's no_sync changes the graph; leave one "
                "out."
            )
        if self.num_gpus % self.num_shards:
            raise ValueError(
                f"shard_size={self.num_shards} does not divide num_gpus={self.num_gpus} into groups; take a divisor."
            )
        if self.facts.shards_state and self.num_gpus == 1:
            raise ValueError(
                f"strategy={self.strategy!r} shards over GPUs and needs num_gpus>=2; use 'single' for one."
            )
        for axis, reason in self.facts.refuses.items():
            if getattr(self, axis) != AXIS_DEFAULTS[axis]:
                raise ValueError(
                    f"{axis}={getattr(self, axis)!r} does not work with strategy={self.strategy!r}: {reason}; leave it "
                    "out."
                )
        if self.facts.shards_parameters and self.precision == "fp16":
            raise ValueError(f"precision='fp16' is not tried with strategy={self.strategy!r}; use 'bf16'.")
        if self.param_dtype == "bf16" and self.precision != "bf16":
            raise ValueError(
                f"param_dtype='bf16' computes in bf16, got precision={self.precision!r}; use precision='bf16'."
            )

    def _check_model(self) -> None:
        if self.axes_of_blocks and is_image_model(self.model):
            raise ValueError(
                f"{self.axes_of_blocks[0]}='blocks' is of units of shard_units, and models of images have none; leave "
                "it out."
            )
        if self.model in CIFAR_MODELS or self.model is None:
            if self.options:
                name = self.options[0].partition("=")[0]
                raise ValueError(f"model={self.model!r} has no option {name!r}; leave out model.{name}.")
            return
        if self.model.startswith(TORCHVISION):
            if self.dataset not in (None, "imagefolder"):
                raise ValueError(f"model={self.model!r} reads an image folder; use dataset='imagefolder'.")
            if "zero_gamma" in self.remedies or self.input == "gpu":
                what = "input='gpu'" if self.input == "gpu" else "remedies=['zero_gamma']"
                raise ValueError(f"{what} works for {' and '.join(CIFAR_MODELS)} alone; leave it out.")
            return
        if ":" not in self.model and self.model not in BUILT_IN_MODELS:  # of a later version, or of another checkout
            return
        for axis in IMAGE_AXES:
            default = None if axis == "dataset" else AXIS_DEFAULTS[axis]
            if getattr(self, axis) != default:
                raise ValueError(
                    f"{axis}={getattr(self, axis)!r} is an axis of image models and does nothing for {self.model!r}; "
                    f"leave it out, or make it an option, model.{axis}."
                )
        if self.facts.uses_threads or self.input == "gpu":
            of_strategy, of_input = (f"strategy={self.strategy!r}", "'ddp'"), ("input='gpu'", "'dataloader'")
            what, cure = of_strategy if self.facts.uses_threads else of_input
            raise ValueError(f"{what} works for image models alone, got model={self.model!r}; use {cure}.")

    def _check_input(self) -> None:
        if self.script is not None:  # its data is its own
            return
        if self.num_samples < self.num_gpus:
            raise ValueError(
                f"num_samples={self.num_samples} leaves some of num_gpus={self.num_gpus} without a sample; "
                "raise num_samples."
            )
        always_full = self.is_probe or self.measure == "memory"
        if not always_full and self.grad_accumulation > 1 and self.num_samples % self.global_batch_size:
            raise ValueError(
                f"num_samples={self.num_samples} is no multiple of the {self.global_batch_size} samples of an update "
                f"with grad_accumulation={self.grad_accumulation}; change num_samples."
            )
        if not always_full and self.batch_size_per_gpu > self.samples_per_gpu:
            raise ValueError(
                f"batch_size_per_gpu={self.batch_size_per_gpu} is larger than the {self.samples_per_gpu} samples of "
                f"a GPU (num_samples={self.num_samples} over num_gpus={self.num_gpus}) and would never be full; lower "
                "batch_size_per_gpu, or make the configuration a probe with input: synthetic and max_steps: 3."
            )

    def _check_training(self) -> None:
        if len(set(self.remedies)) != len(self.remedies):
            raise ValueError(f"remedies={list(self.remedies)} names one twice; name each once.")
        if "warmup" in self.remedies and self.warmup_epochs > self.epochs:
            raise ValueError(
                f"warmup_epochs={self.warmup_epochs} exceeds epochs={self.epochs}; raise epochs or lower warmup_epochs."
            )
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true needs a momentum above 0, got 0; raise momentum.")
        if self.compile != "none" and (self.static_graph or (self.bucket_cap_mb or 1) < 1):
            raise ValueError(
                f"compile={self.compile!r} is not tried with static_graph, and needs bucket_cap_mb>=1: DDP's first "
                "bucket is 1 MiB; leave them out."
            )
        if self.sync_batchnorm and (not self.facts.syncs_batchnorm or self.device == "cpu"):
            raise ValueError(
                "sync_batchnorm=true shares statistics over the GPUs of DDP; use strategy='ddp' on device='cuda'."
            )

    def _check_measure(self) -> None:
        if self.measure == "epochs":
            needed = NUM_WARM_UP_EPOCHS + self.windows
            if self.windows > 1 and self.epochs < needed:
                raise ValueError(
                    f"windows={self.windows} timed epochs come after epoch 1, which is only the warm-up; "
                    f"raise epochs from {self.epochs} to {needed}."
                )
            return
        if self.measure == "quantize":
            self._check_quantize()
            return
        if self.input != "synthetic" and self.script is None:
            raise ValueError(
                f"measure={self.measure!r} runs steps without a loader and needs input='synthetic', got {self.input!r}."
            )
        if self.evaluate or self.remedies:
            raise ValueError(f"measure={self.measure!r} keeps no trained model; leave out evaluate and remedies.")
        if self.measure == "network":
            if self.is_distributed and self.num_gpus > 1 and self.execution == "eager":
                return
            raise ValueError(
                "measure='network' delays the collectives of an eager step and needs num_gpus>=2, execution='eager' "
                f"and a strategy with processes, such as 'ddp', got {self.strategy!r} on {self.num_gpus}."
            )
        if self.measure == "communication":
            if not self.facts.is_parallel or self.num_gpus < 2:
                raise ValueError(
                    f"measure='communication' compares N GPUs with and without their transfers and needs num_gpus>=2 "
                    f"and a strategy for several, such as 'ddp', got {self.strategy!r} on {self.num_gpus}; for one GPU "
                    "use measure='epochs'."
                )
            return
        if self.num_nodes > 1:
            raise ValueError(
                f"measure='memory' needs num_nodes=1, got {self.num_nodes}: a GPU's memory does not depend on the "
                "number of nodes; use one node."
            )
        if self.max_steps is not None:
            raise ValueError(f"measure='memory' runs trials of {NUM_TRIAL_STEPS} steps; leave out max_steps.")
        if self.device == "cpu" and self.memory_limit_gib is None:
            raise ValueError("measure='memory' on device='cpu' would fill the whole machine; set memory_limit_gib.")

    def _check_quantize(self) -> None:
        needed = {"strategy": "single", "model": "lenet", "precision": "fp32", "evaluate": True}
        for axis, value in needed.items():
            if (got := getattr(self, axis)) != value:
                raise ValueError(
                    "measure='quantize' trains one network of convolutions and linear layers in fp32 and tests it; it "
                    f"needs {axis}={value!r}, got {got!r}."
                )
        if self.input == "synthetic":
            raise ValueError("measure='quantize' needs images to train on, got input='synthetic'; use input='gpu'.")
        if self.num_calibration_samples > self.num_samples:
            raise ValueError(
                f"num_calibration_samples={self.num_calibration_samples} exceeds num_samples={self.num_samples}, from "
                "which they are chosen; lower num_calibration_samples."
            )

    def execution_problem(self, execution: Execution) -> str | None:
        """Explain why the point cannot use this execution, with the cure; None if it can."""
        stated = f"execution={execution!r}"
        if execution == "eager":
            return None
        if of_blocks := self.axes_of_blocks:
            return f"{stated} is not tried with {of_blocks[0]}='blocks', which is of an eager step; leave one out."
        if self.facts.uses_threads:
            return (
                f"{stated} does not work with strategy={self.strategy!r}, which starts new threads each step; use "
                "'eager' or 'auto'."
            )
        if self.facts.is_eager_only or self.static_graph or self.gradient_compression != "none":
            what = f"strategy={self.strategy!r}" if self.facts.is_eager_only else "this option of DDP"
            return f"{stated} is not tried with {what}; use 'eager' or 'auto'."
        if execution in CAPTURED_EXECUTIONS and self.grad_accumulation > 1:
            return (
                f"{stated} does not work with grad_accumulation: a graph is a whole update; use 'eager' or 'compile'."
            )
        if execution in CAPTURED_EXECUTIONS and self.device == "cpu":
            return f"{stated} needs device='cuda': a graph is captured from CUDA streams; use 'eager' or 'compile'."
        if execution in CAPTURED_EXECUTIONS and self.rate_varies and not self.fused_optimizer:
            cause = "remedies=['warmup']" if "warmup" in self.remedies else f"schedule={self.schedule!r}"
            return (
                f"{stated} with {cause} needs fused_optimizer=true: the learning rate changes with every "
                "update, and only the fused optimizer reads it from the device."
            )
        is_unfused = is_image_model(self.model) and not self.fused_optimizer
        if execution in CAPTURED_EXECUTIONS and self.precision == "fp16" and is_unfused:
            return f"{stated} in fp16 needs fused_optimizer=true: others wait for the host at each scaled update."
        if execution in COMPILED_EXECUTIONS and self.sync_batchnorm:
            return f"{stated} does not work with sync_batchnorm=true: torch.compile cannot include it; use 'graph'."
        if execution in COMPILED_EXECUTIONS and self.bucket_cap_mb is not None and self.bucket_cap_mb < 1:
            return f"{stated} needs bucket_cap_mb>=1, got {self.bucket_cap_mb}: DDP's first bucket is 1 MiB; raise it."
        if execution in COMPILED_EXECUTIONS and self.measure == "communication":
            return (
                f"{stated} does not work with measure='communication': it runs several variants of one model, and all "
                "would use the code compiled for the first one; use 'eager' or 'graph'."
            )
        return None

    @property
    def facts(self) -> Strategy:
        """The declaration of the point's strategy."""
        return STRATEGIES[self.strategy]

    @property
    def axes_of_blocks(self) -> list[str]:
        """The axes that change the blocks of the model one by one."""
        return [axis for axis in ("compile", "activation_checkpointing") if getattr(self, axis) == "blocks"]

    @property
    def rate_varies(self) -> bool:
        return self.schedule != "constant" or "warmup" in self.remedies

    @property
    def is_probe(self) -> bool:
        """True if the point only tests that the batch fits: a few full synthetic steps, no epoch time."""
        return self.max_steps is not None and self.input == "synthetic" and self.measure == "epochs"

    @property
    def is_distributed(self) -> bool:
        """True if each GPU has a process of its own, and the processes exchange data."""
        return self.facts.is_distributed

    @property
    def global_batch_size(self) -> int:
        """Samples of one update over all GPUs and passes."""
        return self.batch_size_per_gpu * self.num_gpus * self.grad_accumulation

    @property
    def global_grad_accumulation(self) -> int:
        """Passes of one update over all GPUs."""
        return self.num_gpus * self.grad_accumulation

    @property
    def num_shards(self) -> int:
        """Shards of the model: the GPUs that share one copy of it."""
        return self.shard_size or self.num_gpus // self.num_nodes if self.facts.replicates else self.num_gpus

    @property
    def samples_per_gpu(self) -> int:
        """Samples of the data set for each GPU, rounded up."""
        return math.ceil(self.num_samples / self.num_gpus)


AXIS_DEFAULTS: dict[str, Any] = {found.name: found.default for found in msgspec.structs.fields(Axes)}
AXES: tuple[str, ...] = tuple(AXIS_DEFAULTS)
"""Every axis a grid may name, in the order in which tables show them."""
AXIS_TYPES: dict[str, Any] = {found.name: found.type for found in msgspec.structs.fields(Axes)}


DECLARED: dict[str, Axis] = {
    name: part.extra["axis"] for name, annotated in AXIS_TYPES.items() for part in annotated.__metadata__ if part.extra
}
FLOAT_AXES = tuple(name for name, axis_type in AXIS_TYPES.items() if float in leaves_of(axis_type))
IMAGE_AXES = tuple(name for name, axis in DECLARED.items() if axis.of_images)
"""Axes of image models alone."""
STRATEGY_AXES = tuple(
    dict.fromkeys(
        name for strategy in reversed(STRATEGIES) for name, axis in DECLARED.items() if strategy in axis.strategies
    )
)
"""Axes that only some strategies have."""


def axes_that(use: MayDiffer) -> tuple[str, ...]:
    """Return the axes in which alike points may differ in this use."""
    return tuple(name for name, axis in DECLARED.items() if use in axis.may_differ)
