"""What this machine has, without importing torch."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PROC_GPUS = Path("/proc/driver/nvidia/gpus")


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def gpu_names() -> set[str]:
    """The names of all NVIDIA GPUs of this machine, by the kernel module; empty where it does not say."""
    found = set()
    for path in PROC_GPUS.glob("*/information"):
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").splitlines()
            found |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return found


def num_visible_gpus() -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible."""
    present = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia[0-9]*"))
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return present
    named = [entry for entry in mask.split(",") if entry.strip() and not entry.strip().startswith("-")]
    return min(present, len(named))


def node_rank() -> int:
    """Which node of the Slurm step this is; 0 outside Slurm."""
    return int(os.environ.get("SLURM_NODEID", "0"))
