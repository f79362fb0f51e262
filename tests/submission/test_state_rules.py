import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from factories import ARRAY, NOW, SUBMISSION, assert_says, make_experiment, make_record, make_spec

from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import Manifest, SlurmArray, add_points, start_submission
from pipeline.experiment.outcomes import PointOutcome, PointStatus
from pipeline.experiment.record import Status
from pipeline.experiment.record_store import publish_record
from pipeline.experiment.spec import Spec
from pipeline.submission import read_progress as reading
from pipeline.submission import slurm_queries, state_rules
from pipeline.submission.read_progress import (
    PointJob,
    PointProgress,
    choose_job,
    poll_until_finished,
    read_log_tail,
    read_progress,
)
from pipeline.submission.slurm_queries import JobKey, JobState
from pipeline.submission.state_rules import (
    HELD_JOB_STATES,
    RUNNING_JOB_STATES,
    WAITING_JOB_STATES,
    WORD_BY_ENDED_JOB_STATE,
    PointState,
    decide_state,
    is_unfinished,
)

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


def job(state: str, exit_code: int = 0, *, ended_s_ago: float | None = None, reason: str = "None") -> JobState:
    end = None if ended_s_ago is None else (NOW - timedelta(seconds=ended_s_ago)).isoformat()
    return JobState(state, exit_code, end, reason)


def word(state: JobState | None, log_tail: str = "", *, was_submitted: bool = True) -> str:
    return decide_state(NO_RECORD, state, was_submitted, log_tail, NOW).word


@pytest.mark.fault("F03")
@pytest.mark.parametrize("name", STATE_NAMES)
def test_every_state_name_of_slurm_is_in_exactly_one_bucket(name: str) -> None:
    buckets = (
        WAITING_JOB_STATES,
        HELD_JOB_STATES,
        RUNNING_JOB_STATES,
        set(WORD_BY_ENDED_JOB_STATE),
        DECIDED_ONE_BY_ONE,
    )
    assert sum(name in bucket for bucket in buckets) == 1
    assert word(job(name)) != "unknown"


@pytest.mark.fault("F03")
@pytest.mark.parametrize("name", ["", "running", "RUNNINGG", "TELEPORTED", "CANCELLED+"])
def test_a_state_name_that_no_manual_has_is_unknown_and_named(name: str) -> None:
    state = decide_state(NO_RECORD, job(name), True, "", NOW)
    assert state.word == "unknown"
    assert name in state.reason


OOM_KILL = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0."
OVER_LIMIT = "slurmstepd-node1: error: StepId=7.0 exceeded memory limit (342581248 > 209715200), being killed"


@pytest.mark.fault("F31")
@pytest.mark.parametrize("exit_code", [137, -9])
@pytest.mark.parametrize("line", [OOM_KILL, OVER_LIMIT])
def test_a_job_that_was_killed_and_of_whose_memory_slurm_itself_wrote_ran_out_of_it(exit_code: int, line: str) -> None:
    state = decide_state(NO_RECORD, job("FAILED", exit_code), True, f"epoch 1\n{line}\n", NOW)
    assert state.word == "host_oom"
    assert state.reason.endswith("; raise mem_per_gpu_gib in the grid file, or give --mem 0")


@pytest.mark.parametrize(
    ("log_tail", "exit_code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", 1),
        ("RuntimeError: CUDA out of memory. Tried to allocate", 137),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", -9),
        ("my loader: oom-kill", 137),  # anybody may write that
        ("my loader: slurmstepd: error: oom-kill", 137),
        (OOM_KILL, 1),  # it ended otherwise
        (OVER_LIMIT, -15),
    ],
)
def test_a_log_that_suggests_out_of_memory_is_a_failure_and_no_result(log_tail: str, exit_code: int) -> None:
    state = decide_state(NO_RECORD, job("FAILED", exit_code), True, log_tail, NOW)
    assert (state.word, state.reason.partition(";")[0]) == ("failed", "its log suggests out of memory")


