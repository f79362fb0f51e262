"""One experiment on GPUs of two models: a time is of one model, an accuracy of all."""

from typing import Any

import msgspec
import pytest
from factories import (
    LARGE,
    assert_says,
    comm_point,
    low,
    make_communication_record,
    make_record,
    make_spec,
    measured,
    on,
    resolved,
    steady,
    studied,
    trained,
    with_measurement,
)
from rendered import answers_of, assert_row, build, cells, line_panel, plots_of, report, row_of, table_of, timed_record

from pipeline.figures.comparison import Comparison, compare_outcomes
from pipeline.records.record import GpuWindow, Record, SweptCollective, Telemetry
from pipeline.report.plots import Plot
from pipeline.report.table import Row

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def timed(gpu: str, time_s: float, batch_size_per_gpu: int = 128, **fields: Any) -> Record:
    return on(gpu, timed_record(make_spec(batch_size_per_gpu=batch_size_per_gpu, **fields), time_s))


def seeds(gpu: str, time_s: float, *numbers: int, **fields: Any) -> list[Record]:
    """Runs of 512 images a step that reach 0.88 in their third epoch, and 0.9 + seed/100 at the end."""
    ends = {seed: [0.5, 0.7, 0.89, 0.9 + seed / 100] for seed in numbers}
    size = {"batch_size_per_gpu": 512, **fields}
    return [on(gpu, trained(accuracies, time_s, seed=seed, **size)) for seed, accuracies in ends.items()]


def baseline(num_seeds: int = 3) -> list[Record]:
    """128 images a step on an H100 at 2 s an epoch."""
    return [on(H100, trained([0.5, 0.7, 0.89, 0.9], 2.0, seed=seed)) for seed in range(num_seeds)]


def study(*found: Record) -> tuple[Row, Row]:
    """The row of the baseline, of three seeds, and the row of 512."""
    first, second = build(*baseline(), *found)["time_to_target"]
    return first, second


V100 = "Tesla V100-SXM2-32GB"
IN_FP32, IN_TF32 = ({"precision_used": used} for used in ("fp32", "tf32"))


@pytest.mark.parametrize(
    ("found", "precision"),
    [
        (with_measurement(make_record(make_spec(device="cpu")), **IN_FP32), "fp32"),
        (make_record(make_spec(device="cpu"), status="failed"), "fp32"),
        (make_record(make_spec(device="cpu", precision="bf16"), status="failed"), "bf16"),
        (with_measurement(timed(V100, 2.0), **IN_FP32), "fp32"),
        (on(V100, make_record(status="oom")), "fp32"),
        (on(H100, make_record(status="oom")), "tf32"),
        (make_record(status="failed"), "tf32"),
    ],
)
def test_a_row_has_the_precision_that_computed_or_would_have(found: Record, precision: str) -> None:
    """All points ask for tf32, but the one in bf16."""
    (row,) = build(found)["Q1"]
    assert row["precision"] == precision


def test_runs_of_one_point_in_two_precisions_are_a_row_of_the_one_that_was_asked_for() -> None:
    repeats = [with_measurement(timed(H100, 2.0, repeat=n), **used) for n, used in enumerate((IN_FP32, IN_TF32))]
    (row,) = build(*repeats)["Q1"]
    assert_row(row, precision="tf32", n=2)


def test_two_points_that_computed_alike_are_two_rows() -> None:
    asked = [timed(V100, 2.0, precision=precision) for precision in ("fp32", "tf32")]
    found = [with_measurement(record, **IN_FP32) for record in asked]
    assert cells(build(*found)["Q1"], "precision", "n") == [("fp32", 1), ("fp32", 1)]
    assert len(table_of(report(*found), "Q1")) == 2


TWO: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2}


def stated(*found: Record) -> list[Record]:
    return [msgspec.structs.replace(record, measured=False) for record in found]


