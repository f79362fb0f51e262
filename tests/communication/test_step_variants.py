from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.communication import step_variants
from pipeline.communication.step_variants import (
    StepContext,
    build_variants,
    choose_variants,
    list_own_collectives,
    wrap_variant,
)
from pipeline.plan.axes import Execution
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import DDP
from pipeline.training.process_group import Rank
from pipeline.training.torch_strategies import torch_strategy
from pipeline.training.torch_strategies.base import CollectiveCall
from pipeline.workloads.find import build_workload

FIRST_OF_TWO = Rank(0, 2, torch.device("cpu"))


def ddp_spec(**fields: object) -> Spec:
    given: dict[str, object] = {"num_gpus": 2, "batch_size_per_gpu": 4, "input": "synthetic", "device": "cuda"}
    given |= {"model": "resnet18", "measure": "communication", "windows": 6, "strategy": "ddp", "precision": "fp32"}
    return Spec(**{**given, **fields})  # type: ignore[arg-type]


def context_of(spec: Spec, rank: Rank) -> StepContext:
    """What variants share, without a batch and another group."""
    return StepContext(spec, rank, build_workload(spec), (torch.zeros(0), torch.zeros(0)), None)


def test_ddp_over_all_ranks_is_built_first_and_ddp_on_one_last_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(step_variants, "build_variant", lambda context, name, execution: built.append(name))
    context = context_of(ddp_spec(), FIRST_OF_TWO)
    build_variants(context, reversed(DDP.variants))
    assert (built, built[0], built[-1]) == (list(DDP.variants), "ddp", "ddp_one")
    built.clear()
    build_variants(context, ("ddp_one", "no_collectives", "no_op_hook", "no_op_hook_again", "ddp", "ddp_again"))
    assert built == ["ddp", "ddp_again", "no_op_hook", "no_op_hook_again", "no_collectives", "ddp_one"]


@pytest.mark.parametrize(
    ("fields", "execution", "note"),
    [
        ({}, "eager", None),
        ({"sync_batchnorm": True}, "eager", None),
        ({"gradient_compression": "bf16"}, "eager", None),
        ({}, "graph", "no step without collectives: not tried in a CUDA graph"),
    ],
)
def test_where_collectives_cannot_be_left_out_a_note_says_so(
    fields: dict[str, object], execution: Execution, note: str | None
) -> None:
    names, notes = choose_variants(ddp_spec(**fields), execution)
    assert (notes, [name for name in DDP.variants if name not in names]) == (
        (note,) if note else (),
        ["no_collectives"] if note else [],
    )


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize(("compression", "num_bytes"), [("none", 64), ("bf16", 32)])
def test_the_step_without_reduction_gives_every_gradient_to_the_no_op_hook(compression: str, num_bytes: int) -> None:
    """A layer of 3 x 4 weights and 4 biases: one bucket of 16 gradients."""
    calls: list[CollectiveCall] = []
    spec = ddp_spec(device="cpu", gradient_compression=compression)
    model, _ = wrap_variant("no_op_hook", nn.Linear(3, 4), context_of(spec, Rank(0, 1, torch.device("cpu"))))
    torch_strategy(spec.strategy).silence(model, torch.optim.SGD(model.parameters()), spec, calls)
    model(torch.ones(2, 3)).sum().backward()
    assert calls == [CollectiveCall("gradients", "all_reduce", num_bytes)]
    torch.testing.assert_close(next(model.parameters()).grad, torch.full((4, 3), 2.0))


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.fault("F63")
def test_the_collectives_of_the_users_code_are_those_of_the_bare_step() -> None:
    """As in before_update(): a metric, or the norm of gradients."""
    step: Any = SimpleNamespace(eager=lambda: dist.all_reduce(torch.ones(1)))
    assert [list_own_collectives(step, FIRST_OF_TWO._replace(world_size=size)) for size in (2, 1)] == [
        ("all_reduce",),
        (),
    ]
