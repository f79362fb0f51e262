"""Steps that were not measured: on more GPUs, by one ring over equal links, and on a slower network, by delays."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.figures.exposed_communication import (
    communications_of,
    delay_costs_s,
    delayed_steps,
    job_notes,
    median_step_time,
    num_rounds,
    whole_step,
)
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
from pipeline.plan.point_label import describe_point, varying_axes
from pipeline.plan.spec import PREDICTION_MAY_DIFFER, alike_key
from pipeline.records.record import Communication, VariantName
from pipeline.report.link import SweepKey, isolated_time_s, sweep_key, sweep_rows
from pipeline.report.plots import LinePanel, Plot, as_title, make_series
from pipeline.report.table import (
    NUM_WINDOWS,
    PLACE,
    PREDICTION_ERROR,
    STEP_TIME,
    Column,
    Row,
    Table,
    Tables,
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
        "Extrapolated from steps and all-reduces on as many $GPUs as stand under `from`. Only rows with a measured "
        "step were tested; nothing beyond. The model is one ring over equal links, t = 2(N-1) latency + 2(N-1)/N "
        "S/bandwidth, fitted to the all-reduces of DDP alone. None hidden: the step grows by all that all-reduces take "
        "longer. No change: the step takes as long as on those. All hidden: likewise, while all-reduces take no "
        "longer than the step. None of them is a bound. Each error is that of the column before it. Efficiency is "
        "against one $GPU.",
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
        rows += [predicted_row(fewest, other.point.spec.num_gpus, fit, None, other) for other in series[1:]]
        num_measured, fit = most.point.spec.num_gpus, fit_buckets(most, sweeps)
        last = predict_to or 2 * num_measured
        larger = sorted({n for n in (2 * num_measured, *PREDICTED_NUM_GPUS, last) if num_measured < n <= last})
        rows += [predicted_row(most, num_gpus, fit, link) for num_gpus in larger]
    return rows


def fit_buckets(base: PredictionBase, sweeps: Mapping[SweepKey, Sequence[Row]]) -> LinkFit | None:
    """Fit the link to the sweep of the base's place, to messages of about the size of its buckets and larger.

    Of two sweeps on GPUs there the captured one counts.
    """
    place = sweep_key(base.point.ok_records[0])
    captured = place._replace(execution="graph")
    if place.device == "cuda" and captured in sweeps:
        place = captured
    timed = [row for row in sweeps.get(place, ()) if row["time_s"]]
    samples = [SweepSample(place.num_gpus, row["num_bytes"], row["time_s"]) for row in timed]
    fit = fit_large_messages(samples, min(base.measured.bucket_bytes) / SIZES_BELOW_BUCKETS)
    return fit and fit._replace(is_host_bound=place.device == "cuda" and place.execution not in CAPTURED_EXECUTIONS)


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
    if fit and used:
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
    global_batch_size = num_gpus * spec.batch_size_per_gpu
    notes = predicted_notes(base, fit, link, measured)
    row = make_row(
        PREDICTION, base.point, notes, global_batch_size=global_batch_size, from_num_gpus=spec.num_gpus, **figures
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


DELAYED = STEP_TIME._replace(interval="shown")

NETWORK = Table(
    "network",
    "Q3",
    (
        *PLACE,
        Column("added_latency_s", "each longer by [us]", "What each collective takes longer, whatever its size."),
        Column("added_bandwidth_gb_s", "at [GB/s]", "Each collective also takes its bytes over this longer."),
        Column("delay_time_s", "delays [ms]", "Sum of the delays of all collectives in a step, on rank 0."),
        DELAYED,
        Column(
            "added_step_time_s",
            "step longer by [ms]",
            "The step with delays minus the mean of two without, by rounds.",
            interval="shown",
        ),
        Column(
            "hidden_delay_share",
            "hidden [%]",
            "1 - added_step_time_s/delay_time_s, cut to 0 to 1.",
            interval="kept",
            remark="Hidden is the share of the delays beside which the step computes.",
        ),
        NUM_WINDOWS,
    ),
    View(
        "Q3: a slower network, tried by delays",
        "Each collective takes longer, by an equal time or by its bytes over a bandwidth. A delay that computation "
        "hides costs nothing. Between two rows the step lies between theirs; beyond the last one it was not measured.",
    ),
)

OTHER_LINK = Table(
    "other_link",
    "Q3",
    (
        *PLACE,
        FROM_GPUS,
        Column("from_num_nodes", "on nodes", "Their number of nodes.", is_set=True),
        Column("longer_collectives_s", "collectives longer by [ms]", "What those of a step take longer, each alone."),
        Column("by_delays_step_time_s", "predicted [ms]", "The step there, and what delays of that sum add to it."),
        PREDICTION_ERROR,
        *NO_CHANGE,
    ),
    View(
        "Q3: the step on another link, predicted by delays",
        "Isolated collectives say what those of a step take longer here. The step with delays of that sum, measured on "
        "as many $GPUs as stand under `from`, says what it costs. Beyond the longest delay nothing is predicted.",
    ),
)

WORSE_THAN_NO_CHANGE = NoteKind("worse_than_no_change", "no change predicts this step better than the delays do")
BEYOND_THE_DELAYS = NoteKind("beyond_the_delays", "the link is faster, or slower than the longest delay makes it")
SOURCE_MAY_DIFFER = (*PREDICTION_MAY_DIFFER, "measure", "windows")


def network_rows(point: PooledPoint) -> Iterator[Row]:
    """Yield the row of the step as it is, then one of each delay."""
    found = communications_of(point.ok_records)
    rounds, notes = num_rounds(found), job_notes(found)
    usual = median_step_time(found, whole_step(found))
    yield make_row(NETWORK, point, notes, delay_time_s=0.0 if usual else None, step_time_s=usual, num_windows=rounds)
    for step in delayed_steps(found):
        yield make_row(
            NETWORK,
            point,
            added_latency_s=step.latency_s or None,
            added_bandwidth_gb_s=1 / step.s_per_byte / 1e9 if step.s_per_byte else None,
            delay_time_s=step.added_s,
            step_time_s=step.step_s,
            added_step_time_s=step.longer_s,
            hidden_delay_share=step.hidden_share,
            num_windows=rounds,
        )


def other_link_rows(delayed: Sequence[PooledPoint], measured: Sequence[PooledPoint]) -> Iterator[Row]:
    """Yield the step of each measured point whose link differs from that of an alike point with delays."""
    alike = group_pairs(((alike_key(point.spec, SOURCE_MAY_DIFFER), point.gpu), point) for point in measured)
    for source in delayed:
        others = alike.get((alike_key(source.spec, SOURCE_MAY_DIFFER), source.gpu), [])
        here = [point for point in others if place_of(point) == place_of(source)]
        for point in others if here else ():
            if point is not here[0]:
                yield other_link_row(point, here[0], source)


def place_of(point: PooledPoint) -> tuple[int, int]:
    return point.spec.num_nodes, point.spec.num_gpus


def other_link_row(point: PooledPoint, here: PooledPoint, delayed: PooledPoint) -> Row:
    """Return a step that was measured beside what delays predict of it from the place of `here` and `delayed`."""
    found, known = communications_of(point.ok_records), communications_of(here.ok_records)
    times_s = [median_step_time(part, whole_step(part)) for part in (found, known)]
    measured_s, step_s = (None if time_s is None else float(time_s) for time_s in times_s)
    alone_s, alone_here_s = collectives_alone_s(found), collectives_alone_s(known)
    longer_s = None if alone_s is None or alone_here_s is None else alone_s - alone_here_s
    cost_s = None if longer_s is None else delay_costs_s(communications_of(delayed.ok_records), longer_s)
    predicted_s = None if cost_s is None or step_s is None else step_s + cost_s
    error, no_change_error = (
        value_s / measured_s - 1 if value_s and measured_s else None for value_s in (predicted_s, step_s)
    )
    notes = [make_note(BEYOND_THE_DELAYS)] if longer_s is not None and cost_s is None else []
    if error is not None and no_change_error is not None and abs(error) > abs(no_change_error):
        notes.append(make_note(WORSE_THAN_NO_CHANGE))
    return make_row(
        OTHER_LINK,
        point,
        notes,
        from_num_gpus=here.spec.num_gpus,
        from_num_nodes=here.spec.num_nodes,
        longer_collectives_s=longer_s,
        by_delays_step_time_s=predicted_s,
        prediction_error=error,
        no_change_step_time_s=step_s,
        no_change_error=no_change_error,
        measured_step_time_s=measured_s,
    )


def collectives_alone_s(found: Sequence[Communication]) -> float | None:
    """Return the time of a step's collectives, each by itself; None if a size was not timed or nothing was profiled."""
    profile = next((part.profile for part in found if part.profile and part.profile.collectives), None)
    if profile is None:
        return None
    times_s = [isolated_time_s(found, one.num_bytes, one.operation) for one in profile.collectives]
    known_s = [time_s for time_s in times_s if time_s is not None]
    return sum(known_s) if len(known_s) == len(times_s) else None


def network_plots(tables: Tables) -> Iterator[Plot]:
    """Yield the step against the delays that grow with the bytes of a collective."""
    rows = [row for row in tables["network"] if row["step_time_s"] is not None and not row["added_latency_s"]]
    axes = varying_axes([row.axes for row in rows])
    groups = group_pairs((describe_point(row.axes, axes), row) for row in rows)
    if groups:
        series = make_series(groups, "delay_time_s", DELAYED)
        panel = LinePanel(as_title(DELAYED.heading), "delays of a step [s]", series, "linear")
        yield Plot("q3-network", "Q3", "The step on a slower network", (panel,))
