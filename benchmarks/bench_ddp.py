"""Times a DDP step on this machine's GPUs, by turns with each of them alone; a part of `make bench-gpu`.

    torchrun --standalone --nproc-per-node=N benchmarks/bench_ddp.py --data FOLDER --json bench-ddp.json
    python benchmarks/bench_ddp.py --print bench-ddp.json

Images on the GPU, bf16, channels_last, fused SGD, compiled and captured; the gradients are views of DDP's buckets, and
no buffers are broadcast, which training does not read. Both sides by turns in one process group: all ranks train one
model, or each a model of its own over the whole epoch, of which the slowest counts.
"""

import argparse
import os
from pathlib import Path

import msgspec
import tabulate
import torch
from bench_epochs import NUM_WINDOWS, Row, by_turns, ours
from bench_gpu import describe, point

from pipeline.experiment.record import Environment
from pipeline.experiment.spec import Spec
from pipeline.training import process_group, provenance

TARGETS_S = {32: 0.50, 128: 0.225, 512: 0.14, 2048: 0.12}  # four H200s, bf16, an epoch of 50,000 images


class Bench(msgspec.Struct):
    """The slowest rank's windows, of DDP and of training for itself."""

    where: Environment
    num_gpus: int
    rows: list[Row]


def measure(spec: Spec, rank: process_group.Rank, data: Path, num_windows: int) -> list[Row]:
    """One batch size per GPU: DDP over all ranks, and each of them alone, by turns. Called by all ranks."""
    contenders = [
        ours("ddp", spec, rank, data),
        ours("single", point(batch_size_per_gpu=spec.batch_size_per_gpu), process_group.Rank(0, 1, rank.device), data),
    ]
    return by_turns(f"ddp at {spec.batch_size_per_gpu}", contenders, num_windows)


def as_table(bench: Bench) -> str:
    """A line a batch size; efficiency is of the medians: single / (N x ddp)."""
    shown = []
    for ddp, single in zip(bench.rows[::2], bench.rows[1::2], strict=True):
        size = ddp.spec.batch_size_per_gpu
        shown.append(
            {
                "batch": size,
                "ddp epoch s": ddp.median_s,
                "min": min(ddp.windows_s),
                "max": max(ddp.windows_s),
                "n": len(ddp.windows_s),
                "single epoch s": single.median_s,
                "efficiency": single.median_s / (bench.num_gpus * ddp.median_s),
                "target s": TARGETS_S.get(size) if bench.num_gpus == 4 else None,
                "last loss, ddp": ddp.losses[-1],
                "single": single.losses[-1],
                "compile s": ddp.compile_time_s,
            }
        )
    formats = ["d", ".4f", ".4f", ".4f", "d", ".4f", ".3f", ".3f", ".4f", ".4f", ".1f"]
    return tabulate.tabulate(shown, headers="keys", tablefmt="github", floatfmt=formats)


def print_bench(bench: Bench) -> None:
    """The table of a run, and where it ran."""
    print(f"{bench.num_gpus} x {describe(bench.where)}, NCCL {bench.where.nccl}\n")
    print(as_table(bench), flush=True)


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("PIPELINE_DATA", "data")))
    parser.add_argument("--json", type=Path, help="where the raw windows are written")
    parser.add_argument("--print", type=Path, help="measure nothing: print this run's table")
    parser.add_argument("--batch-sizes", default=",".join(map(str, TARGETS_S)))
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS)
    arguments = parser.parse_args()
    if arguments.print:
        print_bench(msgspec.json.decode(arguments.print.read_bytes(), type=Bench))
        return
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    num_gpus = int(os.environ.get("WORLD_SIZE", "1"))
    ddp = {"strategy": "ddp", "num_gpus": num_gpus, "gradient_as_bucket_view": True, "broadcast_buffers": False}
    specs = [point(batch_size_per_gpu=size, **ddp) for size in sizes]
    rank = process_group.join_process_group(specs[0])
    bench = Bench(provenance.describe_environment(specs[0], rank), num_gpus, [])
    for spec in specs:
        bench.rows += measure(spec, rank, arguments.data, arguments.windows)
        torch.cuda.empty_cache()
        if rank.rank == 0 and arguments.json:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(bench), indent=1))
    if rank.rank == 0:
        print_bench(bench)
    process_group.leave_process_group()


if __name__ == "__main__":
    main()
