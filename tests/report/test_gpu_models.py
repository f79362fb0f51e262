"""One experiment on GPUs of two models: its times are those of one model, its accuracies those of all."""

from typing import Any

import msgspec
import pytest
from communication_records import LARGE, measured, point, steady
from factories import assert_says, make_communication_record, make_record, make_spec, sentences
from page_records import timed_record
from rendered_tables import answers_of, build, report, table_of
from study_records import studied, trained

from pipeline.analysis.comparison import compare_outcomes
from pipeline.experiment.measurement import AllReduce, GpuWindow, Telemetry
from pipeline.experiment.outcomes import resolve_outcomes
from pipeline.experiment.record import Environment, Gpu, Record
from pipeline.report.build_tables import build_tables
from pipeline.report.plot_data import BarPanel, LinePanel, Plot, PlotSource
from pipeline.report.plot_registry import build_plots
from pipeline.report.row_types import TimeToTargetRow

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


def study(*found: Record) -> tuple[TimeToTargetRow, TimeToTargetRow]:
    """The row of the baseline, 128 on three H100s at 2 s an epoch, and the row of 512."""
    baseline = [on(H100, trained([0.5, 0.7, 0.89, 0.9], 2.0, seed=seed)) for seed in range(3)]
    first, second = build(*baseline, *found).time_to_target
    return first, second


def test_repeats_on_another_model_are_left_out_of_a_time_and_named() -> None:
    found = [timed(H100, 4.0, 64), timed(H100, 2.0), timed(H200, 1.0, repeat=1), timed(H200, 1.0, repeat=2)]
    found += [timed(H100, 3.0, 256)]
    small, row, _ = build(*found).Q1
    assert (row.epoch_time_s, row.n) == (2.0, 1), "one of three, since most points ran on an H100"
    assert row["note"] == "2 of 3 repeats left out: on NVIDIA H200"
    assert small["note"] is None


def test_a_point_without_the_usual_model_keeps_its_time_and_says_where_it_ran() -> None:
    found = [timed(H100, 2.0), timed(H100, 1.5, 256), timed(H200, 1.0, 512)]
    *_, row = build(*found).Q1
    assert (row.epoch_time_s, row["note"]) == (1.0, f"ran on {H200}, other points of this experiment on {H100}")


def test_a_batch_size_is_not_called_fastest_since_its_gpu_is() -> None:
    alike = [timed(H100, 2.0), timed(H100, 1.5, 256)]
    said = answers_of(*alike, timed(H200, 1.0, 512))["Q1"]
    assert_says(said, "Of 2 batch sizes one GPU is fastest at 256", "Left out: 1 row on another GPU model.")
    assert "Left out" not in answers_of(*alike)["Q1"]
    assert "fastest at 512" in answers_of(*alike, timed(H100, 1.0, 512))["Q1"]


@pytest.mark.parametrize(("gpu", "is_answered"), [(H100, True), (H200, False)])
def test_a_faster_model_is_no_speed_up(gpu: str, is_answered: bool) -> None:
    found = [timed(H100, 2.0), timed(H100, 1.5, 256), timed(gpu, 1.2, strategy="ddp", num_gpus=2)]
    answers = answers_of(*found)
    assert ("1.67 times as fast" in answers["Q2"]) is is_answered
    assert ("the baseline ran on another GPU model" in answers["Q2"]) is not is_answered
    assert answers["Q3"].startswith("Not measured here. Subtraction says" if is_answered else "Not answered here")


def test_seeds_on_another_model_count_in_accuracy_and_epochs_and_not_in_time() -> None:
    baseline, row = study(*seeds(H100, 1.0, 0), *seeds(H200, 0.5, 1, 2))
    assert (row.n, row.num_timed, row.final_test_accuracy, row.epochs_to_target) == (3, 1, 0.91, 3)
    assert (row.time_to_target_s, row.time_to_target_low_s, row.throughput_efficiency) == (3.0, None, 2.0)
    assert_says(row["note"], f"times of 2 of 3 seeds left out: on {H200}", f"mixed GPU: {H100}, {H200}")
    assert (baseline.num_timed, baseline["note"]) == (3, None)


def test_a_row_of_another_model_alone_has_no_time_and_is_not_soonest() -> None:
    baseline, row = study(*seeds(H200, 0.5, 1, 2))
    assert row.final_test_accuracy == pytest.approx(0.915)
    assert (row.epochs_to_target, row.num_timed) == (3, 0)
    assert (row.time_to_target_s, row.throughput_efficiency, row.soonest) == (None, None, None)
    assert baseline.soonest == "seconds and GPU-seconds"
    found = [on(H100, trained([0.5, 0.7, 0.89, 0.9], 2.0, seed=seed)) for seed in range(3)]
    cell = table_of(report(*found, *seeds(H200, 0.5, 1, 2)), "Q4: final accuracy")[1]
    assert (cell["time [s]"], cell["epochs to target"]) == ("other GPU", "3.00")


