"""The strategies in torch. Their facts without torch are declared in `plan/strategies.py`."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pipeline.data.batches import memory_format
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import StrategyName
from pipeline.records.record import Sharding
from pipeline.training.process_group import Rank
from pipeline.workloads.workload import Workload, WorkloadError, describe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

RESHARD_AFTER_FORWARD = {"blocks": None, "always": True, "never": False}  # None: blocks reshard, the root does not
NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

SyncContext = Callable[[bool], contextlib.AbstractContextManager[Any]]  # takes: is this the last pass of an update?


class TorchStrategy:
    """A strategy in torch. This class trains the bare model; a subclass overrides what its strategy does otherwise."""

    capture_warm_up_steps = 3
    waits_for_all_gradients = False  # an update does not end if a parameter gets no gradient

    def check(self, workload: Workload, model: nn.Module, spec: Spec) -> None:
        """Raise WorkloadError for what of the bare model the strategy cannot place. It needs no process group."""

    def place(self, model: nn.Module, workload: Workload, spec: Spec, rank: Rank) -> nn.Module:
        """Move the bare model to the rank's device, its weights in the memory layout of the spec.

        Raises WorkloadError.
        """
        prepare_blocks(workload, model, spec)
        placed: nn.Module = model.to(rank.device, memory_format=memory_format(spec))  # type: ignore[call-overload]
        return placed

    def wrap(
        self, model: nn.Module, workload: Workload, spec: Spec, rank: Rank, group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Return the placed model as it trains over all ranks, or over the process group `group`."""
        return model

    def describe_sharding(self, workload: Workload, model: nn.Module, spec: Spec) -> Sharding | None:
        """Return the sizes of the model's units before sharding, in bytes; None if its parameters are not sharded."""
        return None

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer as the strategy runs it. Raises WorkloadError if it cannot be sharded."""
        return optimizer

    def sync_if_last(self, model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a pass: gradients travel only in the last pass of an update."""
        return contextlib.nullcontext()


class DataParallelStrategy(TorchStrategy):
    """DataParallel: one process copies the model to the first GPUs in each step."""

    def wrap(
        self, model: nn.Module, workload: Workload, spec: Spec, rank: Rank, group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        if spec.precision == "bf16":  # its threads turn autocast on without a type, and would compute in fp16
            model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype("cuda", torch.bfloat16))
        return DataParallel(model, device_ids=list(range(spec.num_gpus)))


class DdpStrategy(TorchStrategy):
    """DistributedDataParallel: every rank has the model, and buckets of gradients are reduced while backward runs."""

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


class Zero1Strategy(DdpStrategy):
    """ZeRO-1 around DDP (torch.distributed.optim.ZeroRedundancyOptimizer): a rank updates a part of the parameters."""

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


class FsdpStrategy(TorchStrategy):
    """FSDP2 (torch.distributed.fsdp.fully_shard): a rank keeps its shard of each parameter, gradient and state.

    HSDP is the same over a mesh of two dimensions: copies of the model lie along one, their shards along the other.
    """

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


TORCH_STRATEGIES: Mapping[StrategyName, TorchStrategy] = {
    "single": TorchStrategy(),
    "dp": DataParallelStrategy(),
    "ddp": DdpStrategy(),
    "zero1": Zero1Strategy(),
    "fsdp": FsdpStrategy(),
    "hsdp": FsdpStrategy(),
}


def prepare_blocks(workload: Workload, model: nn.Module, spec: Spec) -> None:
    """Compile each block of the bare model, or keep none of its activations, as the spec says.

    Hooks of a wrapper stay outside, and names of parameters as they are. Earlier compiled code is dropped.
    Raises WorkloadError if the model has no blocks.
    """
    if not spec.axes_of_blocks:
        return
    blocks = units_of(workload, model)
    if not blocks:
        stated = " and ".join(f"{axis}: blocks" for axis in spec.axes_of_blocks)
        raise WorkloadError(f"shard_units names no block for {stated}; name them, or leave it out")
    if spec.compile == "blocks":
        torch.compiler.reset()
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
    if spec.activation_checkpointing == "blocks":
        for block in blocks:
            block.forward = checkpointed(block.forward)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that keeps its inputs and its random state, and runs again in the backward pass."""
    return lambda *inputs, **keywords: checkpoint(forward, *inputs, use_reentrant=False, **keywords)


def units_of(workload: Workload, model: nn.Module) -> list[nn.Module]:
    """Return the workload's units. Raises WorkloadError unless they are different parts of the model."""
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
    return units


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has the state: of ZeroRedundancyOptimizer the rank's own."""
    owner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return owner


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP's or DataParallel's wrapper."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state on this rank: a part of the whole if the strategy shards it."""
    values = [value for state in own_optimizer(optimizer).state.values() for value in state.values()]
    return sum(local_part(value).nbytes for value in values if isinstance(value, torch.Tensor))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that lies on this rank: its shard under FSDP, else the tensor itself."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
