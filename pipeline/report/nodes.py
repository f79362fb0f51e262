"""Q2 beyond one machine: how much faster several nodes are than one, what is exposed there, and what limits it."""

from collections.abc import Sequence

from pipeline.figures import formulas
from pipeline.figures.exposed_communication import PointsByTraining
from pipeline.figures.intervals import Estimate, estimate, time_ratio_interval
from pipeline.figures.pooling import PooledPoint
from pipeline.figures.scaling import FIXED_AXIS, Scaling
from pipeline.plan.spec import alike_key
from pipeline.report.claims import Tile, badges_of, figure_of, shown, where_of
from pipeline.report.next_step import NEXT_STEP, Advices, limit_words
from pipeline.report.q3 import exposed_per_epoch
from pipeline.report.table import (
    EFFICIENCY,
    EPOCH_TIME,
    PLACE,
    SCALING,
    SPEEDUP,
    Column,
    Row,
    Table,
    Tables,
    View,
    make_row,
    sort_rows,
)

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
        "Against one node with as many $GPUs, and the same $images in both. The limit is the largest part of the time "
        "that a rule of docs/advice.md names.",
        lambda rows: sorted(sort_rows(rows), key=lambda row: str(row["scaling"]), reverse=True),
        keys=("node_speedup", "nodes", "scaling", "node_efficiency", "exposed_share_of_epoch", "limit", "limit_share"),
        hidden_notes=None,
    ),
)


def node_rows(points: Sequence[PooledPoint], measured: PointsByTraining, advices: Advices) -> list[Row]:
    """Return a row for each point on several nodes that has an alike one on one node, for both kinds of scaling."""
    found = []
    for scaling in SCALINGS:
        timed = [point for point in points if point.epoch_time and point.spec.is_whole_epoch]
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
    point: PooledPoint, baseline: PooledPoint, scaling: Scaling, measured: PointsByTraining, advices: Advices
) -> Row:
    """Return the row of a point on several nodes beside the one on one node."""
    time_s, one_s = point.epoch_time, baseline.epoch_time
    assert time_s is not None, "it is timed"
    assert one_s is not None, "so is the one on one node"
    gain = estimate(formulas.speedup(one_s, time_s), time_ratio_interval(one_s, time_s))
    exposed_s, _ = exposed_per_epoch(point, measured)
    advice = advices.get(id(point))
    return make_row(
        NODES,
        point,
        point.difference_notes("one node", baseline),
        nodes=point.spec.num_nodes,
        scaling=scaling,
        epoch_time_s=time_s,
        node_speedup=gain,
        node_efficiency=gain and gain.over(point.spec.num_nodes),
        exposed_share_of_epoch=None if exposed_s is None else exposed_s / time_s,
        **(advice._asdict() if advice else {}),
    )


def node_claims(tables: Tables) -> list[Tile]:
    """Return the speed-up of the most nodes over one, and what limits it; none without a point on several nodes."""
    rows = [row for row in tables["nodes"] if row["node_speedup"]]
    if not rows:
        return []
    most = max(row["nodes"] for row in rows)

    def usefulness(row: Row) -> tuple[bool, Estimate]:
        return row["scaling"] == "weak", row["node_speedup"]

    best = max((row for row in rows if row["nodes"] == most), key=usefulness)
    limit = limit_words(best)
    number, _, interval = figure_of(best["node_speedup"], ".2f")
    conditions = f"{best['num_gpus'] // most} $GPUs a node, {best['scaling']} scaling"
    tile = Tile(
        f"{most} nodes against one",
        f"{number}x",
        interval=interval,
        line=f"{shown(best['node_efficiency'], '.0%')} efficient",
        more=conditions + where_of(best, rows, "num_nodes") + (f"; limited by {limit}" if limit else ""),
        badges=badges_of(best),
    )
    return [tile]
