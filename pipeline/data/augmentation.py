"""Random crops, flips and normalisation of many images at once, on the device that holds them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

PADDING_PX = 4  # black pixels on each side; a crop is taken from the padded image


class AugmentationDraws(NamedTuple):
    """Random draws for n images: the corner of each crop in the padded image, and which images are flipped."""

    tops: Tensor  # [n] int64, 0 to 2 x PADDING_PX
    lefts: Tensor  # [n] int64, 0 to 2 x PADDING_PX
    flips: Tensor  # [n] bool


def pad(pixels: Tensor) -> Tensor:
    """Add black borders: [n, side, side, 3] -> [n, side + 2 x PADDING_PX, side + 2 x PADDING_PX, 3]."""
    return nn.functional.pad(pixels, (0, 0, PADDING_PX, PADDING_PX, PADDING_PX, PADDING_PX))


def draw_augmentation(count: int, generator: torch.Generator) -> AugmentationDraws:
    """Draw crops and flips for `count` images, on the generator's device."""
    corners = torch.randint(2 * PADDING_PX + 1, (2, count), generator=generator, device=generator.device)
    flips = torch.rand(count, generator=generator, device=generator.device) < 0.5
    return AugmentationDraws(corners[0], corners[1], flips)


def crop_and_flip(padded: Tensor, chosen: Tensor, draws: AugmentationDraws) -> Tensor:
    """Crop and flip the chosen images as drawn, in one gather. Return [n, side, side, 3]."""
    side = padded.shape[1] - 2 * PADDING_PX
    pixels = torch.arange(side, device=padded.device)
    rows = draws.tops[:, None] + pixels
    columns = draws.lefts[:, None] + torch.where(draws.flips[:, None], pixels.flip(0), pixels)
    return padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


class Normalization:
    """Normalisation by channel: (pixel / 255 - mean) / std = pixel x scale - shift.

    Scale and shift lie on the device from the start, since copying them there in a step would wait for the device.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        means, stds = (torch.tensor(values, device=device) for values in (mean, std))
        self.scale, self.shift = 1 / (255 * stds), means / stds  # [3] fp32

    def __call__(self, pixels: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
        """Normalise pixels [n, side, side, 3] uint8 in fp32. Return images [n, 3, side, side] of `dtype`."""
        return (pixels * self.scale).sub_(self.shift).permute(0, 3, 1, 2).to(dtype, memory_format=memory_format)
