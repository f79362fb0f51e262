"""The search for a point's memory boundary: trials of several batch sizes, one after another, that make one record.

Each trial runs in new processes: a process that ran out of memory keeps fragmented memory and open handles. Just
below the boundary a library may fail with an error that does not name memory: oneDNN has crashed, and CUDA has reported
a launch failure. The search counts such a batch as one that does not fit.
"""

import math
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pipeline.figures import memory_trials
from pipeline.figures.formulas import GIB
from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.record import MAX_MESSAGE_CHARS, DeviceMemory, Failure, MemoryTrial, Record, bracket_of
from pipeline.runner import failures
from pipeline.runner.failures import OOM_REASONS, RankExit
from pipeline.runner.rank_files import PointResult, PointTask, RankFiles
from pipeline.system.errors import log_line

MAX_OTHER_FAILURES = 2  # errors and crashes near the boundary that a search counts as "does not fit"
CRASH_EXIT_CODES = (-signal.SIGSEGV, -signal.SIGBUS)  # the crashes of native code that does not check its allocations

RunNodeRanks = Callable[[Spec, RankFiles, str], dict[int, RankExit]]
"""The type of pipeline.runner.start_ranks.run_node_ranks, which runs a point's ranks and returns those that failed."""


class FinishedTrial(NamedTuple):
    """A trial that has ended, with its result or its failure; the other one is None."""

    trial: MemoryTrial
    rank_files: RankFiles
    result: PointResult | None
    failure: Failure | None


def search_memory(task: PointTask, rank_files: RankFiles, launch_id: str, run_node_ranks: RunNodeRanks) -> Record:
    """Run trials until the boundary of the task's point is known. Return the record that lists them all.

    The record is `oom` if not even one sample fits, and `failed` if a trial failed for a reason other than memory.
    Raises whatever `run_node_ranks` raises.
    """
    spec = task.spec
    finished: list[FinishedTrial] = []
    trials: list[MemoryTrial] = []
    while (size := memory_trials.next_batch_size(trials, spec.batch_size_per_gpu)) is not None:
        folder = rank_files.folder / f"trial{len(trials)}"
        shutil.rmtree(folder, ignore_errors=True)  # left by the same launch before Slurm requeued it
        last = run_trial(task, size, RankFiles(folder), f"{launch_id}-trial{len(trials)}", run_node_ranks)
        finished.append(last)
        trials.append(last.trial)
        log_line(f"{spec.run_id()}: trial {len(trials)}: {describe_trial(last)}")
        if last.failure and not is_memory_failure(last.failure, trials):
            return failed_search_record(spec, last, launch_id, describe_bracket(trials[:-1]))
    return search_record(spec, finished, launch_id)


def is_memory_failure(failure: Failure, trials: Sequence[MemoryTrial]) -> bool:
    """True if the last trial failed because its batch is too large.

    An out-of-memory is such a failure. So is an exception or a crash of a rank, if the batch is at least 90 % of the
    smallest that ran out of memory and the search has had at most MAX_OTHER_FAILURES exceptions and crashes, this one
    included. A lost peer, a kill, a time limit and another process on the GPU say nothing about memory.
    """
    if failure.kind in OOM_REASONS:
        return True
    is_rank_error = failure.kind == "exception" or failure.exit_code in CRASH_EXIT_CODES
    num_other_failures = sum(trial.reason is not None for trial in trials)
    return is_rank_error and num_other_failures <= MAX_OTHER_FAILURES and memory_trials.is_last_trial_near_oom(trials)


def run_trial(
    task: PointTask, batch_size: int, rank_files: RankFiles, trial_id: str, run_node_ranks: RunNodeRanks
) -> FinishedTrial:
    """Run three full steps at a batch size, and return the trial. It fails if any rank fails."""
    spec = task.spec
    probe = spec.trial_spec(batch_size)
    rank_files.write_point(msgspec.structs.replace(task, spec=probe, needs_free_gpus=True))
    started_ns = time.monotonic_ns()
    exits = run_node_ranks(probe, rank_files, trial_id)
    time_ns = time.monotonic_ns() - started_ns
    outcome = failures.read_outcome(rank_files, exits)
    if isinstance(outcome, Failure):
        reason = None if outcome.kind in OOM_REASONS else outcome.message.partition("\n")[0]
        trial = MemoryTrial(batch_size_per_gpu=batch_size, fits=False, time_ns=time_ns, reason=reason)
        return FinishedTrial(trial, rank_files, None, outcome)
    trial = fitting_trial(spec, batch_size, time_ns, outcome.measurement.memory)
    return FinishedTrial(trial, rank_files, outcome, None)


