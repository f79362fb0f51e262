"""The link: the bandwidth of the gradients' buckets in training, and that of isolated collectives, its limit.

Then what travels in a step, counted by instruments.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

from pipeline.figures import comparability, formulas
from pipeline.figures.exposed_communication import (
    PointsByTraining,
    collectives_of_kinds,
    communications_of,
    job_notes,
    median_step_time,
    training_key,
    whole_step,
)
from pipeline.figures.notes import NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.plan.axes import CAPTURED_EXECUTIONS
from pipeline.plan.point_label import describe_point, varying_axes
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import STRATEGIES, Bytes
from pipeline.records.record import (
    Collective,
    Communication,
    Measurement,
    Operation,
    Record,
    SweptCollective,
    TransferKind,
)
from pipeline.report.plots import MAX_SERIES, LinePanel, Plot, Series, as_title, make_point
from pipeline.report.table import (
    COMM_TIME,
    EPOCH_TIME,
    NUM_WINDOWS,
    PLACE,
    STATUS,
    STEP_TIME,
    TEST_ACCURACY,
    Column,
    Row,
    Table,
    Tables,
    View,
    make_row,
)

NUM_BYTES = Column("num_bytes", "size [MB]", "Bytes of one all-reduce (S).", is_set=True)
BUS_BANDWIDTH = Column("busbw_gb_s", "bus bandwidth [GB/s]", "S/t x 2(N-1)/N (nccl-tests).")

BANDWIDTH = Table(
    "bandwidth",
    "Q3",
    (
        *PLACE,
        Column("bucket", "bucket", "Number of the bucket, in the order of the collectives.", is_set=True),
        NUM_BYTES,
        COMM_TIME._replace(heading="time [us]"),
        BUS_BANDWIDTH,
        Column(
            "peak_busbw_gb_s", "isolated [GB/s]", "busbw_gb_s of an isolated all-reduce of that size in the same job."
        ),
        Column("link_share", "of isolated [%]", "busbw_gb_s over peak_busbw_gb_s."),
    ),
    View(
        "Q3.2: bandwidth of the gradients' buckets, and how much of the link that is",
        "Bus bandwidth is size/time x 2(N-1)/N, as in nccl-tests; isolated: an all-reduce of that size by itself.",
        is_folded=True,
    ),
)

SWEEP = Table(
    "sweep",
    "Q3",
    (
        STATUS,
        NUM_BYTES,
        Column("time_s", "time [us]", "Time of one call, on the slowest rank."),
        Column("algbw_gb_s", "algorithm bandwidth [GB/s]", "S/t."),
        BUS_BANDWIDTH,
        NUM_WINDOWS,
    ),
    View(
        "Q3.2: the link's own limit, isolated collectives",
        "Times of a call on the slowest rank; n counts sweeps.",
        shows_n=True,
        is_folded=True,
    ),
)

SIZE_NOT_SWEPT = NoteKind("size_not_swept", "no isolated all-reduce of this size was timed")
NO_PAUSE_IN_TRAINING = NoteKind(
    "no_pause_in_training", "time on the fastest rank; isolated all-reduces follow a pause, this one does not"
)
SWEEP_WAITED_FOR_HOST = NoteKind(
    "sweep_waited_for_host", "the isolated all-reduces waited for the host: the link's limit lies higher"
)
SWEEPS_DIFFER = NoteKind("sweeps_differ", "isolated all-reduces of some repeats were captured, of others not")
NO_BUFFER_MEMORY = NoteKind("no_buffer_memory", "a rank had no memory for the buffer")

OF_STEPS = ("precision", "execution")  # facts that do not affect isolated all-reduces


class SweepKey(NamedTuple):
    """The place of a sweep, the execution of its calls, the GPU models, and the operation.

    Sweeps are pooled where all are equal.
    """

    device: str
    num_nodes: int
    num_gpus: int
    execution: str
    gpu: str
    operation: Operation = "all_reduce"


LinkKey = tuple[str, int, str]
MeasuredLinks = dict[LinkKey, float]  # the largest bus bandwidth of any isolated all-reduce, in GB/s


def link_key(record: Record) -> LinkKey:
    """Return the kind of place whose links are alike: device, number of nodes, and models of the GPUs."""
    return record.spec.device, record.spec.num_nodes, comparability.gpu_model(record)


def measured_links(records: Iterable[Record]) -> MeasuredLinks:
    """Return the largest bus bandwidth of any isolated collective on each kind of place."""
    links: MeasuredLinks = {}
    for record in records:
        for size in (size for part in communications_of([record]) for size in part.sweep if size.times_ns):
            time_s = statistics.median(size.times_ns) / 1e9
            busbw = formulas.busbw_gb_s(size.num_bytes, time_s, record.spec.num_gpus, size.operation)
            links[link_key(record)] = max(busbw, links.get(link_key(record), 0.0))
    return links


def bandwidth_rows(point: PooledPoint) -> list[Row]:
    """Return a row of Q3.2 for each bucket that DDP reduces, beside the isolated all-reduce of the same size."""
    found = communications_of(point.ok_records)
    profiles = [part.profile for part in found if part.profile]
    numbered = (pair for one in profiles for pair in enumerate(collectives_of_kinds(one, ["gradients"]), 1))
    # repeats need not have the same buckets
    buckets = group_pairs(((number, collective.num_bytes), collective) for number, collective in numbered)
    return [
        bandwidth_row(point, number, seen, isolated_time_s(found, num_bytes))
        for (number, num_bytes), seen in sorted(buckets.items())
    ]


def bandwidth_row(point: PooledPoint, bucket: int, seen: Sequence[Collective], isolated_s: float | None) -> Row:
    """Return the row of one bucket. Its time is the median over steps of the shortest time over ranks."""
    duration_s = statistics.median(min(ranks) for part in seen for ranks in part.durations_ns) / 1e9
    num_bytes, num_ranks = seen[0].num_bytes, point.spec.world_size
    achieved = formulas.busbw_gb_s(num_bytes, duration_s, num_ranks) if duration_s else None
    peak = formulas.busbw_gb_s(num_bytes, isolated_s, num_ranks) if isolated_s else None
    share = achieved / peak if achieved and peak else None
    notes = [] if peak else [make_note(SIZE_NOT_SWEPT)]
    if share is not None and share > 1:
        is_captured = sweep_key(point.ok_records[0]).execution in CAPTURED_EXECUTIONS
        notes.append(make_note(NO_PAUSE_IN_TRAINING if is_captured else SWEEP_WAITED_FOR_HOST))
    if len({sweep_key(record).execution for record in point.ok_records}) > 1:
        notes.append(make_note(SWEEPS_DIFFER))
    bandwidths = {"busbw_gb_s": achieved, "peak_busbw_gb_s": peak, "link_share": share}
    return make_row(BANDWIDTH, point, notes, bucket=bucket, num_bytes=num_bytes, comm_time_s=duration_s, **bandwidths)


def isolated_time_s(found: Sequence[Communication], num_bytes: int, operation: str = "all_reduce") -> float | None:
    """Return the median time of isolated collectives of that size in the same jobs; None where none was timed."""
    swept = [size for part in found for size in part.sweep if size.operation == operation]
    sizes = [size for size in swept if size.num_bytes == num_bytes]
    return formulas.median_of_known(time_ns / 1e9 for size in sizes for time_ns in size.times_ns)


def sweep_rows(points: Iterable[PooledPoint]) -> dict[SweepKey, list[Row]]:
    """Return a row for each size, by place, over all points that swept there."""
    records = [record for point in points for record in point.ok_records]
    timed = [(record, size) for record in records for part in communications_of([record]) for size in part.sweep]
    sweeps = group_pairs(
        ((sweep_key(record)._replace(operation=size.operation), size.num_bytes), (record, size))
        for record, size in timed
    )
    return group_pairs((key[0], sweep_row(*key, found)) for key, found in sorted(sweeps.items()))


def sweep_key(record: Record) -> SweepKey:
    """Return the place of a record's sweep and the execution of its calls."""
    spec, found = record.spec, record.communication
    execution = "graph" if found and found.sweep_captured else "eager"
    return SweepKey(spec.device, spec.num_nodes, spec.num_gpus, execution, comparability.gpu_model(record))


