import pytest
import torch
from factories import RESNET18_GRADIENT_BYTES, RESNET18_PARAMETERS
from torch import nn

from pipeline.plan.model_name import CIFAR_MODELS
from pipeline.workloads.cifar_classifier import Stem, build_model, im2col_convolution


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
