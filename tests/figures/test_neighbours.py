from typing import Any

import msgspec
import pytest
from factories import (
    comm_point,
    make_communication_record,
    make_record,
    make_spec,
    measured,
)
from rendered_tables import build, cells, row_of

from pipeline.figures.pooling import attempt_key, count_neighbours
from pipeline.plan.spec import Spec
from pipeline.records.record import Environment, Gpu, Record

BESIDE_ONE = "other configurations of this experiment on its node meanwhile: 1"
OTHERS = {size: make_spec(batch_size_per_gpu=size) for size in (32, 64, 128, 256)}
TWO_GPUS = make_spec(strategy="ddp", num_gpus=2)


def ran(spec: Spec, start: str, end: str, *, launch_id: str = "", **facts: Any) -> Record:
    """A record of an attempt from one time of an hour to another (mm:ss), on node a and in its own launch."""
    return between(make_record(spec, launch_id=launch_id or spec.run_id()), start, end, **facts)


def between(record: Record, start: str, end: str, **facts: Any) -> Record:
    times = {"started_at": f"2026-11-21T14:{start}Z", "ended_at": f"2026-11-21T14:{end}Z"}
    return msgspec.structs.replace(record, environment=Environment(**{"nodes": ("a",), **facts}), **times)


def neighbours(*found: Record) -> list[int]:
    counts = count_neighbours(found)
    return [counts[attempt_key(record)] for record in found]


def test_attempts_that_overlap_on_a_node_are_neighbours() -> None:
    found = [
        ran(OTHERS[32], "00:00", "01:00"),
        ran(OTHERS[64], "00:59", "02:00"),
        ran(OTHERS[128], "00:30", "03:00"),
        ran(OTHERS[256], "03:00", "04:00"),  # begins as the one before ends
    ]
    assert neighbours(*found) == [2, 2, 2, 0]
    elsewhere = [msgspec.structs.replace(found[0], environment=Environment(nodes=("b",))), *found[1:]]
    assert neighbours(*elsewhere) == [0, 1, 1, 0]


def test_an_attempt_on_two_nodes_is_beside_those_of_either() -> None:
    wide = ran(make_spec(strategy="ddp", num_gpus=2, num_nodes=2), "00:00", "01:00", nodes=("a", "b"))
    on_a, on_b = ran(OTHERS[32], "00:10", "00:20"), ran(OTHERS[64], "00:30", "00:40", nodes=("b",))
    assert neighbours(wide, on_a, on_b) == [1, 1, 1]


def test_machines_of_one_name_are_told_apart_by_their_boot() -> None:
    one, other = (ran(OTHERS[size], "00:00", "01:00", boot_ids=(boot,)) for size, boot in ((32, "x"), (64, "y")))
    assert neighbours(one, other) == [0, 0]
    of_slurm = ran(OTHERS[128], "00:00", "01:00", boot_ids=("x",), nodes=("a2",))  # two nodes that are one machine
    assert neighbours(one, of_slurm) == [1, 1]


def test_points_of_one_launch_do_not_overlap_also_if_the_clock_ran_backward_between_them() -> None:
    first = ran(OTHERS[32], "00:00", "01:00", launch_id="packed")
    after = ran(OTHERS[64], "01:00", "02:00", launch_id="packed")
    set_back = ran(OTHERS[128], "00:30", "01:30", launch_id="packed")
    assert neighbours(first, after, set_back) == [0, 0, 0]
    assert neighbours(first, after, set_back, ran(OTHERS[256], "00:00", "00:10")) == [1, 0, 0, 1]


@pytest.mark.fault("F23")
def test_an_attempt_without_times_or_whose_clock_ran_backward_has_no_neighbours() -> None:
    beside = ran(OTHERS[32], "00:00", "30:00")
    backward = ran(OTHERS[64], "20:00", "10:00")
    timeless = msgspec.structs.replace(ran(OTHERS[128], "00:00", "01:00"), started_at=None)
    assert neighbours(beside, backward, timeless) == [0, 0, 0]


def test_rows_of_neighbours_and_rows_that_compare_with_them_say_so_and_keep_their_figures() -> None:
    alone, two = ran(OTHERS[128], "00:00", "01:00"), ran(TWO_GPUS, "05:00", "06:00")
    beside = ran(OTHERS[32], "00:30", "01:30")
    quiet, noted = (build(alone, two, *more) for more in ((), (beside,)))
    assert cells([*quiet["Q1"], *quiet["Q2"]], "note") == [(None,)] * 3
    assert cells(noted["Q1"], "note") == [(BESIDE_ONE,)] * 2
    noted_two, quiet_two = (row_of(tables["Q2"], num_gpus=2) for tables in (noted, quiet))
    assert (noted_two["note"], noted_two["speedup"]) == (f"baseline: {BESIDE_ONE}", quiet_two["speedup"])
    assert cells(noted["Q3"], "note") == [(f"baseline: {BESIDE_ONE}",)]


def test_measured_communication_beside_another_point_is_said_in_q3() -> None:
    record = make_communication_record(comm_point("ddp", 2), measured(), launch_id="c")
    found = [ran(OTHERS[128], "00:00", "01:00"), ran(TWO_GPUS, "05:00", "06:00")]
    tables = build(*found, between(record, "10:00", "11:00"), ran(OTHERS[32], "10:30", "11:30"))
    assert f"measured communication: {BESIDE_ONE}" in tables["Q3"][0]["note"]
    assert BESIDE_ONE in tables["communication"][0]["note"]


def test_a_superseded_attempt_is_a_neighbour_too() -> None:
    retried = [
        between(make_record(OTHERS[32], status="failed", launch_id="f"), "00:00", "01:00"),
        between(make_record(OTHERS[32], attempt=1, launch_id="g"), "10:00", "11:00"),
    ]
    tables = build(*retried, ran(OTHERS[64], "00:30", "00:40"))
    assert {row["batch_size_per_gpu"]: row["note"] for row in tables["Q1"]} == {32: None, 64: BESIDE_ONE}


def on(spec: Spec, *uuids: str | None, name: str = "NVIDIA H200") -> Record:
    return ran(spec, "00:00", "01:00", launch_id="one", gpus=tuple(Gpu(name=name, uuid=uuid) for uuid in uuids))


@pytest.mark.parametrize(
    ("one", "two", "note"),
    [
        (
            on(OTHERS[128], "x"),
            on(TWO_GPUS, "y", "z"),
            "baseline ran on another GPU of the same model",
        ),
        (
            on(OTHERS[128], "x", name="NVIDIA A40"),
            on(TWO_GPUS, "y", "z"),
            "no baseline: the experiment has no configuration on 1 GPU with these axes",
        ),
        (on(OTHERS[128], "y"), on(TWO_GPUS, "y", "z"), None),
        (on(OTHERS[128], None), on(TWO_GPUS, "y", "z"), None),
        (on(OTHERS[128], "x"), on(TWO_GPUS, None, None), None),
    ],
    ids=["another GPU", "another model", "one of the two", "the baseline's is not known", "the point's are not known"],
)
def test_a_baseline_on_another_gpu_is_marked_as_far_as_uuids_are_known(
    one: Record, two: Record, note: str | None
) -> None:
    assert row_of(build(one, two)["Q2"], num_gpus=2)["note"] == note
