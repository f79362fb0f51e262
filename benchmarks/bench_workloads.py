"""Measures whether a workload costs what the user's own loop costs: both by turns, each turn in a process of its own.

    python benchmarks/bench_workloads.py --json workloads.json            measure what is missing in the file
    python benchmarks/bench_workloads.py --print workloads.json           print its table

The sides share a compiler cache, so that only the first turn compiles. The lowest and the highest ratio of six turns
hold the true median ratio with 96.9 %; fewer turns hold it less often.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tabulate

LOOPS = [(name, execution) for name in ("resnet50", "gpt2") for execution in ("compile", "eager")]
SIDES = ("plain", "workload")
NUM_TURNS = 6
SCRIPT = Path(__file__).with_name("plain_loop.py")

Turn = dict[str, Any]


def run_turn(name: str, side: str, execution: str) -> Turn:
    """Run one side once. Raises subprocess.CalledProcessError."""
    root = SCRIPT.parents[1]
    cache = Path(tempfile.gettempdir()) / f"bench-workloads-{os.getuid()}"
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), name, side, execution]
    answer = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    turn: Turn = json.loads(answer.stdout.splitlines()[-1])
    return turn


def missing_turns(turns: list[Turn], loops: list[tuple[str, str]], num_turns: int) -> list[tuple[str, str, str]]:
    """Return what is still to run, by turns: the first turn of a loop is repeated, since it compiles."""
    planned = [(name, side, execution) for name, execution in loops for _ in range(num_turns) for side in SIDES]
    for turn in turns:
        done = (turn["name"], turn["side"], turn["execution"])
        if done in planned:
            planned.remove(done)
    return planned


def summarize(turns: list[Turn]) -> list[list[str]]:
    """Return a row for each loop: seconds a window of each side, the ratio over the turns, and peak memory."""
    rows = []
    for name, execution in LOOPS:
        by_side = {
            side: [turn for turn in turns if (turn["name"], turn["side"], turn["execution"]) == (name, side, execution)]
            for side in SIDES
        }
        plain, ours = ([statistics.median(turn["windows_s"]) for turn in by_side[side]] for side in SIDES)
        if not plain or not ours:
            continue
        ratios = [of_ours / of_plain for of_plain, of_ours in zip(plain, ours, strict=False)]
        ends = f"{min(ratios):.4f} to {max(ratios):.4f}"
        memory = [statistics.median(turn["peak_bytes"] or 0 for turn in by_side[side]) / 2**30 for side in SIDES]
        rows.append(
            [
                name,
                execution,
                *[f"{statistics.median(side_s):.4f}" for side_s in (plain, ours)],
                f"{statistics.median(ratios):.4f}",
                ends,
                str(len(ratios)),
                f"{memory[0]:.2f}",
                f"{100 * (memory[1] / memory[0] - 1):+.2f} %" if memory[0] else "-",
            ]
        )
    return rows


def main() -> None:
    """Measure or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--print", type=Path, dest="printed")
    parser.add_argument("--loops", default=",".join(f"{name}-{execution}" for name, execution in LOOPS))
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    arguments = parser.parse_args()
    file = arguments.printed or arguments.json
    turns: list[Turn] = json.loads(file.read_text())["turns"] if file and file.exists() else []
    loops = [loop for loop in LOOPS if "-".join(loop) in arguments.loops.split(",")]
    for name, side, execution in [] if arguments.printed else missing_turns(turns, loops, arguments.turns):
        turns.append(run_turn(name, side, execution))
        print(f"{name} {execution} {side}: {statistics.median(turns[-1]['windows_s']):.4f} s a window", file=sys.stderr)
        if arguments.json:
            arguments.json.write_text(json.dumps({"turns": turns}, indent=1))
    headings = [
        "loop",
        "execution",
        "plain [s]",
        "workload [s]",
        "ratio",
        "lowest to highest",
        "n",
        "plain [GiB]",
        "memory",
    ]
    print(tabulate.tabulate(summarize(turns), headings, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
