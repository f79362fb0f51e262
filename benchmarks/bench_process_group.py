"""Measures steps over the process group that counts, silences and delays, by turns in one process.

    python benchmarks/bench_process_group.py                      # two GPUs (or two CPU processes); about 4 minutes
    python benchmarks/bench_process_group.py --only ddp           # a strategy alone
    python benchmarks/bench_process_group.py --links              # DDP by NVLink, shared memory and sockets, on GPUs

Series of a strategy: `plain` over the group of torch, `real` over the measured one, `silent` over the same while it is
silent, `no_sync` of DDP, and `delay` with 2 ms at each collective. Each line has the median over rounds with its
interval; a difference is taken round by round. It also prints counted bytes and the weights of four updates.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeline.communication import timing
from pipeline.communication.process_group import Controller, MeasuredGroup, install
from pipeline.communication.step_variants import (
    StepContext,
    StepVariant,
    build_variant,
)
from pipeline.figures.exposed_communication import NO_OP
from pipeline.figures.intervals import median_interval
from pipeline.figures.stopping_rule import LEAD_IN_STEPS
from pipeline.plan.spec import Spec
from pipeline.training.loop import build_model, set_precision
from pipeline.training.process_group import Rank
from pipeline.training.torch_strategies import local_part

GPT2 = ("layers=12", "heads=12", "width=768", "length=1024", "vocabulary=50304")
SMALL = ("layers=2", "heads=2", "width=64", "length=32", "vocabulary=256")
STRATEGIES = ("ddp", "zero1", "fsdp")
LINKS = {
    "as it is": {},
    "shared memory": {"NCCL_P2P_DISABLE": "1"},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
DELAY_S = 0.002
STEPS = 3  # of a window
NUM_UPDATES = 4


def say(*words: Any) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def make_spec(strategy: str, device: str, batch_size: int, options: Sequence[str]) -> Spec:
    return Spec(
        model="gpt",
        options=tuple(options),
        input="synthetic",
        dataset=None,
        precision="bf16" if device == "cuda" else "fp32",
        device=device,  # type: ignore[arg-type]
        num_gpus=2,
        batch_size_per_gpu=batch_size,
        strategy=strategy,
        measure="communication",
    )


def lines_of(windows: dict[str, list[list[int]]], pairs: Sequence[tuple[str, str]]) -> None:
    step_ms = {name: [max(ranks) / STEPS / 1e6 for ranks in rounds] for name, rounds in windows.items()}
    for name, times in step_ms.items():
        say(f"  {name:28} {with_interval(times)}")
    for one, other in pairs:
        if one in step_ms and other in step_ms:
            apart = [a - b for a, b in zip(step_ms[one], step_ms[other], strict=True)]
            say(f"  {one + ' - ' + other:28} {with_interval(apart)}")


def with_interval(values: Sequence[float]) -> str:
    interval = median_interval(values)
    ends = f"({interval.low:.2f} to {interval.high:.2f})" if interval else ""
    return f"{statistics.median(values):9.2f} {ends} ms, n = {len(values)}"


def count(controller: Controller, variant: StepVariant) -> dict[str, int]:
    """Return the bytes of a real step by collective."""
    total: Counter[str] = Counter()
    with controller.counting() as calls:
        variant.eager()
    for call, number in calls.items():
        total[f"{call.collective}{' (real)' if call.stays_real else ''}"] += number * call.num_bytes
        total[f"{call.collective} calls"] += number
    return dict(total)


def train(variant: StepVariant) -> list[float]:
    """Return the sum of the squares of this rank's weights after each of a few updates."""
    found = []
    for _ in range(NUM_UPDATES):
        variant.eager()
        found.append(sum(float(local_part(one.detach()).double().square().sum()) for one in variant.model.parameters()))
    return found


