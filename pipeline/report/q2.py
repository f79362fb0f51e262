"""Q2, scaling: how much faster several GPUs are than one, and several nodes than one. Tables, answers and plots."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pipeline.figures.epoch_figures import LOADER_BOUND, compute_rate_notes, energy_notes, time_figures, time_notes
from pipeline.figures.exposed_communication import PointsByTraining, untold_notes
from pipeline.figures.intervals import ends_of
from pipeline.figures.pooling import SHARED_CPUS, SHARED_NODE, PooledPoint
from pipeline.figures.scaling import (
    FIXED_AXIS,
    NO_DIFFERENCE,
    SUPERLINEAR,
    Baseline,
    Scaling,
    as_baseline,
    scaling_figures,
)
from pipeline.plan.point_label import NAMED_LAST, varying_axes
from pipeline.plan.spec import BASELINE_MAY_DIFFER, alike_key
from pipeline.plan.strategies import STRATEGIES
from pipeline.report.claims import (
    MAX_NOISE,
    NO_RESULT,
    Tile,
    badges_of,
    figure_of,
    is_fit_for_answer,
    no_result,
    not_answered,
    sample_time,
    shown,
    where_of,
)
from pipeline.report.next_step import NEXT_STEP, Advices, limit_words, next_step_view
from pipeline.report.plots import LinePanel, Plot, Point, Scale, as_title, group_series, make_series
from pipeline.report.q3 import exposed_per_epoch
from pipeline.report.step_parts import BATCH
from pipeline.report.table import (
    AXIS_HEADINGS,
    BASELINE,
    COMPUTE,
    COMPUTE_RATE,
    EFFICIENCY,
    ENERGY,
    EPOCH_TIME,
    FLOPS,
    GLOBAL_BATCH,
    INTERVAL,
    MEMORY,
    MFU,
    PLACE,
    RUN_SPREAD,
    SAMPLE_ENERGY,
    SAMPLE_THROUGHPUT,
    SCALING,
    SPEEDUP,
    STATUS,
    THROUGHPUT,
    TIMING,
    UPDATE_TIME,
    WAITING,
    WORKERS,
    Column,
    Row,
    Rows,
    Table,
    Tables,
    View,
    make_row,
    sort_rows,
)


def scaled(scaling: Scaling, batch: str) -> Callable[[Rows], Rows]:
    """Return the choice of the rows of one kind of scaling, in order.

    None if all are baselines, or if every row on several GPUs has a speed-up of the other kind only.
    """

    def choose(rows: Rows) -> Rows:
        chosen = [row for row in rows if row["scaling"] == scaling]
        several = [row for row in chosen if row["num_gpus"] > 1]
        compared = {repr(row.axes) for row in rows if row["scaling"] != scaling and row["speedup"] is not None}
        is_told = all(row["speedup"] is None and repr(row.axes) in compared for row in several)
        return [] if is_told else sort_rows(chosen, batch)

    return choose


ANSWER_KEYS = ("epoch_time_s", "speedup", "parallel_efficiency")  # the others are shown where there is room
OTHER_KEYS = (
    *("update_time_s", "data_share", "noise_floor"),
    *("throughput_items_per_s", "tflops_per_gpu", "mfu", "num_workers_total", "run_spread_s"),
)

Q2 = Table(
    "Q2",
    "Q2",
    (
        GLOBAL_BATCH,
        STATUS,
        SCALING,
        EPOCH_TIME._replace(interval="kept"),
        UPDATE_TIME,
        SPEEDUP,
        EFFICIENCY,
        Column("serial_fraction_karp_flatt", "Karp-Flatt", "(1/S - 1/N)/(1 - 1/N) for N > 1."),
        WAITING._replace(remark="Waiting is the share of the epoch in which the $GPU that waits longest has no data."),
        INTERVAL,
        THROUGHPUT,
        COMPUTE_RATE,
        MFU,
        WORKERS._replace(remark="Under DDP N $GPUs have N times the loader workers of one."),
        RUN_SPREAD,
        *(column._replace(heading="") for column in (COMPUTE, MEMORY, ENERGY)),
        SAMPLE_THROUGHPUT,
        SAMPLE_ENERGY,
        *FLOPS,
        *TIMING,
        BASELINE,
        Column("baseline_batch_size_per_gpu", "", "Batch size per GPU of the baseline."),
        *NEXT_STEP,
    ),
    View(
        "Q2: weak scaling, speed-up against one $GPU with the per-$GPU batch fixed",
        "Weak scaling: every $GPU keeps its batch size, so N $GPUs train on N times as many $images a step. Speed-up "
        "is T(1)/T(N): the time of an epoch on one $GPU over that on N $GPUs, with the same $images in both. "
        "Efficiency is speed-up/N.",
        scaled("weak", "batch_size_per_gpu"),
        keys=(*ANSWER_KEYS, *OTHER_KEYS),
    ),
    View(
        "Q2: strong scaling, global batch fixed",
        "Strong scaling: the global batch size stays the same, so each of N $GPUs gets 1/N of it. Speed-up is against "
        "one $GPU with the whole batch. Karp-Flatt estimates the serial share of the work; below 0 or above 1 it is no "
        "share.",
        scaled("strong", "global_batch_size"),
        hidden_axes=("batch_size_per_gpu",),
        keys=("global_batch_size", *ANSWER_KEYS, "serial_fraction_karp_flatt", *OTHER_KEYS),
    ),
    next_step_view("Next step of each configuration"),
)


def q2_row(
    point: PooledPoint,
    baseline: Baseline,
    scaling: Scaling,
    peak_tflops: float | None = None,
    advice: Mapping[str, Any] = MappingProxyType({}),
    measured: PointsByTraining = MappingProxyType({}),
) -> Row:
    """Return a row of Q2: speed-up against one GPU with the same batch per GPU (weak) or global batch (strong)."""
    gains = scaling_figures(point, baseline, scaling)
    notes = [
        *time_notes(point),
        *gains.pop("notes"),
        *energy_notes(point),
        *compute_rate_notes(point, peak_tflops),
        *untold_notes(point, measured),
    ]
    return make_row(Q2, point, notes, **time_figures(point, peak_tflops), **gains, **advice)


MAX_LINEAR_GPUS = 8  # on a linear axis; of more the smallest numbers would stand on one spot
WAITS = "limited by data loading"
BASELINE_WAITS = "against one $GPU that waits for data"
SHARED = "with others on the node"
ABOVE_N = "above the ideal"
WAIT_NOT_STATED = "without the wait for data"
LEFT_OUT = {
    LOADER_BOUND: WAITS,
    SHARED_NODE: SHARED,
    SHARED_CPUS: "with fewer CPUs than processes",
    SUPERLINEAR: ABOVE_N,
}
"""The notes that forbid a speed-up, and what an answer says of it."""
WITHOUT_LOADER = "--set input=dataloader,gpu"
CURES = {WITHOUT_LOADER: {WAITS, BASELINE_WAITS}, "--exclusive": {SHARED}}


def speedup_claims(tables: Tables) -> list[Tile]:
    """Return speed-up and efficiency at the largest N that has a row which can be used."""
    rows = tables["Q2"]
    several = [row for row in rows if row["num_gpus"] > 1]
    timed = [row for row in several if row["speedup"] is not None]
    if not timed and (lost := lost_scaling(rows)):
        return [no_result("configurations", lost)]
    if not timed:
        why = "no configuration on several $GPUs" + " has a timed one on one $GPU to compare with" * bool(several)
        return [not_answered(why, "scaling", is_asked=bool(several))]
    fit = usable_rows(rows)
    unknown = () if fit else ("wait for data not stated",)
    fit = fit or usable_rows(rows, is_loader_bound=None)
    used = {id(row) for row in fit}
    reasons = Counter(reason_left_out(row) for row in timed if id(row) not in used)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    if not fit:
        largest = ", ".join(f"{row['speedup']:.2f} with {row['scaling']} scaling" for row in largest_of_each(timed))
        cures = [option for option, cured in CURES.items() if cured & reasons.keys()] or ["--repeats 6"]
        why = f"no speed-up can be used: {why}; the largest: {largest}"
        return [not_answered(why, " ".join(["scaling", *cures]), is_asked=True)]
    most = max(row["num_gpus"] for row in fit)
    best = max((row for row in fit if row["num_gpus"] == most), key=usefulness)
    larger = largest_of_each([row for row in timed if row["speedup"] > best["speedup"]])
    elsewhere = ", ".join(f"{row['speedup']:.2f}" for row in larger)
    left_out = f"{reasons.total()} of {len(timed)} speed-ups left out: {why}" if reasons else ""
    tile = Tile(
        f"Speed-up on {most} $GPUs",
        more=f"{STRATEGIES[best['strategy']].words}, {best['scaling']} scaling{where_of(best, fit, 'strategy')}"
        f"{against_best(best, rows)}",
        warning=left_out + (f"; larger elsewhere: {elsewhere}" if larger and left_out else ""),
        badges=badges_of(best, *unknown),
    )
    return [gain_tile(tile, best, best["speedup"], best["parallel_efficiency"], most)]


def gain_tile(tile: Tile, row: Row, gain: float, efficiency: float, most: int) -> Tile:
    """Return the tile with the gain of a row, which can be `most`; "noisy" or "unproven" if there is none to state."""
    number, _, interval = figure_of(gain, ".2f")
    if gain > most:
        more = f"{tile.more}; more than {most} is impossible here: use --repeats 6"
        return tile._replace(figure="noisy", line=interval or f"{number}x", more=more)
    if row.has_note(NO_DIFFERENCE) or (not interval and abs(gain - 1) < MAX_NOISE):
        badges = tuple(badge for badge in tile.badges if badge != NO_DIFFERENCE.badge)
        line = f"{interval or f'{number}x without an interval'}; 1 is no gain"
        return tile._replace(figure="unproven", line=line, badges=badges)
    return tile._replace(figure=f"{number}x", interval=interval, line=f"{shown(efficiency, '.0%')} efficient")


def against_best(row: Row, rows: Sequence[Row]) -> str:
    """Return the speed-up over one GPU at its best batch size; "" if that is the baseline's, or is not known."""
    may_differ = (*BASELINE_MAY_DIFFER, "batch_size_per_gpu", "num_samples")
    alone = [one for one in rows if one["num_gpus"] == 1 and one["epoch_time_s"] and one["strategy"] == row["baseline"]]
    fit = [one for one in alone if not one.has_note(LOADER_BOUND, SHARED_NODE)]
    alike = [one for one in fit if not varying_axes([one.axes, row.axes], may_differ)]
    best = min(alike, key=sample_time, default=None)
    if best is None or best["batch_size_per_gpu"] == row["baseline_batch_size_per_gpu"]:
        return ""
    speedup = sample_time(best) / sample_time(row)
    return f"; {speedup:.2f}x against one $GPU at its best batch of {best['batch_size_per_gpu']:,}"


