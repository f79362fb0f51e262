"""A point of `measure: quantize`: train in fp32, publish the weights, and test the network in every stage of int8."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from pipeline.data import image_batches
from pipeline.data.image_batches import CHANNEL_MEANS, CHANNEL_STDS
from pipeline.data.images import Images, Pixels, load_images
from pipeline.plan.spec import Spec
from pipeline.records.record import (
    Histogram,
    HistogramTensor,
    LayerScales,
    NetworkScales,
    Quantization,
    QuantizationStage,
    ScaleGranularity,
    ScaleRule,
    StageResult,
)
from pipeline.training.integer_network import (
    Forward,
    Layer,
    QuantizationProblem,
    QuantizedNetwork,
    build_quantized_network,
    calibrate,
    compute_weight_scales,
    fp32_network,
    read_layers,
    round_weights,
    trace_outputs,
)
from pipeline.training.loop import TrainedPoint, train_point
from pipeline.training.process_group import Rank
from pipeline.workloads.find import Sources
from pipeline.workloads.image_classifiers import build_model


def save_weights(model: nn.Module, path: Path) -> str:
    """Write the model's weights, and return the SHA-256 of the file."""
    np.savez(path, **{name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()})
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a weight file into the model."""
    with np.load(path, allow_pickle=False) as arrays:
        model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files})


TEST_BATCH_SIZE = 500  # of the stages; larger batches are slower on a CPU
NUM_BINS = 64
SCALE_BYTES = 4  # a scale is fp32
PARAMETER_BYTES = 4  # of fp32 weights, and of biases in fp32 and int32


class LabelledImages(NamedTuple):
    """Normalised test images [n, 3, 32, 32] fp32, and labels [n] int64."""

    images: Tensor
    labels: Tensor


class Answers(NamedTuple):
    """The class that a network gives to each image, and whether another class has the same score."""

    classes: Tensor
    are_ties: Tensor
    are_finite: bool  # all scores of all images


def quantize_point(spec: Spec, rank: Rank, sources: Sources, weights_path: Path) -> TrainedPoint:
    """Train a point, write its weights to a file, and quantize what the file holds."""
    trained, data = train_point(spec, rank, sources), sources.data
    sha256 = save_weights(trained.model, weights_path)
    test = load_images(spec, "test", data)
    model = build_model(spec.model or "lenet", test.num_classes)
    load_weights(model, weights_path)
    chosen = choose_calibration_images(load_images(spec, "train", data), spec.num_calibration_samples, spec.seed)
    test_set = LabelledImages(normalize_images(test.pixels), torch.from_numpy(np.array(test.labels)))
    quantization = quantize_layers(read_layers(model), normalize_images(chosen), test_set, sha256)
    return trained._replace(measurement=msgspec.structs.replace(trained.measurement, quantization=quantization))


def choose_calibration_images(images: Images, count: int, seed: int) -> Pixels:
    """Return the pixels of that many training images, chosen at random with this seed, not augmented."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(images.labels))[:count])
    return images.pixels[chosen]


def normalize_images(pixels: Pixels) -> Tensor:
    """Return pixels [n, 32, 32, 3] uint8 as the network sees them: [n, 3, 32, 32] fp32."""
    normalize = image_batches.Normalization(CHANNEL_MEANS, CHANNEL_STDS, torch.device("cpu"))
    return normalize(torch.from_numpy(np.array(pixels)), torch.float32, torch.contiguous_format)


@torch.no_grad()
def quantize_layers(layers: Sequence[Layer], calibration: Tensor, test: LabelledImages, sha256: str) -> Quantization:
    """Test the network in fp32, and in every stage with every scale. `sha256` is the digest of its weight file."""
    expected = answer(fp32_network(layers), test.images)
    fp32 = count_answers(StageResult(stage="fp32", num_bytes=count_bytes(layers, "fp32", 0)), expected, expected, test)
    results, networks = [fp32], []
    axes = (get_args(axis) for axis in (ScaleRule, ScaleGranularity, QuantizationStage))
    for rule, granularity, stage in itertools.product(*axes):
        if stage == "fp32":
            continue
        result = StageResult(stage=stage, scale_rule=rule, granularity=granularity)
        try:
            network, num_scales = build_network(layers, calibration, stage, rule, granularity)
            if isinstance(network, QuantizedNetwork):
                check_exactness(network, calibration[:1])
                if stage == "biases":
                    networks.append(describe_scales(network, rule, granularity))
            counted = msgspec.structs.replace(result, num_bytes=count_bytes(layers, stage, num_scales))
            results.append(count_answers(counted, answer(network, test.images), expected, test))
        except QuantizationProblem as problem:
            results.append(msgspec.structs.replace(result, problem=str(problem)))
    return Quantization(
        weights_sha256=sha256,
        num_calibration_samples=len(calibration),
        num_test_samples=len(test.labels),
        results=tuple(results),
        scales=tuple(networks),
        histograms=tuple(draw_histograms(layers, calibration)),
    )


