"""FSDP2 (torch.distributed.fsdp.fully_shard): a rank keeps its shard of each parameter, gradient and state."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.plan.spec import Spec
from pipeline.records.record import Sharding
from pipeline.training.process_group import Rank
from pipeline.training.torch_strategies.base import TorchStrategy, prepare_blocks, units_of
from pipeline.workloads.workload import Workload, WorkloadError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

RESHARD_AFTER_FORWARD = {"blocks": None, "always": True, "never": False}  # None: blocks reshard, the root does not
NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FsdpStrategy(TorchStrategy):
    def check(self, workload: Workload, model: nn.Module, spec: Spec) -> None:
        shard_units_of(workload, model)
        if spec.param_dtype == "bf16":
            refuse_batchnorm(model)

    def place(self, model: nn.Module, workload: Workload, spec: Spec, rank: Rank) -> nn.Module:
        """Shard the units of the workload one by one, then what is left in the root. Raises WorkloadError.

        One unit at a time lies on the device as a whole.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        self.check(workload, model, spec)
        prepare_blocks(workload, model, spec)
        mesh = build_mesh(spec, rank)
        is_pinned = rank.device.type == "cuda"
        for unit in (*shard_units_of(workload, model), model):
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=RESHARD_AFTER_FORWARD[spec.reshard],
                mp_policy=mixed_precision(spec, unit is model),
                offload_policy=CPUOffloadPolicy(pin_memory=is_pinned) if spec.cpu_offload else OffloadPolicy(),
            )
        return model

    def describe_sharding(self, workload: Workload, model: nn.Module, spec: Spec) -> Sharding | None:
        units = shard_units_of(workload, model)
        in_units = [padded_bytes(unit, spec.num_shards) for unit in units]
        return Sharding(
            num_units=len(units),
            units_bytes=sum(in_units),
            largest_unit_bytes=max(in_units, default=0),
            root_bytes=padded_bytes(model, spec.num_shards) - sum(in_units),
        )

    def sync_if_last(self, model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()


def build_mesh(spec: Spec, rank: Rank) -> "DeviceMesh":
    """Return the ranks in one line if they share one copy of the model, else a row for each copy."""
    from torch.distributed.device_mesh import init_device_mesh

    num_copies = rank.world_size // spec.num_shards
    if num_copies == 1:
        return init_device_mesh(rank.device.type, (rank.world_size,))
    return init_device_mesh(rank.device.type, (num_copies, spec.num_shards), mesh_dim_names=("replicate", "shard"))


def shard_units_of(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """Return the workload's units of FSDP. Raises WorkloadError if two of them share a parameter."""
    units = units_of(workload, model)
    refuse_broken_tie(model, units)
    return units


def refuse_broken_tie(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise WorkloadError for a parameter of two modules that lie in different units: each would train its own."""
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for module, prefix, owner in with_owners(model, "", model, set(units)):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            first, name = owners.setdefault(parameter, (owner, prefix + key))
            if first is not owner:
                raise WorkloadError(
                    f"{name} and {prefix}{key} are one tensor, which shard_units puts into two units, and FSDP would "
                    "train two; leave both modules out of shard_units, or put them into one unit"
                )


def with_owners(
    module: nn.Module, prefix: str, owner: nn.Module, units: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield each module at each of its places, with the prefix of its names and the unit that it lies in."""
    yield module, prefix, owner
    for name, child in module._modules.items():  # named_children() skips a module's second place
        if child is not None:
            yield from with_owners(child, f"{prefix}{name}.", child if child in units else owner, units)


def mixed_precision(spec: Spec, is_root: bool) -> "MixedPrecisionPolicy":
    """Return FSDP's number formats. Outputs of a model with bf16 weights are cast to float32 for the loss."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    is_cast, is_reduced_in_bf16 = spec.param_dtype == "bf16", spec.reduce_dtype == "bf16"
    reduced = torch.bfloat16 if is_reduced_in_bf16 else torch.float32
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if is_cast else None,
        reduce_dtype=reduced if is_cast or is_reduced_in_bf16 else None,  # None: the type of the weights
        output_dtype=torch.float32 if is_cast and is_root else None,
    )


def refuse_batchnorm(model: nn.Module) -> None:
    """Raise WorkloadError for a BatchNorm: its kernels take parameters of the type of its statistics, float32."""
    for name, module in model.named_modules():
        if isinstance(module, NORMALISATIONS):
            raise WorkloadError(
                f"{name or 'the model'} is a {type(module).__name__}, whose statistics are float32, so its parameters "
                "cannot be bf16; use param_dtype: fp32"
            )


def padded_bytes(module: nn.Module, num_shards: int) -> int:
    """Return the bytes of a module's parameters, their first dimensions padded to a multiple of the shards."""
    total = 0
    for parameter in module.parameters():
        rows = max(1, len(parameter))
        total += parameter.nbytes // rows * (rows + -rows % num_shards)
    return total


STRATEGY = FsdpStrategy()
