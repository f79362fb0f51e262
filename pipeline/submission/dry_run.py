"""The plan of a submission as a dry run prints it, as text or as JSON."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.plan.find_model import find_code
from pipeline.plan.resources import group_by_shape, pack_elements
from pipeline.plan.spec import non_default_fields
from pipeline.records.folder import start_submission
from pipeline.runner.launch_options import TaskList, digest, launch_command
from pipeline.submission import batch_script, gpu_hours_estimate, plan
from pipeline.submission.plan import PointSelection, SubmitContext
from pipeline.system.errors import CommandError, log_line, pluralize, print_text


def print_plan(context: SubmitContext, selection: PointSelection, refusal: CommandError | None) -> None:
    """Print the plan, then log the next command, or why the run is refused: by `refusal` or by --max-gpu-hours."""
    options, experiment, cluster = context.options, context.experiment, context.cluster
    estimates = plan.estimate_hours(context, selection.todo)
    ranges = plan.predict_ranges(context, selection.todo)
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
    elif plan.UNCLEAR in selection.skipped:
        log_line(f"Without --dry-run this is refused: see {plan.command('status', experiment.folder)}.")
    elif selection.todo and (cluster.kind == "local" or cluster.nodes is not None):
        log_line("Next: the same command without --dry-run")


def describe_code(context: SubmitContext, selection: PointSelection) -> list[str]:
    """Return the user's files whose code will run: the prologue, the models, and what they import from beside them."""
    prologue = context.prologue if context.cluster.kind == "slurm" else None
    models = find_code(selection.todo, context.grid.folder or Path())
    return [str(path.resolve()) for path in (*([prologue.path] if prologue else []), *models)]


def describe_arrays(context: SubmitContext, selection: PointSelection) -> Iterator[dict[str, Any]]:
    """Yield each array with its batch script, in which zeros stand for the random digits of a submission."""
    submission, experiment = start_submission("0" * 32, "slurm"), context.experiment
    prologue = context.prologue.text if context.prologue else None
    for index, planned in enumerate(plan.plan_arrays(context, selection.todo)):
        array = planned.named(submission.array_name(experiment.folder.name, index))
        sha256 = digest(TaskList(planned.elements, plan.launch_options(context)).encode())
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
    manifest_path, options = context.experiment.manifest_path, plan.launch_options(context)
    elements = pack_elements(selection.todo, context.options.points_per_element)
    run_ids = [[spec.run_id() for spec in element] for element in elements]
    return [shlex.join(launch_command(manifest_path, element, options)) for element in run_ids]


def render_plan(plan: dict[str, Any], selection: PointSelection, is_verbose: bool) -> str:
    """Return the numbers of points by resource shape, the hours and the arrays; if verbose, also what is long of each.

    That is a line a point, and the batch scripts, or the commands where no Slurm runs them.
    """
    is_local = plan["place"] == "local"
    lines = [f"{selection.describe()}, {plan['place']}, into {plan['folder']}"]
    lines += [f"  {len(specs):,} on {shape}" for shape, specs in group_by_shape(selection.todo).items()]
    lines += [f"runs the code of {path}" for path in plan["code"]]
    lines += [row["note"] for row in plan["cost"]] + [plan["time"]] * bool(plan["time"])
    if is_verbose:
        lines += ["", *map(describe_point, plan["points"])]
    for index, array in enumerate([] if is_local else plan["arrays"]):
        lines += [""] * is_verbose + [f"array {index}: {pluralize(len(array['elements']), 'element')}"]
        lines += [f"  {notice}" for notice in array["notices"]]
        if is_verbose:
            packed = [element for element in array["elements"] if len(element) > 1]
            lines += [f"  one after another: {', '.join(element)}" for element in packed]
            lines += [f"    {line}" for line in array["sbatch"].splitlines()]
    if is_verbose and is_local:
        lines += ["", "one after another:", *plan["commands"]] if plan["commands"] else []
    elif not is_verbose and plan["points"]:
        lines.append(f"-v lists the configurations and the {'commands' if is_local else 'batch scripts'}")
    return "\n".join(lines)


def describe_point(point: Mapping[str, Any]) -> str:
    stated = {axis: value for axis, value in point.items() if axis != "run_id" and value is not None}
    return f"  {point['run_id']}  {' '.join(f'{axis}={value}' for axis, value in stated.items())}"
