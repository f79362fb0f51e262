"""The part of the command line that all commands share: description and --version."""

import argparse
from collections.abc import Sequence
from typing import Any

from pipeline import __version__


def build_parser(name: str, docstring: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m pipeline.NAME`, with --version; the docstring's first line describes it."""
    prog = f"python -m pipeline.{name}" if name else "python -m pipeline"
    parser = argparse.ArgumentParser(prog=prog, description=first_line(docstring))
    parser.add_argument(
        "--version", action=VersionAction, nargs=0, help="print the version, and the commit in a git checkout"
    )
    return parser


def first_line(docstring: str | None) -> str:
    """Return the summary line of a docstring."""
    return (docstring or "").partition("\n")[0]


class VersionAction(argparse.Action):
    """Print the version and exit. git is asked only then."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(describe_version())
        parser.exit()


def describe_version() -> str:
    """Return name and version, and for a git checkout the commit and whether tracked files were changed."""
    from pipeline.system.source_digest import PACKAGE, git_state

    commit, is_dirty = git_state(PACKAGE.parent)
    if commit is None:
        return f"ddp-scaling-pipeline {__version__}"
    return f"ddp-scaling-pipeline {__version__} (commit {commit[:12]}{', changed' if is_dirty else ''})"
