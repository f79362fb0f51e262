"""Measurement of communication: step times with and without it, a profile, and the limit of the link."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from torch.nn.parallel import DataParallel

from pipeline.communication import dataparallel_split, interleaved_timing, profiling, step_variants
from pipeline.communication.collective_sweep import sweep_collectives
from pipeline.communication.step_variants import StepContext, StepVariant
from pipeline.experiment.measurement import Communication, Measurement, Profile, StepSeries, VariantName
from pipeline.experiment.spec import Spec
from pipeline.figures.exposed_communication import NO_OP, is_communication_precise_enough, whole_step
from pipeline.figures.pooling import group_pairs
from pipeline.training import device_memory
from pipeline.training.loop import build_measurement, refuse_changed_flags, set_precision
from pipeline.training.process_group import Rank
from pipeline.training.step import StepFunction
from pipeline.training.step_setup import choose_execution, execution_stream
from pipeline.training.strategies.strategy import CollectiveCall
from pipeline.workloads.find import Sources

NUM_COUNTED_STEPS = 3
OUTSIDE_GRAPH_FOLDER = "outside_graph"  # has the traces of a captured step that ran outside its graph
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
        with refuse_changed_flags():
            communication = msgspec.structs.replace(time_step_variants(variants, spec, rank, only), notes=notes)
            own_collectives = step_variants.list_own_collectives(variants["plain"], rank)
            if spec.facts.uses_threads:
                communication = add_step_parts(communication, variants[spec.strategy], context)
            elif not only:
                whole = whole_step([communication])
                silent = variants[NO_OP[whole]]
                communication = add_sweep_and_profile(communication, variants[whole], silent, rank, traces)
        model = variants["plain"].model
        return build_measurement(
            context.workload,
            spec,
            rank,
            model,
            (),
            communication=communication,
            execution_used=execution,
            own_collectives=own_collectives,
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
            StepSeries(variant=name, window_times_ns=tuple(map(tuple, values))) for name, values in windows.items()
        )
        communication = Communication(steps_per_window=num_steps, series=series)
        if not only and is_communication_precise_enough(communication):
            break
    return communication


def add_sweep_and_profile(
    communication: Communication, whole: StepVariant, no_op: StepVariant, rank: Rank, traces: Path | None
) -> Communication:
    """Add a sweep of the step's collectives, then a profile: it comes last, because the profiler may stay attached.

    `no_op` is the same step without the collectives that its strategy calls.
    """
    calls = step_variants.list_silent_calls(no_op)
    sweep = sweep_collectives(group_pairs((call.operation, call.num_bytes) for call in calls), rank)
    profile, notes = profile_collectives(whole, no_op, calls, rank, traces)
    called = [(call.kind, call.num_bytes) for call in calls]
    seen = [(one.kind, one.num_bytes) for one in profile.collectives] if profile else []
    has_all = not Counter(called) - Counter(seen)  # then it has the buffers too, which every step broadcasts
    return msgspec.structs.replace(
        communication,
        transfers=profiling.mean_transfers(seen if has_all else called, num_steps=1),
        profile=profile,
        sweep=sweep,
        sweep_captured=rank.device.type == "cuda",  # see capture_stream
        notes=communication.notes + notes,
    )


def add_step_parts(communication: Communication, dp: StepVariant, context: StepContext) -> Communication:
    assert isinstance(dp.model, DataParallel)
    return msgspec.structs.replace(
        communication,
        transfers=dataparallel_split.count_data_parallel_transfers(dp.step, NUM_COUNTED_STEPS),
        split=dataparallel_split.time_step_parts(dp.model, context),
    )


def profile_collectives(
    whole: StepVariant, no_op: StepVariant, calls: Sequence[CollectiveCall], rank: Rank, traces: Path | None
) -> tuple[Profile | None, tuple[str, ...]]:
    """Profile a step on all ranks. Return the profile, or None, and notes on what is missing.

    `no_op` is the same step without `calls`, the collectives that its strategy calls. A captured step is profiled
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
