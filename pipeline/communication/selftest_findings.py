"""Findings of the ranks in a self-test, and when a series of windows is precise enough to stop.

Timing goes on until the checks (selftest_checks) can decide: their limits that depend on it are here.
"""

import statistics
from collections.abc import Sequence

import msgspec

from pipeline.analysis.stopping_rule import is_difference_precise_enough, is_half_width_below
from pipeline.experiment.measurement import Measurement, WindowTimesNs
from pipeline.experiment.record import Environment
from pipeline.experiment.spec import Spec

REPEAT_TOLERANCE = 0.01
CLOCK_TOLERANCE = {"large": 0.01, "small": 0.03}  # share of a step
TOLERANCE_SHARE = 0.5  # differences are timed until known within this share of their tolerance, so that two agree in it


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
    if found is None:
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


def step_us(findings: Findings, name: str) -> list[float]:
    """Return the slowest rank's step time in each window, in us."""
    return [max(ranks) / findings.steps_per_window / 1e3 for ranks in findings.windows[name]]


def difference_us(findings: Findings, name: str, other: str) -> list[float]:
    """Return the difference of two step times in each round, in us; slow drift cancels out."""
    return [a - b for a, b in zip(step_us(findings, name), step_us(findings, other), strict=True)]


def is_precise_enough(findings: Findings) -> bool:
    """Return True if DDP's step time and all differences from the no-op hook are precise enough to stop."""
    differences = [difference_us(findings, name, "no_op_hook") for name in findings.windows if name != "no_op_hook"]
    differences += [difference_us(findings, "extra", "ddp")] if "extra" in findings.windows else []
    times_us = step_us(findings, "ddp")
    is_repeatable = is_half_width_below(times_us, REPEAT_TOLERANCE / 2 * statistics.median(times_us))
    return is_repeatable and all(
        is_difference_precise_enough([us / 1e6 for us in series], TOLERANCE_SHARE) for series in differences
    )


def is_clock_cost_precise_enough(name: str, marked_ns: Sequence[int], unmarked_ns: Sequence[int]) -> bool:
    """Return True if the cost of the clock's marks is known to within half of its limit."""
    return is_half_width_below(clock_costs(marked_ns, unmarked_ns), CLOCK_TOLERANCE[name] / 2)


def clock_costs(marked_ns: Sequence[int], unmarked_ns: Sequence[int]) -> list[float]:
    """Return the cost of the marks as a share of the loop without them, for each pair of windows."""
    return [marked / unmarked - 1 for marked, unmarked in zip(marked_ns, unmarked_ns, strict=True)]
