"""Properties of this machine: GPUs, node, boot, shared memory. Imports no torch."""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pipeline.system.errors import CommandError

NVIDIA_GPUS_PATH = Path("/proc/driver/nvidia/gpus")
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
SIOCGIFADDR, IFREQ_BYTES = 0x8915, 40  # of netdevice(7); bytes 20 to 24 of the answer are an IPv4 address
LINK_LOCAL = "20"  # the scope of IPv6 addresses that need the name of an interface beside them
EXIT_GRACE_S = 5  # for the end of a rank that has finished, and of what it has started
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies. If the parent has died already, end at once.

    The signal is SIGKILL, since a user's code may handle every other one.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def ending_descendants() -> Iterator[None]:
    """Kill all descendants of this process after the body, also those whose own parent has died (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # this process, not init, adopts them
    try:
        yield
    finally:
        kill_descendants()


def kill_descendants() -> None:
    """Kill all descendants of this process, and wait 5 s at most for their end."""
    deadline_s = time.monotonic() + EXIT_GRACE_S
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline_s:
            for pid in children_of(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def num_oom_kills() -> int:
    """Return how many processes of this control group the kernel has killed for memory; 0 if it is unknown."""
    found = 0
    for line in OWN_CGROUPS.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        of_v2, of_v1 = Path(f"{CGROUPS}{group}/memory.events"), Path(f"{CGROUPS}/memory{group}/memory.oom_control")
        if not controllers or "memory" in controllers.split(","):
            with contextlib.suppress(OSError):
                counts = (of_v1 if controllers else of_v2).read_text().splitlines()
                found += sum(int(count.split()[1]) for count in counts if count.startswith("oom_kill "))
    return found


def children_of(parent_pid: int) -> list[int]:
    """Return the processes whose parent is this one."""
    return [pid for pid, (_, parent, *_) in read_processes().items() if int(parent) == parent_pid]


def activity_of_tree(pid: int) -> tuple[float, bool]:
    """Return the CPU time in s of a process and its descendants, and whether one could run now, or waits for a disk."""
    processes, ticks, states, found = read_processes(), 0, "", [pid]
    while found:
        one = found.pop()
        state, _, *fields = processes.get(one, ["", ""])
        ticks += sum(map(int, fields[9:11]))
        states += state
        found += [child for child, (_, parent, *_) in processes.items() if int(parent) == one]
    return ticks / os.sysconf("SC_CLK_TCK"), not {"R", "D"}.isdisjoint(states)


def read_processes() -> dict[int, list[str]]:
    """Return the fields of /proc/PID/stat after the name, of all processes (proc_pid_stat(5))."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if fields := (entry / "stat").read_text(errors="replace").rpartition(")")[2].split():
                found[int(entry.name)] = fields
    return found


def set_process_name(name: str) -> None:
    """Set the name that ps and top show: a forked process has its parent's command line."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def gpu_names() -> set[str]:
    """Return the names of all NVIDIA GPUs of this machine, from the kernel module; empty if it gives none."""
    found = set()
    for path in NVIDIA_GPUS_PATH.glob("*/information"):
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").splitlines()
            found |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return found


def num_visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use: all, or those that CUDA_VISIBLE_DEVICES names."""
    present = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia[0-9]*"))
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(visible_devices(mask, present)) if mask is not None else present


def visible_devices(mask: str, num_present: int) -> list[int | str]:
    """Return the devices that CUDA_VISIBLE_DEVICES shows, in its order: indices, or the (starts of) UUIDs of GPUs.

    The rules are CUDA's: the first entry that is no device hides itself and all after it, the kind of the first entry
    is that of all, and a device that is named twice hides all. Of MIG instances a process sees only the first.
    """
    found: list[int | str] = []
    kind = None
    for entry in map(str.strip, mask.split(",")):
        number = re.match(r"[+]?([0-9]{1,9})", entry)  # CUDA reads as strtol does: "1x" is 1
        own_kind = "index" if number else next((name for name in ("GPU-", "MIG-") if entry.startswith(name)), None)
        device = int(number[1]) if number else entry
        if own_kind is None or own_kind != (kind or own_kind) or (isinstance(device, int) and device >= num_present):
            break
        if device in found:
            return []
        kind = own_kind
        found.append(device)
    return found[:1] if kind == "MIG-" else found[:num_present]


def node_name() -> str:
    """Return Slurm's name of this node, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def boot_id() -> str | None:
    """Return the kernel's random id of this boot, which tells machines of one name apart; None if unreadable."""
    try:
        return BOOT_ID_PATH.read_text().strip()
    except OSError:
        return None


def shared_memory() -> str:
    try:
        size_bytes, _, free_bytes = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        return f"{SHARED_MEMORY} ({error.strerror})"
    return f"{SHARED_MEMORY} of {size_bytes // 1024:,} KiB, {free_bytes // 1024:,} KiB of it free"


def name_shared_memory(error: OSError) -> None:
    """Add the shared memory folder to an error without a file: semaphores are files there, and it may be full."""
    if error.errno == errno.ENOSPC and error.filename is None:
        error.filename = str(SHARED_MEMORY)


def interface_address(name: str) -> str | None:
    """Return this node's address on a network interface: IPv4, else IPv6; None if it has neither, or is absent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFADDR, name.encode().ljust(IFREQ_BYTES, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    lines = IPV6_ADDRESSES.read_text().splitlines() if IPV6_ADDRESSES.exists() else []
    found = (digits for digits, *_, scope, _, own in map(str.split, lines) if own == name and scope != LINK_LOCAL)
    return next((socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) for digits in found), None)


def node_rank() -> int:
    """Return this node's number in the Slurm step; 0 outside a step, where SLURM_NODEID may be an outer job's."""
    rank = slurm_number("SLURM_NODEID", "0")
    return rank if rank < slurm_number("SLURM_STEP_NUM_NODES", "1") else 0


def slurm_number(name: str, default: str = "") -> int:
    """Return a variable that Slurm sets to a number from 0. Raises CommandError if it is none."""
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise CommandError(f"{name}={text[:100]!r} is no number of Slurm's; leave it to Slurm, and submit again.")
    return int(text)


def utc_timestamp(unix_s: float | None = None) -> str:
    """Return a time (default: now) in UTC, to the second."""
    return datetime.fromtimestamp(time.time() if unix_s is None else unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> datetime:
    """Return the time that utc_timestamp wrote. Raises ValueError for a text without date, time and time zone."""
    with contextlib.suppress(ValueError):
        time = datetime.fromisoformat(text)
        if time.tzinfo is not None:
            return time
    raise ValueError(f"{text!r} is no time with a time zone, such as 2025-06-01T12:00:00Z")
