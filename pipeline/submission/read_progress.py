"""The progress of every point of an experiment: what its records, submissions, logs and Slurm say, and its state.

The rules of a state use its record, its job in Slurm, its position in the job's array element, and its log.
"""

import contextlib
import errno
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.folder import LOCAL_PREFIX, Experiment, Manifest, SlurmArray, Submission, as_job_name
from pipeline.records.outcomes import PointOutcome, resolve_outcomes
from pipeline.records.record import Record
from pipeline.runner.failures import SLURM_OOM_SIGNS, suggests_oom
from pipeline.submission import slurm_queries
from pipeline.submission.slurm_queries import JobKey, JobState, job_text
from pipeline.system import files
from pipeline.system.errors import EXIT_GAPS, EXIT_SCHEDULER, CommandError, full_disk_hint, log_line
from pipeline.system.host import parse_timestamp

RECORD_GRACE_S = 60  # a network file system may show a new record this late

WAITING_JOB_STATES = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "RESIZING", "SUSPENDED", "STOPPED"}
WAITING_JOB_STATES |= {"POWER_UP_NODE", "REQUEUED_CRON", "EXPEDITING"}  # 2nd: only Slurm 20.11, 3rd: since 25.11
HELD_JOB_STATES = {"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING_JOB_STATES = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "REVOKED"}
WORD_BY_ENDED_JOB_STATE = {
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "LAUNCH_FAILED": "node_fail",
    "RECONFIG_FAIL": "node_fail",
    "CANCELLED": "cancelled",
}
REASON_IF_REVOKED = "another cluster of the federation has started it (Slurm says REVOKED): see squeue --federation"
HELD_REASON = re.compile(r"JobHeld|JobHoldMaxRequeue|.*\bheld\b")  # "launch failed requeued held"
UNSUCCESSFUL_JOB_STATES = {*WORD_BY_ENDED_JOB_STATE, "FAILED", "OUT_OF_MEMORY"}
# some versions of Slurm add the node, and 26.05 writes the time in place of the name
SLURMSTEPD_ERROR = re.compile(r"(slurmstepd(-\S+)?:|\[[0-9T:.-]+\]) error: ")
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the batch script was killed, or a task, as srun reports it
ADVICE_BY_WAIT_REASON = {
    "PartitionDown": "the partition is down; cancel it, and choose another with --partition",
    "PartitionNodeLimit": "the partition has too few nodes; cancel it, and lower num_nodes or choose another",
    "PartitionTimeLimit": "the limit is longer than the partition allows; cancel it, and lower --time",
    "Resources": "waiting for nodes to become free",
    "Priority": "jobs of higher priority go first",
    "ReqNodeNotAvail": "the nodes are reserved or down",
    "AssocGrpGRES": "your account is at its GPU limit",
    "QOSMaxGRESPerUser": "you are at your GPU limit",
    "JobArrayTaskLimit": "--max-parallel holds it back",
    "DependencyNeverSatisfied": "it waits for a job that failed; cancel it",
}

PositionInElement = Literal["passed", "current", "waiting"]  # of a point, relative to the point that its job runs now
UNREAD = ("unknown", "elsewhere")  # states in which a job may still run
IN_FLIGHT = ("pending", "held", "running", "settling")  # states in which a record may still appear
RECORDED_STATUSES = ("ok", "oom", "failed")
LOG_TAIL_BYTES = 16_384
FIRST_POLL_S, LAST_POLL_S = 2, 30  # the wait doubles from query to query, to spare the Slurm controller


class PointState(NamedTuple):
    """One of the states that docs/exit-codes.md lists, and the reason."""

    word: str
    reason: str


class PointProgress(NamedTuple):
    """One point: its recorded outcome, its state, and its job and log if it has them."""

    outcome: PointOutcome
    state: PointState
    is_in_flight: bool  # a new record may still appear, even if the point has one already
    job: JobKey | None
    log: Path | None
    rerun: PointState | None = None  # the state of a new run of a point that has a result
    started_unix_s: float | None = None  # start of the launch that runs now

    @property
    def spec(self) -> Spec:
        return self.outcome.spec


PointsByExperiment = dict[str, list[PointProgress]]
Launch = tuple[str, str]  # run id, and prefix of the launch id
Launches = Container[Launch]


class PointJob(NamedTuple):
    """A job of a point: a plain job, or an array element, which runs its points one by one."""

    key: JobKey
    submission: Submission
    state: JobState | None  # None if Slurm does not know the job
    position: PositionInElement  # of the point in it

    @property
    def may_publish(self) -> bool:
        return self.state is not None and is_unfinished(self.state) and self.position != "passed"


class Facts(NamedTuple):
    """All that is known of an experiment's points, apart from their records."""

    slurm_problem: str | None  # why Slurm cannot be queried, None if it can
    elsewhere: Mapping[str, str]  # as find_elsewhere returns it
    jobs: dict[str, list[PointJob]]  # as find_jobs returns them
    in_arrays: set[str]  # run ids of all arrays, also of arrays without a job id
    published: set[Launch]  # as published_launches returns it
    starts: Mapping[Launch, float]  # as read_launch_starts returns it
    submit_is_here: bool  # another `submit` process on this machine holds the lock
    running_here: str | None  # the run id of the point that it runs now
    logs: dict[str, Path]
    interrupted: Mapping[str, str]  # run id -> what is known of the `submit` that began to run it
    full_disk: str  # what full_disk_hint says of the experiment's folder now
    now: datetime


def read_progress(experiment: Experiment, manifest: Manifest, *, holds_lock: bool = False) -> list[PointProgress]:
    """Return the progress of every expected point. `holds_lock`: the caller itself holds the submission lock.

    If Slurm does not answer, points that were submitted to it and have no record are `unknown`.
    """
    # Slurm and the lock first: a job or a `submit` that has ended by then has published its records
    owners = experiment.job_owners()
    slurm = query_slurm(manifest, owners)  # adds missing job ids to the manifest
    submit_is_here = not holds_lock and experiment.is_being_submitted()
    found, rejected = store.load_folder(experiment.records_folder)
    published, starts = published_launches(found), read_launch_starts(experiment, found)
    slurm = find_lost_arrays(slurm, manifest, owners, published)
    logs = find_logs(experiment, manifest)
    facts = Facts(
        slurm_problem=slurm.problem,
        elsewhere=find_elsewhere(manifest, slurm, published),
        jobs=find_jobs(manifest, slurm.job_states, published, starts),
        in_arrays={run_id for _, array in manifest.arrays() for run_id in chain(*array.elements)},
        published=published,
        starts=starts,
        submit_is_here=submit_is_here,
        running_here=find_running_here(manifest, starts) if submit_is_here else None,
        logs=logs,
        interrupted={} if submit_is_here else find_interrupted(manifest, logs, starts),
        full_disk=full_disk_now(experiment.folder),
        now=datetime.now(),
    )
    return [find_progress(outcome, facts) for outcome in resolve_outcomes(manifest.points, found, rejected).outcomes]


def refusal_of_unread_state(progress: PointProgress, or_else: str = "") -> CommandError | None:
    """Return the error for a point that may still run, where nobody can tell; else None."""
    run_id, (word, reason) = progress.spec.run_id(), progress.state
    if word == "elsewhere":
        return CommandError(f"{run_id} was {reason}{or_else}.", EXIT_SCHEDULER)
    if word == "unknown":
        problem = f"the state of {run_id} cannot be read ({reason.partition(';')[0]}), and it may still be running"
        return CommandError(f"{problem}; try again when Slurm answers{or_else}.", EXIT_SCHEDULER)
    return None


def find_progress(outcome: PointOutcome, facts: Facts) -> PointProgress:
    run_id = outcome.spec.run_id()
    job = choose_job(facts.jobs.get(run_id, []))
    state = decide_current_state(outcome, job, facts)
    rerun = decide_rerun_state(outcome, job, facts)
    if rerun is not None:
        note = f"being run again: {rerun.word}" + (f", {rerun.reason}" if rerun.reason else "")
        state = state._replace(reason=f"{state.reason}; {note}" if state.reason else note)
    may_publish = job is not None and job.may_publish
    is_in_flight = state.word in IN_FLIGHT or may_publish or rerun is not None
    is_running = "running" in (state.word, rerun.word if rerun else "")
    prefix = job.submission.launch_id_prefix if job else LOCAL_PREFIX
    started_s = facts.starts.get((run_id, prefix)) if is_running else None
    return PointProgress(outcome, state, is_in_flight, job and job.key, facts.logs.get(run_id), rerun, started_s)


def decide_current_state(outcome: PointOutcome, job: PointJob | None, facts: Facts) -> PointState:
    """Return the state of a point. A new run does not change the state of a point that has a result."""
    run_id, has_result = outcome.spec.run_id(), outcome.status in RECORDED_STATUSES
    if outcome.status == "missing" and run_id in facts.in_arrays and facts.slurm_problem:
        return PointState("unknown", facts.slurm_problem)
    if outcome.status == "missing" and run_id in facts.elsewhere:
        return PointState("elsewhere", facts.elsewhere[run_id])
    if not has_result and run_id == facts.running_here:
        return PointState("running", "")
    if not has_result and run_id not in facts.jobs and facts.submit_is_here:
        return PointState("pending", "a submit process on this machine is running or submitting it")
    log = facts.logs.get(run_id)
    tail = "" if has_result else read_log_tail(log, since=f"{run_id}: starting")
    if outcome.status == "missing" and run_id not in facts.in_arrays and log is not None:
        full = full_disk_hint(tail) or facts.full_disk  # then the log may lack even its first line
        if full or run_id in facts.interrupted:
            return PointState("missing", f"no record; {full}" if full else f"interrupted: {facts.interrupted[run_id]}")
    # a plain sbatch does not count: the manifest lists its whole grid, even if only some elements were submitted
    was_submitted = any(other.submission.backend == "slurm" for other in facts.jobs.get(run_id, []))
    in_slurm, position = (job.state, job.position) if job else (None, "current")
    return decide_state(outcome, in_slurm, was_submitted, tail, facts.now, position)


def decide_rerun_state(outcome: PointOutcome, job: PointJob | None, facts: Facts) -> PointState | None:
    """Return the state of a new run of a point that has a result, None without a new run.

    A plain sbatch skips recorded points unless --rerun is given: there a new run is one that has started.
    """
    run_id = outcome.spec.run_id()
    if outcome.status not in RECORDED_STATUSES:
        return None
    if job is not None and job.may_publish:
        launch = (run_id, job.submission.launch_id_prefix)
        if launch not in facts.published and (launch in facts.starts or job.submission.backend != "sbatch"):
            return decide_state(outcome._replace(status="missing"), job.state, True, "", facts.now, job.position)
    return PointState("running", "") if run_id == facts.running_here else None


def published_launches(found: Iterable[Record]) -> set[Launch]:
    """Return the launches that have a record."""
    return {(record.run_id, record.launch_id.partition("-")[0]) for record in found}


def read_launch_starts(experiment: Experiment, found: Iterable[Record]) -> dict[Launch, float]:
    """Return the start of the newest launch without a record, in unix time."""
    published = {(record.run_id, record.launch_id) for record in found}
    starts: dict[Launch, float] = {}
    for folder in experiment.launch_folders():
        run_id, _, launch_id = folder.name.partition(".")
        for name in ("point.json", "trial0/point.json") if (run_id, launch_id) not in published else ():
            with contextlib.suppress(OSError):
                key = (run_id, launch_id.partition("-")[0])
                starts[key] = max(starts.get(key, 0.0), (folder / name).stat().st_mtime)
    return starts


def full_disk_now(folder: Path) -> str:
    """Return that the disk of a folder is full, with the cure; "" if it is not, or cannot say."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        if disk.f_bavail == 0 or (disk.f_files > 0 and disk.f_favail == 0):
            return full_disk_hint(os.strerror(errno.ENOSPC))
    return ""


def find_running_here(manifest: Manifest, starts: Mapping[Launch, float]) -> str | None:
    begun = [submission.submitted_at for submission in manifest.submissions if submission.backend == "local"]
    since_unix_s = max((parse_timestamp(text).timestamp() for text in begun), default=float("inf"))
    own = {run_id: start for (run_id, prefix), start in starts.items() if prefix == LOCAL_PREFIX}
    newest = max(own, key=own.__getitem__, default=None)
    return newest if newest is not None and own[newest] >= since_unix_s else None


def find_interrupted(manifest: Manifest, logs: Mapping[str, Path], starts: Mapping[Launch, float]) -> dict[str, str]:
    """Return run id -> a clause on its driver, of the points that a `submit` without Slurm began to run.

    Its log is in that submission's folder. Whether a driver on another host runs on is not known here.
    """
    found = {}
    drivers = {submission.id: submission for submission in manifest.submissions if submission.backend == "local"}
    for run_id, log in logs.items():
        driver = drivers.get(log.parent.name)
        began_s = starts.get((run_id, LOCAL_PREFIX))
        if driver and began_s is not None and began_s >= parse_timestamp(driver.submitted_at).timestamp():
            process = f"process {driver.pid} on {driver.host}" if driver.pid else f"its process on {driver.host}"
            is_here = driver.host == socket.gethostname()
            found[run_id] = f"submit ({process}) {'ended' if is_here else 'may have ended'} before its record"
    return found


class SlurmAnswer(NamedTuple):
    """The states of a manifest's jobs; none, and the `problem`, if Slurm cannot be queried.

    `of_others` are jobs with an id of the manifest and another name or owner: Slurm's ids may restart, two clusters may
    share a home, and a stranger may have written the manifest.
    """

    job_states: Mapping[JobKey, JobState] = {}
    of_others: Mapping[JobKey, JobState] = {}
    problem: str | None = None


def query_slurm(manifest: Manifest, owners: Collection[int]) -> SlurmAnswer:
    """Return what Slurm says of the manifest's jobs, which these users own.

    An array has no job id if `submit` died before it stored it: then set the id of Slurm's job with the array's name.
    """
    arrays = [array for _, array in manifest.arrays()]
    if not arrays:
        return SlurmAnswer()
    presence = slurm_queries.probe_slurm()
    if presence != "up":
        cure = "run this command on the machine that submitted them"
        return SlurmAnswer(problem=f"Slurm is {presence} here, so the states of its jobs cannot be read; {cure}")
    try:
        set_ids_by_name([array for array in arrays if array.job_id is None], owners)
        return query_arrays(arrays, owners)
    except CommandError as refusal:
        return SlurmAnswer(problem=str(refusal))


def query_arrays(arrays: Sequence[SlurmArray], owners: Collection[int]) -> SlurmAnswer:
    """Return what Slurm says of the jobs that have the ids of these arrays. Raises CommandError (scheduler)."""
    names = {array.job_id: array.job_name for array in arrays if array.job_id is not None}
    job_states = slurm_queries.query_job_states(names)
    of_others = {key: job for key, job in job_states.items() if is_of_others(job, names[key[0]], owners)}
    return SlurmAnswer({key: job for key, job in job_states.items() if key not in of_others}, of_others)


def set_ids_by_name(arrays: Sequence[SlurmArray], owners: Collection[int]) -> list[SlurmArray]:
    """Set the job ids of Slurm's jobs with the arrays' names. Return the arrays whose id is another one now."""
    found = slurm_queries.find_jobs_named({array.job_name for array in arrays}, owners)
    changed = [array for array in arrays if found.get(array.job_name, array.job_id) != array.job_id]
    for array in changed:
        array.job_id = found[array.job_name]
    return changed


def find_lost_arrays(
    slurm: SlurmAnswer, manifest: Manifest, owners: Collection[int], published: Container[Launch]
) -> SlurmAnswer:
    """Return the answer with the jobs of arrays of which Slurm does not know the id, but the unique name of `submit`.

    The manifest gets their ids. A site's sbatch may have printed another number. Only arrays without all records count.
    """
    known = {job_id for job_id, _ in slurm.job_states}
    lost = [
        array
        for submission, array in manifest.arrays()
        if submission.backend == "slurm" and array.job_id is not None and array.job_id not in known
        if any((run_id, submission.launch_id_prefix) not in published for run_id in chain(*array.elements))
    ]
    if not lost or slurm.problem is not None:
        return slurm
    with contextlib.suppress(CommandError):  # then what Slurm has just said of the ids counts
        more = query_arrays(set_ids_by_name(lost, owners), owners)
        still = {array.job_id for _, array in manifest.arrays()}
        of_others = {key: job for key, job in {**slurm.of_others, **more.of_others}.items() if key[0] in still}
        return SlurmAnswer({**slurm.job_states, **more.job_states}, of_others)
    return slurm


def find_elsewhere(manifest: Manifest, slurm: SlurmAnswer, published: Container[Launch]) -> dict[str, str]:
    """Return run id -> why Slurm here does not know its latest job: that of another cluster. Two may share a home."""
    known = {job_id for job_id, _ in slurm.job_states}
    latest = {
        run_id: (submission, array) for submission, array in manifest.arrays() for run_id in chain(*array.elements)
    }
    unknown = {
        run_id: submission.cluster
        for run_id, (submission, array) in latest.items()
        if submission.cluster and array.job_id not in known and (run_id, submission.launch_id_prefix) not in published
    }
    here = slurm_queries.query_cluster_name() if unknown and not slurm.problem else None
    return {
        run_id: f"submitted to the Slurm cluster {cluster}, and this is {here}; run this command there"
        for run_id, cluster in unknown.items()
        if here not in (None, cluster)
    }


def is_of_others(job: JobState, job_name: str, owners: Collection[int]) -> bool:
    """True if Slurm says that the job has another name than its array, or another owner than these."""
    has_other_name = job.name != "" and as_job_name(job.name) != job_name
    return has_other_name or (job.uid is not None and job.uid not in owners)


def find_jobs(
    manifest: Manifest, job_states: Mapping[JobKey, JobState], published: Launches, starts: Launches = ()
) -> dict[str, list[PointJob]]:
    """Return run id -> its jobs, oldest first. Slurm's ids may restart: the latest array has the job."""
    jobs: dict[str, list[PointJob]] = {}
    latest = {array.job_id: array for _, array in manifest.arrays()}
    for submission, array in manifest.arrays():
        for run_id, key in array.job_keys().items() if latest[array.job_id] is array else ():
            launches = [(other, submission.launch_id_prefix) for other in array.elements[key[1] or 0]]
            position = find_position((run_id, submission.launch_id_prefix), launches, published, starts)
            state = job_states.get(key) or job_states.get((key[0], None))  # one of all, cancelled before any began
            jobs.setdefault(run_id, []).append(PointJob(key, submission, state, position))
    return jobs


def find_position(
    launch: Launch, launches: Sequence[Launch], published: Launches, starts: Launches
) -> PositionInElement:
    """Return the position of one of the launches of an element, which run in this order."""
    if len(launches) == 1:
        return "current"
    if any(later in published for later in launches[launches.index(launch) :]):
        return "passed"
    return "current" if launch == launches[0] or launch in starts else "waiting"


def choose_job(jobs: Sequence[PointJob]) -> PointJob | None:
    """Return the job that decides the state of a point: the latest unfinished one, else the latest that Slurm knows."""
    known = [job for job in jobs if job.state is not None]
    best = [job for job in known if job.state is not None and is_unfinished(job.state)] or known
    return best[-1] if best else None


def find_logs(experiment: Experiment, manifest: Manifest) -> dict[str, Path]:
    """Return run id -> its latest log, if this user may see it and it is no link or FIFO."""
    logs: dict[str, Path] = {}
    for submission in manifest.submissions:
        folder = experiment.log_folder(submission.id)
        for array in submission.arrays:
            is_sbatch = submission.backend == "sbatch"
            of_sbatch = logs_of_job_file(experiment.folder.parent, array) if is_sbatch else {}
            for run_id, job in array.job_keys().items():
                of_submit = folder / f"{array.job_name}-{job_text(job)}.log"
                logs[run_id] = of_sbatch.get(job_text(job), Path()) if is_sbatch else of_submit
        if submission.backend == "local":
            logs.update({path.name.removesuffix(".log"): follow_link_beside(path) for path in folder.glob("*.log")})
    return {run_id: log for run_id, log in logs.items() if os.path.isfile(log) and not os.path.islink(log)}


def logs_of_job_file(outputs: Path, array: SlurmArray) -> dict[str, Path]:
    """Return job -> its latest log where a job file puts it: NAME-7_0-NODE.log, formerly NAME-7_0.log."""
    logs = {}
    for log in sorted(outputs.glob(f"*-{array.job_id}[-_.]*log"), key=lambda path: path.lstat().st_mtime):
        name, job = log.name[: len(array.job_name)], log.name[len(array.job_name) + 1 :]
        if as_job_name(name) == array.job_name:  # Slurm's own name may have capitals
            logs[job.removesuffix(".log").partition("-")[0]] = log
    return logs


def follow_link_beside(log: Path) -> Path:
    """Return the file in the same folder that a log links to (points of one element share one), else the log."""
    with contextlib.suppress(OSError, ValueError):  # it is no link, or it links to another folder
        return log.with_name(os.readlink(log))
    return log


def read_log_tail(log: Path | None, since: str = "") -> str:
    """Return the last 16 KiB of a log, without the text up to the last `since`; "" if it cannot be read."""
    with contextlib.suppress(files.UnreadableFile):
        text = files.read_tail(log, LOG_TAIL_BYTES).decode(errors="replace") if log else ""
        return text.rpartition(since)[2] if since else text
    return ""


def poll_until_finished(experiments: Mapping[str, Experiment]) -> Iterator[PointsByExperiment]:
    """Yield the progress of the experiments that have a manifest, until no point is in flight or unknown.

    Where there is no Slurm, what is unknown stays so.
    """
    poll_s = FIRST_POLL_S
    while True:
        manifests = {name: experiment.read_manifest() for name, experiment in experiments.items()}
        progress = {name: read_progress(experiments[name], found) for name, found in manifests.items() if found}
        yield progress
        points = [*chain(*progress.values())]
        is_open = any(point.is_in_flight for point in points)
        is_unknown = any(point.state.word == "unknown" for point in points)
        if not is_open and (not is_unknown or slurm_queries.probe_slurm() == "absent"):
            return
        time.sleep(poll_s)
        poll_s = min(LAST_POLL_S, poll_s * 2)


def wait_until_finished(experiment: Experiment) -> None:
    """Wait until no point is in flight or unknown. Log the number of points in each state when it changes."""
    last_summary = ""
    for progress in poll_until_finished({"": experiment}):
        counts = Counter(point.state.word for point in chain(*progress.values()))
        summary = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        if summary != last_summary:
            log_line(summary)
            last_summary = summary


def count_gaps(experiment: Experiment, specs: Sequence[Spec]) -> int:
    attempts = store.load_attempts(experiment.records_folder, {spec.run_id() for spec in specs})
    return resolve_outcomes(specs, attempts, ()).coverage.num_gaps


def decide_state(
    outcome: PointOutcome,
    job: JobState | None,
    was_submitted: bool,
    log_tail: str,
    now: datetime,
    position: PositionInElement = "current",
) -> PointState:
    """Return the state of a point. `job` is None if Slurm does not know it; it tells only of the point it runs now."""
    if outcome.status == "missing" and position == "passed":
        return PointState("lost", "its element has run a later configuration and there is no record; submit again")
    if position == "passed":
        job = None
    if outcome.status == "missing" and position == "waiting" and job is not None:
        if job.state in RUNNING_JOB_STATES:
            return PointState("pending", "waits for the configurations before it in its element")
        if job.state in UNSUCCESSFUL_JOB_STATES and not has_just_ended(job, now):
            return PointState("missing", f"not started: its element ended before it, Slurm says {job.state}")
    if outcome.status == "ok" and job is not None and job.state in UNSUCCESSFUL_JOB_STATES:
        return PointState("ok", "; ".join(filter(None, (outcome.reason, f"Slurm says {job.state} of its latest job"))))
    if outcome.status in (*RECORDED_STATUSES, "rejected"):
        return PointState(outcome.status, outcome.reason)
    if job is not None:
        return decide_state_by_job(job, log_tail, now)
    if was_submitted:
        # Slurm forgets an element that is cancelled while it waits, and any job some time after it ended
        return PointState("lost", "Slurm no longer knows its job and there is no record; submit again")
    return PointState("missing", "no record")


def is_unfinished(job: JobState) -> bool:
    """True if the job may still write a record. A job in an unknown state may."""
    return job.state not in {*UNSUCCESSFUL_JOB_STATES, "COMPLETED"}


def decide_state_by_job(job: JobState, log_tail: str, now: datetime) -> PointState:
    """Return the state of a point that has no record, from the state of its job."""
    is_waiting = job.state in WAITING_JOB_STATES
    if job.state in HELD_JOB_STATES or (is_waiting and HELD_REASON.match(job.reason.replace("_", " "))):
        return PointState("held", job.reason)
    if is_waiting:
        return PointState("pending", explain_wait_reason(job.reason))
    if job.state in RUNNING_JOB_STATES:
        return PointState("running", REASON_IF_REVOKED if job.state == "REVOKED" else "")
    if job.state == "OUT_OF_MEMORY" or (job.state == "FAILED" and is_memory_kill(job, log_tail)):
        cure = "raise mem_per_gpu_gib in the grid file, or give --mem 0"
        return PointState("host_oom", f"the node's memory ran out; {cure}")
    if has_just_ended(job, now):
        return PointState("settling", "its job ended, its record may not be visible yet")
    if job.state == "FAILED":
        ended = f"{describe_exit(job.exit_code)} without a record; see its log"
        if full := full_disk_hint(log_tail):
            return PointState("failed", f"{full}; {ended}")
        return PointState("failed", f"its log suggests out of memory; {ended}" if suggests_oom(log_tail) else ended)
    if job.state in WORD_BY_ENDED_JOB_STATE:
        return PointState(WORD_BY_ENDED_JOB_STATE[job.state], f"Slurm says {job.state}")
    if job.state == "COMPLETED":
        return PointState("lost", "exited 0 without a record")
    return PointState("unknown", f"Slurm says {job.state}, which this tool does not know")


def has_just_ended(job: JobState, now: datetime) -> bool:
    """True if the job ended just now, and as a launch with records does: with a recorded OOM it is FAILED to Slurm."""
    has_recorded = job.state == "COMPLETED" or (job.state == "FAILED" and job.exit_code == EXIT_GAPS)
    return has_recorded and seconds_since(job.end_time, now) < RECORD_GRACE_S


def is_memory_kill(job: JobState, log_tail: str) -> bool:
    """True if the job was killed for its memory, as Slurm's own daemon says; other lines of a log prove nothing."""
    lines = (line for line in log_tail.splitlines() if SLURMSTEPD_ERROR.match(line))
    return job.exit_code in KILLED and any(sign in line for line in lines for sign in SLURM_OOM_SIGNS)


def explain_wait_reason(reason: str) -> str:
    """Return Slurm's reason for waiting, with advice if there is any; "" while Slurm has no reason yet ("None")."""
    if reason == "None":
        return ""
    advice = next((text for start, text in ADVICE_BY_WAIT_REASON.items() if reason.startswith(start)), None)
    return f"{reason}: {advice}" if advice else reason


def describe_exit(exit_code: int | None) -> str:
    """Return the text for an exit code, which is minus the signal if a signal ended the job."""
    if exit_code is None:
        return "ended"
    return f"ended by signal {-exit_code}" if exit_code < 0 else f"exited {exit_code}"


def seconds_since(end_time: str | None, now: datetime) -> float:
    """Return the seconds from Slurm's end time to now, both local; infinity without an end time."""
    try:
        return (now - datetime.fromisoformat(end_time or "")).total_seconds()
    except ValueError:
        return float("inf")
