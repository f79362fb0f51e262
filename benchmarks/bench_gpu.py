"""Times a training step on this machine's GPU, for `make bench-gpu`: raw windows as JSON, tables on the screen.

    python benchmarks/bench_gpu.py --data FOLDER --json bench.json   measure; FOLDER holds CIFAR-10's images
    torchrun --standalone --nproc-per-node=N benchmarks/bench_gpu.py --data FOLDER --json bench-ddp.json   a DDP step
    python benchmarks/bench_gpu.py --print bench.json ...            the tables of earlier runs

Every comparison has both sides in one process, an epoch of each by turns; medians over the epochs after the first.
cuDNN keeps the first plan that a process makes for a convolution, tuned or not, for whoever comes next: for eager
sections without tuned plans, and compiled ones with them, name each in --sections of a run of its own.

Under torchrun DDP and each rank alone train by turns in one process group: all ranks train one model, or each a model
of its own over the whole epoch, of which the slowest counts. The gradients are views of DDP's buckets, and no buffers
are broadcast, which training does not read.
"""

import argparse
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from operator import truediv
from pathlib import Path
from typing import Any

import msgspec
import tabulate
import torch
from bench_epochs import NUM_WINDOWS, Contender, Row, accelerated, by_hand, by_turns, lightning, ours

from pipeline.plan.spec import Spec
from pipeline.records.record import Environment
from pipeline.training import process_group, provenance
from pipeline.training.process_group import Rank

BATCH_SIZES = "32,128,512,2048"
SECTIONS = ("step", "by_hand", "input", "trainers", "trainers_compiled", "executions")


class Bench(msgspec.Struct):
    """Everything that a run measured, and what could not be measured."""

    where: Environment
    rows: list[Row]
    problems: list[str] = msgspec.field(default_factory=list)
    num_gpus: int = 1

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))


def point(**fields: Any) -> Spec:
    """The fast point: one GPU, images on it, bf16, channels_last, fused SGD, compiled and captured."""
    defaults = {
        "strategy": "single",
        "num_gpus": 1,
        "dataset": "imagefolder",
        "input": "gpu",
        "precision": "bf16",
        "layout": "channels_last",
        "fused_optimizer": True,
        "execution": "compiled_graph",
    }
    return Spec(**{**defaults, **fields})


