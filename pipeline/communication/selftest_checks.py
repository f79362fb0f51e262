"""Checks of the self-test: each compares what the ranks measured with a known value.

All functions are pure. Each result has the measured values with their interval, and a sentence that states the limit. A
check passes only if the whole interval lies inside the limit, and is undecided if the limit lies inside the interval.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from pipeline.analysis.formulas import ring_bytes_per_step
from pipeline.analysis.intervals import Interval, median_interval, ratio_interval
from pipeline.analysis.stopping_rule import difference_tolerance_s
from pipeline.communication.selftest_findings import (
    CLOCK_TOLERANCE,
    Findings,
    clock_costs,
    difference_us,
    step_us,
)

MIN_EXPOSED_US = 10.0  # in a ratio, less exposed communication counts as this
USUAL_BUCKET_BYTES = 25 * 2**20

NO_OP_TOLERANCE_US = 20.0
REPEAT_TOLERANCE = 0.01
LARGE_BUCKET_RATIO = 1.2  # exposed communication must rise by this factor with one bucket
SOCKET_RATIO = 10.0  # exposed communication must rise by this factor over sockets
SOCKET_BANDWIDTH_RATIO = 2.0  # and the bandwidth must fall by this one
INJECTED_TOLERANCE = 0.20
WAIT_TOLERANCE = 0.20
SHORTEST_RISE_TOLERANCE = 0.20  # limit of the rise of the shortest all-reduce while a rank sleeps
BARE_LOOP_TOLERANCE = 0.05
CLOCK_PARTS_TOLERANCE = 0.01

Verdict = Literal["pass", "undecided", "fail", "not applicable"]


class CheckResult(NamedTuple):
    """The result of one check: a verdict, a sentence with the limit, and the figures."""

    check: str
    verdict: Verdict
    sentence: str
    figures: dict[str, float]


class Estimate(NamedTuple):
    """A median, or a figure of medians, with its interval."""

    value: float
    interval: Interval

    def at_least(self, floor: float) -> "Estimate":
        """Return the estimate of the figure where a figure below the floor counts as the floor."""
        low, high = max(self.interval.low, floor), max(self.interval.high, floor)
        return Estimate(max(self.value, floor), self.interval._replace(low=low, high=high))

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate of the figure times a positive factor."""
        return Estimate(self.value * factor, self.interval.scaled(factor))

    def figures(self, key: str) -> dict[str, float]:
        """Return the value and both ends of the interval, by key."""
        return {key: self.value, f"{key}_low": self.interval.low, f"{key}_high": self.interval.high}

    def format(self, form: str) -> str:
        """Return the value and, in brackets, the ends of the interval."""
        ends = (self.value, self.interval.low, self.interval.high)
        value, low, high = (format(number, form).replace("%", " %") for number in ends)
        return f"{value} ({low} to {high})"


def estimate_median(values: Sequence[float]) -> Estimate:
    """Return the median with its interval. Raises ValueError for fewer than six values."""
    interval = median_interval(values)
    if interval is None:
        raise ValueError(f"an interval needs six values, got {len(values)}.")
    return Estimate(statistics.median(values), interval)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """Return the difference of two medians that were measured separately.

    Square-and-add (Zou and Donner, Statistics in Medicine 27, 2008): each side of the interval is the square root of
    the summed squares of the sides that reach there. Its coverage is about that of both intervals. The plain sum of the
    sides would be up to 41 % wider.
    """
    value = one.value - other.value
    below = math.hypot(one.value - one.interval.low, other.interval.high - other.value)
    above = math.hypot(one.interval.high - one.value, other.value - other.interval.low)
    coverage, n = min(one.interval.coverage, other.interval.coverage), min(one.interval.n, other.interval.n)
    return Estimate(value, Interval(value - below, value + above, coverage, n))


def ratio(above: Estimate, below: Estimate) -> Estimate:
    """Return the ratio of two positive medians that were measured separately."""
    return Estimate(above.value / below.value, ratio_interval(above.interval, below.interval))


def judge(interval: Interval, at_least: float = -math.inf, at_most: float = math.inf) -> Verdict:
    """Return `pass` if the whole interval lies inside the limits, `fail` if none of it does, else `undecided`."""
    if at_least <= interval.low and interval.high <= at_most:
        return "pass"
    return "fail" if interval.high < at_least or interval.low > at_most else "undecided"


