"""One rank's place among the others: its device, its process group, and the model wrapped for the strategy."""

import functools
import os
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipeline.data.batches import Shard
from pipeline.experiment.spec import Spec

COLLECTIVE_TIMEOUT_S = 300

T = TypeVar("T")


class Rank(NamedTuple):
    """Which process this is. `device` indexes into the GPUs that the job was given, never into the node's."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def shard(self) -> Shard:
        """This rank's share of the images."""
        return Shard(self.rank, self.world_size, self.device)


def take_place(spec: Spec) -> Rank:
    """Return which rank torchrun made of this process, and its device, which it does not touch yet.

    Raises RuntimeError when fewer GPUs are visible than the point uses.
    """
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cpu")
    if spec.device == "cuda":
        visible = torch.cuda.device_count()
        if visible < spec.gpus_per_node:
            raise RuntimeError(f"the point uses {spec.gpus_per_node} GPUs a node and {visible} are visible here")
        device = torch.device("cuda", local_rank)
    return Rank(rank, local_rank, world_size, device)


def join_process_group(spec: Spec) -> Rank:
    """Take this process's device and, under DDP, join the process group that torchrun laid out."""
    found = take_place(spec)
    device = found.device
    if spec.device == "cuda":
        torch.cuda.set_device(device)
    if spec.strategy == "ddp":
        if spec.is_captured:  # as pytorch.org/docs/stable/notes/cuda.html asks for before DDP's step is captured
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        dist.init_process_group(
            "nccl" if spec.device == "cuda" else "gloo",
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=device if spec.device == "cuda" else None,
        )
    return found


def leave_process_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier(rank: Rank) -> None:
    """Wait for every rank; nothing to wait for outside DDP."""
    if dist.is_initialized():
        dist.barrier(device_ids=[rank.local_rank] if rank.device.type == "cuda" else None)


def synchronize(rank: Rank) -> None:
    """Wait for the rank's device; under DataParallel for the first one, on which every step ends."""
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)


def all_gather(value: T) -> list[T]:
    """Every rank's value, in the order of ranks; the caller's alone outside DDP."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [part for part in values if part is not None]


def wrap_for_strategy(model: nn.Module, spec: Spec, rank: Rank) -> nn.Module:
    """The model as the strategy trains it: bare, DataParallel over the first GPUs, or DDP."""
    if spec.strategy == "dp":
        return DataParallel(model, device_ids=list(range(spec.num_gpus)))
    if spec.strategy == "ddp":
        if spec.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return wrap_ddp(model, spec, rank)
    return model


@functools.cache
def bucket_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the device on which DDP fills its buckets, where the backward pass is not to wait for that."""
    return torch.cuda.Stream(device, priority=-1)


def wrap_ddp(
    model: nn.Module, spec: Spec, rank: Rank, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """DDP as the spec sets it, over all ranks or a group of them."""
    return DistributedDataParallel(
        model,
        device_ids=[rank.local_rank] if rank.device.type == "cuda" else None,
        process_group=group,
        broadcast_buffers=spec.broadcast_buffers,
        bucket_cap_mb=spec.bucket_cap_mb,
        gradient_as_bucket_view=spec.gradient_as_bucket_view,
    )


def device_indices(spec: Spec, rank: Rank) -> list[int]:
    """The CUDA devices that this process uses, as indices into the visible ones; none on the CPU."""
    if spec.device == "cpu":
        return []
    return list(range(spec.num_gpus)) if spec.strategy == "dp" else [rank.local_rank]
