"""What tests on a Slurm share: a grid of two shapes, and what the queue and `status` say."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster import Cluster
from conftest import Command

Env = Mapping[str, str]

MIXED = """
name: mixed
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, num_samples: 64, strategy: ddp}
points:
  - {num_gpus: [1, 2], batch_size_per_gpu: [8]}
  - {num_gpus: [2], num_nodes: [2], batch_size_per_gpu: [8]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def write_grid(folder: Path, text: str) -> Path:
    path = folder / "grid.yaml"
    path.write_text(text)
    return path


def states(pipeline: Command, folder: Path, env: Env) -> dict[str, dict[str, Any]]:
    answer = pipeline("status", folder, "--json", env=env)
    assert answer.returncode == 0, answer.stderr
    return {part["run_id"]: part for parts in json.loads(answer.stdout)["experiments"].values() for part in parts}


def queued(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "-h", "-r", "-o", "%i").stdout.split()
