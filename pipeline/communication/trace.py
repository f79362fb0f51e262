"""Reading of a profiler's trace: the collectives of each step, and their overlap with compute.

The format is the chrome trace that torch.profiler exports (kineto): NCCL kernels with name and size of their
collective, and gloo's spans on the CPU.
"""

import gzip
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.experiment.measurement import TransferKind
from pipeline.training.strategies.strategy import CollectiveCall

SpanUs = tuple[float, float]  # start and end

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
ITEM_BYTES = {"float": 4, "long": 8, "long int": 8, "int": 4, "c10::half": 2, "half": 2, "c10::bfloat16": 2}
ITEM_BYTES |= {"bfloat16": 2, "double": 8, "bool": 1, "byte": 1, "unsigned char": 1}
NCCL_KERNEL = re.compile(r"nccl[A-Za-z]*Kernel_(?P<operation>[A-Za-z]+)")  # ncclDevKernel_, ncclSymkDevKernel_ ...
OPERATIONS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}


class ProfileFailed(RuntimeError):
    """The profiler failed, or its trace is too large, not valid, or not of the expected step. The steps ran."""


class TraceEvent(msgspec.Struct):
    """An event as kineto writes it; times in us."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class TraceFile(msgspec.Struct):
    traceEvents: list[TraceEvent]  # the other fields are for viewers


class TracedCollective(NamedTuple):
    """One collective as one rank ran it. `kind` is that of the step's call, None if the strategy does not call it."""

    operation: str
    num_bytes: int
    start_us: float
    duration_us: float
    kind: TransferKind | None = None


class RankTrace(NamedTuple):
    """One rank's profiled steps: collectives in order, and times in ns. Overlapping work counts once.

    comm_ns: the collectives that the strategy calls. compute_ns: all work of the GPU except NCCL's. overlap_ns: both at
    once.
    """

    collectives: list[TracedCollective]
    comm_ns: int
    compute_ns: int
    overlap_ns: int


