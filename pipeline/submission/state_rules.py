"""The rules that give a point's state.

They use its record, its job in Slurm, its position in the job's array element, and its log. read_progress applies
them to every point of an experiment.
"""

import re
import signal
from datetime import datetime
from typing import Literal, NamedTuple

from pipeline.records.outcomes import PointOutcome
from pipeline.runner.failures import SLURM_OOM_SIGNS, suggests_oom
from pipeline.submission.slurm_queries import JobState
from pipeline.system.errors import EXIT_GAPS, full_disk_hint

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
SLURMSTEPD_ERROR = re.compile(r"slurmstepd(-\S+)?: error: ")  # some versions add the node
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the batch script was killed, or a task, as srun reports it
ADVICE_BY_WAIT_REASON = {
    "PartitionDown": "the partition is down; choose another with --partition",
    "PartitionNodeLimit": "the partition has too few nodes; lower num_nodes or choose another",
    "PartitionTimeLimit": "the limit is longer than the partition allows; lower --time",
    "Resources": "waiting for nodes to become free",
    "Priority": "jobs of higher priority go first",
    "ReqNodeNotAvail": "the nodes are reserved or down",
    "AssocGrpGRES": "your account is at its GPU limit",
    "QOSMaxGRESPerUser": "you are at your GPU limit",
    "JobArrayTaskLimit": "--max-parallel holds it back",
    "DependencyNeverSatisfied": "it waits for a job that failed; cancel it",
}

PositionInElement = Literal["passed", "current", "waiting"]  # of a point, relative to the point that its job runs now
IN_FLIGHT = ("pending", "held", "running", "settling")  # states in which a record may still appear
RECORDED_STATUSES = ("ok", "oom", "failed")


class PointState(NamedTuple):
    """One of the states that docs/exit-codes.md lists, and the reason."""

    word: str
    reason: str


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
