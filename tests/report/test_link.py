from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from factories import (
    LARGE,
    SMALL,
    US,
    assert_says,
    comm_point,
    ends,
    five_times,
    make_collective,
    make_communication,
    make_communication_record,
    make_record,
    make_spec,
    measured,
    on_gpus,
    profile,
    steady,
    with_measurement,
)
from rendered_tables import assert_row, build, cells

from pipeline.plan.axes import Execution
from pipeline.plan.grid import expand_grid
from pipeline.plan.spec import TRAINED_MAY_DIFFER, alike_key
from pipeline.records.record import Profile, Record, SweptCollective, Transfer, VariantName
from pipeline.report.link import KINDS


def with_second(*durations_us: tuple[float, ...]) -> Profile:
    """The profile with other times of the large bucket, of each step on each rank."""
    collectives = (profile().collectives[0], make_collective(LARGE, *durations_us))
    return msgspec.structs.replace(profile(), collectives=collectives)


HOST = "the isolated all-reduces waited for the host: the link's limit lies higher"
PAUSE = "time on the fastest rank; isolated all-reduces follow a pause, this one does not"


@pytest.mark.parametrize(("num_gpus", "factor"), [(2, 1), (4, 1.5)])  # the ring's is 2(N-1)/N
def test_a_buckets_bandwidth_beside_that_of_the_same_size_alone(num_gpus: int, factor: float) -> None:
    slower = with_second((80, 90), (90, 99))  # shortest 80 and 90: 85 us in training, 64 alone
    (row,) = build(make_communication_record(comm_point(num_gpus=num_gpus), measured(profile=slower)))["bandwidth"]
    bandwidths = {"busbw_gb_s": factor * 26e6 / 85e-6 / 1e9, "peak_busbw_gb_s": factor * 26e6 / 64e-6 / 1e9}
    assert_row(row, bucket=1, num_bytes=LARGE, comm_time_s=85 * US, link_share=64 / 85, note=None, **bandwidths)


@pytest.mark.parametrize(("captured", "why"), [(None, HOST), (False, HOST), (True, PAUSE)])
def test_a_bucket_that_is_faster_in_training_than_alone_says_what_held_the_sweep_back(
    captured: bool | None, why: str
) -> None:
    faster = with_second((50, 90), (60, 99))  # shortest 50 and 60 us in training, 64 alone
    found = measured(profile=faster, sweep_captured=captured)
    (row,) = build(make_communication_record(comm_point(num_gpus=2), found))["bandwidth"]
    assert_row(row, link_share=64 / 55, note=why)


def test_a_bucket_that_the_sweep_does_not_know_has_no_share_and_says_so() -> None:
    first, second = build(make_communication_record(comm_point(), measured()))["bandwidth"]
    assert_row(first, num_bytes=LARGE, note=None)
    absent = {"peak_busbw_gb_s": None, "link_share": None}
    assert_row(second, bucket=2, num_bytes=SMALL, comm_time_s=20 * US, busbw_gb_s=400, **absent)  # 8 MB in 20 us
    assert_says(second["note"], "no isolated all-reduce", "size")


def test_repeats_with_other_buckets_are_not_mixed() -> None:
    whole = msgspec.structs.replace(profile(), collectives=(make_collective(LARGE + SMALL, (95, 95), (95, 95)),))
    repeats = [measured(), measured(profile=whole)]
    rows = build(*(make_communication_record(comm_point(repeat=n), found) for n, found in enumerate(repeats)))[
        "bandwidth"
    ]
    sizes_us = ((1, LARGE, 80), (1, LARGE + SMALL, 95), (2, SMALL, 20))
    assert cells(rows, "bucket", "num_bytes", "comm_time_s") == [
        (bucket, size, pytest.approx(time_us * US)) for bucket, size, time_us in sizes_us
    ]


def test_the_sweep_pools_all_points_on_as_many_gpus() -> None:
    other = measured(sweep=(SweptCollective(num_bytes=LARGE, operation="all_reduce", times_ns=(66_000,)),))
    places = (
        (comm_point(), measured()),
        (comm_point(batch_size_per_gpu=32), other),
        (comm_point(num_gpus=4), other),
    )
    two, four = build(*(make_communication_record(spec, found) for spec, found in places))["sweep"]
    # 65 us of 60, 64, 66 and 70; 26 MB in them, factor 2(1)/2
    assert_row(two, num_gpus=2, num_windows=4, n=2, time_s=65 * US, algbw_gb_s=400, busbw_gb_s=400)
    assert_row(four, num_gpus=4, num_windows=1, n=1, busbw_gb_s=four["algbw_gb_s"] * 1.5)


def test_a_size_without_memory_is_an_oom_without_figures() -> None:
    sweep = (
        SweptCollective(num_bytes=LARGE, operation="all_reduce", times_ns=(65_000,)),
        SweptCollective(num_bytes=2**40, operation="all_reduce"),
    )
    fits, large = build(make_communication_record(comm_point(), measured(sweep=sweep)))["sweep"]
    assert_row(fits, status="ok", note=None)
    absent = dict.fromkeys(("time_s", "algbw_gb_s", "busbw_gb_s"))
    assert_row(large, "no memory", "rank", num_bytes=2**40, status="oom", num_windows=0, **absent)


