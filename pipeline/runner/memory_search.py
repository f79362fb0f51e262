"""The search for the memory boundary of one point: a trial after another, each in new processes, made one record.

New processes, since after an out-of-memory the same process has fragments and handles that a fresh one has not. Close
below the boundary libraries may fail in other ways than by saying that memory ran out (oneDNN crashes, CUDA has met a
launch failure): such a trial does not fit either.
"""

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pipeline.analysis import memory_boundary
from pipeline.analysis.formulas import GIB
from pipeline.experiment import record_store
from pipeline.experiment.measurement import DeviceMemory, MemoryTrial
from pipeline.experiment.record import MAX_MESSAGE_CHARS, Failure, Record
from pipeline.experiment.spec import Spec
from pipeline.runner import failed_record
from pipeline.runner.failed_record import OOM_REASONS, RankExit
from pipeline.runner.rank_files import PointResult, PointTask, RankFiles
from pipeline.system.errors import log_line

MAX_OTHER_FAILURES = 2  # trials that failed otherwise close below one that ran out of memory
CRASH_EXIT_CODES = (
    -signal.SIGSEGV,
    -signal.SIGBUS,
)  # what native code makes of memory that it did not get, as exit codes

RunRanks = Callable[[Spec, RankFiles, str], dict[int, RankExit]]
"""Runs a point's ranks to their end and returns those that ended badly: pipeline.runner.torchrun.run_ranks."""


class FinishedTrial(NamedTuple):
    """How a trial ended: with a result, or with the failure that says why not."""

    trial: MemoryTrial
    rank_files: RankFiles
    result: PointResult | None
    failure: Failure | None


def search_memory(spec: Spec, rank_files: RankFiles, launch_id: str, run_ranks: RunRanks) -> Record:
    """Run trials until the boundary is known; the record lists them all.

    `oom` where not one sample fits, `failed` where a trial's failure says nothing of memory. Raises what `run_ranks`
    raises.
    """
    ended: list[FinishedTrial] = []
    while (
        size := memory_boundary.next_batch_size([part.trial for part in ended], spec.batch_size_per_gpu)
    ) is not None:
        folder = rank_files.folder / f"trial{len(ended)}"
        shutil.rmtree(folder, ignore_errors=True)  # of the launch that Slurm requeued
        ended.append(run_trial(spec, size, RankFiles(folder), f"{launch_id}-trial{len(ended)}", run_ranks))
        log_line(f"{spec.run_id()}: trial {len(ended)}: {describe_trial(ended[-1])}")
        failure = ended[-1].failure
        if failure and not is_memory_failure(failure, [part.trial for part in ended]):
            return failed_search_record(spec, ended[-1], launch_id, failure, bracket_text(ended))
    return search_record(spec, ended, launch_id)


def is_memory_failure(failure: Failure, trials: Sequence[MemoryTrial]) -> bool:
    """Whether the last trial's failure is the boundary's: memory ran out, or may have.

    That may be where an error or a crash of a rank's own, and not one too many, ends a trial close below one that ran
    out of memory. A lost peer, a kill, a limit of time or another process on the GPU tells nothing.
    """
    if failure.kind in OOM_REASONS:
        return True
    is_own = failure.kind == "exception" or failure.exit_code in CRASH_EXIT_CODES
    num_others = sum(trial.reason is not None for trial in trials)
    return is_own and num_others <= MAX_OTHER_FAILURES and memory_boundary.is_last_trial_near_oom(trials)


