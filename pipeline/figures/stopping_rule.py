"""Stopping rule: a series of windows ends early once its figure is precise enough.

It looks after every window from the sixth on, at the interval that tables report, nominally 97.5 %. To look so often
costs coverage: at independent noise of 1, 2, 4 and 8 % the interval holds the true median in 97.1, 96.2, 95.9 and
96.5 % of simulated runs. Autocorrelation lowers that: 0.2 to 92 to 94 %, 0.4 to 85 to 89 %, 0.6 to 74 to 80 %. A drift
of 2 % over 120 windows lowers it to 66, 84, 90 and 96 %: a run that ends early sees only its beginning. The simulation
is in docs/stopping-rule.md. Pure functions of values that every rank has, so that all ranks decide the same.
"""

import statistics
from collections.abc import Sequence

from pipeline.figures.intervals import median_interval

WINDOW_S = 0.25  # timed steps of the slowest series fill it, with at least and at most so many of them
MIN_STEPS, MAX_STEPS = 5, 500
LEAD_IN_STEPS = 2  # of each window, not timed
MAX_TIME_HALF_WIDTH = 0.02  # of the median; more precision is not worth the time of more windows
DIFFERENCE_TOLERANCE_FRACTION, DIFFERENCE_TOLERANCE_S = 0.15, 20e-6


def is_time_precise_enough(times: Sequence[float]) -> bool:
    """True if the median time is known within 2 %."""
    return is_half_width_below(times, MAX_TIME_HALF_WIDTH * statistics.median(times)) if times else False


def is_difference_precise_enough(differences_s: Sequence[float]) -> bool:
    """True if the median difference of step times is known within its tolerance."""
    return is_half_width_below(differences_s, difference_tolerance_s(statistics.median(differences_s)))


def is_half_width_below(values: Sequence[float], within: float) -> bool:
    """True if half the width of the median's interval is below `within`. Fewer than six values have no interval."""
    interval = median_interval(values)
    return interval is not None and (interval.high - interval.low) / 2 < within


def difference_tolerance_s(difference_s: float) -> float:
    """Return the tolerated error of a difference of step times: the larger of 15 % and 20 us."""
    return max(DIFFERENCE_TOLERANCE_FRACTION * abs(difference_s), DIFFERENCE_TOLERANCE_S)
