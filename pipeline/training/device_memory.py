"""Memory limits, use and peaks of a rank: on its CUDA devices, or on the host."""

import ctypes
import gc
import resource
from pathlib import Path

import torch

from pipeline.experiment.measurement import DeviceMemory
from pipeline.experiment.spec import Spec
from pipeline.figures.formulas import GIB
from pipeline.training.process_group import Rank, device_indices


def reset_memory_statistics(spec: Spec, rank: Rank) -> bool:
    """Release unused memory and restart the peak counters of this process. Return False if the kernel refuses."""
    gc.collect()
    if rank.device.type == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident set (proc(5))
        except OSError:
            return False
        return True
    torch.cuda.empty_cache()
    for index in device_indices(spec, rank):
        torch.cuda.reset_peak_memory_stats(index)
        torch.cuda.reset_accumulated_memory_stats(index)
    return True


def set_memory_limit(spec: Spec, rank: Rank) -> None:
    """Limit this process to `memory_limit_gib`, so that a machine can stand in for a smaller one.

    On CUDA the limit holds for each device (a memory fraction). On the CPU it is RLIMIT_DATA, and counts on top of the
    data segment that the process has after its imports.
    """
    if spec.memory_limit_gib is None:
        return
    if spec.device == "cpu":
        limit_bytes = process_memory_bytes("VmData") + int(spec.memory_limit_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        return
    for index in device_indices(spec, rank):
        total_bytes = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, spec.memory_limit_gib * GIB / total_bytes), index)


def usable_device_bytes(spec: Spec, index: int) -> int:
    """Return the bytes of a device that this process's allocator holds or could still get."""
    free_bytes, _ = torch.cuda.mem_get_info(index)
    usable = free_bytes + torch.cuda.memory_reserved(index)
    return usable if spec.memory_limit_gib is None else min(usable, int(spec.memory_limit_gib * GIB))


def usable_host_bytes(spec: Spec) -> int | None:
    """Return the bytes that this process holds or could still get under RLIMIT_DATA; None without a limit."""
    if spec.memory_limit_gib is None:
        return None
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return process_memory_bytes("VmRSS") + max(0, limit_bytes - process_memory_bytes("VmData"))


def process_memory_bytes(field: str) -> int:
    """Return a size from /proc/self/status (proc(5)): VmData (the data segment), VmRSS (resident), VmHWM (its peak)."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def read_peak_memory(spec: Spec, rank: Rank) -> list[DeviceMemory]:
    """Return the peak memory of each device of this rank; on the CPU the process's peak resident set."""
    if spec.device == "cpu":
        # not ru_maxrss: it begins with the size of the parent process
        peak_bytes, limit_bytes = process_memory_bytes("VmHWM"), usable_host_bytes(spec)
        return [DeviceMemory(rank=rank.rank, device="cpu", peak_allocated_bytes=peak_bytes, usable_bytes=limit_bytes)]
    return [
        DeviceMemory(
            rank=rank.rank,
            device=f"cuda:{index}",
            peak_allocated_bytes=torch.cuda.max_memory_allocated(index),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(index),
            num_alloc_retries=torch.cuda.memory_stats(index).get("num_alloc_retries", 0),
            usable_bytes=usable_device_bytes(spec, index),
        )
        for index in device_indices(spec, rank)
    ]