def test_a_job_whose_log_says_that_the_disk_is_full_failed_for_that() -> None:
    state = decide_state(NO_RECORD, job("FAILED", 1), True, "OSError: [Errno 28] No space left on device: 'x'\n", NOW)
    assert_says(state.reason, "the disk is full: free space on it, and submit again; exited 1 without a record")
    of_memory = "unable to write to file </torch_1>: No space left on device (28)\n/dev/shm: No space left on device"
    assert "disk" not in decide_state(NO_RECORD, job("FAILED", 1), True, of_memory, NOW).reason


@pytest.mark.parametrize("log_tail", ["a mushroom grew", ""])
def test_a_log_without_such_a_word_says_nothing_of_memory(log_tail: str) -> None:
    state = decide_state(NO_RECORD, job("FAILED", 137), True, log_tail, NOW)
    assert (state.word, "memory" in state.reason) == ("failed", False)


@pytest.mark.parametrize(
    ("exit_code", "words"), [(3, "exited 3"), (-9, "ended by signal 9"), (None, "ended without a record")]
)
def test_a_failure_says_how_the_job_ended(exit_code: int | None, words: str) -> None:
    assert words in decide_state(NO_RECORD, JobState("FAILED", exit_code, None, ""), True, "", NOW).reason


@pytest.mark.fault("F08")
@pytest.mark.parametrize(
    ("ended_s_ago", "expected"),
    [(0, "settling"), (59, "settling"), (60, "lost"), (86_400, "lost"), (None, "lost"), (-5, "settling")],
)
def test_a_completed_job_settles_for_a_minute_and_then_is_lost(ended_s_ago: float | None, expected: str) -> None:
    assert word(job("COMPLETED", ended_s_ago=ended_s_ago)) == expected


@pytest.mark.parametrize(
    ("exit_code", "ended_s_ago", "expected"),
    [
        (1, 0, "settling"),
        (1, 59, "settling"),
        (1, 60, "failed"),
        (1, None, "failed"),
        (2, 0, "failed"),
        (-9, 0, "failed"),
    ],
)
def test_a_job_that_exits_as_a_launch_with_a_recorded_oom_settles_too(
    exit_code: int, ended_s_ago: float | None, expected: str
) -> None:
    assert word(job("FAILED", exit_code, ended_s_ago=ended_s_ago), "CUDA out of memory") == expected


@pytest.mark.parametrize("end", ["", "Unknown", "N/A", "NONE"])
def test_an_end_time_that_is_none_is_long_ago(end: str) -> None:
    assert word(JobState("COMPLETED", 0, end, "")) == "lost"


def test_what_slurm_does_not_know_is_lost_if_a_driver_submitted_it_and_else_missing() -> None:
    assert word(None, was_submitted=True) == "lost"
    assert word(None, was_submitted=False) == "missing"


@pytest.mark.fault("F06")
@pytest.mark.parametrize(
    ("reason", "expected", "advice"),
    [
        ("PartitionDown", "pending", "--partition"),
        ("PartitionNodeLimit", "pending", "num_nodes"),
        ("Resources", "pending", "become free"),
        ("JobHeldUser", "held", ""),
        ("JobHeldAdmin", "held", ""),
        ("launch failed requeued held", "held", ""),
        ("launch_failed_requeued_held", "held", ""),
        ("job requeued in held state", "held", ""),
        ("JobHoldMaxRequeue", "held", ""),
        ("Nodes withheld", "pending", ""),
        ("SomethingNew", "pending", ""),
    ],
)
def test_a_point_that_waits_says_why_with_advice_where_there_is_any(reason: str, expected: str, advice: str) -> None:
    state = decide_state(NO_RECORD, job("PENDING", reason=reason), True, "", NOW)
    assert state.word == expected
    assert state.reason.startswith(reason)
    assert advice in state.reason


@pytest.mark.fault("F03")
def test_a_job_that_another_cluster_of_the_federation_has_started_may_still_write_its_record() -> None:
    """REVOKED is the state of its siblings: to run the point again would run it twice."""
    revoked = job("REVOKED", ended_s_ago=1000)
    state = decide_state(NO_RECORD, revoked, True, "", NOW)
    assert (state.word, "federation" in state.reason) == ("running", True)
    assert is_unfinished(revoked)


