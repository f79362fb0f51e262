"""Take configurations out of an experiment, with their records: they are no longer expected.

    python -m pipeline.drop outputs/smoke --only batch_size_per_gpu=64 max_steps=3
    python -m pipeline.drop outputs/smoke --only RUN_ID

Nothing is deleted. Records, step times, weights and traces move into dropped/1/ in the experiment's folder, those of
the next call into dropped/2/, each under its former path. Moved back, they count again once `submit` expects their
configurations. Logs stay.
Exit codes: 0 success; 2 an unknown axis or value, the folder cannot be read or belongs to another user, a submit
process uses it, or a configuration is queued or running; 3 no experiment, or --only selects no configuration; 4 Slurm
does not answer and a configuration may still run.
"""

import argparse
import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pipeline.plan.grid import matches, parse_overrides, place_models
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, Manifest, find_experiments
from pipeline.submission.plan import command
from pipeline.submission.read_progress import read_progress, refusal_of_unread_state
from pipeline.system import errors, files
from pipeline.system.command_line import build_parser
from pipeline.system.errors import EXIT_NOTHING_FOUND, CommandError, log_line, pluralize, print_text

CLAIM = ".claim-"  # begins the name of the empty file that reserves the name of a record


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("drop", __doc__)
    parser.add_argument("folder", type=Path, help="the folder of one experiment")
    only = "configurations with these values of all these axes, as for --set of submit; or run ids, which narrow them"
    words = "AXIS=VALUE[,VALUE]|RUN_ID"
    parser.add_argument("--only", nargs="+", action="extend", required=True, metavar=words, help=only)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    experiment = Experiment(arguments.folder)
    find_experiments(experiment.folder)  # refuses what is no folder
    if experiment.read_manifest() is None:
        problem = f"no manifest in {experiment.folder}; give the folder of one experiment that was submitted."
        raise CommandError(problem, EXIT_NOTHING_FOUND)
    experiment.refuse_manifest_of_another_user()
    with experiment.submission_lock():
        manifest = experiment.read_manifest()
        assert manifest is not None
        dropped = {spec.run_id() for spec in select_points(experiment, manifest, arguments.only)}
        refuse_under_way(experiment, manifest, dropped)
        with experiment.edit_manifest() as manifest:
            target, num_moved = move_files(experiment, dropped)
            manifest.points = [spec for spec in manifest.points if spec.run_id() not in dropped]
    print_text("\n".join(f"dropped {run_id}" for run_id in sorted(dropped)))
    moved = f", {num_moved} of their files and folders moved into {target}" if num_moved else ""
    log_line(f"{pluralize(len(dropped), 'configuration')} dropped, {len(manifest.points):,} left{moved}.")
    log_line(f"Next: {command('collect', experiment.folder)}")
    return errors.EXIT_OK


def select_points(experiment: Experiment, manifest: Manifest, only: Sequence[str]) -> list[Spec]:
    """Return the expected points that have all values of `only` and are one of its run ids, if it has any.

    Raises CommandError: "usage" for an unknown axis or value, "nothing found" if a run id is unknown or none is left.
    """
    wanted = parse_overrides([word for word in only if "=" in word], "--only")
    place_models(wanted, Path.cwd())
    run_ids = [word for word in only if "=" not in word]
    known = {spec.run_id(): spec for spec in manifest.points}
    see = f"see {command('status', experiment.folder)} --json"
    if unknown := [run_id for run_id in run_ids if run_id not in known]:
        raise CommandError(
            f"--only names {unknown[0]!r}, which is no expected configuration; {see}.", EXIT_NOTHING_FOUND
        )
    found = [known[run_id] for run_id in run_ids or known if matches(known[run_id], wanted)]
    if not found:
        raise CommandError(f"--only selects no configuration of {experiment.folder}; {see}.", EXIT_NOTHING_FOUND)
    return found


def refuse_under_way(experiment: Experiment, manifest: Manifest, run_ids: Collection[str]) -> None:
    """Raise CommandError for a point that is queued or running, or may be: it would leave a record of no point."""
    for progress in read_progress(experiment, manifest, holds_lock=True):
        run_id, state = progress.spec.run_id(), progress.state
        if run_id in run_ids and progress.is_in_flight:
            cure = f"wait for it, or end it with {command('cancel', experiment.folder)} --only {run_id}"
            raise CommandError(f"{run_id} is {(progress.rerun or state).word}; {cure}.")
        if run_id in run_ids and (refusal := refusal_of_unread_state(progress)) is not None:
            raise refusal


def move_files(experiment: Experiment, run_ids: Collection[str]) -> tuple[Path, int]:
    """Move what these points have left into a new folder of dropped/. Return that folder, and the number moved."""
    numbers = (experiment.dropped / str(number) for number in itertools.count(1))
    target = next(folder for folder in numbers if not folder.exists())
    sources = list(files_of(experiment, run_ids))
    for source in sources:
        moved = target / source.relative_to(experiment.folder)
        files.make_folder(moved.parent)
        source.rename(moved)
    return target, len(sources)


def files_of(experiment: Experiment, run_ids: Collection[str]) -> Iterator[Path]:
    """Yield the records with the files beside them and their claims, the traces, and what launches have left in logs/.

    A result there that a killed launcher did not publish would be published by the next `submit`.
    """
    beside = (folder.glob("*") for folder in (experiment.records_folder, experiment.traces))
    for path in (*itertools.chain(*beside), *experiment.launch_folders()):
        if path.name.removeprefix(CLAIM).partition(".")[0] in run_ids:
            yield path


if __name__ == "__main__":
    errors.run_command(main)
