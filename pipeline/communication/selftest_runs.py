"""What the ranks of a self-test measure: the instrument against things whose size is known."""

import math
import random
import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipeline.analysis.exposure import chosen, straggler_wait_ns, total_comm_ns
from pipeline.communication import selftest_checks
from pipeline.communication.allreduce_sweep import capturing, time_all_reduce
from pipeline.communication.interleaved_timing import TARGET_WINDOW_S, Windows, interleave, warm_up
from pipeline.communication.profiling import bucket_bytes, profile_ranks
from pipeline.communication.selftest_checks import Findings
from pipeline.communication.step_variants import Step, Variant, Workbench, build_variant, build_workbench
from pipeline.data.batches import ResidentBatches
from pipeline.experiment.spec import Spec
from pipeline.training import process_group
from pipeline.training.loop import run_epoch, set_precision
from pipeline.training.models import build_model
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep
from pipeline.training.step_timer import SilentClock, StepClock

EXTRA_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
LARGE_BUCKET_MB = 100.0
SLEEP_S = {"cuda": 0.005, "cpu": 0.1}
SMALL_BATCH = 32
BARE_CALLS = {"cuda": 20, "cpu": 3}
BARE_WINDOWS = 7


def measure_exposure(spec: Spec, rank: Rank) -> Findings:
    """The step with and without its collectives, and one all-reduce of all gradients; called by all ranks."""
    set_precision(spec)
    bench = build_workbench(spec, rank, next(ResidentBatches(spec, rank.shard).epoch(1)))
    variants = [build_variant(bench, name) for name in ("ddp", "no_op_hook")]
    return time_variants(variants, bench)