@pytest.mark.parametrize("status", ["ok", "oom", "failed"])
@pytest.mark.parametrize("name", [*STATE_NAMES, None])
def test_a_valid_record_decides_whatever_slurm_says(status: Status, name: str | None) -> None:
    record = make_record(status=status)
    state = decide_state(
        PointOutcome(record.spec, status, record, "as recorded"), job(name) if name else None, True, "oom-kill", NOW
    )
    assert state.word == status
    assert "as recorded" in state.reason


@pytest.mark.fault("F10")
def test_a_record_that_slurm_contradicts_is_noted() -> None:
    record = make_record()
    assert (
        "NODE_FAIL" in decide_state(PointOutcome(record.spec, "ok", record, ""), job("NODE_FAIL"), True, "", NOW).reason
    )


@pytest.mark.parametrize("name", ["COMPLETED", "FAILED", "TIMEOUT", "RUNNING", None])
def test_an_invalid_record_is_rejected_with_its_reason_whatever_slurm_says(name: str | None) -> None:
    outcome = PointOutcome(make_spec(), "rejected", None, "its only record is truncated")
    state = decide_state(outcome, job(name) if name else None, True, "CUDA out of memory", NOW)
    assert state == PointState("rejected", "its only record is truncated")


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
    jobs = [PointJob(key, start_submission(SUBMISSION, "slurm"), known.get(key), "current") for key in keys]
    chosen = choose_job(jobs)
    assert (chosen and chosen.key) == picked


@pytest.fixture
def submitted(tmp_path: Path) -> tuple[Experiment, Manifest]:
    """Two points of one array (job 7), and one point that nobody submitted."""
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    points = [make_spec(repeat=repeat) for repeat in range(3)]
    submission = start_submission(SUBMISSION, "slurm")
    submission.arrays.append(SlurmArray(ARRAY, [[spec.run_id()] for spec in points[:2]], job_id="7"))
    with experiment.edit_manifest() as manifest:
        add_points(manifest, points)
        manifest.submissions.append(submission)
    return experiment, manifest


def words(parts: list[PointProgress]) -> list[str]:
    return [part.state.word for part in parts]


@pytest.mark.parametrize("presence", ["absent", "silent"])
def test_where_slurm_cannot_be_asked_a_submitted_point_is_unknown_and_never_failed(
    submitted: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch, presence: str
) -> None:
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: presence)
    publish_record(make_record(make_spec(repeat=1)), submitted[0].records_folder)
    parts = read_progress(*submitted)
    assert words(parts) == ["unknown", "ok", "missing"]
    assert presence in parts[0].state.reason


def test_an_invalid_record_is_named_also_where_slurm_cannot_be_asked(
    submitted: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "absent")
    submitted[0].records_folder.mkdir(exist_ok=True)
    (submitted[0].records_folder / f"{make_spec().run_id()}.0.json").write_text('{"schema_version"')
    part, *others = read_progress(*submitted)
    assert words([part, *others]) == ["rejected", "unknown", "missing"]
    assert part.state.reason.startswith("its only record was not read: ")
    assert part.state.reason.endswith("; remove it and submit again")


def test_each_element_has_the_state_of_its_own_job_and_its_own_log(
    submitted: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "up")
    known = {("7", 0): job("RUNNING"), ("7", 1): job("FAILED", 1)}
    monkeypatch.setattr(slurm_queries, "query_job_states", lambda _: known)
    folder = submitted[0].log_folder(SUBMISSION) / ARRAY
    folder.mkdir(parents=True)
    (folder / "7_1_0_log.err").write_text("CUDA out of memory")
    parts = read_progress(*submitted)
    assert words(parts) == ["running", "failed", "missing"]
    assert parts[1].state.reason.startswith("its log suggests out of memory")
    assert [part.is_in_flight for part in parts] == [True, False, False]
    assert [part.log for part in parts] == [None, folder / "7_1_0_log.err", None]


