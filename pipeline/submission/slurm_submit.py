"""Points on Slurm: one array a resource shape, submitted through submitit. The only module that imports it."""

import contextlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.experiment.folder import Experiment, displayable_name
from pipeline.experiment.manifest import SlurmArray, Submission
from pipeline.runner.launch_options import PYTHONPATH_ROOT, LaunchOptions, exec_element
from pipeline.submission import slurm_queries
from pipeline.submission.slurm_request import SlurmRequest
from pipeline.system import slurm_commands
from pipeline.system.errors import CONTROL_CHARACTER, EXIT_SCHEDULER, CommandError

SUBMITIT_DEFAULT_PARALLEL = 256
PICKLE = "elements.pkl"  # what all elements of an array read; without it none begins


class Unanswered(CommandError):
    """Slurm may have taken an array, and did not say so."""


def job_name(experiment_name: str, submission_id: str, number: int) -> str:
    """A name that no other array has: it finds an array that was submitted without its id being learnt."""
    return f"{experiment_name}-{submission_id[:8]}-{number}"


def refuse_unsafe_paths(experiment: Experiment) -> None:
    """Raise CommandError for a path that a batch script cannot hold; every other one is quoted there.

    Slurm takes % and \\ in the names of logs for its own signs, and no quoting holds a line break in an #SBATCH line.
    """
    folder = str(experiment.folder.absolute())
    for path, cure in (
        (folder, "choose another --outputs"),
        (str(PYTHONPATH_ROOT), "install the pipeline elsewhere"),
        (sys.executable, "install Python elsewhere"),
    ):
        if CONTROL_CHARACTER.search(path) or displayable_name(path) != path:
            raise CommandError(f"the path {path!r} has a control character, or is not UTF-8; {cure}.")
    sign = next((sign for sign in "%\\" if sign in folder), None)
    if sign:
        raise CommandError(f"the folder {folder} has a {sign!r}, which Slurm would replace; choose another --outputs.")


def batch_setup_lines(submission_name: str, prologue: Path | None) -> list[str]:
    """What the batch script does before it starts the tasks; a failing line ends the job."""
    lines = [
        "set -euo pipefail",
        *slurm_commands.clean_step_lines(),
        f'export PIPELINE_LAUNCH_ID="{submission_name}-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"',
        f'export PYTHONPATH={shlex.quote(str(PYTHONPATH_ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
    ]
    if prologue is not None:
        path = shlex.quote(str(prologue.resolve()))
        lines += [
            "set +eu",  # module systems read unset variables, and what fails inside their functions is their own
            """trap 'echo "the prologue failed: $BASH_COMMAND" >&2; exit 1' ERR""",
            f"test -r {path}",  # no source says that of what it reads through cat
            f"source <(cat {path}; printf '\\n:\\n')",  # its last line may be a test that is false
            "trap - ERR",
            "set -eu",
        ]
    return lines


def srun_arguments(request: SlurmRequest) -> list[str]:
    """A rank that dies ends the whole step; srun does not inherit the CPUs of the job."""
    return ["--kill-on-bad-exit=1", f"--cpus-per-task={request.options['cpus-per-task']}"]


def sbatch_text(
    name: str, request: SlurmRequest, num_elements: int, setup: Sequence[str], command: Sequence[str]
) -> str:
    """The batch script that submitit is told to write, but for its own folder and its way to start the command."""
    options = {"job-name": name, **request.options}
    if num_elements > 1:
        options["array"] = f"0-{num_elements - 1}%{max_running_elements(request, num_elements)}"
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}{'=' * bool(value)}{value}" for key, value in sorted(options.items()))]
    return "\n".join([*lines, *setup, shlex.join(["srun", *srun_arguments(request), *command])]) + "\n"


def max_running_elements(request: SlurmRequest, num_elements: int) -> int:
    """How many elements may run at once."""
    return min(num_elements, request.max_parallel or SUBMITIT_DEFAULT_PARALLEL)


