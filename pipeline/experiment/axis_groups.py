"""Groups of axes in which two points may differ and still count as alike, one group for each use.

Every key below is made of all axes outside its group. A new axis is in no group, so that points that differ in it are
not alike until somebody adds it here.
"""

import functools
from typing import Any

import msgspec

from pipeline.experiment.spec import AXES, AXIS_DEFAULTS, Spec

AxisGroup = tuple[str, ...]
Key = tuple[object, ...]

POOLED_AXES: AxisGroup = ("repeat", "seed")
"""Repeats of one measurement: the tables pool them into one row."""

STRATEGY_AXES: AxisGroup = ("reshard", "static_graph", "gradient_compression")
"""Axes of one strategy alone."""

BASELINE_MAY_DIFFER: AxisGroup = (
    *("strategy", "num_nodes", "num_gpus", "epochs", "windows"),
    *STRATEGY_AXES,
    *POOLED_AXES,
)
"""A point and its one-GPU baseline; their batch sizes are compared apart, by the quantity that the scaling fixes."""

COST_MAY_DIFFER: AxisGroup = ("learning_rate", "reference_batch_size", *POOLED_AXES)
"""Points of equal cost: these axes change values, not the work."""

COST_PER_SAMPLE_MAY_DIFFER: AxisGroup = ("epochs", "windows")
"""Timed training without evaluation: its cost is proportional to the samples trained on."""

COST_PER_STEP_MAY_DIFFER: AxisGroup = ("num_samples", "max_steps")
"""Likewise where the length of an epoch changes neither image decoding nor what is compiled or captured."""

OOM_MAY_DIFFER: AxisGroup = ("batch_size_per_gpu", *POOLED_AXES)
"""A smaller batch that ran out of memory implies that a larger one does."""

PEAK_MEMORY_MAY_DIFFER: AxisGroup = ("batch_size_per_gpu", "epochs", "windows", "max_steps", *POOLED_AXES)
"""Peak memory scales with the batch size and does not depend on how long the point runs."""

PREDICTION_MAY_DIFFER: AxisGroup = ("num_gpus", "num_nodes")
"""One series of measured steps, from which the step on more GPUs is predicted."""

CHOICE_MAY_DIFFER: AxisGroup = (
    *(
        "strategy",
        "num_nodes",
        "num_gpus",
        "batch_size_per_gpu",
        "grad_accumulation",
        "num_samples",
        "epochs",
        "windows",
    ),
    *("precision", "input", "num_workers", "execution", "layout", "fused_optimizer"),
    *("broadcast_buffers", "sync_batchnorm", "bucket_cap_mb", "gradient_as_bucket_view"),
    *STRATEGY_AXES,
    *POOLED_AXES,
)
"""Ways to train one model on one data set, of which the fastest is to be used."""

TARGET_MAY_DIFFER: AxisGroup = (
    "strategy",
    "num_nodes",
    "num_gpus",
    "batch_size_per_gpu",
    "epochs",
    "learning_rate",
    "remedies",
    "warmup_epochs",
    "reference_batch_size",
    "broadcast_buffers",
    "sync_batchnorm",
    "grad_accumulation",
    *STRATEGY_AXES,
    *POOLED_AXES,
)
"""Trainings of one model on one data set, compared by the time that they take to a target accuracy."""

TRAINED_MAY_DIFFER: AxisGroup = (
    "measure",
    "windows",
    "epochs",
    "input",
    "num_workers",
    "max_steps",
    "num_samples",
    "evaluate",
    "dataset",
)
"""A communication point and the training point beside it: the step is the same, its input and length are not."""

PROCESS_MAY_DIFFER: AxisGroup = (
    *TRAINED_MAY_DIFFER,  # input and length
    "batch_size_per_gpu",
    "precision",
    "learning_rate",
    "momentum",
    "weight_decay",
    "remedies",
    "warmup_epochs",
    "reference_batch_size",
    "schedule",
    "nesterov",
    "broadcast_buffers",
    "sync_batchnorm",
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "grad_accumulation",
    *STRATEGY_AXES,
    "memory_limit_gib",
    "layout",
    "fused_optimizer",
    "execution",
    *POOLED_AXES,
)
"""Points that one set of processes may run in turn: each point sets these anew."""


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
