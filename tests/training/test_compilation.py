"""Options of the compiler for a step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from convolutions import Repeated
from factories import make_spec
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.experiment.spec import COMPILED_EXECUTIONS
from pipeline.training import compilation
from pipeline.training.models import build_model
from pipeline.training.step import cross_entropy
from pipeline.training.step_setup import has_compiler

needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="torch.compile needs a C++ compiler")


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    yield
    compilation.set_cudnn_benchmark("eager")


class Wrapped(DistributedDataParallel):
    """A stand-in for DDP that holds a module, without a process group."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = model


@pytest.mark.training
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_compiler_is_told_depends_on_the_execution() -> None:
    from pipeline.training import weight_gradient_overlap

    assert compilation.inductor_options("compile", nn.Identity()) == {"combo_kernels": True}
    captured = compilation.inductor_options("compiled_graph", nn.Identity())
    assert isinstance(captured.pop("post_grad_custom_post_pass"), weight_gradient_overlap.OverlapWeightGradients)
    assert captured == {
        "combo_kernels": True,
        "allow_buffer_reuse": False,
        "inplace_buffers": False,
        "max_autotune_pointwise": True,
    }
    torch.compile(nn.Linear(1, 1), options=captured)  # which refuses an option that it does not know


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("wrapped", "times", "expected"),
    [(False, 1, False), (True, 1, True), (True, 2, False)],
    ids=["bare", "once", "twice"],
)
def test_the_compiler_is_told_where_ddp_alone_reads_the_gradients(wrapped: bool, times: int, expected: bool) -> None:
    model = Wrapped(Repeated(times)) if wrapped else Repeated(times)
    options = compilation.inductor_options("compiled_graph", model)
    assert options["post_grad_custom_post_pass"].to_buckets is expected


@pytest.mark.training
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (build_model("resnet18", 10), True),
        (build_model("lenet", 10), True),
        (Repeated(1), True),
        (Repeated(2), False),
        (Repeated(1, is_computed=True), False),
    ],
)
def test_only_weights_that_are_read_once_go_to_the_buckets(model: nn.Module, expected: bool) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert compilation.is_each_weight_read_once(model) is expected
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("device", "options"), [("cuda", {"combo_kernels": True}), ("cpu", {})])
def test_a_model_is_compiled_with_the_options_of_its_device(
    device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[object, dict[str, Any]] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **given: told.setdefault(function, given) and function)
    model = nn.Identity()
    compiled = compilation.compile_model(model, "compile", make_spec(device=device, execution="compile"))
    assert told == {model: {"dynamic": False, "options": options}, cross_entropy: {"dynamic": False}}
    assert compiled == (model, cross_entropy)


def test_only_a_compiled_step_has_its_convolutions_tuned() -> None:
    for execution in COMPILED_EXECUTIONS:
        compilation.set_cudnn_benchmark(execution)
        assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark_limit == 0
    compilation.set_cudnn_benchmark("graph")
    assert not torch.backends.cudnn.benchmark
