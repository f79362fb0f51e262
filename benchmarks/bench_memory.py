"""The search for the largest batch that fits beside accelerate's: wall time of whole processes.

    PYTHONPATH=tests python benchmarks/bench_memory.py --json memory.json     on a GPU; part of `make bench-gpu`
    PYTHONPATH=tests python benchmarks/bench_memory.py --print memory.json

The same model, precision, optimizer and synthetic images for all; three steps a trial. accelerate begins at 65,536 and
takes a tenth off at each out-of-memory.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import tabulate
import torch
from factories import ROOT, make_spec
from torch import nn

from pipeline.plan.axes import NUM_TRIAL_STEPS
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, add_points
from pipeline.records.record import MemoryTrial
from pipeline.records.store import load_folder
from pipeline.runner.launch_options import LaunchOptions, launch_command
from pipeline.training.loop import set_precision
from pipeline.workloads.image_classifiers import build_model

FIRST_BATCH_SIZE = 65_536  # of accelerate's search
SPEC = make_spec(input="synthetic", measure="memory", batch_size_per_gpu=512)


class Search(msgspec.Struct):
    """The time and the result of one search, as a whole process."""

    name: str
    time_s: float
    largest_fitting: int
    note: str = ""


def ours() -> Search:
    """A point of `--grid memory`, as an array element runs it."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(Path(folder) / "memory")
        experiment.create()
        with experiment.edit_manifest() as manifest:
            add_points(manifest, [SPEC])
        time_s = run(launch_command(experiment.manifest_path, [SPEC.run_id()], LaunchOptions(Path(folder))))
        ((record,), _) = load_folder(experiment.records_folder)
    found = record.measurement.memory_search if record.measurement else None
    if found is None:
        raise RuntimeError(record.status_line())
    trials = ", ".join(describe(trial) for trial in found.trials)
    error = abs((found.predicted or 0) - found.largest_fitting) / found.largest_fitting
    return Search("ours", time_s, found.largest_fitting, f"{trials}; first prediction {error:.1%} off")


def describe(trial: MemoryTrial) -> str:
    """A trial of ours in a few words."""
    how = "" if trial.fits else f" {trial.reason or 'OOM'}"
    return f"{trial.batch_size_per_gpu}{how} ({trial.time_ns / 1e9:.1f} s)"


def accelerates() -> Search:
    """The search of accelerate, in a process of its own."""
    with tempfile.NamedTemporaryFile() as said:
        time_s = run([sys.executable, __file__, "--accelerate", said.name])
        size, note = Path(said.name).read_text().split(" ", 1)
    return Search("accelerate", time_s, int(size), note)


def run(command: list[str]) -> float:
    """Wall time of a command that ends well, in s."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started_s = time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started_s


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int, spec: Spec) -> None:
    """Three steps of a full synthetic batch."""
    images = torch.randn(batch_size, 3, 32, 32, device="cuda")
    labels = torch.randint(10, (batch_size,), device="cuda")
    for _ in range(NUM_TRIAL_STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    torch.cuda.synchronize()


def build(spec: Spec) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The experiment's model on the GPU, and its optimizer."""
    set_precision(spec)
    model = build_model("resnet18", 10).cuda()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)


def search_with_accelerate(spec: Spec) -> tuple[int, str]:
    """accelerate's find_executable_batch_size, as its documentation uses it."""
    from accelerate.utils import find_executable_batch_size

    tried: list[int] = []

    def trial(batch_size: int) -> int:
        tried.append(batch_size)
        model, optimizer = build(spec)
        train_steps(model, optimizer, batch_size, spec)
        return batch_size

    found = int(find_executable_batch_size(trial, starting_batch_size=FIRST_BATCH_SIZE)())
    return found, f"{len(tried)} trials, {len(tried) - 1} OOM"


def as_table(searches: list[Search]) -> str:
    """Searches as Markdown; the ratio is of each wall time to ours."""
    rows = [
        {
            "search": search.name,
            "wall s": search.time_s,
            "times ours": search.time_s / searches[0].time_s,
            "largest": search.largest_fitting,
            "trials": search.note,
        }
        for search in searches
    ]
    return tabulate.tabulate(rows, headers="keys", tablefmt="github", floatfmt=".2f")


def main() -> None:
    """Search with each, or print an earlier run's table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the searches are written")
    parser.add_argument("--print", type=Path, help="measure nothing: print this run's table")
    parser.add_argument("--accelerate", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.accelerate:
        size, note = search_with_accelerate(SPEC)
        arguments.accelerate.write_text(f"{size} {note}")
    elif arguments.print:
        print(as_table(msgspec.json.decode(arguments.print.read_bytes(), type=list[Search])))
    elif not torch.cuda.is_available():
        sys.exit("This benchmark needs a GPU, and torch sees none here.")
    else:
        searches = [ours()]
        try:
            searches.append(accelerates())
        except subprocess.CalledProcessError as error:
            print(f"not measured: accelerate: {error}", file=sys.stderr)
        if arguments.json:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(searches), indent=1))
        print(as_table(searches))


if __name__ == "__main__":
    main()
