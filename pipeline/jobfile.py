"""Render the batch script of a grid, which runs the experiment with plain sbatch.

python -m pipeline.jobfile q4 > jobs/q4.sbatch
"""

import shlex
from pathlib import Path

from pipeline.plan.axes import Device
from pipeline.plan.grid import expand_grid, is_path, load_grid_file
from pipeline.plan.resources import ResourceShape
from pipeline.runner.launch_options import PYTHONPATH_ROOT
from pipeline.submission.batch_script import SlurmOptions, array_option, build_request, render_script
from pipeline.system.command_line import build_parser
from pipeline.system.errors import EXIT_OK, CommandError, replace_control_characters, run_command


def render_job(name: str) -> str:
    """Return the batch script of a grid. It requests the largest shape and runs one point in each element."""
    file = load_grid_file(name)
    points = expand_grid(name).points
    gpus_per_node = [spec.gpus_per_node for spec in points]
    device: Device = "cuda" if any(spec.device == "cuda" for spec in points) else "cpu"
    shape = ResourceShape(device, max(spec.num_nodes for spec in points), max(gpus_per_node))
    comments = [
        replace_control_characters(" ".join(file.description.split())),
        "Run it from the repository's root. Options of sbatch override these lines, arguments go to pipeline.launch:",
        f"  sbatch [--partition=...] [--account=...] jobs/{file.name}.sbatch [--data DIR] [--set AXIS=VALUE ...]",
    ]
    least, most = min(gpus_per_node), max(gpus_per_node)
    if least < most:
        comments += [
            f"It holds {most} GPUs a node for every configuration, also for those that use {least}. The thrifty way:",
            f"`ddpscale submit --grid {file.name}` asks for one array a shape.",
        ]
    named = {"job-name": file.name, "array": array_option(len(points)), "output": "outputs/%x-%A_%a-%N.log"}
    return render_script(
        {**named, **build_request(shape, file.resources, SlurmOptions(), None, None).options},
        launch_id="${SLURM_ARRAY_JOB_ID:?submit this file with sbatch}",
        root='"$PWD"',
        python='"${PIPELINE_PYTHON:-.venv/bin/python}"',
        source=f"--grid {grid_argument(name)}",
        comments=[*comments, "Rendered from templates/job.sbatch.j2 by `make jobs`."],
    )


def grid_argument(name: str) -> str:
    """Return the grid's name, or its quoted path, from the repository's root where it lies in there.

    Raises CommandError for a path that cannot be printed.
    """
    if not is_path(name):
        return name
    path = Path(name).resolve()
    if not str(path).isprintable():
        raise CommandError(f"the path {str(path)!r} has characters that cannot be printed; rename it.")
    return shlex.quote(f"./{path.relative_to(PYTHONPATH_ROOT)}" if path.is_relative_to(PYTHONPATH_ROOT) else str(path))


def main() -> int:
    parser = build_parser("jobfile", __doc__)
    parser.add_argument("grid", help="the name of a shipped grid, or a path to a grid file")
    print(render_job(parser.parse_args().grid), end="")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
