"""Scales, rounding and the int8 network, against arithmetic in integers and onnxruntime."""

import itertools
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx_reference import OnnxNetwork
from torch import nn

from pipeline.records.record import ScaleGranularity, ScaleRule
from pipeline.training.integer_network import (
    INT8_MAX,
    INT8_MIN,
    QuantizationProblem,
    QuantizedNetwork,
    build_quantized_network,
    calibrate,
    compute_scales,
    compute_weight_scales,
    fp32_network,
    max_accumulator,
    quantize,
    quantize_biases,
    read_layers,
    round_weights,
)
from pipeline.workloads.image_classifiers import build_model

Array = npt.NDArray[Any]
SCALES = list(itertools.product(get_args(ScaleRule), get_args(ScaleGranularity)))


def make_lenet() -> nn.Module:
    """LeNet with biases that matter; the images of these tests are noise."""
    torch.manual_seed(0)
    model = build_model("lenet", 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def images_of(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def quantized_lenet(rule: ScaleRule, granularity: ScaleGranularity, int32_biases: bool = True) -> QuantizedNetwork:
    layers = read_layers(make_lenet())
    scales = compute_weight_scales(layers, rule, granularity)
    return build_quantized_network(layers, scales, calibrate(layers, images_of(32, 1), rule), int32_biases)


def test_lenet_is_the_cnn_of_the_courses() -> None:
    assert {
        layer.name: (
            tuple(layer.module.weight.shape),
            layer.has_relu,
            [type(part).__name__ for part in layer.reshaping],
        )
        for layer in read_layers(build_model("lenet", 10))
    } == {
        "conv1": ((6, 3, 5, 5), True, ["MaxPool2d"]),
        "conv2": ((16, 6, 5, 5), True, ["MaxPool2d", "Flatten"]),
        "fc1": ((120, 400), True, []),
        "fc2": ((84, 120), True, []),
        "fc3": ((10, 84), False, []),
    }


@pytest.mark.seconds
@pytest.mark.parametrize("granularity", get_args(ScaleGranularity))
def test_onnxruntime_gives_the_same_outputs_for_the_same_scales(granularity: ScaleGranularity, tmp_path: Path) -> None:
    model, calibration, images = make_lenet(), images_of(32, 1), images_of(2000, 2)
    reference = OnnxNetwork(model, calibration.numpy(), tmp_path, granularity == "per_channel")
    assert (reference.operators.count("QLinearConv"), reference.operators.count("QGemm")) == (2, 3)
    indices = [index for index, module in enumerate(model.children()) if isinstance(module, nn.Conv2d | nn.Linear)]

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(np.atleast_1d(reference.tensors[name]))

    weight_scales = [tensor(f"weight{index}_scale") for index in indices]
    activation_scales = [tensor("images_scale"), *(tensor(f"output{index}_scale") for index in indices)]
    layers = read_layers(model)
    for ours, theirs in (
        (compute_weight_scales(layers, "largest_magnitude", granularity), weight_scales),
        (calibrate(layers, calibration, "largest_magnitude"), activation_scales),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    network = build_quantized_network(layers, weight_scales, activation_scales, int32_biases=True)
    for quantized, index in zip(network.layers, indices, strict=True):
        np.testing.assert_array_equal(quantized.weights.numpy(), reference.tensors[f"weight{index}_quantized"])
        np.testing.assert_array_equal(quantized.biases.numpy(), reference.tensors[f"bias{index}_quantized"])
    expected = reference(images.numpy()) / reference.tensors[f"output{indices[-1]}_scale"]
    assert expected.size == 20_000
    np.testing.assert_array_equal(network(images).numpy(), np.round(expected))


def test_biases_in_fp32_and_int32_differ_by_rounding_alone() -> None:
    images = images_of(50, 2)
    exact = quantized_lenet("largest_magnitude", "per_channel", int32_biases=False)
    rounded = quantized_lenet("largest_magnitude", "per_channel")
    assert [{layer.biases.dtype for layer in network.layers} for network in (exact, rounded)] == [
        {torch.float32},
        {torch.int32},
    ]
    assert int((exact(images).int() - rounded(images).int()).abs().max()) <= 2


def test_rounded_weights_stay_within_half_a_step_of_the_scores() -> None:
    """Scores of int8 weights are near those of fp32 and are not the same."""
    model, images = make_lenet(), images_of(50, 2)
    layers = read_layers(model)
    with torch.no_grad():
        expected = model(images)
    rounded = round_weights(layers, compute_weight_scales(layers, "largest_magnitude", "per_tensor"))
    found = fp32_network(rounded)(images)
    torch.testing.assert_close(fp32_network(layers)(images), expected)  # the layers keep their own weights
    assert 0 < float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_sums_that_fp32_cannot_hold_are_computed_in_float64() -> None:
    """3,001 products of 127 x 127 are odd and above 2^24."""
    wide = nn.Linear(3001, 1, bias=False)
    nn.init.ones_(wide.weight)
    layers = read_layers(nn.Sequential(wide))
    one = torch.tensor([1 / 127])
    (layer,) = build_quantized_network(layers, [one], [one, one], int32_biases=True).layers
    inputs = torch.full((1, 3001), 127, dtype=torch.int8)
    total = 3001 * 127 * 127
    assert total > 2**24
    assert layer.sum_dtype == torch.float64
    assert int(layer.layer.multiply(inputs.double(), layer.weights.double())) == total
    assert int(torch.tensor(total, dtype=torch.float32)) != total


def test_sums_of_more_than_32_bits_are_refused() -> None:
    """128 x 127 x 132,105 is the first product past 2^31 - 1."""
    biases = torch.zeros(1, dtype=torch.int32)
    most = torch.full((1, 132_104), 127, dtype=torch.int8)
    assert max_accumulator(most, biases, "fc1") == 128 * 127 * 132_104 < 2**31
    assert max_accumulator(most[:, :1], biases + 7, "fc1") == 128 * 127 + 7
    assert max_accumulator(most[:, :1], biases.float() + 7, "fc1") == 128 * 127, "in fp32 it is added after the sum"
    with pytest.raises(QuantizationProblem, match=r"fc1: a sum may reach 2147498880, and 32 bits hold 2147483647"):
        max_accumulator(torch.full((1, 132_105), 127, dtype=torch.int8), biases, "fc1")


def test_a_layer_that_never_answers_is_named() -> None:
    model = make_lenet()
    nn.init.constant_(model.get_parameter("0.bias"), -1e6)
    with pytest.raises(QuantizationProblem, match="the outputs of conv1: all values are 0"):
        calibrate(read_layers(model), images_of(2, 1), "largest_magnitude")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "BatchNorm2d cannot be quantized"),
        (nn.Sequential(nn.ReLU(), nn.Linear(3, 4)), "ReLU cannot be quantized"),
        (build_model("resnet18", 10), "cannot be quantized.*use model='lenet'"),
    ],
)
def test_a_model_of_other_parts_is_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(QuantizationProblem, match=why):
        read_layers(model)


