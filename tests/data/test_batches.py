import errno
import multiprocessing
import os
from multiprocessing.queues import Queue
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from factories import COLOURS, make_spec
from image_steps import ALONE, batches_of

from pipeline.data import image_batches
from pipeline.data.batches import Batch, batch_sizes, build_sampler, copy_batch, send_errors_of_queues
from pipeline.data.images import IMAGE_SIZE_PX, Images, synthetic_images
from pipeline.plan.spec import Spec
from pipeline.training.process_group import Rank


class NotSent:
    def __reduce__(self) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_batch_that_a_worker_cannot_send_is_an_error_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 tensors a batch under `ulimit -n 128` the rank waited for ever."""
    monkeypatch.setattr(Queue, "_on_queue_feeder_error", None)  # sets it back afterwards
    send_errors_of_queues(1)
    queue = multiprocessing.get_context("fork").Queue()
    queue.put((3, NotSent()))
    index, found = queue.get(timeout=30)
    assert index == 3
    with pytest.raises(OSError, match=r"Caught OSError in DataLoader worker process 1\.(?s:.*)Too many open files"):
        found.reraise()


class TokensFirst(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor


class LabelsFirst(NamedTuple):
    labels: torch.Tensor
    tokens: torch.Tensor


TOKENS, LABELS = torch.full((2, 4), 3), torch.full((2, 4), 7)


@pytest.mark.fault("F62")
@pytest.mark.parametrize(
    "source",
    [
        {"labels": LABELS, "tokens": TOKENS},
        [{"tokens": TOKENS, "labels": LABELS}],
        [LabelsFirst(LABELS, TOKENS)],
        ({"text": {"labels": LABELS, "tokens": TOKENS}}, TOKENS),
    ],
)
def test_a_batch_is_copied_by_key_whatever_the_order_of_the_keys(source: Batch) -> None:
    def zeros(batch: Batch) -> Batch:
        """The same batch as it was captured: zeros, and dicts and named tuples in another order."""
        if isinstance(batch, LabelsFirst):
            return TokensFirst(torch.zeros_like(TOKENS), torch.zeros_like(LABELS))
        if isinstance(batch, dict):
            return {key: zeros(part) for key, part in reversed(batch.items())}
        if isinstance(batch, list | tuple):
            return [zeros(part) for part in batch]
        return torch.zeros_like(batch)

    target = zeros(source)
    copy_batch(source, target)
    held = target[0] if isinstance(target, list) else target
    held = held.get("text", held) if isinstance(held, dict) else held._asdict()
    assert (held["tokens"].tolist(), held["labels"].tolist()) == (TOKENS.tolist(), LABELS.tolist())


@pytest.mark.parametrize(
    "source",
    [
        {"labels": LABELS, "words": TOKENS},
        {"labels": LABELS},
        {"labels": LABELS, "tokens": TOKENS[:, :1]},  # copy_ would broadcast it
        {"labels": LABELS, "tokens": [TOKENS]},
        [TOKENS, LABELS],
    ],
)
def test_a_batch_that_does_not_fit_into_the_captured_one_is_refused(source: Batch) -> None:
    target = {"tokens": torch.zeros(2, 4), "labels": torch.zeros(2, 4)}
    with pytest.raises(ValueError, match=r"another form .*than the captured one; make all alike"):
        copy_batch(source, target)


@pytest.mark.parametrize("input", ["dataloader", "gpu", "synthetic"])
@pytest.mark.parametrize(
    ("fields", "world_size", "sizes"),
    [
        ({"num_samples": 10, "batch_size_per_gpu": 4}, 1, [4, 4, 2]),
        ({"num_samples": 10, "batch_size_per_gpu": 4, "max_steps": 2, "input": "dataloader"}, 1, [4, 4]),
        ({"num_samples": 10, "batch_size_per_gpu": 2, "strategy": "ddp", "num_gpus": 4}, 4, [2, 1]),  # shards of 3
        ({"num_samples": 10, "batch_size_per_gpu": 2, "strategy": "dp", "num_gpus": 4}, 1, [8, 2]),  # global batches
    ],
)
def test_batches_are_full_but_for_the_last(
    input: str, fields: dict[str, int | str], world_size: int, sizes: list[int]
) -> None:
    spec = make_spec(**{"dataset": "synthetic", "num_workers": 0, "input": input, **fields})
    batches = batches_of(spec, Rank(0, world_size, torch.device("cpu")))
    assert (spec.world_size, spec.steps_per_epoch, batch_sizes(spec)) == (world_size, len(sizes), sizes)
    assert [len(labels) for _, labels in batches.epoch(1)][: spec.steps_per_epoch] == sizes


def labels_of(spec: Spec, rank: int, world_size: int, epoch: int = 1) -> list[int]:
    batches = batches_of(spec, Rank(rank, world_size, torch.device("cpu")))
    return torch.cat([labels for _, labels in batches.epoch(epoch)]).tolist()


def test_single_and_ddp_see_the_same_samples_in_the_same_order() -> None:
    fields = {"dataset": "synthetic", "num_workers": 0, "num_samples": 64, "batch_size_per_gpu": 8, "seed": 3}
    alone = labels_of(make_spec(**fields), 0, 1)
    ddp = make_spec(**fields, strategy="ddp", num_gpus=2)
    assert [labels_of(ddp, rank, 2) for rank in (0, 1)] == [alone[0::2], alone[1::2]]
    assert labels_of(make_spec(**fields), 0, 1, epoch=2) != alone == labels_of(make_spec(**fields), 0, 1)
    first, other = (list(build_sampler(64, 1, 0, seed)) for seed in (3, 4))
    assert first != other


@pytest.mark.parametrize(
    ("fields", "ranks", "world_size"),
    [
        ({}, (0,), 1),
        ({"strategy": "ddp", "num_gpus": 3}, (0, 1, 2), 3),  # 65 samples: the shares are padded
        ({"strategy": "dp", "num_gpus": 2}, (0,), 1),  # one process, global batches
        ({"max_steps": 3}, (0,), 1),
    ],
)
def test_the_samples_come_in_the_same_order_whatever_the_input_path(
    fields: dict[str, int | str], ranks: tuple[int, ...], world_size: int
) -> None:
    base = {"dataset": "synthetic", "num_workers": 0, "num_samples": 65, "batch_size_per_gpu": 8, "seed": 5, **fields}
    loader, gpu = (make_spec(**{**base, "input": input}) for input in ("dataloader", "gpu"))
    for rank in ranks:
        for epoch in (1, 2):
            expected = labels_of(loader, rank, world_size, epoch)
            assert labels_of(gpu, rank, world_size, epoch) == expected[: loader.max_steps and 8 * loader.max_steps]


def pixels_of(images: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Undo the normalisation: return uint8 pixels [n, 32, 32, 3]."""
    mean, std = (
        torch.tensor(values).view(1, 3, 1, 1) for values in (image_batches.CHANNEL_MEANS, image_batches.CHANNEL_STDS)
    )
    pixels: npt.NDArray[np.uint8] = ((images.float() * std + mean) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return pixels


def crops_of(image: npt.NDArray[np.uint8]) -> dict[bytes, tuple[int, int, bool]]:
    """Return every crop of an image padded by 4, and its mirror image."""
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    crops = {
        (top, left): padded[top : top + IMAGE_SIZE_PX, left : left + IMAGE_SIZE_PX]
        for top in range(9)
        for left in range(9)
    }
    return {
        part.tobytes(): (*corner, flipped)
        for corner, crop in crops.items()
        for part, flipped in ((crop, False), (crop[:, ::-1], True))
    }


def test_every_crop_on_the_device_is_one_that_the_dataloader_could_have_made() -> None:
    """All 81 corners and both flips occur in 4,000 draws; a corner is expected 49 times, standard deviation 7."""
    spec = make_spec(dataset="synthetic", input="gpu", num_samples=4000, batch_size_per_gpu=1000)
    image = synthetic_images(1, "train", 0).pixels
    images = Images(image.repeat(4000, axis=0), np.zeros(4000, dtype=np.int64), 10)
    crops = crops_of(image[0])
    batches = image_batches.DeviceAugmentedBatches(spec, ALONE, images)
    seen = [crops[part.tobytes()] for batch, _ in batches.epoch(1) for part in pixels_of(batch)]
    counts = np.zeros((9, 9, 2), dtype=int)
    for top, left, flipped in seen:
        counts[top, left, int(flipped)] += 1
    assert counts.sum() == 4000
    assert 15 <= counts.sum(axis=2).min() <= counts.sum(axis=2).max() <= 90
    assert 1850 <= counts[:, :, 1].sum() <= 2150  # 2000, standard deviation 32


def test_an_image_and_its_label_stay_together_on_the_device() -> None:
    spec = make_spec(dataset="synthetic", input="gpu", num_samples=50, batch_size_per_gpu=8)
    images = synthetic_images(50, "train", 0)
    owners = {crop: index for index in range(50) for crop in crops_of(images.pixels[index])}
    for batch, labels in image_batches.DeviceAugmentedBatches(spec, ALONE, images).epoch(1):
        assert images.labels[[owners[part.tobytes()] for part in pixels_of(batch)]].tolist() == labels.tolist()


def test_augmentation_differs_by_epoch_rank_and_seed_and_repeats_itself() -> None:
    def first_image(seed: int = 0, rank: int = 0, epoch: int = 1) -> torch.Tensor:
        spec = make_spec(
            strategy="ddp",
            num_gpus=2,
            input="gpu",
            num_samples=64,
            batch_size_per_gpu=32,
            seed=seed,
            dataset="synthetic",
        )
        images = Images(synthetic_images(1, "train", 0).pixels.repeat(64, axis=0), np.zeros(64, dtype=np.int64), 10)
        return next(
            image_batches.DeviceAugmentedBatches(spec, Rank(rank, 2, torch.device("cpu")), images).epoch(epoch)
        )[0]

    assert torch.equal(first_image(), first_image())
    for other in (first_image(seed=1), first_image(rank=1), first_image(epoch=2)):
        assert not torch.equal(first_image(), other)


@pytest.mark.parametrize("chunk_images", [1, 8, 20, 1000])
def test_chunks_bound_the_memory_and_lose_no_sample(monkeypatch: pytest.MonkeyPatch, chunk_images: int) -> None:
    monkeypatch.setattr(image_batches, "AUGMENTATION_CHUNK_BYTES", chunk_images * 3 * IMAGE_SIZE_PX * IMAGE_SIZE_PX * 4)
    spec = make_spec(dataset="synthetic", input="gpu", num_samples=50, batch_size_per_gpu=8, num_workers=0)
    drawn = list(batches_of(spec).epoch(1))
    assert [len(labels) for _, labels in drawn] == [8] * 6 + [2]
    held = {images.untyped_storage().data_ptr(): images.untyped_storage().nbytes() for images, _ in drawn}
    assert max(held.values()) <= max(chunk_images, 8) * 3 * IMAGE_SIZE_PX * IMAGE_SIZE_PX * 4  # never less than a batch
    expected = labels_of(msgspec.structs.replace(spec, input="dataloader"), 0, 1)
    assert torch.cat([labels for _, labels in drawn]).tolist() == expected


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_images_on_the_device_come_as_the_step_computes(precision: str, dtype: torch.dtype) -> None:
    spec = make_spec(dataset="synthetic", input="gpu", num_samples=16, batch_size_per_gpu=8, precision=precision)
    images, labels = next(batches_of(spec).epoch(1))
    assert (images.dtype, labels.dtype, images.is_contiguous()) == (dtype, torch.int64, True)
    assert images.shape == (8, 3, IMAGE_SIZE_PX, IMAGE_SIZE_PX)


def test_images_that_only_others_may_write_can_lie_on_the_device(image_folder: Path) -> None:
    spec = make_spec(dataset="imagefolder", input="gpu", num_samples=5, batch_size_per_gpu=5)
    ((images, labels),) = batches_of(spec, data=image_folder).epoch(1)  # the cache is mapped read-only
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 1]
    for image, label in zip(pixels_of(images), labels.tolist(), strict=True):
        assert (image[IMAGE_SIZE_PX // 2, IMAGE_SIZE_PX // 2] == list(COLOURS.values())[label]).all()


def test_an_augmented_image_is_normalised_by_channel() -> None:
    """A mid-grey image: (0.5 - 0.4914) / 0.2023 = 0.0425 in the middle, which no crop changes."""
    pixels = np.full((1, IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3), 0.5 * 255, dtype=np.float64).round().astype(np.uint8)
    image, label = image_batches.AugmentedImages(Images(pixels, np.array([7]), 10))[0]
    middle = image[:, IMAGE_SIZE_PX // 2, IMAGE_SIZE_PX // 2]
    expected = [
        (128 / 255 - mean) / std
        for mean, std in zip(image_batches.CHANNEL_MEANS, image_batches.CHANNEL_STDS, strict=True)
    ]
    assert middle.tolist() == pytest.approx(expected, abs=1e-5)
    assert label == 7
