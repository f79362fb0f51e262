"""The state of a point by its record, its job and its log, of which no other file is read; and what a driver says."""

import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from itertools import accumulate, chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import (
    ARRAY,
    NOW,
    ROOT,
    RUN_ID,
    SUBMISSION,
    assert_says,
    make_experiment,
    make_measurement,
    make_record,
    make_script_spec,
    make_spec,
    manifest_of,
    slurm_submission,
    write_file,
)

from pipeline.cancel import find_unfinished_jobs
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, SlurmArray, Submission, start_submission
from pipeline.records.outcomes import PointOutcome
from pipeline.records.record import Status
from pipeline.records.store import publish_record
from pipeline.runner.script_rank import ScriptRank
from pipeline.submission import read_progress as reading
from pipeline.submission import slurm_queries
from pipeline.submission.gpu_hours_estimate import EarlierAttempt
from pipeline.submission.local import ERASE_LINE, PROGRESS_LINE, ProgressDisplay, expect_durations_s, open_log
from pipeline.submission.read_progress import (
    HELD_JOB_STATES,
    RUNNING_JOB_STATES,
    WAITING_JOB_STATES,
    WORD_BY_ENDED_JOB_STATE,
    PointState,
    decide_state,
    find_logs,
    is_unfinished,
    read_log_tail,
    refusal_of_unread_state,
)
from pipeline.submission.slurm_queries import JobKey, JobState
from pipeline.training.loop import describe_epoch

NO_RECORD = PointOutcome(make_spec(), "missing", None, "no record")

# every JOB STATE CODE of squeue(1) and sacct(1), Slurm 22.05, and what later ones add
STATE_NAMES = [
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "CONFIGURING", "COMPLETING", "DEADLINE"),
    *("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED", "RUNNING"),
    *("RESV_DEL_HOLD", "REQUEUE_FED", "REQUEUE_HOLD", "REQUEUED", "RESIZING", "REVOKED"),
    *("SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "TIMEOUT"),
    *("LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED_CRON", "EXPEDITING"),
]
DECIDED_ONE_BY_ONE = {"OUT_OF_MEMORY", "FAILED", "COMPLETED"}


def job(
    state: str,
    exit_code: int | None = 0,
    *,
    ended_s_ago: float | None = None,
    reason: str = "None",
    now: datetime = NOW,
) -> JobState:
    end = None if ended_s_ago is None else (now - timedelta(seconds=ended_s_ago)).isoformat()
    return JobState(state, exit_code, end, reason)


@pytest.mark.fault("F03")
def test_every_state_name_of_slurm_is_in_exactly_one_bucket() -> None:
    ended = set(WORD_BY_ENDED_JOB_STATE)
    buckets = (WAITING_JOB_STATES, HELD_JOB_STATES, RUNNING_JOB_STATES, ended, DECIDED_ONE_BY_ONE)
    for name in STATE_NAMES:
        assert sum(name in bucket for bucket in buckets) == 1, name
        word = decide_state(NO_RECORD, job(name), True, "", NOW).word
        assert word != "unknown", name
        assert is_unfinished(job(name)) == (name not in ended | DECIDED_ONE_BY_ONE) == (word in reading.IN_FLIGHT)


@pytest.mark.parametrize(
    ("found", "word", "said"),
    [
        *(  # that no manual has
            pytest.param(job(name), "unknown", name, marks=pytest.mark.fault("F03"))
            for name in ("", "running", "RUNNINGG", "TELEPORTED", "CANCELLED+")
        ),
        # the state of its siblings on other clusters of a federation: to run the point again would run it twice
        pytest.param(job("REVOKED", ended_s_ago=1000), "running", "federation", marks=pytest.mark.fault("F03")),
        *(
            pytest.param(job("PENDING", reason=reason), word, f"{reason}{advice}", marks=pytest.mark.fault("F06"))
            for reason, word, advice in (
                ("PartitionDown", "pending", ": the partition is down; cancel it, and choose another with --partition"),
                ("PartitionNodeLimit", "pending", ": the partition has too few nodes; cancel it, and lower num_nodes"),
                ("Resources", "pending", ": waiting for nodes to become free"),
                ("JobHeldUser", "held", ""),
                ("JobHeldAdmin", "held", ""),
                ("launch failed requeued held", "held", ""),
                ("launch_failed_requeued_held", "held", ""),
                ("job requeued in held state", "held", ""),
                ("JobHoldMaxRequeue", "held", ""),
                ("Nodes withheld", "pending", ""),
                ("SomethingNew", "pending", ""),
            )
        ),
        *(
            pytest.param(job("COMPLETED", ended_s_ago=ago), word, "", marks=pytest.mark.fault("F08"))
            for ago, word in {
                0: "settling",
                59: "settling",
                60: "lost",
                86_400: "lost",
                None: "lost",
                -5: "settling",
            }.items()
        ),
        *((JobState("COMPLETED", 0, end, ""), "lost", "exited 0") for end in ("", "Unknown", "N/A", "NONE")),
        *((job("FAILED", code), "failed", said) for code, said in {3: "exited 3", -9: "ended by signal 9"}.items()),
        (job("FAILED", None), "failed", "ended without a record"),
        (None, "lost", "no longer knows"),
    ],
)
def test_the_job_of_a_point_without_a_record_gives_its_state(found: JobState | None, word: str, said: str) -> None:
    state = decide_state(NO_RECORD, found, True, "", NOW)
    assert (state.word, said in state.reason) == (word, True), state.reason


