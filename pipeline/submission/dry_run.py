"""The plan of a submission as a dry run prints it, as text or as JSON."""

import shlex
from collections.abc import Sequence
from typing import Any

from pipeline.experiment.folder import Experiment
from pipeline.experiment.spec import Spec, non_default_fields
from pipeline.runner.launch_options import LaunchOptions, launch_command
from pipeline.submission import batch_script
from pipeline.submission.batch_script import Prologue
from pipeline.submission.gpu_hours_estimate import Estimate
from pipeline.submission.plan import Cluster, PlannedArray, PointSelection
from pipeline.system.errors import pluralize


def describe_plan(
    experiment: Experiment,
    cluster: Cluster,
    selection: PointSelection,
    arrays: Sequence[PlannedArray],
    options: LaunchOptions,
    prologue: Prologue | None,
    estimates: Sequence[Estimate],
    elements_here: Sequence[Sequence[Spec]],
) -> dict[str, Any]:
    """Return the plan as `--dry-run --json` prints it; `elements_here` are those that would run on this machine."""
    setup = batch_script.setup_lines("<submission>", prologue)
    described = []
    for index, array in enumerate(arrays):
        run_ids, name = array.run_ids(), f"{experiment.folder.name}-{index}"
        most = max(len(element) for element in run_ids)
        variables = ["$RUN_ID"] if most == 1 else [f"$RUN_ID_{number}" for number in range(1, most + 1)]
        command = launch_command(experiment.manifest_path, variables, options)
        described.append(
            {
                "shape": array.shape._asdict(),
                "resources": array.request.options,
                "elements": run_ids,
                "notices": list(array.request.notices),
                "sbatch": batch_script.render_batch_script(name, array.request, len(run_ids), setup, command),
            }
        )
    return {
        "folder": str(experiment.folder),
        "place": cluster.kind,
        "points": [{"run_id": spec.run_id(), **non_default_fields(spec)} for spec in selection.todo],
        "skipped": selection.skipped,
        "cost": [estimate.as_row() for estimate in estimates],
        "arrays": described,
        "commands": [
            shlex.join(launch_command(experiment.manifest_path, [spec.run_id() for spec in element], options))
            for element in elements_here
        ],
    }


def render_plan(plan: dict[str, Any]) -> str:
    skipped = "".join(f", {count} {reason}" for reason, count in sorted(plan["skipped"].items()))
    lines = [f"{pluralize(len(plan['points']), 'point')} to run{skipped}, {plan['place']}, into {plan['folder']}"]
    for point in plan["points"]:
        fields = " ".join(f"{axis}={value}" for axis, value in point.items() if axis != "run_id")
        lines.append(f"  {point['run_id']}  {fields}")
    lines += [row["note"] for row in plan["cost"]]
    if plan["place"] == "local":
        return "\n".join([*lines, *(["", "one after another:"] if plan["commands"] else []), *plan["commands"]])
    for index, array in enumerate(plan["arrays"]):
        lines += ["", f"array {index}: {pluralize(len(array['elements']), 'element')}"]
        lines += [f"  {notice}" for notice in array["notices"]]
        packed = [element for element in array["elements"] if len(element) > 1]
        lines += [f"  one after another: {', '.join(element)}" for element in packed]
        lines += [f"    {line}" for line in array["sbatch"].splitlines()]
    return "\n".join(lines)