def worst(*verdicts: Verdict) -> Verdict:
    """Return the verdict on several claims together."""
    return min(verdicts, key=("fail", "undecided", "pass").index)


def check_answers(runs: Mapping[str, Findings]) -> list[CheckResult]:
    """Run every check on the runs of a self-test.

    `known_answers` has the variants of the checks, `measure` is the same point by `measure: communication` in new
    processes, `sockets` the same over sockets. Files of earlier versions have `again`, the self-test's own code in new
    processes, and no `measure`. Raises LookupError or ValueError if findings are missing.
    """
    findings, measured = runs["known_answers"], runs.get("measure")
    return [
        check_no_op_series(findings),
        check_large_bucket(findings),
        check_sockets(findings, runs.get("sockets")),
        check_injected(findings),
        check_repeat(findings, measured or runs["again"]),
        check_entry_points(findings, measured),
        check_straggler(findings),
        check_bare_loop(findings),
        check_parts(findings),
        *(check_clock(findings, name) for name in findings.clock_windows),
    ]


def exposed_us(findings: Findings, name: str = "ddp") -> Estimate:
    """Return the exposed communication of a step in us: the median difference from the no-op hook over rounds."""
    return estimate_median(difference_us(findings, name, "no_op_hook"))


def check_no_op_series(findings: Findings) -> CheckResult:
    """Check that two interleaved no-op series differ by at most NO_OP_TOLERANCE_US."""
    apart = estimate_median(difference_us(findings, "no_op_hook", "no_op_hook_again"))
    limit = NO_OP_TOLERANCE_US
    return CheckResult(
        "two no-op series",
        judge(apart.interval, -limit, limit),
        f"two interleaved series of the no-op hook differ by {apart.format('.1f')} us a step, limit {limit:.1f}",
        apart.figures("difference_us")
        | {"limit_us": limit, "step_us": statistics.median(step_us(findings, "no_op_hook"))},
    )


def check_large_bucket(findings: Findings) -> CheckResult:
    """Check that exposed communication rises with one bucket for all gradients, which cannot overlap with backward."""
    name, factor = "bucket cap of 100 MB", LARGE_BUCKET_RATIO
    if findings.gradient_bytes <= USUAL_BUCKET_BYTES:
        return CheckResult(name, "not applicable", "all gradients fit in one bucket in any case", {})
    usual, large = exposed_us(findings), exposed_us(findings, "one_bucket")
    by_round = [difference_us(findings, name, "no_op_hook") for name in ("one_bucket", "ddp")]
    above = estimate_median([one_bucket - factor * ddp for one_bucket, ddp in zip(*by_round, strict=False)])
    floor_us = factor * MIN_EXPOSED_US
    return CheckResult(
        name,
        worst(judge(above.interval, 0), judge(large.interval, floor_us)),
        f"exposed communication goes from {usual.value:.1f} to {large.format('.1f')} us a step, at least "
        f"{floor_us:.0f}; less x{factor} that is {above.format('+.1f')} us, at least 0",
        usual.figures("exposed_us") | large.figures("exposed_one_bucket_us") | above.figures("above_limit_us"),
    )


def check_sockets(findings: Findings, sockets: Findings | None) -> CheckResult:
    """Check that over sockets exposed communication rises at least tenfold and the bandwidth falls below half."""
    if findings.device != "cuda":
        return CheckResult("sockets", "not applicable", "only for NCCL; other backends always use sockets", {})
    if sockets is None:
        return CheckResult("sockets", "undecided", "there is no run over sockets; run the self-test again", {})
    fast, slow = exposed_us(findings), exposed_us(sockets)
    rise = ratio(slow.at_least(MIN_EXPOSED_US), fast.at_least(MIN_EXPOSED_US))
    peak, collapsed = gradients_busbw_gb_s(findings), gradients_busbw_gb_s(sockets)
    fall = ratio(estimate_median(sockets.swept_ns), estimate_median(findings.swept_ns))
    return CheckResult(
        "sockets",
        worst(judge(rise.interval, SOCKET_RATIO), judge(fall.interval, SOCKET_BANDWIDTH_RATIO)),
        f"without P2P and shared memory exposed communication goes from {fast.value:.1f} to {slow.value:.1f} us a "
        f"step: x{rise.format('.1f')}, at least x{SOCKET_RATIO:.0f}; the bus bandwidth goes from {peak:.1f} to "
        f"{collapsed:.2f} GB/s: 1/{fall.format('.1f')}, at most 1/{SOCKET_BANDWIDTH_RATIO:.0f}",
        fast.figures("exposed_us")
        | slow.figures("exposed_sockets_us")
        | rise.figures("rise")
        | {"busbw_gb_s": peak, "busbw_sockets_gb_s": collapsed}
        | fall.figures("busbw_fall"),
    )


