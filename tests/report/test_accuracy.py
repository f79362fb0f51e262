"""Q4 and int8: time to target, claims and plots of trainings whose accuracies and times were made up."""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from factories import (
    INT8_RECORDS,
    ROOT,
    ends,
    high,
    int8_point,
    int8_record,
    int8_result,
    known,
    learnt,
    low,
    make_record,
    make_spec,
    measurement_of,
    on,
    resolved,
    studied,
    trained,
    with_epochs,
)
from render_results import rows
from rendered import (
    REMEDIES,
    assert_row,
    build,
    cells,
    claims_of,
    labels,
    line_panel,
    plots_of,
    remedy_records,
    report,
    table_of,
    xs,
)

from pipeline.figures.intervals import ends_of
from pipeline.figures.time_to_target import NOT_REACHED, spread
from pipeline.plan.axes import REMEDIES as REMEDIES_OF_SPEC
from pipeline.plan.point_label import OF_GPUS
from pipeline.plan.spec import Spec
from pipeline.records.record import Record, StageResult
from pipeline.records.store import load_record
from pipeline.report.claims import Tile
from pipeline.report.display import DisplayOptions
from pipeline.report.markdown import render_experiment
from pipeline.report.plots import MAX_POINTS, MAX_SERIES, REFERENCE, Point
from pipeline.report.questions import answer_questions, build_tables, flatten
from pipeline.report.table import Row, Tables
from pipeline.report.time_to_target import Targets, describe_run
from pipeline.training.quantize_point import load_weights
from pipeline.workloads.image_classifiers import build_model


def baseline(**fields: Any) -> Record:
    """Batch 128, 391 updates an epoch: 0.90 at the end, so the target is 0.88, reached after three epochs of 2 s."""
    return trained([0.5, 0.7, 0.89, 0.90], 2.0, **fields)


def rows_by_batch(*found: Record, missing: Sequence[Spec] = ()) -> dict[int, Row]:
    return {row["global_batch_size"]: row for row in build(*found, missing=missing)["time_to_target"]}


def test_the_figures_are_those_worked_by_hand() -> None:
    """1024 needs four epochs of 1 s, at twice the throughput: 2 x 3/4 = 1.5, and 6 s over 4 s is that."""
    large = trained([0.3, 0.6, 0.8, 0.88], 1.0, batch_size_per_gpu=1024, remedies=("linear_scaling", "warmup"))
    rows = rows_by_batch(baseline(), large)
    assert_row(
        rows[128],
        target_accuracy=0.88,
        **{"epochs_to_target": 3, "updates_to_target": 3 * 391, "time_to_target_s": 6},
        **{"throughput_efficiency": 1, "statistical_efficiency": 1, "target_efficiency": 1},
        **{"soonest": None, "learning_rate": 0.1},
    )
    assert_row(
        rows[1024],
        **{"epochs_to_target": 4, "updates_to_target": 4 * 49, "time_to_target_s": 4},
        **{"throughput_efficiency": 2, "statistical_efficiency": 0.75, "target_efficiency": 1.5},
        **{
            "soonest": "seconds and GPU-seconds",
            "learning_rate": 0.8,
            "final_test_accuracy": 0.88,
            "reached": "1 of 1",
        },
    )


def test_seconds_and_gpu_seconds_may_name_two_batch_sizes() -> None:
    large = trained([0.3, 0.6, 0.8, 0.88], 1.0, strategy="ddp", num_gpus=4, batch_size_per_gpu=512)
    rows = build(baseline(), large)["time_to_target"]
    assert cells(rows, "time_to_target_s", "gpu_time_to_target_s", "soonest", "target_efficiency") == [
        (6, 6, "GPU-seconds", 1),
        (4, 16, "seconds", pytest.approx(6 / 16)),
    ]


