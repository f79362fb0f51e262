"""Strategies whose collectives return at once, and a count of what these would have sent.

DDP: a hook without reduction, or a group whose collectives do nothing. ZeRO-1: also an update that broadcasts nothing.
FSDP: all-gathers and reduce-scatters that keep their buffers. All other work stays: hooks, copies, casts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, Work, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipeline.experiment.measurement import Operation, TransferKind
from pipeline.experiment.spec import Spec
from pipeline.training.process_group import Rank


def nothing() -> None:
    """Do nothing."""


class CollectiveCall(NamedTuple):
    """A collective that a rank calls. `num_bytes`: of a gather the output, of every other operation the input."""

    kind: TransferKind
    operation: Operation
    num_bytes: int


def silence(
    model: nn.Module, optimizer: torch.optim.Optimizer, spec: Spec, calls: list[CollectiveCall] | None = None
) -> None:
    """Let the collectives of a model's updates return at once. DDP still broadcasts its buffers.

    Each collective that is left out is appended to `calls`, if given.
    """
    noted = [] if calls is None else calls
    if isinstance(model, DistributedDataParallel):
        hook = cast_without_reduction if spec.gradient_compression == "bf16" else leave_out_reduction
        model.register_comm_hook(noted, hook)
    if spec.strategy == "zero1":
        leave_out_broadcasts(optimizer, noted)
    if spec.strategy == "fsdp":
        keep_buffers(model, noted, is_silent=True)


def delay(
    model: nn.Module, optimizer: torch.optim.Optimizer, spec: Spec, pause: Callable[[], object], is_silent: bool
) -> None:
    """Let each collective of FSDP, or each broadcast of ZeRO-1, pause first; silent ones never run."""
    if spec.strategy == "fsdp":
        keep_buffers(model, [], is_silent, pause)
    elif not is_silent:
        broadcast = cast(Any, optimizer)._broadcast_params_from_rank

        def late(rank: int) -> list[Any]:
            pause()
            handles: list[Any] = broadcast(rank)
            return handles

        cast(Any, optimizer)._broadcast_params_from_rank = late


def leave_out_reduction(calls: list[CollectiveCall], bucket: GradBucket) -> Future[Tensor]:
    """Do what torch's no-op hook does, and note the call."""
    calls.append(CollectiveCall("gradients", "all_reduce", bucket.buffer().nbytes))
    done: Future[Tensor] = noop_hook(None, bucket)
    return done


def cast_without_reduction(calls: list[CollectiveCall], bucket: GradBucket) -> Future[Tensor]:
    """Do what the bf16 hook does without its all-reduce: cast to bf16, divide, and cast back."""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    calls.append(CollectiveCall("gradients", "all_reduce", compressed.nbytes))
    buffer.copy_(compressed)
    done: Future[Tensor] = noop_hook(None, bucket)
    return done


def leave_out_broadcasts(optimizer: Any, calls: list[CollectiveCall]) -> None:
    """Leave out the broadcasts of the parameters that each rank has updated."""

    def note(rank: int) -> list[Any]:
        buckets: list[list[Tensor]] = optimizer._buckets  # views of the parameters, by device and rank
        calls.extend(CollectiveCall("parameters", "broadcast", by_rank[rank].nbytes) for by_rank in buckets)
        return []

    optimizer._broadcast_params_from_rank = note


def keep_buffers(
    model: nn.Module, calls: list[CollectiveCall], is_silent: bool, before: Callable[[], object] = nothing
) -> None:
    """Let FSDP gather and scatter in buffers that are kept. Silent ones skip all gathers after the first of a buffer.

    `before` runs before each collective that is not skipped.

    The other ranks' shards stay in the buffer; this rank's shard is copied into it anew.
    """
    gather, inputs = KeptAllGather(calls, is_silent, before), dict[tuple[object, ...], Tensor]()
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):  # the setters do not reach the modules inside
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # it need not be torch's private class
            scatter = KeptReduceScatter(calls, is_silent, before, inputs)
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]


class KeptAllGather:
    """An all-gather with two kept buffers for each size, as FSDPModule.set_custom_all_gather takes it.

    They take turns: FSDP fills the next unit's buffer while it still copies weights out of the last one's.
    """

    def __init__(self, calls: list[CollectiveCall], is_silent: bool, before: Callable[[], object] = nothing) -> None:
        self._calls, self._is_silent, self._before = calls, is_silent, before
        self._kept: dict[tuple[object, ...], list[Tensor]] = {}
        self._gathered: set[int] = set()

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        kept = self._kept.setdefault((*size, dtype), [])
        buffer = torch.zeros(*size, dtype=dtype, device=device) if len(kept) < 2 else kept.pop(0)
        kept.append(buffer)
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._calls.append(CollectiveCall("parameters", "all_gather", output_tensor.nbytes))
        if self._is_silent and output_tensor.data_ptr() in self._gathered:
            return None
        self._gathered.add(output_tensor.data_ptr())
        self._before()
        work: dist.Work | None = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        return work


class KeptReduceScatter:
    """A unit's reduce-scatter with kept buffers, for FSDPModule.set_custom_reduce_scatter. Silent outputs stay zero.

    `inputs` has a buffer for each size, for all units. Outputs are the unit's own: its gradients are views of them.
    """

    def __init__(
        self,
        calls: list[CollectiveCall],
        is_silent: bool,
        before: Callable[[], object],
        inputs: dict[tuple[object, ...], Tensor],
    ) -> None:
        self._calls, self._is_silent, self._before = calls, is_silent, before
        self._inputs, self._outputs = inputs, dict[tuple[object, ...], Tensor]()
        self._is_input = False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._is_input = not self._is_input  # FSDP asks for the input, then for the output
        kept, key = self._inputs if self._is_input else self._outputs, (*size, dtype)
        if key not in kept:
            kept[key] = torch.zeros(*size, dtype=dtype, device=device)
        return kept[key]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._calls.append(CollectiveCall("gradients", "reduce_scatter", input_tensor.nbytes))
        if self._is_silent:
            return None
        self._before()
        work: dist.Work | None = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        return work


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
