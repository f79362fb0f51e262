"""Execute a plan: stage the data, submit its arrays or run its points on this machine, and wait for them."""

import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from pipeline.data import staging
from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import SlurmArray, Submission, start_submission
from pipeline.experiment.outcomes import resolve_outcomes
from pipeline.experiment.spec import Spec
from pipeline.runner.launch_options import LaunchOptions
from pipeline.submission import batch_script, local, slurm_queries, slurm_submit
from pipeline.submission.plan import PlannedArray
from pipeline.submission.progress import read_progress
from pipeline.system.errors import CommandError, log_line, pluralize

FIRST_POLL_S, LAST_POLL_S = 2, 30  # the interval doubles up to the last: frequent queries load the controller


def stage_data(todo: Sequence[Spec], folder: Path) -> None:
    """Check that the data of the points exists, and download CIFAR-10 if it does not: jobs never download.

    Raises CommandError.
    """
    reading = [spec for spec in todo if spec.reads_data]
    num_images = max((spec.num_samples for spec in reading if spec.dataset == "imagefolder"), default=None)
    try:
        if any(spec.dataset == "cifar10" for spec in reading) and staging.stage_cifar10(folder):
            log_line(f"CIFAR-10 staged in {folder}.")
        if num_images is not None:
            staging.require_images(staging.require_folder(folder), num_images)
    except staging.DataNotStaged as error:
        raise CommandError(str(error)) from error


def run_locally(experiment: Experiment, elements: Sequence[Sequence[Spec]], options: LaunchOptions) -> None:
    """Run the elements one after another on this machine, as one submission."""
    if not elements:
        return
    submission = start_submission(uuid.uuid4().hex, "local")
    with experiment.edit_manifest() as manifest:
        manifest.submissions.append(submission)
    local.run_elements(experiment, submission, elements, options)


def submit_arrays(
    experiment: Experiment, arrays: Sequence[PlannedArray], prologue: bytes | None, options: LaunchOptions
) -> None:
    """Submit every array. The manifest lists all arrays before, and the job id of each one after it is submitted.

    Raises CommandError; the manifest then holds the arrays that Slurm has or may have.
    """
    if not arrays:
        return
    submission = start_submission(uuid.uuid4().hex, "slurm")
    folder = experiment.log_folder(submission.id)
    folder.mkdir(mode=0o700, parents=True)
    frozen = folder / "prologue.sh" if prologue is not None else None
    if frozen is not None and prologue is not None:
        frozen.write_bytes(prologue)
        submission.prologue_sha256 = hashlib.sha256(prologue).hexdigest()
    setup = batch_script.setup_lines(submission.launch_id_prefix, frozen)
    notices = dict.fromkeys(notice for array in arrays for notice in array.request.notices)
    for notice in notices:
        log_line(f"Notice: {notice}.")
    add_planned_arrays(experiment, submission, arrays)
    for number, (planned, array) in enumerate(zip(arrays, tuple(submission.arrays), strict=True)):
        try:
            array.job_id = slurm_submit.submit_array(experiment, submission, array, planned.request, setup, options)
        except CommandError as refusal:
            may_be_accepted = isinstance(refusal, slurm_submit.SubmissionUnconfirmed)
            del submission.arrays[number + may_be_accepted :]
            raise
        finally:
            write_submission(experiment, submission)
        count, num_points = len(array.elements), sum(len(element) for element in array.elements)
        points = f", {num_points} points" if num_points > count else ""
        print(f"array {array.job_id}: {pluralize(count, 'element')}, {planned.shape}{points}", flush=True)


def recover_unnamed_arrays(experiment: Experiment) -> None:
    """Find the job ids of arrays whose driver died before it stored them; remove arrays that Slurm does not know.

    A removed array cannot run any more, even if an sbatch that outlived its driver submits it now.
    Raises CommandError (scheduler) if there are arrays without a job id and Slurm does not answer.
    """
    manifest = experiment.read_manifest()
    arrays = [array for submission in manifest.submissions for array in submission.arrays] if manifest else []
    names = {array.job_name for array in arrays if array.job_id is None}
    if not names:
        return
    found = slurm_queries.find_jobs_named(names)
    with experiment.edit_manifest() as manifest:
        for submission in manifest.submissions:
            for array in submission.arrays:
                if array.job_id is None:
                    folder = experiment.log_folder(submission.id) / array.job_name
                    array.job_id = found.get(array.job_name) or slurm_submit.withdraw_array(folder)
            submission.arrays = [array for array in submission.arrays if array.job_id is not None]


def add_planned_arrays(experiment: Experiment, submission: Submission, arrays: Sequence[PlannedArray]) -> None:
    """Write the arrays into the manifest before they are submitted. Their names find them if this process dies."""
    for number, planned in enumerate(arrays):
        elements = [[spec.run_id() for spec in element] for element in planned.elements]
        name = slurm_submit.job_name(experiment.folder.name, submission.id, number)
        submission.arrays.append(SlurmArray(name, elements, is_array=len(elements) > 1))
    write_submission(experiment, submission)


def write_submission(experiment: Experiment, submission: Submission) -> None:
    """Write the submission into the manifest, in place of its earlier state."""
    with experiment.edit_manifest() as manifest:
        manifest.submissions = [*(other for other in manifest.submissions if other.id != submission.id), submission]


def count_gaps(experiment: Experiment, specs: Sequence[Spec]) -> int:
    """Return the number of points whose records hold no result."""
    attempts = record_store.load_attempts_by_point(experiment.records_folder, {spec.run_id() for spec in specs})
    return resolve_outcomes(specs, chain.from_iterable(attempts), ()).coverage.num_gaps


def wait_until_finished(experiment: Experiment) -> None:
    """Wait until no point is queued, running or settling, and log the states when they change."""
    poll_s, last_summary = FIRST_POLL_S, ""
    while True:
        manifest = experiment.read_manifest()
        assert manifest is not None, "the submission wrote it"
        points = read_progress(experiment, manifest)
        counts = Counter(point.state.word for point in points)
        summary = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        if summary != last_summary:
            log_line(summary)
            last_summary = summary
        if not any(point.is_in_flight or point.state.word in ("settling", "unknown") for point in points):
            return
        time.sleep(poll_s)
        poll_s = min(LAST_POLL_S, poll_s * 2)
