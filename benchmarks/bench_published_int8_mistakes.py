"""Published mistakes of int8 quantization, beside the right way, on the networks and the training of those reports.

    python benchmarks/bench_published_int8_mistakes.py --data DIR [--json FILE]

DIR is an image folder. Batch 4, rate 0.001, two epochs, 400 calibration images, two seeds. The networks are the two
LeNets of the reports: one without biases, and one whose last layer alone has a bias.

Inverted: a report scales the outputs of a layer by 127 max / (product of the scales before it) and not by 127 / (max x
product). An output then saturates from 1 / max on, not from max on. Its bias is multiplied by 2147483647 / (weight
factor x input factor x product), and not by the product of these factors (printed bias scale). That is tried beside two
others: the factor of the inverted sums, and the one that the sums would have without the mistake (right bias).
Unscaled: a bias is added to the sums as it is, and not over the scale of the sums, so that it is next to nothing.
Clamped: the outputs of a layer are scaled so that their largest magnitude is 255, and cut at 127, half of it.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import tabulate
import torch
from torch import Tensor, nn

from pipeline.data.images import Images, load_images
from pipeline.plan.spec import Spec
from pipeline.training.integer_network import (
    INT8_MAX,
    INT32_MAX,
    Forward,
    QuantizedLayer,
    QuantizedNetwork,
    build_quantized_network,
    calibrate,
    compute_weight_scales,
    fp32_network,
    max_accumulator,
    quantize_biases,
    read_layers,
    round_weights,
)
from pipeline.workloads.image_classifiers import build_model

SEEDS = (0, 1)
EPOCHS, BATCH_SIZE, LEARNING_RATE, MOMENTUM = 2, 4, 0.001, 0.9
NUM_CALIBRATION_IMAGES = 400
TEST_BATCH_SIZE = 500
UINT8_MAX = 255


class Row(NamedTuple):
    """The test accuracy of one network by seed, as a fraction."""

    network: str
    test_accuracy: tuple[float, ...]


def normalize(images: Images) -> tuple[Tensor, Tensor]:
    """Return images from -1 to 1 [n, 3, 32, 32] fp32, and labels."""
    pixels = torch.from_numpy(np.array(images.pixels)).permute(0, 3, 1, 2)
    return (pixels / 127.5 - 1).contiguous(), torch.from_numpy(np.array(images.labels))


def build_network(num_classes: int, has_bias: bool) -> nn.Module:
    """Build LeNet without biases, or with a bias in its last layer alone."""
    model = build_model("lenet", num_classes)
    layers = read_layers(model)
    for layer in layers[:-1] if has_bias else layers:
        layer.module.bias = None
    return model


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int = EPOCHS) -> nn.Module:
    """Train a network as the reports do: SGD with momentum, without augmentation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(BATCH_SIZE):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return model


def inverted(scales: Sequence[Tensor]) -> list[Tensor]:
    """Return activation scales of which those of outputs are inverted: 1 / (127 max) and not max / 127."""
    return [scales[0], *(1 / (INT8_MAX**2 * scale) for scale in scales[1:])]


def clamped(scales: Sequence[Tensor]) -> list[Tensor]:
    """Return activation scales of which those of outputs make 255, not 127, of the largest magnitude."""
    return [scales[0], *(scale * INT8_MAX / UINT8_MAX for scale in scales[1:])]


def with_bias_scales(network: QuantizedNetwork, scale_of: Callable[[QuantizedLayer], Tensor]) -> QuantizedNetwork:
    """Return the network whose biases are integers of another scale."""
    layers = []
    for layer in network.layers:
        biases = quantize_biases(layer.layer.biases, scale_of(layer), layer.layer.name)
        largest = max_accumulator(layer.weights, biases, layer.layer.name)
        layers.append(layer._replace(biases=biases, max_accumulator=largest))
    return QuantizedNetwork(tuple(layers))


def no_scale(layer: QuantizedLayer) -> Tensor:
    """Return a scale of 1: biases are the fp32 ones, rounded."""
    return torch.ones(1)


