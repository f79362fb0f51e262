"""Points on this machine: element after element, each a process of its own, with progress."""

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import Submission
from pipeline.experiment.spec import Spec
from pipeline.runner.launch_options import PYTHONPATH_ROOT, LaunchOptions, launch_command
from pipeline.system.errors import log_line
from pipeline.system.host import die_with_parent

RECORD_POLL_S = 0.2


def run_elements(
    experiment: Experiment, submission: Submission, elements: Sequence[Sequence[Spec]], options: LaunchOptions
) -> None:
    """Run every point to its end; how each ended is in its record, and a line of progress says it."""
    folder = experiment.log_folder(submission.id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    numbers, total = itertools.count(1), sum(len(element) for element in elements)
    for element in elements:
        num_before = {spec: num_attempts(experiment, spec) for spec in element}
        log = open_log(folder, element)
        with launch_process(experiment, element, log, options) as process:
            for spec in element:
                started_s = time.monotonic()
                progress = f"[{next(numbers)}/{total}] {spec.run_id()}"
                log_line(f"{progress}: running")
                while process.poll() is None and num_attempts(experiment, spec) == num_before[spec]:
                    time.sleep(RECORD_POLL_S)
                ended = latest_status_line(experiment, spec, num_before[spec]) or f"no record; see {log}"
                log_line(f"{progress}: {ended} after {time.monotonic() - started_s:.0f} s")


def open_log(folder: Path, element: Sequence[Spec]) -> Path:
    """The log of an element, which has the names of all its points."""
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
    """Launch the points and wait; an interruption reaches them first, and then us."""
    run_ids = [spec.run_id() for spec in element]
    command = launch_command(experiment.manifest_path, run_ids, options.for_element(len(run_ids)))
    inherited = ("PIPELINE_LAUNCH_ID", "SLURM_NODEID")  # of a job that this driver may be running in
    environ = {key: value for key, value in os.environ.items() if key not in inherited}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PYTHONPATH_ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ, preexec_fn=die_with_parent)
        try:
            yield process
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def num_attempts(experiment: Experiment, spec: Spec) -> int:
    """How many records the point has."""
    return len(record_store.load_attempts(experiment.records_folder, spec.run_id()))


def latest_status_line(experiment: Experiment, spec: Spec, num_before: int) -> str | None:
    """The status of the point's latest attempt past the earlier ones, by its record and nothing else; None without."""
    attempts = record_store.load_attempts(experiment.records_folder, spec.run_id())[num_before:]
    return attempts[-1].status_line() if attempts else None
