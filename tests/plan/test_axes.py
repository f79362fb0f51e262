"""The declarations of the axes: complete, true, and on the page of grids."""

import re
from typing import Any

import pytest
from factories import ROOT, values_in_example
from words_page import render_axes

from pipeline.plan.axes import AXES, AXIS_DEFAULTS, AXIS_TYPES, DECLARED, MayDiffer, leaves_of


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_has_a_meaning_that_names_its_values_and_an_example_that_sets_another_one(axis: str) -> None:
    meaning = DECLARED[axis].meaning
    values = {leaf for leaf in leaves_of(AXIS_TYPES[axis]) if isinstance(leaf, str)}
    assert re.fullmatch(r"[^|]+\.", meaning)
    assert values <= {*re.findall(r"`(\w+)`", meaning)}
    assert {*values_in_example(axis)} - {AXIS_DEFAULTS[axis]}


def test_the_page_of_grids_has_every_axis() -> None:
    page = (ROOT / "docs" / "grids.md").read_text()
    assert page == render_axes(page), "run make words"
    assert all(f"\n| `{axis}` |" in page for axis in AXES)


@pytest.mark.parametrize(
    ("axis_type", "leaves"),
    [(AXIS_TYPES["max_steps"], [int, type(None)]), (AXIS_TYPES["layout"], ["contiguous", "channels_last"])],
)
def test_the_type_of_an_axis_is_made_of_plain_types_and_values(axis_type: Any, leaves: list[Any]) -> None:
    assert leaves_of(axis_type) == leaves


def test_an_axis_that_changes_what_is_learnt_is_one_of_a_choice() -> None:
    assert all(MayDiffer.CHOICE in axis.may_differ for axis in DECLARED.values() if axis.changes_learning)
