"""Cancel the queued and running Slurm jobs of an experiment, and end a `submit` that runs its configurations here.

    python -m pipeline.cancel outputs/scaling
    python -m pipeline.cancel outputs/scaling --only RUN_ID

All records are kept. To run the cancelled configurations again, repeat the same command. If one experiment
cannot be cancelled, the others are, and the highest exit code counts. A job that has an id of the manifest, but
another name or owner, is named and runs on.
Exit codes: 0 success, also if nothing of the experiment was queued or running; 2 a folder cannot be read, it belongs
to another user, a submit process uses it, or a job also has configurations that --only does not name; 3 no experiment,
or an unknown RUN_ID; 4 Slurm refuses or is silent.
"""

import argparse
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.figures.pooling import group_pairs
from pipeline.records import store
from pipeline.records.folder import Experiment, Manifest, Submission, find_experiments
from pipeline.submission.read_progress import (
    find_elsewhere,
    find_jobs,
    find_lost_arrays,
    is_unfinished,
    published_launches,
    query_slurm,
)
from pipeline.submission.slurm_queries import JobKey, JobState, ask_slurm, job_text
from pipeline.system import errors
from pipeline.system.command_line import build_parser
from pipeline.system.errors import EXIT_SCHEDULER, CommandError, log_line, pluralize, replace_control_characters

END_WAIT_S = 60.0  # for the end of a process and its ranks
LAUNCH = re.compile(r"pipeline\.launch\b|\bddpscale\s+launch\b")
ENDING = "COMPLETING"  # Slurm is already ending the job's processes


