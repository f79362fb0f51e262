"""Training batches from images. Equal seeds give equal sample order on every input path."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate, get_worker_info
from torchvision import transforms

from pipeline.data import augmentation
from pipeline.data.images import IMAGE_SIZE_PX, NUM_SYNTHETIC_CLASSES, Images, load_images
from pipeline.experiment.spec import Spec
from pipeline.system.host import name_shared_memory

CHANNEL_MEANS = (0.4914, 0.4822, 0.4465)
CHANNEL_STDS = (0.2023, 0.1994, 0.2010)
AUGMENTATION_CHUNK_BYTES = 256 * 2**20  # of augmented fp32 images in memory at once; an epoch of CIFAR-10 is 3 chunks

Batch = tuple[Tensor, Tensor]  # images [batch, 3, 32, 32] of image_dtype(), labels [batch] int64


class Shard(NamedTuple):
    """The share of the images that one rank trains on, and the device of its batches."""

    rank: int
    world_size: int
    device: torch.device


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
        image = Image.fromarray(self._images.pixels[index])
        return self._transform(image), int(self._images.labels[index])


class TrainingBatches(Protocol):
    """The batches of one rank. `num_classes` counts the classes of the data set."""

    num_classes: int

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Return the batches of an epoch, on the host or the device. Epochs count from 1."""


class LoaderBatches:
    """A DataLoader with persistent workers over this rank's share of the images."""

    def __init__(self, spec: Spec, shard: Shard, images: Images) -> None:
        self.num_classes = images.num_classes
        self._sampler = build_sampler(spec.num_samples, shard.world_size, shard.rank, spec.seed)
        assert spec.num_workers is not None, "num_workers must be set in a point that runs"
        self._loader = DataLoader(
            AugmentedImages(images),
            batch_size=spec.global_batch_size // shard.world_size,
            sampler=self._sampler,
            num_workers=spec.num_workers,
            collate_fn=collate_shared,
            persistent_workers=spec.num_workers > 0,
            pin_memory=shard.device.type == "cuda",
            generator=torch.Generator().manual_seed(derive_seed(spec.seed, shard.rank)),
        )

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self._sampler.set_epoch(epoch)
        try:
            return iter(self._loader)
        except OSError as error:
            name_shared_memory(error)  # the workers' queues need semaphores in shared memory
            raise


def derive_seed(seed: int, number: int) -> int:
    """Return a seed for a rank or an epoch. No two pairs have the same one (numbers are below 1,000,003)."""
    return seed * 1_000_003 + number


def collate_shared(samples: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Collate samples into a batch; in a loader's worker, move the labels into shared memory as well.

    If shared memory is full, the error is raised here and reaches the rank. By default a background thread moves the
    labels: its error would be lost, and the rank would wait forever.
    """
    images, labels = default_collate(samples)
    return [images, labels.share_memory_() if get_worker_info() else labels]


def build_sampler(num_samples: int, world_size: int, rank: int, seed: int) -> DistributedSampler[int]:
    """Return a sampler that shuffles all samples in each epoch. It repeats some, so that all shares are equal."""
    placeholder: Dataset[int] = range(num_samples)  # type: ignore[assignment]  # only its length is used
    return DistributedSampler(placeholder, num_replicas=world_size, rank=rank, seed=seed)


class SyntheticBatches:
    """Batches of `input: synthetic`: every step gets the same batch on the device, the last step maybe a part of it."""

    num_classes = NUM_SYNTHETIC_CLASSES

    def __init__(self, spec: Spec, shard: Shard) -> None:
        batch_size = spec.global_batch_size // shard.world_size
        generator = torch.Generator(shard.device).manual_seed(derive_seed(spec.seed, shard.rank))
        shape = (batch_size, 3, IMAGE_SIZE_PX, IMAGE_SIZE_PX)
        self._labels = torch.randint(NUM_SYNTHETIC_CLASSES, shape[:1], generator=generator, device=shard.device)
        self._images = torch.randn(shape, generator=generator, device=shard.device)
        self._images += (self._labels / NUM_SYNTHETIC_CLASSES).view(-1, 1, 1, 1)
        self._images = self._images.contiguous(memory_format=memory_format(spec))
        self._sizes = batch_sizes(spec, shard.world_size)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        return ((self._images[:size], self._labels[:size]) for size in self._sizes)


class DeviceAugmentedBatches:
    """Batches of `input: gpu`: the data set lies on the device as uint8 and is augmented there once an epoch.

    The sample order is drawn before the clock starts, as in a DataLoader. Augmentation is timed. It is done in chunks
    of one or more batches: the step of a chunk's first batch augments the whole chunk, in its `data` part. Each batch
    is a slice of a chunk. Under DataParallel the global batch lies on GPU 0.
    """

    def __init__(self, spec: Spec, shard: Shard, images: Images) -> None:
        self.num_classes = images.num_classes
        self._sampler = build_sampler(spec.num_samples, shard.world_size, shard.rank, spec.seed)
        self._padded = augmentation.pad(torch.tensor(images.pixels, device=shard.device))
        self._labels = torch.tensor(images.labels, device=shard.device)
        self._generator = torch.Generator(shard.device)
        self._seed = derive_seed(spec.seed, shard.rank)
        self._num_images = sum(batch_sizes(spec, shard.world_size))
        self._batch_size = spec.global_batch_size // shard.world_size
        self._normalize = augmentation.Normalization(CHANNEL_MEANS, CHANNEL_STDS, shard.device)
        self._dtype, self._memory_format = image_dtype(spec), memory_format(spec)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self._sampler.set_epoch(epoch)
        order = torch.tensor(list(self._sampler), device=self._labels.device)[: self._num_images]
        self._generator.manual_seed(derive_seed(self._seed, epoch) % 2**63)
        return self._batches(order)

    def _batches(self, order: Tensor) -> Iterator[Batch]:
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


def memory_format(spec: Spec) -> torch.memory_format:
    return torch.channels_last if spec.layout == "channels_last" else torch.contiguous_format


def batch_sizes(spec: Spec, world_size: int) -> list[int]:
    """Return the size of each batch in one rank's epoch. Only the last may be smaller; in a probe all are full."""
    batch_size = spec.global_batch_size // world_size
    if spec.is_probe:
        return [batch_size] * spec.steps_per_epoch
    share = math.ceil(spec.num_samples / world_size)
    return [min(batch_size, share - step * batch_size) for step in range(spec.steps_per_epoch)]


def build_batches(spec: Spec, shard: Shard, folder: Path | None) -> TrainingBatches:
    """Build the training input that the spec names. Raises staging.DataNotStaged."""
    if spec.input == "synthetic":
        return SyntheticBatches(spec, shard)
    images = load_images(spec, "train", folder)
    return DeviceAugmentedBatches(spec, shard, images) if spec.input == "gpu" else LoaderBatches(spec, shard, images)
