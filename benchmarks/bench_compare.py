"""False verdicts of `compare`, and its power: on published records of one point, by arithmetic and by simulation.

    python benchmarks/bench_compare.py      the figures of docs/trust.md; half a minute, no GPU

Each simulated side has some repeats of six windows. The logarithm of a time is the repeat's effect plus the window's,
so all times are positive. A side's spread between repeats is given in standard deviations of a window; of Student's t
and of the exponential distribution it is the scale. The seed is fixed.
"""

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tabulate
from numpy.typing import NDArray

from pipeline.figures.comparison import Verdict, compare_outcomes, verdict_on
from pipeline.figures.intervals import CONFIDENCE, innermost_rank, median_time, time_ratio_interval
from pipeline.figures.pooling import pool_outcomes
from pipeline.records.folder import Experiment
from pipeline.records.outcomes import PointOutcome, collect_outcomes
from pipeline.records.record import Record

Values = NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = "published/h100x2/q4-study"
NUM_EPOCHS = 7  # of each record: one warms up, six are timed

NUM_WINDOWS = 6
NUM_REPEATS = 6
WINDOW_DEVIATION = 0.005  # standard deviation of a window, relative to its time
SPREADS = (0, 0.5, 1, 2, 4)  # between repeats, in standard deviations of a window
TRUE_DIFFERENCE = 0.03
POWER_SPREADS = (0.005, 0.01, 0.02)  # between repeats, relative to the time
POWER_REPEATS = (6, 12, 20)
# the same points, on two machines of one kind
SITTINGS = ("published/h100x2/captured", "published/h100x2/captured-again")
RUN_SPREADS = (0.0005, 0.001, 0.002)  # between the runs of a sitting, relative to the time
LIMIT = 0.01  # of `--fail-above 1%`

EFFECTS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Values]] = {
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "heavy tails (Student's t, 2 degrees of freedom)": lambda generator, shape: generator.standard_t(2, shape),
    "skewed (exponential)": lambda generator, shape: generator.exponential(1, shape),
}
"""The effects of repeats: a sample of (comparisons, repeats)."""


def published_pairs() -> list[tuple[Record, Record]]:
    """Return every two ok records of one point on one GPU model, cut to six windows."""
    points = pool_outcomes(collect_outcomes(Experiment(ROOT / EXPERIMENT)).outcomes)
    return [pair for point in points for pair in itertools.combinations(map(cut_record, point.ok_records), 2)]


def cut_record(record: Record) -> Record:
    """Return the record as a point of six windows would have left it."""
    assert record.measurement is not None
    spec = msgspec.structs.replace(record.spec, epochs=NUM_EPOCHS, windows=NUM_WINDOWS)
    measurement = msgspec.structs.replace(record.measurement, epochs=record.measurement.epochs[:NUM_EPOCHS])
    return msgspec.structs.replace(record, spec=spec, run_id=spec.run_id(), measurement=measurement)


def pair_verdict(a: Record, b: Record) -> Verdict:
    """Return the verdict on two records of one point, each in an experiment of its own."""
    sides = [[PointOutcome(record.spec, record.status, record, record.reason)] for record in (a, b)]
    (point,) = compare_outcomes(*sides).points
    return point.verdict


def exact_false_share(num_a: int, num_b: int) -> float:
    """Return the probability that the intervals of two sides do not overlap, if all repeats are alike.

    Every order of the repeats is then equally likely, whatever their distribution. The intervals are apart if
    num_a + 1 - rank or more of A lie below the rank-th smallest of B, or the other way round.
    """
    ranks = [innermost_rank(n, CONFIDENCE) for n in (num_a, num_b)]
    orders = 0
    for (low, num_low), (high, num_high) in itertools.permutations(zip(ranks, (num_a, num_b), strict=True)):
        for below in range(num_low + 1 - low, num_low + 1):  # of the low side, below the high side's rank-th smallest
            before = math.comb(below + high - 1, below)
            orders += before * math.comb(num_low - below + num_high - high, num_low - below)
    return orders / math.comb(num_a + num_b, num_a)


def simulate_side(
    generator: np.random.Generator, effect: str, spread: float, num_repeats: int, num_comparisons: int
) -> Values:
    """Return times [comparison, repeat, window] around 1. `spread` is relative to the time."""
    between = spread * EFFECTS[effect](generator, (num_comparisons, num_repeats))
    within = WINDOW_DEVIATION * generator.standard_normal((num_comparisons, num_repeats, NUM_WINDOWS))
    return np.exp(between[:, :, np.newaxis] + within)


def count_verdicts(a: Values, b: Values) -> Counter[Verdict]:
    """Return how often each verdict is given: the rule of `compare` itself."""
    sides = zip(a.tolist(), b.tolist(), strict=True)
    return Counter(verdict_on(median_time(times_a), median_time(times_b)) for times_a, times_b in sides)


