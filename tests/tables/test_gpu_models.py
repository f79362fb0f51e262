"""One experiment on GPUs of two models: a time is of one model, an accuracy of all."""

import re
from typing import Any

import msgspec
import pytest
from communication_records import LARGE, measured, point, steady
from factories import assert_says, low, make_communication_record, make_record, make_spec
from page_records import timed_record
from rendered_tables import answers_of, build, report, table_of
from study_records import studied, trained

from pipeline.analysis.comparison import compare_outcomes
from pipeline.experiment.measurement import GpuWindow, SweptCollective, Telemetry
from pipeline.experiment.outcomes import resolve_outcomes
from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.pages.html_page import build_plots
from pipeline.pages.plot_data import BarPanel, LinePanel, Plot, PlotSource
from pipeline.tables.build_tables import build_tables
from pipeline.tables.columns import Row

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def on(gpu: str, record: Record) -> Record:
    return msgspec.structs.replace(record, environment=Environment(gpus=(Gpu(name=gpu),)))


def timed(gpu: str, time_s: float, batch_size_per_gpu: int = 128, **fields: Any) -> Record:
    return on(gpu, timed_record(make_spec(batch_size_per_gpu=batch_size_per_gpu, **fields), time_s))


def seeds(gpu: str, time_s: float, *numbers: int, **fields: Any) -> list[Record]:
    """Runs of 512 images a step that reach 0.88 in their third epoch, and 0.9 + seed/100 at the end."""
    ends = {seed: [0.5, 0.7, 0.89, 0.9 + seed / 100] for seed in numbers}
    size = {"batch_size_per_gpu": 512, **fields}
    return [on(gpu, trained(accuracies, time_s, seed=seed, **size)) for seed, accuracies in ends.items()]


def study(*found: Record) -> tuple[Row, Row]:
    """The row of the baseline, 128 on three H100s at 2 s an epoch, and the row of 512."""
    baseline = [on(H100, trained([0.5, 0.7, 0.89, 0.9], 2.0, seed=seed)) for seed in range(3)]
    first, second = build(*baseline, *found)["time_to_target"]
    return first, second


def test_a_point_on_two_models_is_two_rows() -> None:
    found = [timed(H100, 2.0), timed(H200, 1.0, repeat=1), timed(H200, 1.2, repeat=2), timed(H100, 3.0, 256)]
    first, second, third = build(*found)["Q1"]
    assert [(row["gpu"], row["epoch_time_s"], row.n) for row in (first, second)] == [(H200, 1.1, 2), (H100, 2.0, 1)]
    assert (third["gpu"], third["epoch_time_s"], third["note"]) == (H100, 3.0, None)
    table = table_of(report(*found), "Q1: epoch time")
    assert [row["GPU model"] for row in table] == [H200, H100, H100]


def test_an_oom_is_that_of_the_model_that_ran_out_of_memory() -> None:
    """512 fits on one model and not on the other, and 1,024 was tried on the smaller one alone."""
    ooms = [on(H100, make_record(make_spec(batch_size_per_gpu=size), status="oom")) for size in (512, 1024)]
    found = [timed(H100, 2.0), timed(H200, 1.0, repeat=1), *ooms, timed(H200, 1.0, 512, repeat=1)]
    rows = [(row["batch_size_per_gpu"], row["gpu"], row.status) for row in build(*found)["Q1"]]
    assert (512, H100, "oom") in rows
    assert (512, H200, "ok") in rows
    assert (1024, H100, "oom") in rows
    first, second = (re.search(rf"On {gpu}: .*", answers_of(*found)["Q1"]) for gpu in (H100, H200))
    assert first is not None
    assert second is not None
    assert "512 runs out of memory, 128 fits." in first[0]
    assert "Nothing up to 512 ran out of memory" in second[0]


def test_a_point_without_a_result_is_one_row() -> None:
    rows = build(timed(H100, 2.0), timed(H200, 1.0, 256), make_record(make_spec(batch_size_per_gpu=512), status="oom"))[
        "Q1"
    ]
    assert [(row["gpu"], row.status) for row in rows] == [(H100, "ok"), (H200, "ok"), (None, "oom")]


def test_a_batch_size_is_not_called_fastest_since_its_gpu_is() -> None:
    alike = [timed(H100, 2.0), timed(H100, 1.5, 256)]
    said = answers_of(*alike, timed(H200, 1.0, 512))["Q1"]
    assert_says(said, f"On {H100}: One GPU has the shortest epoch at 256", f"On {H200}: One batch size was timed: 512")
    assert H100 not in answers_of(*alike)["Q1"]
    assert "shortest epoch at 512" in answers_of(*alike, timed(H100, 1.0, 512))["Q1"]


