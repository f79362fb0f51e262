"""Run the points on this machine: one process for each element, one element after another, with progress."""

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import start_submission
from pipeline.experiment.point_label import point_labels
from pipeline.experiment.spec import Spec
from pipeline.runner.launch_options import LaunchOptions, launch_command, python_variables
from pipeline.submission.gpu_hours_estimate import find_comparable_attempts, predict_durations_s
from pipeline.submission.progress_display import ProgressDisplay
from pipeline.submission.read_progress import read_log_tail
from pipeline.system.host import die_with_parent, gpu_names

RECORD_POLL_S = 0.2


def run_elements(experiment: Experiment, elements: Sequence[Sequence[Spec]], options: LaunchOptions) -> None:
    """Run the elements one after another, as one submission, and show the progress of every point."""
    if not elements:
        return
    submission = start_submission(uuid.uuid4().hex, "local")
    with experiment.edit_manifest() as manifest:
        manifest.submissions.append(submission)
        labels = point_labels(manifest.points)
    folder = experiment.log_folder(submission.id)
    folder.mkdir(mode=0o700, parents=True)
    specs, gpus = [spec for element in elements for spec in element], gpu_names()
    gpu_model = gpus.pop() if len(gpus) == 1 else None
    earlier = find_comparable_attempts(specs, experiment.folder.parent, gpu_model)
    progress = ProgressDisplay(specs, labels, predict_durations_s(specs, earlier))
    for element in elements:
        num_before = {
            spec: len(record_store.load_attempts(experiment.records_folder, spec.run_id())) for spec in element
        }
        log = open_log(folder, element)
        with launch_process(experiment, element, log, options) as process:
            for spec in element:
                progress.begin(spec)
                while process.poll() is None and latest_status_line(experiment, spec, num_before[spec]) is None:
                    if progress.is_terminal:
                        progress.show_epochs(spec, read_log_tail(log, since=f"{spec.run_id()}: starting"))
                    time.sleep(RECORD_POLL_S)
                progress.end(spec, latest_status_line(experiment, spec, num_before[spec]) or say_lost(log))


def say_lost(log: Path) -> str:
    """Return that a point left no record, with the error at the end of its log if there is one."""
    last = read_log_tail(log).rstrip().rpartition("\n")[2]
    return f"no record; see {log}" + (f" ({last})" if last.startswith("error: ") else "")


def open_log(folder: Path, element: Sequence[Spec]) -> Path:
    """Return the log of an element, named after its first point, with a link for each other point."""
    log, *others = (folder / f"{spec.run_id()}.log" for spec in element)
    for other in others:
        try:
            other.symlink_to(log.name)
        except OSError:  # a file system without links
            other.write_text(f"see {log.name}\n")
    return log


@contextlib.contextmanager
def launch_process(
    experiment: Experiment, element: Sequence[Spec], log: Path, options: LaunchOptions
) -> Iterator[subprocess.Popen[bytes]]:
    """Launch the points and wait for them. An interrupt of this process ends them first."""
    command = launch_command(experiment.manifest_path, [spec.run_id() for spec in element], options)
    inherited = ("PIPELINE_LAUNCH_ID", "SLURM_NODEID")  # if this `submit` runs inside a job
    environ = {key: value for key, value in os.environ.items() if key not in inherited} | python_variables()
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ, preexec_fn=die_with_parent)
        try:
            yield process
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def latest_status_line(experiment: Experiment, spec: Spec, num_before: int) -> str | None:
    attempts = record_store.load_attempts(experiment.records_folder, spec.run_id())[num_before:]
    return attempts[-1].status_line() if attempts else None