def test_a_target_that_is_never_reached_is_a_named_cell() -> None:
    found = baseline(), trained([0.1, 0.2, 0.3, 0.4], batch_size_per_gpu=8192)
    absent = dict.fromkeys(("epochs_to_target", "time_to_target_s", "statistical_efficiency", "soonest"))
    assert_row(rows_by_batch(*found)[8192], reached="never reached", throughput_efficiency=2, **absent)
    cell = table_of(report(*found), "Q4: final accuracy")[1]
    # of one run there is no interval
    shown = {"reached": "never reached", "time [s]": "never", "epochs to target": "", "accuracy [%]": "40.0"}
    assert_row(cell, **shown)
    collected = resolved(*found)
    tables = build_tables(collected.outcomes, targets=Targets(0.99))
    narrow = table_of(render_experiment("x", tables, collected, DisplayOptions(60)), "Q4: final accuracy")
    assert [(row["time [s]"], "reached" in row) for row in narrow] == [("never", False)] * 2


def test_seeds_that_fail_to_reach_it_widen_the_spread_before_they_move_the_median() -> None:
    reaching = [trained([0.5, 0.89, 0.9, 0.9], batch_size_per_gpu=512, seed=seed) for seed in (0, 1)]
    failing = trained([0.5, 0.5, 0.5, 0.5], batch_size_per_gpu=512, seed=2)
    row = rows_by_batch(baseline(), *reaching, failing)[512]
    assert (row["reached"], ends(row["epochs_to_target"])) == ("2 of 3", (2, 2, None))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 1, 2], (2, 1, 3)),
        ([6, 5, 4, 3, 2, 1], (3.5, 1, 6)),
        ([*range(1, 13)], (6.5, 2, 11)),  # ranks 3 and 10 cover 96.1 %, below 97.5 %
        ([1, NOT_REACHED, 2], (2, 1, None)),
        ([1, NOT_REACHED, NOT_REACHED], (None, None, None)),
        ([1], (1, None, None)),
        ([], (None, None, None)),
    ],
)
def test_six_values_have_an_interval_and_fewer_their_extremes(values: list[float], expected: tuple[Any, ...]) -> None:
    found = spread(values)
    assert (found, *ends_of(found)) == expected


def test_a_missing_seed_is_named() -> None:
    absent, found = (trained([0.9] * 4, batch_size_per_gpu=512, seed=seed) for seed in (5, 4))
    row = rows_by_batch(baseline(), found, missing=[absent.spec])[512]
    assert (row.n, "no result of seed 5 (missing)" in row["note"]) == (1, True)


def test_without_a_baseline_there_is_no_target_and_the_row_says_so() -> None:
    row = rows_by_batch(trained([0.9] * 4, batch_size_per_gpu=512), missing=[baseline().spec])[512]
    assert_row(
        row,
        "no target: the baseline has no final test accuracy",
        final_test_accuracy=0.9,
        target_accuracy=None,
        reached=None,
    )


def test_two_gpus_are_compared_with_one_of_the_same_global_batch_epoch_by_epoch() -> None:
    def seeds(losses: Sequence[Sequence[float]], **fields: Any) -> list[Record]:
        return [
            with_epochs(
                trained([0.9] * len(curve), seed=seed, **fields),
                lambda epoch, curve=curve: {"loss": curve[epoch.epoch - 1]},  # type: ignore[misc]
            )
            for seed, curve in enumerate(losses)
        ]

    one = seeds([[2.0, 1.0, 0.5], [2.2, 1.2, 0.6]], batch_size_per_gpu=1024)
    two = seeds([[2.1, 1.3, 0.4], [2.3, 1.4, 0.5]], strategy="ddp", num_gpus=2, batch_size_per_gpu=512)
    rows = build(baseline(), *one, *two)["time_to_target"]
    said = (
        "the ranges of the training loss of this row and of 1 GPU with the same global batch overlap in 2 of 3 epochs"
    )
    assert [(row["num_gpus"], said in (row["note"] or ""), "overlap" in (row["note"] or "")) for row in rows] == [
        (1, False, False),
        (1, False, False),
        (2, True, True),
    ]


@pytest.mark.parametrize("fields", [{"evaluate": False}, {"batch_size_per_gpu": 128, "seed": 1}, {"model": "lenet"}])
def test_only_alike_evaluated_trainings_of_several_batch_sizes_are_compared(fields: dict[str, Any]) -> None:
    other = trained([0.9] * 4, **{"batch_size_per_gpu": 512, **fields})
    assert build(baseline(), other)["time_to_target"] == []


