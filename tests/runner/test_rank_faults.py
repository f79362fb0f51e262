"""A rank that fails in any way ends its point, which leaves one record and no process."""

import os
import time
from pathlib import Path

import pytest
from conftest import ROOT, processes_of, run_program, succeeded
from factories import LENET, failure_of, make_experiment, make_spec, only_record

from pipeline.experiment.folder import Experiment
from pipeline.runner.launch_options import LaunchOptions, launch_command

LIMIT_S = 20
# run by Python at its start: the last rank notes the time and fails where its epoch would begin
SITECUSTOMIZE = """
import importlib.util, os, pathlib, signal, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pipeline.training.loop":
            sys.meta_path.remove(self)
            found = importlib.util.find_spec(name)
            self.execute, found.loader.exec_module = found.loader.exec_module, self.exec_module
            return found

    def exec_module(self, module):
        self.execute(module)
        module.run_epoch, self.run_epoch = self.fail, module.run_epoch

    def fail(self, *arguments):
        import torch
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            pathlib.Path(os.environ["TEST_FOLDER"], "failed_at").write_text(str(time.time()))
            FAULT
        return self.run_epoch(*arguments)

sys.meta_path.insert(0, Finder())
"""


def start_launch(tmp_path: Path, fault: str, *, num_gpus: int) -> tuple[Experiment, list[str], dict[str, str]]:
    """An experiment of one point whose last rank has this fault, its command, and the environment for it."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.replace("FAULT", fault))
    strategy = "ddp" if num_gpus > 1 else "single"
    spec = make_spec(**LENET, input="synthetic", strategy=strategy, num_gpus=num_gpus, num_samples=64 * 8)
    experiment = make_experiment(tmp_path / "x", missing=[spec])
    command = launch_command(experiment.manifest_path, [spec.run_id()], LaunchOptions(tmp_path))
    return experiment, command, {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TEST_FOLDER": str(tmp_path)}


@pytest.mark.training
@pytest.mark.fault("F16")
@pytest.mark.parametrize(
    ("fault", "status", "kind", "said"),
    [
        ("raise torch.OutOfMemoryError('CUDA out of memory')", "oom", "cuda_oom", "out of GPU memory"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed", "signal", "rank 1 was killed by SIGKILL"),
        ("os._exit(0)", "failed", "exit", "rank 1: exited with 0 before its point had ended; remove os._exit"),
        ("time.sleep(3600)", "failed", "timeout", f"limit of {LIMIT_S} s"),
    ],
    ids=["raises OOM", "is killed", "exits with 0", "hangs"],
)
def test_a_rank_that_fails_ends_its_point_with_one_record(
    tmp_path: Path, fault: str, status: str, kind: str, said: str
) -> None:
    experiment, command, env = start_launch(tmp_path, fault, num_gpus=2)
    command += ["--point-limit-s", str(LIMIT_S if kind == "timeout" else 300)]
    done = run_program(*command, env=env)
    took_s = time.time() - float((tmp_path / "failed_at").read_text())
    assert (done.returncode, took_s < 15 + (LIMIT_S if kind == "timeout" else 0)) == (1, True), done.stderr
    assert processes_of(tmp_path) == []
    record = only_record(experiment)
    assert (record.status, failure_of(record).kind, said in record.reason) == (status, kind, True), record.reason


@pytest.mark.training
@pytest.mark.fault("F54")
@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("os._exit(0)", "exited with 0"),
        ("os.execv('/bin/sleep', ['sleep', '600'])", "became another program (exec)"),
        ("os.fork() and os.execv('/bin/true', ['true']); time.sleep(600)", "exited with 0"),
    ],
    ids=["exits with 0", "becomes another program", "becomes one that succeeds, and leaves a child"],
)
def test_a_rank_that_leaves_without_a_result_fails_its_point_within_seconds(
    tmp_path: Path, fault: str, said: str, num_gpus: int
) -> None:
    experiment, command, env = start_launch(tmp_path, fault, num_gpus=num_gpus)
    done = run_program(*command, env=env)
    took_s = time.time() - float((tmp_path / "failed_at").read_text())
    assert (done.returncode, took_s < 20) == (1, True), done.stderr
    record = only_record(experiment)
    assert (record.status, failure_of(record).kind, failure_of(record).rank) == ("failed", "exit", num_gpus - 1)
    assert record.reason.startswith(f"rank {num_gpus - 1}: {said} before its point had ended; remove os._exit")
    assert processes_of(tmp_path) == []


@pytest.mark.training
@pytest.mark.fault("F55")
def test_what_a_rank_has_started_ends_with_its_point(tmp_path: Path) -> None:
    """A child in a session of its own, whose parent has ended; the point is ok."""
    experiment, command, env = start_launch(tmp_path, "os.system('setsid sleep 600 > /dev/null 2>&1 &')", num_gpus=1)
    succeeded(run_program(*command, env=env))
    assert processes_of(tmp_path) == []
    assert only_record(experiment).status == "ok"
