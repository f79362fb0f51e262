import re
from itertools import pairwise

import bench_stopping_rule as bench
import pytest
from conftest import ROOT
from published_pages import TRUST, missing_in

from pipeline.figures.intervals import drifted_halves, median_interval
from pipeline.figures.stopping_rule import difference_tolerance_s, is_difference_precise_enough, is_time_precise_enough

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


def test_the_tolerance_of_a_difference_never_falls_as_it_grows() -> None:
    tolerances = [difference_tolerance_s(us * US) for us in range(0, 1000, 10)]
    assert all(one <= other for one, other in pairwise(tolerances))
    assert (tolerances[0], difference_tolerance_s(1000 * US)) == pytest.approx((20 * US, 150 * US))


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
        interval = median_interval(times[:ended])
        assert interval is not None
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
