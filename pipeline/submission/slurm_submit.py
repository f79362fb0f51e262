"""Points on Slurm: one array a resource shape, submitted through submitit. The only module that imports it."""

import contextlib
import shutil
import sys
from pathlib import Path

from pipeline.experiment.folder import Experiment, displayable_name
from pipeline.experiment.manifest import SlurmArray, Submission
from pipeline.runner.launch_options import PYTHONPATH_ROOT, LaunchOptions, exec_element
from pipeline.submission import batch_script, slurm_queries
from pipeline.submission.slurm_request import SlurmRequest
from pipeline.system import slurm_commands
from pipeline.system.errors import CONTROL_CHARACTER, EXIT_SCHEDULER, CommandError

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
    setup = [batch_script.link_line(folder.resolve() / PICKLE, array.is_array), *setup]
    parameters = batch_script.submitit_parameters(array.job_name, request, len(array.elements), setup)
    executor.update_parameters(**parameters)
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


def last_line(text: str) -> str:
    """The line of an error that says what is wrong, without its end mark."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "").rstrip(".")
