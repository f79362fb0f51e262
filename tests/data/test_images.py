import errno
import os
import time
from pathlib import Path

import filelock
import numpy as np
import pytest
from factories import COLOURS, make_spec, raising
from PIL import Image

from pipeline.data import images, staging
from pipeline.data.images import (
    IMAGE_SIZE_PX,
    Images,
    cached_folder_images,
    load_images,
    private_cache_folder,
    shuffled_subset,
    synthetic_images,
)


def test_synthetic_images_tell_their_class() -> None:
    """Classify test images by the nearest class mean of training images; a guess is right for one in ten."""
    train, test = (synthetic_images(1000, split, seed=0) for split in ("train", "test"))
    means = np.stack([train.pixels[train.labels == label].mean(axis=0) for label in range(train.num_classes)])
    distances = ((test.pixels[:, None].astype(np.float32) - means) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == test.labels).mean() > 0.9


def test_synthetic_images_come_of_the_seed_and_training_is_not_the_test() -> None:
    first = synthetic_images(50, "train", seed=0)
    assert np.array_equal(first.pixels, synthetic_images(50, "train", seed=0).pixels)
    assert not np.array_equal(first.pixels, synthetic_images(50, "train", seed=1).pixels)
    test = synthetic_images(50, "test", seed=0)
    assert len(test.labels) == 10
    assert not np.array_equal(first.pixels[:10], test.pixels)


def test_the_first_samples_are_of_every_class_alike_and_always_the_same() -> None:
    labels = np.repeat(np.arange(10), 100)  # as a folder lists them: class after class
    pixels = np.zeros((1000, 1, 1, 3), dtype=np.uint8) + labels[:, None, None, None].astype(np.uint8)
    images = Images(pixels, labels, 10)
    some = shuffled_subset(images, 200, Path("root"))
    assert len(some.labels) == 200
    assert np.bincount(some.labels, minlength=10).min() >= 8  # 20 expected, standard deviation 4: three of them
    assert np.array_equal(some.pixels[:, 0, 0, 0], some.labels)
    assert np.array_equal(some.labels, shuffled_subset(images, 200, Path("root")).labels)
    assert shuffled_subset(images, 1000, Path("root")) is images


def test_more_samples_than_there_are_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        staging.DataNotStaged, match=r"root has 50 training images and the configuration needs 51; complete the folder"
    ):
        shuffled_subset(synthetic_images(50, "train", 0), 51, Path("root"))


def test_an_image_folder_gives_its_images_and_labels(image_folder: Path) -> None:
    images = cached_folder_images(image_folder, "train")
    assert (images.labels.tolist(), images.num_classes) == ([0, 0, 1, 1, 1], 2)
    assert images.pixels.shape == (5, IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3)
    for pixels, label in zip(images.pixels, images.labels, strict=True):
        assert (pixels == list(COLOURS.values())[label]).all()


