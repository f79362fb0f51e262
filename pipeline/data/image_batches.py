"""Batches of images: augmented one by one by a loader's workers, or all at once on the device that holds them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import transforms

from pipeline.data.batches import Rank, batch_sizes, build_sampler, derive_seed, memory_format
from pipeline.data.images import IMAGE_SIZE_PX, Images
from pipeline.plan.spec import Spec

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


CHANNEL_MEANS = (0.4914, 0.4822, 0.4465)
CHANNEL_STDS = (0.2023, 0.1994, 0.2010)
AUGMENTATION_CHUNK_BYTES = 256 * 2**20  # of augmented fp32 images in memory at once; an epoch of CIFAR-10 is 3 chunks

ImageBatch = tuple[Tensor, Tensor]  # images [batch, 3, 32, 32] of image_dtype(), labels [batch] int64


class AugmentedImages(Dataset[tuple[Tensor, int]]):
    """Images augmented one at a time by loader workers: random crop, flip with probability 0.5, normalisation."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self._transform = transforms.Compose(
            [
                transforms.RandomCrop(IMAGE_SIZE_PX, padding=PADDING_PX),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(CHANNEL_MEANS, CHANNEL_STDS),
            ]
        )

    def __len__(self) -> int:
        return len(self._images.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._images.pixels[index])), int(self._images.labels[index])


class DeviceAugmentedBatches:
    """Batches of `input: gpu`: the data set lies on the device as uint8 and is augmented there once an epoch.

    The sample order is drawn before the clock starts, as in a DataLoader. Augmentation is timed. It is done in chunks
    of one or more batches: the step of a chunk's first batch augments the whole chunk, in its `data` part. Each batch
    is a slice of a chunk. Under DataParallel the global batch lies on GPU 0.
    """

    def __init__(self, spec: Spec, rank: Rank, images: Images) -> None:
        self._sampler = build_sampler(spec.num_samples, rank.world_size, rank.rank, spec.seed)
        self._padded = pad(torch.tensor(images.pixels, device=rank.device))
        self._labels = torch.tensor(images.labels, device=rank.device)
        self._generator = torch.Generator(rank.device)
        self._seed = derive_seed(spec.seed, rank.rank)
        self._num_images = sum(batch_sizes(spec))
        self._batch_size = spec.batch_size_per_process
        self._normalize = Normalization(CHANNEL_MEANS, CHANNEL_STDS, rank.device)
        self._dtype, self._memory_format = image_dtype(spec), memory_format(spec)

    def epoch(self, epoch: int) -> Iterator[ImageBatch]:
        self._sampler.set_epoch(epoch)
        order = torch.tensor(list(self._sampler), device=self._labels.device)[: self._num_images]
        self._generator.manual_seed(derive_seed(self._seed, epoch) % 2**63)
        return self._batches(order)

    def _batches(self, order: Tensor) -> Iterator[ImageBatch]:
        batches_per_chunk = max(1, AUGMENTATION_CHUNK_BYTES // (3 * IMAGE_SIZE_PX**2 * 4) // self._batch_size)
        for chosen in order.split(batches_per_chunk * self._batch_size):
            draws = draw_augmentation(len(chosen), self._generator)
            pixels = crop_and_flip(self._padded, chosen, draws)
            images = self._normalize(pixels, self._dtype, self._memory_format)
            del pixels
            yield from zip(images.split(self._batch_size), self._labels[chosen].split(self._batch_size), strict=True)


def image_dtype(spec: Spec) -> torch.dtype:
    """Return the type of a batch's images. `input: gpu` rounds to bf16 once; autocast would round in every step."""
    return torch.bfloat16 if spec.input == "gpu" and spec.precision == "bf16" else torch.float32
