from typing import Any

import msgspec
import pytest
from communication_records import LARGE, SMALL, US, measured, point, profile
from factories import assert_says, make_collective, make_communication_record
from rendered_tables import build

from pipeline.experiment.measurement import SweptCollective
from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.plan.axes import Execution


@pytest.mark.parametrize(
    ("num_gpus", "achieved", "peak"),
    [(2, 26e6 / 85e-6 / 1e9, 26e6 / 64e-6 / 1e9), (4, 1.5 * 26e6 / 85e-6 / 1e9, 1.5 * 26e6 / 64e-6 / 1e9)],
)
def test_a_buckets_bandwidth_beside_that_of_the_same_size_alone(num_gpus: int, achieved: float, peak: float) -> None:
    slower = msgspec.structs.replace(
        profile(), collectives=(profile().collectives[0], make_collective(LARGE, (80, 90), (90, 99)))
    )  # shortest 80 and 90: 85 us in training, 64 alone; the ring's factor is 2(N-1)/N
    (row,) = build(make_communication_record(point(num_gpus=num_gpus), measured(profile=slower)))["bandwidth"]
    assert (row["bucket"], row["num_bytes"], row["comm_time_s"]) == (1, LARGE, pytest.approx(85 * US))
    assert (row["busbw_gb_s"], row["peak_busbw_gb_s"]) == (pytest.approx(achieved), pytest.approx(peak))
    assert row["link_share"] == pytest.approx(64 / 85)
    assert row["note"] is None


@pytest.mark.parametrize(
    ("captured", "why"),
    [
        (None, "the isolated all-reduces waited for the host: the link's limit lies higher"),
        (False, "the isolated all-reduces waited for the host: the link's limit lies higher"),
        (True, "time on the fastest rank; isolated all-reduces follow a pause, this one does not"),
    ],
)
def test_a_bucket_that_is_faster_in_training_than_alone_says_what_held_the_sweep_back(
    captured: bool | None, why: str
) -> None:
    faster = msgspec.structs.replace(
        profile(), collectives=(profile().collectives[0], make_collective(LARGE, (50, 90), (60, 99)))
    )  # shortest 50 and 60 us in training, 64 alone
    (row,) = build(make_communication_record(point(num_gpus=2), measured(profile=faster, sweep_captured=captured)))[
        "bandwidth"
    ]
    assert row["link_share"] == pytest.approx(64 / 55)
    assert row["note"] == why


def test_a_bucket_that_the_sweep_does_not_know_has_no_share_and_says_so() -> None:
    first, second = build(make_communication_record(point(), measured()))["bandwidth"]
    assert (first["num_bytes"], first["note"]) == (LARGE, None)
    assert (second["bucket"], second["num_bytes"], second["comm_time_s"]) == (2, SMALL, pytest.approx(20 * US))
    assert second["busbw_gb_s"] == pytest.approx(400)  # 8 MB in 20 us
    assert (second["peak_busbw_gb_s"], second["link_share"]) == (None, None)
    assert_says(second["note"], "no isolated all-reduce", "size")


def test_repeats_with_other_buckets_are_not_mixed() -> None:
    whole = msgspec.structs.replace(profile(), collectives=(make_collective(LARGE + SMALL, (95, 95), (95, 95)),))
    found = [
        make_communication_record(point(), measured()),
        make_communication_record(point(repeat=1), measured(profile=whole)),
    ]
    rows = build(*found)["bandwidth"]
    assert [(row["bucket"], row["num_bytes"]) for row in rows] == [(1, LARGE), (1, LARGE + SMALL), (2, SMALL)]
    assert [row["comm_time_s"] for row in rows] == [pytest.approx(time_us * US) for time_us in (80, 95, 20)]


