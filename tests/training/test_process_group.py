"""What ranks exchange: it arrives as it was sent, and nothing that arrives runs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.nn.functional as dist_functions
from forked_ranks import run_ranks
from port_attacker import Canary
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from pipeline.communication.profiling import RankTrace, TracedCollective
from pipeline.records.record import DeviceMemory, RankEpoch
from pipeline.training import process_group
from pipeline.training.loop import RankEpochSeries


@pytest.mark.usefixtures("alone_in_a_group")
def test_values_arrive_as_they_were_sent() -> None:
    memory = [DeviceMemory(rank=0, device="cpu", peak_allocated_bytes=2**40, usable_bytes=None)]
    trace = RankTrace([TracedCollective("all_reduce", 516, 0.5, 3.0)], 3, 2, 1)
    sent_as: list[tuple[Any, Any]] = [
        (True, bool),
        (0.1 + 0.2, float),
        ({"ddp": 2**62}, dict[str, int]),
        (memory, list[DeviceMemory]),
        ((trace, None), tuple[RankTrace | None, str | None]),
        ((None, "rank 0: no profile"), tuple[RankTrace | None, str | None]),
    ]
    for sent, kind in sent_as:
        assert process_group.all_gather(sent, kind) == [sent]


@pytest.mark.usefixtures("alone_in_a_group")
def test_an_epoch_that_diverged_arrives_with_its_part_times() -> None:
    sent = RankEpochSeries(
        RankEpoch(rank=0, num_samples=5), [[0, 1], [2, 3], [4, 5]], [0.5, math.nan, math.inf], [2, 2, 1], 4
    )
    (found,) = process_group.all_gather(sent, RankEpochSeries)
    assert found._replace(losses=[]) == sent._replace(losses=[])
    assert found.losses == pytest.approx([0.5, math.nan, math.inf], nan_ok=True)


class GatheredGradient(torch.autograd.Function):
    """Nothing in the forward pass, an all-reduce of the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradients[0])
        return gradients[0]


def gather_in_autocast(x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        checkpoint(lambda y: torch.cat(dist_functions.all_gather(y @ y.T)), x, use_reentrant=False).sum().backward()


def summed(x: torch.Tensor) -> Any:
    assert dist.group.WORLD is not None
    return functional_collectives.all_reduce(x, "sum", dist.group.WORLD)


@torch.compile(backend="eager")
def compiled(x: torch.Tensor) -> Any:
    return summed(x) + 1


def called_in(module: str) -> Callable[[torch.Tensor], object]:
    """A function of this module of torch that calls a collective."""
    names: dict[str, Any] = {"__name__": module, "dist": dist}
    exec("def reduce(x):\n    dist.all_reduce(x.detach())", names)
    found: Callable[[torch.Tensor], object] = names["reduce"]
    return found


@pytest.mark.fault("F63")
@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda x: dist.all_reduce(x.detach(), async_op=True).wait(), {"all_reduce"}),
        (lambda x: dist.all_gather_into_tensor(torch.empty(4, 2), x.detach()), {"all_gather"}),
        (lambda x: dist.reduce_scatter_tensor(torch.empty(4, 2), x.detach()), {"reduce_scatter"}),
        (lambda x: dist.all_to_all_single(torch.empty(4, 2), x.detach()), {"all_to_all"}),
        (lambda x: dist.broadcast(x.detach(), 0, group=dist.new_group([0])), {"broadcast"}),
        (lambda x: dist.all_gather_object([None], 1), {"all_gather"}),
        (lambda x: dist.barrier(), {"barrier"}),
        (lambda x: summed(x) + 1, {"all_reduce"}),
        (lambda x: GatheredGradient.apply(x).sum().backward(), {"all_reduce"}),  # type: ignore[no-untyped-call]
        (gather_in_autocast, {"all_gather", "scatter"}),
        (compiled, {"all_reduce"}),
        (called_in("torch.distributed.fsdp._fully_shard._fsdp_collectives"), set()),
        (called_in("torch.nn.modules._functions"), {"all_reduce"}),  # a SyncBatchNorm of the model itself
        (lambda x: (x @ x.T).sum().backward(), set()),
    ],
)
def test_the_users_own_collectives_are_seen_wherever_they_run(call: Callable[[Any], object], found: set[str]) -> None:
    watch = process_group.CollectiveWatch()
    x = torch.ones(4, 2, requires_grad=True)
    with watch, torch.compiler.set_stance("force_eager"):
        call(x)
    assert watch.operations == found
    assert watch.gather() == tuple(sorted(found))
    assert dist.all_reduce(torch.ones(1)) is None
    assert watch.operations == found  # not what runs outside


@pytest.mark.fault("F63")
def test_the_collectives_of_an_operation_on_shards_are_seen() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    shards = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    with process_group.CollectiveWatch() as watch:
        shards.softmax(0)
    dist.destroy_process_group()
    assert watch.operations == {"all_gather"}


def gather_beside_an_attacker(rank: int, folder: str) -> None:
    """Gather a value from rank 1, which sends a pickle instead."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 0:
        with pytest.raises(msgspec.MsgspecError):
            process_group.all_gather(True, bool)
        Path(folder, "refused").touch()
    else:
        raw = torch.frombuffer(bytearray(Canary(Path(folder, "canary")).pickled()), dtype=torch.uint8)
        process_group.gather_tensors(torch.tensor([len(raw)]))
        process_group.gather_tensors(raw)
    dist.destroy_process_group()


@pytest.mark.training
@pytest.mark.fault("F42")
def test_a_pickle_from_another_rank_is_refused_and_does_not_run(tmp_path: Path) -> None:
    run_ranks(gather_beside_an_attacker, (str(tmp_path),), 2)
    assert ((tmp_path / "refused").exists(), (tmp_path / "canary").exists()) == (True, False)