def called_share(
    effect: str,
    spreads: tuple[float, float],
    num_comparisons: int,
    *,
    num_repeats: int = NUM_REPEATS,
    difference: float = 0.0,
    verdicts: Sequence[Verdict] = ("slower", "faster"),
) -> float:
    """Return the share of comparisons with one of the verdicts. `spreads` of A and B are relative to the time."""
    generator = np.random.default_rng(7)
    a, b = (simulate_side(generator, effect, spread, num_repeats, num_comparisons) for spread in spreads)
    counts = count_verdicts(a, b * (1 + difference))
    return sum(counts[verdict] for verdict in verdicts) / num_comparisons


def false_rows(num_comparisons: int) -> list[list[Any]]:
    """Return the share of false verdicts for every effect and spread, the one-sided spread, and one repeat."""
    scaled = [spread * WINDOW_DEVIATION for spread in SPREADS]
    rows: list[list[Any]] = []
    for effect in EFFECTS:
        shares = [called_share(effect, (spread, spread), num_comparisons) for spread in scaled]
        rows.append([effect, *map(per_cent, shares)])
    shares = [called_share("normal", (0, spread), num_comparisons) for spread in scaled]
    rows.append(["normal, repeats of A without spread", *map(per_cent, shares)])
    single: dict[str, Any] = {"num_repeats": 1, "verdicts": ["differs within one run"]}
    shares = [called_share("normal", (spread, spread), num_comparisons, **single) for spread in scaled]
    rows.append(["normal, one repeat: differs within one run", *map(per_cent, shares)])
    return rows


def power(num_repeats: int, spread: float, num_comparisons: int) -> float:
    """Return the share of comparisons that call B slower by the true difference."""
    return called_share(
        "normal",
        (spread, spread),
        num_comparisons,
        num_repeats=num_repeats,
        difference=TRUE_DIFFERENCE,
        verdicts=["slower"],
    )


def power_rows(num_comparisons: int) -> list[list[Any]]:
    """Return the power for every number of repeats and spread."""
    return [
        [num_repeats, *(f"{power(num_repeats, spread, num_comparisons):.0%}" for spread in POWER_SPREADS)]
        for num_repeats in POWER_REPEATS
    ]


def sitting_deviation() -> float:
    """Return the standard deviation of a sitting, relative to the time: from the ratios of two published sittings."""
    sides = [collect_outcomes(Experiment(ROOT / name)).outcomes for name in SITTINGS]
    ratios = [point.ratio for point in compare_outcomes(*sides).points if point.ratio is not None]
    return math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios) / 2)


def sitting_shares(deviation: float, spread: float, num_comparisons: int) -> tuple[float, float]:
    """Return the shares of equal sides, each in a sitting of its own, with a verdict, and slower by more than LIMIT."""
    generator = np.random.default_rng(7)
    shape = (2, num_comparisons, NUM_REPEATS)
    effects = deviation * generator.standard_normal((*shape[:2], 1)) + spread * generator.standard_normal(shape)
    verdicts = beyond = 0
    for a, b in zip(*np.exp(effects).tolist(), strict=True):
        time_a, time_b = (median_time([[run] for run in side]) for side in (a, b))
        is_told = verdict_on(time_a, time_b) in ("slower", "faster")
        interval = time_ratio_interval(time_b, time_a)
        verdicts += is_told
        beyond += is_told and interval is not None and interval.low > 1 + LIMIT
    return verdicts / num_comparisons, beyond / num_comparisons


def per_cent(share: float) -> str:
    """Return a share as per cent."""
    return f"{100 * share:.1f} %"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=20_000, metavar="N", help="simulated comparisons in a cell")
    arguments = parser.parse_args()
    counts = Counter(pair_verdict(a, b) for a, b in published_pairs())
    print(f"{counts.total()} pairs of {EXPERIMENT}: {', '.join(f'{n} {word}' for word, n in counts.most_common())}.")
    worst = max(itertools.product(range(NUM_REPEATS, 101), repeat=2), key=lambda pair: exact_false_share(*pair))
    print(f"\nFalse verdicts if all repeats are alike: {exact_false_share(6, 6):.2%} at six repeats on each side.")
    print(f"At 6 to 100 repeats at most {exact_false_share(*worst):.2%}, at {worst[0]} and {worst[1]}.")
    headers = ["effect of a repeat", *(f"spread {spread}" for spread in SPREADS)]
    print(f"\nFalse verdicts, {arguments.comparisons:,} comparisons of equal sides in a cell:\n")
    print(tabulate.tabulate(false_rows(arguments.comparisons), headers=headers, tablefmt="github"))
    headers = ["repeats on each side", *(f"{100 * spread:g} % between repeats" for spread in POWER_SPREADS)]
    print(f"\nPower for a true difference of {TRUE_DIFFERENCE:.0%}, effects normal:\n")
    print(tabulate.tabulate(power_rows(arguments.comparisons), headers=headers, tablefmt="github"))
    deviation = sitting_deviation()
    print(f"\nTwo sittings ({' and '.join(SITTINGS)}): standard deviation of one {100 * deviation:.3f} %.")
    print("Equal sides, each in a sitting of its own, by the spread between its runs: with a verdict, and beyond 1 %:")
    for spread in RUN_SPREADS:
        told, beyond = sitting_shares(deviation, spread, arguments.comparisons)
        print(f"{100 * spread:g} %: {per_cent(told)}, {per_cent(beyond)}")


if __name__ == "__main__":
    main()
