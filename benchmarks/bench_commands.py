"""Times the commands on this machine and prints medians of n runs. Part of `make bench`."""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from bench_folder import NUM_REPEATS, write_folder
from bench_submit import report_submit
from factories import ROOT, make_record, make_spec

from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import add_points
from pipeline.experiment.spec import Spec

NUM_RUNS = 5
NUM_PAIRS = 3  # of a collect and a bare read, which take a minute together
NUM_POINTS = 1000
COMMANDS = ("submit", "status", "collect", "ingest", "stage", "launch")
PYTHON = (sys.executable, "-m")


class Run(NamedTuple):
    """The wall time, the CPU time and the peak resident memory of a command, run as a process."""

    time_s: float
    cpu_s: float
    peak_memory_gib: float


def run(command: Sequence[str], cwd: Path) -> Run:
    """Run a command and return what it took. Raises RuntimeError if it fails."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile() as said:
        started_s = time.perf_counter()
        env = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        time_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
        said.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: {said.read().decode(errors='replace')}")
    return Run(time_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def report(what: str, command: Sequence[str], cwd: Path) -> None:
    """Print the median of NUM_RUNS runs after one that is not counted."""
    times_s = [run(command, cwd).time_s for _ in range(NUM_RUNS + 1)][1:]
    low, high = min(times_s), max(times_s)
    print(f"{what:<45} {statistics.median(times_s):.2f} s  (min {low:.2f}, max {high:.2f}, n={NUM_RUNS})", flush=True)


def report_collect(folder: Path, num_points: int) -> None:
    """Print what collecting NUM_REPEATS records a point takes beside a bare read and decode of the same files.

    By turns, so that whatever else the machine does meets both, and from the page cache: the files were just written.
    """
    experiment, num_records = write_folder(folder / "many-repeats", num_points), num_points * NUM_REPEATS
    bare = (sys.executable, str(Path(__file__).with_name("bench_folder.py")), str(experiment.records_folder))
    collect = (*PYTHON, "pipeline.collect", str(experiment.folder))
    pairs = [(run(bare, folder), run(collect, folder)) for _ in range(NUM_PAIRS)]
    coverage = msgspec.json.decode((experiment.folder / "tables.json").read_bytes())["coverage"]
    assert coverage["ok"] == num_records, "it is the whole folder that was collected"
    bare_s, collect_s = (statistics.median(run.time_s for run in runs) for runs in zip(*pairs, strict=True))
    ratio = statistics.median(collected.time_s / read.time_s for read, collected in pairs)
    peak_gib = max(collected.peak_memory_gib for _, collected in pairs)
    print(
        f"{f'collect of {num_records} records':<45} {collect_s:.2f} s, {1e6 * collect_s / num_records:.0f} us each, "
        f"peak {peak_gib:.2f} GiB; bare read and decode {bare_s:.2f} s: {ratio:.2f} times  (n={NUM_PAIRS})",
        flush=True,
    )
    shutil.rmtree(experiment.folder)


def write_experiment(folder: Path, specs: Sequence[Spec]) -> None:
    """Write an experiment of these points with a record each."""
    experiment = Experiment(folder)
    experiment.create()
    for spec in specs:
        record_store.publish_record(make_record(spec, [1.5, 1.25]), experiment.records_folder)
    with experiment.edit_manifest() as written:
        add_points(written, specs)


def configurations(num_points: int) -> list[Spec]:
    """Distinct configurations: ten batch sizes by many learning rates."""
    return [make_spec(batch_size_per_gpu=1 + i % 10, learning_rate=0.1 + i // 10 / 10_000) for i in range(num_points)]


def dry_run(num_points: int) -> list[str]:
    """The dry run of so many points of the scaling grid, which has five for each batch size."""
    sizes = ",".join(str(size) for size in range(1, num_points // 5 + 1))
    changes = [f"batch_size_per_gpu={sizes}", "input=dataloader"]
    return [*PYTHON, "pipeline.submit", "--grid", "scaling", "--dry-run", "--set", *changes]


def report_growth(folder: Path) -> None:
    """Print the CPU-seconds of one run each over many points: none may grow with the square of their number."""
    write_experiment(folder / "distinct", configurations(10 * NUM_POINTS))
    write_experiment(folder / "runs", [make_spec(repeat=repeat) for repeat in range(100 * NUM_POINTS)])
    for what, command in (
        (f"submit --dry-run of {10 * NUM_POINTS} points", dry_run(10 * NUM_POINTS)),
        (f"collect of {10 * NUM_POINTS} configurations", [*PYTHON, "pipeline.collect", "distinct"]),
        (f"collect of {100 * NUM_POINTS} runs of one point", [*PYTHON, "pipeline.collect", "runs"]),
    ):
        print(f"{what:<45} {run(command, folder).cpu_s:.1f} CPU-s  (n=1)", flush=True)
    shutil.rmtree(folder / "distinct")
    shutil.rmtree(folder / "runs")


def main() -> None:
    """Print every figure."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report(f"submit --dry-run of {NUM_POINTS} points", dry_run(NUM_POINTS), folder)
        write_experiment(folder / "many", configurations(NUM_POINTS))
        report(f"collect of {NUM_POINTS} records", [*PYTHON, "pipeline.collect", "many"], folder)
        for command in COMMANDS:
            report(f"{command} --help", [*PYTHON, f"pipeline.{command}", "--help"], folder)
        report_growth(folder)
        report_submit(folder)
        for num_points in (NUM_POINTS, 10 * NUM_POINTS):
            report_collect(folder, num_points)


if __name__ == "__main__":
    main()
