"""A point whose loader finds shared memory full fails at once, and the reason says what was full."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, wait_for, workers_of
from factories import assert_says, only_record

from pipeline.records.folder import Experiment
from pipeline.runner.failures import describe_exception
from pipeline.system import host

GRID = """
name: loading
base: {device: cpu, model: lenet, dataset: synthetic, input: dataloader, precision: fp32, strategy: single, num_gpus: 1}
points:
  - {num_workers: [2], batch_size_per_gpu: [16], num_samples: [2000], epochs: [EPOCHS]}
"""


@contextlib.contextmanager
def running_point(folder: Path, epochs: int, mount: str = "true") -> Iterator[subprocess.Popen[str]]:
    """Run the point, with two loader workers, in a new mount namespace after the shell line `mount`."""
    (folder / "grid.yaml").write_text(GRID.replace("EPOCHS", str(epochs)))
    submit = f"{sys.executable} -m pipeline.submit --grid {folder}/grid.yaml --outputs {folder} --cluster local"
    driver = subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{mount} && exec {submit}"],
        cwd=ROOT,
        env={**os.environ, "TEST_FOLDER": str(folder)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield driver
    finally:
        driver.terminate()
        driver.wait()


def reason_of_failure(folder: Path, driver: subprocess.Popen[str]) -> str:
    stderr = driver.communicate(timeout=300)[1]
    record = only_record(Experiment(folder / "loading"))
    assert (driver.returncode, record.status) == (1, "failed"), stderr
    return record.reason


@pytest.mark.fault("F19")
@pytest.mark.training
@pytest.mark.parametrize(("size_kib", "filled_kib"), [(64, 64), (1024, 800)], ids=["full", "full after some batches"])
def test_shared_memory_that_is_too_small_is_named_with_its_size(tmp_path: Path, size_kib: int, filled_kib: int) -> None:
    mount = f"mount -t tmpfs -o size={size_kib}k tmpfs /dev/shm && head -c {filled_kib}k /dev/zero > /dev/shm/other"
    with running_point(tmp_path, 1, mount) as driver:
        reason = reason_of_failure(tmp_path, driver)
    assert_says(reason, f"shared memory is /dev/shm of {size_kib:,} KiB, ", "enlarge it")


@pytest.mark.fault("F19")
@pytest.mark.training
@pytest.mark.parametrize("victim", ["worker", "rank"])
def test_a_process_that_dies_of_sigbus_names_shared_memory(tmp_path: Path, victim: str) -> None:
    with running_point(tmp_path, 1000) as driver:
        worker, rank = wait_for(lambda: find_loader_worker(tmp_path), 200)
        os.kill(worker if victim == "worker" else rank, signal.SIGBUS)
        reason = reason_of_failure(tmp_path, driver)
    assert f"shared memory is /dev/shm of {os.statvfs('/dev/shm').f_blocks * 4096 // 1024:,} KiB, " in reason


@pytest.mark.training
@pytest.mark.fault("F18")
def test_a_loader_worker_that_is_killed_ends_its_point_and_is_named(tmp_path: Path) -> None:
    with running_point(tmp_path, 1000) as driver:
        worker, _ = wait_for(lambda: find_loader_worker(tmp_path), 200)
        os.kill(worker, signal.SIGKILL)
        killed_s = time.monotonic()
        reason = reason_of_failure(tmp_path, driver)
    assert time.monotonic() - killed_s < 15
    assert re.search(rf"DataLoader worker \(pid(\(s\))? {worker}\)", reason), reason
    assert workers_of(tmp_path) == []


def find_loader_worker(folder: Path) -> tuple[int, int] | None:
    """Return the process ids of a loader worker, found by the name that torch gives it, and of its rank."""
    for rank in workers_of(folder):
        for path in Path(f"/proc/{rank}/task").glob("*/children"):
            for child in path.read_text().split():
                with contextlib.suppress(OSError):  # the child has ended since
                    if Path(f"/proc/{child}/comm").read_text().startswith("pt_data_worker"):
                        return int(child), rank
    return None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unable to open shared memory object </torch_1_2> in read-write mode: No space left on device (28)", True),
        ("unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)", False),
        ("unable to write to file </torch_1_2>: No space left on device (28)", True),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", True),
        ("DataLoader worker (pid(s) 7) exited unexpectedly", True),
        ("Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)", True),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", False),
        ("out of resource: shared memory, Required: 131072, Hardware limit: 101376", False),  # the GPU's shared memory
    ],
)
def test_a_shared_memory_error_is_recognised_by_its_text(text: str, expected: bool) -> None:
    assert ("; shared memory is " in describe_exception(RuntimeError(text))) == expected


def test_an_error_caused_by_a_bus_error_names_shared_memory_and_keeps_its_own_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path / "absent")
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly\nhere")
    error.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. ")
    first, *rest = describe_exception(error).splitlines()
    said = f"Bus error.; shared memory is {tmp_path / 'absent'} (No such file or directory); if"
    assert said in first
    assert rest == ["RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly", "here"]