def test_q4_has_every_epoch_for_scripts_and_the_first_and_last_for_people() -> None:
    found = baseline(), trained([0.1] * 11, 0.5, batch_size_per_gpu=512, remedies=("linear_scaling",))
    assert cells(build(*found)["Q4"], "training_time_s", "learning_rate") == [
        *((time_s, 0.1) for time_s in (2, 4, 6, 8)),
        *((number / 2, 0.4) for number in range(1, 12)),
    ]
    shown = cells(table_of(report(*found), "Q4: first and last epoch"), "images per GPU", "epoch")
    assert shown == [("128", "1"), ("128", "4"), ("512", "1"), ("512", "11")]


STUDY = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0), *studied(2048, 0.89, 0, "warmup")]


def q4(*found: Record, target_accuracy: float | None = None) -> Tile:
    return answer_questions(build(*found, targets=Targets(target_accuracy)))["Q4"][0]


def soonest(*found: Record, target_accuracy: float | None = None) -> str:
    """The words of the claim that names the run that is soonest at the target."""
    return answer_questions(build(*found, targets=Targets(target_accuracy)))["Q4"][1].in_words_of(OF_GPUS).text


def test_six_seeds_tell_a_remedy_from_noise_or_say_that_they_do_not() -> None:
    plain = [*studied(128, 0.9, 0.001), *studied(2048, 0.8, 0.001)]
    told = q4(*plain, *studied(2048, 0.88, 0.001, "linear_scaling"))
    assert str(told) == "Accuracy at batch 2,048: 80.3 % (80.0 to 80.5 %), 90.3 % at 128"
    assert told.more == "88.3 % with linear_scaling (rate 1.6), the best of 1 set; 30 epochs, n = 6"
    unclear = q4(*plain, *studied(2048, 0.801, 0.001, "linear_scaling")).more
    assert "the best of 1 set (no difference is shown); " in unclear


@pytest.mark.parametrize(
    ("time_s", "fields", "words"),
    [
        # 30 epochs reach 90 % evenly: 88 % in epoch 30, so 30 epochs of the time each
        (0.5, {}, "15.0 s (15.0 to 15.0), 2,048 images a step, warmup; 128 images take 30.0 s"),
        (2.0, {}, "30.0 s (30.0 to 30.0), 128 images a step, no remedies"),
        (
            0.75,
            {"strategy": "ddp", "num_gpus": 2, "batch_size_per_gpu": 1024},
            "22.5 s (22.5 to 22.5), 2,048 images a step, 2 GPUs, warmup",
        ),
    ],
)
def test_the_run_that_is_soonest_at_the_target_is_named(time_s: float, fields: dict[str, Any], words: str) -> None:
    large: dict[str, Any] = {"strategy": "single", "num_gpus": 1, "batch_size_per_gpu": 2048} | fields
    found = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0, **large)]
    said = soonest(*found, *studied(2048, 0.9, 0, "warmup", epoch_time_s=time_s, **large))
    assert said.startswith(f"Soonest at accuracy 88.0 %: {words}")


def test_a_target_that_some_seeds_miss_says_how_many_reached_it() -> None:
    """One of six ends below 88 %: the time has no upper end."""
    found = [*STUDY[:12], *studied(2048, 0.9, -0.005, "warmup", epoch_time_s=0.5)]  # the sixth ends at 87.5 %
    assert "15.0 s, 2,048 images a step, warmup; 5 of 6 runs reach it" in soonest(*found)
    rival = soonest(*found, *studied(512, 0.95, 0, "warmup"), target_accuracy=0.92)
    assert "512 images a step, warmup" in rival
    assert "128 images" not in rival  # the small batch does not reach it


def test_a_seed_that_misses_leaves_the_end_open_and_the_baseline_may_be_a_rival() -> None:
    missed = studied(2048, 0.9, -0.005, "warmup", epoch_time_s=0.9)
    assert "1 more may be as good" in soonest(*STUDY[:12], *missed)


