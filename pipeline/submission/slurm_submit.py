"""Submit arrays to Slurm: the manifest lists each one first, then submitit submits it.

This is the only module that imports submitit.
"""

import contextlib
import itertools
import os
import re
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from pipeline.plan.find_model import source_digests
from pipeline.records.folder import Experiment, Submission, displayable_name, start_submission
from pipeline.runner.launch_options import PYTHONPATH_ROOT, LaunchOptions, TaskList, digest
from pipeline.submission import batch_script, slurm_queries
from pipeline.submission.plan import PlannedArray, Prologue
from pipeline.system import files
from pipeline.system.errors import CONTROL_CHARACTER, EXIT_SCHEDULER, CommandError, log_line, pluralize

# sbatch's own line, alone: what a wrapper or a banner prints around it may name jobs too
SUBMITTED = re.compile(r"^Submitted batch job ([0-9]+)(?: on cluster \S+)?[ \t]*$", re.MULTILINE)
ERROR_PREFIX = re.compile(r"\A(?:sbatch: )?error: (?:Batch job submission failed: )?", re.IGNORECASE)
# Slurm's names of the limits of waiting and running jobs, and what it says where the whole cluster has no room
SUBMIT_LIMIT = re.compile(r"\b(?:QOS|Assoc)\w*Submit\w*|job submit limit|Resource temporarily unavailable")
FEWER_JOBS = "wait until some of your jobs have ended and submit again, or need fewer jobs with --points-per-element"


class SubmissionUnconfirmed(CommandError):
    """Slurm may have accepted an array, but did not confirm it."""


def refuse_unsafe_paths(experiment: Experiment, *others: Path) -> None:
    """Raise CommandError for a path that manifest, batch scripts and commands cannot hold. All others are quoted."""
    for path, cure in (
        (str(experiment.folder.absolute()), "choose another --outputs"),
        (str(PYTHONPATH_ROOT), "install the pipeline elsewhere"),
        (sys.executable, "install Python elsewhere"),
        *((str(path.absolute()), "rename it") for path in (Path(), *others)),
    ):
        if CONTROL_CHARACTER.search(path) or displayable_name(path) != path:
            raise CommandError(f"the path {path!r} has a control character, or is not UTF-8; {cure}.")


def refuse_replaced_signs(experiment: Experiment) -> None:
    """Raise CommandError for a folder with a sign that Slurm replaces in the names of logs."""
    folder = str(experiment.folder.absolute())
    sign = next((sign for sign in "%\\" if sign in folder), None)
    if sign:
        raise CommandError(f"the folder {folder} has a {sign!r}, which Slurm would replace; choose another --outputs.")


def submit_arrays(
    experiment: Experiment,
    arrays: Sequence[PlannedArray],
    prologue: Prologue | None,
    options: LaunchOptions,
    cluster: str | None = None,
) -> None:
    """Submit every array to the cluster of this name, and write the job id of each one into the manifest.

    The manifest lists all arrays before the first one is submitted. Raises CommandError; the manifest then keeps
    only the arrays that Slurm has accepted or may have accepted.
    """
    if not arrays:
        return
    submission = start_submission(uuid.uuid4().hex, "slurm")
    submission.arguments, submission.workdir = sys.argv[1:], os.getcwd()
    submission.cluster = cluster
    elements = itertools.chain(*(planned.elements for planned in arrays))
    submission.sources = source_digests(itertools.chain(*elements), options.modules)
    if prologue is not None:
        submission.prologue_sha256 = digest(prologue.text.encode())
    for notice in dict.fromkeys(notice for array in arrays for notice in array.request.notices):
        log_line(f"Notice: {notice}.")
    for index, planned in enumerate(arrays):
        submission.arrays.append(planned.named(submission.array_name(experiment.folder.name, index)))
    write_submission(experiment, submission)  # first: Slurm finds a job by its unique name if this process dies
    for index, (planned, array) in enumerate(zip(arrays, tuple(submission.arrays), strict=True)):
        try:
            raw = TaskList(planned.elements, options).encode()
            text = prologue.text if prologue else None
            script = batch_script.render_array(experiment, submission, array, planned.request, digest(raw), text)
            with files.private_folder(experiment.log_folder(submission.id)) as folder:
                (folder / f"{array.job_name}.json").write_bytes(raw)
                array.job_id = submit_array(array.job_name, script, folder)
        except SubmissionUnconfirmed:
            del submission.arrays[index + 1 :]  # keep this array, which Slurm may have
            raise
        except CommandError as refusal:
            del submission.arrays[index:]
            taken, wanted = (sum(len(part.elements) for part in parts) for parts in (arrays[:index], arrays))
            raise CommandError(f"Slurm has taken {taken} of {wanted} elements: {refusal}", refusal.code) from refusal
        finally:
            write_submission(experiment, submission)
        count, num_points = len(array.elements), sum(len(element) for element in array.elements)
        points = f", {num_points} configurations" if num_points > count else ""
        print(f"array {array.job_id}: {pluralize(count, 'element')}, {planned.shape}{points}", flush=True)


