"""What samples come to over a window: energies and clocks worked by hand, and None where they say too little.

The sampler is a real process with a fake driver, and points succeed even if it fails.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from conftest import CPU_SIZE, ROOT, SMALL_GRID, Command, processes_of, succeeded, wait_for
from factories import make_measurement, make_record, make_spec, write_file
from slurm_queue import records_in

from pipeline.records import store
from pipeline.records.record import Environment, Epoch, Gpu, GpuWindow
from pipeline.runner import telemetry
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.telemetry import (
    MAX_GPU_WINDOWS,
    GpuSample,
    NodeSamples,
    SamplingRound,
    TimeSpan,
    energy_of,
    gpu_window,
    host_window,
    name_reasons,
    read_node_samples,
    summarize_telemetry,
)

S = 1_000_000_000  # nanoseconds
T0 = 1_700_000_000 * S
UUID = "aaaaaaaa-0000-0000-0000-00000000000{}"


def at(time_s: float, **fields: Any) -> GpuSample:
    """A sample so many seconds after T0: 200 W steadily, the counter from 1000 J on, unless said otherwise."""
    facts: dict[str, Any] = {
        "energy_mj": 1_000_000 + round(200_000 * time_s),
        "power_mw": 200_000,
        "sm_clock_mhz": 1980,
        "temperature_c": 40,
        "reasons": 0,
    }
    return GpuSample(gpu=0, unix_ns=T0 + round(time_s * S), **{**facts, **fields})


def every(interval_s: float, until_s: float, **fields: Any) -> list[GpuSample]:
    return [at(step * interval_s, **fields) for step in range(round(until_s / interval_s) + 1)]


def window(start_s: float, end_s: float) -> TimeSpan:
    return TimeSpan(T0 + round(start_s * S), T0 + round(end_s * S))


RESET = [at(step / 10, energy_mj=20_000 * (step if step < 15 else step - 15)) for step in range(31)]  # by the driver


def tick(time_s: float, cpu: tuple[int, int] | None, gpus: Sequence[GpuSample] = ()) -> SamplingRound:
    return SamplingRound(T0 + round(time_s * S), cpu, tuple(gpus))


@pytest.mark.parametrize(
    ("samples", "start_s", "end_s", "energy"),
    [
        (every(0.1, 3), 0.55, 2.05, (300.0, "counter")),  # 1.5 s of 200 W, interpolated at both ends
        (every(0.1, 3, power_mw=1), 1, 2, (200.0, "counter")),  # the driver's mean lags behind
        # 1 J each 0.4 s, halfway between moves at both ends: 1.5 J to 4.5 J
        ([at(step / 10, energy_mj=1_000 * (step // 4)) for step in range(41)], 0.6, 1.8, (3.0, "counter")),
        # without a counter, and with one that stands still: the mean of 50 W and 350 W, for 3 s
        *(
            ([at(s, power_mw=round(100_000 * s), energy_mj=value) for s in range(5)], 0.5, 3.5, (600.0, "power"))
            for value in (None, 0)
        ),
        (RESET, 1, 2, (200.0, "power")),
        (RESET, 1.6, 2.6, (200.0, "counter")),  # after the reset it is sound again
        *((every(0.1, 3), *ends, (None, None)) for ends in ((-1, 1), (2, 4), (5, 6))),  # not spanned
    ],
)
def test_the_energy_of_a_window_is_that_of_the_counter_else_of_the_power(
    samples: list[GpuSample], start_s: float, end_s: float, energy: tuple[float | None, str | None]
) -> None:
    assert energy_of(samples, window(start_s, end_s)) == energy


def test_a_window_between_two_samples_has_no_figures() -> None:
    assert gpu_window(2, 0, every(0.1, 3), window(1.01, 1.09)) == GpuWindow(epoch=2, gpu=0, num_telemetry_samples=0)


@pytest.mark.parametrize(
    ("end_s", "num_samples", "clock", "energy_j"),
    [(1.05, 1, None, None), (1.15, 2, 1980, None), (1.35, 4, 1980, None), (1.45, 5, 1980, 100.0)],  # 0.5 s of 200 W
)
def test_a_clock_takes_two_samples_and_an_energy_five(
    end_s: float, num_samples: int, clock: float | None, energy_j: float | None
) -> None:
    found = gpu_window(2, 0, every(0.1, 3), window(0.95, end_s))
    assert (found.num_telemetry_samples, found.median_sm_clock_mhz, found.energy_j) == (num_samples, clock, energy_j)


def test_a_window_holds_its_own_samples_alone() -> None:
    outside = [at(time_s, sm_clock_mhz=1, power_mw=9, temperature_c=99, reasons=0x8) for time_s in (0, 0.5, 3.5, 4)]
    clocks, powers = (1980, 1200, 1500), (300_000, 100_000, 350_000)
    inside = [
        at(1 + place, sm_clock_mhz=clocks[place], power_mw=powers[place], temperature_c=50 + place, reasons=0x4 * place)
        for place in range(3)
    ]
    found = gpu_window(2, 1, [*outside[:2], *inside, *outside[2:]], window(0.9, 3.1))
    assert (found.epoch, found.gpu, found.num_telemetry_samples) == (2, 1, 3)
    assert (found.median_sm_clock_mhz, found.min_sm_clock_mhz, found.mean_power_w) == (1500, 1200, 250)
    assert (found.max_temperature_c, found.throttle_reasons) == (52, ("sw_power_cap", "hw_slowdown"))


@pytest.mark.parametrize(
    ("masks", "names"),
    [
        ([0], ()),
        ([0x1, 0x2, 0x100, 0x103], ()),  # idle, clocks set by hand, display
        ([0x1 | 0x4], ("sw_power_cap",)),
        ([0x40, 0x20, 0x40], ("sw_thermal_slowdown", "hw_thermal_slowdown")),
        ([0x80 | 0x8], ("hw_slowdown", "hw_power_brake")),
        ([0x8000], ("other",)),
    ],
)
def test_reasons_are_named_and_the_harmless_are_left_out(masks: list[int], names: tuple[str, ...]) -> None:
    assert name_reasons(masks) == names


def test_reasons_that_the_driver_does_not_give_are_unknown_and_not_none() -> None:
    assert gpu_window(2, 0, every(0.1, 3, reasons=None), window(1, 2)).throttle_reasons is None
    assert gpu_window(2, 0, every(0.1, 3), window(1, 2)).throttle_reasons == ()


def test_the_cpu_share_is_that_of_the_ticks_between_the_ends() -> None:
    ticks = [tick(0, (0, 0)), tick(1, (100, 400)), tick(2, (400, 800)), tick(3, (400, 1200))]
    found = host_window(2, 0, ticks, window(0.5, 2.5))
    assert (found.num_telemetry_samples, found.cpu_share) == (2, 0.4375)  # (400 - 50) / (1000 - 200)
    assert host_window(2, 0, ticks, window(1.2, 1.8)).cpu_share is None
    assert host_window(2, 0, ticks, window(0.5, 3.5)).cpu_share is None
    assert host_window(2, 0, [tick(t, None) for t in range(4)], window(0.5, 2.5)).cpu_share is None


def make_node(uuids: Sequence[str], power_w: Sequence[int], until_s: float = 6) -> NodeSamples:
    """A node whose GPUs draw so much steadily, sampled ten times a second; its CPUs are half busy."""
    steps = range(round(until_s * 10) + 1)
    gpus = {
        uuid: [at(step / 10, energy_mj=100 * watts * step, power_mw=1000 * watts) for step in steps]
        for uuid, watts in zip(uuids, power_w, strict=True)
    }
    return NodeSamples(0.1, [tick(step / 10, (step, 2 * step)) for step in steps], gpus, [])


def started(epochs: Sequence[Epoch], starts_s: Sequence[float]) -> list[Epoch]:
    """The epochs with all their ranks started at those times."""
    return [
        msgspec.structs.replace(
            epoch,
            ranks=tuple(msgspec.structs.replace(rank, started_unix_ns=T0 + round(start_s * S)) for rank in epoch.ranks),
        )
        for epoch, start_s in zip(epochs, starts_s, strict=True)
    ]


def two_epochs(num_gpus: int = 2, strategy: str = "ddp", **fields: Any) -> list[Epoch]:
    """Two epochs of 2 s and 1 s, from 1 s and from 4 s after T0."""
    return started(make_measurement(make_spec(strategy=strategy, num_gpus=num_gpus, **fields)).epochs, (1, 4))


def environment(*numbers: int) -> Environment:
    return Environment(gpus=tuple(Gpu(name="H200", uuid=UUID.format(number)) for number in numbers))


def test_every_epoch_of_every_gpu_that_was_used_is_a_window_and_no_other_gpu_counts() -> None:
    node = make_node([UUID.format(number) for number in range(4)], [100, 200, 300, 400])
    found = summarize_telemetry(two_epochs(), environment(3, 1), [node], 10)
    assert [(w.epoch, w.gpu, w.energy_j) for w in found.gpus] == [(1, 0, 800), (1, 1, 400), (2, 0, 400), (2, 1, 200)]
    assert [(host.epoch, host.node, host.cpu_share) for host in found.hosts] == [(1, 0, 0.5), (2, 0, 0.5)]
    assert (found.interval_s, found.notes) == (0.1, ())


def test_a_window_has_the_highest_clock_of_its_gpu() -> None:
    uuids = [UUID.format(0), UUID.format(1)]
    node = make_node(uuids, [100, 200])._replace(highest_sm_clocks_mhz=dict(zip(uuids, (1980, None), strict=True)))
    found = summarize_telemetry(two_epochs(), environment(1, 0), [node], 10)
    assert [(window.gpu, window.highest_sm_clock_mhz) for window in found.gpus[:2]] == [(0, None), (1, 1980)]


def test_under_data_parallel_one_rank_has_every_gpu() -> None:
    node = make_node([UUID.format(0), UUID.format(1)], [100, 200])
    found = summarize_telemetry(two_epochs(strategy="dp"), environment(0, 1), [node], 10)
    assert [(w.gpu, w.energy_j) for w in found.gpus if w.epoch == 2] == [(0, 100), (1, 200)]


def test_each_node_has_its_own_clock() -> None:
    (first, second) = two_epochs(num_nodes=2)
    late = msgspec.structs.replace(second.ranks[1], started_unix_ns=T0 + 100 * S)  # its node's clock is ahead
    second = msgspec.structs.replace(second, ranks=(second.ranks[0], late))
    ahead = make_node([UUID.format(1)], [200])
    ahead = ahead._replace(
        gpus={
            uuid: [msgspec.structs.replace(sample, unix_ns=sample.unix_ns + 96 * S) for sample in samples]
            for uuid, samples in ahead.gpus.items()
        },
        rounds=[msgspec.structs.replace(one, unix_ns=one.unix_ns + 96 * S) for one in ahead.rounds],
    )
    found = summarize_telemetry([first, second], environment(0, 1), [make_node([UUID.format(0)], [100]), ahead], 10)
    assert [(w.gpu, w.energy_j) for w in found.gpus if w.epoch == 2] == [(0, 100), (1, 200)]
    assert [(host.node, host.cpu_share) for host in found.hosts if host.epoch == 2] == [(0, 0.5), (1, 0.5)]


def test_what_is_missing_is_said() -> None:
    node = make_node([UUID.format(0)], [100])._replace(notes=["the sampler ended early (signal 9)"])
    found = summarize_telemetry(two_epochs(), environment(0, 1), [node], 1)
    assert found.notes == (
        "node 0: the sampler ended early (signal 9)",
        "gpu 1 was not sampled",
        "the first 1 of 2 epochs alone are kept",
    )
    assert {window.epoch for window in found.gpus} == {1}
    untimed = make_measurement(make_spec()).epochs  # without the start of its clock
    assert summarize_telemetry(untimed, environment(0), [node], 10).gpus == ()


def test_a_file_is_read_as_far_as_its_lines_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "samples.0.jsonl"
    lines = [
        ["header", 0.1, ["GPU-" + UUID.format(0).upper()]],
        ["tick", T0 + S, [1, 2], [[0, T0 + S, 7, 8, 9, 10, 4], [5, T0, 0, 0, 0, 0, 0]]],
        ["tick", T0, [0, 1], [[0, T0, None, None, None, None, None]]],
    ]
    whole = "\n".join(json.dumps(line) for line in lines)
    path.write_bytes(whole.encode() + b'\n["tick", 17\n\xff\xfe\n["note", "why"]\n["tick", 1')
    found = read_node_samples(path)
    assert (found.interval_s, found.notes) == (0.1, ["why"])
    assert [one.cpu for one in found.rounds] == [(0, 1), (1, 2)]  # in the order of time
    assert {uuid: [one.energy_mj for one in samples] for uuid, samples in found.gpus.items()} == {
        UUID.format(0): [None, 7]
    }


def test_a_record_of_many_gpus_and_epochs_stays_small_and_is_loaded_as_it_was(tmp_path: Path) -> None:
    spec = make_spec(strategy="ddp", num_gpus=8, epochs=100)
    measurement = make_measurement(spec, [0.9] * 100)
    epochs = started(measurement.epochs, range(100))
    node = make_node([UUID.format(number) for number in range(8)], [101 + number for number in range(8)], 100)
    found = summarize_telemetry(epochs, environment(*range(8)), [node], MAX_GPU_WINDOWS // 8)
    assert len(found.gpus) == MAX_GPU_WINDOWS
    alone = len(store.encode_record(make_record(spec, measurement=measurement)))
    record = make_record(spec, measurement=measurement, telemetry=found)
    assert len(store.encode_record(record)) - alone < 150_000
    assert store.load_record(store.publish_record(record, tmp_path)).telemetry == found


UUIDS = [f"{letter * 8}-0000-0000-0000-000000000000" for letter in "abcd"]
# four GPUs; the last is old: no energy counter, and throttle reasons under the old name
PYNVML = f"""
import time
NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 4
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(gpu): return "GPU-" + {UUIDS!r}[gpu]
def nvmlDeviceGetTotalEnergyConsumption(gpu):
    if gpu == 3: raise NVMLError("Not Supported")
    return int(time.time() * 1000) * 100 * (gpu + 1)
