"""When a series has enough windows: its figure is known so well that the rest may go.

Looking after each window costs some of the interval's coverage: 93 % are left of 95 % where windows differ so much
that rounds go on longest, and none is lost where they are alike. Pure functions of values that every rank has, so that
every rank answers alike.
"""

import statistics
from collections.abc import Sequence

from pipeline.analysis.intervals import median_interval

MAX_TIME_HALF_WIDTH = 0.02  # of the median: narrower, and more windows are not worth their time
DIFFERENCE_TOLERANCE_FRACTION, DIFFERENCE_TOLERANCE_S = 0.15, 20e-6


def is_time_precise_enough(times: Sequence[float]) -> bool:
    """Whether the median time is known within 2 %."""
    return is_half_width_below(times, MAX_TIME_HALF_WIDTH * statistics.median(times)) if times else False


def is_difference_precise_enough(differences_s: Sequence[float]) -> bool:
    """Whether the median difference of step times is known within its tolerance."""
    return (
        is_half_width_below(differences_s, difference_tolerance_s(statistics.median(differences_s)))
        if differences_s
        else False
    )


def is_half_width_below(values: Sequence[float], within: float) -> bool:
    """Whether half the width of the median's interval is less, in the unit of the values; never below six of them."""
    interval = median_interval(values)
    return interval is not None and (interval.high - interval.low) / 2 < within


def difference_tolerance_s(difference_s: float) -> float:
    """How far off a difference of step times may be before it matters: the larger of 15 % and 20 us."""
    return max(DIFFERENCE_TOLERANCE_FRACTION * abs(difference_s), DIFFERENCE_TOLERANCE_S)
