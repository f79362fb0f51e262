"""The telemetry sampler of a node: a separate process, so that it does not slow the ranks.

    python -m pipeline.runner.telemetry_sampler FOLDER --node 0 --interval-s 0.1

The launcher starts and stops it. FOLDER holds the point's rank_files. Each round appends one line with the state of the
CPUs and, through nvidia-ml-py, of the point's GPUs, until SIGTERM. If the sampler fails, the point runs on without it.
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

from pipeline.plan.spec import Spec
from pipeline.runner import telemetry_summary
from pipeline.runner.launch_options import python_variables
from pipeline.runner.rank_files import RankFiles
from pipeline.runner.telemetry_summary import GpuSample, NodeSamples, SamplerHeader, SamplerNote, SamplingRound
from pipeline.system import host

SAMPLING_INTERVAL_S = 0.1
FULL_RATE_ROUNDS = 36_000  # one hour at the default interval; then ten times slower, to limit the file size
NICENESS = 10
STOP_GRACE_S = 5
OTHER_NODES_WAIT_S = 5  # for the samples that other nodes still write


@contextlib.contextmanager
def sample_in_background(rank_files: RankFiles, node: int) -> Iterator[None]:
    """Sample this node while the body runs. A failure of the sampler never reaches the body."""
    path = rank_files.samples(node)
    note = None
    with contextlib.suppress(OSError):
        for stale in (path, path.with_suffix(".part")):  # left by the same launch before Slurm requeued it
            stale.unlink(missing_ok=True)
    module = "pipeline.runner.telemetry_sampler"
    command = [sys.executable, "-P", "-m", module, str(rank_files.folder), "--node", str(node)]
    try:
        process = start_sampler(command)
    except OSError as error:
        process, note = None, f"the sampler could not be started: {error}"
    try:
        yield
    finally:
        if process is not None:
            note = stop_sampler(process)
        with contextlib.suppress(OSError):
            finish_samples_file(path, note)


def start_sampler(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the sampler, which ends with this process. Raises OSError."""
    environ = {**os.environ, **python_variables()}
    words = [*command, "--parent", str(os.getpid())]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ)


def stop_sampler(process: subprocess.Popen[bytes]) -> str | None:
    """Stop the sampler. Return a note if it has ended already or does not stop, else None."""
    exit_code = process.poll()
    if exit_code is None:
        process.terminate()
        try:
            exit_code = process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # no wait: a process inside a stuck driver may never end
            return f"the sampler did not stop within {STOP_GRACE_S} s"
        if exit_code in (0, -signal.SIGTERM):  # else it was ending for another reason when it was asked to stop
            return None
    return f"the sampler ended early ({'signal' if exit_code < 0 else 'exit code'} {abs(exit_code)})"


def finish_samples_file(path: Path, note: str | None) -> None:
    """Append the note, and give the file its final name, which tells the first node that it is complete."""
    part = path.with_suffix(".part")
    with part.open("ab") as file:
        if note:
            file.write(b"\n" + msgspec.json.encode(SamplerNote(note)) + b"\n")  # "\n" first: the last line may be cut
    part.rename(path)


def read_all_nodes(rank_files: RankFiles, num_nodes: int) -> list[NodeSamples]:
    """Return the samples of every node. Wait up to OTHER_NODES_WAIT_S for files that are not complete."""
    deadline = time.monotonic() + OTHER_NODES_WAIT_S
    paths = [rank_files.samples(node) for node in range(num_nodes)]
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [read_samples_or_note(path) for path in paths]


def read_samples_or_note(path: Path) -> NodeSamples:
    """Return the samples of a node, or a note that says why its file cannot be read."""
    try:
        return telemetry_summary.read_node_samples(path)
    except OSError as error:
        return NodeSamples(None, [], {}, [f"its samples cannot be read: {error.strerror}"])