def nvmlDeviceGetPowerUsage(gpu): return 100_000 * (gpu + 1)
def nvmlDeviceGetClockInfo(gpu, kind): return 1000 * kind + gpu
def nvmlDeviceGetMaxClockInfo(gpu, kind): return 1980 - gpu if kind == NVML_CLOCK_SM else 0
def nvmlDeviceGetTemperature(gpu, kind): return 40 + gpu
def nvmlDeviceGetCurrentClocksEventReasons(gpu):
    if gpu == 3: raise NVMLError("Function Not Found")
    return 4
def nvmlDeviceGetCurrentClocksThrottleReasons(gpu): return 32
"""


def write_point(tmp_path: Path, **fields: Any) -> RankFiles:
    rank_files = RankFiles(tmp_path / "rank_files")
    rank_files.write_point(PointTask(make_spec(**fields), None))
    return rank_files


@pytest.fixture
def rank_files(tmp_path: Path) -> RankFiles:
    """The files of a point on the CPU."""
    return write_point(tmp_path, device="cpu")


def with_pynvml(tmp_path: Path, text: str, mask: str | None = None) -> dict[str, str]:
    """Return an environment in which pynvml has this source."""
    write_file(tmp_path / "fake" / "pynvml.py", text)
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return {**env, "PYTHONPATH": f"{tmp_path / 'fake'}:{ROOT}"} | ({"CUDA_VISIBLE_DEVICES": mask} if mask else {})


@pytest.fixture(autouse=True)
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samplers of a test are known by this variable."""
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))


