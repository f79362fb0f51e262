"""Images of a split in memory: from the staged archive, from an image folder decoded once per node, or synthetic."""

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np
import numpy.typing as npt
from PIL import Image
from torchvision import datasets

from pipeline.data import staging
from pipeline.plan.model_names import CIFAR_MODELS
from pipeline.plan.spec import Spec
from pipeline.system import files

IMAGE_SIZE_PX = 32  # height and width; images of a folder are resized when they are decoded
NUM_SYNTHETIC_CLASSES = 10
SYNTHETIC_TRAIN_IMAGES_PER_TEST_IMAGE = 5
MAX_UNUSED_DAYS, MAX_CACHE_BYTES = 7, 8 * 2**30  # of decoded image folders on a node; 1.3 million images take 3.7 GiB

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


class Images(NamedTuple):
    """A split in memory: pixels [n, 32, 32, 3] uint8, labels [n] int64."""

    pixels: Pixels
    labels: Labels
    num_classes: int


def load_images(spec: Spec, split: str, folder: Path | None) -> Images:
    """Load the `test` split, or `num_samples` images of the `train` split. Nothing is downloaded.

    Raises staging.DataNotStaged when the data folder lacks images.
    """
    if spec.dataset == "synthetic":
        return synthetic_images(spec.num_samples, split, spec.seed)
    root = staging.require_folder(folder)
    images = load_split(spec.dataset, split, root)
    return images if split == "test" else shuffled_subset(images, spec.num_samples, root)


@functools.lru_cache(maxsize=2)  # both splits stay in memory for the next points of this process
def load_split(dataset: str | None, split: str, root: Path) -> Images:
    """Load all images of a split. Raises staging.DataNotStaged."""
    return cifar10_images(root, split) if dataset == "cifar10" else cached_folder_images(root, split)


def decode_ahead(spec: Spec, folder: Path | None) -> None:
    """Decode an image folder on this node if the point reads one. Raises staging.DataNotStaged."""
    if spec.dataset == "imagefolder" and spec.reads_data and spec.model in CIFAR_MODELS:
        for split in ("train", "test") if spec.evaluate else ("train",):
            cached_folder_images(staging.require_folder(folder), split)


def shuffled_subset(images: Images, num_samples: int, root: Path) -> Images:
    """Select `num_samples` images by a fixed shuffle, because a folder lists images class by class."""
    available = len(images.labels)
    if num_samples > available:
        raise staging.DataNotStaged(
            f"{root} has {available} training images and the configuration needs {num_samples}; complete the folder, "
            "or lower num_samples."
        )
    if num_samples == available:
        return images
    chosen = np.sort(np.random.default_rng(0).permutation(available)[:num_samples])
    return Images(images.pixels[chosen], images.labels[chosen], images.num_classes)


def cifar10_images(root: Path, split: str) -> Images:
    """Load CIFAR-10 from the staged archive with torchvision, which checks the MD5 of every file."""
    staging.check_cifar10_files(root)
    try:
        source = datasets.CIFAR10(str(root), train=split == "train", download=False)
    except RuntimeError:  # a wrong MD5, for which torchvision advises a download
        staging.check_cifar10_md5(root)
        raise
    return Images(source.data, np.array(source.targets, dtype=np.int64), len(source.classes))


