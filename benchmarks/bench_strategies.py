"""Shows that the strategies are right on two GPUs over NCCL, or where there is one GPU on two ranks that share it.

    python benchmarks/bench_strategies.py --json strategies.json          measure the parts that the file lacks
    python benchmarks/bench_strategies.py --print strategies.json         print its table

NCCL refuses two ranks on one GPU: they use gloo, which copies each message through the host, and their times say
nothing. Peaks are of one process's allocator.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tabulate
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from pipeline.communication.process_group import install
from pipeline.communication.step_variants import StepContext, build_variant, count_calls
from pipeline.figures.formulas import state_bytes
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import gathered_bytes, reduced_bytes
from pipeline.records.record import Measurement
from pipeline.system.host import gpu_names, num_visible_gpus
from pipeline.training.devices import set_memory_limit
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, ignore_mark
from pipeline.training.torch_strategies import TORCH_STRATEGIES, optimizer_bytes
from pipeline.workloads.find import build_workload

SIZES = {"layers": 8, "width": 512, "heads": 8, "length": 128, "vocabulary": 8192}  # 29 million parameters
SMALL_SIZES = {"layers": 2, "width": 128, "heads": 4, "length": 32, "vocabulary": 256}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "fsdp, reshard: blocks": {"strategy": "fsdp"},
    "fsdp, reshard: always": {"strategy": "fsdp", "reshard": "always"},
    "fsdp, reshard: never": {"strategy": "fsdp", "reshard": "never"},
    "fsdp, param_dtype: bf16": {"strategy": "fsdp", "precision": "bf16", "param_dtype": "bf16"},
    "fsdp, cpu_offload": {"strategy": "fsdp", "cpu_offload": True},
    **{
        f"{strategy}, {axis}: blocks": {"strategy": strategy, axis: "blocks"}
        for strategy in ("ddp", "fsdp")
        for axis in ("compile", "activation_checkpointing")
    },
}
BATCH_SIZES = (4, 16)
NUM_UPDATES = 4  # DDP builds its buckets anew in the second: for a moment it has both, which is no state of a step
LIMIT_SHARE = 4.0  # of the weights: less than DDP's 5 with AdamW, more than FSDP's on two ranks

Found = dict[str, Any]


def make_point(batch_size: int, sizes: dict[str, int], **fields: Any) -> Spec:
    options = tuple(f"{name}={value}" for name, value in sizes.items())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common: dict[str, Any] = {"model": "gpt", "dataset": None, "input": "synthetic", "precision": "fp32"}
    common |= {"device": device, "num_gpus": 2, "batch_size_per_gpu": batch_size, "options": options}
    return Spec(**(common | fields))


def train(spec: Spec, rank: Rank) -> tuple[Found, int]:
    """Train a few updates on the same tokens. Return what was found, and the peak of the last two in bytes."""
    workload = build_workload(spec)
    torch.manual_seed(0)
    strategy = TORCH_STRATEGIES[spec.strategy]
    model = strategy.wrap(strategy.place(workload.build_model(), workload, spec, rank), workload, spec, rank)
    step = EagerStep(model, workload, spec, rank)
    torch.manual_seed(1 + rank.rank)
    batch = workload.synthetic_batch(spec.batch_size_per_gpu, rank.device)
    losses = []
    for number in range(NUM_UPDATES):
        if number == NUM_UPDATES // 2 and rank.device.type == "cuda":
            torch.cuda.empty_cache()  # else buckets that DDP has left may still count
            torch.cuda.reset_peak_memory_stats()
        losses.append(float(step(batch, ignore_mark)))
    peak_bytes = torch.cuda.max_memory_allocated() if rank.device.type == "cuda" else 0
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    measurement = Measurement(
        epochs=(),
        num_parameters=num_parameters,
        gradient_bytes=4 * num_parameters,
        sharding=strategy.describe_sharding(workload, model, spec),
        optimizer_bytes=most_of_all_ranks(optimizer_bytes(step.optimizer), rank),
    )
    return {"losses": losses, "measurement": measurement}, peak_bytes


def most_of_all_ranks(number: int, rank: Rank) -> int:
    largest = torch.tensor([number], device=rank.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def measure_strategy_alone(fields: Found, rank: Rank) -> Found:
    """Return the memory, losses and counted bytes of a strategy."""
    return measure_memory(fields, rank) | count_bytes(fields, rank)


def measure_memory(fields: Found, rank: Rank) -> Found:
    """Return losses, and memory without samples by measurement and by formula."""
    peaks: dict[int, int] = {}
    for batch_size in BATCH_SIZES:
        spec = make_point(batch_size, SIZES, **fields)
        found, peaks[batch_size] = train(spec, rank)
        free_memory()
    line = statistics.linear_regression(list(peaks), list(peaks.values()))
    measurement: Measurement = found["measurement"]
    return {
        "losses": found["losses"],
        "parameters": measurement.num_parameters,
        "optimizer_bytes": measurement.optimizer_bytes,
        "peak_bytes": peaks,
        "sample_bytes": line.slope,
        "state_bytes": line.intercept,
        "state_formula_bytes": state_bytes(measurement, spec),
    }


def free_memory() -> None:
    gc.collect()  # a wrapped model is part of a cycle
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def count_bytes(fields: Found, rank: Rank) -> Found:
    """Return the bytes of an update's collectives as counted in a silent one, those by formula, and if it is finite."""
    spec = make_point(BATCH_SIZES[0], SMALL_SIZES, **fields)
    workload = build_workload(spec)
    context = StepContext(spec, rank, workload, workload.synthetic_batch(spec.batch_size_per_gpu, rank.device), None)
    silent = build_variant(context, "no_op_hook" if spec.strategy == "ddp" else "no_op")
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        calls = count_calls(silent)
    counted: dict[str, int] = {}
    for call in calls.elements():
        counted[call.collective] = counted.get(call.collective, 0) + call.num_bytes
    sharding = TORCH_STRATEGIES[spec.strategy].describe_sharding(workload, silent.model, spec)
    gradient_bytes = sum(parameter.nbytes for parameter in silent.model.parameters())
    formula = {"all_reduce": gradient_bytes} | ({"broadcast": gradient_bytes} if spec.strategy == "zero1" else {})
    if sharding:
        formula = {"all_gather": int(gathered_bytes(0, sharding, spec) or 0)}
        formula["reduce_scatter"] = int(reduced_bytes(0, sharding, spec) or 0)
    local = [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in silent.model.parameters()
    ]
    is_finite = all(bool(tensor.isfinite().all()) for tensor in local)
    return {"counted_bytes": counted, "formula_bytes": formula, "silent_is_finite": is_finite}


