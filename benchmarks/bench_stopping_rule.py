"""Simulation of rules for the number of windows, and of the test for drift; the tables of docs/stopping-rule.md.

    python benchmarks/bench_stopping_rule.py > docs/stopping-rule.md

A run is a series of relative times around a true median of 1. A rule ends it and reports an interval. Coverage is the
share of runs whose interval contains 1; no GPU is needed, and the seed is fixed. It takes about a minute.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tabulate
from numpy.typing import NDArray

from pipeline.figures.intervals import (
    CONFIDENCE,
    DRIFT_DEVIATIONS,
    innermost_rank,
    median_time,
    min_values,
    time_ratio_interval,
)
from pipeline.figures.stopping_rule import MAX_TIME_HALF_WIDTH

Values = NDArray[np.float64]

NUM_RUNS = 20_000
MAX_WINDOWS = 120  # of the grids that measure communication
FIRST = min_values()
NOISES = (0.01, 0.02, 0.04, 0.08)  # standard deviation of a window over the median
AUTOCORRELATIONS = (0.2, 0.4, 0.6)
DRIFTS = (0.02, 0.05)  # change over MAX_WINDOWS windows
NUM_SERIES, NUM_WINDOWS, NEW_RUNS = 4000, 6, (1, 3, 6)  # of what one run says of the next
DRIFT_COUNTS = (6, 8, 12, 20, 30, 60, 120)


class Rule(NamedTuple):
    """A rule: it stops at the first of `checks` with a narrow interval at `stop`, and reports the interval at `report`.

    Without a narrow one it runs `most` windows.
    """

    name: str
    checks: Sequence[int] = ()
    stop: float = 0.95
    report: float = 0.95
    most: int = MAX_WINDOWS


class Outcome(NamedTuple):
    """The outcome of a rule over all runs: ends of the reported intervals and numbers of windows, one for each run."""

    low: Values
    high: Values
    num_windows: NDArray[np.int64]

    @property
    def coverage(self) -> float:
        """The share of intervals that contain 1."""
        return float(np.mean((self.low <= 1) & (self.high >= 1)))

    def cell(self) -> str:
        """Return coverage, mean number of windows and median half-width as the text of a cell."""
        half_width = np.median(self.high - self.low) / 2
        return f"{self.coverage:.1%}, {self.num_windows.mean():.1f}, {half_width:.1%}"


def every(step: int, first: int) -> range:
    """Return every step-th number of windows from the first on."""
    return range(first, MAX_WINDOWS + 1, step)


WIDER = Rule("95 %, after every window from 6 on", every(1, 6))
CHOSEN = Rule("97.5 %, after every window from 6 on (chosen)", every(1, FIRST), CONFIDENCE, CONFIDENCE)
FIXED = [Rule(f"97.5 %, fixed: {count} windows", report=CONFIDENCE, most=count) for count in (6, 20, 60)]
RULES = (
    *FIXED,
    WIDER,
    Rule("stop at 95 % from 6 on, report at 97.5 %", every(1, 6), 0.95, 0.975),
    CHOSEN,
    Rule("97.5 %, after 6, 12, 24, 48, 96", (6, 12, 24, 48, 96), 0.975, 0.975),
)


def simulate_times(noise: float, autocorrelation: float = 0.0, drift: float = 0.0, num_runs: int = NUM_RUNS) -> Values:
    """Return relative times [run, window]: normal noise around 1, AR(1), and a linear drift whose middle is at 1."""
    times = np.random.default_rng(7).standard_normal((num_runs, MAX_WINDOWS))
    for window in range(1, MAX_WINDOWS):
        fresh = math.sqrt(1 - autocorrelation**2) * times[:, window]
        times[:, window] = autocorrelation * times[:, window - 1] + fresh
    return 1 + noise * times + drift * np.linspace(-0.5, 0.5, MAX_WINDOWS)


def apply_rules(times: Values, rules: Sequence[Rule]) -> list[Outcome]:
    """Return the outcome of every rule. Each number of windows is sorted once, for the runs that still need it."""
    num_runs = len(times)
    outcomes = [Outcome(np.zeros(num_runs), np.zeros(num_runs), np.zeros(num_runs, np.int64)) for _ in rules]
    for n in range(FIRST, MAX_WINDOWS + 1):
        looks = [
            (outcome.num_windows == 0) & ((n in rule.checks) | (n == rule.most))
            for rule, outcome in zip(rules, outcomes, strict=True)
        ]
        runs = np.flatnonzero(np.any(looks, axis=0))
        ordered = np.sort(times[runs, :n], axis=1)
        medians = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
        for rule, outcome, look in zip(rules, outcomes, looks, strict=True):
            low, high = ends(ordered, rule.stop)
            is_narrow = (high - low) / 2 < MAX_TIME_HALF_WIDTH * medians
            is_over = look[runs] & ((n == rule.most) | ((n in rule.checks) & is_narrow))
            over = runs[is_over]
            low, high = ends(ordered, rule.report)
            outcome.low[over], outcome.high[over], outcome.num_windows[over] = low[is_over], high[is_over], n
    return outcomes


def ends(ordered: Values, confidence: float) -> tuple[Values, Values]:
    """Return both ends of the median's interval of each sorted series."""
    rank = innermost_rank(ordered.shape[1], confidence)
    return ordered[:, rank - 1], ordered[:, -rank]


