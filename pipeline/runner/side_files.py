"""Step times, weights and traces: the ranks write them into the folder of the launch; their place is beside the record.

The launcher moves them once it has published an ok record. The next `submit` or `launch` of the experiment does it for
a launcher that was killed in between.
"""

import contextlib
import itertools
import stat
from collections.abc import Iterator
from pathlib import Path

from pipeline.records import store
from pipeline.records.folder import Experiment
from pipeline.runner.rank_files import RankFiles
from pipeline.system import files
from pipeline.system.errors import describe_os_error, log_line


def move_side_files(experiment: Experiment, rank_files: RankFiles, record_path: Path) -> list[str]:
    """Move the side files that exist beside the record, and return their names. Say which ones cannot be moved."""
    targets = (
        record_path.with_suffix(".steps.npz"),
        record_path.with_suffix(".weights.npz"),
        experiment.traces / record_path.stem,
    )
    moved = []
    for source, target in zip(rank_files.side_files(), targets, strict=True):
        try:
            if source.exists() and not source.is_symlink():
                close_to_others(source)
                files.make_folder(target.parent)
                source.rename(target)
                moved.append(source.name)
        except FileNotFoundError:
            continue  # another process has just moved it
        except OSError as error:
            log_line(f"{source} stays there, not beside the record: {describe_os_error(error)}.")
    return moved


def close_to_others(path: Path) -> None:
    """Take away the right of others to write to a file, or to a folder and its files: a user's code may set umask 0."""
    for found in (path, *path.glob("*")):
        if not found.is_symlink():
            found.chmod(stat.S_IMODE(found.stat().st_mode) & ~0o022)


@contextlib.contextmanager
def open_launches(experiment: Experiment) -> Iterator[list[RankFiles]]:
    """Yield the files of this user's launches that are still there, below the descriptors of their private folders."""
    with contextlib.ExitStack() as stack:
        found = []
        for parent, folders in itertools.groupby(experiment.launch_folders(), key=lambda folder: folder.parent):
            with contextlib.suppress(OSError):  # a colleague's
                private = stack.enter_context(files.private_folder(parent))
                found += [RankFiles(private / folder.name) for folder in folders]
        yield found


def recover_side_files(experiment: Experiment) -> None:
    """Move the side files of launchers that published an ok record and were killed before they moved them.

    The launch id, in the record and in the folder's name, pairs them. A launcher that is about to move its files itself
    loses nothing: a rename is atomic, and whoever comes second finds no file.
    """
    with open_launches(experiment) as launches:
        left = {
            (launch.run_id, launch.launch_id): launch
            for launch in launches
            if any(path.exists() for path in launch.side_files())
        }
        run_ids = {run_id for run_id, _ in left}
        attempts = store.load_attempts(experiment.records_folder, run_ids) if left else []
        for record in attempts:
            launch = left.get((record.run_id, record.launch_id))
            if record.status == "ok" and launch is not None:
                path = experiment.records_folder / f"{record.run_id}.{record.attempt}.json"
                if moved := move_side_files(experiment, launch, path):
                    log_line(f"{record.run_id}: its launcher was killed; {', '.join(moved)} moved beside the record.")
