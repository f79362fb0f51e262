"""When a series has enough windows: its figure is known so well that the rest may go.

Looking after each window costs some of the interval's coverage: 92 % are left of 95 % where windows differ so much
that rounds go on longest, and none is lost where they are alike. Pure functions of values that every rank has, so that
every rank answers alike.
"""

import statistics
from collections.abc import Sequence

from pipeline.intervals import half_width, median_interval

TIME_HALF_WIDTH = 0.02  # of the median: narrower, and more windows are not worth their time
DIFFERENCE_SHARE, DIFFERENCE_S = 0.15, 20e-6


def is_time_settled(times: Sequence[float]) -> bool:
    """Whether half the width of the median time's interval is below 2 % of it; never below six values."""
    interval = median_interval(times)
    return interval is not None and half_width(interval, statistics.median(times)) < TIME_HALF_WIDTH


def is_difference_settled(differences_s: Sequence[float]) -> bool:
    """Whether half the width of the median difference's interval is below its tolerance; never below six values."""
    interval = median_interval(differences_s)
    if interval is None:
        return False
    return (interval.high - interval.low) / 2 < tolerance_s(statistics.median(differences_s))


def tolerance_s(difference_s: float) -> float:
    """How far off a difference of step times may be before it matters: the larger of 15 % and 20 us."""
    return max(DIFFERENCE_SHARE * abs(difference_s), DIFFERENCE_S)