def drift_alarms(times: Values) -> float:
    """Return the share of series in which the test sees a drift (`intervals.drifted_halves`, vectorized)."""
    n = times.shape[1]
    score = sum(np.sign(times[:, lag:] - times[:, :-lag]).sum(axis=1) for lag in range(1, n))
    return float(np.mean(np.abs(score) > DRIFT_DEVIATIONS * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)))


def alarms_after_stop(noise: float) -> float:
    """Return the share of steady runs in which the test sees a drift once the chosen rule has ended them."""
    times = simulate_times(noise)
    (outcome,) = apply_rules(times, [CHOSEN])
    counts, num_runs = np.unique(outcome.num_windows, return_counts=True)
    alarms = [drift_alarms(times[outcome.num_windows == count, :count]) for count in counts]
    return float(np.average(alarms, weights=num_runs))


def render_rules() -> str:
    """Return the table of all rules under independent noise."""
    columns = [[outcome.cell() for outcome in apply_rules(simulate_times(noise), RULES)] for noise in NOISES]
    rows = [[rule.name, *cells] for rule, *cells in zip(RULES, *columns, strict=True)]
    return table(rows, ["rule", *(f"noise {noise:.0%}" for noise in NOISES)])


def render_dependence() -> str:
    """Return the table of two rules under autocorrelation and drift."""
    rules = (FIXED[1], CHOSEN)
    cases = [(f"autocorrelation {value}", value, 0.0) for value in AUTOCORRELATIONS]
    cases += [(f"drift of {value:.0%} in {MAX_WINDOWS} windows", 0.0, value) for value in DRIFTS]
    rows = []
    for name, autocorrelation, drift in cases:
        columns = [apply_rules(simulate_times(noise, autocorrelation, drift), rules) for noise in NOISES]
        for rule, *outcomes in zip(rules, *columns, strict=True):
            rows.append([name, rule.name, *(outcome.cell() for outcome in outcomes)])
    return table(rows, ["times", "rule", *(f"noise {noise:.0%}" for noise in NOISES)])


def render_drift() -> str:
    """Return the table of the test for drift: false alarms of steady series, and how often it sees a drift."""
    steady = [("steady, independent", 0.0, 0.0)]
    steady += [(f"steady, autocorrelation {value}", value, 0.0) for value in AUTOCORRELATIONS]
    rows = []
    for name, autocorrelation, drift in steady:
        times = simulate_times(0.01, autocorrelation, drift)
        rows.append([name, *(f"{drift_alarms(times[:, :count]):.1%}" for count in DRIFT_COUNTS)])
    for noises in (2, 4):
        # the drift from the first to the last window, in standard deviations of the noise
        shares = []
        for count in DRIFT_COUNTS:
            drifting = simulate_times(0.01)[:, :count] + 0.01 * noises * np.linspace(0, 1, count)
            shares.append(f"{drift_alarms(drifting):.1%}")
        rows.append([f"drift of {noises} times the noise", *shares])
    return table(rows, ["series", *map(str, DRIFT_COUNTS)])


def simulate_runs(num_runs: int, autocorrelation: float, seed: int) -> list[list[list[float]]]:
    """Return relative times [series, run, window] around 1: runs differ as much as the windows of a run."""
    generator = np.random.default_rng(seed)
    times = generator.standard_normal((NUM_SERIES, num_runs, NUM_WINDOWS))
    for window in range(1, NUM_WINDOWS):
        fresh = math.sqrt(1 - autocorrelation**2) * times[..., window]
        times[..., window] = autocorrelation * times[..., window - 1] + fresh
    times += generator.standard_normal((NUM_SERIES, num_runs, 1))
    found: list[list[list[float]]] = (1 + NOISES[0] * times).tolist()
    return found


