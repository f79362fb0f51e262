"""The devices of a rank: memory limits, use and peaks, and whether its GPUs can run a point and are free."""

import ctypes
import gc
import importlib
import os
import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pipeline.figures.formulas import GIB
from pipeline.plan.axes import AXES
from pipeline.plan.spec import Spec
from pipeline.records.record import DeviceMemory, FailureKind
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


MIN_OTHER_PROCESS_BYTES = GIB  # less is a display, a monitor, or the error of the estimate
# Memory of a process outside torch's allocator: CUDA context and kernels, and NCCL's buffers. On H200s 0.8 GiB,
# and up to 2.0 GiB under DDP over 2 and 4 GPUs (published records: memory of the GPU less `usable_bytes`).
CONTEXT_BYTES, NCCL_BYTES = GIB, GIB
VOLTA, AMPERE = (7, 0), (8, 0)  # compute capabilities

Capability = tuple[int, int]


class GpuProblem(RuntimeError):
    """The GPU cannot run the point. The message names the reason and the cure; `kind` is the kind of failure."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def check_gpu_supported(spec: Spec, devices: Sequence[int]) -> None:
    """Raise GpuProblem if this torch has no kernels for a device, or a device lacks the precision of the point."""
    arch_list = torch.cuda.get_arch_list() if devices else []
    for index in devices:
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        problem = kernel_problem(name, capability, arch_list) or bf16_problem(name, capability, spec)
        if problem:
            raise GpuProblem("unsupported_gpu", problem)


def kernel_problem(name: str, capability: Capability, arch_list: Sequence[str]) -> str | None:
    """Return why a torch built for `arch_list` cannot run on the GPU, with the cure; None if it can.

    A binary (sm_80) runs on its own and later minor versions (8.6), intermediate code (compute_90) on every later GPU.
    An empty list is no problem.
    """
    if not arch_list or any(has_kernels_for(arch, capability) for arch in arch_list):
        return None
    cure = "install with -c constraints-volta.txt" if capability == VOLTA else "install one that was built for it"
    return f"this torch has no kernels for sm_{capability[0]}{capability[1]} ({name}); {cure}"


def has_kernels_for(arch: str, capability: Capability) -> bool:
    """True if code for `arch` runs on a GPU of that capability. Suffix a: only that capability; f: only its family."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    built_for = int(match[2]), int(match[3])
    if match[4] == "a":
        return capability == built_for
    if match[1] == "sm" or match[4] == "f":
        return capability[0] == built_for[0] and capability[1] >= built_for[1]
    return capability >= built_for


def bf16_problem(name: str, capability: Capability, spec: Spec) -> str | None:
    """Return why the GPU cannot compute in bf16 or send it, with the cure; None if it can, or if the point has none.

    torch emulates bf16 on older GPUs, slower than fp32. TF32 is only a permission: a record's `precision_used` has the
    precision that was used.
    """
    axis = next((axis for axis in AXES if getattr(spec, axis) == "bf16"), None)
    if axis is None or capability >= AMPERE:
        return None
    cure = "use precision=fp32" if axis == "precision" else f"leave out {axis}"
    return f"bf16 needs compute capability 8.0 or later; {name} has {capability[0]}.{capability[1]}; {cure}"


def check_gpu_free(others_bytes: Mapping[int, int | None]) -> None:
    """Raise GpuProblem if other processes hold more than 1 GiB of one of the GPUs."""
    if problem := other_process_problem(others_bytes, "holds"):
        raise GpuProblem("gpu_shared", problem)


def other_process_problem(others_bytes: Mapping[int, int | None], verb: str) -> str | None:
    """Return on which GPUs other processes hold over 1 GiB, with the cure; None if on no GPU."""
    held = [
        f"{num_bytes / GIB:.1f} GiB of GPU {index}"
        for index, num_bytes in others_bytes.items()
        if num_bytes is not None and num_bytes > MIN_OTHER_PROCESS_BYTES
    ]
    return f"another process {verb} {', '.join(held)}; run again on a free GPU" if held else None


def memory_of_others_bytes(spec: Spec, index: int) -> int | None:
    """Return the bytes of a GPU that other processes hold now; None if CUDA gives no answer.

    Assumes that this process is the only one of its job on the GPU. Its own use comes from the driver. If the driver
    does not know it (no nvidia-ml-py, or process ids of a container), it is estimated from torch's memory.
    """
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            return None
        return torch.cuda.get_device_properties(index).total_memory  # this process has no context there
    own_bytes = nvml_process_bytes(index)
    if own_bytes is None:
        own_bytes = torch.cuda.memory_reserved(index) + CONTEXT_BYTES + (NCCL_BYTES if spec.num_gpus > 1 else 0)
    return max(0, total_bytes - free_bytes - own_bytes)


def nvml_process_bytes(index: int) -> int | None:
    """Return the bytes of a GPU that this process holds, from the driver; None if it gives no answer."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except ImportError:
        return None
    except nvml.NVMLError:
        return None
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
