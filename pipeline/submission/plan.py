"""What a submission would do: which points are to run, where, and in which arrays. Nothing is written."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pipeline.experiment import packing
from pipeline.experiment.folder import Experiment
from pipeline.experiment.grid import Grid, expand_grid
from pipeline.experiment.manifest import MANIFEST_VERSION, Manifest, add_points
from pipeline.experiment.resources import Resources, ResourceShape, group_by_shape
from pipeline.experiment.spec import Spec
from pipeline.runner.launch_options import Rerun
from pipeline.submission import point_state, slurm_queries, slurm_request
from pipeline.submission.progress import read_progress
from pipeline.submission.slurm_queries import NodeType
from pipeline.submission.slurm_request import SlurmOptions, SlurmRequest
from pipeline.system import slurm_commands
from pipeline.system.errors import EXIT_NOTHING_FOUND, EXIT_SCHEDULER, CommandError
from pipeline.system.host import gpu_names, num_visible_gpus

ClusterKind = Literal["slurm", "local"]

NOT_PACKED = "since over several nodes only the end of the whole element ends a point that fails"


class SubmitOptions(NamedTuple):
    """What the person asked for on the command line."""

    grid: str
    overrides: Sequence[str]
    outputs: Path
    cluster: Literal["auto", "slurm", "local"]
    slurm_options: SlurmOptions
    time: str | None
    max_parallel: int | None
    points_per_element: int
    only: Sequence[str]
    rerun: Rerun | None
    skip_unsatisfiable: bool
    is_dry_run: bool


class Cluster(NamedTuple):
    """Where points will run: `nodes` is None where Slurm cannot be asked (a dry run) or is not used.

    `partition_limit_min` is None where the partition has no limit, or was not asked for one.
    """

    kind: ClusterKind
    nodes: list[NodeType] | None
    max_array_size: int
    num_gpus_here: int
    notices: list[str]
    partition_limit_min: int | None = None


class PlannedArray(NamedTuple):
    """One Slurm array to be: its points' shape, what it asks for, each element's points."""

    shape: ResourceShape
    request: SlurmRequest
    elements: list[list[Spec]]


class PointSelection(NamedTuple):
    """The points to run now, and how many are not for which reason."""

    todo: list[Spec]
    skipped: dict[str, int]


def expand_submission(submit_options: SubmitOptions) -> Grid:
    """The grid as the person changed it. Raises CommandError."""
    slurm_request.check_slurm_options(submit_options.slurm_options)
    grid = expand_grid(submit_options.grid, submit_options.overrides, has_gpus=num_visible_gpus() > 0)
    if submit_options.time is None:
        return grid
    try:
        return grid._replace(resources=msgspec.structs.replace(grid.resources, time=submit_options.time))
    except ValueError as error:
        raise CommandError(f"--time: {error}") from error


def inspect_cluster(submit_options: SubmitOptions) -> Cluster:
    """Where points would run, and what is there.

    Raises CommandError (scheduler) where Slurm is configured and silent: a login node never starts training by itself.
    A dry run goes on without its nodes.
    """
    here = num_visible_gpus()
    if submit_options.cluster == "local":
        return Cluster("local", None, slurm_queries.DEFAULT_MAX_ARRAY_SIZE, here, [])
    presence = slurm_queries.probe_slurm()
    if presence == "up":
        nodes = slurm_queries.query_node_types(submit_options.slurm_options.partition)
        slurm_request.check_gpu_type(submit_options.slurm_options.gpu_type, nodes)
        limit_min = (
            slurm_queries.query_partition_limit_min(submit_options.slurm_options.partition)
            if submit_options.points_per_element > 1
            else None
        )
        return Cluster(
            "slurm",
            nodes,
            slurm_queries.query_max_array_size(),
            here,
            slurm_commands.ignored_variables_notice(),
            limit_min,
        )
    if presence == "absent" and submit_options.cluster == "auto":
        notice = "No Slurm here: the points run on this machine, one after another."
        return Cluster("local", None, slurm_queries.DEFAULT_MAX_ARRAY_SIZE, here, [notice])
    problem = "Slurm is configured and its controller does not answer" if presence == "silent" else "no Slurm here"
    if submit_options.is_dry_run:
        return Cluster(
            "slurm", None, slurm_queries.DEFAULT_MAX_ARRAY_SIZE, here, [f"Notice: {problem}; its nodes are unknown."]
        )
    wait = "wait for it, or " if presence == "silent" else ""
    raise CommandError(f"{problem}; {wait}run on this machine with --cluster local.", EXIT_SCHEDULER)


def gpu_model(site: Cluster, options: SlurmOptions) -> str | None:
    """The one GPU model that points will run on, in the words of this machine or of Slurm; None where it is not known.

    On Slurm it is the type asked for, else that of all GPUs of the partition.
    """
    if site.kind == "local":
        names = gpu_names()
    elif options.gpu_type is not None:
        names = {options.gpu_type}
    else:
        nodes = [node for node in site.nodes or () if node.num_gpus]
        all_typed = all(sum(node.gpus_by_type.values()) == node.num_gpus for node in nodes)
        names = {name for node in nodes for name in node.gpus_by_type} if all_typed else set()
    return next(iter(names)) if len(names) == 1 else None


def find_unsatisfiable(points: Sequence[Spec], site: Cluster, submit_options: SubmitOptions) -> dict[str, str]:
    """run id -> why this place cannot run it."""
    if site.kind == "local":
        return slurm_request.unsatisfiable_here(points, site.num_gpus_here)
    if site.nodes is None:
        return {}
    return slurm_request.unsatisfiable_on_slurm(points, site.nodes, submit_options.slurm_options.gpu_type)


def drop_unsatisfiable(
    points: Sequence[Spec], reasons: Mapping[str, str], submit_options: SubmitOptions
) -> tuple[list[Spec], list[str]]:
    """The points without those that cannot run, each named; refuses them unless the person said to skip."""
    if not reasons:
        return list(points), []
    if submit_options.is_dry_run and not submit_options.skip_unsatisfiable:
        return list(points), [f"Could not run here, {named}." for named in slurm_request.lines_by_reason(reasons)]
    if not submit_options.skip_unsatisfiable:
        slurm_request.refuse_unsatisfiable(reasons, len(points))
    kept = [spec for spec in points if spec.run_id() not in reasons]
    if not kept:
        raise CommandError("this place can run none of the points; change them with --set.")
    return kept, [f"Left out, {named}." for named in slurm_request.lines_by_reason(reasons)]


def select_points(points: Sequence[Spec], experiment: Experiment, submit_options: SubmitOptions) -> PointSelection:
    """The points that lack a record and are not under way, and those to be run again.

    Raises CommandError: nothing where --only names no point of the grid or --rerun selects none, scheduler where the
    state of an earlier submission cannot be read.
    """
    manifest = experiment.read_manifest() or Manifest(MANIFEST_VERSION, experiment.folder.name)
    add_points(manifest, points)
    wanted = named_points(points, submit_options.only)
    todo, skipped = [], Counter[str]()
    for progress in read_progress(experiment, manifest, holds_lock=True):
        if progress.spec.run_id() not in wanted:
            continue
        word, status = progress.state.word, progress.outcome.status
        if word == "unknown" and submit_options.is_dry_run:
            skipped["in a state that cannot be read"] += 1
        elif word == "unknown":
            raise CommandError(
                f"the state of {progress.spec.run_id()} cannot be read ({progress.state.reason}), and it may still be "
                "running; try again when Slurm answers, or use another --outputs.",
                EXIT_SCHEDULER,
            )
        elif progress.is_in_flight:
            skipped["queued or running"] += 1
        elif status in point_state.RECORDED_STATUSES and submit_options.rerun not in ("all", status):
            skipped[f"recorded as {status}"] += 1
        else:
            todo.append(progress.spec)
    if not todo and submit_options.rerun and not skipped.get("queued or running"):
        raise CommandError("--rerun selects nothing that is to run; see python -m pipeline.status.", EXIT_NOTHING_FOUND)
    return PointSelection(todo, dict(skipped))


def named_points(points: Sequence[Spec], only: Sequence[str]) -> set[str]:
    """The run ids that the person named, else all. Raises CommandError (nothing) for one that is not in the grid."""
    known = {spec.run_id() for spec in points}
    unknown = [run_id for run_id in only if run_id not in known]
    if unknown:
        raise CommandError(
            f"--only names {unknown[0]!r}, which the grid does not have; see --dry-run.", EXIT_NOTHING_FOUND
        )
    return set(only) or known


def plan_arrays(
    todo: Sequence[Spec], resources: Resources, site: Cluster, submit_options: SubmitOptions
) -> list[PlannedArray]:
    """One array a resource shape, cut to what the site allows; points over several nodes are not packed."""
    arrays = []
    for shape, specs in group_by_shape(todo).items():
        packed = packing.pack_elements(specs, submit_options.points_per_element if shape.num_nodes == 1 else 1)
        request = array_request(shape, packed, resources, site, submit_options)
        arrays += [PlannedArray(shape, request, part) for part in split_to_max_array_size(packed, site.max_array_size)]
    return arrays


def array_request(
    shape: ResourceShape,
    elements: Sequence[Sequence[Spec]],
    resources: Resources,
    site: Cluster,
    submit_options: SubmitOptions,
) -> SlurmRequest:
    """What an array of these elements asks for, and for how long."""
    request = slurm_request.build_request(
        shape, resources, submit_options.slurm_options, site.nodes, submit_options.max_parallel
    )
    num_points = max(len(element) for element in elements)
    if num_points > 1:
        return slurm_request.sum_time_limits(request, shape, num_points, site.partition_limit_min)
    if shape.num_nodes > 1 and submit_options.points_per_element > 1:
        return request._replace(notices=(*request.notices, f"{shape}: one point an element, {NOT_PACKED}"))
    return request


def split_to_max_array_size(elements: Sequence[list[Spec]], max_elements: int) -> list[list[list[Spec]]]:
    """Arrays of elements, none longer than the site allows."""
    return [list(elements[i : i + max_elements]) for i in range(0, len(elements), max_elements)]
