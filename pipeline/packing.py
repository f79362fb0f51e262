"""Packing: which points of one shape share an array element, where they run one after another, in which order."""

import hashlib
from collections.abc import Sequence

from pipeline import sharing
from pipeline.spec import Spec

ORDER_SEED = 0


def pack(specs: Sequence[Spec], points_per_element: int) -> list[list[Spec]]:
    """Elements of up to so many points, one after another.

    Alone in their elements, points keep the grid's order. Packed, those that can share processes lie together, a block
    for each layout of processes and repeat. A fixed seed draws the order within a block, so that what drifts meanwhile
    (clocks, heat, neighbours) falls together with no axis, and that of the layouts. Probes run last and by batch size,
    so that the first OOM stands before the larger ones. The manifest holds the order.
    """
    ordered = list(specs) if points_per_element == 1 else sorted(specs, key=place_in_order)
    return [ordered[start : start + points_per_element] for start in range(0, len(ordered), points_per_element)]


def place_in_order(spec: Spec) -> tuple[bool, int, bytes, tuple[int, int], bool, bytes]:
    """Before or after other points: by the seed and the point alone, whichever points are packed with it."""
    return (
        spec.is_probe,
        spec.batch_size_per_gpu if spec.is_probe else 0,
        draw(sharing.process_layout(spec)),
        (spec.repeat, spec.seed),
        not sharing.may_share(spec),
        draw(spec.run_id()),
    )


def draw(what: object) -> bytes:
    """A place that follows from the seed and nothing else."""
    return hashlib.sha256(f"{ORDER_SEED} {what}".encode()).digest()
