"""Plan a submission: the points to run, the cluster and the arrays; a dry run prints it. Writes no file."""

import argparse
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from pipeline.plan.find_model import code_place, find_code, find_lacking, source_digests
from pipeline.plan.grid import Grid, check_grid_name, expand_grid, value_of
from pipeline.plan.resources import ResourceShape, group_by_shape, pack_elements
from pipeline.plan.spec import Spec, non_default_fields
from pipeline.records import store
from pipeline.records.folder import (
    MANIFEST_VERSION,
    Experiment,
    Manifest,
    SlurmArray,
    Submission,
    add_points,
    start_submission,
)
from pipeline.records.outcomes import PointOutcome, submission_of
from pipeline.runner.launch_options import LaunchOptions, TaskList, digest, launch_command, read_launch_options
from pipeline.submission import batch_script, gpu_hours_estimate, slurm_queries
from pipeline.submission.batch_script import SlurmRequest
from pipeline.submission.read_progress import (
    RECORDED_STATUSES,
    PointProgress,
    read_progress,
    refusal_of_unread_state,
)
from pipeline.submission.slurm_queries import NodeType
from pipeline.system.command_line import command_name
from pipeline.system.errors import (
    EXIT_NOTHING_FOUND,
    EXIT_SCHEDULER,
    CommandError,
    log_line,
    pluralize,
    print_text,
    shorten_list,
)
from pipeline.system.host import gpu_names, num_visible_gpus

ClusterKind = Literal["slurm", "local"]

MAX_PARTITIONS = 5  # in one sentence
MAX_VALUES = 4  # likewise
UNCLEAR = "in a state that cannot be read"
BEFORE_EDIT = " before its file was edited"
WITHOUT_GRES = "if its nodes have GPUs that Slurm does not know, ask for whole nodes with --no-gres"
NOT_PACKED = "since a failed configuration on several nodes is ended only with its whole element"


class Cluster(NamedTuple):
    """The Slurm cluster, or this machine, where the points will run."""

    kind: ClusterKind
    nodes: list[NodeType] | None = None  # None without Slurm, or if it does not answer in a dry run
    max_array_size: int = slurm_queries.DEFAULT_MAX_ARRAY_SIZE
    notices: Sequence[str] = ()
    partition_limit_min: int | None = None  # None without a limit, or if it was not queried
    name: str | None = None  # None if Slurm does not say


class Prologue(NamedTuple):
    """The shell file that every job sources, and its text when it was read."""

    path: Path
    text: str


class SubmitContext(NamedTuple):
    """The settings of one call of `submit`, by which points are submitted or run. `options` is its command line."""

    options: argparse.Namespace
    experiment: Experiment
    grid: Grid
    cluster: Cluster
    prologue: Prologue | None = None


class PlannedArray(NamedTuple):
    """A Slurm array before it is submitted; `elements` holds the points of each element."""

    shape: ResourceShape
    request: SlurmRequest
    elements: list[list[Spec]]

    def named(self, job_name: str) -> SlurmArray:
        """Return the array as the manifest lists it."""
        run_ids = [[spec.run_id() for spec in element] for element in self.elements]
        return SlurmArray(job_name, run_ids, is_array=len(run_ids) > 1)


class PointSelection(NamedTuple):
    """The points to run, and the number of points that are skipped for each reason."""

    todo: list[Spec]
    skipped: dict[str, int]

    def describe(self) -> str:
        skipped = "".join(f", {count} {reason}" for reason, count in sorted(self.skipped.items()))
        return f"{pluralize(len(self.todo), 'configuration')} to run{skipped}"


def command(name: str, folder: Path) -> str:
    """Return the command line that the user types next for this folder."""
    return f"{command_name(name)} {shlex.quote(str(folder))}"


