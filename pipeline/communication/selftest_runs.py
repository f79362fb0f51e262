"""Measurements by the ranks of a self-test: the instrument against quantities whose size is known."""

import math
import random
import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipeline.analysis.exposed_communication import collectives_of_kinds, straggler_wait_ns, total_comm_ns
from pipeline.communication import selftest_checks
from pipeline.communication.allreduce_sweep import capture_stream, time_all_reduce
from pipeline.communication.interleaved_timing import TARGET_WINDOW_S, time_interleaved, warm_up_and_size_windows
from pipeline.communication.profiling import ddp_bucket_bytes, profile_ranks
from pipeline.communication.selftest_checks import Findings
from pipeline.communication.step_variants import (
    StepContext,
    StepVariant,
    build_step_context,
    build_variant,
    build_variants,
)
from pipeline.data.batches import SyntheticBatches
from pipeline.experiment.measurement import WindowTimesNs
from pipeline.experiment.spec import Spec
from pipeline.training import process_group
from pipeline.training.loop import run_epoch, set_precision
from pipeline.training.models import build_model
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, StepFunction
from pipeline.training.step_timer import StepTimer, UnmarkedTimer

INJECTED_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
LARGE_BUCKET_MB = 100.0
SLEEP_S = {"cuda": 0.005, "cpu": 0.1}
SMALL_BATCH_SIZE_PER_GPU = 32
BARE_CALLS = {"cuda": 20, "cpu": 3}
BARE_WINDOWS = 7


def measure_exposure(spec: Spec, rank: Rank) -> Findings:
    """Time the step with and without collectives, and one all-reduce of all gradients. Called by all ranks."""
    set_precision(spec)
    context = build_step_context(spec, rank, next(SyntheticBatches(spec, rank.shard).epoch(1)))
    variants = build_variants(context, ("ddp", "no_op_hook"))
    return time_selftest_variants(variants, context)