def compare(
    strategy: str,
    context: StepContext,
    plain: StepVariant,
    controller: Controller,
    rounds: int,
) -> None:
    rank, build = context.rank, partial(build_variant, context)
    started = time.perf_counter()
    variants = {"plain": plain, "real": build(strategy), "silent": build(NO_OP[strategy])}
    variants["delay"] = build(strategy)
    if strategy == "ddp":
        variants["no_sync"] = build("no_sync")
    say(f"{strategy}, {context.spec.batch_size_per_gpu} sequences a process")
    for name, found in {name: train(variants[name]) for name in ("plain", "real")}.items():
        say(f"  squares of weights, {name:8} {found}")
    say(f"  counted {count(controller, variants['real'])}")
    run_ahead(build(strategy), rounds * (STEPS + LEAD_IN_STEPS) + 30)
    for variant in variants.values():
        timing.time_steps(variant.step, 1, rank, timing.WARM_UP_STEPS_PER_VARIANT)
    timers = {name: partial(timing.time_steps, one.step, STEPS, rank) for name, one in variants.items()}
    timers["delay"] = partial(time_delayed, controller, variants["delay"], rank)
    *_, windows = timing.time_rounds(timers, dict.fromkeys(timers, rounds))
    pairs = [("real", "plain"), ("real", "silent"), ("silent", "no_sync")]
    lines_of(windows, [*pairs, ("delay", "real")])
    asked_ms = controller.delayed_s() * 1e3 / rounds / (STEPS + LEAD_IN_STEPS)
    say(f"  delays of a step on this rank: {asked_ms:.2f} ms; took {time.perf_counter() - started:.0f} s\n")


def run_ahead(variant: StepVariant, num_steps: int) -> None:
    """Run more updates than any other series will.

    DTensor decides anew how to shard each operation whose numbers it has not seen, and AdamW's numbers are new in each
    update. It remembers them for all models, so the series that is ahead would pay for the others.
    """
    for _ in range(num_steps):
        variant.eager()


def time_delayed(controller: Controller, variant: StepVariant, rank: Rank) -> int:
    """Time a window of the real step, each collective delayed. The mode is set once: it measures the GPU's clock."""
    with controller.in_mode("delay", DELAY_S):
        return timing.time_steps(variant.eager, STEPS, rank)


def run_rank(arguments: argparse.Namespace) -> None:
    on_gpus = torch.cuda.device_count() > 1
    number = int(os.environ["RANK"])
    device = torch.device("cuda", number) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    run_strategies(arguments, Rank(number, 2, device))
    dist.destroy_process_group()


def run_strategies(arguments: argparse.Namespace, rank: Rank) -> None:
    device, contexts, plain = rank.device.type, dict[str, StepContext](), dict[str, StepVariant]()
    options, batch_size = (GPT2, 48) if device == "cuda" else (SMALL, 4)
    for strategy in arguments.only or STRATEGIES:
        spec = make_spec(strategy, device, arguments.batch_size or batch_size, options)
        set_precision(spec)
        workload, _ = build_model(spec, rank)
        batch = workload.synthetic_batch(spec.batch_size_per_gpu, rank.device)
        context = contexts[strategy] = StepContext(spec, rank, workload, batch, None)
        plain[strategy] = build_variant(context, strategy)  # it keeps the group of torch
    controller = install()
    assert isinstance(dist.group.WORLD, MeasuredGroup)
    for strategy, context in contexts.items():
        compare(strategy, context, plain.pop(strategy), controller, arguments.rounds)


def main() -> None:
    """Start two processes, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=STRATEGIES)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--links", action="store_true")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    if not arguments.links:
        subprocess.run([*torchrun, *sys.argv[1:]], check=True)
        return
    for name, variables in LINKS.items():
        print(f"link: {name}", flush=True)
        own = ["--only", "ddp", "--batch-size", str(arguments.batch_size or 24), "--rounds", "6"]
        subprocess.run([*torchrun, *own], env=os.environ | variables, check=True)


if __name__ == "__main__":
    main()
