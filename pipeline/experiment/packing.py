"""Packing: which points of one shape share an array element, where they run one after another, in which order."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.experiment.axis_groups import PEAK_MEMORY_MAY_DIFFER, PROCESS_MAY_DIFFER, alike_key, without_repeat
from pipeline.experiment.measurement import DeviceMemory
from pipeline.experiment.spec import Spec

ORDER_SEED = 0


def pack_elements(specs: Sequence[Spec], points_per_element: int) -> list[list[Spec]]:
    """Elements of up to so many points, one after another.

    Alone in their elements, points keep the grid's order. Packed, those that can share processes lie together, a block
    for each layout of processes and repeat. A fixed seed draws the order within a block, so that what drifts meanwhile
    (clocks, heat, neighbours) falls together with no axis, and that of the layouts. Probes run last and by batch size,
    so that the first OOM stands before the larger ones. The manifest holds the order.
    """
    ordered = list(specs) if points_per_element == 1 else sorted(specs, key=order_key)
    return [ordered[start : start + points_per_element] for start in range(0, len(ordered), points_per_element)]


def order_key(spec: Spec) -> tuple[bool, int, bytes, tuple[int, int], bool, bytes]:
    """Before or after other points: by the seed and the point alone, whichever points are packed with it."""
    return (
        spec.is_probe,
        spec.batch_size_per_gpu if spec.is_probe else 0,
        random_order_key(process_layout(spec)),
        (spec.repeat, spec.seed),
        not may_share_processes(spec),
        random_order_key(spec.run_id()),
    )


def random_order_key(what: object) -> bytes:
    """A place that follows from the seed and nothing else."""
    return hashlib.sha256(f"{ORDER_SEED} {what}".encode()).digest()


MAX_SHARED_MEMORY_FRACTION = 0.5  # of a device's memory: a point that may need more gets fresh processes


def points_for_same_processes(points: Sequence[Spec]) -> list[Spec]:
    """The points from the first one on that its processes may run, in their order; at least that one.

    A repeat or another seed asks for new processes, so the same point comes only once.
    """
    first, *others = points
    shared = [first]
    for spec in others if may_share_processes(first) else []:
        is_repeat = without_repeat(spec) in map(without_repeat, shared)
        if not may_share_processes(spec) or process_layout(spec) != process_layout(first) or is_repeat:
            break
        shared.append(spec)
    return shared


def may_share_processes(spec: Spec) -> bool:
    """Whether a point may run in processes that ran others before, and others after it."""
    near_boundary = spec.is_probe or spec.measure == "memory" or spec.memory_limit_gib is not None
    profiles = spec.measure == "communication"
    return spec.execution == "eager" and not near_boundary and not profiles and spec.num_nodes == 1


def process_layout(spec: Spec) -> tuple[object, ...]:
    """Return the properties that the processes are started for: points that differ in one cannot share processes.

    The first five stand in this order because the packing order digests them.
    """
    first = ("device", "strategy", "num_gpus", "num_nodes", "model")
    others = alike_key(spec, (*first, *PROCESS_MAY_DIFFER))
    return (*(getattr(spec, axis) for axis in first), spec.reads_data, *others)


class EarlierPoint(NamedTuple):
    """A point that ran before in these processes, and the peak memory of every rank's devices."""

    spec: Spec
    memory: Sequence[DeviceMemory]


def has_memory_headroom(spec: Spec, before: Sequence[EarlierPoint]) -> bool:
    """Whether a point is far enough from the memory boundary to follow others in their processes."""
    return expected_memory_fraction(spec, before) <= MAX_SHARED_MEMORY_FRACTION


def expected_memory_fraction(spec: Spec, before: Sequence[EarlierPoint]) -> float:
    """The share of a device's memory that a point is expected to take, by those that ran before it.

    By one that differs in its batch alone, its peak as the batch grows: more than it will be, since weights and data
    do not grow. The least of these bounds; where no point is so alike, the most of what all say, which bounds nothing
    (another precision takes twice as much: hence ROOM). 0 where none says of how much memory its peak was a part, as on
    the CPU.
    """
    key = alike_key(spec, PEAK_MEMORY_MAY_DIFFER)
    alike = [part for part in before if alike_key(part.spec, PEAK_MEMORY_MAY_DIFFER) == key]
    shares = [share for part in alike or before if (share := scaled_memory_fraction(spec, part)) is not None]
    return (min if alike else max)(shares, default=0.0)


def scaled_memory_fraction(spec: Spec, before: EarlierPoint) -> float | None:
    """The share of its fullest device that a point took, as the batch grows to that of another point."""
    shares = [part.peak_allocated_bytes / part.usable_bytes for part in before.memory if part.usable_bytes]
    growth = max(1.0, spec.batch_size_per_gpu / before.spec.batch_size_per_gpu)
    return max(shares) * growth if shares else None
