"""Sharing: which points of an array element the same processes run, one after another, and when they had better not.

What is shared - imports, the CUDA context, the communicators, decoded images - changes no result. What could is kept
apart: compiling leaves caches behind, a profiler may stay attached to CUDA, a limit on memory cannot be lifted, and
fragments move the memory boundary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.measurement import DeviceMemory
from pipeline.spec import COMPILED, Spec, stated_fields

ROOM = 0.5  # of a device's memory: a point that may need more gets fresh processes


def first_shared(points: Sequence[Spec]) -> list[Spec]:
    """The points from the first one on that its processes may run, in their order; at least that one.

    A repeat asks for new processes, so the same point comes only once.
    """
    first, *others = points
    shared = [first]
    for spec in others if may_share(first) else []:
        if not may_share(spec) or layout(spec) != layout(first) or without_repeat(spec) in map(without_repeat, shared):
            break
        shared.append(spec)
    return shared


def may_share(spec: Spec) -> bool:
    """Whether a point may run in processes that ran others before, and others after it."""
    near_boundary = spec.is_probe or spec.measure == "memory" or spec.memory_limit_gib is not None
    compiles = spec.execution == "auto" or spec.execution in COMPILED
    profiles = spec.measure == "communication"
    return not (near_boundary or compiles or profiles) and spec.num_nodes == 1


def layout(spec: Spec) -> tuple[object, ...]:
    """What the processes are laid out for: points that differ in it cannot share them."""
    return spec.device, spec.strategy, spec.num_gpus, spec.num_nodes, spec.is_captured


def without_repeat(spec: Spec) -> Spec:
    """The point that all its repeats are."""
    return msgspec.structs.replace(spec, repeat=0)


class Ended(NamedTuple):
    """A point that ended in these processes, and the peak memory of every rank's devices."""

    spec: Spec
    memory: Sequence[DeviceMemory]


def has_room(spec: Spec, ended: Sequence[Ended]) -> bool:
    """Whether a point is far enough from the memory boundary to follow others in their processes."""
    return expected_share(spec, ended) <= ROOM


def expected_share(spec: Spec, ended: Sequence[Ended]) -> float:
    """The share of a device's memory that a point takes at most, by those that ended.

    By one that differs in its batch alone, its peak as the batch grows: more than it will be, since weights and data
    do not grow. The least of these bounds; where no point is so alike, the most of what all say. 0 where none says of
    how much memory its peak was a part, as on the CPU.
    """
    alike = [part for part in ended if what_else(part.spec) == what_else(spec)]
    bounds = [bound for part in alike or ended if (bound := scaled_share(spec, part)) is not None]
    return (min if alike else max)(bounds, default=0.0)


def what_else(spec: Spec) -> dict[str, Any]:
    """All that a point states but its batch size and what says how long it runs."""
    lengths = ("batch_size_per_gpu", "repeat", "epochs", "windows", "max_steps")
    return {axis: value for axis, value in stated_fields(spec).items() if axis not in lengths}


def scaled_share(spec: Spec, ended: Ended) -> float | None:
    """The share of its fullest device that a point took, as the batch grows to that of another point."""
    shares = [part.peak_allocated_bytes / part.usable_bytes for part in ended.memory if part.usable_bytes]
    growth = max(1.0, spec.batch_size_per_gpu / ended.spec.batch_size_per_gpu)
    return max(shares) * growth if shares else None