def fits(fields: Found, rank: Rank) -> Found:
    """Train within a limit of memory. Both ranks run out at the same place, or neither does."""
    probe = build_workload(make_point(1, SIZES, **fields)).build_model()
    limit_gib = LIMIT_SHARE * sum(parameter.nbytes for parameter in probe.parameters()) / 2**30
    spec = make_point(1, SIZES, memory_limit_gib=limit_gib, **fields)
    set_memory_limit(spec, rank)
    try:
        train(spec, rank)
    except torch.OutOfMemoryError:
        return {"limit_gib": limit_gib, "fits": False}
    return {"limit_gib": limit_gib, "fits": True}


PARTS: dict[str, Callable[[Rank], Found]] = {  # each in new processes, which hold nothing of another
    **{name: partial(measure_strategy_alone, fields) for name, fields in STRATEGIES.items()},
    "limit ddp": partial(fits, {"strategy": "ddp"}),
    "limit fsdp": partial(fits, {"strategy": "fsdp"}),
}


def run_rank(rank: int, folder: str, part: str) -> None:
    """Measure one part on one rank, and write rank 0's."""
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % num_gpus) if num_gpus else torch.device("cpu")
    if num_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "nccl" if num_gpus > 1 else "gloo"
    device_id = device if num_gpus > 1 else None
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=device_id)
    install()
    found = PARTS[part](Rank(rank, 2, device))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(part: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, (folder, part), 2, start_method="forkserver")
        found: Found = json.loads(Path(folder, "found.json").read_text())
    return found


def print_tables(found: Found) -> None:
    """Print memory by formula, the largest difference of a loss, and what fits."""
    rows, ddp = [], found["ddp"]
    for name in [name for name in STRATEGIES if name in found]:
        one = found[name]
        is_equal = "yes" if one["counted_bytes"] == one["formula_bytes"] else "no"
        rows.append([name, *memory_cells(one, ddp), f"{loss_difference(one, ddp):.1e}", is_equal])
    headings = ["strategy", "state [GiB]", "formula [GiB]", "saved [GiB]", "formula [GiB]", "a sample [MiB]"]
    headings += ["largest difference of a loss", "bytes as by formula"]
    print(tabulate.tabulate(rows, headings, tablefmt="pipe", disable_numparse=True))
    for part in [part for part in found if part.startswith("limit")]:
        word = "fits" if found[part]["fits"] else "runs out of memory"
        print(f"\nWithin {found[part]['limit_gib']:.2f} GiB {part.removeprefix('limit ')} {word}.")


def memory_cells(one: Found, ddp: Found) -> list[str]:
    """Return memory without samples, what is saved against DDP, each by measurement and by formula; and of a sample."""
    if "state_bytes" not in one:
        return ["not measured"] * 5
    saved = (ddp[key] - one[key] for key in ("state_bytes", "state_formula_bytes"))
    gib = [f"{num_bytes / 2**30:.3f}" for num_bytes in (one["state_bytes"], one["state_formula_bytes"], *saved)]
    return [*gib, f"{one['sample_bytes'] / 2**20:.1f}"]


def loss_difference(one: Found, other: Found) -> float:
    """Return the largest relative difference of a loss."""
    ratios = [ours / theirs for ours, theirs in zip(one["losses"], other["losses"], strict=True)]
    return float(max(abs(ratio - 1) for ratio in ratios))


def main() -> None:
    """Measure or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--print", type=Path, dest="printed")
    arguments = parser.parse_args()
    file = arguments.printed or arguments.json
    found: Found = json.loads(file.read_text()) if file and file.exists() else {}
    gpus = sorted(gpu_names())
    todo = [part for part in PARTS if part not in found and (gpus or not part.startswith("limit"))]
    multiprocessing.set_forkserver_preload(["__main__", "torch._dynamo"])  # the longest imports, once for all ranks
    for part in [] if arguments.printed else todo:
        about = {
            "gpus": gpus,
            "num_gpus": num_visible_gpus(),
            "torch": torch.__version__,
            "sizes": SIZES,
            "small_sizes": SMALL_SIZES,
        }
        found |= {**about, part: measure(part)}
        print(f"{part}: measured", file=sys.stderr)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print_tables(found)


if __name__ == "__main__":
    main()
