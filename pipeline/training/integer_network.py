"""A small CNN as an int8 processor computes it: int8 weights and activations, int32 biases and sums.

A real value is scale x integer, without a zero point. An activation has one scale per tensor: a sum of integers over
input channels has a meaning only if all of them have the same scale.

The sums are computed in floating point, and they are exact: fp32 holds every whole number up to 2^24, fp64 up to 2^53.
`max_accumulator` is an upper bound of every sum and partial sum. Up to 2^24 fp32 is used, above it fp64.
`F.linear` on int8 tensors would overflow without an error. Everything runs on the CPU.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.records.record import ScaleGranularity, ScaleRule

INT8_MIN, INT8_MAX = -128, 127
INT32_MAX = 2**31 - 1
NUM_SIGMAS = 3
QUANTILE = 0.999


class QuantizationProblem(ValueError):
    """A model, its weights or its activations cannot be quantized. The message says why, and what to do."""


def compute_scales(values: Tensor, rule: ScaleRule, granularity: ScaleGranularity, name: str) -> Tensor:
    """Return fp32 scales: one for the tensor, shape [1], or one per output channel, shape [channels].

    A scale is clip magnitude / 127. If the rule gives a clip magnitude of 0, because few values differ from 0, the
    largest magnitude is used. A channel with only zeros gets the largest scale of the other channels: any scale suits
    its weights, and with a large one its int32 bias is small. Raises QuantizationProblem if the tensor is not finite or
    all zero. `name` is the tensor's name in that message.
    """
    rows = values.detach().float().reshape(1 if granularity == "per_tensor" else len(values), -1)
    if not rows.isfinite().all():
        raise QuantizationProblem(f"{name}: not all values are finite; train again with a lower learning rate.")
    scales = clip_magnitudes(rows, rule) / INT8_MAX
    scales = torch.where(scales > 0, scales, rows.abs().amax(1) / INT8_MAX)
    if not scales.any():
        raise QuantizationProblem(
            f"{name}: all values are 0, so that there is no scale; train again with a lower learning rate."
        )
    return torch.where(scales > 0, scales, scales.max())


def clip_magnitudes(rows: Tensor, rule: ScaleRule) -> Tensor:
    """Return the clip magnitude of each row of [rows, n]: it becomes 127, and larger magnitudes saturate.

    `three_sigma` is |mean| + 3 sigma, which covers the mean plus and minus 3 sigma. `percentile_99_9` is the smallest
    magnitude in the row for which at least 99.9 % of the magnitudes are as small or smaller.
    """
    if rule == "largest_magnitude":
        return rows.abs().amax(1)
    if rule == "three_sigma":
        return rows.mean(1).abs() + NUM_SIGMAS * rows.std(1, correction=0)
    return rows.abs().kthvalue(math.ceil(QUANTILE * rows.shape[1]), dim=1).values


def quantize(values: Tensor, scales: Tensor) -> Tensor:
    """Return values / scales as int8. Halves round to the even integer; values out of range saturate."""
    return (values / scales).round().clamp(INT8_MIN, INT8_MAX).to(torch.int8)


def quantize_biases(biases: Tensor, scales: Tensor, name: str) -> Tensor:
    """Return the biases [channels] as int32. Their scale is input scale x weight scale, the scale of the sums.

    Raises QuantizationProblem if one needs more than 32 bits.
    """
    rounded = (biases / scales).round().double()
    if not bool((rounded.abs() <= INT32_MAX).all()):  # also refuses NaN
        raise QuantizationProblem(
            f"{name}: a bias does not fit into 32 bits, since the layer's weights or inputs are tiny beside it; use "
            "another scale rule or granularity of this record, or train again with a lower learning rate."
        )
    return rounded.to(torch.int32)


MAX_EXACT_FP32 = 2**24

Forward = Callable[[Tensor], Tensor]  # images to scores [batch, classes]


class Layer(NamedTuple):
    """A convolution or linear layer and what follows it: a ReLU if `has_relu`, then `reshaping`: pool, flatten."""

    name: str
    module: nn.Conv2d | nn.Linear
    has_relu: bool
    reshaping: tuple[nn.Module, ...]

    def multiply(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """Return the layer's sums of products, without bias."""
        if isinstance(self.module, nn.Linear):
            return nn.functional.linear(inputs, weights)
        module = self.module
        return nn.functional.conv2d(
            inputs, weights, None, module.stride, module.padding, module.dilation, module.groups
        )

    def per_channel(self, values: Tensor) -> Tensor:
        """Return values [channels] or [1] in a shape that broadcasts over the layer's outputs."""
        return values if isinstance(self.module, nn.Linear) else values.view(-1, 1, 1)

    @property
    def biases(self) -> Tensor:
        """The biases [channels] in fp32; zeros if the layer has none."""
        module = self.module
        return torch.zeros(len(module.weight)) if module.bias is None else module.bias.detach()

    def reshape(self, outputs: Tensor) -> Tensor:
        """Apply pooling and flattening, which keep whole numbers whole."""
        for module in self.reshaping:
            outputs = module(outputs)
        return outputs

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return fp32 outputs (before ReLU, after ReLU), not pooled or flattened."""
        before = self.multiply(inputs, self.module.weight.detach()) + self.per_channel(self.biases)
        return before, before.relu() if self.has_relu else before

    def quantize_weights(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights as int8, and the scales [1] or [channels] in a shape that broadcasts over them."""
        shaped = scales.view(-1, *[1] * (self.module.weight.dim() - 1))
        return quantize(self.module.weight.detach(), shaped), shaped


