"""Scaling: what a point gains over one GPU, with the batch of each GPU fixed (weak) or that of all (strong)."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from pipeline.analysis import comparability, formulas, intervals
from pipeline.analysis.intervals import Interval
from pipeline.analysis.notes import Note, make_note
from pipeline.analysis.pooling import PooledPoint
from pipeline.experiment.axis_groups import BASELINE_MAY_DIFFER, alike_key
from pipeline.experiment.spec import Spec

Scaling = Literal["weak", "strong"]


FIXED_AXIS: dict[Scaling, str] = {"weak": "batch_size_per_gpu", "strong": "global_batch_size"}
"""What stays fixed as N grows: a property of the point."""


BaselineIndex = dict[tuple[Any, ...], list[PooledPoint]]


class Baseline(NamedTuple):
    """The point on one GPU that a point is compared with and its time; why there is none, or how they are unlike."""

    point: PooledPoint | None
    time_s: float | None
    notes: tuple[Note, ...] = ()

    @property
    def strategy(self) -> str | None:
        """Whose time it is."""
        return self.point.spec.strategy if self.point else None

    @property
    def batch_size_per_gpu(self) -> int | None:
        """The batch size of the one GPU."""
        return self.point.spec.batch_size_per_gpu if self.point else None


def baseline_key(spec: Spec, scaling: Scaling) -> tuple[Any, ...]:
    """What a point and its baseline have in common: the invariant, and every axis that they may not differ in."""
    return getattr(spec, FIXED_AXIS[scaling]), *alike_key(spec, (*BASELINE_MAY_DIFFER, "batch_size_per_gpu"))


def index_baselines(points: Iterable[PooledPoint], scaling: Scaling) -> BaselineIndex:
    """The N=1 points by what they share with the points they are a baseline of."""
    index: BaselineIndex = {}
    for point in points:
        if point.spec.num_gpus == 1:
            index.setdefault(baseline_key(point.spec, scaling), []).append(point)
    return index


def check_invariant(spec: Spec, baseline: Spec, scaling: Scaling) -> None:
    """Raise ValueError where a baseline differs in what the scaling holds fixed, or is not on one GPU."""
    invariant = FIXED_AXIS[scaling]
    fixed, found = getattr(spec, invariant), getattr(baseline, invariant)
    if fixed != found:
        raise ValueError(f"{scaling} scaling holds {invariant} fixed: {fixed} against a baseline of {found}.")
    if baseline.num_gpus != 1:
        raise ValueError(f"a baseline runs on 1 GPU, got {baseline.num_gpus}.")


def find_baseline(point: PooledPoint, index: BaselineIndex, scaling: Scaling = "weak") -> Baseline:
    """The N=1 point of the same strategy, else of `single`; one that has a time before one that has none.

    Of several the one with as many epochs and windows.
    """
    order = {strategy: place for place, strategy in enumerate(dict.fromkeys((point.spec.strategy, "single")))}
    candidates = [other for other in index.get(baseline_key(point.spec, scaling), []) if other.spec.strategy in order]
    if not candidates:
        return Baseline(None, None, (make_note("no_baseline"),))

    def preference(other: PooledPoint) -> tuple[bool, int, bool, bool]:
        spec = other.spec
        untimed = other.median_epoch_time_s is None
        return untimed, order[spec.strategy], spec.epochs != point.spec.epochs, spec.windows != point.spec.windows

    best = min(candidates, key=preference)
    check_invariant(point.spec, best.spec, scaling)
    time_s = best.median_epoch_time_s
    if time_s is None:
        note = make_note("baseline_untimed", strategy=best.spec.strategy, status=why_untimed(best))
        return Baseline(best, None, (note,))
    return Baseline(
        best,
        time_s,
        tuple(
            comparability.environment_difference_notes(
                "baseline", best.records_by_environment, point.records_by_environment
            )
        ),
    )


def why_untimed(point: PooledPoint) -> str:
    """A baseline's state in a word."""
    return "not timed" if point.status == "ok" else point.status


def weak_pairs(points: Sequence[PooledPoint]) -> list[tuple[PooledPoint, Baseline]]:
    """Every point and the one-GPU point of the same batch size per GPU, in the order of the grid."""
    index = index_baselines(points, "weak")
    return [(point, find_baseline(point, index, "weak")) for point in points]


def strong_pairs(points: Sequence[PooledPoint]) -> list[tuple[PooledPoint, Baseline]]:
    """Every point for which one GPU ran the same global batch, and those one-GPU points, in the order of the grid."""
    whole = [point for point in points if point.spec.is_whole_epoch]
    index = index_baselines(whole, "strong")
    pairs = [(point, find_baseline(point, index, "strong")) for point in whole]
    serving = {baseline.point.spec for point, baseline in pairs if baseline.point and point.spec.num_gpus > 1}
    shown = [(point, baseline) for point, baseline in pairs if point.spec.num_gpus > 1 or point.spec in serving]
    return [(point, baseline) for point, baseline in shown if baseline.point]


def scaling_figures(point: PooledPoint, baseline: Baseline, scaling: Scaling) -> dict[str, Any]:
    """Speed-up and efficiency with their intervals, and under strong scaling the serial fraction; `notes` besides."""
    time_s, num_gpus = point.median_epoch_time_s, point.spec.num_gpus
    speedup = formulas.speedup(baseline.time_s, time_s) if time_s is not None and baseline.time_s is not None else None
    interval = speedup_interval(point, baseline)
    serial_fraction = None
    if scaling == "strong" and speedup is not None and num_gpus > 1:
        serial_fraction = formulas.serial_fraction_karp_flatt(speedup, num_gpus)
    return {
        "scaling": scaling,
        "speedup": speedup,
        "speedup_low": interval.low if interval else None,
        "speedup_high": interval.high if interval else None,
        "parallel_efficiency": None if speedup is None else formulas.parallel_efficiency(speedup, num_gpus),
        "parallel_efficiency_low": formulas.parallel_efficiency(interval.low, num_gpus) if interval else None,
        "parallel_efficiency_high": formulas.parallel_efficiency(interval.high, num_gpus) if interval else None,
        "serial_fraction_karp_flatt": serial_fraction,
        "baseline": baseline.strategy,
        "baseline_batch_size_per_gpu": baseline.batch_size_per_gpu,
        "notes": scaling_notes(baseline, interval, speedup, num_gpus) if num_gpus > 1 else [],
    }


def speedup_interval(point: PooledPoint, baseline: Baseline) -> Interval | None:
    """T(1)/T(N) by the intervals of both; None where either has none, and on one GPU, which is its own baseline."""
    if baseline.point is None or point.spec.num_gpus == 1:
        return None
    above, below = baseline.point.epoch_time_interval.interval, point.epoch_time_interval.interval
    return intervals.ratio_interval(above, below) if above and below else None


def scaling_notes(baseline: Baseline, interval: Interval | None, speedup: float | None, num_gpus: int) -> list[Note]:
    """What the reader of a point on several GPUs must know."""
    notes = [*baseline.notes]
    if interval and baseline.point:
        notes += [make_note("of_baseline", note=note) for note in baseline.point.epoch_time_drift_notes]
    if interval and interval.contains(1):
        notes.append(make_note("no_difference"))
    if speedup is not None and speedup > num_gpus:
        notes.append(make_note("superlinear"))
    return notes
