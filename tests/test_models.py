from typing import get_args

import pytest
import torch
from factories import RESNET18_GRADIENT_BYTES, RESNET18_PARAMETERS

from pipeline.models import build_model
from pipeline.spec import Model


def test_resnet18_for_cifar_has_the_published_size() -> None:
    sizes = [parameter.numel() for parameter in build_model("resnet18", 10).parameters()]
    assert sum(sizes) == RESNET18_PARAMETERS == 11_173_962
    assert 4 * sum(sizes) == RESNET18_GRADIENT_BYTES == 44_695_848


@pytest.mark.parametrize("name", get_args(Model))
@pytest.mark.parametrize("num_classes", [10, 3])
def test_every_model_of_the_axis_builds_and_gives_a_score_a_class(name: Model, num_classes: int) -> None:
    scores = build_model(name, num_classes)(torch.zeros(2, 3, 32, 32))
    assert scores.shape == (2, num_classes)


def test_zero_gamma_makes_every_residual_block_begin_as_its_shortcut() -> None:
    def last_gammas(zero_gamma: bool) -> list[float]:
        named = build_model("resnet18", 10, zero_gamma).named_parameters()
        return [float(gamma.detach().abs().max()) for name, gamma in named if name.endswith("bn2.weight")]

    assert last_gammas(True) == [0.0] * 8
    assert last_gammas(False) == [1.0] * 8
