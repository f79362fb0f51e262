"""Measurements by the ranks of a self-test: the instrument against quantities whose size is known."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from pipeline.communication import profiling, selftest_checks, timing
from pipeline.communication.measure_point import total_bytes
from pipeline.communication.process_group import install, measure_sleep
from pipeline.communication.selftest_checks import ALL_REDUCE_WINDOWS, Findings, count_windows
from pipeline.communication.step_variants import (
    CollectiveCall,
    StepContext,
    StepVariant,
    build_step_context,
    build_variant,
    build_variants,
    count_calls,
    list_calls,
)
from pipeline.communication.timing import NUM_WINDOWS, capture_stream, time_collective
from pipeline.figures.exposed_communication import CALLED, collectives_of_kinds
from pipeline.figures.stopping_rule import MIN_STEPS, WINDOW_S
from pipeline.plan.spec import Spec
from pipeline.records.record import Profile
from pipeline.training import process_group
from pipeline.training.loop import build_batches, build_model, run_epoch
from pipeline.training.process_group import Rank
from pipeline.training.step import STEP_PARTS, EagerStep, StepFunction

INJECTED_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
LARGE_BUCKET_MB = 100.0
DELAY_S = {"cuda": 0.002, "cpu": 0.02}  # before each collective of a strategy
NUM_DELAYED_STEPS = 12
DELAYED_SHARE = 10  # of a step: delays that are together so long cannot hide behind it
SLEEP_S = {"cuda": 0.02, "cpu": 0.1}
HEAD_START_S = {"cuda": 0.05, "cpu": 0.0}  # pause of every device, so that no host is late while it is profiled
CYCLES_PER_S = 2e9  # of a GPU's clock, about; measured before use
CALIBRATION_S = 0.01
SMALL_BATCH_SIZE_PER_GPU = 32
BARE_CALLS = {"cuda": 20, "cpu": 3}
MIN_CLOCK_STEPS, MAX_CLOCK_STEPS = 10, 200  # of a window of the large batch

LengthS = Callable[[], float]  # gives the length of a pause in s, once it has ended


def measure_exposure(spec: Spec, rank: Rank) -> Findings:
    """Time the step with and without collectives, and one all-reduce of all gradients. Called by all ranks."""
    context = build_step_context(spec, rank)
    variants = build_variants(context, selftest_checks.EXPOSED_VARIANTS)
    findings = time_selftest_variants(variants, context, selftest_checks.SOCKET_ROUND_SHARES)
    return add_sweep(findings, rank, NUM_WINDOWS)


def measure_strategy(spec: Spec, rank: Rank) -> Findings:
    """Time FSDP or ZeRO-1 with its collectives, without, and delayed. Called by all ranks."""
    context = build_step_context(spec, rank)
    variants = build_variants(context, (spec.strategy, "no_op", "no_op_again"))
    findings = time_selftest_variants(variants, context, selftest_checks.STRATEGY_ROUND_SHARES)
    return add_delayed_steps(msgspec.structs.replace(findings, strategy=spec.strategy), variants[spec.strategy], rank)


def add_delayed_steps(findings: Findings, variant: StepVariant, rank: Rank) -> Findings:
    """Time pairs of steps, one of them with a known delay at each collective. Return the findings with both.

    Delays follow each other as on one link, and together they last so much longer than a step that hardly any of it can
    hide them.
    """
    controller, num_calls = install(), count_calls(variant).total()
    longest_ns = max(process_group.all_gather(timing.time_steps(variant.step, MIN_STEPS, rank), int)) / MIN_STEPS
    delay_s = max(DELAY_S[rank.device.type], DELAYED_SHARE * longest_ns / 1e9 / num_calls)
    found = []
    for _ in range(NUM_DELAYED_STEPS):
        usual_ns = timing.time_steps(variant.step, 1, rank, 0)
        with controller.in_mode("delay", delay_s):
            controller.delayed_s()
            delayed_ns = timing.time_steps(variant.step, 1, rank, 0)
            length_ns = round(controller.delayed_s() * 1e9)
        found.append([usual_ns, delayed_ns, length_ns])
    by_rank = process_group.all_gather(found, list[list[int]])
    slowest = [[max(values) for values in zip(*step, strict=True)] for step in zip(*by_rank, strict=True)]
    added_ns, lengths_ns = [delayed - usual for usual, delayed, _ in slowest], [length for *_, length in slowest]
    return msgspec.structs.replace(findings, delay_added_ns=added_ns, delay_ns=round(statistics.median(lengths_ns)))


def measure_known_answers(spec: Spec, rank: Rank) -> Findings:
    """Measure everything that one process group can measure. Called by all ranks."""
    context = build_step_context(spec, rank)
    extra = torch.zeros(INJECTED_BYTES[rank.device.type] // 4, device=rank.device)
    one_bucket = msgspec.structs.replace(spec, bucket_cap_mb=LARGE_BUCKET_MB)
    variants = build_variants(context, ("ddp", "no_op_hook", "no_op_hook_again", "no_collectives"))
    variants["one_bucket"] = build_variant(context._replace(spec=one_bucket), "ddp")
    variants["extra"] = build_variant(context, "ddp", after_backward=partial(dist.all_reduce, extra))
    findings = time_selftest_variants(variants, context, selftest_checks.ROUND_SHARES)
    findings = add_sweep(findings, rank, ALL_REDUCE_WINDOWS)
    findings = add_clock_cost(findings, "large", spec, rank)
    if spec.batch_size_per_gpu > SMALL_BATCH_SIZE_PER_GPU:
        small = msgspec.structs.replace(spec, batch_size_per_gpu=SMALL_BATCH_SIZE_PER_GPU)
        findings = add_clock_cost(findings, "small", small, rank)
    findings = msgspec.structs.replace(
        findings,
        bare_ns=time_bare_loop(findings.gradient_bytes, rank),
        extra_bytes=extra.nbytes,
        extra_ns=list(time_collective(extra.nbytes, rank, num_windows=ALL_REDUCE_WINDOWS)),
    )
    calls = [call for call in list_calls(count_calls(variants["no_op_hook"]), Counter()) if call.kind in CALLED]
    return add_sleeping_rank(findings, variants["ddp"], calls, rank)  # last: the profiler may stay attached


def time_selftest_variants(
    variants: Mapping[str, StepVariant], context: StepContext, round_shares: Mapping[str, float]
) -> Findings:
    spec, rank = context.spec, context.rank
    steps = {name: variant.step for name, variant in variants.items()}
    steps_per_window = timing.warm_up_and_size_windows(steps, rank)
    gradient_bytes = total_bytes(variants[spec.strategy].model.parameters())
    timers = {name: partial(timing.time_steps, step, steps_per_window, rank) for name, step in steps.items()}
    num_windows = {name: count for name, count in count_windows(round_shares, spec.windows).items() if name in timers}
    *_, windows = timing.time_rounds(timers, num_windows)
    return Findings(
        device=rank.device.type,
        gpu=torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "",
        num_ranks=rank.world_size,
        batch_size_per_gpu=spec.batch_size_per_gpu,
        gradient_bytes=gradient_bytes,
        steps_per_window=steps_per_window,
        windows=windows,
        swept_ns=[],
    )


def add_sweep(findings: Findings, rank: Rank, num_windows: int) -> Findings:
    """Time one all-reduce of all gradients, as a sweep does."""
    with capture_stream(rank) as capture:
        swept_ns = list(time_collective(findings.gradient_bytes, rank, capture, num_windows))
    return msgspec.structs.replace(findings, swept_ns=swept_ns)


def time_bare_loop(num_bytes: int, rank: Rank) -> list[int]:
    """Time all-reduces with a plain loop and a clock. Return the slowest rank's ns per call, by window."""
    buffer = torch.zeros(num_bytes // 4, device=rank.device)
    num_calls = BARE_CALLS[rank.device.type]
    times_ns = []
    for _ in range(selftest_checks.BARE_WARM_UP_WINDOWS + ALL_REDUCE_WINDOWS):
        process_group.barrier(rank)
        process_group.synchronize(rank)
        started_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            dist.all_reduce(buffer)
        process_group.synchronize(rank)
        times_ns.append((time.perf_counter_ns() - started_ns) // num_calls)
    slowest_ns = [max(ranks) for ranks in zip(*process_group.all_gather(times_ns, list[int]), strict=True)]
    return slowest_ns[selftest_checks.BARE_WARM_UP_WINDOWS :]


def add_clock_cost(findings: Findings, batch: str, spec: Spec, rank: Rank) -> Findings:
    """Time the training loop in pairs of windows, with marks and without. Return the findings with both.

    A step of the large batch is bound by the device: windows of many steps, until the cost is precise enough. A step of
    the small batch is bound by the host, whose speed changes by 10 % within a second: windows of one step each.
    """
    epoch = msgspec.structs.replace(spec, measure="epochs", windows=1, epochs=1)
    workload, model = build_model(epoch, rank)
    step = EagerStep(model, workload, epoch, rank)
    batches = build_batches(workload, epoch, rank)
    parts_share: list[float] = []

    def run(num_steps: int, parts: tuple[str, ...]) -> int:
        step.parts = parts
        series = run_epoch(1, msgspec.structs.replace(epoch, max_steps=num_steps), rank, workload, batches, step)
        wall_ns = series.times.epoch_time_ns or 1
        if parts:
            parts_share.append(sum(map(sum, series.parts_ns)) / wall_ns)
        return wall_ns

    run(MIN_CLOCK_STEPS, STEP_PARTS)
    wall_ns = max(process_group.all_gather(run(MIN_CLOCK_STEPS, ()), int))
    num_steps = math.ceil(WINDOW_S / (wall_ns / MIN_CLOCK_STEPS / 1e9))
    num_steps = 1 if batch == "small" else max(MIN_CLOCK_STEPS, min(MAX_CLOCK_STEPS, num_steps))
    parts_share.clear()
    timers = {"marked": partial(run, num_steps, STEP_PARTS), "unmarked": partial(run, num_steps, ())}
    num_pairs = count_windows(selftest_checks.CLOCK_PAIR_SHARES, spec.windows)[batch]
    for windows in timing.time_rounds(timers, dict.fromkeys(timers, num_pairs)):
        marked_ns, unmarked_ns = (list(map(max, windows[name])) for name in timers)
        if batch == "large" and selftest_checks.is_clock_cost_precise_enough(batch, marked_ns, unmarked_ns):
            break
    return msgspec.structs.replace(
        findings,
        clock_windows={**findings.clock_windows, batch: marked_ns},
        unmarked_windows={**findings.unmarked_windows, batch: unmarked_ns},
        parts_share=findings.parts_share or parts_share,  # of the large batch, which comes first
        clock_batches={**findings.clock_batches, batch: spec.batch_size_per_gpu},
    )


def add_sleeping_rank(findings: Findings, ddp: StepVariant, calls: Sequence[CollectiveCall], rank: Rank) -> Findings:
    """Profile the step undisturbed and with the last rank asleep before it. Return the findings with both."""
    pause = calibrated_pause(rank)
    shortest_ns: list[list[float]] = []
    wait_ns: list[list[float]] = []
    for sleep_s in (0.0, SLEEP_S[rank.device.type]):
        seconds = HEAD_START_S[rank.device.type] + (sleep_s if rank.rank == rank.world_size - 1 else 0.0)
        lengths: list[LengthS] = []
        step = after_pause(ddp.step, partial(pause, seconds), lengths)
        profiles: list[Profile] = []
        for _ in range(selftest_checks.SLEEP_PROFILES):
            profile, problems = profiling.profile_ranks(step, rank, calls)
            if profile is None or not collectives_of_kinds(profile, ["gradients"]):
                problem = "; ".join(problems) or "the profile shows no all-reduce of gradients"
                return msgspec.structs.replace(findings, profile_problem=problem)
            profiles.append(profile)
        pauses_ns = process_group.all_gather(median_ns(lengths), float)
        shortest_ns.append([time_ns for profile in profiles for time_ns in shortest_by_step_ns(profile)])
        wait_ns.append([time_ns for profile in profiles for time_ns in wait_by_step_ns(profile)])
    return msgspec.structs.replace(
        findings,
        sleep_ns=round(pauses_ns[-1] - statistics.fmean(pauses_ns[:-1])),
        shortest_by_step_ns=shortest_ns,
        wait_by_step_ns=wait_ns,
    )


def shortest_by_step_ns(profile: Profile) -> list[float]:
    """Return the time of the gradients' all-reduces on the fastest rank, by step."""
    by_step = zip(*(part.durations_ns for part in collectives_of_kinds(profile, ["gradients"])), strict=True)
    return [float(sum(map(min, step))) for step in by_step]


def wait_by_step_ns(profile: Profile) -> list[float]:
    """Return the longest wait of a rank in one collective, mean over ranks, by step.

    Every other rank waits for a late one for the whole delay, in a broadcast of buffers or in the first all-reduce of
    gradients. A sum over collectives would count the delay again in each later all-reduce: the backward pass does not
    wait for them, so that the late rank fills each of its buckets later than the others do.
    """
    by_step = zip(*(part.durations_ns for part in profile.collectives), strict=True)
    waits_ns = ([[duration - min(ranks) for duration in ranks] for ranks in step] for step in by_step)
    return [statistics.fmean(map(max, zip(*by_collective, strict=True))) for by_collective in waits_ns]


def calibrated_pause(rank: Rank) -> Callable[[float], LengthS]:
    """Return the function that pauses this rank for so many seconds: its host on the CPU, else its device.

    On GPUs the host goes on, as it does while a device is late; one that slept would lose its lead over the device. The
    length of each pause is measured, since a kernel counts cycles of a clock that changes.
    """
    if rank.device.type == "cpu":
        return pause_host
    lengths = [measure_sleep(round(CYCLES_PER_S * CALIBRATION_S)) for _ in range(3)]
    cycles_per_s = CYCLES_PER_S * CALIBRATION_S * 1e9 / median_ns(lengths)
    return lambda seconds: measure_sleep(round(seconds * cycles_per_s))


def pause_host(seconds: float) -> LengthS:
    started_ns = time.perf_counter_ns()
    time.sleep(seconds)
    time_s = (time.perf_counter_ns() - started_ns) / 1e9
    return lambda: time_s


def median_ns(lengths: Sequence[LengthS]) -> float:
    return 1e9 * statistics.median(length() for length in lengths)


def after_pause(step: StepFunction, pause: Callable[[], LengthS], lengths: list[LengthS]) -> StepFunction:
    def pause_and_step() -> None:
        lengths.append(pause())
        step()

    return pause_and_step


SELFTEST_TASKS: dict[str, Callable[[Spec, Rank], Findings]] = {
    "known_answers": measure_known_answers,
    "exposure": measure_exposure,
    "strategy": measure_strategy,
}
