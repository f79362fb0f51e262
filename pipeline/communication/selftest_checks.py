"""Known answers: what the instrument must find of itself, from what a self-test measured.

Pure functions of the findings; each answer carries its figures, its limit and a sentence.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from pipeline.analysis.formulas import ring_bytes_per_step
from pipeline.analysis.intervals import median_interval
from pipeline.analysis.stopping_rule import is_difference_precise_enough, is_half_width_below

NOISE_FLOOR_US = 10.0
LARGE_BUCKET_RATIO = 1.5
USUAL_BUCKET_BYTES = 25 * 2**20
SOCKET_RATIO = 10.0
INJECTED_TOLERANCE = 0.20
REPEAT_TOLERANCE = 0.01
WAIT_SHARE = 0.8  # of the sleep, that must appear as waiting
BANDWIDTH_TOLERANCE = 0.20
BARE_LOOP_TOLERANCE = 0.05
CLOCK_PARTS_TOLERANCE = 0.01
CLOCK_TOLERANCE = {"large": 0.01, "small": 0.03}  # of a step

Verdict = Literal["pass", "fail", "not applicable"]
WindowTimesNs = dict[str, list[list[int]]]  # ns, [window][rank], by name


class Findings(msgspec.Struct, frozen=True):
    """What the ranks of one self-test launch measured, raw. Times in ns unless a name says otherwise."""

    device: str
    gpu: str
    num_ranks: int
    batch_size_per_gpu: int
    gradient_bytes: int
    steps_per_window: int
    windows: WindowTimesNs
    swept_ns: list[int]  # an all-reduce of all gradients: a call, by window
    bare_ns: list[int] = []  # the same as a bare loop
    extra_bytes: int = 0
    extra_ns: list[int] = []  # the injected all-reduce alone
    sleep_ns: int = 0
    shortest_ns: list[float] = []  # gradients of a profiled step: undisturbed, with one rank asleep
    wait_ns: list[float] = []
    clock_windows: dict[str, list[int]] = {}  # wall time with all marks: by batch, as "large", "small"
    silent_windows: dict[str, list[int]] = {}  # the same loop without
    parts_share: list[float] = []  # sum of the parts over the wall clock, by window
    clock_batches: dict[str, int] = {}


class SavedRuns(msgspec.Struct):
    """What `selftest --json` prints; the answers are computed again from the runs."""

    runs: dict[str, Findings]


class CheckResult(NamedTuple):
    """One check: what was found, in a sentence with its limit, and the figures it rests on."""

    check: str
    verdict: Verdict
    sentence: str
    figures: dict[str, float]


def check_answers(found: Findings, again: Findings, sockets: Findings | None) -> list[CheckResult]:
    """Every answer; `again` is the same point in new processes, `sockets` the same over sockets (None: no NCCL)."""
    return [
        check_no_op_series(found),
        check_large_bucket(found),
        check_sockets(found, sockets),
        check_injected(found),
        check_repeat(found, again),
        check_straggler(found),
        check_bare_loop(found),
        check_parts(found),
        *(check_clock(found, name) for name in found.clock_windows),
    ]


def step_us(found: Findings, name: str) -> list[float]:
    """The slowest rank's step time in each window, in us."""
    return [max(ranks) / found.steps_per_window / 1e3 for ranks in found.windows[name]]


def difference_us(found: Findings, name: str, other: str) -> list[float]:
    """One series less the other, round by round: drift falls out."""
    return [a - b for a, b in zip(step_us(found, name), step_us(found, other), strict=True)]


def exposed_us(found: Findings, name: str = "ddp") -> float:
    """Exposed communication of a step: the series less the no-op hook, median over rounds, in us."""
    return statistics.median(difference_us(found, name, "no_op_hook"))


def is_precise_enough(found: Findings) -> bool:
    """Whether the rounds so far tell every series from that of the no-op hook, and how long DDP's step takes."""
    differences = [difference_us(found, name, "no_op_hook") for name in found.windows if name != "no_op_hook"]
    differences += [difference_us(found, "extra", "ddp")] if "extra" in found.windows else []
    times_us = step_us(found, "ddp")
    is_repeatable = is_half_width_below(times_us, REPEAT_TOLERANCE / 2 * statistics.median(times_us))
    return is_repeatable and all(is_difference_precise_enough([us / 1e6 for us in series]) for series in differences)


