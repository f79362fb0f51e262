"""Time to target of trainings whose accuracies and times were made up."""

from collections.abc import Sequence
from typing import Any

import pytest
from factories import (
    ends,
    resolved,
    trained,
    with_epochs,
)
from rendered_tables import assert_row, build, cells, report, table_of

from pipeline.plan.spec import Spec
from pipeline.records.record import Record
from pipeline.report.display import DisplayOptions
from pipeline.report.markdown import render_experiment
from pipeline.report.questions import build_tables
from pipeline.report.table import Row
from pipeline.report.time_to_target import NOT_REACHED, Spread, Targets, spread


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
        ([3, 1, 2], Spread(2, 1, 3)),
        ([6, 5, 4, 3, 2, 1], Spread(3.5, 1, 6)),
        ([*range(1, 13)], Spread(6.5, 2, 11)),  # ranks 3 and 10 cover 96.1 %, below 97.5 %
        ([1, NOT_REACHED, 2], Spread(2, 1, NOT_REACHED)),
        ([], None),
    ],
)
def test_six_values_have_an_interval_and_fewer_their_extremes(values: list[float], expected: Spread | None) -> None:
    assert spread(values) == expected


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


def test_a_given_target_replaces_that_of_the_baseline() -> None:
    found = [baseline(), trained([0.3, 0.6, 0.8, 0.88], batch_size_per_gpu=512)]
    rows = build(*found, targets=Targets(0.5))["time_to_target"]
    assert cells(rows, "target_accuracy", "epochs_to_target") == [(0.5, 1), (0.5, 2)]


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


def test_rows_that_differ_in_the_rate_alone_name_it() -> None:
    fields: dict[str, Any] = {"batch_size_per_gpu": 8192, "remedies": ("linear_scaling",)}
    halves = [trained([0.1, 0.2, 0.3, 0.4], **fields, reference_batch_size=size) for size in (128, 256)]
    rows = table_of(report(baseline(), *halves), "Q4: final accuracy")
    named = [("no remedies", "0.1"), ("linear_scaling", "3.2"), ("linear_scaling", "6.4")]
    assert cells(rows, "remedies", "rate") == named
