"""Shows that the strategies are right on a GPU where there is only one: two ranks share it, over gloo. No time counts.

    python tests/benchmarks/bench_shared_gpu.py --json shared.json          measure
    python tests/benchmarks/bench_shared_gpu.py --print shared.json         print its table

NCCL refuses two ranks on one GPU; gloo copies each message through the host. Memory, losses and counted bytes are those
that NCCL would give. Peaks are of one process's allocator, gloo's own buffers lie on the host.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import tabulate
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from pipeline.analysis.formulas import gathered_bytes_per_step, state_bytes
from pipeline.communication import selftest_checks, silent_collectives
from pipeline.communication.selftest_checks import judge_checks
from pipeline.communication.selftest_runs import measure_strategy
from pipeline.communication.step_variants import StepContext, build_variant
from pipeline.experiment.measurement import Measurement
from pipeline.experiment.spec import Spec
from pipeline.training.device_memory import set_memory_limit
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, ignore_mark
from pipeline.training.strategies import describe_sharding, optimizer_bytes, place_model, wrap_for_strategy
from pipeline.workloads.find import build_workload

SIZES = {"layers": 12, "width": 1024, "heads": 16, "length": 128, "vocabulary": 16384}  # 168 million parameters
SMALL_SIZES = {"layers": 4, "width": 512, "heads": 8, "length": 32, "vocabulary": 1024}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "fsdp, reshard: blocks": {"strategy": "fsdp"},
    "fsdp, reshard: always": {"strategy": "fsdp", "reshard": "always"},
    "fsdp, reshard: never": {"strategy": "fsdp", "reshard": "never"},
}
BATCH_SIZES = (4, 8, 16)
NUM_UPDATES = 4
NUM_ROUNDS = 100  # of the self-test; its times are those of a shared GPU
LIMIT_SHARE = 4.0  # of the weights: less than DDP's 5 with AdamW, more than FSDP's on two ranks

Found = dict[str, Any]


def make_point(batch_size: int, sizes: dict[str, int], **fields: Any) -> Spec:
    options = tuple(f"{name}={value}" for name, value in sizes.items())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common: dict[str, Any] = {"model": "gpt", "dataset": None, "input": "synthetic", "precision": "fp32"}
    common |= {"device": device, "num_gpus": 2, "batch_size_per_gpu": batch_size, "options": options}
    return Spec(**(common | fields))


def train(spec: Spec, rank: Rank, is_kept: bool = False) -> tuple[Found, int]:
    """Train a few updates on the same tokens. Return what was found, and the peak of the last updates in bytes."""
    workload = build_workload(spec)
    torch.manual_seed(0)
    model = wrap_for_strategy(place_model(workload.build_model(), workload, spec, rank), workload, spec, rank)
    if is_kept:
        silent_collectives.keep_buffers(model, [], is_silent=False)
    step = EagerStep(model, workload, spec, rank)
    torch.manual_seed(1 + rank.rank)
    batch = workload.synthetic_batch(spec.batch_size_per_gpu, rank.device)
    losses = []
    for number in range(NUM_UPDATES):
        if number == NUM_UPDATES // 2 and rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses.append(float(step(batch, ignore_mark)))
    peak_bytes = torch.cuda.max_memory_allocated() if rank.device.type == "cuda" else 0
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    measurement = Measurement(
        epochs=(),
        num_parameters=num_parameters,
        gradient_bytes=4 * num_parameters,
        sharding=describe_sharding(workload, model, spec),
        optimizer_bytes=most_of_all_ranks(optimizer_bytes(step.optimizer)),
    )
    return {"losses": losses, "measurement": measurement}, peak_bytes


def most_of_all_ranks(number: int) -> int:
    largest = torch.tensor([number])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


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
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def count_calls(fields: Found, rank: Rank) -> Found:
    """Return the bytes of an update's collectives as counted in a silent one, those by formula, and if it is finite."""
    spec = make_point(BATCH_SIZES[0], SMALL_SIZES, **fields)
    workload = build_workload(spec)
    context = StepContext(spec, rank, workload, workload.synthetic_batch(spec.batch_size_per_gpu, rank.device), None)
    silent = build_variant(context, "no_op_hook" if spec.strategy == "ddp" else "no_op")
    for _ in range(3):  # the first gather of each buffer is real
        silent.calls.clear()
        silent.step()
    counted: dict[str, int] = {}
    for call in silent.calls:
        counted[call.operation] = counted.get(call.operation, 0) + call.num_bytes
    sharding = describe_sharding(workload, silent.model, spec)
    gradient_bytes = sum(parameter.nbytes for parameter in silent.model.parameters())
    formula = {"all_reduce": gradient_bytes} | ({"broadcast": gradient_bytes} if spec.strategy == "zero1" else {})
    if sharding:
        formula = {"all_gather": gathered_bytes_per_step(sharding, spec)}
        formula["reduce_scatter"] = sharding.units_bytes + sharding.root_bytes
    local = [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in silent.model.parameters()
    ]
    is_finite = all(bool(tensor.isfinite().all()) for tensor in local)
    return {"counted_bytes": counted, "formula_bytes": formula, "silent_is_finite": is_finite}