def read_trace(path: Path, max_bytes: int) -> list[TraceEvent]:
    """Read the events of a trace, plain or gzipped (`.gz`).

    Raises ProfileFailed if it has more than `max_bytes` uncompressed, or is not valid.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise ProfileFailed(
            f"the trace of a rank is larger than {max_bytes} bytes, the limit in pipeline.communication.profiling; "
            "raise it"
        )
    try:
        return msgspec.json.decode(raw, type=TraceFile, strict=False).traceEvents
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProfileFailed(f"the trace of a rank cannot be read: {error}") from error


def summarize_trace(
    events: list[TraceEvent],
    calls: Sequence[CollectiveCall],
    num_ranks: int,
    expected: Sequence[tuple[str, int]] = (),
) -> RankTrace:
    """Summarize the communication in one rank's trace; `calls` are the collectives that the strategy calls in a step.

    `expected` has operation and bytes of each collective of one step. Give it for a captured step, since kernels inside
    a graph carry no sizes. Raises ProfileFailed if the trace holds other collectives.
    """
    collectives = sorted(filter(None, map(parse_collective, events)), key=lambda collective: collective.start_us)
    if expected:
        collectives = add_sizes(collectives, expected)
    on_gloo = not any(NCCL_KERNEL.match(event.name) for event in events)
    by_form = {form: call for call in calls for form in traced_forms(call, num_ranks, on_gloo)}
    collectives = [name_by_call(one, by_form.get((one.operation, one.num_bytes))) for one in collectives]
    work = [event for event in events if event.cat in DEVICE_WORK and not NCCL_KERNEL.match(event.name)]
    called = [one for one in collectives if one.kind]
    comm = merge_spans([(one.start_us, one.start_us + one.duration_us) for one in called])
    compute = merge_spans((event.ts, event.ts + event.dur) for event in work)
    return RankTrace(
        collectives,
        comm_ns=length_ns(comm),
        compute_ns=length_ns(compute),
        overlap_ns=overlap_ns(comm, compute),
    )


def add_sizes(traced: Sequence[TracedCollective], one_step: Sequence[tuple[str, int]]) -> list[TracedCollective]:
    """Return the collectives of one or more steps, with their sizes: `one_step` lists those of a single step.

    Raises ProfileFailed unless `traced` repeats the operations of that step a whole number of times.
    """
    expected = [*one_step] * (len(traced) // len(one_step))
    if [part.operation for part in traced] != [operation for operation, _ in expected]:
        raise ProfileFailed("the collectives of the captured step differ from those of the same step without a graph")
    return [part._replace(num_bytes=num_bytes) for part, (_, num_bytes) in zip(traced, expected, strict=True)]


def traced_forms(call: CollectiveCall, num_ranks: int, on_gloo: bool) -> list[tuple[str, int]]:
    """Return the operations and input bytes of one rank under which a trace may show a call."""
    num_bytes = call.num_bytes // num_ranks if call.operation == "all_gather" else call.num_bytes
    names = [call.operation]
    if on_gloo and call.operation == "reduce_scatter":
        names.append("all_reduce")  # as gloo runs it
    return [(name, num_bytes) for name in names]


def name_by_call(traced: TracedCollective, call: CollectiveCall | None) -> TracedCollective:
    """Return the collective with the kind, operation and bytes of its call, if it has one."""
    if call is None:
        return traced
    return traced._replace(kind=call.kind, operation=call.operation, num_bytes=call.num_bytes)


def parse_collective(event: TraceEvent) -> TracedCollective | None:
    kernel = NCCL_KERNEL.match(event.name) if event.cat == "kernel" else None
    if kernel is not None:
        operation = str(event.args.get("Collective name") or kernel["operation"])
        return TracedCollective(torch_operation_name(operation), nccl_bytes(event.args), event.ts, event.dur)
    if event.cat == "user_annotation" and event.name.startswith("gloo:"):
        return TracedCollective(event.name.removeprefix("gloo:"), gloo_bytes(event.args), event.ts, event.dur)
    return None


def torch_operation_name(operation: str) -> str:
    bare = operation.strip("_").lower().removesuffix("_base").replace("_", "")
    return next((name for start, name in OPERATIONS.items() if bare.startswith(start)), bare)


def nccl_bytes(args: dict[str, Any]) -> int:
    """Return the input bytes of one rank, from torch's annotations of an NCCL kernel; 0 if it has none."""
    return int(args["In msg nelems"]) * item_bytes(args.get("dtype")) if "In msg nelems" in args else 0


def gloo_bytes(args: dict[str, Any]) -> int:
    """Return the input bytes of one rank, from the shapes in a span of gloo."""
    dims, types = args.get("Input Dims", []), args.get("Input type", [])
    return sum(math.prod(shape) * item_bytes(kind) for shape, kind in zip(dims, types, strict=False))


def item_bytes(kind: object) -> int:
    """Return the bytes of an element from its type, as spelled by NCCL's annotations or gloo's spans.

    Raises ProfileFailed for an unknown type.
    """
    if str(kind).lower() not in ITEM_BYTES:
        raise ProfileFailed(f"the trace of a rank has elements of an unknown type {str(kind)[:40]!r}")
    return ITEM_BYTES[str(kind).lower()]


def merge_spans(spans: Iterable[SpanUs]) -> list[SpanUs]:
    """Merge spans that overlap or touch. Return them in order."""
    merged: list[SpanUs] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length_ns(spans: Iterable[SpanUs]) -> int:
    """Return the total length of disjoint spans, us -> ns."""
    return round(math.fsum(end - start for start, end in spans) * 1e3)


def overlap_ns(one: list[SpanUs], other: list[SpanUs]) -> int:
    """Return the length of the intersection of two sets of disjoint spans, us -> ns."""
    return length_ns(one) + length_ns(other) - length_ns(merge_spans([*one, *other]))