def test_a_point_with_a_record_that_is_queued_again_keeps_its_word_and_says_so(
    submitted: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "up")
    known = {("7", 0): job("PENDING", reason="PartitionDown"), ("7", 1): job("COMPLETING")}
    monkeypatch.setattr(slurm_queries, "query_job_states", lambda _: known)
    publish_record(make_record(make_spec(), launch_id="ea411e40-3-0"), submitted[0].records_folder)
    publish_record(
        make_record(make_spec(repeat=1), launch_id="5ab0ab1e-8-0"), submitted[0].records_folder
    )  # this job's own
    first, second, _ = (part.state for part in read_progress(*submitted))
    assert first.word == "ok"
    assert first.reason.startswith("being run again: pending, PartitionDown: the partition is down")
    assert second == PointState("ok", "")


def test_a_record_that_is_published_while_slurm_is_asked_counts(
    submitted: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_job(_: object) -> dict[JobKey, JobState]:
        publish_record(make_record(make_spec()), submitted[0].records_folder)
        return {("7", 0): job("COMPLETED"), ("7", 1): job("PENDING")}

    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "up")
    monkeypatch.setattr(slurm_queries, "query_job_states", end_job)
    assert words(read_progress(*submitted)) == ["ok", "pending", "missing"]


@pytest.mark.fault("F08")
@pytest.mark.parametrize(("ended_s_ago", "word", "may_come"), [(20, "settling", True), (120, "lost", False)])
def test_a_record_that_appears_late_makes_a_point_ok(
    submitted: tuple[Experiment, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    ended_s_ago: float,
    word: str,
    may_come: bool,
) -> None:
    """As a network file system may show it. For a minute after the job's end nothing else may run the point."""
    end = (datetime.now() - timedelta(seconds=ended_s_ago)).isoformat()
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "up")
    known = {("7", 0): JobState("COMPLETED", 0, end, "None"), ("7", 1): job("RUNNING")}
    monkeypatch.setattr(slurm_queries, "query_job_states", lambda _: known)
    first, *_ = read_progress(*submitted)
    assert (first.state.word, first.is_in_flight) == (word, may_come)
    publish_record(make_record(make_spec()), submitted[0].records_folder)
    first, *_ = read_progress(*submitted)
    assert (first.state, first.is_in_flight) == (PointState("ok", ""), False)


def test_a_record_that_is_published_while_the_lock_is_tried_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = make_experiment(tmp_path / "x", missing=[make_spec()])

    def end_submit() -> bool:
        publish_record(make_record(make_spec()), experiment.records_folder)
        return False

    monkeypatch.setattr(experiment, "is_being_submitted", end_submit)
    manifest = experiment.read_manifest()
    assert manifest is not None
    assert words(read_progress(experiment, manifest)) == ["ok"]


def test_slurm_is_asked_ever_more_rarely_also_while_points_keep_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    specs = [make_spec(repeat=repeat) for repeat in range(8)]

    def read(*_: object) -> list[PointProgress]:
        """One point more has ended each time."""
        ends = [number < len(waits) for number in range(8)]
        states = [PointState("ok" if has_ended else "running", "") for has_ended in ends]
        found = zip(specs, states, ends, strict=True)
        return [PointProgress(NO_RECORD._replace(spec=a), b, not c, None, None) for a, b, c in found]

    monkeypatch.setattr(reading, "read_progress", read)
    watched = list(poll_until_finished({"x": make_experiment(tmp_path / "x", missing=specs)}))
    assert waits == [2, 4, 8, 16, 30, 30, 30, 30]
    assert set(words(watched[-1]["x"])) == {"ok"}


def test_only_the_end_of_a_log_is_read_and_any_bytes_will_do(tmp_path: Path) -> None:
    log = tmp_path / "7_0_0_log.err"
    log.write_bytes(b"oom-kill" + b"\xff" * 100_000 + b"the end")
    tail = read_log_tail(log)
    assert tail.endswith("the end")
    assert "oom-kill" not in tail
    (tmp_path / "7_0_1_log.err").write_text("of the other node")
    assert "of the other node" in read_log_tail(log)
    assert read_log_tail(None) == read_log_tail(tmp_path / "absent") == ""