@pytest.mark.parametrize(
    ("values", "rule", "granularity", "scales"),
    [
        ([[0.5, -2.54], [1.27, 0.0]], "largest_magnitude", "per_tensor", [0.02]),
        ([[0.5, -2.54], [1.27, 0.0]], "largest_magnitude", "per_channel", [0.02, 0.01]),
        # a channel of zeros has the largest scale of the others
        ([[0.0, 0.0], [1.27, 0.0], [2.54, 1.0]], "largest_magnitude", "per_channel", [0.02, 0.01, 0.02]),
        ([[1, 1, 3, 3]], "three_sigma", "per_tensor", [5 / 127]),  # mean 2 and sigma 1: from -1 to 5
        ([[-1, -1, -3, -3]], "three_sigma", "per_tensor", [5 / 127]),
        *(
            ([[(-1.0) ** value * value for value in range(1, n + 1)]], "percentile_99_9", "per_tensor", [clip / 127])
            for n, clip in ((1000, 999), (1001, 1000), (2000, 1998), (75, 75))
        ),
        # 99.9 % of the magnitudes are 0: a rule that would clip everything leaves the largest one
        ([[0.0] * 1999 + [1.27]], "percentile_99_9", "per_tensor", [0.01]),
    ],
)
def test_the_clip_magnitude_of_a_rule_becomes_127(
    values: list[list[float]], rule: ScaleRule, granularity: ScaleGranularity, scales: list[float]
) -> None:
    assert compute_scales(torch.tensor(values), rule, granularity, "w").tolist() == pytest.approx(scales)


@pytest.mark.parametrize("rule", get_args(ScaleRule))
@pytest.mark.parametrize("granularity", get_args(ScaleGranularity))
def test_values_without_a_scale_are_refused_by_name(rule: ScaleRule, granularity: ScaleGranularity) -> None:
    for values, why in (
        (torch.zeros(2, 3), "all values are 0"),
        (torch.tensor([[1.0, math.nan]]), "not all values are finite"),
        (torch.tensor([[1.0, math.inf]]), "not all values are finite"),
    ):
        with pytest.raises(QuantizationProblem, match=rf"^the weights of fc1: .*{why}.*;.*\.$"):
            compute_scales(values, rule, granularity, "the weights of fc1")


def test_a_constant_channel_keeps_its_value_under_every_rule() -> None:
    """Its sigma is 0."""
    values = torch.tensor([[0.5, 0.5, 0.5], [1.0, -1.0, 0.25]])
    for rule in get_args(ScaleRule):
        scales = compute_scales(values, rule, "per_channel", "the weights")
        assert quantize(values, scales[:, None])[0].tolist() == [127] * 3
        assert float(scales[0] * 127) == pytest.approx(0.5)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1), st.floats(2**-20, 2**10, width=32))
def test_quantized_values_lie_in_range_and_within_half_a_step(values: list[float], scale: float) -> None:
    exact = torch.tensor(values)
    found = quantize(exact, torch.tensor(scale)).int()
    assert int(found.min()) >= INT8_MIN == -128
    assert int(found.max()) <= INT8_MAX == 127
    clipped = exact.double().clamp(INT8_MIN * scale, INT8_MAX * scale)
    assert bool(((found * scale - clipped).abs() <= scale * (0.5 + 1e-4)).all())


def test_rounding_is_half_to_even() -> None:
    assert quantize(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]), torch.tensor(1.0)).tolist() == [0, 2, 2, 0, -2]


def test_biases_are_int32_at_the_scale_of_the_sums() -> None:
    """Input scale 0.5, weight scales 0.25 and 0.125: a bias of 1 is 8 and 16 steps."""
    found = quantize_biases(torch.tensor([1.0, -1.0]), torch.tensor([0.5]) * torch.tensor([0.25, 0.125]), "fc1")
    assert (found.dtype, found.tolist()) == (torch.int32, [8, -16])


def test_biases_round_half_to_even() -> None:
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5])
    assert quantize_biases(halves, torch.tensor([1.0]), "fc1").tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("bias", [1e6, -1e6, math.nan])
def test_a_bias_of_more_than_32_bits_is_refused(bias: float) -> None:
    with pytest.raises(QuantizationProblem, match="fc1: a bias does not fit into 32 bits"):
        quantize_biases(torch.tensor([0.0, bias]), torch.tensor([1e-4]), "fc1")
