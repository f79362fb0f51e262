"""A process group whose collectives return at once."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from pipeline.training.process_group import Rank


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