def swept(time_us: int = 30, execution: Execution = "eager", precision: str = "tf32", **place: Any) -> Record:
    sweep = (SweptCollective(num_bytes=LARGE, operation="all_reduce", times_ns=(time_us * 1000,)),)
    record = make_communication_record(
        comm_point(execution=execution, precision=precision, **place),
        measured(sweep=sweep, sweep_captured=execution == "graph"),
    )
    return with_measurement(record, execution_used=execution, precision_used=precision)


def test_a_sweep_of_captured_calls_is_a_row_of_its_own_and_one_beside_another_precision_is_none() -> None:
    rows = build(swept(30), swept(8, "graph"), swept(30, precision="bf16"))["sweep"]
    assert cells(rows, "execution", "time_s", "n", "note") == [
        ("eager", pytest.approx(30 * US), 2, None),  # gradients are reduced in float32 beside either
        ("graph", pytest.approx(8 * US), 1, None),
    ]


def test_a_sweep_beside_eager_steps_says_itself_whether_it_was_captured_and_repeats_of_both_kinds_say_so() -> None:
    found = [make_communication_record(comm_point(repeat=n), measured(sweep_captured=bool(n))) for n in (0, 1)]
    assert [cells(build(*part)["sweep"], "execution") for part in (found[:1], found[1:], found)] == [
        [("eager",)],
        [("graph",)],
        [("eager",), ("graph",)],
    ]
    said = "isolated all-reduces of some repeats were captured, of others not"
    assert all(said in row["note"] for row in build(*found)["bandwidth"])


@pytest.mark.parametrize(
    ("strategy", "num_gpus", "formula"),
    [("ddp", 2, 44_695_848), ("ddp", 4, 44_695_848), ("dp", 2, 44_695_848), ("dp", 4, 134_087_544)],
)
def test_the_ledger_stands_beside_the_formula(strategy: str, num_gpus: int, formula: int) -> None:
    transfers = (
        Transfer(kind="gradients", calls_per_step=3, bytes_per_step=formula),
        Transfer(kind="buffers", calls_per_step=0.5, bytes_per_step=38_560),
    )
    times: dict[VariantName, Sequence[float]] = {"plain": [700.0] * 6, "dp": [31_000.0] * 6}
    found = make_communication(five_times() if strategy == "ddp" else times, transfers=transfers)
    (row,) = build(make_communication_record(comm_point(strategy, num_gpus), found))["transfers"]
    counted: dict[str, float] = {f"{kind}_{what}_per_step": 0 for kind in KINDS for what in ("calls", "bytes")}
    counted |= {"gradients_calls_per_step": 3, "gradients_bytes_per_step": formula}
    counted |= {"buffers_calls_per_step": 0.5, "buffers_bytes_per_step": 38_560}
    step_s = (1190 if strategy == "ddp" else 31_000) * US
    assert_row(
        row, gradients_bytes_formula=formula, step_time_s=step_s, epoch_time_s=None, test_accuracy=None, **counted
    )


def test_the_point_that_trained_with_the_same_axes_lends_its_time_and_accuracy() -> None:
    trained = make_record(on_gpus(2, 128), (9, 2), loss=1.0, test_accuracy=0.75)
    others = [
        make_record(on_gpus(2, 128, input="synthetic", epochs=1, max_steps=3), (1,)),  # a probe
        *(
            make_record(on_gpus(2, 128, **fields), (9, 7))
            for fields in (
                {"broadcast_buffers": False},
                {"precision": "bf16"},
                {"remedies": ("zero_gamma",)},
                {"strategy": "dp"},
            )
        ),
    ]
    tables = build(
        *others,
        trained,
        make_record(make_spec(), (9, 3)),
        make_communication_record(comm_point(), measured()),
    )
    (ledger,) = tables["transfers"]
    assert_row(ledger, epoch_time_s=2, test_accuracy=0.75)
    (twin,) = [row for row in tables["Q3"] if None not in (row["exposed_comm_time_s"], row["epoch_time_s"])]
    # 2 - 3/2: the estimate stands beside it
    assert_row(twin, epoch_time_s=2, strategy="ddp", precision="tf32", comm_time_subtraction_s=0.5)
    assert ends(twin["exposed_comm_time_s"], 196 * US) == pytest.approx((38, 40, 42))  # ceil(25,000 / 128) steps


def test_the_grid_of_q3_measures_every_ddp_point_that_it_subtracts() -> None:
    points = expand_grid("q3").points
    measured, subtracted = (
        [alike_key(spec, TRAINED_MAY_DIFFER) for spec in points if (spec.measure, spec.strategy) in kinds]
        for kinds in ([("communication", "ddp"), ("communication", "dp")], [("epochs", "ddp")])
    )
    assert [measured.count(key) for key in subtracted] == [1] * 10  # 5 batch sizes on each of 2 and 4 GPUs


def test_a_point_measured_twice_lends_what_most_rounds_say_and_not_what_failed() -> None:
    long = make_communication_record(comm_point(windows=120), steady(*[60.0] * 12))
    short = make_communication_record(comm_point(windows=12), measured(*[40.0] * 6))
    failed = make_record(comm_point(windows=60), status="oom")
    for found in ([failed, short, long], [long, short, failed]):
        (row,) = build(make_record(on_gpus(2, 128)), *found)["Q3"]
        assert row["exposed_comm_time_s"] == pytest.approx(196 * 60 * US)
