"""How each strategy places, wraps and updates a model: bare, DataParallel, DDP, FSDP2, and ZeRO-1 around DDP.

FSDP2 is torch.distributed.fsdp.fully_shard; ZeRO-1 is torch.distributed.optim.ZeroRedundancyOptimizer.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipeline.data.batches import memory_format
from pipeline.experiment.measurement import Sharding
from pipeline.experiment.spec import Spec
from pipeline.training.process_group import Rank
from pipeline.workloads.workload import Workload, WorkloadError, describe, optimizer_of

RESHARD_AFTER_FORWARD = {"blocks": None, "always": True, "never": False}  # None: blocks reshard, the root does not

SyncContext = Callable[[bool], contextlib.AbstractContextManager[Any]]  # takes: is this the last pass of an update?


def place_model(model: nn.Module, workload: Workload, spec: Spec, rank: Rank) -> nn.Module:
    """Move the bare model to the rank's device, its weights in the memory layout of the spec.

    Under FSDP the rank keeps its shard of each parameter. One unit at a time lies on the device as a whole.
    Raises WorkloadError.
    """
    if spec.strategy == "fsdp":
        shard_model(model, workload, spec, rank)
        return model
    placed: nn.Module = model.to(rank.device, memory_format=memory_format(spec))  # type: ignore[call-overload]
    return placed


def shard_model(model: nn.Module, workload: Workload, spec: Spec, rank: Rank) -> None:
    """Shard the units of the workload one by one, then what is left in the root. Raises WorkloadError."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    for unit in (*shard_units_of(workload, model), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=RESHARD_AFTER_FORWARD[spec.reshard])


def shard_units_of(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """Return the workload's units of FSDP. Raises WorkloadError unless they are different parts of the model."""
    found: object = workload.shard_units(model)
    if not isinstance(found, Iterable):
        raise WorkloadError(f"shard_units returns {describe(found)}; return a list of parts, as list(model.blocks)")
    units = list(found)
    names = {module: name for name, module in model.named_modules()}
    for unit in units:
        if not isinstance(unit, nn.Module) or unit not in names or unit is model:
            raise WorkloadError(f"shard_units gives {describe(unit)} that is no part of the model; leave it out")
    listed_twice = [names[unit] for unit in units if units.count(unit) > 1]
    if listed_twice:
        raise WorkloadError(f"shard_units gives {listed_twice[0]} twice; give each unit once")
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


def describe_sharding(workload: Workload, model: nn.Module, spec: Spec) -> Sharding | None:
    """Return the sizes of FSDP's units before sharding, in bytes, from the sharded model; None without FSDP."""
    if spec.strategy != "fsdp":
        return None
    units = shard_units_of(workload, model)
    in_units = [padded_bytes(unit) for unit in units]
    return Sharding(
        num_units=len(units),
        units_bytes=sum(in_units),
        largest_unit_bytes=max(in_units, default=0),
        root_bytes=padded_bytes(model) - sum(in_units),
    )


def padded_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters, their first dimensions padded to a multiple of the ranks."""
    num_ranks, total = dist.get_world_size(), 0
    for parameter in module.parameters():
        rows = max(1, len(parameter))
        total += parameter.nbytes // rows * (rows + -rows % num_ranks)
    return total


def wrap_for_strategy(
    model: nn.Module, workload: Workload, spec: Spec, rank: Rank, group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Return the placed model as the strategy trains it: as it is, in DataParallel over the first GPUs, or in DDP.

    DDP works over all ranks, or over the process group `group`.
    """
    if spec.strategy in ("single", "fsdp"):
        return model
    if spec.strategy == "dp":
        if spec.precision == "bf16":  # its threads turn autocast on without a type, and would compute in fp16
            model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype("cuda", torch.bfloat16))
        return DataParallel(model, device_ids=list(range(spec.num_gpus)))
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


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP's or DataParallel's wrapper."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model


def build_optimizer(
    model: nn.Module, workload: Workload, spec: Spec, optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    """Return the workload's optimizer; under ZeRO-1 each rank keeps its state of a part of the parameters.

    `optimizer` is that of the bare model, if it was made before. Raises WorkloadError if ZeRO-1 cannot shard it.
    """
    if optimizer is None:
        optimizer = optimizer_of(workload, bare_model(model))
    return shard_optimizer(optimizer) if spec.strategy == "zero1" else optimizer


def shard_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a ZeroRedundancyOptimizer of the same kind and settings. Its broadcasts follow the update of each rank.

    Raises WorkloadError if the optimizer cannot be built anew from its settings.
    """
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    groups = [
        {key: value for key, value in group.items() if key in {"params", *known}} for group in optimizer.param_groups
    ]
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
            f"ZeRO-1 builds {kind.__name__} anew without what was attached to it ({', '.join(dropped)}); do that in "
            "before_update() or learning_rate(), or use strategy: ddp"
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


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state on this rank: under ZeRO-1 and FSDP a part of the whole."""
    from torch.distributed.tensor import DTensor

    owner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer: the rank's own optimizer
    tensors = [value for state in owner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


def update_sync(model: nn.Module, spec: Spec) -> SyncContext:
    """Return the context of each forward and backward pass: gradients travel only in the last pass of an update."""
    if spec.grad_accumulation == 1:
        return lambda is_last: contextlib.nullcontext()
    return functools.partial(sync_if_last, model)


def sync_if_last(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if is_last else model.no_sync()
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # of an FSDP module
    if set_sync is not None:
        set_sync(is_last)
    return contextlib.nullcontext()
