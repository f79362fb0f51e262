"""Checks of the self-test: each compares what the ranks measured with a known value.

All functions are pure. Each result has the measured values and a sentence that states the limit.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from pipeline.analysis.formulas import ring_bytes_per_step
from pipeline.analysis.intervals import Interval, median_interval
from pipeline.analysis.stopping_rule import is_difference_precise_enough, is_half_width_below
from pipeline.experiment.measurement import WindowTimesNs

NOISE_FLOOR_US = 10.0
LARGE_BUCKET_RATIO = 1.5  # exposed communication must rise by this factor with one bucket
USUAL_BUCKET_BYTES = 25 * 2**20
SOCKET_RATIO = 10.0  # exposed communication must rise by this factor over sockets
INJECTED_TOLERANCE = 0.20
REPEAT_TOLERANCE = 0.01
WAIT_SHARE = 0.8  # smallest share of the expected wait that must be measured
SHORTEST_RISE_TOLERANCE = 0.20  # limit of the rise of the shortest all-reduce while a rank sleeps
BARE_LOOP_TOLERANCE = 0.05
CLOCK_PARTS_TOLERANCE = 0.01
CLOCK_TOLERANCE = {"large": 0.01, "small": 0.03}  # share of a step

Verdict = Literal["pass", "fail", "not applicable"]


class Findings(msgspec.Struct, frozen=True):
    """Raw findings of the ranks in one run of the self-test."""

    device: str
    gpu: str
    num_ranks: int
    batch_size_per_gpu: int
    gradient_bytes: int
    steps_per_window: int
    windows: WindowTimesNs
    swept_ns: list[int]  # time of one all-reduce of all gradients, by window
    bare_ns: list[int] = []  # the same, timed by a bare loop
    extra_bytes: int = 0
    extra_ns: list[int] = []  # time of the injected all-reduce alone, by window
    sleep_ns: int = 0
    # all-reduces of gradients in a profiled step: [normal, with one rank asleep]
    shortest_ns: list[float] = []  # time on the fastest rank
    wait_ns: list[float] = []  # mean wait over the ranks
    clock_windows: dict[str, list[int]] = {}  # wall time of the training loop with marks, by batch ("large", "small")
    silent_windows: dict[str, list[int]] = {}  # the same without marks
    parts_share: list[float] = []  # sum of the parts over the wall time, by window
    clock_batches: dict[str, int] = {}  # samples per GPU of "large" and "small"


class SavedRuns(msgspec.Struct):
    """The output of `selftest --json`. Its `answers` are not read: they are computed again from the runs."""

    runs: dict[str, Findings]


class CheckResult(NamedTuple):
    """The result of one check: a verdict, a sentence with the limit, and the figures."""

    check: str
    verdict: Verdict
    sentence: str
    figures: dict[str, float]


def check_answers(findings: Findings, again: Findings, sockets: Findings | None) -> list[CheckResult]:
    """Run every check. `again` is the same point in new processes, `sockets` the same over sockets (None: not NCCL)."""
    return [
        check_no_op_series(findings),
        check_large_bucket(findings),
        check_sockets(findings, sockets),
        check_injected(findings),
        check_repeat(findings, again),
        check_straggler(findings),
        check_bare_loop(findings),
        check_parts(findings),
        *(check_clock(findings, name) for name in findings.clock_windows),
    ]


def step_us(findings: Findings, name: str) -> list[float]:
    """Return the slowest rank's step time in each window, in us."""
    return [max(ranks) / findings.steps_per_window / 1e3 for ranks in findings.windows[name]]


def difference_us(findings: Findings, name: str, other: str) -> list[float]:
    """Return the difference of two step times in each round, in us; slow drift cancels out."""
    return [a - b for a, b in zip(step_us(findings, name), step_us(findings, other), strict=True)]


def exposed_us(findings: Findings, name: str = "ddp") -> float:
    """Return the exposed communication of a step in us: the median difference from the no-op hook over rounds."""
    return statistics.median(difference_us(findings, name, "no_op_hook"))


def is_precise_enough(findings: Findings) -> bool:
    """Return True if DDP's step time and all differences from the no-op hook are precise enough to stop."""
    differences = [difference_us(findings, name, "no_op_hook") for name in findings.windows if name != "no_op_hook"]
    differences += [difference_us(findings, "extra", "ddp")] if "extra" in findings.windows else []
    times_us = step_us(findings, "ddp")
    is_repeatable = is_half_width_below(times_us, REPEAT_TOLERANCE / 2 * statistics.median(times_us))
    return is_repeatable and all(is_difference_precise_enough([us / 1e6 for us in series]) for series in differences)


