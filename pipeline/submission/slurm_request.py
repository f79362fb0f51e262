"""What each resource shape asks of Slurm, fitted to the nodes that are there; and what no node can run."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from pipeline.experiment.resources import Resources, ResourceShape, group_by_shape
from pipeline.experiment.spec import Spec
from pipeline.submission.slurm_queries import NodeType
from pipeline.system.errors import EXIT_SCHEDULER, CommandError, shorten_list

SAFE_OPTION_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,:=+@/-]{0,127}")
GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_SIGNAL_DELAY_S = 30
MAX_NAMES = 8  # of points, in one line


Memory = Literal["0", "default"]


class SlurmOptions(NamedTuple):
    """What a person chooses of the site; None leaves the site's default.

    `exclusive` asks for whole nodes, so that no other work runs beside a point. `gres` asks for GPUs by --gres, for
    sites without --gpus-per-node. `mem` is 0 for all the memory of a node, `default` for what the site gives, None for
    what the grid asks for.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    gpu_type: str | None = None
    gres: bool = False
    mem: Memory | None = None

    def named(self) -> dict[str, str]:
        """The options that are passed to Slurm as they are, by its names."""
        return {name: value for name in PASSED_ON if isinstance(value := getattr(self, name), str)}

    def gpus(self, count: int) -> dict[str, str]:
        """The option that asks for so many GPUs of a node."""
        typed = f"{self.gpu_type}:{count}" if self.gpu_type else str(count)
        return {"gres": f"gpu:{typed}"} if self.gres else {"gpus-per-node": typed}


PASSED_ON = ("partition", "account", "qos", "constraint")


class SlurmRequest(NamedTuple):
    """One array's options of sbatch: long name -> value; an empty value is a flag."""

    options: dict[str, str]
    max_parallel: int | None
    notices: tuple[str, ...]


def check_slurm_options(site: SlurmOptions) -> None:
    """Raise CommandError for a text that could be more than a name: #SBATCH lines are not shell."""
    for field, value in site._asdict().items():
        pattern, marks = (GPU_TYPE, "._-") if field == "gpu_type" else (SAFE_OPTION_VALUE, "._,:=+@/-")
        if isinstance(value, str) and not pattern.fullmatch(value):
            raise CommandError(
                f"--{field.replace('_', '-')} {value!r} must be 1 to 128 letters, digits or {marks} and start with a "
                "letter or digit."
            )


def check_gpu_type(gpu_type: str | None, nodes: Sequence[NodeType]) -> None:
    """Raise CommandError (scheduler) for a GPU type that no node of the partition has."""
    known = sorted({name for node in nodes for name in node.gpus_by_type})
    if gpu_type is None or gpu_type in known:
        return
    cure = f"choose one of {', '.join(known)}" if known else "its GPUs have no type; leave --gpu-type out"
    raise CommandError(f"--gpu-type {gpu_type!r} is no GPU type of the partition; {cure}.", EXIT_SCHEDULER)


