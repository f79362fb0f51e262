"""The findings of a self-test's ranks, and the checks of them as a table: each compares a figure with a known value.

All functions are pure. A check passes only if the whole interval of each judged figure lies inside its limits. It is
undecided if a limit lies inside an interval. The numbers of windows let the checks decide:
benchmarks/bench_selftest.py prints how often they do.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from pipeline.figures.formulas import ring_bytes_per_step
from pipeline.figures.intervals import median_interval
from pipeline.figures.stopping_rule import difference_tolerance_s, is_half_width_below
from pipeline.plan.spec import MIN_WINDOWS_FOR_INTERVAL, Spec
from pipeline.records.record import Environment, Measurement, VariantName, WindowTimesNs

NUM_ROUNDS = 300  # of `measure: communication`; the numbers below are shares of it
EXPOSED_VARIANTS: tuple[VariantName, ...] = ("ddp", "no_op_hook")  # exposed communication is their difference
ROUND_SHARES = {  # of the process that measures the known answers, by variant
    "ddp": 0.45,
    "no_op_hook": 0.45,
    "no_op_hook_again": 0.22,
    "one_bucket": 0.2,
    "no_collectives": 0.05,
    "extra": 0.1,
}
STRATEGY_ROUND_SHARES = {  # of the process that measures FSDP or ZeRO-1
    "fsdp": 0.45,
    "hsdp": 0.45,
    "zero1": 0.45,
    "no_op": 0.45,
    "no_op_again": 0.45,
}
SOCKET_ROUND_SHARES = {"ddp": 0.05, "no_op_hook": 0.05}
CLOCK_PAIR_SHARES = {"large": 0.25, "small": 3.0}  # of a window with marks and one without: the most, by batch
ALL_REDUCE_WINDOWS = 31  # of seven, one slow window would decide
BARE_WARM_UP_WINDOWS = 5
SLEEP_PROFILES = 6  # with a rank asleep, and as many without; one has ten steps on GPUs

CLOCK_TOLERANCE = {"large": 0.01, "small": 0.03}  # share of a step
MIN_EXPOSED_US = 10.0  # in a ratio, less exposed communication counts as this
USUAL_BUCKET_BYTES = 25 * 2**20
LARGE_BUCKET_RATIO = 1.2  # exposed communication must rise by this factor with one bucket
NO_OP_TOLERANCE_US = 20.0

CheckVerdict = Literal["pass", "undecided", "fail", "not applicable"]


class Findings(msgspec.Struct, frozen=True):
    """Raw findings of the ranks in one run of the self-test."""

    device: str
    gpu: str
    num_ranks: int
    batch_size_per_gpu: int
    gradient_bytes: int
    steps_per_window: int
    windows: WindowTimesNs  # by variant and round; every variant begins with round 1, and some end early
    swept_ns: list[int]  # time of one all-reduce of all gradients, by window
    bare_ns: list[int] = []  # the same, timed by a bare loop
    extra_bytes: int = 0
    extra_ns: list[int] = []  # time of the injected all-reduce alone, by window
    sleep_ns: int = 0  # how much longer one rank pauses before a step than the others do
    # by profiled step: [no rank asleep, one asleep][step]
    shortest_by_step_ns: list[list[float]] = []  # all-reduces of gradients, on the fastest rank
    wait_by_step_ns: list[list[float]] = []  # longest wait of a rank in one collective, mean over ranks
    profile_problem: str = ""  # the reason why no step was profiled
    clock_windows: dict[str, list[int]] = {}  # wall time of the training loop with marks, by batch ("large", "small")
    unmarked_windows: dict[str, list[int]] = {}  # the same without marks
    parts_share: list[float] = []  # sum of the parts over the wall time, by window
    clock_batches: dict[str, int] = {}  # samples per GPU of "large" and "small"
    strategy: str = "ddp"
    delay_added_ns: list[int] = []  # by how much a step with delayed collectives is longer, by step
    delay_ns: int = 0  # delays of the collectives of one step


class SavedSelftest(msgspec.Struct, kw_only=True):
    """The output of `selftest --json`. Its `answers` are not read: they are computed again from the runs.

    `measured_at` is the time of the start, in UTC.
    """

    answers: Any = []
    measured_at: str
    duration_s: float | None = None
    environment: Environment
    runs: dict[str, Findings]


def findings_of_point(spec: Spec, measurement: Measurement) -> Findings:
    """Return the windows of a point of `measure: communication` as findings. Raises ValueError if it has none."""
    found = measurement.communication
    if found is None or measurement.gradient_bytes is None:
        raise ValueError("the configuration did not measure communication.")
    return Findings(
        device=spec.device,
        gpu="",
        num_ranks=spec.world_size,
        batch_size_per_gpu=spec.batch_size_per_gpu,
        gradient_bytes=measurement.gradient_bytes,
        steps_per_window=found.steps_per_window,
        windows={series.variant: [list(window) for window in series.window_times_ns] for series in found.series},
        swept_ns=[],
    )


def count_windows(shares: Mapping[str, float], num_rounds: int) -> dict[str, int]:
    """Return the number of windows of each series: its share of the rounds, but as many as an interval needs."""
    return {name: max(MIN_WINDOWS_FOR_INTERVAL, round(share * num_rounds)) for name, share in shares.items()}


def step_us(findings: Findings, name: str) -> list[float]:
    """Return the slowest rank's step time in each window, in us."""
    return [max(ranks) / findings.steps_per_window / 1e3 for ranks in findings.windows[name]]


