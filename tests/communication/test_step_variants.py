"""Variants of a step, and transfers of DataParallel at torch's functions: stand-ins replace these."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_steps import ALONE
from torch import nn
from torch.nn.parallel import comm

from pipeline.communication import measure_point, step_variants
from pipeline.communication.measure_point import (
    TRANSFER_FUNCTIONS,
    count_data_parallel_transfers,
    time_step_parts,
)
from pipeline.communication.process_group import DDP_MODULE, SYNC_BATCHNORM_MODULE, Call, install
from pipeline.communication.step_variants import (
    CollectiveCall,
    StepContext,
    build_variants,
    choose_variants,
    count_calls,
    describe_own,
    list_calls,
    wrap_variant,
)
from pipeline.plan.axes import Execution
from pipeline.plan.spec import Spec
from pipeline.plan.strategies import DDP
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep
from pipeline.workloads.find import build_workload
from pipeline.workloads.image_classifiers import build_model

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
def test_the_step_without_reduction_makes_the_bucket_and_the_casts(compression: str, num_bytes: int) -> None:
    """A layer of 3 x 4 weights and 4 biases: one bucket of 16 gradients."""
    install()
    spec = ddp_spec(device="cpu", gradient_compression=compression)
    model, _ = wrap_variant("no_op_hook", nn.Linear(3, 4), context_of(spec, Rank(0, 1, torch.device("cpu"))))
    with install().counting() as calls, install().in_mode("silent"):
        model(torch.ones(2, 3)).sum().backward()
    assert list_calls(calls, Counter()) == [CollectiveCall("gradients", "all_reduce", num_bytes, num_ranks=1)]
    torch.testing.assert_close(next(model.parameters()).grad, torch.full((4, 3), 2.0))


def test_calls_have_their_kind_by_module_and_collective_without_those_of_the_user() -> None:
    own = Counter([Call("all_gather", 64_000_000, "", "user"), Call("all_reduce", 4, "a single number", "user")])
    calls = own + Counter(
        [
            Call("all_reduce", 64, caller="torch.autograd.graph"),
            Call("broadcast", 8, caller=DDP_MODULE),
            Call("all_gather", 36, caller=SYNC_BATCHNORM_MODULE),
            Call("all_reduce", 8, "a single number", "torch.distributed.tensor"),
        ]
    )
    assert list_calls(calls, own) == [
        CollectiveCall("gradients", "all_reduce", 64),
        CollectiveCall("buffers", "broadcast", 8),
        CollectiveCall("batchnorm_statistics", "all_gather", 36),
    ]
    assert describe_own(own) == (
        "the model or its loss calls all_gather of 64 MB: that is communication too",
        "in every step, the reference too, stay real: all_reduce (a single number)",
    )
    assert describe_own(Counter()) == ()


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.fault("F63")
def test_the_collectives_of_the_users_code_are_those_of_the_bare_step() -> None:
    """As in before_update(): a metric, or the norm of gradients."""
    install()
    step: Any = SimpleNamespace(eager=lambda: dist.all_reduce(torch.ones(2)))
    assert [(call.collective, call.num_bytes) for call in count_calls(step)] == [("all_reduce", 8)]


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRANSFER_FUNCTIONS:
        monkeypatch.setattr(comm, name, lambda *_, **__: "moved")


@pytest.mark.usefixtures("without_gpus")
def test_every_transfer_of_a_step_is_counted_by_kind_and_still_made() -> None:
    weights = [torch.zeros(10, requires_grad=True), torch.zeros(5, requires_grad=True)]
    buffers = [torch.zeros(3), torch.zeros(1, dtype=torch.int64)]
    images, outputs, devices = torch.zeros(8, 3, 4, 4), torch.zeros(2, 10), [0, 1, 2, 3]
    answers: list[Any] = []

    def step() -> None:
        answers.extend(
            [
                comm.scatter(images, devices, None, 0, None),
                comm.broadcast_coalesced(weights, devices),
                comm.broadcast_coalesced(buffers, devices),
                comm.gather([outputs] * 4, 0, 0),
                comm.scatter(torch.zeros(8, 10), devices, None, 0, None),
                comm.reduce_add_coalesced([weights] * 4, 0),
            ]
        )

    counted = {part.kind: (part.calls_per_step, part.bytes_per_step) for part in count_data_parallel_transfers(step, 2)}
    assert counted == {
        "inputs": (1, 8 * 3 * 4 * 4 * 4 * 3 / 4),
        "parameters": (1, 15 * 4 * 3),
        "buffers": (1, (3 * 4 + 8) * 3),
        "outputs": (2, 3 * 2 * 10 * 4 + 8 * 10 * 4 * 3 / 4),
        "gradients": (1, 15 * 4 * 3),
    }
    assert answers == ["moved"] * 12


@pytest.mark.usefixtures("without_gpus")
def test_torchs_functions_are_put_back() -> None:
    before = {name: getattr(comm, name) for name in TRANSFER_FUNCTIONS}
    with pytest.raises(ZeroDivisionError):
        count_data_parallel_transfers(lambda: 1 / 0, 1)
    assert {name: getattr(comm, name) for name in TRANSFER_FUNCTIONS} == before


def test_the_split_is_of_the_step_that_trains_with_each_of_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ddp_spec(strategy="dp", grad_accumulation=2, weight_decay=0.1)
    model: Any = nn.DataParallel(build_model("lenet", 10))
    now_ns = itertools.count()
    model.output_device = None
    monkeypatch.setattr(model, "scatter", lambda inputs, keywords, _: ([inputs], [keywords]))
    monkeypatch.setattr(model, "replicate", lambda module, _: [module])
    monkeypatch.setattr(model, "parallel_apply", lambda replicas, inputs, _: [replicas[0](*inputs[0])])
    monkeypatch.setattr(model, "gather", lambda outputs, _: outputs[0])
    monkeypatch.setattr(measure_point, "device_indices", lambda *_: [])
    monkeypatch.setattr(measure_point, "time_when_idle_ns", lambda _: next(now_ns))
    stepped: list[torch.optim.Optimizer] = []
    monkeypatch.setattr(EagerStep, "_update", lambda step: stepped.append(step.optimizer))
    batch = torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)
    split = time_step_parts(model, StepContext(spec, ALONE, build_workload(spec), batch, None))
    of_passes = ("scatter", "replicate", "parallel_forward", "gather", "backward")
    times_ns = {part.part: part.times_ns for part in split}
    assert times_ns == {**dict.fromkeys(of_passes, (2,) * 6), "optimizer": (1,) * 6}
    assert {optimizer.defaults["weight_decay"] for optimizer in stepped} == {0.1}
