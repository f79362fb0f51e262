"""Stopping rule: a series of windows ends early once its figure is precise enough.

Checking after every window lowers the interval's coverage from 95 % to 93 % in the worst case, in which windows differ
most and rounds go on longest. Pure functions of values that every rank has, so that all ranks decide the same.
"""

import statistics
from collections.abc import Sequence

from pipeline.analysis.intervals import median_interval

MAX_TIME_HALF_WIDTH = 0.02  # of the median; more precision is not worth the time of more windows
DIFFERENCE_TOLERANCE_FRACTION, DIFFERENCE_TOLERANCE_S = 0.15, 20e-6


def is_time_precise_enough(times: Sequence[float]) -> bool:
    """True if the median time is known within 2 %."""
    return is_half_width_below(times, MAX_TIME_HALF_WIDTH * statistics.median(times)) if times else False


def is_difference_precise_enough(differences_s: Sequence[float]) -> bool:
    """True if the median difference of step times is known within its tolerance."""
    if not differences_s:
        return False
    return is_half_width_below(differences_s, difference_tolerance_s(statistics.median(differences_s)))


def is_half_width_below(values: Sequence[float], within: float) -> bool:
    """True if half the width of the median's interval is below `within`. Fewer than six values have no interval."""
    interval = median_interval(values)
    return interval is not None and (interval.high - interval.low) / 2 < within


def difference_tolerance_s(difference_s: float) -> float:
    """Return the tolerated error of a difference of step times: the larger of 15 % and 20 us."""
    return max(DIFFERENCE_TOLERANCE_FRACTION * abs(difference_s), DIFFERENCE_TOLERANCE_S)
