"""Points on this machine: nothing is left running when the driver goes, and a rank that dies costs its point alone."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, Command, processes_of, run_program, succeeded, wait_for, workers_of
from factories import (
    failure_of,
    make_experiment,
    make_record,
    make_spec,
    measurement_of,
    only_record,
    own_point,
    records_of,
    with_change,
    write_model,
)

from pipeline.records.folder import Experiment
from pipeline.runner.launch_options import LaunchOptions, launch_command
from pipeline.submission.local import latest_status_line, say_lost
from pipeline.system import host

pytestmark = pytest.mark.training

GRID = """
name: two
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: ddp, num_gpus: 2}
points:
  - {num_samples: [1000000], batch_size_per_gpu: [1]}
  - {num_samples: [64], batch_size_per_gpu: [8]}
"""

LIMIT_S = 25
IMPORTS_AGAIN = "imports torch again"  # a launch, where its agent is not forked from a server


def start_driver(tmp_path: Path, is_in_background: bool = False, grid: str = GRID) -> subprocess.Popen[str]:
    """A submit; the shell of a script lets one in the background ignore SIGINT."""
    (tmp_path / "grid.yaml").write_text(grid)
    command = [sys.executable, "-m", "pipeline.submit", "--grid", str(tmp_path / "grid.yaml"), "--cluster", "local"]
    return subprocess.Popen(
        [*command, "--outputs", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TEST_FOLDER": str(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN) if is_in_background else None,
    )


def both_ranks_train(tmp_path: Path) -> bool:
    return bool(list(tmp_path.glob("two/logs/scratch/*/environment.json"))) and len(workers_of(tmp_path)) >= 2


def test_cancel_ends_the_driver_and_its_ranks_and_status_says_so_with_the_command_that_goes_on(
    pipeline: Command, tmp_path: Path
) -> None:
    """Also one that a shell began in the background."""
    driver = start_driver(tmp_path, is_in_background=True)
    wait_for(lambda: both_ranks_train(tmp_path))
    (launcher,) = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    assert os.getsid(int(launcher)) != os.getsid(driver.pid), "Ctrl-C or a hang-up would end it"
    answer = pipeline("cancel", tmp_path / "two")
    _, said = driver.communicate(timeout=60)
    assert (answer.returncode, driver.returncode) == (0, 130), (answer.stderr, said)
    assert answer.stdout == f"ended two process {driver.pid} on this machine\n"
    assert workers_of(tmp_path) == []
    text = pipeline("status", tmp_path / "two").stdout
    interrupted = rf"interrupted: submit \(process {driver.pid} on .*ended before its record \[\S*\.log\]"
    assert re.search(interrupted, " ".join(text.split()))  # a long path is on a line of its own
    command = f"python -m pipeline.submit --grid {tmp_path / 'grid.yaml'} --cluster local --outputs {tmp_path}"
    *_, todo, last = text.splitlines()
    assert (todo.partition(" (")[0], last) == ("To run the configurations without a record", f"  {command}")


@pytest.mark.fault("F16")
def test_a_point_past_its_limit_is_ended_with_its_ranks_and_the_points_around_it_are_measured(tmp_path: Path) -> None:
    """The first begins the processes that the second shares; of the second a rank hangs; the third has new ones."""
    waits = "time.sleep(600 if len(batch['x']) == 1 and os.environ['RANK'] == '1' else 0); return nn.functional"
    path = write_model(tmp_path, "import os, time\n" + with_change("return nn.functional", waits))
    sizes = {64: 8, 1_000_000: 1, 128: 8}
    ddp = {"strategy": "ddp", "num_gpus": 2}
    points = [
        own_point(f"{path}:Tiny", **ddp, num_samples=count, batch_size_per_gpu=size) for count, size in sizes.items()
    ]
    experiment = make_experiment(tmp_path / "x", missing=points)
    options = LaunchOptions(tmp_path, point_limit_s=LIMIT_S)
    command = launch_command(experiment.manifest_path, [spec.run_id() for spec in points], options)
    started_s = time.monotonic()
    done = run_program(*command, env={**os.environ, "TEST_FOLDER": str(tmp_path)})
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert time.monotonic() - started_s < 2 * LIMIT_S + 60
    assert workers_of(tmp_path) == []
    first, second, third = sorted(records_of(experiment), key=lambda record: points.index(record.spec))
    assert [record.status for record in (first, second, third)] == ["ok", "failed", "ok"]
    assert (failure_of(second).kind, f"limit of {LIMIT_S} s" in second.reason) == ("timeout", True)
    assert second.environment.nodes == first.environment.nodes
    assert second.environment.boot_ids == first.environment.boot_ids == (host.boot_id(),)  # of two ranks, one boot
    assert first.launch_id == second.launch_id != third.launch_id


def test_a_point_without_a_record_is_said_with_the_error_that_its_log_ends_with(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    full = "x: /scratch/x.json: No space left on device; its record is written again in 1 s.\n"
    for text, said in {
        "": f"see {log}",
        "error: needs the package 'torch'; install it.\n": f"see {log} (error: needs the package 'torch'; install it.)",
        full: f"the disk is full: free space on it, and try again; see {log}",
    }.items():
        log.write_text(f"x: starting\n{text}")
        assert say_lost(log) == f"no record: {said}"


@pytest.mark.fault("F27")
def test_a_launcher_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    """Its ranks are children of multiprocessing's fork server, which lives as long as they do."""
    driver = start_driver(tmp_path)
    wait_for(lambda: both_ranks_train(tmp_path))
    (launcher,) = (int(pid) for pid in Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split())
    ranks = workers_of(tmp_path)
    os.kill(launcher, signal.SIGKILL)
    wait_for(lambda: not {str(pid) for pid in ranks} & set(os.listdir("/proc")), timeout_s=60)
    _, said = driver.communicate(timeout=120)
    (log,) = re.findall(r"no record after .+: see (.*\.log)", said)
    assert (Path(log).is_file(), driver.returncode) == (True, 1), said
    assert "1 of 2 configurations have no result; see python -m pipeline.status" in said
    record = only_record(Experiment(tmp_path / "two"))  # of the second point
    assert (record.status, record.spec.num_samples) == ("ok", 64)


