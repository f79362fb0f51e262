"""What NCCL, nvidia-smi and the kernel say of the links, parsed, and which variables are recorded.

Lines are as they print them, with hosts renamed.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from factories import assert_says, raising, write_file

from pipeline.records.record import MAX_SHORT_TEXT_CHARS, Link, NetworkDevice
from pipeline.training import links
from pipeline.training.provenance import recorded_variables

SOCKETS_2_18 = """\
n1:857:857 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
n1:857:884 [0] NCCL INFO NET/IB : No device found.
n1:857:884 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.0.1.1<0>
n1:857:884 [0] NCCL INFO Using network Socket
n1:857:884 [0] NCCL INFO comm 0x5f08a1 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 27000 commId 0x438c - Init START
n1:857:884 [0] NCCL INFO Channel 00/02 :    0   1   2   3
n1:857:884 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read
n1:857:884 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/IPC/read
n1:857:884 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/1
n1:857:884 [0] NCCL INFO Channel 00/0 : 0[0] -> 3[1] [send] via NET/Socket/1
n1:857:884 [0] NCCL INFO Channel 01/0 : 0[0] -> 3[1] [send] via NET/Socket/1
n1:857:884 [0] NCCL INFO Channel 00/1 : 0[0] -> 2[0] [send] via NET/Socket/0/Shared
n1:857:884 [0] NCCL INFO Connected all rings
n1:857:884 [0] NCCL INFO 2 coll channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer
"""
INFINIBAND_2_14 = """\
NCCL version 2.14.3+cuda11.7
n1:22:31 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ib0:10.0.0.1<0>
n1:22:31 [0] NCCL INFO Channel 01 : 1[2a000] -> 0[27000] via SHM/direct/direct
n1:22:31 [0] NCCL INFO Channel 00/0 : 1[2a000] -> 8[27000] [send] via NET/IB/1
"""
INFINIBAND_2_22 = """\
n1:85:906 [3] NCCL INFO P2P plugin v8 IBext_v8
n1:85:906 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP [RO]; OOB ib0:10.0.0.1<0>
n1:85:906 [3] NCCL INFO ncclCommInitRank comm 0x559d rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId e6000 - Init START
n1:85:906 [3] NCCL INFO Channel 03/0 : 7[3] -> 3[3] [receive] via NET/IBext_v8/1/GDRDMA
n1:85:906 [3] NCCL INFO Channel 03/0 : 3[3] -> 7[3] [send] via NET/IBext_v8/1/GDRDMA
n1:85:906 [3] NCCL INFO Channel 07/0 : 3[3] -> 7[3] [send] via NET/IBext_v8/1(2)/GDRDMA
n1:85:906 [3] NCCL INFO Channel 02/0 : 3[3] -> 1[1] via P2P/CUMEM
n1:85:906 [3] NCCL INFO Channel 04/0 : 3[3] -> 2[2] via P2P/direct pointer
"""
PLUGIN_2_28 = """\
n1:85:906 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/5/GDRDMA(PCI)/Shared
"""


@pytest.mark.parametrize(
    ("log", "world_size", "found"),
    [
        (
            SOCKETS_2_18,
            4,
            [
                Link(pairs=((0, 1),), transport="P2P", num_channels=2),
                Link(pairs=((0, 3),), transport="NET/Socket", num_channels=2, device="eth1"),
            ],
        ),
        (
            INFINIBAND_2_14,
            16,
            [
                Link(pairs=((1, 0),), transport="SHM", num_channels=1),
                Link(pairs=((1, 8),), transport="NET/IB", num_channels=1, device="mlx5_1:1/RoCE"),
            ],
        ),
        (
            INFINIBAND_2_22,
            8,
            [
                Link(pairs=((3, 7),), transport="NET/IBext_v8", num_channels=2, device="mlx5_1:1/IB", gpudirect=True),
                Link(pairs=((3, 1), (3, 2)), transport="P2P", num_channels=1),
            ],
        ),
        (PLUGIN_2_28, 16, [Link(pairs=((0, 8),), transport="NET/AWS Libfabric", num_channels=1, gpudirect=True)]),
        (SOCKETS_2_18, 8, []),  # a group of four beside that of all: its ranks are not known
        ("", 2, []),
        ("n1:85:906 [0] NCCL INFO Channel 00/0 : 0[0] -> via\n", 2, []),
    ],
)
def test_the_log_of_nccl_names_transport_device_and_channels(log: str, world_size: int, found: list[Link]) -> None:
    assert links.parse_links(log, world_size) == found


def test_links_of_ranks_that_are_alike_become_one() -> None:
    one, other = (Link(pairs=(pair,), transport="P2P", num_channels=2) for pair in ((1, 0), (0, 1)))
    assert links.merge_links([one, other]) == [Link(pairs=((0, 1), (1, 0)), transport="P2P", num_channels=2)]


LIST = """\
GPU 0: NVIDIA A40 (UUID: GPU-aaaa)
GPU 1: NVIDIA A40 (UUID: GPU-bbbb)
  MIG 1g.5gb Device 0: (UUID: MIG-cccc)
