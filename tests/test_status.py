import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from conftest import Command, without_slurm
from factories import ROOT, SUBMISSION, assert_says, make_experiment, make_record, make_spec, write_file

from pipeline import status
from pipeline.records.folder import Experiment, start_submission
from pipeline.records.record import Environment, Gpu
from pipeline.records.store import publish_record
from pipeline.system.errors import format_duration

OK, OOM, FAILED, MISSING = (make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=2**size) for size in range(3, 7))

H100 = Environment(gpus=(Gpu(name="NVIDIA H100"),))


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Points in four states, without Slurm."""
    found = [
        make_record(OK, environment=H100),
        make_record(OOM, status="oom", reason="full"),
        make_record(FAILED, status="failed", reason="rank 0: lost"),
    ]
    return make_experiment(tmp_path / "out" / "mine", *found, missing=[MISSING])


@pytest.fixture
def running(experiment: Experiment) -> Iterator[Experiment]:
    """A driver runs the first point again, since 75 s."""
    with experiment.edit_manifest() as manifest:
        submission = start_submission(SUBMISSION, "local")
        submission.submitted_at = "2020-01-01T00:00:00Z"
        manifest.submissions.append(submission)
    started = write_file(experiment.scratch_folder / f"{OK.run_id()}.here-2" / "point.json", "{}")
    os.utime(started, (time.time() - 75,) * 2)
    with experiment.submission_lock():
        yield experiment


def test_counts_come_first_and_then_what_has_no_result(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    answer = pipeline("status", experiment.folder, env=without_slurm(tmp_path))
    *points, todo = answer.stdout.split("\n", 3)
    assert points == [
        f"{experiment.folder}: 4 configurations: 1 ok, 1 oom, 1 failed, 1 missing",
        "  failed   ddp 2 GPUs, 32 per GPU  rank 0: lost",
        "  missing  ddp 2 GPUs, 64 per GPU  no record",
    ]
    assert "--rerun failed" in " ".join(todo.split())  # a long path wraps it
    everything = pipeline("status", experiment.folder, "--all", env=without_slurm(tmp_path)).stdout
    assert_says(everything, "ok       ddp 2 GPUs, 8 per GPU\n", "oom      ddp 2 GPUs, 16 per GPU  full\n")


def test_of_several_experiments_there_is_a_line_each_with_the_first_reason(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    make_experiment(tmp_path / "out" / "done", make_record(OK))
    make_experiment(tmp_path / "out" / "planned", missing=[OK, OOM])
    answer = pipeline("status", tmp_path / "out", env=without_slurm(tmp_path))
    assert answer.stdout.splitlines()[:-1] == [
        "experiment  runs  states                            first reason",
        "done           1  1 ok",
        "mine           4  1 ok, 1 oom, 1 failed, 1 missing  rank 0: lost",
        "planned        2  2 missing",
    ]
    narrow = pipeline("status", tmp_path / "out", env=without_slurm(tmp_path, COLUMNS="60")).stdout.splitlines()[:-1]
    assert (len(narrow), max(map(len, narrow)), narrow[2][-1]) == (4, 60, "…")
    everything = pipeline("status", tmp_path / "out", "--all", env=without_slurm(tmp_path)).stdout
    assert everything.count("ddp 2 GPUs, 8 per GPU") == 3


def test_the_command_that_goes_on_is_the_one_that_submitted(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    given = ["--grid", "my grid.yaml", "--rerun", "all", "--set", "num_gpus=2"]
    with experiment.edit_manifest() as manifest:
        for arguments in (given, given[:2], given[:2]):
            submission = start_submission(SUBMISSION, "local")
            submission.arguments = arguments
            manifest.submissions.append(submission)
    assert pipeline("status", experiment.folder, env=without_slurm(tmp_path)).stdout.splitlines()[-3:] == [
        "To run the failed configurations (1):",
        "  python -m pipeline.submit --grid 'my grid.yaml' --set num_gpus=2 --rerun failed",
        "  python -m pipeline.submit --grid 'my grid.yaml' --rerun failed",
    ]


def test_the_command_of_another_grid_of_the_experiment_does_not_run_what_failed(
    pipeline: Command, tmp_path: Path
) -> None:
    first, second = (start_submission(f"{number}" * 32, "slurm") for number in (1, 2))
    first.arguments, second.arguments = ["--grid", "q1"], ["--grid", "q2", "--merge"]
    experiment = make_experiment(tmp_path / "x", missing=[FAILED], submissions=[first, second])
    failed = msgspec.structs.replace(make_record(FAILED, status="failed", reason="lost"), launch_id="22222222-0-0")
    publish_record(failed, experiment.records_folder)
    assert pipeline("status", experiment.folder, env=without_slurm(tmp_path)).stdout.splitlines()[-2:] == [
        "To run the failed configurations (1):",
        "  python -m pipeline.submit --grid q2 --merge --rerun failed",
    ]


def test_a_point_that_is_run_again_shows_its_old_result_and_its_new_state(
    pipeline: Command, running: Experiment, tmp_path: Path
) -> None:
    text = pipeline("status", running.folder, env=without_slurm(tmp_path)).stdout
    (line,) = [line for line in text.splitlines() if "8 per GPU" in line]
    assert re.fullmatch(r"  ok .*1 min 1.*being run again: running", line)  # 75 s and what the command took
    answer = pipeline("status", running.folder, "--json", env=without_slurm(tmp_path)).stdout
    states = json.loads(answer)["experiments"]["mine"]
    assert [part["rerun"] for part in states] == [{"word": "running", "reason": ""}, None, None, None]
    assert [part["state"] for part in states] == ["ok", "oom", "failed", "pending"]
    assert 75 <= time.time() - states[0]["started_unix_s"] < 200


def test_a_running_point_names_its_log(pipeline: Command, running: Experiment, tmp_path: Path) -> None:
    log = write_file(running.log_folder(SUBMISSION) / f"{MISSING.run_id()}.log", "epoch 1\n")
    write_file(running.scratch_folder / f"{MISSING.run_id()}.here-3" / "point.json", "{}")
    for columns in ("40", "400"):
        text = pipeline("status", running.folder, env={**without_slurm(tmp_path), "COLUMNS": columns}).stdout
        (line,) = [line for line in text.splitlines() if "64 per GPU" in line]
        assert line.startswith("  running ")
        assert f"[{log}]" in text, "a terminal opens a path only if it is whole"


def test_the_time_so_far_stands_beside_what_an_earlier_record_took(
    pipeline: Command, running: Experiment, tmp_path: Path
) -> None:
    record = make_record(OK, started_at="2026-01-01T00:00:00Z", ended_at="2026-01-01T00:04:00Z", environment=H100)
    make_experiment(running.folder.parent / "earlier", record)
    assert " of about 4 min 00 s" in pipeline("status", running.folder, env=without_slurm(tmp_path)).stdout


@pytest.mark.parametrize("columns", [40, 60])
def test_no_line_is_wider_than_the_terminal(
    pipeline: Command, experiment: Experiment, tmp_path: Path, columns: int
) -> None:
    env = without_slurm(tmp_path, COLUMNS=str(columns))
    lines = pipeline("status", experiment.folder, "--all", env=env).stdout.splitlines()[1:]
    assert max(map(len, lines)) <= columns
    assert any("rank 0: lost" in line for line in lines)


def test_off_a_terminal_watching_prints_each_state_once_and_ends_with_the_last_point(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    watched = pipeline("status", experiment.folder, "--watch", "--strict", env=without_slurm(tmp_path))
    once = pipeline("status", experiment.folder, "--strict", env=without_slurm(tmp_path))
    assert (watched.returncode, watched.stdout) == (once.returncode, once.stdout) == (1, once.stdout)


@pytest.mark.parametrize(("terminal", "is_live"), [("xterm", True), ("dumb", False)])
def test_a_terminal_shows_a_live_table_unless_it_cannot(
    experiment: Experiment, tmp_path: Path, terminal: str, is_live: bool
) -> None:
    pytest.importorskip("rich")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "pipeline.status", str(experiment.folder), "--watch"]
    env = without_slurm(tmp_path, TERM=terminal, COLUMNS="200")
    subprocess.run(command, cwd=ROOT, env=env, stdout=slave, stderr=subprocess.DEVNULL, timeout=60, check=True)
    os.close(slave)
    text = os.read(master, 100_000).decode()
    os.close(master)
    assert "ddp 2 GPUs, 32 per GPU" in text
    assert ("\x1b[" in text) == is_live


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (130, "2 min 10 s"), (3900, "1 h 05 min")]
)
def test_a_duration_is_written_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_command_for_a_script_has_more_options_before_the_script() -> None:
    given = ["--num-gpus", "2", "--rerun=all", "--", "train.py", "--rerun", "1"]  # the last is the script's own
    submission = start_submission(SUBMISSION, "local")
    submission.arguments = given
    command = "python -m pipeline.run --num-gpus 2 --rerun failed -- train.py --rerun 1"
    assert status.command_again(submission, ["--rerun", "failed"]) == command


def test_the_command_for_what_has_no_record_selects_it_and_names_the_folder_of_its_paths() -> None:
    submission = start_submission(SUBMISSION, "local")
    submission.arguments, submission.workdir = ["--grid", "x.yaml", "--only", "a", "--pilot"], "/my jobs"
    place = "cd '/my jobs' && python -m pipeline.submit --grid x.yaml"
    assert status.command_again(submission, []) == place
    assert status.command_again(submission, ["--rerun", "failed"]) == f"{place} --only a --pilot --rerun failed"
    submission.workdir = os.getcwd()
    assert status.command_again(submission, []) == "python -m pipeline.submit --grid x.yaml"