def measure_known_answers(spec: Spec, rank: Rank) -> Findings:
    """Everything that one process group can find out; called by all ranks."""
    set_precision(spec)
    bench = build_workbench(spec, rank, next(ResidentBatches(spec, rank.shard).epoch(1)))
    extra = torch.zeros(EXTRA_BYTES[rank.device.type] // 4, device=rank.device)
    one_bucket = msgspec.structs.replace(spec, bucket_cap_mb=LARGE_BUCKET_MB)
    variants = [build_variant(bench, name) for name in ("ddp", "ddp_again", "no_op_hook", "no_op_hook_again")]
    variants += [
        build_variant(bench, "ddp", spec=one_bucket)._replace(name="one_bucket"),
        build_variant(bench, "ddp", after_backward=partial(dist.all_reduce, extra))._replace(name="extra"),
    ]
    found = time_variants(variants, bench)
    clocked = {"large": spec.batch_size_per_gpu, "small": min(SMALL_BATCH, spec.batch_size_per_gpu)}
    marks = {
        name: time_clock(name, msgspec.structs.replace(spec, batch_size_per_gpu=b), rank) for name, b in clocked.items()
    }
    bare_ns = time_bare_loop(found.gradient_bytes, rank)
    extra_ns = list(time_all_reduce(EXTRA_BYTES[rank.device.type], False, rank).times_ns)
    shortest_ns, wait_ns = profile_asleep(variants[0], rank)  # last: the profiler may stay attached
    return msgspec.structs.replace(
        found,
        bare_ns=bare_ns,
        extra_bytes=EXTRA_BYTES[rank.device.type],
        extra_ns=extra_ns,
        sleep_ns=round(SLEEP_S[rank.device.type] * 1e9),
        shortest_ns=shortest_ns,
        wait_ns=wait_ns,
        clock_windows={name: windows for name, (windows, _, _) in marks.items()},
        silent_windows={name: windows for name, (_, windows, _) in marks.items()},
        parts_share=marks["large"][2],
        clock_batches=clocked,
    )


def time_variants(variants: list[Variant], bench: Workbench) -> Findings:
    """The variants' windows, interleaved until they are settled, and the isolated all-reduce of all gradients."""
    spec, rank = bench.spec, bench.rank
    steps = {variant.name: variant.step for variant in variants}
    steps_per_window = warm_up(steps, rank)
    parameters = variants[0].model.parameters()
    gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    found = Findings(
        device=rank.device.type,
        gpu=torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "",
        num_ranks=rank.world_size,
        batch_size_per_gpu=spec.batch_size_per_gpu,
        gradient_bytes=gradient_bytes,
        steps_per_window=steps_per_window,
        windows={},
        swept_ns=[],
    )

    def are_settled(windows: Windows) -> bool:
        return selftest_checks.are_settled(msgspec.structs.replace(found, windows=windows))

    windows = interleave(steps, spec.windows, steps_per_window, rank, are_settled)
    with capturing(rank) as record:
        swept_ns = list(time_all_reduce(gradient_bytes, False, rank, record).times_ns)
    return msgspec.structs.replace(found, windows=windows, swept_ns=swept_ns)


def time_bare_loop(num_bytes: int, rank: Rank) -> list[int]:
    """All-reduces as a person would time them: a loop and a clock, the slowest rank's; ns a call, by window."""
    buffer = torch.zeros(num_bytes // 4, device=rank.device)
    num_calls = BARE_CALLS[rank.device.type]
    times_ns = []
    for _ in range(BARE_WINDOWS + 1):
        process_group.barrier(rank)
        process_group.synchronize(rank)
        started_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            dist.all_reduce(buffer)
        process_group.synchronize(rank)
        times_ns.append((time.perf_counter_ns() - started_ns) // num_calls)
    return [max(ranks) for ranks in zip(*process_group.gather(times_ns), strict=True)][1:]  # the first warms up


def profile_asleep(ddp: Variant, rank: Rank) -> tuple[list[float], list[float]]:
    """Transfer and wait of a profiled step's gradients, undisturbed and with the last rank asleep, in ns."""
    assert isinstance(ddp.model, DistributedDataParallel)
    buckets = bucket_bytes(ddp.model)
    shortest_ns, wait_ns = [], []
    for step in (ddp.step, drowsy(ddp.step, rank)):
        profile, problems = profile_ranks(step, rank, buckets)
        if profile is None:
            raise RuntimeError("; ".join(problems))
        gradients = chosen(profile, ["gradients"])
        shortest_ns.append(total_comm_ns(gradients))
        wait_ns.append(straggler_wait_ns(gradients))
    return shortest_ns, wait_ns


def drowsy(step: Step, rank: Rank) -> Step:
    """The step, before which the last rank sleeps with its device idle."""

    def sleep_and_step() -> None:
        if rank.rank == rank.world_size - 1:
            process_group.synchronize(rank)
            time.sleep(SLEEP_S[rank.device.type])
        step()

    return sleep_and_step


def time_clock(name: str, spec: Spec, rank: Rank) -> tuple[list[int], list[int], list[float]]:
    """Wall time of the training loop with and without its marks, by window, and the parts' share of it.

    Pairs of windows, until what the marks cost is known well enough to judge it.
    """
    num_windows = spec.windows
    spec = msgspec.structs.replace(spec, measure="epochs", windows=1, epochs=1, max_steps=10)
    step = EagerStep(build_model(spec.model or "resnet18", num_classes=10).to(rank.device), spec, rank)

    def run(spec: Spec, clock: type[StepClock]) -> tuple[int, float]:
        series = run_epoch(1, spec, rank, ResidentBatches(spec, rank.shard), step, clock)
        wall_ns = series.clock.epoch_time_ns or 1
        return wall_ns, float(series.parts_ns.sum()) / wall_ns

    run(spec, StepClock)
    wall_ns = max(process_group.gather(run(spec, SilentClock)[0]))
    num_steps = max(10, min(200, math.ceil(TARGET_WINDOW_S / (wall_ns / 10 / 1e9))))
    spec = msgspec.structs.replace(spec, max_steps=num_steps)
    times_ns: dict[type[StepClock], list[int]] = {StepClock: [], SilentClock: []}
    shares: list[float] = []
    order = list(times_ns)
    shuffle = random.Random(0).shuffle
    for _ in range(num_windows):
        shuffle(order)
        pair = {clock: run(spec, clock) for clock in order}
        shares.append(pair[StepClock][1])
        for clock in order:
            times_ns[clock].append(max(process_group.gather(pair[clock][0])))
        if selftest_checks.is_clock_settled(name, times_ns[StepClock], times_ns[SilentClock]):
            break
    return times_ns[StepClock], times_ns[SilentClock], shares


TASKS: dict[str, Callable[[Spec, Rank], Findings]] = {
    "known_answers": measure_known_answers,
    "exposure": measure_exposure,
}
