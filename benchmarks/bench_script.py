r"""Compares a training script timed by itself with the same script under `ddpscale run`, by turns.

    python benchmarks/bench_script.py                            # two GPUs (or two CPU processes)
    python benchmarks/bench_script.py --turns 2 --batch-size 4

Each turn is a process of its own. Alone, the script reads its own clock (see gpt_script.py); measured, its time of an
update is that of its record. Prints both of each turn, then the median ratio of time and of peak memory with its
interval.

    python benchmarks/bench_script.py --nanogpt FOLDER --turns 3 --batch-size 12    # a clone of nanoGPT, two GPUs

runs its train.py, and prints what its own lines say of an iteration beside the time between these lines, when it logs
each iteration (which waits for the GPU) and every tenth, and the record's time of an update when it logs every tenth,
beside the lines of that run.

    python benchmarks/bench_script.py --airbench FOLDER --turns 3    # a clone of cifar10-airbench, one GPU

runs its legacy/airbench94.py, and prints what its own clock, which stops for evaluations, says of an update alone and
measured, and the median update of the record. FOLDER/cifar10 holds its train.pt and test.pt, or it downloads them.

    python benchmarks/bench_script.py --own-line 'iter (?P<index>\d+).* time (?P<ms>[\d.]+)' -- -- train.py

runs `ddpscale run` once with what follows the first --, and prints what the script's own lines say of an update in that
run beside the record. The pattern has the group `n`, the number of the update, `index`, which counts from 0, or
`samples`, those of all ranks so far, and `ms` or `s` an update, or updates `per_s`. From means, `mean_per_s` (since the
start) or `moving_per_s` (of tqdm), each update is computed. The last one of a window is left out: its line has the time
of the report, too.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import ddpscale
from pipeline.figures.intervals import median_interval
from pipeline.figures.pooling import timed_epochs, update_times_s
from pipeline.plan.script import script_name
from pipeline.records import store
from pipeline.records.folder import find_experiments
from pipeline.records.record import Record
from pipeline.run import split_command

SCRIPT = str(Path(__file__).resolve().with_name("gpt_script.py"))
NUM_UPDATES = 100  # of the script alone
WARM_UP_UPDATES = 20  # of nanoGPT
ITERATION = re.compile(r"^iter (\d+): .* time ([\d.]+)ms", re.MULTILINE)
AIRBENCH_UPDATES, AIRBENCH_EPOCHS = 48, 9  # of an epoch; whole ones of a run
MANY_UPDATES = 1_000_000  # the measurement ends the script
MEASURED = (SCRIPT, "--batch-size", "{batch_size_per_gpu}", "--updates", str(MANY_UPDATES))

WEIGHTS: dict[str, Callable[[float], float]] = {
    "mean_per_s": lambda count: 1 / count,
    "moving_per_s": lambda count: 0.3 / (1 - 0.7**count),  # tqdm's smoothing
}
"""The weight of the last of `count` updates in a mean."""


def run_alone(batch_size: int) -> tuple[float, float | None]:
    """Return the time of an update in ms, and the peak memory in GiB, as the script prints them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, SCRIPT, "--batch-size", str(batch_size), "--updates", str(NUM_UPDATES)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(printed.splitlines()[-1])
    return found["update_ms"], found["peak_gib"]


def run_measured(batch_size: int, updates: int | None) -> tuple[float, float]:
    """Return the same of the record that `ddpscale run` writes of the script."""
    with tempfile.TemporaryDirectory() as outputs:
        command = [sys.executable, "-m", "pipeline.run", "--num-gpus", "2", "--batch-size", str(batch_size)]
        command += ["--cluster", "local", "--outputs", outputs]
        command += [] if updates is None else ["--updates", str(updates)]
        subprocess.run([*command, "--", *MEASURED], check=True, stdout=subprocess.DEVNULL)
        (row,) = ddpscale.load(outputs).configurations.to_dict("records")
    return 1e3 * row["update_time_s"], row["peak_memory_gib"]


def nanogpt_arguments(log_interval: int, updates: int) -> list[str]:
    """Return arguments of nanoGPT's train.py: no evaluation after the first, nothing compiled, one pass a process."""
    numbers = f"--gradient_accumulation_steps=2 --log_interval={log_interval} --max_iters={updates} --eval_iters=1"
    return [*numbers.split(), "--eval_interval=1000000000", "--compile=False", "--dataset=random"]


