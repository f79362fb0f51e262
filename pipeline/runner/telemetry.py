"""The telemetry sampler of a node, a separate process, so that it does not slow the ranks; and what its samples say.

    python -m pipeline.runner.telemetry FOLDER --node 0 --interval-s 0.1

The launcher starts and stops it. FOLDER holds the point's files. Each round appends one line with the state of the
CPUs and, through nvidia-ml-py, of the point's GPUs, until SIGTERM. If the sampler fails, the point runs on without it.
The summary is over the epochs of a measurement.
"""

import argparse
import bisect
import contextlib
import functools
import importlib
import itertools
import operator
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from pipeline.plan.spec import Spec
from pipeline.records.record import (
    EnergyMethod,
    Environment,
    Epoch,
    GpuWindow,
    HostWindow,
    RankEpoch,
    Telemetry,
    ThrottleReason,
    short_text,
)
from pipeline.runner.launch_options import python_variables
from pipeline.runner.rank_files import RankFiles
from pipeline.system import host

MIN_SAMPLES = 2  # fewest samples in a window to report any value
# an H200's energy counter changes ten times a second; in a shorter window the two ends cause large errors
MIN_ENERGY_SAMPLES = 5
MAX_GPU_WINDOWS = 200  # per record, to keep it small; the first epochs are kept, and they include the timed ones
MAX_NOTES = 20
# bits of NVML's clocks event reasons (nvml.h); not throttling: 0x1 idle, 0x2 clocks set by the user, 0x100 display
REASON_BITS: dict[int, ThrottleReason] = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x200: "board_limit",
    0x400: "reliability",
}
NOT_THROTTLING_BITS = 0x1 | 0x2 | 0x100

TimeSeries = list[tuple[int, float]]  # (unix_ns, value), sorted by time


