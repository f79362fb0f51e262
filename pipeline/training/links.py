"""Links between ranks: what NCCL chose, by its own log, and the GPUs, networks and NUMA nodes of this machine.

NCCL's lines are those of 2.14 to 2.30 (src/transport/{p2p,shm,net,net_socket}.cc, net_ib). What cannot be read is left
out: nothing here ends a run but a binding that was asked for.
"""

import ctypes
import functools
import itertools
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pipeline.figures.links import NEAR_CPUS
from pipeline.records.record import Binding, Link, NetworkDevice, short_text
from pipeline.system.host import node_name

CHANNEL = re.compile(
    r"Channel (?P<channel>\d+)(?:/(?P<index>\d+))? : (?P<sender>\d+)\[\w+\] -> (?P<receiver>\d+)\[\w+\] "
    r"(?:\[send\] )?via (?:(?P<kind>P2P|SHM)|(?P<net>NET/[^/]+)/(?P<device>\d+)(?:\(\d+\))?(?P<gdr>/GDRDMA)?)"
)
USING = re.compile(r"NET/(Socket|IB) : Using (.*)")
DEVICES = {"Socket": re.compile(r"\[(\d+)\]([^:\s]+):"), "IB": re.compile(r"\[(\d+)\]([^:\s]+:\d+/(?:IB|RoCE))")}
COMMUNICATOR = re.compile(r"rank \d+ nranks (\d+) ")
TRANSPORT_INDEX = "0"  # of collectives; the others are of send and recv
GPU_UUID = re.compile(r"^GPU \d+:.*\(UUID: (GPU-[^)]+)\)", re.MULTILINE)  # of nvidia-smi -L
GPU_ROW = re.compile(r"^(?:\x1b\[\d*m)*\s*GPU\d+\s")
COMMAND_LIMIT_S = 20
BUS_ID_BYTES = 32  # more than 0000:3B:00.0 needs
SYS = Path("/sys")

_log: list[int] = []  # the descriptor of NCCL's log, if this process keeps one


def start_log() -> None:
    """Let NCCL write its log into this process's memory. A user who asks for one has it to himself."""
    if not _log and not any(name.startswith("NCCL_DEBUG") for name in os.environ):
        _log.append(os.memfd_create("nccl"))
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
        os.environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{_log[0]}"


def log_descriptors() -> Sequence[int]:
    """Return the descriptors that a child which uses NCCL must inherit."""
    return tuple(_log)


def is_own(name: str) -> bool:
    """True for a variable that start_log has set."""
    return bool(_log) and name.startswith("NCCL_DEBUG")


def read_links(world_size: int) -> list[Link]:
    """Return the connections over which this rank sends, as far as NCCL has made them; none without a log."""
    ctypes.CDLL(None).fflush(None)  # NCCL's lines that are still buffered
    logs = [Path(f"/proc/self/fd/{descriptor}").read_text(errors="replace") for descriptor in _log]
    return parse_links("".join(logs), world_size)


def parse_links(log: str, world_size: int) -> list[Link]:
    """Return the connections in a log of NCCL, pairs alike in one.

    None of a process that is in groups of several sizes: no line says of which group its ranks are.
    """
    if {int(size) for size in COMMUNICATOR.findall(log)} - {1, world_size}:
        return []
    devices: dict[tuple[str, str], str] = {}
    for kind, text in USING.findall(log):
        devices |= {(kind, number): name for number, name in DEVICES[kind].findall(text)}
    channels: dict[tuple[str, str | None, bool, tuple[int, int]], set[str]] = defaultdict(set)
    for found in CHANNEL.finditer(log):
        if (found["index"] or TRANSPORT_INDEX) == TRANSPORT_INDEX:  # a receiver logs "[receive]"
            network = "Socket" if found["net"] == "NET/Socket" else "IB"
            device = devices.get((network, found["device"])) if found["net"] else None
            pair = int(found["sender"]), int(found["receiver"])
            channels[found["kind"] or found["net"], device, bool(found["gdr"]), pair].add(found["channel"])
    return merge_links(
        Link(pairs=(pair,), transport=short_text(transport), num_channels=len(own), device=device, gpudirect=gdr)
        for (transport, device, gdr, pair), own in channels.items()
    )


def merge_links(links: Iterable[Link]) -> list[Link]:
    """Return the connections with the pairs of those that are alike in one."""
    pairs: dict[Link, set[tuple[int, int]]] = defaultdict(set)
    for link in links:
        pairs[msgspec.structs.replace(link, pairs=())].update(link.pairs)
    return [msgspec.structs.replace(link, pairs=tuple(sorted(own))) for link, own in pairs.items()]


