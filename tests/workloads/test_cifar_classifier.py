"""How the compiled step of a CIFAR model is tuned."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_spec
from PIL import Image
from torch import nn

from pipeline.plan.axes import COMPILED_EXECUTIONS, Execution
from pipeline.training.execution import has_compiler
from pipeline.training.loop import set_precision
from pipeline.workloads.cifar_classifier import CifarClassifier

needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="torch.compile needs a C++ compiler")


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    yield
    set_precision(make_spec())


def classifier(device: str, execution: Execution) -> CifarClassifier:
    return CifarClassifier(make_spec(device=device, execution=execution), None, execution)


@pytest.mark.parametrize(
    ("device", "execution", "options"),
    [
        ("cuda", "compile", {"combo_kernels": True, "max_autotune_pointwise": False}),
        ("cuda", "compiled_graph", {"combo_kernels": True, "max_autotune_pointwise": True}),
        ("cpu", "compile", None),
    ],
)
def test_a_model_is_compiled_with_the_options_of_its_device(
    device: str, execution: Execution, options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a captured step has its pointwise kernels tuned."""
    told: dict[object, dict[str, Any]] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **given: told.setdefault(function, given) and function)
    model = nn.Identity()
    assert classifier(device, execution).compile(model) is model
    assert told.pop(model) == {"dynamic": False} | ({"options": options} if options else {})
    assert list(told.values()) == [{"dynamic": False}]  # the loss


@pytest.mark.training
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("execution", COMPILED_EXECUTIONS)
def test_torch_knows_the_options(execution: Execution) -> None:
    """It refuses an option that it does not know."""
    assert callable(classifier("cuda", execution).compile(nn.Linear(1, 1)))


def test_only_a_compiled_step_has_its_convolutions_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    set_precision(make_spec())
    found = [torch.backends.cudnn.benchmark]
    classifier("cuda", "compile").compile(nn.Identity())
    found.append(torch.backends.cudnn.benchmark)
    set_precision(make_spec())  # of the next point
    found.append(torch.backends.cudnn.benchmark)
    assert (found, torch.backends.cudnn.benchmark_limit) == ([False, True, False], 0)


def test_a_random_batch_has_the_classes_of_the_images(tmp_path: Path) -> None:
    """An image folder of two classes: a label of another class has no score."""
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(2):
                Image.new("RGB", (32, 32), (index, 0, 0)).save(tmp_path / split / name / f"{index}.png")
    spec = make_spec(dataset="imagefolder", device="cpu", model="lenet", num_samples=4, batch_size_per_gpu=2)
    workload = CifarClassifier(spec, tmp_path)
    _, labels = workload.synthetic_batch(64, torch.device("cpu"))
    assert set(labels.tolist()) == {0, 1}
    _, correct = workload.loss(workload.build_model(), workload.synthetic_batch(8, torch.device("cpu")))
    assert 0 <= int(correct) <= 8
