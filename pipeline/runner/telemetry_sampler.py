"""The sampler of a node: a process of its own beside the ranks, so that it costs the timed processes nothing.

    python -m pipeline.runner.telemetry_sampler FOLDER --node 0 --interval-s 0.1

Started and ended by pipeline.launch; FOLDER is the point's rank_files. It appends a line a round (the CPUs, and the
GPUs that the point uses, by nvidia-ml-py) until a SIGTERM. Whatever becomes of it, the point goes on without it.
"""

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pipeline.analysis.telemetry_summary import (
    GpuSample,
    NodeSamples,
    SamplerHeader,
    SamplerNote,
    SamplingRound,
    normalize_uuid,
    read_node_samples,
)
from pipeline.experiment.spec import Spec
from pipeline.runner.rank_files import RankFiles
from pipeline.system import host

SAMPLING_INTERVAL_S = 0.1
FULL_RATE_ROUNDS = 36_000  # an hour; after it ten times slower, so that a day of samples fits beside its point
NICENESS = 10
ENDING_GRACE_S = 5
OTHER_SAMPLES_GRACE_S = 5


@contextlib.contextmanager
def sample_meanwhile(rank_files: RankFiles, node: int) -> Iterator[None]:
    """Sample this node while the body runs; no failure of it reaches the body."""
    path = rank_files.samples(node)
    note = None
    with contextlib.suppress(OSError):
        for stale in (path, path.with_suffix(".part")):  # of the launch that Slurm requeued
            stale.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pipeline.runner.telemetry_sampler", str(rank_files.folder), "--node", str(node)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    except OSError as error:
        process, note = None, f"the sampler could not be started: {error}"
    try:
        yield
    finally:
        if process is not None:
            note = end_sampler(process)
        with contextlib.suppress(OSError):
            close_samples(path, note)


