"""ZeRO-1 around DDP (torch.distributed.optim.ZeroRedundancyOptimizer): a rank updates a part of the parameters."""

import inspect

import torch

from pipeline.training.torch_strategies.ddp import DdpStrategy
from pipeline.workloads.workload import WorkloadError


class Zero1Strategy(DdpStrategy):
    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return a ZeroRedundancyOptimizer of the same kind and settings, which broadcasts after each rank's update.

        Raises WorkloadError if the optimizer cannot be built anew from its settings.
        """
        kind = type(optimizer)
        known = inspect.signature(kind).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in known}
        kept = {"params", *known}
        groups = [{key: group[key] for key in group if key in kept} for group in optimizer.param_groups]
        cure = "use an optimizer of torch.optim, such as AdamW, or strategy: ddp"
        try:
            rebuilt = kind([dict(group) for group in groups], **settings)
        except Exception as error:  # whatever its constructor raises
            raise WorkloadError(
                f"ZeRO-1 cannot build {kind.__name__} for a part of the parameters ({error}); {cure}"
            ) from error
        if rebuilt.defaults != optimizer.defaults or optimizer.state:
            raise WorkloadError(f"ZeRO-1 cannot build {kind.__name__} anew from its settings; {cure}")
        if dropped := what_is_attached(optimizer, rebuilt):
            raise WorkloadError(
                f"ZeRO-1 builds {kind.__name__} anew without what was attached to it ({', '.join(dropped)}); do that "
                "in before_update() or learning_rate(), or use strategy: ddp"
            )
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, parameters_as_bucket_view=True, **settings)


def what_is_attached(optimizer: torch.optim.Optimizer, rebuilt: torch.optim.Optimizer) -> list[str]:
    """Return what an optimizer has beside its settings: hooks, replaced methods, keys of its parameter groups."""
    own, plain = vars(optimizer), vars(rebuilt)
    hooks = [name.removeprefix("_optimizer_") for name, value in own.items() if name.endswith("_hooks") and value]
    groups = {key for group in optimizer.param_groups for key in group if key != "param_names"}
    added = groups - {key for group in rebuilt.param_groups for key in group}
    return [*hooks, *(name for name in own if name not in plain), *sorted(added)]


STRATEGY = Zero1Strategy()