def sweep_row(place: SweepKey, num_bytes: int, found: Sequence[tuple[Record, SweptCollective]]) -> Row:
    """Return the row of one size; `n` counts the jobs that timed it. It has no figures if the buffer did not fit."""
    timed = [record for record, part in found if part.times_ns]
    times_ns = [time_ns for _, part in found for time_ns in part.times_ns]
    notes = comparability.mixed_environment_notes(timed, but=OF_STEPS) if timed else [make_note(NO_BUFFER_MEMORY)]
    figures: dict[str, Any] = {"num_bytes": num_bytes, "status": "ok" if timed else "oom", "num_windows": len(times_ns)}
    if time_s := statistics.median(times_ns or [0]) / 1e9:
        figures |= {"time_s": time_s, "algbw_gb_s": formulas.bandwidth_gb_s(num_bytes, time_s)}
        figures["busbw_gb_s"] = formulas.busbw_gb_s(num_bytes, time_s, place.num_gpus, place.operation)
    return Row(place._asdict() | {"gpu": place.gpu or None}, SWEEP.complete(figures), len(timed), tuple(notes))


def bandwidth_plots(tables: Tables) -> Iterator[Plot]:
    """Yield Q3.2: bus bandwidth against message size, of isolated collectives and of DDP's buckets.

    Of several collectives of one kind and size the fastest is shown, of several buckets each.
    """
    kinds = {"isolated": tables["sweep"], "DDP's buckets": tables["bandwidth"]}
    known = {kind: [row for row in rows if row["busbw_gb_s"] is not None] for kind, rows in kinds.items()}
    rows = [row for found in known.values() for row in found]
    axes = ["num_gpus", *varying_axes([{"gpu": row["gpu"]} for row in rows])]
    lines = []
    for style, link in enumerate(sorted(set(map(link_of, rows)))):
        for kind, found in known.items():
            own = [row for row in found if link_of(row) == link]
            points = sorted({make_point(row["num_bytes"], row, BUS_BANDWIDTH) for row in own})
            if is_isolated := kind == "isolated":
                points = list({point.x: point for point in points}.values())
            if points:
                named = describe_point(own[0].axes, ["operation"]) if is_isolated else ""
                label = f"{kind} {named}".strip() + f", {describe_point(own[0].axes, axes)}"
                lines.append(Series(label, tuple(points), style % MAX_SERIES, is_line=is_isolated))
    panel = LinePanel(as_title(BUS_BANDWIDTH.heading), "size of one message", tuple(lines), "bytes")
    yield Plot("q3-bandwidth", "Q3", "Bus bandwidth against message size", (panel,))


