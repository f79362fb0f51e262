"""The late rank: who it is, by how much, and what is known of it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from factories import (
    LARGE,
    comm_point,
    make_collective,
    make_communication,
    make_communication_record,
    measurement_of,
    sentences,
    with_measurement,
)
from rendered_tables import build

from pipeline.figures.exposed_communication import LATE_RANK, find_late_rank
from pipeline.records.record import (
    Environment,
    Gpu,
    GpuWindow,
    Link,
    NetworkDevice,
    Profile,
    Record,
    StepSeries,
    Telemetry,
    VariantName,
)

NODES = Environment(
    gpus=tuple(Gpu(name="NVIDIA H200", node=f"node-{rank // 2}") for rank in range(4)), nodes=("node-0", "node-1")
)


def communicating(
    waits_us: Sequence[Sequence[float]],
    bare_us: Sequence[float] = (1000, 1000, 1000, 1300),
    environment: Environment = NODES,
    telemetry: Telemetry | None = None,
    **fields: Any,
) -> Record:
    """A record of four ranks whose all-reduces took so long, step by step, and whose bare steps took so long."""
    profile = Profile(num_steps=len(waits_us), collectives=(make_collective(LARGE, *waits_us),))
    series: dict[VariantName, Sequence[float]] = {
        "no_op_hook": [1300.0] * 6,
        "ddp": [1400.0] * 6,
        "ddp_again": [1400.0] * 6,
    }
    found = make_communication(series, num_ranks=4, profile=profile)
    windows = tuple(tuple(round(10_000 * time_us) for time_us in bare_us) for _ in range(6))
    spec = comm_point(num_gpus=4, num_nodes=2)
    record = make_communication_record(spec, found, environment=environment, telemetry=telemetry)
    bare = StepSeries(variant="plain", window_times_ns=windows)
    part = msgspec.structs.replace(found, series=(*measurement_of(record).communication.series, bare))  # type: ignore[union-attr]
    return with_measurement(record, communication=part)


LATE = [(500, 510, 490, 100)] * 4


def test_a_rank_that_is_last_and_slow_has_a_name_a_node_and_a_remedy() -> None:
    late = find_late_rank([communicating(LATE)])
    assert late is not None
    # 300 of 400 us in the profile: the bare step explains them
    assert (late.rank, late.node, late.remedy, late.wait_s) == (3, "node-1", "exclude node-1", 300e-6)


def test_a_node_whose_ranks_are_late_in_turns_is_named() -> None:
    turns = [(500, 510, 490, 100), (500, 510, 100, 490)] * 4
    late = find_late_rank([communicating(turns, (1000, 1000, 1300, 1310))])
    assert late is not None
    assert (late.rank, late.node, late.remedy) == (2, "node-1", "exclude node-1")
    assert late.facts == ("all ranks of its node are late",)
    assert late.wait_s == pytest.approx(210e-6)  # the bare step explains less: 305
    without_gpus = find_late_rank([communicating(turns, (1000, 1000, 1300, 1310), Environment(nodes=("a", "b")))])
    assert without_gpus is not None
    assert (without_gpus.node, without_gpus.gpu) == ("b", "")


def test_the_report_says_so_and_advises_it() -> None:
    (row,) = build(communicating(LATE))["communication"]
    assert (row["late_rank"], row["limit"], row["next_step"]) == (3, "a late rank", "exclude node-1")
    (said,) = [text for text in sentences(row.notes) if "rank 3" in text]
    assert said.startswith("the other ranks wait 300 us of a step for rank 3 (GPU 3 on node-1)")


def test_a_slow_link_that_the_record_names_is_the_next_step_in_place_of_a_larger_batch() -> None:
    sockets = Link(pairs=((0, 2),), transport="NET/Socket", num_channels=2, device="eth0")
    fast = NetworkDevice(node="node-0", name="ib0", gbit_per_s=100)
    slow = NetworkDevice(node="node-0", name="eth0", gbit_per_s=1)
    even = [(500, 500, 500, 500)] * 4
    for devices, limit, step in (
        ((slow, fast), "a slow link", "NCCL_SOCKET_IFNAME=ib0"),
        ((fast,), "communication", "a larger batch"),
    ):
        environment = msgspec.structs.replace(NODES, links=(sockets,), network_devices=devices)
        (row,) = build(communicating(even, (1290, 1290, 1290, 1290), environment))["communication"]
        assert (row["limit"], step in row["next_step"]) == (limit, True)


def test_what_is_known_of_it_is_told() -> None:
    windows = [
        GpuWindow(
            epoch=1,
            gpu=gpu,
            num_telemetry_samples=9,
            median_sm_clock_mhz=1200 if gpu == 3 else 1980,
            max_temperature_c=88 if gpu == 3 else 60,
            throttle_reasons=("sw_thermal_slowdown",) if gpu == 3 else (),
        )
        for gpu in range(4)
    ]
    shared = (*NODES.gpus[:3], msgspec.structs.replace(NODES.gpus[3], memory_of_others_bytes=3 * 2**30))
    environment = msgspec.structs.replace(NODES, gpus=shared)
    late = find_late_rank(
        [communicating(LATE, (1, 1, 1, 2), environment, Telemetry(interval_s=0.1, gpus=tuple(windows)))]
    )
    assert late is not None
    assert late.facts == (
        "clock 1,200 MHz, others 1,980 (sw_thermal_slowdown)",
        "88 °C, others 60",
        "other processes hold 3.0 GiB of its memory",
    )


def test_a_rank_that_only_the_profiler_slows_is_not_named() -> None:
    assert find_late_rank([communicating(LATE, (1000, 1000, 1000, 1000))]) is None


def test_ranks_that_take_turns_and_records_that_disagree_name_none() -> None:
    turns = [(100, 500, 500, 500), (500, 100, 500, 500), (500, 500, 100, 500), (500, 500, 500, 100)]
    other = communicating([(100, 500, 500, 500)] * 4, (1300, 1000, 1000, 1000))
    for found in ([communicating(turns)], [communicating(LATE), other], []):
        assert find_late_rank(found) is None


def test_a_short_wait_is_a_figure_and_no_advice() -> None:
    (row,) = build(communicating(LATE, (1000, 1000, 1000, 1020)))["communication"]
    assert (row["late_rank"], row["limit"] == "a late rank", row.has_note(LATE_RANK)) == (3, False, False)
