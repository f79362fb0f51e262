"""Comparison of two experiments, A and B: the ratio of each shared point's time, and the facts in which they differ.

Times are in seconds: the epoch time of a timed point, the step time of a communication point. A verdict is about new
processes, so it needs six repeats on both sides. Windows of one process say nothing of the next process.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from pipeline.figures import intervals
from pipeline.figures.comparability import Fact, compared_facts, fact_values
from pipeline.figures.exposed_communication import communications_of, step_times_s, whole_step
from pipeline.figures.intervals import Estimate, median_time
from pipeline.figures.pooling import PooledPoint, group_pairs, pool_outcomes
from pipeline.plan.spec import Spec, alike_key
from pipeline.records.outcomes import PointOutcome
from pipeline.records.record import Record

Verdict = Literal[
    "slower",
    "faster",
    "inside the noise",
    "differs within one run",
    "inside the noise of one run",
    "no interval",
    "no data",
]
TimeKey = Literal["epoch_time_s", "step_time_s"]
TIMED_MEASURES = ("epochs", "communication")
SITTING_DEVIATION = 0.00125  # of a time, beyond the spread of runs: the same points on two machines (docs/trust.md)

HARDWARE_FACTS: dict[str, Fact] = {
    "nodes": lambda record: " and ".join(sorted(record.environment.nodes)),
    "CPU": lambda record: record.environment.cpu,
    "CUDA": lambda record: record.environment.cuda,
    "cuDNN": lambda record: record.environment.cudnn,
    "Python": lambda record: record.environment.python,
    "seed": lambda record: str(record.spec.seed),
    "repeat": lambda record: str(record.spec.repeat),
}
"""Facts that only this module compares. It also compares those of `comparability.compared_facts`."""


class TimedSide:
    """One side of a compared point: its median time, and notes on a drift if the interval is over windows."""

    def __init__(self, point: PooledPoint) -> None:
        times_s = times_by_repeat_s(point)
        self.point, self.time = point, median_time(times_s)
        self.notes = intervals.drift_notes(time_key(point.spec), times_s)


class ComparedPoint:
    """A point that both experiments expect. `ratio` is B's median over A's, with its interval if both have one.

    Across num_samples it is that of the time of a sample. `axes` are those that both sides share. `is_between_runs`:
    the interval has the spread between repeats, so that there is a verdict.
    """

    def __init__(self, a: PooledPoint, b: PooledPoint, across: Sequence[str] = ()) -> None:
        self.spec = a.spec
        shared = {axis: value for axis, value in msgspec.structs.asdict(a.spec).items() if axis not in across}
        self.axes = shared | {"gpu": a.gpu or None if a.gpu == b.gpu else None}
        self.a, self.b = TimedSide(a), TimedSide(b)
        self.is_per_sample = "num_samples" in across and time_key(a.spec) == "epoch_time_s"
        time_a, time_b = (
            side.time.over(side.point.spec.num_samples) if self.is_per_sample and side.time else side.time
            for side in (self.a, self.b)
        )
        self.ratio = time_b / time_a if time_a is not None and time_b is not None else None
        self.interval = intervals.time_ratio_interval(time_b, time_a)
        self.verdict = verdict_on(time_a, time_b)
        self.is_between_runs = self.verdict in ("slower", "faster", "inside the noise")

    def is_unchecked(self, limit: float | None = None) -> bool:
        """True if a limit (0.1 is 10 %) cannot be checked: without a result of A or a verdict, or below the noise."""
        if self.ratio is not None:
            return not self.is_between_runs or (limit is not None and self.is_noisier_than(limit))
        if self.is_lost or self.a.point.status == "oom":  # B fails any limit, or none
            return False
        return self.a.point.status != "ok" or (self.a.time is None) != (self.b.time is None)

    def is_noisier_than(self, limit: float) -> bool:
        """True if the interval of the ratio contains 1 + limit, and half of its width is more than the limit."""
        low, high = self.interval[:2] if self.interval else (math.inf, math.inf)
        return low <= 1 + limit < high and (high - low) / 2 > limit

    @property
    def is_lost(self) -> bool:
        """True if the point is ok in A and not in B, for example out of memory."""
        return self.a.point.status == "ok" and self.b.point.status != "ok"

    def is_slower_by(self, share: float) -> bool:
        """True if the verdict is "slower", and the whole interval of the ratio lies above 1 + share."""
        return self.verdict == "slower" and self.interval is not None and self.interval.low > 1 + share


class Comparison(NamedTuple):
    """The points that A and B share, those that only one has, and the facts in which the shared points differ."""

    points: list[ComparedPoint]
    only_in_a: list[Spec]
    only_in_b: list[Spec]
    differences: dict[str, tuple[list[str], list[str]]]  # fact -> its values in A and in B


def compare_outcomes(
    a: Sequence[PointOutcome], b: Sequence[PointOutcome], *, across: tuple[str, ...] = ()
) -> Comparison:
    """Return the comparison of two experiments.

    Two points are shared if all their axes but repeat and seed, and those in `across`, are equal. On each GPU model
    that both sides have they are compared apart; without such a model the first of each side. On another model of A
    they are missing in B. Points without a time to compare are left out (`measure: memory` and `quantize`). Raises
    ValueError if several points of a side are alike but for `across`.
    """
    pooled = [[p for p in pool_outcomes(outcomes) if p.spec.measure in TIMED_MEASURES] for outcomes in (a, b)]
    points_a, points_b = (group_pairs((alike_key(p.spec, across), p) for p in points) for points in pooled)
    for letter, points in (("A", points_a), ("B", points_b)):
        if any(len({p.spec for p in alike}) > 1 for alike in points.values()):
            raise ValueError(f"several configurations of {letter} differ in {' and '.join(across)} alone")
    shared = [
        ComparedPoint(one, other, across)
        for key, of_a in points_a.items()
        if key in points_b
        for one, other in pair_by_gpu(of_a, points_b[key])
    ]
    records_a = [record for point in shared for record in point.a.point.ok_records]
    records_b = [record for key in points_a for p in points_b.get(key, ()) for record in p.ok_records]
    paired = {point.b.point for point in shared}
    return Comparison(
        shared,
        [points[0].spec for key, points in points_a.items() if key not in points_b],
        [*dict.fromkeys(p.spec for alike in points_b.values() for p in alike if p not in paired)],
        differing_axes(shared, across) | differing_facts(records_a, records_b) | unlike_gpu_models(shared),
    )


def differing_axes(points: Sequence[ComparedPoint], across: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the axes that the pairs were not paired by and in which they differ, with the values of A and of B."""
    found = {}
    for axis in across:
        pairs = [(getattr(point.a.point.spec, axis), getattr(point.b.point.spec, axis)) for point in points]
        if any(one != other for one, other in pairs):
            a, b = ([*map(str, dict.fromkeys(values))] for values in zip(*pairs, strict=True))
            found[axis] = (a, b)
    return found