def difference_us(findings: Findings, name: str, other: str) -> list[float]:
    """Return the difference of two step times in each round that timed both, in us; slow drift cancels out."""
    return [a - b for a, b in zip(step_us(findings, name), step_us(findings, other), strict=False)]


def clock_costs(marked_ns: Sequence[int], unmarked_ns: Sequence[int]) -> list[float]:
    """Return the cost of the marks as a share of the loop without them, for each pair of windows."""
    return [marked / unmarked - 1 for marked, unmarked in zip(marked_ns, unmarked_ns, strict=True)]


def is_clock_cost_precise_enough(batch: str, marked_ns: Sequence[int], unmarked_ns: Sequence[int]) -> bool:
    """True if the cost of the clock's marks is known to within half of its limit."""
    return is_half_width_below(clock_costs(marked_ns, unmarked_ns), CLOCK_TOLERANCE[batch] / 2)


class MeasuredValue(NamedTuple):
    """A median, or a figure of medians, with the ends of its interval."""

    value: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"

    def transformed(self, rising: Callable[[float], float]) -> "MeasuredValue":
        return MeasuredValue(*map(rising, self))

    @property
    def change(self) -> "MeasuredValue":
        """A ratio near 1, less 1."""
        return self.transformed(lambda ratio: ratio - 1)


Figures = Mapping[str, MeasuredValue | float]  # by key of the JSON
NotMeasured = tuple[CheckVerdict, str]  # why a check has no figures: its verdict and sentence


class CheckResult(NamedTuple):
    """The result of one check. `figures` has a measured value as three numbers: `key`, `key_low` and `key_high`."""

    check: str
    verdict: CheckVerdict
    sentence: str
    figures: dict[str, float]


class Limits(NamedTuple):
    """The limits of a figure; with `of` they are multiples of the figure of that name."""

    low: float = -math.inf
    high: float = math.inf
    of: str = ""

    @property
    def tolerance(self) -> float:
        """The largest rise of a ratio near 1."""
        return self.high - 1


class Check(NamedTuple):
    """A row of the table.

    `compute` gets the findings of `runs`, None for a run that is not there. `sentence` is a template: it may use the
    figures (`{key}` with the interval, `{key.value}` without), their limits, and the sizes that judge_check adds. With
    `clock_batch` the check is made only if that batch was timed.
    """

    compute: Callable[..., Figures | NotMeasured]
    limits: Mapping[str, Limits]
    sentence: str
    runs: tuple[str, ...] = ("known_answers",)
    clock_batch: str | None = None


def judge_checks(runs: Mapping[str, Findings]) -> list[CheckResult]:
    """Judge every check on the runs of a self-test.

    `known_answers` has the variants of the checks, `measure` is the same point by `measure: communication` in new
    processes, `sockets` the same over sockets. Raises LookupError or ValueError if findings are missing.
    """
    if "strategy" in runs:
        return [judge_check(name, runs) for name in STRATEGY_CHECKS]
    if not {"known_answers", "measure"} <= runs.keys():
        raise LookupError("it lacks the runs known_answers and measure")
    timed = runs["known_answers"].clock_windows
    return [judge_check(name, runs) for name, check in CHECKS.items() if check.clock_batch in (None, *timed)]


