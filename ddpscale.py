"""The installed command `ddpscale`, what a notebook imports (`load`), and words that a training script may say.

Command and `load` run the package beside this file, whatever else is called `pipeline`. The words (`items`, `update`,
`skip`, `merit`) import nothing and do nothing, unless `ddpscale run` measures the script.
"""

import importlib
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.report.collected import Frames

HERE = str(Path(__file__).resolve().parent)


def load(folder: "str | Path") -> "Frames":
    """Return the experiments at or under a folder as pandas DataFrames: configurations, epochs, steps, tables."""
    frames: Frames = part("report.collected").load_frames(folder)
    return frames


PROBE = "_ddpscale_probe"  # in sys.modules of a script that is measured


def items(count: Any, unit: str = "items") -> None:
    """Say what this rank has trained on since its last update: real tokens, atoms. `count` is a number or a tensor."""
    if (probe := sys.modules.get(PROBE)) is not None:
        probe.add_items(count, unit)


def update() -> None:
    """Say that an update has ended, where no optimizer of torch marks it. From then on optimizers do not count."""
    if (probe := sys.modules.get(PROBE)) is not None:
        probe.mark_update()


def skip() -> AbstractContextManager[None]:
    """Return a context whose update is not timed: around an evaluation or a checkpoint."""
    probe = sys.modules.get(PROBE)
    return nullcontext() if probe is None else probe.skip()


def merit(value: float, name: str, better: str = "higher") -> None:
    """Say a figure of merit, such as a test accuracy, for the record."""
    if (probe := sys.modules.get(PROBE)) is not None:
        probe.note_merit(value, name, better)


def part(name: str) -> Any:
    """Return a module of the package beside this file."""
    sys.path.insert(0, HERE)
    try:
        return importlib.import_module(f"pipeline.{name}")
    finally:
        sys.path.remove(HERE)


def run() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command, as under -m
    errors, command = part("system.errors"), part("__main__")
    errors.open_closed_streams()
    sys.excepthook = errors.report_uncaught
    errors.run_command(command.main)


if __name__ == "__main__":
    run()