OOM_KILL = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0."
OVER_LIMIT = "slurmstepd-node1: error: StepId=7.0 exceeded memory limit (342581248 > 209715200), being killed"
OVER_LIMIT_26 = OVER_LIMIT.replace("slurmstepd-node1:", "[2026-11-30T03:53:01.740]")  # as Slurm 26.05 writes it
CUDA_OOM = "torch.OutOfMemoryError: CUDA out of memory."
RAN_OUT = "the node's memory ran out; raise mem_per_gpu_gib in the grid file, or give --mem 0"
SUGGESTS, DISK = "its log suggests out of memory; ", "the disk is full: free space on it, and try again; "
FULL_SHM = "unable to write to file </torch_1>: No space left on device (28)\n/dev/shm: No space left on device"


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    ("exit_code", "ended_s_ago", "log_tail", "word", "reason"),
    [
        *(
            (code, None, f"epoch 1\n{line}\n", "host_oom", RAN_OUT)
            for code in (137, -9)
            for line in (OOM_KILL, OVER_LIMIT, OVER_LIMIT_26)
        ),
        (1, None, CUDA_OOM, "failed", SUGGESTS),
        (137, None, "RuntimeError: CUDA out of memory. Tried to allocate", "failed", SUGGESTS),
        (-9, None, "RuntimeError: DefaultCPUAllocator: can't allocate memory", "failed", SUGGESTS),
        (137, None, "my loader: oom-kill", "failed", SUGGESTS),  # anybody may write that
        (137, None, "my loader: slurmstepd: error: oom-kill", "failed", SUGGESTS),
        (137, None, "[my loader] error: oom-kill", "failed", SUGGESTS),
        (1, None, OOM_KILL, "failed", SUGGESTS),  # it ended otherwise
        (-15, None, OVER_LIMIT, "failed", SUGGESTS),
        (137, None, "a mushroom grew", "failed", "exited 137"),
        (137, None, "", "failed", "exited 137"),
        (1, None, "OSError: [Errno 28] No space left on device: 'x'\n", "failed", f"{DISK}exited 1"),
        (1, None, FULL_SHM, "failed", "exited 1"),  # of shared memory
        # as a launch with a recorded OOM exits
        (1, 0, CUDA_OOM, "settling", "its job ended"),
        (1, 59, CUDA_OOM, "settling", "its job ended"),
        (1, 60, CUDA_OOM, "failed", SUGGESTS),
        (2, 0, CUDA_OOM, "failed", SUGGESTS),
        (-9, 0, CUDA_OOM, "failed", SUGGESTS),
    ],
)
def test_a_log_that_suggests_out_of_memory_is_no_result_unless_slurm_itself_wrote_so(
    exit_code: int, ended_s_ago: float | None, log_tail: str, word: str, reason: str
) -> None:
    state = decide_state(NO_RECORD, job("FAILED", exit_code, ended_s_ago=ended_s_ago), True, log_tail, NOW)
    assert (state.word, state.reason[: len(reason)]) == (word, reason)


@pytest.mark.fault("F10")
@pytest.mark.parametrize("status", ["ok", "oom", "failed", "rejected"])
def test_a_record_decides_whatever_slurm_says_and_one_that_it_contradicts_is_noted(status: Status) -> None:
    outcome = PointOutcome(make_spec(), status, None, "as recorded")
    for name in (*STATE_NAMES, None):
        state = decide_state(outcome, job(name) if name else None, True, f"oom-kill {CUDA_OOM}", NOW)
        is_contradicted = status == "ok" and name in reading.UNSUCCESSFUL_JOB_STATES
        said = f"as recorded; Slurm says {name} of its latest job" if is_contradicted else "as recorded"
        assert state == (status, said)