def is_clock_cost_precise_enough(name: str, clocked_ns: Sequence[int], silent_ns: Sequence[int]) -> bool:
    """Whether what the marks cost is known within half of its limit."""
    return is_half_width_below(clock_costs(clocked_ns, silent_ns), CLOCK_TOLERANCE[name] / 2)


def clock_costs(clocked_ns: Sequence[int], silent_ns: Sequence[int]) -> list[float]:
    """What the marks cost, as a share of the loop without them, pair by pair."""
    return [clocked / silent - 1 for clocked, silent in zip(clocked_ns, silent_ns, strict=True)]


def max_abs_bound(values: Sequence[float]) -> float:
    """How far from 0 the interval of the values' median reaches, in their unit. Raises ValueError below six values."""
    interval = median_interval(values)
    if interval is None:
        raise ValueError(f"an interval needs six values, got {len(values)}.")
    return max(abs(interval.low), abs(interval.high))


def pass_or_fail(is_met: bool) -> Verdict:
    """A check's outcome as a word."""
    return "pass" if is_met else "fail"


def check_no_op_series(found: Findings) -> CheckResult:
    """Two interleaved no-op series differ by no more than the larger of 10 us and the A/A interval.

    The A/A interval is that of the difference between two equal series of the whole step: what it reaches is noise.
    """
    differences = difference_us(found, "no_op_hook", "no_op_hook_again")
    difference = abs(statistics.median(differences))
    floor = max_abs_bound(difference_us(found, "ddp", "ddp_again"))
    limit = max(NOISE_FLOOR_US, floor)
    return CheckResult(
        "two no-op series",
        pass_or_fail(difference <= limit),
        f"two interleaved series of the no-op hook differ by {difference:.1f} us a step (limit {limit:.1f})",
        {"difference_us": difference, "limit_us": limit, "step_us": statistics.median(step_us(found, "no_op_hook"))},
    )


def check_large_bucket(found: Findings) -> CheckResult:
    """One bucket for all gradients cannot overlap with backward: exposed communication rises."""
    if found.gradient_bytes <= USUAL_BUCKET_BYTES:
        return CheckResult("bucket cap of 100 MB", "not applicable", "the gradients fill one bucket in any case", {})
    usual, large = exposed_us(found), exposed_us(found, "one_bucket")
    return CheckResult(
        "bucket cap of 100 MB",
        pass_or_fail(large >= LARGE_BUCKET_RATIO * max(usual, NOISE_FLOOR_US)),
        f"exposed communication goes from {usual:.1f} to {large:.1f} us a step (at least x{LARGE_BUCKET_RATIO})",
        {"exposed_us": usual, "exposed_one_bucket_us": large},
    )


def check_sockets(found: Findings, sockets: Findings | None) -> CheckResult:
    """Over sockets exposed communication rises ten times and the bandwidth collapses."""
    if sockets is None:
        return CheckResult("sockets", "not applicable", "only NCCL between GPUs has a faster way than sockets", {})
    fast, slow = exposed_us(found), exposed_us(sockets)
    peak, collapsed = gradients_busbw_gb_s(found), gradients_busbw_gb_s(sockets)
    return CheckResult(
        "sockets",
        pass_or_fail(slow >= SOCKET_RATIO * max(fast, NOISE_FLOOR_US) and collapsed < peak / 2),
        f"without P2P and shared memory exposed communication goes from {fast:.1f} to {slow:.1f} us a step (at least "
        f"x{SOCKET_RATIO:.0f}) and the bus bandwidth from {peak:.1f} to {collapsed:.2f} GB/s (below half)",
        {"exposed_us": fast, "exposed_sockets_us": slow, "busbw_gb_s": peak, "busbw_sockets_gb_s": collapsed},
    )


def gradients_busbw_gb_s(found: Findings) -> float:
    """Bus bandwidth of an all-reduce of all gradients (nccl-tests, doc/PERFORMANCE.md)."""
    return ring_bytes_per_step(found.gradient_bytes, found.num_ranks) / statistics.median(found.swept_ns)


def check_injected(found: Findings) -> CheckResult:
    """An injected all-reduce costs a step what it costs alone."""
    injected = statistics.median(difference_us(found, "extra", "ddp"))
    alone = statistics.median(found.extra_ns) / 1e3
    error = abs(injected - alone) / alone
    return CheckResult(
        "injected all-reduce",
        pass_or_fail(error <= INJECTED_TOLERANCE),
        f"an extra all-reduce of {found.extra_bytes / 1e6:.1f} MB adds {injected:.0f} us to a step and takes "
        f"{alone:.0f} us alone: {error:.1%} apart (limit {INJECTED_TOLERANCE:.0%})",
        {"injected_us": injected, "isolated_us": alone, "error": error},
    )


