from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from factories import assert_says

from pipeline.communication.selftest_checks import (
    CheckResult,
    Findings,
    Verdict,
    check_answers,
    check_bare_loop,
    check_clock,
    check_injected,
    check_large_bucket,
    check_no_op_series,
    check_parts,
    check_repeat,
    check_sockets,
    check_straggler,
    count_verdicts,
    difference_us,
    exposed_us,
    gradients_busbw_gb_s,
    is_clock_cost_precise_enough,
    is_precise_enough,
    require_interval,
    step_us,
)

STEPS = 10
DRIFT_US = (0, 100, 200, 300, 400, 500)
ADDED_US: dict[str, float] = {
    "ddp": 100.0,
    "ddp_again": 100.0,
    "no_op_hook": 0.0,
    "no_op_hook_again": 0.0,
    "one_bucket": 300.0,
    "extra": 1100.0,
}  # to a step of 1,000 us


def windows_of(added_us: Mapping[str, float | Sequence[float]]) -> dict[str, list[list[int]]]:
    """Build six drifting rounds of two ranks: the slower takes 1,000 us a step plus the given time."""
    windows = {}
    for name, added in added_us.items():
        values = list(added) if isinstance(added, Sequence) else [added] * 6
        steps_us = [1000 + drift + value for drift, value in zip(DRIFT_US, values, strict=True)]
        windows[name] = [[round(STEPS * time_us * 500), round(STEPS * time_us * 1e3)] for time_us in steps_us]
    return windows


def make_findings(added_us: Mapping[str, float | Sequence[float]] | None = None, **fields: Any) -> Findings:
    """Build findings that pass every check, with the given changes."""
    given: dict[str, Any] = {
        "device": "cuda",
        "gpu": "NVIDIA H200",
        "num_ranks": 2,
        "batch_size_per_gpu": 512,
        "gradient_bytes": 44_695_848,
        "steps_per_window": STEPS,
        "swept_ns": [179_000, 178_000, 177_000],
        "bare_ns": [178_000],
        "extra_bytes": 268_435_456,
        "extra_ns": [1_000_000, 900_000, 1_100_000],
        "sleep_ns": 5_000_000,
        "shortest_ns": [200_000.0, 210_000.0],
        "wait_ns": [20_000.0, 2_520_000.0],
        "clock_windows": {"large": [1_005, 1_005], "small": [1_010, 1_010]},
        "silent_windows": {"large": [1_000, 1_000], "small": [1_000, 1_000]},
        "parts_share": [0.999, 1.001],
        "clock_batches": {"large": 512, "small": 32},
        **fields,
    }
    return Findings(windows=windows_of({**ADDED_US, **(added_us or {})}), **given)


SOCKETS = make_findings({"ddp": 1000.0}, swept_ns=[44_695_848])  # ten times what is exposed, 1 GB/s


def test_all_checks_pass_on_a_sound_instrument() -> None:
    answers = check_answers(make_findings(), make_findings(), SOCKETS)
    assert {answer.check: answer.verdict for answer in answers} == dict.fromkeys(
        (
            "two no-op series",
            "bucket cap of 100 MB",
            "sockets",
            "injected all-reduce",
            "the same point twice",
            "a rank asleep",
            "sweep against a bare loop",
            "parts against the wall clock",
            "cost of the clock, large batch",
            "cost of the clock, small batch",
        ),
        "pass",
    )


def test_a_step_takes_as_long_as_its_slowest_rank_and_drift_falls_out() -> None:
    found = make_findings()
    assert step_us(found, "no_op_hook") == [1000, 1100, 1200, 1300, 1400, 1500]
    assert difference_us(found, "ddp", "no_op_hook") == pytest.approx([100] * 6)
    assert exposed_us(found) == pytest.approx(100)
    assert exposed_us(found, "one_bucket") == pytest.approx(300)


@pytest.mark.parametrize(
    ("difference_us", "verdict"), [(10.0, "pass"), (-10.0, "pass"), (10.1, "fail"), (-10.1, "fail")]
)
def test_two_no_op_series_differ_by_10_us_at_most(difference_us: float, verdict: Verdict) -> None:
    answer = check_no_op_series(make_findings({"no_op_hook_again": -difference_us}))
    assert answer.verdict == verdict
    assert answer.figures["difference_us"] == pytest.approx(abs(difference_us))
    assert answer.figures["step_us"] == 1250  # the median of the drift
    assert_says(answer.sentence, "no-op hook", f"{abs(difference_us):.1f} us", "limit 10.0")


