"""A profiler's trace read for what travels: the collectives of each step, and what they overlap.

Understands the chrome trace that torch.profiler exports (kineto): NCCL kernels with their collective's name and
size, and gloo's spans on the CPU.
"""

import gzip
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.float64]  # [n, 2]: start and end in us

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
ITEM_BYTES = {"float": 4, "long": 8, "long int": 8, "int": 4, "c10::half": 2, "half": 2, "c10::bfloat16": 2}
ITEM_BYTES |= {"bfloat16": 2, "double": 8, "bool": 1, "byte": 1, "unsigned char": 1}
NCCL_KERNEL = re.compile(r"nccl[A-Za-z]*Kernel_(?P<operation>[A-Za-z]+)")  # Dev, SymkDev, ...
LAUNCH_GAP_US = 5.0  # between kernels that follow each other, most gaps are shorter: launches, there in any step
OPERATIONS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}


class TraceUnreadable(ValueError):
    """The trace is not what kineto should have written."""


class TraceTooLarge(TraceUnreadable):
    """The trace is larger than the limit, in bytes."""


class TraceEvent(msgspec.Struct):
    """One event as kineto writes it; times in us."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class TraceFile(msgspec.Struct):
    """The file: everything else in it is for viewers."""

    traceEvents: list[TraceEvent]


class TracedCollective(NamedTuple):
    """One collective as a rank ran it."""

    operation: str
    num_bytes: int
    start_us: float
    duration_us: float


class RankTrace(NamedTuple):
    """One rank's profiled steps: collectives in order, and unions of intervals on the device, in ns.

    `comm_ns` is of the collectives that reduce gradients, `compute_ns` of all other work on the device, `overlap_ns` of
    both at once, `covered_ns` of collectives beside other work or in a gap of at most LAUNCH_GAP_US of it.
    """

    collectives: list[TracedCollective]
    comm_ns: int
    compute_ns: int
    overlap_ns: int
    covered_ns: int


def read_trace(path: Path, max_bytes: int) -> list[TraceEvent]:
    """The events of a trace, gzipped or not. Raises TraceTooLarge past `max_bytes` of text, else TraceUnreadable."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise TraceTooLarge(
            f"the trace of a rank is larger than {max_bytes} bytes, the limit in pipeline.communication.profiling; "
            "raise it"
        )
    try:
        return msgspec.json.decode(raw, type=TraceFile, strict=False).traceEvents
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceUnreadable(f"the trace of a rank cannot be read: {error}") from error


def summarize_trace(
    events: list[TraceEvent], buckets: Collection[int], like: Sequence[tuple[str, int]] = ()
) -> RankTrace:
    """What one rank's trace says of communication; `buckets` are the sizes in which gradients travel, in bytes.

    `like` are operation and bytes of each collective of a step, for a step inside a graph: kernels carry no sizes
    there. Raises TraceUnreadable where the trace holds others.
    """
    collectives = sorted(filter(None, map(parse_collective, events)), key=lambda seen: seen.start_us)
    if like:
        collectives = add_sizes(collectives, like)
    compute = [
        (event.ts, event.ts + event.dur)
        for event in events
        if event.cat in DEVICE_WORK and not NCCL_KERNEL.match(event.name)
    ]
    comm = merge_intervals(
        [(seen.start_us, seen.start_us + seen.duration_us) for seen in collectives if carries_gradients(seen, buckets)]
    )
    work = merge_intervals(compute)
    return RankTrace(
        collectives,
        comm_ns=length_ns(comm),
        compute_ns=length_ns(work),
        overlap_ns=overlap_ns(comm, work),
        covered_ns=overlap_ns(comm, merge_intervals(compute, LAUNCH_GAP_US)),
    )


def add_sizes(seen: Sequence[TracedCollective], like: Sequence[tuple[str, int]]) -> list[TracedCollective]:
    """The collectives of some steps with the sizes that those of one step have, place by place.

    Raises TraceUnreadable where they are not whole steps of the same operations.
    """
    expected = [like[place % len(like)] for place in range(len(seen))]
    if len(seen) % len(like) or [part.operation for part in seen] != [operation for operation, _ in expected]:
        raise TraceUnreadable("the collectives inside the graph are not those of the same step outside it")
    return [part._replace(num_bytes=num_bytes) for part, (_, num_bytes) in zip(seen, expected, strict=True)]


def carries_gradients(seen: TracedCollective, buckets: Collection[int]) -> bool:
    """Whether a collective is the reduction of a bucket of gradients."""
    return seen.operation == "all_reduce" and seen.num_bytes in buckets


def parse_collective(event: TraceEvent) -> TracedCollective | None:
    """The collective that an event is, if it is one."""
    kernel = NCCL_KERNEL.match(event.name) if event.cat == "kernel" else None
    if kernel is not None:
        operation = str(event.args.get("Collective name") or kernel["operation"])
        return TracedCollective(plain_name(operation), nccl_bytes(event.args), event.ts, event.dur)
    if event.cat == "user_annotation" and event.name.startswith("gloo:"):
        return TracedCollective(event.name.removeprefix("gloo:"), gloo_bytes(event.args), event.ts, event.dur)
    return None


def plain_name(operation: str) -> str:
    """A collective's name as torch.distributed spells it."""
    bare = operation.strip("_").lower().removesuffix("_base").replace("_", "")
    return next((name for start, name in OPERATIONS.items() if bare.startswith(start)), bare)


def nccl_bytes(args: dict[str, Any]) -> int:
    """What one rank hands in, from the annotations that torch puts on NCCL's kernels; 0 of a kernel without them."""
    return int(args["In msg nelems"]) * item_bytes(args.get("dtype")) if "In msg nelems" in args else 0


def gloo_bytes(args: dict[str, Any]) -> int:
    """The same from the shapes of gloo's spans."""
    dims, types = args.get("Input Dims", []), args.get("Input type", [])
    return sum(int(np.prod(shape)) * item_bytes(kind) for shape, kind in zip(dims, types, strict=False))


def item_bytes(kind: object) -> int:
    """The size of an element, from its type as NCCL's annotations or gloo's spans spell it.

    Raises TraceUnreadable for one that is not known: a guess would be a wrong number of bytes.
    """
    try:
        return ITEM_BYTES[str(kind).lower()]
    except KeyError:
        raise TraceUnreadable(f"the trace of a rank has elements of an unknown type {str(kind)[:40]!r}") from None


def merge_intervals(intervals: list[tuple[float, float]], gap_us: float = 0.0) -> Intervals:
    """The intervals merged where no more than the gap lies between them, in order: [n, 2]."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start - merged[-1][1] <= gap_us:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged, dtype=np.float64).reshape(-1, 2)


def length_ns(intervals: Intervals) -> int:
    """The summed length of disjoint intervals, us -> ns."""
    return round(float((intervals[:, 1] - intervals[:, 0]).sum()) * 1e3)


def overlap_ns(one: Intervals, other: Intervals) -> int:
    """How long two sets of disjoint intervals go on at once, in ns."""
    both = merge_intervals([(float(start), float(end)) for start, end in (*one, *other)])
    return length_ns(one) + length_ns(other) - length_ns(both)