def run_nanogpt(folder: Path, batch_size: int, log_interval: int) -> tuple[float, float]:
    """Return the time of an iteration in ms: the median of what the script prints, and that between its lines."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    arguments = [f"--batch_size={batch_size}", *nanogpt_arguments(log_interval, WARM_UP_UPDATES + NUM_UPDATES)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*torchrun, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout, "it is a pipe"
        lines = [(time.perf_counter(), line) for line in run.stdout]
    timed = [(at, ITERATION.search(line)) for at, line in lines]
    logged = [(at, int(found[1]), float(found[2])) for at, found in timed if found and int(found[1]) >= WARM_UP_UPDATES]
    (start, first, _), (end, last, _) = logged[0], logged[-1]
    return statistics.median(ms for _, _, ms in logged), 1e3 * (end - start) / (last - first)


def print_nanogpt(folder: Path, batch_size: int, turns: int) -> None:
    """Print what nanoGPT prints and what its record says, turn by turn. Its data are made up where it has none."""
    data = folder / "data" / "random"
    data.mkdir(parents=True, exist_ok=True)
    for part in ("train.bin", "val.bin"):
        (data / part).write_bytes(torch.randint(50_000, (1_000_000,)).to(torch.uint16).numpy().tobytes())
    script = ["train.py", "--batch_size={batch_size_per_gpu}", *nanogpt_arguments(10, MANY_UPDATES)]
    for turn in range(turns):
        each, tenth = (run_nanogpt(folder, batch_size, log_interval) for log_interval in (1, 10))
        record, log = run_and_read(["--num-gpus", "2", "--batch-size", str(batch_size), "--", *script], folder)
        lines_ms = [float(ms) for number, ms in ITERATION.findall(log) if int(number) >= WARM_UP_UPDATES]
        measured_ms = 1e3 * statistics.median(update_times_s(record))
        print(
            f"turn {turn}: logs each: its lines {each[0]:.2f} ms, between them {each[1]:.2f}; logs every tenth: "
            f"its lines {tenth[0]:.2f} ms, between them {tenth[1]:.2f}, measured {measured_ms:.2f}, its lines then "
            f"{statistics.median(lines_ms):.2f}",
            flush=True,
        )


def airbench_update_ms(printed: str) -> float:
    """Return the time of an update in ms by airbench's clock, over the epochs of its first run but the first two."""
    lines = re.findall(r"\|\s+(\d+)\s+\|[^\n]*\|\s+([\d.]+)\s+\|$", printed, re.MULTILINE)
    seconds = {int(epoch): float(total) for epoch, total in reversed(lines)}
    last = min(max(seconds), AIRBENCH_EPOCHS - 1)
    return 1e3 * (seconds[last] - seconds[1]) / ((last - 1) * AIRBENCH_UPDATES)


def print_airbench(folder: Path, turns: int) -> None:
    """Print an update of airbench by its own clock, alone and measured, and by its record, turn by turn."""
    script = "legacy/airbench94.py"
    for turn in range(turns):
        with subprocess.Popen([sys.executable, "-u", script], cwd=folder, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout, "it is a pipe"
            printed = "".join(itertools.takewhile(lambda line: "eval" not in line.split(), run.stdout))
            run.terminate()  # of 25 runs the first is enough
        record, log = run_and_read(["--num-gpus", "1", "--", script], folder)
        steps_ms = [ns / 1e6 for epoch in timed_epochs(record) for ns in epoch.step_times_ns or ()]
        print(
            f"turn {turn}: by its clock {airbench_update_ms(printed):.3f} ms alone, {airbench_update_ms(log):.3f} "
            f"measured; record {statistics.median(steps_ms):.3f} ms, n = {len(steps_ms)} updates",
            flush=True,
        )


def run_and_read(options: Sequence[str], folder: Path | None = None) -> tuple[Record, str]:
    """Return the record and the log of a configuration that `ddpscale run` measures."""
    with tempfile.TemporaryDirectory() as outputs:
        command = [sys.executable, "-m", "pipeline.run", "--cluster", "local", "--outputs", outputs, *options]
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=folder)
        (experiment,) = find_experiments(Path(outputs)).values()
        (record,) = store.load_folder(experiment.records_folder)[0]
        (log,) = (path.read_text(errors="replace") for path in experiment.logs.glob("*/*.log"))
    return record, log