def new_run_coverage(num_runs: int, autocorrelation: float) -> tuple[float, float]:
    """Return the share of intervals that contain the true median: of an epoch time, and of a speed-up."""
    sides = [map(median_time, simulate_runs(num_runs, autocorrelation, seed)) for seed in (7, 8)]
    times = gains = 0
    for one, other in zip(*sides, strict=True):
        gain = time_ratio_interval(one, other)
        times += one is not None and one.interval is not None and one.interval.contains(1)
        gains += gain is not None and gain.contains(1)
    return times / NUM_SERIES, gains / NUM_SERIES


def render_new_runs() -> str:
    """Return the table of what intervals over windows, and over six runs, say of the next run."""
    rows = []
    for autocorrelation in (0.0, 0.4):
        shares = [new_run_coverage(count, autocorrelation) for count in NEW_RUNS]
        name = f"autocorrelation {autocorrelation}" if autocorrelation else "independent windows"
        rows.append([f"epoch time, {name}", *(f"{time:.0%}" for time, _ in shares)])
        rows.append([f"speed-up, {name}", *(f"{gain:.1%}" for _, gain in shares)])
    return table(rows, ["figure", *(f"{count} run{'s' if count > 1 else ''}" for count in NEW_RUNS)])


def table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table in Markdown."""
    return tabulate.tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True)


PAGE = """# The stopping rule, simulated

Written by `python benchmarks/bench_stopping_rule.py > docs/stopping-rule.md`: {num_runs:,} runs of up to {most}
windows, normal noise around a true median of 1. A cell holds the share of reported intervals that contain the true
median, the mean number of windows, and the median half-width. A rule stops once half the width is below 2 %. The share
in its name is the nominal one of its intervals; tables print those of 97.5 %.

## Independent noise

{rules}

A fixed number of windows keeps its coverage whatever the noise, but not its precision. A rule that stops early pays
with coverage, since it stops where the windows happen to lie close together. The chosen rule keeps 95 % at every noise,
and 2 % of half-width, with the interval that is reported. At a noise of 4 % it takes {extra:.0%} more windows than that
of 95 %. Differences of step times (15 % or 20 us) stop by the same interval.

## Autocorrelation and drift

Autocorrelation is that of one window with the next (AR(1)). The true median of a run that drifts is taken half way
through {most} windows.

{dependence}

Under autocorrelation no rule here keeps 95 %: read such an interval as too narrow, and repeat the configuration in new
processes. A run that stops early misses most of a slow drift, so every run is tested for one:

## The test for drift

Mann and Kendall's test for a trend: over all pairs of windows, those that rise less those that fall; a drift is
reported beyond {deviations} standard deviations of that count, from six windows on. Columns are numbers of windows; a
cell is the share of series that the test calls drifting. Of steady independent series that is the false-alarm rate; of
steady runs that the chosen rule ended it is {stopped} at a noise of 1, 2, 4 and 8 %.

{drift}

Tables leave out a drift below 0.1 % of the median.

## One run, and the next

An interval over the windows of fewer than six runs is a range within these runs. A cell is the share of such intervals
that contain the true median over all runs, where runs differ as much as their windows do ({new_runs:,} series,
{new_windows} windows a run, noise 1 %). With six runs the interval is over runs: below six, a new run may fall outside.

{new}
"""


def main() -> None:
    """Print the page."""
    parts = {
        "rules": render_rules(),
        "dependence": render_dependence(),
        "drift": render_drift(),
        "new": render_new_runs(),
    }
    parts |= {"stopped": ", ".join(f"{alarms_after_stop(noise):.1%}" for noise in NOISES)}
    earlier, chosen = (outcome.num_windows.mean() for outcome in apply_rules(simulate_times(0.04), (WIDER, CHOSEN)))
    figures = {"num_runs": NUM_RUNS, "most": MAX_WINDOWS, "deviations": DRIFT_DEVIATIONS}
    figures |= {"new_runs": NUM_SERIES, "new_windows": NUM_WINDOWS}
    print(PAGE.format(extra=chosen / earlier - 1, **figures, **parts), end="")


if __name__ == "__main__":
    main()