def link_of(row: Row) -> tuple[int, str, Operation]:
    """Return what the row's bandwidth depends on: GPUs, their model, and the operation, all-reduce for a bucket."""
    return row["num_gpus"], row["gpu"] or "", row.axes.get("operation", "all_reduce")


def transfer(kind: str, what: str, heading: str) -> tuple[Column, Column]:
    """Return the bytes and the calls per step of one kind of transfer."""
    return (
        Column(f"{kind}_bytes_per_step", heading, f"Bytes per step of {what}."),
        Column(f"{kind}_calls_per_step", "", f"Calls per step that send {what}."),
    )


GRADIENTS, GRADIENT_CALLS = transfer("gradients", "gradients", "gradients [MB]")

TRANSFERS = Table(
    "transfers",
    "Q3",
    (
        *PLACE,
        GRADIENTS,
        GRADIENT_CALLS._replace(heading="calls", decimals=0),
        Column(
            "gradients_bytes_formula", "by formula [MB]", "Bytes of the model's gradients (x N-1 under DataParallel)."
        ),
        *transfer("buffers", "buffers", "buffers [MB]"),
        *transfer("batchnorm_statistics", "the statistics of synchronized batch norm", "batch norm [MB]"),
        *transfer("parameters", "parameters", "parameters [MB]"),
        Column(
            "parameters_bytes_formula",
            "parameters by formula [MB]",
            "Bytes that FSDP gathers (each unit, and again if the forward pass frees it) or ZeRO-1 broadcasts.",
        ),
        *transfer("inputs", "inputs", "inputs [MB]"),
        *transfer("outputs", "outputs", "outputs [MB]"),
        STEP_TIME._replace(heading=""),
        EPOCH_TIME._replace(heading=""),
        TEST_ACCURACY._replace(heading=""),
    ),
    View(
        "Q3: what travels in a step, counted",
        "What one rank gives to collectives (under DataParallel: what leaves a $GPU), counted by instruments. A "
        "ring sends 2(N-1)/N of it.",
        is_folded=True,
        hides_zeros=True,
    ),
)
KINDS: tuple[TransferKind, ...] = get_args(TransferKind)


def transfer_row(point: PooledPoint, trained: PointsByTraining) -> Row:
    """Return the calls and bytes of one step by kind. Epoch time and accuracy come from training the same point."""
    found, spec = communications_of(point.ok_records), point.spec
    counted = {transfer.kind: transfer for part in found for transfer in part.transfers}
    keys = [(kind, quantity) for kind in KINDS for quantity in ("calls_per_step", "bytes_per_step")]
    absent = 0.0 if counted else None
    transfers = {f"{kind}_{quantity}": getattr(counted.get(kind), quantity, absent) for kind, quantity in keys}
    same = trained.get(training_key(point.gpu, point.spec), [])
    match = next((other for other in same if other.epoch_time is not None), None)  # a probe has no epoch time
    accuracy = match and match.median(lambda record: record.epochs[-1].test_accuracy if record.epochs else None)
    notes = [] if counted else job_notes(found)
    if match:
        notes += point.difference_notes("training", match)
    return make_row(
        TRANSFERS,
        point,
        **transfers,
        gradients_bytes_formula=formula_bytes(point.measurements, STRATEGIES[spec.strategy].gradient_bytes, spec),
        parameters_bytes_formula=formula_bytes(point.measurements, STRATEGIES[spec.strategy].parameter_bytes, spec),
        step_time_s=median_step_time(found, whole_step(found)),
        epoch_time_s=match.epoch_time if match else None,
        test_accuracy=accuracy,
        notes=notes,
    )


def formula_bytes(measured: Sequence[Measurement], by_formula: Bytes, spec: Spec) -> float | None:
    """Return the bytes in a step by a formula; None if that has none, or if the model's size is unknown."""
    if not measured or measured[0].gradient_bytes is None:
        return None
    return by_formula(measured[0].gradient_bytes, measured[0].sharding, spec)
