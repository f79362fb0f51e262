"""What communication costs, measured: step times with and without it, a profiled pass, and the link's own limit."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipeline.analysis import exposure
from pipeline.communication.allreduce_sweep import captures_calls, sweep_all_reduce
from pipeline.communication.dataparallel_split import count_data_parallel, split_steps
from pipeline.communication.interleaved_timing import Windows, interleave, warm_up
from pipeline.communication.profiling import bucket_bytes, count_transfers, profile_ranks
from pipeline.communication.step_variants import (
    DDP_VARIANTS,
    DP_VARIANTS,
    Step,
    Variant,
    Workbench,
    build_variant,
    build_workbench,
)
from pipeline.data.batches import ResidentBatches
from pipeline.experiment.measurement import Communication, Measurement, Profile, StepSeries
from pipeline.experiment.spec import Execution, Spec
from pipeline.training import device_memory
from pipeline.training.loop import describe, set_precision
from pipeline.training.process_group import Rank
from pipeline.training.step_setup import choose_execution, stream_of

LEDGER_STEPS = 3
OUTSIDE = "outside_graph"  # where traces of a captured step's eager form are kept
NOT_TRACED = "profile and ledger are of the same step outside its graph"


def measure_communication(spec: Spec, rank: Rank, traces: Path | None) -> Measurement:
    """Everything `measure: communication` asks for; `traces` is where the profiler's files stay, if they do."""
    set_precision(spec)
    device_memory.limit_memory(spec, rank)
    execution = choose_execution(spec, rank)
    with stream_of(execution, rank):
        return measure_variants(execution, spec, rank, traces)


def measure_variants(execution: Execution, spec: Spec, rank: Rank, traces: Path | None) -> Measurement:
    """The variants of the step in that execution, timed side by side, and what is seen of their transfers."""
    batch = next(ResidentBatches(spec, rank.shard).epoch(1))
    bench = build_workbench(spec, rank, batch)
    names = DDP_VARIANTS if spec.strategy == "ddp" else DP_VARIANTS
    variants = [build_variant(bench, name, execution=execution) for name in names]
    found = time_variants(variants, spec, rank)
    if spec.strategy == "ddp":
        found = add_collectives(found, named(variants, "ddp"), named(variants, "no_op_hook"), rank, traces)
    else:
        found = add_split(found, named(variants, "dp"), bench)
    model = named(variants, "plain").model
    return describe(spec, rank, model, (), communication=found, execution_used=execution)


def time_variants(variants: list[Variant], spec: Spec, rank: Rank) -> Communication:
    """Windows of every variant side by side, until they are settled or as many as the point asks for."""
    steps = {variant.name: variant.step for variant in variants}
    fitting = warm_up(steps, rank)
    num_steps = spec.max_steps or fitting

    def collect(windows: Windows) -> Communication:
        return Communication(steps_per_window=num_steps, series=as_series(windows))

    return collect(
        interleave(steps, spec.windows, num_steps, rank, lambda windows: exposure.is_settled(collect(windows)))
    )


def as_series(windows: Windows) -> tuple[StepSeries, ...]:
    """The windows by variant, as the record holds them."""
    return tuple(
        StepSeries(variant=name, window_times_ns=tuple(map(tuple, values)))  # type: ignore[arg-type]
        for name, values in windows.items()
    )


def named(variants: list[Variant], name: str) -> Variant:
    """The variant of that name."""
    return next(variant for variant in variants if variant.name == name)


def add_collectives(
    found: Communication, ddp: Variant, quiet: Variant, rank: Rank, traces: Path | None
) -> Communication:
    """The sweep at the sizes of DDP's buckets, and the profiled pass: last, as the profiler may stay attached."""
    assert isinstance(ddp.model, DistributedDataParallel)
    buckets = bucket_bytes(ddp.model)
    sweep = sweep_all_reduce(buckets, rank)
    profile, notes = profile_collectives(ddp, quiet, buckets, rank, traces)
    return msgspec.structs.replace(
        found,
        transfers=count_transfers(profile) if profile else (),
        profile=profile,
        sweep=sweep,
        sweep_captured=captures_calls(rank),
        notes=found.notes + notes,
    )


def add_split(found: Communication, dp: Variant, bench: Workbench) -> Communication:
    """DataParallel's own parts, and what it hands from GPU to GPU."""
    assert isinstance(dp.model, DataParallel)
    return msgspec.structs.replace(
        found,
        transfers=count_data_parallel(dp.step, LEDGER_STEPS),
        split=split_steps(dp.model, bench.spec, bench.batch, bench.rank),
    )


def profile_collectives(
    ddp: Variant, quiet: Variant, buckets: list[int], rank: Rank, traces: Path | None
) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile of all ranks, or why there is none; `quiet` is the same step where no gradients travel.

    Of a step that is captured: what its collectives are is seen outside the graph first, as kernels inside it carry no
    sizes; what they take is seen inside.
    """
    if ddp.step is ddp.eager:
        return profile_between(ddp.eager, quiet.eager, rank, buckets, traces)
    outside, notes = profile_ranks(ddp.eager, rank, buckets, traces and traces / OUTSIDE)
    if outside is None:
        return None, notes
    if not outside.collectives:
        return outside, (NOT_TRACED, *notes)
    like = [(collective.operation, collective.num_bytes) for collective in outside.collectives]
    inside, notes = profile_between(ddp.step, quiet.step, rank, buckets, traces, like)
    if inside is None or not inside.collectives:
        return outside, (NOT_TRACED, *notes)
    return inside, notes


def profile_between(
    step: Step, quiet: Step, rank: Rank, buckets: list[int], traces: Path | None, like: Sequence[tuple[str, int]] = ()
) -> tuple[Profile | None, tuple[str, ...]]:
    """The profile of a step between two of where no gradients travel, which tell how much longer kernels take in it.

    With a note where these two were not seen; what differs between them is noise.
    """
    before, problems = profile_ranks(quiet, rank, [])
    found, notes = profile_ranks(step, rank, buckets, traces, like)
    if found is None or not any(found.compute_ns):
        return found, notes
    after, more = profile_ranks(quiet, rank, [])
    if before is None or after is None:
        return found, (*notes, *(f"no-op hook, {problem}" for problem in dict.fromkeys((*problems, *more))))
    both = {"quiet_compute_ns": before.compute_ns, "quiet_again_compute_ns": after.compute_ns}
    return msgspec.structs.replace(found, **both), notes
