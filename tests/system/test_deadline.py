"""Time that is over ends what runs, once, there and nowhere else; and a point whose time is over is published once."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from factories import assert_says, make_measurement, make_spec

from pipeline import launch as launching
from pipeline.experiment.folder import Experiment
from pipeline.experiment.record import Environment, FailureKind, Record
from pipeline.experiment.record_store import load_folder
from pipeline.experiment.spec import Spec
from pipeline.launch import launch_points, run_launch
from pipeline.runner.failed_record import RankExit
from pipeline.runner.launch_options import LaunchOptions, launch_command
from pipeline.runner.rank_files import PointResult, PointTask, RankError, RankFiles
from pipeline.system.deadline import Deadline, DeadlineExpired

LIMIT_S = 1
SOON_S = 0.2


def test_what_takes_longer_is_ended_and_what_comes_after_is_left_alone() -> None:
    deadline = Deadline(SOON_S)
    started_s = time.monotonic()
    with pytest.raises(DeadlineExpired), deadline:
        time.sleep(60)
    assert SOON_S <= time.monotonic() - started_s < 30
    assert deadline.is_expired
    time.sleep(2 * SOON_S)


def test_what_ends_in_time_is_not_ended_later() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    deadline = Deadline(SOON_S)
    with deadline:
        assert not deadline.is_expired
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == handler
    time.sleep(2 * SOON_S)


def test_no_handler_of_errors_on_the_way_takes_it_for_its_own() -> None:
    def handle_errors() -> None:
        with contextlib.suppress(Exception):
            time.sleep(60)

    with pytest.raises(DeadlineExpired), Deadline(SOON_S):
        handle_errors()


def test_another_thread_restarts_it_and_it_still_comes() -> None:
    deadline = Deadline(2 * SOON_S)
    started_s = time.monotonic()
    threading.Timer(SOON_S, deadline.restart).start()
    with pytest.raises(DeadlineExpired), deadline:
        time.sleep(60)
    assert time.monotonic() - started_s >= 3 * SOON_S


def test_a_restart_after_the_end_sets_no_alarm() -> None:
    deadline = Deadline(SOON_S)
    with deadline:
        pass
    deadline.restart()
    time.sleep(2 * SOON_S)
    assert deadline.is_expired


def test_an_alarm_that_comes_after_the_end_rings_in_vain() -> None:
    deadline = Deadline(SOON_S)
    deadline.__enter__()
    ring = signal.getsignal(signal.SIGALRM)
    deadline.__exit__()
    time.sleep(2 * SOON_S)
    assert callable(ring)
    ring(signal.SIGALRM, None)


def test_without_a_limit_it_never_comes_and_uses_no_signal() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    deadline = Deadline(None)
    with deadline:
        assert signal.getsignal(signal.SIGALRM) == handler
    assert not deadline.is_expired


@pytest.mark.parametrize("run_ids", [["a"], ["a", "b"]])
def test_the_limit_is_passed_where_an_element_runs_several_points(run_ids: list[str]) -> None:
    options = LaunchOptions(Path("data"), point_limit_s=1200)
    command = launch_command(Path("manifest.json"), run_ids, options)
    assert (command[-2:] == ["--point-limit-s", "1200"]) == (len(run_ids) > 1)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    return experiment


def write_result(rank_files: RankFiles, spec: Spec) -> None:
    rank_files.write_result(PointResult(make_measurement(spec), Environment()))


class Ranks:
    """Ranks that end each point by what `how` says of its batch size: `ok`, `hang` or what they do before they hang."""

    def __init__(self, experiment: Experiment, how: dict[int, str]) -> None:
        self.launched: list[int] = []
        self._experiment = experiment
        self._how = how

    def __call__(self, spec: Spec, first: RankFiles, launch_id: str, num_threads: int) -> dict[int, RankExit]:
        self.launched.append(spec.batch_size_per_gpu)
        rank_files_by_point = [first, *(RankFiles(Path(part.folder)) for part in first.read_following())]
        points = [first.read_point(), *(part.point for part in first.read_following())]
        for rank_files, point in zip(rank_files_by_point, points, strict=True):
            self.run(rank_files, point)
        return {}

    def run(self, rank_files: RankFiles, point: PointTask) -> None:
        how = self._how[point.spec.batch_size_per_gpu]
        rank_files.write_point(point)
        if how == "hang with a result":
            write_result(rank_files, point.spec)
        elif how.startswith("hang with "):
            kind: FailureKind = "cuda_oom" if how.endswith("oom") else "collective"
            rank_files.write_error(RankError(kind, "what happened", 0, "node1", 0))
        if how.startswith("hang"):
            time.sleep(60)
        write_result(rank_files, point.spec)


def run(
    experiment: Experiment, how: dict[int, str], monkeypatch: pytest.MonkeyPatch, limit_s: int = LIMIT_S
) -> tuple[int, list[Record], list[int]]:
    """The exit code, the records in the order of the points, and the first points of the launches."""
    points = [make_spec(batch_size_per_gpu=size) for size in how]
    ranks = Ranks(experiment, how)
    monkeypatch.setattr(launching, "run_ranks", ranks)
    monkeypatch.setenv("PIPELINE_LAUNCH_ID", "launch")  # as Slurm's elements have: one id, and so one folder a point
    code = run_launch(points, experiment, LaunchOptions(Path("data"), point_limit_s=limit_s))
    found, rejected = load_folder(experiment.records_folder)
    assert rejected == []
    assert [record.attempt for record in found] == [0] * len(points), "each point is published once"
    by_id = {record.run_id: record for record in found}
    return code, [by_id[spec.run_id()] for spec in points], ranks.launched


def test_a_point_that_hangs_fails_by_name_and_those_behind_it_are_launched_anew(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, records, launched = run(experiment, {8: "ok", 16: "hang", 32: "ok"}, monkeypatch)
    assert (code, launched) == (1, [8, 32])
    assert [record.status for record in records] == ["ok", "failed", "ok"]
    assert os.listdir(experiment.scratch_folder) == [f"{records[1].run_id}.launch"]  # what the others left is removed
    failure = records[1].failure
    assert failure is not None
    assert failure.kind == "timeout"
    assert_says(records[1].reason, "limit of 1 s", "raise --time")


def test_each_point_of_shared_processes_has_the_whole_limit(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 3  # a loaded machine may need a second more for a point

    def run_slowly(ranks: Ranks, rank_files: RankFiles, point: PointTask) -> None:
        rank_files.write_point(point)
        time.sleep(0.27 * limit_s)  # four points together take longer than the limit of one
        write_result(rank_files, point.spec)

    monkeypatch.setattr(Ranks, "run", run_slowly)
    code, records, launched = run(experiment, dict.fromkeys((8, 16, 32, 64), "ok"), monkeypatch, limit_s)
    assert (code, launched) == (0, [8])
    assert [record.status for record in records] == ["ok"] * 4


def test_a_result_counts_also_where_its_ranks_do_not_end(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, records, launched = run(experiment, {8: "hang with a result", 16: "ok"}, monkeypatch)
    assert (code, launched) == (0, [8, 16])
    assert [record.status for record in records] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("how", "status", "kind"),
    [("hang with an oom", "oom", "cuda_oom"), ("hang with a lost peer", "failed", "timeout")],
)
def test_an_error_that_a_rank_left_about_itself_is_the_cause_and_a_consequence_is_not(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, how: str, status: str, kind: str
) -> None:
    _, (record, after), _ = run(experiment, {8: how, 16: "ok"}, monkeypatch)
    assert record.failure is not None
    assert (record.status, record.failure.kind, after.status) == (status, kind, "ok")


def test_a_point_that_begins_while_the_one_before_it_is_ended_is_launched_anew(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent takes a moment to end the ranks: in it the point whose time is over ends well and the next begins."""
    first, second = points = [make_spec(batch_size_per_gpu=size) for size in (8, 16)]

    def run_ranks(spec: Spec, rank_files: RankFiles, launch_id: str, num_threads: int) -> dict[int, RankExit]:
        (following,) = rank_files.read_following()
        try:
            time.sleep(60)
        finally:
            write_result(rank_files, spec)
            RankFiles(Path(following.folder)).write_error(RankError("collective", "lost its peer", 1, "node1", 0))
        return {}

    monkeypatch.setattr(launching, "run_ranks", run_ranks)
    monkeypatch.setenv("PIPELINE_LAUNCH_ID", "launch")
    (record,) = launch_points(points, experiment, LaunchOptions(Path("data"), point_limit_s=LIMIT_S))
    assert record is not None
    assert (record.run_id, record.status) == (first.run_id(), "ok")
    assert os.listdir(experiment.scratch_folder) == []  # the second will be launched, the first is ok
    assert not list(experiment.records_folder.glob(f"{second.run_id()}.*"))


def test_the_limit_covers_a_whole_search_for_the_memory_boundary(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_trials = 0

    def run_ranks(spec: Spec, rank_files: RankFiles, launch_id: str, num_threads: int) -> dict[int, RankExit]:
        nonlocal num_trials
        num_trials += 1
        time.sleep(0.4 * LIMIT_S)
        rank_files.write_error(RankError("cuda_oom", "out", 0, "node1", 0))
        return {0: RankExit(1, 0.0)}

    monkeypatch.setattr(launching, "run_ranks", run_ranks)
    spec = make_spec(input="synthetic", measure="memory", batch_size_per_gpu=1024)
    options = LaunchOptions(Path("data"), point_limit_s=LIMIT_S)
    (record,) = launch_points([spec], experiment, options)
    assert num_trials == 3
    assert record is not None
    assert record.failure is not None
    assert (record.status, record.failure.kind) == ("failed", "timeout")
