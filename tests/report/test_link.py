"""What travels and how fast; and steps that were not measured, by hand: on more GPUs, and on another link."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from conftest import Command, assert_refused, only_experiment
from factories import (
    BUCKETS,
    LARGE,
    NVLINK,
    SIZES,
    SMALL,
    US,
    assert_says,
    comm_point,
    ends,
    five_times,
    make_collective,
    make_communication,
    make_communication_record,
    make_experiment,
    make_record,
    make_spec,
    measured,
    on_gpus,
    profile,
    steady,
    with_measurement,
)
from rendered import assert_row, build, cells, report

from pipeline.collect import read_link_options
from pipeline.figures.formulas import Link, all_reduce_time_s, busbw_gb_s
from pipeline.plan.axes import Execution
from pipeline.plan.grid import expand_grid
from pipeline.plan.spec import TRAINED_MAY_DIFFER, alike_key
from pipeline.records.record import (
    DelayedSteps,
    Environment,
    Operation,
    Profile,
    Record,
    SweptCollective,
    Transfer,
    VariantName,
)
from pipeline.report.link import KINDS
from pipeline.report.network import BEYOND_THE_DELAYS, WORSE_THAN_NO_CHANGE
from pipeline.report.table import Row
from pipeline.system.errors import CommandError


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
    factors = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75, "broadcast": 1.0}
    assert {name: busbw_gb_s(2e9, 2.0, 4, name) for name in get_args(Operation)} == factors


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


HOST_BOUND = Link(latency_s=25 * US, bandwidth_bytes_per_s=300e9)


def swept_sizes(num_gpus: int, step_us: float, link: Link = NVLINK, captured: bool = True, **fields: Any) -> Record:
    """A point whose step took so long, and whose sweep is exactly that of the link."""
    times: dict[VariantName, list[float]] = {
        "plain": [920.0] * 6,
        "ddp_one": [900.0] * 6,
        "no_op_hook": [950.0] * 6,
        "ddp": [step_us] * 6,
    }
    collectives = tuple(make_collective(size, *[(50.0,) * num_gpus] * 2) for size in BUCKETS)
    found = make_communication(
        times,
        num_ranks=num_gpus,
        profile=Profile(num_steps=2, collectives=collectives),
        sweep_captured=captured,
        sweep=tuple(
            SweptCollective(
                num_bytes=size, operation="all_reduce", times_ns=(round(all_reduce_time_s(link, num_gpus, size) * 1e9),)
            )
            for size in SIZES
        ),
    )
    return make_communication_record(comm_point(num_gpus=num_gpus, **fields), found)


def predictions(*found: Record, **options: Any) -> Sequence[Row]:
    return build(*found, **options)["prediction"]


def test_four_gpus_are_predicted_from_two_and_compared_with_what_was_measured() -> None:
    row, doubled = predictions(swept_sizes(4, 1000 + 40 + 175 / 3 - 10), swept_sizes(2, 1000))
    keys = ("from_num_gpus", "num_gpus", "global_batch_size", "num_nodes")
    assert cells([row, doubled], *keys) == [(2, 4, 512, 1), (4, 8, 1024, None)]
    assert_row(doubled, **dict.fromkeys(("measured_step_time_s", "prediction_error", "no_change_error")))
    found = {
        key: row[key] for key in row.figures if key.endswith(("time_s", "latency_us", "gb_s", "error", "efficiency"))
    }
    assert found == {
        "latency_us": pytest.approx(5, rel=1e-3),
        "link_gb_s": pytest.approx(300, rel=1e-3),
        "fit_worst_error": pytest.approx(0, abs=1e-3),
        "predicted_step_time_s": pytest.approx((1040 + 175 / 3) * US, rel=1e-4),
        "measured_step_time_s": pytest.approx((1030 + 175 / 3) * US),
        "prediction_error": pytest.approx(10 / (1030 + 175 / 3), rel=1e-2),  # 0.9 % too long
        "predicted_parallel_efficiency": pytest.approx(900 / (1040 + 175 / 3), rel=1e-4),  # of the faster alone
        "all_hidden_step_time_s": pytest.approx(1000 * US),
        "all_hidden_parallel_efficiency": pytest.approx(0.9),
        "no_change_step_time_s": pytest.approx(1000 * US),  # of the two GPUs
        "no_change_error": pytest.approx(1000 / (1030 + 175 / 3) - 1, rel=1e-4),  # 8.1 % too short
    }


@pytest.mark.parametrize(
    ("num_measured", "predict_to", "numbers"),
    [
        ((2,), None, [4]),
        ((3,), None, [6]),
        ((4,), None, [8]),
        ((16,), None, [32]),
        ((2,), 1024, [4, 8, 16, 64, 256, 1024]),
        ((4,), 1024, [8, 16, 64, 256, 1024]),
        ((16,), 1024, [32, 64, 256, 1024]),
        ((4,), 100, [8, 16, 64, 100]),
        ((4,), 6, [6]),
        ((4,), 4, []),
        ((4,), 2, []),
        ((2, 16), 1024, [16, 32, 64, 256, 1024]),  # the first tests the model
    ],
)
def test_twice_the_measured_number_is_predicted_and_more_only_if_asked_for(
    num_measured: tuple[int, ...], predict_to: int | None, numbers: list[int]
) -> None:
    rows = predictions(*(swept_sizes(number, 1100) for number in num_measured), predict_to=predict_to)
    assert [row["num_gpus"] for row in rows] == numbers


def test_as_many_gpus_on_more_nodes_are_no_larger_number() -> None:
    rows = predictions(swept_sizes(2, 1000), swept_sizes(2, 1100, num_nodes=2))
    assert [(row["from_num_gpus"], row["num_gpus"]) for row in rows] == [(2, 4)]


def test_processes_on_cpus_are_not_predicted() -> None:
    """Neither more of them, nor four from two that were both measured."""
    on_cpus = [swept_sizes(num, 1000, device="cpu") for num in (2, 4)]
    assert predictions(*on_cpus) == predictions(*on_cpus, predict_to=1024) == []
    assert "Prediction" not in report(*on_cpus)


def test_a_given_link_is_noted_and_the_test_of_the_model_keeps_its_own() -> None:
    found, network = [swept_sizes(2, 1000), swept_sizes(4, 1100)], Link(latency_s=20 * US, bandwidth_bytes_per_s=25e9)
    test, *larger = predictions(*found, link=network, predict_to=1024)
    assert (test["note"], round(test["link_gb_s"])) == (None, 300)
    given = ("the link is given, not measured", pytest.approx(20), pytest.approx(25))
    assert cells(larger, "note", "latency_us", "link_gb_s") == [given] * 5
    pairs = zip(larger, predictions(*found, predict_to=1024)[1:], strict=True)
    assert min(row["predicted_step_time_s"] - mine["predicted_step_time_s"] for row, mine in pairs) > 0


def test_a_captured_sweep_is_used_where_there_is_one_and_an_eager_one_is_said_to_be_the_hosts() -> None:
    eager, captured = swept_sizes(2, 1000, HOST_BOUND, captured=False), swept_sizes(2, 1000, batch_size_per_gpu=32)
    for found, latency_us, is_said in (([eager], 25, True), ([eager, captured], 5, False)):
        rows = predictions(*found)
        told = {(round(row["latency_us"]), "the latency is the host's" in str(row["note"])) for row in rows}
        assert told == {(latency_us, is_said)}
    given = predictions(eager, link=NVLINK)
    assert {row["note"] for row in given} == {"the link is given, not measured"}


def test_points_that_differ_in_another_axis_are_predicted_apart() -> None:
    found = [
        swept_sizes(2, 1000),
        swept_sizes(4, 1100),
        swept_sizes(4, 1200, batch_size_per_gpu=32),
        swept_sizes(2, 1000, windows=12),
    ]
    rows = [row for row in predictions(*found) if row["measured_step_time_s"] is not None]
    expected = [(2, 4, pytest.approx(1100 * US))]
    assert cells(rows, "from_num_gpus", "num_gpus", "measured_step_time_s") == expected


def test_the_link_between_nodes_is_not_mixed_with_that_within_one() -> None:
    network = Link(latency_s=20 * US, bandwidth_bytes_per_s=25e9)
    found = [swept_sizes(4, 1100), swept_sizes(4, 3000, network, num_nodes=2, batch_size_per_gpu=32)]
    links = {row["batch_size_per_gpu"]: (row["link_gb_s"], row["fit_worst_error"]) for row in predictions(*found)}
    exact = pytest.approx(0, abs=1e-3)
    assert links == {128: (pytest.approx(300, rel=1e-3), exact), 32: (pytest.approx(25, rel=1e-3), exact)}


def test_a_sweep_that_no_link_explains_leaves_rows_without_figures_and_a_reason() -> None:
    backward = Link(latency_s=100 * US, bandwidth_bytes_per_s=-3e12)  # larger messages take less time
    rows = predictions(swept_sizes(2, 1000, backward), swept_sizes(4, 1100, backward), predict_to=1024)
    figures = [name for name in rows[0].figures if name.startswith(("predicted_", "all_hidden_", "l", "fit_"))]
    assert len(figures) == 7
    assert {*cells(rows, *figures)} == {(None,) * 7}
    note = "no latency and bandwidth above 0 explain the sweep on {}"
    assert cells(rows, "num_gpus", "note") == [
        (4, note.format(2)),
        *((number, note.format(4)) for number in (8, 16, 64, 256, 1024)),
    ]
    assert_row(rows[0], measured_step_time_s=1100 * US, prediction_error=None)


def test_points_that_were_not_measured_or_not_profiled_predict_nothing() -> None:
    unprofiled = make_communication({"plain": [1.0], "no_op_hook": [1.0], "ddp": [1.0]})
    found = [
        make_communication_record(comm_point(num_gpus=4), unprofiled),
        make_record(comm_point(num_gpus=4), status="oom"),
    ]
    assert [predictions(record) for record in found] == [[], []]


def test_a_test_of_the_model_names_what_the_two_steps_do_not_share() -> None:
    found = [
        msgspec.structs.replace(
            swept_sizes(num_gpus, 1000),
            environment=Environment(torch="2.11.0", git_commit=commit * 10, nodes=("node1",), boot_ids=(boot,)),
        )
        for num_gpus, commit, boot in ((2, "a", "1"), (4, "b", "2"))
    ]
    measured, *larger = predictions(*found)
    assert measured["note"].split("; ") == [
        f"measured step with another commit ({'b' * 10} against {'a' * 10})",
        "measured step from another boot of its node",
    ]
    assert {row["note"] for row in larger} == {None}


def arguments(latency_us: float | None, bandwidth_gb_s: float | None) -> argparse.Namespace:
    return argparse.Namespace(link_latency_us=latency_us, link_gb_s=bandwidth_gb_s)


def test_a_link_is_given_in_microseconds_and_gigabytes() -> None:
    assert read_link_options(arguments(5.0, 25.0)) == pytest.approx((5e-6, 25e9))
    assert read_link_options(arguments(None, None)) is None
    with pytest.raises(CommandError, match="give both or neither"):
        read_link_options(arguments(None, 25.0))


def test_collect_refuses_half_a_link_before_it_reads_anything(pipeline: Command, tmp_path: Path) -> None:
    assert_refused(pipeline("collect", tmp_path, "--link-latency-us", "5"), 2, "give both or neither")


def test_collect_predicts_as_far_as_it_is_asked_to(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", swept_sizes(2, 1000))
    command = ("collect", tmp_path / "x", "--no-write", "--only", "prediction", "--format", "json")
    for options, numbers in (((), [4]), (("--predict-to", "64"), [4, 8, 16, 64])):
        found = only_experiment(pipeline(*command, *options))
        assert [row["num_gpus"] for row in found["prediction"]] == numbers


BUCKET = 1_000_000


def timed(num_nodes: int, step_us: float, alone_us: float | None = 100) -> Record:
    """Two GPUs whose step has two buckets; an isolated all-reduce of that size took so long."""
    swept = SweptCollective(
        num_bytes=BUCKET, operation="all_reduce", times_ns=(round(alone_us * 1e3),) if alone_us else ()
    )
    buckets = tuple(make_collective(BUCKET, *[(50.0, 50.0)] * 2) for _ in range(2))
    times = {"plain": [900.0] * 6, "no_op_hook": [950.0] * 6, "ddp": [step_us] * 6}
    found = make_communication(times, profile=Profile(num_steps=2, collectives=buckets), sweep=(swept,))
    return make_communication_record(comm_point(num_nodes=num_nodes), found)


def delayed() -> Record:
    """On one node a step of 1 ms; delays of 400 us add 100 us to it, delays of 800 us add 500."""
    usual = make_communication({"ddp": [1000.0] * 6, "ddp_again": [1000.0] * 6})
    delays = tuple(
        DelayedSteps(0.0, 1e-9, (added_us * 1000,) * 6, ((step_us * 10_000, step_us * 5_000),) * 6)
        for added_us, step_us in ((400, 1100), (800, 1500))
    )
    return make_communication_record(comm_point(measure="network"), msgspec.structs.replace(usual, delayed=delays))


def test_the_step_on_two_nodes_is_what_delays_as_long_as_its_collectives_add() -> None:
    (row,) = build(delayed(), timed(1, 1000), timed(2, 1250, alone_us=400))["other_link"]
    assert_row(
        row,
        num_nodes=2,
        from_num_nodes=1,
        from_num_gpus=2,
        longer_collectives_s=pytest.approx(600e-6),  # two of 400 in place of 100 us
        by_delays_step_time_s=pytest.approx(1300e-6),  # in the middle of 1100 and 1500
        prediction_error=pytest.approx(0.04),
        no_change_step_time_s=pytest.approx(1000e-6),
        no_change_error=pytest.approx(-0.2),
        measured_step_time_s=pytest.approx(1250e-6),
    )
    assert row.notes == ()


@pytest.mark.parametrize(
    ("step_us", "alone_us", "predicted_us", "notes"),
    [
        (1100, 400, 1300, [WORSE_THAN_NO_CHANGE]),
        (1900, 600, None, [BEYOND_THE_DELAYS]),
        (1900, 50, None, [BEYOND_THE_DELAYS]),
        (1900, None, None, []),
    ],
    ids=["worse", "a slower link", "a faster link", "not swept"],
)
def test_a_prediction_that_is_worse_or_not_possible_says_so(
    step_us: float, alone_us: float | None, predicted_us: float | None, notes: list[object]
) -> None:
    (row,) = build(delayed(), timed(1, 1000), timed(2, step_us, alone_us))["other_link"]
    expected = None if predicted_us is None else pytest.approx(predicted_us / 1e6)
    assert row["by_delays_step_time_s"] == expected
    assert [note.kind for note in row.notes] == notes


def test_without_the_link_of_the_delays_nothing_is_predicted() -> None:
    assert build(delayed(), timed(2, 1250, alone_us=400))["other_link"] == []
    assert build(timed(1, 1000), timed(2, 1250, alone_us=400))["other_link"] == []
    (lost,) = build(make_record(delayed().spec, status="failed"))["network"]
    assert (lost["delay_time_s"], lost["step_time_s"]) == (None, None)
