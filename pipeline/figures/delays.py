"""A slower network, tried by delays: the step while each collective takes longer, against the step as it is.

Computation hides a delay until it is too long, so the steps lie on a bend and not on a line. Differences are taken
round by round. Pure functions of records; times in seconds.
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.figures.exposed_communication import slowest_times_s, step_times_s, whole_step
from pipeline.figures.intervals import Estimate, median_time
from pipeline.figures.pooling import group_pairs
from pipeline.figures.stopping_rule import is_difference_precise_enough, is_time_precise_enough
from pipeline.records.record import Communication, DelayedSteps


class DelayedStep(NamedTuple):
    """The step with one delay. `added_s` is the sum of its delays, `longer_s` what the step takes longer for them."""

    latency_s: float
    s_per_byte: float
    added_s: float
    step_s: Estimate
    longer_s: Estimate

    @property
    def hidden_share(self) -> Estimate:
        """The share of the delays that does not make the step longer, cut to 0 to 1."""
        ends = (self.longer_s, self.longer_s.high, self.longer_s.low)
        share, low, high = (None if end is None else min(max(1 - end / self.added_s, 0.0), 1.0) for end in ends)
        assert share is not None, "only the ends may be missing"
        return Estimate(share, low, high)


def differences_s(found: Communication, delayed: DelayedSteps) -> list[float]:
    """Return the delayed step minus the mean of both steps without delays, for each round."""
    step = whole_step([found])
    slow_s = slowest_times_s(found, delayed.window_times_ns)
    usual = zip(step_times_s(found, step), step_times_s(found, f"{step}_again"), strict=True)
    return [slow - statistics.fmean(two) for slow, two in zip(slow_s, usual, strict=True)]


def is_delay_precise_enough(found: Communication) -> bool:
    """True once the step and every difference are precise enough to stop."""
    usual = (step_times_s(found, series.variant) for series in found.series)
    return all(map(is_time_precise_enough, usual)) and all(
        is_difference_precise_enough(differences_s(found, delayed)) for delayed in found.delayed
    )


def delayed_steps(found: Sequence[Communication]) -> Iterator[DelayedStep]:
    """Yield the step with each delay, in the order of the run. Delays of repeats, which each chooses, are pooled."""
    by_place = group_pairs((place, (part, one)) for part in found for place, one in enumerate(part.delayed))
    for pairs in by_place.values():
        step = median_time([slowest_times_s(part, one.window_times_ns) for part, one in pairs])
        longer = median_time([differences_s(part, one) for part, one in pairs])
        added_s = statistics.median(ns for _, one in pairs for ns in one.delays_ns) / 1e9
        latency_s = statistics.median(one.latency_s for _, one in pairs)
        if step is not None and longer is not None and added_s:
            yield DelayedStep(latency_s, statistics.median(one.s_per_byte for _, one in pairs), added_s, step, longer)


def delay_costs_s(found: Sequence[Communication], added_s: float) -> float | None:
    """Return what the step takes longer if its collectives take `added_s` longer in all; None if none was as long.

    Between two measured delays that grow with the bytes it lies on the line between them.
    """
    costs = {step.added_s: float(step.longer_s) for step in delayed_steps(found) if not step.latency_s}
    for (low_s, low_cost_s), (high_s, high_cost_s) in itertools.pairwise(sorted({0.0: 0.0, **costs}.items())):
        if low_s <= added_s <= high_s:
            return low_cost_s + (high_cost_s - low_cost_s) * (added_s - low_s) / (high_s - low_s)
    return None