@pytest.mark.parametrize(("difference_us", "verdict"), [(39.9, "pass"), (40.1, "fail")])
def test_or_by_what_the_same_series_twice_differ_by(difference_us: float, verdict: Verdict) -> None:
    again = (100, 90, 110, 105, 95, 140)  # differences of 0, 10, -10, -5, 5, -40: the interval reaches to -40
    answer = check_no_op_series(make_findings({"no_op_hook_again": difference_us, "ddp_again": again}))
    assert answer.verdict == verdict
    assert answer.figures["limit_us"] == pytest.approx(40)
    assert answer.sentence.endswith("(limit 40.0)")


def test_an_interval_reaches_to_its_far_end_and_needs_six_values() -> None:
    assert require_interval([1, 2, 3, -4, 0, 0]).max_abs_bound == 4
    assert require_interval([1, 2, 3, -4, 0, 5]).max_abs_bound == 5
    with pytest.raises(ValueError, match="an interval needs six values, got 5"):
        require_interval([1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("usual_us", "large_us", "verdict"),
    [
        (100, 150, "pass"),
        (100, 149, "fail"),
        (-5, 14, "fail"),  # what is exposed counts as no less than the noise floor
        (-5, 15, "pass"),
        (0, 0, "fail"),
    ],
)
def test_one_bucket_exposes_half_as_much_again(usual_us: float, large_us: float, verdict: Verdict) -> None:
    answer = check_large_bucket(make_findings({"ddp": usual_us, "one_bucket": large_us}))
    assert answer.verdict == verdict
    assert answer.figures == {
        "exposed_us": pytest.approx(usual_us),
        "exposed_one_bucket_us": pytest.approx(large_us),
    }
    assert_says(answer.sentence, "exposed", f"from {usual_us:.1f} to {large_us:.1f} us", "at least x1.5")


@pytest.mark.parametrize(("num_bytes", "verdict"), [(25 * 2**20, "not applicable"), (25 * 2**20 + 4, "pass")])
def test_gradients_that_fill_one_bucket_anyway_answer_nothing(num_bytes: int, verdict: Verdict) -> None:
    answer = check_large_bucket(make_findings(gradient_bytes=num_bytes))
    assert answer.verdict == verdict
    assert (answer.figures == {}) == (verdict == "not applicable")


@pytest.mark.parametrize(
    ("exposed", "swept_ns", "verdict"),
    [
        (1000, 44_695_848, "pass"),
        (999, 44_695_848, "fail"),  # less than ten times
        (1000, 2 * 178_000 + 2, "pass"),
        (1000, 2 * 178_000, "fail"),  # half the bandwidth is no collapse
    ],
)
def test_over_sockets_ten_times_as_much_is_exposed_and_the_bandwidth_collapses(
    exposed: float, swept_ns: int, verdict: Verdict
) -> None:
    answer = check_sockets(make_findings(), make_findings({"ddp": exposed}, swept_ns=[swept_ns]))
    assert answer.verdict == verdict
    assert answer.figures["busbw_gb_s"] == pytest.approx(44_695_848 / 178_000)  # 251.1, of the median; 2(1)/2 = 1
    assert answer.figures["exposed_sockets_us"] == pytest.approx(exposed)


def test_the_sentence_of_the_sockets_has_both_figures_and_both_limits() -> None:
    said = check_sockets(make_findings(), SOCKETS).sentence
    assert_says(said, "P2P", "from 100.0 to 1000.0 us", "at least x10", "from 251.1 to 1.00 GB/s", "below half")


def test_without_nccl_there_are_no_sockets_to_compare_with() -> None:
    answer = check_sockets(make_findings(), None)
    assert (answer.verdict, answer.figures) == ("not applicable", {})


def test_bus_bandwidth_has_the_rings_factor() -> None:
    assert gradients_busbw_gb_s(make_findings(num_ranks=4, swept_ns=[224_000])) == pytest.approx(
        299.3, abs=0.05
    )  # the probe's


@pytest.mark.parametrize(
    ("added_us", "verdict"),
    [(1000, "pass"), (1200, "pass"), (1200.1, "fail"), (800, "pass"), (799.9, "fail")],
)
def test_an_injected_all_reduce_costs_what_it_takes_alone(added_us: float, verdict: Verdict) -> None:
    answer = check_injected(make_findings({"extra": 100 + added_us}))
    assert answer.verdict == verdict
    assert answer.figures["isolated_us"] == 1000
    assert answer.figures["error"] == pytest.approx(abs(added_us - 1000) / 1000)


def test_the_sentence_of_the_injected_all_reduce() -> None:
    said = check_injected(make_findings({"extra": 1250.0})).sentence
    assert_says(said, "all-reduce of 268.4 MB", "adds 1150 us", "1000 us alone", "15.0%", "limit 20%")


@pytest.mark.parametrize(
    ("again_us", "verdict"), [(113.5, "pass"), (113.6, "fail"), (86.5, "pass"), (86.4, "fail"), (100, "pass")]
)
def test_the_same_point_twice_differs_by_one_per_cent_at_most(again_us: float, verdict: Verdict) -> None:
    answer = check_repeat(make_findings(), make_findings({"ddp": again_us}))  # medians of 1,350 and 1,250 + again
    assert answer.verdict == verdict
    assert answer.figures["difference"] == pytest.approx(abs(again_us - 100) / 1350)


def test_the_sentence_of_the_same_point_twice() -> None:
    said = check_repeat(make_findings(), make_findings({"ddp": 127.0})).sentence
    assert_says(said, "1350.0 us", "1377.0 us in new processes", "2.00%", "limit 1%")


@pytest.mark.parametrize(
    ("num_ranks", "wait_us", "shortest_us", "verdict"),
    [
        (2, 2_020, 240, "pass"),  # 0.8 x 5 ms x 1/2 beyond the 20 us of every step, 200 us + 20 %
        (2, 2_019, 240, "fail"),
        (2, 2_020, 240.1, "fail"),
        (2, 2_020, 100, "pass"),  # a faster link is no harm
        (4, 3_020, 200, "pass"),  # 0.8 x 5 ms x 3/4
        (4, 3_019, 200, "fail"),
    ],
)
def test_a_sleeping_rank_is_waiting_and_no_slower_link(
    num_ranks: int, wait_us: float, shortest_us: float, verdict: Verdict
) -> None:
    found = make_findings(
        num_ranks=num_ranks, wait_ns=[20_000.0, wait_us * 1e3], shortest_ns=[200_000.0, shortest_us * 1e3]
    )
    answer = check_straggler(found)
    assert answer.verdict == verdict
    assert answer.figures["expected_wait_us"] == 5_000 * (num_ranks - 1) / num_ranks


def test_the_sentence_of_the_sleeping_rank() -> None:
    said = check_straggler(make_findings()).sentence
    assert_says(said, "5 ms of sleep", "2500 us", "at least 2000", "shortest", "+5.0%", "limit +20%")


@pytest.mark.parametrize(
    ("bare_ns", "verdict"),
    [(178_000, "pass"), (169_524, "pass"), (169_523, "fail"), (187_368, "pass"), (187_369, "fail")],
)  # 178 / 1.05 = 169.5238, 178 / 0.95 = 187.3684
def test_the_sweep_takes_as_long_as_a_bare_loop_within_5_per_cent(bare_ns: int, verdict: Verdict) -> None:
    answer = check_bare_loop(make_findings(bare_ns=[1, bare_ns, 10**9]))
    assert answer.verdict == verdict
    assert answer.figures["error"] == pytest.approx(abs(178_000 - bare_ns) / bare_ns)


def test_the_sentence_of_the_bare_loop() -> None:
    said = check_bare_loop(make_findings(bare_ns=[172_816])).sentence
    assert_says(said, "44.7 MB", "178.0 us in the sweep", "172.8 us in a bare loop", "3.0%", "limit 5%")


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [([1.0, 1.0099], "pass"), ([1.0, 1.0101], "fail"), ([0.9901, 1.0], "pass"), ([0.9899, 1.0, 1.0], "fail")],
)
def test_the_parts_sum_to_the_wall_clock_in_every_window(shares: list[float], verdict: Verdict) -> None:
    answer = check_parts(make_findings(parts_share=shares))
    assert answer.verdict == verdict
    assert answer.figures["worst_difference"] == pytest.approx(max(abs(share - 1) for share in shares))