def test_an_image_folder_is_decoded_once(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = np.array(cached_folder_images(image_folder, "train").pixels)

    def decode_again(*_: object) -> None:
        pytest.fail("the cache was there")

    monkeypatch.setattr(images, "decode_folder", decode_again)
    again = cached_folder_images(image_folder, "train").pixels
    assert isinstance(again, np.memmap)
    assert np.array_equal(first, again)


def age(path: Path, days: float) -> None:
    os.utime(path, times=(time.time() - days * 86_400,) * 2)


def test_caches_that_nobody_uses_are_removed_before_a_new_one_is_written(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_folder_images(image_folder, "train")
    folder = private_cache_folder()
    (train,) = folder.glob("train-*.npy")
    for name, days in (("train-old.npy", 8), ("train-new.npy", 2), ("train-killed.decoding", 8)):
        (folder / name).write_bytes(b"0" * 100)
        age(folder / name, days)
    age(train, 8)
    mapped = cached_folder_images(image_folder, "train").pixels  # used again, so it is not old
    cached_folder_images(image_folder, "test")
    left = {path.name for path in folder.iterdir() if path.suffix != ".lock"}
    assert left == {train.name, "train-new.npy", next(folder.glob("test-*.npy")).name}
    monkeypatch.setattr(images, "MAX_CACHE_BYTES", 50)
    age(train, 1.5)
    (image_folder / "test" / "cat" / "0.png").touch()  # another fingerprint, so it is decoded again
    os.utime(image_folder / "test" / "cat" / "0.png", (0, 0))
    cached_folder_images(image_folder, "test")
    assert {path.name for path in (train, folder / "train-new.npy") if path.exists()} == set()
    assert len(list(folder.glob("test-*.npy"))) == 2, "of today, so kept also beyond the limit"
    assert mapped[0].max() == 255


def test_a_cache_that_another_process_is_decoding_is_not_removed(image_folder: Path) -> None:
    other = private_cache_folder() / "train-other.decoding"
    other.touch()
    age(other, 8)
    with filelock.FileLock(other.with_suffix(".lock")):
        cached_folder_images(image_folder, "train")
    assert other.exists()


def test_a_decoding_that_was_cut_short_is_not_taken_for_the_cache(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            cached_folder_images(image_folder, "train")
    assert cached_folder_images(image_folder, "train").pixels[0].max() == 255


@pytest.mark.parametrize("content", [b"", b"no image", "half"])
def test_an_image_that_cannot_be_decoded_is_named(image_folder: Path, content: bytes | str) -> None:
    path = image_folder / "train" / "cat" / "0.png"
    whole = path.read_bytes()
    path.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])
    with pytest.raises(staging.DataNotStaged, match=rf"{path} cannot be decoded \(.*\); replace or remove it"):
        cached_folder_images(image_folder, "train")
    path.write_bytes(whole)
    assert len(cached_folder_images(image_folder, "train").pixels) == 5


def test_splits_of_other_classes_are_refused_also_by_a_job_that_no_submit_has_checked(image_folder: Path) -> None:
    (image_folder / "test" / "cat").rename(image_folder / "test" / "dogs")
    with pytest.raises(staging.DataNotStaged, match=r"has the classes \['cat', 'dogs'\] in only one split"):
        cached_folder_images(image_folder, "train")


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_an_image_of_more_than_8_bits_is_refused_and_not_cut_off(image_folder: Path, mode: str) -> None:
    path = image_folder / "train" / "cat" / "0.tiff"
    Image.new(mode, (IMAGE_SIZE_PX, IMAGE_SIZE_PX), 40_000).save(path)
    with pytest.raises(
        staging.DataNotStaged, match=rf"{path} cannot be decoded \(more than 8 bits a channel, mode {mode}.*\)"
    ):
        cached_folder_images(image_folder, "train")


def test_a_cache_that_the_disk_has_no_room_for_is_named_and_leaves_nothing(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device: '.*/train-[0-9a-f]{16}\.npy'"):
        cached_folder_images(image_folder, "train")
    assert [path.suffix for path in private_cache_folder().iterdir()] == [".lock"]


def test_a_class_without_an_image_is_named_with_its_split(image_folder: Path) -> None:
    for path in (image_folder / "train" / "cat").iterdir():
        path.rename(path.with_suffix(".txt"))
    with pytest.raises(
        staging.DataNotStaged, match=rf"{image_folder / 'train'}: .*cat.*; complete the folder, or remove the class"
    ):
        cached_folder_images(image_folder, "train")


def test_an_image_that_changes_is_decoded_anew(image_folder: Path) -> None:
    cached_folder_images(image_folder, "train")
    path = image_folder / "train" / "cat" / "0.png"
    Image.new("RGB", (IMAGE_SIZE_PX, IMAGE_SIZE_PX), (0, 255, 0)).save(path)
    os.utime(path, ns=(0, 0))
    assert cached_folder_images(image_folder, "train").pixels[0, 0, 0].tolist() == [0, 255, 0]


def test_the_cache_is_private(image_folder: Path) -> None:
    folder = private_cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="must be a folder that you alone can write; set PIPELINE_CACHE"):
        cached_folder_images(image_folder, "train")


@pytest.mark.fault("F24")
@pytest.mark.parametrize("dataset", ["cifar10", "imagefolder"])
def test_data_that_is_not_staged_is_refused_and_never_downloaded(tmp_path: Path, dataset: str) -> None:
    for folder in (None, tmp_path / "absent", tmp_path):
        with pytest.raises(staging.DataNotStaged):
            load_images(make_spec(dataset=dataset), "train", folder)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_cifar10_is_named_with_the_cure(tmp_path: Path) -> None:
    batches = tmp_path / staging.CIFAR10_FOLDER
    batches.mkdir()
    for name in staging.CIFAR10_FILES:
        (batches / name).write_text("damaged")
    for path in (tmp_path, batches, *batches.iterdir()):
        path.chmod(0o755)
    with pytest.raises(
        staging.DataNotStaged, match=r"batches\.meta is not the file of CIFAR-10 .*; remove it, and fetch"
    ):
        load_images(make_spec(), "train", tmp_path)