@pytest.mark.parametrize(
    ("known", "picked"),
    [
        ({}, None),
        ({("1", 0): job("COMPLETED")}, ("1", 0)),
        ({("1", 0): job("COMPLETED"), ("2", None): job("FAILED")}, ("2", None)),  # the later one
        ({("1", 0): job("RUNNING"), ("2", None): job("FAILED")}, ("1", 0)),  # one that may still write
        ({("9", 0): job("RUNNING")}, None),  # another's
    ],
)
def test_the_job_that_speaks_is_one_under_way_else_the_latest_known(
    known: dict[JobKey, JobState], picked: JobKey | None
) -> None:
    keys: list[JobKey] = [("1", 0), ("2", None)]
    jobs = [reading.PointJob(key, start_submission(SUBMISSION, "slurm"), known.get(key), "current") for key in keys]
    chosen = reading.choose_job(jobs)
    assert (chosen and chosen.key) == picked


REPEATS = [make_spec(repeat=repeat) for repeat in range(4)]
LAUNCH, EARLIER = "5ab0ab1e-7-0", "ea411e40-3-0"


def submitted(folder: Path, *elements: list[Spec], missing: Collection[Spec] = ()) -> Experiment:
    """An experiment whose points are the elements of array 7, or of the plain job 7 if there is one element."""
    submission = slurm_submission(*elements, is_array=len(elements) > 1)
    return make_experiment(folder, missing=[*chain(*elements), *missing], submissions=[submission])


@pytest.fixture
def array(tmp_path: Path) -> Experiment:
    """Two points of one array, and one point that nobody submitted."""
    return submitted(tmp_path / "x", REPEATS[:1], REPEATS[1:2], missing=REPEATS[2:3])


def progress_of(experiment: Experiment) -> list[reading.PointProgress]:
    return reading.read_progress(experiment, manifest_of(experiment))


def words(parts: list[reading.PointProgress]) -> list[str]:
    return [part.state.word for part in parts]


def start(experiment: Experiment, spec: Spec, launch_id: str = LAUNCH) -> None:
    folder = experiment.scratch_folder / f"{spec.run_id()}.{launch_id}"
    folder.mkdir(parents=True)
    (folder / "point.json").touch()


def end(experiment: Experiment, spec: Spec, status: Status = "ok", launch_id: str = LAUNCH) -> None:
    publish_record(make_record(spec, status=status, launch_id=launch_id), experiment.records_folder)


@pytest.mark.parametrize("presence", ["absent", "silent"])
def test_where_slurm_cannot_be_asked_a_submitted_point_is_unknown_unless_it_has_a_record(
    array: Experiment, monkeypatch: pytest.MonkeyPatch, presence: str
) -> None:
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: presence)
    first, *others = progress_of(array)
    assert words([first, *others]) == ["unknown", "unknown", "missing"]
    assert presence in first.state.reason
    end(array, REPEATS[1])
    (array.records_folder / f"{REPEATS[0].run_id()}.0.json").write_text('{"schema_version"')
    first, *others = progress_of(array)
    assert words([first, *others]) == ["rejected", "ok", "missing"]
    assert_says(first.state.reason, "its only record (", ") was not read: ", "; remove it and submit again")


def test_each_element_has_the_state_of_its_own_job_and_its_own_log(
    array: Experiment, jobs: dict[JobKey, JobState]
) -> None:
    jobs.update({("7", 0): job("RUNNING"), ("7", 1): job("FAILED", 1)})
    log = write_file(array.log_folder(SUBMISSION) / f"{ARRAY}-7_1.log", CUDA_OOM)
    parts = progress_of(array)
    assert words(parts) == ["running", "failed", "missing"]
    assert parts[1].state.reason.startswith(SUGGESTS)
    assert [(part.is_in_flight, part.log) for part in parts] == [(True, None), (False, log), (False, None)]


def test_a_point_with_a_record_that_is_queued_again_keeps_its_word_and_says_so(
    array: Experiment, jobs: dict[JobKey, JobState]
) -> None:
    jobs.update({("7", 0): job("PENDING", reason="PartitionDown"), ("7", 1): job("COMPLETING")})
    end(array, REPEATS[0], launch_id=EARLIER)
    end(array, REPEATS[1])  # this job's own
    first, second, _ = (part.state for part in progress_of(array))
    assert (first.word, second) == ("ok", PointState("ok", ""))
    assert first.reason.startswith("being run again: pending, PartitionDown: the partition is down")