def test_the_sentence_of_the_parts() -> None:
    assert_says(check_parts(make_findings(parts_share=[0.995, 1.001])).sentence, "parts", "0.50%", "limit 1%")


@pytest.mark.parametrize(
    ("name", "clocked", "verdict"),
    [
        ("large", 10_099, "pass"),
        ("large", 10_101, "fail"),
        ("small", 10_299, "pass"),
        ("small", 10_301, "fail"),
        ("small", 9_000, "pass"),  # faster with marks: noise
    ],
)
def test_the_marks_cost_1_per_cent_of_a_large_step_and_3_of_a_small_one(
    name: str, clocked: int, verdict: Verdict
) -> None:
    # a pair that was disturbed as a whole, and one in which the marks alone were: neither is in the interval's way
    clocks, silents = [2 * clocked, 99_999, *[clocked] * 9], [20_000, *[10_000] * 10]
    found = make_findings(clock_windows={name: clocks}, silent_windows={name: silents})
    answer = check_clock(found, name)
    assert (answer.verdict, answer.check) == (verdict, f"cost of the clock, {name} batch")
    assert answer.figures["cost"] == pytest.approx(clocked / 10_000 - 1)
    batch, limit = {"large": (512, "1%"), "small": (32, "3%")}[name]
    cost = clocked / 10_000 - 1
    assert (answer.figures["cost_low"], answer.figures["cost_high"]) == pytest.approx((cost, cost))
    assert_says(answer.sentence, f"{batch} per GPU", "marks", f"{cost:+.2%} to {cost:+.2%}", f"limit {limit}")