GPU 2: NVIDIA A40 (UUID: GPU-dddd)
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tSYS\tNODE\t0-15,32-47\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tPIX\t0-15,32-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tNODE\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
OLD_TOPOLOGY = """\
        GPU0    GPU1    mlx5_0  CPU Affinity    NUMA Affinity
GPU0     X      PHB     NODE    0-47,96-143     0
GPU1    PHB      X      PXB     0-47,96-143     0
mlx5_0  NODE    PXB      X
"""


def test_the_topology_of_nvidia_smi_gives_the_path_of_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links.parse_topology(OLD_TOPOLOGY) == [["X", "PHB"], ["PHB", "X"]]
    monkeypatch.setattr(links, "run_nvidia_smi", lambda *words: LIST if words == ("-L",) else TOPOLOGY)
    read = links.read_gpu_paths.__wrapped__
    assert read(("GPU-aaaa", "GPU-bbbb")) == {(0, 1): "NV4"}
    assert read(("GPU-dddd", "GPU-bbbb", "GPU-aaaa")) == {(0, 1): "SYS", (0, 2): "SYS", (1, 2): "NV4"}
    assert read(("GPU-aaaa", "GPU-eeee")) == {}
    monkeypatch.setattr(links, "run_nvidia_smi", lambda *words: LIST if words == ("-L",) else OLD_TOPOLOGY)
    assert read(("GPU-aaaa", "GPU-bbbb")) == {}  # two answers that do not fit


def test_without_nvidia_smi_there_is_no_topology(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert links.run_nvidia_smi("-L") == ""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert links.run_nvidia_smi("-L") == ""


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write_file(root / name, text + "\n")


def test_interfaces_that_are_up_and_ports_of_infiniband_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    ports = "class/infiniband/mlx5_{}/ports/1"
    write_files(
        tmp_path,
        {
            **{"class/net/eth0/operstate": "up", "class/net/eth0/speed": "1000"},
            **{"class/net/eth1/operstate": "down", "class/net/eth1/speed": "-1"},
            **{"class/net/lo/operstate": "unknown"},
            **{f"{ports.format(0)}/state": "4: ACTIVE", f"{ports.format(0)}/rate": "100 Gb/sec (4X EDR)"},
            **{f"{ports.format(0)}/link_layer": "InfiniBand"},
            **{f"{ports.format(1)}/state": "1: DOWN", f"{ports.format(1)}/link_layer": "Ethernet"},
        },
    )
    assert links.read_network_devices(tmp_path) == [
        NetworkDevice(node="n1", name="eth0", gbit_per_s=1),
        NetworkDevice(node="n1", name="mlx5_0:1/IB", gbit_per_s=100, is_rdma=True),
        NetworkDevice(node="n1", name="mlx5_1:1/RoCE", is_rdma=True, is_up=False),
    ]
    assert links.read_network_devices(tmp_path / "none") == []


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a kernel on two sockets, of which this process may use some CPUs. GPU 5e has no known node."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 9, 16})
    nodes = "devices/system/node/node{}/cpulist"
    write_files(tmp_path, {nodes.format(0): "0-3,8", nodes.format(1): "4-7,9-15", nodes.format(2): "20-31"})
    of_gpus = {"0000:1b:00.0": "0", "0000:3b:00.0": "1", "0000:5e:00.0": "-1", "0000:af:00.0": "2"}
    write_files(tmp_path, {f"bus/pci/devices/{bus}/numa_node": node for bus, node in of_gpus.items()})
    return tmp_path


def test_a_rank_states_its_cpus_their_numa_nodes_and_that_of_its_gpu(two_sockets: Path) -> None:
    buses = ("0000:3b:00.0", "0000:5e:00.0", "0000:00:00.0", None)
    found = [links.describe_binding(3, bus, two_sockets) for bus in buses]
    assert {(one.rank, one.cpus, one.numa_nodes) for one in found} == {(3, "0-2,9,16", (0, 1))}
    assert [one.gpu_numa_node for one in found] == [1, None, None, None]


@pytest.mark.parametrize(
    ("buses", "cpus"),
    [
        (["0000:1b:00.0"], {0, 1, 2}),
        (["0000:3b:00.0"], {9}),
        (["0000:1b:00.0", "0000:3b:00.0"], {0, 1, 2, 9}),  # DataParallel
    ],
)
def test_a_rank_is_bound_to_all_its_cpus_on_the_numa_node_of_its_gpu(
    two_sockets: Path, monkeypatch: pytest.MonkeyPatch, buses: list[str | None], cpus: set[int]
) -> None:
    bound: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append((pid, cpus)))
    links.bind_to_gpus(buses, two_sockets)
    assert bound == [(0, cpus)]


