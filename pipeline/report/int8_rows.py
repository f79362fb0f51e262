"""The rows of int8: test accuracy in every stage and with every scale, and the histograms that scales come from."""

import statistics
from collections.abc import Sequence

import msgspec

from pipeline.experiment.measurement import Quantization, StageResult
from pipeline.figures.intervals import estimate, median_interval, min_values
from pipeline.figures.notes import NoteKind, make_note, text_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.report.definitions import INT8, INT8_HISTOGRAMS
from pipeline.report.table import Row, make_row

TOO_FEW_SEEDS = NoteKind("too_few_seeds", "an interval needs {needed} seeds, got {found}")

NUM_SIGMAS = 3

TestedNetwork = tuple[Quantization, StageResult]  # one network of a seed, and the test of it


def int8_rows(point: PooledPoint) -> list[Row]:
    """Return a row for fp32 and for every stage and scale, pooled over seeds; one row for a point without a result."""
    pairs = [(quantization, result) for _, quantization in quantizations_of(point) for result in quantization.results]
    by_stage = group_pairs(((pair[1].stage, pair[1].scale_rule, pair[1].granularity), pair) for pair in pairs).values()
    return [int8_row(point, results) for results in by_stage] or [make_row(INT8, point)]


def quantizations_of(point: PooledPoint) -> list[tuple[int, Quantization]]:
    """Return the seed and the result of each run that has one, in the order of seeds."""
    records = sorted(point.ok_records, key=lambda record: (record.spec.seed, record.spec.repeat))
    measured = [(record.spec.seed, record.measurement) for record in records if record.measurement]
    return [(seed, found.quantization) for seed, found in measured if found.quantization]


def int8_row(point: PooledPoint, found: Sequence[TestedNetwork]) -> Row:
    """Return the row of one stage and scale: medians over seeds, with intervals over seeds if there are enough."""
    tested = [pair for pair in found if pair[1].num_correct is not None]
    shares = group_pairs(share for pair in tested for share in result_shares(*pair).items())
    _, result = found[0]
    problems = dict.fromkeys(other.problem for _, other in found)
    notes = [text_note(problem) for problem in problems if problem]
    if 0 < len(tested) < min_values():
        notes.append(make_note(TOO_FEW_SEEDS, needed=min_values(), found=len(tested)))
    changes = shares.get("accuracy_change")
    return make_row(
        INT8,
        point,
        notes,
        n=len(tested),
        stage=result.stage,
        scale_rule=result.scale_rule,
        granularity=result.granularity,
        **{key: estimate(statistics.median(values), median_interval(values)) for key, values in shares.items()},
        mean_accuracy_change=statistics.fmean(changes) if changes else None,
        network_bytes=tested[0][1].num_bytes if tested else None,
    )


def result_shares(quantization: Quantization, result: StageResult) -> dict[str, float]:
    """Return the figures of one network as shares of the test images, by column, without those that are not known.

    The change is paired: each seed against its own network in fp32. fp32 itself has no change and no agreement.
    """
    counts = {"test_accuracy": result.num_correct, "tie_share": result.num_ties}
    fp32 = next((other.num_correct for other in quantization.results if other.stage == "fp32"), None)
    if result.stage != "fp32":
        counts["agreement"] = result.num_agreeing
        if result.num_correct is not None and fp32 is not None:
            counts["accuracy_change"] = result.num_correct - fp32
    return {key: count / quantization.num_test_samples for key, count in counts.items() if count is not None}


def int8_histogram_rows(point: PooledPoint) -> list[Row]:
    """Return the histograms of the first seed: those of several seeds have other bins.

    Each has the lines at the mean plus and minus three sigma.
    """
    rows = []
    for seed, quantization in quantizations_of(point)[:1]:
        for histogram in quantization.histograms:
            figures = msgspec.structs.asdict(histogram) | {"counts": list(histogram.counts)}
            low, high = (histogram.mean + sign * NUM_SIGMAS * histogram.sigma for sign in (-1, 1))
            figures |= {"three_sigma_low": low, "three_sigma_high": high}
            rows.append(make_row(INT8_HISTOGRAMS, point, n=1, seed=seed, **figures))
    return rows
