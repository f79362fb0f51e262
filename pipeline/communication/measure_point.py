"""What communication costs, measured: step times with and without it, a profiled pass, and the link's own limit."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipeline.analysis import exposure
from pipeline.communication.allreduce_sweep import is_sweep_captured, sweep_all_reduce
from pipeline.communication.dataparallel_split import count_data_parallel, split_steps
from pipeline.communication.interleaved_timing import WindowTimesNs, time_interleaved, warm_up_and_size_windows
from pipeline.communication.profiling import count_transfers, ddp_bucket_bytes, profile_ranks
from pipeline.communication.step_variants import (
    DDP_VARIANTS,
    DP_VARIANTS,
    StepContext,
    StepFunction,
    StepVariant,
    build_step_context,
    build_variant,
)
from pipeline.data.batches import SyntheticBatches
from pipeline.experiment.measurement import Communication, Measurement, Profile, StepSeries
from pipeline.experiment.spec import Execution, Spec
from pipeline.training import device_memory
from pipeline.training.loop import build_measurement, set_precision
from pipeline.training.process_group import Rank
from pipeline.training.step_setup import choose_execution, execution_stream

NUM_COUNTED_STEPS = 3
OUTSIDE_GRAPH_FOLDER = "outside_graph"  # where traces of a captured step's eager form are kept
NOT_TRACED = "profile and ledger are of the same step outside its graph"


def measure_communication(spec: Spec, rank: Rank, traces: Path | None) -> Measurement:
    """Everything `measure: communication` asks for; `traces` is where the profiler's files stay, if they do."""
    set_precision(spec)
    device_memory.set_memory_limit(spec, rank)
    execution = choose_execution(spec, rank)
    with execution_stream(execution, rank):
        return measure_variants(execution, spec, rank, traces)


def measure_variants(execution: Execution, spec: Spec, rank: Rank, traces: Path | None) -> Measurement:
    """The variants of the step in that execution, timed side by side, and what is seen of their transfers."""
    batch = next(SyntheticBatches(spec, rank.shard).epoch(1))
    bench = build_step_context(spec, rank, batch)
    names = DDP_VARIANTS if spec.strategy == "ddp" else DP_VARIANTS
    variants = [build_variant(bench, name, execution=execution) for name in names]
    found = time_step_variants(variants, spec, rank)
    if spec.strategy == "ddp":
        found = add_collectives(
            found, find_variant(variants, "ddp"), find_variant(variants, "no_op_hook"), rank, traces
        )
    else:
        found = add_split(found, find_variant(variants, "dp"), bench)
    model = find_variant(variants, "plain").model
    return build_measurement(spec, rank, model, (), communication=found, execution_used=execution)


def time_step_variants(variants: list[StepVariant], spec: Spec, rank: Rank) -> Communication:
    """Windows of every variant side by side, until they are settled or as many as the point asks for."""
    steps = {variant.name: variant.step for variant in variants}
    fitting = warm_up_and_size_windows(steps, rank)
    num_steps = spec.max_steps or fitting

    def collect(windows: WindowTimesNs) -> Communication:
        return Communication(steps_per_window=num_steps, series=as_series(windows))

    return collect(
        time_interleaved(
            steps,
            spec.windows,
            num_steps,
            rank,
            lambda windows: exposure.is_communication_precise_enough(collect(windows)),
        )
    )


def as_series(windows: WindowTimesNs) -> tuple[StepSeries, ...]:
    """The windows by variant, as the record holds them."""
    return tuple(
        StepSeries(variant=name, window_times_ns=tuple(map(tuple, values)))  # type: ignore[arg-type]
        for name, values in windows.items()
    )


def find_variant(variants: list[StepVariant], name: str) -> StepVariant:
    """The variant of that name."""
    return next(variant for variant in variants if variant.name == name)


def add_collectives(
    found: Communication, ddp: StepVariant, without_communication: StepVariant, rank: Rank, traces: Path | None
) -> Communication:
    """The sweep at the sizes of DDP's buckets, and the profiled pass: last, as the profiler may stay attached."""
    assert isinstance(ddp.model, DistributedDataParallel)
    buckets = ddp_bucket_bytes(ddp.model)
    sweep = sweep_all_reduce(buckets, rank)
    profile, notes = profile_collectives(ddp, without_communication, buckets, rank, traces)
    return msgspec.structs.replace(
        found,
        transfers=count_transfers(profile) if profile else (),
        profile=profile,
        sweep=sweep,
        sweep_captured=is_sweep_captured(rank),
        notes=found.notes + notes,
    )


def add_split(found: Communication, dp: StepVariant, bench: StepContext) -> Communication:
    """DataParallel's own parts, and what it hands from GPU to GPU."""
    assert isinstance(dp.model, DataParallel)
    return msgspec.structs.replace(
        found,
        transfers=count_data_parallel(dp.step, NUM_COUNTED_STEPS),
        split=split_steps(dp.model, bench.spec, bench.batch, bench.rank),
    )


def profile_collectives(
    ddp: StepVariant, without_communication: StepVariant, buckets: list[int], rank: Rank, traces: Path | None
) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile of all ranks, or why there is none; `without_communication` is the same step where no gradients travel.

    Of a step that is captured: what its collectives are is seen outside the graph first, as kernels inside it carry no
    sizes; what they take is seen inside.
    """
    if ddp.step is ddp.eager:
        return profile_between(ddp.eager, without_communication.eager, rank, buckets, traces)
    outside, notes = profile_ranks(ddp.eager, rank, buckets, traces and traces / OUTSIDE_GRAPH_FOLDER)
    if outside is None:
        return None, notes
    if not outside.collectives:
        return outside, (NOT_TRACED, *notes)
    like = [(collective.operation, collective.num_bytes) for collective in outside.collectives]
    inside, notes = profile_between(ddp.step, without_communication.step, rank, buckets, traces, like)
    if inside is None or not inside.collectives:
        return outside, (NOT_TRACED, *notes)
    return inside, notes


def profile_between(
    step: StepFunction,
    without_communication: StepFunction,
    rank: Rank,
    buckets: list[int],
    traces: Path | None,
    like: Sequence[tuple[str, int]] = (),
) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile of a step between two of where no gradients travel, which tell how much longer kernels take in it.

    With a note where these two were not seen; what differs between them is noise.
    """
    before, problems = profile_ranks(without_communication, rank, [])
    found, notes = profile_ranks(step, rank, buckets, traces, like)
    if found is None or not any(found.compute_ns):
        return found, notes
    after, more = profile_ranks(without_communication, rank, [])
    if before is None or after is None:
        return found, (*notes, *(f"no-op hook, {problem}" for problem in dict.fromkeys((*problems, *more))))
    both = {"quiet_compute_ns": before.compute_ns, "quiet_again_compute_ns": after.compute_ns}
    return msgspec.structs.replace(found, **both), notes
