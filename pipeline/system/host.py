"""What this machine has, without importing torch."""

import contextlib
import ctypes
import errno
import os
import signal
import socket
from datetime import UTC, datetime
from pathlib import Path

NVIDIA_GPUS_PATH = Path("/proc/driver/nvidia/gpus")
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = Path("/dev/shm")


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def set_process_name(name: str) -> None:
    """What ps and top call this process; a forked one has the command line of the one that it was forked from."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def gpu_names() -> set[str]:
    """The names of all NVIDIA GPUs of this machine, by the kernel module; empty where it does not say."""
    found = set()
    for path in NVIDIA_GPUS_PATH.glob("*/information"):
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").splitlines()
            found |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return found


def visible_gpu_ids() -> list[str]:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible, as it names them; by number without it."""
    present = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia[0-9]*"))
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return [str(number) for number in range(present)]
    named = [entry.strip() for entry in mask.split(",")]
    return [entry for entry in named if entry and not entry.startswith("-")][:present]


def num_visible_gpus() -> int:
    """How many GPUs are visible."""
    return len(visible_gpu_ids())


def num_job_gpus() -> int:
    """GPUs of this node that the Slurm job holds; 0 outside Slurm."""
    held = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(held) if held.isdecimal() else 0


def node_name() -> str:
    """The node as Slurm names it, else the host's name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def boot_id() -> str | None:
    """What the kernel draws anew at every boot, and no other machine of that name has; None where it does not say."""
    try:
        return BOOT_ID_PATH.read_text().strip()
    except OSError:
        return None


def shared_memory() -> str:
    """The folder of shared memory, its size, and how much of it is free now."""
    try:
        facts = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return f"{SHARED_MEMORY} ({error.strerror})"
    size_kib, free_kib = (blocks * facts.f_frsize // 1024 for blocks in (facts.f_blocks, facts.f_bavail))
    return f"{SHARED_MEMORY} of {size_kib:,} KiB, {free_kib:,} KiB of it free"


def name_shared_memory(error: OSError) -> None:
    """Name the folder in an error of a semaphore, which is a file there: of a full one the system names none."""
    if error.errno == errno.ENOSPC and error.filename is None:
        error.filename = str(SHARED_MEMORY)


def node_rank() -> int:
    """Which node of the Slurm step this is; 0 outside a step, whatever SLURM_NODEID says."""
    rank = int(os.environ.get("SLURM_NODEID", "0"))
    return rank if rank < int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) else 0


def utc_timestamp() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