def build_request(
    shape: ResourceShape,
    resources: Resources,
    site: SlurmOptions,
    nodes: Sequence[NodeType] | None,
    max_parallel: int | None,
) -> SlurmRequest:
    """What an array of the shape asks for: one task a node, torchrun starts the ranks inside it.

    CPUs and memory are cut to what the best of the nodes with enough GPUs of the type has; GPUs and nodes never are.
    `nodes` is None where Slurm cannot be asked.
    """
    cpus = resources.cpus_per_gpu * shape.gpus_per_node
    memory_mib = math.ceil(resources.mem_per_gpu_gib * 1024) * shape.gpus_per_node
    notices = []
    fitting = [node for node in nodes or () if node.count_gpus(site.gpu_type) >= gpus_needed(shape)]
    if fitting:
        best = max(fitting, key=lambda node: min(1, node.num_cpus / cpus) * min(1, node.memory_mib / memory_mib))
        most_cpus, most_memory_mib = best.num_cpus, best.memory_mib
        if cpus > most_cpus:
            notices.append(f"{shape}: asking for {most_cpus} CPUs a node, all there are, instead of {cpus}")
        if memory_mib > most_memory_mib and site.mem is None:
            notices.append(f"{shape}: asking for {most_memory_mib} MiB a node, all there is, instead of {memory_mib}")
        cpus, memory_mib = min(cpus, most_cpus), min(memory_mib, most_memory_mib)
    options = {
        "nodes": str(shape.num_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        "mem": f"{memory_mib}M" if site.mem is None else site.mem,
        "time": str(resources.time_min()),
        "signal": f"USR2@{signal_delay_s(resources.time_min())}",
        "open-mode": "append",
        "no-requeue": "",
    }
    if site.mem == "default":
        del options["mem"]
    if shape.device == "cuda":
        options |= site.gpus(shape.gpus_per_node)
    options |= site.named()
    if site.exclusive:
        options["exclusive"] = ""
    return SlurmRequest(options, max_parallel, tuple(notices))


def gpus_needed(shape: ResourceShape) -> int:
    """GPUs that a node must have for the shape."""
    return shape.gpus_per_node if shape.device == "cuda" else 0


def signal_delay_s(limit_min: int) -> int:
    """How long before the limit Slurm warns: a tenth of it, so that a short job with slack is left alone."""
    return min(MAX_SIGNAL_DELAY_S, limit_min * 60 // 10)


def sum_time_limits(
    request: SlurmRequest, shape: ResourceShape, num_points: int, partition_limit_min: int | None
) -> SlurmRequest:
    """The request for elements of several points: the sum of their limits, or what the partition allows if less."""
    point_min = int(request.options["time"])
    sum_min = num_points * point_min
    limit_min = max(point_min, min(sum_min, partition_limit_min or sum_min))
    sum_text = f"{num_points} x {point_min} = {sum_min} min"
    notice = f"{shape}: up to {num_points} points in sequence an element, limit {sum_text}"
    if limit_min < sum_min:
        notice += f", cut to {limit_min} min, all the partition allows"
    times = {"time": str(limit_min), "signal": f"USR2@{signal_delay_s(limit_min)}"}
    return request._replace(options=request.options | times, notices=(*request.notices, notice))


def unsatisfiable_on_slurm(
    points: Iterable[Spec], nodes: Sequence[NodeType], gpu_type: str | None = None
) -> dict[str, str]:
    """run id -> why no node of the partition can run it."""
    reasons = {}
    for shape, specs in group_by_shape(points).items():
        most_gpus = max((node.count_gpus(gpu_type) for node in nodes), default=0)
        fitting = sum(node.num_nodes for node in nodes if node.count_gpus(gpu_type) >= gpus_needed(shape))
        reason = None
        if gpus_needed(shape) > most_gpus:
            needed = gpu_count_text(shape.gpus_per_node, gpu_type)
            reason = f"needs {needed} a node and the largest node has {most_gpus}"
        elif shape.num_nodes > fitting:
            reason = f"needs {shape.num_nodes} nodes and the partition has {fitting} that fit"
        if reason:
            reasons.update({spec.run_id(): reason for spec in specs})
    return reasons


def unsatisfiable_here(points: Iterable[Spec], num_gpus: int) -> dict[str, str]:
    """run id -> why this machine cannot run it."""
    reasons = {}
    for spec in points:
        if spec.num_nodes > 1:
            reasons[spec.run_id()] = f"needs {spec.num_nodes} nodes and this is one; submit it to Slurm"
        elif spec.device == "cuda" and spec.num_gpus > num_gpus:
            reasons[spec.run_id()] = f"needs {gpu_count_text(spec.num_gpus)} and this machine has {num_gpus}"
    return reasons


def gpu_count_text(number: int, gpu_type: str | None = None) -> str:
    """`1 GPU`, `2 GPUs`, `2 a40 GPUs`."""
    return f"{number} {gpu_type or ''} GPU{'s' * (number != 1)}".replace("  ", " ")


def refuse_unsatisfiable(reasons: Mapping[str, str], num_points: int) -> None:
    """Raise CommandError that names the points that cannot run, before anything is submitted."""
    if not reasons:
        return
    named = "; ".join(lines_by_reason(reasons))
    raise CommandError(
        f"{len(reasons)} of {num_points} points cannot run here; leave them out with --skip-unsatisfiable, or change "
        f"them with --set ({named})."
    )


def lines_by_reason(reasons: Mapping[str, str]) -> list[str]:
    """A line a reason, with the points it holds for; of many only the first are named."""
    groups: dict[str, list[str]] = {}
    for run_id, reason in reasons.items():
        groups.setdefault(reason, []).append(run_id)
    return [f"{reason}: {shorten_list(run_ids, MAX_NAMES)}" for reason, run_ids in groups.items()]
