"""Step times, weights and traces of a launcher that was killed reach their record."""

import multiprocessing
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Command, Words, needs_root, succeeded
from factories import PLANNED, make_experiment, make_record, measurement_of, planned_points, write_grid

from pipeline.records.folder import Experiment
from pipeline.records.record import Record, Status
from pipeline.records.store import load_attempts, publish_record
from pipeline.runner import side_files
from pipeline.runner.launch_session import LaunchSession, find_unpublished, recover_results
from pipeline.runner.rank_files import PointResult, PointTask, RankError, RankFiles


def make_published(folder: Path, *records: Record) -> Experiment:
    """An experiment with these records, each of its own launch."""
    experiment = make_experiment(folder, missing=[record.spec for record in records])
    for record in records:
        publish_record(record, experiment.records_folder)
    return experiment


def write_side_files(experiment: Experiment, record: Record) -> RankFiles:
    """The side files of a point in the folder of its launch."""
    rank_files = RankFiles(experiment.scratch_folder / f"{record.run_id}.{record.launch_id}")
    rank_files.write_point(PointTask(record.spec, None))
    rank_files.series.write_bytes(b"steps")
    rank_files.weights.write_bytes(b"weights")
    rank_files.traces.mkdir()
    (rank_files.traces / "rank0.gz").write_bytes(b"trace")
    return rank_files


def side_files_of(experiment: Experiment) -> dict[str, bytes]:
    """The side files beside the records, by their path in the experiment."""
    paths = [*experiment.records_folder.glob("*.npz"), *experiment.traces.glob("*/*")]
    return {str(path.relative_to(experiment.folder)): path.read_bytes() for path in paths}


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Experiment, Record, RankFiles]:
    """An experiment with a record, and the side files of its launcher, which was killed."""
    record = make_record(launch_id="killed")
    experiment = make_published(tmp_path / "x", record)
    return experiment, record, write_side_files(experiment, record)


Killed = tuple[Experiment, Record, RankFiles]


def publish_and_die(experiment: Experiment, record: Record) -> None:
    """Publish the record as a launcher does, and be killed before the side files are moved."""
    side_files.move_side_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    LaunchSession(experiment, experiment.scratch_folder, record.launch_id, [record.spec]).publish(record)


def run_killed(launch: Callable[[Experiment, Record], None], experiment: Experiment, record: Record) -> None:
    """Run this as a process that ends by SIGKILL."""
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(experiment, record))
    launcher.start()
    launcher.join()
    assert launcher.exitcode == -signal.SIGKILL


@pytest.mark.fault("F51")
def test_the_side_files_of_a_killed_launcher_are_moved_beside_their_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_record(launch_id="killed")
    experiment = make_experiment(tmp_path / "x", missing=[record.spec])
    write_side_files(experiment, record)
    run_killed(publish_and_die, experiment, record)
    assert [found.status for found in load_attempts(experiment.records_folder, {record.run_id})] == ["ok"]
    assert side_files_of(experiment) == {}
    capsys.readouterr()

    side_files.recover_side_files(experiment)
    run_id = record.run_id
    assert side_files_of(experiment) == {
        f"records/{run_id}.0.steps.npz": b"steps",
        f"records/{run_id}.0.weights.npz": b"weights",
        f"traces/{run_id}.0/rank0.gz": b"trace",
    }
    said = f"{run_id}: its launcher was killed; steps.npz, weights.npz, traces moved beside the record.\n"
    assert capsys.readouterr().err == said
    side_files.recover_side_files(experiment)
    assert capsys.readouterr().err == ""


@pytest.mark.fault("F51")
@pytest.mark.parametrize(("status", "launch_id"), [("ok", "other"), ("failed", "busy")])
def test_side_files_without_an_ok_record_of_their_launch_stay(tmp_path: Path, status: Status, launch_id: str) -> None:
    """The launch still runs, or it failed: its files say why."""
    experiment = make_published(tmp_path / "x", make_record(status=status, launch_id=launch_id))
    rank_files = write_side_files(experiment, make_record(launch_id="busy"))
    side_files.recover_side_files(experiment)
    assert side_files_of(experiment) == {}
    assert all(path.exists() for path in rank_files.side_files())


