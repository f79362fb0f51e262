"""Confidence intervals of medians (by order statistics) and of ratios of medians, and a test for drift.

Pure functions of numbers. An interval is in the unit of its values. It assumes no distribution, only independent,
identically distributed values. Its nominal coverage is 97.5 % (96.9 % for six values), so that runs that stop early
still have 95 % (stopping_rule; the simulation is in docs/stopping-rule.md). Intervals are computed when tables are
collected.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from pipeline.figures.notes import Note, NoteKind, make_note

WINDOWS_POOLED = NoteKind(
    "windows_pooled",
    "range within the windows of {repeats} repeats together: too narrow if repeats differ more than their windows",
)
OF_DRIFT = "from the first half of a run to the second: its interval assumes steady times, so allow for the drift too"
DRIFTED = NoteKind(
    "drifted",
    "{what:figures} drifted by {drift:+.1%} " + OF_DRIFT,
    badge="drifted {drift:+.1%}",
    word="drifted",
)
DRIFTED_IN_REPEATS = NoteKind(
    "drifted_in_repeats",
    "{what:figures} drifted in {count} of {repeats} repeats, at most by {drift:+.1%} " + OF_DRIFT,
    badge="drifted {drift:+.1%}",
    word="drifted",
)

CONFIDENCE = 0.975  # nominal: it holds if the number of values was fixed before the run
MIN_COVERAGE = 0.95  # fewer than six values cannot reach it, and get no interval
DRIFT_DEVIATIONS = 2.33  # standard deviations; a larger trend is a drift (at most 2.1 % false alarms in steady series)
MIN_RELATIVE_DRIFT = 0.001  # of the median; a smaller drift is not reported, even if significant

IntervalBasis = Literal["windows", "repeats"]


class Interval(NamedTuple):
    """An interval that contains the true median with probability >= `coverage`."""

    low: float
    high: float
    coverage: float

    def contains(self, value: float) -> bool:
        """True if the value lies inside, bounds included."""
        return self.low <= value <= self.high


class Estimate(float):
    """A figure with the ends of its interval, all in its unit.

    `noise` hides a figure that is not larger. A median of runs also has its `interval` with what that is computed from,
    and the median of each run. None: it has none.
    """

    low: float | None
    high: float | None
    noise: float | None
    interval: Interval | None
    basis: IntervalBasis | None
    run_medians: tuple[float, ...]

    def __new__(
        cls, value: float, low: float | None = None, high: float | None = None, noise: float | None = None
    ) -> "Estimate":
        found = super().__new__(cls, value)
        found.low, found.high, found.noise = low, high, noise
        found.interval, found.basis, found.run_medians = None, None, ()
        return found

    def times(self, count: float) -> "Estimate":
        """Return the figure of so many, such as the time of the steps of an epoch from that of one."""
        ends = (None if end is None else count * end for end in (self.low, self.high, self.noise))
        return Estimate(count * self, *ends)

    def over(self, divisor: float) -> "Estimate":
        """Return the figure as a share of a number above 0, with the interval that verdicts use."""
        ends = (None if end is None else end / divisor for end in (self.low, self.high, self.noise))
        found = Estimate(self / divisor, *ends)
        if self.interval:
            low, high, coverage = self.interval
            found.interval, found.basis = Interval(low / divisor, high / divisor, coverage), self.basis
        return found

    @property
    def relative_half_width(self) -> float | None:
        """Half the interval's width divided by the figure. If over windows, not valid for a new process."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2 / self


def estimate(value: float | None, interval: Interval | None = None) -> Estimate | None:
    """Return a figure with its interval, if there is one; None if it is not known."""
    return None if value is None else Estimate(value, *(interval[:2] if interval else ()))


def ends_of(figure: float | None) -> tuple[float | None, float | None]:
    """Return the ends of a figure's interval; None without one."""
    return (figure.low, figure.high) if isinstance(figure, Estimate) else (None, None)


@functools.cache
def min_values() -> int:
    """Return the smallest n for which minimum and maximum of n values have MIN_COVERAGE: 1 - 2^(1-n) >= 95 %."""
    return next(n for n in itertools.count(2) if coverage_of_ranks(1, n) >= MIN_COVERAGE)


@functools.cache
def coverage_of_ranks(rank: int, n: int) -> float:
    """Return the probability that the median lies between the rank-th smallest and the rank-th largest of n values.

    Ranks count from 1.
    """
    return next(itertools.islice(coverages(n), rank - 1, None))


def coverages(n: int) -> Iterator[float]:
    """Yield the coverage of each rank of n values, from rank 1 on.

    1 - 2 P(X < rank) with X ~ Binomial(n, 1/2) (Conover, Practical Nonparametric Statistics, 3.2; Hahn & Meeker,
    Statistical Intervals, 5.2): each value is below the median with probability 1/2. The counts of outcomes are exact,
    and each follows from the one before: to sum math.comb anew takes minutes for 100,000 values.
    """
    ways = fewer = 1  # of 2^n outcomes, those with exactly (ways) and at most (fewer) rank - 1 values below the median
    total = 1 << n
    for rank in range(1, n + 1):
        yield 1 - 2 * fewer / total
        ways = ways * (n - rank + 1) // rank
        fewer += ways


