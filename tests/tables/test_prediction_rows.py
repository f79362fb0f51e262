import argparse
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from communication_records import BUCKETS, NVLINK, SIZES, US
from conftest import Command
from factories import (
    make_collective,
    make_communication,
    make_communication_record,
    make_experiment,
    make_record,
    make_spec,
)
from rendered_tables import report, table_of

from pipeline.analysis.ring_model import (
    Link,
    all_reduce_time_s,
)
from pipeline.collect import parse_num_gpus, read_link_options
from pipeline.experiment.measurement import Profile, SweptCollective, VariantName
from pipeline.experiment.outcomes import resolve_outcomes
from pipeline.experiment.record import Environment, Record
from pipeline.pages.display_tables import DisplayOptions
from pipeline.system.errors import EXIT_USAGE, CommandError
from pipeline.tables.build_tables import build_tables
from pipeline.tables.columns import Row

HOST_BOUND = Link(latency_s=25 * US, bandwidth_bytes_per_s=300e9)


def swept(num_gpus: int, step_us: float, link: Link = NVLINK, captured: bool = True, **fields: Any) -> Record:
    """A point whose step took so long, and whose sweep is exactly that of the link."""
    spec: dict[str, Any] = {"measure": "communication", "input": "synthetic", "windows": 6, **fields}
    times: dict[VariantName, list[float]] = {
        "plain": [920.0] * 6,
        "ddp_one": [900.0] * 6,
        "no_op_hook": [950.0] * 6,
        "ddp": [step_us] * 6,
    }
    collectives = tuple(make_collective(size, *[(50.0,) * num_gpus] * 2) for size in BUCKETS)
    found = make_communication(
        times,
        num_ranks=num_gpus,
        profile=Profile(num_steps=2, collectives=collectives),
        sweep_captured=captured,
        sweep=tuple(
            SweptCollective(num_bytes=size, times_ns=(round(all_reduce_time_s(link, num_gpus, size) * 1e9),))
            for size in SIZES
        ),
    )
    return make_communication_record(make_spec(strategy="ddp", num_gpus=num_gpus, **spec), found)


def predictions(*found: Record, link: Link | None = None, predict_to: int | None = None) -> list[Row]:
    outcomes = resolve_outcomes([record.spec for record in found], found, []).outcomes
    return build_tables(outcomes, link, predict_to=predict_to)["prediction"]


def test_four_gpus_are_predicted_from_two_and_compared_with_what_was_measured() -> None:
    row, *larger = predictions(swept(4, 1000 + 40 + 175 / 3 - 10), swept(2, 1000))
    assert (row["from_num_gpus"], row["num_gpus"], row["global_batch_size"]) == (2, 4, 512)
    assert row["latency_us"] == pytest.approx(5, rel=1e-3)
    assert row["link_gb_s"] == pytest.approx(300, rel=1e-3)
    assert row["predicted_step_time_s"] == pytest.approx((1040 + 175 / 3) * US, rel=1e-4)
    assert row["measured_step_time_s"] == pytest.approx((1030 + 175 / 3) * US)
    assert row["prediction_error"] == pytest.approx(10 / (1030 + 175 / 3), rel=1e-2)  # 0.9 % too long
    assert row["predicted_parallel_efficiency"] == pytest.approx(
        900 / (1040 + 175 / 3), rel=1e-4
    )  # of the faster alone
    assert row["all_hidden_step_time_s"] == pytest.approx(1000 * US)
    assert row["all_hidden_parallel_efficiency"] == pytest.approx(0.9)
    assert row["no_change_step_time_s"] == pytest.approx(1000 * US)  # of the two GPUs
    assert row["no_change_error"] == pytest.approx(1000 / (1030 + 175 / 3) - 1, rel=1e-4)  # 8.1 % too short
    (doubled,) = larger
    nothing = (doubled["measured_step_time_s"], doubled["prediction_error"], doubled["no_change_error"])
    assert (doubled["from_num_gpus"], doubled["num_gpus"], *nothing) == (4, 8, None, None, None)


@pytest.mark.parametrize(
    ("num_measured", "predict_to", "numbers"),
    [
        (2, None, [4]),
        (3, None, [6]),
        (4, None, [8]),
        (16, None, [32]),
        (2, 1024, [4, 8, 16, 64, 256, 1024]),
        (4, 1024, [8, 16, 64, 256, 1024]),
        (16, 1024, [32, 64, 256, 1024]),
        (4, 100, [8, 16, 64, 100]),
        (4, 6, [6]),
        (4, 4, []),
        (4, 2, []),
    ],
)
def test_twice_the_measured_number_is_predicted_and_more_only_if_asked_for(
    num_measured: int, predict_to: int | None, numbers: list[int]
) -> None:
    rows = predictions(swept(num_measured, 1100), predict_to=predict_to)
    assert [row["num_gpus"] for row in rows] == numbers


