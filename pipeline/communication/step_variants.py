"""Variants of one training step. Their times differ by the cost of DDP, of its collectives, or of DataParallel."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipeline.data.batch import Batch, first_samples
from pipeline.experiment.spec import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, Execution, Spec
from pipeline.training.check_workload import check_workload
from pipeline.training.cuda_graph import (
    graph_capturer,
    num_capture_warm_up_steps,
    prepare_capture,
    warm_up_and_capture,
)
from pipeline.training.loop import build_batches, build_model
from pipeline.training.process_group import Rank, wrap_for_strategy
from pipeline.training.step import EagerStep, StepFunction, ignore_mark, place_model
from pipeline.workloads.find import NO_SOURCES, Sources
from pipeline.workloads.workload import Workload

# By strategy, in the order in which variants are built and warmed up. As in training, DDP over all ranks comes first.
# `ddp_one` comes last, because it uses a second NCCL communicator. A DDP that is warmed up after `ddp_one` has shorter
# gaps between its kernels, by 0.6 ms in a step of 27.5 ms on two H100s (512 per GPU, TF32).
VARIANTS = {
    "ddp": ("ddp", "ddp_again", "no_op_hook", "no_collectives", "no_sync", "plain", "ddp_one"),
    "dp": ("plain", "dp", "dp_again"),
}

SyncContext = Callable[[], contextlib.AbstractContextManager[Any]]


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
    workload, model = build_model(spec, rank, sources)
    check_workload(workload, model, spec, rank)
    batch = next(build_batches(workload, spec, rank).epoch(1))
    groups = [dist.new_group([member]) for member in range(rank.world_size)] if dist.is_initialized() else []
    return StepContext(spec, rank, workload, batch, groups[rank.rank] if groups else None)


def choose_variants(spec: Spec, execution: Execution) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the variants to measure at a point, and notes on those that are not possible there."""
    names = VARIANTS[spec.strategy]
    if spec.sync_batchnorm:
        reason = "SyncBatchNorm needs its collectives"
    elif execution in CAPTURED_EXECUTIONS:
        reason = "not tried in a CUDA graph"
    else:
        return names, ()
    return tuple(name for name in names if name != "no_collectives"), (f"no step without collectives: {reason}",)


def build_variants(
    context: StepContext, names: Iterable[str], execution: Execution = "eager"
) -> dict[str, StepVariant]:
    """Build the variants in the order of VARIANTS, whatever the order of `names`."""
    order = VARIANTS[context.spec.strategy]
    in_order = sorted(names, key=lambda name: (order.index(name.removesuffix("_again")), name))
    return {name: build_variant(context, name, execution=execution) for name in in_order}


def build_variant(
    context: StepContext,
    name: str,
    after_backward: StepFunction | None = None,
    execution: Execution = "eager",
) -> StepVariant:
    """Build the variant of that name. It has its own parameters, with equal initial values on all ranks.

    `plain`: the bare module. `ddp_one`: DDP on this rank alone. `ddp`: DDP over all ranks. `no_op_hook`: DDP that runs
    hooks and bucket copies, but no reduction and no division by N; it broadcasts buffers. `no_collectives`: DDP over a
    group whose collectives do nothing. `no_sync`: DDP in its no_sync context, without reduction. `dp`: DataParallel.
    The suffix `_again` repeats a variant: the difference between the two is noise.

    `after_backward` runs between backward and optimizer. `execution` is eager or graph. All ranks must call this
    function inside step_setup.execution_stream(execution).
    """
    assert execution not in COMPILED_EXECUTIONS, "the variants of a model would share their compiled code"
    spec, base_name = context.spec, name.removesuffix("_again")
    assert base_name == "plain" or base_name in VARIANTS.get(spec.strategy, ()), "the variant needs another strategy"
    torch.manual_seed(spec.seed)
    bare = place_model(context.workload.build_model(), spec, context.rank)
    model, sync_context = wrap_variant(base_name, bare, context)
    train_step = EagerStep(
        model, context.workload, spec, context.rank, sync_context=sync_context, after_backward=after_backward
    )
    train_step.begin_epoch()
    is_global = base_name == "dp"  # DataParallel takes the global batch
    batch = context.batch if is_global else first_samples(context.batch, spec.batch_size_per_gpu)

    def eager() -> None:
        train_step(batch, ignore_mark)

    step: StepFunction = eager
    if execution in CAPTURED_EXECUTIONS:
        with prepare_capture(train_step):
            step = warm_up_and_capture(eager, num_capture_warm_up_steps(spec), graph_capturer())
    return StepVariant(model, step, eager)


def wrap_variant(base_name: str, bare: nn.Module, context: StepContext) -> tuple[nn.Module, SyncContext]:
    """Return the model wrapped for the variant, and the context of its forward and backward pass."""
    if base_name == "plain":
        return bare, contextlib.nullcontext
    group = {"ddp_one": context.single_rank_group, "no_collectives": SilentGroup(context.rank)}.get(base_name)
    model = wrap_for_strategy(bare, context.spec, context.rank, group, context.workload.find_unused_parameters)
    if isinstance(model, DistributedDataParallel):
        if base_name == "no_op_hook":
            model.register_comm_hook(None, noop_hook)
        if base_name == "no_sync":
            return model, model.no_sync
    return model, contextlib.nullcontext


class SilentGroup(dist.ProcessGroup):
    """A group of all ranks. Each collective that DDP calls returns at once, and each rank keeps its own data.

    DDP does all its other work: hooks, buckets, division by N. No rank waits for another. Gradients are not summed
    over ranks, so that ranks end up with different gradients.
    """

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.rank, rank.world_size)  # type: ignore[call-arg]
        self._devices: list[int | str | torch.device] | None = [rank.device] if rank.device.type == "cuda" else None

    def getBackendName(self) -> str:
        return "silent"

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:  # type: ignore[override]
        return self._completed(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Work:  # type: ignore[override]
        return self._completed(tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None
    ) -> Work:
        """Copy this rank's tensor into each rank's output, so that DDP finds the same parameter shapes on all ranks."""
        for by_rank, tensor in zip(outputs, inputs, strict=True):
            for output in by_rank:
                output.copy_(tensor)
        return self._completed(outputs)

    def _completed(self, result: Any) -> Work:
        future: Future[Any] = torch.futures.Future(devices=self._devices)
        future.set_result(result)
        work: Work = _create_work_from_future(future)
        return work
