"""DistributedDataParallel: every rank has the model, and buckets of gradients are reduced while backward runs."""

import contextlib
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from pipeline.plan.spec import Spec
from pipeline.training.process_group import Rank
from pipeline.training.torch_strategies.base import TorchStrategy
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


STRATEGY = DdpStrategy()
