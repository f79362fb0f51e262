"""Run the configurations of one array element one after another, and publish a record of each.

    python -m pipeline.launch --grid q4 --index 3                    a configuration of a grid (jobs/*.sbatch)
    python -m pipeline.launch --tasks PATH --sha256 HEX --index 3    an element of a task list (the arrays of `submit`)
    python -m pipeline.launch --manifest PATH --run-id ID ...        configurations of a manifest

Exit codes: 0 every configuration is ok, 1 at least one is not ok (its record says why), 2 wrong usage.
"""

import argparse
import functools
import os
import signal
import uuid
from collections.abc import Sequence
from pathlib import Path

from pipeline.plan.grid import Grid, expand_grid
from pipeline.plan.resources import points_for_same_processes
from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.folder import LOCAL_PREFIX, Experiment, SlurmArray, add_points, as_job_name, start_submission
from pipeline.records.record import Record
from pipeline.runner.failures import limit_hint
from pipeline.runner.launch_options import (
    LaunchOptions,
    add_point_arguments,
    read_launch_options,
    read_task_list,
)
from pipeline.runner.launch_session import LaunchSession, publish_with_retries
from pipeline.runner.memory_search import search_memory
from pipeline.runner.rank_files import PointTask
from pipeline.runner.side_files import recover_side_files
from pipeline.runner.start_ranks import run_node_ranks
from pipeline.system import errors, files
from pipeline.system.command_line import build_parser, positive_integer
from pipeline.system.deadline import DeadlineExpired
from pipeline.system.errors import CommandError, log_line, pluralize
from pipeline.system.host import gpu_names, node_rank, num_visible_gpus


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("launch", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--grid", help="a shipped grid's name, or a path")
    source.add_argument("--tasks", type=Path, help="the task list of an array; it has all other options")
    source.add_argument("--manifest", type=Path, help="the manifest.json that holds the configurations")
    parser.add_argument(
        "--index", type=int, help="the index of the configuration in the grid or of the element, from 0"
    )
    parser.add_argument("--sha256", metavar="HEX", help="the SHA-256 that the task list must have")
    parser.add_argument(
        "--run-id", action="append", default=[], help="a configuration of the manifest; may be repeated"
    )
    modules = "the folder of the modules of your models (default: that of the grid file)"
    parser.add_argument("--modules", type=Path, metavar="DIR", help=modules)
    threads = "CPU threads of each process that trains on the CPU (default: the grid's cpus_per_gpu; with --manifest 1)"
    parser.add_argument("--num-threads", type=positive_integer, metavar="N", help=threads)
    limit = "stop a configuration that runs longer than S seconds, and run the next one"
    parser.add_argument("--point-limit-s", type=positive_integer, metavar="S", help=limit)
    add_point_arguments(parser, parser)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    errors.require_packages(*errors.RANK_PACKAGES)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # sbatch --signal warns every process of the step before the limit
    if arguments.tasks:
        experiment = Experiment(arguments.tasks.parents[2])
    elif arguments.manifest:
        experiment, points = resolve_manifest(arguments.manifest, arguments.run_id)
        options = read_launch_options(arguments, arguments.point_limit_s, arguments.num_threads or 1, arguments.modules)
    else:
        grid = expand_grid(arguments.grid, arguments.overrides, has_gpus=num_visible_gpus() > 0)
        experiment, points = resolve_grid(grid, arguments.index, arguments.outputs)
        num_threads, modules = arguments.num_threads or grid.resources.cpus_per_gpu, arguments.modules or grid.folder
        options = read_launch_options(arguments, arguments.point_limit_s, num_threads, modules)
        points = [spec for spec in points if needs_run(spec, experiment, arguments.rerun)]
    files.make_folder(experiment.logs)
    with files.private_folder(arguments.tasks.parent if arguments.tasks else experiment.scratch_folder) as private:
        if arguments.tasks:
            tasks = read_task_list(private / arguments.tasks.name, arguments.sha256)
            points, options = without_results_of_job(tasks.points_of(arguments.index), experiment), tasks.options
            if len(points) == 1:
                options = options._replace(point_limit_s=None)
        points = [spec for spec in points if node_rank() < spec.num_nodes]
        refuse_reused_launch_id(points, experiment, private)
        if node_rank() == 0:
            recover_side_files(experiment)
        return run_element(points, experiment, private, options)


def run_element(points: Sequence[Spec], experiment: Experiment, private: Path, options: LaunchOptions) -> int:
    """Run the points of an element in order, in shared processes if that changes no result. Return the exit code."""
    exit_code = errors.EXIT_OK
    while points:
        implied = publish_implied_oom(points[0], experiment, options)
        specs = points_for_same_processes(points)
        results = [implied] if implied else run_in_same_processes(specs, experiment, private, options)
        if any(record is not None and record.status != "ok" for record in results):
            exit_code = errors.EXIT_GAPS
            if points[0].num_nodes > 1:  # by this exit code srun ends the point on the other nodes
                return exit_code
        points = points[len(results) :]
    return exit_code


def resolve_manifest(path: Path, run_ids: list[str]) -> tuple[Experiment, list[Spec]]:
    """Return the points of the manifest with these run ids. Raises CommandError for an unknown run id or for none."""
    experiment = Experiment(path.parent)
    manifest = experiment.read_manifest()
    if manifest is None:
        raise CommandError(f"{path} is absent; submit the experiment first.")
    known = {spec.run_id(): spec for spec in manifest.points}
    missing = [run_id for run_id in run_ids if run_id not in known]
    if not run_ids:
        raise CommandError(f"no configuration of {path} is named; add --run-id with the run id of a configuration.")
    if missing:
        raise CommandError(
            f"{path} has no configuration {', '.join(missing)}; give --run-id one of its configurations."
        )
    return experiment, [known[run_id] for run_id in run_ids]


def resolve_grid(grid: Grid, index: int | None, outputs: Path) -> tuple[Experiment, list[Spec]]:
    """Return the experiment, and a list with the grid's point at the index; the list is empty past the grid's end.

    Add the points and the Slurm array to the manifest if it lacks them. Raises CommandError if the index or the array
    id is not valid.
    """
    if index is None or index < 0:
        raise CommandError("--grid needs --index, the number of a configuration from 0.")
    array_id = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array_id and not (array_id.isascii() and array_id.isdigit()):  # no manifest with such an id can be read
        raise CommandError(f"SLURM_ARRAY_JOB_ID={array_id!r} is not a job id; unset it.")
    experiment = Experiment(outputs / grid.name)
    experiment.create()
    manifest = experiment.read_manifest()
    known = {spec.run_id() for spec in manifest.points} if manifest else set()
    is_listed = not array_id or (manifest and any(s.id == f"sbatch-{array_id}" for s in manifest.submissions))
    if manifest is None or not is_listed or not all(spec.run_id() in known for spec in grid.points):
        publish_manifest(experiment, grid.name, list(grid.points), array_id)
    if index >= len(grid.points):
        log_line(
            f"grid {grid.name} has {pluralize(len(grid.points), 'configuration')}; element {index} has nothing to do."
        )
        return experiment, []
    return experiment, [grid.points[index]]


def needs_run(spec: Spec, experiment: Experiment, rerun: str | None) -> bool:
    """True if the point has no record, or if `rerun` selects its record. So a second sbatch only fills the gaps."""
    attempts = store.load_attempts(experiment.records_folder, {spec.run_id()})
    if not attempts or rerun in ("all", status := store.choose_attempt(attempts).status):
        return True
    log_line(f"{spec.run_id()}: recorded as {status}, nothing to do; --rerun {status} runs it again.")
    return False


def without_results_of_job(points: Sequence[Spec], experiment: Experiment) -> list[Spec]:
    """Return the points of which this job has no result: a requeued one has run the first of its element."""
    launch_id = os.environ.get("PIPELINE_LAUNCH_ID", "")
    job = launch_id.rsplit("-", 2)[0]  # before the number of its restarts and the time
    attempts = store.load_attempts(experiment.records_folder, {spec.run_id() for spec in points}) if job else []
    earlier = (one for one in attempts if one.launch_id != launch_id and one.launch_id.rsplit("-", 2)[0] == job)
    done = {one.run_id for one in earlier if one.status != "failed"}
    return [spec for spec in points if spec.run_id() not in done]


def publish_manifest(experiment: Experiment, name: str, points: list[Spec], array_id: str | None) -> None:
    """Add the points and the Slurm array that runs them to the manifest, so that `submit` does not submit them too."""
    with experiment.edit_manifest() as manifest:
        manifest.name = name
        add_points(manifest, points)
        submission = start_submission(f"sbatch-{array_id}", "sbatch")
        if array_id and all(other.id != submission.id for other in manifest.submissions):
            job_name = as_job_name(os.environ.get("SLURM_JOB_NAME") or name)  # sbatch --job-name may have changed it
            submission.arrays.append(SlurmArray(job_name, [[spec.run_id()] for spec in points], array_id))
            manifest.submissions.append(submission)


def refuse_reused_launch_id(points: Sequence[Spec], experiment: Experiment, private: Path) -> None:
    """Raise CommandError for a point that was already launched with this launch id: two attempts would look like one.

    A launch folder or a record proves the earlier launch. For a point on several nodes only a record does, because
    another node of the same launch may just have created the folder.
    """
    launch_id = os.environ.get("PIPELINE_LAUNCH_ID")
    for spec in points if launch_id else ():
        run_id = spec.run_id()
        has_folder = spec.num_nodes == 1 and (private / f"{run_id}.{launch_id}").exists()
        attempts = store.load_attempts(experiment.records_folder, {run_id})
        if has_folder or any(record.launch_id == launch_id for record in attempts):
            problem = f"{run_id} was already launched with PIPELINE_LAUNCH_ID={launch_id}"
            raise CommandError(f"{problem}; unset it to run again.")


def publish_implied_oom(spec: Spec, experiment: Experiment, options: LaunchOptions) -> Record | None:
    """Publish an `oom` record if the record of a smaller batch implies it. Return it, or None if the point must run."""
    manifest = experiment.read_manifest()
    cause = None
    if manifest is not None and options.rerun not in ("oom", "all"):
        cause = store.find_implying_oom(spec, manifest.points, experiment.records_folder, gpu_names())
    if cause is None:
        return None
    record = store.implied_oom_record(spec, cause, read_launch_id())
    publish_with_retries(record, experiment.records_folder)
    log_line(f"{spec.run_id()}: {record.status_line()}")
    return record


def read_launch_id() -> str:
    """Return the id of this launch in its records: the submission's id and job, or a new one."""
    return os.environ.get("PIPELINE_LAUNCH_ID") or f"{LOCAL_PREFIX}-{uuid.uuid4().hex[:12]}"


def run_in_same_processes(
    specs: Sequence[Spec], experiment: Experiment, private: Path, options: LaunchOptions
) -> list[Record | None]:
    """Run this node's ranks for the points, one after another, and publish a record of each.

    Return an entry for each point that was started: its record, or None if another node publishes the record. The
    other points need new processes, because a point failed or the ranks stopped before the next point.
    """
    launch = LaunchSession(experiment, private, read_launch_id(), specs, options.point_limit_s)
    run_and_publish(launch, options)
    launch.remove_ok_folders()
    return launch.published


def run_and_publish(launch: LaunchSession, options: LaunchOptions) -> None:
    first_spec, first_files = launch.specs[0], launch.rank_files_by_point[0]
    run_with_threads = functools.partial(run_node_ranks, num_threads=options.num_threads)
    try:
        if first_spec.measure == "memory":
            with launch.deadline:
                (task,) = point_tasks(launch, options)
                record = search_memory(task, first_files, launch.id, run_with_threads)
            launch.publish(record)
            return
        write_points(launch, options)
        with launch.publish_while_running(), launch.deadline:
            exits = run_with_threads(first_spec, first_files, launch.id)
    except DeadlineExpired:
        launch.publish_timed_out()
    except (RuntimeError, TimeoutError) as error:  # from run_node_ranks: the ranks could not start or connect
        hint = limit_hint(error)  # which describe_exception may have added
        text = str(error) or type(error).__name__
        cure = f"; {hint}" if hint and hint not in text else ""
        launch.publish(launch.failure_record(f"the ranks could not be started: {text}{cure}"))
    else:
        launch.publish_finished(exits)


def point_tasks(launch: LaunchSession, options: LaunchOptions) -> list[PointTask]:
    """Return the orders to the ranks, one for each point."""
    data, modules = str(options.data.resolve()), str(options.modules.resolve()) if options.modules else None
    submitted = launch.experiment.submitted_sources(launch.id)
    return [PointTask(spec, data, modules, submitted.get(spec.code), options.keep_trace) for spec in launch.specs]


def write_points(launch: LaunchSession, options: LaunchOptions) -> None:
    first, *following = point_tasks(launch, options)
    launch.current_files.write_following(following)
    launch.current_files.write_point(first)


if __name__ == "__main__":
    errors.run_command(main)