def on_all(gpu: str, records: list[Record]) -> list[Record]:
    return [on(gpu, record) for record in records]


def test_the_answer_to_q4_counts_the_rows_without_a_time_and_says_of_none_that_it_misses_the_target() -> None:
    plain = on_all(H100, [*studied(128, 0.9, 0, epoch_time_s=2.0), *studied(2048, 0.6, 0)])
    sooner = answers_of(*plain, *on_all(H200, studied(2048, 0.9, 0, "warmup")))["Q4"]
    said = "1 row reaches it without a time on the usual GPU model."
    assert_says(sooner, "No run is known to reach 88.0 % sooner than 128", said)
    elsewhere = [*on_all(H200, studied(128, 0.9, 0)), *on_all(H100, studied(2048, 0.6, 0))]
    elsewhere += on_all(H100, studied(2048, 0.7, 0, "warmup"))
    unknown = answers_of(*elsewhere)["Q4"]
    assert_says(unknown, "No time to 88.0 % is known.", said)
    assert "without a time" not in answers_of(*plain, *on_all(H100, studied(2048, 0.9, 0, "warmup")))["Q4"]


def test_a_time_of_few_seeds_is_not_that_of_a_row_that_misses_the_target() -> None:
    """Of six seeds the one on the usual model reaches it, and the five others do not."""
    few = [on(H200, trained([0.1, 0.2, 0.3, 0.4], batch_size_per_gpu=512, seed=seed)) for seed in range(1, 6)]
    baseline = [on(H100, trained([0.5, 0.7, 0.89, 0.9], 2.0, seed=seed)) for seed in range(6)]
    first, row = build(*baseline, *seeds(H100, 1.0, 0), *few).time_to_target
    assert (row.reached, row.epochs_to_target, row.time_to_target_s, row.soonest) == ("1 of 6", None, None, None)
    assert first.soonest == "seconds and GPU-seconds"


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


def test_the_time_of_a_curve_is_of_the_usual_model() -> None:
    rows = build(*seeds(H100, 1.0, 0, 1), *seeds(H200, 0.5, 2)).Q4
    assert [row.training_time_s for row in rows] == [1.0, 2.0, 3.0, 4.0]
    assert [row.n for row in rows] == [3] * 4
    assert {row.learning_rate for row in rows} == {0.1}


def test_what_states_no_model_is_never_left_out() -> None:
    unknown = make_record(make_spec(repeat=1), (9.0, 4.0))
    (row, *_) = build(timed(H100, 2.0), unknown, timed(H200, 1.0, 256)).Q1
    assert (row.epoch_time_s, row.n) == (3.0, 2)


def plots_of(*found: Record) -> dict[str, Plot]:
    outcomes = resolve_outcomes([record.spec for record in found], found, []).outcomes
    return {plot.name: plot for plot in build_plots(PlotSource(build_tables(outcomes).flat(), outcomes))}


def lines_of(plot: Plot, panel: int = 0) -> list[tuple[float, ...]]:
    shown = plot.panels[panel]
    assert isinstance(shown, LinePanel)
    return [tuple(point.y for point in line.points) for line in shown.series]


def test_a_plot_of_times_leaves_another_model_out_and_says_so() -> None:
    alike = [timed(H100, 2.0), timed(H100, 1.5, 256), timed(H100, 1.2, strategy="ddp", num_gpus=2)]
    plots = plots_of(*alike, timed(H200, 1.0, 512), timed(H200, 0.8, 256, strategy="ddp", num_gpus=2))
    assert lines_of(plots["q1"]) == [(2.0, 1.5)]
    (speedups,) = lines_of(plots["q2"])
    assert speedups == pytest.approx((2 / 1.2,))
    assert plots["q1"].note == "Left out: 1 row on another GPU model."
    assert plots["q2"].note == "Left out: 1 row on another GPU model or with a baseline on one."
    assert plots_of(*alike)["q1"].note == plots_of(*alike)["q2"].note == ""


