"""Render jobs/*.sbatch: the same experiment with no driver, on any cluster.

python -m pipeline.jobfile q4 > jobs/q4.sbatch
"""

import argparse
import math
import shlex
from importlib import resources as package_files
from pathlib import Path

import jinja2

from pipeline.experiment.grid import expand_grid, is_path, load_grid_file
from pipeline.runner.launch_options import PYTHONPATH_ROOT
from pipeline.system.errors import EXIT_OK, CommandError, replace_control_characters, run_command
from pipeline.system.slurm_commands import clean_step_lines


def render_job(name: str) -> str:
    """The batch script of a grid: the request of its largest shape, and one command."""
    file = load_grid_file(name)
    points = expand_grid(name).points
    gpus_per_node = max(spec.gpus_per_node for spec in points)
    template = (package_files.files("pipeline") / "templates" / "job.sbatch.j2").read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(template).render(  # a shell script, not HTML
        grid=file,
        description=replace_control_characters(" ".join(file.description.split())),
        argument=grid_argument(name),
        num_points=len(points),
        num_nodes=max(spec.num_nodes for spec in points),
        gpus_per_node=gpus_per_node,
        least_gpus_per_node=min(spec.gpus_per_node for spec in points),
        cpus_per_node=file.resources.cpus_per_gpu * gpus_per_node,
        clean_step="\n".join(clean_step_lines()),
        mem_per_node_gib=math.ceil(file.resources.mem_per_gpu_gib * gpus_per_node),
    )


def grid_argument(name: str) -> str:
    """The grid as launch finds it from the repository's root, quoted. Raises CommandError for a path of no plain text."""
    if not is_path(name):
        return name
    path = Path(name).resolve()
    if not str(path).isprintable():
        raise CommandError(f"the path {str(path)!r} has characters that cannot be printed; rename it.")
    return shlex.quote(f"./{path.relative_to(PYTHONPATH_ROOT)}" if path.is_relative_to(PYTHONPATH_ROOT) else str(path))


def main() -> int:
    """Print the batch script of a grid."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.jobfile", description="Render a grid's batch script.")
    parser.add_argument("grid", help="a shipped grid's name, or a path to one")
    print(render_job(parser.parse_args().grid), end="")
    return EXIT_OK


if __name__ == "__main__":
    run_command(main)
