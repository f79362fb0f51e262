"""Each check of the self-test can decide: it passes on a sound instrument and fails under twice its limit."""

import re

import numpy as np
import pytest
from bench_selftest import (
    CheckWithDefects,
    Power,
    entry_points_as_published,
    find_power,
    list_checks,
)
from conftest import ROOT
from drawn_selftests import Runs, read_recorded
from published_pages import missing_in

from pipeline.communication.selftest_checks import (
    difference,
    difference_us,
    judge_checks,
    median_of,
    step_us,
)

DRAWS = 200
LEAST = 0.845  # 90 % less 2.6 standard errors of the share of 200 draws
SELDOM = {"two entry points"}  # decides too seldom where rounds scatter as the recorded ones do
TRUST = (ROOT / "docs/trust.md").read_text()
WORDS = " ".join(TRUST.split())


@pytest.fixture(scope="module")
def recorded() -> Runs:
    return read_recorded()


@pytest.fixture(scope="module")
def checks(recorded: Runs) -> list[CheckWithDefects]:
    return list_checks(recorded)


@pytest.fixture(scope="module")
def powers(recorded: Runs, checks: list[CheckWithDefects]) -> list[Power]:
    return find_power(checks, recorded, DRAWS)


def test_each_check_passes_where_the_instrument_is_right(powers: list[Power]) -> None:
    assert {check.name for check, passes, _ in powers if passes < LEAST} == SELDOM


def test_each_check_fails_under_a_defect_of_twice_its_limit(powers: list[Power]) -> None:
    assert {check.name for check, _, fails in powers if fails < LEAST} == SELDOM


def test_every_check_of_the_self_test_is_among_them(recorded: Runs, checks: list[CheckWithDefects]) -> None:
    assert [check.name for check in checks] == [result.check for result in judge_checks(recorded)]


@pytest.mark.parametrize(
    ("name", "figure", "moved"),
    [
        ("two no-op series", "difference_us", (-40, 40)),
        ("injected all-reduce", "ratio", (-0.4, 0.4)),
        ("the same point twice", "ratio", (-0.02, 0.02)),
        ("sweep against a bare loop", "ratio", (-0.0974, 0.0974)),  # 10 % of a ratio of 0.974
        ("parts against the wall clock", "ratio", (-0.02, 0.02)),
        ("cost of the clock, large batch", "cost", (0.02,)),
        ("cost of the clock, small batch", "cost", (0.0613,)),  # 6 % of a window that is 1.021 times the unmarked one
    ],
)
def test_a_defect_moves_the_figure_by_twice_the_limit(
    recorded: Runs, checks: list[CheckWithDefects], name: str, figure: str, moved: tuple[float, ...]
) -> None:
    (check,) = (check for check in checks if check.name == name)
    right = check.run(recorded).figures[figure]
    by_defect = sorted(check.run(defect(recorded)).figures[figure] - right for defect in check.defects)
    assert by_defect == pytest.approx(moved, rel=0.01)


def test_the_entry_points_are_equal_and_a_defect_sets_them_apart_by_twice_the_limit(
    recorded: Runs, checks: list[CheckWithDefects]
) -> None:
    (check,) = (check for check in checks if check.name == "two entry points")
    assert check.run(recorded).figures["difference_us"] == pytest.approx(0, abs=1e-3)
    for defect in check.defects:
        figures = check.run(defect(recorded)).figures
        assert abs(figures["difference_us"]) == pytest.approx(2 * figures["limit_us"], rel=1e-3)


def test_a_difference_of_separate_medians_holds_the_truth_as_often_as_its_interval_says() -> None:
    """Two entry points of equal medians, one with twice the noise of the other."""
    generator = np.random.default_rng(7)
    apart = (
        difference(*(median_of(generator.normal(0, noise, n).tolist()) for noise, n in ((25, 135), (50, 300))))
        for _ in range(1000)
    )
    assert sum(one.low <= 0 <= one.high for one in apart) >= 975


def test_the_docs_say_what_the_entry_points_give_as_they_were_published() -> None:
    """Their launches differ, so more windows of each find that more often."""
    (once_passes, once_fails), (more_passes, more_fails) = (entry_points_as_published(times, DRAWS) for times in (1, 5))
    assert (once_passes, more_passes) == (0, 0)
    (said,) = re.findall(
        r"the check passes in 0 % and fails in (\d+) %, and with five times the windows it fails in (\d+) %", WORDS
    )
    for share, shown in zip((once_fails, more_fails), said, strict=True):
        assert share == pytest.approx(float(shown) / 100, abs=0.1)  # 3.6 standard errors


def test_the_docs_say_how_alike_one_round_is_to_the_next(recorded: Runs) -> None:
    def autocorrelation(values: list[float]) -> float:
        centred = np.array(values) - np.mean(values)
        return float((centred[1:] * centred[:-1]).sum() / (centred**2).sum())

    of_differences = [
        autocorrelation(difference_us(findings, name, "no_op_hook"))
        for findings in recorded.values()
        for name in findings.windows
        if name != "no_op_hook"
    ]
    of_steps = autocorrelation(step_us(recorded["known_answers"], "ddp"))
    said = f"of a difference is {max(of_differences):.2f} at most, that of DDP's steps {of_steps:.2f}"
    assert missing_in(TRUST, [said]) == []