@functools.cache
def read_gpu_paths(uuids: tuple[str, ...]) -> dict[tuple[int, int], str]:
    """Return what `nvidia-smi topo -m` says of each pair of these GPUs, by their places: NV4, PIX, SYS."""
    listed = GPU_UUID.findall(run_nvidia_smi("-L"))
    rows = parse_topology(run_nvidia_smi("topo", "-m")) if set(uuids) <= {*listed} else []
    places = [listed.index(uuid) for uuid in uuids] if len(rows) == len(listed) else []
    pairs = itertools.combinations(range(len(places)), 2)
    return {(one, other): rows[places[one]][places[other]] for one, other in pairs}


def parse_topology(text: str) -> list[list[str]]:
    """Return the paths from each GPU to every GPU in the answer of `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in text.splitlines() if GPU_ROW.match(line)]
    rows = [row[1:] for row in rows if "X" in row]  # not the headings
    return [row[: len(rows)] for row in rows]


def run_nvidia_smi(*words: str) -> str:
    """Return the answer of nvidia-smi; "" if there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, errors="replace", timeout=COMMAND_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_network_devices(root: Path = SYS) -> list[NetworkDevice]:
    """Return the interfaces of this node that are up and state a speed, and its ports for RDMA."""
    found, node = [], node_name()
    for folder in sorted((root / "class/net").glob("*")):
        mbit_per_s = number_in(read(folder / "speed"))
        if read(folder / "operstate") == "up" and mbit_per_s:
            found.append(NetworkDevice(node=node, name=short_text(folder.name), gbit_per_s=mbit_per_s / 1000))
    for port in sorted((root / "class/infiniband").glob("*/ports/*")):
        kind = "RoCE" if read(port / "link_layer") == "Ethernet" else "IB"
        name = short_text(f"{port.parent.parent.name}:{port.name}/{kind}")
        is_up = "ACTIVE" in read(port / "state")
        rate = number_in(read(port / "rate"))
        found.append(NetworkDevice(node=node, name=name, gbit_per_s=rate, is_rdma=True, is_up=is_up))
    return found


def bind_to_gpus(bus_ids: Sequence[str | None], root: Path = SYS) -> None:
    """Bind this process, and what it starts from now on, to those of its CPUs that lie on the NUMA node of its GPU.

    One that drives several GPUs may use the CPUs of all their nodes. Raises RuntimeError if a node is not known, or if
    the process may use no CPU there.
    """
    nodes, own, named = [gpu_numa_node(bus_id, root) for bus_id in bus_ids], os.sched_getaffinity(0), bus_ids[0]
    if None in nodes:
        raise RuntimeError(
            f"numa_binding=gpu needs the NUMA node of GPU {named}, and no file {root}/bus/pci/devices/*/numa_node has "
            "it; leave it out"
        )
    lists = [read(root / f"devices/system/node/node{node}/cpulist") for node in nodes]
    cpus = own & parse_cpus(",".join(lists))
    if not cpus:
        raise RuntimeError(
            f"numa_binding=gpu finds no CPU for a rank: it may use {format_cpus(own)}, and NUMA node {nodes[0]} of GPU "
            f"{named} has {lists[0] or 'none'}; {NEAR_CPUS}, or leave it out"
        )
    os.sched_setaffinity(0, cpus)


def gpu_bus_id(index: int) -> str | None:
    """Return the PCI bus id of a visible GPU as sysfs names it, 0000:3b:00.0; None if the driver gives none.

    The driver is asked, not torch: this process gets no context on the GPU, which the user's script may want alone.
    """
    text, device = ctypes.create_string_buffer(BUS_ID_BYTES), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)
    failed = failed or driver.cuDeviceGetPCIBusId(text, BUS_ID_BYTES, device)
    return None if failed else text.value.decode().lower()


def gpu_numa_node(bus_id: str | None, root: Path = SYS) -> int | None:
    """Return the NUMA node of a GPU; None if it is not known."""
    node = number_in(read(root / "bus/pci/devices" / bus_id / "numa_node")) if bus_id else None
    return None if node is None else int(node)


def describe_binding(rank: int, bus_id: str | None, root: Path = SYS) -> Binding:
    """Return where this process may run, and the NUMA node of its GPU."""
    cpus = os.sched_getaffinity(0)
    own = {
        int(folder.name.removeprefix("node"))
        for folder in (root / "devices/system/node").glob("node[0-9]*")
        if cpus & parse_cpus(read(folder / "cpulist"))
    }
    nodes = tuple(sorted(own))
    return Binding(rank=rank, cpus=format_cpus(cpus), numa_nodes=nodes, gpu_numa_node=gpu_numa_node(bus_id, root))


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a list of the kernel: 0-3,8."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",") if re.fullmatch(r"\d+(-\d+)?", part)]
    return {cpu for first, *last in ends for cpu in range(first, (last or [first])[0] + 1)}


def format_cpus(cpus: Iterable[int]) -> str:
    """Return a list of CPUs as the kernel writes it."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return short_text(",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs))


def read(path: Path) -> str:
    """Return the content of a file of the kernel; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number_in(text: str) -> float | None:
    """Return the number with which a text begins; None without one, or if it is negative."""
    match = re.match(r"\d+(?:\.\d+)?", text)
    return float(match[0]) if match else None
