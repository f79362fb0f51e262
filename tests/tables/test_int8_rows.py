"""The table of int8: medians over seeds, changes against each seed's own fp32, and what is missing by name."""

import pytest
from factories import high, low, make_record, make_spec
from int8_records import RECORDS, int8_result, point, record_of

from pipeline.experiment.outcomes import CollectedOutcomes, resolve_outcomes
from pipeline.experiment.record import Record
from pipeline.pages.markdown import render_experiment
from pipeline.tables.build_tables import Tables, build_tables, flatten


def collect(*found: Record, num_seeds: int = 6) -> CollectedOutcomes:
    return resolve_outcomes([point(seed) for seed in range(num_seeds)], found, [])


def build(*found: Record) -> Tables:
    return build_tables(collect(*found).outcomes)


def test_accuracy_is_the_median_over_seeds_with_the_interval_of_six() -> None:
    fp32, biases = build(*RECORDS)["int8"]
    assert (fp32["stage"], fp32["scale_rule"], fp32["granularity"], fp32.n) == ("fp32", None, None, 6)
    assert (fp32["test_accuracy"], low(fp32["test_accuracy"]), high(fp32["test_accuracy"])) == (0.625, 0.6, 0.65)
    assert (fp32["accuracy_change"], fp32["agreement"], fp32["network_bytes"]) == (None, None, 248_024)
    assert (biases["stage"], biases["scale_rule"], biases["granularity"]) == ("biases", "three_sigma", "per_channel")
    # 599, 608, 623, 626, 635, 651
    assert (biases["test_accuracy"], low(biases["test_accuracy"]), high(biases["test_accuracy"])) == (
        0.6245,
        0.599,
        0.651,
    )
    assert (biases["tie_share"], biases["network_bytes"]) == (0.02, 63_682)
    assert biases["agreement"] == pytest.approx(0.9245)
    assert biases["note"] is None


def test_the_change_is_that_of_each_seed_against_its_own_fp32() -> None:
    """-5, -4, -2, -1, 1, 3 of 1,000: the median is -1.5; the medians of accuracy differ by 0.5."""
    (_, biases) = build(*RECORDS)["int8"]
    assert biases["accuracy_change"] == pytest.approx(-0.0015)
    assert (low(biases["accuracy_change"]), high(biases["accuracy_change"])) == (-0.005, 0.003)
    assert biases["mean_accuracy_change"] == pytest.approx(-0.008 / 6)


def test_a_missing_seed_leaves_no_interval_and_is_named() -> None:
    (_, biases) = build(*RECORDS[:5])["int8"]
    assert (biases.n, biases["test_accuracy"]) == (5, 0.623)
    assert (low(biases["test_accuracy"]), high(biases["accuracy_change"])) == (None, None)
    assert biases["note"] == "1 of 6 repeats: missing; an interval needs 6 seeds, got 5"


def test_a_network_that_cannot_be_quantized_is_a_row_with_its_sentence() -> None:
    why = "the weights of fc1: all values are 0, so that there is no scale; train the model longer."
    _, biases = build(*RECORDS[:5], record_of(5, int8_result(None, why)))["int8"]
    assert (biases.n, biases["note"]) == (5, f"{why}; an interval needs 6 seeds, got 5")
    _, biases = build(record_of(0, int8_result(None, why)))["int8"]
    assert (biases.n, biases["test_accuracy"], biases["network_bytes"]) == (0, None, None)


def test_a_point_without_a_record_keeps_its_row() -> None:
    collected = collect()
    tables = build_tables(collected.outcomes)
    (row,) = tables["int8"]
    assert (row.status, row["stage"], row.n) == ("missing", None, 0)
    assert " missing |" in render_experiment("quantize", tables, collected)


def test_histograms_are_those_of_the_first_seed_with_the_lines_at_three_sigma() -> None:
    (row,) = build(*reversed(RECORDS))["int8_histograms"]
    assert (row["seed"], row["layer"], row["tensor"], row["low"], row["high"]) == (0, "conv1", "weights", -1.0, 1.0)
    assert (row["three_sigma_low"], row["three_sigma_high"]) == (-1.25, 1.75)
    assert row["counts"] == [1, 2, 1]


def test_json_has_the_tables_of_int8_only_where_a_point_quantizes() -> None:
    assert {"int8", "int8_histograms"} <= flatten(build(*RECORDS)).keys()
    usual = make_record(make_spec())
    tables = build_tables(resolve_outcomes([usual.spec], [usual], []).outcomes)
    assert not {"int8", "int8_histograms"} & flatten(tables).keys()


def test_the_report_shows_points_and_bytes() -> None:
    collected = collect(*RECORDS)
    text = render_experiment("quantize", build_tables(collected.outcomes), collected)
    table = text.split("## int8: test accuracy after quantization")[1].split("##")[0]
    (row,) = [line for line in table.splitlines() if line.startswith("| + biases")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["+ biases (all)", "three_sigma", "per_channel"]
    assert cells[3:] == ["62.45 (59.90 to 65.10)", "-0.150 (-0.500 to 0.300)", "6"]
    sizes = text.split("## int8: agreement with fp32, and size")[1].split("##")[0]
    (row,) = [line for line in sizes.splitlines() if line.startswith("| + biases")]
    assert [cell.strip() for cell in row.strip("|").split("|")][3:] == ["92.5", "2.0", "0.064", "6"]
