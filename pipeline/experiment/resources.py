"""Resources per GPU, and the resource shape that all elements of one Slurm array share."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pipeline.experiment.spec import Spec
from pipeline.plan.axes import Device, PositiveFloat, PositiveInt
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
            raise ValueError(f'time={self.time!r} is not a time; write hours:minutes:seconds, such as "00:30:00".')
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