POOLED = [timed(H100, 2.0), timed(H200, 1.0, repeat=1), timed(H200, 1.2, repeat=2), timed(H100, 3.0, 256)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(
            POOLED,
            [(H200, 1.1, "ok", 2), (H100, 2.0, "ok", 1), (H100, 3.0, "ok", 1)],
            id="a point on two models is two rows",
        ),
        pytest.param(
            [timed(H100, 2.0), timed(H200, 1.0, 256), make_record(make_spec(batch_size_per_gpu=512), status="oom")],
            [(H100, 2.0, "ok", 1), (H200, 1.0, "ok", 1), (None, None, "oom", 0)],
            id="a point without a result is one row",
        ),
        pytest.param(
            [timed(H100, 2.0), make_record(make_spec(repeat=1), (9.0, 4.0)), timed(H200, 1.0, 256)],
            [(H100, 3.0, "ok", 2), (H200, 1.0, "ok", 1)],
            id="what states no model is never left out",
        ),
        pytest.param(
            stated(timed(H100, 5.0), timed(H200, 1.0, repeat=1)),
            [(H100, 5.0, "ok", 1), (H200, 1.0, "ok", 1)],
            id="stated times are not mixed either",
        ),
    ],
)
def test_the_rows_of_two_models(found: list[Record], expected: list[tuple[Any, ...]]) -> None:
    assert cells(build(*found)["Q1"], "gpu", "epoch_time_s", "status", "n") == expected


def test_rows_of_two_models_need_no_note_and_name_their_model() -> None:
    assert build(*POOLED)["Q1"][2]["note"] is None
    assert cells(table_of(report(*POOLED), "Q1: epoch time"), "GPU model") == [(H200,), (H100,), (H100,)]


def test_an_oom_is_that_of_the_model_that_ran_out_of_memory() -> None:
    """512 fits on one model and not on the other, and 1,024 was tried on the smaller one alone."""
    ooms = [on(H100, make_record(make_spec(batch_size_per_gpu=size), status="oom")) for size in (512, 1024)]
    found = [timed(H100, 2.0), timed(H200, 1.0, repeat=1), *ooms, timed(H200, 1.0, 512, repeat=1)]
    rows = cells(build(*found)["Q1"], "batch_size_per_gpu", "gpu", "status")
    assert {(512, H100, "oom"), (512, H200, "ok"), (1024, H100, "oom")} <= {*rows}
    of_h100 = f"Largest batch that fits, {H100}: 128 images, of those tried; 512 runs out of memory"
    of_h200 = f"Largest batch that fits, {H200}: 512 images, the largest that was tried; more may fit"
    assert_says(answers_of(*found)["Q1"], of_h100, of_h200)


def test_a_batch_size_is_not_called_fastest_since_its_gpu_is() -> None:
    alike = [timed(H100, 2.0), timed(H100, 1.5, 256)]
    said = answers_of(*alike, timed(H200, 1.0, 512))["Q1"]
    words = (f"Best batch, one GPU, {H100}: 256 images", f"Only batch tried, one GPU, {H200}: 512 images")
    assert_says(said, *words)
    assert H100 not in answers_of(*alike)["Q1"]
    assert "Best batch, one GPU: 512 images" in answers_of(*alike, timed(H100, 1.0, 512))["Q1"]


@pytest.mark.parametrize(("gpu", "is_answered"), [(H100, True), (H200, False)])
def test_a_faster_model_is_no_speed_up(gpu: str, is_answered: bool) -> None:
    found = [timed(H100, 2.0), timed(H100, 1.5, 256), timed(gpu, 1.2, **TWO)]
    answers = answers_of(*found)
    words = ("Speed-up on 2 GPUs: 1.67x", "no configuration on several GPUs")
    assert [word in answers["Q2"] for word in words] == [is_answered, not is_answered]
    assert ("by subtraction" in answers["Q3"]) is is_answered
    assert (row_of(build(*found)["Q2"], num_gpus=2)["speedup"] is not None) is is_answered


def test_seeds_on_another_model_count_in_accuracy_and_epochs_and_not_in_time() -> None:
    first, row = study(*seeds(H100, 1.0, 0), *seeds(H200, 0.5, 1, 2))
    learnt = {"n": 3, "num_timed": 1, "final_test_accuracy": 0.91, "epochs_to_target": 3}
    assert_row(row, f"mixed GPU: {H100}, {H200}", **learnt, time_to_target_s=3.0, throughput_efficiency=2.0, gpu=H100)
    assert low(row["time_to_target_s"]) is None
    assert_row(first, num_timed=3, note=None, gpu=H100)


def test_a_row_of_another_model_alone_has_no_time_and_is_not_soonest() -> None:
    first, row = study(*seeds(H200, 0.5, 1, 2))
    learnt = {"final_test_accuracy": 0.915, "epochs_to_target": 3, "num_timed": 0}
    assert_row(row, **learnt, time_to_target_s=None, throughput_efficiency=None, soonest=None)
    assert first["soonest"] == "seconds and GPU-seconds"
    cell = table_of(report(*baseline(), *seeds(H200, 0.5, 1, 2)), "Q4: final accuracy")[1]
    assert_row(cell, **{"time [s]": "other GPU", "epochs to target": "3.00"})


