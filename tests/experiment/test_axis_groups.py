from typing import Any

import pytest
from factories import make_spec, with_other_value

from pipeline.experiment import axis_groups
from pipeline.experiment.packing import process_layout
from pipeline.experiment.spec import Spec
from pipeline.plan.axes import AXES

GROUPS: dict[str, axis_groups.AxisGroup] = {
    name: group for name, group in vars(axis_groups).items() if name.endswith(("_MAY_DIFFER", "POOLED_AXES"))
}
POINT: dict[str, Any] = {"strategy": "ddp", "num_gpus": 4, "batch_size_per_gpu": 64, "epochs": 3, "input": "synthetic"}


@pytest.mark.parametrize("axis", AXES)
def test_points_are_alike_if_they_differ_in_axes_of_the_group_and_in_no_other(axis: str) -> None:
    spec, other = make_spec(**POINT), with_other_value(make_spec(**POINT), axis)
    assert getattr(spec, axis) != getattr(other, axis)
    for name, group in GROUPS.items():
        assert (axis_groups.alike_key(spec, group) == axis_groups.alike_key(other, group)) == (axis in group), name


def test_a_new_axis_keeps_points_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class LaterSpec(Spec, frozen=True, kw_only=True):
        later_axis: int = 1

    monkeypatch.setattr(axis_groups, "AXES", (*AXES, "later_axis"))
    axis_groups._axes_outside.cache_clear()
    one, two = LaterSpec(**POINT), LaterSpec(**POINT, later_axis=2)
    try:
        assert all(axis_groups.alike_key(one, group) != axis_groups.alike_key(two, group) for group in GROUPS.values())
        assert process_layout(one) != process_layout(two)
    finally:
        axis_groups._axes_outside.cache_clear()
