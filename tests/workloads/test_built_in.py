"""The built-in workloads: every model of torchvision is built, one of each kind trains, and the decoder learns."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from factories import RESNET18_GRADIENT_BYTES, RESNET18_PARAMETERS, make_spec
from image_steps import ALONE
from torch import nn

from pipeline.plan.axes import COMPILED_EXECUTIONS, Execution
from pipeline.plan.model_names import CIFAR_MODELS
from pipeline.plan.spec import Spec
from pipeline.training.check_workload import check_workload
from pipeline.training.execution import has_compiler
from pipeline.training.loop import set_precision, train_point
from pipeline.training.step import EagerStep, ignore_mark
from pipeline.workloads.find import build_workload
from pipeline.workloads.gpt import Gpt
from pipeline.workloads.image_classifiers import (
    CifarClassifier,
    Stem,
    TorchvisionClassifier,
    build_model,
    im2col_convolution,
)

NAMES = torchvision.models.list_models(module=torchvision.models)
# the two with auxiliary heads, and one of each kind of the others, the smallest; all are built
TRAINED = ("googlenet", "inception_v3", "mobilenet_v3_small", "resnet18", "squeezenet1_1", "vit_b_32")


def torchvision_point(name: str, **fields: Any) -> Spec:
    given: dict[str, Any] = {"batch_size_per_gpu": 2, "num_samples": 2, "dataset": None, "input": "synthetic"}
    return make_spec(model=f"torchvision:{name}", device="cpu", precision="fp32", **{**given, **fields})


@pytest.mark.training
@pytest.mark.parametrize("name", NAMES)
def test_every_classification_model_of_torchvision_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = torchvision.models.regnet.BlockParams.from_init_params

    def computed_on_cpu(*arguments: Any, **keywords: Any) -> Any:  # these sizes need values
        with torch.device("cpu"):
            return sizes(*arguments, **keywords)

    monkeypatch.setattr(torchvision.models.regnet.BlockParams, "from_init_params", computed_on_cpu)
    with torch.device("meta"):
        workload = build_workload(torchvision_point(name))
        model = workload.build_model()
    assert isinstance(workload, TorchvisionClassifier)
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e6
    assert [workload.image_size_px] == torchvision.models.get_model_weights(name).DEFAULT.transforms().crop_size


@pytest.mark.training
@pytest.mark.parametrize("name", TRAINED)
def test_a_model_of_torchvision_trains_for_a_step(name: str) -> None:
    spec = torchvision_point(name)
    workload = build_workload(spec)
    torch.manual_seed(0)
    model = workload.build_model()
    check_workload(workload, model, spec, ALONE)
    step = EagerStep(model, workload, spec, ALONE)
    step.begin_epoch()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert torch.isfinite(step(workload.synthetic_batch(2, ALONE.device), ignore_mark))
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_every_model_with_auxiliary_heads_is_trained() -> None:
    builders = {name: torchvision.models.get_model_builder(name) for name in NAMES}
    heads = {name for name, builder in builders.items() if "aux_logits" in inspect.getsource(builder)}
    assert heads
    assert heads <= {*TRAINED}


def test_auxiliary_heads_count_in_the_loss_with_their_weight() -> None:
    workload = build_workload(torchvision_point("googlenet"))
    scores = [torch.randn(2, 1000) for _ in range(3)]
    labels = torch.tensor([1, 2])
    losses = [nn.functional.cross_entropy(part, labels) for part in scores]
    found = workload.loss(lambda images: tuple(scores), (torch.zeros(2), labels))
    assert isinstance(found, tuple)
    assert float(found[0]) == pytest.approx(float(losses[0] + 0.3 * (losses[1] + losses[2])))


def test_a_decoder_predicts_only_from_what_comes_before() -> None:
    torch.manual_seed(0)
    model = Gpt(layers=2, heads=2, width=16, length=8, vocabulary=32).build_model().eval()
    tokens = torch.randint(32, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 32
    one, other = model(tokens), model(changed)
    assert torch.allclose(one[:, :5], other[:, :5], atol=1e-6)
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_the_sequences_follow_their_rule_and_do_not_depend_on_who_reads_them() -> None:
    data = Gpt(length=64).dataset()
    sample = data[7]
    assert torch.equal(sample["next"], data[7]["next"])
    assert torch.equal(sample["tokens"][1:], sample["next"][:-1])
    pairs = [data[index] for index in range(50)]
    follows = torch.cat([(pair["next"] - pair["tokens"]) % 512 == 3 for pair in pairs]).float().mean()
    assert 0.85 < float(follows) < 0.95  # nine tokens in ten


@pytest.mark.training
def test_the_decoder_learns_and_is_evaluated_by_a_figure_that_falls() -> None:
    fields = {"input": "dataloader", "num_workers": 0, "num_samples": 512, "batch_size_per_gpu": 32, "epochs": 4}
    options = ("layers=2", "length=32", "rate=0.003", "vocabulary=64", "width=32")
    spec = make_spec(
        model="gpt", dataset=None, options=options, device="cpu", precision="fp32", evaluate=True, **fields
    )
    measurement = train_point(spec, ALONE).measurement
    merits = [epoch.merit for epoch in measurement.epochs]
    assert (measurement.unit, measurement.items_per_sample) == ("tokens", 32)
    assert (measurement.merit, measurement.better) == ("test loss", "lower")
    absent = [(epoch.test_accuracy, epoch.accuracy, epoch.first_learning_rate) for epoch in measurement.epochs]
    assert absent == [(None, None, None)] * 4
    assert (merits[0] or 0) - (merits[-1] or 9) > 0.5


def test_resnet18_for_cifar_has_the_published_size() -> None:
    sizes = [parameter.numel() for parameter in build_model("resnet18", 10).parameters()]
    assert sum(sizes) == RESNET18_PARAMETERS == 11_173_962
    assert 4 * sum(sizes) == RESNET18_GRADIENT_BYTES == 44_695_848


@pytest.mark.parametrize("name", CIFAR_MODELS)
@pytest.mark.parametrize("num_classes", [10, 3])
def test_every_model_of_the_axis_builds_and_gives_a_score_a_class(name: str, num_classes: int) -> None:
    assert build_model(name, num_classes)(torch.zeros(2, 3, 32, 32)).shape == (2, num_classes)


def test_zero_gamma_makes_every_residual_block_begin_as_its_shortcut() -> None:
    def last_gammas(zero_gamma: bool) -> list[float]:
        named = build_model("resnet18", 10, zero_gamma).named_parameters()
        return [float(gamma.detach().abs().max()) for name, gamma in named if name.endswith("bn2.weight")]

    assert last_gammas(True) == [0.0] * 8
    assert last_gammas(False) == [1.0] * 8


@pytest.mark.parametrize(("channels", "kernel_size"), [(3, (3, 3)), (1, (5, 3)), (4, (1, 1))])
def test_patches_times_the_weight_are_the_convolution(channels: int, kernel_size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(channels, 16, kernel_size, padding=1, bias=False)
    images = torch.randn(2, channels, 8, 8)
    expected = convolution(images)
    found = im2col_convolution(images, convolution.weight, 1)
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    (of_convolution,) = torch.autograd.grad(expected.square().sum(), convolution.weight)
    (of_product,) = torch.autograd.grad(found.square().sum(), convolution.weight)
    assert torch.allclose(of_product, of_convolution, rtol=1e-4, atol=1e-3)


def test_the_stem_is_a_convolution_wherever_it_is_not_compiled_for_a_gpu() -> None:
    stem = build_model("resnet18", 10).conv1
    assert isinstance(stem, Stem)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(stem(images), nn.functional.conv2d(images, stem.weight, padding=1))


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
    """Only a CUDA-graph step has its pointwise kernels tuned."""
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


def test_a_random_batch_has_the_classes_of_the_images(image_folder: Path) -> None:
    """An image folder of two classes: a label of another class has no score."""
    spec = make_spec(dataset="imagefolder", device="cpu", model="lenet", num_samples=4, batch_size_per_gpu=2)
    workload = CifarClassifier(spec, image_folder)
    _, labels = workload.synthetic_batch(64, torch.device("cpu"))
    assert set(labels.tolist()) == {0, 1}
    _, correct = workload.loss(workload.build_model(), workload.synthetic_batch(8, torch.device("cpu")))
    assert 0 <= int(correct) <= 8
