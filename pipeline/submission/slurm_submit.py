"""Submit one Slurm array through submitit. This is the only module that imports it."""

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

PICKLE = "elements.pkl"  # read by every element of an array; an element cannot start without it


class SubmissionUnconfirmed(CommandError):
    """Slurm may have accepted an array, but did not confirm it."""


def job_name(experiment_name: str, submission_id: str, number: int) -> str:
    """Return a unique job name, by which an array is found if its driver died before it read the job id."""
    return f"{experiment_name}-{submission_id[:8]}-{number}"


def refuse_unsafe_paths(experiment: Experiment) -> None:
    """Raise CommandError for a path that a batch script cannot hold. All other paths are quoted there.

    Slurm replaces % and \\ in the names of logs, and no quoting keeps a line break inside an #SBATCH line.
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

    submitit only submits. In the job, the process of an element becomes pipeline.launch (exec), so that exit code,
    signals and logs are those of the point. All elements read one pickle that exists before sbatch is called, so that
    no element needs this process afterwards. (executor.map_array names its pickles after sbatch has returned: a driver
    that is killed in between loses the array.)

    Raises CommandError (scheduler) if sbatch refused the array, whose files are then removed, and
    SubmissionUnconfirmed if Slurm may have accepted it.
    """
    import submitit

    folder = experiment.log_folder(submission.id).absolute() / array.job_name  # submitit would expand a leading ~
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    executor = submitit.SlurmExecutor(folder)
    setup = [batch_script.link_line(folder.resolve() / PICKLE, array.is_array), *setup]
    parameters = batch_script.submitit_parameters(array.job_name, request, len(array.elements), setup)
    executor.update_parameters(**parameters)
    if array.is_array:
        executor.parameters["map_count"] = len(array.elements)  # submitit then submits an array, not a plain job
    absolute = options._replace(data=options.data.resolve())
    element = (exec_element, experiment.manifest_path.resolve(), array.elements, absolute)
    submitit.core.utils.DelayedSubmission(*element).dump(folder / PICKLE)
    try:
        with slurm_commands.clean_environment():
            return str(executor.submit(*element).job_id)
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
        job_id = find_accepted_array(array.job_name, folder, last_line(str(error)))
        if job_id is None:
            raise CommandError(f"sbatch refused {array.job_name}: {last_line(str(error))}.", EXIT_SCHEDULER) from error
        return job_id  # sbatch failed after the controller had accepted the job


def find_accepted_array(name: str, folder: Path, problem: str) -> str | None:
    """Return the job id of an array whose sbatch failed, None if Slurm does not have it.

    Raises SubmissionUnconfirmed if Slurm does not answer.
    """
    try:
        found = slurm_queries.find_jobs_named([name])
    except CommandError as refusal:
        raise SubmissionUnconfirmed(
            f"sbatch failed for {name} ({problem or 'without a message'}) and Slurm does not say whether it has the "
            f"array ({str(refusal).partition(';')[0]}); submit again: the command then asks Slurm for it first.",
            EXIT_SCHEDULER,
        ) from refusal
    return found.get(name) or withdraw_array(folder)


def withdraw_array(folder: Path) -> str | None:
    """Remove the pickle of an array that Slurm does not know, so that no element runs if sbatch submits it later.

    Returns the job id, and keeps the pickle, if an element has started.
    """
    pickle, withdrawn = folder / PICKLE, folder / "withdrawn.pkl"
    with contextlib.suppress(FileNotFoundError):
        pickle.rename(withdrawn)
    started = next(folder.glob("*_submitted.pkl"), None)
    if started is None:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    with contextlib.suppress(FileNotFoundError):
        withdrawn.rename(pickle)
    return started.name.partition("_")[0]


def last_line(text: str) -> str:
    """Return the last line of an error message that contains "error", else its last line, without the full stop."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "").rstrip(".")