def largest_of_each(rows: Sequence[Row]) -> list[Row]:
    """Return the row with the largest speed-up of weak scaling, and that of strong scaling, if there are any."""
    by_scaling = ([row for row in rows if row["scaling"] == scaling] for scaling in ("weak", "strong"))
    return [max(own, key=lambda row: float(row["speedup"])) for own in by_scaling if own]


def usable_rows(rows: Sequence[Row], is_loader_bound: bool | None = False) -> list[Row]:
    """Return the rows on several GPUs with a fit speed-up that are not loader-bound; None: where that is not known."""
    several = [row for row in rows if row["num_gpus"] > 1 and row["is_loader_bound"] is is_loader_bound]
    return [row for row in several if is_fit_for_answer(row, "speedup")]


def usefulness(row: Row) -> tuple[bool, float, float]:
    """Return the sort key of a usable row: weak scaling first, then the speed-up up to N, then its lower end."""
    return row["scaling"] == "weak", min(row["speedup"], row["num_gpus"]), ends_of(row["speedup"])[0] or 0.0


def lost_scaling(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose missing result leaves Q2 without an answer: on several GPUs, or else baselines of such."""
    lost = [row for row in rows if row.status in NO_RESULT]
    is_measured = any(row.status == "ok" and row["num_gpus"] > 1 for row in rows)
    return [row for row in lost if is_measured or row["num_gpus"] > 1]


def reason_left_out(row: Row) -> str:
    """Return why an answer cannot use the speed-up of this row. A note on waiting may be that of its baseline."""
    why = next((why for kind, why in LEFT_OUT.items() if row.has_note(kind)), WAIT_NOT_STATED)
    is_of_baseline = all(note.is_of_baseline for note in row.notes if note.kind == LOADER_BOUND)
    return BASELINE_WAITS if why == WAITS and is_of_baseline else why


def speedup_plots(tables: Tables) -> Iterator[Plot]:
    """Yield Q2: speed-up with weak and with strong scaling."""
    for name, scaling, batch, fixed in (
        ("q2", "weak", BATCH, AXIS_HEADINGS[BATCH]),
        ("q2-strong", "strong", "global_batch_size", GLOBAL_BATCH.heading),
    ):
        rows = [row for row in tables["Q2"] if row["speedup"] is not None and row["num_gpus"] > 1]
        if rows := sorted((row for row in rows if row["scaling"] == scaling), key=lambda row: int(row[batch])):
            panels, note = speedup_panels(rows, batch, fixed)
            yield Plot(name, "Q2", f"Speed-up over one $GPU, {scaling} scaling, {fixed} fixed", panels, note)


def speedup_panels(rows: Sequence[Row], batch: str, fixed: str) -> tuple[tuple[LinePanel, ...], str]:
    """Return speed-up against GPUs, a panel for each strategy; with one number of GPUs against the batch size.

    Return the note on the number of series too.
    """
    counts, strategies = ({row[axis] for row in rows} for axis in ("num_gpus", "strategy"))
    optional = (BATCH, *NAMED_LAST)
    if len(counts) == 1:
        groups, note = group_series(rows, batch, ("strategy",), optional)
        of_strategy = f"of {min(strategies)} " if len(strategies) == 1 else ""
        title = f"{as_title(SPEEDUP.heading)} {of_strategy}on {max(counts)} $GPUs"
        return (LinePanel(title, fixed, make_series(groups, batch, SPEEDUP), ideal=lambda _: max(counts)),), note
    groups, note = group_series(rows, "num_gpus", (batch,), optional, panel="strategy")
    panels = []
    for strategy in sorted(strategies):
        chosen = {label: [row for row in group if row["strategy"] == strategy] for label, group in groups.items()}
        lines = make_series(chosen, "num_gpus", SPEEDUP)
        from_one = tuple(line._replace(points=(Point(1, 1), *line.points)) for line in lines)
        title = f"{as_title(SPEEDUP.heading)} of {strategy}"
        scale: Scale = "log2" if max(counts) > MAX_LINEAR_GPUS else "linear"
        panels.append(LinePanel(title, AXIS_HEADINGS["num_gpus"], from_one, scale, ideal=float, y_scale=scale))
    return tuple(panels), note


MAY_DIFFER = ("num_nodes", "num_gpus", "batch_size_per_gpu", "epochs", "windows")
SCALINGS: tuple[Scaling, ...] = ("weak", "strong")

NODES = Table(
    "nodes",
    "Q2",
    (
        *PLACE,
        Column("nodes", "nodes", "Nodes, each with as many GPUs.", is_set=True),
        SCALING._replace(heading="scaling"),
        EPOCH_TIME,
        SPEEDUP._replace(
            key="node_speedup", heading="against one node", meaning="Epoch time on one node over this one."
        ),
        EFFICIENCY._replace(key="node_efficiency", meaning="node_speedup/nodes."),
        Column("exposed_share_of_epoch", "exposed [%]", "Measured exposed communication over the epoch time."),
        *NEXT_STEP,
    ),
    View(
        "Q2: nodes, speed-up against one node",
        "Against one node with as many $GPUs, and the same $images in both. The limit is what the "
        "next step is against, by the order in docs/advice.md.",
        lambda rows: sorted(sort_rows(rows), key=lambda row: str(row["scaling"]), reverse=True),
        keys=("node_speedup", "nodes", "scaling", "node_efficiency", "exposed_share_of_epoch", "limit", "limit_share"),
    ),
)


def node_rows(points: Sequence[PooledPoint], measured: PointsByTraining, advices: Advices) -> list[Row]:
    """Return a row for each point on several nodes that has an alike one on one node, for both kinds of scaling."""
    found = []
    for scaling in SCALINGS:
        timed = [point for point in points if point.epoch_time]
        one = {node_key(point, scaling): point for point in reversed(timed) if point.spec.num_nodes == 1}
        several = [point for point in timed if point.spec.num_nodes > 1]
        pairs = [(point, one[node_key(point, scaling)]) for point in several if node_key(point, scaling) in one]
        found += [node_row(point, baseline, scaling, measured, advices) for point, baseline in pairs]
    return found


def node_key(point: PooledPoint, scaling: Scaling) -> tuple[object, ...]:
    """Return what a point and the one on one node share."""
    fixed = getattr(point.spec, FIXED_AXIS[scaling])
    return point.gpu, point.spec.gpus_per_node, fixed, *alike_key(point.spec, MAY_DIFFER)


def node_row(
    point: PooledPoint, one_node: PooledPoint, scaling: Scaling, measured: PointsByTraining, advices: Advices
) -> Row:
    """Return the row of a point on several nodes beside the one on one node."""
    gains = scaling_figures(point, as_baseline(point, one_node, "one node"), scaling)
    time_s, (exposed_s, exposed_notes) = point.epoch_time, exposed_per_epoch(point, measured)
    return make_row(
        NODES,
        point,
        [*time_notes(point), *gains["notes"], *exposed_notes],
        nodes=point.spec.num_nodes,
        scaling=scaling,
        epoch_time_s=time_s,
        node_speedup=gains["speedup"],
        node_efficiency=gains["parallel_efficiency"],
        exposed_share_of_epoch=exposed_s.over(time_s) if exposed_s is not None and time_s else None,
        **advices.get(id(point), {}),
    )


def node_claims(tables: Tables) -> list[Tile]:
    """Return the speed-up of the most nodes over one, and what limits it; none without a point on several nodes."""
    rows = tables["nodes"]
    if not rows:
        return []
    fit = [row for row in rows if not row.flaws_of("speedup")]
    most = max(row["nodes"] for row in fit or rows)
    label = f"{most} nodes against one"
    if not fit:
        why = ", ".join(f"{count} {reason}" for reason, count in Counter(map(reason_left_out, rows)).items())
        return [Tile(label, "unproven", line=f"no speed-up can be used: {why}")]
    best = max(
        (row for row in fit if row["nodes"] == most),
        key=lambda row: (row["scaling"] == "weak", float(row["node_speedup"])),
    )
    limit = limit_words(best)
    conditions = f"{best['num_gpus'] // most} $GPUs a node, {best['scaling']} scaling"
    more = conditions + where_of(best, rows, "num_nodes") + (f"; limited by {limit}" if limit else "")
    tile = Tile(label, more=more, badges=badges_of(best))
    return [gain_tile(tile, best, best["node_speedup"], best["node_efficiency"], most)]
