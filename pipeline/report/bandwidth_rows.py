"""The rows of bandwidth: what each bucket of gradients reaches in training, and the link's own limit beside it."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.analysis import comparability, formulas
from pipeline.analysis.exposure import collectives_of_kinds, communications_of
from pipeline.analysis.pooling import PooledPoint
from pipeline.experiment.measurement import AllReduce, Collective, Communication
from pipeline.experiment.record import Record
from pipeline.experiment.spec import CAPTURED_EXECUTIONS
from pipeline.report.rows import Row, start_row

OF_STEPS = ("precision", "execution")  # facts that say nothing of isolated all-reduces
FASTER_IN_TRAINING = {  # whether the isolated all-reduces were captured
    True: "timed on the fastest rank, without the pause before it that isolated all-reduces have",
    False: "the isolated all-reduces waited for the host: the link's limit lies higher",
}


class SweepKey(NamedTuple):
    """Where collectives ran: one node's link is not that between nodes, and captured calls do not wait for the host."""

    device: str
    num_nodes: int
    num_gpus: int
    execution: str


def bandwidth_rows(cell: PooledPoint, axes: Sequence[str]) -> list[Row]:
    """Q3.2: each bucket's bus bandwidth in training, that of an isolated all-reduce of its size, and the share."""
    found = communications_of(cell.ok_records)
    buckets: dict[tuple[int, int], list[Collective]] = {}  # repeats need not have the same ones
    for profile in (part.profile for part in found if part.profile):
        for number, collective in enumerate(collectives_of_kinds(profile, ["gradients"]), 1):
            buckets.setdefault((number, collective.num_bytes), []).append(collective)
    return [
        bandwidth_row(cell, axes, number, seen, isolated_all_reduce_s(found, num_bytes))
        for (number, num_bytes), seen in sorted(buckets.items())
    ]


def bandwidth_row(
    cell: PooledPoint, axes: Sequence[str], bucket: int, seen: Sequence[Collective], alone_s: float | None
) -> Row:
    """One bucket; its duration is the shortest over ranks, the median over steps."""
    duration_s = statistics.median(min(ranks) for part in seen for ranks in part.durations_ns) / 1e9
    num_bytes, num_ranks = seen[0].num_bytes, cell.spec.world_size
    achieved = formulas.busbw_gb_s(num_bytes, duration_s, num_ranks) if duration_s else None
    peak = formulas.busbw_gb_s(num_bytes, alone_s, num_ranks) if alone_s else None
    share = achieved / peak if achieved and peak else None
    notes = [] if peak else ["no isolated all-reduce of this size was timed"]
    if share is not None and share > 1:
        notes.append(FASTER_IN_TRAINING[sweep_key(cell.ok_records[0]).execution in CAPTURED_EXECUTIONS])
    if len({sweep_key(record) for record in cell.ok_records}) > 1:
        notes.append("isolated all-reduces of some repeats were captured, of others not")
    return start_row(
        cell,
        axes,
        bucket=bucket,
        num_bytes=num_bytes,
        comm_time_s=duration_s,
        busbw_gb_s=achieved,
        peak_busbw_gb_s=peak,
        link_share=share,
        notes=notes,
    )


def isolated_all_reduce_s(found: Sequence[Communication], num_bytes: int) -> float | None:
    """An isolated all-reduce of that size in the same jobs: the median over windows."""
    times_ns = [time for part in found for size in part.sweep if size.num_bytes == num_bytes for time in size.times_ns]
    return statistics.median(times_ns) / 1e9 if times_ns else None


def sweep_rows(cells: Iterable[PooledPoint]) -> list[Row]:
    """The link's own limit by place and size, over all points that swept there."""
    sweeps: dict[tuple[SweepKey, int], list[tuple[Record, AllReduce]]] = {}
    for record in (record for cell in cells for record in cell.ok_records):
        for size in (size for part in communications_of([record]) for size in part.sweep):
            sweeps.setdefault((sweep_key(record), size.num_bytes), []).append((record, size))
    return [sweep_row(*key, found) for key, found in sorted(sweeps.items())]


def sweep_key(record: Record) -> SweepKey:
    """Where a record's sweep ran, and whether its calls were captured: by earlier records, if its steps were."""
    spec = record.spec
    return SweepKey(spec.device, spec.num_nodes, spec.num_gpus, execution_of_calls(record))


def execution_of_calls(record: Record) -> str:
    """How the calls of a record's sweep were issued."""
    found = record.measurement
    captured = found.communication.sweep_captured if found and found.communication else None
    if captured is None:
        return (found.execution_used if found else None) or record.spec.execution
    return "graph" if captured else "eager"


def sweep_row(place: SweepKey, num_bytes: int, found: Sequence[tuple[Record, AllReduce]]) -> Row:
    """One size, `n` the jobs that timed it; without figures where its buffer did not fit."""
    times_ns = [time_ns for _, part in found for time_ns in part.times_ns]
    time_s = statistics.median(times_ns) / 1e9 if times_ns else None
    notes = comparability.mixed_environment_notes([record for record, part in found if part.times_ns], but=OF_STEPS)
    return {
        **place._asdict(),
        "num_bytes": num_bytes,
        "status": "ok" if times_ns else "oom",
        "time_s": time_s,
        "algbw_gb_s": formulas.bandwidth_gb_s(num_bytes, time_s) if time_s else None,
        "busbw_gb_s": formulas.busbw_gb_s(num_bytes, time_s, place.num_gpus) if time_s else None,
        "num_windows": len(times_ns),
        "n": sum(bool(part.times_ns) for _, part in found),
        "note": "; ".join(notes) or None if times_ns else "no memory for the buffer on some rank",
    }
