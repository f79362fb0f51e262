"""The base class of strategies in torch. Their facts without torch are declared in `plan/strategies.py`."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pipeline.data.batches import memory_format
from pipeline.plan.spec import Spec
from pipeline.records.record import Sharding
from pipeline.training.process_group import Rank
from pipeline.workloads.workload import Workload, WorkloadError, describe

SyncContext = Callable[[bool], contextlib.AbstractContextManager[Any]]  # takes: is this the last pass of an update?


class TorchStrategy:
    """A strategy in torch. This class trains the bare model; a subclass overrides what its strategy does otherwise."""

    capture_warm_up_steps = 3
    waits_for_all_gradients = False  # an update does not end if a parameter gets no gradient

    def check(self, workload: Workload, model: nn.Module, spec: Spec) -> None:
        """Raise WorkloadError for what of the bare model the strategy cannot place. It needs no process group."""

    def place(self, model: nn.Module, workload: Workload, spec: Spec, rank: Rank) -> nn.Module:
        """Move the bare model to the rank's device, its weights in the memory layout of the spec.

        Raises WorkloadError.
        """
        prepare_blocks(workload, model, spec)
        placed: nn.Module = model.to(rank.device, memory_format=memory_format(spec))  # type: ignore[call-overload]
        return placed

    def wrap(
        self, model: nn.Module, workload: Workload, spec: Spec, rank: Rank, group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Return the placed model as it trains over all ranks, or over the process group `group`."""
        return model

    def describe_sharding(self, workload: Workload, model: nn.Module, spec: Spec) -> Sharding | None:
        """Return the sizes of the model's units before sharding, in bytes; None if its parameters are not sharded."""
        return None

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer as the strategy runs it. Raises WorkloadError if it cannot be sharded."""
        return optimizer

    def sync_if_last(self, model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a pass: gradients travel only in the last pass of an update."""
        return contextlib.nullcontext()


def prepare_blocks(workload: Workload, model: nn.Module, spec: Spec) -> None:
    """Compile each block of the bare model, or keep none of its activations, as the spec says.

    Hooks of a wrapper stay outside, and names of parameters as they are. Earlier compiled code is dropped.
    Raises WorkloadError if the model has no blocks.
    """
    if not spec.axes_of_blocks:
        return
    blocks = units_of(workload, model)
    if not blocks:
        stated = " and ".join(f"{axis}: blocks" for axis in spec.axes_of_blocks)
        raise WorkloadError(f"shard_units names no block for {stated}; name them, or leave it out")
    if spec.compile == "blocks":
        torch.compiler.reset()
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
    if spec.activation_checkpointing == "blocks":
        for block in blocks:
            block.forward = checkpointed(block.forward)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that keeps its inputs and its random state, and runs again in the backward pass."""
    return lambda *inputs, **keywords: checkpoint(forward, *inputs, use_reentrant=False, **keywords)


def units_of(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """Return the workload's units. Raises WorkloadError unless they are different parts of the model."""
    found: object = workload.shard_units(model)
    if not isinstance(found, Iterable):
        raise WorkloadError(f"shard_units returns {describe(found)}; return a list of parts, as list(model.blocks)")
    units = list(found)
    names = {module: name for name, module in model.named_modules()}
    for unit in units:
        if not isinstance(unit, nn.Module) or unit not in names or unit is model:
            raise WorkloadError(f"shard_units gives {describe(unit)} that is no part of the model; leave it out")
    listed_twice = [names[unit] for unit in units if units.count(unit) > 1]
    if listed_twice:
        raise WorkloadError(f"shard_units gives {listed_twice[0]} twice; give each unit once")
    return units


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has the state: of ZeroRedundancyOptimizer the rank's own."""
    owner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return owner


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP's or DataParallel's wrapper."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state on this rank: a part of the whole if the strategy shards it."""
    values = [value for state in own_optimizer(optimizer).state.values() for value in state.values()]
    return sum(local_part(value).nbytes for value in values if isinstance(value, torch.Tensor))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that lies on this rank: its shard under FSDP, else the tensor itself."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