def read_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Return the layers of a sequential model, named conv1, conv2, ..., fc1, ...

    Raises QuantizationProblem if the model has any part besides convolutions, linear layers, ReLU, max-pool, flatten.
    """
    layers: list[Layer] = []
    for module in model.children():
        if isinstance(module, nn.Conv2d | nn.Linear):
            kind = "conv" if isinstance(module, nn.Conv2d) else "fc"
            number = 1 + sum(layer.name.startswith(kind) for layer in layers)
            layers.append(Layer(f"{kind}{number}", module, False, ()))
        elif isinstance(module, nn.ReLU) and layers and not layers[-1].reshaping:
            layers[-1] = layers[-1]._replace(has_relu=True)
        elif isinstance(module, nn.MaxPool2d | nn.Flatten) and layers:
            layers[-1] = layers[-1]._replace(reshaping=(*layers[-1].reshaping, module))
        else:
            raise QuantizationProblem(
                f"{type(module).__name__} cannot be quantized here: a model may hold only convolutions and linear "
                "layers, and after each of them ReLU, then max-pool and flatten; use model='lenet'."
            )
    return tuple(layers)


def trace_outputs(layers: Sequence[Layer], images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's fp32 outputs before and after its ReLU."""
    traced = []
    for layer in layers:
        traced.append(layer.forward(images))
        images = layer.reshape(traced[-1][1])
    return traced


def fp32_network(layers: Sequence[Layer]) -> Forward:
    return lambda images: layers[-1].reshape(trace_outputs(layers, images)[-1][1])


class QuantizedLayer(NamedTuple):
    """A layer with int8 weights. Its biases are int32; in the stage `activations` they are still fp32."""

    layer: Layer
    weights: Tensor  # int8
    weight_scales: Tensor  # [1] or [channels], fp32
    input_scale: Tensor  # [1], fp32
    output_scale: Tensor  # [1], fp32
    biases: Tensor  # [channels], int32 or fp32
    max_accumulator: int  # upper bound of every sum's magnitude; the sum includes an int32 bias

    @property
    def sum_dtype(self) -> torch.dtype:
        """The floating-point type in which every sum is exact."""
        return torch.float32 if self.max_accumulator <= MAX_EXACT_FP32 else torch.float64

    def forward(self, inputs: Tensor) -> Tensor:
        """Return int8 outputs for int8 inputs, before pooling and flattening."""
        per_channel = self.layer.per_channel
        sums = self.layer.multiply(inputs.to(self.sum_dtype), self.weights.to(self.sum_dtype))
        sum_scales = per_channel(self.input_scale * self.weight_scales)
        if self.biases.dtype == torch.int32:
            outputs = (sums + per_channel(self.biases)).float() * (sum_scales / self.output_scale)
        else:
            outputs = (sums.float() * sum_scales + per_channel(self.biases)) / self.output_scale
        low = 0 if self.layer.has_relu else INT8_MIN
        return outputs.round().clamp(low, INT8_MAX).to(torch.int8)


