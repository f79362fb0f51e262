"""Cancel what is queued or running of an experiment in Slurm.

    python -m pipeline.cancel outputs/scaling
    python -m pipeline.cancel outputs/scaling --only RUN_ID

Records stay, and the same submit runs again what was cancelled.
Exit codes: 0 success, also if nothing was queued or running; 2 a folder cannot be read, a driver is at work in it, or a
job has points that --only does not name; 3 no experiment, or an unknown RUN_ID; 4 Slurm refuses or does not answer.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.system import errors
from pipeline.system.command_line import build_parser
from pipeline.system.errors import CommandError, log_line, pluralize, replace_control_characters

if TYPE_CHECKING:
    from pipeline.experiment.folder import Experiment


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("cancel", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    parser.add_argument(
        "--only", action="append", default=[], metavar="RUN_ID", help="only the job of this point; may be repeated"
    )
    return parser.parse_args()


def main() -> int:
    """Cancel the jobs, and print a line for each."""
    arguments = parse_arguments()
    # imported after the command line is parsed, so that --help answers at once
    from pipeline.experiment.folder import find_experiments

    unreadable: list[OSError] = []
    experiments = find_experiments(arguments.folder, unreadable.append)
    manifests = {name: manifest for name, found in experiments.items() if (manifest := found.read_manifest())}
    if not manifests:
        problem = f"no manifest under {arguments.folder}; submit an experiment first."
        raise CommandError(problem, errors.EXIT_NOTHING_FOUND)
    known = {spec.run_id() for manifest in manifests.values() for spec in manifest.points}
    if unknown := [run_id for run_id in arguments.only if run_id not in known]:
        problem = f"--only {unknown[0]}: no experiment under {arguments.folder} has this point"
        raise CommandError(f"{problem}; take a run id that status prints.", errors.EXIT_NOTHING_FOUND)
    num_cancelled = 0
    for name, manifest in manifests.items():
        run_ids = {spec.run_id() for spec in manifest.points}
        only = [run_id for run_id in arguments.only if run_id in run_ids]
        if only or not arguments.only:
            num_cancelled += cancel_experiment(name, experiments[name], only)
    if num_cancelled:
        log_line(f"{pluralize(num_cancelled, 'job')} cancelled; the same submit runs their points again.")
    else:
        print(f"Nothing {'of these points ' if arguments.only else ''}is queued or running in Slurm.")
    return errors.EXIT_USAGE if unreadable else errors.EXIT_OK


def cancel_experiment(name: str, experiment: "Experiment", only: list[str]) -> int:
    """Cancel the jobs of one experiment, or those of the points in `only`; return their number. Raises CommandError.

    The lock keeps a driver from submitting more meanwhile. A driver that runs points on this machine holds it too.
    """
    from pipeline.submission.cancel_jobs import cancel_jobs, find_unfinished_jobs, select_jobs
    from pipeline.submission.read_progress import job_text

    manifest = experiment.read_manifest()
    has_arrays = manifest is not None and any(submission.arrays for submission in manifest.submissions)
    if not has_arrays and not experiment.is_being_submitted():
        return 0
    with experiment.submission_lock():
        manifest = experiment.read_manifest()
        assert manifest is not None, "the caller read it"
        jobs = find_unfinished_jobs(experiment, manifest)
        if only:
            jobs = select_jobs(jobs, only)
        if jobs:
            # without --only whole arrays, in place of up to thousands of elements
            cancel_jobs({job.key if only else (job.key[0], None) for job in jobs})
    for job in jobs:
        line = f"cancelled {name} job {job_text(job.key)} ({job.state.lower()}): {', '.join(job.run_ids)}"
        print(replace_control_characters(line))
    return len(jobs)


if __name__ == "__main__":
    errors.run_command(main)
