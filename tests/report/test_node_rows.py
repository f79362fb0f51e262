"""Q2 beyond one machine: several nodes against one with as many GPUs, what is exposed there, and what limits it."""

from typing import Any

import msgspec
import pytest
from factories import (
    comm_point,
    make_communication,
    make_communication_record,
    make_measurement,
    make_record,
    make_spec,
)
from rendered_tables import assert_row, build

from pipeline.plan.point_label import OF_GPUS
from pipeline.records.record import Environment, Gpu, Link, Record
from pipeline.report.q2 import node_claims
from pipeline.report.questions import flatten

GPT: dict[str, Any] = {"model": "gpt", "dataset": None, "input": "synthetic", "num_samples": 8192}


def place(num_nodes: int, num_gpus: int) -> Environment:
    link = Link(pairs=((0, 4),), transport="NET/Socket", num_channels=2, device="eth0")
    nodes = tuple(f"n{index}" for index in range(num_nodes))
    return Environment(
        gpus=tuple(Gpu(name="NVIDIA H100") for _ in range(num_gpus)), nodes=nodes, links=(link,) * (num_nodes > 1)
    )


def timed(time_s: float, num_nodes: int, batch: int = 8, gpus_per_node: int = 4, **fields: Any) -> Record:
    """A record of DDP on nodes of four GPUs, with the time of an epoch."""
    num_gpus = num_nodes * gpus_per_node
    spec = make_spec(strategy="ddp", num_gpus=num_gpus, num_nodes=num_nodes, batch_size_per_gpu=batch, **GPT | fields)
    measurement = make_measurement(spec, (9, time_s), compute_share=1)
    return make_record(spec, measurement=measurement, environment=place(num_nodes, num_gpus))


def stepped(num_nodes: int, step_us: float, exposed_us: float, batch: int = 8) -> Record:
    """A record of the communication of DDP on nodes of four GPUs."""
    num_gpus = 4 * num_nodes
    spec = comm_point(num_gpus=num_gpus, num_nodes=num_nodes, batch_size_per_gpu=batch, **GPT)
    series = {"no_op_hook": [step_us - exposed_us] * 6, "ddp": [step_us] * 6, "ddp_again": [step_us] * 6}
    found = make_communication(series, num_ranks=num_gpus)
    return make_communication_record(spec, found, environment=place(num_nodes, num_gpus))


def test_several_nodes_are_compared_with_one_of_as_many_gpus() -> None:
    rows = build(timed(28, 1), timed(18, 2), timed(13, 4), timed(50, 1, gpus_per_node=2), timed(9, 8, seed=1))["nodes"]
    assert [(row["nodes"], row["scaling"], row["num_gpus"]) for row in rows] == [
        (2, "weak", 8),
        (4, "weak", 16),
        (8, "weak", 32),
    ]
    assert [row["node_speedup"] for row in rows] == pytest.approx([28 / 18, 28 / 13, 28 / 9])
    assert_row(rows[0], epoch_time_s=18, node_efficiency=pytest.approx(14 / 18))


def test_strong_scaling_holds_the_global_batch_fixed() -> None:
    rows = build(timed(28, 1, 32), timed(18, 2, 16), timed(16, 4, 16))["nodes"]
    assert [(row["nodes"], row["scaling"]) for row in rows] == [(2, "strong")]


@pytest.mark.parametrize(
    "other",
    [
        timed(28, 1, gpus_per_node=8),
        timed(28, 1, precision="bf16"),
        timed(28, 1, model="lenet", dataset="synthetic"),
        msgspec.structs.replace(timed(28, 1), environment=Environment(gpus=(Gpu(name="NVIDIA A40"),) * 4)),
    ],
)
def test_a_point_that_differs_in_more_than_nodes_is_no_baseline(other: Record) -> None:
    tables = build(other, timed(18, 2))
    assert tables["nodes"] == []
    assert "nodes" not in flatten(tables)
    assert node_claims(tables) == []


def test_the_row_says_what_is_exposed_and_why() -> None:
    """256 steps an epoch of 18 ms on two nodes, 4.5 ms of each exposed."""
    tables = build(timed(3.6, 1), timed(2.304, 2), stepped(2, 18_000, 4_500))
    (row,) = tables["nodes"]
    assert_row(row, exposed_share_of_epoch=pytest.approx(0.25), limit="communication", limit_share=pytest.approx(0.25))
    (claim,) = node_claims(tables)
    tile = claim.in_words_of(OF_GPUS)
    assert (tile.label, tile.figure, tile.line) == ("2 nodes against one", "1.56x", "78 % efficient")
    assert tile.more.startswith("4 GPUs a node, weak scaling, ddp, 8 per GPU")
    assert tile.more.endswith("; limited by communication, 25 % of its time")