def expand_submission(options: argparse.Namespace, cluster: Cluster) -> Grid:
    """Return the grid with the changes of the command line. Raises CommandError."""
    grid = expand_grid(options.grid, options.overrides, has_gpus=has_gpus(options, cluster))
    if options.name is not None:
        check_grid_name(options.name, "--name")
        grid = grid._replace(name=options.name)
    if options.time is None:
        return grid
    try:
        return grid._replace(resources=msgspec.structs.replace(grid.resources, time=options.time))
    except ValueError as error:
        raise CommandError(f"--time: {error}") from error


def inspect_cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster where the points will run; a dry run goes on without its nodes.

    Raises CommandError (scheduler) if Slurm is configured and silent: a login node never starts training by itself.
    """
    if options.cluster == "local":
        return Cluster("local")
    presence = slurm_queries.probe_slurm()
    if presence == "up":
        return query_cluster(options)
    if presence == "absent" and options.cluster == "auto":
        return Cluster("local", notices=["No Slurm here: the configurations run on this machine, one after another."])
    problem = "Slurm is configured and its controller does not answer" if presence == "silent" else "no Slurm here"
    if options.is_dry_run:
        return Cluster("slurm", notices=[f"Notice: {problem}; its nodes are unknown."])
    wait = "wait for it, or " if presence == "silent" else ""
    raise CommandError(f"{problem}; {wait}run on this machine with --cluster local.", EXIT_SCHEDULER)


def has_gpus(options: argparse.Namespace, cluster: Cluster) -> bool:
    """True if the points can have GPUs: on the nodes of a partition, else on this machine."""
    if cluster.nodes is None:
        return num_visible_gpus() > 0
    return options.slurm_options.no_gres or any(node.count_gpus(options.gpu_type) for node in cluster.nodes)


def query_cluster(options: argparse.Namespace) -> Cluster:
    site = options.slurm_options
    nodes = slurm_queries.query_node_types(options.partition, site.nodelist, site.exclude)
    batch_script.check_gpu_type(options.gpu_type, nodes)
    is_packed = options.points_per_element > 1
    limit_min = slurm_queries.query_partition_limit_min(options.partition) if is_packed else None
    notices = slurm_queries.ignored_variables_notice()
    configuration = slurm_queries.query_configuration()
    max_array_size, name = slurm_queries.read_max_array_size(configuration), configuration.get("ClusterName")
    return Cluster("slurm", nodes, max_array_size, notices, limit_min, name)


def num_cpu_threads(grid: Grid, cluster: Cluster) -> int:
    """Return the threads of each process on the CPU, the same for every strategy: the grid's cpus_per_gpu.

    This machine gives no more than its cores allow beside the other processes of the grid's largest point.
    """
    processes = [spec.num_processes_per_node for spec in grid.points if spec.device == "cpu"]
    if not processes:
        return 1
    if cluster.kind == "slurm":
        return grid.resources.cpus_per_gpu
    return max(1, min(grid.resources.cpus_per_gpu, len(os.sched_getaffinity(0)) // max(processes)))


def crowded_notices(points: Sequence[Spec], cluster: Cluster) -> list[str]:
    """Return a notice if this machine has fewer CPUs than some points have processes."""
    num_cpus = len(os.sched_getaffinity(0))
    crowded = [spec for spec in points if spec.device == "cpu" and spec.num_processes_per_node > num_cpus]
    if cluster.kind == "slurm" or not crowded:
        return []
    verb = "has" if len(crowded) == 1 else "have"
    these = f"{pluralize(len(crowded), 'configuration')} {verb} more processes than the {num_cpus} CPUs here"
    return [f"Notice: {these}; no answer uses their speed-ups or their communication."]


def find_gpu_model(cluster: Cluster, gpu_type: str | None) -> str | None:
    """Return the GPU model of all points: Slurm's requested or only type, here the only name; None if unknown."""
    if cluster.kind == "local":
        names = gpu_names()
    elif gpu_type is not None:
        names = {gpu_type}
    else:
        nodes = [node for node in cluster.nodes or () if node.num_gpus]
        all_typed = all(sum(node.gpus_by_type.values()) == node.num_gpus for node in nodes)
        names = {name for node in nodes for name in node.gpus_by_type} if all_typed else set()
    return next(iter(names)) if len(names) == 1 else None