def gradients_busbw_gb_s(findings: Findings) -> float:
    """Return the bus bandwidth of an all-reduce of all gradients (nccl-tests, doc/PERFORMANCE.md).

    It equals formulas.busbw_gb_s except for rounding; published self-tests contain the digits of this form.
    """
    return ring_bytes_per_step(findings.gradient_bytes, findings.num_ranks) / statistics.median(findings.swept_ns)


def check_injected(findings: Findings) -> CheckResult:
    """Check that an injected all-reduce lengthens a step by the time that it takes alone."""
    injected = estimate_median(difference_us(findings, "extra", "ddp"))
    alone = estimate_median(findings.extra_ns).scaled(1e-3)
    share = ratio(injected.at_least(MIN_EXPOSED_US), alone)
    limits = 1 - INJECTED_TOLERANCE, 1 + INJECTED_TOLERANCE
    return CheckResult(
        "injected all-reduce",
        judge(share.interval, *limits),
        f"an extra all-reduce of {findings.extra_bytes / 1e6:.1f} MB adds {injected.value:.0f} us to a step and takes "
        f"{alone.value:.0f} us alone: x{share.format('.3f')}, limit {limits[0]:g} to {limits[1]:g}",
        injected.figures("injected_us") | alone.figures("isolated_us") | share.figures("ratio"),
    )


def check_repeat(findings: Findings, again: Findings) -> CheckResult:
    """Check that the step time in new processes differs by at most REPEAT_TOLERANCE."""
    one, other = (estimate_median(step_us(run, "ddp")) for run in (findings, again))
    share = ratio(other, one)
    return CheckResult(
        "the same point twice",
        judge(share.interval, 1 - REPEAT_TOLERANCE, 1 + REPEAT_TOLERANCE),
        f"a step takes {one.value:.1f} us, and {other.value:.1f} us in new processes: {format_change(share)}, "
        f"limit {100 * REPEAT_TOLERANCE:.0f} %",
        one.figures("step_us") | other.figures("step_again_us") | share.figures("ratio"),
    )


def format_change(share: Estimate) -> str:
    """Return a ratio near 1 as a change in per cent, with the ends of its interval."""
    ends = share.interval._replace(low=share.interval.low - 1, high=share.interval.high - 1)
    return Estimate(share.value - 1, ends).format("+.2%")


def check_entry_points(findings: Findings, measured: Findings | None) -> CheckResult:
    """Check that the self-test and `measure: communication` agree on exposed communication of the same point.

    The limit is the tolerance of a difference of step times. The time that all collectives add is printed beside it.
    """
    name = "two entry points"
    if measured is None:
        return CheckResult(name, "undecided", "there is no run of measure: communication; run the self-test again", {})
    ours, theirs = exposed_us(findings), exposed_us(measured)
    apart = difference(ours, theirs)
    limit = difference_tolerance_s(max(abs(ours.value), abs(theirs.value)) / 1e6) * 1e6
    collectives = estimate_median(difference_us(findings, "ddp", "no_collectives"))
    return CheckResult(
        name,
        judge(apart.interval, -limit, limit),
        f"exposed communication is {ours.value:.1f} us a step here, {theirs.value:.1f} us by measure: communication; "
        f"difference {apart.format('+.1f')} us, limit {limit:.1f}; all collectives add {collectives.value:.0f} us",
        ours.figures("exposed_us")
        | theirs.figures("exposed_measure_us")
        | apart.figures("difference_us")
        | {"limit_us": limit}
        | collectives.figures("collectives_us"),
    )


