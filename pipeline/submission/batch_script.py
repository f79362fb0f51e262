"""The batch script: one template for what `submit` sends, what its dry run shows, and jobs/*.sbatch.

Its sbatch options follow from a resource shape, limited to what the nodes have. Some points cannot run there.
"""

import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources as package_files
from typing import Literal, NamedTuple

from pipeline.figures.pooling import group_pairs
from pipeline.plan.resources import Resources, ResourceShape, group_by_shape
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, SlurmArray, Submission
from pipeline.runner.launch_options import PYTHONPATH_ROOT
from pipeline.submission.slurm_queries import STEP_VARIABLES, NodeType
from pipeline.system.errors import EXIT_SCHEDULER, CommandError, pluralize

SAFE_OPTION_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,:=+@/-]{0,127}")
GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]{0,999}")
CONSTRAINT = re.compile(r"[A-Za-z0-9(\[!][A-Za-z0-9._,:=+@/&|!()\[\]*-]{0,999}")
NAME_RULE = "1 to 128 letters, digits or ._,:=+@/- and start with a letter or digit"
NODES_RULE = "1 to 1,000 letters, digits or ._,-[] and start with a letter or digit"
RULES = {  # options whose values are no plain names
    "gpu_type": (GPU_TYPE, "1 to 128 letters, digits or ._- and start with a letter or digit"),
    "exclude": (NODES, NODES_RULE),
    "nodelist": (NODES, NODES_RULE),
    "constraint": (
        CONSTRAINT,
        "1 to 1,000 letters, digits or ._,:=+@/&|!()[]*- and start with a letter, a digit or ([!",
    ),
}
PASSED_ON = {  # options that sbatch has under the same name -> help
    "partition": "Slurm's partition",
    "account": "Slurm's account",
    "qos": "Slurm's quality of service",
    "constraint": "features that the nodes must have, by Slurm's operators: 'a100&nvlink', 'a40|a100', '[rack1|rack2]'",
    "exclude": "nodes that no job may use: node7 or node[1-3,9]",
    "nodelist": "nodes that each job must have; name one for configurations on one node",
    "reservation": "Slurm's reservation",
    "switches": "leaf switches over which the nodes of a job may lie, at most, and how long to wait: 1@01:00:00",
}

Memory = Literal["0", "default"]


