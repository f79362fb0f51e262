"""Measurement of communication: step times with and without it, a profile, and the limit of the link.

A step of DataParallel is split into its parts: they are called one by one, with all devices synchronized after each.
Their sum is therefore longer than the step, which overlaps some of them.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DataParallel, comm

from pipeline.communication import process_group as measured_group
from pipeline.communication import profiling, step_variants, timing
from pipeline.communication.profiling import mean_transfers
from pipeline.communication.step_variants import CollectiveCall, StepContext, StepVariant
from pipeline.communication.timing import sweep_collectives
from pipeline.figures.exposed_communication import (
    CALLED,
    NO_OP,
    is_communication_precise_enough,
    whole_step,
)
from pipeline.figures.pooling import group_pairs
from pipeline.figures.stopping_rule import LEAD_IN_STEPS
from pipeline.plan.spec import Spec
from pipeline.records.record import (
    Communication,
    DelayedSteps,
    Measurement,
    Profile,
    SplitPart,
    StepSeries,
    Transfer,
    TransferKind,
    VariantName,
)
from pipeline.training import devices, process_group
from pipeline.training.execution import choose_execution, execution_stream
from pipeline.training.loop import build_measurement, refuse_changed_flags
from pipeline.training.process_group import Rank, device_indices
from pipeline.training.step import EagerStep, StepFunction
from pipeline.workloads.find import Sources

DATA_PARALLEL_PARTS = ("scatter", "replicate", "parallel_forward", "gather", "backward", "optimizer")
STEPS_PER_WINDOW = 5
SPLIT_WARM_UP_STEPS = 3
TRANSFER_FUNCTIONS = ("broadcast_coalesced", "reduce_add_coalesced", "scatter", "gather")


def time_step_parts(model: DataParallel[nn.Module], context: StepContext) -> tuple[SplitPart, ...]:
    """Time each part of a step: the mean of each window, in ns."""
    spec = context.spec
    devices = device_indices(spec, context.rank)
    totals_ns: Counter[str] = Counter()
    started_ns = 0

    def mark(part: str) -> None:
        nonlocal started_ns
        if part in DATA_PARALLEL_PARTS:  # else the time is that of the part which ends next
            ended_ns = time_when_idle_ns(devices)
            totals_ns[part] += ended_ns - started_ns
            started_ns = ended_ns

    def forward_in_parts(*arguments: Any) -> Any:
        inputs, keywords = model.scatter(arguments, {}, model.device_ids)
        mark("scatter")
        replicas = model.replicate(model.module, model.device_ids[: len(inputs)])
        mark("replicate")
        outputs = model.parallel_apply(replicas, inputs, keywords)
        mark("parallel_forward")
        gathered = model.gather(outputs, model.output_device)
        mark("gather")
        return gathered

    step = EagerStep(model, context.workload, spec, context.rank, forward=forward_in_parts)

    def time_parts(num_steps: int) -> Counter[str]:
        nonlocal started_ns
        totals_ns.clear()
        for _ in range(num_steps):
            started_ns = time_when_idle_ns(devices)
            for passes_left in reversed(range(spec.grad_accumulation)):
                step(context.batch, mark, passes_left == 0)
        return totals_ns.copy()

    time_parts(SPLIT_WARM_UP_STEPS)
    windows = [time_parts(STEPS_PER_WINDOW) for _ in range(spec.windows)]
    return tuple(
        SplitPart(part=part, times_ns=tuple(window[part] // STEPS_PER_WINDOW for window in windows))
        for part in DATA_PARALLEL_PARTS
    )


def time_when_idle_ns(devices: Sequence[int]) -> int:
    for index in devices:
        torch.cuda.synchronize(index)
    return time.perf_counter_ns()


def count_data_parallel_transfers(step: StepFunction, num_steps: int) -> tuple[Transfer, ...]:
    """Count the transfers between GPUs in `num_steps` steps of DataParallel. Return the means per step.

    It counts every call of torch.nn.parallel to a transfer function of torch.nn.parallel.comm.
    """
    transfers: list[tuple[TransferKind, int]] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(comm, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            transfers.append(transfer_of_call(name, *arguments[:2]))
            return original(*arguments, **keywords)

        return call

    originals = {name: getattr(comm, name) for name in TRANSFER_FUNCTIONS}
    vars(comm).update({name: counted(name) for name in TRANSFER_FUNCTIONS})
    try:
        for _ in range(num_steps):
            step()
    finally:
        vars(comm).update(originals)
    return mean_transfers(transfers, num_steps)


def total_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def transfer_of_call(name: str, tensors: Any, devices: Any) -> tuple[TransferKind, int]:
    """Return the kind and the bytes of a call from its first two arguments. One device needs no transfer."""
    match name:
        case "broadcast_coalesced":
            kind: TransferKind = "parameters" if any(tensor.requires_grad for tensor in tensors) else "buffers"
            return kind, total_bytes(tensors) * (len(devices) - 1)
        case "reduce_add_coalesced":
            return "gradients", sum(map(total_bytes, tensors[1:]))
        case "scatter":  # images in the forward pass, [batch, channel, row, column], output gradients in the backward
            is_image = tensors.dim() == 4
            return "inputs" if is_image else "outputs", tensors.nbytes * (len(devices) - 1) // len(devices)
    return "outputs", total_bytes(tensors[1:])  # gather


NUM_COUNTED_STEPS = 3
OUTSIDE_GRAPH_FOLDER = "outside_graph"  # has the traces of a CUDA-graph step that ran outside its graph
NOT_TRACED = "profile and transfers are those of the same step outside its CUDA graph"


def measure_communication(
    spec: Spec, rank: Rank, sources: Sources, traces: Path | None, only: Collection[VariantName] = ()
) -> Measurement:
    """Measure a point of `measure: communication`. Profiler traces are kept in the folder `traces`, if given.

    Timing ends when the step times and their differences are precise enough, at the latest after `spec.windows` rounds.
    With `only` all variants are built and warmed up, but only these are timed, in `spec.windows` rounds, and DDP has
    neither sweep nor profile.
    """
    devices.set_memory_limit(spec, rank)
    execution = choose_execution(spec, rank)
    with execution_stream(execution, rank):
        context = step_variants.build_step_context(spec, rank, sources)
        names, notes = step_variants.choose_variants(spec, execution)
        variants = step_variants.build_variants(context, names, execution)
        with refuse_changed_flags():
            communication = time_step_variants(variants, spec, rank, only)
            own = step_variants.count_calls(variants["plain"])
            communication = msgspec.structs.replace(
                communication, notes=notes + step_variants.describe_own(own), counts_own=True
            )
            if spec.facts.uses_threads:
                communication = add_step_parts(communication, variants[spec.strategy], context)
            elif not only:
                whole = whole_step([communication])
                silent = variants[NO_OP[whole]]
                calls = step_variants.list_calls(step_variants.count_calls(silent), own)
                communication = add_sweep_and_profile(communication, variants[whole], silent, calls, rank, traces)
        model = variants["plain"].model
        return build_measurement(
            context.workload,
            spec,
            rank,
            model,
            (),
            communication=communication,
            execution_used=execution,
            own_collectives=tuple(sorted({call.collective for call in own})),
        )


def time_step_variants(
    variants: Mapping[str, StepVariant], spec: Spec, rank: Rank, only: Collection[VariantName] = ()
) -> Communication:
    steps = {name: variant.step for name, variant in variants.items()}
    steps_filling_window = timing.warm_up_and_size_windows(steps, rank)
    num_steps = spec.max_steps or steps_filling_window
    timers = {name: partial(timing.time_steps, steps[name], num_steps, rank) for name in only or steps}
    for windows in timing.time_rounds(timers, dict.fromkeys(timers, spec.windows)):
        series = tuple(
            StepSeries(variant=name, window_times_ns=tuple(map(tuple, values))) for name, values in windows.items()
        )
        communication = Communication(steps_per_window=num_steps, series=series)
        if not only and is_communication_precise_enough(communication):
            break
    return communication


DELAYS_BY_BYTES = (0.25, 0.5, 1.0, 3.0)  # times the step: the sum of delays that grow with the bytes of a collective
EQUAL_DELAYS = (0.5,)  # likewise of delays that are equal
NO_COLLECTIVE = "the step calls no collective: there is nothing to delay"


class Delay(NamedTuple):
    """A delay of each collective: `latency_s`, and its bytes times `s_per_byte`."""

    latency_s: float
    s_per_byte: float


def measure_network(spec: Spec, rank: Rank, sources: Sources) -> Measurement:
    """Measure a point of `measure: network`: the step as it is, and while each collective takes longer, by turns."""
    devices.set_memory_limit(spec, rank)
    measured_group.install()  # before a model is wrapped
    context = step_variants.build_step_context(spec, rank, sources)
    with refuse_changed_flags():
        whole = step_variants.build_variant(context, spec.strategy)
        communication = time_delayed_steps(whole.step, spec, rank)
    return build_measurement(
        context.workload, spec, rank, whole.model, (), communication=communication, execution_used="eager"
    )


def time_delayed_steps(step: StepFunction, spec: Spec, rank: Rank) -> Communication:
    """Time rounds of the step, twice as it is and once with each delay, until the differences are precise enough."""
    num_steps = spec.max_steps or timing.warm_up_and_size_windows({spec.strategy: step}, rank)
    with measured_group.install().counting() as counted:
        step()
    calls = [counted.total(), sum(call.num_bytes * count for call, count in counted.items())]
    num_calls, num_bytes = process_group.all_gather(calls, list[int])[0]
    windows_ns = process_group.all_gather(timing.time_steps(step, num_steps, rank), int)
    delays = choose_delays(num_calls, num_bytes, max(windows_ns) / num_steps / 1e9)
    names = (spec.strategy, f"{spec.strategy}_again")
    delays_ns: list[list[int]] = [[] for _ in delays]
    timers = {name: partial(timing.time_steps, step, num_steps, rank) for name in names}
    timers |= {
        f"delay {index}": partial(time_while_delayed, step, num_steps, rank, delay, delays_ns[index])
        for index, delay in enumerate(delays)
    }
    for windows in timing.time_rounds(timers, dict.fromkeys(timers, spec.windows)):
        times_ns = {name: tuple(map(tuple, values)) for name, values in windows.items()}
        communication = Communication(
            steps_per_window=num_steps,
            series=tuple(StepSeries(variant=name, window_times_ns=times_ns[name]) for name in names),
            delayed=tuple(
                DelayedSteps(*delay, delays_ns=tuple(delays_ns[index]), window_times_ns=times_ns[f"delay {index}"])
                for index, delay in enumerate(delays)
            ),
            notes=() if delays else (NO_COLLECTIVE,),
        )
        if is_communication_precise_enough(communication):
            break
    return communication


def choose_delays(num_calls: int, num_bytes: int, step_s: float) -> list[Delay]:
    """Return delays whose sums over the collectives of a step are shares of it: hidden ones, and ones that are not."""
    if not num_calls or not num_bytes:
        return []
    equal = [Delay(share * step_s / num_calls, 0.0) for share in EQUAL_DELAYS]
    return [*equal, *(Delay(0.0, share * step_s / num_bytes) for share in DELAYS_BY_BYTES)]


def time_while_delayed(step: StepFunction, num_steps: int, rank: Rank, delay: Delay, delays_ns: list[int]) -> int:
    """Return the time of `num_steps` steps with delays, in ns. Append the sum of the delays in a step of this rank."""
    controller = measured_group.install()
    with controller.in_mode("delay", *delay):
        time_ns = timing.time_steps(step, num_steps, rank)
    delays_ns.append(round(controller.delayed_s() * 1e9 / (LEAD_IN_STEPS + num_steps)))
    return time_ns


def add_sweep_and_profile(
    communication: Communication,
    whole: StepVariant,
    no_op: StepVariant,
    calls: Sequence[CollectiveCall],
    rank: Rank,
    traces: Path | None,
) -> Communication:
    """Add a sweep of the step's collectives over all ranks, then a profile.

    The profile comes last, because the profiler may stay attached. `no_op` is the same step without the collectives of
    gradients and parameters among `calls`.
    """
    called = [call for call in calls if call.kind in CALLED]
    of_all = [call for call in called if call.num_ranks == rank.world_size]
    sweep = sweep_collectives(group_pairs((call.operation, call.num_bytes) for call in of_all), rank)
    profile, notes = profile_collectives(whole, no_op, called, rank, traces)
    return msgspec.structs.replace(
        communication,
        transfers=profiling.mean_transfers(((call.kind, call.num_bytes) for call in calls), num_steps=1),
        profile=profile,
        sweep=sweep,
        sweep_captured=rank.device.type == "cuda",  # see capture_stream
        notes=communication.notes + notes,
    )


def add_step_parts(communication: Communication, dp: StepVariant, context: StepContext) -> Communication:
    assert isinstance(dp.model, DataParallel)
    return msgspec.structs.replace(
        communication,
        transfers=count_data_parallel_transfers(dp.step, NUM_COUNTED_STEPS),
        split=time_step_parts(dp.model, context),
    )


def profile_collectives(
    whole: StepVariant, no_op: StepVariant, calls: Sequence[CollectiveCall], rank: Rank, traces: Path | None
) -> tuple[Profile | None, tuple[str, ...]]:
    """Profile a step on all ranks. Return the profile, or None, and notes on what is missing.

    `no_op` is the same step without `calls`, the collectives that its strategy calls. A CUDA-graph step is profiled
    twice. The profile outside its graph has the sizes of its collectives, which are unknown inside. The other has the
    times.
    """
    if whole.step is whole.eager:
        return profile_beside_no_op(whole.eager, no_op.eager, rank, calls, traces)
    outside, notes = profiling.profile_ranks(whole.eager, rank, calls, traces and traces / OUTSIDE_GRAPH_FOLDER)
    if outside is None:
        return None, notes
    if not outside.collectives:
        return outside, (NOT_TRACED, *notes)
    expected = [(collective.operation, collective.num_bytes) for collective in outside.collectives]
    inside, notes = profile_beside_no_op(whole.step, no_op.step, rank, calls, traces, expected)
    if inside is None or not inside.collectives:
        return outside, (NOT_TRACED, *notes)
    return inside, notes


def profile_beside_no_op(
    step: StepFunction,
    no_op: StepFunction,
    rank: Rank,
    calls: Sequence[CollectiveCall],
    traces: Path | None,
    expected: Sequence[tuple[str, int]] = (),
) -> tuple[Profile | None, tuple[str, ...]]:
    """Profile a step, and before and after it the step without collectives. Return the profile and notes.

    The comparison shows how much communication slows down compute kernels. The two profiles without collectives differ
    by noise.
    """
    before, problems = profiling.profile_ranks(no_op, rank, [])
    profile, notes = profiling.profile_ranks(step, rank, calls, traces, expected)
    if profile is None or not any(profile.compute_ns):
        return profile, notes
    after, later_problems = profiling.profile_ranks(no_op, rank, [])
    if before is None or after is None:
        problems = tuple(dict.fromkeys((*problems, *later_problems)))
        return profile, (*notes, *(f"without collectives, {problem}" for problem in problems))
    no_op_times = {"no_op_compute_ns": before.compute_ns, "no_op_again_compute_ns": after.compute_ns}
    return msgspec.structs.replace(profile, **no_op_times), notes
