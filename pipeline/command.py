"""The command that runs points of a manifest in a process of its own, on a node or here."""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # goes on the process's PYTHONPATH, whatever folder it starts in


def launch_command(manifest: Path, run_ids: Sequence[str], data: Path | None) -> list[str]:
    """What an array element, or this machine, runs for these points, as words."""
    command = [sys.executable, "-u", "-m", "pipeline.launch", "--manifest", str(manifest.resolve())]
    for run_id in run_ids:
        command += ["--run-id", run_id]
    return command + (["--data", str(data.resolve())] if data else [])