def on_all(gpu: str, records: list[Record]) -> list[Record]:
    return [on(gpu, record) for record in records]


def test_the_answer_to_q4_counts_the_rows_whose_time_does_not_compare() -> None:
    plain = on_all(H100, [*studied(128, 0.9, 0, epoch_time_s=2.0), *studied(2048, 0.6, 0)])
    other, own = (answers_of(*plain, *on_all(gpu, studied(2048, 0.9, 0, "warmup")))["Q4"] for gpu in (H200, H100))
    assert_says(other, "Soonest at accuracy 88.0 %: 60.0 s", "128 images a step", "other GPU")
    assert "other GPU" not in own


def test_a_time_of_few_seeds_is_not_that_of_a_row_that_misses_the_target() -> None:
    """Of six seeds the one on the model of the baseline reaches it, and the five others do not."""
    few = [on(H200, trained([0.1, 0.2, 0.3, 0.4], batch_size_per_gpu=512, seed=seed)) for seed in range(1, 6)]
    first, row = build(*baseline(6), *seeds(H100, 1.0, 0), *few)["time_to_target"]
    assert_row(row, reached="1 of 6", epochs_to_target=None, time_to_target_s=None, soonest=None)
    assert first["soonest"] == "seconds and GPU-seconds"


def test_clocks_lowered_in_runs_whose_times_are_left_out_weaken_no_time() -> None:
    throttled = GpuWindow(epoch=1, gpu=0, num_telemetry_samples=5, throttle_reasons=("sw_power_cap",))
    hot = [
        msgspec.structs.replace(record, telemetry=Telemetry(interval_s=0.1, gpus=(throttled,)))
        for record in seeds(H200, 0.5, 1, 2)
    ]
    for runs, is_said in ((hot, False), (on_all(H100, hot), True)):
        _, row = study(*seeds(H100, 1.0, 0), *runs)
        assert ("throttled" in (row["note"] or "")) is is_said


def test_the_time_of_a_curve_is_of_the_model_of_most_of_its_runs() -> None:
    rows = build(*seeds(H100, 1.0, 0, 1), *seeds(H200, 0.5, 2))["Q4"]
    expected = [(H100, time_s, 3, 0.1) for time_s in (1.0, 2.0, 3.0, 4.0)]
    assert cells(rows, "gpu", "training_time_s", "n", "learning_rate") == expected


def lines_of(plot: Plot) -> dict[str, tuple[float, ...]]:
    return {line.label: tuple(point.y for point in line.points) for line in line_panel(plot).series}


def test_each_model_is_a_line_of_its_own() -> None:
    alike = [timed(H100, 2.0), timed(H100, 1.5, 256), timed(H100, 1.2, **TWO)]
    plots = plots_of(*alike, timed(H200, 1.0, 512), timed(H200, 0.52, 512, **TWO))
    assert lines_of(plots["q1"]) == {H100: (2.0, 1.5), H200: (1.0,)}
    assert [line.points[0].y for line in line_panel(plots["q2"]).series] == pytest.approx([2 / 1.2, 1 / 0.52])
    assert [*lines_of(plots_of(*alike)["q1"])] == [""]


def test_speed_ups_of_two_models_are_not_ranked() -> None:
    found = [timed(H100, 1.0), timed(H100, 0.6, **TWO), timed(H200, 0.5, 256), timed(H200, 0.26, 256, **TWO)]
    words = (f"Speed-up on 2 GPUs, {H100}: 1.67x", f"Speed-up on 2 GPUs, {H200}: 1.92x")
    assert_says(answers_of(*found)["Q2"], *words)
    pivot = table_of(report(*found, timed(H100, 1.0, 64), timed(H100, 0.6, 64, **TWO)), "Q2: speed-up by GPUs")
    assert cells(pivot, "GPU model") == [(H100,), (H200,)]


def communicating(gpu: str, batch_size_per_gpu: int = 128, sweep_ns: int = 0) -> Record:
    """DDP on two GPUs of which 300 us of 5,300 are exposed, or only an isolated all-reduce of that time."""
    sweep = (SweptCollective(num_bytes=LARGE, operation="all_reduce", times_ns=(sweep_ns,)),)
    found = measured(sweep=sweep) if sweep_ns else steady(300, 301, 302, 303, 304, 305)
    return on(gpu, make_communication_record(comm_point(batch_size_per_gpu=batch_size_per_gpu), found))