def test_every_status_of_an_outcome_has_a_state() -> None:
    def state_of(status: PointStatus, spec: Spec) -> str:
        return decide_state(PointOutcome(spec, status, None, "why"), None, False, "", NOW).word

    statuses: list[PointStatus] = ["ok", "oom", "failed", "rejected", "missing"]
    assert [state_of(status, make_spec()) for status in statuses] == statuses


def test_a_state_under_way_is_one_of_those_that_a_driver_waits_for() -> None:
    under_way = {name for name in STATE_NAMES if state_rules.is_unfinished(job(name))}
    assert {*(word(job(name)) for name in under_way), "settling"} == set(state_rules.IN_FLIGHT)
    assert not under_way & {*WORD_BY_ENDED_JOB_STATE, *DECIDED_ONE_BY_ONE}


LAUNCH = "5ab0ab1e-7-0"
POINTS = [make_spec(repeat=repeat) for repeat in range(4)]


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Experiment, Manifest]:
    """Four points in one element, whose array is a plain job: 7."""
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    submission = start_submission(SUBMISSION, "slurm")
    submission.arrays.append(SlurmArray(ARRAY, [[spec.run_id() for spec in POINTS]], job_id="7", is_array=False))
    with experiment.edit_manifest() as manifest:
        add_points(manifest, POINTS)
        manifest.submissions.append(submission)
    return experiment, manifest


def start(experiment: Experiment, *points: Spec, launch_id: str = LAUNCH) -> None:
    for spec in points:
        folder = experiment.launch_folder(spec.run_id(), launch_id)
        folder.mkdir(parents=True)
        (folder / "point.json").touch()


def end(experiment: Experiment, spec: Spec, status: Status = "ok", launch_id: str = LAUNCH) -> None:
    publish_record(make_record(spec, status=status, launch_id=launch_id), experiment.records_folder)


def read_with_job(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch, state: str, code: int = 0
) -> list[PointProgress]:
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "up")
    monkeypatch.setattr(slurm_queries, "query_job_states", lambda _: {("7", None): JobState(state, code, None, "None")})
    return read_progress(*packed)