def test_each_attempt_gets_its_own_files(tmp_path: Path) -> None:
    first, second = make_record(launch_id="a"), make_record(launch_id="b")
    experiment = make_published(tmp_path / "x", first, second)
    for record in (second, first):
        write_side_files(experiment, record).series.write_text(record.launch_id)
    side_files.recover_side_files(experiment)
    found = side_files_of(experiment)
    assert [found[f"records/{first.run_id}.{attempt}.steps.npz"] for attempt in (0, 1)] == [b"a", b"b"]


@pytest.mark.fault("F51")
def test_a_launcher_whose_files_were_moved_by_another_process_says_nothing(
    killed: Killed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, record, rank_files = killed
    exists = Path.exists

    def move_first(path: Path) -> bool:
        found = exists(path)
        if path == rank_files.series and found:
            path.rename(experiment.records_folder / f"{record.run_id}.0.steps.npz")
        return found

    monkeypatch.setattr(Path, "exists", move_first)
    path = experiment.records_folder / f"{record.run_id}.0.json"
    assert side_files.move_side_files(experiment, rank_files, path) == ["weights.npz", "traces"]
    assert capsys.readouterr().err == ""
    assert len(side_files_of(experiment)) == 3


@pytest.mark.fault("F51")
def test_a_link_is_not_followed(tmp_path: Path, killed: Killed) -> None:
    experiment, _, rank_files = killed
    experiment.scratch_folder.rename(tmp_path / "elsewhere")
    experiment.scratch_folder.symlink_to(tmp_path / "elsewhere")
    side_files.recover_side_files(experiment)
    assert side_files_of(experiment) == {}
    assert rank_files.series.exists()


def die_with_a_result(experiment: Experiment, record: Record) -> None:
    """Be a launcher that is killed once its ranks have left their result."""
    experiment.scratch_folder.mkdir(mode=0o700)
    launch = LaunchSession(experiment, experiment.scratch_folder, record.launch_id, [record.spec])  # it holds a lock
    (rank_files,) = launch.rank_files_by_point
    rank_files.write_point(PointTask(record.spec, None))
    rank_files.series.write_bytes(b"steps")
    rank_files.write_result(PointResult(measurement_of(record), record.environment))
    os.kill(os.getpid(), signal.SIGKILL)


def make_unpublished(tmp_path: Path) -> tuple[Experiment, Record]:
    """An experiment whose first of two points has the result of a launcher that was killed; the second is recorded."""
    first, second = planned_points()
    experiment = make_published(tmp_path / "planned", make_record(second))
    with experiment.edit_manifest() as manifest:
        manifest.points.insert(0, first)
    record = make_record(first, launch_id="killed")
    run_killed(die_with_a_result, experiment, record)
    return experiment, record


def unpublished(experiment: Experiment) -> list[str]:
    """The run ids of the results that the next submit would publish."""
    with side_files.open_launches(experiment) as launches:
        return [found.run_id for found in find_unpublished(experiment, launches)]


@pytest.mark.fault("F57")
def test_the_next_submit_publishes_the_result_of_a_killed_launcher(
    pipeline: Command, tmp_path: Path, submit_planned: Words
) -> None:
    experiment, record = make_unpublished(tmp_path)
    assert load_attempts(experiment.records_folder, {record.run_id}) == []
    assert "1 configuration to run" in pipeline(*submit_planned, "--dry-run").stdout
    answer = succeeded(pipeline(*submit_planned))
    assert f"{record.run_id}: its launcher was killed before it published the record; its result is" in answer.stderr
    assert "0 configurations to run, 2 recorded as ok" in answer.stderr
    (found,) = load_attempts(experiment.records_folder, {record.run_id})
    assert (found.status, found.launch_id, found.measurement) == ("ok", "killed", record.measurement)
    assert found.started_at is not None
    assert side_files_of(experiment) == {f"records/{record.run_id}.0.steps.npz": b"steps"}
    assert unpublished(experiment) == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "open scratch": lambda folder: folder.parent.chmod(0o770),
    "lives on": lambda folder: RankFiles(folder).hold_lock(),  # until this process ends
    "lost lock": lambda folder: (folder / "launcher.lock").unlink(),
    "given away": lambda folder: os.chown(folder.parent, 65534, -1),
    "a link": lambda folder: folder.symlink_to(folder.rename(folder.parents[2] / "elsewhere")),
}


