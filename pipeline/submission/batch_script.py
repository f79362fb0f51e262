"""The batch script: one template for what `submit` sends, what its dry run shows, and jobs/*.sbatch."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import resources as package_files

from pipeline.records.folder import Experiment, SlurmArray, Submission
from pipeline.runner.launch_options import PYTHONPATH_ROOT
from pipeline.submission.sbatch_options import SlurmRequest
from pipeline.system.slurm_commands import STEP_VARIABLES

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
