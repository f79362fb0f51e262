"""What kind of failure an exception in a rank is: the one place that says out of memory."""

import resource

import torch
import torch.distributed as dist

from pipeline.experiment.record import FailureKind
from pipeline.training.gpu_checks import GpuProblem

# what CUDA's libraries (NCCL last) say where torch's allocator has left them no memory
CUDA_OOM_SIGNS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)


# what torch says where no convolution of cuDNN found memory for its workspace, and where none supports the shape
CUDNN_NO_ENGINE_SIGN = "unable to find an engine to execute this computation"


# what oneDNN says where it found no memory, and where it has no implementation
ONEDNN_NO_PRIMITIVE_SIGN = "could not create a primitive"


def classify_error(error: BaseException) -> FailureKind:
    """`cuda_oom`, `host_oom`, a GPU's own problem, `collective` (another rank may be to blame) or `exception`."""
    text = str(error)
    if isinstance(error, GpuProblem):
        return error.kind
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in CUDA_OOM_SIGNS):
        return "cuda_oom"
    if CUDNN_NO_ENGINE_SIGN in text and ran_out_of_memory():
        return "cuda_oom"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return "host_oom"
    if ONEDNN_NO_PRIMITIVE_SIGN in text and resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        return "host_oom"
    lost_peer = any(phrase in text for phrase in ("onnection closed by peer", "onnection reset by peer", "Broken pipe"))
    if isinstance(error, dist.DistError) or lost_peer:
        return "collective"
    return "exception"


def ran_out_of_memory() -> bool:
    """Whether torch's allocator refused memory to this process, also where the caller tried something else then."""
    return any(torch.cuda.memory_stats(index).get("num_ooms", 0) for index in range(torch.cuda.device_count()))
