"""Prediction: the step on more GPUs, from what was measured on fewer, by one ring over equal links. Its table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.figures.exposed_communication import communications_of, median_step_time, whole_step
from pipeline.figures.formulas import (
    Link,
    LinkFit,
    MeasuredStep,
    SweepSample,
    fit_large_messages,
    predict_all_hidden_step_s,
    predict_step_s,
)
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.plan.axes import CAPTURED_EXECUTIONS
from pipeline.plan.spec import PREDICTION_MAY_DIFFER, alike_key
from pipeline.records.record import VariantName
from pipeline.report.link import SweepKey, sweep_key, sweep_rows
from pipeline.report.table import (
    PLACE,
    PREDICTION_ERROR,
    Column,
    Row,
    Table,
    View,
    make_row,
)

FROM_GPUS = Column("from_num_gpus", "from", "Number of GPUs whose measurements the prediction uses.", is_set=True)
NO_CHANGE = (
    Column("no_change_step_time_s", "no change [ms]", "Step time as measured on from_num_gpus: nothing is added."),
    Column("no_change_error", "its error [%]", "no_change_step_time_s divided by measured_step_time_s, minus 1."),
    Column("measured_step_time_s", "measured [ms]", "Step time that was measured on that number of GPUs."),
)

PREDICTION = Table(
    "prediction",
    "Q3",
    (
        *PLACE,
        FROM_GPUS,
        Column(
            "predicted_step_time_s",
            "none hidden [ms]",
            "Step time if compute hides none of the extra all-reduce time; no upper bound.",
            decimals=1,
        ),
        PREDICTION_ERROR,
        *NO_CHANGE,
        Column(
            "predicted_parallel_efficiency",
            "none hidden efficiency [%]",
            "Time on one GPU alone over predicted_step_time_s.",
            decimals=0,
        ),
        Column(
            "all_hidden_step_time_s",
            "all hidden [ms]",
            "Step time if compute hides the extra all-reduce time; no lower bound.",
            decimals=1,
        ),
        Column(
            "all_hidden_parallel_efficiency",
            "all hidden efficiency [%]",
            "Time on one GPU alone over all_hidden_step_time_s.",
            decimals=0,
        ),
        Column("latency_us", "", "Latency of one hop, for messages of the size of the buckets."),
        Column("link_gb_s", "", "Bandwidth of one link."),
        Column("fit_worst_error", "", "Largest relative error of the fit, over the sizes that it is fitted to."),
    ),
    View(
        "Prediction: weak scaling on more $GPUs",
        'Extrapolated from steps and all-reduces on as many $GPUs as the column "from" names. Only rows with a '
        "measured step were tested; nothing beyond. The model is one ring over equal links, t = 2(N-1) latency + "
        "2(N-1)/N S/bandwidth, fitted to the all-reduces of DDP alone. None hidden: the step grows by all that "
        "all-reduces take longer. No change: the step takes as long as on those. All hidden: no change, while "
        "all-reduces take no longer than the step. None of them is a bound. Each error is that of the column before "
        "it. Efficiency is against one $GPU.",
        lambda rows: sorted(rows, key=lambda row: int(row["batch_size_per_gpu"])),
        is_folded=True,
    ),
)

LATENCY_OF_HOST = NoteKind(
    "latency_of_host", "the host issued the sweep's calls one by one: the latency is the host's, not the link's"
)
LINK_GIVEN = NoteKind("link_given", "the link is given, not measured")
NO_LINK_FITS = NoteKind("no_link_fits", "no latency and bandwidth above 0 explain the sweep on {num_gpus}")

PREDICTED_NUM_GPUS = (8, 16, 64, 256, 1024)  # as far as they are asked for, beside twice the measured number
ON_ONE_GPU: tuple[VariantName, ...] = ("plain", "ddp_one")
SIZES_BELOW_BUCKETS = 4  # the link is fitted to messages from the smallest bucket over this


class PredictionBase(NamedTuple):
    """A communication point and its step times, from which a prediction starts."""

    point: PooledPoint
    measured: MeasuredStep


def prediction_rows(points: Sequence[PooledPoint], link: Link | None, predict_to: int | None = None) -> list[Row]:
    """Return the predictions of every series of points that differ in the number of GPUs alone.

    From the fewest GPUs each other measured number is predicted, to test the model. From the most GPUs larger numbers
    up to `predict_to` are predicted (by default twice the most), for `link` or else the measured link.
    """
    sweeps = sweep_rows(points)
    rows = []
    for series in series_of(points):
        fewest, most = series[0], series[-1]
        fit = fit_buckets(fewest, sweeps)
        more = [other for other in series if other.point.spec.num_gpus > fewest.point.spec.num_gpus]
        rows += [predicted_row(fewest, other.point.spec.num_gpus, fit, None, other) for other in more]
        num_measured, fit = most.point.spec.num_gpus, fit_buckets(most, sweeps)
        last = predict_to or 2 * num_measured
        larger = sorted({n for n in (2 * num_measured, *PREDICTED_NUM_GPUS, last) if num_measured < n <= last})
        rows += [predicted_row(most, num_gpus, fit, link) for num_gpus in larger]
    return rows


def fit_buckets(base: PredictionBase, sweeps: Mapping[SweepKey, Sequence[Row]]) -> LinkFit | None:
    """Fit the link to the sweep of the base's place, to messages of about the size of its buckets and larger.

    Of two sweeps there the captured one counts.
    """
    place = sweep_key(base.point.ok_records[0])
    captured = place._replace(execution="graph")
    place = captured if captured in sweeps else place
    timed = [row for row in sweeps.get(place, ()) if row["time_s"]]
    samples = [SweepSample(place.num_gpus, row["num_bytes"], row["time_s"]) for row in timed]
    fit = fit_large_messages(samples, min(base.measured.bucket_bytes) / SIZES_BELOW_BUCKETS)
    return fit and fit._replace(is_host_bound=place.execution not in CAPTURED_EXECUTIONS)


def series_of(points: Iterable[PooledPoint]) -> list[list[PredictionBase]]:
    """Return the series of measured points that differ in num_gpus and num_nodes alone, each by number of GPUs.

    Points on another GPU model are another series.
    """
    bases = filter(None, map(prediction_base, points))
    series = group_pairs(((alike_key(base.point.spec, PREDICTION_MAY_DIFFER), base.point.gpu), base) for base in bases)
    return [sorted(bases, key=lambda base: base.point.spec.num_gpus) for bases in series.values()]


def prediction_base(point: PooledPoint) -> PredictionBase | None:
    """Return the point with its step times; None without its step times or buckets, or with own collectives in them."""
    found = communications_of(point.ok_records)
    alone = [step_s for name in ON_ONE_GPU if (step_s := median_step_time(found, name)) is not None]
    no_op_s, step_s = median_step_time(found, "no_op_hook"), median_step_time(found, whole_step(found))
    buckets = next((part.profile.collectives for part in found if part.profile and part.profile.collectives), ())
    sizes = tuple(collective.num_bytes for collective in buckets if collective.kind == "gradients")
    if point.own_collectives or not alone or no_op_s is None or step_s is None or not sizes:
        return None
    return PredictionBase(point, MeasuredStep(point.spec.num_gpus, min(alone), no_op_s, step_s, sizes))


def predicted_row(
    base: PredictionBase,
    num_gpus: int,
    fit: LinkFit | None,
    link: Link | None,
    measured: PredictionBase | None = None,
) -> Row:
    """Return one prediction beside the measured step time, if any. It has no figures if no link fits the sweep."""
    spec, step, used = base.point.spec, base.measured, link or (fit.link if fit else None)
    figures: dict[str, Any] = {"no_change_step_time_s": step.step_s}
    if used:
        figures |= {"latency_us": used.latency_s * 1e6, "link_gb_s": used.bandwidth_bytes_per_s / 1e9}
        if fit:
            step_s = predict_step_s(step, used, num_gpus, fit.link)
            hidden_step_s = predict_all_hidden_step_s(step, used, num_gpus, fit.link)
            figures |= {
                "fit_worst_error": fit.worst_error,
                "predicted_step_time_s": step_s,
                "all_hidden_step_time_s": hidden_step_s,
                "predicted_parallel_efficiency": step.one_gpu_step_s / step_s,
                "all_hidden_parallel_efficiency": step.one_gpu_step_s / hidden_step_s,
            }
    if measured:
        measured_s = figures["measured_step_time_s"] = measured.measured.step_s
        errors = {"prediction_error": "predicted_step_time_s", "no_change_error": "no_change_step_time_s"}
        figures |= {error: figures[key] / measured_s - 1 for error, key in errors.items() if key in figures}
    row = make_row(
        PREDICTION,
        base.point,
        predicted_notes(base, fit, link, measured),
        global_batch_size=num_gpus * spec.batch_size_per_gpu,
        from_num_gpus=spec.num_gpus,
        **figures,
    )
    num_nodes = measured.point.spec.num_nodes if measured else None  # the model knows no nodes
    return msgspec.structs.replace(row, axes={**row.axes, "num_gpus": num_gpus, "num_nodes": num_nodes})


def predicted_notes(
    base: PredictionBase, fit: LinkFit | None, link: Link | None, measured: PredictionBase | None
) -> list[Note]:
    """Return the notes on a prediction, and on facts in which the measured step differs from the prediction's base."""
    notes = [make_note(LINK_GIVEN)] if link else []
    if fit is None:
        notes.append(make_note(NO_LINK_FITS, num_gpus=base.point.spec.num_gpus))
    elif fit.is_host_bound and not link:
        notes.append(make_note(LATENCY_OF_HOST))
    return notes + (base.point.difference_notes("measured step", measured.point) if measured else [])