def test_a_record_that_is_published_while_slurm_is_asked_or_the_lock_is_tried_counts(
    array: Experiment, jobs: dict[JobKey, JobState], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_job(_: object) -> dict[JobKey, JobState]:
        end(array, REPEATS[0])
        return {("7", 0): job("COMPLETED"), ("7", 1): job("PENDING")}

    def end_submit() -> bool:
        end(array, REPEATS[2])
        return False

    monkeypatch.setattr(slurm_queries, "query_job_states", end_job)
    monkeypatch.setattr(array, "is_being_submitted", end_submit)
    assert words(progress_of(array)) == ["ok", "pending", "ok"]


@pytest.mark.fault("F08")
@pytest.mark.parametrize(("ended_s_ago", "word", "may_come"), [(20, "settling", True), (120, "lost", False)])
def test_a_record_that_appears_late_makes_a_point_ok(
    array: Experiment, jobs: dict[JobKey, JobState], ended_s_ago: float, word: str, may_come: bool
) -> None:
    """As a network file system may show it. For a minute after the job's end nothing else may run the point."""
    jobs.update({("7", 0): job("COMPLETED", ended_s_ago=ended_s_ago, now=datetime.now()), ("7", 1): job("RUNNING")})
    first, *_ = progress_of(array)
    assert (first.state.word, first.is_in_flight) == (word, may_come)
    end(array, REPEATS[0])
    first, *_ = progress_of(array)
    assert (first.state, first.is_in_flight) == (PointState("ok", ""), False)


def test_slurm_is_asked_ever_more_rarely_also_while_points_keep_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    specs = [make_spec(repeat=repeat) for repeat in range(8)]

    def read(*_: object) -> list[reading.PointProgress]:
        """One point more has ended each time."""
        ends = [number < len(waits) for number in range(8)]
        found = zip(specs, [PointState("ok" if has_ended else "running", "") for has_ended in ends], ends, strict=True)
        return [reading.PointProgress(NO_RECORD._replace(spec=a), b, not c, None, None) for a, b, c in found]

    monkeypatch.setattr(reading, "read_progress", read)
    watched = list(reading.poll_until_finished({"x": make_experiment(tmp_path / "x", missing=specs)}))
    assert waits == [2, 4, 8, 16, 30, 30, 30, 30]
    in_minutes = Counter(int(end_s // 60) for end_s in accumulate(waits, initial=0))
    said = f"{3 * in_minutes[0]} calls in the first minute and {3 * in_minutes[1]} in each later one"
    assert_says(" ".join((ROOT / "docs/for-admins.md").read_text().split()), said)
    assert set(words(watched[-1]["x"])) == {"ok"}


def test_what_is_unknown_where_there_is_no_slurm_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = reading.PointProgress(NO_RECORD, PointState("unknown", "Slurm is absent here"), False, None, None)
    monkeypatch.setattr(reading, "read_progress", lambda *_: [unknown])
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "absent")
    experiments = {"x": make_experiment(tmp_path / "x", missing=REPEATS[:1])}
    assert [*reading.poll_until_finished(experiments)] == [{"x": [unknown]}]
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "silent")
    with pytest.raises(pytest.fail.Exception, match="it waits"):
        list(reading.poll_until_finished(experiments))


@pytest.mark.usefixtures("jobs")
def test_an_array_that_sbatch_has_not_confirmed_is_being_submitted(tmp_path: Path) -> None:
    submissions = [slurm_submission(REPEATS[:1], job_id=None)]
    experiment = make_experiment(tmp_path / "x", missing=REPEATS[:1], submissions=submissions)
    assert words(progress_of(experiment)) == ["missing"]
    with Experiment(experiment.folder).submission_lock():
        assert words(progress_of(experiment)) == ["pending"]


def test_what_another_cluster_has_taken_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: dict[JobKey, JobState]
) -> None:
    """Two clusters share a home."""
    experiment = submitted(tmp_path / "x", REPEATS[:1], REPEATS[1:2])
    end(experiment, REPEATS[1], "ok", LAUNCH)
    monkeypatch.setattr(slurm_queries, "query_cluster_name", lambda: "beta")
    for cluster, word in (("beta", "lost"), (None, "lost"), ("alpha", "elsewhere")):
        with experiment.edit_manifest() as manifest:
            manifest.submissions[0].cluster = cluster
        assert words(progress_of(experiment)) == [word, "ok"]
    said = "submitted to the Slurm cluster alpha, and this is beta; run this command there"
    (part, _) = progress_of(experiment)
    assert part.state.reason == said
    assert str(refusal_of_unread_state(part, ", or wait")) == f"{RUN_ID} was {said}, or wait."
    assert len([*islice(reading.poll_until_finished({"x": experiment}), 2)]) == 1, "it is not waited for"
    jobs["7", 0] = job("RUNNING")  # a sibling in the federation
    assert words(progress_of(experiment)) == ["running", "ok"]


