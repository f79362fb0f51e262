"""DistributedDataParallel: every rank has the model, and buckets of gradients are reduced while backward runs."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipeline.plan.spec import Spec
from pipeline.training.process_group import Rank
from pipeline.training.torch_strategies.base import CollectiveCall, TorchStrategy
from pipeline.workloads.workload import Workload


class DdpStrategy(TorchStrategy):
    # it rebuilds its buckets after the first step, and synchronizes for its log in each of the first ten steps
    capture_warm_up_steps = 11
    waits_for_all_gradients = True

    def wrap(
        self, model: nn.Module, workload: Workload, spec: Spec, rank: Rank, group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        if spec.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[rank.device.index] if rank.device.type == "cuda" else None,
            process_group=group,
            broadcast_buffers=spec.broadcast_buffers,
            bucket_cap_mb=spec.bucket_cap_mb,
            gradient_as_bucket_view=spec.gradient_as_bucket_view,
            find_unused_parameters=workload.find_unused_parameters,
            static_graph=spec.static_graph,
        )
        if spec.gradient_compression == "bf16" and group is None:
            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    def sync_if_last(self, model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        assert isinstance(model, DistributedDataParallel)
        return contextlib.nullcontext() if is_last else model.no_sync()

    def silence(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, spec: Spec, calls: list[CollectiveCall]
    ) -> None:
        """Let the all-reduces of gradients return at once. DDP still broadcasts its buffers."""
        assert isinstance(model, DistributedDataParallel)
        hook = cast_without_reduction if spec.gradient_compression == "bf16" else leave_out_reduction
        model.register_comm_hook(calls, hook)


def leave_out_reduction(calls: list[CollectiveCall], bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Do what torch's no-op hook does, and note the call."""
    calls.append(CollectiveCall("gradients", "all_reduce", bucket.buffer().nbytes))
    done: Future[Tensor] = noop_hook(None, bucket)
    return done


def cast_without_reduction(calls: list[CollectiveCall], bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Do what the bf16 hook does without its all-reduce: cast to bf16, divide, and cast back."""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    calls.append(CollectiveCall("gradients", "all_reduce", compressed.nbytes))
    buffer.copy_(compressed)
    done: Future[Tensor] = noop_hook(None, bucket)
    return done


STRATEGY = DdpStrategy()
