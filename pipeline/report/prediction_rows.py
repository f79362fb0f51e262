"""The rows of the prediction: each measured number of GPUs, and what its step would be on more."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.analysis import comparability
from pipeline.analysis.exposure import communications_of, median_step_time
from pipeline.analysis.pooling import PooledPoint
from pipeline.analysis.ring_model import (
    Link,
    LinkFit,
    MeasuredStep,
    SweepSample,
    fit_link,
    predict_efficiency,
    predict_min_step_s,
    predict_step_s,
)
from pipeline.experiment.axis_groups import PREDICTION_MAY_DIFFER, alike_key
from pipeline.report.bandwidth_rows import SweepKey, sweep_key, sweep_rows
from pipeline.report.rows import Row, start_row

PREDICTED_NUM_GPUS = (8, 16, 64, 256, 1024)


class PredictionBase(NamedTuple):
    """A communication cell as the prediction uses it."""

    cell: PooledPoint
    measured: MeasuredStep


def prediction_rows(cells: Sequence[PooledPoint], axes: Sequence[str], link: Link | None) -> list[Row]:
    """For each point that differs in the number of GPUs alone: from the fewest GPUs each other measured number, as a
    test of the model, and from the most GPUs the larger ones, over `link` or the one that was measured.
    """
    fits = {place: fit_link(samples) for place, samples in samples_by_sweep_key(cells).items()}
    rows = []
    for series in series_of(cells):
        fewest, most = series[0], series[-1]
        fit = fits.get(sweep_key(fewest.cell.ok_records[0]))
        rows += [predicted_row(fewest, axes, other.cell.spec.num_gpus, fit, None, other) for other in series[1:]]
        fit, larger = (
            fits.get(sweep_key(most.cell.ok_records[0])),
            [n for n in PREDICTED_NUM_GPUS if n > most.cell.spec.num_gpus],
        )
        rows += [predicted_row(most, axes, num_gpus, fit, link) for num_gpus in larger]
    return rows


def samples_by_sweep_key(cells: Iterable[PooledPoint]) -> dict[SweepKey, list[SweepSample]]:
    """The sweeps of each place."""
    samples: dict[SweepKey, list[SweepSample]] = {}
    for row in sweep_rows(cells):
        if row["time_s"] is not None:
            sample = SweepSample(row["num_gpus"], row["num_bytes"], row["time_s"])
            samples.setdefault(SweepKey(*(row[field] for field in SweepKey._fields)), []).append(sample)
    return samples


def series_of(cells: Iterable[PooledPoint]) -> list[list[PredictionBase]]:
    """The measured points that differ in num_gpus and num_nodes alone, by number of GPUs."""
    series: dict[tuple[object, ...], list[PredictionBase]] = {}
    for cell in cells:
        base = prediction_base(cell)
        if base is not None:
            key = alike_key(cell.spec, PREDICTION_MAY_DIFFER)
            series.setdefault(key, []).append(base)
    return [sorted(bases, key=lambda base: base.cell.spec.num_gpus) for bases in series.values()]


def prediction_base(cell: PooledPoint) -> PredictionBase | None:
    """What was measured of the cell; None where a step time or the buckets are lacking."""
    found = communications_of(cell.ok_records)
    alone = [step for step in (median_step_time(found, "plain"), median_step_time(found, "ddp_one")) if step]
    no_op, step = median_step_time(found, "no_op_hook"), median_step_time(found, "ddp")
    buckets = next((part.profile.collectives for part in found if part.profile and part.profile.collectives), ())
    sizes = tuple(collective.num_bytes for collective in buckets if collective.kind == "gradients")
    if not alone or no_op is None or step is None or not sizes:
        return None
    one_gpu_s = min(figure.value_s for figure in alone)
    return PredictionBase(cell, MeasuredStep(cell.spec.num_gpus, one_gpu_s, no_op.value_s, step.value_s, sizes))


def predicted_row(
    base: PredictionBase,
    axes: Sequence[str],
    num_gpus: int,
    fit: LinkFit | None,
    link: Link | None,
    measured: PredictionBase | None = None,
) -> Row:
    """One prediction, beside what was measured there if it was. Without figures where the sweep gave no link."""
    spec, used, step_s, min_step_s = base.cell.spec, link or (fit.link if fit else None), None, None
    if fit and used:
        step_s = predict_step_s(base.measured, used, num_gpus, fit.link)
        min_step_s = predict_min_step_s(base.measured, used, num_gpus, fit.link)
    measured_step_s = measured.measured.step_s if measured else None
    row = start_row(
        base.cell,
        axes,
        from_num_gpus=spec.num_gpus,
        latency_us=used.latency_s * 1e6 if used else None,
        link_gb_s=used.bandwidth_bytes_per_s / 1e9 if used else None,
        fit_worst_error=fit.worst_error if fit else None,
        predicted_step_time_low_s=min_step_s,
        predicted_step_time_s=step_s,
        predicted_parallel_efficiency=None if step_s is None else predict_efficiency(base.measured, step_s),
        predicted_parallel_efficiency_high=None
        if min_step_s is None
        else predict_efficiency(base.measured, min_step_s),
        measured_step_time_s=measured_step_s,
        prediction_error=None if step_s is None or measured_step_s is None else step_s / measured_step_s - 1,
        notes=predicted_notes(fit, link, spec.num_gpus) + unlike_notes(base, measured),
    )
    num_nodes = measured.cell.spec.num_nodes if measured else None  # the model knows no nodes
    return row | {
        "num_gpus": num_gpus,
        "num_nodes": num_nodes,
        "global_batch_size": num_gpus * spec.batch_size_per_gpu,
    }


def unlike_notes(base: PredictionBase, measured: PredictionBase | None) -> list[str]:
    """What the measured step does not share with the one that the prediction rests on."""
    return (
        comparability.environment_difference_notes(
            "measured step", measured.cell.records_by_environment, base.cell.records_by_environment
        )
        if measured
        else []
    )


def predicted_notes(fit: LinkFit | None, link: Link | None, num_gpus: int) -> list[str]:
    """What the reader of a prediction must know."""
    notes = ["the link is given, not measured"] if link else []
    if fit is None:
        notes.append(f"no latency and bandwidth above 0 explain the sweep on {num_gpus}")
    return notes
