"""Command-line arguments that several commands share."""

import argparse
import os
from pathlib import Path


def add_point_arguments(parser: argparse.ArgumentParser) -> None:
    """What names points, where they are written and where their data lies."""
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="AXIS=VALUE[,VALUE]",
        help="replace an axis in every block of the grid",
    )
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="the parent of the experiment's folder")
    parser.add_argument("--data", type=Path, help="the data folder; PIPELINE_DATA where it is left out")


def data_folder(arguments: argparse.Namespace) -> Path | None:
    """The data folder that was named, if one was."""
    named: Path | None = arguments.data
    if named is None and os.environ.get("PIPELINE_DATA"):
        return Path(os.environ["PIPELINE_DATA"])
    return named