class UnfinishedJob(NamedTuple):
    """An array element or plain job that is queued or running, and its points that this job has not recorded yet."""

    key: JobKey
    state: str  # as Slurm says it
    run_ids: list[str]


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("cancel", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    only = "only the job of this configuration; may be repeated"
    parser.add_argument("--only", action="append", default=[], metavar="RUN_ID", help=only)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    codes: list[int] = []  # of errors after which the command went on
    experiments = find_experiments(arguments.folder, lambda _: codes.append(errors.EXIT_USAGE))
    manifests: dict[str, Manifest] = {}
    for name, experiment in experiments.items():
        with errors.go_on_after_error(name, codes):
            if (manifest := experiment.read_manifest()) is not None:
                manifests[name] = manifest
    if not manifests and not codes:
        problem = f"no manifest under {arguments.folder}; submit an experiment first."
        raise CommandError(problem, errors.EXIT_NOTHING_FOUND)
    if not manifests:
        return max(codes)
    known = {spec.run_id() for manifest in manifests.values() for spec in manifest.points}
    if unknown := [run_id for run_id in arguments.only if run_id not in known]:
        problem = f"--only {unknown[0]}: no experiment under {arguments.folder} has this configuration"
        raise CommandError(f"{problem}; take a run id that status prints.", errors.EXIT_NOTHING_FOUND)
    num_cancelled = 0
    for name, manifest in manifests.items():
        run_ids = {spec.run_id() for spec in manifest.points}
        only = [run_id for run_id in arguments.only if run_id in run_ids]
        if only or not arguments.only:
            with errors.go_on_after_error(name, codes):
                num_cancelled += cancel_experiment(name, experiments[name], manifest, only)
    if num_cancelled:
        log_line(f"{pluralize(num_cancelled, 'job')} cancelled; the same submit runs their configurations again.")
    elif not codes:
        print(f"{'None of these configurations' if arguments.only else 'Nothing'} is queued or running in Slurm.")
    return max(codes, default=errors.EXIT_OK)


def cancel_experiment(name: str, experiment: Experiment, manifest: Manifest, only: list[str]) -> int:
    """Cancel the jobs of one experiment, or only the jobs of the points in `only`. Return the number of jobs.

    While this function holds the lock, no `submit` can add jobs. Raises CommandError, also if another process holds the
    lock, but for a `submit` that runs points on this machine: without `only` that one is ended.
    """
    is_running_here = experiment.is_being_submitted()
    if not manifest.arrays() and not is_running_here:
        driver = last_driver(manifest)
        if driver and driver.pid and driver.host != socket.gethostname():
            log_line(f"{name} ran on {driver.host}; if process {driver.pid} runs there still, end it there.")
        return 0
    experiment.refuse_manifest_of_another_user()
    if is_running_here and not only and end_driver(name, experiment, manifest) and not manifest.arrays():
        return 1
    with experiment.submission_lock():
        jobs = find_unfinished_jobs(experiment, experiment.read_manifest() or manifest)
        if only:
            jobs = select_jobs(jobs, only)
        if jobs:
            # without --only cancel whole arrays: to name each element would take up to thousands of arguments
            keys = {job.key if only else (job.key[0], None) for job in jobs}
            # for scancel it is no failure if a job has ended meanwhile
            ask_slurm("scancel", *map(job_text, keys), cure="some jobs may still be active; see status")
    for job in jobs:
        line = f"cancelled {name} job {job_text(job.key)} ({job.state.lower()}): {', '.join(job.run_ids)}"
        print(replace_control_characters(line))
    return len(jobs)


def end_driver(name: str, experiment: Experiment, manifest: Manifest) -> bool:
    """Interrupt the `submit` that runs points on this machine, and wait for its end.

    By SIGTERM: a process that a script began in the background ignores SIGINT.

    Return False if it is none that runs points itself: the manifest names its process, which must hold the lock.
    """
    driver = last_driver(manifest)
    if driver is None or driver.pid is None or not experiment.holds_submission_lock(driver.pid):
        return False
    os.kill(driver.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + END_WAIT_S
    while experiment.holds_submission_lock(driver.pid):
        if time.monotonic() > deadline_s:
            problem = f"process {driver.pid} on {driver.host} runs configurations of {name} and does not end"
            raise CommandError(f"{problem}; end it there with kill -KILL {driver.pid}.")
        time.sleep(0.1)
    print(replace_control_characters(f"ended {name} process {driver.pid} on this machine"))
    return True


def last_driver(manifest: Manifest) -> Submission | None:
    """Return the last submission that ran its points itself."""
    return next((part for part in reversed(manifest.submissions) if part.backend == "local"), None)


def find_unfinished_jobs(experiment: Experiment, manifest: Manifest) -> list[UnfinishedJob]:
    """Return the jobs that are queued or running. Raises CommandError (scheduler) if Slurm cannot be queried."""
    owners = experiment.job_owners()
    published = published_launches(store.load_folder(experiment.records_folder)[0])
    slurm = find_lost_arrays(query_slurm(manifest, owners), manifest, owners, published)
    if slurm.problem:
        sentence = f"{slurm.problem.partition(';')[0]}; run this command on the machine that submitted them."
        raise CommandError(sentence, EXIT_SCHEDULER)
    for reason, count in Counter(find_elsewhere(manifest, slurm, published).values()).items():
        log_line(f"{pluralize(count, 'configuration')}: {reason}.")
    unfinished = {key: job for key, job in slurm.job_states.items() if is_unfinished(job) and job.state != ENDING}
    unproven = {key: job for key, job in unfinished.items() if job.name == "" or job.uid is None}
    name_jobs_of_others({**slurm.of_others, **unproven})
    of_other_work = name_other_scripts({job_id for job_id, _ in unfinished.keys() - unproven.keys()}, manifest)
    points = group_pairs(
        (job.key, run_id)
        for run_id, jobs in find_jobs(manifest, unfinished, published).items()
        for job in jobs
        if job.may_publish and job.key not in unproven and job.key[0] not in of_other_work
    )
    return [UnfinishedJob(key, unfinished[key].state, run_ids) for key, run_ids in points.items()]


def name_other_scripts(job_ids: Collection[str], manifest: Manifest) -> set[str]:
    """Return the jobs of plain sbatch whose batch script does not run this project, with a line on stderr for each.

    Any job may have the name that a manifest states for it, and a manifest may be copied. An array of `submit` has the
    random digits of its submission in its name.
    """
    of_sbatch = {array.job_id for submission, array in manifest.arrays() if submission.backend == "sbatch"}
    other = {job_id for job_id in job_ids if job_id in of_sbatch and not LAUNCH.search(read_script(job_id))}
    for job_id in sorted(other):
        problem = "its batch script does not run pipeline.launch, or cannot be read"
        log_line(f"Job {job_id} is not cancelled: {problem}; if it is this experiment's, use scancel {job_id}.")
    return other


def read_script(job_id: str) -> str:
    """Return the batch script of a job, "" if Slurm does not give it."""
    try:
        return ask_slurm("scontrol", "write", "batch_script", job_id, "-")
    except CommandError:
        return ""


def name_jobs_of_others(jobs: Mapping[JobKey, JobState]) -> None:
    """Log a sentence for each unfinished job or array that is not cancelled, because it may belong to other work."""
    unfinished = {job_id: job for (job_id, _), job in jobs.items() if is_unfinished(job) and job.state != ENDING}
    for job_id, job in unfinished.items():
        owner = "an unknown user" if job.uid is None else f"user {job.uid}"
        found = f"Slurm says that it is {job.name or 'a job without a name'} of {owner}"
        log_line(f"Job {job_id} is not cancelled: {found}, not the manifest's; if it is yours, use scancel {job_id}.")


def select_jobs(jobs: Sequence[UnfinishedJob], only: Collection[str]) -> list[UnfinishedJob]:
    """Return the jobs that run the points named in `only`.

    Raises CommandError if such a job also has points that are not named: they would be cancelled with it.
    """
    selected = [job for job in jobs if not set(only).isdisjoint(job.run_ids)]
    for job in selected:
        others = [run_id for run_id in job.run_ids if run_id not in only]
        if others:
            options = " ".join(f"--only {run_id}" for run_id in others)
            problem = (
                f"job {job_text(job.key)} also has {pluralize(len(others), 'configuration')} that --only does not name"
            )
            raise CommandError(f"{problem}; to cancel them too, add {options}")
    return selected


if __name__ == "__main__":
    errors.run_command(main)