@functools.cache
def innermost_rank(n: int, confidence: float) -> int:
    """Return the largest rank (at least 1) whose coverage reaches the confidence."""
    return max(1, sum(1 for _ in itertools.takewhile(lambda coverage: coverage >= confidence, coverages(n))))


NOMINAL = f"nominally {100 * CONFIDENCE:g} %"
OF_FEWEST_VALUES = coverage_of_ranks(1, min_values())  # of minimum and maximum
"""The coverage of an interval in words, and that of the fewest values that have one."""


def median_interval(values: Sequence[float]) -> Interval | None:
    """Return the narrowest interval between symmetric ranks with a coverage of CONFIDENCE; None below `min_values`.

    Six values cannot reach it: they give their minimum and maximum, which cover 96.9 %.
    """
    n, ordered = len(values), sorted(values)
    if n < min_values():
        return None
    rank = innermost_rank(n, CONFIDENCE)
    return Interval(ordered[rank - 1], ordered[-rank], coverage_of_ranks(rank, n))


def drifted_halves(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the medians of the earlier and the later half of the values if they drift, else None.

    Values that drift are not identically distributed, so an interval over all of them is too narrow. The test is that
    of Mann and Kendall for a trend: the number of pairs that rise minus the number that fall is compared with the
    standard deviation that it has without a trend (Kendall, Rank Correlation Methods, 4.9). The test reports a drift in
    1.1 to 2.1 % of steady series of independent values, and in fewer if some values are equal. With fewer values than
    `min_values` the result is None.
    """
    n, middle = len(values), len(values) // 2
    if n < min_values():
        return None
    trend = sum((later > earlier) - (later < earlier) for earlier, later in itertools.combinations(values, 2))
    if abs(trend) <= DRIFT_DEVIATIONS * math.sqrt(n * (n - 1) * (2 * n + 5) / 18):
        return None
    return statistics.median(values[:middle]), statistics.median(values[middle:])


def drift_notes(what: str, by_repeat: Sequence[Sequence[float]]) -> list[Note]:
    """Return a note with the largest drift within a repeat, if an interval of positive times is over windows."""
    time = median_time(by_repeat)
    is_over_windows = time is not None and time.basis == "windows"
    halves = [found for values in by_repeat if is_over_windows and (found := drifted_halves(values))]
    drifts = [drift for before, after in halves if abs(drift := after / before - 1) >= MIN_RELATIVE_DRIFT]
    if not drifts:
        return []
    values = {"what": what, "drift": max(drifts, key=abs)}
    if len(by_repeat) > 1:
        return [make_note(DRIFTED_IN_REPEATS, **values, count=len(drifts), repeats=len(by_repeat))]
    return [make_note(DRIFTED, **values)]


def median_time(by_repeat: Sequence[Sequence[float]]) -> Estimate | None:
    """Return the median of the repeats' medians and its interval; None without values.

    The interval is over the repeats' medians if there are enough, because windows of one process share its placement
    and clocks, else over all windows. That is widened to include the median of the repeats' medians, which may lie
    outside if repeats have unequal numbers of windows.
    """
    known = [values for values in by_repeat if values]
    if not known:
        return None
    run_medians = tuple(map(statistics.median, known))
    middle = statistics.median(run_medians)
    time = Estimate(middle)
    time.run_medians = run_medians
    if interval := median_interval(run_medians):
        time.interval, time.basis = interval, "repeats"
    elif interval := median_interval([value for values in known for value in values]):
        time.interval = interval._replace(low=min(interval.low, middle), high=max(interval.high, middle))
        time.basis = "windows"
    if time.interval:
        time.low, time.high = time.interval[:2]
    return time


def pooled_notes(by_repeat: Sequence[Sequence[float]], basis: IntervalBasis | None) -> list[Note]:
    """Return a note if an interval is over windows of several processes, whose times may differ."""
    if basis == "windows" and len(by_repeat) > 1:
        return [make_note(WINDOWS_POOLED, repeats=len(by_repeat))]
    return []


def time_ratio_interval(numerator: Estimate | None, denominator: Estimate | None) -> Interval | None:
    """Return the interval of numerator/denominator; None if one of the times has no interval."""
    if numerator is None or denominator is None or numerator.interval is None or denominator.interval is None:
        return None
    return ratio_interval(numerator.interval, denominator.interval)


def ratio_interval(numerator: Interval, denominator: Interval) -> Interval:
    """Return the interval of numerator/denominator, from those of two positive medians that were measured separately.

    Interval arithmetic: the ratio is inside if both medians are, so by Bonferroni the coverage is at least the sum of
    both minus 1: 0.95 for two intervals of 0.975, and 0.9375 if both have six values. Conservative: it does not use
    pairing.
    """
    coverage = numerator.coverage + denominator.coverage - 1
    return Interval(numerator.low / denominator.high, numerator.high / denominator.low, coverage)