SAMPLER = [sys.executable, "-m", "pipeline.runner.telemetry"]


def wait_for_rounds(rank_files: RankFiles, count: int = 1) -> Path:
    """Wait until the sampler has written so many rounds; return its unfinished file."""
    part = rank_files.samples(0).with_suffix(".part")
    wait_for(lambda: part.exists() and len(read_node_samples(part).rounds) >= count)
    return part


def sample_for_a_while(rank_files: RankFiles, env: Mapping[str, str] | None = None) -> NodeSamples:
    """Return the samples of a sampler that ran for at least three rounds."""
    process = subprocess.Popen([*SAMPLER, str(rank_files.folder), "--interval-s", "0.01"], cwd=ROOT, env=env)
    part = wait_for_rounds(rank_files, 3)
    process.terminate()
    assert process.wait(30) == 0
    return read_node_samples(part)


def test_the_sampler_reads_the_first_gpus_of_the_mask_that_the_point_uses(tmp_path: Path) -> None:
    rank_files = write_point(tmp_path, strategy="ddp", num_gpus=2)
    found = sample_for_a_while(rank_files, with_pynvml(tmp_path, PYNVML, mask="3,1,0"))
    assert list(found.gpus) == [UUIDS[3], UUIDS[1]]
    old, new = found.gpus[UUIDS[3]][-1], found.gpus[UUIDS[1]][-1]
    figures = [(one.power_mw, one.sm_clock_mhz, one.temperature_c, one.reasons) for one in (old, new)]
    assert (old.energy_mj, figures) == (None, [(400_000, 1003, 43, 32), (200_000, 1001, 41, 4)])
    energies = [sample.energy_mj or 0 for sample in found.gpus[UUIDS[1]]]
    assert energies == sorted(energies)
    assert energies[-1] > energies[0] > 0
    assert len(found.gpus[UUIDS[3]]) == len(found.rounds) >= 3
    assert (found.highest_sm_clocks_mhz, found.notes) == ({UUIDS[3]: 1977, UUIDS[1]: 1979}, [])


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("device", "text", "mask", "notes"),
    [
        ("cuda", "raise ImportError", None, ["nvidia-ml-py is not installed; install the extra `telemetry`"]),
        (
            *("cuda", PYNVML + "def nvmlInit(): raise NVMLError('Driver Not Loaded')", None),
            ["no GPU was sampled: Driver Not Loaded"],
        ),
        ("cuda", PYNVML, "-1", ["CUDA_VISIBLE_DEVICES names no whole GPU"]),
        ("cuda", PYNVML, "MIG-aaaaaaaa-0000", ["CUDA_VISIBLE_DEVICES names no whole GPU"]),
        ("cpu", PYNVML, None, []),  # the driver is not asked
    ],
    ids=["absent", "no driver", "hidden", "a slice", "on a CPU"],
)
def test_without_readable_gpus_the_cpus_are_sampled_and_a_note_says_why(
    tmp_path: Path, device: str, text: str, mask: str | None, notes: list[str]
) -> None:
    found = sample_for_a_while(write_point(tmp_path, device=device), with_pynvml(tmp_path, text, mask))
    assert (found.gpus, len(found.notes)) == ({}, len(notes)), found.notes
    assert all(note in said for note, said in zip(notes, found.notes, strict=True))
    assert all(one.cpu and 0 < one.cpu[0] < one.cpu[1] for one in found.rounds)