def judge_check(name: str, runs: Mapping[str, Findings]) -> CheckResult:
    """Judge a check of the table. The worst verdict on its figures counts."""
    check, known = (CHECKS | STRATEGY_CHECKS)[name], runs.get("known_answers") or runs["strategy"]
    computed = check.compute(*map(runs.get, check.runs))
    if isinstance(computed, tuple):
        return CheckResult(name, *computed, figures={})
    figures: dict[str, float] = {}
    for key, figure in computed.items():
        if isinstance(figure, MeasuredValue):
            figures |= {key: figure.value, f"{key}_low": figure.low, f"{key}_high": figure.high}
        else:
            figures[key] = figure
    limits = {}
    for key, (low, high, of) in check.limits.items():
        limits[key] = Limits(low * figures[of], high * figures[of]) if of else Limits(low, high)
    verdicts = [judge(figures[f"{key}_low"], figures[f"{key}_high"], within) for key, within in limits.items()]
    sentence = check.sentence.format(
        **computed,
        limits=limits,
        gradients_mb=known.gradient_bytes / 1e6,
        extra_mb=known.extra_bytes / 1e6,
        sleep_ms=known.sleep_ns / 1e6,
        clock_batches=known.clock_batches,
    )
    worst = min(verdicts, key=("fail", "undecided", "pass").index)
    return CheckResult(name, worst, sentence.replace("%", " %"), figures)


def judge(low: float, high: float, limits: Limits) -> CheckVerdict:
    """Return `pass` if the whole interval lies inside the limits, `fail` if none of it does, else `undecided`."""
    if limits.low <= low and high <= limits.high:
        return "pass"
    return "fail" if high < limits.low or low > limits.high else "undecided"


def median_of(values: Sequence[float]) -> MeasuredValue:
    """Return the median with its interval. Raises ValueError for fewer than six values."""
    interval = median_interval(values)
    if interval is None:
        raise ValueError(f"an interval needs six values, got {len(values)}.")
    return MeasuredValue(statistics.median(values), interval.low, interval.high)


def median_us(times_ns: Sequence[float]) -> MeasuredValue:
    return median_of(times_ns).transformed(lambda time_ns: 1e-3 * time_ns)


def exposed_us(findings: Findings, name: str = "ddp") -> MeasuredValue:
    """Return the exposed communication of a step in us: the median difference from the no-op hook over rounds."""
    return median_of(difference_us(findings, name, "no_op_hook"))


def difference(one: MeasuredValue, other: MeasuredValue) -> MeasuredValue:
    """Return the difference of two medians that were measured separately.

    Square-and-add (Zou and Donner, Statistics in Medicine 27, 2008): each side of the interval is the square root of
    the summed squares of the sides that reach there. Its coverage is about that of both intervals. The plain sum of the
    sides would be up to 41 % wider.
    """
    value = one.value - other.value
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    return MeasuredValue(value, value - below, value + above)


def ratio(above: MeasuredValue, below: MeasuredValue, least: float = 0.0) -> MeasuredValue:
    """Return the ratio of two medians that were measured separately (see intervals.ratio_interval).

    Less than `least` counts as that. Raises ZeroDivisionError if the interval below reaches 0.
    """
    above, below = (MeasuredValue(*(max(end, least) for end in one)) for one in (above, below))
    return MeasuredValue(above.value / below.value, above.low / below.high, above.high / below.low)


def gradients_busbw_gb_s(findings: Findings) -> float:
    """Return the bus bandwidth of an all-reduce of all gradients (nccl-tests, doc/PERFORMANCE.md).

    It equals formulas.busbw_gb_s except for rounding; published self-tests contain the digits of this form.
    """
    return ring_bytes_per_step(findings.gradient_bytes, findings.num_ranks) / statistics.median(findings.swept_ns)


def compare_large_bucket(known: Findings) -> Figures | NotMeasured:
    """Compare with one bucket for all gradients, which cannot overlap with backward."""
    if known.gradient_bytes <= USUAL_BUCKET_BYTES:
        return "not applicable", "all gradients fit in one bucket in any case"
    by_round = (difference_us(known, name, "no_op_hook") for name in ("one_bucket", "ddp"))
    return {
        "exposed_us": exposed_us(known),
        "exposed_one_bucket_us": exposed_us(known, "one_bucket"),
        "above_limit_us": median_of([one - LARGE_BUCKET_RATIO * ddp for one, ddp in zip(*by_round, strict=False)]),
    }