@pytest.mark.parametrize(("gpu", "is_answered"), [(H100, True), (H200, False)])
def test_a_faster_model_is_no_speed_up(gpu: str, is_answered: bool) -> None:
    found = [timed(H100, 2.0), timed(H100, 1.5, 256), timed(gpu, 1.2, strategy="ddp", num_gpus=2)]
    answers = answers_of(*found)
    assert ("1.67 times as fast" in answers["Q2"]) is is_answered
    assert ("no point on several GPUs" in answers["Q2"]) is not is_answered
    row = next(row for row in build(*found)["Q2"] if row["num_gpus"] == 2)
    assert (row["speedup"] is None) is not is_answered
    assert ("By subtraction" in answers["Q3"]) is is_answered


def test_seeds_on_another_model_count_in_accuracy_and_epochs_and_not_in_time() -> None:
    baseline, row = study(*seeds(H100, 1.0, 0), *seeds(H200, 0.5, 1, 2))
    assert (row.n, row["num_timed"], row["final_test_accuracy"], row["epochs_to_target"]) == (3, 1, 0.91, 3)
    assert (row["time_to_target_s"], low(row["time_to_target_s"]), row["throughput_efficiency"]) == (3.0, None, 2.0)
    assert_says(row["note"], f"mixed GPU: {H100}, {H200}")
    assert (baseline["num_timed"], baseline["note"]) == (3, None)
    assert row["gpu"] == baseline["gpu"] == H100


def test_a_row_of_another_model_alone_has_no_time_and_is_not_soonest() -> None:
    baseline, row = study(*seeds(H200, 0.5, 1, 2))
    assert row["final_test_accuracy"] == pytest.approx(0.915)
    assert (row["epochs_to_target"], row["num_timed"]) == (3, 0)
    assert (row["time_to_target_s"], row["throughput_efficiency"], row["soonest"]) == (None, None, None)
    assert baseline["soonest"] == "seconds and GPU-seconds"
    found = [on(H100, trained([0.5, 0.7, 0.89, 0.9], 2.0, seed=seed)) for seed in range(3)]
    cell = table_of(report(*found, *seeds(H200, 0.5, 1, 2)), "Q4: final accuracy")[1]
    assert (cell["time [s]"], cell["epochs to target"]) == ("other GPU", "3.00")


def on_all(gpu: str, records: list[Record]) -> list[Record]:
    return [on(gpu, record) for record in records]


def test_the_answer_to_q4_counts_the_rows_whose_time_does_not_compare() -> None:
    plain = on_all(H100, [*studied(128, 0.9, 0, epoch_time_s=2.0), *studied(2048, 0.6, 0)])
    sooner = answers_of(*plain, *on_all(H200, studied(2048, 0.9, 0, "warmup")))["Q4"]
    assert_says(sooner, "Soonest at 88.00 % is 128 images a step", "other GPU")
    assert "other GPU" not in answers_of(*plain, *on_all(H100, studied(2048, 0.9, 0, "warmup")))["Q4"]


def test_a_time_of_few_seeds_is_not_that_of_a_row_that_misses_the_target() -> None:
    """Of six seeds the one on the model of the baseline reaches it, and the five others do not."""
    few = [on(H200, trained([0.1, 0.2, 0.3, 0.4], batch_size_per_gpu=512, seed=seed)) for seed in range(1, 6)]
    baseline = [on(H100, trained([0.5, 0.7, 0.89, 0.9], 2.0, seed=seed)) for seed in range(6)]
    first, row = build(*baseline, *seeds(H100, 1.0, 0), *few)["time_to_target"]
    assert (row["reached"], row["epochs_to_target"], row["time_to_target_s"], row["soonest"]) == (
        "1 of 6",
        None,
        None,
        None,
    )
    assert first["soonest"] == "seconds and GPU-seconds"


def test_clocks_lowered_in_runs_whose_times_are_left_out_weaken_no_time() -> None:
    throttled = GpuWindow(epoch=1, gpu=0, num_telemetry_samples=5, throttle_reasons=("sw_power_cap",))
    hot = [
        msgspec.structs.replace(record, telemetry=Telemetry(interval_s=0.1, gpus=(throttled,)))
        for record in seeds(H200, 0.5, 1, 2)
    ]
    _, row = study(*seeds(H100, 1.0, 0), *hot)
    assert "throttled" not in (row["note"] or "")
    _, row = study(*seeds(H100, 1.0, 0), *on_all(H100, hot))
    assert "throttled" in (row["note"] or "")


