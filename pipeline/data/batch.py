"""A batch: tensors in tuples, lists and dicts, each with one sample in every row of its first dimension."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Batch = Any  # Tensor | tuple[Batch, ...] | list[Batch] | dict[str, Batch]


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


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_of(part)


def num_samples(batch: Batch) -> int:
    """Return the number of samples of a batch."""
    return len(next(tensors_of(batch)))


def first_samples(batch: Batch, count: int) -> Batch:
    """Return the first samples of a batch, as views."""
    return map_tensors(lambda tensor: tensor[:count], batch)


def copy_batch(source: Batch, target: Batch) -> None:
    """Copy a batch into the tensors of another of the same form, without waiting for the device."""
    for part, place in zip(tensors_of(source), tensors_of(target), strict=True):
        place.copy_(part, non_blocking=True)


def place_batch(batch: Batch, device: torch.device, layout: torch.memory_format) -> Batch:
    """Return the batch on the device, its images (tensors with four dimensions) in this memory layout."""

    def place(tensor: Tensor) -> Tensor:
        placed = tensor.to(device, non_blocking=True)
        return placed.contiguous(memory_format=layout) if placed.ndim == 4 else placed

    return map_tensors(place, batch)