def test_the_sampler_has_low_priority_and_ends_with_its_parent(tmp_path: Path, rank_files: RankFiles) -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL); "
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, *SAMPLER, str(rank_files.folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        sampler = int(parent.stdout.readline())
        wait_for_rounds(rank_files)
        niceness = os.getpriority(os.PRIO_PROCESS, sampler)
        assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + telemetry.NICENESS)
        parent.kill()
    wait_for(lambda: processes_of(tmp_path) == [], timeout_s=20)


def test_sampling_spans_the_body_and_leaves_a_complete_file(tmp_path: Path, rank_files: RankFiles) -> None:
    rank_files.samples(0).write_text('["note", "of an earlier launch"]')
    with telemetry.sample_in_background(rank_files, 0):
        wait_for_rounds(rank_files)
        assert not rank_files.samples(0).exists()
    assert processes_of(tmp_path) == []
    (node,) = telemetry.read_all_nodes(rank_files, 1)
    assert (node.interval_s, node.notes) == (telemetry.SAMPLING_INTERVAL_S, [])
    assert len(node.rounds) >= 2  # one from inside the body, and the last one


def test_a_sampler_that_is_still_ending_when_it_is_stopped_ended_early() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        process.kill()
        with mock.patch.object(process, "poll", return_value=None):
            assert telemetry.stop_sampler(process) == "the sampler ended early (signal 9)"


