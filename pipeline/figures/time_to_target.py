"""Time to a target: the epochs, updates and training seconds after which test accuracy or another merit reaches it.

A large batch is worth its price if it gets there sooner. Against a baseline on one GPU, N GPUs are sooner by
N x throughput efficiency x statistical efficiency: the samples per second and GPU over the baseline's, times the
baseline's epochs over the epochs needed.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.figures import formulas, intervals
from pipeline.figures.comparability import gpu_model
from pipeline.figures.intervals import Estimate
from pipeline.figures.pooling import PooledPoint
from pipeline.records.record import TEST_ACCURACY, Better, Record

TARGET_MARGIN = 0.02  # the target is this much worse than the baseline's final accuracy; a share of other merits
NOT_REACHED = math.inf  # sorts after every value, so that a median over seeds stays one of ranks


class Merit(NamedTuple):
    """A figure by which trainings are compared: its name, and the direction in which it gets better."""

    name: str = TEST_ACCURACY
    better: Better = "higher"

    @property
    def is_accuracy(self) -> bool:
        return self.name == TEST_ACCURACY

    def reaches(self, value: float, target: float) -> bool:
        """True if a value is the target or better."""
        return value >= target if self.better == "higher" else value <= target

    def target_beside(self, final: float) -> float | None:
        """Return the default target of a baseline's final value; None for an accuracy if nothing above 0 is left."""
        margin = TARGET_MARGIN if self.is_accuracy else TARGET_MARGIN * abs(final)
        target = final - margin if self.better == "higher" else final + margin
        return None if self.is_accuracy and target <= 0 else target


class CostToTarget(NamedTuple):
    """The cost of training up to the end of an epoch; every field is inf if the target was not reached."""

    epochs: float
    updates: float
    time_s: float


def evaluated_records(point: PooledPoint) -> list[Record]:
    """Return the point's ok records that were measured here and were tested after every epoch."""
    return [
        record
        for record in point.ok_records
        if record.measured and all(epoch.merit_or_accuracy is not None for epoch in record.epochs)
    ]


def merit_of(study: Sequence[PooledPoint]) -> Merit:
    """Return what a study is compared by, as its first record states it, also one whose figures are not finite."""
    found = (record.measurement for point in study for record in point.ok_records)
    return next((Merit(part.merit, part.better) for part in found if part and part.merit), Merit())


def timed_records(point: PooledPoint, gpu: str) -> list[Record]:
    """Return the evaluated records on this GPU model, and those that state none: their times compare."""
    return [record for record in evaluated_records(point) if gpu_model(record) in ("", gpu)]


def training_times_s(record: Record) -> list[float]:
    """Return the training seconds from the start to the end of each epoch: the slowest rank's, without evaluation."""
    return [total_ns / 1e9 for total_ns in itertools.accumulate(epoch.time_ns for epoch in record.epochs)]


def states_every_time(record: Record) -> bool:
    """True if the record has the time of every epoch from the first on; a file of timings may state some alone."""
    return all(epoch.epoch == number and epoch.slowest_rank for number, epoch in enumerate(record.epochs, 1))


def final_merit(record: Record) -> float:
    """Return the test accuracy, or another merit, after the last epoch of an evaluated record."""
    return record.epochs[-1].merit_or_accuracy or 0.0


def cost_to_target(record: Record, target: float, merit: Merit) -> CostToTarget:
    """Return what training cost up to the first epoch whose merit is the target or better."""
    for epoch, time_s in zip(record.epochs, training_times_s(record), strict=True):
        if epoch.merit_or_accuracy is not None and merit.reaches(epoch.merit_or_accuracy, target):
            assert epoch.num_updates is not None, "it was measured here"
            return CostToTarget(epoch.epoch, epoch.num_updates, time_s)
    return CostToTarget(NOT_REACHED, NOT_REACHED, NOT_REACHED)


def spread(values: Sequence[float]) -> Estimate | None:
    """Return the median over seeds with its interval (intervals.median_interval), of fewer than six with the extremes.

    None if the median is not reached. An end that is not reached is None, and so are those of a single seed.
    """
    if not values or not math.isfinite(median := statistics.median(values)):
        return None
    ordered, n = sorted(values), len(values)
    rank = intervals.innermost_rank(n, intervals.CONFIDENCE)
    ends = (end if math.isfinite(end) and n > 1 else None for end in (ordered[rank - 1], ordered[-rank]))
    return Estimate(median, *ends)


def study_baseline(study: Sequence[PooledPoint]) -> PooledPoint | None:
    """Return the point of the smallest global batch without remedies; None if no point is without.

    Of several it is one that trains as long as a larger batch does, on the fewest GPUs, with the lowest learning rate.
    """
    plain = [point for point in study if not point.spec.remedies]
    smallest = min((point.spec.global_batch_size for point in plain), default=0)
    lengths = {point.spec.epochs for point in plain if point.spec.global_batch_size > smallest}

    def order(point: PooledPoint) -> tuple[float, ...]:
        spec = point.spec
        return spec.global_batch_size, spec.epochs not in lengths, spec.num_gpus, spec.epochs, spec.learning_rate

    return min(plain, key=order, default=None)


def default_target(baseline: PooledPoint | None, merit: Merit) -> float | None:
    """Return the target beside the baseline's median final merit; None without a result, or if a run diverged."""
    records = evaluated_records(baseline) if baseline else []
    final = formulas.median_of_known(map(final_merit, records))
    return None if final is None or any(map(is_diverged, records)) else merit.target_beside(final)


def is_diverged(record: Record) -> bool:
    """True if the loss of an epoch is not finite."""
    return any(epoch.loss is None for epoch in record.epochs)


def throughput_per_gpu(point: PooledPoint, gpu: str) -> float | None:
    """Return the samples a second and GPU over whole trainings on this model, the median over seeds."""
    return formulas.median_of_known(
        record.spec.num_samples * len(times_s) / times_s[-1] / record.spec.num_gpus
        for record in timed_records(point, gpu)
        if (times_s := training_times_s(record))
    )


def loss_ranges(point: PooledPoint) -> list[tuple[float, float]]:
    """Return the smallest and the largest training loss over the seeds, by epoch; [] with fewer than two seeds.

    A loss that is not finite counts as inf.
    """
    records = evaluated_records(point)
    if len(records) < 2:
        return []
    curves = [[epoch.loss for epoch in record.epochs] for record in records]
    by_epoch = ([math.inf if loss is None else loss for loss in losses] for losses in zip(*curves, strict=True))
    return [(min(losses), max(losses)) for losses in by_epoch]