@needs_root
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_result_of_a_launcher_that_lives_or_that_others_could_write_is_not_published(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    experiment, record = make_unpublished(tmp_path)
    assert unpublished(experiment) == [record.run_id]
    change(experiment.scratch_folder / f"{record.run_id}.killed")
    assert unpublished(experiment) == []
    shutil.rmtree(experiment.scratch_folder)  # the point is not lost: it runs again


@pytest.mark.parametrize("fault", ["another point", "a rank's error", "no JSON"])
def test_a_result_that_is_not_that_of_its_point_is_not_published(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, record = make_unpublished(tmp_path)
    rank_files = RankFiles(experiment.scratch_folder / f"{record.run_id}.killed")
    if fault == "another point":
        rank_files.write_point(PointTask(make_record().spec, None))
    elif fault == "no JSON":
        (rank_files.folder / "result.json").write_text("{")
    else:
        rank_files.write_error(RankError("exception", "of rank 1", 1, "node", 0))
    with side_files.open_launches(experiment) as launches:
        recover_results(experiment, find_unpublished(experiment, launches))
    assert load_attempts(experiment.records_folder, {record.run_id}) == []
    assert ("the configuration runs again" in capsys.readouterr().err) == (fault != "a rank's error")


def test_what_a_rank_wrote_under_a_umask_of_0_is_closed_to_others_as_it_is_moved(killed: Killed) -> None:
    """A user's code may set the umask of a rank."""
    experiment, _, rank_files = killed
    (trace,) = rank_files.traces.iterdir()
    for path in (*rank_files.side_files(), trace):
        path.chmod(0o777 if path.is_dir() else 0o666)
    side_files.recover_side_files(experiment)
    moved = [*experiment.records_folder.glob("*.npz"), *experiment.traces.rglob("*")]
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in moved} == {"0o644", "0o755"}


@pytest.mark.fault("F51")
def test_a_linked_side_file_is_not_moved(tmp_path: Path, killed: Killed) -> None:
    experiment, record, rank_files = killed
    (tmp_path / "elsewhere").write_text("secret")
    for path in rank_files.side_files():
        path.rename(path.with_name(f"old-{path.name}"))
        path.symlink_to(tmp_path / "elsewhere")
    side_files.recover_side_files(experiment)
    target = experiment.records_folder / f"{record.run_id}.0.json"
    assert side_files.move_side_files(experiment, rank_files, target) == []
    assert side_files_of(experiment) == {}


@pytest.mark.fault("F51")
@pytest.mark.parametrize("command", ["submit", "launch"])
def test_the_next_submit_or_launch_moves_them(pipeline: Command, tmp_path: Path, command: str) -> None:
    """All its points are recorded, so that nothing runs."""
    records = [make_record(spec, launch_id="killed") for spec in planned_points()]
    experiment = make_published(tmp_path / "planned", *records)
    write_side_files(experiment, records[1])
    grid = ("--grid", write_grid(tmp_path, PLANNED), "--outputs", tmp_path)
    answer = succeeded(
        pipeline(command, *grid, *({"submit": ("--cluster", "local"), "launch": ("--index", "0")}[command]))
    )
    assert f"{records[1].run_id}: its launcher was killed; steps.npz" in answer.stderr
    assert len(side_files_of(experiment)) == 3
