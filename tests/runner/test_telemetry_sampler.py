"""The telemetry sampler: a real process with a fake driver, and points that succeed even if it fails."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import CPU_SIZE, ROOT, SMALL_GRID, Command, processes_of, succeeded, wait_for
from factories import make_spec
from slurm_queue import records_in

from pipeline.runner import telemetry_sampler
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.telemetry_summary import NodeSamples, read_node_samples

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


def with_pynvml(tmp_path: Path, text: str, mask: str | None = None) -> dict[str, str]:
    """Return an environment in which pynvml has this source."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "pynvml.py").write_text(text)
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return {**env, "PYTHONPATH": f"{tmp_path / 'fake'}:{ROOT}"} | ({"CUDA_VISIBLE_DEVICES": mask} if mask else {})


@pytest.fixture(autouse=True)
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samplers of a test are known by this variable."""
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))


SAMPLER = [sys.executable, "-m", "pipeline.runner.telemetry_sampler"]


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
    ("text", "mask", "note"),
    [
        ("raise ImportError", None, "nvidia-ml-py is not installed; install the extra `telemetry`"),
        (
            PYNVML + "def nvmlInit(): raise NVMLError('Driver Not Loaded')",
            None,
            "no GPU was sampled: Driver Not Loaded",
        ),
        (PYNVML, "-1", "CUDA_VISIBLE_DEVICES names no whole GPU"),
        (PYNVML, "MIG-aaaaaaaa-0000", "CUDA_VISIBLE_DEVICES names no whole GPU"),
    ],
    ids=["absent", "no driver", "hidden", "a slice"],
)
def test_without_readable_gpus_the_cpus_are_sampled_and_a_note_says_why(
    tmp_path: Path, text: str, mask: str | None, note: str
) -> None:
    found = sample_for_a_while(write_point(tmp_path), with_pynvml(tmp_path, text, mask))
    (said,) = found.notes
    assert (found.gpus, note in said) == ({}, True), said
    assert all(one.cpu and 0 < one.cpu[0] < one.cpu[1] for one in found.rounds)


def test_a_cpu_point_does_not_query_the_driver(tmp_path: Path) -> None:
    found = sample_for_a_while(write_point(tmp_path, device="cpu"), with_pynvml(tmp_path, PYNVML))
    assert (found.gpus, found.notes) == ({}, [])


def test_the_sampler_has_low_priority_and_ends_with_its_parent(tmp_path: Path) -> None:
    rank_files = write_point(tmp_path, device="cpu")
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
        assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + telemetry_sampler.NICENESS)
        parent.kill()
    wait_for(lambda: processes_of(tmp_path) == [], timeout_s=20)


def test_sampling_spans_the_body_and_leaves_a_complete_file(tmp_path: Path) -> None:
    rank_files = write_point(tmp_path, device="cpu")
    rank_files.samples(0).write_text('["note", "of an earlier launch"]')
    with telemetry_sampler.sample_in_background(rank_files, 0):
        wait_for_rounds(rank_files)
        assert not rank_files.samples(0).exists()
    assert processes_of(tmp_path) == []
    (node,) = telemetry_sampler.read_all_nodes(rank_files, 1)
    assert (node.interval_s, node.notes) == (telemetry_sampler.SAMPLING_INTERVAL_S, [])
    assert len(node.rounds) >= 2  # one from inside the body, and the last one


def test_a_sampler_that_is_still_ending_when_it_is_stopped_ended_early() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        process.kill()
        with mock.patch.object(process, "poll", return_value=None):
            assert telemetry_sampler.stop_sampler(process) == "the sampler ended early (signal 9)"


def test_a_sampler_that_is_killed_leaves_its_samples_and_a_note(tmp_path: Path) -> None:
    rank_files = write_point(tmp_path, device="cpu")
    with telemetry_sampler.sample_in_background(rank_files, 0):
        part = wait_for_rounds(rank_files)
        (sampler,) = processes_of(tmp_path)
        os.kill(sampler, signal.SIGKILL)
        wait_for(lambda: processes_of(tmp_path) == [])
        with part.open("ab") as file:
            file.write(b'["tick", 17')  # incomplete
    (node,) = telemetry_sampler.read_all_nodes(rank_files, 1)
    assert (node.notes, node.rounds != []) == (["the sampler ended early (signal 9)"], True)


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"], ids=["cannot start", "fails"])
def test_a_sampler_that_does_not_start_does_not_disturb_the_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    rank_files = write_point(tmp_path, device="cpu")
    monkeypatch.setattr(sys, "executable", python)
    done = []
    with telemetry_sampler.sample_in_background(rank_files, 0):
        if python == "/bin/false":
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # it has ended by itself
        done.append(True)
    (node,) = telemetry_sampler.read_all_nodes(rank_files, 1)
    assert (done, node.rounds, len(node.notes)) == ([True], [], 1)
    assert node.notes[0].startswith("the sampler ")


def test_what_the_body_raises_is_raised_and_the_sampler_ended(tmp_path: Path) -> None:
    rank_files = write_point(tmp_path, device="cpu")
    with pytest.raises(RuntimeError, match="the ranks"), telemetry_sampler.sample_in_background(rank_files, 0):
        raise RuntimeError("the ranks did not meet")
    assert processes_of(tmp_path) == []


def test_a_node_without_a_file_has_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_sampler, "OTHER_NODES_WAIT_S", 0)
    rank_files = write_point(tmp_path, device="cpu")
    rank_files.samples(0).write_text('["header", 0.1, []]\n["tick", 5, [1, 2], []]\n')
    first, second = telemetry_sampler.read_all_nodes(rank_files, 2)
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
    assert telemetry_sampler.visible_gpu_indices(UUIDS, mask) == indices


def launch_on_cpu(pipeline: Command, tmp_path: Path, num_samples: int, **env: str) -> dict[str, Any]:
    """Run one CPU point with four samples per step, and return its record."""
    arguments = ("--grid", SMALL_GRID, "--index", "0", "--outputs", tmp_path)
    size = [change for change in CPU_SIZE if not change.startswith("num_samples")]
    sizes = (*size, f"num_samples={num_samples}", "batch_size_per_gpu=4", "strategy=single", "num_gpus=1")
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "PIPELINE"))}
    succeeded(pipeline("launch", *arguments, "--set", *sizes, env={**plain, **env}))
    (record,) = records_in(tmp_path)
    return record


@pytest.mark.training
def test_a_cpu_point_records_the_cpu_share_of_every_epoch_and_no_gpu(pipeline: Command, tmp_path: Path) -> None:
    record = launch_on_cpu(pipeline, tmp_path, 1600)
    sampled = record["telemetry"]
    assert record["status"] == "ok"
    assert (sampled["gpus"], sampled["notes"], sampled["interval_s"]) == ([], [], 0.1)
    epochs = [(host["epoch"], host["node"]) for host in sampled["hosts"]]
    assert epochs == [(epoch["epoch"], 0) for epoch in record["measurement"]["epochs"]]
    shares = [host["cpu_share"] for host in sampled["hosts"] if host["num_samples"] >= 2]
    assert shares  # an epoch of 400 steps takes longer than two samples
    assert all(0 < share <= 1 for share in shares)


@pytest.mark.training
def test_a_point_succeeds_without_its_sampler(pipeline: Command, tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    # Python runs this file at startup; it ends the sampler and nothing else
    (tmp_path / "fake" / "sitecustomize.py").write_text(
        "import os, sys\nif 'pipeline.runner.telemetry_sampler' in ' '.join(sys.orig_argv): os._exit(3)\n"
    )
    record = launch_on_cpu(pipeline, tmp_path, 64, PYTHONPATH=str(tmp_path / "fake"))
    assert (record["status"], record["telemetry"]["hosts"]) == ("ok", [])
    assert record["telemetry"]["notes"] == ["node 0: the sampler ended early (exit code 3)"]
