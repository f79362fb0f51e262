"""The rows of the prediction: each measured number of GPUs, and what its step would be on more."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.cells import Cell
from pipeline.communication_rows import sweep_rows
from pipeline.exposure import communications, step_time
from pipeline.prediction import Fit, Link, Measured, Sample, fit_link, predict_efficiency, predict_step_s
from pipeline.rows import Row, start_row

LARGER = (8, 16, 64, 256, 1024)


class Base(NamedTuple):
    """A communication cell as the prediction uses it."""

    cell: Cell
    measured: Measured


def prediction_rows(cells: Sequence[Cell], axes: Sequence[str], link: Link | None) -> list[Row]:
    """For each point that differs in the number of GPUs alone: from the fewest GPUs each other measured number, as a
    test of the model, and from the most GPUs the larger ones, over `link` or the one that was measured.
    """
    fits = {num_gpus: fit_link(samples_of(cells, [num_gpus])) for num_gpus in sorted({c.spec.num_gpus for c in cells})}
    rows = []
    for series in series_of(cells):
        fewest, most = series[0], series[-1]
        for other in series[1:]:
            rows += [predicted_row(fewest, axes, other.cell.spec.num_gpus, fits, None, other.measured.step_s)]
        larger = [num_gpus for num_gpus in LARGER if num_gpus > most.cell.spec.num_gpus]
        rows += [predicted_row(most, axes, num_gpus, fits, link, None) for num_gpus in larger]
    return [row for row in rows if row is not None]


def samples_of(cells: Iterable[Cell], num_gpus: Sequence[int]) -> list[Sample]:
    """The sweeps on those numbers of GPUs."""
    rows = [row for row in sweep_rows(cells) if row["num_gpus"] in num_gpus and row["time_s"] is not None]
    return [Sample(row["num_gpus"], row["num_bytes"], row["time_s"]) for row in rows]


def series_of(cells: Iterable[Cell]) -> list[list[Base]]:
    """The measured points that differ in num_gpus and num_nodes alone, by number of GPUs."""
    series: dict[tuple[object, ...], list[Base]] = {}
    for cell in cells:
        base = base_of(cell)
        if base is not None:
            spec = cell.spec
            key = (spec.batch_size_per_gpu, spec.precision, spec.model, spec.device, spec.broadcast_buffers)
            series.setdefault((*key, spec.sync_batchnorm, spec.bucket_cap_mb), []).append(base)
    return [sorted(bases, key=lambda base: base.cell.spec.num_gpus) for bases in series.values()]


def base_of(cell: Cell) -> Base | None:
    """What was measured of the cell; None where a step time or the buckets are lacking."""
    found = communications(cell.measured)
    alone = [step for step in (step_time(found, "plain"), step_time(found, "ddp_one")) if step]
    no_op, step = step_time(found, "no_op_hook"), step_time(found, "ddp")
    buckets = next((part.profile.collectives for part in found if part.profile and part.profile.collectives), ())
    sizes = tuple(collective.num_bytes for collective in buckets if collective.kind == "gradients")
    if not alone or no_op is None or step is None or not sizes:
        return None
    one_gpu_s = min(figure.value_s for figure in alone)
    return Base(cell, Measured(cell.spec.num_gpus, one_gpu_s, no_op.value_s, step.value_s, sizes))


def predicted_row(
    base: Base,
    axes: Sequence[str],
    num_gpus: int,
    fits: dict[int, Fit | None],
    link: Link | None,
    measured_step_s: float | None,
) -> Row | None:
    """One prediction; with the measured step where there is one. None where the sweep gave no link."""
    fit = fits[base.cell.spec.num_gpus]
    if fit is None:
        return None
    used = link or fit.link
    step_s = predict_step_s(base.measured, used, num_gpus, fit.link)
    row = start_row(
        base.cell,
        axes,
        from_num_gpus=base.cell.spec.num_gpus,
        latency_us=used.latency_s * 1e6,
        link_gb_s=used.bandwidth_bytes_per_s / 1e9,
        fit_worst_error=fit.worst_error,
        predicted_step_time_s=step_s,
        predicted_parallel_efficiency=predict_efficiency(base.measured, step_s),
        measured_step_time_s=measured_step_s,
        prediction_error=None if measured_step_s is None else step_s / measured_step_s - 1,
        notes=["the link is given, not measured"] if link else [],
    )
    return row | {"num_gpus": num_gpus, "global_batch_size": num_gpus * base.cell.spec.batch_size_per_gpu}
