"""DataParallel: one process copies the model to the first GPUs in each step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

from pipeline.plan.spec import Spec
from pipeline.training.process_group import Rank
from pipeline.training.torch_strategies.base import TorchStrategy
from pipeline.workloads.workload import Workload


class DataParallelStrategy(TorchStrategy):
    def wrap(
        self, model: nn.Module, workload: Workload, spec: Spec, rank: Rank, group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        if spec.precision == "bf16":  # its threads turn autocast on without a type, and would compute in fp16
            model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype("cuda", torch.bfloat16))
        return DataParallel(model, device_ids=list(range(spec.num_gpus)))


STRATEGY = DataParallelStrategy()
