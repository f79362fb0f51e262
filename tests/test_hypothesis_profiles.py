"""The profiles of hypothesis: no test fails because a machine is slow."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_profiles import ALL, FEW


@pytest.mark.parametrize("name", [ALL, FEW])
def test_examples_that_are_drawn_slowly_fail_no_test(name: str) -> None:
    @settings(settings.get_profile(name), max_examples=8, database=None)
    @given(st.integers().map(lambda number: time.sleep(0.25)))
    def draw(nothing: None) -> None:
        assert nothing is None

    draw()
