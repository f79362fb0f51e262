"""The command of a user's training script: its words, its name, the placeholders that a point fills, and its refusals.

train.py --micro-batch {batch_size_per_gpu}      a file; grids hold its absolute path
-m package.train --size {model.size}             a module; {model.NAME} is an option that the grid gives
WANDB_MODE=disabled train.py                     with variables of the environment, as in a shell
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pipeline.plan.axes import Axes

PLACEHOLDER = re.compile(r"\{\{\w[\w.]*\}\}|\{(\w[\w.]*)\}")  # {{word}} stays {word}; other braces are text
PLACEHOLDERS = (
    *("batch_size_per_gpu", "global_batch_size", "num_gpus", "num_nodes", "grad_accumulation"),
    *("global_grad_accumulation", "precision", "strategy", "seed", "repeat"),
)
BATCH_PLACEHOLDERS = {"batch_size_per_gpu", "global_batch_size"}
OPTION = "model."  # begins the name of an option
VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)

SHAPE_AXES = (
    *("strategy", "num_gpus", "batch_size_per_gpu", "device", "num_nodes", "num_samples", "seed", "repeat"),
    "numa_binding",
)
"""Axes that any training has."""
OWN_AXES = ("warmup_updates", "updates", "update_by", "stated_flops_per_sample")
"""Axes that only scripts have."""
SCRIPT_AXES = (
    *SHAPE_AXES,
    *("model", "options", "precision", "epochs", "windows", "grad_accumulation", "measure", "script"),
    *OWN_AXES,
)
"""Axes that a script has; whatever else it needs are arguments of its own."""
UNSTATED_BY_SCRIPTS = ("dataset", "input", "num_workers")


class Command(NamedTuple):
    """The variables of a command, and its words, the first of which is a file or -m."""

    variables: dict[str, str]
    words: list[str]


def read_command(command: str) -> Command:
    """Return the parts of a command. Raises ValueError if it names no script, or has an open quote."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"script={command!r}: {error}; close it.") from error
    variables: dict[str, str] = {}
    while words and (match := VARIABLE.fullmatch(words[0])):
        variables[match[1]] = match[2]
        del words[0]
    if not words or words == ["-m"]:
        raise ValueError("script names no file; write it as script: train.py --arguments.")
    if words[0] != "-m" and not words[0].endswith(".py"):
        raise ValueError(
            f"script={command!r} must begin with a Python file, or with -m and a module: the ranks are started here, "
            "so leave out python, torchrun and accelerate launch."
        )
    return Command(variables, words)


def script_name(command: str) -> str:
    """Return the name of a script for people, which is the model of its points: `train.py`, or `package.train`."""
    words = read_command(command).words
    return words[1] if words[0] == "-m" else Path(words[0]).name


def place_script(command: str, folder: Path) -> str:
    """Return the command with the absolute path of its file; a relative one starts in this folder."""
    variables, words = read_command(command)
    if words[0] != "-m":
        words[0] = os.path.normpath(folder / Path(words[0]).expanduser())
    return shlex.join([*(f"{name}={value}" for name, value in variables.items()), *words])


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


def fill_command(command: str, values: Mapping[str, object]) -> Command:
    """Return the parts of a command with its placeholders filled."""

    def fill(text: str) -> str:
        return PLACEHOLDER.sub(lambda match: str(values[match[1]]) if match[1] else match[0][1:-1], text)

    variables, words = read_command(command)
    return Command({name: fill(value) for name, value in variables.items()}, [*map(fill, words)])


def check_script_axes(axes: "Axes", defaults: Mapping[str, Any]) -> None:
    """Raise ValueError for what a script cannot have, or for an axis of scripts where there is none."""
    if axes.script is None:
        for axis in OWN_AXES:
            if getattr(axes, axis) != defaults[axis]:
                raise ValueError(f"{axis}={getattr(axes, axis)} is an axis of scripts; leave it out.")
        return
    check_placeholders(axes.script, dict(option.split("=", 1) for option in axes.options))
    if axes.model != script_name(axes.script):
        raise ValueError(f"model={axes.model!r} is not the name of the script; leave model out.")
    for axis, default in defaults.items():
        unstated = None if axis in UNSTATED_BY_SCRIPTS else default
        if axis not in SCRIPT_AXES and getattr(axes, axis) != unstated:
            raise ValueError(
                f"{axis}={getattr(axes, axis)!r} does nothing for a script; leave it out, or make it an argument of "
                "the script."
            )
    if axes.measure not in ("epochs", "communication"):
        raise ValueError(f"measure={axes.measure!r} is not tried with a script; use 'epochs' or 'communication'.")
    if axes.precision is not None and "precision" not in placeholders_of(axes.script):
        raise ValueError("precision is the script's own; write {precision} into script, or leave precision out.")
    if not axes.is_distributed and axes.num_gpus > 1:
        raise ValueError(f"strategy={axes.strategy!r} is not tried with a script on several GPUs; use 'ddp'.")
