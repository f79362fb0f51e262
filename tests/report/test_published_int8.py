"""The published records of int8: their weights, and what docs/int8.md claims of them."""

from pathlib import Path

import pytest
from factories import ROOT
from render_results import rows

from pipeline.records.store import load_record
from pipeline.training.quantize_point import load_weights
from pipeline.workloads.image_classifiers import build_model


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
    measurement = load_record(path).measurement
    assert measurement is not None
    assert measurement.quantization is not None
    load_weights(build_model("lenet", 10), path.with_suffix(".weights.npz"), measurement.quantization.weights_sha256)
