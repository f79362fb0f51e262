"""Times the commands on this machine and prints medians of NUM_RUNS runs. Part of `make bench`."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from factories import ROOT, make_experiment, make_record, make_spec

NUM_RUNS = 5
NUM_POINTS = 1000
SIZES = ",".join(str(size) for size in range(1, NUM_POINTS // 5 + 1))  # the grid has five points of each
DRY_RUN = ("submit", "--grid", "scaling", "--dry-run", "--set", f"batch_size_per_gpu={SIZES}", "input=dataloader")
HELP = [(f"{name} --help", (name, "--help")) for name in ("submit", "status", "collect", "ingest", "stage", "launch")]


def report(what: str, command: str, *arguments: str, folder: Path) -> None:
    """Print the median of NUM_RUNS runs after one that is not counted."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    times_s = []
    for _ in range(NUM_RUNS + 1):
        started_s = time.perf_counter()
        words = [sys.executable, "-m", f"pipeline.{command}", *arguments]
        subprocess.run(words, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times_s.append(time.perf_counter() - started_s)
    ends = f"min {min(times_s[1:]):.2f}, max {max(times_s[1:]):.2f}, n={NUM_RUNS}"
    print(f"{what:<45} {statistics.median(times_s[1:]):.2f} s  ({ends})", flush=True)


def main() -> None:
    """Print the time of a dry run, of a collection, and of every command's help."""
    points = [make_spec(batch_size_per_gpu=1 + i % 10, learning_rate=0.1 + i // 10 / 10_000) for i in range(NUM_POINTS)]
    with tempfile.TemporaryDirectory() as folder:
        make_experiment(Path(folder, "many"), *(make_record(point, [1.5, 1.25]) for point in points))
        report(f"submit --dry-run of {NUM_POINTS} points", *DRY_RUN, folder=Path(folder))
        report(f"collect of {NUM_POINTS} records", "collect", "many", folder=Path(folder))
        for what, words in HELP:
            report(what, *words, folder=Path(folder))


if __name__ == "__main__":
    main()