# whenever this test runs, its end is less than a minute ago
JUST_NOW = job("FAILED", 1, ended_s_ago=0, now=datetime.now() + timedelta(days=1))
WAITS = {3: "waits for the configurations before it in its element"}
PENDING = ["pending"] * 3


@pytest.mark.parametrize(
    ("launch_id", "started", "ended", "found", "states", "num_in_flight", "reasons"),
    [
        pytest.param(
            *(LAUNCH, 3, {0: "ok", 1: "failed"}, job("RUNNING")),
            *(["ok", "failed", "running", "pending"], 2, WAITS),
            id="runs",
        ),
        pytest.param(LAUNCH, 0, {}, job("RUNNING"), ["running", *PENDING], 4, WAITS, id="before its first launch"),
        pytest.param(LAUNCH, 1, {0: "ok"}, job("RUNNING"), ["ok", *PENDING], 3, WAITS, id="between two launches"),
        *(
            pytest.param(
                *(LAUNCH, 2, {0: "ok"}, job(state), ["ok", word, "missing", "missing"], 0),
                # what became of its element later is no word against the first
                {0: "", 2: f"not started: its element ended before it, Slurm says {state}"},
                id=word,
            )
            for state, word in {"TIMEOUT": "timeout", "CANCELLED": "cancelled", "OUT_OF_MEMORY": "host_oom"}.items()
        ),
        # so `submit` leaves them alone
        pytest.param(LAUNCH, 1, {0: "ok"}, JUST_NOW, ["ok", *["settling"] * 3], 3, {}, id="has just ended"),
        pytest.param(LAUNCH, 0, {}, job("PENDING"), ["pending"] * 4, 4, {}, id="waits"),
        pytest.param(LAUNCH, 0, {}, job("REQUEUE_HOLD"), ["held"] * 4, 4, {}, id="held"),
        pytest.param(LAUNCH, 0, {}, job("COMPLETED"), ["lost"] * 4, 0, {}, id="lost"),
        pytest.param(
            *(LAUNCH, 3, {1: "ok"}, job("RUNNING"), ["lost", "ok", "running", "pending"], 2, WAITS),
            id="a record was removed",  # that point may be submitted
        ),
        pytest.param(
            *(EARLIER, 2, {1: "failed"}, job("RUNNING"), ["running", "failed", "pending", "pending"], 4),
            {1: f"being run again: pending, {WAITS[3]}"},
            id="measured by an earlier submission",
        ),
    ],
)
def test_the_points_of_an_element_of_several_are_where_it_stands(
    tmp_path: Path,
    jobs: dict[JobKey, JobState],
    launch_id: str,
    started: int,
    ended: Mapping[int, Status],
    found: JobState,
    states: list[str],
    num_in_flight: int,
    reasons: Mapping[int, str],
) -> None:
    """Four points in one element, whose array is a plain job. Those in flight are the last ones."""
    experiment = submitted(tmp_path / "x", REPEATS)
    jobs["7", None] = found
    for spec in REPEATS[:started]:
        start(experiment, spec, launch_id)
    for index, status in ended.items():
        end(experiment, REPEATS[index], status, launch_id)
    parts = progress_of(experiment)
    assert words(parts) == states
    assert [part.is_in_flight for part in parts] == [index >= 4 - num_in_flight for index in range(4)]
    assert {index: parts[index].state.reason for index in reasons} == reasons


def test_points_of_a_plain_sbatch_have_a_start_and_a_log_and_are_run_again_only_once_they_have_started(
    tmp_path: Path, jobs: dict[JobKey, JobState]
) -> None:
    first, second, third = REPEATS[:3]
    submission = start_submission("sbatch-7", "sbatch")
    submission.arrays.append(SlurmArray("q4", [[spec.run_id()] for spec in REPEATS[:3]], job_id="7"))
    found = (make_record(second), make_record(third))
    experiment = make_experiment(tmp_path / "q4", *found, missing=[first], submissions=[submission])
    start(experiment, first, "7-0-0-1750000000")
    start(experiment, second, "7-1-0-1750000000")  # with --rerun
    (tmp_path / "q4-7_0.log").write_text("epoch 1")
    jobs.update({("7", index): job("RUNNING") for index in range(3)})
    parts = {part.spec: part for part in progress_of(experiment)}
    assert [
        (parts[spec].state.word, parts[spec].started_unix_s is not None, parts[spec].rerun is not None)
        for spec in (first, second, third)
    ] == [("running", True, False), ("ok", True, True), ("ok", False, False)]
    assert parts[first].log == tmp_path / "q4-7_0.log"


