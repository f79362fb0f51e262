"""The state of a point from its record, what Slurm says of its job, and the end of its log. First match wins."""

import re
import signal
from datetime import datetime
from typing import NamedTuple

from pipeline.outcomes import Outcome
from pipeline.scheduler import JobState

SETTLING_S = 60  # how long a network file system may hide a record that was written

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "RESIZING", "SUSPENDED", "STOPPED", "POWER_UP_NODE"}
WAITING |= {"REQUEUED_CRON", "EXPEDITING"}  # of 20.11 alone, and since 25.11
HELD = {"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}
ENDED_AS = {
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "LAUNCH_FAILED": "node_fail",
    "RECONFIG_FAIL": "node_fail",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
}
ENDED = {*ENDED_AS, "COMPLETED", "FAILED", "OUT_OF_MEMORY"}
HOST_OOM_SIGNS = ("oom-kill", "oom_kill", "exceeded memory limit")
SLURMSTEPD_ERROR = re.compile(r"slurmstepd(-\S+)?: error: ")  # some name the node
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the batch script by it, and by srun's word of a task
OOM_SIGNS = ("OutOfMemoryError", "CUDA out of memory", "DefaultCPUAllocator: can't allocate")
ADVICE = {
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

IN_FLIGHT = ("pending", "held", "running")
MEASURED = ("ok", "oom", "failed")


class State(NamedTuple):
    """One word of the list in README.md, and why."""

    word: str
    reason: str


def decide(outcome: Outcome, job: JobState | None, was_submitted: bool, log_tail: str, now: datetime) -> State:
    """The state of one point. `job` is None where Slurm, which answered, does not know it."""
    if outcome.status == "ok" and job is not None and job.state in (*ENDED_AS, "FAILED", "OUT_OF_MEMORY"):
        return State("ok", "; ".join(filter(None, (outcome.reason, f"Slurm says {job.state} of its latest job"))))
    if outcome.status in (*MEASURED, "rejected"):
        return State(outcome.status, outcome.reason)
    if job is not None:
        return decide_by_job(job, log_tail, now)
    if was_submitted:
        # Slurm forgets an element that is cancelled while it waits, and every job some time after its end
        return State("lost", "Slurm no longer knows its job and there is no record; submit again")
    return State("missing", "no record")


def note_next(state: State, coming: State) -> State:
    """The state by a record, with what is known of the attempt that is under way."""
    note = f"being run again: {coming.word}" + (f", {coming.reason}" if coming.reason else "")
    return State(state.word, "; ".join(filter(None, (state.reason, note))))


def is_unfinished(job: JobState) -> bool:
    """Whether the job may still write a record; one in a state that this tool does not know may."""
    return job.state not in ENDED


def decide_by_job(job: JobState, log_tail: str, now: datetime) -> State:
    """The state of a point without a record by its job's."""
    if job.state in HELD or job.reason.startswith("JobHeld"):
        return State("held", job.reason)
    if job.state in WAITING:
        return State("pending", advise(job.reason))
    if job.state in RUNNING:
        return State("running", "")
    if job.state == "OUT_OF_MEMORY" or (job.state == "FAILED" and is_memory_kill(job, log_tail)):
        return State("host_oom", "the node's memory ran out; raise mem_per_gpu_gib")
    if job.state == "FAILED":
        ended = f"{exit_words(job.exit_code)} without a record; see its log"
        suggests_oom = any(sign in log_tail for sign in (*OOM_SIGNS, *HOST_OOM_SIGNS))
        return State("failed", f"its log suggests out of memory; {ended}" if suggests_oom else ended)
    if job.state in ENDED_AS:
        return State(ENDED_AS[job.state], f"Slurm says {job.state}")
    if job.state == "COMPLETED":
        if seconds_since(job.end_time, now) < SETTLING_S:
            return State("settling", "ended, its record may still be on its way")
        return State("lost", "exited 0 without a record")
    return State("unknown", f"Slurm says {job.state}, which this tool does not know")


def is_memory_kill(job: JobState, log_tail: str) -> bool:
    """Whether the job was killed and Slurm's own daemon wrote that it was for its memory: other lines prove nothing."""
    lines = (line for line in log_tail.splitlines() if SLURMSTEPD_ERROR.match(line))
    return job.exit_code in KILLED and any(sign in line for line in lines for sign in HOST_OOM_SIGNS)


def advise(reason: str) -> str:
    """Slurm's reason for waiting with a line of advice; Slurm says None before it has one."""
    if reason == "None":
        return ""
    advice = next((text for start, text in ADVICE.items() if reason.startswith(start)), None)
    return f"{reason}: {advice}" if advice else reason


def exit_words(exit_code: int | None) -> str:
    """How a job ended, in words."""
    if exit_code is None:
        return "ended"
    return f"ended by signal {-exit_code}" if exit_code < 0 else f"exited {exit_code}"


def seconds_since(end_time: str | None, now: datetime) -> float:
    """Seconds from Slurm's time to now, both local; long ago where it names none."""
    try:
        return (now - datetime.fromisoformat(end_time or "")).total_seconds()
    except ValueError:
        return float("inf")