class NvmlGpus:
    """The GPUs of this node that the point uses, read through nvidia-ml-py. `note` says why there are none."""

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
            self._find_visible(spec.gpus_per_node)
        except ImportError:
            self.note = "no GPU was sampled: nvidia-ml-py is not installed; install the extra `telemetry`"
        except self._nvml.NVMLError as error:
            self.note = f"no GPU was sampled: {error}"

    def _find_visible(self, num_gpus: int) -> None:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [telemetry_summary.normalize_uuid(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        indices = visible_gpu_indices(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))[:num_gpus]
        self.uuids, self._handles = [uuids[i] for i in indices], [handles[i] for i in indices]
        if not indices:
            self.note = "no GPU was sampled: CUDA_VISIBLE_DEVICES names no whole GPU that the driver knows"

    def highest_sm_clocks_mhz(self) -> tuple[int | None, ...]:
        return tuple(
            self._ask("nvmlDeviceGetMaxClockInfo", handle, self._nvml.NVML_CLOCK_SM) for handle in self._handles
        )

    def read(self) -> tuple[GpuSample, ...]:
        return tuple(self._read_one(index, handle) for index, handle in enumerate(self._handles))

    def _read_one(self, index: int, handle: Any) -> GpuSample:
        nvml = self._nvml
        energy_mj = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        unix_ns = time.time_ns()  # right after the energy, since the five queries together take milliseconds
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # the function's name before driver 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuSample(
            gpu=index,
            unix_ns=unix_ns,
            energy_mj=energy_mj,
            power_mw=self._ask("nvmlDeviceGetPowerUsage", handle),
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            reasons=reasons,
        )

    def _ask(self, function: str, *arguments: Any) -> int | None:
        """Return the result of a function of NVML, or None if this GPU, driver or library does not support it."""
        try:
            return int(getattr(self._nvml, function)(*arguments))
        except (AttributeError, self._nvml.NVMLError):
            return None


def visible_gpu_indices(uuids: Sequence[str], mask: str | None) -> list[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES shows, in its order.

    As in CUDA, the first entry that names no GPU hides all later ones.
    """
    if mask is None:
        return list(range(len(uuids)))
    indices: list[int] = []
    for device in host.visible_devices(mask, len(uuids)):
        prefix = "" if isinstance(device, int) else telemetry_summary.normalize_uuid(device.lower())
        named = [index for index, uuid in enumerate(uuids) if prefix and uuid.startswith(prefix)]
        found = [device] if isinstance(device, int) else named
        if len(found) != 1:
            break
        indices += found
    return indices


def read_cpu() -> tuple[int, int] | None:
    """Return the busy time and the whole time of the node's CPUs since boot, in jiffies; None without /proc/stat.

    The fields of its first line: user nice system idle iowait irq softirq steal (proc(5)).
    """
    try:
        with open("/proc/stat", "rb") as file:
            times = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return None
    idle, iowait = times[3:5]
    return sum(times) - idle - iowait, sum(times)


def sample_until_sigterm(gpus: NvmlGpus, file: BinaryIO, interval_s: float) -> None:
    """Write one line per round until SIGTERM, then a last one, so that the samples cover the end of the last window."""
    is_stopping = False
    num_rounds, due_s = 0, time.monotonic()
    while not is_stopping:
        due_s = max(due_s + (interval_s if num_rounds <= FULL_RATE_ROUNDS else 10 * interval_s), time.monotonic())
        is_stopping = signal.sigtimedwait([signal.SIGTERM], max(0, due_s - time.monotonic())) is not None
        write_line(file, SamplingRound(time.time_ns(), read_cpu(), gpus.read()))
        num_rounds += 1


def write_line(file: BinaryIO, line: SamplerHeader | SamplerNote | SamplingRound) -> None:
    """Append one line with a single write, so that a reader sees it whole."""
    file.write(msgspec.json.encode(line) + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.runner.telemetry_sampler",
        description="Sample the GPUs and CPUs of this node until SIGTERM.",
    )
    parser.add_argument("folder", type=Path, help="the folder of the point's launch")
    parser.add_argument("--node", type=int, default=0, help="the node's rank, from 0")
    parser.add_argument("--interval-s", type=float, default=SAMPLING_INTERVAL_S, help="seconds between samples")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="the launcher, with which this process ends")
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # sample_until_sigterm waits for it between two lines
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher too, which then stops this process
    host.die_with_parent(arguments.parent)
    os.nice(NICENESS)
    rank_files = RankFiles(arguments.folder)
    with rank_files.samples(arguments.node).with_suffix(".part").open("wb", buffering=0) as file:
        gpus = NvmlGpus(rank_files.read_point().spec)
        write_line(file, SamplerHeader(arguments.interval_s, tuple(gpus.uuids), gpus.highest_sm_clocks_mhz()))
        if gpus.note:
            write_line(file, SamplerNote(gpus.note))
        sample_until_sigterm(gpus, file, arguments.interval_s)


if __name__ == "__main__":
    main()