def estimate_hours(context: SubmitContext, todo: Sequence[Spec]) -> list[gpu_hours_estimate.HoursEstimate]:
    """Return an estimate for each device of the points. Only Slurm limits the time of a point."""
    options, grid, cluster = context.options, context.grid, context.cluster
    limit_min = grid.resources.time_min() if cluster.kind == "slurm" else None
    gpu_model = find_gpu_model(cluster, options.gpu_type)
    return gpu_hours_estimate.estimate_points(todo, options.outputs, limit_min, gpu_model)


def predict_ranges(context: SubmitContext, todo: Sequence[Spec]) -> dict[str, gpu_hours_estimate.DurationRange]:
    """Return run id -> the range of its time, from earlier records of equal points, the pilot, or its rounds."""
    gpu_model = find_gpu_model(context.cluster, context.options.gpu_type)
    earlier = gpu_hours_estimate.find_comparable_attempts(todo, context.options.outputs, gpu_model)
    pilots = gpu_hours_estimate.find_pilot_attempts(context.experiment, todo, gpu_model)
    return gpu_hours_estimate.predict_ranges(todo, earlier, pilots)


def launch_options(context: SubmitContext) -> LaunchOptions:
    limit_s, num_threads = context.grid.resources.time_min() * 60, num_cpu_threads(context.grid, context.cluster)
    modules = context.grid.folder if any(code_place(spec) for spec in context.grid.points) else None
    return read_launch_options(context.options, limit_s, num_threads, modules)


def drop_unsatisfiable(context: SubmitContext, todo: Sequence[Spec]) -> tuple[SubmitContext, CommandError | None]:
    """Return the context without those points of `todo` that cannot run, a notice for each reason, and None.

    Without --skip-unsatisfiable, or if no selected point can run, return the same context, and the refusal.
    """
    options, grid, cluster = context.options, context.grid, context.cluster
    lacking = find_lacking(todo, grid.folder)
    elsewhere = find_unsatisfiable(context, [spec for spec in todo if spec.run_id() not in lacking], cluster.nodes)
    reasons = {**lacking, **elsewhere}
    if not reasons:
        return context, None
    lines = batch_script.group_by_reason(reasons)
    selected = selected_run_ids(context)
    is_any_left = not selected <= reasons.keys()
    if options.skip_unsatisfiable and is_any_left:
        options.only = [run_id for run_id in options.only if run_id not in reasons]
        grid = grid._replace(points=tuple(spec for spec in grid.points if spec.run_id() not in reasons))
        cluster = cluster._replace(notices=[*cluster.notices, *(f"Left out: {line}." for line in lines)])
        return context._replace(grid=grid, cluster=cluster), None
    cures = ["correct the class"] if lacking else []
    if elsewhere:
        cures += list_other_places(context, [spec for spec in todo if spec.run_id() in elsewhere], len(elsewhere))
    if is_any_left:
        cures.append("leave them out with --skip-unsatisfiable")
    cures.append("change them with --set")
    problem = f"{len(reasons)} of {pluralize(len(selected), 'configuration')} cannot run here: {'; '.join(lines)}"
    return context, CommandError(f"{problem}; {', or '.join(cures)}.")


def find_unsatisfiable(
    context: SubmitContext, todo: Sequence[Spec], nodes: Sequence[NodeType] | None
) -> dict[str, str]:
    """Return run id -> reason for the points that this machine or these nodes cannot run; {} for unknown nodes."""
    if context.cluster.kind == "local":
        return batch_script.unsatisfiable_on_this_machine(todo, num_visible_gpus())
    return (
        {}
        if nodes is None
        else batch_script.unsatisfiable_on_slurm(
            todo, nodes, context.options.gpu_type, context.options.slurm_options.no_gres
        )
    )