@pytest.mark.parametrize(
    ("bus", "words"),
    [
        ("0000:5e:00.0", ("needs the NUMA node of GPU 0000:5e:00.0", "/numa_node has it; leave it out")),
        (None, ("needs the NUMA node of GPU None", "leave it out")),
        (
            "0000:af:00.0",
            ("it may use 0-2,9,16, and NUMA node 2 of GPU 0000:af:00.0 has 20-31", "cpus_per_gpu", "or leave it out"),
        ),
    ],
)
def test_a_binding_that_was_asked_for_and_cannot_be_is_one_sentence(
    two_sockets: Path, monkeypatch: pytest.MonkeyPatch, bus: str | None, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", raising(AssertionError("bound")))
    with pytest.raises(RuntimeError) as refused:
        links.bind_to_gpus([bus], two_sockets)
    assert_says(str(refused.value), *words)
    assert "\n" not in str(refused.value)


class Driver:
    """libcuda with two GPUs; `failing` names the function that fails."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.called: list[str] = []

    def cuInit(self, flags: int) -> int:
        return self.answer("cuInit")

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return self.answer("cuDeviceGet")

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: Any) -> int:
        text.value = [b"0000:1B:00.0", b"0000:AF:00.0"][device.value][: size - 1]
        return self.answer("cuDeviceGetPCIBusId")

    def answer(self, name: str) -> int:
        self.called.append(name)
        return 100 * (name == self.failing)


def test_the_driver_tells_the_bus_id_of_a_visible_gpu_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert [links.gpu_bus_id(index) for index in (0, 1)] == ["0000:1b:00.0", "0000:af:00.0"]
    assert {*driver.called} == {"cuInit", "cuDeviceGet", "cuDeviceGetPCIBusId"}
    for failing in driver.called[:3]:
        monkeypatch.setattr(ctypes, "CDLL", lambda name, failing=failing: Driver(failing))
        assert links.gpu_bus_id(0) is None
    monkeypatch.setattr(ctypes, "CDLL", raising(OSError("libcuda.so.1: cannot open shared object file")))
    assert links.gpu_bus_id(0) is None


NCCL = """
import ctypes, glob, sys
from pathlib import Path
from pipeline.training import links
links.start_log()
import torch
libraries = [path for path in Path("/proc/self/maps").read_text().split() if "libnccl.so" in path]
if not libraries or torch.cuda.nccl.version() < (2, 28):  # which says nothing of this call in INIT or NET
    sys.exit(print("no NCCL"))
assert ctypes.CDLL(libraries[0]).ncclGetUniqueId(ctypes.create_string_buffer(256)) == 0
print(links.read_links(2), [Path(f"/proc/self/fd/{one}").read_text().count("NCCL INFO") > 0 for one in links._log])
"""


@pytest.mark.seconds
def test_nccl_itself_writes_into_the_log() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    command = [sys.executable, "-c", NCCL]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    if done.stdout.strip() == "no NCCL":
        pytest.skip("this torch has no NCCL, or an older one")
    assert done.stdout.strip() == "[] [True]"


def test_a_user_who_asks_for_the_log_of_nccl_has_it_to_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "WARN"})
    monkeypatch.setattr(links, "_log", [])
    links.start_log()
    assert (links.log_descriptors(), {**os.environ}) == ((), {"NCCL_DEBUG": "WARN"})


MEASURED = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "FI_PROVIDER": "efa",
    "GLOO_SOCKET_IFNAME": "lo",
    "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=128:glibc.malloc.check=3",
    "KMP_AFFINITY": "granularity=fine,compact,1,0",
    "LD_PRELOAD": "/usr/lib/libjemalloc.so.2:/usr/lib/libother.so",
    "MALLOC_CONF": "background_thread:true,metadata_thp:auto",
    "MKL_NUM_THREADS": "1",
    "NCCL_A_LATER_VERSION_READS_IT": "2",
    "NCCL_ALGO": "ring;allreduce:tree,ring",
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "^lo,docker0",
    "NCCL_TOPO_FILE": "/etc/nccl/topology.xml",
    "NVIDIA_TF32_OVERRIDE": "0",
    "OMP_NUM_THREADS": "4",
    "OMP_PLACES": "{0:4}:4:4",
    "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync,expandable_segments:True,max_split_size_mb:128",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "UCX_TLS": "rc,cuda_copy",
}
SECRET = "hunter2"


def test_a_record_keeps_the_variables_that_change_what_is_measured_and_no_others() -> None:
    others = {
        "HOME": "/home/me",
        "MY_NCCL_NOTES": "1",
        "TORCHELASTIC_RUN_ID": "7",
        "CUDA_HOME": "/home/me/cuda",
        "CUDA_CACHE_PATH": "/home/me/cache",
        "NCCL_DEBUG_FILE": "/home/me/nccl.log",
        "TORCH_LOGS": "+dynamo",
        "CUDA_MPS_PIPE_DIRECTORY": "/home/me/mps",
        "CUDNN_LOGDEST_DBG": "/home/me/cudnn.log",
        "UCX_LOG_FILE": "/home/me/ucx.log",
        "TORCHINDUCTOR_CACHE_DIR": "/home/me/cache",
        "TORCH_HOME": "/home/me/models",
    }
    assert recorded_variables(MEASURED | others) == MEASURED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_NET_AUTH", SECRET),
        ("NCCL_TOKEN", SECRET),
        ("TORCH_COOKIE", SECRET),
        ("UCX_API_KEY", SECRET),
        ("MKL_LICENSE_PASSWORD", SECRET),
        ("FI_SECRETS", SECRET),
        ("MALLOC_CONF", f"http://me:{SECRET}@host"),
        ("OMP_X", f"Bearer {SECRET}"),
        ("NCCL_BAR", f"user:{SECRET}"),
        ("GLOO_URL", f"https://host/?token={SECRET}"),
        ("NCCL_TOPO_FILE", f"http://me:{SECRET}@host/models"),
        ("NCCL_TOPO_FILE", f"https://{SECRET}@host"),
        ("NCCL_TOPO_FILE", f"me:{SECRET}"),
        ("NCCL_TOPO_FILE", f"a,me:{SECRET}"),
        ("NCCL_TOPO_FILE", f"Bearer {SECRET}"),
        ("NCCL_TOPO_FILE", f"bearer:{SECRET}"),
        ("NCCL_TOPO_FILE", f"https://host/x?a=1&token={SECRET}"),
        ("NCCL_TOPO_FILE", f"api_key={SECRET}"),
        ("NCCL_TOPO_FILE", f"PASSWORD = {SECRET}"),
    ],
)
def test_a_variable_whose_name_or_value_is_that_of_a_secret_is_redacted(name: str, value: str) -> None:
    assert recorded_variables({name: value}) == {name: "redacted"}


@pytest.mark.parametrize(
    "name", ["token", "key", "secret", "pass", "auth", "authentication", "authorization", "credential", "cookie"]
)
def test_a_value_with_the_name_of_a_credential_before_an_equals_sign_is_not_recorded(name: str) -> None:
    assert recorded_variables({"NCCL_TOPO_FILE": f"{name}={SECRET}"}) == {"NCCL_TOPO_FILE": "redacted"}


def test_long_values_are_cut() -> None:
    assert recorded_variables({"NCCL_TOPO_FILE": "x" * (MAX_SHORT_TEXT_CHARS + 1)}) == {
        "NCCL_TOPO_FILE": "x" * MAX_SHORT_TEXT_CHARS
    }


def test_every_variable_of_the_published_records_is_still_recorded_as_it_was() -> None:
    found = [json.loads(path.read_text()) for path in (ROOT / "published").glob("**/records/*.json")]
    seen = {pair for record in found for pair in record.get("environment", {}).get("variables", {}).items()}
    assert len(seen) > 5
    assert {pair for name, value in seen for pair in recorded_variables({name: value}).items()} == seen
