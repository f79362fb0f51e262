"""The kinds of failures, by exceptions that torch, NCCL and oneDNN raise."""

import resource
import subprocess
import sys
from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, succeeded

from pipeline.experiment.record import FailureKind
from pipeline.runner.classify_failure import OOM_REASONS, classify_error, suggests_oom

NO_ENGINE = "GET was unable to find an engine to execute this computation"
NO_PRIMITIVE = "could not create a primitive"


def refuse_to_answer() -> bool:
    raise AssertionError("this error needs no answer of torch's allocator")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("Tried to allocate 32.00 GiB"), "cuda_oom"),
        (type("OurOutOfMemoryError", (torch.OutOfMemoryError,), {})(""), "cuda_oom"),
        (RuntimeError("CUDA error: out of memory"), "cuda_oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), "cuda_oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cuda_oom"),
        (dist.DistBackendError("ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'"), "cuda_oom"),
        (dist.DistBackendError("NCCL WARN Cuda failure 'out of memory'"), "cuda_oom"),
        (MemoryError(), "host_oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "host_oom"),
        (dist.DistBackendError("NCCL communicator was aborted"), "collective"),
        (dist.DistNetworkError("the client socket has timed out"), "collective"),
        (RuntimeError("[gloo] Connection closed by peer"), "collective"),
        (RuntimeError("[gloo] writev: Connection reset by peer"), "collective"),
        (RuntimeError("[gloo] Broken pipe"), "collective"),
        (RuntimeError("boom"), "exception"),
        (RuntimeError("out of resource: shared memory"), "exception"),
        (KeyboardInterrupt(), "exception"),
    ],
)
def test_an_error_is_classified_by_its_type_and_text(error: BaseException, kind: FailureKind) -> None:
    assert classify_error(error, True, refuse_to_answer) == kind


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        ValueError("no GPU: Cuda failure 'out of memory'"),
        RuntimeError(NO_ENGINE),
    ],
)
def test_the_text_of_an_error_on_a_cpu_is_no_proof_of_a_full_gpu(error: BaseException) -> None:
    assert classify_error(error, False, lambda: True) == "exception"


@pytest.mark.parametrize(("refused", "kind"), [(lambda: False, "exception"), (lambda: True, "cuda_oom")])
def test_a_missing_convolution_is_an_oom_only_if_the_allocator_refused_memory(
    refused: Callable[[], bool], kind: FailureKind
) -> None:
    assert classify_error(RuntimeError(NO_ENGINE), True, refused) == kind


@pytest.mark.parametrize(("limit", "kind"), [(resource.RLIM_INFINITY, "exception"), (2**30, "host_oom")])
def test_a_missing_primitive_of_onednn_is_an_oom_only_if_memory_is_limited(
    monkeypatch: pytest.MonkeyPatch, limit: int, kind: FailureKind
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert classify_error(RuntimeError(NO_PRIMITIVE), False, refuse_to_answer) == kind


def test_every_kind_of_oom_is_a_kind_of_failure_with_a_reason() -> None:
    assert OOM_REASONS == {"cuda_oom": "out of GPU memory", "host_oom": "out of host memory"}
    assert set(OOM_REASONS) < set(get_args(FailureKind))


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("torch.OutOfMemoryError: Tried to allocate", True),
        ("RuntimeError: CUDA out of memory. Tried to allocate", True),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", True),
        ("slurmstepd: error: Detected 1 oom-kill event(s)", True),
        ("StepId=7.0 exceeded memory limit (342581248 > 209715200), being killed", True),
        ("a mushroom grew", False),
        ("", False),
    ],
)
def test_a_log_suggests_an_oom_by_its_words(log: str, expected: bool) -> None:
    assert suggests_oom(log) is expected


def test_the_module_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import pipeline.runner.classify_failure"
    succeeded(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60))
