"""Shared by the tests on a Slurm: a grid of two shapes, what the queue and `status` say, and a stand-in for Slurm."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster import Cluster
from conftest import Command, succeeded, without_slurm
from factories import ROOT, write_file, write_script
from import_hook import when_imported

Env = Mapping[str, str]

NO_CONFIGURATION = "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"
UP = "echo 'Slurmctld(primary) at here is UP'"
DEAD = "echo 'Slurmctld(primary) at here is DOWN'; exit 1"

MIXED = """
name: mixed
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, num_samples: 64, strategy: ddp}
points:
  - {num_gpus: [1, 2], batch_size_per_gpu: [8]}
  - {num_gpus: [2], num_nodes: [2], batch_size_per_gpu: [8]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def states(pipeline: Command, folder: Path, env: Env) -> dict[str, dict[str, Any]]:
    answer = succeeded(pipeline("status", folder, "--json", env=env))
    return {part["run_id"]: part for parts in json.loads(answer.stdout)["experiments"].values() for part in parts}


def records_in(folder: Path) -> list[dict[str, Any]]:
    """The contents of all records of the experiments in the folder, in the order of their file names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/records/*.json"))]


def array_of(answer: subprocess.CompletedProcess[str]) -> str:
    """The one array that a submission printed."""
    (array,) = re.findall(r"^array (\d+):", answer.stdout, re.MULTILINE)
    return str(array)


def queued(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "-h", "-r", "-o", "%i").stdout.split()


def with_sbatch(folder: Path, env: Env, script: str) -> Env:
    """The environment with an sbatch of our own, whose script may call the {real} one."""
    shim = write_script(folder / "bin" / "sbatch", script.format(real=shutil.which("sbatch")))
    return {**env, "PATH": f"{shim.parent}:{env['PATH']}"}


def write_commands(folder: Path, lines: Mapping[str, str]) -> None:
    """Make the folder, with a shell script of that line under each name."""
    folder.mkdir()
    for name, line in lines.items():
        write_script(folder / name, line)


def fake_slurm(folder: Path, ping: str = UP, **lines: str) -> Mapping[str, str]:
    """A PATH with a Slurm: its controller says that to a ping, each sbatch is noted, and others run their lines."""
    noted = f"/bin/touch {folder / 'sbatch.was.called'}"
    write_commands(folder, {"scontrol": ping, "sbatch": noted, "srun": "", **lines})
    return without_slurm(folder)


# run by the Python of a job: a point has a result at once, or a long one after hours, without torch and without a rank;
# a task list that is not there is awaited for a second, not thirty
QUICK = """
import time

def write_result(spec, rank_files, launch_id, num_threads=1):
    from factories import make_measurement
    from pipeline.records.record import Environment
    from pipeline.runner.rank_files import PointResult
    rank_files.write_environment(Environment())
    if spec.num_samples > 100_000:
        time.sleep(7200)
    rank_files.write_result(PointResult(make_measurement(spec, [1.0] * spec.epochs), Environment()))
    return {}

"""
QUICK += when_imported(
    "pipeline.runner.start_ranks",
    """
module.run_node_ranks = write_result
sys.modules["pipeline.runner.launch_options"].VISIBLE_LIMIT_S = 1
""",
)


def quick_paths(folder: Path) -> str:
    """A PYTHONPATH for launchers that start no ranks: for what Slurm and drivers do, any result will do."""
    write_file(folder / "quick" / "sitecustomize.py", QUICK)
    return f"{folder / 'quick'}:{ROOT / 'tests'}:{ROOT}"


def quick_points(folder: Path, *lines: str) -> tuple[str, ...]:
    """Options for a submission whose launchers start no ranks, with these lines in its prologue."""
    export = f"export PYTHONPATH={quick_paths(folder)}:$PYTHONPATH"
    return ("--prologue", str(write_script(folder / "quick" / "prologue.sh", export, *lines)))