def test_exposed_communication_of_another_model_is_not_set_beside_subtraction() -> None:
    trainings = [timed(H100, 4.0), timed(H100, 2.4, **TWO)]
    (other,), (own,) = (build(*trainings, communicating(gpu))["Q3"] for gpu in (H200, H100))
    assert_row(other, exposed_comm_time_s=None, comm_time_subtraction_s=0.4)
    assert own["exposed_comm_time_s"] == pytest.approx(302.5e-6 * 196, rel=0.01)  # steps of an epoch on two GPUs
    answer = answers_of(*trainings, communicating(H100), communicating(H200, 64))["Q3"]
    assert_says(answer, f"Exposed communication, {H100}: ", f"Exposed communication, {H200}: ")


def test_a_sweep_is_of_one_model_and_so_is_the_link_of_a_prediction() -> None:
    found = [communicating(H100, 128, 60_000), communicating(H100, 64, 60_000), communicating(H200, 256, 30_000)]
    assert cells(build(*found)["sweep"], "n", "time_s", "gpu") == [
        (2, pytest.approx(60e-6), H100),
        (1, pytest.approx(30e-6), H200),
    ]


def test_buckets_of_one_model_are_not_set_beside_the_link_of_another() -> None:
    swept = on(
        H100,
        make_communication_record(comm_point(batch_size_per_gpu=64), measured(profile=None)),
    )
    whole = on(H200, make_communication_record(comm_point(batch_size_per_gpu=256), measured()))
    isolated = [f"isolated all-reduce, 2 GPUs, {gpu}" for gpu in (H100, H200)]
    assert [*lines_of(plots_of(swept, whole)["q3-bandwidth"])] == [*isolated, f"DDP's buckets, 2 GPUs, {H200}"]


def test_a_repeat_that_states_no_gpu_is_no_other_kind_of_sweep() -> None:
    unknown = make_communication_record(comm_point(repeat=1), measured())
    rows = build(on(H100, make_communication_record(comm_point(), measured())), unknown)["bandwidth"]
    assert ["captured" in (row["note"] or "") for row in rows] == [False, False]


def test_the_step_of_one_model_is_not_set_beside_the_epoch_of_another() -> None:
    for gpu, epoch_time_s in ((H100, 2.4), (H200, None)):
        (row,) = build(timed(gpu, 2.4, **TWO), communicating(H100), timed(H100, 3.0, 512))["transfers"]
        assert row["epoch_time_s"] == epoch_time_s


def test_a_baseline_on_the_same_model_comes_before_one_of_the_same_strategy() -> None:
    found = [timed(H200, 1.0, strategy="ddp"), timed(H100, 2.0), timed(H100, 1.2, **TWO), timed(H100, 1.0, 256)]
    assert_row(row_of(build(*found)["Q2"], num_gpus=2), speedup=2 / 1.2, baseline="single")


def compared(one: list[Record], other: list[Record]) -> Comparison:
    return compare_outcomes(resolved(*one).outcomes, resolved(*other).outcomes)


def test_compared_experiments_compare_times_of_one_model() -> None:
    """What only A has on another model is lost; what only B has there is named."""
    found = [timed(H100, 2.0), timed(H100, 2.2, repeat=1), timed(H200, 1.0, repeat=2)]
    points = compared(found, found[:2]).points
    assert [(point.a.point.gpu, point.ratio, point.is_lost) for point in points] == [
        (H100, 1, False),
        (H200, None, True),
    ]
    back = compared(found[:2], found)
    assert ([point.ratio for point in back.points], len(back.only_in_b)) == ([1], 1)


def test_compared_points_of_two_models_are_said_to_differ_in_it() -> None:
    """Each point ran on one model, and both experiments have both models."""
    one = [*(timed(H200, 1.0, repeat=number) for number in range(2)), timed(H100, 1.5, 256)]
    other = [*(timed(H100, 2.0, repeat=number) for number in range(2)), timed(H200, 0.8, 256)]
    assert compared(one, other).differences["GPU"] == ([H200], [H100])


def test_each_common_model_is_compared_apart() -> None:
    alike = [timed(H100, 2.0, repeat=number) for number in range(6)]
    both = alike + [timed(H200, 3.0, repeat=number) for number in range(6, 13)]
    assert [(point.ratio, point.verdict) for point in compared(alike, both).points] == [(1, "inside the noise")]
    assert [(point.a.point.gpu, point.ratio) for point in compared(both, both).points] == [(H200, 1), (H100, 1)]
