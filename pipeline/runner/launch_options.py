"""Options that commands share to launch points, the command line of a launch, and the task list of an array.

`submit` writes the task list, and in the job each element runs its own part. It lies in the private folder of its
submission. Its SHA-256 stands in the batch script, of which Slurm keeps its own copy, so a list that somebody has
changed since, or another folder in its place, is refused on each node.
"""

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from pipeline.plan.spec import Spec
from pipeline.records.folder import DEFAULT_OUTPUTS
from pipeline.system import files
from pipeline.system.errors import CommandError

# the PYTHONPATH of what this project starts, which then finds the package from any working directory
PYTHONPATH_ROOT = Path(__file__).resolve().parent.parent.parent

Rerun = Literal["failed", "oom", "all"]


class LaunchOptions(NamedTuple):
    """The options of a launch: the data folder, if traces are kept, and the kind of recorded points to run again.

    `modules` is the folder of the modules of the user's models, that of the grid file.
    `point_limit_s` limits each point of an element that runs several; a single point has the job's limit alone.
    `num_threads` is of each process on the CPU.
    """

    data: Path
    keep_trace: bool = False
    rerun: Rerun | None = None
    point_limit_s: int | None = None
    num_threads: int = 1
    modules: Path | None = None


def python_variables() -> dict[str, str]:
    """Return the variables of a Python that this project starts: it finds this package, then the user's PYTHONPATH.

    It imports nothing from the current folder, and neither do the processes that it starts (PYTHONSAFEPATH).
    """
    users = os.environ.get("PYTHONPATH")
    folders = [str(PYTHONPATH_ROOT), *(users.split(os.pathsep) if users else [])]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(folders)), "PYTHONSAFEPATH": "1"}


def launch_command(manifest: Path, run_ids: Sequence[str], options: LaunchOptions) -> list[str]:
    """Return the command of an element that runs these points, as a list of words."""
    command = [sys.executable, "-P", "-u", "-m", "pipeline.launch", "--manifest", str(manifest.resolve())]
    for run_id in run_ids:
        command += ["--run-id", run_id]
    command += ["--data", str(options.data.resolve())]
    if options.modules is not None:
        command += ["--modules", str(options.modules.resolve())]
    if options.rerun:
        command += ["--rerun", options.rerun]
    if options.num_threads != 1:
        command += ["--num-threads", str(options.num_threads)]
    if options.point_limit_s is not None and len(run_ids) > 1:
        command += ["--point-limit-s", str(options.point_limit_s)]
    if options.keep_trace:
        command.append("--keep-trace")
    return command


def add_point_arguments(points: argparse._ActionsContainer, folders: argparse._ActionsContainer) -> None:
    """Add the options that change and select the points, name their data folder and say what is written where."""
    add_set_argument(points, "replace an axis in every block of the grid")
    again = "also run configurations whose record has this status; all: run every one again"
    points.add_argument("--rerun", choices=get_args(Rerun), help=again)
    folders.add_argument("--outputs", type=Path, default=DEFAULT_OUTPUTS, help="the parent of the experiment's folder")
    folders.add_argument(
        "--keep-trace", action="store_true", help="keep the profiler's traces where communication is measured"
    )
    add_data_argument(folders)


def add_set_argument(parser: argparse._ActionsContainer, meaning: str) -> None:
    changes = "AXIS=VALUE[,VALUE]"
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar=changes, help=meaning
    )


def add_data_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("PIPELINE_DATA") or "data"),
        help="the data folder (default: the environment variable PIPELINE_DATA, else data)",
    )


def read_launch_options(
    arguments: argparse.Namespace, point_limit_s: int | None, num_threads: int, modules: Path | None
) -> LaunchOptions:
    data, modules = arguments.data.resolve(), modules.resolve() if modules else None
    return LaunchOptions(data, arguments.keep_trace, arguments.rerun, point_limit_s, num_threads, modules)


MAX_FILE_BYTES = 256_000_000
VISIBLE_LIMIT_S = 30  # a network file system may show a new name this late (nfs(5): acdirmin)
VISIBLE_POLL_S = 0.2


class TaskList(msgspec.Struct, frozen=True):
    """The points of each element, and how they are launched."""

    elements: list[list[Spec]]
    options: LaunchOptions

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)  # of paths

    def points_of(self, index: int) -> list[Spec]:
        """Return the points of an element. Raises CommandError for an element that the array does not have."""
        if not 0 <= index < len(self.elements):
            last = len(self.elements) - 1
            raise CommandError(f"--index {index}, but the elements of this array are 0 to {last}; submit again.")
        return self.elements[index]


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def read_task_list(path: Path, sha256: str) -> TaskList:
    """Return the task list. Raises CommandError if `submit` did not write this file, or has withdrawn it."""
    deadline_s = time.monotonic() + VISIBLE_LIMIT_S
    while not os.path.lexists(path) and time.monotonic() < deadline_s:
        time.sleep(VISIBLE_POLL_S)
    try:
        raw = files.read_bounded(path, MAX_FILE_BYTES)
    except files.UnreadableFile as error:
        raise CommandError(f"{path} {error}, so it is not known what to run; submit again.") from error
    if digest(raw) != sha256:
        raise CommandError(f"{path} was changed after submit wrote it; see who may write there, and submit again.")
    return msgspec.json.decode(raw, type=TaskList, dec_hook=lambda kind, text: kind(text))