def compare_sockets(known: Findings, sockets: Findings | None) -> Figures | NotMeasured:
    if known.device != "cuda":
        return "not applicable", "only for NCCL; other backends always use sockets"
    if sockets is None:
        return "undecided", "there is no run over sockets; run the self-test again"
    fast, slow = exposed_us(known), exposed_us(sockets)
    return {
        "exposed_us": fast,
        "exposed_sockets_us": slow,
        "rise": ratio(slow, fast, MIN_EXPOSED_US),
        "busbw_gb_s": gradients_busbw_gb_s(known),
        "busbw_sockets_gb_s": gradients_busbw_gb_s(sockets),
        "busbw_fall": ratio(median_of(sockets.swept_ns), median_of(known.swept_ns)),
    }


def compare_injected(known: Findings) -> Figures:
    injected, alone = median_of(difference_us(known, "extra", "ddp")), median_us(known.extra_ns)
    return {"injected_us": injected, "isolated_us": alone, "ratio": ratio(injected, alone, MIN_EXPOSED_US)}


def compare_repeat(known: Findings, measured: Findings) -> Figures:
    one, other = (median_of(step_us(run, "ddp")) for run in (known, measured))
    return {"step_us": one, "step_again_us": other, "ratio": ratio(other, one)}


def compare_entry_points(known: Findings, measured: Findings) -> Figures:
    """Compare exposed communication. The time that all collectives add is printed beside it."""
    ours, theirs = exposed_us(known), exposed_us(measured)
    return {
        "exposed_us": ours,
        "exposed_measure_us": theirs,
        "difference_us": difference(ours, theirs),
        "limit_us": difference_tolerance_s(max(abs(ours.value), abs(theirs.value)) / 1e6) * 1e6,
        "collectives_us": median_of(difference_us(known, "ddp", "no_collectives")),
    }


def compare_sleeping_rank(known: Findings) -> Figures | NotMeasured:
    """Compare steps before which one rank sleeps with others: the rest must wait, and the link be no slower."""
    if known.profile_problem:
        return "undecided", known.profile_problem
    usual, wait = map(median_us, known.wait_by_step_ns)
    before, after = map(median_of, known.shortest_by_step_ns)
    return {
        "wait_us": wait,
        "usual_wait_us": usual,
        "expected_wait_us": known.sleep_ns * (known.num_ranks - 1) / known.num_ranks / 1e3,
        "shortest_ratio": ratio(after, before),
    }


def compare_bare_loop(known: Findings) -> Figures:
    swept, bare = median_us(known.swept_ns), median_us(known.bare_ns)
    return {
        "sweep_us": swept,
        "bare_loop_us": bare,
        "ratio": ratio(swept, bare),
        "busbw_gb_s": gradients_busbw_gb_s(known),
    }


def compare_marks(batch: str, known: Findings) -> Figures:
    return {"cost": median_of(clock_costs(known.clock_windows[batch], known.unmarked_windows[batch]))}


