"""Time to a target accuracy: the epochs, updates and training seconds after which the test accuracy reaches it.

A large batch is worth its price if it gets there sooner. Against a baseline on one GPU, N GPUs are sooner by
N x throughput efficiency x statistical efficiency: the samples per second and GPU over the baseline's, times the
baseline's epochs over the epochs needed.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.analysis import formulas, intervals
from pipeline.analysis.comparability import gpu_model
from pipeline.analysis.pooling import PooledPoint
from pipeline.experiment.record import Record

TARGET_MARGIN = 0.02  # below the baseline's final accuracy
NOT_REACHED = math.inf  # sorts after every value, so that a median over seeds stays one of ranks


class Spread(NamedTuple):
    """The median over seeds with its interval, or with minimum and maximum of fewer than six; inf is "not reached"."""

    median: float
    low: float
    high: float


class CostToTarget(NamedTuple):
    """The cost of training up to the end of an epoch; every field is inf if the target was not reached."""

    epochs: float
    updates: float
    time_s: float


def evaluated_records(point: PooledPoint) -> list[Record]:
    """Return the point's ok records that were measured here and have a test accuracy in every epoch."""
    found = [(record, record.measurement.epochs) for record in point.ok_records if record.measurement]
    return [record for record, epochs in found if record.measured and all(e.test_accuracy is not None for e in epochs)]


def timed_records(point: PooledPoint, gpu: str) -> list[Record]:
    """Return the evaluated records on this GPU model, and those that state none: their times compare."""
    return [record for record in evaluated_records(point) if gpu_model(record) in ("", gpu)]


def training_times_s(record: Record) -> list[float]:
    """Return the training seconds from the start to the end of each epoch: the slowest rank's, without evaluation."""
    epochs = record.measurement.epochs if record.measurement else ()
    return [total_ns / 1e9 for total_ns in itertools.accumulate(epoch.time_ns for epoch in epochs)]


def states_every_time(record: Record) -> bool:
    """True if the record has the time of every epoch from the first on; a file of timings may state some alone."""
    epochs = record.measurement.epochs if record.measurement else ()
    return all(epoch.epoch == number and epoch.slowest_rank for number, epoch in enumerate(epochs, 1))


def final_accuracy(record: Record) -> float:
    """Return the test accuracy after the last epoch of an evaluated record."""
    return (record.measurement.epochs[-1].test_accuracy if record.measurement else None) or 0.0


def cost_to_target(record: Record, target_accuracy: float) -> CostToTarget:
    """Return what training cost up to the first epoch whose test accuracy is the target or more."""
    epochs = record.measurement.epochs if record.measurement else ()
    for epoch, time_s in zip(epochs, training_times_s(record), strict=True):
        if (epoch.test_accuracy or 0.0) >= target_accuracy:
            assert epoch.num_updates is not None, "it was measured here"
            return CostToTarget(epoch.epoch, epoch.num_updates, time_s)
    return CostToTarget(NOT_REACHED, NOT_REACHED, NOT_REACHED)


def spread(values: Sequence[float]) -> Spread | None:
    """Return the median with its interval (intervals.median_interval, which six values have), else with the extremes.

    None without values.
    """
    if not values:
        return None
    ordered, n = sorted(values), len(values)
    rank = intervals.innermost_rank(n, intervals.CONFIDENCE) if n >= intervals.min_values() else 1
    return Spread(statistics.median(ordered), ordered[rank - 1], ordered[-rank])


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


def target_below(baseline: PooledPoint | None) -> float | None:
    """Return the default target: TARGET_MARGIN below the baseline's median final accuracy.

    None without a result, if a run of the baseline diverged, or if nothing above 0 is left.
    """
    records = evaluated_records(baseline) if baseline else []
    final = formulas.median_of_known(map(final_accuracy, records))
    if final is None or final <= TARGET_MARGIN or any(map(is_diverged, records)):
        return None
    return final - TARGET_MARGIN


def is_diverged(record: Record) -> bool:
    """True if the loss of an epoch is not finite."""
    return any(epoch.loss is None for epoch in (record.measurement.epochs if record.measurement else ()))


def throughput_per_gpu(point: PooledPoint, gpu: str) -> float | None:
    """Return the samples a second and GPU over whole trainings on this model, the median over seeds."""
    rates = [
        record.spec.num_samples * len(times_s) / times_s[-1] / record.spec.num_gpus
        for record in timed_records(point, gpu)
        if (times_s := training_times_s(record))
    ]
    return formulas.median_of_known(rates)


def loss_ranges(point: PooledPoint) -> list[tuple[float, float]]:
    """Return the smallest and the largest training loss over the seeds, by epoch; [] with fewer than two seeds.

    A loss that is not finite counts as inf.
    """
    records = evaluated_records(point)
    if len(records) < 2:
        return []
    curves = [[epoch.loss for epoch in record.measurement.epochs] for record in records if record.measurement]
    by_epoch = ([math.inf if loss is None else loss for loss in losses] for losses in zip(*curves, strict=True))
    return [(min(losses), max(losses)) for losses in by_epoch]