def list_other_places(context: SubmitContext, todo: Sequence[Spec], num_unsatisfiable: int) -> list[str]:
    """Return the cure for points that cannot run here: the partitions that can run most, or a grid without GPUs."""
    if context.cluster.kind == "local":
        return ["take --grid smoke, which runs anywhere"] if num_visible_gpus() == 0 else []
    num_left_out = {
        name: len(find_unsatisfiable(context, todo, nodes))
        for name, nodes in slurm_queries.query_nodes_by_partition().items()
    }
    fewest = min(num_left_out.values(), default=num_unsatisfiable)
    if fewest >= num_unsatisfiable:
        return [] if any(node.num_gpus for node in context.cluster.nodes or ()) else [WITHOUT_GRES]
    names = sorted(name for name, number in num_left_out.items() if number == fewest)
    return [f"choose another --partition ({shorten_list(names, MAX_PARTITIONS)})"]


def select_points(context: SubmitContext) -> PointSelection:
    """Return the points that have no record and are not queued or running, and those that --rerun selects.

    Raises CommandError: "nothing found" if --only or --rerun select no point, "scheduler" if the state of an earlier
    submission cannot be read, "usage" for another grid, or if a record cannot be read that may be valid.
    """
    options, experiment, grid = context.options, context.experiment, context.grid
    manifest = experiment.read_manifest() or Manifest(MANIFEST_VERSION, experiment.folder.name)
    refuse_other_grid(context, manifest)
    add_points(manifest, grid.points)
    selected = selected_run_ids(context)
    todo, skipped = [], Counter[str]()
    sources = source_digests(grid.points, grid.folder)
    expected = read_progress(experiment, manifest, holds_lock=True)
    store.refuse_other_origin((one.outcome.record for one in expected), experiment.folder, measured=True)
    for progress in expected:
        if progress.spec.run_id() not in selected:
            continue
        status, refusal = progress.outcome.status, refusal_of_unclear_point(progress)
        if refusal is not None and not options.is_dry_run:
            raise refusal
        if refusal is not None:
            skipped[UNCLEAR] += 1
        elif progress.state.word == "settling":
            skipped["that ended just now, with no record yet"] += 1
        elif progress.is_in_flight:
            skipped["queued or running"] += 1
        elif status in RECORDED_STATUSES and options.rerun not in ("all", status):
            if not is_source_changed(progress.outcome, manifest.submissions, sources):
                skipped[f"recorded as {status}"] += 1
            elif status == "failed":
                todo.append(progress.spec)
            else:
                skipped[f"recorded as {status}{BEFORE_EDIT}"] += 1
        else:
            todo.append(progress.spec)
    if not todo and options.rerun and not skipped.get("queued or running"):
        cure = f"see {command('status', experiment.folder)}"
        raise CommandError(f"--rerun selects no configuration; {cure}.", EXIT_NOTHING_FOUND)
    return PointSelection(todo, dict(skipped))


def refuse_other_grid(context: SubmitContext, manifest: Manifest) -> None:
    """Raise CommandError if --set would mix two grids in one folder, without --name or --merge.

    Another grid is one whose expected points have other values of an axis of --set, where neither side has all of the
    other's. A grid with more values, or with fewer, is the same one.
    """
    options = context.options
    if options.name is not None or options.is_merged:
        return
    for axis in (change.partition("=")[0] for change in options.overrides):
        held, asked = ({value_of(spec, axis) for spec in points} for points in (manifest.points, context.grid.points))
        if not (held <= asked or asked <= held):
            there, here = (shorten_list(sorted(map(str, values)), MAX_VALUES) for values in (held, asked))
            problem = f"{context.experiment.folder} holds another grid ({axis} {there}, not {here})"
            raise CommandError(f"{problem}; give this one a folder with --name NAME, or add it with --merge.")


