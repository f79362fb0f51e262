import math
import re
import statistics
from collections.abc import Iterator, Sequence
from itertools import permutations

import bench_stopping_rule as bench
import pytest
from conftest import ROOT
from factories import assert_says, known, sentences
from hypothesis import given
from hypothesis import strategies as st
from published_pages import TRUST, missing_in

from pipeline.figures import intervals
from pipeline.figures.intervals import (
    CONFIDENCE,
    MIN_COVERAGE,
    Interval,
    coverage_of_ranks,
    drift_notes,
    drifted_halves,
    innermost_rank,
    median_interval,
    ratio_interval,
)
from pipeline.figures.stopping_rule import is_difference_precise_enough, is_time_precise_enough

TIMES = st.floats(min_value=1e-3, max_value=1e3)
SAMPLES = st.lists(TIMES, min_size=6, max_size=60)


@pytest.mark.parametrize("n", [*range(1, 13), 100, 333])
def test_coverage_and_rank_are_those_of_the_sums_of_binomial_coefficients(n: int) -> None:
    """Equal to the last digit: tables show the coverage."""
    outcomes = [math.comb(n, below) for below in range(n)]
    exact = [1 - 2 * sum(outcomes[:rank]) / 2**n for rank in range(1, n + 1)]
    assert [coverage_of_ranks(rank, n) for rank in range(1, n + 1)] == exact
    for confidence in (0.8, CONFIDENCE, 0.99):
        assert innermost_rank(n, confidence) == max(1, sum(coverage >= confidence for coverage in exact))


