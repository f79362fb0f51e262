"""Variants of one training step. Their times differ by the cost of DDP, of its collectives, or of DataParallel."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipeline.data.batches import Batch
from pipeline.experiment.spec import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, Execution, Spec
from pipeline.training.cuda_graph import graph_capturer, num_capture_warm_up_steps, warm_up_and_capture
from pipeline.training.models import build_model
from pipeline.training.process_group import Rank, wrap_ddp
from pipeline.training.step import EagerStep, StepFunction, ignore_mark, place_model

DDP_VARIANTS = ("plain", "ddp_one", "ddp", "ddp_again", "no_op_hook", "no_sync")
DP_VARIANTS = ("plain", "dp", "dp_again")


class StepVariant(NamedTuple):
    """A variant with its own model. `step` may be captured; `eager` is the same step issued by the host."""

    name: str
    model: nn.Module
    step: StepFunction
    eager: StepFunction


class StepContext(NamedTuple):
    """The parts that all variants share: point, rank, batch, and a process group of this rank alone."""

    spec: Spec
    rank: Rank
    batch: Batch
    single_rank_group: dist.ProcessGroup | None


def build_step_context(spec: Spec, rank: Rank, batch: Batch) -> StepContext:
    """Build the context of a rank. Called by all ranks, since all take part in making every process group."""
    groups = [dist.new_group([member]) for member in range(rank.world_size)] if dist.is_initialized() else []
    return StepContext(spec, rank, batch, groups[rank.rank] if groups else None)


def build_variant(
    context: StepContext,
    name: str,
    spec: Spec | None = None,
    after_backward: StepFunction | None = None,
    execution: Execution = "eager",
) -> StepVariant:
    """Build the variant of that name. It has its own parameters, with equal initial values on all ranks.

    `plain`: the bare module. `ddp_one`: DDP on this rank alone. `ddp`: DDP over all ranks. `no_op_hook`: DDP whose
    hooks and bucket copies run without collectives and without the division by N. `no_sync`: DDP without reduction.
    `dp`: DataParallel. The suffix `_again` repeats a variant: their difference is noise.

    `spec` replaces the context's spec; `after_backward` runs between backward and optimizer. `execution` is eager or
    graph. Called by all ranks inside step_setup.execution_stream(execution).
    """
    assert execution not in COMPILED_EXECUTIONS, "variants of one model would share compiled code"
    spec = spec or context.spec
    torch.manual_seed(spec.seed)
    bare = place_model(build_model(spec.model or "resnet18", num_classes=10), spec, context.rank)
    form = name.removesuffix("_again")
    model = wrap_variant(bare, form, spec, context)
    if form == "no_op_hook":
        assert isinstance(model, DistributedDataParallel)
        model.register_comm_hook(None, noop_hook)
    sync_context = (
        model.no_sync if form == "no_sync" and isinstance(model, DistributedDataParallel) else contextlib.nullcontext
    )
    eager = build_step(model, spec, context, sync_context, after_backward)
    step = capture_step(eager, spec) if execution in CAPTURED_EXECUTIONS else eager
    return StepVariant(name, model, step, eager)


def wrap_variant(bare: nn.Module, form: str, spec: Spec, context: StepContext) -> nn.Module:
    """Wrap the bare module as the form requires."""
    if form == "plain":
        return bare
    if form == "dp":
        return DataParallel(bare, device_ids=list(range(spec.num_gpus)))
    group = context.single_rank_group if form == "ddp_one" else None
    if spec.sync_batchnorm:
        bare = nn.SyncBatchNorm.convert_sync_batchnorm(bare, group)
    return wrap_ddp(bare, spec, context.rank, group)


def build_step(
    model: nn.Module,
    spec: Spec,
    context: StepContext,
    sync_context: Callable[[], contextlib.AbstractContextManager[Any]],
    after_backward: StepFunction | None,
) -> StepFunction:
    """Build a training step like that of loop.run_epoch, without the marks of the clock."""
    images, labels = select_batch(model, spec, context.batch)
    eager = EagerStep(model, spec, context.rank, sync_context=sync_context, after_backward=after_backward)
    eager.begin_epoch()

    def step() -> None:
        eager(images, labels, ignore_mark)

    return step


def capture_step(step: StepFunction, spec: Spec) -> StepFunction:
    """Capture the step in a CUDA graph. Return its replay."""
    return warm_up_and_capture(step, num_capture_warm_up_steps(spec), graph_capturer())


def select_batch(model: nn.Module, spec: Spec, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the batch of a model: the global batch for DataParallel, one GPU's share for others."""
    images, labels = batch
    size = len(labels) if isinstance(model, DataParallel) else spec.batch_size_per_gpu
    return images[:size], labels[:size]
