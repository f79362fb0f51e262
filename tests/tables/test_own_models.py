"""Tables and answers of a user's own model: its unit, and its figure of merit."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from factories import make_record, make_spec
from rendered_tables import build, report, table_of
from study_records import trained

from pipeline.answers.questions import answers_of
from pipeline.experiment.measurement import Better, Measurement
from pipeline.experiment.outcomes import CollectedOutcomes, resolve_outcomes
from pipeline.experiment.record import Record
from pipeline.experiment.spec import Spec

OWN: dict[str, Any] = {"model": "/home/ada/gpt.py:Gpt", "dataset": None}


def with_measurement(record: Record, **fields: Any) -> Record:
    assert record.measurement is not None
    return msgspec.structs.replace(record, measurement=msgspec.structs.replace(record.measurement, **fields))


def timed(unit: str = "tokens", items: int = 512, **fields: Any) -> Record:
    """A timed point of 1 s an epoch of 50,000 samples."""
    record = make_record(make_spec(**{**OWN, "input": "synthetic", **fields}))
    return with_measurement(record, unit=unit, items_per_sample=items)


def losses(values: Sequence[float], merit: str = "test loss", better: Better = "lower", **fields: Any) -> Record:
    """A training with this figure of merit after each epoch of 1 s."""
    record = trained([0.5] * len(values), **{**OWN, **fields})
    assert isinstance(record.measurement, Measurement)
    epochs = tuple(
        msgspec.structs.replace(epoch, test_accuracy=None, merit=value)
        for epoch, value in zip(record.measurement.epochs, values, strict=True)
    )
    return with_measurement(record, epochs=epochs, merit=merit, better=better, unit="tokens")


def collected(*found: Record, missing: Sequence[Spec] = ()) -> CollectedOutcomes:
    return resolve_outcomes([*(record.spec for record in found), *missing], found, [])


def answers(*found: Record) -> dict[str, list[str]]:
    said = answers_of(build(*found), collected(*found).terms)
    return {answer.question: [*answer.paragraphs, answer.command] for answer in said}


def test_throughput_counts_items_and_keeps_samples() -> None:
    (row,) = build(timed())["Q1"]
    assert (row["throughput_samples_per_s"], row["throughput_items_per_s"]) == (50_000, 50_000 * 512)
    assert (row["unit"], row["learning_rate"] if "learning_rate" in row.figures else None) == ("tokens", None)
    (cells,) = table_of(report(timed()), "Q1")
    assert cells["tokens/s"] == "25,600,000"
    assert "images/s" not in cells


def test_a_model_without_a_record_counts_samples() -> None:
    assert collected(missing=[make_spec(**OWN, input="synthetic")]).terms.unit == "samples"
    assert collected(missing=[make_spec()]).terms.unit == "images"


def test_two_units_are_answered_apart_and_share_a_table_that_names_them() -> None:
    of_images = make_record(make_spec(input="synthetic", batch_size_per_gpu=64))
    said, text = answers(timed(), of_images)["Q1"], report(timed(), of_images)
    assert [part.partition(":")[0] for part in said[:-1]] == ["In tokens", "In images"]
    assert "25,600,000 tokens/s" in said[0]
    assert "50,000 images/s" in said[1]
    rows = table_of(text, "Q1")
    assert {row["items/s"] for row in rows} == {"25,600,000", "50,000"}
    assert "tokens" in text.split("## Q1", 1)[1]


def test_of_a_lower_merit_the_target_lies_above_the_baseline_and_is_reached_from_above() -> None:
    small = losses([4.0, 2.5, 2.03, 2.0], batch_size_per_gpu=128)
    large = losses([5.0, 3.0, 2.1, 2.05], batch_size_per_gpu=1024)
    rows = {row["global_batch_size"]: row for row in build(small, large)["time_to_target"]}
    assert rows[128]["target_merit"] == pytest.approx(2.04)
    assert [(row["epochs_to_target"], row["reached"]) for row in rows.values()] == [
        (3, "1 of 1"),
        (None, "never reached"),
    ]
    assert [row["final_merit"] for row in rows.values()] == [2.0, 2.05]
    assert {(row["final_test_accuracy"], row["target_accuracy"], row["learning_rate"]) for row in rows.values()} == {
        (None, None, None)
    }
    text = report(small, large)
    cells = table_of(text, "Q4: final test loss")
    assert [row["test loss"] for row in cells] == ["2.000", "2.050"]
    assert [row["test loss"] for row in table_of(text, "Q4: loss and accuracy")] == ["4.000", "2.000", "5.000", "2.050"]
    assert "learning" not in "".join(cells[0])


def test_of_a_higher_merit_that_is_below_zero_the_target_is_worse() -> None:
    small = losses([-4.0, -2.0], "log likelihood", "higher", batch_size_per_gpu=128)
    large = losses([-4.0, -2.03], "log likelihood", "higher", batch_size_per_gpu=1024)
    rows = build(small, large)["time_to_target"]
    assert [(row["target_merit"], row["epochs_to_target"]) for row in rows] == [(pytest.approx(-2.04), 2)] * 2


def test_the_answer_of_q4_names_the_merit_and_no_remedy() -> None:
    seeds = [losses([4.0, 2.0 + seed / 100], batch_size_per_gpu=128, seed=seed) for seed in range(6)]
    seeds += [losses([4.0, 3.0 + seed / 100], batch_size_per_gpu=1024, seed=seed) for seed in range(6)]
    said, command = answers(*seeds)["Q4"]
    assert said == (
        "After 2 epochs the test loss is 3.03 (3.00 to 3.05) at 1,024 samples a step and 2.03 (2.00 to 2.05) at 128, "
        "n = 6. Soonest at 2.066 is 128 samples a step: 2.0 s (2.0 to 2.0 s) of training."
    )
    assert command == ""


def test_an_accuracy_of_an_own_model_is_answered_in_per_cent() -> None:
    ends = {128: 0.9, 1024: 0.7}
    found = [trained([0.5, final], **OWN, batch_size_per_gpu=size) for size, final in ends.items()]
    small, large = (with_measurement(record, unit="tokens") for record in found)
    said = answers(small, large)["Q4"][0]
    assert said.startswith("After 2 epochs 1,024 samples a step reach 70.0 % test accuracy, 128 reach 90.0 %, n = 1")


def test_what_was_not_measured_of_an_own_model_is_measured_by_the_grid_for_such() -> None:
    found = answers(timed())
    model = "--set model=/home/ada/gpt.py:Gpt"
    memory = f"python -m pipeline.submit --grid memory {model} strategy=single num_gpus=1"
    submit = f"python -m pipeline.submit --grid own-model {model}"
    assert {question: said[-1] for question, said in found.items()} == {
        "Q1": memory,
        "Q2": submit,
        "Q3": submit,
        "Q4": "",
        "Q5": "",
    }