def build_network(
    layers: Sequence[Layer],
    calibration: Tensor,
    stage: QuantizationStage,
    rule: ScaleRule,
    granularity: ScaleGranularity,
) -> tuple[Forward, int]:
    """Return the network of a stage after fp32, and the number of its scales. Raises QuantizationProblem."""
    scales = compute_weight_scales(layers, rule, granularity)
    num_scales = sum(map(len, scales))
    if stage == "weights":
        return fp32_network(round_weights(layers, scales)), num_scales
    activation_scales = calibrate(layers, calibration, rule)
    network = build_quantized_network(layers, scales, activation_scales, int32_biases=stage == "biases")
    return network, num_scales + len(activation_scales)


def check_exactness(network: QuantizedNetwork, images: Tensor) -> None:
    """Raise RuntimeError if this machine's fp32 sums of whole numbers differ from those in float64.

    A convolution by another algorithm, or with a shorter type inside, would not be exact.
    """
    in_float64 = QuantizedNetwork(tuple(layer._replace(max_accumulator=2**31) for layer in network.layers))
    if not torch.equal(network(images), in_float64(images)):
        raise RuntimeError("fp32 sums of whole numbers are not exact on this machine; unset DNNL_DEFAULT_FPMATH_MODE.")


def answer(network: Forward, images: Tensor) -> Answers:
    """Return the answers of a network. The first of several highest scores counts."""
    scores = torch.cat([network(batch) for batch in images.split(TEST_BATCH_SIZE)])
    are_ties = (scores == scores.amax(1, keepdim=True)).sum(1) > 1
    return Answers(scores.argmax(1), are_ties, bool(scores.isfinite().all()))


def count_answers(result: StageResult, found: Answers, expected: Answers, test: LabelledImages) -> StageResult:
    """Return the result with its counts, or with a problem if scores are not finite. `expected` are those in fp32."""
    if not found.are_finite:
        problem = "the scores: not all values are finite; train again with a lower learning rate."
        return msgspec.structs.replace(result, num_bytes=None, problem=problem)
    return msgspec.structs.replace(
        result,
        num_correct=int((found.classes == test.labels).sum()),
        num_agreeing=int((found.classes == expected.classes).sum()),
        num_ties=int(found.are_ties.sum()),
    )


def count_bytes(layers: Sequence[Layer], stage: QuantizationStage, num_scales: int) -> int:
    """Return the bytes of weights, biases and scales. A weight takes 4 bytes in fp32 and 1 in int8."""
    num_weights = sum(layer.module.weight.numel() for layer in layers)
    num_biases = sum(layer.module.bias.numel() for layer in layers if layer.module.bias is not None)
    weight_bytes = num_weights * (PARAMETER_BYTES if stage == "fp32" else 1)
    return weight_bytes + num_biases * PARAMETER_BYTES + num_scales * SCALE_BYTES


def describe_scales(network: QuantizedNetwork, rule: ScaleRule, granularity: ScaleGranularity) -> NetworkScales:
    """Return the scales of a fully quantized network, and the largest magnitudes of its integers."""
    layers = [
        LayerScales(
            layer=quantized.layer.name,
            weight_scales=tuple(quantized.weight_scales.tolist()),
            input_scale=float(quantized.input_scale),
            output_scale=float(quantized.output_scale),
            max_weight=int(quantized.weights.int().abs().max()),
            max_bias=int(quantized.biases.long().abs().max()),
            max_accumulator=quantized.max_accumulator,
        )
        for quantized in network.layers
    ]
    return NetworkScales(scale_rule=rule, granularity=granularity, layers=tuple(layers))


def draw_histograms(layers: Sequence[Layer], calibration: Tensor) -> Iterator[Histogram]:
    """Yield the histograms of each layer's weights, and of its fp32 outputs before and after ReLU.

    A tensor that is not finite has none.
    """
    for layer, (before, after) in zip(layers, trace_outputs(layers, calibration), strict=True):
        tensors: dict[HistogramTensor, Tensor] = {"weights": layer.module.weight.detach(), "before_relu": before}
        if layer.has_relu:
            tensors["after_relu"] = after
        for name, values in tensors.items():
            if values.isfinite().all():
                yield draw_histogram(layer.name, name, values)


def draw_histogram(layer: str, tensor: HistogramTensor, values: Tensor) -> Histogram:
    """Return the histogram of the values, NUM_BINS bins from the smallest to the largest."""
    low, high = float(values.min()), float(values.max())
    # in float64, which counts past 2^24; one bin for a constant, whose range torch would widen
    counts = torch.histc(values.double(), 1 if low == high else NUM_BINS, low, high)
    return Histogram(
        layer=layer,
        tensor=tensor,
        low=low,
        high=high,
        counts=tuple(int(count) for count in counts),
        mean=float(values.double().mean()),
        sigma=float(values.double().std(correction=0)),
    )