def test_the_sweep_pools_all_points_on_as_many_gpus() -> None:
    other = measured(sweep=(SweptCollective(num_bytes=LARGE, times_ns=(66_000,)),))
    found = [
        make_communication_record(point(), measured()),
        make_communication_record(point(batch_size_per_gpu=32), other),
        make_communication_record(point(num_gpus=4), other),
    ]
    two, four = build(*found)["sweep"]
    assert (two["num_gpus"], two["num_windows"], two["n"]) == (2, 4, 2)
    assert two["time_s"] == pytest.approx(65 * US)  # of 60, 64, 66 and 70
    assert two["algbw_gb_s"] == two["busbw_gb_s"] == pytest.approx(400)  # 26 MB in 65 us, factor 2(1)/2
    assert (four["num_gpus"], four["num_windows"], four["n"]) == (4, 1, 1)
    assert four["busbw_gb_s"] == pytest.approx(four["algbw_gb_s"] * 1.5)


def test_a_size_without_memory_is_an_oom_without_figures() -> None:
    sweep = (SweptCollective(num_bytes=LARGE, times_ns=(65_000,)), SweptCollective(num_bytes=2**40))
    fits, large = build(make_communication_record(point(), measured(sweep=sweep)))["sweep"]
    assert (fits["status"], fits["note"]) == ("ok", None)
    assert (large["num_bytes"], large["status"], large["num_windows"]) == (2**40, "oom", 0)
    assert (large["time_s"], large["algbw_gb_s"], large["busbw_gb_s"]) == (None, None, None)
    assert_says(large["note"], "no memory", "rank")


def test_a_sweep_of_captured_calls_is_a_row_of_its_own() -> None:
    def swept(execution: Execution, time_us: int, **place: Any) -> Record:
        sweep = (SweptCollective(num_bytes=LARGE, times_ns=(time_us * 1000,)),)
        record = make_communication_record(point(execution=execution), measured(sweep=sweep), **place)
        assert record.measurement is not None
        measurement = msgspec.structs.replace(record.measurement, execution_used=execution)
        return msgspec.structs.replace(record, measurement=measurement)

    rows = build(swept("eager", 30), swept("graph", 8))["sweep"]
    assert [(row["execution"], row["time_s"], row["n"], row["note"]) for row in rows] == [
        ("eager", pytest.approx(30 * US), 1, None),
        ("graph", pytest.approx(8 * US), 1, None),
    ]


@pytest.mark.parametrize(("captured", "execution"), [(True, "graph"), (False, "eager")])
def test_a_sweep_beside_eager_steps_says_itself_whether_it_was_captured(captured: bool, execution: Execution) -> None:
    (row,) = build(make_communication_record(point(), measured(sweep_captured=captured)))["sweep"]
    assert row["execution"] == execution


def test_repeats_of_both_kinds_of_sweep_are_not_pooled_without_a_word() -> None:
    found = [make_communication_record(point(repeat=n), measured(sweep_captured=bool(n))) for n in (0, 1)]
    tables = build(*found)
    assert [row["execution"] for row in tables["sweep"]] == ["eager", "graph"]
    said = "isolated all-reduces of some repeats were captured, of others not"
    assert all(said in row["note"] for row in tables["bandwidth"])


def test_sweeps_on_two_gpu_models_are_two_rows() -> None:
    gpus = [Environment(gpus=(Gpu(name=name),)) for name in ("NVIDIA A40", "NVIDIA H200")]
    found = [
        make_communication_record(point(batch_size_per_gpu=32 * 2**number), measured(), environment=place)
        for number, place in enumerate(gpus)
    ]
    rows = build(*found)["sweep"]
    assert {row["gpu"]: row["n"] for row in rows} == {"NVIDIA A40": 1, "NVIDIA H200": 1}
    assert len(rows) == 2 * len(build(found[0])["sweep"])


def test_a_sweep_beside_steps_of_another_precision_is_the_same_sweep() -> None:
    def swept(precision: str) -> Record:
        record = make_communication_record(point(precision=precision), measured())
        assert record.measurement is not None
        measurement = msgspec.structs.replace(record.measurement, precision_used=precision)
        return msgspec.structs.replace(record, measurement=measurement)

    (row,) = build(swept("bf16"), swept("tf32"))["sweep"]
    assert (row["n"], row["note"]) == (2, None), "gradients are reduced in float32 beside either"
