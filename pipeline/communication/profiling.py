"""A short profiled pass, apart from timed steps: the collectives and the compute of each rank's device."""

import gzip
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.communication import trace
from pipeline.communication.trace import ProfileFailed, RankTrace, TracedCollective
from pipeline.experiment.measurement import Collective, Profile, Transfer, TransferKind
from pipeline.figures.pooling import group_pairs
from pipeline.system import files
from pipeline.training import process_group
from pipeline.training.process_group import Rank
from pipeline.training.step import StepFunction
from pipeline.training.strategies.strategy import CollectiveCall

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
    collectives of a captured step (see trace.summarize_trace).
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
            folder.mkdir(exist_ok=True)
            kept = gzip.compress(path.read_bytes(), 6)
            files.replace_file_atomically(folder / TRACE_NAME.format(rank=rank.rank), kept)
        return trace.summarize_trace(trace.read_trace(path, MAX_TRACE_BYTES), calls, rank.world_size, expected)


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
    by_operation = [group_pairs((one.operation, one) for one in trace.collectives) for trace in traces]
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
        comm_ns=tuple(trace.comm_ns for trace in traces),
        compute_ns=tuple(trace.compute_ns for trace in traces),
        overlap_ns=tuple(trace.overlap_ns for trace in traces),
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