def test_the_baseline_trains_as_long_as_the_large_batch_and_a_diverged_one_is_none() -> None:
    tile = q4(*studied(128, 0.6, 0, epochs=5), *STUDY)
    assert ("; 30 epochs, " in tile.more, tile.line) == (True, "90.0 % at 128")
    lost = make_record(make_spec(epochs=30, evaluate=True), [1.0] * 30, diverged_at_update=7, test_accuracy=0.1)
    claim = q4(lost, *STUDY[6:])
    assert (claim.is_answer, "diverged" in claim.line) == (False, True)


def test_the_answer_is_about_the_largest_batch_that_tried_a_remedy() -> None:
    found = [*studied(128, 0.9, 0), *studied(512, 0.8, 0), *studied(512, 0.89, 0, "warmup"), *studied(8192, 0.5, 0)]
    assert (q4(*found).label, q4(*found).more[:6]) == ("Accuracy at batch 512", "89.0 %")
    plain = q4(*(record for record in found if not record.spec.remedies))
    assert plain.line == "no run of 8,192 $images a step for 30 epochs tried a remedy"


def test_six_seeds_count_before_one_and_a_study_with_an_answer_before_one_without() -> None:
    assert " % with warmup (" in q4(*STUDY, *studied(2048, 0.895, 0, "zero_gamma")[:1]).more
    other = [*studied(128, 0.7, 0, precision="bf16"), *studied(2048, 0.6, 0, precision="bf16")]
    more = q4(*other, *STUDY).more
    assert (more[:6], more.endswith(", tf32, n = 6")) == ("89.0 %", True)


def test_a_target_that_nobody_reaches_is_said() -> None:
    assert soonest(*STUDY, target_accuracy=1.0) == "Soonest at accuracy 100.0 %: no run reaches it."


def test_a_configuration_without_a_result_has_not_missed_the_target() -> None:
    found = [learnt(128, 0.9), learnt(1024, 0.8, remedies=("warmup",)), learnt(1024, 0.8)]
    lost = [make_spec(evaluate=True, epochs=4, batch_size_per_gpu=size) for size in (2048, 4096)]
    claims = answer_questions(build(*found, missing=lost, targets=Targets(0.99)))["Q4"]
    assert claims[1].text == "Soonest at accuracy 99.0 %: no run reaches it; 2 configurations without a result."


def test_what_the_first_epoch_reaches_is_no_answer() -> None:
    found = [learnt(128, 0.9), learnt(1024, 0.89)]
    tiles = [answer_questions(build(*found, targets=Targets(target)))["Q5"] for target in (0.8, 0.1)]
    assert [[tile.label for tile in own[1:]] for own in tiles] == [["Cheapest at accuracy 80.0 %"], []]


def test_the_cheapest_counts_its_rivals_and_the_seeds_that_were_timed() -> None:
    elsewhere = on("A", learnt(1024, 0.9, 30, 1.0, seed=6))
    found = [*studied(128, 0.9, 0, epoch_time_s=1.1), *studied(1024, 0.9, 0), *studied(512, 0.9, 0), elsewhere]
    (tile,) = answer_questions(build(*found))["Q5"][1:]
    assert tile.more == "128 $images take 33.0 $GPU-seconds; 1 more may be as good; n = 6"


def test_few_epochs_or_runs_show_no_remedy() -> None:
    short = [*studied(128, 0.9, 0, epochs=5), *studied(2048, 0.8, 0, epochs=5)]
    short += studied(2048, 0.89, 0, "warmup", epochs=5)
    for found, few in (([record for record in STUDY if record.spec.seed < 2], "2 runs"), (short, "5 epochs")):
        claim = q4(*found)
        assert claim.warning == f"{few} cannot show whether a remedy helps"
        assert claim.command.endswith("--grid q4-study")
    assert q4(*STUDY).warning == ""


def test_sets_of_remedies_are_counted_once() -> None:
    assert "the best of 1 set;" in q4(*STUDY, *studied(2048, 0.85, 0, "warmup", learning_rate=0.3)).more


def test_a_study_without_its_baseline_answers_nothing_yet() -> None:
    (claim,) = claims_of(*studied(2048, 0.8, 0.001), missing=[make_spec(evaluate=True, epochs=30)])["Q4"]
    assert claim.line.endswith("the runs to compare with, have no result; run the same command again")


