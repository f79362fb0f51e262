"""Lanes: points of one GPU that an array element runs at once, each lane with a GPU and CPUs of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.command import LaunchOptions, launch_command
from pipeline.experiment import Experiment
from pipeline.here import die_with_parent, visible_gpus
from pipeline.spec import Device

SYS_CPUS = Path("/sys/devices/system/cpu")


class Lane(NamedTuple):
    """A lane's part of the element: its CPUs, and its GPU as CUDA_VISIBLE_DEVICES names it (None on the CPU)."""

    cpus: frozenset[int]
    gpu: str | None

    def enter(self) -> None:
        """Keep this process, and those that it starts, to the lane's CPUs."""
        os.sched_setaffinity(0, self.cpus)

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """The command in a process that sees this lane's part alone and ends with this one; its output is ours."""

        def enter() -> None:
            die_with_parent()
            self.enter()

        own = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, **own}, preexec_fn=enter)


def divide_node(num_lanes: int, device: Device) -> list[Lane]:
    """As many CPUs for each lane as for the others, and a GPU on `cuda`; none where there is not one for each."""
    cpus = sorted(os.sched_getaffinity(0), key=lambda cpu: (first_thread_of_core(cpu), cpu))
    share = len(cpus) // num_lanes
    gpus: Sequence[str | None] = visible_gpus()[:num_lanes] if device == "cuda" else [None] * num_lanes
    if share == 0 or len(gpus) < num_lanes:
        return []
    return [Lane(frozenset(cpus[place * share :][:share]), gpu) for place, gpu in enumerate(gpus)]


def first_thread_of_core(cpu: int) -> int:
    """What the hardware threads of one core have in common: sorted by it, a share of whole cores splits none."""
    try:
        siblings = (SYS_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        return int(re.split("[,-]", siblings)[0])
    except (OSError, ValueError):
        return cpu


def run_lanes(experiment: Experiment, run_ids: Sequence[str], options: LaunchOptions, lanes: Sequence[Lane]) -> int:
    """Run the points dealt to the lanes, one after another in each; the worst exit code of a lane."""
    dealt = deal(run_ids, len(lanes))
    return max(run_at_once([launch_command(experiment.manifest, own, options) for own in dealt], lanes))


def deal(run_ids: Sequence[str], num_lanes: int) -> list[Sequence[str]]:
    """The points of each lane in their order, of no more lanes than there are points; pipeline.turns relies on it."""
    return [run_ids[lane::num_lanes] for lane in range(min(num_lanes, len(run_ids)))]


def run_at_once(commands: Sequence[Sequence[str]], lanes: Sequence[Lane]) -> list[int]:
    """Run each command in its lane and wait for all; their exit codes, 128 and its number for a signal.

    A SIGTERM or an interruption reaches them first, and then us.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with exiting_on_sigterm():
        try:
            for command, lane in zip(commands, lanes, strict=False):
                processes.append(lane.start(command))
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.terminate()  # nothing where it has ended
            for process in processes:
                process.wait()
    return [code if code >= 0 else 128 - code for code in codes]


@contextlib.contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """While the body runs a SIGTERM unwinds this process instead of ending it at once."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
