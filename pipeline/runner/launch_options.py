"""How points are launched: the options that commands share, and the command of a process that runs points."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

PYTHONPATH_ROOT = (
    Path(__file__).resolve().parent.parent.parent
)  # goes on the process's PYTHONPATH, whatever folder it starts in


class LaunchOptions(NamedTuple):
    """What a launch is told: where the data lies, whether traces are kept, what runs again.

    `point_limit_s` holds for each point of an element that runs several.
    """

    data: Path
    keep_trace: bool = False
    rerun: str | None = None
    point_limit_s: int | None = None

    def for_element(self, num_points: int) -> "LaunchOptions":
        """The options of an element with so many points: alone, a point has its element's own limit."""
        limit_s = self.point_limit_s if num_points > 1 else None
        return self._replace(point_limit_s=limit_s)


def launch_command(manifest: Path, run_ids: Sequence[str], options: LaunchOptions) -> list[str]:
    """What an array element, or this machine, runs for these points, as words."""
    command = [sys.executable, "-u", "-m", "pipeline.launch", "--manifest", str(manifest.resolve())]
    for run_id in run_ids:
        command += ["--run-id", run_id]
    command += ["--data", str(options.data.resolve())]
    command += ["--rerun", options.rerun] if options.rerun else []
    command += ["--point-limit-s", str(options.point_limit_s)] if options.point_limit_s is not None else []
    return command + ["--keep-trace"] * options.keep_trace


def exec_element(manifest: Path, elements: Sequence[Sequence[str]], options: LaunchOptions) -> NoReturn:
    """Become the launch of the element that this process is of its array; called in the job."""
    index = int(os.environ["SLURM_ARRAY_TASK_ID"]) if len(elements) > 1 else 0  # one element is a plain job
    command = launch_command(manifest, elements[index], options.for_element(len(elements[index])))
    os.execvp(command[0], command)


DEFAULT_DATA = "data"


RERUN_CHOICES = ("failed", "oom", "all")


def add_point_arguments(parser: argparse.ArgumentParser) -> None:
    """What changes points, where they are written and where their data lies."""
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="AXIS=VALUE[,VALUE]",
        help="replace an axis in every block of the grid",
    )
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="the parent of the experiment's folder")
    parser.add_argument(
        "--keep-trace", action="store_true", help="keep the profiler's traces of points that measure communication"
    )
    parser.add_argument("--data", type=Path, help="the data folder (default: PIPELINE_DATA, else data)")


def read_launch_options(arguments: argparse.Namespace, point_limit_s: int | None) -> LaunchOptions:
    """What the launches are told."""
    return LaunchOptions(choose_data_folder(arguments), arguments.keep_trace, arguments.rerun, point_limit_s)


def choose_data_folder(arguments: argparse.Namespace) -> Path:
    """The data folder that was named, or the default one."""
    named: Path | None = arguments.data
    return named or Path(os.environ.get("PIPELINE_DATA") or DEFAULT_DATA)
