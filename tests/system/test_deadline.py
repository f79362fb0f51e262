"""Time that is over ends what runs, once, there and nowhere else; and a point whose time is over is published once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pytest
from conftest import wait_for
from factories import assert_says, failure_of, make_measurement, make_spec, records_of

from pipeline import launch as launching
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment
from pipeline.records.record import Environment, FailureKind, Record
from pipeline.runner import launch_session, telemetry
from pipeline.runner.failures import RankExit
from pipeline.runner.launch_options import LaunchOptions, launch_command
from pipeline.runner.rank_files import PointResult, PointTask, RankError, RankFiles
from pipeline.system.deadline import Deadline, DeadlineExpired

LIMIT_S = 10
OPTIONS = LaunchOptions(Path("data"), point_limit_s=LIMIT_S)


class FakeClock:
    """A clock and an alarm whose time passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.alarm_s: float | None = None

    def monotonic(self) -> float:
        return self.now_s

    def setitimer(self, _: int, seconds: float) -> None:
        self.alarm_s = self.now_s + seconds if seconds else None

    def sleep(self, seconds: float) -> None:
        """Let time pass. Call the handler of each alarm that comes in between."""
        end_s = self.now_s + seconds
        while self.alarm_s is not None and self.alarm_s <= end_s:
            self.now_s, self.alarm_s = self.alarm_s, None
            ring = signal.getsignal(signal.SIGALRM)
            assert callable(ring)
            ring(signal.SIGALRM, None)
        self.now_s = end_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    fake_signal = SimpleNamespace(**{**vars(signal), "setitimer": clock.setitimer})
    monkeypatch.setattr("pipeline.system.deadline.time", clock)
    monkeypatch.setattr("pipeline.system.deadline.signal", fake_signal)
    return clock


def test_what_takes_longer_is_ended_by_the_alarm_of_the_operating_system() -> None:
    deadline = Deadline(0.05)
    with pytest.raises(DeadlineExpired), deadline:
        time.sleep(600)
    assert (deadline.is_expired, signal.getitimer(signal.ITIMER_REAL)) == (True, (0, 0))


def test_what_ends_in_time_is_not_ended_later(clock: FakeClock) -> None:
    """Neither by an alarm that comes late nor after a restart."""
    before = signal.getsignal(signal.SIGALRM)
    deadline = Deadline(LIMIT_S)
    with deadline:
        ring = signal.getsignal(signal.SIGALRM)
        assert not deadline.is_expired
    deadline.restart()
    assert (clock.alarm_s, signal.getsignal(signal.SIGALRM)) == (None, before)
    clock.sleep(2 * LIMIT_S)
    assert callable(ring)
    ring(signal.SIGALRM, None)
    assert deadline.is_expired


def test_no_handler_of_errors_on_the_way_takes_it_for_its_own(clock: FakeClock) -> None:
    def handle_errors() -> None:
        with contextlib.suppress(Exception):
            clock.sleep(60)

    with pytest.raises(DeadlineExpired), Deadline(LIMIT_S):
        handle_errors()


def test_another_thread_restarts_it_and_it_still_comes(clock: FakeClock) -> None:
    deadline = Deadline(LIMIT_S)

    def restart_halfway() -> None:
        clock.sleep(0.5 * LIMIT_S)
        thread = threading.Thread(target=deadline.restart)
        thread.start()
        thread.join()
        clock.sleep(60)

    with pytest.raises(DeadlineExpired), deadline:
        restart_halfway()
    assert clock.now_s == 1.5 * LIMIT_S


def test_without_a_limit_it_never_comes_and_uses_no_signal(clock: FakeClock) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    deadline = Deadline(None)
    with deadline:
        assert signal.getsignal(signal.SIGALRM) == handler
        clock.sleep(1e9)
    assert not deadline.is_expired


@pytest.mark.parametrize("run_ids", [["a"], ["a", "b"]])
def test_the_limit_is_passed_where_an_element_runs_several_points(run_ids: list[str]) -> None:
    command = launch_command(Path("manifest.json"), run_ids, LaunchOptions(Path("data"), point_limit_s=1200))
    assert (command[-2:] == ["--point-limit-s", "1200"]) == (len(run_ids) > 1)


@contextlib.contextmanager
def sample_nothing(rank_files: RankFiles, node: int) -> Iterator[None]:
    """Stand in for the sampler, which is a process of its own."""
    yield
    with contextlib.suppress(OSError):
        telemetry.finish_samples_file(rank_files.samples(node), None)


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.setattr(launch_session, "RANK_FILES_POLL_S", 0.001)
    monkeypatch.setattr(telemetry, "sample_in_background", sample_nothing)
    monkeypatch.setenv("PIPELINE_LAUNCH_ID", "launch")  # as Slurm's elements have: one id, and so one folder a point
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    return experiment


def write_result(rank_files: RankFiles, spec: Spec) -> None:
    rank_files.write_result(PointResult(make_measurement(spec), Environment()))


