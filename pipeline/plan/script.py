"""The command of a user's training script: its words, its name, and the placeholders that a point fills.

train.py --micro-batch {batch_size_per_gpu}      a file; grids hold its absolute path
-m package.train --size {model.size}             a module; {model.NAME} is an option that the grid gives
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

PLACEHOLDER = re.compile(r"\{\{\w[\w.]*\}\}|\{(\w[\w.]*)\}")  # {{word}} stays {word}; other braces are text
PLACEHOLDERS = (
    *("batch_size_per_gpu", "global_batch_size", "num_gpus", "num_nodes", "grad_accumulation", "precision", "strategy"),
    *("seed", "repeat"),
)
OPTION = "model."  # begins the name of an option


def script_words(command: str) -> list[str]:
    """Return the words of a command. Raises ValueError if it has none, or an open quote."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"script={command!r}: {error}; close it.") from error
    if not words or words == ["-m"]:
        raise ValueError("script names no file; write it as script: train.py --arguments.")
    if words[0] != "-m" and not words[0].endswith(".py"):
        raise ValueError(
            f"script={command!r} must begin with a Python file, or with -m and a module: the ranks are started here, "
            "so leave out python, torchrun and accelerate launch."
        )
    return words


def script_name(command: str) -> str:
    """Return the name of a script for people, which is the model of its points: `train.py`, or `package.train`."""
    words = script_words(command)
    return words[1] if words[0] == "-m" else Path(words[0]).name


def place_script(command: str, folder: Path) -> str:
    """Return the command with the absolute path of its file; a relative one starts in this folder."""
    words = script_words(command)
    if words[0] == "-m":
        return command
    return shlex.join([os.path.normpath(folder / Path(words[0]).expanduser()), *words[1:]])


def placeholders_of(command: str) -> Iterator[str]:
    """Yield the names of a command that a point fills."""
    yield from (match[1] for match in PLACEHOLDER.finditer(command) if match[1])


def check_placeholders(command: str, options: Mapping[str, str]) -> None:
    """Raise ValueError for a placeholder that no point fills, or for an option that none uses."""
    known, used = (*PLACEHOLDERS, *(OPTION + name for name in options)), set(placeholders_of(command))
    for name in sorted(used):
        if name not in known:
            choices = ", ".join(f"{{{one}}}" for one in known)
            raise ValueError(f"script has the placeholder {{{name}}}; use {choices}, or {{{{{name}}}}} for the text.")
    if unused := [name for name in options if OPTION + name not in used]:
        raise ValueError(f"{OPTION}{unused[0]} fills no placeholder; write {{{OPTION}{unused[0]}}} into script.")


def fill_words(command: str, values: Mapping[str, object]) -> list[str]:
    """Return the words of a command with its placeholders filled."""

    def fill(match: re.Match[str]) -> str:
        return str(values[match[1]]) if match[1] else match[0][1:-1]

    return [PLACEHOLDER.sub(fill, word) for word in script_words(command)]