def test_an_oom_in_the_log_is_that_of_the_point_that_left_it(tmp_path: Path, jobs: dict[JobKey, JobState]) -> None:
    experiment = submitted(tmp_path / "x", REPEATS)
    jobs["7", None] = job("FAILED", 1)
    start(experiment, REPEATS[0])
    start(experiment, REPEATS[1])
    end(experiment, REPEATS[0], "oom")
    first, second = (f"{spec.run_id()}: starting" for spec in REPEATS[:2])
    text = "\n".join([first, CUDA_OOM, second, "a mushroom grew\n"])
    log = write_file(experiment.log_folder(SUBMISSION) / f"{ARRAY}-7.log", text)
    parts = progress_of(experiment)
    assert words(parts) == ["oom", "failed", "missing", "missing"]
    assert parts[1].state.reason == "exited 1 without a record; see its log"
    assert reading.read_log_tail(log, since=second) == "\na mushroom grew\n"


TIME = "2025-06-01T00:00:00Z"
SECRET = "CUDA out of memory"  # a log with these words changes the reason of a point


@pytest.mark.fault("F09")
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_job_whose_id_slurm_has_given_again_is_that_of_the_later_array(
    tmp_path: Path, jobs: dict[JobKey, JobState], is_packed: bool
) -> None:
    """Slurm's ids begin anew where its state is wiped. The point of the earlier array 7 has no job any more."""
    later = [spec.run_id() for spec in REPEATS[1:3]]
    again = SlurmArray("x-0b0b0b0b-0", [later] if is_packed else [[run_id] for run_id in later], "7")
    submissions = [slurm_submission(REPEATS[:1]), Submission("0b" * 16, "slurm", TIME, [again])]
    experiment = make_experiment(tmp_path / "x", missing=REPEATS[:3], submissions=submissions)
    jobs.update({("7", index): JobState("RUNNING", 0, None, "None", again.job_name) for index in (0, 1)})
    assert words(progress_of(experiment)) == ["missing", "running", "pending" if is_packed else "running"]


@pytest.mark.fault("F09")
@pytest.mark.parametrize("is_of_others", [False, True])
def test_before_an_array_is_lost_slurm_is_asked_for_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jobs: dict[JobKey, JobState],
    is_of_others: bool,
) -> None:
    """The manifest has a number of the site's banner. It may be the id of somebody's job."""
    submissions = [slurm_submission(REPEATS[:1], job_id="3")]
    experiment = make_experiment(tmp_path / "x", missing=REPEATS[:1], submissions=submissions)
    jobs["4711", 0] = JobState("RUNNING", 0, None, "None", ARRAY, os.getuid())
    if is_of_others:
        jobs["3", 0] = JobState("RUNNING", 0, None, "None", "another")
    names: list[set[str]] = []

    def find_jobs_named(asked: set[str], owners: object) -> dict[str, str]:
        names.append(set(asked))
        return dict.fromkeys(asked, "4711")

    monkeypatch.setattr(slurm_queries, "find_jobs_named", find_jobs_named)
    (part,) = progress_of(experiment)
    assert (part.state.word, part.job) == ("running", ("4711", 0))
    assert names[-1] == {ARRAY}
    assert [job.key for job in find_unfinished_jobs(experiment, manifest_of(experiment))] == [("4711", 0)]


def test_an_array_that_was_cancelled_before_any_element_began_is_one_line_of_squeue(
    array: Experiment, jobs: dict[JobKey, JobState]
) -> None:
    """Seen with 22.05 without accounting: the one line has N/A as the index."""
    jobs["7", None] = JobState("CANCELLED", 0, None, "None", ARRAY)
    cancelled = PointState("cancelled", "Slurm says CANCELLED")
    assert [part.state for part in progress_of(array)[:2]] == [cancelled] * 2


STARTING = f"{RUN_ID}: starting\n"


