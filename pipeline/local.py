"""Points on this machine: one after another, each a process of its own, with progress."""

import os
import subprocess
import time
from pathlib import Path

from pipeline import records
from pipeline.command import ROOT, LaunchOptions, launch_command
from pipeline.exits import talk
from pipeline.experiment import Experiment, Submission
from pipeline.here import die_with_parent
from pipeline.spec import Spec


def run_points(experiment: Experiment, submission: Submission, points: list[Spec], options: LaunchOptions) -> None:
    """Run every point to its end; how each ended is in its record, and a line of progress says it."""
    folder = experiment.log_folder(submission.id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number, spec in enumerate(points, 1):
        started_s = time.monotonic()
        progress = f"[{number}/{len(points)}] {spec.run_id()}"
        talk(f"{progress}: running")
        run_point(experiment, spec, folder / f"{spec.run_id()}.log", options)
        talk(f"{progress}: {how_it_ended(experiment, spec)} after {time.monotonic() - started_s:.0f} s")


def run_point(experiment: Experiment, spec: Spec, log: Path, options: LaunchOptions) -> None:
    """Launch one point and wait; an interruption reaches the point first, and then us."""
    command = launch_command(experiment.manifest, [spec.run_id()], options)
    inherited = ("PIPELINE_LAUNCH_ID", "SLURM_NODEID")  # of a job that this driver may be running in
    environ = {key: value for key, value in os.environ.items() if key not in inherited}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ, preexec_fn=die_with_parent)
        try:
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def how_it_ended(experiment: Experiment, spec: Spec) -> str:
    """The status of the point's latest attempt, by its record and nothing else."""
    attempts = records.read_attempts(experiment.records, spec.run_id())
    return attempts[-1].ending() if attempts else "no record; see its log"
