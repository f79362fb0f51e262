"""Expand a grid and run the configurations that have no record: as Slurm arrays, or here if there is no Slurm.

    python -m pipeline.submit --grid scaling
    python -m pipeline.submit --grid scaling --dry-run

Exit codes: 0 success, also if there is nothing to run; 1 a configuration that ran here has no result (with --wait: any
expected configuration); 2 wrong usage or settings; 3 --only or --rerun select no configuration; 4 Slurm refused
an array, or Slurm is configured and does not answer.
"""

import argparse
import functools
import math
import signal
from collections.abc import Sequence
from pathlib import Path

from pipeline.data import staging
from pipeline.plan.resources import pack_elements
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, add_points, warn_of_open_folders
from pipeline.runner import launch_session, side_files
from pipeline.runner.launch_options import add_point_arguments
from pipeline.submission import local, plan, read_progress, slurm_submit
from pipeline.submission.batch_script import PASSED_ON, SlurmOptions, check_slurm_options
from pipeline.submission.gpu_hours_estimate import check_gpu_hours_limit, pilot_points
from pipeline.submission.plan import Prologue, SubmitContext, command
from pipeline.system import errors, files
from pipeline.system.command_line import build_parser, number, positive_integer
from pipeline.system.errors import EXIT_OK, CommandError, log_line, pluralize

MAX_PROLOGUE_BYTES = 1_000_000
MAX_REPEATS = 1000


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("submit", __doc__)
    points = parser.add_argument_group("what to measure")
    points.add_argument("--grid", required=True, help="the name of a shipped grid, or a path to a grid file")
    add_arguments(parser, points)
    return check_arguments(parser, parser.parse_args())


