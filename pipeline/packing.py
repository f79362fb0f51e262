"""Packing: which points of one shape share an array element, where they run one after another, in which order."""

import hashlib
from collections.abc import Sequence

from pipeline.spec import Spec

ORDER_SEED = 0


def pack(specs: Sequence[Spec], points_per_element: int) -> list[list[Spec]]:
    """Elements of up to so many points; every point gets processes of its own, so none can hurt another.

    Alone in their elements, points keep the grid's order. Packed, timed points run in an order that a fixed seed
    draws: what drifts within an allocation (clocks, heat, neighbours) then falls together with no axis. Probes run
    last and by batch size, so that the first OOM stands before the larger ones. The manifest holds the order.
    """
    ordered = list(specs) if points_per_element == 1 else sorted(specs, key=place_in_order)
    return [ordered[start : start + points_per_element] for start in range(0, len(ordered), points_per_element)]


def place_in_order(spec: Spec) -> tuple[bool, int, bytes]:
    """Before or after other points: by the seed and the run id alone, whichever points are packed with it."""
    drawn = hashlib.sha256(f"{ORDER_SEED} {spec.run_id()}".encode()).digest()
    return spec.is_probe, spec.batch_size_per_gpu if spec.is_probe else 0, drawn
