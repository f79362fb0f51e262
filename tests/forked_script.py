"""Stands in for `subprocess` where a script starts under the probe: a fork of a process that has torch, not a new one.

A new Python takes 3 s of CPU to import torch. The probe sees the script import it all the same.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forked_ranks import IMPORTED_ONCE

from pipeline.system import host

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["DEVNULL", "PIPE", "STDOUT", "Popen"]
START_METHOD = "forkserver"  # "fork" in a rank, which has trained nothing
started: list["Popen"] = []


class Popen:
    """The process of `python -u PROBE CONFIG SCRIPT ARGUMENTS...`, with its output in a pipe."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str], umask: int, **_: object) -> None:
        multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
        context: Any = multiprocessing.get_context(START_METHOD)
        reader, writer = context.Pipe(duplex=False)
        arguments = (command[2:], cwd, dict(env), umask, writer)
        self.process = context.Process(target=run_probe, args=arguments)
        self.process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), "rb")
        started.append(self)

    @property
    def pid(self) -> Any:
        return self.process.pid

    def poll(self) -> Any:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> Any:
        self.process.join()
        return self.process.exitcode


class Found:
    """Finds a module that was imported and is forgotten."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        spec: Any = self.module.__spec__
        if name != self.module.__name__:
            return None
        spec.loader = self
        return spec  # type: ignore[no-any-return]

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, _: ModuleType) -> None:
        """It was executed."""


def run_probe(words: Sequence[str], folder: Path, env: Mapping[str, str], umask: int, output: "Connection") -> None:
    """Be the Python of these words, whose output goes to a pipe."""
    host.die_with_parent(os.getppid())
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    if umask >= 0:
        os.umask(umask)
    os.chdir(folder)
    sys.argv[:] = words
    sys.path.insert(0, "")
    torch = sys.modules.pop("torch")
    torch.set_num_threads(torch.get_num_threads())  # its pool is made anew, which two threads at once could not
    sys.meta_path.insert(0, Found(torch))
    runpy.run_path(words[0], run_name="__main__")