def test_processes_on_cpus_are_not_predicted() -> None:
    """Neither more of them, nor four from two that were both measured."""
    on_cpus = [swept(num, 1000, device="cpu") for num in (2, 4)]
    assert predictions(*on_cpus) == predictions(*on_cpus, predict_to=1024) == []
    assert "Prediction" not in report(*on_cpus)


def test_larger_numbers_take_longer_and_are_less_efficient() -> None:
    rows = predictions(swept(4, 1100), predict_to=1024)
    assert [row["num_gpus"] for row in rows] == [8, 16, 64, 256, 1024]
    times_s = [row["predicted_step_time_s"] for row in rows]
    efficiencies = [row["predicted_parallel_efficiency"] for row in rows]
    assert times_s == sorted(set(times_s))
    assert efficiencies == sorted(set(efficiencies), reverse=True)
    assert efficiencies[0] < 900 / 1100
    assert [row["num_nodes"] for row in rows] == [None] * 5
    # 8 GPUs: 2 x 14 x 5 us + 14/8 x 116.667 us; 4: 2 x 6 x 5 us + 6/4 x 116.667 us
    assert times_s[0] == pytest.approx((1100 + 80 + 0.25 * 350 / 3) * US, rel=1e-4)


def test_a_number_that_was_measured_is_not_among_the_larger_ones() -> None:
    rows = predictions(swept(2, 1000), swept(16, 1100), predict_to=1024)
    assert [row["num_gpus"] for row in rows] == [16, 32, 64, 256, 1024]


def test_a_given_link_is_noted_and_the_test_of_the_model_keeps_its_own() -> None:
    network = Link(latency_s=20 * US, bandwidth_bytes_per_s=25e9)
    test, *larger = predictions(swept(2, 1000), swept(4, 1100), link=network, predict_to=1024)
    assert (test["note"], round(test["link_gb_s"])) == (None, 300)
    assert {row["note"] for row in larger} == {"the link is given, not measured"}
    assert all((row["latency_us"], row["link_gb_s"]) == (pytest.approx(20), pytest.approx(25)) for row in larger)
    own = predictions(swept(2, 1000), swept(4, 1100), predict_to=1024)[1:]
    slower = [
        row["predicted_step_time_s"] - mine["predicted_step_time_s"] for row, mine in zip(larger, own, strict=True)
    ]
    assert len(slower) == 5
    assert min(slower) > 0


def test_a_captured_sweep_is_used_where_there_is_one_and_an_eager_one_is_said_to_be_the_hosts() -> None:
    eager, captured = swept(2, 1000, HOST_BOUND, captured=False), swept(2, 1000, batch_size_per_gpu=32)
    alone, both = predictions(eager), predictions(eager, captured)
    assert {round(row["latency_us"]) for row in alone} == {25}
    assert {"the latency is the host's" in str(row["note"]) for row in alone} == {True}
    assert {round(row["latency_us"]) for row in both} == {5}
    assert {row["note"] for row in both} == {None}


def test_points_that_differ_in_another_axis_are_predicted_apart() -> None:
    found = [swept(2, 1000), swept(4, 1100), swept(4, 1200, batch_size_per_gpu=32), swept(2, 1000, windows=12)]
    rows = [row for row in predictions(*found) if row["measured_step_time_s"] is not None]
    assert [(row["from_num_gpus"], row["num_gpus"]) for row in rows] == [(2, 4)]
    assert rows[0]["measured_step_time_s"] == pytest.approx(1100 * US)


def test_the_link_between_nodes_is_not_mixed_with_that_within_one() -> None:
    network = Link(latency_s=20 * US, bandwidth_bytes_per_s=25e9)
    found = [swept(4, 1100), swept(4, 3000, network, num_nodes=2, batch_size_per_gpu=32)]
    within, between = (next(row for row in predictions(*found) if row["batch_size_per_gpu"] == b) for b in (128, 32))
    assert (round(within["link_gb_s"]), round(between["link_gb_s"])) == (300, 25)
    assert (within["fit_worst_error"], between["fit_worst_error"]) == (pytest.approx(0, abs=1e-3),) * 2


def test_a_sweep_that_no_link_explains_leaves_rows_without_figures_and_a_reason() -> None:
    backward = Link(latency_s=100 * US, bandwidth_bytes_per_s=-3e12)  # larger messages take less time
    rows = predictions(swept(2, 1000, backward), swept(4, 1100, backward), predict_to=1024)
    assert [row["num_gpus"] for row in rows] == [4, 8, 16, 64, 256, 1024]
    figures = ["latency_us", "link_gb_s", "fit_worst_error"]
    figures += [name for name in rows[0].figures if name.startswith(("predicted_", "all_hidden_"))]
    assert len(figures) == 7
    assert {row[figure] for row in rows for figure in figures} == {None}
    assert [row["note"] for row in rows] == [
        f"no latency and bandwidth above 0 explain the sweep on {n}" for n in (2, *[4] * 5)
    ]
    assert (rows[0]["measured_step_time_s"], rows[0]["prediction_error"]) == (pytest.approx(1100 * US), None)


