"""A network of known rate on one machine: hosts are network namespaces joined by a bridge, each link shaped by tbf.

Linux as root, with iproute2 and the queueing discipline tbf (`missing_parts` says what is absent). The bridge has a
namespace of its own: the machine's interfaces, routes and firewall stay as they are.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

INTERFACE, BRIDGE = "eth0", "bridge0"
PORT = 29500  # of rank 0's store; every network has its own ports
MTU_BYTES, ETHERNET_BYTES = 1500, 14  # tbf counts neither a frame's preamble nor its checksum nor the gap after it
IP_BYTES, TCP_BYTES = 20, 32  # IPv4 without options; TCP with the timestamps that Linux sends
BURST_S, LEAST_BURST_BYTES = 1e-3, 256 * 1024  # what a link catches up with, since timers may come late
QUEUE_BYTES = 4 * 2**20  # tbf drops packets beyond it
NAMESPACES = Path("/run/netns")
PREFIX = "shaped"
ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")  # even if this process is killed
POLL_S = 0.05
END_LINES = 12  # of a failed rank's output


def payload_bytes_per_s(rate_bits_per_s: float) -> float:
    """Return the rate at which TCP carries payload in full segments over a link of that rate.

    tbf counts a frame from its Ethernet header on, and a segmentation offload packet as the frames that it stands for
    (the kernel's qdisc_pkt_len_init): 1514 bytes for a payload of 1448.
    """
    return rate_bits_per_s / 8 * (MTU_BYTES - IP_BYTES - TCP_BYTES) / (MTU_BYTES + ETHERNET_BYTES)


class ShapedNetwork(NamedTuple):
    """A running network; its hosts are numbered from 0."""

    num_hosts: int

    def shape(self, rate_bits_per_s: float) -> None:
        """Give every link that rate in each direction, by tbf at both of its ends."""
        burst = max(LEAST_BURST_BYTES, round(BURST_S * rate_bits_per_s / 8))
        bucket = f"rate {rate_bits_per_s:.0f}bit burst {burst} limit {QUEUE_BYTES}"
        for namespace, device in self.link_ends():
            execute(f"tc -n {namespace} qdisc replace dev {device} root tbf {bucket}")

    def link_ends(self) -> list[tuple[str, str]]:
        """Return the namespace and the interface of both ends of every link."""
        ports = [(namespace_of("bridge"), f"port{host}") for host in range(self.num_hosts)]
        return [*((namespace_of(host), INTERFACE) for host in range(self.num_hosts)), *ports]

    def num_dropped_packets(self) -> int:
        """Return how many packets the shapers have dropped; TCP has sent them again."""
        shown = [execute(f"tc -s -n {namespace} qdisc show dev {device}") for namespace, device in self.link_ends()]
        return sum(int(text.partition("(dropped ")[2].partition(",")[0]) for text in shown)

    def run_ranks(self, arguments: Sequence[str], timeout_s: float) -> None:
        """Run `python ARGUMENTS` as one rank of a gloo process group on each host.

        Raises RuntimeError with the end of its output if a rank fails or does not end in time. No rank is left behind.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(started_rank(self, host, arguments)) for host in range(self.num_hosts)]
            while None in (endings := [rank.process.poll() for rank in ranks]):
                if any(endings) or time.monotonic() > deadline:
                    break  # the others would wait for a rank that failed
                time.sleep(POLL_S)
            if any(endings):
                rank, ending = next((rank, ending) for rank, ending in zip(ranks, endings, strict=True) if ending)
                raise RuntimeError(f"{rank.name} ended with {ending}:\n{rank.output_end()}")
            if None in endings:
                rank = ranks[endings.index(None)]
                raise RuntimeError(f"{rank.name} did not end within {timeout_s:.0f} s:\n{rank.output_end()}")


class RunningRank(NamedTuple):
    """A rank and the file of its output."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path

    def output_end(self) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-END_LINES:])


@contextlib.contextmanager
def started_rank(network: ShapedNetwork, host: int, arguments: Sequence[str]) -> Iterator[RunningRank]:
    """Start a rank on a host, and kill it at the end if it still runs."""
    variables: dict[str, str | int] = {
        "RANK": host,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": network.num_hosts,
        "MASTER_ADDR": address_of(0),
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": 1,
    }
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **{k: str(v) for k, v in variables.items()},
    }
    command = ["ip", "netns", "exec", namespace_of(host), *ENDS_WITH_PARENT, sys.executable, *arguments]
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield RunningRank(f"rank {host}", process, Path(output.name))
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def shaped_network(num_hosts: int) -> Iterator[ShapedNetwork]:
    """Make hosts that are joined by a bridge, unshaped at first. Remove them at the end, however it comes."""
    remove_leftovers()
    network = ShapedNetwork(num_hosts)
    try:
        bridge = namespace_of("bridge")
        commands = [
            f"ip netns add {bridge}",
            f"ip -n {bridge} link add {BRIDGE} type bridge",
            f"ip -n {bridge} link set {BRIDGE} up",
        ]
        for host in range(num_hosts):
            name, port = namespace_of(host), f"port{host}"
            commands += [
                f"ip netns add {name}",
                f"ip -n {name} link add {INTERFACE} type veth peer name {port} netns {bridge}",
                f"ip -n {name} address add {address_of(host)}/24 dev {INTERFACE}",
                f"ip -n {name} link set lo up",
                f"ip -n {name} link set {INTERFACE} up",
                f"ip -n {bridge} link set {port} master {BRIDGE}",
                f"ip -n {bridge} link set {port} up",
            ]
        for command in commands:
            execute(command)
        yield network
    finally:
        remove_namespaces(os.getpid())


def namespace_of(host: int | str) -> str:
    """Return the name of a host's namespace. It carries this process's id, so that leftovers are known as such."""
    return f"{PREFIX}-{os.getpid()}-{host}"


def address_of(host: int) -> str:
    """Return the IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


def remove_leftovers() -> None:
    """Remove the namespaces of processes that were killed before they could."""
    for pid in {int(path.name.split("-")[1]) for path in NAMESPACES.glob(f"{PREFIX}-*-*")}:
        if not Path(f"/proc/{pid}").exists():
            remove_namespaces(pid)


def remove_namespaces(pid: int) -> None:
    """Remove the namespaces that the process made, and with them their interfaces."""
    for path in NAMESPACES.glob(f"{PREFIX}-{pid}-*"):
        subprocess.run(["ip", "netns", "delete", path.name], check=False)


def execute(command: str) -> str:
    """Run a command without a shell and return its output. Raises RuntimeError with what it said if it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def missing_parts() -> str | None:
    """Return why no network can be shaped here; None if one could."""
    if not all(map(shutil.which, ("ip", "tc", "setpriv"))):
        return "a shaped network needs `ip` and `tc` (iproute2) and `setpriv` (util-linux)"
    if os.geteuid() != 0:
        return "a shaped network needs root, to make network namespaces"
    try:
        with shaped_network(num_hosts=1) as network:
            network.shape(1e9)
    except RuntimeError as error:
        return f"a shaped network needs network namespaces, veth, a bridge and tbf: {error}"
    return None