@pytest.mark.fault("F20")
@pytest.mark.parametrize(
    ("log_text", "free_blocks", "said"),
    [
        (f"{STARTING}OSError: [Errno 28] No space left on device", 9, "no record; the disk is full: free space on it"),
        (f"{STARTING}OSError: [Errno 122] Disk quota exceeded", 9, "no record; your quota on the disk is used up"),
        (STARTING, 0, "no record; the disk is full"),
        ("", 0, "no record; the disk is full"),  # not even the first line had room
        (STARTING, 9, "interrupted: submit (its process on "),
        (f"No space left on device\n{STARTING}", 9, "interrupted: "),  # of an earlier attempt
        (f"{STARTING}{'a long log' * 2000}", 9, "interrupted: "),
        ("", 9, "no record"),
    ],
)
def test_a_point_whose_disk_was_full_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_text: str, free_blocks: int, said: str
) -> None:
    submissions = [Submission(SUBMISSION, "local", TIME, host=socket.gethostname())]
    experiment = make_experiment(tmp_path / "x", missing=REPEATS[:1], submissions=submissions)
    write_file(experiment.log_folder(SUBMISSION) / f"{RUN_ID}.log", log_text)
    if STARTING in log_text:
        start(experiment, REPEATS[0], "here-1")
    disk = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*disk[:4], free_blocks, *disk[5:])))
    (part,) = progress_of(experiment)
    assert (part.state.word, part.state.reason[: len(said)]) == ("missing", said)


def link_to(target: str) -> Callable[[Path], None]:
    def link(log: Path) -> None:
        (log.parent / target).write_text(SECRET)
        log.symlink_to(target)

    return link


@pytest.mark.fault("F46")
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda log: log.symlink_to("/dev/zero"), link_to("../../../secret"), link_to("secret")],
)
def test_what_is_no_regular_file_is_no_log(
    tmp_path: Path, jobs: dict[JobKey, JobState], make: Callable[[Path], None]
) -> None:
    jobs["7", 0] = JobState("FAILED", 2, None, "None")
    submissions = [slurm_submission(REPEATS[:1])]
    experiment = make_experiment(tmp_path / "x", missing=REPEATS[:1], submissions=submissions)
    log = experiment.log_folder(SUBMISSION) / f"{ARRAY}-7_0.log"
    log.parent.mkdir(parents=True)
    make(log)
    (part,) = progress_of(experiment)
    assert (part.state.reason, part.log) == ("exited 2 without a record; see its log", None)
    assert read_log_tail(log) == ""


@pytest.mark.fault("F46")
def test_the_log_of_plain_sbatch_is_that_of_the_node_where_it_ran_last_and_no_link(tmp_path: Path) -> None:
    other = REPEATS[1].run_id()
    of_sbatch = Submission("sbatch-7", "sbatch", TIME, [SlurmArray("q4", [[RUN_ID], [other]], "7")])
    experiment = make_experiment(tmp_path / "out" / "q4", missing=REPEATS[:2], submissions=[of_sbatch])
    (tmp_path / "out" / "secret").write_text(SECRET)
    link = tmp_path / "out" / "q4-7_0-n17.log"
    link.symlink_to("secret")
    assert find_logs(experiment, manifest_of(experiment)) == {}
    link.unlink()
    for seconds, name in enumerate(("7_0-gpu-node-2", "7_0-n17", "7_1", "77_0-n17", "7_10-n17")):
        (log := tmp_path / "out" / f"q4-{name}.log").touch()
        os.utime(log, (seconds, seconds))
    found = {run_id: log.name for run_id, log in find_logs(experiment, manifest_of(experiment)).items()}
    assert found == {RUN_ID: "q4-7_0-n17.log", other: "q4-7_1.log"}  # the latter from a job file of an earlier version
    (tmp_path / "out" / "Q4-7_1-n17.log").touch()  # of sbatch --job-name=Q4
    assert find_logs(experiment, manifest_of(experiment))[other].name == "Q4-7_1-n17.log"


def test_the_log_of_a_later_point_of_a_local_element_is_that_of_its_first_point(tmp_path: Path) -> None:
    first, second, third, fourth = REPEATS
    experiment = make_experiment(tmp_path / "x", submissions=[Submission(SUBMISSION, "local", TIME)])
    folder = experiment.log_folder(SUBMISSION)
    folder.mkdir()
    log = open_log(folder, [first, second])
    log.write_text("epoch 1")
    (tmp_path / "secret.log").write_text(SECRET)
    (folder / f"{third.run_id()}.log").symlink_to(tmp_path / "secret.log")
    (folder / f"{fourth.run_id()}.log").symlink_to("../../../secret.log")
    assert find_logs(experiment, manifest_of(experiment)) == {first.run_id(): log, second.run_id(): log}


