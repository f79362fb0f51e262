"""Carry a plan out: stage the data, then submit its arrays or run its points here, and wait for them."""

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

FIRST_POLL_S, LAST_POLL_S = 2, 30  # asking oftener annoys those who run the cluster


def stage_data(todo: Sequence[Spec], folder: Path) -> None:
    """Check that the data of the points is there, and fetch CIFAR-10 where it is not: jobs never download."""
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
    """Run the elements one after another on this machine, as a submission of their own."""
    if not elements:
        return
    submission = start_submission(uuid.uuid4().hex, "local")
    with experiment.edit_manifest() as manifest:
        manifest.submissions.append(submission)
    local.run_elements(experiment, submission, elements, options)


def submit_arrays(
    experiment: Experiment, arrays: Sequence[PlannedArray], prologue: bytes | None, options: LaunchOptions
) -> None:
    """Submit every array, all announced in the manifest before and each named in it after. Raises CommandError."""
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
            may_be_there = isinstance(refusal, slurm_submit.Unanswered)
            del submission.arrays[number + may_be_there :]
            raise
        finally:
            write_submission(experiment, submission)
        count, num_points = len(array.elements), sum(len(element) for element in array.elements)
        points = f", {num_points} points" if num_points > count else ""
        print(f"array {array.job_id}: {pluralize(count, 'element')}, {planned.shape}{points}", flush=True)


def recover_unnamed_arrays(experiment: Experiment) -> None:
    """Find the arrays that an earlier driver announced and did not name; forget those that Slurm does not know.

    None of the latter can run afterwards, also where an sbatch that outlived its driver submits it now.
    Raises CommandError (scheduler) where there are some and Slurm cannot be asked.
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
                    array.job_id = found.get(array.job_name) or slurm_submit.withdraw(folder)
            submission.arrays = [array for array in submission.arrays if array.job_id is not None]


def add_planned_arrays(experiment: Experiment, submission: Submission, arrays: Sequence[PlannedArray]) -> None:
    """Write down the arrays before they are submitted: if we die in between, their names find them again."""
    for number, planned in enumerate(arrays):
        elements = [[spec.run_id() for spec in element] for element in planned.elements]
        name = slurm_submit.job_name(experiment.folder.name, submission.id, number)
        submission.arrays.append(SlurmArray(name, elements, is_array=len(elements) > 1))
    write_submission(experiment, submission)


def write_submission(experiment: Experiment, submission: Submission) -> None:
    """Put the submission as it is now into the manifest."""
    with experiment.edit_manifest() as manifest:
        manifest.submissions = [*(other for other in manifest.submissions if other.id != submission.id), submission]


def count_gaps(experiment: Experiment, specs: Sequence[Spec]) -> int:
    """How many of the points have no result by their records."""
    attempts = record_store.load_attempts_by_point(experiment.records_folder, {spec.run_id() for spec in specs})
    return resolve_outcomes(specs, chain.from_iterable(attempts), ()).coverage.num_gaps


def wait_until_finished(experiment: Experiment) -> None:
    """Return when no point is queued, running or settling."""
    poll_s, last = FIRST_POLL_S, ""
    while True:
        manifest = experiment.read_manifest()
        assert manifest is not None, "it was written above"
        parts = read_progress(experiment, manifest)
        counts = Counter(part.state.word for part in parts)
        now = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        if now != last:
            log_line(now)
            last = now
        if not any(part.is_in_flight or part.state.word in ("settling", "unknown") for part in parts):
            return
        time.sleep(poll_s)
        poll_s = min(LAST_POLL_S, poll_s * 2)
