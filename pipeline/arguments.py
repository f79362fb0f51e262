"""Command-line arguments that several commands share."""

import argparse
import os
from pathlib import Path

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
    parser.add_argument("--data", type=Path, help="the data folder (default: PIPELINE_DATA, else data)")


def data_folder(arguments: argparse.Namespace) -> Path:
    """The data folder that was named, or the default one."""
    named: Path | None = arguments.data
    return named or Path(os.environ.get("PIPELINE_DATA") or DEFAULT_DATA)
