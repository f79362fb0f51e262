"""Groups of axes in which two points may differ and still count as alike, one group for each use.

Every key below is made of all axes outside its group. `plan.axes` declares the groups of each axis. An axis that
declares none is in no group, so that points that differ in it are not alike.
"""

import functools
from typing import Any

import msgspec

from pipeline.experiment.spec import Spec
from pipeline.plan.axes import AXES, AXIS_DEFAULTS, axes_that
from pipeline.plan.declaration import MayDiffer

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
