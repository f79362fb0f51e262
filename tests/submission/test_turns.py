from pathlib import Path

import pytest
from factories import make_record, make_spec

from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import Manifest, SlurmArray, add_points, start_submission
from pipeline.experiment.record import Status
from pipeline.experiment.record_store import publish_record
from pipeline.experiment.spec import Spec
from pipeline.submission import slurm_queries
from pipeline.submission.progress import PointProgress, read_log_tail, read_progress
from pipeline.submission.slurm_queries import JobState

SUBMISSION = "5ub0ab1e" + "0" * 24
LAUNCH = "5ub0ab1e-7-0"
POINTS = [make_spec(repeat=repeat) for repeat in range(4)]


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Experiment, Manifest]:
    """Four points in one element, whose array is a plain job: 7."""
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    submission = start_submission(SUBMISSION, "slurm")
    submission.arrays.append(SlurmArray("x-0", [[spec.run_id() for spec in POINTS]], job_id="7", is_array=False))
    with experiment.edit_manifest() as manifest:
        add_points(manifest, POINTS)
        manifest.submissions.append(submission)
    return experiment, manifest


def begin(experiment: Experiment, *points: Spec, launch_id: str = LAUNCH) -> None:
    for spec in points:
        (experiment.scratch_folder / f"{spec.run_id()}.{launch_id}").mkdir(parents=True)


def end(experiment: Experiment, spec: Spec, status: Status = "ok", launch_id: str = LAUNCH) -> None:
    publish_record(make_record(spec, status=status, launch_id=launch_id), experiment.records_folder)


def follow(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch, state: str, code: int = 0
) -> list[PointProgress]:
    monkeypatch.setattr(slurm_queries, "probe_slurm", lambda: "up")
    monkeypatch.setattr(slurm_queries, "query_job_states", lambda _: {("7", None): JobState(state, code, None, "None")})
    return read_progress(*packed)


def words(parts: list[PointProgress]) -> list[str]:
    return [part.state.word for part in parts]


def test_points_of_a_running_element_are_done_running_or_wait_for_their_turn(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(packed[0], *POINTS[:3])
    end(packed[0], POINTS[0])
    end(packed[0], POINTS[1], "failed")
    parts = follow(packed, monkeypatch, "RUNNING")
    assert words(parts) == ["ok", "failed", "running", "pending"]
    assert [part.is_in_flight for part in parts] == [False, False, True, True]
    assert parts[3].state.reason == "waits for the points before it in its element"


def test_before_its_first_launch_and_between_two_the_element_is_in_flight(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words(follow(packed, monkeypatch, "RUNNING")) == ["running", "pending", "pending", "pending"]
    begin(packed[0], POINTS[0])
    end(packed[0], POINTS[0])
    assert words(follow(packed, monkeypatch, "RUNNING")) == ["ok", "pending", "pending", "pending"]


@pytest.mark.parametrize(
    ("state", "word"), [("TIMEOUT", "timeout"), ("CANCELLED", "cancelled"), ("OUT_OF_MEMORY", "host_oom")]
)
def test_an_element_that_is_ended_loses_the_point_that_ran_and_the_rest_were_not_begun(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch, state: str, word: str
) -> None:
    begin(packed[0], *POINTS[:2])
    end(packed[0], POINTS[0])
    parts = follow(packed, monkeypatch, state)
    assert words(parts) == ["ok", word, "missing", "missing"]
    assert parts[0].state.reason == ""  # what became of its element later is no word against it
    assert parts[2].state.reason == f"not begun: its element ended before its turn, Slurm says {state}"
    assert not any(part.is_in_flight for part in parts)


@pytest.mark.parametrize("state", ["PENDING", "REQUEUE_HOLD", "COMPLETED"])
def test_other_states_of_a_job_hold_for_all_its_points(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    word = {"PENDING": "pending", "REQUEUE_HOLD": "held", "COMPLETED": "lost"}[state]
    assert words(follow(packed, monkeypatch, state)) == [word] * 4


def test_a_point_whose_record_was_removed_while_its_element_runs_on_is_lost_and_may_be_submitted(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(packed[0], *POINTS[:3])
    end(packed[0], POINTS[1])
    parts = follow(packed, monkeypatch, "RUNNING")
    assert words(parts) == ["lost", "ok", "running", "pending"]
    assert not parts[0].is_in_flight


def test_a_point_that_an_earlier_submission_measured_is_in_flight_until_its_turn_is_over(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(packed[0], POINTS[1], launch_id="ea411e40-3-0")
    end(packed[0], POINTS[1], "failed", launch_id="ea411e40-3-0")
    parts = follow(packed, monkeypatch, "RUNNING")
    assert words(parts) == ["running", "failed", "pending", "pending"]
    assert parts[1].state.reason.endswith("being run again: pending, waits for the points before it in its element")
    assert [part.is_in_flight for part in parts] == [True] * 4


def leave_log(experiment: Experiment, *lines: str) -> Path:
    """The log of the element."""
    log = experiment.log_folder(SUBMISSION) / "x-0" / "7_0_log.err"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"{line}\n" for line in lines))
    return log


def test_an_oom_in_the_log_is_that_of_the_point_that_left_it(
    packed: tuple[Experiment, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(packed[0], *POINTS[:2])
    end(packed[0], POINTS[0], "oom")
    first, second = (f"{spec.run_id()}: starting" for spec in POINTS[:2])
    log = leave_log(packed[0], first, "CUDA out of memory", second, "a mushroom grew")
    parts = follow(packed, monkeypatch, "FAILED", 1)
    assert words(parts) == ["oom", "failed", "missing", "missing"]
    assert parts[1].state.reason == "exited 1 without a record; see its log"
    assert read_log_tail(log, since=second) == "\na mushroom grew\n"
