"""One rank's place among the others: its device, its process group, and the model wrapped for the strategy."""

import ctypes
import functools
import gc
import os
import resource
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipeline.metrics import GIB
from pipeline.spec import Spec

COLLECTIVE_TIMEOUT_S = 300

T = TypeVar("T")


class Rank(NamedTuple):
    """Which process this is. `device` indexes into the GPUs that the job was given, never into the node's."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


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


def join(spec: Spec) -> Rank:
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


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def forget_point(spec: Spec, rank: Rank) -> bool:
    """Count this process's memory from here, and give back what it does not use; False where it cannot."""
    gc.collect()
    if rank.device.type == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak resident set counts from here (proc(5))
        except OSError:
            return False
        return True
    torch.cuda.empty_cache()
    for index in devices_of(spec, rank):
        torch.cuda.reset_peak_memory_stats(index)
        torch.cuda.reset_accumulated_memory_stats(index)
    return True


def barrier(rank: Rank) -> None:
    """Wait for every rank; nothing to wait for outside DDP."""
    if dist.is_initialized():
        dist.barrier(device_ids=[rank.local_rank] if rank.device.type == "cuda" else None)


def synchronize(rank: Rank) -> None:
    """Wait for the rank's device; under DataParallel for the first one, on which every step ends."""
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)


def gather(value: T) -> list[T]:
    """Every rank's value, in the order of ranks; the caller's alone outside DDP."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [part for part in values if part is not None]


def wrap(model: nn.Module, spec: Spec, rank: Rank) -> nn.Module:
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


def limit_memory(spec: Spec, rank: Rank) -> None:
    """Let this process use no more than `memory_limit_gib`, so that any machine can play a smaller one.

    On CUDA a fraction of the card for each of its devices; on the CPU a limit on data (RLIMIT_DATA) above
    what the process holds after its imports.
    """
    if spec.memory_limit_gib is None:
        return
    if spec.device == "cpu":
        limit_bytes = held_data_bytes() + int(spec.memory_limit_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        return
    for index in devices_of(spec, rank):
        total_bytes = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, spec.memory_limit_gib * GIB / total_bytes), index)


def usable_bytes(spec: Spec, index: int) -> int:
    """What this process holds of a CUDA device and could still get: all but CUDA's own and other processes'."""
    free_bytes, _ = torch.cuda.mem_get_info(index)
    usable = free_bytes + torch.cuda.memory_reserved(index)
    return usable if spec.memory_limit_gib is None else min(usable, int(spec.memory_limit_gib * GIB))


def devices_of(spec: Spec, rank: Rank) -> list[int]:
    """The CUDA devices that this process uses, as indices into the visible ones; none on the CPU."""
    if spec.device == "cpu":
        return []
    return list(range(spec.num_gpus)) if spec.strategy == "dp" else [rank.local_rank]


def usable_host_bytes(spec: Spec) -> int | None:
    """What this process holds of the host's memory and could still get under RLIMIT_DATA; None without a limit."""
    if spec.memory_limit_gib is None:
        return None
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return host_bytes("VmRSS") + max(0, limit_bytes - held_data_bytes())


def held_data_bytes() -> int:
    """The size of this process's data segment now, which is what RLIMIT_DATA counts."""
    return host_bytes("VmData")


def host_bytes(field: str) -> int:
    """A size of this process as the kernel gives it (proc(5), status): VmData, VmRSS, or its peak VmHWM."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
