"""Time to target of trainings whose accuracies and times were made up."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from conftest import assert_refused, run_command
from factories import assert_says, high, low
from rendered_tables import build, report, table_of
from study_records import trained

from pipeline.analysis.time_to_target import NOT_REACHED, Spread, spread
from pipeline.experiment.outcomes import resolve_outcomes
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Spec
from pipeline.pages.display_tables import DisplayOptions
from pipeline.pages.markdown import render_experiment
from pipeline.tables.build_tables import build_tables
from pipeline.tables.columns import Row
from pipeline.tables.time_to_target_rows import Targets


def baseline(**fields: Any) -> Record:
    """Batch 128, 391 updates an epoch: 0.90 at the end, so the target is 0.88, reached after three epochs of 2 s."""
    return trained([0.5, 0.7, 0.89, 0.90], 2.0, **fields)


def rows_by_batch(*found: Record, missing: Sequence[Spec] = ()) -> dict[int, Row]:
    return {row["global_batch_size"]: row for row in build(*found, missing=missing)["time_to_target"]}


def test_the_figures_are_those_worked_by_hand() -> None:
    """1024 needs four epochs of 1 s, at twice the throughput: 2 x 3/4 = 1.5, and 6 s over 4 s is that."""
    large = trained([0.3, 0.6, 0.8, 0.88], 1.0, batch_size_per_gpu=1024, remedies=("linear_scaling", "warmup"))
    rows = rows_by_batch(baseline(), large)
    one, other = rows[128], rows[1024]
    assert one["target_accuracy"] == pytest.approx(0.88)
    assert (one["epochs_to_target"], one["updates_to_target"], one["time_to_target_s"]) == (3, 3 * 391, 6)
    assert (other["epochs_to_target"], other["updates_to_target"], other["time_to_target_s"]) == (4, 4 * 49, 4)
    assert (one["throughput_efficiency"], one["statistical_efficiency"], one["target_efficiency"]) == (1, 1, 1)
    found = (other["throughput_efficiency"], other["statistical_efficiency"], other["target_efficiency"])
    assert found == pytest.approx((2, 0.75, 1.5))
    assert (one["soonest"], other["soonest"]) == (None, "seconds and GPU-seconds")
    assert (one["learning_rate"], other["learning_rate"]) == (0.1, 0.8)
    assert (other["final_test_accuracy"], other["reached"]) == (0.88, "1 of 1")


def test_seconds_and_gpu_seconds_may_name_two_batch_sizes() -> None:
    large = trained([0.3, 0.6, 0.8, 0.88], 1.0, strategy="ddp", num_gpus=4, batch_size_per_gpu=512)
    rows = rows_by_batch(baseline(), large)
    assert [(row["time_to_target_s"], row["gpu_time_to_target_s"], row["soonest"]) for row in rows.values()] == [
        (6, 6, "GPU-seconds"),
        (4, 16, "seconds"),
    ]
    assert rows[2048]["target_efficiency"] == pytest.approx(6 / 16)


def test_a_target_that_is_never_reached_is_a_named_cell() -> None:
    found = baseline(), trained([0.1, 0.2, 0.3, 0.4], batch_size_per_gpu=8192)
    row = rows_by_batch(*found)[8192]
    assert row["reached"] == "never reached"
    assert (row["epochs_to_target"], row["time_to_target_s"], row["statistical_efficiency"], row["soonest"]) == (
        None,
    ) * 4
    assert row["throughput_efficiency"] == 2
    cell = table_of(report(*found), "Q4: final accuracy")[1]
    assert (cell["reached"], cell["time [s]"], cell["epochs to target"]) == ("never reached", "never", "")
    assert cell["accuracy [%]"] == "40.0"  # of one run there is no interval


def test_a_target_that_no_run_reaches_is_named_where_a_table_has_little_room() -> None:
    found = baseline(), trained([0.1, 0.2, 0.3, 0.4], batch_size_per_gpu=8192)
    collected = resolve_outcomes([record.spec for record in found], found, [])
    tables = build_tables(collected.outcomes, targets=Targets(0.99))
    text = render_experiment("x", tables, collected, DisplayOptions(60))
    cells = table_of(text, "Q4: final accuracy")
    assert [cell["time [s]"] for cell in cells] == ["never"] * 2
    assert "reached" not in cells[0]


def test_seeds_that_fail_to_reach_it_widen_the_spread_before_they_move_the_median() -> None:
    reaching = [trained([0.5, 0.89, 0.9, 0.9], batch_size_per_gpu=512, seed=seed) for seed in (0, 1)]
    failing = trained([0.5, 0.5, 0.5, 0.5], batch_size_per_gpu=512, seed=2)
    row = rows_by_batch(baseline(), *reaching, failing)[512]
    assert (row["reached"], row["epochs_to_target"], low(row["epochs_to_target"]), high(row["epochs_to_target"])) == (
        "2 of 3",
        2,
        2,
        None,
    )


def test_six_values_have_an_interval_and_fewer_their_extremes() -> None:
    assert spread([3, 1, 2]) == Spread(2, 1, 3)
    assert spread([6, 5, 4, 3, 2, 1]) == Spread(3.5, 1, 6)
    assert spread([*range(1, 13)]) == Spread(6.5, 2, 11)  # ranks 3 and 10 cover 96.1 %, below 97.5 %
    assert spread([1, NOT_REACHED, 2]) == Spread(2, 1, NOT_REACHED)
    assert spread([]) is None


def test_a_missing_seed_is_named() -> None:
    absent = trained([0.9] * 4, batch_size_per_gpu=512, seed=5).spec
    found = trained([0.9] * 4, batch_size_per_gpu=512, seed=4)
    row = rows_by_batch(baseline(), found, missing=[absent])[512]
    assert_says(row["note"], "no result of seed 5 (missing)")
    assert row.n == 1


def test_without_a_baseline_there_is_no_target_and_the_row_says_so() -> None:
    large = trained([0.9] * 4, batch_size_per_gpu=512)
    rows = rows_by_batch(large, missing=[baseline().spec])
    assert_says(rows[512]["note"], "no target: the baseline has no final test accuracy")
    assert (rows[512]["final_test_accuracy"], rows[512]["target_accuracy"], rows[512]["reached"]) == (0.9, None, None)


def test_two_gpus_are_compared_with_one_of_the_same_global_batch_epoch_by_epoch() -> None:
    def seeds(losses: Sequence[Sequence[float]], **fields: Any) -> list[Record]:
        records = []
        for seed, curve in enumerate(losses):
            record = trained([0.9] * len(curve), seed=seed, **fields)
            assert record.measurement is not None
            pairs = zip(record.measurement.epochs, curve, strict=True)
            epochs = tuple(msgspec.structs.replace(epoch, loss=loss) for epoch, loss in pairs)
            measurement = msgspec.structs.replace(record.measurement, epochs=epochs)
            records.append(msgspec.structs.replace(record, measurement=measurement))
        return records

    one = seeds([[2.0, 1.0, 0.5], [2.2, 1.2, 0.6]], batch_size_per_gpu=1024)
    two = seeds([[2.1, 1.3, 0.4], [2.3, 1.4, 0.5]], strategy="ddp", num_gpus=2, batch_size_per_gpu=512)
    rows = build(baseline(), *one, *two)["time_to_target"]
    assert [row.axes["num_gpus"] for row in rows] == [1, 1, 2]
    assert_says(
        rows[2]["note"],
        "the ranges of the training loss of this row and of 1 GPU with the same global batch overlap in 2 of 3 epochs",
    )
    assert not any("overlap" in (row["note"] or "") for row in rows[:2])


def test_a_given_target_replaces_that_of_the_baseline() -> None:
    records = [baseline(), trained([0.3, 0.6, 0.8, 0.88], batch_size_per_gpu=512)]
    outcomes = resolve_outcomes([record.spec for record in records], records, []).outcomes
    rows = build_tables(outcomes, targets=Targets(0.5))["time_to_target"]
    assert [(row["target_accuracy"], row["epochs_to_target"]) for row in rows] == [(0.5, 1), (0.5, 2)]


@pytest.mark.parametrize("target", ["0", "88", "-1", "nan", "abc", "88%"])
def test_a_target_that_is_no_fraction_is_refused(target: str) -> None:
    assert_refused(run_command("collect", ".", f"--target-accuracy={target}"), 2, "write 88 % as 0.88")


@pytest.mark.parametrize("fields", [{"evaluate": False}, {"batch_size_per_gpu": 128, "seed": 1}, {"model": "lenet"}])
def test_only_alike_evaluated_trainings_of_several_batch_sizes_are_compared(fields: dict[str, Any]) -> None:
    other = trained([0.9] * 4, **{"batch_size_per_gpu": 512, **fields})
    assert build(baseline(), other)["time_to_target"] == []


def test_q4_has_every_epoch_for_scripts_and_the_first_and_last_for_people() -> None:
    found = baseline(), trained([0.1] * 11, 0.5, batch_size_per_gpu=512, remedies=("linear_scaling",))
    rows = build(*found)["Q4"]
    assert len(rows) == 4 + 11
    assert [row["training_time_s"] for row in rows[:4]] == [2, 4, 6, 8]
    assert (rows[-1]["training_time_s"], rows[-1]["learning_rate"]) == (5.5, 0.4)
    shown = table_of(report(*found), "Q4: loss")
    assert [(row["images per GPU"], row["epoch"]) for row in shown] == [
        ("128", "1"),
        ("128", "4"),
        ("512", "1"),
        ("512", "11"),
    ]


def test_rows_that_differ_in_the_rate_alone_name_it() -> None:
    fields: dict[str, Any] = {"batch_size_per_gpu": 8192, "remedies": ("linear_scaling",)}
    halves = [trained([0.1, 0.2, 0.3, 0.4], **fields, reference_batch_size=size) for size in (128, 256)]
    rows = table_of(report(baseline(), *halves), "Q4: final accuracy")
    named = [("no remedies", "0.1"), ("linear_scaling", "3.2"), ("linear_scaling", "6.4")]
    assert [(row["remedies"], row["rate"]) for row in rows] == named
