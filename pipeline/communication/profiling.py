"""A short profiled pass, apart from timed steps: the collectives and the compute of each rank's device.

The format is the chrome trace that torch.profiler exports (kineto): NCCL kernels with name and size of their
collective, and gloo's spans on the CPU.
"""

import gzip
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.communication.step_variants import CollectiveCall
from pipeline.figures.pooling import group_pairs
from pipeline.records.record import Collective, Profile, Transfer, TransferKind
from pipeline.system import files
from pipeline.training import process_group
from pipeline.training.process_group import Rank
from pipeline.training.step import StepFunction

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

    `expected` has operation and bytes of each collective of one step. Give it for a CUDA-graph step, since kernels
    inside a graph carry no sizes. Raises ProfileFailed if the trace holds other collectives.
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
        raise ProfileFailed("the collectives of the CUDA-graph step differ from those of the same step without a graph")
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


NUM_PROFILED_STEPS = {"cuda": 10, "cpu": 6}  # an interval needs six
PROFILER_WARM_UP_STEPS = 2
MAX_TRACE_BYTES = 400_000_000  # per rank, uncompressed
TRACE_NAME = "rank{rank}.pt.trace.json.gz"  # the name that Holistic Trace Analysis expects; Perfetto opens it too


def profile_steps(
    step: StepFunction,
    rank: Rank,
    calls: Sequence[CollectiveCall],
    folder: Path | None = None,
    expected: Sequence[tuple[str, int]] = (),
) -> RankTrace:
    """Profile a few steps on this rank; all ranks begin together. The trace is kept in `folder`, if given.

    `calls` are the collectives that the strategy calls in a step. `expected` are the operations and bytes of the
    collectives of a CUDA-graph step (see trace.summarize_trace).
    If the profiler fails the steps run on without it, since the other ranks wait for this rank's collectives. Raises
    ProfileFailed at the end then, and what a step raises.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if rank.device.type == "cuda" else [])]
    num_steps = NUM_PROFILED_STEPS[rank.device.type]
    plan = schedule(wait=0, warmup=PROFILER_WARM_UP_STEPS, active=num_steps, repeat=1)
    profiler = profile(activities=activities, schedule=plan, record_shapes=True)
    failures: list[Exception] = []
    call_profiler(profiler.start, failures)
    for index in range(PROFILER_WARM_UP_STEPS + num_steps):
        step()
        if index == PROFILER_WARM_UP_STEPS - 1:
            process_group.barrier(rank)
        if index in (PROFILER_WARM_UP_STEPS - 1, PROFILER_WARM_UP_STEPS + num_steps - 1):
            process_group.synchronize(rank)  # keeps work of the warm-up out of the profiled steps
        call_profiler(profiler.step, failures)
    try:
        profiler.stop()  # also after a failure: a profiler left running would spoil the next one
    except (RuntimeError, AssertionError) as error:  # the second: it never started
        failures.append(error)
    with tempfile.TemporaryDirectory(prefix="pipeline-trace-") as scratch:
        path = Path(scratch) / "trace.json"
        call_profiler(lambda: profiler.export_chrome_trace(str(path)), failures)
        if failures:
            raise ProfileFailed(str(failures[0])) from failures[0]
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            kept = gzip.compress(path.read_bytes(), 6)
            files.replace_file_atomically(folder / TRACE_NAME.format(rank=rank.rank), kept)
        return summarize_trace(read_trace(path, MAX_TRACE_BYTES), calls, rank.world_size, expected)


def call_profiler(action: Callable[[], None], failures: list[Exception]) -> None:
    """Call a function of the profiler, unless one failed before; append its error to `failures`."""
    if failures:
        return
    try:
        with warnings.catch_warnings():
            # torch warns that it drops the events of earlier cycles; there is one cycle
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            action()
    except RuntimeError as error:
        failures.append(error)


def profile_ranks(
    step: StepFunction,
    rank: Rank,
    calls: Sequence[CollectiveCall],
    folder: Path | None = None,
    expected: Sequence[tuple[str, int]] = (),
) -> tuple[Profile | None, tuple[str, ...]]:
    """Profile a step on all ranks. Return the profile and notes; None if the profile of any rank failed.

    Arguments are those of profile_steps. Raises what a step raises: this ends the point at once, where a rank that
    went on would leave the others waiting in a collective.
    """
    found, problem = None, None
    try:
        found = profile_steps(step, rank, calls, folder, expected)
    except (ProfileFailed, OSError) as error:
        problem = f"rank {rank.rank}: no profile: {error}"
    gathered = process_group.all_gather((found, problem), tuple[RankTrace | None, str | None])
    problems = [text for _, text in gathered if text]
    if problems:
        return None, tuple(problems)
    traces = [part for part, _ in gathered if part]
    profile, note = combine_traces(traces, NUM_PROFILED_STEPS[rank.device.type])
    return profile, (note,) if note else ()


def combine_traces(traces: Sequence[RankTrace], num_steps: int) -> tuple[Profile, str | None]:
    """Combine the ranks' traces into one profile. Return it with a note if their collectives cannot be matched.

    Collectives of one operation have one order on all ranks. Those of two operations may overlap, in any order.
    """
    by_operation = [group_pairs((one.operation, one) for one in rank.collectives) for rank in traces]
    counts = [{operation: len(found) for operation, found in groups.items()} for groups in by_operation]
    note, matched = None, list[tuple[float, Collective]]()
    if not any(counts):
        note = "the profiler saw no collective (on GPUs it needs CUPTI): no figures"
    elif any(other != counts[0] for other in counts) or any(count % num_steps for count in counts[0].values()):
        named = [", ".join(f"{number} {operation}" for operation, number in sorted(count.items())) for count in counts]
        found = " or ".join(dict.fromkeys(named))
        note = f"the ranks' profiled collectives ({found}) do not divide into {num_steps} steps: no figures"
    else:
        for operation, count in counts[0].items():
            per_step = count // num_steps
            for index in range(per_step):
                matched.append(match_collective([groups[operation][index::per_step] for groups in by_operation]))
    profile = Profile(
        num_steps=num_steps,
        collectives=tuple(collective for _, collective in sorted(matched, key=lambda pair: pair[0])),
        comm_ns=tuple(rank.comm_ns for rank in traces),
        compute_ns=tuple(rank.compute_ns for rank in traces),
        overlap_ns=tuple(rank.overlap_ns for rank in traces),
    )
    return profile, note


def match_collective(by_rank: Sequence[Sequence[TracedCollective]]) -> tuple[float, Collective]:
    """Return one collective over ranks and steps, behind its start in us on the first rank."""
    first = by_rank[0][0]
    collective = Collective(
        kind=first.kind or ("buffers" if first.operation == "broadcast" else "batchnorm_statistics"),
        operation=first.operation,
        num_bytes=first.num_bytes,
        durations_ns=tuple(tuple(round(one.duration_us * 1e3) for one in step) for step in zip(*by_rank, strict=True)),
    )
    return first.start_us, collective


def mean_transfers(transfers: Iterable[tuple[TransferKind, int]], num_steps: int) -> tuple[Transfer, ...]:
    """Return calls and bytes per step for each kind of transfer, from the kind and bytes of each call."""
    return tuple(
        Transfer(kind=kind, calls_per_step=len(calls) / num_steps, bytes_per_step=sum(calls) / num_steps)
        for kind, calls in group_pairs(transfers).items()
    )
