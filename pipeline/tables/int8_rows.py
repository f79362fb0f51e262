"""The rows of int8: test accuracy in every stage and with every scale, and the histograms that scales come from."""

import statistics
from collections.abc import Callable, Sequence

from pipeline.analysis.formulas import median_of_known
from pipeline.analysis.intervals import estimate, median_interval, min_values
from pipeline.analysis.notes import make_note, text_note
from pipeline.analysis.pooling import PooledPoint
from pipeline.experiment.measurement import Histogram, Quantization, StageResult
from pipeline.tables.definitions import INT8, INT8_HISTOGRAMS
from pipeline.tables.row import Row, make_row

NUM_SIGMAS = 3

StageFigure = Callable[[Quantization, StageResult], float | None]


def int8_rows(point: PooledPoint) -> list[Row]:
    """Return a row for fp32 and for every stage and scale, pooled over seeds; one row for a point without a result."""
    found = quantizations_of(point)
    if not found:
        return [make_row(INT8, point)]
    keys = dict.fromkeys(stage_key(result) for quantization in found for result in quantization.results)
    return [int8_row(point, found, key) for key in keys]


def quantizations_of(point: PooledPoint) -> list[Quantization]:
    """Return the result of each seed that has one, in the order of seeds."""
    records = sorted(point.ok_records, key=lambda record: (record.spec.seed, record.spec.repeat))
    return [found for record in records if record.measurement and (found := record.measurement.quantization)]


def stage_key(result: StageResult) -> tuple[str | None, ...]:
    """Return the stage and scale of a result, which every seed has once."""
    return result.stage, result.scale_rule, result.granularity


def int8_row(point: PooledPoint, found: Sequence[Quantization], key: tuple[str | None, ...]) -> Row:
    """Return the row of one stage and scale: medians over seeds, with intervals over seeds if there are enough.

    The change is paired: each seed against its own network in fp32.
    """
    results = [
        (quantization, result)
        for quantization in found
        for result in quantization.results
        if stage_key(result) == key and result.num_correct is not None
    ]

    def values_of(figure: StageFigure) -> list[float]:
        return [value for pair in results if (value := figure(*pair)) is not None]

    accuracies, changes = values_of(accuracy_of), values_of(accuracy_change)
    notes = [
        text_note(problem)
        for problem in dict.fromkeys(
            result.problem for quantization in found for result in quantization.results if stage_key(result) == key
        )
        if problem
    ]
    if results and len(accuracies) < min_values():
        notes.append(make_note("too_few_seeds", needed=min_values(), found=len(results)))
    stage, scale_rule, granularity = key
    return make_row(
        INT8,
        point,
        notes,
        n=len(results),
        stage=stage,
        scale_rule=scale_rule,
        granularity=granularity,
        test_accuracy=estimate(median_of_known(accuracies), median_interval(accuracies)),
        accuracy_change=estimate(median_of_known(changes), median_interval(changes)),
        mean_accuracy_change=statistics.fmean(changes) if changes else None,
        agreement=median_of_known(values_of(agreement)),
        tie_share=median_of_known(values_of(tie_share)),
        network_bytes=results[0][1].num_bytes if results else None,
    )


def accuracy_of(quantization: Quantization, result: StageResult) -> float | None:
    """Return the share of test images that are classified correctly."""
    return None if result.num_correct is None else result.num_correct / quantization.num_test_samples


def accuracy_change(quantization: Quantization, result: StageResult) -> float | None:
    """Return the accuracy minus that of the same seed's network in fp32; None for fp32 itself."""
    fp32 = next((other for other in quantization.results if other.stage == "fp32"), None)
    if result.stage == "fp32" or fp32 is None or fp32.num_correct is None or result.num_correct is None:
        return None
    return (result.num_correct - fp32.num_correct) / quantization.num_test_samples


def agreement(quantization: Quantization, result: StageResult) -> float | None:
    """Return the share of test images that get the same class as in fp32; None for fp32 itself."""
    if result.stage == "fp32" or result.num_agreeing is None:
        return None
    return result.num_agreeing / quantization.num_test_samples


def tie_share(quantization: Quantization, result: StageResult) -> float | None:
    """Return the share of test images whose highest score several classes have."""
    return None if result.num_ties is None else result.num_ties / quantization.num_test_samples


def int8_histogram_rows(point: PooledPoint) -> list[Row]:
    """Return the histograms of the first seed: those of several seeds have other bins."""
    records = sorted(point.ok_records, key=lambda record: (record.spec.seed, record.spec.repeat))
    for record in records:
        if record.measurement and record.measurement.quantization:
            found = record.measurement.quantization.histograms
            return [histogram_row(point, record.spec.seed, histogram) for histogram in found]
    return []


def histogram_row(point: PooledPoint, seed: int, histogram: Histogram) -> Row:
    """Return the row of one histogram, with the lines at the mean plus and minus three sigma."""
    return make_row(
        INT8_HISTOGRAMS,
        point,
        n=1,
        seed=seed,
        layer=histogram.layer,
        tensor=histogram.tensor,
        low=histogram.low,
        high=histogram.high,
        mean=histogram.mean,
        sigma=histogram.sigma,
        three_sigma_low=histogram.mean - NUM_SIGMAS * histogram.sigma,
        three_sigma_high=histogram.mean + NUM_SIGMAS * histogram.sigma,
        counts=list(histogram.counts),
    )
