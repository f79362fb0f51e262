"""Random crops, flips and normalisation of many images at once, on whatever device they lie."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

PADDING_PX = 4  # black pixels on each side, out of which a crop is taken


class AugmentationDraws(NamedTuple):
    """What chance decides for each of n images: the crop's corner in the padded image, and whether it is flipped."""

    tops: Tensor  # [n] int64, 0 to 2 x PADDING
    lefts: Tensor  # [n] int64, 0 to 2 x PADDING
    flips: Tensor  # [n] bool


def pad(pixels: Tensor) -> Tensor:
    """Images with their borders: [n, side, side, 3] -> [n, side + 2 x PADDING, side + 2 x PADDING, 3]."""
    return nn.functional.pad(pixels, (0, 0, PADDING_PX, PADDING_PX, PADDING_PX, PADDING_PX))


def draw_augmentation(count: int, generator: torch.Generator) -> AugmentationDraws:
    """The draws of so many images, on the generator's device."""
    corners = torch.randint(2 * PADDING_PX + 1, (2, count), generator=generator, device=generator.device)
    flips = torch.rand(count, generator=generator, device=generator.device) < 0.5
    return AugmentationDraws(corners[0], corners[1], flips)


def crop_and_flip(padded: Tensor, chosen: Tensor, draws: AugmentationDraws) -> Tensor:
    """The chosen images, each cropped and flipped as drawn, in one gather: [n, side, side, 3]."""
    side = padded.shape[1] - 2 * PADDING_PX
    pixels = torch.arange(side, device=padded.device)
    rows = draws.tops[:, None] + pixels
    columns = draws.lefts[:, None] + torch.where(draws.flips[:, None], pixels.flip(0), pixels)
    return padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


class Normalization(NamedTuple):
    """(pixel / 255 - mean) / std as pixel x scale - shift, by channel; on the device beforehand, for copying waits."""

    scale: Tensor  # [3] fp32
    shift: Tensor  # [3] fp32


def normalization(mean: Sequence[float], std: Sequence[float], device: torch.device) -> Normalization:
    """The normalisation with those channel means and standard deviations, of pixels as fractions."""
    means, stds = (torch.tensor(values, device=device) for values in (mean, std))
    return Normalization(1 / (255 * stds), means / stds)


def normalize(
    pixels: Tensor,
    by: Normalization,
    dtype: torch.dtype,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Pixels [n, side, side, 3] uint8 -> images [n, 3, side, side], computed in fp32."""
    images = (pixels * by.scale).sub_(by.shift)
    return images.permute(0, 3, 1, 2).to(dtype, memory_format=memory_format)
