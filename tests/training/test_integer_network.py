"""The int8 network, against arithmetic in integers and onnxruntime; its points, weight files and published mistakes."""

import hashlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from bench_published_int8_mistakes import build_network, clamped, compare, inverted, networks_of, normalize
from conftest import Command, succeeded
from factories import LENET, known, make_record, make_spec, measurement_of
from hypothesis import given
from hypothesis import strategies as st
from image_steps import ALONE
from onnx_reference import OnnxNetwork
from torch import Tensor, nn

from pipeline.data.images import Images, synthetic_images
from pipeline.records.record import Quantization, ScaleGranularity, ScaleRule
from pipeline.records.store import encode_record, load_record
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
from pipeline.training.quantize_point import (
    LabelledImages,
    check_exactness,
    choose_calibration_images,
    draw_histogram,
    load_weights,
    normalize_images,
    quantize_layers,
    quantize_point,
    save_weights,
)
from pipeline.workloads.find import NO_SOURCES
from pipeline.workloads.image_classifiers import build_model

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


SMALL: dict[str, Any] = {
    **LENET,
    "input": "gpu",
    "evaluate": True,
    "measure": "quantize",
    "num_samples": 320,
    "num_calibration_samples": 32,
    "learning_rate": 0.01,
}


def quantized(model: nn.Module, num_images: int = 40) -> Quantization:
    images = synthetic_images(num_images, "train", 0)
    normalized = normalize_images(images.pixels)
    test = LabelledImages(normalized, torch.from_numpy(images.labels))
    return quantize_layers(read_layers(model), normalized, test, "digest")


def test_a_point_publishes_the_weights_that_it_quantizes(tmp_path: Path) -> None:
    spec = make_spec(**SMALL)
    measurement, series, _ = quantize_point(spec, ALONE, NO_SOURCES, tmp_path / "weights.npz")
    found = known(measurement.quantization)
    assert len(measurement.epochs) == len(series) == 2
    assert (found.num_calibration_samples, found.num_test_samples, found.weights_sha256) == (
        *(32, 64),
        hashlib.sha256((tmp_path / "weights.npz").read_bytes()).hexdigest(),
    )
    assert [(result.stage, result.scale_rule, result.granularity) for result in found.results] == [
        ("fp32", None, None),
        *((stage, *scale) for scale in SCALES for stage in ("weights", "activations", "biases")),
    ]
    fp32 = found.results[0]
    assert (fp32.num_correct, fp32.num_agreeing, fp32.num_ties) == (
        round((measurement.epochs[-1].test_accuracy or 0) * 64),
        64,
        0,
    )
    assert all(result.num_agreeing is not None and result.num_agreeing > 48 for result in found.results)
    record = make_record(spec, measurement=measurement)
    path = tmp_path / f"{record.run_id}.0.json"
    path.write_bytes(encode_record(record))
    assert load_record(path) == record


def test_the_stages_take_as_many_bytes_as_counted_by_hand() -> None:
    """LeNet has 61,770 weights and 236 biases; 5 layers, or 236 channels, have a weight scale, 6 tensors another."""
    assert {(r.stage, r.granularity): r.num_bytes for r in quantized(build_model("lenet", 10)).results} == {
        ("fp32", None): 4 * (61_770 + 236),
        ("weights", "per_tensor"): 61_770 + 4 * (236 + 5),
        ("activations", "per_tensor"): 61_770 + 4 * (236 + 5 + 6),
        ("biases", "per_tensor"): 61_770 + 4 * (236 + 5 + 6),
        ("weights", "per_channel"): 61_770 + 4 * (236 + 236),
        ("activations", "per_channel"): 61_770 + 4 * (236 + 236 + 6),
        ("biases", "per_channel"): 61_770 + 4 * (236 + 236 + 6),
    }


def test_the_ranges_of_every_network_are_recorded() -> None:
    found = quantized(build_model("lenet", 10))
    assert [(network.scale_rule, network.granularity) for network in found.scales] == SCALES
    for network in found.scales:
        assert [layer.layer for layer in network.layers] == ["conv1", "conv2", "fc1", "fc2", "fc3"]
        for layer, after in itertools.pairwise(network.layers):
            assert layer.output_scale == after.input_scale
        for layer in network.layers:
            assert 1 <= layer.max_weight <= 128
            assert layer.max_weight * 128 <= layer.max_accumulator < 2**24
            assert layer.max_bias < 2**31
    assert found.scales[0].layers[0].max_weight == 127


