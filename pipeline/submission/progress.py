"""Where every point of an experiment stands: its records, its submissions, and what Slurm says of them."""

import contextlib
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import Manifest, SlurmArray
from pipeline.experiment.outcomes import PointOutcome, resolve_outcomes
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Spec
from pipeline.submission import point_state, slurm_queries
from pipeline.submission.point_state import PointState
from pipeline.submission.slurm_queries import JobKey, JobState
from pipeline.system.errors import CommandError

LOG_TAIL_BYTES = 16_384


class PointProgress(NamedTuple):
    """One point: its outcome by its records, its state, and its job and log where it has them.

    `is_in_flight` holds while a job or a driver may still write a record for it, also where it has one already.
    """

    outcome: PointOutcome
    state: PointState
    is_in_flight: bool
    job: JobKey | None
    log: Path | None

    @property
    def spec(self) -> Spec:
        return self.outcome.spec


def read_progress(experiment: Experiment, manifest: Manifest, *, holds_lock: bool = False) -> list[PointProgress]:
    """The progress of every expected point.

    Where Slurm cannot be asked, the points that were submitted to it and have no record are `unknown`.
    `holds_lock`: the caller is the driver.
    """
    found, rejected = record_store.load_folder(experiment.records_folder)
    outcomes = resolve_outcomes(manifest.points, found, rejected).outcomes
    known, problem = query_slurm(manifest)
    jobs, submitted_run_ids = submitted_jobs(manifest)
    announced = {run_id for array in arrays_of(manifest) for element in array.elements for run_id in element}
    elements = point_state.read_element_positions(experiment, manifest, found)
    to_publish = submitted_again(manifest, found)
    driver_is_here = not holds_lock and experiment.is_being_submitted()
    logs = find_logs(experiment, manifest)
    now = datetime.now()
    result = []
    for outcome in outcomes:
        run_id = outcome.spec.run_id()
        job = choose_job(jobs.get(run_id, []), known)
        log, turn = logs.get(run_id), elements.of(run_id, job)
        unmeasured = outcome.status not in point_state.RECORDED_STATUSES
        told = known.get(job) if job is not None else None
        to_come = told is not None and point_state.is_unfinished(told) and turn != "over"
        if outcome.status == "missing" and run_id in announced and problem:
            state = PointState("unknown", problem)
        elif unmeasured and run_id not in announced and driver_is_here:
            state = PointState("pending", "a driver is at work on this machine")
        else:
            tail = read_log_tail(log, since=f"{run_id}: starting") if unmeasured else ""
            state = point_state.decide_state_in_element(outcome, told, turn, run_id in submitted_run_ids, tail, now)
        if to_come and not unmeasured and (run_id, job) in to_publish:
            coming = point_state.decide_state_in_element(outcome._replace(status="missing"), told, turn, True, "", now)
            state = point_state.note_next(state, coming)
        result.append(PointProgress(outcome, state, state.word in point_state.IN_FLIGHT or to_come, job, log))
    return result


def query_slurm(manifest: Manifest) -> tuple[dict[JobKey, JobState], str | None]:
    """The states of the manifest's jobs, or why Slurm cannot be asked.

    An array that was announced and whose driver died before naming it gets its id by its name.
    """
    arrays = arrays_of(manifest)
    if not arrays:
        return {}, None
    presence = slurm_queries.probe_slurm()
    if presence != "up":
        return {}, f"Slurm is {presence} here, so its jobs cannot be seen"
    try:
        nameless = [array for array in arrays if array.job_id is None]
        found = slurm_queries.find_jobs_named({array.job_name for array in nameless})
        for array in nameless:
            array.job_id = found.get(array.job_name)
        return slurm_queries.query_job_states({array.job_id for array in arrays if array.job_id is not None}), None
    except CommandError as refusal:
        return {}, str(refusal)


def arrays_of(manifest: Manifest) -> list[SlurmArray]:
    """Every array, in the order of submission."""
    return [array for submission in manifest.submissions for array in submission.arrays]


def submitted_jobs(manifest: Manifest) -> tuple[dict[str, list[JobKey]], set[str]]:
    """run id -> the jobs that were submitted for it, in order; and the points that a driver did submit.

    A plain sbatch registers every point of its grid, whichever elements it was given.
    """
    jobs: dict[str, list[JobKey]] = {}
    submitted_run_ids = set()
    for submission in manifest.submissions:
        for array in submission.arrays:
            for run_id, job in array.job_keys().items():
                jobs.setdefault(run_id, []).append(job)
                if submission.backend == "slurm":
                    submitted_run_ids.add(run_id)
    return jobs, submitted_run_ids


def submitted_again(manifest: Manifest, found: Iterable[Record]) -> set[tuple[str, JobKey]]:
    """The (run id, job) of which a driver submitted the job for the point, and no record is the job's yet."""
    published = {(record.run_id, point_state.launch_id_prefix_of(record.launch_id)) for record in found}
    return {
        (run_id, job)
        for submission in manifest.submissions
        if submission.backend == "slurm"
        for array in submission.arrays
        for run_id, job in array.job_keys().items()
        if (run_id, submission.launch_id_prefix) not in published
    }


def choose_job(jobs: list[JobKey], known: dict[JobKey, JobState]) -> JobKey | None:
    """The job that speaks for a point: one that is not finished, else the latest that Slurm knows."""
    seen = [job for job in jobs if job in known]
    unfinished = [job for job in seen if point_state.is_unfinished(known[job])]
    best = unfinished or seen
    return best[-1] if best else None


def find_logs(experiment: Experiment, manifest: Manifest) -> dict[str, Path]:
    """run id -> its latest log, as far as this tool placed it."""
    logs: dict[str, Path] = {}
    for submission in manifest.submissions:
        folder = experiment.log_folder(submission.id)
        for array in submission.arrays:
            for run_id, (job_id, index) in array.job_keys().items():
                name = job_id if index is None else f"{job_id}_{index}"
                logs[run_id] = folder / array.job_name / f"{name}_0_log.err"
        if submission.backend == "local":
            logs.update({path.name.removesuffix(".log"): path for path in folder.glob("*.log")})
    return {run_id: log for run_id, log in logs.items() if log.exists()}


def read_log_tail(log: Path | None, since: str = "") -> str:
    """The end of a log, and of those of the other nodes beside it; of each what follows the text, if it is there."""
    if log is None:
        return ""
    tails = []
    for path in [log, *sorted(log.parent.glob(log.name.replace("_0_log", "_[1-9]*_log")))]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
            tails.append(text.rpartition(since)[2] if since else text)
    return "\n".join(tails)
