"""One point of the grid: what follows from its axes, its run id, which points are alike, and its learning rates."""

import functools
import hashlib
import math
from typing import Any

import msgspec

from pipeline.plan.axes import (
    AXES,
    AXIS_DEFAULTS,
    CAPTURED_EXECUTIONS,
    NUM_TRIAL_STEPS,
    NUM_WARM_UP_EPOCHS,
    Axes,
    MayDiffer,
    axes_that,
)
from pipeline.plan.script import BATCH_PLACEHOLDERS, PLACEHOLDERS, Command, fill_command, placeholders_of

RUN_ID_PATTERN = r"[a-z0-9-]{1,120}"
FIRST_TIMED_EPOCH = NUM_WARM_UP_EPOCHS + 1  # epochs count from 1
MIN_WINDOWS_FOR_INTERVAL = 6  # fewer values give no interval


class Spec(Axes, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One point. `num_gpus` is the total over nodes (processes on `cpu`).

    With `measure: memory` the point is a search for the largest batch, and `batch_size_per_gpu` is its first trial.
    With `measure: quantize` it trains in fp32, then tests the int8 network in every stage with every kind of scale.
    """

    @property
    def is_captured(self) -> bool:
        """True if the step runs as a CUDA graph: as stated, or because `auto` will choose one."""
        return self.execution in CAPTURED_EXECUTIONS or (
            self.execution == "auto" and self.execution_problem("graph") is None
        )

    @property
    def reads_data(self) -> bool:
        """True if the point reads images in the data folder."""
        is_stated = self.dataset not in (None, "synthetic")
        return is_stated and (self.input in ("dataloader", "gpu") or self.evaluate)

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
    def full_steps_per_epoch(self) -> int:
        """Updates of an epoch that visits every sample."""
        return math.ceil(self.samples_per_gpu / (self.batch_size_per_gpu * self.grad_accumulation))

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
    def code(self) -> str:
        """The name of the user's code in a manifest: the command of the point's script, or its model."""
        return self.script or self.model or ""

    @property
    def script_command(self) -> Command:
        """The script's command with the values of this point. Only a point of a script has one."""
        assert self.script is not None
        options = {f"model.{name}": value for name, value in (option.split("=", 1) for option in self.options)}
        return fill_command(self.script, {name: getattr(self, name) for name in PLACEHOLDERS} | options)

    @property
    def counts_batches(self) -> bool:
        """True for a script whose samples of a batch are not stated: each batch of a GPU then counts as one."""
        if self.script is None or self.batch_size_per_gpu > 1:
            return False
        return not BATCH_PLACEHOLDERS & {*placeholders_of(self.script)}

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


# Groups of axes in which two points may differ and still count as alike, one group for each use. Every key is made of
# all axes outside its group. An axis that declares no group is in none, so that points that differ in it are not alike.
AxisGroup = tuple[str, ...]
Key = tuple[object, ...]

POOLED_AXES = axes_that(MayDiffer.POOLED)
BASELINE_MAY_DIFFER = axes_that(MayDiffer.BASELINE)
COST_MAY_DIFFER = axes_that(MayDiffer.COST)
COST_PER_SAMPLE_MAY_DIFFER = axes_that(MayDiffer.COST_PER_SAMPLE)
COST_PER_STEP_MAY_DIFFER = axes_that(MayDiffer.COST_PER_STEP)
OOM_MAY_DIFFER = axes_that(MayDiffer.OOM)
PEAK_MEMORY_MAY_DIFFER = axes_that(MayDiffer.PEAK_MEMORY)
PREDICTION_MAY_DIFFER = axes_that(MayDiffer.PREDICTION)
CHOICE_MAY_DIFFER = axes_that(MayDiffer.CHOICE)
TARGET_MAY_DIFFER = axes_that(MayDiffer.TARGET)
TRAINED_MAY_DIFFER = axes_that(MayDiffer.TRAINED)
PROCESS_MAY_DIFFER = axes_that(MayDiffer.PROCESS)


@functools.cache
def _axes_outside(group: AxisGroup) -> AxisGroup:
    return tuple(axis for axis in AXES if axis not in group)


def alike_key(spec: Spec, may_differ: AxisGroup) -> Key:
    """Return the values of all axes outside the group: points are alike if their keys are equal."""
    return tuple([getattr(spec, axis) for axis in _axes_outside(may_differ)])


def without_repeat(spec: Spec) -> Spec:
    """Return the point with the pooled axes at their defaults: all its repeats give the same one."""
    defaults: dict[str, Any] = {axis: AXIS_DEFAULTS[axis] for axis in POOLED_AXES}
    return msgspec.structs.replace(spec, **defaults)


def learning_rate_at(spec: Spec, update: int) -> float:
    """Return the learning rate of an update, counted from 0.

    Linear scaling multiplies the rate by global_batch_size / reference_batch_size (Goyal et al. 2017). Warm-up ramps it
    up linearly over the updates of the warm-up epochs, from near 0; theirs begins at the unscaled rate. After them
    `cosine` lowers it from its peak towards 0 at the end of the run: peak x (1 + cos(pi x share of the remaining
    updates that are done)) / 2 (Loshchilov & Hutter 2017).
    """
    rate = spec.learning_rate
    if "linear_scaling" in spec.remedies:
        rate *= spec.global_batch_size / spec.reference_batch_size
    num_warm_up = num_warm_up_updates(spec)
    if update < num_warm_up:
        rate *= (update + 1) / num_warm_up
    elif spec.schedule == "cosine":
        done = (update - num_warm_up) / (spec.epochs * spec.steps_per_epoch - num_warm_up)
        rate *= (1 + math.cos(math.pi * done)) / 2
    return rate


def num_warm_up_updates(spec: Spec) -> int:
    return spec.warmup_epochs * spec.steps_per_epoch if "warmup" in spec.remedies else 0


def peak_learning_rate(spec: Spec) -> float:
    """Return the largest rate of the run: that of the first update after warm-up, or of the last if there is none."""
    return learning_rate_at(spec, min(num_warm_up_updates(spec), spec.epochs * spec.steps_per_epoch - 1))
