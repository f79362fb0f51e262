"""The kind of a failure: the one place that decides what counts as out of memory.

It judges an exception by its text and by the names of its types, because `submission` uses this module and never
imports torch. A caller that has torch passes in the only fact that torch alone knows.
"""

import resource
from collections.abc import Callable, Mapping, Set

from pipeline.records.record import FailureKind

# the kinds of failure that make a record `oom`, with its reason; a trial of a memory search then counts as too large
OOM_REASONS: Mapping[FailureKind, str] = {"cuda_oom": "out of GPU memory", "host_oom": "out of host memory"}

TORCH_OOM_TYPE = "OutOfMemoryError"
CPU_ALLOCATOR_SIGN = "DefaultCPUAllocator: can't allocate memory"
# texts of CUDA's libraries, NCCL's last, when torch's allocator has left them no memory
CUDA_LIBRARY_SIGNS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)
# torch's text for two causes: no convolution of cuDNN found memory for its workspace, or none supports the shape
CUDNN_NO_ENGINE_SIGN = "unable to find an engine to execute this computation"
# oneDNN's text for two causes: it found no memory, or it has no implementation
ONEDNN_NO_PRIMITIVE_SIGN = "could not create a primitive"

LOST_PEER_TYPE = "DistError"  # the base of torch.distributed's exceptions
LOST_PEER_SIGNS = ("onnection closed by peer", "onnection reset by peer", "Broken pipe")

SLURM_OOM_SIGNS = ("oom-kill", "oom_kill", "exceeded memory limit")  # proof only in a line of Slurm's own daemon
LOG_OOM_SIGNS = (TORCH_OOM_TYPE, "CUDA out of memory", CPU_ALLOCATOR_SIGN, *SLURM_OOM_SIGNS)


def classify_error(error: BaseException, uses_gpu: bool, did_allocator_refuse: Callable[[], bool]) -> FailureKind:
    """Return the kind of failure of an exception that ended a rank.

    `cuda_oom` and `host_oom` are out of memory. `collective` means that a peer was lost, so another rank may be to
    blame. Everything else is `exception`. The text of an error is no proof of a full GPU if the point computes on a
    CPU, where the user's code can say so, too. `did_allocator_refuse` tells if torch's allocator ever refused this
    process GPU memory. It is called only for an error that has another possible cause.
    """
    return classify({kind.__name__ for kind in type(error).__mro__}, str(error), uses_gpu, did_allocator_refuse)


def classify(type_names: Set[str], text: str, uses_gpu: bool, did_allocator_refuse: Callable[[], bool]) -> FailureKind:
    """Return the kind of failure of an exception, from the names of its types and its text. See `classify_error`."""
    if TORCH_OOM_TYPE in type_names or (uses_gpu and contains_any(text, CUDA_LIBRARY_SIGNS)):
        return "cuda_oom"
    if uses_gpu and CUDNN_NO_ENGINE_SIGN in text and did_allocator_refuse():
        return "cuda_oom"
    if "MemoryError" in type_names or CPU_ALLOCATOR_SIGN in text:
        return "host_oom"
    is_host_memory_limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY  # memory_limit_gib
    if ONEDNN_NO_PRIMITIVE_SIGN in text and is_host_memory_limited:
        return "host_oom"
    if LOST_PEER_TYPE in type_names or contains_any(text, LOST_PEER_SIGNS):
        return "collective"
    return "exception"


def suggests_oom(log: str) -> bool:
    """True if a log mentions out of memory. This is a hint for the user, never a result: anybody can print it."""
    return contains_any(log, LOG_OOM_SIGNS)


def contains_any(text: str, signs: tuple[str, ...]) -> bool:
    return any(sign in text for sign in signs)
