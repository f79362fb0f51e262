"""How a launch ended: the ranks' exits and errors turned into one record."""

import signal
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pipeline.experiment import record_store
from pipeline.experiment.record import Failure, Record
from pipeline.experiment.spec import Spec
from pipeline.runner.rank_files import RankError, RankFiles
from pipeline.system import host

OOM_REASONS = {"cuda_oom": "out of GPU memory", "host_oom": "out of host memory"}
# of torch and its loader where shared memory is full, and of NCCL, which names the file
SHARED_MEMORY_SIGNS = (
    "shared memory(shm)",
    "shared memory object",
    "unable to write to file </torch_",
    "unable to resize file </torch_",
    "killed by signal: Bus error",
    f"{host.SHARED_MEMORY}",
)


class RankExit(NamedTuple):
    """A rank that the agent saw end badly: its exit code (minus the signal), and when."""

    exit_code: int
    time_s: float


def ok_record(spec: Spec, rank_files: RankFiles, launch_id: str) -> Record | None:
    """The record of a launch whose ranks all ended well; None where none of them left a result."""
    result = rank_files.read_result()
    if result is None:
        return None
    return record_store.new_record(
        spec, "ok", launch_id, measurement=result.measurement, environment=result.environment
    )


def failure_record(spec: Spec, rank_files: RankFiles, launch_id: str, failure: Failure) -> Record:
    """The record of a launch that ended otherwise: an out-of-memory is a result of its own."""
    is_oom = failure.kind in OOM_REASONS
    return record_store.new_record(
        spec,
        "oom" if is_oom else "failed",
        launch_id,
        reason=OOM_REASONS.get(failure.kind, first_line(failure)),
        failure=failure,
        environment=rank_files.read_environment(),
    )


def first_line(failure: Failure) -> str:
    """What the failure's message begins with."""
    return failure.message.split("\n")[0]


def find_root_cause(rank_files: RankFiles, exits: Mapping[int, RankExit]) -> Failure:
    """The first failure that is not another's consequence.

    In this order: an error that a rank left about itself, a rank that a signal ended (not the agent's own
    SIGTERM), a rank that lost its peers, a rank that only exited.
    """
    errors = sorted(rank_files.read_errors(), key=lambda error: error.time_ns)
    in_time = sorted(exits.items(), key=lambda item: item[1].time_s)
    for error in errors:
        if error.kind != "collective":
            return failure_from_error(error)
    for rank, exit in in_time:
        if exit.exit_code < 0 and exit.exit_code != -signal.SIGTERM:
            return failure_from_signal(rank, -exit.exit_code)
    for error in errors:
        return failure_from_error(error)
    for rank, exit in in_time:
        code = exit.exit_code
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"exited with {code}"
        return Failure(kind="exit", message=f"rank {rank} {how}", rank=rank, exit_code=code)
    return Failure(kind="exit", message="every rank exited 0 and none left a result", exit_code=0)


def find_timeout_cause(rank_files: RankFiles, limit_s: float | None) -> Failure:
    """Why a point was not done within its limit: an error that a rank left about itself, else the limit alone."""
    cause = find_root_cause(rank_files, {})
    if not may_be_consequence(cause):
        return cause
    message = f"ended after its limit of {limit_s} s, so that the points behind it run; raise --time"
    return Failure(kind="timeout", message=message)


def may_be_consequence(failure: Failure) -> bool:
    """Whether another node's rank may be to blame."""
    return failure.kind in ("collective", "exit")


def describe_exception(error: BaseException) -> str:
    """The error's type and text; where shared memory failed, below a line that names its folder and size."""
    text = f"{type(error).__name__}: {error}"
    if not is_of_shared_memory(error):
        return text
    last_line = text.strip().splitlines()[-1]
    return f"{last_line}; {shared_memory_hint()}" + (f"\n{text}" if text.strip() != last_line else "")


def is_of_shared_memory(error: BaseException) -> bool:
    """True for an error of shared memory, or of a loader's worker that died without saying of what."""
    said = " ".join(str(part) for part in causes(error))
    died_silently = "DataLoader worker (pid(s)" in said and "killed by signal" not in said
    return died_silently or any(sign in said for sign in SHARED_MEMORY_SIGNS)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def shared_memory_hint() -> str:
    """The size of this node's shared memory, and what to do where it is full."""
    return (
        f"shared memory is {host.shared_memory()}; where it is full, enlarge it (in a container --shm-size), or lower "
        "num_workers"
    )


def failure_from_error(error: RankError) -> Failure:
    """The failure that a rank wrote down itself."""
    message = f"rank {error.rank}: {error.message}"
    return Failure(
        kind=error.kind,
        message=message,
        rank=error.rank,
        node=error.node,
        memory_of_others_bytes=error.memory_of_others_bytes,
    )


def failure_from_signal(rank: int, number: int) -> Failure:
    """A rank that a signal ended."""
    hint = "; where the node ran out of memory, raise mem_per_gpu_gib" if number == signal.SIGKILL else ""
    if number == signal.SIGBUS:
        hint = f"; {shared_memory_hint()}"
    message = f"rank {rank} was ended by {signal_name(number)}{hint}"
    return Failure(kind="signal", message=message, rank=rank, exit_code=-number)


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name of their own."""
    return signal.Signals(number).name if number in signal.Signals.__members__.values() else f"signal {number}"