def is_source_changed(outcome: PointOutcome, submissions: Sequence[Submission], sources: Mapping[str, str]) -> bool:
    """True if the file of the user's model or script was edited since the point was submitted that has this record."""
    if outcome.record is None:
        return False
    code, ran = outcome.spec.code, submission_of(outcome.record, submissions)
    before = ran.sources.get(code) if ran else None
    return before is not None and sources.get(code) not in (None, before)


def refusal_of_unclear_point(progress: PointProgress) -> CommandError | None:
    """Return the error for a point that may still run, or may have a valid record, and nobody can tell; else None."""
    or_else, outcome = ", or use another --outputs", progress.outcome
    if outcome.may_hold_result and not progress.is_in_flight:
        return CommandError(f"{progress.spec.run_id()}: {outcome.reason}{or_else}.")
    return refusal_of_unread_state(progress, or_else)


def selected_run_ids(context: SubmitContext) -> set[str]:
    """Return the run ids of --only, else all. Raises CommandError (nothing found) for one that is not in the grid."""
    known, only = {spec.run_id() for spec in context.grid.points}, context.options.only
    unknown = [run_id for run_id in only if run_id not in known]
    if unknown:
        problem = f"--only names {unknown[0]!r}, which is not in the grid"
        raise CommandError(f"{problem}; --dry-run -v lists its run ids.", EXIT_NOTHING_FOUND)
    return set(only) or known


def plan_arrays(context: SubmitContext, todo: Sequence[Spec]) -> list[PlannedArray]:
    """Return the arrays: one for each shape, split to MaxArraySize. Points on several nodes are not packed."""
    options, grid, cluster = context.options, context.grid, context.cluster
    most = options.points_per_element
    arrays = []
    for shape, specs in group_by_shape(todo).items():
        is_packed = most > 1 and shape.num_nodes == 1
        elements = pack_elements(specs, most) if is_packed else [[spec] for spec in specs]
        request = batch_script.build_request(
            shape, grid.resources, options.slurm_options, cluster.nodes, options.max_parallel
        )
        num_points = max(len(element) for element in elements)
        if num_points > 1:
            request = batch_script.sum_time_limits(request, shape, num_points, cluster.partition_limit_min)
        elif shape.num_nodes > 1 and most > 1:
            request = request._replace(
                notices=(*request.notices, f"{shape}: one configuration per element, {NOT_PACKED}")
            )
        parts = split_to_max_array_size(elements, cluster.max_array_size)
        arrays += [PlannedArray(shape, request, part) for part in parts]
    return arrays


def split_to_max_array_size(elements: Sequence[list[Spec]], max_elements: int) -> list[list[list[Spec]]]:
    return [list(elements[i : i + max_elements]) for i in range(0, len(elements), max_elements)]


def print_plan(context: SubmitContext, selection: PointSelection, refusal: CommandError | None) -> None:
    """Print the plan, then log the next command, or why the run is refused: by `refusal` or by --max-gpu-hours."""
    options, experiment, cluster = context.options, context.experiment, context.cluster
    estimates = estimate_hours(context, selection.todo)
    ranges = predict_ranges(context, selection.todo)
    described = {
        "folder": str(experiment.folder),
        "place": cluster.kind,
        "points": [{"run_id": spec.run_id(), **non_default_fields(spec)} for spec in selection.todo],
        "skipped": selection.skipped,
        "code": describe_code(context, selection),
        "cost": [estimate.as_row() for estimate in estimates],
        "ranges_s": {run_id: found[:2] for run_id, found in ranges.items()},
        "time": gpu_hours_estimate.describe_ranges(selection.todo, ranges, one_by_one=cluster.kind == "local"),
        "arrays": [*describe_arrays(context, selection)],
        "commands": describe_commands(context, selection) if refusal is None else [],
    }
    print_text(
        json.dumps(described, indent=1) if options.json else render_plan(described, selection, options.is_verbose)
    )
    try:
        if refusal is None and options.max_gpu_hours is not None:
            gpu_hours_estimate.check_gpu_hours_limit(estimates, options.max_gpu_hours)
    except CommandError as error:
        refusal = error
    if refusal is not None:
        log_line(f"Without --dry-run this is refused: {refusal}")
    elif UNCLEAR in selection.skipped:
        log_line(f"Without --dry-run this is refused: see {command('status', experiment.folder)}.")
    elif selection.todo and (cluster.kind == "local" or cluster.nodes is not None):
        log_line(f"Next: the same command without --dry-run{' and -v' if options.is_verbose else ''}")