def test_speed_ups_of_two_models_are_not_ranked_or_set_side_by_side() -> None:
    two: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2}
    usual = [timed(H100, 1.0), timed(H100, 0.6, **two), timed(H100, 1.0, 64), timed(H100, 0.7, 64, **two)]
    found = [*usual, timed(H200, 0.5, 256), timed(H200, 0.26, 256, **two)]
    answers = answers_of(*found)
    assert_says(answers["Q2"], "1.67 times as fast", "128 per GPU", "Left out: 1 row on another GPU model.")
    assert_says(answers["Q3"], "(ddp 2 GPUs, 64 per GPU, n = 1 run)")
    plot = plots_of(*found)["q2"]
    (speedups,) = lines_of(plot)
    assert speedups == pytest.approx((1 / 0.7, 1 / 0.6))
    assert "Left out: 1 row" in plot.note
    pivot = table_of(report(*found), "Q2: epoch time [s] by GPUs")
    assert [sorted(row) for row in pivot] == [["128", "64", "GPUs", "strategy"]] * 2
    assert "Left out: 2 rows on another GPU model." in report(*found)


def communicating(gpu: str, batch_size_per_gpu: int = 128, sweep_ns: int = 0) -> Record:
    """DDP on two GPUs of which 300 us of 5,300 are exposed, or only an isolated all-reduce of that time."""
    sweep = (AllReduce(num_bytes=LARGE, times_ns=(sweep_ns,)),)
    found = measured(sweep=sweep) if sweep_ns else steady(300, 301, 302, 303, 304, 305)
    return on(gpu, make_communication_record(point(batch_size_per_gpu=batch_size_per_gpu), found))


def test_exposed_communication_of_another_model_is_not_set_beside_subtraction() -> None:
    trainings = [timed(H100, 4.0), timed(H100, 2.4, strategy="ddp", num_gpus=2)]
    (row,) = build(*trainings, communicating(H200)).Q3
    assert row.exposed_comm_time_s is None
    assert row.comm_time_subtraction_s == pytest.approx(0.4)
    (row,) = build(*trainings, communicating(H100)).Q3
    assert row.exposed_comm_time_s == pytest.approx(302.5e-6 * 196, rel=0.01)  # steps of an epoch on two GPUs
    answer = answers_of(*trainings, communicating(H100), communicating(H200, 64))["Q3"]
    assert_says(answer, "Left out: 1 row on another GPU model.")


def test_a_sweep_is_of_one_model_and_so_is_the_link_of_a_prediction() -> None:
    found = [communicating(H100, 128, 60_000), communicating(H100, 64, 60_000), communicating(H200, 256, 30_000)]
    rows = build(*found).sweep
    assert [row.n for row in rows] == [2, 1]
    assert [row.time_s for row in rows] == pytest.approx([60e-6, 30e-6])
    assert [row["note"] for row in rows] == [None, f"ran on {H200}, other points of this experiment on {H100}"]


def test_buckets_of_one_model_are_not_set_beside_the_link_of_another() -> None:
    """Two runs on H100s have a sweep alone, one on H200s has the buckets of its profile too."""
    swept = measured(profile=None)
    usual = [on(H100, make_communication_record(point(batch_size_per_gpu=size), swept)) for size in (64, 128)]
    whole = on(H200, make_communication_record(point(batch_size_per_gpu=256), measured()))
    plot = plots_of(*usual, whole)["q3-bandwidth"]
    (panel,) = plot.panels
    assert isinstance(panel, LinePanel)
    assert [line.label for line in panel.series] == ["isolated all-reduce, 2 GPUs"]
    rows = build(whole)
    assert rows.bandwidth
    assert plot.note == f"Left out: {len(rows.sweep) + len(rows.bandwidth)} rows on another GPU model."


def test_a_repeat_that_states_no_gpu_is_no_other_kind_of_sweep() -> None:
    unknown = make_communication_record(point(repeat=1), measured())
    rows = build(on(H100, make_communication_record(point(), measured())), unknown).bandwidth
    assert rows
    assert not any("captured" in (row["note"] or "") for row in rows)


def test_the_step_of_one_model_is_not_set_beside_the_epoch_of_another() -> None:
    two: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2}
    for gpu, epoch_time_s in ((H100, 2.4), (H200, None)):
        (row,) = build(timed(gpu, 2.4, **two), communicating(H100), timed(H100, 3.0, 512)).transfers
        assert row.epoch_time_s == epoch_time_s


def test_a_baseline_on_the_same_model_comes_before_one_of_the_same_strategy() -> None:
    ddp: dict[str, Any] = {"strategy": "ddp"}
    found = [timed(H200, 1.0, **ddp), timed(H100, 2.0), timed(H100, 1.2, num_gpus=2, **ddp), timed(H100, 1.0, 256)]
    row = next(row for row in build(*found).Q2 if row["num_gpus"] == 2 and row.scaling == "weak")
    assert row.speedup == pytest.approx(2 / 1.2)
    assert row.baseline == "single"


