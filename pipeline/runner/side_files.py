"""Step times, weights and traces: the ranks write them into the folder of the launch; their place is beside the record.

The launcher moves them once it has published an ok record. The next `submit` or `launch` of the experiment does it for
a launcher that was killed in between.
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
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


def recover_side_files(experiment: Experiment) -> None:
    """Move the side files of launchers that published an ok record and were killed before they moved them.

    The launch id, in the record and in the folder's name, pairs them. A launcher that is about to move its files itself
    loses nothing: a rename is atomic, and whoever comes second finds no file.
    """
    left: dict[str, dict[str, RankFiles]] = {}
    for folder in launch_folders(experiment):
        run_id, _, launch_id = folder.name.partition(".")
        rank_files = RankFiles(folder)
        with contextlib.suppress(PermissionError):  # of another member of the group
            if any(path.exists() for path in rank_files.side_files()):
                left.setdefault(run_id, {})[launch_id] = rank_files
    attempts = record_store.load_attempts_by_point(experiment.records_folder, left) if left else []
    for record in itertools.chain(*attempts):
        if record.status == "ok" and record.launch_id in left[record.run_id]:
            path = experiment.records_folder / f"{record.run_id}.{record.attempt}.json"
            moved = move_side_files(experiment, left[record.run_id][record.launch_id], path)
            if moved:
                log_line(f"{record.run_id}: its launcher was killed; {', '.join(moved)} moved beside the record.")


def private_launch_folders(experiment: Experiment) -> Iterator[Path]:
    """Yield the folders of launches that are private, if the scratch folder is private, too."""
    for folder in launch_folders(experiment):
        with contextlib.suppress(OSError):
            if files.is_private(folder.parent.lstat()) and files.is_private(folder.lstat()):
                yield folder


def launch_folders(experiment: Experiment) -> Iterator[Path]:
    """Yield the folders of launches; none through a link."""
    if experiment.scratch_folder.is_symlink():
        return
    with contextlib.suppress(OSError), os.scandir(experiment.scratch_folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)