def pair_by_gpu(a: Sequence[PooledPoint], b: Sequence[PooledPoint]) -> list[tuple[PooledPoint, PooledPoint]]:
    """Return each point of A with that of B on its GPU model; without a common model the first with the first of B.

    On another model the point is missing in B.
    """
    on_model = {point.gpu: point for point in b}
    if not any(point.gpu in on_model for point in a):
        on_model[a[0].gpu] = b[0]
    absent = PointOutcome(a[0].spec, "missing", None, "no record")
    return [(point, on_model.get(point.gpu) or dataclasses.replace(point, outcomes=[absent])) for point in a]


def is_failing(points: Iterable[ComparedPoint], fail_above: float | None, allow_unchecked: bool = False) -> bool:
    """True if a point is slower by more than `fail_above` (0.1 is 10 %), is lost, or is unchecked and must not be.

    False if `fail_above` is None.
    """
    return fail_above is not None and any(
        point.is_lost or point.is_slower_by(fail_above) or (point.is_unchecked(fail_above) and not allow_unchecked)
        for point in points
    )


def verdict_on(a: Estimate | None, b: Estimate | None) -> Verdict:
    """Return the verdict on B's time against A's.

    The rule is that the interval of the ratio excludes 1: of six repeats a side, all of one side are slower than all of
    the other. By chance alone equal sides do so in 0.22 % of cases, and with 6 to 100 repeats in at most 0.9 %
    (docs/trust.md).
    """
    if a is None or b is None:
        return "no data"
    interval = intervals.time_ratio_interval(b, a)
    if interval is None:
        return "no interval"
    if not a.basis == b.basis == "repeats":
        return "inside the noise of one run" if interval.contains(1) else "differs within one run"
    if interval.contains(1):
        return "inside the noise"
    return "slower" if interval.low > 1 else "faster"


def time_key(spec: Spec) -> TimeKey:
    """Return the column of the time that is compared."""
    return "step_time_s" if spec.measure == "communication" else "epoch_time_s"


def times_by_repeat_s(point: PooledPoint) -> list[list[float]]:
    """Return a list of times for each repeat with times: one per timed epoch, or one step time per window."""
    if time_key(point.spec) == "epoch_time_s":
        return point.epoch_times_s
    found = communications_of(point.ok_records)
    return [times_s for part in found if (times_s := step_times_s(part, whole_step(found)))]


def differing_facts(a: Sequence[Record], b: Sequence[Record]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the facts in which the records differ, each with its values in A and in B.

    A fact that one side does not state is no difference.
    """
    found = {}
    for name, fact in {**HARDWARE_FACTS, **compared_facts([*a, *b])}.items():
        values_a, values_b = fact_values(fact, a), fact_values(fact, b)
        if values_a and values_b and values_a != values_b:
            found[name] = (values_a, values_b)
    return found


def unlike_gpu_models(points: Iterable[ComparedPoint]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the GPU models of the first point whose sides ran on different ones, as a fact with its values."""
    models = ((point.a.point.gpu, point.b.point.gpu) for point in points)
    return next(({"GPU": ([a], [b])} for a, b in models if a and b and a != b), {})
