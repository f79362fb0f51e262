"""The images: a split in memory, from the staged archive, from an image folder decoded once a node, or made up."""

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np
import numpy.typing as npt
from PIL import Image
from torchvision import datasets

from pipeline.data import staging
from pipeline.experiment.spec import Spec
from pipeline.system import files

IMAGE_SIZE_PX = 32  # images are SIZE x SIZE; an image folder's are resized when it is decoded
NUM_SYNTHETIC_CLASSES = 10
SYNTHETIC_TEST_SHARE = 5  # one test image for so many of training

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


class Images(NamedTuple):
    """A split in memory: pixels [n, 32, 32, 3] uint8, labels [n]."""

    pixels: Pixels
    labels: Labels
    num_classes: int


def load_images(spec: Spec, split: str, folder: Path | None) -> Images:
    """The `train` or `test` split; of `train` exactly `num_samples` images. What was loaded last stays in memory.

    Raises staging.DataNotStaged where the data folder lacks them; never downloads.
    """
    if spec.dataset == "synthetic":
        return synthetic_images(spec.num_samples, split, spec.seed)
    root = staging.require_folder(folder)
    images = load_split(spec.dataset, split, root)
    return images if split == "test" else balanced_subset(images, spec.num_samples, root)


@functools.lru_cache(maxsize=2)  # both splits, for the points that the same process runs next
def load_split(dataset: str | None, split: str, root: Path) -> Images:
    """All images of a split. Raises staging.DataNotStaged."""
    return cifar10_images(root, split) if dataset == "cifar10" else cached_folder_images(root, split)


def decode_ahead(spec: Spec, folder: Path | None) -> None:
    """Decode an image folder's splits on this node, where the point reads them. Raises staging.DataNotStaged."""
    if spec.dataset == "imagefolder" and spec.reads_data:
        for split in ("train", "test") if spec.evaluate else ("train",):
            cached_folder_images(staging.require_folder(folder), split)


def balanced_subset(images: Images, num_samples: int, root: Path) -> Images:
    """So many of the images, of every class alike: a fixed shuffle, since a folder lists class after class."""
    available = len(images.labels)
    if num_samples > available:
        raise staging.DataNotStaged(
            f"{root} has {available} training images and the point needs {num_samples}; complete the folder, "
            "or lower num_samples."
        )
    if num_samples == available:
        return images
    chosen = np.sort(np.random.default_rng(0).permutation(available)[:num_samples])
    return Images(images.pixels[chosen], images.labels[chosen], images.num_classes)


def cifar10_images(root: Path, split: str) -> Images:
    """CIFAR-10 as torchvision reads the staged archive (which it checks file by file)."""
    staging.check_cifar10_files(root)
    source = datasets.CIFAR10(str(root), train=split == "train", download=False)
    return Images(source.data, np.array(source.targets, dtype=np.int64), len(source.classes))


def synthetic_images(num_samples: int, split: str, seed: int) -> Images:
    """Noise around a pattern for each class, so that a loss can fall; the patterns are those of every seed."""
    coarse = np.random.default_rng(1).integers(64, 192, (NUM_SYNTHETIC_CLASSES, 2, 2, 3))
    patterns = coarse.repeat(IMAGE_SIZE_PX // 2, axis=1).repeat(
        IMAGE_SIZE_PX // 2, axis=2
    )  # in quarters, so that a crop keeps them
    count = num_samples if split == "train" else max(1, num_samples // SYNTHETIC_TEST_SHARE)
    generator = np.random.default_rng((seed, split == "test"))
    labels = generator.integers(0, NUM_SYNTHETIC_CLASSES, count)
    pixels = np.empty((count, IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3), dtype=np.uint8)
    for start in range(0, count, 4096):  # noise in slices: it is four times the size of the pixels
        part = labels[start : start + 4096]
        noise = generator.integers(-64, 64, (len(part), IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3), dtype=np.int16)
        pixels[start : start + 4096] = patterns[part] + noise
    return Images(pixels, labels, NUM_SYNTHETIC_CLASSES)


def cached_folder_images(root: Path, split: str) -> Images:
    """An image folder (`<split>/<class>/*.jpg`), decoded once a node into a memory-mapped uint8 file."""
    staging.require_image_folder(root)
    try:
        source = datasets.ImageFolder(str(root / split))
    except FileNotFoundError as error:  # a class without an image that it knows
        raise staging.DataNotStaged(f"{root / split}: {error}; complete the folder, or remove the class.") from error
    cache = private_cache_folder() / f"{split}-{folder_fingerprint(source)}.npy"
    with filelock.FileLock(cache.with_suffix(".lock")):
        if not cache.exists():
            decode_folder(source, cache)
    pixels = np.load(cache, mmap_mode="r", allow_pickle=False)
    return Images(pixels, np.array(source.targets, dtype=np.int64), len(source.classes))


def folder_fingerprint(source: datasets.ImageFolder) -> str:
    """A digest of what the decoded pixels depend on: every file's name, size and time of change, and SIZE."""
    digest = hashlib.sha256(str(IMAGE_SIZE_PX).encode())
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


def decode_folder(source: datasets.ImageFolder, cache: Path) -> None:
    """Write every image of the folder, under a name of its own first. Raises staging.DataNotStaged and OSError."""
    scratch = cache.with_suffix(".decoding")
    shape = (len(source.samples), IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3)
    try:
        pixels = np.lib.format.open_memmap(scratch, mode="w+", dtype=np.uint8, shape=shape)
        with (
            files.add_path_to_errors(cache),
            scratch.open("rb+") as file,
        ):  # a hole that the disk cannot fill would be a SIGBUS
            os.posix_fallocate(file.fileno(), 0, scratch.stat().st_size)
        for index, (path, _) in enumerate(source.samples):
            pixels[index] = decode_image(path)
        pixels.flush()
        scratch.rename(cache)
    finally:
        scratch.unlink(missing_ok=True)


def decode_image(path: str) -> Pixels:
    """One image as SIZE x SIZE pixels in RGB. Raises staging.DataNotStaged with the file's name."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # which Pillow cuts off at 255
                raise ValueError(f"more than 8 bits a channel, mode {image.mode}")
            rgb = image.convert("RGB")
            return np.asarray(
                rgb if rgb.size == (IMAGE_SIZE_PX, IMAGE_SIZE_PX) else rgb.resize((IMAGE_SIZE_PX, IMAGE_SIZE_PX))
            )
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise staging.DataNotStaged(f"{path} cannot be decoded ({error}); replace or remove it.") from error