def own_times_s(pattern: str, log: str, samples_per_update: int = 1) -> dict[float, float]:
    """Return the time of an update that each matching line of a script's log says, by the number of the update."""
    found = [match.groupdict() for line in re.split(r"[\r\n]", log) for match in re.finditer(pattern, line)]
    lines = [{name: float(text) for name, text in groups.items() if text} for groups in found]
    rates = [next((line[name] for name in line if name.endswith("per_s")), None) for line in lines]
    times_s = [1 / rate if rate else line.get("s") or line["ms"] / 1e3 for line, rate in zip(lines, rates, strict=True)]
    places = [line.get("index", line.get("samples", 0) / samples_per_update - 1) + 1 for line in lines]
    numbers = [line.get("n", place) for line, place in zip(lines, places, strict=True)]
    return dict(zip(numbers, times_s, strict=True))


def last_times_s(means_s: dict[float, float], weight: Callable[[float], float]) -> dict[float, float]:
    """Return the time of each update from means that end with it. `weight`: its own in the mean with its number."""
    pairs = [(at, mean, means_s[at - 1]) for at, mean in means_s.items() if at - 1 in means_s]
    return {at: before + (mean - before) / weight(at) for at, mean, before in pairs}


def print_own_lines(pattern: str, options: Sequence[str]) -> None:
    """Run `ddpscale run` and print what the script's own lines say of an update beside the record of that run."""
    record, log = run_and_read(options)
    said_s, windows = own_times_s(pattern, log, record.spec.global_batch_size), []
    weight = next((WEIGHTS[name] for name in WEIGHTS if f"<{name}>" in pattern), None)
    own_s = last_times_s(said_s, weight) if weight else said_s
    for epoch in timed_epochs(record):
        end, steps = epoch.num_updates or 0, epoch.step_times_ns or ()
        pairs = [(own_s[at], ns / 1e9) for at, ns in enumerate(steps, end - len(steps) + 1) if at in own_s and at < end]
        windows += [[1e3 * statistics.fmean(side) for side in zip(*pairs, strict=True)]] if pairs else []
    if not windows:
        raise SystemExit(f"no line of a timed update matches {pattern!r}; the log begins {log[:2000]!r}")
    last = f"lines: {len(said_s)}, the last {1e3 * said_s[max(said_s)]:.4f} ms"
    print(f"{script_name(record.spec.script or '')}, processes: {record.spec.world_size}, {last}")
    print_median("ms an update, record", [1e3 * time_s for time_s in update_times_s(record)])
    print_median("ms an update, its lines", [own for own, _ in windows])
    print_median("the same updates of rank 0, record over lines", [recorded / own for own, recorded in windows])


def print_median(name: str, values: Sequence[float]) -> None:
    """Print the median of values with its interval; with too few of them, their ends."""
    interval = median_interval(values)
    low, high = interval[:2] if interval else (min(values), max(values))
    kind = "interval" if interval else "range"
    print(f"{name}: {statistics.median(values):.4f} ({kind} {low:.4f} to {high:.4f}), n = {len(values)}", flush=True)


def main() -> None:
    """Print both times of each turn, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=24, help="sequences of a process")
    parser.add_argument("--updates", type=int, help="timed updates, at most (default: until precise enough)")
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="a clone of nanoGPT, to run its train.py")
    parser.add_argument("--airbench", type=Path, metavar="FOLDER", help="a clone of cifar10-airbench")
    parser.add_argument("--own-line", metavar="PATTERN", help="compare the script's own lines with the record")
    words, options = split_command(sys.argv[1:])
    arguments = parser.parse_args(words)
    if arguments.own_line:
        print_own_lines(arguments.own_line, options)
        return
    if arguments.nanogpt:
        print_nanogpt(arguments.nanogpt.resolve(), arguments.batch_size, arguments.turns)
        return
    if arguments.airbench:
        print_airbench(arguments.airbench.resolve(), arguments.turns)
        return
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
    print_median("time of an update, measured over alone", time_ratios)
    if memory_ratios:
        print_median("peak memory, measured over alone", memory_ratios)


if __name__ == "__main__":
    main()
