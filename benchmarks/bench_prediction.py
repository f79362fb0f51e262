"""Errors of three predictions of the step on more GPUs, over all published pairs of points.

    python benchmarks/bench_prediction.py

A pair is two communication points on one GPU model that differ in the number of GPUs, and may differ in the number of
rounds, in one experiment or in two. The step on more GPUs is predicted from the one on fewer:
none hidden  the measured step and all that the ring model adds to the all-reduces
no change    the measured step
scaled       the measured step, its exposed communication multiplied by the modelled ratio of the all-reduces
Beside them stand exposed communication and the step without all-reduces (no-op hook), measured on both. A pair is no
test of a model of communication if its steps without all-reduces differ by more than the predictions do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tabulate

from pipeline.figures.exposed_communication import communications_of, exposed_time
from pipeline.figures.pooling import pool_outcomes
from pipeline.figures.ring_model import LinkFit, all_reduces_time_s, predict_step_s
from pipeline.plan.point_label import describe_point
from pipeline.plan.spec import PREDICTION_MAY_DIFFER, alike_key
from pipeline.records.folder import find_experiments
from pipeline.records.outcomes import collect_outcomes
from pipeline.report.link import sweep_rows
from pipeline.report.prediction import PredictionBase, fit_buckets, prediction_base

PUBLISHED = Path(__file__).resolve().parents[1] / "published"
NAMED_AXES = ("batch_size_per_gpu", "precision", "execution", "broadcast_buffers", "sync_batchnorm")
HEADERS = ("from", "to", "point", "none hidden", "no change", "scaled", "exposed [us]", "no-op hook [us]")


class MeasuredPoint(NamedTuple):
    """A published communication point on GPUs, its experiment, and the link that was fitted to its sweep."""

    experiment: str
    base: PredictionBase
    fit: LinkFit | None

    @property
    def key(self) -> tuple[object, ...]:
        """A key of what two points of a pair share."""
        return (
            alike_key(self.base.point.spec, (*PREDICTION_MAY_DIFFER, "windows")),
            self.base.point.gpu,
        )

    @property
    def exposed_s(self) -> float:
        """Exposed communication of a step."""
        exposed, _ = exposed_time(communications_of(self.base.point.ok_records))
        assert exposed is not None
        return float(exposed)


class PairErrors(NamedTuple):
    """The errors of the three predictions for one pair: predicted over measured step, minus 1."""

    few: MeasuredPoint
    many: MeasuredPoint
    none_hidden: float
    no_change: float
    scaled: float


def measured_points() -> list[MeasuredPoint]:
    """Return all published communication points on GPUs from which a step can be predicted."""
    found = []
    for name, experiment in find_experiments(PUBLISHED).items():
        pooled = pool_outcomes(collect_outcomes(experiment).outcomes)
        points = [point for point in pooled if point.spec.measure == "communication" and point.spec.device == "cuda"]
        sweeps = sweep_rows(points)
        bases = filter(None, map(prediction_base, points))
        found += [MeasuredPoint(name, base, fit_buckets(base, sweeps)) for base in bases]
    return found


def published_pairs() -> Iterator[PairErrors]:
    """Yield the errors of every pair, in the order of the experiments."""
    points = measured_points()
    for few in points:
        for many in points:
            is_larger = many.base.measured.num_gpus > few.base.measured.num_gpus
            if is_larger and few.key == many.key and few.fit:
                yield pair_errors(few, many, few.fit)


def pair_errors(few: MeasuredPoint, many: MeasuredPoint, fit: LinkFit) -> PairErrors:
    """Return the errors of the predictions from few GPUs to many."""
    measured, num_gpus = few.base.measured, many.base.measured.num_gpus
    ratio = all_reduces_time_s(measured, fit.link, num_gpus) / all_reduces_time_s(measured, fit.link, measured.num_gpus)
    predicted_s = (
        predict_step_s(measured, fit.link, num_gpus),
        measured.step_s,
        measured.step_s + (ratio - 1) * few.exposed_s,
    )
    return PairErrors(few, many, *(step_s / many.base.measured.step_s - 1 for step_s in predicted_s))


def pair_row(pair: PairErrors) -> list[Any]:
    """Return the row of one pair."""
    few, many = pair.few, pair.many
    return [
        *(f"{point.experiment}, {point.base.measured.num_gpus}" for point in (few, many)),
        describe_point(msgspec.structs.asdict(few.base.point.spec), NAMED_AXES),
        *(f"{100 * error:+.1f} %" for error in (pair.none_hidden, pair.no_change, pair.scaled)),
        f"{1e6 * few.exposed_s:.0f} to {1e6 * many.exposed_s:.0f}",
        f"{1e6 * few.base.measured.no_op_step_s:,.0f} to {1e6 * many.base.measured.no_op_step_s:,.0f}",
    ]


def main() -> None:
    """Print the errors."""
    print(
        tabulate.tabulate(map(pair_row, published_pairs()), headers=HEADERS, tablefmt="github", disable_numparse=True)
    )


if __name__ == "__main__":
    main()