def max_accumulator(weights: Tensor, biases: Tensor, name: str) -> int:
    """Return an upper bound of every sum, whatever the int8 inputs: 128 sum|weights| + |bias|, for the largest channel.

    Only int32 biases count: one in fp32 is added later, to the scaled sum. `name` is the layer's name in the message.
    Raises QuantizationProblem if the bound does not fit into 32 bits.
    """
    bounds = weights.long().abs().flatten(1).sum(1) * -INT8_MIN
    largest = int((bounds + biases.long().abs() if biases.dtype == torch.int32 else bounds).max())
    if largest > INT32_MAX:
        raise QuantizationProblem(
            f"{name}: a sum may reach {largest}, and 32 bits hold {INT32_MAX}; use a layer with fewer inputs."
        )
    return largest


@dataclass(frozen=True)
class QuantizedNetwork:
    """A network whose layers pass int8 values to each other."""

    layers: tuple[QuantizedLayer, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Return int8 scores of fp32 images."""
        values = quantize(images, self.layers[0].input_scale)
        for quantized in self.layers:
            # pooling needs floating point; fp32 holds int8 exactly
            values = quantized.layer.reshape(quantized.forward(values).float()).to(torch.int8)
        return values


def compute_weight_scales(layers: Sequence[Layer], rule: ScaleRule, granularity: ScaleGranularity) -> list[Tensor]:
    return [compute_scales(layer.module.weight, rule, granularity, f"the weights of {layer.name}") for layer in layers]


def round_weights(layers: Sequence[Layer], weight_scales: Sequence[Tensor]) -> list[Layer]:
    """Return copies of the layers with rounded weights: the int8 weights times their scales, in fp32."""
    rounded = [layer._replace(module=copy.deepcopy(layer.module)) for layer in layers]
    for layer, scales in zip(rounded, weight_scales, strict=True):
        weights, shaped = layer.quantize_weights(scales)
        layer.module.weight.data = weights * shaped
    return rounded


def calibrate(layers: Sequence[Layer], images: Tensor, rule: ScaleRule) -> list[Tensor]:
    """Return len(layers) + 1 activation scales: that of the images, then that of each layer's outputs after ReLU.

    Raises QuantizationProblem for outputs that are all 0 or not finite.
    """
    outputs = trace_outputs(layers, images)
    names = [f"the outputs of {layer.name}" for layer in layers]
    found = zip(["the images", *names], [images, *(after for _, after in outputs)], strict=True)
    return [compute_scales(values, rule, "per_tensor", name) for name, values in found]


def build_quantized_network(
    layers: Sequence[Layer], weight_scales: Sequence[Tensor], activation_scales: Sequence[Tensor], int32_biases: bool
) -> QuantizedNetwork:
    """Return the network with int8 weights and activations; its biases are int32 if `int32_biases`, else fp32.

    Raises QuantizationProblem if a bias or a sum needs more than 32 bits.
    """
    quantized = []
    for number, (layer, scales) in enumerate(zip(layers, weight_scales, strict=True)):
        input_scale, output_scale = activation_scales[number : number + 2]
        weights, _ = layer.quantize_weights(scales)
        biases = layer.biases
        if int32_biases:
            biases = quantize_biases(biases, input_scale * scales, layer.name)
        largest = max_accumulator(weights, biases, layer.name)
        quantized.append(QuantizedLayer(layer, weights, scales, input_scale, output_scale, biases, largest))
    return QuantizedNetwork(tuple(quantized))
