"""Scales of post-training quantization, and the rounding of weights, activations and biases to whole numbers.

A real value is scale x integer, without a zero point. Weights and activations are int8, biases int32. An activation has
one scale per tensor: a sum of integers over input channels has a meaning only if all of them have the same scale.
"""

import math

import torch
from torch import Tensor

from pipeline.experiment.measurement import ScaleGranularity, ScaleRule

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
    its weights, and with a large one its int32 bias is small. Raises QuantizationProblem if the tensor is empty, not
    finite or all zero. `name` is the tensor's name in that message.
    """
    if not values.numel():
        raise QuantizationProblem(f"{name}: there are no values to scale; calibrate with one image or more.")
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
