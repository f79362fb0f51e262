"""Compares a training script timed by itself with the same script under `ddpscale run`, by turns.

    python benchmarks/bench_script.py                            # two GPUs (or two CPU processes)
    python benchmarks/bench_script.py --turns 2 --batch-size 4

Each turn is a process of its own. Alone, the script reads its own clock (see gpt_script.py); measured, its time of an
update is that of its record. Prints both of each turn, then the median ratio of time and of peak memory with its
interval.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import ddpscale
from pipeline.figures.intervals import median_interval

SCRIPT = str(Path(__file__).resolve().with_name("gpt_script.py"))
NUM_UPDATES = 100  # of the script alone
MANY_UPDATES = 1_000_000  # the measurement ends the script


def run_alone(batch_size: int) -> tuple[float, float | None]:
    """Return the time of an update in ms, and the peak memory in GiB, as the script prints them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, SCRIPT, "--batch-size", str(batch_size), "--updates", str(NUM_UPDATES)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(printed.splitlines()[-1])
    return found["update_ms"], found["peak_gib"]


def run_measured(batch_size: int, updates: int | None) -> tuple[float, float]:
    """Return the same of the record that `ddpscale run` writes."""
    with tempfile.TemporaryDirectory() as outputs:
        command = [sys.executable, "-m", "pipeline.run", "--num-gpus", "2", "--batch-size", str(batch_size)]
        command += ["--cluster", "local", "--outputs", outputs]
        command += [] if updates is None else ["--updates", str(updates)]
        script = [SCRIPT, "--batch-size", "{batch_size_per_gpu}", "--updates", str(MANY_UPDATES)]
        subprocess.run([*command, "--", *script], check=True, stdout=subprocess.DEVNULL)
        (row,) = ddpscale.load(outputs).configurations.to_dict("records")
    return 1e3 * row["update_time_s"], row["peak_memory_gib"]


def print_ratio(name: str, ratios: list[float]) -> None:
    """Print the median of ratios with its interval; with too few of them, their ends."""
    interval = median_interval(ratios)
    low, high = interval[:2] if interval else (min(ratios), max(ratios))
    kind = "interval" if interval else "range"
    print(f"{name}: {statistics.median(ratios):.4f} ({kind} {low:.4f} to {high:.4f}), n = {len(ratios)}", flush=True)


def main() -> None:
    """Print both times of each turn, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=24, help="sequences of a process")
    parser.add_argument("--updates", type=int, help="timed updates, at most (default: until precise enough)")
    arguments = parser.parse_args()
    on_gpus = torch.cuda.device_count() > 1
    time_ratios, memory_ratios = [], []
    for turn in range(arguments.turns):
        measured = run_measured(arguments.batch_size, arguments.updates) if turn % 2 else None
        alone_ms, alone_gib = run_alone(arguments.batch_size)
        measured_ms, measured_gib = measured or run_measured(arguments.batch_size, arguments.updates)
        time_ratios.append(measured_ms / alone_ms)
        line = f"turn {turn}: alone {alone_ms:.2f} ms, measured {measured_ms:.2f} ms, ratio {time_ratios[-1]:.4f}"
        if on_gpus and alone_gib:
            memory_ratios.append(measured_gib / alone_gib)
            line += f"; alone {alone_gib:.3f} GiB, measured {measured_gib:.3f} GiB"
        print(line, flush=True)
    print_ratio("time of an update, measured over alone", time_ratios)
    if memory_ratios:
        print_ratio("peak memory, measured over alone", memory_ratios)


if __name__ == "__main__":
    main()
