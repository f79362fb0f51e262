"""The benchmark of published mistakes makes those mistakes and no others."""

import pytest
import torch
from bench_published_int8_mistakes import build_network, clamped, compare, inverted, networks_of, normalize

from pipeline.data.images import synthetic_images
from pipeline.training.integer_network import QuantizedNetwork, read_layers

NAMES = [
    "no bias: fp32",
    "no bias: int8 weights",
    "no bias: right",
    "no bias: inverted",
    "no bias: clamped",
    "bias: fp32",
    "bias: int8 weights",
    "bias: right",
    "bias: unscaled bias",
    "bias: inverted",
    "bias: inverted, right bias",
    "bias: inverted, printed bias scale",
    "bias: printed bias scale",
    "bias: clamped",
    "bias: clamped, unscaled bias",
]


def test_an_inverted_scale_saturates_from_1_over_max_on() -> None:
    """Images to 2 and outputs to 4: 4/127 becomes 1/(127 x 4), so that 127 stands for 1/4."""
    images, outputs = inverted([torch.tensor([2 / 127]), torch.tensor([4 / 127])])
    assert (float(images * 127), float(outputs * 127)) == pytest.approx((2, 1 / 4))


def test_clamped_outputs_saturate_at_half_of_their_largest_magnitude() -> None:
    """Images to 2 and outputs to 4: 255 stands for 4, so 127 for 1.99."""
    images, outputs = clamped([torch.tensor([2 / 127]), torch.tensor([4 / 127])])
    assert (float(images * 127), float(outputs * 127)) == pytest.approx((2, 4 * 127 / 255))


def test_no_layer_or_the_last_one_has_a_bias() -> None:
    assert [
        [layer.module.bias is not None for layer in read_layers(build_network(10, has_bias))]
        for has_bias in (False, True)
    ] == [[False] * 5, [False] * 4 + [True]]


def test_a_bias_is_next_to_nothing_if_unscaled_and_follows_the_scales_or_not_if_inverted() -> None:
    torch.manual_seed(0)
    images, _ = normalize(synthetic_images(8, "train", 0))
    with torch.no_grad():
        networks = networks_of(build_network(10, has_bias=True), images)
    lasts = {name: network.layers[-1] for name, network in networks.items() if isinstance(network, QuantizedNetwork)}
    biases = {name.removeprefix("bias: "): last.biases for name, last in lasts.items()}
    assert int(biases["right"].abs().max()) > 100
    assert biases["unscaled bias"].abs().max() == 0  # all biases lie below 0.5
    assert torch.equal(biases["inverted, right bias"], biases["right"])
    assert not torch.equal(biases["inverted"], biases["right"])
    last = lasts["bias: right"]
    factors = float(last.input_scale * last.weight_scales)  # 1 / (weight factor x input factor x product)
    printed = (last.layer.biases.double() * 2147483647 * factors).round()
    assert torch.allclose(biases["printed bias scale"].double(), printed, rtol=1e-6)


@pytest.mark.training
def test_every_way_is_measured_for_every_seed() -> None:
    training, test = synthetic_images(200, "train", 0), synthetic_images(200, "test", 0)
    rows = compare(training, test, seeds=(0, 1), epochs=1, num_calibration_images=20)
    assert [row.network for row in rows] == NAMES
    assert all(len(row.test_accuracy) == 2 for row in rows)
    assert all(0 <= value <= 1 for row in rows for value in row.test_accuracy)
