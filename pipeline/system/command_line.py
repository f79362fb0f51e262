"""The part of the command line that all commands share: description and --version."""

import argparse
import contextlib
import difflib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pipeline import __version__
from pipeline.system.errors import CommandError
from pipeline.system.files import PACKAGE

SCRIPT = "ddpscale"  # that pip installs


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, which suggests the option that was meant and names --help.

    `cure_of_unknown` says what else unknown arguments may be.
    """

    cure_of_unknown = ""

    def error(self, message: str) -> NoReturn:
        known = {name.removeprefix("--"): name for name in self._option_string_actions}
        own = itertools.takewhile(lambda word: word != "--", sys.argv[1:])
        options = [word.partition("=")[0].removeprefix("--") for word in own if word.startswith("--")]
        unknown = [option for option in options if option not in known]
        near = ((option, difflib.get_close_matches(option, known, n=1)) for option in unknown)
        said = [f"--{option}: did you mean '{known[found[0]]}'?" for option, found in near if found]
        if self.cure_of_unknown and message.startswith("unrecognized arguments"):
            said.append(self.cure_of_unknown)
        raise CommandError(f"{'; '.join([message, *said])} (see {self.prog} --help)")


parser_class = CommandParser  # pipeline.completion sets another, to get the parsers of all commands


def build_parser(name: str, docstring: str | None) -> CommandParser:
    """Return the parser of a command, with --version; the docstring's first line describes it."""
    # no abbreviations: a new option would make them ambiguous, and --gpus would be --gpus-per-node
    parser = parser_class(prog=command_name(name), description=first_line(docstring), allow_abbrev=False)
    version = "print the version, and the commit in a git checkout"
    parser.add_argument("--version", action=VersionAction, nargs=0, help=version)
    return parser


def command_name(name: str) -> str:
    """Return how a user calls a command: `ddpscale NAME` if this one was called so, else as a module."""
    if Path(sys.argv[0]).stem == SCRIPT:
        return f"{SCRIPT} {name}" if name else SCRIPT
    return f"python -m pipeline.{name}" if name else "python -m pipeline"


def number(meaning: str, low: float, high: float, kind: Callable[[str], float] = int) -> Callable[[str], Any]:
    """Return what parses a number from `low` to `high` for argparse. `meaning` says what it must be."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError, OverflowError):
            value = kind(text)
            if low <= value <= high:
                return value
        raise argparse.ArgumentTypeError(f"must be {meaning}")

    return parse


ABOVE_ZERO = sys.float_info.min
positive_integer = number("a whole number from 1 on", 1, 2**62)


def first_line(docstring: str | None) -> str:
    return (docstring or "").partition("\n")[0]


class VersionAction(argparse.Action):
    """Print name and version, and in a git checkout the commit and whether tracked files were changed; then exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from pipeline.system.source_digest import git_state  # not at the top: it reads all source files

        commit, is_dirty = git_state(PACKAGE.parent)
        suffix = f" (commit {commit[:12]}{', changed' if is_dirty else ''})" if commit else ""
        print(f"ddpscale {__version__}{suffix}")
        parser.exit()
