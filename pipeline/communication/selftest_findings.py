"""Findings of the ranks in a self-test, and the number of windows of each series.

These numbers let the checks (selftest_checks) decide: tests/benchmarks/bench_selftest.py prints how often they do.
"""

from collections.abc import Mapping, Sequence

import msgspec

from pipeline.analysis.stopping_rule import is_half_width_below
from pipeline.experiment.measurement import Measurement, VariantName, WindowTimesNs
from pipeline.experiment.record import Environment
from pipeline.experiment.spec import MIN_WINDOWS_FOR_INTERVAL, Spec

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
SOCKET_ROUND_SHARES = {"ddp": 0.05, "no_op_hook": 0.05}
CLOCK_PAIR_SHARES = {"large": 0.25, "small": 3.0}  # of a window with marks and one without: the most, by batch
ALL_REDUCE_WINDOWS = 31  # of seven, one slow window would decide
BARE_WARM_UP_WINDOWS = 5
SLEEP_PROFILES = 2  # with a rank asleep, and as many without; one has ten steps on GPUs

CLOCK_TOLERANCE = {"large": 0.01, "small": 0.03}  # share of a step


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
    # the same without marks; its name in files is that of earlier versions
    unmarked_windows: dict[str, list[int]] = msgspec.field(default_factory=dict, name="silent_windows")
    parts_share: list[float] = []  # sum of the parts over the wall time, by window
    clock_batches: dict[str, int] = {}  # samples per GPU of "large" and "small"


class SavedSelftest(msgspec.Struct, kw_only=True):
    """The output of `selftest --json`. Its `answers` are not read: they are computed again from the runs.

    `measured_at` is the time of the start, in UTC. Files of earlier versions have neither that nor the environment.
    """

    measured_at: str | None = None
    environment: Environment | None = None
    runs: dict[str, Findings]


def findings_of_point(spec: Spec, measurement: Measurement) -> Findings:
    """Return the windows of a point of `measure: communication` as findings. Raises ValueError if it has none."""
    found = measurement.communication
    if found is None or measurement.gradient_bytes is None:
        raise ValueError("the point did not measure communication.")
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


def is_clock_cost_precise_enough(name: str, marked_ns: Sequence[int], unmarked_ns: Sequence[int]) -> bool:
    """Return True if the cost of the clock's marks is known to within half of its limit."""
    return is_half_width_below(clock_costs(marked_ns, unmarked_ns), CLOCK_TOLERANCE[name] / 2)


def clock_costs(marked_ns: Sequence[int], unmarked_ns: Sequence[int]) -> list[float]:
    """Return the cost of the marks as a share of the loop without them, for each pair of windows."""
    return [marked / unmarked - 1 for marked, unmarked in zip(marked_ns, unmarked_ns, strict=True)]