def test_the_time_of_a_curve_is_of_the_model_of_most_of_its_runs() -> None:
    rows = build(*seeds(H100, 1.0, 0, 1), *seeds(H200, 0.5, 2))["Q4"]
    assert [(row["gpu"], row["training_time_s"]) for row in rows] == [(H100, time_s) for time_s in (1.0, 2.0, 3.0, 4.0)]
    assert [row.n for row in rows] == [3] * 4
    assert {row["learning_rate"] for row in rows} == {0.1}


def test_what_states_no_model_is_never_left_out() -> None:
    unknown = make_record(make_spec(repeat=1), (9.0, 4.0))
    (row, *_) = build(timed(H100, 2.0), unknown, timed(H200, 1.0, 256))["Q1"]
    assert (row["epoch_time_s"], row.n) == (3.0, 2)


def plots_of(*found: Record) -> dict[str, Plot]:
    outcomes = resolve_outcomes([record.spec for record in found], found, []).outcomes
    return {plot.name: plot for plot in build_plots(PlotSource(build_tables(outcomes), outcomes))}


def lines_of(plot: Plot, panel: int = 0) -> list[tuple[float, ...]]:
    shown = plot.panels[panel]
    assert isinstance(shown, LinePanel)
    return [tuple(point.y for point in line.points) for line in shown.series]


def labels_of(plot: Plot, panel: int = 0) -> list[str]:
    shown = plot.panels[panel]
    assert isinstance(shown, LinePanel)
    return [line.label for line in shown.series]


def test_each_model_is_a_line_of_its_own() -> None:
    two: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2}
    alike = [timed(H100, 2.0), timed(H100, 1.5, 256), timed(H100, 1.2, **two)]
    plots = plots_of(*alike, timed(H200, 1.0, 512), timed(H200, 0.52, 512, **two))
    assert labels_of(plots["q1"]) == [H100, H200]
    assert lines_of(plots["q1"]) == [(2.0, 1.5), (1.0,)]
    assert lines_of(plots["q2"]) == [pytest.approx((2 / 1.2,)), pytest.approx((1 / 0.52,))]
    assert labels_of(plots_of(*alike)["q1"]) == [""]


def test_speed_ups_of_two_models_are_not_ranked() -> None:
    two: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2}
    found = [timed(H100, 1.0), timed(H100, 0.6, **two), timed(H200, 0.5, 256), timed(H200, 0.26, 256, **two)]
    answers = answers_of(*found)
    assert_says(
        answers["Q2"], f"On {H100}: 2 GPUs with DDP are 1.67 times", f"On {H200}: 2 GPUs with DDP are 1.92 times"
    )
    pivot = table_of(report(*found, timed(H100, 1.0, 64), timed(H100, 0.6, 64, **two)), "Q2: speed-up by GPUs")
    assert [row["GPU model"] for row in pivot] == [H100, H200]


def communicating(gpu: str, batch_size_per_gpu: int = 128, sweep_ns: int = 0) -> Record:
    """DDP on two GPUs of which 300 us of 5,300 are exposed, or only an isolated all-reduce of that time."""
    sweep = (SweptCollective(num_bytes=LARGE, times_ns=(sweep_ns,)),)
    found = measured(sweep=sweep) if sweep_ns else steady(300, 301, 302, 303, 304, 305)
    return on(gpu, make_communication_record(point(batch_size_per_gpu=batch_size_per_gpu), found))


def test_exposed_communication_of_another_model_is_not_set_beside_subtraction() -> None:
    trainings = [timed(H100, 4.0), timed(H100, 2.4, strategy="ddp", num_gpus=2)]
    (row,) = build(*trainings, communicating(H200))["Q3"]
    assert row["exposed_comm_time_s"] is None
    assert row["comm_time_subtraction_s"] == pytest.approx(0.4)
    (row,) = build(*trainings, communicating(H100))["Q3"]
    assert row["exposed_comm_time_s"] == pytest.approx(302.5e-6 * 196, rel=0.01)  # steps of an epoch on two GPUs
    answer = answers_of(*trainings, communicating(H100), communicating(H200, 64))["Q3"]
    assert_says(answer, f"On {H100}: ", f"On {H200}: ")


def test_a_sweep_is_of_one_model_and_so_is_the_link_of_a_prediction() -> None:
    found = [communicating(H100, 128, 60_000), communicating(H100, 64, 60_000), communicating(H200, 256, 30_000)]
    rows = build(*found)["sweep"]
    assert [row.n for row in rows] == [2, 1]
    assert [row["time_s"] for row in rows] == pytest.approx([60e-6, 30e-6])
    assert [row["gpu"] for row in rows] == [H100, H200]


