"""Command-line arguments that several commands share."""

import argparse
import os
from pathlib import Path

from pipeline.command import LaunchOptions

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


def launch_options(arguments: argparse.Namespace, point_limit_s: int | None) -> LaunchOptions:
    """What the launches are told."""
    return LaunchOptions(data_folder(arguments), arguments.keep_trace, arguments.rerun, point_limit_s)


def data_folder(arguments: argparse.Namespace) -> Path:
    """The data folder that was named, or the default one."""
    named: Path | None = arguments.data
    return named or Path(os.environ.get("PIPELINE_DATA") or DEFAULT_DATA)