def test_points_that_were_not_measured_or_not_profiled_predict_nothing() -> None:
    spec = swept(4, 1100).spec
    unprofiled = make_communication_record(
        spec, make_communication({"plain": [1.0], "no_op_hook": [1.0], "ddp": [1.0]})
    )
    assert predictions(unprofiled) == predictions(make_record(spec, status="oom")) == []


def test_the_prediction_for_people() -> None:
    text = report(swept(2, 1000), swept(4, 1040 + 175 / 3 + 10), options=DisplayOptions(max_width=200))
    rows = table_of(text, "Prediction: weak scaling on more GPUs")
    assert [row["GPUs"] for row in rows] == ["4", "8"]
    first, second = rows
    steps = [first[f"{name} [ms]"] for name in ("none hidden", "no change", "all hidden", "measured")]
    assert steps == ["1.1", "1.000", "1.0", "1.108"]
    assert (first["none hidden efficiency [%]"], first["all hidden efficiency [%]"]) == ("82", "90")  # 900/1098.3
    assert (first["error [%]"], first["its error [%]"]) == ("-0.9", "-9.8")  # 1000/1108.3
    assert second["no change [ms]"] == "1.108"  # of the four
    assert [second[name] for name in ("measured [ms]", "error [%]", "its error [%]")] == [""] * 3
    assert not [name for name in first if "at most" in name or "at least" in name]


def test_the_narrow_table_has_both_predictions_with_their_errors() -> None:
    sizes = [
        swept(num, step_us, batch_size_per_gpu=size) for num, step_us in ((2, 1000), (4, 1108)) for size in (32, 64)
    ]
    first, *_ = table_of(report(*sizes), "Prediction: weak scaling on more GPUs")
    shown = ["from", "none hidden [ms]", "error [%]", "no change [ms]", "its error [%]", "measured [ms]"]
    assert list(first) == ["GPUs", "images per GPU", *shown]


def test_a_test_of_the_model_names_what_the_two_steps_do_not_share() -> None:
    places = [
        Environment(torch="2.11.0", git_commit=commit * 10, nodes=("node1",), boot_ids=(boot,))
        for commit, boot in (("a", "1"), ("b", "2"))
    ]
    found = [
        msgspec.structs.replace(swept(num_gpus, 1000), environment=place)
        for num_gpus, place in zip((2, 4), places, strict=True)
    ]
    measured, *larger = predictions(*found)
    assert measured["note"].split("; ") == [
        f"measured step with another commit ({'b' * 10} against {'a' * 10})",
        "measured step from another boot of its node",
    ]
    assert {row["note"] for row in larger} == {None}


def arguments(latency_us: float | None, bandwidth_gb_s: float | None) -> argparse.Namespace:
    return argparse.Namespace(link_latency_us=latency_us, link_gb_s=bandwidth_gb_s)


def test_a_link_is_given_in_microseconds_and_gigabytes() -> None:
    link = read_link_options(arguments(5.0, 25.0))
    assert link == pytest.approx((5e-6, 25e9))
    assert read_link_options(arguments(None, None)) is None


@pytest.mark.parametrize(
    ("latency_us", "bandwidth_gb_s"),
    [(5.0, None), (None, 25.0), (0.0, 25.0), (5.0, 0.0), (-5.0, 25.0), (5.0, -25.0), (math.nan, 25.0), (5.0, math.nan)],
)
def test_half_a_link_is_refused_with_the_cure(latency_us: float | None, bandwidth_gb_s: float | None) -> None:
    with pytest.raises(
        CommandError, match="--link-latency-us and --link-gb-s belong together and must be finite and above 0"
    ) as refused:
        read_link_options(arguments(latency_us, bandwidth_gb_s))
    assert refused.value.code == EXIT_USAGE


def test_collect_refuses_half_a_link_before_it_reads_anything(pipeline: Command, tmp_path: Path) -> None:
    done = pipeline("collect", tmp_path, "--link-latency-us", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "give both or neither" in done.stderr


@pytest.mark.parametrize("text", ["1", "0", "-4", "2.5", "many", "", "1000001", "9" * 5000])
def test_a_number_of_gpus_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="from 2 to 1,000,000"):
        parse_num_gpus(text)


def test_collect_predicts_as_far_as_it_is_asked_to(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", swept(2, 1000))
    command = ("collect", tmp_path / "x", "--no-write", "--only", "prediction", "--format", "json")
    for options, numbers in (((), [4]), (("--predict-to", "64"), [4, 8, 16, 64])):
        (found,) = json.loads(pipeline(*command, *options).stdout)["experiments"].values()
        assert [row["num_gpus"] for row in found["prediction"]] == numbers