def check_repeat(found: Findings, again: Findings) -> CheckResult:
    """The same point in new processes differs by no more than 1 %."""
    one, other = (statistics.median(step_us(run, "ddp")) for run in (found, again))
    difference = abs(one - other) / one
    return CheckResult(
        "the same point twice",
        pass_or_fail(difference <= REPEAT_TOLERANCE),
        f"a step takes {one:.1f} us, and {other:.1f} us in new processes: {difference:.2%} apart "
        f"(limit {REPEAT_TOLERANCE:.0%})",
        {"step_us": one, "step_again_us": other, "difference": difference},
    )


def check_straggler(found: Findings) -> CheckResult:
    """A rank that sleeps shows as the others' wait and not as a slower link."""
    expected_us = found.sleep_ns * (found.num_ranks - 1) / found.num_ranks / 1e3
    wait_us = (found.wait_ns[1] - found.wait_ns[0]) / 1e3
    change = found.shortest_ns[1] / found.shortest_ns[0] - 1
    return CheckResult(
        "a rank asleep",
        pass_or_fail(wait_us >= WAIT_SHARE * expected_us and change <= BANDWIDTH_TOLERANCE),
        f"{found.sleep_ns / 1e6:.0f} ms of sleep in one rank add {wait_us:.0f} us to the mean rank's wait (at least "
        f"{WAIT_SHARE * expected_us:.0f}), and the shortest all-reduces change by {change:+.1%} (limit "
        f"+{BANDWIDTH_TOLERANCE:.0%})",
        {"wait_us": wait_us, "expected_wait_us": expected_us, "shortest_change": change},
    )


def check_bare_loop(found: Findings) -> CheckResult:
    """The sweep's all-reduce of all gradients takes as long as a bare loop's."""
    swept, bare = statistics.median(found.swept_ns) / 1e3, statistics.median(found.bare_ns) / 1e3
    error = abs(swept - bare) / bare
    return CheckResult(
        "sweep against a bare loop",
        pass_or_fail(error <= BARE_LOOP_TOLERANCE),
        f"an all-reduce of {found.gradient_bytes / 1e6:.1f} MB takes {swept:.1f} us in the sweep and {bare:.1f} us in "
        f"a bare loop: {error:.1%} apart (limit {BARE_LOOP_TOLERANCE:.0%})",
        {"sweep_us": swept, "bare_loop_us": bare, "error": error, "busbw_gb_s": gradients_busbw_gb_s(found)},
    )


def check_parts(found: Findings) -> CheckResult:
    """The parts of a step sum to the wall clock."""
    worst = max(abs(share - 1) for share in found.parts_share)
    return CheckResult(
        "parts against the wall clock",
        pass_or_fail(worst <= CLOCK_PARTS_TOLERANCE),
        f"the sum of the parts differs from the wall clock by {worst:.2%} at worst (limit {CLOCK_PARTS_TOLERANCE:.0%})",
        {"worst_difference": worst},
    )


def check_clock(found: Findings, name: str) -> CheckResult:
    """What the marks cost, against the same loop without them; where windows are too uneven to tell, it is no pass."""
    costs = clock_costs(found.clock_windows[name], found.silent_windows[name])
    cost, interval = statistics.median(costs), median_interval(costs)
    low, high = (interval.low, interval.high) if interval else (min(costs), max(costs))
    limit = CLOCK_TOLERANCE[name]
    is_close, is_settled = low <= limit < high, is_half_width_below(costs, limit / 2)
    doubt = ""
    if is_close:
        uneven = "; windows of this host differ by too much to tell, raise --windows"
        doubt = "; too close to tell" if is_settled else uneven
    return CheckResult(
        f"cost of the clock, {name} batch",
        pass_or_fail(cost <= limit and (is_settled or not is_close)),
        f"at {found.clock_batches[name]} per GPU the marks cost {cost:+.2%} of a step, {low:+.2%} to {high:+.2%} "
        f"(limit {limit:.0%}){doubt}",
        {"cost": cost, "cost_low": low, "cost_high": high},
    )


def count_verdicts(answers: Sequence[CheckResult]) -> Mapping[str, int]:
    """How many checks came to which verdict."""
    return {word: sum(answer.verdict == word for answer in answers) for word in ("pass", "fail", "not applicable")}