class Runner:
    """Runs sections one after another; what one cannot do is a problem by name, and the next one runs."""

    def __init__(self, rank: Rank, data: Path, num_windows: int, path: Path | None) -> None:
        self.rank, self.data, self.num_windows, self._path = rank, data, num_windows, path
        self.bench = Bench(provenance.describe_environment(point(batch_size_per_gpu=1), rank), [])

    def attempt(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.bench.problems.append(f"{what}: {type(error).__name__}: {error}"[:400])
        if self._path:
            self.bench.write(self._path)

    def compare(self, section: str, build: Sequence[Callable[[], Contender]]) -> None:
        self.attempt(section, lambda: self._compare(section, build))
        torch.cuda.empty_cache()

    def _compare(self, section: str, build: Sequence[Callable[[], Contender]]) -> None:
        contenders = []
        for one in build:
            try:
                contenders.append(one())
            except ImportError as error:
                self.bench.problems.append(f"{section}: {error}")
        rows = by_turns(section, contenders, self.num_windows)
        self.bench.rows += rows
        print(as_table(rows), flush=True)

    def ours(self, name: str, spec: Spec) -> Callable[[], Contender]:
        return lambda: ours(name, spec, self.rank, self.data)


def measure(runner: Runner, sections: Sequence[str], batch_sizes: Sequence[int]) -> None:
    """Every section that was asked for."""
    rank, data = runner.rank, runner.data
    if "step" in sections:
        for size in batch_sizes:
            runner.compare(f"step at {size}", [runner.ours("compiled_graph", point(batch_size_per_gpu=size))])
    if "by_hand" in sections:
        spec = point(batch_size_per_gpu=128)
        tf32 = msgspec.structs.replace(spec, precision="tf32")
        plain = Spec(strategy="single", num_gpus=1, batch_size_per_gpu=128, dataset="imagefolder")
        runner.compare(
            "by_hand",
            [
                lambda: by_hand(plain, rank, data),
                runner.ours("ours, bf16", spec),
                runner.ours("ours, TF32", tf32),
            ],
        )
    if "input" in sections:
        for size in (size for size in batch_sizes if size >= 128):
            spec = point(batch_size_per_gpu=size, execution="graph")
            synthetic = msgspec.structs.replace(spec, input="synthetic", dataset="synthetic")
            runner.compare(f"input at {size}", [runner.ours("gpu", spec), runner.ours("synthetic", synthetic)])
    if "trainers" in sections:
        spec = point(batch_size_per_gpu=512, execution="eager")
        others = trainers(spec, runner)
        runner.compare("trainers at 512", [runner.ours("ours, eager", spec), *others])
    if "trainers_compiled" in sections:
        spec = point(batch_size_per_gpu=512)
        others = trainers(msgspec.structs.replace(spec, execution="eager"), runner)
        by_host = msgspec.structs.replace(spec, execution="compile")
        runner.compare("trainers at 512, compiled", [runner.ours("ours, compile", by_host), *others])
        # without Lightning, whose teardown frees what a CUDA graph still reads: cuBLAS's workspaces
        runner.compare("trainers at 512, captured", [runner.ours("ours, compiled_graph", spec), others[0]])
    # for their losses: in a run of its own all three have the eager step's plans
    if "executions" in sections:
        for size in batch_sizes:
            all_three = [
                runner.ours(execution, point(batch_size_per_gpu=size, execution=execution))
                for execution in ("eager", "graph", "compiled_graph")
            ]
            runner.compare(f"executions at {size}", all_three)


def compare_ddp(spec: Spec, rank: Rank, data: Path, num_windows: int) -> list[Row]:
    """One batch size per GPU: DDP over all ranks, and each of them alone, by turns. Called by all ranks."""
    contenders = [
        ours("ddp", spec, rank, data),
        ours("single", point(batch_size_per_gpu=spec.batch_size_per_gpu), Rank(0, 1, rank.device), data),
    ]
    return by_turns(f"ddp at {spec.batch_size_per_gpu}", contenders, num_windows)


def as_ddp_table(bench: Bench) -> str:
    """A line a batch size; efficiency is of the medians: single / (N x ddp)."""
    shown = []
    for ddp, single in zip(bench.rows[::2], bench.rows[1::2], strict=True):
        shown.append(
            {
                "batch": ddp.spec.batch_size_per_gpu,
                "ddp epoch s": ddp.median_s,
                "min": min(ddp.windows_s),
                "max": max(ddp.windows_s),
                "n": len(ddp.windows_s),
                "single epoch s": single.median_s,
                "efficiency": single.median_s / (bench.num_gpus * ddp.median_s),
                "last loss, ddp": ddp.losses[-1],
                "single": single.losses[-1],
                "compile s": ddp.compile_time_s,
            }
        )
    formats = ["d", ".4f", ".4f", ".4f", "d", ".4f", ".3f", ".4f", ".4f", ".1f"]
    return tabulate.tabulate(shown, headers="keys", tablefmt="github", floatfmt=formats)


def measure_ddp(arguments: argparse.Namespace, batch_sizes: Sequence[int], num_gpus: int) -> None:
    """Measure and print every batch size per GPU. Called by all ranks."""
    ddp = {"strategy": "ddp", "num_gpus": num_gpus, "gradient_as_bucket_view": True, "broadcast_buffers": False}
    specs = [point(batch_size_per_gpu=size, **ddp) for size in batch_sizes]
    rank = process_group.join_process_group(specs[0])
    bench = Bench(provenance.describe_environment(specs[0], rank), [], num_gpus=num_gpus)
    for spec in specs:
        bench.rows += compare_ddp(spec, rank, arguments.data, arguments.windows)
        torch.cuda.empty_cache()
        if rank.rank == 0 and arguments.json:
            bench.write(arguments.json)
    if rank.rank == 0:
        print_bench(bench)
    process_group.leave_process_group()


def trainers(spec: Spec, runner: Runner) -> list[Callable[[], Contender]]:
    """accelerate's loop and Lightning's Trainer with the model, batch, precision and input of the spec."""
    return [
        lambda: accelerated(spec, runner.rank, runner.data),
        lambda: lightning(spec, runner.rank, runner.data),
    ]


def as_table(rows: Sequence[Row]) -> str:
    """Rows as Markdown; the ratio is of the first row's epoch to the row's own, the median over rounds."""
    shown = [
        {
            "section": row.section,
            "name": row.name,
            "batch": row.spec.batch_size_per_gpu,
            "epoch s": row.median_s,
            "min": min(row.windows_s),
            "max": max(row.windows_s),
            "n": len(row.windows_s),
            "ratio": statistics.median(map(truediv, rows[0].windows_s, row.windows_s)),
            "last loss": row.losses[-1],
            "compile s": row.compile_time_s,
        }
        for row in rows
    ]
    formats = ["", "", "d", ".4f", ".4f", ".4f", "d", ".3f", ".4f", ".1f"]
    return tabulate.tabulate(shown, headers="keys", tablefmt="github", floatfmt=formats)


def describe(where: Environment) -> str:
    """Return where a benchmark ran, in a line."""
    gpu = where.gpus[0].name if where.gpus else "no GPU"
    dirty = " with uncommitted changes" * bool(where.git_dirty)
    return f"{gpu}; torch {where.torch}, driver {where.driver}, commit {where.git_commit}{dirty}"


def print_bench(bench: Bench) -> None:
    """The tables of a run, a section each."""
    if bench.num_gpus > 1:
        print(
            f"{bench.num_gpus} x {describe(bench.where)}, NCCL {bench.where.nccl}\n\n{as_ddp_table(bench)}", flush=True
        )
        return
    print(describe(bench.where) + "\n")
    for section in dict.fromkeys(row.section for row in bench.rows):
        print(as_table([row for row in bench.rows if row.section == section]) + "\n")
    for problem in bench.problems:
        print(f"not measured: {problem}")


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("PIPELINE_DATA", "data")))
    parser.add_argument("--json", type=Path, help="where the raw windows are written")
    parser.add_argument("--print", type=Path, nargs="+", help="measure nothing: print the tables of these runs")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--batch-sizes", default=BATCH_SIZES)
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS)
    arguments = parser.parse_args()
    if arguments.print:
        for path in arguments.print:
            print_bench(msgspec.json.decode(path.read_bytes(), type=Bench))
        return
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a GPU, and torch sees none here.")
    batch_sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    if "WORLD_SIZE" in os.environ:
        measure_ddp(arguments, batch_sizes, int(os.environ["WORLD_SIZE"]))
        return
    runner = Runner(Rank(0, 1, torch.device("cuda", 0)), arguments.data, arguments.windows, arguments.json)
    measure(runner, arguments.sections.split(","), batch_sizes)
    for problem in runner.bench.problems:
        print(f"not measured: {problem}")


if __name__ == "__main__":
    main()