def write_submission(experiment: Experiment, submission: Submission) -> None:
    """Write the submission into the manifest, in place of its earlier state."""
    with experiment.edit_manifest() as manifest:
        manifest.submissions = [*(other for other in manifest.submissions if other.id != submission.id), submission]


def submit_array(name: str, script: str, folder: Path) -> str:
    """Submit the script of an array and return its job id.

    submitit calls sbatch with this script, not with one of its own: in each job that would load a pickle, which a
    member of the group could have changed.

    Raises CommandError (scheduler) if sbatch refused the array, and removes its task list. Raises SubmissionUnconfirmed
    if Slurm may have accepted it.
    """
    import submitit

    class Executor(submitit.SlurmExecutor):
        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return script

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:  # submitit takes the first "job N"
            return read_job_id(string if isinstance(string, str) else string.decode(errors="replace"))

    try:
        with tempfile.TemporaryDirectory(prefix="pipeline-submit-") as own, slurm_queries.clean_environment():
            return str(Executor(own).submit(int).job_id)  # submitit wants a function, which no job calls
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
        problem = error_line(str(error))
        job_id = find_accepted_array(name, folder, problem)
        if job_id is None:
            cure = f"; {FEWER_JOBS}" if SUBMIT_LIMIT.search(problem) else ""
            raise CommandError(f"sbatch refused {name}: {problem}{cure}.", EXIT_SCHEDULER) from error
        return job_id  # sbatch failed after the controller had accepted the job, or did not print its id


def read_job_id(output: str) -> str:
    """Return the job id in the output of sbatch. Raises OSError if its own line is absent, or there are several."""
    found = set(SUBMITTED.findall(output))
    if len(found) != 1:
        *_, last = ["", *filter(None, map(str.strip, output.splitlines()))]
        raise OSError(f"it printed {last[:80]!r}, which names no job id")
    return str(found.pop())


def find_accepted_array(name: str, folder: Path, problem: str) -> str | None:
    """Return the job id of an array whose sbatch failed, None if Slurm lacks it. Raises SubmissionUnconfirmed."""
    try:
        found = slurm_queries.find_jobs_named([name], {os.getuid()})
    except CommandError as refusal:
        raise SubmissionUnconfirmed(
            f"sbatch did not confirm {name} ({problem or 'without a message'}) and Slurm does not say whether it has "
            f"the array ({str(refusal).partition(';')[0]}); submit again: submit first looks for the array in Slurm.",
            EXIT_SCHEDULER,
        ) from refusal
    return found.get(name) or withdraw_array(name, folder)


def withdraw_array(name: str, folder: Path) -> str | None:
    """Remove the task list of an array that Slurm does not know: if sbatch submits it later, no element can run.

    Returns the job id, and keeps the list, if there is a log: Slurm makes it before an element begins.
    """
    tasks, withdrawn = folder / f"{name}.json", folder / f"{name}.withdrawn"
    with contextlib.suppress(FileNotFoundError):
        tasks.rename(withdrawn)
    log = next(folder.glob(f"{name}-[0-9]*.log"), None)
    if log is None:
        withdrawn.unlink(missing_ok=True)
        return None
    with contextlib.suppress(FileNotFoundError):
        withdrawn.rename(tasks)
    return log.stem.removeprefix(f"{name}-").partition("_")[0]


def recover_job_ids(experiment: Experiment) -> None:
    """Find the job ids of arrays whose `submit` died before it stored them. Remove the arrays that Slurm does not know.

    A removed array can never run, even if its sbatch process still runs and submits it now. Raises CommandError
    (scheduler) if an array has no job id and Slurm does not answer.
    """
    manifest = experiment.read_manifest()
    arrays = manifest.arrays() if manifest else []
    names = {array.job_name for _, array in arrays if array.job_id is None}
    if not names:
        return
    found = slurm_queries.find_jobs_named(names, {os.getuid()})
    with experiment.edit_manifest() as manifest:
        for submission in manifest.submissions:
            for array in submission.arrays:
                if array.job_id is None:
                    with files.private_folder(experiment.log_folder(submission.id)) as folder:
                        array.job_id = found.get(array.job_name) or withdraw_array(array.job_name, folder)
            submission.arrays = [array for array in submission.arrays if array.job_id is not None]


def error_line(text: str) -> str:
    """Return the errors of sbatch, else the last line that contains "error", else the last line; without full stop.

    sbatch says the limit that was reached in one line, and that it failed in the next.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [ERROR_PREFIX.sub("", line) for line in lines if ERROR_PREFIX.match(line)]
    if own:
        return ": ".join(dict.fromkeys(own)).rstrip(".")
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "").rstrip(".")