class GpuSample(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a GPU; `gpu` is its index in the header. None: the driver does not give this value."""

    gpu: int
    unix_ns: int
    energy_mj: int | None
    power_mw: int | None
    sm_clock_mhz: int | None
    temperature_c: int | None
    reasons: int | None


class SamplerHeader(msgspec.Struct, frozen=True, array_like=True, tag="header"):
    """The first line of a sampler file: the interval, and of the GPUs their UUIDs and highest clocks."""

    interval_s: float
    gpus: tuple[str, ...]
    highest_sm_clocks_mhz: tuple[int | None, ...] = ()


class SamplerNote(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """A line that says why something was not sampled."""

    text: str


class SamplingRound(msgspec.Struct, frozen=True, array_like=True, tag="tick"):
    """One round of samples: the CPU ticks since boot as (busy, all), and one sample of every GPU."""

    unix_ns: int
    cpu: tuple[int, int] | None
    gpus: tuple[GpuSample, ...]


class NodeSamples(NamedTuple):
    """All samples of one node; the keys of `gpus` are UUIDs as `normalize_uuid` returns them."""

    interval_s: float | None
    rounds: list[SamplingRound]
    gpus: dict[str, list[GpuSample]]
    notes: list[str]
    highest_sm_clocks_mhz: Mapping[str, int | None] = {}


class TimeSpan(NamedTuple):
    """A time span on a node's own clock."""

    start_ns: int
    end_ns: int

    def holds(self, unix_ns: int) -> bool:
        return self.start_ns <= unix_ns <= self.end_ns


_line_decoder = msgspec.json.Decoder(SamplerHeader | SamplerNote | SamplingRound)


def normalize_uuid(uuid: str) -> str:
    """Return the UUID as torch writes it: in lower case, without the driver's prefix `GPU-`."""
    return uuid.lower().removeprefix("gpu-")


def read_node_samples(path: Path) -> NodeSamples:
    """Return the samples of one node sorted by time; lines that cannot be decoded are skipped. Raises OSError."""
    lines = list(read_sampler_lines(path))
    header = next((line for line in lines if isinstance(line, SamplerHeader)), SamplerHeader(0, ()))
    # sorted, since the node's clock may have been set back
    rounds = sorted((line for line in lines if isinstance(line, SamplingRound)), key=lambda one: one.unix_ns)
    samples = sorted((sample for one in rounds for sample in one.gpus), key=lambda sample: sample.unix_ns)
    gpus = {
        normalize_uuid(uuid): [sample for sample in samples if sample.gpu == place]
        for place, uuid in enumerate(header.gpus)
    }
    notes = [line.text for line in lines if isinstance(line, SamplerNote)]
    highest = dict(zip(map(normalize_uuid, header.gpus), header.highest_sm_clocks_mhz, strict=False))
    return NodeSamples(header.interval_s or None, rounds, gpus, notes, highest)


def read_sampler_lines(path: Path) -> Iterator[SamplerHeader | SamplerNote | SamplingRound]:
    with path.open("rb") as file:
        for raw in file:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                yield _line_decoder.decode(raw)


def summarize_telemetry(
    epochs: Sequence[Epoch], environment: Environment, nodes: Sequence[NodeSamples], max_epochs: int
) -> Telemetry:
    """Return the telemetry of every GPU that the point used and of every node, for the first `max_epochs` epochs.

    A rank's times and the samples of its GPUs are on the clock of the same node.
    """
    found = {uuid: samples for node in nodes for uuid, samples in node.gpus.items()}
    highest = {uuid: clock for node in nodes for uuid, clock in node.highest_sm_clocks_mhz.items()}
    uuids = [normalize_uuid(gpu.uuid or "") for gpu in environment.gpus]
    sampled = {place: found[uuid] for place, uuid in enumerate(uuids) if found.get(uuid)}
    notes = [f"node {place}: {note}" for place, node in enumerate(nodes) for note in node.notes]
    notes += [f"gpu {place} was not sampled" for place in range(len(uuids)) if place not in sampled]
    if len(epochs) > max_epochs:
        notes.append(f"the first {max_epochs} of {len(epochs)} epochs alone are kept")
    gpus, hosts = [], []
    for epoch in epochs[:max_epochs]:
        for place, samples in sampled.items():
            # with DataParallel one rank drives every GPU
            rank = epoch.ranks[place if len(epoch.ranks) == len(uuids) else 0]
            if window := timed_span(rank):
                gpus.append(gpu_window(epoch.epoch, place, samples, window, highest.get(uuids[place])))
        for place, node in enumerate(nodes):
            rank = epoch.ranks[place * len(epoch.ranks) // len(nodes)]
            if node.rounds and (window := timed_span(rank)):
                hosts.append(host_window(epoch.epoch, place, node.rounds, window))
    return Telemetry(
        interval_s=max((node.interval_s or 0 for node in nodes), default=0),
        gpus=tuple(gpus),
        hosts=tuple(hosts),
        notes=tuple(short_text(note) for note in notes[:MAX_NOTES]),
    )


def timed_span(rank: RankEpoch) -> TimeSpan | None:
    if rank.started_unix_ns is None or rank.epoch_time_ns is None:
        return None
    return TimeSpan(rank.started_unix_ns, rank.started_unix_ns + rank.epoch_time_ns)


def gpu_window(
    epoch: int, gpu: int, samples: Sequence[GpuSample], window: TimeSpan, highest_sm_clock_mhz: int | None = None
) -> GpuWindow:
    """Summarize a GPU's samples inside the window; a value with too few samples is None."""
    inside = [sample for sample in samples if window.holds(sample.unix_ns)]
    reasons = [sample.reasons for sample in inside if sample.reasons is not None]
    energy_j, method = energy_of(samples, window) if len(inside) >= MIN_ENERGY_SAMPLES else (None, None)
    power_mw = aggregate_if_enough([sample.power_mw for sample in inside], statistics.fmean)
    return GpuWindow(
        epoch=epoch,
        gpu=gpu,
        num_telemetry_samples=len(inside),
        median_sm_clock_mhz=aggregate_if_enough([sample.sm_clock_mhz for sample in inside], statistics.median),
        min_sm_clock_mhz=aggregate_if_enough([sample.sm_clock_mhz for sample in inside], min),
        highest_sm_clock_mhz=highest_sm_clock_mhz,
        mean_power_w=None if power_mw is None else round(power_mw / 1e3, 3),
        max_temperature_c=aggregate_if_enough([sample.temperature_c for sample in inside], max),
        throttle_reasons=name_reasons(reasons) if reasons else None,
        energy_j=energy_j,
        energy_method=method,
    )


def aggregate_if_enough(values: Iterable[int | None], aggregate: Callable[[list[float]], float]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return aggregate(known) if len(known) >= MIN_SAMPLES else None


def name_reasons(masks: Iterable[int]) -> tuple[ThrottleReason, ...]:
    """Return the throttle reasons in any of the bit masks, in the order of their bits."""
    seen = functools.reduce(operator.or_, masks, 0)
    named = tuple(name for bit, name in REASON_BITS.items() if seen & bit)
    is_other = seen & ~(NOT_THROTTLING_BITS | sum(REASON_BITS))
    return (*named, "other") if is_other else named


def energy_of(samples: Sequence[GpuSample], window: TimeSpan) -> tuple[float | None, EnergyMethod | None]:
    """Return joules and where they come from: the counter, else the power. Both None if no samples span the window."""
    counter = counter_changes([(s.unix_ns, s.energy_mj) for s in samples if s.energy_mj is not None])
    counted = clip_to_span(counter, window)
    # a falling counter was reset by the driver
    if counted and all(before[1] <= after[1] for before, after in itertools.pairwise(counted)):
        return round((counted[-1][1] - counted[0][1]) / 1e3, 3), "counter"
    powers = clip_to_span([(s.unix_ns, s.power_mw) for s in samples if s.power_mw is not None], window)
    if not powers:
        return None, None
    joules = sum((end[0] - start[0]) / 1e9 * (start[1] + end[1]) / 2e3 for start, end in itertools.pairwise(powers))
    return round(joules, 3), "power"


def counter_changes(points: TimeSeries) -> TimeSeries:
    """Return the points at which the value changes: a counter is sampled more often than it is updated."""
    return points[:1] + [after for before, after in itertools.pairwise(points) if after[1] != before[1]]


def clip_to_span(points: TimeSeries, window: TimeSpan) -> TimeSeries:
    """Return the points inside the window and its two interpolated ends; [] if the points do not span the window."""
    ends = [interpolate(points, unix_ns) for unix_ns in window]
    if ends[0] is None or ends[1] is None:
        return []
    inside = [point for point in points if window.start_ns < point[0] < window.end_ns]
    return [(window.start_ns, ends[0]), *inside, (window.end_ns, ends[1])]


def interpolate(points: TimeSeries, unix_ns: int) -> float | None:
    """Return the value at a time by linear interpolation; None before the first point and after the last."""
    place = bisect.bisect_left(points, unix_ns, key=lambda point: point[0])
    if place < len(points) and points[place][0] == unix_ns:
        return points[place][1]
    if place in (0, len(points)):
        return None
    (start_ns, start), (end_ns, end) = points[place - 1 : place + 1]
    return start + (end - start) * (unix_ns - start_ns) / (end_ns - start_ns)


def host_window(epoch: int, node: int, rounds: Sequence[SamplingRound], window: TimeSpan) -> HostWindow:
    """Return the busy share of a node's CPUs in the window; its ticks at the two ends are interpolated."""
    inside = sum(window.holds(one.unix_ns) for one in rounds)
    busy, total = (clip_to_span([(one.unix_ns, one.cpu[part]) for one in rounds if one.cpu], window) for part in (0, 1))
    share = None
    if inside >= MIN_SAMPLES and total and total[-1][1] > total[0][1]:
        share = (busy[-1][1] - busy[0][1]) / (total[-1][1] - total[0][1])
        share = round(min(1.0, max(0.0, share)), 4)  # the kernel's idle time may decrease a little
    return HostWindow(epoch=epoch, node=node, num_telemetry_samples=inside, cpu_share=share)


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
    module = "pipeline.runner.telemetry"
    command = [sys.executable, "-P", "-m", module, str(rank_files.folder), "--node", str(node)]
    command += ["--parent", str(os.getpid())]  # with which it ends
    try:
        environ = {**os.environ, **python_variables()}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ)
    except OSError as error:
        process, note = None, f"the sampler could not be started: {error}"
    try:
        yield
    finally:
        if process is not None:
            note = stop_sampler(process)
        with contextlib.suppress(OSError):
            finish_samples_file(path, note)


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
        return read_node_samples(path)
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
        uuids = [normalize_uuid(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
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
        prefix = "" if isinstance(device, int) else normalize_uuid(device)
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
        prog="python -m pipeline.runner.telemetry",
        description="Sample the GPUs and CPUs of this node until SIGTERM.",
    )
    parser.add_argument("folder", type=Path, help="the folder of the configuration's launch")
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
