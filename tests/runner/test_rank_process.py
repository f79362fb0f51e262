"""The errors that a rank reports, and the id of the boot that it runs under."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
import pytest
import torch
from conftest import ROOT
from factories import assert_says, make_record, make_script_spec, make_spec, raising, write_file

from pipeline.figures.comparability import unlike_nodes_notes
from pipeline.figures.formulas import GIB
from pipeline.plan.spec import Spec
from pipeline.records.record import Environment, Gpu, Measurement
from pipeline.report.table import render_note
from pipeline.runner import rank_process
from pipeline.runner.rank_files import PointTask, RankError, RankFiles
from pipeline.runner.script_blocks import ScriptProblem
from pipeline.system import host
from pipeline.training import links, provenance
from pipeline.training.devices import CONTEXT_BYTES, GpuProblem
from pipeline.training.process_group import Rank
from pipeline.workloads import user_code


@pytest.mark.parametrize("num_ooms", [0, 2])
def test_torchs_allocator_tells_if_it_refused_memory(monkeypatch: pytest.MonkeyPatch, num_ooms: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: {"num_ooms": num_ooms} if index else {})
    assert rank_process.did_gpu_allocator_refuse() is (num_ooms > 0)


def test_the_boot_id_is_none_if_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text("8d0a3c5e-0000-4000-8000-000000000001\n")
    monkeypatch.setattr(host, "BOOT_ID_PATH", tmp_path / "boot_id")
    assert host.boot_id() == "8d0a3c5e-0000-4000-8000-000000000001"
    monkeypatch.setattr(host, "BOOT_ID_PATH", tmp_path / "absent")
    assert host.boot_id() is None


@pytest.fixture
def only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the only rank."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("only_rank")
def test_what_a_script_has_started_is_ended_before_the_memory_of_others_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a loader outlives a script that is killed, and holds its GPU memory."""

    class Killed:
        def __init__(self, *arguments: object) -> None: ...

        def run(self) -> None:
            subprocess.run(["sh", "-c", "sleep 100 &"], check=True)
            assert host.children_of(os.getpid())
            raise ScriptProblem("killed")

    def describe(spec: Spec, rank: Rank) -> NoReturn:
        sys.exit(1 if host.children_of(os.getpid()) else 0)

    monkeypatch.setattr(rank_process, "ScriptRank", Killed)
    monkeypatch.setattr(rank_process, "describe_script_rank", describe)
    point = PointTask(make_script_spec("train.py", device="cpu"), None)
    arguments = (point, RankFiles(tmp_path), None)
    process = multiprocessing.get_context("fork").Process(target=rank_process.run_script, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.fixture
def rank_files(tmp_path: Path, only_rank: None, monkeypatch: pytest.MonkeyPatch) -> RankFiles:
    """The files of a point whose only rank is this process, which raises SystemExit where a rank ends at once."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = RankFiles(tmp_path)
    found.write_point(PointTask(make_spec(batch_size_per_gpu=8192), None))
    return found


def report_of(rank_files: RankFiles, error: Exception) -> RankError:
    """Return the error file that a rank writes when this error ends it."""
    with pytest.raises(SystemExit), rank_process.record_rank_errors(rank_files):
        raise error
    (found,) = rank_files.read_errors()
    return found


@pytest.fixture
def affinity() -> Iterator[set[int]]:
    """The CPUs of this process, which it gets back after the test."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


AFFINITY = "import os; print(*os.sched_getaffinity(0))"


@pytest.mark.parametrize("script", [None, "train.py"])
@pytest.mark.parametrize("numa_binding", ["none", "gpu"])
def test_a_rank_is_bound_before_it_starts_a_script_or_a_workload(
    rank_files: RankFiles,
    monkeypatch: pytest.MonkeyPatch,
    affinity: set[int],
    script: str | None,
    numa_binding: Literal["none", "gpu"],
) -> None:
    """The GPU of rank 0 is on NUMA node 1, which has the last CPU of this process and one that it may not use."""
    last = max(affinity)
    of_kernel = {"numa_node": "1", "cpulist": f"{last},{last + 1}"}
    monkeypatch.setattr(links, "gpu_bus_id", lambda index: f"0000:{index:02}:00.0")
    monkeypatch.setattr(links, "read", lambda path: of_kernel[path.name])
    unstated = dict.fromkeys(("precision", "input", "num_workers", "dataset")) if script else {}
    spec = make_spec(script=script, model=script or "lenet", numa_binding=numa_binding, **unstated)
    rank_files.write_point(PointTask(spec, None))
    inherited: list[set[int]] = []

    def start(*_: object) -> NoReturn:
        said = subprocess.run([sys.executable, "-c", AFFINITY], capture_output=True, text=True, check=True).stdout
        inherited.append({*map(int, said.split())})
        sys.exit(3)

    monkeypatch.setattr(rank_process, "run_script" if script else "check_gpus_and_decode", start)
    with pytest.raises(SystemExit):
        rank_process.run_rank(rank_files, None)
    assert inherited == [{last} if numa_binding == "gpu" else affinity]


def test_a_rank_that_cannot_be_bound_fails_in_one_sentence(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "gpu_bus_id", lambda index: "0000:5e:00.0")
    monkeypatch.setattr(links, "read", lambda path: "-1")
    rank_files.write_point(PointTask(make_spec(numa_binding="gpu"), None))
    with pytest.raises(SystemExit):
        rank_process.run_rank(rank_files, None)
    (found,) = rank_files.read_errors()
    first_line = found.message.partition("\n")[0]
    assert_says(first_line, "RuntimeError: numa_binding=gpu needs the NUMA node of GPU 0000:5e:00.0", "leave it out")


def test_a_worker_that_ends_while_an_error_is_written_does_not_replace_it(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's loader sets a handler of SIGCHLD that raises, once for each worker that ends."""

    def describe(_: BaseException, text: str) -> str:
        os.kill(os.getpid(), signal.SIGCHLD)
        return text

    monkeypatch.setattr(user_code, "describe_user_error", describe)
    as_torch_does = raising(RuntimeError("DataLoader worker (pid 2) is killed by signal: Killed."))
    before = signal.signal(signal.SIGCHLD, as_torch_does)
    try:
        assert report_of(rank_files, ValueError("the first")).message == "ValueError: the first"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_worker_that_was_killed_is_named_where_its_pipe_ended_first(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its signal comes 20 ms later."""

    def sleep(seconds: float) -> None:
        if seconds > 0.02:
            signal.raise_signal(signal.SIGCHLD)

    monkeypatch.setattr(time, "sleep", sleep)
    killed = RuntimeError("DataLoader worker (pid 2) is killed by signal: Killed.")
    before = signal.signal(signal.SIGCHLD, raising(killed))
    try:
        assert report_of(rank_files, EOFError()).message.startswith(f"RuntimeError: {killed}")
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    "error", [torch.distributed.DistStoreError("got 0 bytes"), RuntimeError("Connection reset by peer")]
)
def test_a_lost_connection_is_not_blamed_on_the_line_that_waited(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A stranger may have ended the store of a launch on several nodes."""
    monkeypatch.setattr(user_code, "user_lines", lambda error: ["tiny.py:12 in loss"])
    monkeypatch.setattr(rank_process, "LOST_PEER_GRACE_S", 0)
    found = report_of(rank_files, error)
    said = f"lost the connection to another rank or to the store of the launch: {type(error).__name__}: {error}"
    assert (found.kind, found.message) == ("collective", said)
    (rank_files.folder / "rank0.error.json").unlink()
    assert "tiny.py:12" in report_of(rank_files, ValueError("of the user's")).message


def test_an_import_that_failed_in_the_fork_server_is_the_error_of_its_repetition_alone(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch keeps what a failed import has left: the second one said "Artifact ... already registered"."""
    preloaded = types.ModuleType("preloaded")
    preloaded.import_error = RuntimeError("can't start new thread")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.runner.fork_server_imports", preloaded)
    write_file(tmp_path / "site-packages" / "registers_twice.py", "raise AssertionError('already registered')")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    with pytest.raises(AssertionError, match="already") as again:
        importlib.import_module("registers_twice")
    assert report_of(rank_files, again.value).message.startswith(
        "RuntimeError: can't start new thread; the limit of threads is reached: raise it (ulimit -u)"
    )
    (rank_files.folder / "rank0.error.json").unlink()
    assert report_of(rank_files, ValueError("of a step")).message.startswith("ValueError: of a step")


def pretend_full_gpu(monkeypatch: pytest.MonkeyPatch, *, others_gib: float) -> None:
    """Pretend that a GPU of 139 GiB is full, and that other processes hold `others_gib` of it."""
    free_bytes, total_bytes = 2**20, 139 * GIB
    own_bytes = total_bytes - free_bytes - int(others_gib * GIB) - CONTEXT_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free_bytes, total_bytes))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: own_bytes)
    monkeypatch.setitem(sys.modules, "pynvml", None)


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 GiB")


TORCHS_OWN = "OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 GiB"
SHARED = f"another process held 118.5 GiB of GPU 0; run again on a free GPU\n{TORCHS_OWN}"
OF_USER = RuntimeError("CUDA error: out of memory")
NO_KERNELS = "this torch has no kernels for sm_70"


@pytest.mark.parametrize(
    ("error", "device", "others_gib", "kind", "said"),
    [
        (OOM, "cuda", 118.5, "gpu_shared", SHARED),
        (OOM, "cuda", 0.5, "cuda_oom", TORCHS_OWN),
        (OOM, "cuda", None, "cuda_oom", TORCHS_OWN),
        (OF_USER, "cuda", 0.5, "cuda_oom", "RuntimeError: CUDA error: out of memory"),
        (OF_USER, "cpu", 0.5, "exception", "RuntimeError: CUDA error: out of memory"),
        (GpuProblem("unsupported_gpu", NO_KERNELS), "cuda", 0.0, "unsupported_gpu", NO_KERNELS),
        (ValueError(os.fsdecode(b"no caf\xe9.npz")), "cuda", 0.0, "exception", "ValueError: no caf\\udce9.npz (at"),
    ],
    ids=["shared", "alone", "CUDA cannot say", "of the user", "on a CPU", "a check", "undecodable"],
)
def test_an_error_is_written_with_its_kind_and_with_what_others_held_of_a_full_gpu(
    rank_files: RankFiles,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    device: str,
    others_gib: float | None,
    kind: str,
    said: str,
) -> None:
    pretend_full_gpu(monkeypatch, others_gib=others_gib or 0)
    if others_gib is None:
        error_of_cuda = RuntimeError("CUDA error: unspecified launch failure")
        monkeypatch.setattr(torch.cuda, "mem_get_info", raising(error_of_cuda))
    rank_files.write_point(PointTask(make_spec(device=device, precision="fp32"), None))
    found = report_of(rank_files, error)
    assert (found.kind, found.message[: len(said)]) == (kind, said)
    if isinstance(error, torch.OutOfMemoryError):
        assert found.memory_of_others_bytes == (None if others_gib is None else int(others_gib * GIB),)


@pytest.mark.parametrize("needs_free_gpus", [True, False])
def test_a_point_that_needs_free_gpus_does_not_begin_beside_another_process(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch, needs_free_gpus: bool
) -> None:
    """Another process holds 2 GiB of GPU 1."""
    gpus = (Gpu(name="H200", memory_of_others_bytes=0), Gpu(name="H200", memory_of_others_bytes=2 * GIB))
    monkeypatch.setattr(provenance, "describe_environment", lambda spec, rank: Environment(gpus=gpus))
    begun: list[PointTask] = []

    def measure(point: PointTask, *_: object) -> Measurement:
        begun.append(point)
        return Measurement(epochs=(), num_parameters=1, gradient_bytes=4)

    monkeypatch.setattr(rank_process, "run_measurement", measure)
    point = PointTask(make_spec(), None, needs_free_gpus=needs_free_gpus)
    problem = pytest.raises(GpuProblem, match=r"another process holds 2\.0 GiB of GPU 1")
    with problem if needs_free_gpus else contextlib.nullcontext():
        rank_process.run_point(point, Rank(0, 1, torch.device("cpu")), rank_files, 0)
    assert begun == ([] if needs_free_gpus else [point])


def test_a_node_of_other_software_or_gpus_is_named_with_what_it_has() -> None:
    first = Environment(nodes=("a",), torch="2.11.0", driver="580.1", gpus=(Gpu(name="NVIDIA A40"),))
    alike = msgspec.structs.replace(first, nodes=("b",))
    other = msgspec.structs.replace(first, nodes=("c",), driver="535.2", gpus=(Gpu(name="NVIDIA L4"),))
    found = rank_process.name_unlike_nodes([first, first, alike, other, other])
    assert found == {"c": "driver 535.2, GPU NVIDIA L4"}
    record = make_record(environment=msgspec.structs.replace(first, unlike_nodes=found))
    (note,) = unlike_nodes_notes([record, record])
    assert render_note(note) == "c has driver 535.2, GPU NVIDIA L4, unlike the first node"


@pytest.mark.training
def test_output_of_a_rank_goes_to_stderr_even_from_native_code(tmp_path: Path) -> None:
    """Gloo of torch 2.8 writes to the file descriptor, past Python, and the command's stdout carries data."""
    code = (
        "import os, pathlib; from pipeline.runner import rank_process; "
        "rank_process.run_rank = lambda *_: (print('from Python'), os.write(1, b'from native code')); "
        "rank_process.main(pathlib.Path('.'), None)"
    )
    env = {**os.environ, "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert_says(done.stderr, "from Python\n", "from native code")