def test_of_rows_on_unusual_models_alone_those_of_one_are_compared() -> None:
    ddp = [timed(H100, 1.0, size, strategy="ddp", num_gpus=2) for size in (64, 128, 256)]
    found = [timed(H200, 2.0), timed("NVIDIA A100", 1.5, 256), *ddp]
    assert_says(answers_of(*found)["Q1"], "One batch size was timed: 128", "Left out: 1 row on another GPU model.")
    assert "q1" in plots_of(timed(H200, 2.0), timed(H200, 1.5, 256), *ddp)


def test_stated_times_of_two_models_are_not_mixed_either() -> None:
    found = timed(H100, 5.0), timed(H200, 1.0, repeat=1)
    stated = [msgspec.structs.replace(record, measured=False) for record in found]
    (row,) = build(*stated).Q1
    assert (row.epoch_time_s, row.n) == (5.0, 1)
    assert_says(row["note"], "1 of 2 repeats left out: on NVIDIA H200")
    two = msgspec.structs.replace(timed(H200, 0.6, strategy="ddp", num_gpus=2), measured=False)
    speedup = next(row for row in build(stated[0], two).Q2 if row["num_gpus"] == 2)
    assert_says(speedup["note"], f"baseline with another GPU ({H100} against {H200})")


def test_the_bars_of_a_step_are_of_the_model_of_the_tables() -> None:
    two: dict[str, Any] = {"strategy": "ddp", "num_gpus": 2}
    found = [timed(H100, 4.0), timed(H100, 2.4, **two), timed(H200, 1.0, repeat=1), timed(H200, 1.2, 64, **two)]
    plot = plots_of(*found, timed(H100, 3.0, 512), timed(H100, 3.0, 256))["q3"]
    assert plot.note == "Left out: 1 row on another GPU model."
    (panel,) = plot.panels
    assert isinstance(panel, BarPanel)
    steps_ms = [1e3 * time_s / steps for time_s, steps in ((4.0, 391), (2.4, 196), (3.0, 196), (3.0, 98))]
    assert sorted(panel.totals_ms) == pytest.approx(steps_ms, rel=0.07), "the parts take 0.94 to 1 of a step"


def test_compared_experiments_compare_times_of_one_model() -> None:
    found = [timed(H100, 2.0), timed(H100, 2.2, repeat=1), timed(H200, 1.0, repeat=2)]
    sides = [resolve_outcomes([record.spec for record in part], part, []).outcomes for part in (found, found[:2])]
    (compared,) = compare_outcomes(*sides).points
    assert compared.ratio == 1
    assert sentences(compared.a.notes) == ["1 of 3 repeats left out: on NVIDIA H200"]
    assert compared.b.notes == []


def test_compared_points_of_two_models_are_said_to_differ_in_it() -> None:
    """Each point ran on the usual model of its experiment, and both experiments have both models."""
    one = [*(timed(H200, 1.0, repeat=number) for number in range(2)), timed(H100, 1.5, 256)]
    other = [*(timed(H100, 2.0, repeat=number) for number in range(2)), timed(H200, 0.8, 256)]
    sides = [resolve_outcomes([record.spec for record in part], part, []).outcomes for part in (one, other)]
    assert compare_outcomes(*sides).differences["GPU"] == ([H200], [H100])


def test_compared_experiments_compare_the_model_that_both_have() -> None:
    alike = [timed(H100, 2.0, repeat=number) for number in range(6)]
    slower = [timed(H200, 3.0, repeat=number) for number in range(6, 13)]
    sides = [resolve_outcomes([record.spec for record in part], part, []).outcomes for part in (alike, alike + slower)]
    (compared,) = compare_outcomes(*sides).points
    assert (compared.ratio, compared.verdict) == (1, "inside the noise")
    left_out, _ = sentences(compared.b.notes)
    assert left_out == "7 of 13 repeats left out: on NVIDIA H200"


def test_a_curve_of_another_model_has_no_seconds_and_the_plot_says_so() -> None:
    fields: dict[str, Any] = {"remedies": ("warmup",)}
    found = [on(H100, trained([0.5, 0.7, 0.89, 0.9], 2.0, seed=seed)) for seed in range(3)]
    (plot,) = [plot for name, plot in plots_of(*found, *seeds(H200, 0.5, 0, 1, **fields)).items() if name == "q4"]
    assert [len(lines_of(plot, panel)) for panel in range(3)] == [2, 2, 1], (
        "the last, by second, has the baseline alone"
    )
    assert plot.note == "Medians over the seeds. A curve without seconds ran on another GPU model."
    (plot,) = [plot for name, plot in plots_of(*found, *seeds(H100, 0.5, 0, 1, **fields)).items() if name == "q4"]
    assert plot.note == "Medians over the seeds."
