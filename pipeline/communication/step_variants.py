"""The same training step in several forms that differ in one thing each: what DDP adds, what its collectives cost."""

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
from pipeline.training.step import EagerStep, ignore_mark, place_model

DDP_VARIANTS = ("plain", "ddp_one", "ddp", "ddp_again", "no_op_hook", "no_sync")
DP_VARIANTS = ("plain", "dp", "dp_again")

StepFunction = Callable[[], None]


class StepVariant(NamedTuple):
    """A model of its own, as one form of the step trains it; `eager` is that step as the host would issue it."""

    name: str
    model: nn.Module
    step: StepFunction
    eager: StepFunction


class StepContext(NamedTuple):
    """What all variants share: the point, this rank, its batch, and a process group of this rank alone."""

    spec: Spec
    rank: Rank
    batch: Batch
    single_rank_group: dist.ProcessGroup | None


def build_step_context(spec: Spec, rank: Rank, batch: Batch) -> StepContext:
    """The context of a rank; called by all ranks, since each takes part in making every group."""
    groups = [dist.new_group([member]) for member in range(rank.world_size)] if dist.is_initialized() else []
    return StepContext(spec, rank, batch, groups[rank.rank] if groups else None)


def build_variant(
    bench: StepContext,
    name: str,
    spec: Spec | None = None,
    after_backward: StepFunction | None = None,
    execution: Execution = "eager",
) -> StepVariant:
    """The variant of that name, with parameters of its own that begin alike everywhere.

    `plain` is the bare module, `ddp_one` DDP on this rank alone, `ddp` over all ranks, `no_op_hook` the same
    with the collectives left out (hooks and bucket copies run, without the division by N), `no_sync` DDP that
    reduces nothing, `dp` DataParallel; a name's `_again` is the same form a second time, whose difference is
    noise. `spec` replaces the context's, `after_backward` runs between backward and optimizer. Called by all
    ranks inside prepare.execution_stream(execution), which is eager or a graph.
    """
    assert execution not in COMPILED_EXECUTIONS, "forms of one model would share what was compiled for the first"
    spec = spec or bench.spec
    torch.manual_seed(spec.seed)
    bare = place_model(build_model(spec.model or "resnet18", num_classes=10), spec, bench.rank)
    form = name.removesuffix("_again")
    model = wrap_variant(bare, form, spec, bench)
    if form == "no_op_hook":
        assert isinstance(model, DistributedDataParallel)
        model.register_comm_hook(None, noop_hook)
    without_communication = (
        model.no_sync if form == "no_sync" and isinstance(model, DistributedDataParallel) else contextlib.nullcontext
    )
    eager = build_step(model, spec, bench, without_communication, after_backward)
    step = capture_step(eager, spec) if execution in CAPTURED_EXECUTIONS else eager
    return StepVariant(name, model, step, eager)


def wrap_variant(bare: nn.Module, form: str, spec: Spec, bench: StepContext) -> nn.Module:
    """The bare module as the form trains it."""
    if form == "plain":
        return bare
    if form == "dp":
        return DataParallel(bare, device_ids=list(range(spec.num_gpus)))
    group = bench.single_rank_group if form == "ddp_one" else None
    if spec.sync_batchnorm:
        bare = nn.SyncBatchNorm.convert_sync_batchnorm(bare, group)
    return wrap_ddp(bare, spec, bench.rank, group)


def build_step(
    model: nn.Module,
    spec: Spec,
    bench: StepContext,
    without_communication: Callable[[], contextlib.AbstractContextManager[Any]],
    after_backward: StepFunction | None,
) -> StepFunction:
    """One training step as train.run_epoch makes it, without the clock's marks."""
    images, labels = select_batch(model, spec, bench.batch)
    trained = EagerStep(
        model, spec, bench.rank, without_communication=without_communication, after_backward=after_backward
    )
    trained.begin_epoch()

    def step() -> None:
        trained(images, labels, ignore_mark)

    return step


def capture_step(step: StepFunction, spec: Spec) -> StepFunction:
    """The step as a CUDA graph that is replayed."""
    replay = warm_up_and_capture(step, num_capture_warm_up_steps(spec), graph_capturer())

    def replayed() -> None:
        replay()

    return replayed


def select_batch(model: nn.Module, spec: Spec, batch: Batch) -> tuple[Tensor, Tensor]:
    """The rank's batch; beside DataParallel, which takes the global one, a model on one GPU gets its share."""
    images, labels = batch
    size = len(labels) if isinstance(model, DataParallel) else spec.batch_size_per_gpu
    return images[:size], labels[:size]
