"""The state of a point: from its record, what Slurm says of its job, its turn in the element, and its log."""

import os
import re
import signal
from collections.abc import Iterable
from datetime import datetime
from typing import Literal, NamedTuple

from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import Manifest
from pipeline.experiment.outcomes import PointOutcome
from pipeline.experiment.record import Record
from pipeline.runner.classify_failure import SLURM_OOM_SIGNS, suggests_oom
from pipeline.submission.slurm_queries import JobKey, JobState

RECORD_GRACE_S = 60  # how long a network file system may hide a record that was written

WAITING_JOB_STATES = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "RESIZING",
    "SUSPENDED",
    "STOPPED",
    "POWER_UP_NODE",
}
WAITING_JOB_STATES |= {"REQUEUED_CRON", "EXPEDITING"}  # of 20.11 alone, and since 25.11
HELD_JOB_STATES = {"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING_JOB_STATES = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}
WORD_BY_ENDED_JOB_STATE = {
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
ENDED = {*WORD_BY_ENDED_JOB_STATE, "COMPLETED", "FAILED", "OUT_OF_MEMORY"}
SLURMSTEPD_ERROR = re.compile(r"slurmstepd(-\S+)?: error: ")  # some name the node
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the batch script by it, and by srun's word of a task
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

IN_FLIGHT = ("pending", "held", "running")
RECORDED_STATUSES = ("ok", "oom", "failed")


class PointState(NamedTuple):
    """One word of the list in README.md, and why."""

    word: str
    reason: str


def decide_state(
    outcome: PointOutcome, job: JobState | None, was_submitted: bool, log_tail: str, now: datetime
) -> PointState:
    """The state of one point. `job` is None where Slurm, which answered, does not know it."""
    if (
        outcome.status == "ok"
        and job is not None
        and job.state in (*WORD_BY_ENDED_JOB_STATE, "FAILED", "OUT_OF_MEMORY")
    ):
        return PointState("ok", "; ".join(filter(None, (outcome.reason, f"Slurm says {job.state} of its latest job"))))
    if outcome.status in (*RECORDED_STATUSES, "rejected"):
        return PointState(outcome.status, outcome.reason)
    if job is not None:
        return decide_state_by_job(job, log_tail, now)
    if was_submitted:
        # Slurm forgets an element that is cancelled while it waits, and every job some time after its end
        return PointState("lost", "Slurm no longer knows its job and there is no record; submit again")
    return PointState("missing", "no record")


def note_next(state: PointState, coming: PointState) -> PointState:
    """The state by a record, with what is known of the attempt that is under way."""
    note = f"being run again: {coming.word}" + (f", {coming.reason}" if coming.reason else "")
    return PointState(state.word, "; ".join(filter(None, (state.reason, note))))


def is_unfinished(job: JobState) -> bool:
    """Whether the job may still write a record; one in a state that this tool does not know may."""
    return job.state not in ENDED


def decide_state_by_job(job: JobState, log_tail: str, now: datetime) -> PointState:
    """The state of a point without a record by its job's."""
    if job.state in HELD_JOB_STATES or job.reason.startswith("JobHeld"):
        return PointState("held", job.reason)
    if job.state in WAITING_JOB_STATES:
        return PointState("pending", explain_wait_reason(job.reason))
    if job.state in RUNNING_JOB_STATES:
        return PointState("running", "")
    if job.state == "OUT_OF_MEMORY" or (job.state == "FAILED" and is_memory_kill(job, log_tail)):
        return PointState("host_oom", "the node's memory ran out; raise mem_per_gpu_gib")
    if job.state == "FAILED":
        ended = f"{describe_exit(job.exit_code)} without a record; see its log"
        return PointState("failed", f"its log suggests out of memory; {ended}" if suggests_oom(log_tail) else ended)
    if job.state in WORD_BY_ENDED_JOB_STATE:
        return PointState(WORD_BY_ENDED_JOB_STATE[job.state], f"Slurm says {job.state}")
    if job.state == "COMPLETED":
        if seconds_since(job.end_time, now) < RECORD_GRACE_S:
            return PointState("settling", "ended, its record may still be on its way")
        return PointState("lost", "exited 0 without a record")
    return PointState("unknown", f"Slurm says {job.state}, which this tool does not know")


def is_memory_kill(job: JobState, log_tail: str) -> bool:
    """Whether the job was killed and Slurm's own daemon wrote that it was for its memory: other lines prove nothing."""
    lines = (line for line in log_tail.splitlines() if SLURMSTEPD_ERROR.match(line))
    return job.exit_code in KILLED and any(sign in line for line in lines for sign in SLURM_OOM_SIGNS)


def explain_wait_reason(reason: str) -> str:
    """Slurm's reason for waiting with a line of advice; Slurm says None before it has one."""
    if reason == "None":
        return ""
    advice = next((text for start, text in ADVICE_BY_WAIT_REASON.items() if reason.startswith(start)), None)
    return f"{reason}: {advice}" if advice else reason


def describe_exit(exit_code: int | None) -> str:
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


PositionInElement = Literal["over", "now", "later"]


class PackedElement(NamedTuple):
    """An element of several points: what its launch ids begin with, and its points in the order they run in."""

    launch_id_prefix: str
    run_ids: list[str]

    def starting_with(self, run_id: str) -> list[str]:
        """The point and those that follow it."""
        return self.run_ids[self.run_ids.index(run_id) :]


class ElementPositions(NamedTuple):
    """The elements of several points, and the (run id, launch name) of what they have begun and published."""

    elements: dict[JobKey, PackedElement]
    begun: set[tuple[str, str]]
    published: set[tuple[str, str]]

    def of(self, run_id: str, job: JobKey | None) -> PositionInElement:
        """A point's turn in its job; a point that has a job to itself is always at it."""
        element = self.elements.get(job) if job is not None else None
        if element is None:
            return "now"
        if any((later, element.launch_id_prefix) in self.published for later in element.starting_with(run_id)):
            return "over"
        has_begun = run_id == element.run_ids[0] or (run_id, element.launch_id_prefix) in self.begun
        return "now" if has_begun else "later"


def read_element_positions(experiment: Experiment, manifest: Manifest, found: Iterable[Record]) -> ElementPositions:
    """The turns of an experiment by its records, and by the folders that launches leave when they begin a point."""
    elements = {
        (array.job_id, index if array.is_array else None): PackedElement(submission.launch_id_prefix, run_ids)
        for submission in manifest.submissions
        for array in submission.arrays
        for index, run_ids in enumerate(array.elements)
        if array.job_id is not None and len(run_ids) > 1
    }
    if not elements:
        return ElementPositions({}, set(), set())
    folders = os.listdir(experiment.scratch_folder) if experiment.scratch_folder.is_dir() else []
    begun = (name.partition(".")[::2] for name in folders)
    return ElementPositions(
        elements,
        {(run_id, launch_id_prefix_of(launch_id)) for run_id, launch_id in begun},
        {(record.run_id, launch_id_prefix_of(record.launch_id)) for record in found},
    )


def launch_id_prefix_of(launch_id: str) -> str:
    """What the launch ids of one submission share."""
    return launch_id.partition("-")[0]


def decide_state_in_element(
    outcome: PointOutcome,
    job: JobState | None,
    turn: PositionInElement,
    was_submitted: bool,
    log_tail: str,
    now: datetime,
) -> PointState:
    """The state of one point: what Slurm says of a job holds for the point whose turn it is."""
    has_record = outcome.status != "missing"
    if turn == "over" and not has_record:
        return PointState("lost", "its turn is over and there is no record; submit again")
    if turn == "over":
        return decide_state(outcome, None, was_submitted, log_tail, now)
    if turn == "later" and not has_record and job is not None:
        if job.state in RUNNING_JOB_STATES:
            return PointState("pending", "waits for the points before it in its element")
        if job.state in (*WORD_BY_ENDED_JOB_STATE, "FAILED", "OUT_OF_MEMORY"):
            return PointState("missing", f"not begun: its element ended before its turn, Slurm says {job.state}")
    return decide_state(outcome, job, was_submitted, log_tail, now)