def test_many_values_take_one_step_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 runs of one point took over 8 minutes: a sum of 49,646 binomial coefficients, each computed anew."""
    steps: list[float] = []

    def counted(n: int) -> Iterator[float]:
        for coverage in original(n):
            steps.append(coverage)
            yield coverage

    original = intervals.coverages
    monkeypatch.setattr(intervals, "coverages", counted)
    monkeypatch.setattr("math.comb", None)
    interval = known(median_interval(range(1, 10_001)))
    assert interval.low == 4888
    assert len(steps) == 4889 + 4888  # to the first rank that covers too little; to the coverage of the last that does


@given(SAMPLES)
def test_it_holds_the_median_with_the_nominal_confidence_and_is_the_narrowest(values: list[float]) -> None:
    interval = known(median_interval(values))
    assert (CONFIDENCE if len(values) > 6 else MIN_COVERAGE) <= interval.coverage < 1
    assert min(values) <= interval.low <= statistics.median(values) <= interval.high <= max(values)
    rank = next(rank for rank in range(1, len(values)) if coverage_of_ranks(rank + 1, len(values)) < CONFIDENCE)
    assert (interval.low, interval.high) == (sorted(values)[rank - 1], sorted(values)[-rank])


def test_a_ratio_spans_the_worst_of_both_and_is_less_sure_than_either() -> None:
    ratio = ratio_interval(Interval(8, 12, 0.96875), Interval(4, 5, 0.96875))
    assert ratio == Interval(8 / 5, 12 / 4, 0.9375)  # 2 x 0.96875 - 1
    assert (ratio.contains(1.6), ratio.contains(1.59)) == (True, False)


SIX = (1.0, 1.01, 1.02, 1.03, 1.04, 1.05)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (SIX, (1.01, 1.04)),  # six values that only rise: 2 of 720 orders
        ([1.01, 1.0, *SIX[2:]], (1.01, 1.04)),  # one pair of fifteen falls: 10 more orders
        ([1.02, 1.0, 1.01, *SIX[3:]], None),  # two pairs fall
        (SIX[::-1], (1.04, 1.01)),
        (SIX[:5], None),  # too few to tell
        ([1.0] * 12, None),
        ([*[1.0] * 6, *[1.2] * 6], (1.0, 1.2)),  # a step
        ([1.0, 1.2] * 6, None),
    ],
)
def test_values_that_mostly_rise_or_fall_drift_from_six_on(
    values: Sequence[float], found: tuple[float, float] | None
) -> None:
    assert drifted_halves(values) == (None if found is None else pytest.approx(found))


@pytest.mark.parametrize("n", [6, 7, 8])
def test_steady_values_are_said_to_drift_in_at_most_2_1_per_cent_of_all_orders(n: int) -> None:
    orders = list(permutations(range(n)))
    assert 0.01 < sum(drifted_halves(order) is not None for order in orders) / len(orders) <= 0.021


def test_the_largest_drift_of_several_repeats_is_named_with_their_number() -> None:
    steady = [1.02, 1.05, 1.0, 1.04, 1.01, 1.03]
    slower, faster = [*SIX, *[1.2] * 6], [*SIX[::-1], *[0.5] * 6]
    assert sentences(drift_notes("step_time_s", [steady])) == []
    (alone,) = sentences(drift_notes("step_time_s", [slower]))
    assert alone == (
        "step_time_s drifted by +17.1 % from the first half of a run to the second: its interval assumes steady times, "
        "so allow for the drift too"
    )
    assert "repeat" not in alone
    (largest,) = sentences(drift_notes("step_time_s", [slower, steady, faster]))
    assert_says(largest, "step_time_s drifted in 2 of 3 repeats", "-51.2 %")


def test_a_drift_below_a_thousandth_is_no_finding_however_sure() -> None:
    assert sentences(drift_notes("step_time_s", [[*[1.0] * 6, *[1.0009] * 6]])) == []
    assert sentences(drift_notes("step_time_s", [[*[1.0] * 6, *[1.0011] * 6]])) != []


US = 1e-6


@pytest.mark.parametrize(
    ("times", "settled"),
    [
        ([1.0] * 5, False),  # no interval
        ([1.0] * 6, True),
        ([1.0] * 5 + [1.03], True),  # half of 3 %
        ([1.0] * 5 + [1.05], False),  # half of 5 %
        ([1.0] * 8 + [1.05], False),  # of nine the first and the ninth
        ([1.0] * 9 + [1.05], True),  # of ten the second and the ninth
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


@pytest.mark.parametrize("noise", [0.01, 0.02, 0.04, 0.08])
def test_looking_after_each_window_keeps_95_per_cent_of_coverage(noise: float) -> None:
    earlier, chosen = bench.apply_rules(bench.simulate_times(noise, num_runs=5000), (bench.WIDER, bench.CHOSEN))
    assert chosen.coverage >= 0.95
    assert chosen.coverage > earlier.coverage or noise == 0.01
    assert chosen.num_windows.mean() < 1.3 * earlier.num_windows.mean()


def test_the_simulated_rule_is_that_of_the_pipeline() -> None:
    runs = bench.simulate_times(0.03, num_runs=40)
    (simulated,) = bench.apply_rules(runs, [bench.CHOSEN])
    for times, low, high, num_windows in zip(runs.tolist(), *simulated, strict=True):
        ended = next((n for n in range(1, 121) if is_time_precise_enough(times[:n])), 120)
        interval = known(median_interval(times[:ended]))
        assert (ended, interval.low, interval.high) == (num_windows, low, high)


def test_the_simulated_test_for_drift_is_that_of_the_pipeline() -> None:
    runs = bench.simulate_times(0.01, autocorrelation=0.6, num_runs=200)[:, :12]
    alarms = sum(drifted_halves(times) is not None for times in runs.tolist())
    assert 0 < alarms == round(bench.drift_alarms(runs) * len(runs))


def test_the_published_page_holds_the_simulated_figures() -> None:
    page = (ROOT / "docs" / "stopping-rule.md").read_text()
    cells = [outcome.cell() for outcome in bench.apply_rules(bench.simulate_times(0.01), bench.RULES)]
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    for rule, cell in zip(bench.RULES, cells, strict=True):
        assert any(line.startswith(f"| {rule.name} ") and f"| {cell} " in line for line in lines), rule.name


def test_the_docs_say_how_often_the_range_of_a_few_runs_holds_the_truth() -> None:
    """Runs that differ as much as their windows: the interval of one run covers the true median in 71 %, not 97 %."""
    times, gains = zip(*(bench.new_run_coverage(count, 0.0) for count in bench.NEW_RUNS), strict=True)
    page = (ROOT / "docs" / "stopping-rule.md").read_text()
    assert [re.findall(r"[\d.]+%", line) for line in page.splitlines() if ", independent windows" in line] == [
        [f"{share:.0%}" for share in times],
        [f"{share:.1%}" for share in gains],
    ]
    one, three, six = (f"{100 * share:.0f} %" for share in times)
    said = f"holds the true epoch time in {one}, that of three runs in {three} and that of six in {six}"
    assert missing_in(TRUST, [said, "that of a speed-up in 86, 97.5 and 99.7 %"]) == []
    assert gains == pytest.approx([0.86, 0.975, 0.997], abs=0.005)
