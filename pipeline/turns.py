"""Turns: where a point stands in an array element that runs several points one after another."""

import os
from collections.abc import Iterable
from datetime import datetime
from typing import Literal, NamedTuple

from pipeline import states
from pipeline.experiment import Experiment, Manifest
from pipeline.outcomes import Outcome
from pipeline.scheduler import JobKey, JobState
from pipeline.schema import Record
from pipeline.states import State

Turn = Literal["over", "now", "later"]


class Element(NamedTuple):
    """An element of several points: what its launch ids begin with, and its points in the order they run in."""

    launch_name: str
    run_ids: list[str]

    def starting_with(self, run_id: str) -> list[str]:
        """The point and those that follow it."""
        return self.run_ids[self.run_ids.index(run_id) :]


class Turns(NamedTuple):
    """The elements of several points, and the (run id, launch name) of what they have begun and published."""

    elements: dict[JobKey, Element]
    begun: set[tuple[str, str]]
    published: set[tuple[str, str]]

    def of(self, run_id: str, job: JobKey | None) -> Turn:
        """A point's turn in its job; a point that has a job to itself is always at it."""
        element = self.elements.get(job) if job is not None else None
        if element is None:
            return "now"
        if any((later, element.launch_name) in self.published for later in element.starting_with(run_id)):
            return "over"
        has_begun = run_id == element.run_ids[0] or (run_id, element.launch_name) in self.begun
        return "now" if has_begun else "later"


def read_turns(experiment: Experiment, manifest: Manifest, found: Iterable[Record]) -> Turns:
    """The turns of an experiment by its records, and by the folders that launches leave when they begin a point."""
    elements = {
        (array.job_id, index if array.is_array else None): Element(submission.launch_name, run_ids)
        for submission in manifest.submissions
        for array in submission.arrays
        for index, run_ids in enumerate(array.elements)
        if array.job_id is not None and len(run_ids) > 1
    }
    if not elements:
        return Turns({}, set(), set())
    folders = os.listdir(experiment.scratch) if experiment.scratch.is_dir() else []
    begun = (name.partition(".")[::2] for name in folders)
    return Turns(
        elements,
        {(run_id, launch_name_of(launch_id)) for run_id, launch_id in begun},
        {(record.run_id, launch_name_of(record.launch_id)) for record in found},
    )


def launch_name_of(launch_id: str) -> str:
    """What the launch ids of one submission share."""
    return launch_id.partition("-")[0]


def decide(
    outcome: Outcome, job: JobState | None, turn: Turn, was_submitted: bool, log_tail: str, now: datetime
) -> State:
    """The state of one point: what Slurm says of a job holds for the point whose turn it is."""
    has_record = outcome.status != "missing"
    if turn == "over" and not has_record:
        return State("lost", "its turn is over and there is no record; submit again")
    if turn == "over":
        return states.decide(outcome, None, was_submitted, log_tail, now)
    if turn == "later" and not has_record and job is not None:
        if job.state in states.RUNNING:
            return State("pending", "waits for the points before it in its element")
        if job.state in (*states.ENDED_AS, "FAILED", "OUT_OF_MEMORY"):
            return State("missing", f"not begun: its element ended before its turn, Slurm says {job.state}")
    return states.decide(outcome, job, was_submitted, log_tail, now)
