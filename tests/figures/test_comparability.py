"""What is said where environments differ; how ranks were connected, and what is wrong with it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from factories import assert_says, make_record, make_spec, sentences, with_measurement

from pipeline.figures.comparability import COMPARED_FACTS, environment_difference_notes, mixed_environment_notes
from pipeline.figures.links import describe_links, link_notes, link_problems
from pipeline.figures.pooling import pool_outcomes
from pipeline.plan.axes import Device, Execution
from pipeline.plan.strategies import StrategyName
from pipeline.records.outcomes import resolve_outcomes
from pipeline.records.record import Binding, Environment, Gpu, Link, NetworkDevice, Record
from pipeline.report.provenance import list_provenance
from pipeline.report.table import MAX_VALUE_CHARS, render_note, shorten_values

H200 = (Gpu(name="NVIDIA H200"),)
DIFFERENCES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "link",
        {"links": (Link(pairs=((0, 1),), transport="SHM", num_channels=2),)},
        {"links": (Link(pairs=((0, 1),), transport="NET/Socket", num_channels=2),)},
    ),
    ("commit", {"git_commit": "a" * 40}, {"git_commit": "b" * 40}),
    ("source", {"source_digest": "a" * 64}, {"source_digest": "b" * 64}),
    ("model source", {"model_digest": "a" * 64}, {"model_digest": "b" * 64}),
    ("torch", {"torch": "2.10.0"}, {"torch": "2.11.0"}),
    ("NCCL", {"nccl": "2.27.0"}, {"nccl": "2.28.9"}),
    ("driver", {"driver": "570.1"}, {"driver": "580.1"}),
    ("GPU", {"gpus": (Gpu(name="NVIDIA A40"),)}, {"gpus": H200}),
    ("data folder", {"data": "/data/cifar"}, {"data": "/data/other"}),
]


def unlike_baseline(records: Sequence[Record], baseline: Sequence[Record]) -> list[str]:
    return sentences(environment_difference_notes("baseline", baseline, records))


def mixed(records: Sequence[Record]) -> list[str]:
    return sentences(mixed_environment_notes(records))


def on(
    repeat: int = 0,
    *,
    measured: bool = True,
    precision_used: str | None = None,
    point: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Record:
    spec = make_spec(repeat=repeat, **(point or {}))
    record = make_record(spec, environment=Environment(**facts), measured=measured)
    return with_measurement(record, precision_used=precision_used)


@pytest.mark.parametrize(("name", "one", "other"), DIFFERENCES, ids=[name for name, _, _ in DIFFERENCES])
def test_records_that_differ_in_one_fact_are_marked_by_its_name_alone(
    name: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    unlike, note = (*mixed([on(**one), on(1, **other)]), *unlike_baseline([on(**one)], [on(1, **other)]))
    assert unlike.startswith(f"mixed {name}: ")
    assert note.startswith(f"baseline with another {name} (")


def test_every_fact_is_tried() -> None:
    assert {name for name, _, _ in DIFFERENCES} | {
        "precision",
        "execution",
        "number of threads",
    } == COMPARED_FACTS.keys()


def executed(execution: Execution, repeat: int = 0) -> Record:
    return with_measurement(on(repeat), execution_used=execution)


def threaded(num_threads: int, device: Device = "cpu") -> Record:
    return with_measurement(make_record(make_spec(device=device, repeat=num_threads)), num_threads=num_threads)


ONE_GPU: dict[str, Any] = {"strategy": "ddp", "num_gpus": 1}
TWO_GPUS: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2, "execution": "compile"}
CPUS: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2, "device": "cpu"}


def under(repeat: int = 0, point: Mapping[str, Any] = TWO_GPUS, **variables: Any) -> Record:
    return on(repeat, torch="2.11.0", point=point, variables=variables)


def booted(*boot_ids: str, nodes: tuple[str, ...] = ("node1",), repeat: int = 0) -> Record:
    return on(repeat, nodes=nodes, boot_ids=boot_ids)


NO_P2P, TUNED = under(NCCL_P2P_DISABLE="1"), under(TORCHINDUCTOR_MAX_AUTOTUNE="1")
TWO_NODES = booted("x", "z", nodes=("node1", "node2"))
REBOOTED = "baseline from another boot of its node"


@pytest.mark.parametrize(
    ("found", "baseline", "marks", "notes"),
    [
        pytest.param(
            [executed("graph")],
            [executed("compiled_graph", 1)],
            ["mixed execution: compiled_graph, graph"],
            ["baseline with another execution (compiled_graph against graph)"],
            id="executed otherwise, as `execution: auto` may where a machine cannot compile",
        ),
        pytest.param([executed("graph")], [on(1)], [], [], id="a record of before says nothing of its execution"),
        pytest.param(
            [threaded(1)],
            [threaded(2)],
            ["mixed number of threads: 1, 2"],
            ["baseline with another number of threads (2 against 1)"],
            id="another number of threads on the CPU",
        ),
        pytest.param([threaded(1, "cuda")], [threaded(2, "cuda")], [], [], id="another number of threads on a GPU"),
        pytest.param(
            [NO_P2P],
            [under(1)],
            ["mixed NCCL_P2P_DISABLE: 1, not set"],
            ["baseline with another NCCL_P2P_DISABLE (not set against 1)"],
            id="a variable that one of them had not",
        ),
        pytest.param([NO_P2P], [under(1, ONE_GPU)], [], [], id="a variable that changes no time of one GPU"),
        pytest.param([TUNED], [under(1, TORCHINDUCTOR_MAX_AUTOTUNE="1")], [], [], id="the same variables"),
        pytest.param([TUNED], [on(1)], [], [], id="a record that says nothing of its environment"),
        pytest.param(
            [on(torch="2.11.0", precision_used="tf32")],
            [on(1, torch="2.11.0", precision_used="fp32")],
            ["mixed precision: fp32, tf32"],
            ["baseline with another precision (fp32 against tf32)"],
            id="another precision, the baseline's first",
        ),
        pytest.param(
            [on(git_commit="a" * 40)],
            [on(1, git_commit="b" * 40)],
            [f"mixed commit: {'a' * 12}, {'b' * 12}"],
            [f"baseline with another commit ({'b' * 12} against {'a' * 12})"],
            id="another commit, the baseline's first",
        ),
        pytest.param(
            [on(nodes=("b",))],
            [on(1, nodes=("a",))],
            [],
            ["baseline from another node (a against b)"],
            id="another node: repeats may run anywhere",
        ),
        pytest.param([on(nodes=("a", "b"))], [on(1, nodes=("a",))], [], [], id="one of its nodes"),
        pytest.param(
            [on(nodes=("a",))],
            [on(nodes=("a",)), on(1, nodes=("b",))],
            [],
            ["baseline from another node (a, b against a)"],
            id="its node and another",
        ),
        pytest.param([booted("x")], [booted("y", repeat=1)], [], [REBOOTED], id="another boot"),
        pytest.param([booted("x")], [booted("x"), booted("y", repeat=1)], [], [REBOOTED], id="its boot and another"),
        pytest.param([TWO_NODES], [booted("y")], [], [REBOOTED], id="another boot of one of its nodes"),
        pytest.param([TWO_NODES], [booted("z")], [], [], id="the boot of one of its nodes"),
        pytest.param(
            [booted("x")],
            [booted("y", nodes=("node2",))],
            [],
            ["baseline from another node (node2 against node1)"],
            id="another boot of another node",
        ),
        pytest.param([booted("x")], [booted()], [], [], id="a baseline that states no boot"),
        pytest.param([booted()], [booted("x")], [], [], id="no boot against one"),
        pytest.param([on(gpus=H200 * 4)], [on(1, gpus=H200)], [], [], id="more GPUs of one model"),
        pytest.param(
            [on(torch="a", measured=False)], [on(1, torch="b", measured=False)], [], [], id="measured elsewhere"
        ),
    ],
)
def test_what_marks_records_together_and_against_a_baseline(
    found: list[Record], baseline: list[Record], marks: list[str], notes: list[str]
) -> None:
    assert (mixed([*found, *baseline]), unlike_baseline(found, baseline)) == (marks, notes)


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("NCCL_ALGO", [TWO_GPUS]),
        ("UCX_TLS", [TWO_GPUS, CPUS]),
        ("TORCH_NCCL_BLOCKING_WAIT", [TWO_GPUS]),
        ("CUDA_LAUNCH_BLOCKING", [TWO_GPUS, ONE_GPU]),
        ("NVIDIA_TF32_OVERRIDE", [TWO_GPUS, ONE_GPU]),
        ("PYTORCH_CUDA_ALLOC_CONF", [TWO_GPUS, ONE_GPU]),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", [TWO_GPUS]),
        ("KMP_AFFINITY", [TWO_GPUS, ONE_GPU, CPUS]),
        ("LD_PRELOAD", [TWO_GPUS, ONE_GPU, CPUS]),
        ("NCCL_VERSION", []),
        ("NCCL_DEBUG", []),
        ("NCCL_DEBUG_FILE", []),
        ("NCCL_DEBUG_SUBSYS", []),
        ("CUDA_VISIBLE_DEVICES", []),
        ("TORCH_CUDA_ARCH_LIST", []),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", []),
        ("CUDA_MODULE_LOADING", []),
        ("OMP_NUM_THREADS", []),
        ("HOME", []),
    ],
)
def test_variables_are_compared_only_where_they_can_change_a_time(
    name: str, points: Sequence[Mapping[str, Any]]
) -> None:
    variables: dict[str, Any] = {name: "1"}
    for point in (TWO_GPUS, ONE_GPU, CPUS):
        marks = mixed([under(point=point, **variables), under(1, point=point)])
        assert marks == ([f"mixed {name}: 1, not set"] if point in points else []), point


ALIKE = {"torch": "2.11.0", "nodes": ("a",), "boot_ids": ("x",), "gpus": H200, "git_commit": "c" * 40}


@pytest.mark.parametrize("facts", [{}, ALIKE])
def test_what_is_alike_or_not_stated_is_not_marked(facts: dict[str, Any]) -> None:
    for records in ([on(**facts), on(1, **facts)], [on(**facts), on(1)]):
        assert (mixed(records), unlike_baseline(records[:1], records[1:])) == ([], [])
        assert unlike_baseline(records[1:], records[:1]) == []


def test_a_note_stays_short() -> None:
    assert shorten_values({str(number) for number in range(9)}) == "0, 1, 2 and 6 more"
    assert shorten_values({"x" * 400}) == "x" * MAX_VALUE_CHARS


def test_repeats_on_one_machine_that_were_executed_unlike_are_told_apart() -> None:
    found = [executed("graph"), executed("compiled_graph", 1)]
    shared = [msgspec.structs.replace(record, environment=found[0].environment) for record in found]
    (point,) = pool_outcomes(resolve_outcomes([record.spec for record in shared], shared, []).outcomes)
    assert sentences(point.notes) == ["mixed execution: compiled_graph, graph"]
    assert [note.kind.badge for note in point.notes] == ["unlike repeats"]


@pytest.mark.parametrize(
    ("held", "said"), [((0, None), []), ((0, 2**30 - 1), []), ((2**30,), ["1.0"]), ((2**30, 17 * 2**30), ["17.0"])]
)
def test_a_gpu_that_other_processes_used_at_the_start_is_named(held: Sequence[int | None], said: list[str]) -> None:
    """Measured: a process that was left behind halved the speed of 30 points, which agreed with each other to 0.2 %."""
    gpus = tuple(Gpu(name="NVIDIA H200", memory_of_others_bytes=bytes_held) for bytes_held in held)
    (point,) = pool_outcomes(resolve_outcomes([(record := on(gpus=gpus)).spec], [record], []).outcomes)
    assert [note.kind.badge for note in point.notes] == ["shared GPU"] * len(said)
    for number, sentence in zip(said, sentences(point.notes), strict=True):
        assert_says(sentence, f"other processes held {number} GiB of a GPU", "run again on free GPUs")


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
        ((msgspec.structs.replace(INFINIBAND, device=None),), {}, "InfiniBand with GPUDirect"),
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


def test_the_page_states_kinds_and_channels() -> None:
    found = list_provenance([linked(ONE_NODE, SOCKETS), linked(INFINIBAND)])
    assert found["link"] == ("peer-to-peer, 16 channels; sockets, 2 channels; InfiniBand with GPUDirect, 4 channels")
    assert "link" not in list_provenance([linked()])


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