def run_trial(spec: Spec, batch_size: int, rank_files: RankFiles, trial_id: str, run_ranks: RunRanks) -> FinishedTrial:
    """Three full steps at a batch size; memory that ended on any rank ended for all, since they end together."""
    probe = spec.trial_spec(batch_size)
    rank_files.write_point(PointTask(probe, None, needs_free_gpus=True))
    started_ns = time.monotonic_ns()
    exits = run_ranks(probe, rank_files, trial_id)
    time_ns = time.monotonic_ns() - started_ns
    result = None if exits else rank_files.read_result()
    if result is None:
        failure = failed_record.find_root_cause(rank_files, exits)
        reason = None if failure.kind in OOM_REASONS else failed_record.first_line(failure)
        trial = MemoryTrial(batch_size_per_gpu=batch_size, fits=False, time_ns=time_ns, reason=reason)
        return FinishedTrial(trial, rank_files, None, failure)
    return FinishedTrial(fitting_trial(spec, batch_size, time_ns, result.measurement.memory), rank_files, result, None)


def fitting_trial(spec: Spec, batch_size: int, time_ns: int, memory: tuple[DeviceMemory, ...]) -> MemoryTrial:
    """A trial that fits, by its fullest device, and the retries of the device that has most."""
    fullest = max(memory, key=share_used)
    peak_bytes, usable_bytes = fullest.peak_allocated_bytes, fullest.usable_bytes
    if spec.device == "cpu" and usable_bytes is not None and spec.memory_limit_gib is not None:
        limit_bytes = int(spec.memory_limit_gib * GIB)  # counts from what the process held when it was set
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


def share_used(memory: DeviceMemory) -> float:
    """The share of a device that its peak takes; above all shares where it is not known of how much."""
    return memory.peak_allocated_bytes / memory.usable_bytes if memory.usable_bytes else float("inf")


def describe_trial(ended: FinishedTrial) -> str:
    """A trial in a line."""
    trial = ended.trial
    if ended.failure is not None:
        how = OOM_REASONS.get(ended.failure.kind, f"failed, {trial.reason}")
    else:
        how = f"fits, peak {(trial.peak_allocated_bytes or 0) / GIB:.2f} of {(trial.usable_bytes or 0) / GIB:.2f} GiB"
    return f"{trial.batch_size_per_gpu} per GPU: {how} ({trial.time_ns / 1e9:.0f} s)"


def search_record(spec: Spec, ended: list[FinishedTrial], launch_id: str) -> Record:
    """The record of a search that came to its end: of the largest batch that fits, with all trials."""
    found = memory_boundary.search_result([part.trial for part in ended])
    if found is None:
        smallest = min(ended, key=lambda part: part.trial.batch_size_per_gpu)
        assert smallest.failure is not None, "where nothing fits every trial has a failure"
        return failed_search_record(spec, smallest, launch_id, smallest.failure, known="")
    results = {part.trial.batch_size_per_gpu: part.result for part in ended if part.result}
    largest = results[found.largest_fitting]
    measurement = msgspec.structs.replace(largest.measurement, epochs=(), memory_search=found)
    return record_store.new_record(spec, "ok", launch_id, measurement=measurement, environment=largest.environment)


def bracket_text(ended: Sequence[FinishedTrial]) -> str:
    """What the trials before the last enclose, in brackets; nothing where they say nothing."""
    fits, fails = memory_boundary.bracket_of([part.trial for part in ended[:-1]])
    said = [f"{size} {what}" for size, what in ((fits, "fits"), (fails, "does not")) if size is not None]
    return f" ({', '.join(said)})" if said else ""


def failed_search_record(spec: Spec, ended: FinishedTrial, launch_id: str, failure: Failure, known: str) -> Record:
    """The record of a search that a trial ended, which its message and reason name with what is known by then."""
    where = f"at batch_size_per_gpu {ended.trial.batch_size_per_gpu}{known}"
    named = msgspec.structs.replace(failure, message=f"{where}: {failure.message}"[:MAX_MESSAGE_CHARS])
    record = failed_record.failure_record(spec, ended.rank_files, launch_id, named)
    reason = f"{OOM_REASONS[failure.kind]} {where}" if failure.kind in OOM_REASONS else record.reason
    return msgspec.structs.replace(record, reason=reason)
