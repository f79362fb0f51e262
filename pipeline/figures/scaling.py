"""Speed-up over one GPU or one node: weak scaling (fixed batch size per GPU) and strong scaling (fixed global one)."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pipeline.figures import formulas, intervals
from pipeline.figures.epoch_figures import clock_notes, time_notes
from pipeline.figures.intervals import Estimate, ends_of, estimate
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import (
    OTHER_SHARED_NODE,
    PooledPoint,
    group_pairs,
)
from pipeline.plan.spec import BASELINE_MAY_DIFFER, alike_key
from pipeline.plan.strategies import STRATEGIES

NO_BASELINE = NoteKind("no_baseline", "no baseline: the experiment has no configuration on 1 $GPU with these axes")
BASELINE_UNTIMED = NoteKind("baseline_untimed", "no baseline: {strategy} on 1 $GPU is {status}")
NO_DIFFERENCE = NoteKind(
    "no_difference", "no difference from the baseline: 1 lies inside the interval", badge="no difference shown"
)
BASELINE_RUNS = NoteKind(
    "baseline_runs",
    "baseline: n = {n}, so the interval of the speed-up is not between runs alone",
    badge="baseline of {n}",
    word="n of the baseline",
)
SUPERLINEAR = NoteKind(
    "superlinear",
    "efficiency above 1: noise, a slow baseline, or a difference other than the number of $GPUs",
    forbids=("speedup",),
)
SUPERLINEAR_IS_NOISE = NoteKind(
    "superlinear_is_noise",
    "the speed-up is above {factor}, which lies inside its interval: the noise is larger than the gap",
)
SERIAL_FRACTION_ABOVE_1 = NoteKind(
    "serial_fraction_above_1",
    "Karp-Flatt above 1: slower than the baseline, so the loss is overhead, not a serial part",
)

Scaling = Literal["weak", "strong"]
BaselineIndex = dict[tuple[Any, ...], list[PooledPoint]]

# the property of a point that stays fixed as N grows
FIXED_AXIS: dict[Scaling, str] = {"weak": "batch_size_per_gpu", "strong": "global_batch_size"}


class Baseline(NamedTuple):
    """The point that another is compared with, and its time. Notes say why it is missing, or how it differs.

    It is on one GPU, or on one node.
    """

    point: PooledPoint | None
    time_s: Estimate | None
    notes: tuple[Note, ...] = ()


def baseline_key(point: PooledPoint, scaling: Scaling) -> tuple[Any, ...]:
    """Return what a point and its baseline share: GPU model, fixed axis, and all axes not in BASELINE_MAY_DIFFER."""
    alike = alike_key(point.spec, (*BASELINE_MAY_DIFFER, "batch_size_per_gpu"))
    return point.gpu, getattr(point.spec, FIXED_AXIS[scaling]), *alike


def one_gpu_baseline(point: PooledPoint, index: BaselineIndex, scaling: Scaling) -> Baseline:
    """Return the baseline of a point: of the same strategy or `single`, on one GPU.

    Among several it prefers, in this order: one with a time, the same strategy, as many epochs, as many windows.
    """
    own = point.spec.strategy
    alike = index.get(baseline_key(point, scaling), [])
    candidates = [
        other for other in alike if other.spec.strategy == own or not STRATEGIES[other.spec.strategy].is_parallel
    ]
    if not candidates:
        return Baseline(None, None, (make_note(NO_BASELINE),))

    def preference(other: PooledPoint) -> tuple[bool, int, bool, bool]:
        spec = other.spec
        return (
            other.epoch_time is None,
            spec.strategy != own,
            spec.epochs != point.spec.epochs,
            spec.windows != point.spec.windows,
        )

    best = min(candidates, key=preference)
    if best.epoch_time is None:
        status = "not timed" if best.status == "ok" else best.status
        return Baseline(best, None, (make_note(BASELINE_UNTIMED, strategy=best.spec.strategy, status=status),))
    return as_baseline(point, best)


def as_baseline(point: PooledPoint, other: PooledPoint, name: str = "baseline") -> Baseline:
    """Return another point as the baseline of this one. Notes say how it differs, and all that weakens its time."""
    differences = [note for note in point.difference_notes(name, other) if note.kind != OTHER_SHARED_NODE]
    weak = [note for note in (*other.notes, *time_notes(other), *clock_notes(other)) if note.kind.badge]
    weakened = (note._replace(is_of_baseline=True) for note in weak if note not in point.notes)
    return Baseline(other, other.epoch_time, (*differences, *weakened))


def pair_with_baselines(points: Sequence[PooledPoint], scaling: Scaling) -> list[tuple[PooledPoint, Baseline]]:
    """Return every point with its baseline, in the order of the grid."""
    on_one_gpu = (point for point in points if point.spec.num_gpus == 1)
    index = group_pairs((baseline_key(point, scaling), point) for point in on_one_gpu)
    return [(point, one_gpu_baseline(point, index, scaling)) for point in points]


def strong_pairs(points: Sequence[PooledPoint]) -> list[tuple[PooledPoint, Baseline]]:
    """Return the points on several GPUs that have a strong scaling baseline, and these baselines, in grid order."""
    pairs = pair_with_baselines([point for point in points if point.spec.is_whole_epoch], "strong")
    serving = {baseline.point.spec for point, baseline in pairs if baseline.point and point.spec.num_gpus > 1}
    wanted = [pair for pair in pairs if pair[0].spec.num_gpus > 1 or pair[0].spec in serving]
    return [(point, baseline) for point, baseline in wanted if baseline.point]


def scaling_figures(point: PooledPoint, baseline: Baseline, scaling: Scaling) -> dict[str, Any]:
    """Return speed-up and efficiency with their intervals, the serial fraction (strong scaling only) and `notes`.

    They are against a baseline on one GPU, or on another number of them.
    """
    time_s = point.epoch_time
    factor = point.spec.num_gpus // (baseline.point.spec.num_gpus if baseline.point else 1)
    gain = serial_fraction = None
    if time_s is not None and baseline.time_s is not None:
        interval = intervals.time_ratio_interval(baseline.time_s, time_s) if factor > 1 else None
        gain = estimate(baseline.time_s / time_s, interval)
        if scaling == "strong" and gain is not None and factor > 1:
            serial_fraction = formulas.serial_fraction_karp_flatt(gain, factor)
    return {
        "scaling": scaling,
        "speedup": gain,
        "parallel_efficiency": gain and gain.over(factor),
        "serial_fraction_karp_flatt": serial_fraction,
        "baseline": baseline.point.spec.strategy if baseline.point else None,
        "baseline_batch_size_per_gpu": baseline.point.spec.batch_size_per_gpu if baseline.point else None,
        "notes": scaling_notes(point, baseline, gain, factor, serial_fraction) if point.spec.num_gpus > 1 else [],
    }


def scaling_notes(
    point: PooledPoint, baseline: Baseline, gain: Estimate | None, factor: int, serial_fraction: float | None
) -> list[Note]:
    """Return the notes on the speed-up of a point on `factor` times as many GPUs.

    Above this factor it is superlinear if its whole interval is, else the noise is larger than the gap.
    """
    notes = [*baseline.notes]
    low, high = ends_of(gain)
    bases = [time.basis for time in (point.epoch_time, baseline.time_s) if time is not None]
    if baseline.point and bases == ["repeats", "windows"]:
        notes.append(make_note(BASELINE_RUNS, n=len(baseline.point.ok_records)))
    if low is not None and high is not None and low <= 1 <= high:
        notes.append(make_note(NO_DIFFERENCE))
    if gain is not None and gain > factor:
        is_noise = low is not None and low <= factor
        notes.append(make_note(SUPERLINEAR_IS_NOISE, factor=factor) if is_noise else make_note(SUPERLINEAR))
    if serial_fraction is not None and serial_fraction > 1:
        notes.append(make_note(SERIAL_FRACTION_ABOVE_1))
    return notes
