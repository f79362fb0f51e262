"""What a rank says of its own error, and of the machine it runs on."""

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline import here
from pipeline.schema import FailureKind
from pipeline.worker import classify

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
    assert classify(error) == kind


@pytest.mark.parametrize(("num_ooms", "kind"), [(0, "exception"), (2, "cuda_oom")])
def test_no_convolution_is_an_oom_only_where_the_allocator_refused_memory(
    monkeypatch: pytest.MonkeyPatch, num_ooms: int, kind: FailureKind
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: {"num_ooms": num_ooms})
    assert classify(RuntimeError(NO_ENGINE)) == kind


@pytest.mark.parametrize(("limit", "kind"), [(resource.RLIM_INFINITY, "exception"), (2**30, "host_oom")])
def test_no_primitive_of_onednn_is_an_oom_only_where_memory_is_limited(
    monkeypatch: pytest.MonkeyPatch, limit: int, kind: FailureKind
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert classify(RuntimeError("could not create a primitive")) == kind


def test_a_boot_has_one_id_and_none_where_the_kernel_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "boot_id").write_text("8d0a3c5e-0000-4000-8000-000000000001\n")
    monkeypatch.setattr(here, "BOOT_ID", tmp_path / "boot_id")
    assert here.boot_id() == "8d0a3c5e-0000-4000-8000-000000000001"
    monkeypatch.setattr(here, "BOOT_ID", tmp_path / "absent")
    assert here.boot_id() is None
