"""A rank that fails in any way ends its point, which leaves one record and no process."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, workers_of
from factories import LENET, make_experiment, make_spec

from pipeline.experiment.record_store import load_folder
from pipeline.runner.launch_options import LaunchOptions, launch_command

LIMIT_S = 20
# run by Python at its start: the second rank notes the time and fails where its epoch would begin
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
        if os.environ["RANK"] == "1":
            pathlib.Path(os.environ["TEST_FOLDER"], "failed_at").write_text(str(time.time()))
            FAULT
        return self.run_epoch(*arguments)

sys.meta_path.insert(0, Finder())
"""
LOST_PEER = "rank 0"  # which is all that is known of a rank that left without a word


@pytest.mark.training
@pytest.mark.fault("F16")
@pytest.mark.parametrize(
    ("fault", "status", "kind", "said"),
    [
        ("raise torch.OutOfMemoryError('CUDA out of memory')", "oom", "cuda_oom", "out of GPU memory"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed", "signal", "rank 1 was killed by SIGKILL"),
        ("os._exit(0)", "failed", "collective", LOST_PEER),
        ("time.sleep(3600)", "failed", "timeout", f"limit of {LIMIT_S} s"),
    ],
    ids=["raises OOM", "is killed", "exits with 0", "hangs"],
)
def test_a_rank_that_fails_ends_its_point_with_one_record(
    tmp_path: Path, fault: str, status: str, kind: str, said: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.replace("FAULT", fault))
    spec = make_spec(**LENET, input="synthetic", strategy="ddp", num_gpus=2, num_samples=64 * 8)
    experiment = make_experiment(tmp_path / "x", missing=[spec])
    command = launch_command(experiment.manifest_path, [spec.run_id()], LaunchOptions(tmp_path))
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TEST_FOLDER": str(tmp_path)}
    command += ["--point-limit-s", str(LIMIT_S if kind == "timeout" else 300)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    took_s = time.time() - float((tmp_path / "failed_at").read_text())
    assert done.returncode == 1, done.stderr
    assert took_s < 15 + (LIMIT_S if kind == "timeout" else 0)
    assert workers_of(tmp_path) == []
    (record,), rejected = load_folder(experiment.records_folder)
    assert rejected == []
    assert record.failure is not None
    assert (record.status, record.failure.kind, said in record.reason) == (status, kind, True), record.reason