@pytest.mark.fault("F46")
def test_of_a_log_of_10_gb_the_last_16_kib_are_read_whatever_its_bytes(tmp_path: Path) -> None:
    log = tmp_path / "7_0.log"
    with log.open("wb") as file:
        file.truncate(10 * 10**9)  # takes no space
        file.seek(0, os.SEEK_END)
        file.write(b"\xff the end")
    assert read_log_tail(log) == "\0" * (16_384 - 9) + "\ufffd the end"
    assert read_log_tail(None) == read_log_tail(tmp_path / "absent") == ""


POINTS = [make_spec(batch_size_per_gpu=size) for size in (8, 16, 32)]
LABELS = {spec.run_id(): f"batch {spec.batch_size_per_gpu}" for spec in POINTS}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, to be set."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_off_a_terminal_a_point_has_two_lines_with_the_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = ProgressDisplay(POINTS, LABELS, {POINTS[1].run_id(): 100.0})
    for spec in POINTS[:2]:
        progress.begin(spec)
        clock[0] += 20
        progress.end(spec, "ok")
    assert capsys.readouterr().err.splitlines() == [
        "[1/3] batch 8: running",
        "[1/3] batch 8: ok after 20 s; about 2 min 00 s left for 2 configurations",  # an earlier record says 100 s
        "[2/3] batch 16: running, about 1 min 40 s left",
        "[2/3] batch 16: ok after 20 s; about 20 s left for 1 configuration",
    ]


def test_a_point_is_expected_to_take_as_long_as_those_of_its_shape_else_the_middle_of_its_range() -> None:
    fields = {"strategy": "ddp", "num_gpus": 2, "measure": "communication", "input": "synthetic", "windows": 60}
    small, large = (make_spec(**fields, batch_size_per_gpu=size) for size in (32, 512))
    low_s, high_s = 8 + 6 * 7 * 0.125, 100 + 60 * 7 * 7 * 0.15
    assert expect_durations_s([small], []) == {small.run_id(): pytest.approx((low_s * high_s) ** 0.5)}
    took = [EarlierAttempt("x", large, "H100", 0.0, other_s) for other_s in (38.0, 20.0, 47.0)]
    assert expect_durations_s([small], took) == {small.run_id(): 38.0}
    shorter = make_spec(**fields | {"windows": 12})
    middle_s = (low_s * (100 + 12 * 7 * 7 * 0.15)) ** 0.5
    assert expect_durations_s([shorter], took) == {shorter.run_id(): pytest.approx(middle_s)}
    equal = EarlierAttempt("x", small, "H100", 0.0, 18.0)
    assert expect_durations_s([small, large], [*took, equal]) == {small.run_id(): 18.0, large.run_id(): 38.0}


def test_on_a_terminal_one_line_shows_the_epochs_that_ended(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    progress = ProgressDisplay(POINTS, LABELS, {})
    progress.begin(POINTS[0])
    clock[0] = 12
    progress.show_epochs(POINTS[0], "warning: x\nepoch 1 of 4: 6 s, loss 2.3\nepoch 2 of 4: 3.5 s, loss 2.1\n")
    progress.end(POINTS[0], "ok")
    shown, ended = capsys.readouterr().err.split(ERASE_LINE)[1:]
    assert shown == "[##########..........]  [1/3] batch 8  epoch 2 of 4, 12 s, "  # 59 columns, the whole bar
    assert "\n" not in shown
    assert ended.startswith("[1/3] batch 8: ok after 12 s")


def test_the_driver_reads_the_line_that_a_rank_writes() -> None:
    measurement = make_measurement(POINTS[0], (2.0, 1.5), loss=2.25, accuracy=0.5, test_accuracy=0.25)
    line = describe_epoch(measurement.epochs[1], 7)
    assert line == "epoch 2 of 7: 1.5 s, loss 2.25, accuracy 50.0%, test accuracy 25.0%"
    assert PROGRESS_LINE.findall(line) == [("epoch 2 of 7", "2", "7", "1.5")]
    unknown = make_measurement(POINTS[0], (2.0,), loss=None)
    assert re.fullmatch(r"epoch 1 of 7: 2 s, diverged", describe_epoch(unknown.epochs[0], 7))


def test_the_driver_reads_the_line_that_a_rank_of_a_script_writes(capsys: pytest.CaptureFixture[str]) -> None:
    rank: Any = SimpleNamespace(blocks=[SimpleNamespace(time_ns=1.5e9, update_ns=2e6)] * 2, spec=make_script_spec())
    ScriptRank.log_block(rank)
    (found,) = PROGRESS_LINE.findall(capsys.readouterr().err)
    assert (found[0], found[3]) == (f"window 2 of {rank.spec.epochs}", "1.5")
