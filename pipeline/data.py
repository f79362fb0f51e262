"""The images, and the batches made of them: the same seeds give the same order whatever the input path."""

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import filelock
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import datasets, transforms

from pipeline import augmentation, files, staging
from pipeline.distributed import Rank
from pipeline.spec import Spec

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)
SIZE = 32  # images are SIZE x SIZE; an image folder's are resized when it is decoded
NUM_SYNTHETIC_CLASSES = 10
SYNTHETIC_TEST_SHARE = 5  # one test image for so many of training
AUGMENTED_BYTES = 256 * 2**20  # of augmented images (as fp32) at a time: CIFAR-10's epoch is three such chunks

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Batch = tuple[Tensor, Tensor]  # images [batch, 3, 32, 32] of image_dtype(), labels [batch] int64


class Images(NamedTuple):
    """A split in memory: pixels [n, 32, 32, 3] uint8, labels [n]."""

    pixels: Pixels
    labels: Labels
    num_classes: int


def load_images(spec: Spec, split: str, folder: Path | None) -> Images:
    """The `train` or `test` split; of `train` exactly `num_samples` images. What was loaded last stays in memory.

    Raises staging.NotStaged where the data folder lacks them; never downloads.
    """
    if spec.dataset == "synthetic":
        return synthetic_images(spec.num_samples, split, spec.seed)
    root = staging.require_folder(folder)
    images = load_split(spec.dataset, split, root)
    return images if split == "test" else first_samples(images, spec.num_samples, root)


@functools.lru_cache(maxsize=2)  # both splits, for the points that the same process runs next
def load_split(dataset: str | None, split: str, root: Path) -> Images:
    """All images of a split. Raises staging.NotStaged."""
    return cifar10_images(root, split) if dataset == "cifar10" else cached_folder_images(root, split)


def warm_cache(spec: Spec, folder: Path | None) -> None:
    """Decode an image folder's splits on this node, where the point reads them. Raises staging.NotStaged."""
    if spec.dataset == "imagefolder" and spec.reads_data:
        for split in ("train", "test") if spec.evaluate else ("train",):
            cached_folder_images(staging.require_folder(folder), split)


def first_samples(images: Images, num_samples: int, root: Path) -> Images:
    """So many of the images, of every class alike: a fixed shuffle, since a folder lists class after class."""
    available = len(images.labels)
    if num_samples > available:
        raise staging.NotStaged(
            f"{root} has {available} training images and the point needs {num_samples}; complete the folder, "
            "or lower num_samples."
        )
    if num_samples == available:
        return images
    chosen = np.sort(np.random.default_rng(0).permutation(available)[:num_samples])
    return Images(images.pixels[chosen], images.labels[chosen], images.num_classes)


def cifar10_images(root: Path, split: str) -> Images:
    """CIFAR-10 as torchvision reads the staged archive (which it checks file by file)."""
    staging.require_cifar10(root)
    source = datasets.CIFAR10(str(root), train=split == "train", download=False)
    return Images(source.data, np.array(source.targets, dtype=np.int64), len(source.classes))


