"""How a command ends: the exit codes, and an error that is one sentence with the cure."""

import importlib.util
import io
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn

EXIT_OK = 0  # also when everything was measured already
EXIT_GAPS = 1  # points without a result: under --strict, and of those that submit ran here or waited for
EXIT_USAGE = 2  # usage or configuration; a folder that is absent, unreadable or a file; a grid of zero points
EXIT_NOTHING_FOUND = 3  # nothing there: no experiment in the folder, a selection that selects nothing
EXIT_SCHEDULER = 4  # the scheduler refused, or is configured and does not answer

OTHERS_MAY_NOT_WRITE = 0o027  # of the modes of all that a command and its processes make: the group may read


CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
RANK_PACKAGES = ("numpy", "PIL", "torch", "torchvision")  # by the names of their modules
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "PyYAML"}  # where the package is called otherwise than its module
INSTALL = "install this project's packages with: python -m pip install -c constraints.txt -e ."


class CommandError(Exception):
    """The command cannot go on: one sentence with the cure, and the exit code that says so."""

    def __init__(self, sentence: str, code: int = EXIT_USAGE) -> None:
        super().__init__(sentence)
        self.code = code


def log_line(sentence: str) -> None:
    """Say something to the person: on stderr, since stdout carries data."""
    print(replace_control_characters(sentence), file=sys.stderr, flush=True)


def pluralize(number: int, noun: str) -> str:
    """So many of something: 1 point, 2 points."""
    return f"{number} {noun}{'s' * (number != 1)}"


def shorten_list(names: Sequence[str], most: int) -> str:
    """The first names, and how many there are besides: a, b and 3 more."""
    num_besides = len(names) - most
    return ", ".join(names[:most]) + (f" and {num_besides} more" if num_besides > 0 else "")


def replace_control_characters(text: str) -> str:
    """The text without control characters other than line breaks: error texts may hold terminal escapes."""
    return "".join(char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def refuse_control_characters(words: Sequence[str]) -> None:
    """Raise CommandError for a word of a command line that has one: in a batch script a line break starts a new command."""
    for before, word in itertools.pairwise(["", *words]):
        if CONTROL_CHARACTER.search(word):
            option = f"{before} " if before.startswith("-") and "=" not in before else ""
            raise CommandError(f"{option}{word!r} has a control character; give it without.")


def require_packages(*modules: str) -> None:
    """Raise CommandError for the first of the modules that is not installed; imports none."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise missing_package_error(module)


def missing_package_error(module: str) -> CommandError:
    """The package of that module is needed, and what installs it."""
    name = module.partition(".")[0]
    return CommandError(f"needs the package {DISTRIBUTIONS.get(name, name)!r}; {INSTALL}")


def import_error_as_command_error(error: ImportError) -> CommandError | None:
    """The sentence for a package that is missing or broken; None where a module of ours is at fault."""
    if (error.name or "").partition(".")[0] == "pipeline":
        return None
    if isinstance(error, ModuleNotFoundError) and error.name:
        return missing_package_error(error.name)
    return CommandError(f"cannot import a package ({' '.join(str(error).split())}); {INSTALL}")


def report_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """End a command whose own imports failed with a sentence; show any other error as Python does."""
    refusal = import_error_as_command_error(error) if isinstance(error, ImportError) else None
    if refusal is None:
        sys.__excepthook__(kind, error, traceback)
        return
    log_line(f"error: {refusal}")
    sys.exit(refusal.code)


def describe_os_error(error: OSError) -> str:
    """The error's words, and its file where it has one: others are of a connection, a process or memory."""
    what = error.strerror or str(error) or type(error).__name__
    return what if error.filename is None else f"{error.filename}: {what}"


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command line's main and exit with its code; a CommandError becomes one sentence on stderr."""
    os.umask(os.umask(OTHERS_MAY_NOT_WRITE) | OTHERS_MAY_NOT_WRITE)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is still a name
    try:
        refuse_control_characters(sys.argv[1:])
        code = main()
        sys.stdout.flush()
    except CommandError as refusal:
        log_line(f"error: {refusal}")
        code = refusal.code
    except ImportError as error:  # commands import late what they may not need
        refused = import_error_as_command_error(error)
        if refused is None:
            raise
        log_line(f"error: {refused}")
        code = refused.code
    except BrokenPipeError:  # `... | head` closed our stdout: not an error, and nothing is left to flush to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except OSError as error:
        log_line(f"error: {describe_os_error(error)}; the command cannot go on: mend that, and run it again.")
        code = EXIT_USAGE
    except KeyboardInterrupt:
        log_line("interrupted; run the same command again to go on.")
        code = 128 + signal.SIGINT
    sys.exit(code)
