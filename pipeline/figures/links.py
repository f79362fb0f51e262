"""Links between the ranks of a record, in words, and those that are slower than need be. Pure functions of records."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.records.record import Environment, Link, NetworkDevice, Record

SLOW_LINK = NoteKind("slow_link", "{what}", badge="slow link")
NEAR_CPUS = "let the job have CPUs there (cpus_per_gpu in the grid file)"
BIND = "--set numa_binding=gpu"
FAR_CPUS = NoteKind(
    "far_cpus",
    f"{{ranks}} may run only on CPUs of another NUMA node than that of the GPU; {NEAR_CPUS} and {BIND}",
    badge="far CPUs",
)
UNBOUND = NoteKind(
    "unbound", f"{{ranks}} may run on CPUs of another NUMA node than that of the GPU, too; {BIND} forbids it"
)

SLOW_GBIT_PER_S = 1
NETWORKS_OFF = {"NCCL_IB_DISABLE": ("1",), "NCCL_NET": ("Socket", "socket")}
"""Variables of NCCL -> values that rule out RDMA."""


class LinkProblem(NamedTuple):
    """A link that is slower than need be, and the cure."""

    what: str
    cure: str


def link_kinds(environment: Environment) -> list[tuple[str, int]]:
    """Return the kinds of connections between the ranks, by name, each with its number of channels."""
    return sorted({(kind, link.num_channels) for link in environment.links for kind in kinds_of(link, environment)})


def kinds_of(link: Link, environment: Environment) -> Iterable[str]:
    """Yield the names of a connection; peer-to-peer goes by NVLink for some pairs and by PCIe for others."""
    if link.transport == "P2P":
        for sender, receiver in link.pairs:
            path = environment.gpu_paths.get(f"{min(sender, receiver)}-{max(sender, receiver)}", "")
            yield "NVLink" if path.startswith("NV") else "PCIe" if path else "peer-to-peer"
    elif link.transport == "SHM":
        yield "shared memory"
    elif link.transport == "NET/Socket":
        yield "sockets"
    else:
        name = link.transport.removeprefix("NET/")
        if name.startswith("IB"):
            name = "RoCE" if (link.device or "").endswith("RoCE") else "InfiniBand"
        yield f"{name} {'with' if link.gpudirect else 'without'} GPUDirect"


def describe_links(record: Record) -> str | None:
    """Return the kinds of connections between the ranks: `NVLink and sockets`; None if they are not known."""
    return " and ".join(dict.fromkeys(kind for kind, _ in link_kinds(record.environment))) or None


def link_problems(environment: Environment) -> list[LinkProblem]:
    """Return what is slower than it need be between the ranks of different nodes."""
    names = {link.transport: link.device or "an interface" for link in environment.links}
    devices = environment.network_devices
    found = []
    if "NET/Socket" in names:
        own = names["NET/Socket"]
        if ports := [device for device in devices if device.is_rdma and device.is_up]:
            port = ports[0]
            what = f"ranks talk over sockets ({own}), though {port.name} is up on {port.node}"
            found.append(LinkProblem(what, use_rdma(environment)))
        speeds = [device.gbit_per_s for device in devices if device.name == own and device.gbit_per_s]
        if speeds and min(speeds) <= SLOW_GBIT_PER_S:
            what = f"ranks talk over {own} of {min(speeds):g} Gbit/s"
            found.append(LinkProblem(what, use_faster(devices, min(speeds))))
    if any(link.transport.startswith("NET/IB") and not link.gpudirect for link in environment.links):
        what = "ranks talk over InfiniBand or RoCE without GPUDirect: data passes through the memory of the host"
        found.append(LinkProblem(what, "load the kernel module nvidia_peermem on the nodes"))
    return found


def use_rdma(environment: Environment) -> str:
    """Return how NCCL comes to use the ports for RDMA."""
    off = [name for name, values in NETWORKS_OFF.items() if environment.variables.get(name) in values]
    return f"leave out {' and '.join(off)}" if off else "let NCCL find the port (libibverbs, /dev/infiniband)"


def use_faster(devices: Sequence[NetworkDevice], gbit_per_s: float) -> str:
    """Return how NCCL comes to use a faster interface, if one is up."""
    faster = [one for one in devices if not one.is_rdma and (one.gbit_per_s or 0) > gbit_per_s]
    best = max(faster, key=lambda one: one.gbit_per_s or 0, default=None)
    return f"NCCL_SOCKET_IFNAME={best.name}" if best else "a faster network"


def link_notes(records: Sequence[Record]) -> list[Note]:
    """Return a note for each problem of the links, and for ranks that may run on CPUs of another NUMA node.

    A process that drives several GPUs has none: it may have one on each node.
    """
    problems = dict.fromkeys(problem.what for record in records for problem in link_problems(record.environment))
    ranks: dict[NoteKind, set[int]] = defaultdict(set)
    with_gpu = (record.environment for record in records if not record.spec.facts.uses_threads)
    for one in (binding for environment in with_gpu for binding in environment.bindings):
        if one.gpu_numa_node is not None and {*one.numa_nodes} - {one.gpu_numa_node}:
            ranks[UNBOUND if one.gpu_numa_node in one.numa_nodes else FAR_CPUS].add(one.rank)
    return [
        *(make_note(SLOW_LINK, what=what) for what in problems),
        *(
            make_note(kind, ranks=f"rank{'s' if len(own) > 1 else ''} {', '.join(map(str, sorted(own)))}")
            for kind, own in ranks.items()
        ),
    ]
