"""int8: medians over seeds, changes against fp32 of each seed, and what docs/int8.md claims of published records."""

import hashlib
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
    low,
    make_record,
)
from render_results import rows
from rendered import assert_row, build, cells, report

from pipeline.records.record import Record
from pipeline.records.store import load_record
from pipeline.report.questions import flatten
from pipeline.report.table import Tables
from pipeline.training.quantize_point import load_weights
from pipeline.workloads.image_classifiers import build_model


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
    measurement = known(load_record(path).measurement)
    assert measurement.quantization is not None
    weights = path.with_suffix(".weights.npz")
    load_weights(build_model("lenet", 10), weights)
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == measurement.quantization.weights_sha256
