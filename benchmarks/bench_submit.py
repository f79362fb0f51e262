"""Times the submission of many points to Slurm beside one plain sbatch for each point. Part of `make bench`."""

import os
import shutil
import statistics
import sys
import time
from pathlib import Path

from cluster import Cluster, missing_parts, throwaway_cluster
from factories import ROOT

NUM_SUBMITS = 5
NUM_SBATCHES = 50
MAX_ARRAY_SIZE = 1001  # Slurm's own default
NUM_POINTS = 1000
GRID = """
name: thousand
base: {dataset: synthetic, input: synthetic, batch_size_per_gpu: 128}
points:
  - {strategy: [single], num_gpus: [1], precision: [fp32, tf32], seed: [0, 1, 2, 3, 4], repeat: REPEATS}
  - {strategy: [ddp], num_gpus: [2], precision: [fp32, tf32], seed: [0, 1, 2, 3, 4], repeat: REPEATS}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""
NUM_SHAPES = 2  # each with half of the points, which one array holds
JOB = "#!/bin/bash\n#SBATCH --gpus-per-node=1 --time=10 --output=/dev/null\nsrun true\n"
COUNTING = '#!/bin/sh\necho >> "{calls}"\nexec {sbatch} "$@"\n'


def report_submit(folder: Path) -> None:
    """Print both times, measured by turns on one cluster whose nodes are down; without Slurm print why not."""
    if missing := missing_parts():
        print(f"submit to Slurm of {NUM_POINTS} points: skipped. {missing}", flush=True)
        return
    (folder / "grid.yaml").write_text(GRID.replace("REPEATS", str(list(range(NUM_POINTS // NUM_SHAPES // 10)))))
    (folder / "job.sh").write_text(JOB)
    with throwaway_cluster(folder / "cluster", max_array_size=MAX_ARRAY_SIZE) as cluster:
        pairs = [
            (time_sbatch_s(cluster, folder), time_submit_s(cluster, folder, folder / f"outputs-{number}"))
            for number in range(NUM_SUBMITS + 1)
        ][1:]
    a_point_s, submit_s = (statistics.median(times_s) for times_s in zip(*pairs, strict=True))
    ratio = statistics.median(NUM_POINTS * one_s / all_s for one_s, all_s in pairs)
    print(
        f"{f'submit to Slurm of {NUM_POINTS} points':<45} {submit_s:.2f} s in {NUM_SHAPES} sbatch; one sbatch a point "
        f"{1e3 * a_point_s:.1f} ms (of {NUM_SBATCHES}): {ratio:.0f} times faster  (n={NUM_SUBMITS})",
        flush=True,
    )


def time_sbatch_s(cluster: Cluster, folder: Path) -> float:
    """Return the mean time of NUM_SBATCHES plain sbatch in a row, in seconds."""
    started_s = time.perf_counter()
    for _ in range(NUM_SBATCHES):
        cluster.run("sbatch", "--partition", "down", str(folder / "job.sh"))
    return (time.perf_counter() - started_s) / NUM_SBATCHES


def time_submit_s(cluster: Cluster, folder: Path, outputs: Path) -> float:
    """Return the time of a whole submission in seconds. It must call sbatch once for each shape."""
    sbatch, calls = folder / "bin" / "sbatch", outputs.with_suffix(".calls")
    sbatch.parent.mkdir(exist_ok=True)
    sbatch.write_text(COUNTING.format(calls=calls, sbatch=shutil.which("sbatch")))
    sbatch.chmod(0o755)
    path = os.pathsep.join([str(sbatch.parent), cluster.env["PATH"]])
    command = (sys.executable, "-m", "pipeline.submit", "--grid", str(folder / "grid.yaml"), "--partition", "down")
    started_s = time.perf_counter()
    sent = cluster.run(*command, "--outputs", str(outputs), cwd=ROOT, env={"PATH": path})
    time_s = time.perf_counter() - started_s
    assert f"{NUM_POINTS} points to run" in sent.stderr
    assert len(calls.read_text().splitlines()) == NUM_SHAPES, "one sbatch a shape and chunk"
    return time_s
