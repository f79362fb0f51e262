"""Measurement of communication: step times with and without it, a profile, and the limit of the link."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipeline.analysis.exposed_communication import is_communication_precise_enough
from pipeline.analysis.pooling import group_pairs
from pipeline.communication import dataparallel_split, interleaved_timing, profiling, step_variants
from pipeline.communication.collective_sweep import sweep_collectives
from pipeline.communication.step_variants import StepContext, StepVariant
from pipeline.experiment.measurement import Communication, Measurement, Profile, StepSeries, VariantName
from pipeline.experiment.spec import Compression, Spec
from pipeline.training import device_memory
from pipeline.training.loop import build_measurement, set_precision
from pipeline.training.process_group import Rank
from pipeline.training.step import StepFunction
from pipeline.training.step_setup import choose_execution, execution_stream
from pipeline.workloads.find import Sources

NUM_COUNTED_STEPS = 3
OUTSIDE_GRAPH_FOLDER = "outside_graph"  # has the traces of a captured step that ran outside its graph
BYTES_BY_COMPRESSION: dict[Compression, int] = {"none": 1, "bf16": 2}  # of a gradient: fewer travel, by this factor
NOT_PROFILED = "no profile of this strategy: its collectives were counted where they are called"
NOT_TRACED = "profile and transfers are those of the same step outside its CUDA graph"


def measure_communication(
    spec: Spec, rank: Rank, sources: Sources, traces: Path | None, only: Collection[VariantName] = ()
) -> Measurement:
    """Measure a point of `measure: communication`. Profiler traces are kept in the folder `traces`, if given.

    Timing ends when the step times and their differences are precise enough, at the latest after `spec.windows` rounds.
    With `only` all variants are built and warmed up, but only these are timed, in `spec.windows` rounds, and DDP has
    neither sweep nor profile.
    """
    set_precision(spec)
    device_memory.set_memory_limit(spec, rank)
    execution = choose_execution(spec, rank)
    with execution_stream(execution, rank):
        context = step_variants.build_step_context(spec, rank, sources)
        names, notes = step_variants.choose_variants(spec, execution)
        variants = step_variants.build_variants(context, names, execution)
        communication = msgspec.structs.replace(time_step_variants(variants, spec, rank, only), notes=notes)
        if spec.strategy == "dp":
            communication = add_step_parts(communication, variants["dp"], context)
        elif spec.strategy != "ddp" and not only:
            communication = add_sweep_of_calls(communication, variants["no_op"], rank)
        elif not only:
            communication = add_sweep_and_profile(
                communication, variants["ddp"], variants["no_op_hook"], rank, traces, spec.gradient_compression
            )
        model = variants["plain"].model
        return build_measurement(
            context.workload, spec, rank, model, (), communication=communication, execution_used=execution
        )


def time_step_variants(
    variants: Mapping[str, StepVariant], spec: Spec, rank: Rank, only: Collection[VariantName] = ()
) -> Communication:
    steps = {name: variant.step for name, variant in variants.items()}
    steps_filling_window = interleaved_timing.warm_up_and_size_windows(steps, rank)
    num_steps = spec.max_steps or steps_filling_window
    timers = {name: partial(interleaved_timing.time_steps, steps[name], num_steps, rank) for name in only or steps}
    for windows in interleaved_timing.time_rounds(timers, dict.fromkeys(timers, spec.windows)):
        series = tuple(
            StepSeries(variant=name, window_times_ns=tuple(map(tuple, values)))  # type: ignore[arg-type]
            for name, values in windows.items()
        )
        communication = Communication(steps_per_window=num_steps, series=series)
        if not only and is_communication_precise_enough(communication):
            break
    return communication


def add_sweep_and_profile(
    communication: Communication,
    ddp: StepVariant,
    no_op_hook: StepVariant,
    rank: Rank,
    traces: Path | None,
    compression: Compression = "none",
) -> Communication:
    """Add the all-reduce sweep, then the profile: it comes last, because the profiler may stay attached."""
    assert isinstance(ddp.model, DistributedDataParallel)
    buckets = [size // BYTES_BY_COMPRESSION[compression] for size in profiling.ddp_bucket_bytes(ddp.model)]
    sweep = sweep_collectives({"all_reduce": buckets}, rank)
    profile, notes = profile_collectives(ddp, no_op_hook, buckets, rank, traces)
    collectives = profile.collectives if profile else ()
    return msgspec.structs.replace(
        communication,
        transfers=profiling.mean_transfers([(one.kind, one.num_bytes) for one in collectives], num_steps=1),
        profile=profile,
        sweep=sweep,
        sweep_captured=rank.device.type == "cuda",  # see capture_stream
        notes=communication.notes + notes,
    )


def add_sweep_of_calls(communication: Communication, no_op: StepVariant, rank: Rank) -> Communication:
    """Add the collectives that a step without them leaves out, and a sweep of their operations and sizes."""
    no_op.calls.clear()
    no_op.step()
    called = group_pairs((call.operation, call.num_bytes) for call in no_op.calls)
    return msgspec.structs.replace(
        communication,
        transfers=profiling.mean_transfers([(call.kind, call.num_bytes) for call in no_op.calls], num_steps=1),
        sweep=sweep_collectives(called, rank),
        sweep_captured=rank.device.type == "cuda",  # see capture_stream
        notes=(*communication.notes, NOT_PROFILED),
    )


def add_step_parts(communication: Communication, dp: StepVariant, context: StepContext) -> Communication:
    assert isinstance(dp.model, DataParallel)
    return msgspec.structs.replace(
        communication,
        transfers=dataparallel_split.count_data_parallel_transfers(dp.step, NUM_COUNTED_STEPS),
        split=dataparallel_split.time_step_parts(dp.model, context),
    )


def profile_collectives(
    ddp: StepVariant, no_op_hook: StepVariant, buckets: list[int], rank: Rank, traces: Path | None
) -> tuple[Profile | None, tuple[str, ...]]:
    """Profile DDP's step on all ranks. Return the profile, or None, and notes on what is missing.

    `no_op_hook` is the same step without the reduction of gradients. A captured step is profiled twice. The profile
    outside its graph has the sizes of its collectives, which are unknown inside. The other has the times.
    """
    if ddp.step is ddp.eager:
        return profile_beside_no_op_hook(ddp.eager, no_op_hook.eager, rank, buckets, traces)
    outside, notes = profiling.profile_ranks(ddp.eager, rank, buckets, traces and traces / OUTSIDE_GRAPH_FOLDER)
    if outside is None:
        return None, notes
    if not outside.collectives:
        return outside, (NOT_TRACED, *notes)
    expected = [(collective.operation, collective.num_bytes) for collective in outside.collectives]
    inside, notes = profile_beside_no_op_hook(ddp.step, no_op_hook.step, rank, buckets, traces, expected)
    if inside is None or not inside.collectives:
        return outside, (NOT_TRACED, *notes)
    return inside, notes


def profile_beside_no_op_hook(
    step: StepFunction,
    no_op_hook: StepFunction,
    rank: Rank,
    buckets: list[int],
    traces: Path | None,
    expected: Sequence[tuple[str, int]] = (),
) -> tuple[Profile | None, tuple[str, ...]]:
    """Profile a step, and before and after it the step with the no-op hook. Return the profile and notes.

    The comparison shows how much communication slows down compute kernels. The two profiles with the no-op hook differ
    by noise.
    """
    before, problems = profiling.profile_ranks(no_op_hook, rank, [])
    profile, notes = profiling.profile_ranks(step, rank, buckets, traces, expected)
    if profile is None or not any(profile.compute_ns):
        return profile, notes
    after, later_problems = profiling.profile_ranks(no_op_hook, rank, [])
    if before is None or after is None:
        return profile, (*notes, *(f"no-op hook, {problem}" for problem in dict.fromkeys((*problems, *later_problems))))
    no_op_times = {"no_op_compute_ns": before.compute_ns, "no_op_again_compute_ns": after.compute_ns}
    return msgspec.structs.replace(profile, **no_op_times), notes