class Ranks:
    """Ranks that end each point by what `how` says of its batch size: `ok`, `hang` or what they do before they hang."""

    def __init__(self, experiment: Experiment, how: dict[int, str], clock: FakeClock, point_time_s: float) -> None:
        self.launched: list[int] = []
        self._experiment = experiment
        self._how = how
        self._clock = clock
        self._point_time_s = point_time_s
        self._num_begun = 0

    def __call__(self, spec: Spec, first: RankFiles, launch_id: str, num_threads: int) -> dict[int, RankExit]:
        self.launched.append(spec.batch_size_per_gpu)
        rank_files_by_point = [first, *map(first.following, first.read_following())]
        points = [first.read_point(), *first.read_following()]
        for rank_files, point in zip(rank_files_by_point, points, strict=True):
            self.run(rank_files, point)
        return {}

    def run(self, rank_files: RankFiles, point: PointTask) -> None:
        how = self._how[point.spec.batch_size_per_gpu]
        rank_files.write_point(point)
        published = self._experiment.records_folder
        wait_for(lambda: len([*published.glob("*.json")]) == self._num_begun)  # those before it, and no file half made
        self._num_begun += 1
        self._clock.sleep(self._point_time_s)
        if how == "hang with a result":
            write_result(rank_files, point.spec)
        elif how.startswith("hang with "):
            kind: FailureKind = "cuda_oom" if how.endswith("oom") else "collective"
            rank_files.write_error(RankError(kind, "what happened", 0, "node1", 0))
        if how.startswith("hang"):
            self._clock.sleep(60)
        write_result(rank_files, point.spec)


Outcome = tuple[int, list[Record], list[int]]


class RunPoints(Protocol):
    """Run points of these batch sizes, each as `how` says of its size, after a time that every point takes.

    Return the exit code, the records in the order of the points, and the first points of the launches.
    """

    def __call__(self, how: dict[int, str], point_time_s: float = 0.0) -> Outcome: ...


@pytest.fixture
def run(experiment: Experiment, monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> RunPoints:
    def run_points(how: dict[int, str], point_time_s: float = 0.0) -> Outcome:
        points = [make_spec(batch_size_per_gpu=size) for size in how]
        ranks = Ranks(experiment, how, clock, point_time_s)
        monkeypatch.setattr(launching, "run_node_ranks", ranks)
        code = launching.run_element(points, experiment, experiment.scratch_folder, OPTIONS)
        found = records_of(experiment)
        assert [record.attempt for record in found] == [0] * len(points), "each point is published once"
        by_id = {record.run_id: record for record in found}
        return code, [by_id[spec.run_id()] for spec in points], ranks.launched

    return run_points


def test_a_point_that_hangs_fails_by_name_and_those_behind_it_are_launched_anew(
    experiment: Experiment, run: RunPoints
) -> None:
    code, records, launched = run({8: "ok", 16: "hang", 32: "ok"})
    assert (code, launched, [record.status for record in records]) == (1, [8, 32], ["ok", "failed", "ok"])
    assert os.listdir(experiment.scratch_folder) == [f"{records[1].run_id}.launch"]  # what the others left is removed
    assert failure_of(records[1]).kind == "timeout"
    assert_says(records[1].reason, "limit of 10 s", "raise --time")


@pytest.mark.parametrize(
    ("how", "point_time_s", "code", "launched", "ends"),
    [
        (dict.fromkeys((8, 16, 32, 64), "ok"), 0.6 * LIMIT_S, 0, [8], ["ok"] * 4),  # each has the whole limit
        ({8: "hang with a result", 16: "ok"}, 0, 0, [8, 16], ["ok", "ok"]),  # it counts
        # an error that a rank left about itself is the cause, and a consequence is not
        ({8: "hang with an oom", 16: "ok"}, 0, 1, [8, 16], ["cuda_oom", "ok"]),
        ({8: "hang with a lost peer", 16: "ok"}, 0, 1, [8, 16], ["timeout", "ok"]),
    ],
)
def test_what_ranks_leave_before_they_hang_tells_how_their_point_ended(
    run: RunPoints, how: dict[int, str], point_time_s: float, code: int, launched: list[int], ends: list[str]
) -> None:
    found = run(how, point_time_s)
    assert (found[0], found[2]) == (code, launched)
    assert [record.failure.kind if record.failure else record.status for record in found[1]] == ends


def test_a_point_that_begins_while_the_one_before_it_is_ended_is_launched_anew(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    """The agent takes a moment to end the ranks: in it the point whose time is over ends well and the next begins."""
    first, second = points = [make_spec(batch_size_per_gpu=size) for size in (8, 16)]

    def run_node_ranks(spec: Spec, rank_files: RankFiles, launch_id: str, num_threads: int) -> dict[int, RankExit]:
        (following,) = rank_files.read_following()
        try:
            clock.sleep(60)
        finally:
            write_result(rank_files, spec)
            rank_files.following(following).write_error(RankError("collective", "lost its peer", 1, "node1", 0))
        return {}

    monkeypatch.setattr(launching, "run_node_ranks", run_node_ranks)
    (record,) = launching.run_in_same_processes(points, experiment, experiment.scratch_folder, OPTIONS)
    assert record is not None
    assert (record.run_id, record.status) == (first.run_id(), "ok")
    assert os.listdir(experiment.scratch_folder) == []  # the second will be launched, the first is ok
    assert not list(experiment.records_folder.glob(f"{second.run_id()}.*"))


def test_the_limit_covers_a_whole_search_for_the_memory_boundary(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    num_trials = 0

    def run_node_ranks(spec: Spec, rank_files: RankFiles, launch_id: str, num_threads: int) -> dict[int, RankExit]:
        nonlocal num_trials
        num_trials += 1
        clock.sleep(0.4 * LIMIT_S)
        rank_files.write_error(RankError("cuda_oom", "out", 0, "node1", 0))
        return {0: RankExit(1, 0.0)}

    monkeypatch.setattr(launching, "run_node_ranks", run_node_ranks)
    spec = make_spec(input="synthetic", measure="memory", batch_size_per_gpu=1024)
    (record,) = launching.run_in_same_processes([spec], experiment, experiment.scratch_folder, OPTIONS)
    assert record is not None
    assert (num_trials, record.status, failure_of(record).kind) == (3, "failed", "timeout")