def describe_code(context: SubmitContext, selection: PointSelection) -> list[str]:
    """Return the user's files whose code will run: the prologue, the models, and what they import from beside them."""
    prologue = context.prologue if context.cluster.kind == "slurm" else None
    models = find_code(selection.todo, context.grid.folder or Path())
    return [str(path.resolve()) for path in (*([prologue.path] if prologue else []), *models)]


def describe_arrays(context: SubmitContext, selection: PointSelection) -> Iterator[dict[str, Any]]:
    """Yield each array with its batch script, in which zeros stand for the random digits of a submission."""
    submission, experiment = start_submission("0" * 32, "slurm"), context.experiment
    prologue = context.prologue.text if context.prologue else None
    for index, planned in enumerate(plan_arrays(context, selection.todo)):
        array = planned.named(submission.array_name(experiment.folder.name, index))
        sha256 = digest(TaskList(planned.elements, launch_options(context)).encode())
        yield {
            "shape": planned.shape._asdict(),
            "resources": planned.request.options,
            "elements": array.elements,
            "notices": list(planned.request.notices),
            "sbatch": batch_script.render_array(experiment, submission, array, planned.request, sha256, prologue),
        }


def describe_commands(context: SubmitContext, selection: PointSelection) -> list[str]:
    if context.cluster.kind != "local":
        return []
    manifest_path, options = context.experiment.manifest_path, launch_options(context)
    elements = pack_elements(selection.todo, context.options.points_per_element)
    run_ids = [[spec.run_id() for spec in element] for element in elements]
    return [shlex.join(launch_command(manifest_path, element, options)) for element in run_ids]


def render_plan(described: dict[str, Any], selection: PointSelection, is_verbose: bool) -> str:
    """Return the numbers of points by resource shape, the hours and the arrays; if verbose, also what is long of each.

    That is a line a point, and the batch scripts, or the commands where no Slurm runs them.
    """
    is_local = described["place"] == "local"
    lines = [f"{selection.describe()}, {described['place']}, into {described['folder']}"]
    lines += [f"  {len(specs):,} on {shape}" for shape, specs in group_by_shape(selection.todo).items()]
    lines += [f"runs the code of {path}" for path in described["code"]]
    lines += [row["note"] for row in described["cost"]] + [described["time"]] * bool(described["time"])
    if is_verbose:
        lines += ["", *map(describe_planned, described["points"])]
    for index, array in enumerate([] if is_local else described["arrays"]):
        lines += [""] * is_verbose + [f"array {index}: {pluralize(len(array['elements']), 'element')}"]
        lines += [f"  {notice}" for notice in array["notices"]]
        if is_verbose:
            packed = [element for element in array["elements"] if len(element) > 1]
            lines += [f"  one after another: {', '.join(element)}" for element in packed]
            lines += [f"    {line}" for line in array["sbatch"].splitlines()]
    if is_verbose and is_local:
        lines += ["", "one after another:", *described["commands"]] if described["commands"] else []
    elif not is_verbose and described["points"]:
        lines.append(f"-v lists the configurations and the {'commands' if is_local else 'batch scripts'}")
    return "\n".join(lines)


def describe_planned(point: Mapping[str, Any]) -> str:
    stated = {axis: value for axis, value in point.items() if axis != "run_id" and value is not None}
    return f"  {point['run_id']}  {' '.join(f'{axis}={value}' for axis, value in stated.items())}"