class SlurmOptions(NamedTuple):
    """Slurm options that the user chooses; None keeps the default of the cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclusive: bool = False  # request whole nodes, so that no other job shares them
    gpu_type: str | None = None
    gres: bool = False  # request GPUs with --gres, for clusters without --gpus-per-node
    mem: Memory | None = None  # 0: all memory of a node; default: that of the cluster; None: what the grid states
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    switches: str | None = None
    no_gres: bool = False  # request whole nodes and no GPUs, for clusters where Slurm does not know the GPUs

    def gpus(self, count: int) -> dict[str, str]:
        if self.no_gres:
            return {}
        typed = f"{self.gpu_type}:{count}" if self.gpu_type else str(count)
        return {"gres": f"gpu:{typed}"} if self.gres else {"gpus-per-node": typed}


class SlurmRequest(NamedTuple):
    """The sbatch options of one array: long name -> value, where an empty value is a flag."""

    options: dict[str, str]
    max_parallel: int | None
    notices: tuple[str, ...]


def check_slurm_options(slurm_options: SlurmOptions) -> None:
    """Raise CommandError for a value with other characters than its option needs, and for options that contradict.

    Slurm, not the shell, parses #SBATCH lines.
    """
    for field, value in slurm_options._asdict().items():
        pattern, rule = RULES.get(field, (SAFE_OPTION_VALUE, NAME_RULE))
        if isinstance(value, str) and not pattern.fullmatch(value):
            raise CommandError(f"--{field.replace('_', '-')} {value!r} must be {rule}.")
    if slurm_options.no_gres and (slurm_options.gres or slurm_options.gpu_type):
        raise CommandError("--no-gres asks Slurm for no GPUs; leave out --gres and --gpu-type, or --no-gres.")


def check_gpu_type(gpu_type: str | None, nodes: Sequence[NodeType]) -> None:
    """Raise CommandError (scheduler) if no node of the partition has GPUs of this type."""
    known = sorted({name for node in nodes for name in node.gpus_by_type})
    if gpu_type is None or gpu_type in known:
        return
    cure = f"choose one of {', '.join(known)}" if known else "its GPUs have no type; leave --gpu-type out"
    raise CommandError(f"--gpu-type {gpu_type!r} is not a GPU type of the partition; {cure}.", EXIT_SCHEDULER)


def build_request(
    shape: ResourceShape,
    resources: Resources,
    slurm_options: SlurmOptions,
    nodes: Sequence[NodeType] | None,
    max_parallel: int | None,
) -> SlurmRequest:
    """Return the request of an array of this shape: one task per node, in which torchrun starts the ranks.

    CPUs and memory are reduced to what the best nodes with enough GPUs of the type have; GPUs and nodes are never
    reduced. `nodes` is None if Slurm cannot be queried.
    """
    cpus = resources.cpus_per_gpu * shape.gpus_per_node
    memory_mib = math.ceil(resources.mem_per_gpu_gib * 1024) * shape.gpus_per_node
    notices = []
    num_gpus = 0 if slurm_options.no_gres else gpus_needed(shape)
    large_enough = [node for node in nodes or () if node.count_gpus(slurm_options.gpu_type) >= num_gpus]
    most = find_common_limits(large_enough, shape.num_nodes, cpus, memory_mib)
    if most is not None:
        notices = reduction_notices(shape, cpus, memory_mib if slurm_options.mem is None else 0, *most)
        cpus, memory_mib = min(cpus, most[0]), min(memory_mib, most[1])
    options = {
        "nodes": str(shape.num_nodes),
        "ntasks-per-node": "1",
        **(slurm_options.gpus(shape.gpus_per_node) if shape.device == "cuda" else {}),
        "cpus-per-task": str(cpus),
        **({} if slurm_options.mem == "default" else {"mem": slurm_options.mem or f"{memory_mib}M"}),
        "time": str(resources.time_min()),
        "open-mode": "append",
        "no-requeue": "",
    }
    options |= {name: value for name in PASSED_ON if isinstance(value := getattr(slurm_options, name), str)}
    if slurm_options.exclusive or (slurm_options.no_gres and shape.device == "cuda"):
        options["exclusive"] = ""
    return SlurmRequest(options, max_parallel, tuple(notices))


def find_common_limits(nodes: Sequence[NodeType], num_nodes: int, cpus: int, memory_mib: int) -> tuple[int, int] | None:
    """Return the CPUs and the MiB that each of the `num_nodes` best nodes has: the nearest to the wanted ones.

    Return None if no partition has so many nodes.
    """

    def satisfied_share(limits: tuple[int, int]) -> float:
        return min(1, limits[0] / cpus) * min(1, limits[1] / memory_mib)

    found = []
    for own in by_partition(nodes):
        each = [(node.num_cpus, node.memory_mib) for node in own for _ in range(min(node.num_nodes, num_nodes))]
        best = sorted(each, key=satisfied_share, reverse=True)[:num_nodes]
        if len(best) == num_nodes:
            found.append((min(num_cpus for num_cpus, _ in best), min(mib for _, mib in best)))
    return max(found, key=satisfied_share, default=None)


def reduction_notices(
    shape: ResourceShape, cpus: int, memory_mib: int, most_cpus: int, most_memory_mib: int
) -> list[str]:
    best = "the best node has" if shape.num_nodes == 1 else f"the {shape.num_nodes} best nodes have"
    amounts = (
        (cpus, most_cpus, "CPUs", ""),
        (memory_mib, most_memory_mib, "MiB", "; if Slurm refuses it, give --mem 0"),
    )
    return [
        f"{shape}: {most} {unit} per node instead of {wanted}: {best} no more{cure}"
        for wanted, most, unit, cure in amounts
        if wanted > most
    ]


def gpus_needed(shape: ResourceShape) -> int:
    return shape.gpus_per_node if shape.device == "cuda" else 0


def sum_time_limits(
    request: SlurmRequest, shape: ResourceShape, num_points: int, partition_limit_min: int | None
) -> SlurmRequest:
    """Return the request for elements of several points: the sum of their limits, at most that of the partition."""
    point_min = int(request.options["time"])
    sum_min = num_points * point_min
    limit_min = max(point_min, min(sum_min, partition_limit_min or sum_min))
    packing = f"{shape}: up to {num_points} configurations in sequence per element"
    notice = f"{packing}, limit {num_points} x {point_min} = {sum_min} min"
    if limit_min < sum_min:
        notice += f", reduced to {limit_min} min, the limit of the partition"
    return request._replace(options=request.options | {"time": str(limit_min)}, notices=(*request.notices, notice))


def unsatisfiable_on_slurm(
    points: Iterable[Spec], nodes: Sequence[NodeType], gpu_type: str | None = None, no_gres: bool = False
) -> dict[str, str]:
    """Return run id -> what the point needs and what there is, for each point that no node of the partition can run.

    With `no_gres` nobody knows the GPUs of the nodes.
    """
    reasons = {}
    most_gpus = max((node.count_gpus(gpu_type) for node in nodes), default=0)
    for shape, specs in group_by_shape(points).items():
        num_gpus = 0 if no_gres else gpus_needed(shape)
        fitting = [node for node in nodes if node.count_gpus(gpu_type) >= num_gpus]
        num_fitting = max((sum(node.num_nodes for node in own) for own in by_partition(fitting)), default=0)
        if num_gpus > most_gpus:
            needed = pluralize(shape.gpus_per_node, f"{gpu_type} GPU" if gpu_type else "GPU")
            reason = f"{needed} per node and the largest node has {most_gpus}"
        else:
            reason = f"{shape.num_nodes} nodes and the partition has {num_fitting} that fit"
        if shape.num_nodes > num_fitting:
            reasons.update({spec.run_id(): reason for spec in specs})
    return reasons


def by_partition(nodes: Iterable[NodeType]) -> list[list[NodeType]]:
    """Return the nodes of each partition. A job gets all of its nodes from one, and nodes may lie in several."""
    return list(group_pairs((node.partition, node) for node in nodes).values())


def unsatisfiable_on_this_machine(points: Iterable[Spec], num_gpus: int) -> dict[str, str]:
    """Return run id -> what the point needs and what there is, for each point that this machine cannot run."""
    reasons = {}
    for spec in points:
        if spec.num_nodes > 1:
            reasons[spec.run_id()] = f"{spec.num_nodes} nodes and this machine is one"
        elif spec.device == "cuda" and spec.num_gpus > num_gpus:
            reasons[spec.run_id()] = f"{pluralize(spec.num_gpus, 'GPU')} and this machine has {num_gpus}"
    return reasons


def group_by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each reason, with the number of points that it applies to and the first run id."""
    groups = group_pairs((reason, run_id) for run_id, reason in reasons.items())
    return [
        f"{len(ids)} configurations need {reason}, such as {ids[0]}"
        if len(ids) > 1
        else f"1 configuration needs {reason}: {ids[0]}"
        for reason, ids in groups.items()
    ]