STUBBORN = "import signal\nimport time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + with_change(
    "return nn.functional", "time.sleep(1)\n        return nn.functional"
)
STUBBORN_GRID = """
name: two
base: {device: cpu, model: "tiny.py:Tiny", input: synthetic, precision: fp32, strategy: ddp, num_gpus: 2}
points:
  - {num_samples: [64], batch_size_per_gpu: [8]}
"""


@pytest.mark.fault("F27")
@pytest.mark.parametrize(
    ("killed", "after_s"), [("driver", 0.7), ("launcher", 0.7), ("launcher", 1.8), ("driver", 5.0)]
)
def test_nothing_outlives_a_driver_or_a_launcher_that_is_killed_at_any_moment(
    tmp_path: Path, killed: str, after_s: float
) -> None:
    """The ranks ignore SIGTERM. At the first moments the launcher imports, and the sampler starts."""
    write_model(tmp_path, STUBBORN)
    driver = start_driver(tmp_path, grid=STUBBORN_GRID)
    wait_for(lambda: list(tmp_path.glob("two/logs/*/*.log")))
    (launcher,) = wait_for(lambda: host.children_of(driver.pid))
    time.sleep(after_s)
    os.kill(driver.pid if killed == "driver" else launcher, signal.SIGKILL)
    driver.communicate(timeout=60)
    assert wait_for(lambda: not processes_of(tmp_path), timeout_s=5)


def names_in(folder: str) -> set[str]:
    """What is left in a folder for temporary files, without torch's cache."""
    return {name for name in os.listdir(folder) if not name.startswith("torchinductor_")}


def test_nothing_is_left_in_tmpdir_also_where_its_path_is_too_long_for_a_socket(
    pipeline: Command, tmp_path: Path
) -> None:
    """Where it is not: test_an_element_of_several_points_shares_processes_here_too_and_each_is_said_as_it_ends."""
    (tmp_path / "grid.yaml").write_text(GRID)
    submit = ("submit", "--grid", tmp_path / "grid.yaml", "--outputs", tmp_path, "--cluster", "local")
    small = ("--set", "num_samples=64", "batch_size_per_gpu=8", "strategy=single", "num_gpus=1")
    with tempfile.TemporaryDirectory(prefix="x" * 100) as folder:
        succeeded(pipeline(*submit, *small, env={**os.environ, "TMPDIR": folder}))
        assert names_in(folder) == set()
    assert only_record(Experiment(tmp_path / "two")).status == "ok"
    (log,) = tmp_path.glob("two/logs/*/*.log")
    assert IMPORTS_AGAIN in log.read_text()


def test_an_element_of_several_points_shares_processes_here_too_and_each_is_said_as_it_ends(
    pipeline: Command, tmp_path: Path
) -> None:
    (tmp_path / "grid.yaml").write_text(
        GRID.replace("[1000000], batch_size_per_gpu: [1]", "[64], batch_size_per_gpu: [16]")
    )
    grid = ("submit", "--grid", tmp_path / "grid.yaml", "--cluster", "local", "--outputs", tmp_path)
    # of a surrounding job, which do not reach a local point
    env = {**os.environ, "SLURM_NODEID": "1", "PIPELINE_LAUNCH_ID": "x"}
    with tempfile.TemporaryDirectory(prefix="x") as folder:
        said = pipeline(*grid, "--points-per-element", "2", env={**env, "TMPDIR": folder}).stderr
        assert names_in(folder) == set()
    first, second = records_of(Experiment(tmp_path / "two"))
    assert first.launch_id == second.launch_id
    assert first.launch_id.startswith("here-")
    assert {measurement_of(record).num_points_before for record in (first, second)} == {0, 1}
    assert re.findall(r"^\[.*?: (\w+)", said, re.MULTILINE) == ["running", "ok"] * 2
    logs = {path.stem: path.read_text() for path in tmp_path.glob("two/logs/*/*.log")}
    assert ({*logs}, len({*logs.values()})) == ({first.run_id, second.run_id}, 1)
    assert IMPORTS_AGAIN not in logs[first.run_id]


def test_an_earlier_record_is_not_taken_for_the_ending_of_a_point_that_left_none(tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record())
    assert [latest_status_line(experiment, make_spec(), num_before=count) for count in (0, 1)] == ["ok", None]
