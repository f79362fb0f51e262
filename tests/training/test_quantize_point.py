"""A point of `measure: quantize`, its weight files, and the benchmark of published mistakes, which makes no others."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from bench_published_int8_mistakes import build_network, clamped, compare, inverted, networks_of, normalize
from conftest import Command
from factories import LENET, make_record, make_spec, measurement_of
from image_steps import ALONE
from torch import Tensor, nn

from pipeline.data.images import Images, synthetic_images
from pipeline.records.record import Quantization, ScaleGranularity, ScaleRule
from pipeline.records.store import encode_record, load_record
from pipeline.training.integer_network import (
    QuantizedNetwork,
    build_quantized_network,
    calibrate,
    compute_weight_scales,
    read_layers,
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

SMALL: dict[str, Any] = {
    **LENET,
    "input": "gpu",
    "evaluate": True,
    "measure": "quantize",
    "num_samples": 320,
    "num_calibration_samples": 32,
    "learning_rate": 0.01,
}
SCALES = list(itertools.product(get_args(ScaleRule), get_args(ScaleGranularity)))


def quantized(model: nn.Module, num_images: int = 40) -> Quantization:
    images = synthetic_images(num_images, "train", 0)
    normalized = normalize_images(images.pixels)
    test = LabelledImages(normalized, torch.from_numpy(images.labels))
    return quantize_layers(read_layers(model), normalized, test, "digest")


def test_a_point_publishes_the_weights_that_it_quantizes(tmp_path: Path) -> None:
    spec = make_spec(**SMALL)
    measurement, series, _ = quantize_point(spec, ALONE, NO_SOURCES, tmp_path / "weights.npz")
    found = measurement.quantization
    assert found is not None
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
    done = pipeline("submit", "--grid", "quantize", *sets, *where)
    assert done.returncode == 0, done.stderr
    paths = sorted((tmp_path / "quantize" / "records").glob("*.json"))
    assert len(paths) == 2
    for path in paths:
        found = measurement_of(load_record(path)).quantization
        assert found is not None
        weights = path.with_suffix(".weights.npz")
        load_weights(build_model("lenet", 10), weights)
        assert found.weights_sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    collected = pipeline("collect", tmp_path / "quantize", "--format", "json")
    rows = json.loads(collected.stdout)["experiments"]["quantize"]["int8"]
    assert (len(rows), {row["n"] for row in rows}) == (19, {2})
    assert all("an interval needs 6 seeds, got 2" in row["note"] for row in rows)


def make_model(seed: int, num_classes: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("lenet", num_classes)


def test_saved_weights_come_back_bit_by_bit(tmp_path: Path) -> None:
    model, other = make_model(0), make_model(1)
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
