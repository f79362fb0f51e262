"""Variants of one training step. Their times differ by the cost of DDP, of its collectives, or of DataParallel."""

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.communication.process_group import DDP_MODULE, SYNC_BATCHNORM_MODULE, Call, MeasuredGroup, install
from pipeline.data.batches import Batch, first_samples
from pipeline.plan.axes import AXIS_DEFAULTS, CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, STRATEGY_AXES, Execution
from pipeline.plan.spec import Spec
from pipeline.records.record import Operation, TransferKind
from pipeline.training.check_workload import check_workload
from pipeline.training.execution import (
    graph_capturer,
    prepare_capture,
    warm_up_and_capture,
)
from pipeline.training.loop import build_batches, build_model, refuse_changed_flags, set_precision
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, StepFunction, ignore_mark
from pipeline.training.torch_strategies import TORCH_STRATEGIES, SyncContext
from pipeline.workloads.find import NO_SOURCES, Sources
from pipeline.workloads.workload import Workload, WorkloadError, model_of

KINDS: dict[str, TransferKind] = {  # by the module that calls, or by the collective
    DDP_MODULE: "buffers",
    SYNC_BATCHNORM_MODULE: "batchnorm_statistics",
    "all_reduce": "gradients",
    "reduce_scatter": "gradients",
    "all_gather": "parameters",
    "broadcast": "parameters",
}
BUFFERS = (DDP_MODULE, SYNC_BATCHNORM_MODULE)
SILENT: dict[str, tuple[str, ...]] = {  # variants whose collectives return at once, but for calls of these modules
    "no_collectives": (),
    "no_op_hook": BUFFERS,
    "no_op": BUFFERS,
    "no_sync": (),
    "plain": (),
}


class CollectiveCall(NamedTuple):
    """A collective that a rank calls. `num_bytes`: of a gather the output, of every other operation the input."""

    kind: TransferKind
    operation: Operation
    num_bytes: int
    num_ranks: int = 0  # of its group


built_models: WeakSet[nn.Module] = WeakSet()  # of the variants that there are


class StepVariant(NamedTuple):
    """A variant with its own model. `step` may be captured; `eager` is the same step issued by the host."""

    model: nn.Module
    step: StepFunction
    eager: StepFunction


class StepContext(NamedTuple):
    """The parts that all variants share: point, rank, workload, batch, and a process group of this rank alone."""

    spec: Spec
    rank: Rank
    workload: Workload
    batch: Batch
    single_rank_group: dist.ProcessGroup | None


def build_step_context(spec: Spec, rank: Rank, sources: Sources = NO_SOURCES) -> StepContext:
    """Build the context of a rank. All ranks must call it, because all take part in making every process group."""
    install()  # both steps of a difference go through the measured group
    workload, model = build_model(spec, rank, sources)
    with refuse_changed_flags():
        check_workload(workload, model, spec, rank)
    batch = next(build_batches(workload, spec, rank).epoch(1))
    groups = [dist.new_group([member]) for member in range(rank.world_size)] if dist.is_initialized() else []
    return StepContext(spec, rank, workload, batch, groups[rank.rank] if groups else None)