@pytest.mark.parametrize(("clocks", "is_undecided"), [((9_500, 10_250), False), ((9_500, 10_350), True)])
def test_an_interval_that_reaches_past_the_limit_is_said_to_decide_nothing(
    clocks: tuple[int, int], is_undecided: bool
) -> None:
    found = make_findings(
        clock_windows={"small": [*clocks] * 3, "large": [1] * 6}, silent_windows={"small": [10_000] * 6}
    )
    answer = check_clock(found, "small")
    assert ("differ too much to decide, use a larger --windows" in answer.sentence) is is_undecided
    assert answer.verdict == ("fail" if is_undecided else "pass")


@pytest.mark.parametrize(("median", "verdict"), [(10_290, "pass"), (10_310, "fail")])
def test_a_cost_near_its_limit_that_is_known_well_is_told_by_its_median(median: int, verdict: Verdict) -> None:
    clocks = [10_200, *[median] * 4, 10_400]
    answer = check_clock(
        make_findings(clock_windows={"small": clocks}, silent_windows={"small": [10_000] * 6}), "small"
    )
    assert answer.verdict == verdict
    assert answer.sentence.endswith("too close to tell")


def test_the_summary_counts_every_verdict_also_those_that_do_not_occur() -> None:
    def answered(verdict: Verdict) -> CheckResult:
        return CheckResult("a check", verdict, "", {})

    assert count_verdicts([]) == {"pass": 0, "fail": 0, "not applicable": 0}
    assert count_verdicts([answered("pass"), answered("fail"), answered("pass")]) == {
        "pass": 2,
        "fail": 1,
        "not applicable": 0,
    }
    sound = check_answers(make_findings(gradient_bytes=1000, bare_ns=[178_000]), make_findings(), None)
    assert count_verdicts(sound) == {"pass": 8, "fail": 0, "not applicable": 2}


def test_findings_survive_their_file_and_each_failure_is_its_own() -> None:
    found = make_findings({"extra": 5000.0})
    assert msgspec.json.decode(msgspec.json.encode(found), type=Findings) == found
    answers = check_answers(found, make_findings(), SOCKETS)
    assert [answer.check for answer in answers if answer.verdict == "fail"] == ["injected all-reduce"]


def test_rounds_go_on_until_every_series_is_told_from_the_no_op_hook() -> None:
    def settled(**last_us: float) -> bool:
        steady = {name: [added] * 5 + [last_us.get(name, added)] for name, added in ADDED_US.items()}
        return is_precise_enough(make_findings({name: undrifted(values) for name, values in steady.items()}))

    assert settled()
    assert not settled(one_bucket=400.0)  # half of 100 us, where 45 are 15 %
    assert not settled(no_op_hook_again=41.0)
    assert settled(no_op_hook_again=39.0)


def test_rounds_go_on_until_the_step_is_known_within_half_of_what_two_runs_may_differ_by() -> None:
    def settled(together_us: float) -> bool:
        paced = {name: undrifted([added] * 5 + [added + together_us]) for name, added in ADDED_US.items()}
        return is_precise_enough(make_findings(paced))

    assert settled(10.0)  # half of it is 0.45 % of 1,100 us
    assert not settled(12.0)


def undrifted(values_us: Sequence[float]) -> list[float]:
    return [value - drift for value, drift in zip(values_us, DRIFT_US, strict=True)]


@pytest.mark.parametrize(
    ("name", "last_ns", "settled"),
    [("small", 1_029, True), ("small", 1_031, False), ("large", 1_009, True), ("large", 1_011, False)],
)
def test_pairs_go_on_until_the_clocks_cost_is_known_within_half_of_its_limit(
    name: str, last_ns: int, settled: bool
) -> None:
    clocked_ns, silent_ns = [1_000] * 5 + [last_ns], [1_000] * 6
    assert is_clock_cost_precise_enough(name, clocked_ns, silent_ns) is settled
    assert not is_clock_cost_precise_enough(name, clocked_ns[1:], silent_ns[1:])