def synthetic_images(num_samples: int, split: str, seed: int) -> Images:
    """Make images of one pattern per class plus noise, which a model can learn. All seeds share the patterns."""
    coarse = np.random.default_rng(1).integers(64, 192, (NUM_SYNTHETIC_CLASSES, 2, 2, 3))
    half_px = IMAGE_SIZE_PX // 2  # four uniform quarters: a random crop keeps the pattern
    patterns = coarse.repeat(half_px, axis=1).repeat(half_px, axis=2)
    count = num_samples if split == "train" else max(1, num_samples // SYNTHETIC_TRAIN_IMAGES_PER_TEST_IMAGE)
    generator = np.random.default_rng((seed, split == "test"))
    labels = generator.integers(0, NUM_SYNTHETIC_CLASSES, count)
    pixels = np.empty((count, IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3), dtype=np.uint8)
    for start in range(0, count, 4096):  # in slices: the noise takes four times the memory of the pixels
        part = labels[start : start + 4096]
        noise = generator.integers(-64, 64, (len(part), IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3), dtype=np.int16)
        pixels[start : start + 4096] = patterns[part] + noise
    return Images(pixels, labels, NUM_SYNTHETIC_CLASSES)


def cached_folder_images(root: Path, split: str) -> Images:
    """Load an image folder (`<split>/<class>/*.jpg`), decoded once per node into a memory-mapped uint8 file."""
    staging.require_image_folder(root)
    try:
        source = datasets.ImageFolder(str(root / split))
    except FileNotFoundError as error:  # torchvision knows no file of a class as an image
        raise staging.DataNotStaged(f"{root / split}: {error}; complete the folder, or remove the class.") from error
    cache = private_cache_folder() / f"{split}-{folder_fingerprint(source)}.npy"
    with filelock.FileLock(cache.with_suffix(".lock")):
        if not cache.exists():
            remove_old_caches(cache)
            decode_folder(source, cache)
        os.utime(cache)  # when it was last used
        pixels = np.load(cache, mmap_mode="r", allow_pickle=False)
    return Images(pixels, np.array(source.targets, dtype=np.int64), len(source.classes))


def folder_fingerprint(source: datasets.ImageFolder) -> str:
    """Return a digest of all inputs of decoding: every file's path, size and mtime, and IMAGE_SIZE_PX."""
    digest = hashlib.sha256(str(IMAGE_SIZE_PX).encode())
    for path, _ in source.samples:
        status = os.stat(path)
        digest.update(f"\n{path} {status.st_size} {status.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def private_cache_folder() -> Path:
    """Make a folder on this node that only this user can write. Raises PermissionError if others can write it."""
    folder = Path(os.environ.get("PIPELINE_CACHE", Path(tempfile.gettempdir()) / f"pipeline-cache-{os.getuid()}"))
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must be a folder that you alone can write; set PIPELINE_CACHE to another.")
    return folder


def remove_old_caches(new: Path) -> None:
    """Remove other caches: unused for MAX_UNUSED_DAYS, or beyond MAX_CACHE_BYTES and unused for a day.

    A decoding that was killed counts too. A process that has mapped a removed file keeps it. Lock files stay: they are
    empty, and a lock on a removed file would lock nobody out.
    """
    room = MAX_CACHE_BYTES
    with contextlib.suppress(FileNotFoundError):  # another process removes too
        others = [
            path for path in new.parent.iterdir() if path.suffix in (".npy", ".decoding") and path.stem != new.stem
        ]
        for path, status in sorted(((path, path.stat()) for path in others), key=lambda pair: -pair[1].st_mtime):
            room -= status.st_size
            unused_days = (time.time() - status.st_mtime) / 86_400
            if unused_days > (MAX_UNUSED_DAYS if room >= 0 else 1):
                with contextlib.suppress(filelock.Timeout), filelock.FileLock(path.with_suffix(".lock"), timeout=0):
                    path.unlink(missing_ok=True)


def decode_folder(source: datasets.ImageFolder, cache: Path) -> None:
    """Decode every image into a temporary file, then rename it to `cache`. Raises staging.DataNotStaged and OSError."""
    temporary = cache.with_suffix(".decoding")
    shape = (len(source.samples), IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3)
    try:
        pixels = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        # reserve the space now: on a full disk, writing to the memory map would end in SIGBUS
        with files.add_path_to_errors(cache), temporary.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, temporary.stat().st_size)
        for index, (path, _) in enumerate(source.samples):
            pixels[index] = decode_image(path)
        pixels.flush()
        temporary.rename(cache)
    finally:
        temporary.unlink(missing_ok=True)


def decode_image(path: str) -> Pixels:
    """Decode one image to IMAGE_SIZE_PX x IMAGE_SIZE_PX pixels in RGB. Raises staging.DataNotStaged with its path."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would clip these at 255
                raise ValueError(f"more than 8 bits a channel, mode {image.mode}")
            rgb, size = image.convert("RGB"), (IMAGE_SIZE_PX, IMAGE_SIZE_PX)
            return np.asarray(rgb if rgb.size == size else rgb.resize(size))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise staging.DataNotStaged(f"{path} cannot be decoded ({error}); replace or remove it.") from error
