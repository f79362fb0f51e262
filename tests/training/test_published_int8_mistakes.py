"""The benchmark of two published mistakes makes those mistakes and no others."""

import pytest
import torch
from bench_published_int8_mistakes import build_network, compare, inverted, networks_of, normalize, with_unscaled_biases

from pipeline.data.images import synthetic_images
from pipeline.training.integer_network import QuantizedNetwork, read_layers

NAMES = [
    "fp32",
    "int8 weights",
    "right: int8 activations",
    "right: int32 bias",
    "inverted: int8 activations",
    "inverted: int32 bias",
    "unscaled: int32 bias",
]


def test_an_inverted_scale_saturates_from_1_over_max_on() -> None:
    """Images to 2 and outputs to 4: 4/127 becomes 1/(127 x 4), so that 127 stands for 1/4."""
    images, outputs = inverted([torch.tensor([2 / 127]), torch.tensor([4 / 127])])
    assert float(images * 127) == pytest.approx(2)
    assert float(outputs * 127) == pytest.approx(1 / 4)


def test_only_the_last_layer_has_a_bias_and_unscaled_it_is_next_to_nothing() -> None:
    torch.manual_seed(0)
    layers = read_layers(build_network(10))
    assert [layer.module.bias is not None for layer in layers] == [False] * 4 + [True]
    images, _ = normalize(synthetic_images(8, "train", 0))
    with torch.no_grad():
        right = networks_of(layers, images)["right: int32 bias"]
    assert isinstance(right, QuantizedNetwork)
    assert int(right.layers[-1].biases.abs().max()) > 100
    assert with_unscaled_biases(right).layers[-1].biases.abs().max() == 0  # all biases lie below 0.5


def test_every_way_is_measured_for_every_seed() -> None:
    training, test = synthetic_images(200, "train", 0), synthetic_images(200, "test", 0)
    rows = compare(training, test, seeds=(0, 1), epochs=1, num_calibration_images=20)
    assert [row.network for row in rows] == NAMES
    assert all(len(row.test_accuracy) == 2 for row in rows)
    assert all(0 <= value <= 1 for row in rows for value in row.test_accuracy)