def test_a_network_that_cannot_be_quantized_says_why_and_its_other_stages_keep_their_figures() -> None:
    why = "the outputs of fc1: all values are 0, so that there is no scale; train the model longer."
    failed = StageResult(stage="biases", scale_rule="largest_magnitude", granularity="per_tensor", problem=why)
    tables = build(int8_record(0, failed))
    (claim,) = answer_questions(tables)["int8"]
    assert claim.line == f"no network was quantized in full ({why.rstrip('.')})"
    assert tables["int8"][0]["test_accuracy"] == 0.6


def test_the_answer_about_one_seed_is_in_the_singular_and_without_an_interval() -> None:
    tested = StageResult("biases", "largest_magnitude", "per_tensor", 598, 950, 0, 62_758)
    (claim,) = answer_questions(build(int8_record(0, tested)))["int8"]
    said = (
        "Accuracy in int8: -0.20 points, from 60.0 % in fp32; one scale per tensor by its largest magnitude, 1,000 "
        "test images, 62,758 of 248,024 bytes, n = 1 seed."
    )
    assert claim.in_words_of(OF_GPUS).text == said


def test_a_rate_that_tells_no_rows_apart_leaves_its_room_to_the_time() -> None:
    found = [*studied(128, 0.9, 0), *studied(2048, 0.8, 0), *studied(2048, 0.9, 0, "linear_scaling", "warmup")]
    collected = resolved(*found)
    tables = build_tables(collected.outcomes)
    narrow = render_experiment("x", tables, collected, DisplayOptions(90))
    (first, *_) = table_of(narrow, "Q4: final accuracy")
    assert ("time [s]" in first, "rate" in first) == (True, False)


def test_q4_compares_remedies_with_the_small_batch_by_second() -> None:
    found = plots_of(*remedy_records())
    assert [plot.name for plot in found.values() if plot.question == "Q4"] == ["q4", "q4-batch-size"]
    (panel,) = found["q4"].panels
    lines = line_panel(found["q4"]).series
    assert (panel, len(lines)) == (line_panel(found["q4"]), len(REMEDIES) + 1)
    assert (lines[-1].label, lines[-1].style) == ("64 images, no remedies", REFERENCE)
    assert lines[0].points[-1].y == pytest.approx(55)
    assert xs(lines[0]) == [3, 5, 7, 9]


def test_q4_shows_final_accuracy_and_time_to_target_by_batch_size() -> None:
    """Six seeds at 64; at 4096 one, on one GPU and on two, and a longer one, which is another question."""
    found = [learnt(64, 0.80 + 0.01 * seed, seed=seed) for seed in range(6)]
    found += [learnt(4096, 0.5), learnt(4096, 0.9, epochs=8), learnt(4096, 0.82, remedies=("warmup",))]
    found += [learnt(2048, 0.4, strategy="ddp", num_gpus=2)]
    plot = plots_of(*found)["q4-batch-size"]
    assert plot.title == "Accuracy after 4 epochs and time to the target, by batch size"
    accuracy, time = line_panel(plot), line_panel(plot, 1)
    assert (labels(accuracy), time.title) == (["no remedies", "warmup"], "Training time to accuracy 80.5 % [s]")
    assert [*accuracy.series[0].points] == [
        pytest.approx(Point(64, 82.5, 80, 85)),
        pytest.approx(Point(4096, 50)),
    ]
    assert xs(time.series[0]) == [64]  # the large batch never reaches it
    assert time.series[1].points == (Point(4096, 8),)  # in its last epoch


LOST = make_record(make_spec(batch_size_per_gpu=64, epochs=4, evaluate=True), status="failed", reason="")
ON_FOUR: dict[str, Any] = {"strategy": "ddp", "num_gpus": 4}


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(
            [learnt(64, 0.8), learnt(1024, 0.9, **ON_FOUR), learnt(1024, 0.9, remedies=("warmup",), **ON_FOUR)],
            id="other GPUs",
        ),
        pytest.param(
            [LOST, learnt(512, 0.8), learnt(4096, 0.5), learnt(4096, 0.6, remedies=("warmup",))],
            id="a baseline that was not measured",
        ),
    ],
)
def test_q4_compares_times_on_equal_gpus_with_a_baseline_that_was_measured(found: list[Record]) -> None:
    (panel,) = plots_of(*found)["q4-batch-size"].panels
    assert panel.title == "Test accuracy [%]"