def choose_variants(spec: Spec, execution: Execution) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the variants to measure at a point, and notes on those that are not possible there."""
    missing: dict[str, str] = {}
    if execution in CAPTURED_EXECUTIONS:
        missing["no_collectives"] = "no step without collectives: not tried in a CUDA graph"
    if spec.static_graph:
        missing["no_sync"] = "no step without DDP's hooks: no_sync fails with static_graph"
    names = spec.facts.variants
    return tuple(name for name in names if name not in missing), tuple(missing.values())


def build_variants(
    context: StepContext, names: Iterable[str], execution: Execution = "eager"
) -> dict[str, StepVariant]:
    """Build the variants in the order of the strategy, whatever the order of `names`."""
    order = context.spec.facts.variants
    in_order = sorted(names, key=lambda name: (order.index(name.removesuffix("_again")), name))
    return {name: build_variant(context, name, execution=execution) for name in in_order}


def build_variant(
    context: StepContext,
    name: str,
    after_backward: StepFunction | None = None,
    execution: Execution = "eager",
) -> StepVariant:
    """Build the variant of that name. It has its own parameters, with equal initial values on all ranks.

    `plain`: the bare module. `ddp_one`: DDP on this rank alone. `ddp`, `fsdp`, `hsdp`, `zero1`: these strategies over
    all ranks. `no_collectives`: DDP whose collectives return at once (process_group.py), those of the user's code too.
    `no_op_hook` of DDP and `no_op` of the others: the same, but for buffers and statistics of BatchNorm. `no_sync`: DDP
    in its no_sync context, without reduction. `dp`: DataParallel. The suffix `_again` repeats a variant: the difference
    between the two is noise.

    `after_backward` runs between backward and optimizer. `execution` is eager or graph. All ranks must call this
    function inside execution.execution_stream(execution).
    """
    assert execution not in COMPILED_EXECUTIONS, "the variants of a model would share their compiled code"
    base_name = name.removesuffix("_again")
    assert base_name in ("plain", *context.spec.facts.variants), "it needs another strategy"
    spec = single_spec(context.spec) if base_name == "plain" else context.spec
    torch.manual_seed(spec.seed)
    built = model_of(context.workload)
    if built in built_models:
        raise WorkloadError(
            "build_model returns the model of an earlier call; build a new one in each call, since each variant of a "
            "step wraps its own"
        )
    built_models.add(built)
    set_precision(spec)  # over flags that the user's code sets
    strategy = TORCH_STRATEGIES[spec.strategy]
    bare = strategy.place(built, context.workload, spec, context.rank)
    model, sync_context = wrap_variant(base_name, bare, context._replace(spec=spec))
    train_step = EagerStep(
        model, context.workload, spec, context.rank, sync_context=sync_context, after_backward=after_backward
    )
    train_step.begin_epoch()
    batch = context.batch if spec.facts.uses_threads else first_samples(context.batch, spec.batch_size_per_gpu)

    assert base_name not in SILENT or not dist.is_initialized() or isinstance(dist.group.WORLD, MeasuredGroup)
    silence = partial(install().in_mode, "silent", but=SILENT[base_name]) if base_name in SILENT else nullcontext

    def eager() -> None:
        with silence():
            for passes_left in reversed(range(spec.grad_accumulation)):
                train_step(batch, ignore_mark, passes_left == 0)

    step: StepFunction = eager
    if execution in CAPTURED_EXECUTIONS:
        with prepare_capture(train_step):
            step = warm_up_and_capture(eager, strategy.capture_warm_up_steps, graph_capturer())
    return StepVariant(model, step, eager)


def count_calls(variant: StepVariant) -> Counter[Call]:
    """Run a step once, on all ranks and outside a graph. Return the collectives that this rank calls."""
    with install().counting() as calls:
        variant.eager()
    return calls


def list_calls(calls: Counter[Call], own: Counter[Call]) -> list[CollectiveCall]:
    """Return the calls of a strategy's step that are not those of the user's code, nor left real in a silent step."""
    sent = (call for call in calls.elements() if call not in own and not call.stays_real)
    return [
        CollectiveCall(
            KINDS.get(call.caller) or KINDS[call.collective],
            call.collective,  # type: ignore[arg-type]
            call.num_bytes,
            call.num_ranks,
        )
        for call in sent
    ]


def describe_own(own: Counter[Call]) -> tuple[str, ...]:
    """Return notes on the collectives of the user's code: what is silent without them, and what stays real."""
    silent = [f"{call.collective} of {call.num_bytes / 1e6:.3g} MB" for call in own if not call.stays_real]
    real = [f"{call.collective} ({call.stays_real})" for call in own if call.stays_real]
    notes = {"the model or its loss calls {}: that is communication too": silent}
    notes["in every step, the reference too, stay real: {}"] = real
    return tuple(text.format(", ".join(sorted(set(names)))) for text, names in notes.items() if names)


def single_spec(spec: Spec) -> Spec:
    """Return the same step as it is on one GPU alone."""
    defaults = {axis: AXIS_DEFAULTS[axis] for axis in (*STRATEGY_AXES, "sync_batchnorm")}
    alone = {"strategy": "single", "num_gpus": 1, "num_nodes": 1, **defaults}
    return msgspec.structs.replace(spec.trial_spec(spec.batch_size_per_gpu), **alone)


def wrap_variant(base_name: str, bare: nn.Module, context: StepContext) -> tuple[nn.Module, SyncContext | None]:
    """Return the placed model wrapped for the variant, and the context of each pass if it is not the usual one."""
    group = context.single_rank_group if base_name == "ddp_one" else None
    model = TORCH_STRATEGIES[context.spec.strategy].wrap(bare, context.workload, context.spec, context.rank, group)
    if base_name == "no_sync" and isinstance(model, DistributedDataParallel):
        without_reduction = model.no_sync
        return model, lambda is_last: without_reduction()
    return model, None
