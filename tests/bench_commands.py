"""How fast the commands answer on this machine: run by `make bench`, prints a line a figure, medians of n runs."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from factories import ROOT, make_record, make_spec

from pipeline import records
from pipeline.experiment import MANIFEST_VERSION, Experiment, Manifest, add_points

NUM_RUNS = 5
NUM_POINTS = 1000
COMMANDS = ("submit", "status", "collect", "ingest", "stage", "launch")


def time_s(command: Sequence[str], cwd: Path) -> float:
    """Wall seconds of a command that ends well, as a whole process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started_s = time.perf_counter()
    subprocess.run(command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
    return time.perf_counter() - started_s


def report(what: str, command: Sequence[str], cwd: Path) -> None:
    """Print the median of NUM_RUNS runs after one that is not counted."""
    times_s = [time_s(command, cwd) for _ in range(NUM_RUNS + 1)][1:]
    low, high = min(times_s), max(times_s)
    print(f"{what:<45} {statistics.median(times_s):.2f} s  (min {low:.2f}, max {high:.2f}, n={NUM_RUNS})", flush=True)


def write_experiment(folder: Path) -> None:
    """An experiment of NUM_POINTS points with a record each."""
    experiment = Experiment(folder / "many")
    experiment.create()
    manifest = Manifest(MANIFEST_VERSION, "many")
    for seed in range(NUM_POINTS // 10):
        for batch_size in range(1, 11):
            spec = make_spec(batch_size_per_gpu=batch_size, learning_rate=0.1 + seed / 1000)
            records.publish(make_record(spec, [1.5, 1.25]), experiment.records)
            add_points(manifest, [spec])
    with experiment.edit_manifest() as written:
        written.points = manifest.points


def main() -> None:
    """Print every figure."""
    python = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sizes = ",".join(str(size) for size in range(1, NUM_POINTS // 5 + 1))
        dry_run = [*python, "pipeline.submit", "--grid", "scaling", "--dry-run", "--set", f"batch_size_per_gpu={sizes}"]
        report(f"submit --dry-run of {NUM_POINTS} points", dry_run, folder)
        write_experiment(folder)
        report(f"collect of {NUM_POINTS} records", [*python, "pipeline.collect", "many"], folder)
        for command in COMMANDS:
            report(f"{command} --help", [*python, f"pipeline.{command}", "--help"], folder)


if __name__ == "__main__":
    main()
