"""How a command ends: the exit codes, and an error that is one sentence with the cure."""

import io
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

FINE = 0  # also when everything was measured already
GAPS = 1  # points without a result: under --strict, and of those that submit ran here or waited for
USAGE = 2  # usage or configuration; a folder that is absent, unreadable or a file; a grid of zero points
NOTHING = 3  # nothing there: no experiment in the folder, a selection that selects nothing
SCHEDULER = 4  # the scheduler refused, or is configured and does not answer

OTHERS_MAY_NOT_WRITE = 0o027  # of the modes of all that a command and its processes make: the group may read


CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Refusal(Exception):
    """The command cannot go on: one sentence with the cure, and the exit code that says so."""

    def __init__(self, sentence: str, code: int = USAGE) -> None:
        super().__init__(sentence)
        self.code = code


def talk(sentence: str) -> None:
    """Say something to the person: on stderr, since stdout carries data."""
    print(printable(sentence), file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """So many of something: 1 point, 2 points."""
    return f"{number} {noun}{'s' * (number != 1)}"


def some_of(names: Sequence[str], most: int) -> str:
    """The first names, and how many there are besides: a, b and 3 more."""
    num_besides = len(names) - most
    return ", ".join(names[:most]) + (f" and {num_besides} more" if num_besides > 0 else "")


def printable(text: str) -> str:
    """The text without control characters other than line breaks: error texts may hold terminal escapes."""
    return "".join(char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def refuse_control_characters(words: Sequence[str]) -> None:
    """Raise Refusal for a word of a command line that has one: in a batch script a line break starts a new command."""
    for before, word in itertools.pairwise(["", *words]):
        if CONTROL_CHARACTER.search(word):
            option = f"{before} " if before.startswith("-") and "=" not in before else ""
            raise Refusal(f"{option}{word!r} has a control character; give it without.")


def describe(error: OSError) -> str:
    """The error's words, and its file where it has one: others are of a connection, a process or memory."""
    what = error.strerror or str(error) or type(error).__name__
    return what if error.filename is None else f"{error.filename}: {what}"


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command line's main and exit with its code; a Refusal becomes one sentence on stderr."""
    os.umask(os.umask(OTHERS_MAY_NOT_WRITE) | OTHERS_MAY_NOT_WRITE)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is still a name
    try:
        refuse_control_characters(sys.argv[1:])
        code = main()
        sys.stdout.flush()
    except Refusal as refusal:
        talk(f"error: {refusal}")
        code = refusal.code
    except BrokenPipeError:  # `... | head` closed our stdout: not an error, and nothing is left to flush to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except OSError as error:
        talk(f"error: {describe(error)}; the command cannot go on: mend that, and run it again.")
        code = USAGE
    except KeyboardInterrupt:
        talk("interrupted; run the same command again to go on.")
        code = 128 + signal.SIGINT
    sys.exit(code)
