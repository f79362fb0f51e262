"""Run a command of the pipeline in a fork of a process that has its imports: milliseconds in place of a second."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from pipeline.__main__ import COMMANDS
from pipeline.records import folder as experiment_folder
from pipeline.submission import read_progress

ROOT = Path(__file__).resolve().parent.parent
# what commands import when they need it; torch is not among them
LATE = (
    "pandas",
    "tabulate",
    "jinja2",
    "submitit",
    "pipeline.report.collected",
    "pipeline.report.compare",
    "pipeline.report.draw",
    "pipeline.report.html",
    "pipeline.submission.read_progress",
)
HIDE = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN_PACKAGES"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
"""
"""Code after which this Python lacks the packages that a variable names."""

NEED_NUMPY = ("numpy", "pandas", "matplotlib")
READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_")  # variables that a running Python does not read again
MULTIPROCESSING = multiprocessing.get_context("forkserver")
SERVER = forkserver.ForkServer()  # beside that of this process, which ranks are forked from, with torch
SERVER.set_forkserver_preload([*(f"pipeline.{name}" for name in COMMANDS), *LATE])


def run_module(
    module: str, arguments: Sequence[str], env: Mapping[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Do as `python -m MODULE ARGUMENTS` in the folder; TimeoutExpired after ten minutes."""
    command = [sys.executable, "-m", module, *arguments]
    if _read_at_start(env) != _read_at_start(os.environ):
        return subprocess.run(command, cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=600)
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = MULTIPROCESSING.Process(target=_become, args=(module, arguments, dict(env), cwd, stdout, stderr))
        with mock.patch.object(forkserver, "connect_to_new_process", SERVER.connect_to_new_process):
            process.start()
        try:
            process.join(600)
        finally:  # also at the time limit of the test: else Python would wait for it at its end
            exit_code = process.exitcode
            process.kill()
        if exit_code is None:
            raise subprocess.TimeoutExpired(command, 600)
        return subprocess.CompletedProcess(command, exit_code, stdout.read_text(), stderr.read_text())


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}


def _become(
    module: str, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: Path, stderr: Path
) -> None:
    """Turn this process into the command."""
    for stream, file in ((sys.stdout, stdout), (sys.stderr, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream.fileno())
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, str(ROOT))
    sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # else runpy warns
    # or a test would wait a minute for a job that has long ended
    read_progress.LAST_POLL_S = read_progress.RECORD_GRACE_S = read_progress.FIRST_POLL_S
    experiment_folder.SUBMIT_LOCK_WAIT_S = 0.5
    if packages := env.get("HIDDEN_PACKAGES"):
        _hide(packages.split())
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:  # whatever it is: a Python of its own would print it and end with 1
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _hide(packages: Sequence[str]) -> None:
    """Forget the packages and all that may have imported them, and let nothing import them again."""
    forgotten = {"pipeline", *packages, *(NEED_NUMPY if "numpy" in packages else ())}
    for name in [name for name in sys.modules if name.partition(".")[0] in forgotten]:
        del sys.modules[name]
    sys.argv[0] = "-m"  # as Python has it when the command's package is imported
    exec(HIDE)
