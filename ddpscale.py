"""The installed command `ddpscale`, and what a notebook imports: `ddpscale.load`.

They run the package beside this file, whatever else is called `pipeline`.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pipeline.report.frames import Frames

HERE = str(Path(__file__).resolve().parent)


def load(folder: "str | Path") -> "Frames":
    """Return the experiments at or under a folder as pandas DataFrames: configurations, epochs, steps, tables."""
    frames: Frames = part("report.frames").load_frames(folder)
    return frames


def part(name: str) -> Any:
    """Return a module of the package beside this file."""
    sys.path.insert(0, HERE)
    try:
        return importlib.import_module(f"pipeline.{name}")
    finally:
        sys.path.remove(HERE)


def run() -> NoReturn:
    errors, command = part("system.errors"), part("__main__")
    errors.open_closed_streams()
    sys.excepthook = errors.report_uncaught
    errors.run_command(command.main)


if __name__ == "__main__":
    run()
