"""Measures how long a point takes to start, from the launch to its first step, and what a bare process needs for that.

python benchmarks/bench_start.py --json start.json
python benchmarks/bench_start.py --print start.json          print its table
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tabulate
import torch

ROOT = Path(__file__).resolve().parents[1]
NUM_TURNS = 3
MODELS = {"resnet18": "resnet18", "gpt, which needs no torchvision": "gpt"}
GRID = """
name: start
base: {{model: {model}, input: synthetic, precision: fp32, num_samples: 512, device: {device}}}
points: [{{strategy: [single], num_gpus: [1], batch_size_per_gpu: [32]}}]
"""
BARE = """
import json, time
marks = [time.perf_counter()]
def mark(): marks.append(time.perf_counter())
import torch; mark()
torch.optim.SGD([torch.zeros(1)]); mark()
import torchvision; mark()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
layer = torch.nn.Linear(64, 64).to(device); mark()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
layer(torch.zeros(64, 64, device=device)).sum().backward(); optimizer.step(); float(layer.weight[0, 0].detach()); mark()
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""
BARE_PARTS = ("torch", "TorchDynamo, by the first optimizer", "torchvision after that", "device", "first step")


def time_bare() -> list[float]:
    """Return the seconds of each of BARE_PARTS in a new process."""
    answer = subprocess.run([sys.executable, "-c", BARE], check=True, stdout=subprocess.PIPE, text=True)
    return list(json.loads(answer.stdout))


def time_start(model: str) -> float:
    """Return the seconds from the start of `submit` to the first step of a point. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        grid, device = Path(folder, "start.yaml"), "cuda" if torch.cuda.is_available() else "cpu"
        grid.write_text(GRID.format(model=model, device=device))
        command = [sys.executable, "-m", "pipeline.submit", "--grid", str(grid), "--outputs", folder]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PIPELINE"))}
        started_ns = time.time_ns()
        subprocess.run(
            [*command, "--cluster", "local"],
            cwd=ROOT,
            env={**environ, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
        (record,) = Path(folder, "start", "records").glob("*.json")
        epochs = json.loads(record.read_text())["measurement"]["epochs"]
    return float(epochs[0]["ranks"][0]["started_unix_ns"] - started_ns) / 1e9


def main() -> None:
    """Measure by turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--print", type=Path, dest="printed")
    arguments = parser.parse_args()
    if arguments.printed:
        print_table(json.loads(arguments.printed.read_text()))
        return
    times_s: dict[str, list[float]] = {name: [] for name in (*BARE_PARTS, *MODELS)}
    for _ in range(NUM_TURNS):
        for name, part_s in zip(BARE_PARTS, time_bare(), strict=True):
            times_s[name].append(part_s)
        for name, model in MODELS.items():
            times_s[name].append(time_start(model))
        if arguments.json:
            arguments.json.write_text(json.dumps(times_s, indent=1))
    print_table(times_s)


def print_table(times_s: dict[str, list[float]]) -> None:
    rows = [[name, statistics.median(found), min(found), max(found), len(found)] for name, found in times_s.items()]
    print(tabulate.tabulate(rows, ["start [s]", "median", "min", "max", "n"], tablefmt="pipe", floatfmt=".2f"))


if __name__ == "__main__":
    main()
