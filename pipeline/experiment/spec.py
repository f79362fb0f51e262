"""One point of the grid: every axis of a run, its run id, and which of its epochs are timed."""

import functools
import hashlib
import math
from typing import Any

import msgspec

from pipeline.experiment.model_name import BUILT_IN_MODELS, CIFAR_MODELS, TORCHVISION, is_image_model
from pipeline.plan.axes import (
    AXIS_DEFAULTS,
    CAPTURED_EXECUTIONS,
    COMPILED_EXECUTIONS,
    DECLARED,
    FLOAT_AXES,
    IMAGE_AXES,
    REMEDIES,
    STRATEGY_AXES,
    Axes,
    Execution,
)
from pipeline.plan.strategies import STRATEGIES

RUN_ID_PATTERN = r"[a-z0-9-]{1,120}"
FSDP_REFUSES = {
    "layout": "channels_last weights cannot be sharded",
    "fused_optimizer": "SGD has no fused update of shards",
    "broadcast_buffers": "it never broadcasts buffers",
    "bucket_cap_mb": "it has no buckets",
    "gradient_as_bucket_view": "it has no buckets",
    "evaluate": "no rank has the whole model",
}
"""Axes that do not work with FSDP, with the reason."""
NUM_WARM_UP_EPOCHS = 1  # first epochs of a run, never reported: caches fill, kernels are chosen and compiled
FIRST_TIMED_EPOCH = NUM_WARM_UP_EPOCHS + 1  # epochs count from 1
NUM_TRIAL_STEPS = 3  # in a trial of a memory search; not 1, because the first step creates the optimizer's state
MIN_WINDOWS_FOR_INTERVAL = 6  # fewer values give no interval