def is_clock_cost_precise_enough(name: str, clocked_ns: Sequence[int], silent_ns: Sequence[int]) -> bool:
    """Return True if the cost of the clock's marks is known to within half of its limit."""
    return is_half_width_below(clock_costs(clocked_ns, silent_ns), CLOCK_TOLERANCE[name] / 2)


def clock_costs(clocked_ns: Sequence[int], silent_ns: Sequence[int]) -> list[float]:
    """Return the cost of the marks as a share of the loop without them, for each pair of windows."""
    return [clocked / silent - 1 for clocked, silent in zip(clocked_ns, silent_ns, strict=True)]


def require_interval(values: Sequence[float]) -> Interval:
    """Return the confidence interval of the median. Raises ValueError for fewer than six values."""
    interval = median_interval(values)
    if interval is None:
        raise ValueError(f"an interval needs six values, got {len(values)}.")
    return interval


def pass_or_fail(is_met: bool) -> Verdict:
    """Return the verdict `pass` or `fail`."""
    return "pass" if is_met else "fail"


def check_no_op_series(findings: Findings) -> CheckResult:
    """Check that two interleaved no-op series differ by at most NOISE_FLOOR_US or the noise, whichever is larger.

    The noise is the largest absolute value in the interval of the difference between two equal DDP series (A/A).
    """
    differences = difference_us(findings, "no_op_hook", "no_op_hook_again")
    difference = abs(statistics.median(differences))
    noise = require_interval(difference_us(findings, "ddp", "ddp_again")).max_abs_bound
    limit = max(NOISE_FLOOR_US, noise)
    return CheckResult(
        "two no-op series",
        pass_or_fail(difference <= limit),
        f"two interleaved series of the no-op hook differ by {difference:.1f} us a step (limit {limit:.1f})",
        {"difference_us": difference, "limit_us": limit, "step_us": statistics.median(step_us(findings, "no_op_hook"))},
    )


def check_large_bucket(findings: Findings) -> CheckResult:
    """Check that exposed communication rises with one bucket for all gradients, which cannot overlap with backward."""
    if findings.gradient_bytes <= USUAL_BUCKET_BYTES:
        return CheckResult("bucket cap of 100 MB", "not applicable", "all gradients fit in one bucket in any case", {})
    usual, large = exposed_us(findings), exposed_us(findings, "one_bucket")
    return CheckResult(
        "bucket cap of 100 MB",
        pass_or_fail(large >= LARGE_BUCKET_RATIO * max(usual, NOISE_FLOOR_US)),
        f"exposed communication goes from {usual:.1f} to {large:.1f} us a step (at least x{LARGE_BUCKET_RATIO})",
        {"exposed_us": usual, "exposed_one_bucket_us": large},
    )


def check_sockets(findings: Findings, sockets: Findings | None) -> CheckResult:
    """Check that over sockets exposed communication rises at least tenfold and the bandwidth falls below half."""
    if sockets is None:
        return CheckResult("sockets", "not applicable", "only for NCCL; other backends always use sockets", {})
    fast, slow = exposed_us(findings), exposed_us(sockets)
    peak, collapsed = gradients_busbw_gb_s(findings), gradients_busbw_gb_s(sockets)
    return CheckResult(
        "sockets",
        pass_or_fail(slow >= SOCKET_RATIO * max(fast, NOISE_FLOOR_US) and collapsed < peak / 2),
        f"without P2P and shared memory exposed communication goes from {fast:.1f} to {slow:.1f} us a step (at least "
        f"x{SOCKET_RATIO:.0f}) and the bus bandwidth from {peak:.1f} to {collapsed:.2f} GB/s (below half)",
        {"exposed_us": fast, "exposed_sockets_us": slow, "busbw_gb_s": peak, "busbw_sockets_gb_s": collapsed},
    )


def gradients_busbw_gb_s(findings: Findings) -> float:
    """Return the bus bandwidth of an all-reduce of all gradients (nccl-tests, doc/PERFORMANCE.md).

    It equals formulas.busbw_gb_s except for rounding; published self-tests contain the digits of this form.
    """
    return ring_bytes_per_step(findings.gradient_bytes, findings.num_ranks) / statistics.median(findings.swept_ns)


def check_injected(findings: Findings) -> CheckResult:
    """Check that an injected all-reduce lengthens a step by the time that it takes alone."""
    injected = statistics.median(difference_us(findings, "extra", "ddp"))
    alone = statistics.median(findings.extra_ns) / 1e3
    error = abs(injected - alone) / alone
    return CheckResult(
        "injected all-reduce",
        pass_or_fail(error <= INJECTED_TOLERANCE),
        f"an extra all-reduce of {findings.extra_bytes / 1e6:.1f} MB adds {injected:.0f} us to a step and takes "
        f"{alone:.0f} us alone: {error:.1%} apart (limit {INJECTED_TOLERANCE:.0%})",
        {"injected_us": injected, "isolated_us": alone, "error": error},
    )


