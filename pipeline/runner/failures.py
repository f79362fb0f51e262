"""Failures: their kinds, the one place that decides what counts as out of memory, and the record of a failed launch.

A kind is judged by the text of an exception and by the names of its types, because `submission` uses this module and
never imports torch. A caller that has torch passes in the only fact that torch alone knows. The record is built from
the exit codes and the errors of the ranks.
"""

import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping, Set
from traceback import extract_tb
from typing import NamedTuple

import msgspec

from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.record import MAX_MESSAGE_CHARS, MODEL_ALONE, Failure, FailureKind, Record
from pipeline.runner.rank_files import PointResult, RankError, RankFiles
from pipeline.system import host
from pipeline.system.errors import full_disk_hint

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


# texts of torch and its loader when shared memory is full, and of NCCL, which names the file
SHARED_MEMORY_SIGNS = (
    "shared memory(shm)",
    "shared memory object",
    "unable to write to file </torch_",
    "unable to resize file </torch_",
    "killed by signal: Bus error",
    str(host.SHARED_MEMORY),
)
DIED_SILENTLY_SIGN = "DataLoader worker (pid(s)"  # without a signal in the chain: full shared memory is the usual cause
OPEN_FILES_SIGNS = ("Too many open files", "items of ancillary data")
THREAD_SIGNS = ("can't start new thread", "Resource temporarily unavailable")
INTERFACE_SIGNS = ("no socket interface found", "Unable to find address for")  # of NCCL, and of Gloo
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
TELLING_SIGNS = ("killed by signal", "out of memory", *OPEN_FILES_SIGNS, *THREAD_SIGNS)


class RankExit(NamedTuple):
    """The exit of a rank that failed, as torchrun's agent saw it. A signal is a negative exit code."""

    exit_code: int
    time_s: float


def failure_record(spec: Spec, rank_files: RankFiles, launch_id: str, failure: Failure) -> Record:
    """Return the record of a launch that did not succeed: `oom` for out of memory, else `failed`."""
    reason = OOM_REASONS.get(failure.kind, failure.message.partition("\n")[0])
    if failure.kind in OOM_REASONS and MODEL_ALONE in failure.message:
        reason += f": {MODEL_ALONE}"
    return store.new_record(
        spec,
        "oom" if failure.kind in OOM_REASONS else "failed",
        launch_id,
        reason=reason,
        failure=failure,
        environment=rank_files.read_environment(),
    )


def read_outcome(rank_files: RankFiles, exits: Mapping[int, RankExit]) -> PointResult | Failure:
    """Return the result of the ranks, else why there is none. A result that cannot be read is a failure, too."""
    try:
        result = None if exits else rank_files.read_result()
    except (OSError, ValueError) as error:
        cure = "; see what the model's class returns, and submit again" if isinstance(error, ValueError) else ""
        return Failure(
            kind="exception", message=f"the result could not be published: {error}{cure}"[:MAX_MESSAGE_CHARS]
        )
    return find_root_cause(rank_files, exits) if result is None else result


def find_root_cause(rank_files: RankFiles, exits: Mapping[int, RankExit]) -> Failure:
    """Return the failure that caused the others.

    In order of preference: an error that a rank reported about itself, a rank killed by a signal (but not by the
    agent's own SIGTERM), a rank that lost its peers, a rank that only exited. The earliest of each group wins.
    """
    errors = sorted(rank_files.read_errors(), key=lambda error: error.time_ns)
    exits_by_time = sorted(exits.items(), key=lambda item: item[1].time_s)
    for error in errors:
        if error.kind != "collective":
            return failure_from_error(error)
    for rank, exit in exits_by_time:
        if exit.exit_code < 0 and exit.exit_code != -signal.SIGTERM:
            return failure_from_signal(rank, -exit.exit_code)
    if errors:
        failure = failure_from_error(errors[0])
        silent = name_silent_nodes(rank_files, {error.rank for error in errors} | exits.keys())
        return msgspec.structs.replace(failure, message=silent + failure.message) if silent else failure
    if exits_by_time:
        rank, code = exits_by_time[0][0], exits_by_time[0][1].exit_code
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with {code}"
        return Failure(kind="exit", message=f"rank {rank} {how}", rank=rank, exit_code=code)
    return Failure(kind="exit", message="every rank exited 0 and none left a result", exit_code=0)


