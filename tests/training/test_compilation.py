"""Options of the compiler for a step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from factories import make_spec
from torch import nn

from pipeline.experiment.spec import COMPILED_EXECUTIONS
from pipeline.training import compilation
from pipeline.training.step import cross_entropy
from pipeline.training.step_setup import has_compiler

needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="torch.compile needs a C++ compiler")


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    yield
    compilation.set_cudnn_benchmark("eager")


@pytest.mark.training
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_only_a_captured_step_has_its_pointwise_kernels_tuned() -> None:
    options = compilation.inductor_options("compiled_graph")
    assert options == {"combo_kernels": True, "max_autotune_pointwise": True}
    assert compilation.inductor_options("compile") == {"combo_kernels": True, "max_autotune_pointwise": False}
    torch.compile(nn.Linear(1, 1), options=options)  # which refuses an option that it does not know


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("device", "options"), [("cuda", compilation.inductor_options("compile")), ("cpu", {})])
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