def synthetic_images(num_samples: int, split: str, seed: int) -> Images:
    """Noise around a pattern for each class, so that a loss can fall; the patterns are those of every seed."""
    coarse = np.random.default_rng(1).integers(64, 192, (NUM_SYNTHETIC_CLASSES, 2, 2, 3))
    patterns = coarse.repeat(SIZE // 2, axis=1).repeat(SIZE // 2, axis=2)  # in quarters, so that a crop keeps them
    count = num_samples if split == "train" else max(1, num_samples // SYNTHETIC_TEST_SHARE)
    generator = np.random.default_rng((seed, split == "test"))
    labels = generator.integers(0, NUM_SYNTHETIC_CLASSES, count)
    pixels = np.empty((count, SIZE, SIZE, 3), dtype=np.uint8)
    for start in range(0, count, 4096):  # noise in slices: it is four times the size of the pixels
        part = labels[start : start + 4096]
        noise = generator.integers(-64, 64, (len(part), SIZE, SIZE, 3), dtype=np.int16)
        pixels[start : start + 4096] = patterns[part] + noise
    return Images(pixels, labels, NUM_SYNTHETIC_CLASSES)


def cached_folder_images(root: Path, split: str) -> Images:
    """An image folder (`<split>/<class>/*.jpg`), decoded once a node into a memory-mapped uint8 file."""
    staging.require_image_folder(root)
    try:
        source = datasets.ImageFolder(str(root / split))
    except FileNotFoundError as error:  # a class without an image that it knows
        raise staging.NotStaged(f"{root / split}: {error}; complete the folder, or remove the class.") from error
    cache = private_cache_folder() / f"{split}-{fingerprint(source)}.npy"
    with filelock.FileLock(cache.with_suffix(".lock")):
        if not cache.exists():
            decode(source, cache)
    pixels = np.load(cache, mmap_mode="r", allow_pickle=False)
    return Images(pixels, np.array(source.targets, dtype=np.int64), len(source.classes))


def fingerprint(source: datasets.ImageFolder) -> str:
    """A digest of what the decoded pixels depend on: every file's name, size and time of change, and SIZE."""
    digest = hashlib.sha256(str(SIZE).encode())
    for path, _ in source.samples:
        facts = os.stat(path)
        digest.update(f"\n{path} {facts.st_size} {facts.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def private_cache_folder() -> Path:
    """A folder on this node that only this user can write. Raises PermissionError where it is another's."""
    folder = Path(os.environ.get("PIPELINE_CACHE", Path(tempfile.gettempdir()) / f"pipeline-cache-{os.getuid()}"))
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{folder} must be a folder that you alone can write; set PIPELINE_CACHE to another.")
    return folder


def decode(source: datasets.ImageFolder, cache: Path) -> None:
    """Write every image of the folder, under a name of its own first. Raises staging.NotStaged and OSError."""
    scratch = cache.with_suffix(".decoding")
    shape = (len(source.samples), SIZE, SIZE, 3)
    try:
        pixels = np.lib.format.open_memmap(scratch, mode="w+", dtype=np.uint8, shape=shape)
        with files.naming(cache), scratch.open("rb+") as file:  # a hole that the disk cannot fill would be a SIGBUS
            os.posix_fallocate(file.fileno(), 0, scratch.stat().st_size)
        for index, (path, _) in enumerate(source.samples):
            pixels[index] = decode_image(path)
        pixels.flush()
        scratch.rename(cache)
    finally:
        scratch.unlink(missing_ok=True)


def decode_image(path: str) -> Pixels:
    """One image as SIZE x SIZE pixels in RGB. Raises staging.NotStaged with the file's name."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # which Pillow cuts off at 255
                raise ValueError(f"more than 8 bits a channel, mode {image.mode}")
            rgb = image.convert("RGB")
            return np.asarray(rgb if rgb.size == (SIZE, SIZE) else rgb.resize((SIZE, SIZE)))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise staging.NotStaged(f"{path} cannot be decoded ({error}); replace or remove it.") from error


class AugmentedImages(Dataset[tuple[Tensor, int]]):
    """Random crop with padding 4, flip with probability 0.5, normalised: an image at a time, as workers do it."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self._transform = transforms.Compose(
            [
                transforms.RandomCrop(SIZE, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self._images.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self._images.pixels[index])
        return self._transform(image), int(self._images.labels[index])


class TrainingBatches(Protocol):
    """The batches of an epoch for one rank; `num_classes` is the data set's."""

    num_classes: int

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The epoch's batches on the host or the device; counting from 1."""


class LoaderBatches:
    """A DataLoader with persistent workers over this rank's share of the images."""

    def __init__(self, spec: Spec, rank: Rank, images: Images) -> None:
        self.num_classes = images.num_classes
        self._sampler = build_sampler(spec.num_samples, rank.world_size, rank.rank, spec.seed)
        assert spec.num_workers is not None, "a point that runs states its workers"
        self._loader = DataLoader(
            AugmentedImages(images),
            batch_size=spec.global_batch_size // rank.world_size,
            sampler=self._sampler,
            num_workers=spec.num_workers,
            persistent_workers=spec.num_workers > 0,
            pin_memory=rank.device.type == "cuda",
            generator=torch.Generator().manual_seed(spec.seed * 1_000_003 + rank.rank),
        )

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self._sampler.set_epoch(epoch)
        return iter(self._loader)


def build_sampler(num_samples: int, world_size: int, rank: int, seed: int) -> DistributedSampler[int]:
    """The order of an epoch: one permutation of all samples, dealt to the ranks in turn, padded to equal shares."""
    placeholder: Dataset[int] = range(num_samples)  # type: ignore[assignment]  # only its length is used
    return DistributedSampler(placeholder, num_replicas=world_size, rank=rank, seed=seed)


class ResidentBatches:
    """`input: synthetic`: one batch that lies on the device, given again each step; the last one may be smaller."""

    num_classes = NUM_SYNTHETIC_CLASSES

    def __init__(self, spec: Spec, rank: Rank) -> None:
        batch_size = spec.global_batch_size // rank.world_size
        generator = torch.Generator(rank.device).manual_seed(spec.seed * 1_000_003 + rank.rank)
        shape = (batch_size, 3, SIZE, SIZE)
        self._labels = torch.randint(NUM_SYNTHETIC_CLASSES, shape[:1], generator=generator, device=rank.device)
        self._images = torch.randn(shape, generator=generator, device=rank.device)
        self._images += (self._labels / NUM_SYNTHETIC_CLASSES).view(-1, 1, 1, 1)
        self._images = self._images.contiguous(memory_format=memory_format(spec))
        self._sizes = batch_sizes(spec, rank.world_size)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        return ((self._images[:size], self._labels[:size]) for size in self._sizes)


class AugmentedBatches:
    """`input: gpu`: the whole data set lies on the device as bytes, and is augmented there once an epoch.

    The epoch's order is drawn before the clock, as a DataLoader's is. The augmentation falls into the clock: it
    runs in that order, chunk by chunk, when the first batch of a chunk is asked for (the `data` part of that
    step), so that every batch is a slice. Under DataParallel the global batch lies on GPU 0.
    """

    def __init__(self, spec: Spec, rank: Rank, images: Images) -> None:
        self.num_classes = images.num_classes
        self._sampler = build_sampler(spec.num_samples, rank.world_size, rank.rank, spec.seed)
        self._padded = augmentation.pad(torch.tensor(images.pixels, device=rank.device))
        self._labels = torch.tensor(images.labels, device=rank.device)
        self._generator = torch.Generator(rank.device)
        self._seed = spec.seed * 1_000_003 + rank.rank
        self._num_images = sum(batch_sizes(spec, rank.world_size))
        self._batch_size = spec.global_batch_size // rank.world_size
        self._normalization = augmentation.normalization(MEAN, STD, rank.device)
        self._dtype, self._memory_format = image_dtype(spec), memory_format(spec)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self._sampler.set_epoch(epoch)
        order = torch.tensor(list(self._sampler), device=self._labels.device)[: self._num_images]
        self._generator.manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        return self._batches(order)

    def _batches(self, order: Tensor) -> Iterator[Batch]:
        chunk_size = max(1, AUGMENTED_BYTES // (3 * SIZE * SIZE * 4) // self._batch_size) * self._batch_size
        for chosen in order.split(chunk_size):
            draws = augmentation.draw(len(chosen), self._generator)
            pixels = augmentation.crop_and_flip(self._padded, chosen, draws)
            images = augmentation.normalize(pixels, self._normalization, self._dtype, self._memory_format)
            del pixels
            yield from zip(images.split(self._batch_size), self._labels[chosen].split(self._batch_size), strict=True)


def image_dtype(spec: Spec) -> torch.dtype:
    """What images arrive in: `input: gpu` rounds once to bf16 where autocast would round them in every step."""
    return torch.bfloat16 if spec.input == "gpu" and spec.precision == "bf16" else torch.float32


def memory_format(spec: Spec) -> torch.memory_format:
    """How images and weights lie in memory."""
    return torch.channels_last if spec.layout == "channels_last" else torch.contiguous_format


def batch_sizes(spec: Spec, world_size: int) -> list[int]:
    """The size of each batch of one rank's epoch; a probe's are all full, an epoch's last may be smaller."""
    batch_size = spec.global_batch_size // world_size
    if spec.is_probe:
        return [batch_size] * spec.steps_per_epoch
    share = -(-spec.num_samples // world_size)
    return [min(batch_size, share - step * batch_size) for step in range(spec.steps_per_epoch)]


def build_batches(spec: Spec, rank: Rank, folder: Path | None) -> TrainingBatches:
    """The training input that the spec names. Raises staging.NotStaged."""
    if spec.input == "synthetic":
        return ResidentBatches(spec, rank)
    images = load_images(spec, "train", folder)
    return AugmentedBatches(spec, rank, images) if spec.input == "gpu" else LoaderBatches(spec, rank, images)