def name_silent_nodes(rank_files: RankFiles, known: Set[int]) -> str:
    """Return the nodes none of whose ranks has said how it ended, before the words of another; "" if there are none.

    `known` are the ranks of which an error or an exit is known. All lost a peer, so that node has most likely gone.
    """
    nodes = rank_files.read_environment().nodes
    try:
        size = rank_files.read_point().spec.num_processes_per_node
    except (OSError, ValueError):
        return ""
    silent = [node for index, node in enumerate(nodes) if not known & {*range(index * size, (index + 1) * size)}]
    return f"no word from {', '.join(silent)}: it may have gone; " if 0 < len(silent) < len(nodes) else ""


def find_timeout_cause(rank_files: RankFiles, limit_s: float | None) -> Failure:
    """Return the failure of a point that reached its time limit: a rank's own error if any, else the timeout."""
    cause = find_root_cause(rank_files, {})
    if not may_be_consequence(cause):
        return cause
    message = f"ended at its limit of {limit_s} s, so that the configurations after it can run; raise --time"
    return Failure(kind="timeout", message=message)


def may_be_consequence(failure: Failure) -> bool:
    """True if the failure may be the consequence of another that a rank of another node reports."""
    return failure.kind in ("collective", "exit")


def describe_exception(error: BaseException) -> str:
    """Return the errors that led to this one, a line or more each: the most telling first.

    Behind its first line stands the limit of the node that it is about, with the cure.
    """
    chain = [error, *causes_of(error)]
    telling = next((one for one in chain if limit_hint(one) or contains_any(str(one), TELLING_SIGNS)), None)
    telling = telling or next((one for one in chain if str(one).strip()), error)
    texts = [f"{type(one).__name__}: {one}".strip().removesuffix(":") for one in dict.fromkeys([telling, *chain])]
    if hint := limit_hint(telling) or (shared_memory_hint() if DIED_SILENTLY_SIGN in str(telling) else ""):
        first, line_break, rest = texts[0].partition("\n")
        texts[0] = f"{first}; {hint}{line_break}{rest}"
    return "\n".join(texts)


def causes_of(error: BaseException) -> list[BaseException]:
    """Return what led to an error, from the nearest cause to the first. `raise ... from None` hides the rest."""
    found: list[BaseException] = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found


def limit_hint(error: BaseException) -> str:
    """Return the limit of the node or its user that an error is about, with its value and the cure; "" if none."""
    text = str(error)
    passes_files = any(frame.name in ("recvfds", "recv_handle") for frame in extract_tb(error.__traceback__))
    if contains_any(text, OPEN_FILES_SIGNS) or (isinstance(error, EOFError) and passes_files):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"the limit of open files is {limit}: raise it (ulimit -n), or let collate() make fewer tensors a batch"
    if contains_any(text, SHARED_MEMORY_SIGNS):
        return shared_memory_hint()
    if contains_any(text, THREAD_SIGNS):
        return "the limit of threads is reached: raise it (ulimit -u), or lower OMP_NUM_THREADS or num_workers"
    if "DataLoader worker" in text and "killed by signal: Killed" in text:
        return "if the node ran out of memory, raise mem_per_gpu_gib in the grid file, or lower num_workers"
    if "getpwuid(): uid not found" in text:
        return "this user has no name on this node or in this container: export USER=NAME before you submit"
    if contains_any(text, INTERFACE_SIGNS):
        stated = [f"{name}={os.environ[name]}" for name in INTERFACE_VARIABLES if name in os.environ]
        names = ", ".join(name for _, name in socket.if_nameindex())
        return f"the interfaces of {host.node_name()} are {names}: see {' and '.join(stated or INTERFACE_VARIABLES)}"
    return full_disk_hint(text)


def shared_memory_hint() -> str:
    """Return the size of this node's shared memory, with the cure if it is full."""
    cure = "enlarge it (in a container --shm-size), or lower num_workers"
    return f"shared memory is {host.shared_memory()}; if it is full, {cure}"


def failure_from_error(error: RankError) -> Failure:
    fields = msgspec.structs.asdict(error) | {"message": f"rank {error.rank}: {error.message}"}
    del fields["time_ns"]
    return Failure(**fields)


def failure_from_signal(rank: int, signal_number: int) -> Failure:
    hint = ""
    if signal_number == signal.SIGKILL:
        hint = "; if the node ran out of memory, raise mem_per_gpu_gib in the grid file"
    elif signal_number == signal.SIGBUS:
        hint = f"; {shared_memory_hint()}"
    message = f"rank {rank} was killed by {signal_name(signal_number)}{hint}"
    return Failure(kind="signal", message=message, rank=rank, exit_code=-signal_number)


def signal_name(signal_number: int) -> str:
    """Return the name of a signal: SIGKILL for 9. Real-time signals have none."""
    names = {int(member): member.name for member in signal.Signals}
    return names.get(signal_number, f"signal {signal_number}")