def test_twelve_sets_of_remedies_have_eight_lines_of_different_styles() -> None:
    every = [one for count in range(4) for one in itertools.combinations(REMEDIES_OF_SPEC, count)][:12]
    plot = plots_of(learnt(64, 0.8), *(learnt(4096, 0.5, remedies=one) for one in every))["q4-batch-size"]
    styles = [line.style for line in line_panel(plot).series]
    assert len(set(styles)) == len(styles) == MAX_SERIES
    assert f"{MAX_SERIES} of 12 series are shown." in plot.note


def test_q4_of_a_single_batch_size_or_of_two_epochs_has_no_plot_by_batch_size() -> None:
    assert "q4-batch-size" not in plots_of(learnt(64, 0.8), learnt(64, 0.8, remedies=("warmup",)))
    assert "q4-batch-size" not in plots_of(learnt(64, 0.8, epochs=2), learnt(4096, 0.8, epochs=2))


def test_q4_shows_the_shortest_runs_of_a_batch_and_compares_with_the_baseline() -> None:
    """The baseline has remedies too, and the large batch a longer run."""
    found = [learnt(64, 0.8), learnt(64, 0.7, remedies=("warmup",)), learnt(64, 0.8, epochs=8)]
    found += [learnt(4096, 0.5, remedies=("warmup",), epochs=epochs) for epochs in (4, 8)]
    lines = line_panel(plots_of(*found)["q4"]).series
    assert {line.label: len(line.points) for line in lines} == {"warmup": 4, "64 images, no remedies": 4}
    alone = line_panel(plots_of(*found[:3])["q4"]).series
    assert REFERENCE not in [line.style for line in alone], "a batch is not compared with itself"


def test_q4_is_of_the_largest_size_whose_lines_are_not_flat() -> None:
    """The large batch ends at 55 %; the accuracy of a still larger one stays at 20 %, below half of the best, 60 %."""
    found = remedy_records()
    found += [trained([0.2] * 4, 2.0, batch_size_per_gpu=8192, remedies=remedies) for remedies in REMEDIES]
    assert plots_of(*found)["q4"].title == "Accuracy with 4,096 images a step"


def test_a_curve_of_many_epochs_has_a_point_for_some_of_them_with_both_ends() -> None:
    found = [trained([0.5] * 200, batch_size_per_gpu=size) for size in (64, 512)]
    places = xs(line_panel(plots_of(*found)["q4"]).series[0])
    assert (len(places), places[0], places[-1]) == (MAX_POINTS, 1, 200)


def tables_of(*found: Record) -> Tables:
    """The tables of six seeds, of which some have a record."""
    return build(*found, missing=[int8_point(seed) for seed in range(6)])


def test_accuracy_is_the_median_over_seeds_with_the_interval_of_six_and_the_change_that_of_each_seed() -> None:
    """-5, -4, -2, -1, 1, 3 of 1,000: the median is -1.5; the medians of accuracy differ by 0.5."""
    fp32, biases = tables_of(*INT8_RECORDS)["int8"]
    absent = dict.fromkeys(("scale_rule", "granularity", "accuracy_change", "agreement"))
    assert_row(fp32, stage="fp32", n=6, network_bytes=248_024, **absent)
    assert ends(fp32["test_accuracy"]) == (0.6, 0.625, 0.65)
    assert_row(
        biases,
        **{"stage": "biases", "scale_rule": "three_sigma", "granularity": "per_channel", "note": None},
        **{"tie_share": 0.02, "network_bytes": 63_682, "agreement": 0.9245, "mean_accuracy_change": -0.008 / 6},
    )
    assert ends(biases["test_accuracy"]) == (0.599, 0.6245, 0.651)  # 599, 608, 623, 626, 635, 651
    assert ends(biases["accuracy_change"]) == pytest.approx((-0.005, -0.0015, 0.003))


