"""A slower network: the step while each collective takes longer, and the step on another link that it predicts."""

from collections.abc import Iterator, Sequence

from pipeline.figures.exposed_communication import (
    communications_of,
    delay_costs_s,
    delayed_steps,
    job_notes,
    median_step_time,
    num_rounds,
    whole_step,
)
from pipeline.figures.notes import NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.plan.point_label import describe_point, varying_axes
from pipeline.plan.spec import PREDICTION_MAY_DIFFER, alike_key
from pipeline.records.record import Communication
from pipeline.report.link import isolated_time_s
from pipeline.report.plots import LinePanel, Plot, as_title, make_series
from pipeline.report.prediction import FROM_GPUS, NO_CHANGE
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
        "as many $GPUs as the column 'from' says, tells what it costs. Beyond the longest delay nothing is predicted.",
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
        here = next((point for point in others if place_of(point) == place_of(source)), None)
        if here is not None:
            yield from (other_link_row(point, here, source) for point in others if point is not here)


def place_of(point: PooledPoint) -> tuple[int, int]:
    return point.spec.num_nodes, point.spec.num_gpus


def other_link_row(point: PooledPoint, here: PooledPoint, delayed: PooledPoint) -> Row:
    """Return a step that was measured beside what delays predict of it from the place of `here` and `delayed`."""
    found, known = communications_of(point.ok_records), communications_of(here.ok_records)
    measured_s, step_s = (median_step_time(part, whole_step(part)) for part in (found, known))
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
    series = make_series(groups, "delay_time_s", DELAYED)
    panel = LinePanel(as_title(DELAYED.heading), "delays of a step [s]", series, "linear")
    yield Plot("q3-network", "Q3", "The step on a slower network", (panel,))
