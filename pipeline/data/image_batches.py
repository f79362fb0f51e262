"""Batches of images: augmented one by one by a loader's workers, or all at once on the device that holds them."""

from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms

from pipeline.data import augmentation
from pipeline.data.batches import Shard, batch_sizes, build_sampler, derive_seed, memory_format
from pipeline.data.images import IMAGE_SIZE_PX, Images
from pipeline.experiment.spec import Spec

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
                transforms.RandomCrop(IMAGE_SIZE_PX, padding=augmentation.PADDING_PX),
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

    def __init__(self, spec: Spec, shard: Shard, images: Images) -> None:
        self._sampler = build_sampler(spec.num_samples, shard.world_size, shard.rank, spec.seed)
        self._padded = augmentation.pad(torch.tensor(images.pixels, device=shard.device))
        self._labels = torch.tensor(images.labels, device=shard.device)
        self._generator = torch.Generator(shard.device)
        self._seed = derive_seed(spec.seed, shard.rank)
        self._num_images = sum(batch_sizes(spec))
        self._batch_size = spec.batch_size_per_process
        self._normalize = augmentation.Normalization(CHANNEL_MEANS, CHANNEL_STDS, shard.device)
        self._dtype, self._memory_format = image_dtype(spec), memory_format(spec)

    def epoch(self, epoch: int) -> Iterator[ImageBatch]:
        self._sampler.set_epoch(epoch)
        order = torch.tensor(list(self._sampler), device=self._labels.device)[: self._num_images]
        self._generator.manual_seed(derive_seed(self._seed, epoch) % 2**63)
        return self._batches(order)

    def _batches(self, order: Tensor) -> Iterator[ImageBatch]:
        batches_per_chunk = max(1, AUGMENTATION_CHUNK_BYTES // (3 * IMAGE_SIZE_PX**2 * 4) // self._batch_size)
        for chosen in order.split(batches_per_chunk * self._batch_size):
            draws = augmentation.draw_augmentation(len(chosen), self._generator)
            pixels = augmentation.crop_and_flip(self._padded, chosen, draws)
            images = self._normalize(pixels, self._dtype, self._memory_format)
            del pixels
            yield from zip(images.split(self._batch_size), self._labels[chosen].split(self._batch_size), strict=True)


def image_dtype(spec: Spec) -> torch.dtype:
    """Return the type of a batch's images. `input: gpu` rounds to bf16 once; autocast would round in every step."""
    return torch.bfloat16 if spec.input == "gpu" and spec.precision == "bf16" else torch.float32