CHECKS = {
    "two no-op series": Check(
        lambda known: {
            "difference_us": median_of(difference_us(known, "no_op_hook", "no_op_hook_again")),
            "limit_us": NO_OP_TOLERANCE_US,
            "step_us": statistics.median(step_us(known, "no_op_hook")),
        },
        {"difference_us": Limits(-1, 1, of="limit_us")},
        "two interleaved series of the no-op hook differ by {difference_us:.1f} us a step, limit {limit_us:.1f}",
    ),
    "bucket cap of 100 MB": Check(
        compare_large_bucket,
        {"above_limit_us": Limits(0), "exposed_one_bucket_us": Limits(LARGE_BUCKET_RATIO * MIN_EXPOSED_US)},
        "exposed communication goes from {exposed_us.value:.1f} to {exposed_one_bucket_us:.1f} us a step, at least "
        f"{{limits[exposed_one_bucket_us].low:.0f}}; less x{LARGE_BUCKET_RATIO} that is "
        "{above_limit_us:+.1f} us, at least {limits[above_limit_us].low:.0f}",
    ),
    "sockets": Check(
        compare_sockets,
        {"rise": Limits(10.0), "busbw_fall": Limits(2.0)},
        "without P2P and shared memory exposed communication goes from {exposed_us.value:.1f} to "
        "{exposed_sockets_us.value:.1f} us a step: x{rise:.1f}, at least x{limits[rise].low:.0f}; the bus bandwidth "
        "goes from {busbw_gb_s:.1f} to {busbw_sockets_gb_s:.2f} GB/s: 1/{busbw_fall:.1f}, at most "
        "1/{limits[busbw_fall].low:.0f}",
        runs=("known_answers", "sockets"),
    ),
    "injected all-reduce": Check(
        compare_injected,
        {"ratio": Limits(0.8, 1.2)},
        "an extra all-reduce of {extra_mb:.1f} MB adds {injected_us.value:.0f} us to a step and takes "
        "{isolated_us.value:.0f} us alone: x{ratio:.3f}, limit {limits[ratio].low:g} to {limits[ratio].high:g}",
    ),
    "the same point twice": Check(
        compare_repeat,
        {"ratio": Limits(0.99, 1.01)},
        "a step takes {step_us.value:.1f} us, and {step_again_us.value:.1f} us in new processes: {ratio.change:+.2%}, "
        "limit {limits[ratio].tolerance:.0%}",
        runs=("known_answers", "measure"),
    ),
    "two entry points": Check(
        compare_entry_points,
        {"difference_us": Limits(-1, 1, of="limit_us")},
        "exposed communication is {exposed_us.value:.1f} us a step here, {exposed_measure_us.value:.1f} us by "
        "measure: communication; difference {difference_us:+.1f} us, limit {limit_us:.1f}; all collectives add "
        "{collectives_us.value:.0f} us",
        runs=("known_answers", "measure"),
    ),
    "a rank asleep": Check(
        compare_sleeping_rank,
        {"wait_us": Limits(0.8, 1.2, of="expected_wait_us"), "shortest_ratio": Limits(high=1.2)},
        "while one rank sleeps {sleep_ms:.1f} ms the mean rank waits {wait_us:.0f} us, limit {limits[wait_us].low:.0f} "
        "to {limits[wait_us].high:.0f} (without sleep {usual_wait_us.value:.0f}); the shortest all-reduces change by "
        "{shortest_ratio.change:+.2%}, limit +{limits[shortest_ratio].tolerance:.0%}",
    ),
    "sweep against a bare loop": Check(
        compare_bare_loop,
        {"ratio": Limits(0.95, 1.05)},
        "an all-reduce of {gradients_mb:.1f} MB takes {sweep_us.value:.1f} us in the sweep and "
        "{bare_loop_us.value:.1f} us in a bare loop: {ratio.change:+.2%}, limit {limits[ratio].tolerance:.0%}",
    ),
    "parts against the wall clock": Check(
        lambda known: {
            "ratio": MeasuredValue(statistics.median(known.parts_share), min(known.parts_share), max(known.parts_share))
        },
        {"ratio": Limits(0.99, 1.01)},
        "the sum of the parts differs from the wall clock by {ratio.change:+.2%} over all windows, limit "
        "{limits[ratio].tolerance:.0%}",
    ),
    **{
        f"cost of the clock, {batch} batch": Check(
            partial(compare_marks, batch),
            {"cost": Limits(high=tolerance)},
            f"at {{clock_batches[{batch}]}} per GPU the marks cost "
            "{cost:+.2%} of a step, limit {limits[cost].high:.0%}",
            clock_batch=batch,
        )
        for batch, tolerance in CLOCK_TOLERANCE.items()
    },
}


def strategy_tolerance_us(found: Findings) -> float:
    """Return the tolerance of a difference between steps: that of exposed communication, as `measure` stops at."""
    exposed = statistics.median(difference_us(found, found.strategy, "no_op"))
    return max(NO_OP_TOLERANCE_US, difference_tolerance_s(abs(exposed) / 1e6) * 1e6)


def compare_delayed(found: Findings) -> Figures:
    """Compare what delays of the collectives add to a step with their sum."""
    return {"added_us": median_us(found.delay_added_ns), "delay_us": found.delay_ns / 1e3}


STRATEGY_CHECKS = {
    "two no-op series of the strategy": Check(
        lambda found: {
            "difference_us": median_of(difference_us(found, "no_op", "no_op_again")),
            "limit_us": strategy_tolerance_us(found),
            "step_us": statistics.median(step_us(found, "no_op")),
        },
        {"difference_us": Limits(-1, 1, of="limit_us")},
        "two interleaved series of the step without collectives differ by {difference_us:.1f} us, limit {limit_us:.1f}",
        runs=("strategy",),
    ),
    "delayed collectives": Check(
        compare_delayed,
        {"added_us": Limits(0.8, 1.2, of="delay_us")},
        "delays of {delay_us:.0f} us at the collectives add {added_us:.0f} us to a step, limit "
        "{limits[added_us].low:.0f} to {limits[added_us].high:.0f}",
        runs=("strategy",),
    ),
}
"""The checks of `selftest --strategy fsdp` or `zero1`."""