def fits(fields: Found, rank: Rank, limit_gib: float) -> bool:
    """Train within a limit of memory. Both ranks run out at the same place, or neither does."""
    spec = make_point(1, SIZES, memory_limit_gib=limit_gib, **fields)
    set_memory_limit(spec, rank)
    try:
        train(spec, rank)
    except torch.OutOfMemoryError:
        return False
    return True


def run_rank(rank: int, folder: str, part: str) -> None:
    """Measure one part on one rank, and write rank 0's."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{part}", rank=rank, world_size=2)
    place, found = Rank(rank, 2, device), {}
    if part == "memory":
        for name, fields in STRATEGIES.items():
            found[name] = measure_memory(fields, place) | count_calls(fields, place)
            free_memory()
        kept, _ = train(make_point(BATCH_SIZES[-1], SIZES, strategy="fsdp"), place, is_kept=True)
        found["fsdp, reshard: blocks"]["kept_losses"] = kept["losses"]
    elif part in ("ddp", "fsdp"):  # a process of its own, since one that ran out of memory is no longer whole
        weights_bytes = json.loads(Path(folder, "memory.json").read_text())["ddp"]["parameters"] * 4
        limit_gib = LIMIT_SHARE * weights_bytes / 2**30
        found = {"limit_gib": limit_gib, "fits": fits({"strategy": part}, place, limit_gib)}
    else:
        strategy = part.removeprefix("selftest-")
        spec = make_point(8, SMALL_SIZES, strategy=strategy, measure="communication", windows=NUM_ROUNDS)
        found = {"findings": msgspec.to_builtins(measure_strategy(spec, place))}
    if rank == 0:
        Path(folder, f"{part}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure() -> Found:
    """Return what every part found."""
    parts = ("memory", *(("ddp", "fsdp") if torch.cuda.is_available() else ()), "selftest-fsdp", "selftest-zero1")
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            spawn(run_rank, (folder, part), 2)
            print(f"{part}: measured", file=sys.stderr)
        found = {part: json.loads(Path(folder, f"{part}.json").read_text()) for part in parts}
    for part in ("selftest-fsdp", "selftest-zero1"):
        findings = msgspec.convert(found[part]["findings"], selftest_checks.Findings)
        found[part]["answers"] = [answer._asdict() for answer in judge_checks({"strategy": findings})]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "torch": torch.__version__, "sizes": SIZES, **found}


def print_tables(found: Found) -> None:
    """Print memory by formula, the largest difference of a loss, and the checks of the self-test."""
    rows, ddp = [], found["memory"]["ddp"]
    for name, one in found["memory"].items():
        state, formula = one["state_bytes"] / 2**30, one["state_formula_bytes"] / 2**30
        off = max(abs(ours / theirs - 1) for ours, theirs in zip(one["losses"], ddp["losses"], strict=True))
        is_equal = "yes" if one["counted_bytes"] == one["formula_bytes"] else "no"
        saved = (ddp["state_bytes"] - one["state_bytes"]) / 2**30
        saved_formula = (ddp["state_formula_bytes"] - one["state_formula_bytes"]) / 2**30
        memory = [f"{value:.2f}" for value in (state, formula, saved, saved_formula)]
        rows.append([name, *memory, f"{one['sample_bytes'] / 2**20:.1f}", f"{off:.1e}", is_equal])
    headings = ["strategy", "state [GiB]", "formula [GiB]", "saved [GiB]", "formula [GiB]", "a sample [MiB]"]
    headings += ["largest difference of a loss", "bytes as by formula"]
    print(tabulate.tabulate(rows, headings, tablefmt="pipe", disable_numparse=True))
    for part in ("selftest-fsdp", "selftest-zero1"):
        print()
        for answer in found[part]["answers"]:
            print(f"- {part}: {answer['verdict']}: {answer['check']}: {answer['sentence']}")
    if "fsdp" in found:
        words = {True: "fits", False: "runs out of memory"}
        print(f"\nWithin {found['fsdp']['limit_gib']:.2f} GiB: ddp {words[found['ddp']['fits']]}, ", end="")
        print(f"fsdp {words[found['fsdp']['fits']]}.")


def main() -> None:
    """Measure or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--print", type=Path, dest="printed")
    arguments = parser.parse_args()
    found = json.loads(arguments.printed.read_text()) if arguments.printed else measure()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print_tables(found)


if __name__ == "__main__":
    main()