def end_sampler(process: subprocess.Popen[bytes]) -> str | None:
    """End the sampler; says so where it had ended by itself, or did not end when asked."""
    early = process.poll()
    if early is not None:
        return f"the sampler ended early ({'signal' if early < 0 else 'exit code'} {abs(early)})"
    process.terminate()
    try:
        process.wait(ENDING_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: a process inside a stuck driver may never go
        return f"the sampler did not end within {ENDING_GRACE_S} s"
    return None


def close_samples(path: Path, note: str | None) -> None:
    """Give the file its final name, which tells the first node that it is complete."""
    part = path.with_suffix(".part")
    with part.open("ab") as file:
        if note:
            file.write(b"\n" + msgspec.json.encode(SamplerNote(note)) + b"\n")  # the last line may have been cut off
    part.rename(path)


def read_all_nodes(rank_files: RankFiles, num_nodes: int) -> list[NodeSamples]:
    """What every node sampled; the others' files may appear a little later than this node's."""
    deadline = time.monotonic() + OTHER_SAMPLES_GRACE_S
    paths = [rank_files.samples(node) for node in range(num_nodes)]
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [read_samples_or_note(path) for path in paths]


def read_samples_or_note(path: Path) -> NodeSamples:
    """What a node sampled, or why that is not known."""
    try:
        return read_node_samples(path)
    except OSError as error:
        return NodeSamples(None, [], {}, [f"its samples cannot be read: {error.strerror}"])


class NvmlGpus:
    """The GPUs of this node that the point uses, through nvidia-ml-py; none, with a note, where that cannot be."""

    def __init__(self, spec: Spec) -> None:
        self.uuids: list[str] = []
        self.note: str | None = None
        self._nvml: Any = None
        self._handles: list[Any] = []
        if spec.device != "cuda":
            return
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._find(spec.gpus_per_node)
        except ImportError:
            self.note = "no GPU was sampled: nvidia-ml-py is not installed; install the extra `telemetry`"
        except self._nvml.NVMLError as error:
            self.note = f"no GPU was sampled: {error}"

    def _find(self, num_gpus: int) -> None:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [normalize_uuid(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        places = visible_gpu_indices(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))[:num_gpus]
        self.uuids, self._handles = [uuids[place] for place in places], [handles[place] for place in places]
        if not places:
            self.note = "no GPU was sampled: CUDA_VISIBLE_DEVICES names no whole GPU that the driver knows"

    def read(self) -> tuple[GpuSample, ...]:
        """Every GPU, now."""
        return tuple(self._read_one(place, handle) for place, handle in enumerate(self._handles))

    def _read_one(self, place: int, handle: Any) -> GpuSample:
        nvml = self._nvml
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        unix_ns = time.time_ns()  # beside the energy: asking for all five takes milliseconds
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # its name in drivers before 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuSample(
            gpu=place,
            unix_ns=unix_ns,
            energy_mj=energy_mj,
            power_mw=self._ask("nvmlDeviceGetPowerUsage", handle),
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            reasons=reasons,
        )

    def _ask(self, question: str, *arguments: Any) -> int | None:
        """What the driver answers; None where this card, driver or library does not know."""
        try:
            return int(getattr(self._nvml, question)(*arguments))
        except (AttributeError, self._nvml.NVMLError):
            return None


def visible_gpu_indices(uuids: Sequence[str], mask: str | None) -> list[int]:
    """The places of the GPUs that CUDA_VISIBLE_DEVICES shows, in its order: by number, or by the start of a UUID.

    As in CUDA, whatever follows an entry that names no GPU is hidden.
    """
    if mask is None:
        return list(range(len(uuids)))
    places: list[int] = []
    for entry in (entry.strip().lower() for entry in mask.split(",")):
        if entry.isdecimal():
            found = [int(entry)] if int(entry) < len(uuids) else []
        else:
            named = normalize_uuid(entry) if entry.startswith("gpu-") else None
            found = [place for place, uuid in enumerate(uuids) if named and uuid.startswith(named)]
        if len(found) != 1:
            break
        places += found
    return places


def read_cpu() -> tuple[int, int] | None:
    """Busy and all ticks of the node's CPUs since boot (proc(5): user nice system idle iowait irq softirq steal)."""
    try:
        with open("/proc/stat", "rb") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def sample_until_sigterm(gpus: NvmlGpus, file: BinaryIO, interval_s: float) -> None:
    """Write a line a round until a SIGTERM comes, and one more then: the last window ends before it."""
    asked_to_end = False
    count, due_s = 0, time.monotonic()
    while not asked_to_end:
        due_s = max(due_s + interval_s * (10 if count > FULL_RATE_ROUNDS else 1), time.monotonic())
        asked_to_end = signal.sigtimedwait([signal.SIGTERM], max(0, due_s - time.monotonic())) is not None
        write_line(file, SamplingRound(time.time_ns(), read_cpu(), gpus.read()))
        count += 1


def write_line(file: BinaryIO, line: SamplerHeader | SamplerNote | SamplingRound) -> None:
    """One line in one write, so that it is whole for whoever reads it."""
    file.write(msgspec.json.encode(line) + b"\n")


def main() -> None:
    """Sample until asked to end."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.runner.telemetry_sampler",
        description="Sample the GPUs and CPUs of this node until asked to end.",
    )
    parser.add_argument("folder", type=Path, help="the rank_files folder of a launch")
    parser.add_argument("--node", type=int, default=0, help="the node's rank, from 0")
    parser.add_argument("--interval-s", type=float, default=SAMPLING_INTERVAL_S, help="seconds between samples")
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # taken by sample() between two lines
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which launch gets too
    host.die_with_parent()
    os.nice(NICENESS)
    rank_files = RankFiles(arguments.folder)
    part = rank_files.samples(arguments.node).with_suffix(".part")
    with part.open("wb", buffering=0) as file:
        gpus = NvmlGpus(rank_files.read_point().spec)
        write_line(file, SamplerHeader(arguments.interval_s, tuple(gpus.uuids)))
        if gpus.note:
            write_line(file, SamplerNote(gpus.note))
        sample_until_sigterm(gpus, file, arguments.interval_s)


if __name__ == "__main__":
    main()