MAX_RUNNING_ELEMENTS = 256  # without --max-parallel


def array_option(num_elements: int, max_parallel: int | None = None) -> str:
    """Return the value of sbatch's --array, with a limit of the elements that run together if there are more."""
    limit = max_parallel or MAX_RUNNING_ELEMENTS
    return f"0-{num_elements - 1}" + (f"%{limit}" if num_elements > limit else "")


def render_array(
    experiment: Experiment,
    submission: Submission,
    array: SlurmArray,
    request: SlurmRequest,
    sha256: str,
    prologue: str | None,
) -> str:
    """Return the script of an array of `submit`, each of whose elements runs its part of the task list of this SHA-256.

    The prologue stands in the script, of which Slurm keeps its own copy.
    """
    folder = experiment.log_folder(submission.id).absolute()
    options = {"job-name": array.job_name}
    if array.is_array:
        options["array"] = array_option(len(array.elements), request.max_parallel)
    options["output"] = f"{folder}/{array.job_name}-{'%A_%a' if array.is_array else '%j'}.log"
    return render_script(
        {**options, **request.options},
        launch_id=submission.launch_id_prefix,
        root=shlex.quote(str(PYTHONPATH_ROOT)),
        python=shlex.quote(sys.executable),
        source=shlex.join(["--tasks", f"{folder}/{array.job_name}.json", "--sha256", sha256]),
        prologue=prologue,
    )


def render_script(
    options: Mapping[str, str],
    *,
    launch_id: str,
    root: str,
    python: str,
    source: str,
    prologue: str | None = None,
    comments: Sequence[str] = (),
) -> str:
    """Return a batch script with these sbatch options, where an empty value is a flag; Slurm reads their quotes.

    `root`, `python` and `source` (the options of pipeline.launch that name its points) are text for the shell.
    """
    import jinja2  # here: it takes longer to import than most commands run

    text = (package_files.files("pipeline") / "templates" / "job.sbatch.j2").read_text("utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(text).render(  # a shell script, not HTML
        comments=comments,
        options=[f"{key}={shlex.quote(value)}" if value else key for key, value in options.items()],
        step_variables="'\\\n'|".join(STEP_VARIABLES),  # one line each; the shell joins them
        launch_id=launch_id,
        root=root,
        python=python,
        source=source,
        prologue=None if prologue is None else shlex.quote(prologue),
    )