def fitting_trial(spec: Spec, batch_size: int, time_ns: int, memory: tuple[DeviceMemory, ...]) -> MemoryTrial:
    """Return a trial that fits, with the memory of its fullest device and the most allocator retries of any device."""
    # a device whose usable memory is unknown counts as the fullest
    shares = [part.peak_allocated_bytes / part.usable_bytes if part.usable_bytes else math.inf for part in memory]
    fullest = memory[shares.index(max(shares))]
    peak_bytes, usable_bytes = fullest.peak_allocated_bytes, fullest.usable_bytes
    if spec.device == "cpu" and usable_bytes is not None and spec.memory_limit_gib is not None:
        limit_bytes = int(spec.memory_limit_gib * GIB)  # the limit leaves out memory allocated before it was set
        peak_bytes, usable_bytes = max(0, peak_bytes - (usable_bytes - limit_bytes)), limit_bytes
    retries = [part.num_alloc_retries for part in memory if part.num_alloc_retries is not None]
    return MemoryTrial(
        batch_size_per_gpu=batch_size,
        fits=True,
        time_ns=time_ns,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=fullest.peak_reserved_bytes,
        usable_bytes=usable_bytes,
        num_alloc_retries=max(retries, default=None),
    )


def describe_trial(finished: FinishedTrial) -> str:
    trial = finished.trial
    if finished.failure is not None:
        outcome = OOM_REASONS.get(finished.failure.kind, f"failed, {trial.reason}")
    else:
        used_gib, usable_gib = (trial.peak_allocated_bytes or 0) / GIB, (trial.usable_bytes or 0) / GIB
        outcome = f"fits, peak {used_gib:.2f} of {usable_gib:.2f} GiB"
    return f"{trial.batch_size_per_gpu} per GPU: {outcome} ({trial.time_ns / 1e9:.0f} s)"


def search_record(spec: Spec, finished: list[FinishedTrial], launch_id: str) -> Record:
    """Return the record of a complete search: the measurement of the largest batch that fits, with all trials."""
    found = memory_trials.search_result([part.trial for part in finished])
    if found is None:
        return failed_search_record(spec, min(finished, key=lambda part: part.trial.batch_size_per_gpu), launch_id)
    results = {part.trial.batch_size_per_gpu: part.result for part in finished if part.result}
    largest = results[found.largest_fitting]
    measurement = msgspec.structs.replace(largest.measurement, epochs=(), memory_search=found)
    return store.new_record(spec, "ok", launch_id, measurement=measurement, environment=largest.environment)


def describe_bracket(trials: Sequence[MemoryTrial]) -> str:
    """Return the largest batch that fits and the smallest that does not: " (256 fits, 512 does not)", or "" if none."""
    fits, fails = bracket_of(trials)
    parts = [f"{size} {outcome}" for size, outcome in ((fits, "fits"), (fails, "does not")) if size is not None]
    return f" ({', '.join(parts)})" if parts else ""


def failed_search_record(spec: Spec, last: FinishedTrial, launch_id: str, bracket: str = "") -> Record:
    """Return the record of a search that a failed trial ended. The reason names the batch and the bracket."""
    failure = last.failure
    assert failure is not None, "the trial failed"
    where = f"at batch_size_per_gpu {last.trial.batch_size_per_gpu}{bracket}"
    named = msgspec.structs.replace(failure, message=f"{where}: {failure.message}"[:MAX_MESSAGE_CHARS])
    record = failures.failure_record(spec, last.rank_files, launch_id, named)
    if failure.kind in OOM_REASONS:
        record = msgspec.structs.replace(record, reason=f"{OOM_REASONS[failure.kind]} {where}")
    return record
