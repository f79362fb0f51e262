"""What a rank says of its own error, and of the machine it runs on."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from factories import make_spec

from pipeline.analysis.formulas import GIB
from pipeline.experiment.record import FailureKind
from pipeline.runner.classify_failure import classify_error
from pipeline.runner.rank_files import PointTask, RankError, RankFiles
from pipeline.runner.worker import record_rank_errors
from pipeline.system import host
from pipeline.training.gpu_checks import CONTEXT_BYTES, GpuProblem

NO_ENGINE = "GET was unable to find an engine to execute this computation"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 GiB"), "cuda_oom"),
        (RuntimeError("CUDA error: out of memory"), "cuda_oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cuda_oom"),
        (dist.DistBackendError("ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'"), "cuda_oom"),
        (dist.DistBackendError("NCCL WARN Cuda failure 'out of memory'"), "cuda_oom"),
        (MemoryError(), "host_oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "host_oom"),
        (dist.DistBackendError("NCCL communicator was aborted"), "collective"),
        (RuntimeError("[gloo] Connection closed by peer"), "collective"),
        (RuntimeError("boom"), "exception"),
    ],
)
def test_an_error_is_classified_by_its_type_and_words(error: Exception, kind: FailureKind) -> None:
    assert classify_error(error) == kind


@pytest.mark.parametrize(("num_ooms", "kind"), [(0, "exception"), (2, "cuda_oom")])
def test_no_convolution_is_an_oom_only_where_the_allocator_refused_memory(
    monkeypatch: pytest.MonkeyPatch, num_ooms: int, kind: FailureKind
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: {"num_ooms": num_ooms})
    assert classify_error(RuntimeError(NO_ENGINE)) == kind


@pytest.mark.parametrize(("limit", "kind"), [(resource.RLIM_INFINITY, "exception"), (2**30, "host_oom")])
def test_no_primitive_of_onednn_is_an_oom_only_where_memory_is_limited(
    monkeypatch: pytest.MonkeyPatch, limit: int, kind: FailureKind
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert classify_error(RuntimeError("could not create a primitive")) == kind


def test_a_boot_has_one_id_and_none_where_the_kernel_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "boot_id").write_text("8d0a3c5e-0000-4000-8000-000000000001\n")
    monkeypatch.setattr(host, "BOOT_ID_PATH", tmp_path / "boot_id")
    assert host.boot_id() == "8d0a3c5e-0000-4000-8000-000000000001"
    monkeypatch.setattr(host, "BOOT_ID_PATH", tmp_path / "absent")
    assert host.boot_id() is None


@pytest.fixture
def rank_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankFiles:
    """Of a point whose rank this process is."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = RankFiles(tmp_path)
    found.write_point(PointTask(make_spec(batch_size_per_gpu=8192), None))
    return found


def left_by(rank_files: RankFiles, error: Exception, monkeypatch: pytest.MonkeyPatch) -> RankError:
    """What a rank leaves that this error ends."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit), record_rank_errors(rank_files):
        raise error
    (found,) = rank_files.read_errors()
    return found


def pretend_use(monkeypatch: pytest.MonkeyPatch, *, others_gib: float) -> None:
    """A full card of 139 GiB, of which torch and CUDA in this process hold all but that much."""
    free_bytes, total_bytes = 2**20, 139 * GIB
    own_bytes = total_bytes - free_bytes - int(others_gib * GIB) - CONTEXT_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free_bytes, total_bytes))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: own_bytes)
    monkeypatch.setitem(sys.modules, "pynvml", None)


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 GiB")


def test_an_oom_beside_another_process_is_a_failure_that_names_it(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_use(monkeypatch, others_gib=118.5)
    found = left_by(rank_files, OOM, monkeypatch)
    assert found.kind == "gpu_shared"
    reason, torchs_own = found.message.split("\n", 1)
    assert reason == "another process held 118.5 GiB of GPU 0; run again on a free GPU"
    assert torchs_own == "OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 GiB"
    assert found.memory_of_others_bytes == (int(118.5 * GIB),)


def test_an_oom_of_a_point_that_had_its_gpu_alone_is_one(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_use(monkeypatch, others_gib=0.5)
    found = left_by(rank_files, OOM, monkeypatch)
    assert (found.kind, found.memory_of_others_bytes) == ("cuda_oom", (GIB // 2,))


def test_an_oom_whose_gpu_cannot_be_asked_is_one_and_others_are_not_known(
    rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    found = left_by(rank_files, OOM, monkeypatch)
    assert (found.kind, found.memory_of_others_bytes) == ("cuda_oom", (None,))


def test_what_a_check_refuses_is_left_in_its_own_words(rank_files: RankFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    found = left_by(rank_files, GpuProblem("unsupported_gpu", "this torch has no kernels for sm_70"), monkeypatch)
    assert (found.kind, found.message) == ("unsupported_gpu", "this torch has no kernels for sm_70")


def test_what_a_rank_prints_goes_to_stderr_also_from_native_code(tmp_path: Path) -> None:
    """Gloo of torch 2.8 writes to the file descriptor, past Python; stdout is the data of the command that runs it."""
    code = (
        "import os, pathlib; from pipeline.runner import worker; "
        "worker.run_points = lambda rank_files: (print('from Python'), os.write(1, b'from native code')); "
        "worker.main(pathlib.Path('.'))"
    )
    env = {**os.environ, "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "from Python\n" in done.stderr
    assert "from native code" in done.stderr