def add_arguments(parser: argparse.ArgumentParser, points: argparse._ArgumentGroup) -> None:
    """Add every option but the one that says what is measured, which comes first in the group `points`."""
    parser.set_defaults(is_collected=False, first=None)
    only = "only this configuration; may be repeated"
    points.add_argument("--only", action="append", default=[], metavar="RUN_ID", help=only)
    repeats = "run every configuration N times, each in new processes (repeat=0 to N-1)"
    points.add_argument("--repeats", type=number(f"from 1 to {MAX_REPEATS}", 1, MAX_REPEATS), metavar="N", help=repeats)
    skipping = "leave out configurations that cannot run here"
    piloting = (
        "run only the smallest configuration of each shape, whose record --dry-run then estimates the others from"
    )
    points.add_argument("--pilot", dest="is_pilot", action="store_true", help=piloting)
    points.add_argument("--skip-unsatisfiable", action="store_true", help=skipping)
    folders = parser.add_argument_group("where data and results are")
    naming = "the experiment's folder below --outputs (default: the grid's name)"
    folders.add_argument("--name", help=naming)
    merging = (
        "add configurations also to a folder that holds another grid: it has other values of an axis of --set, and "
        "neither has all of the other's (a grid with more or fewer values is the same one); without it or --name that "
        "is refused"
    )
    folders.add_argument("--merge", dest="is_merged", action="store_true", help=merging)
    add_point_arguments(points, folders)
    running = parser.add_argument_group("how to run it")
    printing = "print how many configurations run on what, their hours and the arrays; write nothing"
    running.add_argument("--dry-run", dest="is_dry_run", action="store_true", help=printing)
    listing = "with --dry-run: also print every configuration, and the batch scripts or commands"
    running.add_argument("-v", "--verbose", dest="is_verbose", action="store_true", help=listing)
    running.add_argument("--json", action="store_true", help="with --dry-run: print one JSON object")
    waiting = "wait until no configuration is queued or running; exit code 1 if a configuration has no result"
    running.add_argument("--wait", action="store_true", help=waiting)
    costly = "refuse if the configurations may take more GPU-hours than this"
    running.add_argument("--max-gpu-hours", type=number("0 or more", 0, math.inf, float), metavar="HOURS", help=costly)
    where = "auto (the default): on Slurm if it is configured, else on this machine"
    running.add_argument("--cluster", choices=("auto", "slurm", "local"), default="auto", help=where)
    packing = "let each array element run N configurations with equal resources, one after another (default: 1)"
    running.add_argument("--points-per-element", type=positive_integer, default=1, metavar="N", help=packing)
    add_cluster_arguments(parser.add_argument_group("what to ask of Slurm"))


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with what follows from them. A wrong one ends the command."""
    if not arguments.is_dry_run and (arguments.json or arguments.is_verbose):
        parser.error(f"{'--json' if arguments.json else '--verbose'} needs --dry-run")
    if arguments.is_pilot and arguments.only:
        parser.error("--pilot and --only both choose configurations; give one of them")
    if arguments.repeats is not None:
        if any(change.partition("=")[0] == "repeat" for change in arguments.overrides):
            parser.error("--repeats and --set repeat=... both number the repeats; give one of them")
        arguments.overrides.append(f"repeat={','.join(map(str, range(arguments.repeats)))}")
    arguments.slurm_options = SlurmOptions(*(getattr(arguments, name) for name in SlurmOptions._fields))
    return arguments


def add_cluster_arguments(slurm: argparse._ArgumentGroup) -> None:
    for name, meaning in PASSED_ON.items():
        slurm.add_argument(f"--{name}", metavar="NODES" if "node" in meaning else "NAME", help=meaning)
    exclusive = "request whole nodes, so that no other job runs beside a configuration"
    slurm.add_argument("--exclusive", action="store_true", help=exclusive)
    slurm.add_argument("--gpu-type", metavar="TYPE", help="request GPUs of this type, as Slurm names it (a40)")
    gres = "request GPUs with --gres, for clusters without --gpus-per-node"
    slurm.add_argument("--gres", action="store_true", help=gres)
    unknown = "request whole nodes and no GPUs, for clusters where Slurm does not know the GPUs of its nodes"
    slurm.add_argument("--no-gres", action="store_true", help=unknown)
    memory = "0: all memory of a node; default: the cluster's default (without the option: the grid's)"
    slurm.add_argument("--mem", choices=("0", "default"), help=memory)
    slurm.add_argument("--time", help="the time limit of a configuration, as [[days-]hours:]minutes:seconds")
    slurm.add_argument("--prologue", type=Path, metavar="FILE", help="your own shell file; each job sources it first")
    parallel = "elements of an array that may run together"
    slurm.add_argument("--max-parallel", type=positive_integer, metavar="N", help=parallel)


def main() -> int:
    return submit(parse_arguments())


def submit(options: argparse.Namespace) -> int:
    """Submit the points of a grid, run them here, or print the plan. Return the exit code."""
    check_slurm_options(options.slurm_options)
    cluster = plan.inspect_cluster(options)
    grid = plan.expand_submission(options, cluster)
    if options.is_pilot:
        options.only = [spec.run_id() for spec in pilot_points(grid.points)]
        if not options.only:
            problem = "--pilot selects no configuration, since all are probes of memory"
            raise CommandError(f"{problem}; run them without it.", errors.EXIT_NOTHING_FOUND)
    experiment = Experiment(options.outputs / grid.name)
    experiment.require_writable()
    experiment.refuse_manifest_of_another_user()
    experiment.refuse_open_folders()
    slurm_submit.refuse_unsafe_paths(experiment, options.data, *([grid.folder] if grid.folder else []))
    if cluster.kind == "slurm":
        slurm_submit.refuse_replaced_signs(experiment)
    context = SubmitContext(options, experiment, grid, cluster, read_prologue(options.prologue))
    selection = plan.select_points(context)
    context, refusal = plan.drop_unsatisfiable(context, selection.todo)
    if refusal is not None and not options.is_dry_run:
        raise refusal
    kept = set(context.grid.points)
    selection = selection._replace(todo=[spec for spec in selection.todo if spec in kept])
    if grid.replaced:
        log_line(f"--set replaced {'; '.join(grid.replaced)}.")
    crowded = plan.crowded_notices(selection.todo, cluster)
    for notice in (*context.cluster.notices, *crowded, *ignored_option_notices(options, cluster.kind)):
        log_line(notice)
    if options.is_dry_run:
        plan.print_plan(context, selection, refusal)
        return EXIT_OK
    if options.max_gpu_hours is not None:
        check_gpu_hours_limit(plan.estimate_hours(context, selection.todo), options.max_gpu_hours)
    return report_end(context, submit_or_run(context, selection.todo))


def ignored_option_notices(arguments: argparse.Namespace, cluster_kind: str) -> list[str]:
    """Return a notice that lists the given options that only Slurm uses, if the points run without Slurm; else []."""
    if cluster_kind == "slurm":
        return []
    names = [*SlurmOptions._fields, "prologue", "max_parallel"]
    if arguments.points_per_element == 1:
        names.append("time")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]
    return [f"Notice: these options have no effect without Slurm: {', '.join(given)}."] if given else []


def submit_or_run(context: SubmitContext, planned: Sequence[Spec]) -> list[Spec]:
    """Take the submission lock, then submit the arrays or run the points on this machine. Return these points.

    The points are selected again under the lock, because another `submit` may have run some of the planned ones.
    """
    options, experiment, grid, cluster, prologue = context
    errors.require_packages(*(errors.RANK_PACKAGES if cluster.kind == "local" else ("submitit",)))
    stage_data(planned, options.data)  # before create(), so that a failure leaves no empty folder
    experiment.create()
    warn_of_open_folders([experiment])
    with experiment.submission_lock():
        slurm_submit.recover_job_ids(experiment)
        recover_killed_launchers(experiment)
        selection = plan.select_points(context)
        log_line(f"{selection.describe()}.")
        if "recorded as failed" in selection.skipped:
            log_line("To run the failed configurations again, add --rerun failed.")
        if any(plan.BEFORE_EDIT in what for what in selection.skipped):
            log_line("To measure the edited file, add --rerun all, or --name NAME for a folder of its own.")
        known = set(planned)
        stage_data([spec for spec in selection.todo if spec not in known], options.data)
        with experiment.edit_manifest() as manifest:
            manifest.name = grid.name
            add_points(manifest, grid.points)
        if cluster.kind == "local":
            run_here(context, selection.todo)
        else:
            arrays = plan.plan_arrays(context, selection.todo)
            slurm_submit.submit_arrays(experiment, arrays, prologue, plan.launch_options(context), cluster.name)
    return selection.todo


def run_here(context: SubmitContext, todo: Sequence[Spec]) -> None:
    """Run the points on this machine. Raises CommandError if the one that is to be the first has no result."""
    first = [spec for spec in context.grid.points if spec.run_id() == context.options.first]
    begin = [[spec] for spec in first if spec in todo]
    check_first = functools.partial(refuse_without_first, context, first)
    if not begin:
        check_first()
    others = pack_elements([spec for spec in todo if spec not in first], context.options.points_per_element)
    launching = plan.launch_options(context)
    local.run_elements(context.experiment, [*begin, *others], launching, check_first if begin else None)


def refuse_without_first(context: SubmitContext, first: Sequence[Spec]) -> None:
    """Raise CommandError if the point that is to be the first has no result."""
    options, experiment = context.options, context.experiment
    if first and read_progress.count_gaps(experiment, first):
        cure = f"read why in {command('status', experiment.folder)}, correct that, and add --rerun failed"
        drop = f"{command('drop', experiment.folder)} --only {options.first}"
        other = f"if you changed an option, remove the old configuration with {drop}"
        problem = "the first configuration has no result, so the others do not start"
        raise CommandError(f"{problem}; {cure}; {other}.", errors.EXIT_GAPS)


def recover_killed_launchers(experiment: Experiment) -> None:
    """Publish results without a record whose job has ended, and move step times, weights and traces beside records."""
    manifest = experiment.read_manifest()
    with side_files.open_launches(experiment) as launches:
        if manifest is not None and (unpublished := launch_session.find_unpublished(experiment, launches)):
            progress = read_progress.read_progress(experiment, manifest, holds_lock=True)
            unread = read_progress.UNREAD
            running = {part.spec.run_id() for part in progress if part.is_in_flight or part.state.word in unread}
            launch_session.recover_results(experiment, [found for found in unpublished if found.run_id not in running])
    side_files.recover_side_files(experiment)


def report_end(context: SubmitContext, submitted: Sequence[Spec]) -> int:
    """Print the folder, wait with --wait, and log the next command, or how many points have no result.

    Return the exit code. Without --wait only points that ran on this machine count: Slurm runs its points later.
    """
    options, experiment, grid, cluster, _ = context
    errors.print_text(f"folder {experiment.folder}")
    if cluster.kind == "slurm" and not options.wait:
        following = f"{command('status', experiment.folder)} --watch"
        is_open = submitted or read_progress.count_gaps(experiment, grid.points)  # such as what is queued since before
        log_line(f"Next: {following if is_open else command('collect', experiment.folder)}")
        return EXIT_OK
    if cluster.kind == "slurm":
        try:
            read_progress.wait_until_finished(experiment)
        except KeyboardInterrupt:
            see, end = command("status", experiment.folder), command("cancel", experiment.folder)
            log_line(f"interrupted; the jobs run on: see {see}, or end them with {end}")
            return 128 + signal.SIGINT
    run_ids = plan.selected_run_ids(context)
    expected = [spec for spec in grid.points if spec.run_id() in run_ids] if options.wait else submitted
    num_gaps = read_progress.count_gaps(experiment, expected)
    if not num_gaps:
        pilot = "the same command with --dry-run in place of --pilot says how long the rest takes"
        if options.is_pilot or not options.is_collected:
            log_line(f"Next: {pilot if options.is_pilot else command('collect', experiment.folder)}")
        return EXIT_OK
    gaps = (
        f"{num_gaps} of {pluralize(len(expected), 'configuration')} {'has' if len(expected) == 1 else 'have'} no result"
    )
    log_line(f"{gaps}; see {command('status', experiment.folder)}")
    return errors.EXIT_GAPS


def stage_data(points: Sequence[Spec], folder: Path) -> None:
    """Check that the points' data exists; download CIFAR-10, because jobs never do. Raises CommandError."""
    reading = [spec for spec in points if spec.reads_data]
    num_images = max((spec.num_samples for spec in reading if spec.dataset == "imagefolder"), default=None)
    try:
        if any(spec.dataset == "cifar10" for spec in reading) and staging.stage_cifar10(folder):
            log_line(f"CIFAR-10 staged in {folder}.")
        if num_images is not None:
            staging.require_images(staging.require_folder(folder), num_images)
    except staging.DataNotStaged as error:
        raise CommandError(str(error)) from error


def read_prologue(path: Path | None) -> Prologue | None:
    """Return the prologue, None without one. Raises CommandError if somebody else may have written it."""
    if path is None:
        return None
    try:
        text = files.read_code(path, MAX_PROLOGUE_BYTES).decode()
    except files.UntrustedFile as error:
        raise CommandError(f"the prologue {path} {error}.") from error
    except files.UnreadableFile as error:
        raise CommandError(f"the prologue {path} {error}; give a file of shell lines.") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"the prologue {path} is not UTF-8, as the batch script is; convert it.") from error
    if "\0" in text:
        raise CommandError(f"the prologue {path} has a NUL byte, which no shell reads; give a file of shell lines.")
    return Prologue(path, text)


if __name__ == "__main__":
    errors.run_command(main)
