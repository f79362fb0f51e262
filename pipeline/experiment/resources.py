"""Resources of a point, and the shape that all elements of one Slurm array share."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pipeline.experiment.spec import Device, PositiveFloat, PositiveInt, Spec

TIME_PATTERN = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):([0-5]\d):([0-5]\d)", re.ASCII)


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a point asks of a node, for each GPU; `time` is the limit as [days-]hours:minutes:seconds."""

    cpus_per_gpu: PositiveInt = 4
    mem_per_gpu_gib: PositiveFloat = 16
    time: str = "00:20:00"

    def __post_init__(self) -> None:
        if self.time_min() == 0:
            raise ValueError("time must be longer than 00:00:00.")

    def time_min(self) -> int:
        """The limit in minutes, rounded up as Slurm does. Raises ValueError when it is not a time."""
        match = TIME_PATTERN.fullmatch(self.time)
        if match is None:
            raise ValueError(f'time={self.time!r} is not a time; write "[days-]hours:minutes:seconds" in quotes.')
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return (days * 24 + hours) * 60 + minutes + (seconds > 0)


class ResourceShape(NamedTuple):
    """What one Slurm array asks for: every element of an array has the same."""

    device: Device
    num_nodes: int
    gpus_per_node: int

    def __str__(self) -> str:
        unit = "GPU" if self.device == "cuda" else "CPU process"
        plural = "" if self.gpus_per_node == 1 else ("es" if unit.endswith("s") else "s")
        return f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} x {self.gpus_per_node} {unit}{plural}"


def group_by_shape(points: Iterable[Spec]) -> dict[ResourceShape, list[Spec]]:
    """The points of each resource shape, shapes and points in the order of the grid."""
    groups: dict[ResourceShape, list[Spec]] = {}
    for spec in points:
        groups.setdefault(ResourceShape(spec.device, spec.num_nodes, spec.gpus_per_node), []).append(spec)
    return groups