def test_points_of_a_running_element_are_done_or_running_or_wait(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(packed[0], *POINTS[:3])
    end(packed[0], POINTS[0])
    end(packed[0], POINTS[1], "failed")
    parts = read_with_job(packed, monkeypatch, "RUNNING")
    assert words(parts) == ["ok", "failed", "running", "pending"]
    assert [part.is_in_flight for part in parts] == [False, False, True, True]
    assert_says(parts[3].state.reason, "waits", "points before it")


def test_before_its_first_launch_and_between_two_the_element_is_in_flight(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words(read_with_job(packed, monkeypatch, "RUNNING")) == ["running", "pending", "pending", "pending"]
    start(packed[0], POINTS[0])
    end(packed[0], POINTS[0])
    assert words(read_with_job(packed, monkeypatch, "RUNNING")) == ["ok", "pending", "pending", "pending"]


@pytest.mark.parametrize(
    ("state", "word"), [("TIMEOUT", "timeout"), ("CANCELLED", "cancelled"), ("OUT_OF_MEMORY", "host_oom")]
)
def test_an_element_that_is_ended_loses_the_point_that_ran_and_the_rest_have_not_started(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch, state: str, word: str
) -> None:
    start(packed[0], *POINTS[:2])
    end(packed[0], POINTS[0])
    parts = read_with_job(packed, monkeypatch, state)
    assert words(parts) == ["ok", word, "missing", "missing"]
    assert parts[0].state.reason == ""  # what became of its element later is no word against it
    assert_says(parts[2].state.reason, "not started", "element ended", f"Slurm says {state}")
    assert not any(part.is_in_flight for part in parts)


def test_an_element_that_has_just_ended_with_a_recorded_failure_settles(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(packed[0], POINTS[0])
    end(packed[0], POINTS[0])
    just_now = JobState("FAILED", 1, datetime.now().isoformat(), "None")
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "up")
    monkeypatch.setattr(slurm_queries, "query_job_states", lambda _: {("7", None): just_now})
    parts = read_progress(*packed)
    assert words(parts) == ["ok", "settling", "settling", "settling"]
    assert [part.is_in_flight for part in parts] == [False, True, True, True]  # so `submit` leaves them alone


@pytest.mark.parametrize("state", ["PENDING", "REQUEUE_HOLD", "COMPLETED"])
def test_other_states_of_a_job_hold_for_all_its_points(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    word = {"PENDING": "pending", "REQUEUE_HOLD": "held", "COMPLETED": "lost"}[state]
    assert words(read_with_job(packed, monkeypatch, state)) == [word] * 4


def test_a_point_whose_record_was_removed_while_its_element_runs_on_is_lost_and_may_be_submitted(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(packed[0], *POINTS[:3])
    end(packed[0], POINTS[1])
    parts = read_with_job(packed, monkeypatch, "RUNNING")
    assert words(parts) == ["lost", "ok", "running", "pending"]
    assert not parts[0].is_in_flight


def test_a_point_that_an_earlier_submission_measured_is_in_flight_until_a_later_point_has_run(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(packed[0], POINTS[1], launch_id="ea411e40-3-0")
    end(packed[0], POINTS[1], "failed", launch_id="ea411e40-3-0")
    parts = read_with_job(packed, monkeypatch, "RUNNING")
    assert words(parts) == ["running", "failed", "pending", "pending"]
    assert parts[1].state.reason.endswith("being run again: pending, waits for the points before it in its element")
    assert [part.is_in_flight for part in parts] == [True] * 4


def test_points_of_a_plain_sbatch_have_a_start_and_a_log_and_are_run_again_only_once_they_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = POINTS[:3]
    experiment = make_experiment(tmp_path / "q4", make_record(second), make_record(third), missing=[first])
    submission = start_submission("sbatch-7", "sbatch")
    elements = [[first.run_id()], [second.run_id()], [third.run_id()]]
    submission.arrays.append(SlurmArray("q4", elements, job_id="7"))
    with experiment.edit_manifest() as manifest:
        manifest.submissions.append(submission)
    start(experiment, first, launch_id="7-0-0-1750000000")
    start(experiment, second, launch_id="7-1-0-1750000000")  # with --rerun
    (tmp_path / "q4-7_0.log").write_text("epoch 1")
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "up")
    known = {("7", index): job("RUNNING") for index in range(3)}
    monkeypatch.setattr(slurm_queries, "query_job_states", lambda _: known)
    parts = {part.spec: part for part in read_progress(experiment, manifest)}
    assert [parts[spec].state.word for spec in (first, second, third)] == ["running", "ok", "ok"]
    assert [parts[spec].started_unix_s is not None for spec in (first, second, third)] == [True, True, False]
    assert [parts[spec].rerun is not None for spec in (first, second, third)] == [False, True, False]
    assert parts[first].log == tmp_path / "q4-7_0.log"
    assert read_log_tail(parts[first].log) == "epoch 1"


def leave_log(experiment: Experiment, *lines: str) -> Path:
    """The log of the element."""
    log = experiment.log_folder(SUBMISSION) / ARRAY / "7_0_log.err"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"{line}\n" for line in lines))
    return log


def test_an_oom_in_the_log_is_that_of_the_point_that_left_it(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(packed[0], *POINTS[:2])
    end(packed[0], POINTS[0], "oom")
    first, second = (f"{spec.run_id()}: starting" for spec in POINTS[:2])
    log = leave_log(packed[0], first, "CUDA out of memory", second, "a mushroom grew")
    parts = read_with_job(packed, monkeypatch, "FAILED", 1)
    assert words(parts) == ["oom", "failed", "missing", "missing"]
    assert_says(parts[1].state.reason, "exited 1", "without a record", "log")
    assert read_log_tail(log, since=second) == "\na mushroom grew\n"
