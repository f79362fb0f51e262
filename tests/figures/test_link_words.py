"""How ranks were connected, in words; what is wrong with it; and what is said where two experiments differ in it."""

from typing import Any

import msgspec
import pytest
from factories import make_record, make_spec

from pipeline.figures.comparability import (
    describe_links,
    environment_difference_notes,
    link_kinds,
    link_notes,
    link_problems,
)
from pipeline.plan.strategies import StrategyName
from pipeline.records.record import Binding, Environment, Link, NetworkDevice, Record
from pipeline.report.provenance import list_provenance
from pipeline.report.table import render_note

ONE_NODE = Link(pairs=((0, 1), (1, 0), (1, 2)), transport="P2P", num_channels=16)
SOCKETS = Link(pairs=((0, 2), (2, 0)), transport="NET/Socket", num_channels=2, device="eth0")
INFINIBAND = Link(pairs=((0, 2),), transport="NET/IB", num_channels=4, device="mlx5_0:1/IB", gpudirect=True)
ETHERNET = NetworkDevice(node="n1", name="eth0", gbit_per_s=1)
PORT = NetworkDevice(node="n1", name="mlx5_0:1/IB", gbit_per_s=100, is_rdma=True)


def linked(
    *links: Link, devices: tuple[NetworkDevice, ...] = (), strategy: StrategyName = "ddp", **facts: Any
) -> Record:
    """A record whose ranks are connected so."""
    environment = Environment(links=links, network_devices=devices, **facts)
    return msgspec.structs.replace(make_record(make_spec(strategy=strategy, num_gpus=2)), environment=environment)


@pytest.mark.parametrize(
    ("links", "paths", "words"),
    [
        ((), {}, None),
        ((ONE_NODE,), {"0-1": "NV4", "1-2": "NV4"}, "NVLink"),
        ((ONE_NODE,), {"0-1": "NV4", "1-2": "SYS"}, "NVLink and PCIe"),
        ((ONE_NODE,), {}, "peer-to-peer"),
        ((Link(pairs=((0, 1),), transport="SHM", num_channels=2), SOCKETS), {}, "shared memory and sockets"),
        ((INFINIBAND,), {}, "InfiniBand with GPUDirect"),
        (
            (msgspec.structs.replace(INFINIBAND, transport="NET/IBext_v8", device="mlx5_0:1/RoCE", gpudirect=False),),
            {},
            "RoCE without GPUDirect",
        ),
        (
            (Link(pairs=((0, 1),), transport="NET/AWS Libfabric", num_channels=2),),
            {},
            "AWS Libfabric without GPUDirect",
        ),
    ],
)
def test_links_are_named_as_people_name_them(links: tuple[Link, ...], paths: dict[str, str], words: str | None) -> None:
    assert describe_links(linked(*links, gpu_paths=paths)) == words


def test_channels_are_counted_by_kind() -> None:
    assert link_kinds(linked(ONE_NODE, SOCKETS).environment) == [("peer-to-peer", 16), ("sockets", 2)]


def test_the_page_states_kinds_and_channels() -> None:
    found = list_provenance([linked(ONE_NODE, SOCKETS), linked(INFINIBAND)])
    assert found["link"] == ("peer-to-peer, 16 channels; sockets, 2 channels; InfiniBand with GPUDirect, 4 channels")
    assert "link" not in list_provenance([linked()])


def test_sockets_here_and_infiniband_there_is_a_difference_of_two_points() -> None:
    here, there, alone = linked(SOCKETS), linked(INFINIBAND), linked()
    (note,) = environment_difference_notes("A", [there], [here])
    assert render_note(note) == "A with another link (InfiniBand with GPUDirect against sockets)"
    assert not environment_difference_notes("baseline", [alone], [here])


@pytest.mark.parametrize(
    ("record", "problems"),
    [
        (
            linked(SOCKETS, devices=(PORT,)),
            [
                (
                    "ranks talk over sockets (eth0), though mlx5_0:1/IB is up on n1",
                    "let NCCL find the port (libibverbs, /dev/infiniband)",
                )
            ],
        ),
        (
            linked(SOCKETS, devices=(PORT,), variables={"NCCL_IB_DISABLE": "1"}),
            [("ranks talk over sockets (eth0), though mlx5_0:1/IB is up on n1", "leave out NCCL_IB_DISABLE")],
        ),
        (linked(SOCKETS, devices=(msgspec.structs.replace(PORT, is_up=False),)), []),
        (linked(SOCKETS, devices=(ETHERNET,)), [("ranks talk over eth0 of 1 Gbit/s", "a faster network")]),
        (
            linked(SOCKETS, devices=(ETHERNET, NetworkDevice(node="n1", name="ib0", gbit_per_s=50))),
            [("ranks talk over eth0 of 1 Gbit/s", "NCCL_SOCKET_IFNAME=ib0")],
        ),
        (linked(SOCKETS, devices=(msgspec.structs.replace(ETHERNET, gbit_per_s=10),)), []),
        (linked(INFINIBAND, devices=(PORT, ETHERNET)), []),
        (
            linked(msgspec.structs.replace(INFINIBAND, gpudirect=False), devices=(PORT,)),
            [
                (
                    "ranks talk over InfiniBand or RoCE without GPUDirect: data passes through the memory of the host",
                    "load the kernel module nvidia_peermem on the nodes",
                )
            ],
        ),
        (linked(ONE_NODE, devices=(PORT, ETHERNET)), []),  # one node
    ],
)
def test_a_link_that_is_slower_than_it_need_be_is_named_with_its_cure(
    record: Record, problems: list[tuple[str, str]]
) -> None:
    assert link_problems(record.environment) == problems
    assert [render_note(note) for note in link_notes([record, record])] == [what for what, _ in problems]


def test_ranks_that_may_not_run_near_their_gpu_are_named() -> None:
    def bound(*bindings: tuple[tuple[int, ...], int | None], strategy: StrategyName = "ddp") -> list[str]:
        found = tuple(
            Binding(rank=rank, cpus="0-7", numa_nodes=own, gpu_numa_node=gpu)
            for rank, (own, gpu) in enumerate(bindings)
        )
        record = linked(bindings=found, strategy=strategy)
        return [render_note(note) for note in link_notes([record, record])]

    ranks = (((0,), 1), ((0,), 0), ((0, 1), 1), ((), 1), ((0,), None), ((0,), 1))
    assert bound(*ranks) == [
        "ranks 0, 5 may run only on CPUs of another NUMA node than that of the GPU; let the job have CPUs there "
        "(cpus_per_gpu in the grid file) and --set numa_binding=gpu",
        "rank 2 may run on CPUs of another NUMA node than that of the GPU, too; --set numa_binding=gpu forbids it",
    ]
    assert bound(((0,), 0), ((1,), 1)) == []
    assert bound(*ranks, strategy="dp") == []  # it drives GPUs of several nodes
