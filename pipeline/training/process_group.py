"""The rank of this process, its device and its process group."""

import itertools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.data.batches import Rank as Rank
from pipeline.plan.spec import Spec
from pipeline.training.flop_counter import COLLECTIVE_NAMESPACES

COLLECTIVE_TIMEOUT_S = 300
NO_LIMIT = timedelta(days=365)
OPERATIONS = (
    *("reduce_scatter", "all_reduce", "all_gather", "all_to_all", "broadcast", "barrier"),
    *("reduce", "gather", "scatter", "send", "recv"),
)
"""The operations of a process group. The first whose name is part of an operator's is that of the operator."""
FSDP_MODULES = "torch.distributed.fsdp._fully_shard"

T = TypeVar("T")
_NUM_WAITS = itertools.count()  # as many on all ranks


def find_rank(spec: Spec) -> Rank:
    """Return the rank of this process from torchrun's variables, with its device. The device is not used yet.

    Raises RuntimeError if fewer GPUs are visible than the point uses.
    """
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cpu")
    if spec.device == "cuda":
        visible = torch.cuda.device_count()
        if visible < spec.gpus_per_node:
            raise RuntimeError(
                f"the configuration uses {spec.gpus_per_node} GPUs per node, of which {visible} are visible here; "
                "request more GPUs, or lower num_gpus."
            )
        device = torch.device("cuda", local_rank)
    return Rank(rank, world_size, device)


def join_process_group(spec: Spec, store: Path | None = None) -> Rank:
    """Select this process's device and, with one process for each GPU, join the process group. Return the rank.

    The ranks meet through the file `store`, or without one through the store that torchrun's variables name.
    """
    rank = find_rank(spec)
    if spec.device == "cuda":
        torch.cuda.set_device(rank.device)
    if spec.is_distributed:
        if spec.is_captured:  # required to capture a DDP step (pytorch.org/docs/stable/notes/cuda.html)
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        backend = "nccl" if spec.device == "cuda" else "gloo"
        if spec.cpu_offload and spec.device == "cuda":  # gradients are clipped where they lie
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=FileStore(str(store), rank.world_size) if store else None,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=rank.device if backend == "nccl" else None,
        )
    return rank


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier(rank: Rank) -> None:
    """Wait for every rank. Return at once where one process trains."""
    if dist.is_initialized():
        dist.barrier(device_ids=[rank.device.index] if rank.device.type == "cuda" else None)


def on_first_rank(rank: Rank, work: Callable[[], T], otherwise: T) -> T:
    """Return what `work` returns on rank 0, and `otherwise` on the others, which wait for it as long as it takes.

    They wait for a key of the store: a collective ends them after COLLECTIVE_TIMEOUT_S.
    """
    group = dist.group.WORLD
    if group is None:
        return work()
    store = group.get_group_store()
    key = f"on_first_rank/{next(_NUM_WAITS)}"
    if rank.rank == 0:
        found = work()
        store.set(key, "")
        return found
    store.wait([key], NO_LIMIT)
    return otherwise


def synchronize(rank: Rank) -> None:
    """Wait for the rank's device; under DataParallel for the first GPU, on which every step ends."""
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)


def all_gather(value: T, kind: type[T]) -> list[T]:
    """Return the values of all ranks in rank order; of one process only the caller's.

    Ranks exchange msgpack, and what arrives must be of this kind. torch's all_gather_object would unpickle it, and so
    run the code of whoever can write to a connection between ranks.
    """
    if not dist.is_initialized():
        return [value]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    raw = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
    sizes = [int(size) for size in gather_tensors(torch.tensor([len(raw)], device=device))]
    padded = nn.functional.pad(raw, (0, max(sizes) - len(raw))).to(device)
    decoder = msgspec.msgpack.Decoder(kind)
    found = zip(gather_tensors(padded), sizes, strict=True)
    return [decoder.decode(part[:size].cpu().numpy().tobytes()) for part, size in found]


def gather_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, which have one shape."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def device_indices(spec: Spec, rank: Rank) -> list[int]:
    """Return the indices of the visible CUDA devices that this process uses; none on the CPU."""
    if spec.device == "cpu":
        return []
    return list(range(spec.num_gpus)) if spec.facts.uses_threads else [rank.device.index]


class CollectiveWatch(TorchDispatchMode):
    """Notes the operations of process groups that run while it is entered, but for those of FSDP.

    Around the bare model these are the user's own: asynchronous ones, those of sub-groups and of backward, and those of
    a SyncBatchNorm that the user's code made. The grid's `sync_batchnorm` converts the model later.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if DTensor in types:
            return NotImplemented  # it comes apart first, into tensors and collectives
        if func.namespace in COLLECTIVE_NAMESPACES and not is_called_by(FSDP_MODULES):
            name = func.name().partition("::")[2].replace("_", "")
            known = (operation for operation in OPERATIONS if operation.replace("_", "") in name)
            self.operations.update([*known][:1])
        return func(*args, **(kwargs or {}))

    def gather(self) -> tuple[str, ...]:
        """Return the operations that any rank ran. All ranks must call it."""
        return tuple(sorted(set().union(*all_gather(sorted(self.operations), list[str]))))


def is_called_by(modules: str) -> bool:
    """True if a function of the modules whose names begin so is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(modules):
        frame = frame.f_back
    return frame is not None