WHY = "the weights of fc1: all values are 0, so that there is no scale; train the model longer."
MISSING = "1 of 6 repeats: missing; an interval needs 6 seeds, got 5"
FIVE = {"n": 5, "test_accuracy": 0.623}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(INT8_RECORDS[:5], FIVE | {"note": MISSING}, id="a missing seed"),
        pytest.param(
            [*INT8_RECORDS[:5], int8_record(5, int8_result(None, WHY))],
            FIVE | {"note": f"{WHY}; an interval needs 6 seeds, got 5"},
            id="a network that cannot be quantized",
        ),
        pytest.param(
            [int8_record(0, int8_result(None, WHY))],
            {"n": 0, "test_accuracy": None, "network_bytes": None},
            id="none that can be quantized",
        ),
    ],
)
def test_a_seed_without_a_network_leaves_no_interval_and_is_named(
    found: list[Record], expected: dict[str, Any]
) -> None:
    (_, biases) = tables_of(*found)["int8"]
    assert_row(biases, **expected)
    assert (low(biases["test_accuracy"]), high(biases["accuracy_change"])) == (None, None)


def test_a_point_without_a_record_keeps_its_row() -> None:
    missing = [int8_point(seed) for seed in range(6)]
    assert cells(tables_of()["int8"], "status", "stage", "n") == [("missing", None, 0)]
    assert " missing |" in report(missing=missing)


def test_histograms_are_those_of_the_first_seed_with_the_lines_at_three_sigma() -> None:
    (row,) = tables_of(*reversed(INT8_RECORDS))["int8_histograms"]
    assert row["counts"] == [1, 2, 1]
    lines = {"low": -1.0, "high": 1.0, "three_sigma_low": -1.25, "three_sigma_high": 1.75}
    assert_row(row, seed=0, layer="conv1", tensor="weights", **lines)


def test_json_has_the_tables_of_int8_only_where_a_point_quantizes() -> None:
    names = {"int8", "int8_histograms"}
    assert [names & flatten(build(*found)).keys() for found in (INT8_RECORDS, [make_record()])] == [names, set()]


def test_a_channel_has_too_few_weights_for_a_percentile_of_99_9() -> None:
    weights = [parameter for name, parameter in build_model("lenet", 10).named_parameters() if "weight" in name]
    assert max(weight[0].numel() for weight in weights) == 400
    found = rows("two-cores/quantize", "int8", stage="weights", granularity="per_channel")
    figures = {row["scale_rule"]: (row["test_accuracy"], row["agreement"]) for row in found}
    assert figures["percentile_99_9"] == figures["largest_magnitude"]


def test_the_right_way_costs_at_most_half_a_point_on_average() -> None:
    complete = [row for row in rows("two-cores/quantize", "int8", stage="biases") if row["scale_rule"] != "three_sigma"]
    assert len(complete) == 4
    assert all(row["n"] == 6 and row["mean_accuracy_change"] >= -0.005 for row in complete)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "published/two-cores/quantize/records").glob("*.json")), ids=lambda path: path.stem
)
def test_published_weights_have_the_digest_of_their_record(path: Path) -> None:
    quantization = known(measurement_of(load_record(path)).quantization)
    weights = path.with_suffix(".weights.npz")
    load_weights(build_model("lenet", 10), weights)
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == quantization.weights_sha256


def test_a_run_names_its_strategy_where_several_train_on_several_gpus() -> None:
    places, batch = (("single", 1), ("ddp", 2), ("zero1", 2)), {"global_batch_size": 64, "epochs": 4}
    alone, ddp, zero1 = (Row({"strategy": name, "num_gpus": n, "remedies": []}, batch) for name, n in places)
    found = [describe_run(row, [alone, ddp, zero1]) for row in (alone, zero1)]
    assert found == ["64 $images a step, 1 $GPU", "64 $images a step, zero1, 2 $GPUs"]
    assert describe_run(ddp, [alone, ddp]) == "64 $images a step, 2 $GPUs"
