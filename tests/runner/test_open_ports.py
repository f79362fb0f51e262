"""The ports of launches: they are never in each other's way, and whoever connects to one gets no code to run."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT, Command, needs_root, run_program
from factories import LENET, make_experiment, make_spec, only_record, write_grid
from slurm_queue import Env

from pipeline.records.folder import Experiment
from pipeline.runner.launch_options import LaunchOptions, launch_command

TORCHRUNS_PORT = 29500
NUM_ATTACKS = 4  # kinds of them, by turns
TWO_RANKS = {**LENET, "input": "synthetic", "strategy": "ddp", "num_gpus": 2, "batch_size_per_gpu": 8}
TWO_NODES = """
name: two
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: ddp}
points:
  - {num_gpus: [2], num_nodes: [2], batch_size_per_gpu: [8], num_samples: [3000]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


class Attack:
    """An attack on the ports of all processes whose environment has TEST_FOLDER, while the body runs."""

    def __init__(self, folder: Path) -> None:
        self.canaries = folder / "canaries"
        self.num_connections: Mapping[str, int] = {}
        self._mark = f"TEST_FOLDER={folder}"

    def __enter__(self) -> "Attack":
        self.canaries.mkdir()
        self.canaries.chmod(0o1777)
        command = [sys.executable, str(ROOT / "tests" / "port_attacker.py"), self._mark, str(self.canaries)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.num_connections = json.loads(self._process.communicate("", timeout=60)[0])


def make_launch(folder: Path, num_samples: int) -> tuple[Experiment, list[str]]:
    """An experiment of one point of two ranks, and the command that launches it."""
    spec = make_spec(**TWO_RANKS, num_samples=num_samples)
    experiment = make_experiment(folder, missing=[spec])
    return experiment, launch_command(experiment.manifest_path, [spec.run_id()], LaunchOptions(folder))


@pytest.mark.training
@pytest.mark.fault("F15")
def test_launches_at_once_on_a_node_where_torchruns_port_is_taken_are_all_ok(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(TORCHRUNS_PORT)}
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else holds it
            stack.enter_context(socket.create_server(("", TORCHRUNS_PORT)))
        launches = [make_launch(tmp_path / str(number), 64) for number in range(2)]
        started = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _, command in launches]
        said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0] * 2, said
    assert [only_record(experiment).status for experiment, _ in launches] == ["ok"] * 2


@needs_root
@pytest.mark.training
@pytest.mark.fault("F42")
def test_on_one_node_only_the_ranks_listen_and_what_they_are_sent_does_not_run(tmp_path: Path) -> None:
    experiment, command = make_launch(tmp_path / "x", 3000)
    with Attack(tmp_path) as attack:
        done = run_program(*command, env={**os.environ, "PYTHONPATH": str(ROOT), "TEST_FOLDER": str(tmp_path)})
    assert list(attack.canaries.iterdir()) == []
    assert sorted(name.split()[0] for name in attack.num_connections) == ["rank0", "rank1"]
    assert min(attack.num_connections.values()) >= NUM_ATTACKS
    assert (done.returncode == 0) == (only_record(experiment).status == "ok"), done.stderr


@needs_root
@pytest.mark.fault("F42")
def test_on_two_nodes_nothing_that_the_store_or_the_ranks_are_sent_runs(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    grid = write_grid(tmp_path, TWO_NODES)
    env = {**on_slurm, "TEST_FOLDER": str(tmp_path)}
    with Attack(tmp_path) as attack:
        done = pipeline("submit", "--grid", grid, "--outputs", tmp_path, "--wait", env=env)
    assert list(attack.canaries.iterdir()) == []
    # the store of the first node is on all of its addresses, as srun is
    (store,) = (name for name in attack.num_connections if not ("127.0.0.1" in name or name.startswith("srun")))
    assert attack.num_connections[store] >= NUM_ATTACKS
    record = only_record(Experiment(tmp_path / "two"))
    assert (done.returncode == 0) == (record.status == "ok"), done.stderr
