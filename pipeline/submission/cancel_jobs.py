"""Cancelling: the jobs of an experiment that have not ended, and the scancel that ends them."""

import subprocess
from collections.abc import Collection, Sequence
from typing import NamedTuple

from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import Manifest
from pipeline.submission.read_progress import job_text, query_slurm, read_element_positions, submitted_jobs
from pipeline.submission.slurm_queries import JobKey
from pipeline.submission.state_rules import is_unfinished
from pipeline.system.errors import EXIT_SCHEDULER, CommandError
from pipeline.system.slurm_commands import run_slurm

ENDING = "COMPLETING"  # its processes are being ended already


class UnfinishedJob(NamedTuple):
    """An array element or plain job that is queued or running, and its points that have no record of it yet."""

    key: JobKey
    state: str  # as Slurm says it
    run_ids: list[str]


def find_unfinished_jobs(experiment: Experiment, manifest: Manifest) -> list[UnfinishedJob]:
    """Return the jobs of an experiment that are queued or running.

    Raises CommandError (scheduler) if Slurm does not say.
    """
    job_states, problem = query_slurm(manifest)
    if problem:
        sentence = f"{problem.partition(';')[0]}; run this command on the machine that submitted them."
        raise CommandError(sentence, EXIT_SCHEDULER)
    run_ids_by_job: dict[JobKey, list[str]] = {}
    for run_id, jobs in submitted_jobs(manifest).items():
        for job in jobs:
            if job in job_states and is_unfinished(job_states[job]) and job_states[job].state != ENDING:
                run_ids_by_job.setdefault(job, []).append(run_id)
    if not run_ids_by_job:
        return []
    found, _ = record_store.load_folder(experiment.records_folder)
    positions = read_element_positions(experiment, manifest, found)
    return [
        UnfinishedJob(job, job_states[job].state, left)
        for job, run_ids in run_ids_by_job.items()
        if (left := [run_id for run_id in run_ids if positions.of(run_id, job) != "passed"])
    ]


def select_jobs(jobs: Sequence[UnfinishedJob], only: Collection[str]) -> list[UnfinishedJob]:
    """Return the jobs that run the points named in `only`.

    Raises CommandError if such a job also has points that are not named: they would be cancelled with it.
    """
    selected = [job for job in jobs if not set(only).isdisjoint(job.run_ids)]
    for job in selected:
        others = [run_id for run_id in job.run_ids if run_id not in only]
        if others:
            options = " ".join(f"--only {run_id}" for run_id in others)
            problem = f"job {job_text(job.key)} would also lose {len(others)} of its points"
            raise CommandError(f"{problem}; to cancel them too, add {options}")
    return selected


def cancel_jobs(keys: Collection[JobKey]) -> None:
    """Cancel these jobs, in one call. The key (7, None) is the whole array 7.

    Raises CommandError (scheduler) if scancel fails; jobs that have ended meanwhile are no failure to it.
    """
    try:
        answer = run_slurm("scancel", *map(job_text, keys))
    except (subprocess.TimeoutExpired, OSError) as error:
        raise CommandError(f"scancel does not answer ({error}); try again.", EXIT_SCHEDULER) from error
    if answer.returncode:
        reason = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        raise CommandError(f"scancel failed: {reason}; some jobs may be left: look at status.", EXIT_SCHEDULER)