def test_a_sampler_that_is_killed_leaves_its_samples_and_a_note(tmp_path: Path, rank_files: RankFiles) -> None:
    with telemetry.sample_in_background(rank_files, 0):
        part = wait_for_rounds(rank_files)
        (sampler,) = processes_of(tmp_path)
        os.kill(sampler, signal.SIGKILL)
        wait_for(lambda: processes_of(tmp_path) == [])
        with part.open("ab") as file:
            file.write(b'["tick", 17')  # incomplete
    (node,) = telemetry.read_all_nodes(rank_files, 1)
    assert (node.notes, node.rounds != []) == (["the sampler ended early (signal 9)"], True)


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"], ids=["cannot start", "fails"])
def test_a_sampler_that_does_not_start_does_not_disturb_the_body(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    done = []
    with telemetry.sample_in_background(rank_files, 0):
        if python == "/bin/false":
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # it has ended by itself
        done.append(True)
    (node,) = telemetry.read_all_nodes(rank_files, 1)
    assert (done, node.rounds, len(node.notes)) == ([True], [], 1)
    assert node.notes[0].startswith("the sampler ")


def test_what_the_body_raises_is_raised_and_the_sampler_ended(tmp_path: Path, rank_files: RankFiles) -> None:
    with pytest.raises(RuntimeError, match="the ranks"), telemetry.sample_in_background(rank_files, 0):
        raise RuntimeError("the ranks did not meet")
    assert processes_of(tmp_path) == []


def test_a_node_without_a_file_has_a_note(rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "OTHER_NODES_WAIT_S", 0)
    rank_files.samples(0).write_text('["header", 0.1, []]\n["tick", 5, [1, 2], []]\n')
    first, second = telemetry.read_all_nodes(rank_files, 2)
    assert (len(first.rounds), first.notes) == (1, [])
    assert (second.rounds, second.notes) == ([], ["its samples cannot be read: No such file or directory"])


@pytest.mark.parametrize(
    ("mask", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("GPU-bbbb,GPU-" + UUIDS[0], [1, 0]),
        ("0,-1,1", [0]),  # as in CUDA, an invalid entry hides all later ones
        ("0,9,1", [0]),
        ("1,GPU-zzzz,0", [1]),
        ("", []),
        ("NoDevFiles", []),
        ("GPU-", []),  # matches every UUID
        ("MIG-aaaaaaaa", []),
    ],
)
def test_the_mask_selects_gpus_by_index_or_uuid(mask: str | None, indices: list[int]) -> None:
    assert telemetry.visible_gpu_indices(UUIDS, mask) == indices


@pytest.mark.training
def test_a_cpu_point_records_the_cpu_share_of_every_epoch_and_no_gpu(pipeline: Command, tmp_path: Path) -> None:
    sizes = (*CPU_SIZE, "num_samples=1600", "batch_size_per_gpu=4", "strategy=single", "num_gpus=1")
    arguments = ("--grid", SMALL_GRID, "--index", "0", "--outputs", tmp_path, "--set")
    succeeded(pipeline("launch", *arguments, *sizes[:4], *sizes[5:]))
    (record,) = records_in(tmp_path)
    sampled = record["telemetry"]
    assert record["status"] == "ok"
    assert (sampled["gpus"], sampled["notes"], sampled["interval_s"]) == ([], [], 0.1)
    epochs = [(host["epoch"], host["node"]) for host in sampled["hosts"]]
    assert epochs == [(epoch["epoch"], 0) for epoch in record["measurement"]["epochs"]]
    shares = [host["cpu_share"] for host in sampled["hosts"] if host["num_samples"] >= 2]
    assert shares  # an epoch of 400 steps takes longer than two samples
    assert all(0 < share <= 1 for share in shares)
