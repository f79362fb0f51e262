"""What the plots of Q4 show, worked by hand."""

import itertools
from typing import Any

import pytest
from factories import (
    learnt,
    make_record,
    make_spec,
    trained,
)
from page_records import REMEDIES, remedy_records
from rendered_plots import labels, line_panel, plots_of, xs, ys

from pipeline.plan.axes import REMEDIES as REMEDIES_OF_SPEC
from pipeline.report.plots import MAX_POINTS, MAX_SERIES, REFERENCE, Point


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
    assert (labels(accuracy), time.title) == (["no remedies", "warmup"], "Training time to 80.5 % [s]")
    assert [*accuracy.series[0].points] == [
        pytest.approx(Point(64, 82.5, 80, 85)),
        pytest.approx(Point(4096, 50)),
    ]
    assert xs(time.series[0]) == [64]  # the large batch never reaches it
    assert time.series[1].points == (Point(4096, 8),)  # in its last epoch


def test_q4_by_batch_size_is_of_one_study_and_tells_rates_apart() -> None:
    found = [learnt(64, 0.8), learnt(4096, 0.5), learnt(4096, 0.6, learning_rate=0.4)]
    found += [learnt(size, 0.3, precision="bf16") for size in (64, 4096)]
    plot = plots_of(*found)["q4-batch-size"]
    assert len(plot.panels) == 1
    assert {line.label: ys(line) for line in line_panel(plot).series} == {
        "learning rate 0.1": pytest.approx([80, 50]),
        "learning rate 0.4": pytest.approx([60]),
    }


def test_q4_compares_times_on_equal_gpus_only() -> None:
    found = [learnt(64, 0.8)]
    found += [learnt(1024, 0.9, strategy="ddp", num_gpus=4, remedies=remedies) for remedies in ((), ("warmup",))]
    (panel,) = plots_of(*found)["q4-batch-size"].panels
    assert panel.title == "Test accuracy [%]"


def test_q4_without_a_baseline_that_was_measured_has_no_times() -> None:
    lost = make_record(make_spec(batch_size_per_gpu=64, epochs=4, evaluate=True), status="failed", reason="")
    found = [lost, learnt(512, 0.8), learnt(4096, 0.5), learnt(4096, 0.6, remedies=("warmup",))]
    (panel,) = plots_of(*found)["q4-batch-size"].panels
    assert panel.title == "Test accuracy [%]"


def test_twelve_sets_of_remedies_have_eight_lines_of_different_styles() -> None:
    every = [one for count in range(4) for one in itertools.combinations(REMEDIES_OF_SPEC, count)][:12]
    plot = plots_of(learnt(64, 0.8), *(learnt(4096, 0.5, remedies=one) for one in every))["q4-batch-size"]
    styles = [line.style for line in line_panel(plot).series]
    assert len(set(styles)) == len(styles) == MAX_SERIES
    assert f"{MAX_SERIES} of 12 series are shown." in plot.note


def test_a_set_of_remedies_has_one_style_in_every_plot() -> None:
    remedies: tuple[Any, ...] = ((), ("linear_scaling", "warmup"), ("linear_scaling", "warmup", "zero_gamma"))
    found = [learnt(64, 0.8), learnt(512, 0.7, remedies=remedies[2]), learnt(512, 0.6, remedies=remedies[1])]
    found += [learnt(4096, 0.5, remedies=one) for one in remedies]
    drawn = plots_of(*found)
    for name in ("q4-batch-size", "q4"):
        styles = {line.label.partition(",")[0]: line.style for line in line_panel(drawn[name]).series}
        assert (styles["linear_scaling + warmup"], styles["linear_scaling + warmup + zero_gamma"]) == (1, 2), name


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
