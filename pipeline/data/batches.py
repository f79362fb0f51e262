"""Training batches of one rank. Equal seeds give equal sample order on every input path."""

import functools
import math
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from pipeline.plan.spec import Spec
from pipeline.system.host import name_shared_memory

Batch = Any  # Tensor | tuple[Batch, ...] | list[Batch] | dict[str, Batch]
PartPath = tuple[object, ...]  # the keys and positions that lead to a part


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return the batch with the function applied to each tensor. Raises TypeError for a part that holds no tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, part) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [map_tensors(function, part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise TypeError(f"a batch holds tensors in tuples, lists and dicts, and not a {type(batch).__name__}")


def parts_of(batch: Batch, path: PartPath = ()) -> Iterator[tuple[PartPath, Any]]:
    """Yield the tensors of a batch with their paths, in order, and what stands in place of a tensor."""
    if isinstance(batch, dict | list | tuple):
        for key, part in batch.items() if isinstance(batch, dict) else enumerate(batch):
            yield from parts_of(part, (*path, key))
    else:
        yield path, batch


def num_samples(batch: Batch) -> int:
    """Return the number of samples of a batch."""
    return len(next(parts_of(batch))[1])


def first_samples(batch: Batch, count: int) -> Batch:
    """Return the first samples of a batch, as views."""
    return map_tensors(lambda tensor: tensor[:count], batch)


def pair_parts(one: Batch, other: Batch, path: PartPath = ()) -> Iterator[tuple[PartPath, Any, Any]]:
    """Yield the path and the parts of two batches with the same key, in tuples and lists with the same position.

    A part is a tensor, what stands in its place, or two dicts or lists of other keys or lengths. The fields of two
    named tuples are keys.
    """
    if isinstance(one, tuple) and isinstance(other, tuple) and hasattr(one, "_asdict") and hasattr(other, "_asdict"):
        one, other = one._asdict(), other._asdict()
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key, part in one.items():
            yield from pair_parts(part, other[key], (*path, key))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for place, (part, beside) in enumerate(zip(one, other, strict=True)):
            yield from pair_parts(part, beside, (*path, place))
    else:
        yield path, one, other


def name_of(path: PartPath) -> str:
    """Return the place of a part as code reads it, for an error: ` as batch['x']`; nothing for the whole batch."""
    return " as batch" + "".join(f"[{key!r}]" for key in path) if path else ""


def copy_batch(source: Batch, target: Batch) -> None:
    """Copy a batch, key by key, into the tensors of another, without waiting for the device.

    Raises ValueError unless both have the same parts and shapes.
    """
    for path, part, place in pair_parts(source, target):
        if not isinstance(part, Tensor) or not isinstance(place, Tensor) or part.shape != place.shape:
            raise ValueError(f"a batch has another form{name_of(path)} than the captured one; make all alike")
        place.copy_(part, non_blocking=True)


def place_batch(batch: Batch, device: torch.device, layout: torch.memory_format) -> Batch:
    """Return the batch on the device, its images (tensors with four dimensions) in this memory layout."""

    def place(tensor: Tensor) -> Tensor:
        placed = tensor.to(device, non_blocking=True)
        return placed.contiguous(memory_format=layout) if placed.ndim == 4 else placed

    return map_tensors(place, batch)


Collate = Callable[[list[Any]], Batch]


class Rank(NamedTuple):
    """The identity of this process. `device` is an index into the GPUs visible to the job, not into the node's."""

    rank: int
    world_size: int
    device: torch.device


class TrainingBatches(Protocol):
    """The batches of one rank."""

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Return the batches of an epoch, on the host or the device. Epochs count from 1."""


class LoaderBatches:
    """A DataLoader with persistent workers over this rank's share of the first `num_samples` of a data set."""

    def __init__(self, spec: Spec, rank: Rank, dataset: Dataset[Any], collate: Collate) -> None:
        self._sampler = build_sampler(spec.num_samples, rank.world_size, rank.rank, spec.seed)
        assert spec.num_workers is not None, "num_workers must be set in a configuration that runs"
        self._loader = DataLoader(
            dataset,
            batch_size=spec.batch_size_per_process,
            sampler=self._sampler,
            num_workers=spec.num_workers,
            worker_init_fn=send_errors_of_queues,
            collate_fn=functools.partial(collate_shared, collate),
            persistent_workers=spec.num_workers > 0,
            pin_memory=rank.device.type == "cuda",
            generator=torch.Generator().manual_seed(derive_seed(spec.seed, rank.rank)),
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


def collate_shared(collate: Collate, samples: list[Any]) -> Batch:
    """Collate samples into a batch; in a loader's worker, move all its tensors into shared memory.

    If shared memory is full, the error is raised here and reaches the rank. By default a background thread moves what
    is not there yet: its error would be lost, and the rank would wait forever.
    """
    batch = collate(samples)
    return map_tensors(torch.Tensor.share_memory_, batch) if get_worker_info() else batch


def send_errors_of_queues(worker_id: int) -> None:
    """Let a batch that this loader's worker cannot send reach the rank as its error.

    By default the thread that sends prints the error and drops the batch, for which the rank would wait forever: for
    example, without a file descriptor for each tensor.
    """

    def send_error(queue: "Queue[Any]", error: Exception, item: tuple[int, Any]) -> None:
        where = f"in DataLoader worker process {worker_id}"
        queue.put((item[0], ExceptionWrapper((type(error), error, error.__traceback__), where)))

    Queue._on_queue_feeder_error = send_error  # type: ignore[attr-defined]


def build_sampler(num_samples: int, world_size: int, rank: int, seed: int) -> DistributedSampler[int]:
    """Return a sampler that shuffles all samples in each epoch. It repeats some, so that all shares are equal."""
    placeholder: Dataset[int] = range(num_samples)  # type: ignore[assignment]  # only its length is used
    return DistributedSampler(placeholder, num_replicas=world_size, rank=rank, seed=seed)


class SyntheticBatches:
    """Batches of `input: synthetic`: every step gets the same batch on the device, the last step maybe a part of it."""

    def __init__(self, spec: Spec, rank: Rank, batch: Batch) -> None:
        self._batch = place_batch(batch, rank.device, memory_format(spec))
        self._sizes = batch_sizes(spec)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        return (first_samples(self._batch, size) for size in self._sizes)


def memory_format(spec: Spec) -> torch.memory_format:
    return torch.channels_last if spec.layout == "channels_last" else torch.contiguous_format


def batch_sizes(spec: Spec) -> list[int]:
    """Return the size of each batch in one rank's epoch. Only the last may be smaller; in a probe all are full."""
    return [batch_size_at(index, spec) for index in range(spec.steps_per_epoch * spec.grad_accumulation)]


def batch_size_at(index: int, spec: Spec) -> int:
    """Return the size of the batch at this place, from 0, of one rank's epoch."""
    batch_size = spec.batch_size_per_process
    share = math.ceil(spec.num_samples / spec.world_size)
    return batch_size if spec.is_probe else min(batch_size, share - index * batch_size)