def printed_scale(layer: QuantizedLayer) -> Tensor:
    """Return the scale of biases that are multiplied by 2147483647 / (weight factor x input factor x product).

    A factor is 1 / scale. The product is that of the factors of the layers before, so input factor x product is the
    factor of this layer's input.
    """
    return 1 / (INT32_MAX * layer.input_scale * layer.weight_scales)


def with_biases_of(network: QuantizedNetwork, other: QuantizedNetwork) -> QuantizedNetwork:
    """Return the network with the integer biases of another."""
    pairs = zip(network.layers, other.layers, strict=True)
    return QuantizedNetwork(tuple(layer._replace(biases=own.biases) for layer, own in pairs))


def networks_of(model: nn.Module, calibration: Tensor) -> dict[str, Forward]:
    """Return the networks to compare, by name. Those with a bias are also tested with wrong ones."""
    layers = read_layers(model)
    weights = compute_weight_scales(layers, "largest_magnitude", "per_tensor")
    scales = calibrate(layers, calibration, "largest_magnitude")
    right = build_quantized_network(layers, weights, scales, int32_biases=True)
    wrong = build_quantized_network(layers, weights, inverted(scales), int32_biases=True)
    cut = build_quantized_network(layers, weights, clamped(scales), int32_biases=True)
    networks: dict[str, Forward] = {
        "fp32": model,
        "int8 weights": fp32_network(round_weights(layers, weights)),
        "right": right,
    }
    if layers[-1].module.bias is None:
        networks |= {"inverted": wrong, "clamped": cut}
        return {f"no bias: {name}": network for name, network in networks.items()}
    networks |= {
        "unscaled bias": with_bias_scales(right, no_scale),
        "inverted": wrong,
        "inverted, right bias": with_biases_of(wrong, right),
        "inverted, printed bias scale": with_bias_scales(wrong, printed_scale),
        "printed bias scale": with_bias_scales(right, printed_scale),
        "clamped": cut,
        "clamped, unscaled bias": with_bias_scales(cut, no_scale),
    }
    return {f"bias: {name}": network for name, network in networks.items()}


@torch.no_grad()
def accuracy(network: Forward, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the network classifies correctly."""
    scores = torch.cat([network(batch) for batch in images.split(TEST_BATCH_SIZE)])
    return float((scores.argmax(1) == labels).double().mean())


def compare(
    training: Images,
    test: Images,
    seeds: Sequence[int] = SEEDS,
    epochs: int = EPOCHS,
    num_calibration_images: int = NUM_CALIBRATION_IMAGES,
) -> list[Row]:
    """Train both networks for each seed, and return the accuracy of each way to quantize it."""
    images, labels = normalize(training)
    test_images, test_labels = normalize(test)
    found: dict[str, list[float]] = {}
    for seed in seeds:
        chosen = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels))[:num_calibration_images])
        for has_bias in (False, True):
            torch.manual_seed(seed)
            model = train(build_network(training.num_classes, has_bias), images, labels, epochs)
            with torch.no_grad():
                networks = networks_of(model, images[chosen])
            for name, network in networks.items():
                found.setdefault(name, []).append(accuracy(network, test_images, test_labels))
    return [Row(name, tuple(values)) for name, values in found.items()]


def main() -> None:
    """Print the accuracy of each network by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="an image folder")
    parser.add_argument("--num-samples", type=int, default=50_000, help="training images (default: 50000)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    spec = Spec(
        strategy="single",
        num_gpus=1,
        batch_size_per_gpu=BATCH_SIZE,
        device="cpu",
        dataset="imagefolder",
        num_samples=arguments.num_samples,
    )
    rows = compare(load_images(spec, "train", arguments.data), load_images(spec, "test", arguments.data))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode([row._asdict() for row in rows])) + b"\n")
    print(f"batch {BATCH_SIZE}, rate {LEARNING_RATE}, {EPOCHS} epochs, {NUM_CALIBRATION_IMAGES} calibration images")
    shown = [[row.network, *(f"{100 * value:.2f}" for value in row.test_accuracy)] for row in rows]
    headers = ["test accuracy [%]", *(f"seed {seed}" for seed in SEEDS)]
    print(
        tabulate.tabulate(shown, headers, tablefmt="github", disable_numparse=True, colalign=["left", "right", "right"])
    )


if __name__ == "__main__":
    main()
