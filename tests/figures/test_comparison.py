"""When two experiments differ: the verdict, how often it is wrong, and how often it finds a true difference."""

from collections import Counter
from itertools import permutations, product

import bench_compare as bench
import pytest
from factories import known
from published_pages import TRUST, missing_in, shown_rows

from pipeline.figures.comparison import SITTING_DEVIATION, Verdict, verdict_on
from pipeline.figures.intervals import Estimate, coverage_of_ranks, median_time

NUM_COMPARISONS = 1_000  # in a cell; the seed is fixed


def repeats(*medians_s: float, spread_s: float = 0.0) -> Estimate:
    """The time of repeats of six windows, which spread around these medians."""
    offsets = [step * spread_s for step in (-1, -0.5, 0, 0, 0.5, 1)]
    return known(median_time([[median_s + offset for offset in offsets] for median_s in medians_s]))


SIX = (1.00, 1.01, 1.02, 1.03, 1.04, 1.05)
LATER = tuple(time_s + 0.06 for time_s in SIX)  # 1.06 to 1.11


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (SIX, LATER, "slower"),
        (LATER, SIX, "faster"),
        (SIX, (1.05, *LATER[1:]), "inside the noise"),  # the two ranges touch
        (SIX, LATER[:5], "differs within one run"),
        (SIX[:5], LATER, "differs within one run"),
        (SIX[:1], SIX[:1], "inside the noise of one run"),
        (SIX[:1], (1.2,), "differs within one run"),
    ],
)
def test_a_verdict_needs_six_repeats_on_both_sides(a: tuple[float], b: tuple[float], verdict: Verdict) -> None:
    assert verdict_on(repeats(*a), repeats(*b)) == verdict


def test_the_spread_within_runs_is_not_in_an_interval_between_runs() -> None:
    """Windows from 0.5 to 1.6 s around medians that lie apart; windows alike around medians that do not."""
    assert verdict_on(repeats(*SIX, spread_s=0.5), repeats(*LATER, spread_s=0.5)) == "slower"
    mixed = repeats(1.03, *LATER[1:])
    assert mixed.interval == (1.03, 1.11, 0.96875)
    assert verdict_on(repeats(*SIX), mixed) == "inside the noise"


def test_no_pair_of_published_records_of_one_point_is_slower_or_faster() -> None:
    """Each pair differs in repeat and seed alone. The rule before this one called the 39 slower or faster: 32 %."""
    pairs = bench.published_pairs()
    assert len({frozenset(map(id, pair)) for pair in pairs}) == len(pairs) == 120
    assert all(len({gpu.name for record in pair for gpu in record.environment.gpus}) == 1 for pair in pairs)
    assert Counter(bench.pair_verdict(a, b) for a, b in pairs) == {
        "differs within one run": 39,
        "inside the noise of one run": 81,
    }
    assert (
        missing_in(TRUST, ["of all 120 pairs of published records", "six windows of one process tell 39 (32 %) apart"])
        == []
    )


def test_the_docs_and_compare_say_how_far_a_sitting_moves_a_time() -> None:
    deviation = bench.sitting_deviation()
    assert pytest.approx(deviation, abs=5e-6) == SITTING_DEVIATION
    assert missing_in(TRUST, [f"a sitting moves a time by {per_cent(SITTING_DEVIATION, 3)} (standard deviation)"]) == []
    shares = (bench.sitting_shares(deviation, spread, NUM_COMPARISONS) for spread in bench.RUN_SPREADS)
    told, beyond = zip(*shares, strict=True)
    assert told == pytest.approx((0.49, 0.2, 0.04), abs=0.05)
    assert beyond == (0, 0, 0)
    said = "in 49 % of comparisons if the runs of a sitting spread by 0.05 %, in 20 % at 0.1 % and in 4 % at 0.2 %"
    assert missing_in(TRUST, [said]) == []


def test_six_repeats_of_equal_sides_are_apart_by_chance_in_2_of_924_orders() -> None:
    """Counted by hand: of the 12! / (6! 6!) orders of six A and six B, one has all A first and one all B first."""
    assert bench.exact_false_share(6, 6) == pytest.approx(2 / 924)
    small = [2 * sum(order[:2] == ("a", "a") for order in set(permutations("aabb"))) / 6]
    assert small == [pytest.approx(bench.exact_false_share(2, 2))]


def test_more_repeats_on_either_side_keep_false_verdicts_below_1_per_cent() -> None:
    shares = {pair: bench.exact_false_share(*pair) for pair in product(range(6, 101), repeat=2)}
    assert max(shares.values()) == shares[6, 97] == pytest.approx(0.0085, abs=5e-5)


@pytest.mark.parametrize("effect", bench.EFFECTS)
@pytest.mark.parametrize("spread", bench.SPREADS)
def test_six_repeats_give_at_most_1_per_cent_of_false_verdicts(effect: str, spread: float) -> None:
    relative = spread * bench.WINDOW_DEVIATION
    assert bench.called_share(effect, (relative, relative), NUM_COMPARISONS) <= 0.01


def test_one_run_differs_from_its_equal_more_often_than_not_where_runs_spread() -> None:
    spread = 4 * bench.WINDOW_DEVIATION
    single = bench.called_share(
        "normal", (spread, spread), NUM_COMPARISONS, num_repeats=1, verdicts=["differs within one run"]
    )
    assert single > 0.5


def test_the_docs_say_how_often_a_verdict_is_wrong_and_what_it_finds() -> None:
    said = [
        f"**False verdicts: {per_cent(bench.exact_false_share(6, 6), 2)}** at six repeats on each side",
        f"it is at most {per_cent(bench.exact_false_share(6, 97), 2)} (6 against 97)",
        f"a false verdict in {per_cent(1 - (1 - bench.exact_false_share(6, 6)) ** 58, 0)} of comparisons",
        f"covers {per_cent(coverage_of_ranks(2, 12), 1)}.",
    ]
    assert missing_in(TRUST, said) == []
    rows = shown_rows(TRUST, "**Power.**")
    assert [row[0] for row in rows] == [str(count) for count in bench.POWER_REPEATS]
    for count, *shown in rows:
        simulated = [bench.power(int(count), spread, NUM_COMPARISONS) for spread in bench.POWER_SPREADS]
        assert [float(cell.removesuffix(" %")) / 100 for cell in shown] == pytest.approx(simulated, abs=0.04)


def per_cent(share: float, decimals: int) -> str:
    return f"{100 * share:.{decimals}f} %"
