"""Requests of points: resources per GPU, their shape, array elements and their order, and shared processes."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pipeline.plan.axes import Device, PositiveFloat, PositiveInt
from pipeline.plan.spec import BASELINE_MAY_DIFFER, PROCESS_MAY_DIFFER, Spec, alike_key, without_repeat
from pipeline.system.errors import pluralize

TIME_PATTERN = re.compile(r"(?:(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d)|(\d{1,3})):([0-5]\d)", re.ASCII)  # as sbatch reads it


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Resources that a point requests, per GPU. `time` is the limit of a point: [[days-]hours:]minutes:seconds."""

    cpus_per_gpu: PositiveInt = 4
    mem_per_gpu_gib: PositiveFloat = 16
    time: str = "00:20:00"

    def __post_init__(self) -> None:
        if self.time_min() == 0:
            raise ValueError("time must be longer than 00:00:00.")

    def time_min(self) -> int:
        """Return the time limit in minutes, rounded up as Slurm does. Raises ValueError if it is not a time."""
        match = TIME_PATTERN.fullmatch(self.time)
        if match is None:
            forms = 'hours:minutes:seconds, such as "00:30:00", or more than 999 hours in days, such as "60-00:00:00"'
            raise ValueError(f"time={self.time!r} is not a time; write {forms}.")
        days, hours, minutes, minutes_alone, seconds = (int(part or 0) for part in match.groups())
        return (days * 24 + hours) * 60 + minutes + minutes_alone + (seconds > 0)


class ResourceShape(NamedTuple):
    """The nodes and GPUs per node of every element of a Slurm array."""

    device: Device
    num_nodes: int
    gpus_per_node: int

    def __str__(self) -> str:
        unit = "GPU" if self.device == "cuda" else "CPU process"
        return f"{pluralize(self.num_nodes, 'node')} x {pluralize(self.gpus_per_node, unit)}"


def group_by_shape(points: Iterable[Spec]) -> dict[ResourceShape, list[Spec]]:
    """Group the points by resource shape; shapes and points keep the order of the grid."""
    groups: dict[ResourceShape, list[Spec]] = {}
    for spec in points:
        groups.setdefault(ResourceShape(spec.device, spec.num_nodes, spec.gpus_per_node), []).append(spec)
    return groups


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
    times_steps = spec.measure in ("communication", "network")
    is_compiled = spec.execution != "eager" or spec.compile != "none"
    is_alone = is_compiled or near_boundary or times_steps or spec.script is not None
    return not is_alone and spec.num_nodes == 1


def process_layout(spec: Spec) -> tuple[object, ...]:
    """Return what processes depend on, to compare points. The order of points depends on the order of these values."""
    first = ("device", "strategy", "num_gpus", "num_nodes", "model")
    return (*(getattr(spec, axis) for axis in first), spec.reads_data, *alike_key(spec, (*first, *PROCESS_MAY_DIFFER)))
