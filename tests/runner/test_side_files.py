"""Step times, weights and traces of a launcher that was killed reach their record."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from conftest import Command
from factories import PLANNED, make_experiment, make_record, planned_points, write_grid

from pipeline.experiment.folder import Experiment
from pipeline.experiment.record import Record
from pipeline.experiment.record_store import load_attempts, publish_record
from pipeline.runner import side_files
from pipeline.runner.launch_session import LaunchSession
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.side_files import recover_side_files


def make_published(folder: Path, *records: Record) -> Experiment:
    """An experiment with these records, each of its own launch."""
    experiment = make_experiment(folder, missing=[record.spec for record in records])
    for record in records:
        publish_record(record, experiment.records_folder)
    return experiment


def write_side_files(experiment: Experiment, record: Record) -> RankFiles:
    """The side files of a point in the folder of its launch."""
    rank_files = RankFiles(experiment.launch_folder(record.run_id, record.launch_id))
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


def publish_and_die(experiment: Experiment, record: Record) -> None:
    """Publish the record as a launcher does, and be killed before the side files are moved."""
    side_files.move_side_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    LaunchSession(experiment, record.launch_id, [record.spec]).publish(record)


@pytest.mark.fault("F51")
def test_the_side_files_of_a_killed_launcher_are_moved_beside_their_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_record(launch_id="killed")
    experiment = make_experiment(tmp_path / "x", missing=[record.spec])
    write_side_files(experiment, record)
    launcher = multiprocessing.get_context("fork").Process(target=publish_and_die, args=(experiment, record))
    launcher.start()
    launcher.join()
    assert launcher.exitcode == -signal.SIGKILL
    assert [found.status for found in load_attempts(experiment.records_folder, record.run_id)] == ["ok"]
    assert side_files_of(experiment) == {}
    capsys.readouterr()

    recover_side_files(experiment)
    run_id = record.run_id
    assert side_files_of(experiment) == {
        f"records/{run_id}.0.steps.npz": b"steps",
        f"records/{run_id}.0.weights.npz": b"weights",
        f"traces/{run_id}.0/rank0.gz": b"trace",
    }
    said = f"{run_id}: its launcher was killed; steps.npz, weights.npz, traces moved beside the record.\n"
    assert capsys.readouterr().err == said
    recover_side_files(experiment)
    assert capsys.readouterr().err == ""


@pytest.mark.fault("F51")
@pytest.mark.parametrize("status", ["ok", "failed"])
def test_side_files_without_an_ok_record_of_their_launch_stay(tmp_path: Path, status: str) -> None:
    """The launch still runs, or it failed: its files say why."""
    launch_id = "other" if status == "ok" else "busy"
    published = make_record(status="ok" if status == "ok" else "failed", launch_id=launch_id)
    experiment = make_published(tmp_path / "x", published)
    rank_files = write_side_files(experiment, make_record(launch_id="busy"))
    recover_side_files(experiment)
    assert side_files_of(experiment) == {}
    assert all(path.exists() for path in rank_files.side_files())


def test_each_attempt_gets_its_own_files(tmp_path: Path) -> None:
    first, second = make_record(launch_id="a"), make_record(launch_id="b")
    experiment = make_published(tmp_path / "x", first, second)
    for record in (second, first):
        write_side_files(experiment, record).series.write_text(record.launch_id)
    recover_side_files(experiment)
    found = side_files_of(experiment)
    assert found[f"records/{first.run_id}.0.steps.npz"] == b"a"
    assert found[f"records/{first.run_id}.1.steps.npz"] == b"b"


@pytest.mark.fault("F51")
def test_a_launcher_whose_files_were_moved_by_another_process_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_record(launch_id="busy")
    experiment = make_published(tmp_path / "x", record)
    rank_files = write_side_files(experiment, record)
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
def test_a_link_is_not_followed(tmp_path: Path) -> None:
    record = make_record(launch_id="killed")
    experiment = make_published(tmp_path / "x", record)
    rank_files = write_side_files(experiment, record)
    experiment.scratch_folder.rename(tmp_path / "elsewhere")
    experiment.scratch_folder.symlink_to(tmp_path / "elsewhere")
    recover_side_files(experiment)
    assert side_files_of(experiment) == {}
    assert rank_files.series.exists()


@pytest.mark.fault("F51")
@pytest.mark.parametrize("command", ["submit", "launch"])
def test_the_next_submit_or_launch_moves_them(pipeline: Command, tmp_path: Path, command: str) -> None:
    """All its points are recorded, so that nothing runs."""
    records = [make_record(spec, launch_id="killed") for spec in planned_points()]
    experiment = make_published(tmp_path / "planned", *records)
    write_side_files(experiment, records[1])
    grid = ("--grid", write_grid(tmp_path, PLANNED), "--outputs", tmp_path)
    answer = pipeline(command, *grid, *({"submit": ("--cluster", "local"), "launch": ("--index", "0")}[command]))
    assert answer.returncode == 0, answer.stderr
    assert f"{records[1].run_id}: its launcher was killed; steps.npz" in answer.stderr
    assert len(side_files_of(experiment)) == 3
