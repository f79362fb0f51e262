import random
from itertools import pairwise

import pytest

from pipeline.analysis.intervals import median_interval
from pipeline.analysis.stopping_rule import difference_tolerance_s, is_difference_precise_enough, is_time_precise_enough

US = 1e-6


@pytest.mark.parametrize(
    ("times", "settled"),
    [
        ([1.0] * 5, False),  # no interval
        ([1.0] * 6, True),
        ([1.0] * 5 + [1.03], True),  # half of 3 %
        ([1.0] * 5 + [1.05], False),  # half of 5 %
        ([1.0] * 8 + [1.05], True),  # of nine the second and the eighth
    ],
)
def test_a_time_is_settled_within_two_per_cent_of_itself(times: list[float], settled: bool) -> None:
    assert is_time_precise_enough(times) is settled


@pytest.mark.parametrize(
    ("spread_us", "around_us", "settled"),
    [
        (38, 0, True),  # half of it is 19 us
        (42, 0, False),
        (42, 150, True),  # 15 % of 150 us are 22.5 us
        (42, -150, True),
        (50, 150, False),
    ],
)
def test_a_difference_is_settled_within_the_larger_of_20_us_and_15_per_cent(
    spread_us: float, around_us: float, settled: bool
) -> None:
    half_s = spread_us / 2 * US
    values_s = [around_us * US + offset for offset in (-half_s, *[0.0] * 4, half_s)]
    assert is_difference_precise_enough(values_s) is settled
    assert not is_difference_precise_enough(values_s[1:])


def test_the_tolerance_of_a_difference_never_falls_as_it_grows() -> None:
    tolerances = [difference_tolerance_s(us * US) for us in range(0, 1000, 10)]
    assert all(one <= other for one, other in pairwise(tolerances))
    assert (tolerances[0], difference_tolerance_s(1000 * US)) == pytest.approx((20 * US, 150 * US))


@pytest.mark.parametrize(("share", "least"), [(0.01, 0.95), (0.06, 0.90)])
def test_looking_after_each_window_costs_little_of_the_coverage(share: float, least: float) -> None:
    """Where windows differ by 6 % rounds go on longest; runs of up to 120 that stop once they are settled."""
    generator = random.Random(7)
    held = 0
    for _ in range(400):
        times: list[float] = []
        while len(times) < 120 and not is_time_precise_enough(times):
            times.append(generator.gauss(1, share))
        interval = median_interval(times)
        assert interval is not None
        held += interval.contains(1)
    assert held / 400 >= least