class Spec(Axes, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One point. `num_gpus` is the total over nodes (processes on `cpu`).

    With `measure: memory` the point is a search for the largest batch, and `batch_size_per_gpu` is its first trial.
    With `measure: quantize` it trains in fp32, then tests the int8 network in every stage with every kind of scale.

    Raises ValueError if the fields contradict each other.
    """

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
        if self.execution != "auto" and (problem := self.execution_problem(self.execution)):
            raise ValueError(problem)

    def _check_shape(self) -> None:
        if self.strategy == "single" and self.num_gpus != 1:
            raise ValueError(f"strategy='single' needs num_gpus=1, got {self.num_gpus}; use 'dp' or 'ddp'.")
        if self.num_gpus % self.num_nodes:
            raise ValueError(
                f"num_gpus={self.num_gpus} is the total over nodes and must be a multiple of "
                f"num_nodes={self.num_nodes}."
            )
        if self.num_nodes > 1 and not self.is_distributed:
            raise ValueError(
                f"strategy={self.strategy!r} runs in one process on one node; use 'ddp' for num_nodes={self.num_nodes}."
            )
        if self.device == "cpu" and self.strategy == "dp":
            raise ValueError(
                "strategy='dp' needs device='cuda': without GPUs DataParallel runs the bare module and its times "
                "would be wrong; use 'ddp'."
            )

    def _check_strategy(self) -> None:
        for axis in STRATEGY_AXES:
            strategy = DECLARED[axis].strategy
            if self.strategy != strategy and getattr(self, axis) != AXIS_DEFAULTS[axis]:
                raise ValueError(
                    f"{axis}={getattr(self, axis)!r} is an axis of strategy={strategy!r}, got {self.strategy!r}; leave "
                    "it out."
                )
        if self.static_graph and self.grad_accumulation > 1:
            raise ValueError(
                "static_graph=true does not work with grad_accumulation: DDP's no_sync changes the graph; leave one "
                "out."
            )
        if self.strategy not in ("fsdp", "zero1"):
            return
        if self.num_gpus == 1:
            raise ValueError(
                f"strategy={self.strategy!r} shards over GPUs and needs num_gpus>=2; use 'single' for one."
            )
        if self.strategy == "fsdp":
            for axis, reason in FSDP_REFUSES.items():
                if getattr(self, axis) != AXIS_DEFAULTS[axis]:
                    raise ValueError(
                        f"{axis}={getattr(self, axis)!r} does not work with strategy='fsdp': {reason}; leave it out."
                    )
            if self.precision == "fp16":
                raise ValueError("precision='fp16' is not tried with strategy='fsdp'; use 'bf16'.")

    def _check_model(self) -> None:
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
        if self.strategy == "dp" or self.input == "gpu":
            what, cure = ("strategy='dp'", "'ddp'") if self.strategy == "dp" else ("input='gpu'", "'dataloader'")
            raise ValueError(f"{what} works for image models alone, got model={self.model!r}; use {cure}.")

    def _check_input(self) -> None:
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
        if not always_full and self.batch_size_per_gpu > self.shard_size:
            raise ValueError(
                f"batch_size_per_gpu={self.batch_size_per_gpu} is larger than the shard of {self.shard_size} samples "
                f"(num_samples={self.num_samples} over num_gpus={self.num_gpus}) and would never be full; lower "
                "batch_size_per_gpu, or make the point a probe with input: synthetic and max_steps: 3."
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
        if self.sync_batchnorm and (self.strategy != "ddp" or self.device == "cpu"):
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
        if self.input != "synthetic":
            raise ValueError(
                f"measure={self.measure!r} runs steps without a loader and needs input='synthetic', got {self.input!r}."
            )
        if self.evaluate or self.remedies:
            raise ValueError(f"measure={self.measure!r} keeps no trained model; leave out evaluate and remedies.")
        if self.measure == "communication":
            if self.strategy == "single" or self.num_gpus < 2:
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
        if self.strategy == "dp":
            return (
                f"{stated} does not work with strategy='dp', which starts new threads each step; use 'eager' or 'auto'."
            )
        if self.strategy in ("fsdp", "zero1") or self.static_graph or self.gradient_compression != "none":
            what = f"strategy={self.strategy!r}" if self.strategy in ("fsdp", "zero1") else "this option of DDP"
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
    def rate_varies(self) -> bool:
        return self.schedule != "constant" or "warmup" in self.remedies

    @property
    def is_captured(self) -> bool:
        """True if the step runs as a CUDA graph: as stated, or because `auto` will choose one."""
        return self.execution in CAPTURED_EXECUTIONS or (
            self.execution == "auto" and self.execution_problem("graph") is None
        )

    @property
    def is_probe(self) -> bool:
        """True if the point only tests that the batch fits: a few full synthetic steps, no epoch time."""
        return self.max_steps is not None and self.input == "synthetic" and self.measure == "epochs"

    @property
    def reads_data(self) -> bool:
        """True if the point reads images in the data folder."""
        is_stated = self.dataset not in (None, "synthetic")
        return is_stated and (self.input in ("dataloader", "gpu") or self.evaluate)

    @property
    def is_distributed(self) -> bool:
        """True if each GPU has a process of its own, and the processes exchange data."""
        return STRATEGIES[self.strategy].is_distributed

    @property
    def global_batch_size(self) -> int:
        """Samples of one update over all GPUs and passes."""
        return self.batch_size_per_gpu * self.num_gpus * self.grad_accumulation

    @property
    def batch_size_per_process(self) -> int:
        """Samples of one pass in one process: those of a GPU, or with DataParallel of all its GPUs."""
        return self.batch_size_per_gpu * self.num_gpus // self.world_size

    @property
    def gpus_per_node(self) -> int:
        """GPUs (processes on `cpu`) of each node."""
        return self.num_gpus // self.num_nodes

    @property
    def num_processes_per_node(self) -> int:
        """Training processes of each node: one per GPU if the strategy is distributed, else one."""
        return self.gpus_per_node if self.is_distributed else 1

    @property
    def world_size(self) -> int:
        """Training processes over all nodes. The scaling axis is `num_gpus`, not this number."""
        return self.num_processes_per_node * self.num_nodes

    @property
    def shard_size(self) -> int:
        """Samples of the data set for each GPU, rounded up."""
        return math.ceil(self.num_samples / self.num_gpus)

    @property
    def full_steps_per_epoch(self) -> int:
        """Updates of an epoch that visits every sample."""
        return math.ceil(self.shard_size / (self.batch_size_per_gpu * self.grad_accumulation))

    @property
    def steps_per_epoch(self) -> int:
        """Steps that run: at most `max_steps` of an epoch; exactly `max_steps` full batches in a probe."""
        if self.max_steps is None:
            return self.full_steps_per_epoch
        return self.max_steps if self.is_probe else min(self.max_steps, self.full_steps_per_epoch)

    @property
    def may_stop_early(self) -> bool:
        """True if epochs after warm-up only repeat the timing: the run may end once it is precise enough."""
        has_only_windows = self.measure == "epochs" and self.epochs == NUM_WARM_UP_EPOCHS + self.windows
        return has_only_windows and not (self.evaluate or self.remedies or self.rate_varies)

    @property
    def min_epochs(self) -> int:
        """The smallest number of epochs that a record of the point may have."""
        return min(self.epochs, NUM_WARM_UP_EPOCHS + MIN_WINDOWS_FOR_INTERVAL) if self.may_stop_early else self.epochs

    @property
    def is_whole_epoch(self) -> bool:
        """True if an epoch visits every sample, so that its time is an epoch time."""
        is_cut = self.is_probe or self.steps_per_epoch < self.full_steps_per_epoch
        return self.measure == "epochs" and not is_cut

    @property
    def timed_epochs(self) -> range:
        """The numbers of the epochs that the tables report: the first `windows` after warm-up; none for cut epochs."""
        last = min(self.epochs, NUM_WARM_UP_EPOCHS + self.windows)
        return range(FIRST_TIMED_EPOCH, last + 1) if self.is_whole_epoch else range(0)

    def trial_spec(self, batch_size_per_gpu: int) -> "Spec":
        """Return the probe that a memory search runs at this batch size."""
        return msgspec.structs.replace(
            self,
            measure="epochs",
            batch_size_per_gpu=batch_size_per_gpu,
            epochs=1,
            windows=1,
            max_steps=NUM_TRIAL_STEPS,
        )

    @property
    def unit(self) -> str:
        """The unit of `num_gpus`: `gpu`, or `proc` on the CPU."""
        return "gpu" if self.device == "cuda" else "proc"

    @functools.cache  # noqa: B019 asked for many times per point; equal specs have equal ids
    def run_id(self) -> str:
        """Return the run id: a readable prefix, and 16 hex digits of the digest of `canonical_json`."""
        prefix = f"{self.strategy}-{self.num_gpus}{self.unit}-b{self.batch_size_per_gpu}"
        return f"{prefix}-{hashlib.sha256(canonical_json(self)).hexdigest()[:16]}"


def canonical_json(spec: Spec) -> bytes:
    """Return the JSON that the run id digests: the fields that differ from their defaults, sorted by name."""
    return msgspec.json.encode(non_default_fields(spec), order="sorted")


def non_default_fields(spec: Spec) -> dict[str, Any]:
    """Return the fields that differ from their defaults, in the order of declaration."""
    values = ((axis, getattr(spec, axis), default) for axis, default in AXIS_DEFAULTS.items())
    return {axis: value for axis, value, default in values if default is msgspec.NODEFAULT or value != default}
