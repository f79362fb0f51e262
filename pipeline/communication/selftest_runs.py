"""Measurements by the ranks of a self-test: the instrument against quantities whose size is known."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipeline.analysis.exposed_communication import collectives_of_kinds
from pipeline.communication.allreduce_sweep import NUM_WINDOWS, capture_stream, time_all_reduce
from pipeline.communication.dataparallel_split import total_bytes
from pipeline.communication.interleaved_timing import (
    TARGET_WINDOW_S,
    time_rounds,
    time_steps,
    warm_up_and_size_windows,
)
from pipeline.communication.profiling import ddp_bucket_bytes, profile_ranks
from pipeline.communication.selftest_findings import (
    ALL_REDUCE_WINDOWS,
    BARE_WARM_UP_WINDOWS,
    CLOCK_PAIR_SHARES,
    EXPOSED_VARIANTS,
    ROUND_SHARES,
    SLEEP_PROFILES,
    SOCKET_ROUND_SHARES,
    Findings,
    count_windows,
    is_clock_cost_precise_enough,
)
from pipeline.communication.step_variants import (
    StepContext,
    StepVariant,
    build_step_context,
    build_variant,
    build_variants,
)
from pipeline.data.batches import SyntheticBatches
from pipeline.experiment.measurement import Profile, WindowTimesNs
from pipeline.experiment.spec import Spec
from pipeline.training import process_group
from pipeline.training.loop import run_epoch, set_precision
from pipeline.training.models import build_model
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, StepFunction
from pipeline.training.step_timer import StepTimer, UnmarkedTimer

INJECTED_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
LARGE_BUCKET_MB = 100.0
SLEEP_S = {"cuda": 0.02, "cpu": 0.1}
HEAD_START_S = {"cuda": 0.05, "cpu": 0.0}  # pause of every device, so that no host is late while it is profiled
CYCLES_PER_S = 2e9  # of a GPU's clock, about; measured before use
CALIBRATION_S = 0.01
SMALL_BATCH_SIZE_PER_GPU = 32
BARE_CALLS = {"cuda": 20, "cpu": 3}
MIN_CLOCK_STEPS, MAX_CLOCK_STEPS = 10, 200  # of a window of the large batch


def measure_exposure(spec: Spec, rank: Rank) -> Findings:
    """Time the step with and without collectives, and one all-reduce of all gradients. Called by all ranks."""
    set_precision(spec)
    context = build_step_context(spec, rank)
    variants = build_variants(context, EXPOSED_VARIANTS)
    return time_selftest_variants(variants, context, SOCKET_ROUND_SHARES, NUM_WINDOWS)


def measure_known_answers(spec: Spec, rank: Rank) -> Findings:
    """Measure everything that one process group can measure. Called by all ranks."""
    set_precision(spec)
    context = build_step_context(spec, rank)
    extra = torch.zeros(INJECTED_BYTES[rank.device.type] // 4, device=rank.device)
    one_bucket = msgspec.structs.replace(spec, bucket_cap_mb=LARGE_BUCKET_MB)
    variants = build_variants(context, ("ddp", "no_op_hook", "no_op_hook_again", "no_collectives"))
    variants += [
        build_variant(context, "ddp", spec=one_bucket)._replace(name="one_bucket"),
        build_variant(context, "ddp", after_backward=partial(dist.all_reduce, extra))._replace(name="extra"),
    ]
    findings = time_selftest_variants(variants, context, ROUND_SHARES, ALL_REDUCE_WINDOWS)
    findings = add_clock_cost(findings, "large", spec, rank)
    if spec.batch_size_per_gpu > SMALL_BATCH_SIZE_PER_GPU:
        small = msgspec.structs.replace(spec, batch_size_per_gpu=SMALL_BATCH_SIZE_PER_GPU)
        findings = add_clock_cost(findings, "small", small, rank)
    findings = msgspec.structs.replace(
        findings,
        bare_ns=time_bare_loop(findings.gradient_bytes, rank),
        extra_bytes=extra.nbytes,
        extra_ns=list(time_all_reduce(extra.nbytes, rank, num_windows=ALL_REDUCE_WINDOWS)),
    )
    return add_sleeping_rank(findings, variants[0], rank)  # last: the profiler may stay attached


def time_selftest_variants(
    variants: list[StepVariant], context: StepContext, round_shares: Mapping[str, float], num_sweep_windows: int
) -> Findings:
    """Time interleaved windows of the variants, and an isolated all-reduce of all gradients."""
    spec, rank = context.spec, context.rank
    steps = {variant.name: variant.step for variant in variants}
    steps_per_window = warm_up_and_size_windows(steps, rank)
    gradient_bytes = total_bytes(variants[0].model.parameters())
    timers = {name: partial(time_steps, step, steps_per_window, rank) for name, step in steps.items()}
    windows = time_rounds(timers, count_windows(round_shares, spec.windows))
    with capture_stream(rank) as capture:
        swept_ns = list(time_all_reduce(gradient_bytes, rank, capture, num_sweep_windows))
    return Findings(
        device=rank.device.type,
        gpu=torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "",
        num_ranks=rank.world_size,
        batch_size_per_gpu=spec.batch_size_per_gpu,
        gradient_bytes=gradient_bytes,
        steps_per_window=steps_per_window,
        windows=windows,
        swept_ns=swept_ns,
    )


def time_bare_loop(num_bytes: int, rank: Rank) -> list[int]:
    """Time all-reduces with a plain loop and a clock. Return the slowest rank's ns per call, by window."""
    buffer = torch.zeros(num_bytes // 4, device=rank.device)
    num_calls = BARE_CALLS[rank.device.type]
    times_ns = []
    for _ in range(BARE_WARM_UP_WINDOWS + ALL_REDUCE_WINDOWS):
        process_group.barrier(rank)
        process_group.synchronize(rank)
        started_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            dist.all_reduce(buffer)
        process_group.synchronize(rank)
        times_ns.append((time.perf_counter_ns() - started_ns) // num_calls)
    slowest_ns = [max(ranks) for ranks in zip(*process_group.all_gather(times_ns, list[int]), strict=True)]
    return slowest_ns[BARE_WARM_UP_WINDOWS:]


def add_clock_cost(findings: Findings, batch: str, spec: Spec, rank: Rank) -> Findings:
    """Time the training loop in pairs of windows, with marks and without. Return the findings with both.

    A step of the large batch is bound by the device: windows of many steps, until the cost is precise enough. A step of
    the small batch is bound by the host, whose speed changes by 10 % within a second: windows of one step each.
    """
    epoch = msgspec.structs.replace(spec, measure="epochs", windows=1, epochs=1)
    step = EagerStep(build_model(spec.model or "resnet18", num_classes=10).to(rank.device), epoch, rank)
    batches = SyntheticBatches(epoch, rank.shard)
    parts_share: list[float] = []

    def run(num_steps: int, clock: type[StepTimer]) -> int:
        series = run_epoch(1, msgspec.structs.replace(epoch, max_steps=num_steps), rank, batches, step, clock)
        wall_ns = series.times.epoch_time_ns or 1
        if clock is StepTimer:
            parts_share.append(float(series.parts_ns.sum()) / wall_ns)
        return wall_ns

    def slowest_ranks(windows: WindowTimesNs) -> tuple[list[int], list[int]]:
        return list(map(max, windows["marked"])), list(map(max, windows["unmarked"]))

    run(MIN_CLOCK_STEPS, StepTimer)
    wall_ns = max(process_group.all_gather(run(MIN_CLOCK_STEPS, UnmarkedTimer), int))
    num_steps = math.ceil(TARGET_WINDOW_S / (wall_ns / MIN_CLOCK_STEPS / 1e9))
    num_steps = 1 if batch == "small" else max(MIN_CLOCK_STEPS, min(MAX_CLOCK_STEPS, num_steps))
    parts_share.clear()
    timers = {"marked": partial(run, num_steps, StepTimer), "unmarked": partial(run, num_steps, UnmarkedTimer)}
    windows = time_rounds(
        timers,
        dict.fromkeys(timers, count_windows(CLOCK_PAIR_SHARES, spec.windows)[batch]),
        lambda windows: batch == "large" and is_clock_cost_precise_enough(batch, *slowest_ranks(windows)),
    )
    marked_ns, unmarked_ns = slowest_ranks(windows)
    return msgspec.structs.replace(
        findings,
        clock_windows={**findings.clock_windows, batch: marked_ns},
        unmarked_windows={**findings.unmarked_windows, batch: unmarked_ns},
        parts_share=findings.parts_share or parts_share,  # of the large batch, which comes first
        clock_batches={**findings.clock_batches, batch: spec.batch_size_per_gpu},
    )


def add_sleeping_rank(findings: Findings, ddp: StepVariant, rank: Rank) -> Findings:
    """Profile the step undisturbed and with the last rank asleep before it. Return the findings with both."""
    assert isinstance(ddp.model, DistributedDataParallel)
    if rank.device.type == "cuda" and not hasattr(torch.cuda, "_sleep"):  # torch has no public function for it
        return msgspec.structs.replace(findings, profile_problem="this torch has no torch.cuda._sleep")
    buckets = ddp_bucket_bytes(ddp.model)
    pause = Pause(rank)
    shortest_ns: list[list[float]] = []
    wait_ns: list[list[float]] = []
    for sleep_s in (0.0, SLEEP_S[rank.device.type]):
        seconds = HEAD_START_S[rank.device.type] + (sleep_s if rank.rank == rank.world_size - 1 else 0.0)
        profiles: list[Profile] = []
        for _ in range(SLEEP_PROFILES):
            profile, problems = profile_ranks(after_pause(ddp.step, pause, seconds), rank, buckets)
            if profile is None or not collectives_of_kinds(profile, ["gradients"]):
                problem = "; ".join(problems) or "the profile shows no all-reduce of gradients"
                return msgspec.structs.replace(findings, profile_problem=problem)
            profiles.append(profile)
        pauses_ns = process_group.all_gather(pause.take_median_ns(), float)
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


class Pause:
    """Pauses of this rank: the host sleeps on the CPU, else a kernel keeps the stream of the device busy.

    On GPUs the host goes on, as it does while a device is late; one that slept would lose its lead over the device. The
    length of each pause is measured, since a kernel counts cycles of a clock that changes.
    """

    def __init__(self, rank: Rank) -> None:
        self._is_on_device = rank.device.type == "cuda"
        self._cycles_per_s = CYCLES_PER_S
        self._times_ns: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if self._is_on_device:
            for _ in range(3):
                self(CALIBRATION_S)
            process_group.synchronize(rank)
            self._cycles_per_s *= CALIBRATION_S * 1e9 / self.take_median_ns()

    def __call__(self, seconds: float) -> None:
        if self._is_on_device:
            started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started.record()
            torch.cuda._sleep(round(seconds * self._cycles_per_s))
            ended.record()
            self._events.append((started, ended))
        else:
            started_ns = time.perf_counter_ns()
            time.sleep(seconds)
            self._times_ns.append(time.perf_counter_ns() - started_ns)

    def take_median_ns(self) -> float:
        """Return the median length of the pauses since the last call. On a device they must have ended."""
        times_ns = self._times_ns + [started.elapsed_time(ended) * 1e6 for started, ended in self._events]
        self._times_ns, self._events = [], []
        return float(statistics.median(times_ns))


def after_pause(step: StepFunction, pause: Pause, seconds: float) -> StepFunction:
    def pause_and_step() -> None:
        pause(seconds)
        step()

    return pause_and_step


SELFTEST_TASKS: dict[str, Callable[[Spec, Rank], Findings]] = {
    "known_answers": measure_known_answers,
    "exposure": measure_exposure,
}