def zero(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        nn.init.zeros_(model.get_parameter(name))
    return model


def test_a_layer_of_zeros_is_a_sentence_in_every_stage_and_fp32_stays() -> None:
    fp32, *others = quantized(zero(build_model("lenet", 10), "3.weight")).results
    assert fp32.num_correct is not None
    said = "the weights of conv2: all values are 0, so that there is no scale; train again with a lower learning rate."
    assert {(other.problem, other.num_correct, other.num_bytes) for other in others} == {(said, None, None)}


def test_a_model_that_diverged_has_a_sentence_and_a_record() -> None:
    model = build_model("lenet", 10)
    nn.init.constant_(model.get_parameter("7.weight"), float("nan"))
    found = quantized(model)
    fp32, *others = found.results
    assert (fp32.problem, fp32.num_correct, fp32.num_ties, fp32.num_bytes) == (
        "the scores: not all values are finite; train again with a lower learning rate.",
        None,
        None,
        None,
    )
    assert {other.problem for other in others} == {
        "the weights of fc1: not all values are finite; train again with a lower learning rate."
    }
    assert {histogram.layer for histogram in found.histograms} == {"conv1", "conv2", "fc2", "fc3"}
    spec = make_spec(**SMALL)
    measured = msgspec.structs.replace(measurement_of(make_record(spec)), quantization=found)
    encode_record(make_record(spec, measurement=measured))


def test_equal_scores_are_counted_as_ties() -> None:
    """The last layer lowers one class and leaves nine at 0: every image has nine highest scores, in every stage."""
    model = zero(build_model("lenet", 10), "11.weight", "11.bias")
    with torch.no_grad():
        model.get_parameter("11.weight")[3] = -1e-3
    assert [(result.problem, result.num_ties) for result in quantized(model).results] == [(None, 40)] * 19


def test_a_machine_whose_sums_are_not_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = read_layers(build_model("lenet", 10))
    images = normalize_images(synthetic_images(2, "train", 0).pixels)
    scales = compute_weight_scales(layers, "largest_magnitude", "per_tensor")
    network = build_quantized_network(layers, scales, calibrate(layers, images, "largest_magnitude"), True)
    check_exactness(network, images)
    convolve = nn.functional.conv2d

    def in_bf16(inputs: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        is_exact = inputs.dtype == torch.float64
        return convolve(inputs, weights, *rest) if is_exact else convolve(inputs, weights, *rest).bfloat16().float()

    monkeypatch.setattr(nn.functional, "conv2d", in_bf16)
    with pytest.raises(RuntimeError, match="not exact on this machine"):
        check_exactness(network, images)


def test_calibration_images_are_training_images_chosen_by_the_seed() -> None:
    pixels = np.arange(100, dtype=np.uint8).repeat(32 * 32 * 3).reshape(100, 32, 32, 3)
    images = Images(pixels, np.zeros(100, dtype=np.int64), 1)
    chosen = [choose_calibration_images(images, 10, seed)[:, 0, 0, 0].tolist() for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 10
    assert max(chosen[0]) > 20


def test_a_histogram_counts_every_value_once() -> None:
    found = draw_histogram("conv1", "weights", torch.tensor([0.0, 1.0, 1.0, 64.0]))
    assert (found.low, found.high, found.counts) == (0.0, 64.0, (1, 2, *[0] * 61, 1))
    assert (found.mean, found.sigma) == pytest.approx((16.5, float(np.std([0, 1, 1, 64]))))
    constant = draw_histogram("conv1", "weights", torch.full((5,), 2.0))
    assert (constant.low, constant.high, constant.counts, constant.sigma) == (2.0, 2.0, (5,), 0.0)


def test_histograms_cover_weights_and_outputs_before_and_after_relu() -> None:
    found = quantized(build_model("lenet", 10), num_images=4).histograms
    named = [(histogram.layer, histogram.tensor) for histogram in found]
    hidden = [
        (layer, tensor)
        for layer in ("conv1", "conv2", "fc1", "fc2")
        for tensor in ("weights", "before_relu", "after_relu")
    ]
    assert named == [*hidden, ("fc3", "weights"), ("fc3", "before_relu")]
    counts = {name: sum(histogram.counts) for name, histogram in zip(named, found, strict=True)}
    assert counts["conv1", "weights"] == 6 * 3 * 5 * 5
    assert counts["conv1", "before_relu"] == counts["conv1", "after_relu"] == 4 * 6 * 28 * 28
    assert all(histogram.low >= 0 for histogram in found if histogram.tensor == "after_relu")


@pytest.mark.training
def test_a_submitted_point_leaves_its_weights_beside_its_record(pipeline: Command, tmp_path: Path) -> None:
    changes = ("dataset=synthetic", "num_samples=320", "num_calibration_samples=32", "epochs=2", "seed=0,1")
    sets = [part for change in changes for part in ("--set", change)]
    where = ("--cluster", "local", "--outputs", tmp_path, "--points-per-element", "2")
    succeeded(pipeline("submit", "--grid", "quantize", *sets, *where))
    paths = sorted((tmp_path / "quantize" / "records").glob("*.json"))
    assert len(paths) == 2
    for path in paths:
        found = known(measurement_of(load_record(path)).quantization)
        assert found.weights_sha256 == hashlib.sha256(path.with_suffix(".weights.npz").read_bytes()).hexdigest()


def test_saved_weights_come_back_bit_by_bit(tmp_path: Path) -> None:
    model, other = make_lenet(), build_model("lenet", 10)
    path = tmp_path / "weights.npz"
    sha256 = save_weights(model, path)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    load_weights(other, path)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


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


@pytest.mark.parametrize(
    ("wrong", "largest_output"),
    [
        (inverted, 1 / 4),  # 4/127 becomes 1/(127 x 4)
        (clamped, 4 * 127 / 255),  # 255 stands for 4, so 127 for 1.99
    ],
)
def test_a_wrong_scale_lets_outputs_to_4_saturate_early_and_images_to_2_keep_theirs(
    wrong: Callable[[list[torch.Tensor]], list[torch.Tensor]], largest_output: float
) -> None:
    images, outputs = wrong([torch.tensor([2 / 127]), torch.tensor([4 / 127])])
    assert (float(images * 127), float(outputs * 127)) == pytest.approx((2, largest_output))


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
