"""An element runs the points that `submit` wrote for it, and nothing that somebody else has put in their place."""

import os
import time
from pathlib import Path

import pytest
from conftest import Command, assert_refused
from factories import make_experiment, make_record, make_spec

from pipeline.launch import without_results_of_job
from pipeline.records.store import publish_record
from pipeline.runner import launch_options
from pipeline.runner.launch_options import LaunchOptions, TaskList, digest, read_task_list
from pipeline.system.errors import CommandError

FIRST, SECOND = make_spec(), make_spec(repeat=1)
TASKS = TaskList([[FIRST], [SECOND]], LaunchOptions(Path("/data"), modules=Path("/models")))
RAW = TASKS.encode()
SHA256 = digest(RAW)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "x-0.json").write_bytes(RAW)
    return tmp_path / "x-0.json"


def test_an_element_has_its_own_points_and_the_options_of_all(file: Path) -> None:
    found = read_task_list(file, SHA256)
    assert (found, found.points_of(1)) == (TASKS, [SECOND])


def test_a_requeued_element_leaves_out_the_points_of_which_it_has_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_LAUNCH_ID", "aaaaaaaa-7-1-1750000060")
    earlier = [(FIRST, "aaaaaaaa-7-0-1750000000"), (SECOND, "aaaaaaaa-8-0-1750000000")]  # the second of another job
    experiment = make_experiment(tmp_path / "x")
    for spec, launch_id in earlier:
        publish_record(make_record(spec, launch_id=launch_id), experiment.records_folder)
    assert without_results_of_job([FIRST, SECOND], experiment) == [SECOND]
    failed = make_record(SECOND, status="failed", launch_id="aaaaaaaa-7-0-1750000001", attempt=1)
    publish_record(failed, experiment.records_folder)
    assert without_results_of_job([FIRST, SECOND], experiment) == [SECOND]
    monkeypatch.setenv("PIPELINE_LAUNCH_ID", "aaaaaaaa-7-0-1750000000")  # of the first: a launch of its own is refused
    assert without_results_of_job([FIRST, SECOND], experiment) == [FIRST, SECOND]
    monkeypatch.delenv("PIPELINE_LAUNCH_ID")
    assert without_results_of_job([FIRST, SECOND], experiment) == [FIRST, SECOND]


@pytest.mark.parametrize("index", ["2", "-1"])
def test_an_index_that_is_none_of_the_array_is_refused_in_a_sentence(
    pipeline: Command, tmp_path: Path, index: str
) -> None:
    folder = make_experiment(tmp_path / "x").log_folder("a" * 32)
    folder.mkdir(parents=True)
    (folder / "x.json").write_bytes(RAW)
    answer = pipeline("launch", "--tasks", folder / "x.json", "--sha256", SHA256, "--index", index)
    assert_refused(answer, 2, f"--index {index}, but the elements of this array are 0 to 1; submit again")


@pytest.mark.fault("F43")
@pytest.mark.parametrize("raw", [RAW + b"\n", RAW.replace(b'"repeat":1', b'"repeat":2'), b"{}", b""])
def test_a_file_that_was_changed_is_refused_by_its_digest(file: Path, raw: bytes) -> None:
    file.write_bytes(raw)
    with pytest.raises(CommandError, match=r"x-0\.json was changed after submit wrote it; .* submit again"):
        read_task_list(file, SHA256)


@pytest.mark.fault("F43")
@pytest.mark.parametrize("kind", ["link", "fifo", "huge"])
def test_what_is_no_file_of_a_usual_size_is_refused_at_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file.rename(file.with_name("same bytes"))
    if kind == "link":
        file.symlink_to("same bytes")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        monkeypatch.setattr(launch_options, "MAX_FILE_BYTES", len(RAW) - 1)
        file.write_bytes(RAW)
    said = {"link": "is a link", "fifo": "is not a regular file", "huge": "bytes, more than"}[kind]
    with pytest.raises(CommandError, match=said):
        read_task_list(file, SHA256)


def test_an_element_waits_for_a_file_that_the_file_system_shows_late(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.rename(file.with_name("hidden"))
    waits: list[float] = []

    def show_after_three_looks(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            file.with_name("hidden").rename(file)

    monkeypatch.setattr(time, "sleep", show_after_three_looks)
    assert read_task_list(file, SHA256) == TASKS
    assert len(waits) == 3
    file.unlink()
    monkeypatch.setattr(launch_options, "VISIBLE_LIMIT_S", 0)
    with pytest.raises(CommandError, match="cannot be read: No such file or directory"):
        read_task_list(file, SHA256)
