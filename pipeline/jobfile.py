"""Render the batch script of a grid, which runs the experiment with plain sbatch.

python -m pipeline.jobfile q4 > jobs/q4.sbatch
"""

import shlex
from importlib import resources as package_files
from pathlib import Path

import jinja2

from pipeline.experiment.grid import expand_grid, is_path, load_grid_file
from pipeline.experiment.resources import ResourceShape
from pipeline.plan.axes import Device
from pipeline.runner.launch_options import PYTHONPATH_ROOT
from pipeline.submission import batch_script
from pipeline.system.command_line import build_parser
from pipeline.system.errors import EXIT_OK, CommandError, replace_control_characters, run_command


def render_job(name: str) -> str:
    """Return the batch script of a grid. It requests the largest shape and runs one point in each element."""
    file = load_grid_file(name)
    points = expand_grid(name).points
    gpus_per_node = [spec.gpus_per_node for spec in points]
    device: Device = "cuda" if any(spec.device == "cuda" for spec in points) else "cpu"
    shape = ResourceShape(device, max(spec.num_nodes for spec in points), max(gpus_per_node))
    options = batch_script.job_file_options(file.name, len(points), shape, file.resources)
    template = (package_files.files("pipeline") / "templates" / "job.sbatch.j2").read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(template).render(  # a shell script, not HTML
        grid=file,
        description=replace_control_characters(" ".join(file.description.split())),
        argument=grid_argument(name),
        shape=shape,
        least_gpus_per_node=min(gpus_per_node),
        options="\n".join(batch_script.option_lines(options)),
        start="\n".join(batch_script.start_lines()),
        srun_arguments=" ".join(batch_script.srun_arguments('"${SLURM_CPUS_PER_TASK:-1}"')),
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
