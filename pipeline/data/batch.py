"""A batch: tensors in tuples, lists and dicts, each with one sample in every row of its first dimension."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

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