def test_buckets_of_one_model_are_not_set_beside_the_link_of_another() -> None:
    swept = on(H100, make_communication_record(point(batch_size_per_gpu=64), measured(profile=None)))
    whole = on(H200, make_communication_record(point(batch_size_per_gpu=256), measured()))
    labels = labels_of(plots_of(swept, whole)["q3-bandwidth"])
    isolated = [f"isolated all-reduce, 2 GPUs, {gpu}" for gpu in (H100, H200)]
    assert labels == [*isolated, f"DDP's buckets, 2 GPUs, {H200}"]


def test_a_repeat_that_states_no_gpu_is_no_other_kind_of_sweep() -> None:
    unknown = make_communication_record(point(repeat=1), measured())
    rows = build(on(H100, make_communication_record(point(), measured())), unknown)["bandwidth"]
    assert rows
    assert not any("captured" in (row["note"] or "") for row in rows)


def test_the_step_of_one_model_is_not_set_beside_the_epoch_of_another() -> None:
    two: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2}
    for gpu, epoch_time_s in ((H100, 2.4), (H200, None)):
        (row,) = build(timed(gpu, 2.4, **two), communicating(H100), timed(H100, 3.0, 512))["transfers"]
        assert row["epoch_time_s"] == epoch_time_s


def test_a_baseline_on_the_same_model_comes_before_one_of_the_same_strategy() -> None:
    ddp: dict[str, Any] = {"strategy": "ddp"}
    found = [timed(H200, 1.0, **ddp), timed(H100, 2.0), timed(H100, 1.2, num_gpus=2, **ddp), timed(H100, 1.0, 256)]
    row = next(row for row in build(*found)["Q2"] if row["num_gpus"] == 2 and row["scaling"] == "weak")
    assert row["speedup"] == pytest.approx(2 / 1.2)
    assert row["baseline"] == "single"


def test_stated_times_of_two_models_are_not_mixed_either() -> None:
    found = timed(H100, 5.0), timed(H200, 1.0, repeat=1)
    rows = build(*(msgspec.structs.replace(record, measured=False) for record in found))["Q1"]
    assert [(row["gpu"], row["epoch_time_s"], row.n) for row in rows] == [(H100, 5.0, 1), (H200, 1.0, 1)]


def test_the_bars_of_a_step_name_their_model() -> None:
    two: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2}
    plot = plots_of(timed(H100, 4.0), timed(H100, 2.4, **two), timed(H200, 1.2, repeat=1, **two))["q3"]
    (panel,) = plot.panels
    assert isinstance(panel, BarPanel)
    assert panel.bars == (f"single 1 GPU, {H100}", f"ddp 2 GPUs, {H100}", f"ddp 2 GPUs, {H200}")


def test_compared_experiments_compare_times_of_one_model() -> None:
    found = [timed(H100, 2.0), timed(H100, 2.2, repeat=1), timed(H200, 1.0, repeat=2)]
    sides = [resolve_outcomes([record.spec for record in part], part, []).outcomes for part in (found, found[:2])]
    (compared,) = compare_outcomes(*sides).points
    assert compared.ratio == 1


def test_compared_points_of_two_models_are_said_to_differ_in_it() -> None:
    """Each point ran on one model, and both experiments have both models."""
    one = [*(timed(H200, 1.0, repeat=number) for number in range(2)), timed(H100, 1.5, 256)]
    other = [*(timed(H100, 2.0, repeat=number) for number in range(2)), timed(H200, 0.8, 256)]
    sides = [resolve_outcomes([record.spec for record in part], part, []).outcomes for part in (one, other)]
    assert compare_outcomes(*sides).differences["GPU"] == ([H200], [H100])


def test_each_common_model_is_compared_apart() -> None:
    alike = [timed(H100, 2.0, repeat=number) for number in range(6)]
    slower = [timed(H200, 3.0, repeat=number) for number in range(6, 13)]
    sides = [resolve_outcomes([record.spec for record in part], part, []).outcomes for part in (alike, alike + slower)]
    (compared,) = compare_outcomes(*sides).points
    assert (compared.ratio, compared.verdict) == (1, "inside the noise")
    both = compare_outcomes(sides[1], sides[1]).points
    assert [(point.a.point.gpu, point.ratio) for point in both] == [(H200, 1), (H100, 1)]


def test_a_curve_by_second_names_its_model() -> None:
    fields: dict[str, Any] = {"remedies": ("warmup",)}
    found = [on(H100, trained([0.5, 0.7, 0.89, 0.9], 2.0, seed=seed)) for seed in range(3)]
    plot = plots_of(*found, *seeds(H200, 0.5, 0, 1), *seeds(H100, 0.5, 0, 1, **fields))["q4"]
    assert labels_of(plot)[:2] == [f"no remedies, {H200}", f"warmup, {H100}"]
