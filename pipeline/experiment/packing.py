"""Packs points into array elements, orders them, and decides which of them share processes."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.experiment.axis_groups import (
    BASELINE_MAY_DIFFER,
    PEAK_MEMORY_MAY_DIFFER,
    PROCESS_MAY_DIFFER,
    alike_key,
    without_repeat,
)
from pipeline.experiment.measurement import DeviceMemory
from pipeline.experiment.spec import Spec

ORDER_SEED = 0


def pack_elements(specs: Sequence[Spec], points_per_element: int) -> list[list[Spec]]:
    """Pack the points into elements of up to `points_per_element`, which run one after another (see order_key)."""
    ordered = sorted(specs, key=lambda spec: order_key(spec, may_share=points_per_element > 1))
    return [ordered[start : start + points_per_element] for start in range(0, len(ordered), points_per_element)]


def order_key(spec: Spec, *, may_share: bool) -> tuple[bool, int, tuple[int, int], bool, bytes, int, bytes, bytes]:
    """Return the sort key of a point. `may_share` says if points of one element can share processes.

    A repeat of all points ends before the next one begins. In it a baseline runs right before the points that are
    compared with it; points that share processes are neighbours, in one block per process layout. The rest of the order
    is random with a fixed seed. So drift (clocks, heat, other jobs) neither becomes a speed-up nor correlates with an
    axis. Timed epochs come first in a repeat: all else takes longer, and they tell how long a step is.
    Probes run last, by batch size, so that the first OOM comes before larger batches. The manifest records the
    order.
    """
    block = PROCESS_MAY_DIFFER if may_share and may_share_processes(spec) else ()
    return (
        spec.is_probe,
        spec.batch_size_per_gpu if spec.is_probe else 0,
        (spec.repeat, spec.seed),
        spec.measure != "epochs",
        random_order_key(alike_key(spec, (*BASELINE_MAY_DIFFER, *block))),
        spec.num_gpus,
        random_order_key(process_layout(spec)),
        random_order_key(spec.run_id()),
    )


def random_order_key(value: object) -> bytes:
    return hashlib.sha256(f"{ORDER_SEED} {value}".encode()).digest()


MAX_SHARED_MEMORY_FRACTION = 0.5  # of a device's memory; a point that may need more gets new processes


def points_for_same_processes(points: Sequence[Spec]) -> list[Spec]:
    """Return the longest prefix of the points, at least one, that the same processes may run. Repeats need new ones."""
    first, *others = points
    shared = [first]
    for spec in others if may_share_processes(first) else []:
        is_repeat = without_repeat(spec) in map(without_repeat, shared)
        if not may_share_processes(spec) or process_layout(spec) != process_layout(first) or is_repeat:
            break
        shared.append(spec)
    return shared


def may_share_processes(spec: Spec) -> bool:
    """True if a point may run in processes that ran other points before and will run others after it."""
    near_boundary = spec.is_probe or spec.measure == "memory" or spec.memory_limit_gib is not None
    profiles = spec.measure == "communication"
    return spec.execution == "eager" and not near_boundary and not profiles and spec.num_nodes == 1


def process_layout(spec: Spec) -> tuple[object, ...]:
    """Return what processes depend on, to compare points. The order of points depends on the order of these values."""
    first = ("device", "strategy", "num_gpus", "num_nodes", "model")
    return (*(getattr(spec, axis) for axis in first), spec.reads_data, *alike_key(spec, (*first, *PROCESS_MAY_DIFFER)))


class EarlierPoint(NamedTuple):
    """A point that ran before in the same processes, and the peak memory of every rank's devices."""

    spec: Spec
    memory: Sequence[DeviceMemory]


def has_memory_headroom(spec: Spec, before: Sequence[EarlierPoint]) -> bool:
    return expected_memory_fraction(spec, before) <= MAX_SHARED_MEMORY_FRACTION


def expected_memory_fraction(spec: Spec, before: Sequence[EarlierPoint]) -> float:
    """Return an upper bound on the share of a device's memory that the point will use, from earlier points.

    Scales the peak of each alike point linearly with batch size, which overestimates it because weights and data do not
    grow, and takes the minimum. Without an alike point it takes the maximum over all earlier points, a heuristic:
    another precision may double the peak, hence the limit of one half. 0 if no peak or usable memory is known, as on
    the CPU.
    """
    key = alike_key(spec, PEAK_MEMORY_MAY_DIFFER)
    alike = [part for part in before if alike_key(part.spec, PEAK_MEMORY_MAY_DIFFER) == key]
    bounds = []
    for part in alike or before:
        shares = [device.peak_allocated_bytes / device.usable_bytes for device in part.memory if device.usable_bytes]
        if shares:
            bounds.append(max(shares) * max(1.0, spec.batch_size_per_gpu / part.spec.batch_size_per_gpu))
    return (min if alike else max)(bounds, default=0.0)