def check_straggler(findings: Findings) -> CheckResult:
    """Check that a sleeping rank appears as waiting of the others and not as a slower link.

    The wait of a rank is its longest in one collective: later ones of the same step wait for the same delay again.
    """
    name = "a rank asleep"
    if findings.profile_problem:
        return CheckResult(name, "undecided", findings.profile_problem, {})
    if not findings.wait_by_step_ns:
        return CheckResult(name, "undecided", "there is no wait by profiled step; run the self-test again", {})
    expected_us = findings.sleep_ns * (findings.num_ranks - 1) / findings.num_ranks / 1e3
    usual, wait = (estimate_median(values).scaled(1e-3) for values in findings.wait_by_step_ns)
    before, after = map(estimate_median, findings.shortest_by_step_ns)
    shortest = ratio(after, before)
    limits_us = (1 - WAIT_TOLERANCE) * expected_us, (1 + WAIT_TOLERANCE) * expected_us
    return CheckResult(
        name,
        worst(judge(wait.interval, *limits_us), judge(shortest.interval, at_most=1 + SHORTEST_RISE_TOLERANCE)),
        f"while one rank sleeps {findings.sleep_ns / 1e6:.1f} ms the mean rank waits {wait.format('.0f')} us, limit "
        f"{limits_us[0]:.0f} to {limits_us[1]:.0f} (without sleep {usual.value:.0f}); the shortest all-reduces change "
        f"by {format_change(shortest)}, limit +{100 * SHORTEST_RISE_TOLERANCE:.0f} %",
        wait.figures("wait_us")
        | usual.figures("usual_wait_us")
        | {"expected_wait_us": expected_us}
        | shortest.figures("shortest_ratio"),
    )


def check_bare_loop(findings: Findings) -> CheckResult:
    """Check that an all-reduce of all gradients takes as long in the sweep as in a bare loop."""
    swept, bare = (estimate_median(times_ns).scaled(1e-3) for times_ns in (findings.swept_ns, findings.bare_ns))
    share = ratio(swept, bare)
    return CheckResult(
        "sweep against a bare loop",
        judge(share.interval, 1 - BARE_LOOP_TOLERANCE, 1 + BARE_LOOP_TOLERANCE),
        f"an all-reduce of {findings.gradient_bytes / 1e6:.1f} MB takes {swept.value:.1f} us in the sweep and "
        f"{bare.value:.1f} us in a bare loop: {format_change(share)}, limit {100 * BARE_LOOP_TOLERANCE:.0f} %",
        swept.figures("sweep_us")
        | bare.figures("bare_loop_us")
        | share.figures("ratio")
        | {"busbw_gb_s": gradients_busbw_gb_s(findings)},
    )


def check_parts(findings: Findings) -> CheckResult:
    """Check that the parts of a step sum to its wall time. The interval holds all windows, since the sum is exact."""
    shares = findings.parts_share
    every = Estimate(statistics.median(shares), Interval(min(shares), max(shares), 1.0, len(shares)))
    return CheckResult(
        "parts against the wall clock",
        judge(every.interval, 1 - CLOCK_PARTS_TOLERANCE, 1 + CLOCK_PARTS_TOLERANCE),
        f"the sum of the parts differs from the wall clock by {format_change(every)} over all windows, "
        f"limit {100 * CLOCK_PARTS_TOLERANCE:.0f} %",
        every.figures("ratio"),
    )


def check_clock(findings: Findings, name: str) -> CheckResult:
    """Check that the marks cost less than the limit."""
    cost = estimate_median(clock_costs(findings.clock_windows[name], findings.unmarked_windows[name]))
    limit = CLOCK_TOLERANCE[name]
    return CheckResult(
        f"cost of the clock, {name} batch",
        judge(cost.interval, at_most=limit),
        f"at {findings.clock_batches[name]} per GPU the marks cost {cost.format('+.2%')} of a step, limit "
        f"{100 * limit:.0f} %",
        cost.figures("cost"),
    )


def count_verdicts(results: Sequence[CheckResult]) -> Mapping[str, int]:
    """Return the number of checks for each verdict."""
    return {word: sum(result.verdict == word for result in results) for word in get_args(Verdict)}