def submit_array(
    experiment: Experiment,
    submission: Submission,
    array: SlurmArray,
    request: SlurmRequest,
    setup: list[str],
    options: LaunchOptions,
) -> str:
    """Submit one array and return its job id.

    submitit only submits: each element's process becomes pipeline.launch (exec), so that exit codes, signals and
    logs are those of the point. All elements read one pickle, which is there before sbatch is called: no element
    needs this process any more. Raises CommandError (scheduler) where sbatch refuses, and what it left is removed then;
    Unanswered where Slurm may have the array.
    """
    import submitit

    folder = experiment.log_folder(submission.id).absolute() / array.job_name  # submitit would expand a leading ~
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    executor = submitit.SlurmExecutor(folder)
    setup = [link_line(folder, array.is_array), *setup]
    executor.update_parameters(**submitit_parameters(array.job_name, request, len(array.elements), setup))
    if array.is_array:
        executor.parameters["map_count"] = len(array.elements)  # what makes an array of a submission in submitit
    absolute = options._replace(data=options.data.resolve())
    element = (exec_element, experiment.manifest_path.resolve(), array.elements, absolute)
    submitit.core.utils.DelayedSubmission(*element).dump(folder / PICKLE)
    try:
        with slurm_commands.clean_environment():
            return str(executor.submit(*element).job_id)
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
        job_id = find_taken(array.job_name, folder, last_line(str(error)))
        if job_id is None:
            raise CommandError(f"sbatch refused {array.job_name}: {last_line(str(error))}.", EXIT_SCHEDULER) from error
        return job_id  # sbatch failed after the controller had taken the job


def find_taken(name: str, folder: Path, problem: str) -> str | None:
    """The job id of an array whose sbatch had a problem; None where Slurm does not have it. Raises Unanswered."""
    try:
        found = slurm_queries.find_jobs_named([name])
    except CommandError as refusal:
        raise Unanswered(
            f"sbatch failed for {name} ({problem or 'without a word'}) and Slurm does not say whether it has the "
            f"array ({str(refusal).partition(';')[0]}); submit again, which asks for it first.",
            EXIT_SCHEDULER,
        ) from refusal
    return found.get(name) or withdraw(folder)


def withdraw(folder: Path) -> str | None:
    """Take back what the elements of an array need that Slurm does not know: if it comes late, none of them runs.

    Returns its job id, and takes nothing back, where an element has begun.
    """
    pickle, withdrawn = folder / PICKLE, folder / "withdrawn.pkl"
    with contextlib.suppress(FileNotFoundError):
        pickle.rename(withdrawn)
    begun = next(folder.glob("*_submitted.pkl"), None)
    if begun is None:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    with contextlib.suppress(FileNotFoundError):
        withdrawn.rename(pickle)
    return begun.name.partition("_")[0]


def link_line(folder: Path, is_array: bool) -> str:
    """The line of the batch script that gives the pickle the name under which submitit looks for it in the job."""
    pickle = shlex.quote(str(folder.resolve() / PICKLE))
    id = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if is_array else "${SLURM_JOB_ID}"
    own = f'{shlex.quote(str(folder.resolve()))}/"{id}_submitted.pkl"'
    return f"ln -f {pickle} {own} 2>/dev/null || cp {pickle} {own} || exit"  # some file systems have no hard links


def submitit_parameters(name: str, request: SlurmRequest, num_elements: int, setup: list[str]) -> dict[str, object]:
    """The request in submitit's words."""
    options = dict(request.options)
    signal_delay_s = int(options.pop("signal").partition("@")[2])
    options.pop("open-mode")  # submitit sets append itself
    options.pop("no-requeue")
    is_exclusive = options.pop("exclusive", None) is not None
    return {
        "job_name": name,
        **{key.replace("-", "_"): int(value) if value.isdecimal() else value for key, value in options.items()},
        "signal_delay_s": signal_delay_s,
        "wckey": "",
        "array_parallelism": max_running_elements(request, num_elements),
        "exclusive": True if is_exclusive else None,
        "additional_parameters": {"no-requeue": True},
        "setup": setup,
        "srun_args": srun_arguments(request),
    }


def last_line(text: str) -> str:
    """The line of an error that says what is wrong, without its end mark."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "").rstrip(".")
