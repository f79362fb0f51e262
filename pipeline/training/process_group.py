"""The rank of this process, its device and its process group."""

import os
import typing
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

from pipeline.data.batches import Shard
from pipeline.experiment.spec import Spec

COLLECTIVE_TIMEOUT_S = 300

T = TypeVar("T")


class Rank(NamedTuple):
    """The identity of this process. `device` is an index into the GPUs visible to the job, not into the node's."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.world_size, self.device)


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
                f"the point uses {spec.gpus_per_node} GPUs per node, of which {visible} are visible here; request more "
                "GPUs, or lower num_gpus."
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
        dist.init_process_group(
            "nccl" if spec.device == "cuda" else "gloo",
            store=FileStore(str(store), rank.world_size) if store else None,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=rank.device if spec.device == "cuda" else None,
        )
    return rank


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier(rank: Rank) -> None:
    """Wait for every rank. Return at once where one process trains."""
    if dist.is_initialized():
        dist.barrier(device_ids=[rank.device.index] if rank.device.type == "cuda" else None)


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
    raw = torch.frombuffer(bytearray(msgspec.msgpack.encode(value, enc_hook=encode_array)), dtype=torch.uint8)
    sizes = [int(size) for size in gather_tensors(torch.tensor([len(raw)], device=device))]
    padded = nn.functional.pad(raw, (0, max(sizes) - len(raw))).to(device)
    decoder = msgspec.msgpack.Decoder(kind, dec_hook=decode_array)
    found = zip(gather_tensors(padded), sizes, strict=True)
    return [decoder.decode(part[:size].cpu().numpy().tobytes()) for part, size in found]


def gather_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, which have one shape."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def encode_array(array: object) -> object:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"ranks cannot exchange a {type(array).__name__}")
    return array.tolist()


def decode_array(kind: type, value: object) -> npt.NDArray[np.int64]:
    """Return the array of nested lists. The ranks exchange arrays of int64 alone."""
    if typing.get_origin(kind) is not np.ndarray:
        raise NotImplementedError(f"ranks cannot exchange a {kind}")
    return np.asarray(value, dtype=np.int64)


def device_indices(spec: Spec, rank: Rank) -> list[int]:
    """Return the indices of the visible CUDA devices that this process uses; none on the CPU."""
    if spec.device == "cpu":
        return []
    return list(range(spec.num_gpus)) if spec.strategy == "dp" else [rank.device.index]
