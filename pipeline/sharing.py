"""Sharing: which points of an array element the same processes run, one after another, and when they had better not.

What is shared - imports, the CUDA context, the communicators, decoded images - changes no result. What could is kept
apart: what is compiled or captured is made ready faster a second time, a profiler may stay attached to CUDA, a limit
on memory cannot be lifted, and fragments move the memory boundary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.measurement import DeviceMemory
from pipeline.spec import Spec, stated_fields

ROOM = 0.5  # of a device's memory: a point that may need more gets fresh processes


def first_shared(points: Sequence[Spec]) -> list[Spec]:
    """The points from the first one on that its processes may run, in their order; at least that one.

    A repeat or another seed asks for new processes, so the same point comes only once.
    """
    first, *others = points
    shared = [first]
    for spec in others if may_share(first) else []:
        is_repeat = without_repeat(spec) in map(without_repeat, shared)
        if not may_share(spec) or process_layout(spec) != process_layout(first) or is_repeat:
            break
        shared.append(spec)
    return shared


def may_share(spec: Spec) -> bool:
    """Whether a point may run in processes that ran others before, and others after it."""
    near_boundary = spec.is_probe or spec.measure == "memory" or spec.memory_limit_gib is not None
    profiles = spec.measure == "communication"
    return spec.execution == "eager" and not near_boundary and not profiles and spec.num_nodes == 1


def process_layout(spec: Spec) -> tuple[object, ...]:
    """What the processes are laid out for, and hold: points that differ in it cannot share them."""
    return spec.device, spec.strategy, spec.num_gpus, spec.num_nodes, spec.model, spec.reads_data


def without_repeat(spec: Spec) -> Spec:
    """The point that all its repeats are, by number or by seed."""
    return msgspec.structs.replace(spec, repeat=0, seed=0)


class Predecessor(NamedTuple):
    """A point that ran before in these processes, and the peak memory of every rank's devices."""

    spec: Spec
    memory: Sequence[DeviceMemory]


def has_room(spec: Spec, before: Sequence[Predecessor]) -> bool:
    """Whether a point is far enough from the memory boundary to follow others in their processes."""
    return expected_share(spec, before) <= ROOM


def expected_share(spec: Spec, before: Sequence[Predecessor]) -> float:
    """The share of a device's memory that a point is expected to take, by those that ran before it.

    By one that differs in its batch alone, its peak as the batch grows: more than it will be, since weights and data
    do not grow. The least of these bounds; where no point is so alike, the most of what all say, which bounds nothing
    (another precision takes twice as much: hence ROOM). 0 where none says of how much memory its peak was a part, as on
    the CPU.
    """
    alike = [part for part in before if what_else(part.spec) == what_else(spec)]
    shares = [share for part in alike or before if (share := scaled_share(spec, part)) is not None]
    return (min if alike else max)(shares, default=0.0)


def what_else(spec: Spec) -> dict[str, Any]:
    """All that a point states but its batch size and what says how long it runs."""
    lengths = ("batch_size_per_gpu", "repeat", "seed", "epochs", "windows", "max_steps")
    return {axis: value for axis, value in stated_fields(spec).items() if axis not in lengths}


def scaled_share(spec: Spec, before: Predecessor) -> float | None:
    """The share of its fullest device that a point took, as the batch grows to that of another point."""
    shares = [part.peak_allocated_bytes / part.usable_bytes for part in before.memory if part.usable_bytes]
    growth = max(1.0, spec.batch_size_per_gpu / before.spec.batch_size_per_gpu)
    return max(shares) * growth if shares else None