def check_repeat(findings: Findings, again: Findings) -> CheckResult:
    """Check that the step time in new processes differs by at most REPEAT_TOLERANCE."""
    one, other = (statistics.median(step_us(run, "ddp")) for run in (findings, again))
    difference = abs(one - other) / one
    return CheckResult(
        "the same point twice",
        pass_or_fail(difference <= REPEAT_TOLERANCE),
        f"a step takes {one:.1f} us, and {other:.1f} us in new processes: {difference:.2%} apart "
        f"(limit {REPEAT_TOLERANCE:.0%})",
        {"step_us": one, "step_again_us": other, "difference": difference},
    )


def check_straggler(findings: Findings) -> CheckResult:
    """Check that a sleeping rank appears as waiting of the others and not as a slower link."""
    expected_us = findings.sleep_ns * (findings.num_ranks - 1) / findings.num_ranks / 1e3
    wait_us = (findings.wait_ns[1] - findings.wait_ns[0]) / 1e3
    change = findings.shortest_ns[1] / findings.shortest_ns[0] - 1
    return CheckResult(
        "a rank asleep",
        pass_or_fail(wait_us >= WAIT_SHARE * expected_us and change <= SHORTEST_RISE_TOLERANCE),
        f"{findings.sleep_ns / 1e6:.0f} ms of sleep in one rank add {wait_us:.0f} us to the mean rank's wait (at least "
        f"{WAIT_SHARE * expected_us:.0f}), and the shortest all-reduces change by {change:+.1%} (limit "
        f"+{SHORTEST_RISE_TOLERANCE:.0%})",
        {"wait_us": wait_us, "expected_wait_us": expected_us, "shortest_change": change},
    )


def check_bare_loop(findings: Findings) -> CheckResult:
    """Check that an all-reduce of all gradients takes as long in the sweep as in a bare loop."""
    swept, bare = statistics.median(findings.swept_ns) / 1e3, statistics.median(findings.bare_ns) / 1e3
    error = abs(swept - bare) / bare
    return CheckResult(
        "sweep against a bare loop",
        pass_or_fail(error <= BARE_LOOP_TOLERANCE),
        f"an all-reduce of {findings.gradient_bytes / 1e6:.1f} MB takes {swept:.1f} us in the sweep and {bare:.1f} us "
        f"in a bare loop: {error:.1%} apart (limit {BARE_LOOP_TOLERANCE:.0%})",
        {"sweep_us": swept, "bare_loop_us": bare, "error": error, "busbw_gb_s": gradients_busbw_gb_s(findings)},
    )


def check_parts(findings: Findings) -> CheckResult:
    """Check that the parts of a step sum to its wall time."""
    worst = max(abs(share - 1) for share in findings.parts_share)
    return CheckResult(
        "parts against the wall clock",
        pass_or_fail(worst <= CLOCK_PARTS_TOLERANCE),
        f"the sum of the parts differs from the wall clock by {worst:.2%} at worst (limit {CLOCK_PARTS_TOLERANCE:.0%})",
        {"worst_difference": worst},
    )


def check_clock(findings: Findings, name: str) -> CheckResult:
    """Check that the marks cost less than the limit. If the windows are too uneven to decide, it is no pass."""
    costs = clock_costs(findings.clock_windows[name], findings.silent_windows[name])
    cost, interval = statistics.median(costs), median_interval(costs)
    low, high = (interval.low, interval.high) if interval else (min(costs), max(costs))
    limit = CLOCK_TOLERANCE[name]
    is_close, is_precise = low <= limit < high, is_half_width_below(costs, limit / 2)
    doubt = ""
    if is_close:
        uneven = "; the windows differ too much to decide, use a larger --windows"
        doubt = "; too close to tell" if is_precise else uneven
    return CheckResult(
        f"cost of the clock, {name} batch",
        pass_or_fail(cost <= limit and (is_precise or not is_close)),
        f"at {findings.clock_batches[name]} per GPU the marks cost {cost:+.2%} of a step, {low:+.2%} to {high:+.2%} "
        f"(limit {limit:.0%}){doubt}",
        {"cost": cost, "cost_low": low, "cost_high": high},
    )


def count_verdicts(results: Sequence[CheckResult]) -> Mapping[str, int]:
    """Return the number of checks for each verdict."""
    return {word: sum(result.verdict == word for result in results) for word in ("pass", "fail", "not applicable")}