def measure_known_answers(spec: Spec, rank: Rank) -> Findings:
    """Measure everything that one process group can measure. Called by all ranks."""
    set_precision(spec)
    context = build_step_context(spec, rank, next(SyntheticBatches(spec, rank.shard).epoch(1)))
    extra = torch.zeros(INJECTED_BYTES[rank.device.type] // 4, device=rank.device)
    one_bucket = msgspec.structs.replace(spec, bucket_cap_mb=LARGE_BUCKET_MB)
    variants = build_variants(context, ("ddp", "ddp_again", "no_op_hook", "no_op_hook_again", "no_collectives"))
    variants += [
        build_variant(context, "ddp", spec=one_bucket)._replace(name="one_bucket"),
        build_variant(context, "ddp", after_backward=partial(dist.all_reduce, extra))._replace(name="extra"),
    ]
    findings = time_selftest_variants(variants, context)
    batch_sizes = {"large": spec.batch_size_per_gpu, "small": min(SMALL_BATCH_SIZE_PER_GPU, spec.batch_size_per_gpu)}
    clock_costs = {
        name: measure_clock_cost(name, msgspec.structs.replace(spec, batch_size_per_gpu=batch_size), rank)
        for name, batch_size in batch_sizes.items()
    }
    bare_ns = time_bare_loop(findings.gradient_bytes, rank)
    extra_ns = list(time_all_reduce(INJECTED_BYTES[rank.device.type], False, rank).times_ns)
    shortest_ns, wait_ns = profile_sleeping_rank(variants[0], rank)  # last: the profiler may stay attached
    return msgspec.structs.replace(
        findings,
        bare_ns=bare_ns,
        extra_bytes=INJECTED_BYTES[rank.device.type],
        extra_ns=extra_ns,
        sleep_ns=round(SLEEP_S[rank.device.type] * 1e9),
        shortest_ns=shortest_ns,
        wait_ns=wait_ns,
        clock_windows={name: windows for name, (windows, _, _) in clock_costs.items()},
        silent_windows={name: windows for name, (_, windows, _) in clock_costs.items()},
        parts_share=clock_costs["large"][2],
        clock_batches=batch_sizes,
    )


def time_selftest_variants(variants: list[StepVariant], context: StepContext) -> Findings:
    """Time interleaved windows of the variants until precise enough, and an isolated all-reduce of all gradients."""
    spec, rank = context.spec, context.rank
    steps = {variant.name: variant.step for variant in variants}
    steps_per_window = warm_up_and_size_windows(steps, rank)
    parameters = variants[0].model.parameters()
    gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    findings = Findings(
        device=rank.device.type,
        gpu=torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "",
        num_ranks=rank.world_size,
        batch_size_per_gpu=spec.batch_size_per_gpu,
        gradient_bytes=gradient_bytes,
        steps_per_window=steps_per_window,
        windows={},
        swept_ns=[],
    )

    def is_precise_enough(windows: WindowTimesNs) -> bool:
        return selftest_checks.is_precise_enough(msgspec.structs.replace(findings, windows=windows))

    windows = time_interleaved(steps, spec.windows, steps_per_window, rank, is_precise_enough)
    with capture_stream(rank) as capture:
        swept_ns = list(time_all_reduce(gradient_bytes, False, rank, capture).times_ns)
    return msgspec.structs.replace(findings, windows=windows, swept_ns=swept_ns)


def time_bare_loop(num_bytes: int, rank: Rank) -> list[int]:
    """Time all-reduces with a plain loop and a clock. Return the slowest rank's ns per call, by window."""
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
    slowest_ns = [max(ranks) for ranks in zip(*process_group.all_gather(times_ns), strict=True)]
    return slowest_ns[1:]  # the first window warms up


def profile_sleeping_rank(ddp: StepVariant, rank: Rank) -> tuple[list[float], list[float]]:
    """Profile the step undisturbed and with the last rank asleep. Return transfer and wait of gradients, in ns."""
    assert isinstance(ddp.model, DistributedDataParallel)
    buckets = ddp_bucket_bytes(ddp.model)
    shortest_ns, wait_ns = [], []
    for step in (ddp.step, sleeping_rank(ddp.step, rank)):
        profile, problems = profile_ranks(step, rank, buckets)
        if profile is None:
            raise RuntimeError("; ".join(problems))
        gradients = collectives_of_kinds(profile, ["gradients"])
        shortest_ns.append(total_comm_ns(gradients))
        wait_ns.append(straggler_wait_ns(gradients))
    return shortest_ns, wait_ns


def sleeping_rank(step: StepFunction, rank: Rank) -> StepFunction:
    """Return a step before which the last rank sleeps with its device idle."""

    def sleep_and_step() -> None:
        if rank.rank == rank.world_size - 1:
            process_group.synchronize(rank)
            time.sleep(SLEEP_S[rank.device.type])
        step()

    return sleep_and_step


def measure_clock_cost(name: str, spec: Spec, rank: Rank) -> tuple[list[int], list[int], list[float]]:
    """Time the training loop with and without marks, in pairs of windows, until their cost is precise enough.

    Return the wall times with and without marks in ns, and the sum of the parts over the wall time, by window.
    """
    num_windows = spec.windows
    spec = msgspec.structs.replace(spec, measure="epochs", windows=1, epochs=1, max_steps=10)
    step = EagerStep(build_model(spec.model or "resnet18", num_classes=10).to(rank.device), spec, rank)

    def run(spec: Spec, clock: type[StepTimer]) -> tuple[int, float]:
        series = run_epoch(1, spec, rank, SyntheticBatches(spec, rank.shard), step, clock)
        wall_ns = series.clock.epoch_time_ns or 1
        return wall_ns, float(series.parts_ns.sum()) / wall_ns

    run(spec, StepTimer)
    wall_ns = max(process_group.all_gather(run(spec, UnmarkedTimer)[0]))
    num_steps = max(10, min(200, math.ceil(TARGET_WINDOW_S / (wall_ns / 10 / 1e9))))
    spec = msgspec.structs.replace(spec, max_steps=num_steps)
    times_ns: dict[type[StepTimer], list[int]] = {StepTimer: [], UnmarkedTimer: []}
    shares: list[float] = []
    order = list(times_ns)
    shuffle = random.Random(0).shuffle
    for _ in range(num_windows):
        shuffle(order)
        pair = {clock: run(spec, clock) for clock in order}
        shares.append(pair[StepTimer][1])
        for clock in order:
            times_ns[clock].append(max(process_group.all_gather(pair[clock][0])))
        if selftest_checks.is_clock_cost_precise_enough(name, times_ns[StepTimer], times_ns[UnmarkedTimer]):
            break
    return times_ns[StepTimer], times_ns[UnmarkedTimer], shares


SELFTEST_TASKS: dict[str, Callable[[Spec, Rank], Findings]] = {
    "known_answers": measure_known_answers,
    "exposure": measure_exposure,
}
