"""The first screen of a page: what limits the experiment, its answers as tiles, efficiency, and what to try next."""

import pytest
from factories import make_record, make_spec, resolved
from page_records import batch_records, every_question, scaling_records
from rendered_tables import published_tables

from pipeline.plan.point_label import OF_GPUS, Terms
from pipeline.records.record import Record
from pipeline.report.html import heat_map_of, suggestions_of, tiles_of, verdict_of
from pipeline.report.questions import answers_of, build_tables
from pipeline.report.table import Tables


def tables_of(*found: Record) -> Tables:
    return build_tables(resolved(*found).outcomes)


def test_a_cause_that_limits_most_configurations_is_the_verdict_and_says_what_to_do() -> None:
    found = verdict_of(published_tables("h200x4/scaling"), OF_GPUS)
    assert found is not None
    assert found.headline == "Data loading is the bottleneck, not the strategy."
    assert found.text == "It slows 18 of 25 configurations. Try input=gpu or more loader workers."


def test_without_a_common_cause_there_is_no_verdict() -> None:
    assert verdict_of(published_tables("h100x2/strategies"), OF_GPUS) is None
    assert verdict_of(tables_of(), OF_GPUS) is None


def test_each_answer_is_a_tile_and_what_was_not_asked_has_none() -> None:
    tiles = tiles_of(answers_of(tables_of(*every_question()), OF_GPUS))
    labels = [tile.label for tile in tiles]
    assert labels[0] == "Configuration to use"
    assert {"Best batch, one GPU", "Largest batch that fits", "Exposed communication"} <= set(labels)
    assert all(tile.figure and tile.line for tile in tiles)
    alone = tiles_of(answers_of(tables_of(make_record()), OF_GPUS))
    assert [tile.label for tile in alone] == ["The only configuration", "Only batch tried, one GPU"]


def test_the_first_tile_of_each_question_goes_before_the_second_of_another() -> None:
    tiles = tiles_of(answers_of(published_tables("h100x2/q4-study"), OF_GPUS))
    labels = [tile.label.partition(",")[0] for tile in tiles]
    assert labels == [
        *("Configuration to use", "Cheapest at 87.98 %", "Best batch", "Largest batch that fits", "Scaling"),
        *("Accuracy at batch 8", "Soonest at 87.98 %"),
    ]


def test_the_figure_of_a_tile_has_no_interval_inside_and_its_unit_apart() -> None:
    speed_up = next(
        tile
        for tile in tiles_of(answers_of(published_tables("h100x2/strategies"), OF_GPUS))
        if tile.label == "Speed-up on 2 GPUs"
    )
    assert (speed_up.figure, speed_up.unit, speed_up.interval) == ("1.92x", "", "1.92 to 1.93")


def test_a_badge_that_all_tiles_share_stands_on_none() -> None:
    tiles = tiles_of(answers_of(tables_of(*batch_records(), *scaling_records()), OF_GPUS))
    badged = [set(tile.badges) for tile in tiles if tile.badges]
    assert len(badged) < 2 or not set.intersection(*badged)


def test_what_to_try_is_grouped_with_the_range_of_the_measured_gains() -> None:
    found = suggestions_of(published_tables("h200x4/scaling"), OF_GPUS)
    assert [(one.num_configurations, one.limit, one.gain, one.command) for one in found] == [
        (12, "waiting for data", "", "--set input=gpu --merge"),
        (10, "DataParallel", "measured here: 1.65 to 4.46 times as fast", "--set strategy=ddp --merge"),
        (3, "kernel launches", "measured here: 2.9 to 3.57 times as fast", "--set execution=graph --merge"),
    ]


def test_the_first_screen_names_the_limits_of_processes() -> None:
    found = suggestions_of(published_tables("two-cores/smoke"), Terms("processes", "images"))
    assert [one.limit for one in found] == ["communication", "what several processes cost, not measured"]


def test_the_efficiency_on_more_nodes_has_a_row_of_its_own() -> None:
    found = heat_map_of(published_tables("h200x2/nodes-shared-memory"), OF_GPUS)
    assert found
    assert [(name, [cell.text for cell in cells]) for name, cells in found.rows] == [
        ("ddp, 1 node", ["93", "96"]),
        ("ddp, 2 nodes", ["77", "87"]),
    ]


def test_the_heat_map_has_the_efficiency_at_the_most_gpus_and_marks_what_no_answer_uses() -> None:
    found = heat_map_of(published_tables("h200x4/scaling"), OF_GPUS)
    assert found is not None
    assert (found.heading, [*found.batch_sizes]) == ("Efficiency on 4 GPUs [%]", ["32", "128", "512", "2,048", "8,192"])
    rows = {strategy: [(cell.text, cell.shade) for cell in cells] for strategy, cells in found.rows}
    assert rows["ddp"] == [("68 ○", ""), ("72 ○", ""), ("92 ○", ""), ("79 ○", ""), ("45 ○", "")]
    fit = heat_map_of(published_tables("h200x2/graph"), OF_GPUS)
    assert fit is not None
    assert [(cell.text, cell.shade) for _, cells in fit.rows for cell in cells] == [
        *(("81", "fair"), ("87", "good"), ("94", "good"), ("97", "good"))
    ]
    assert heat_map_of(tables_of(make_record()), OF_GPUS) is None


def test_what_tells_configurations_apart_has_a_row_and_a_size_without_a_baseline_no_column() -> None:
    """It had mixed points with a loader and without in one row, and columns of strong scaling's sizes."""
    found = heat_map_of(published_tables("h200x2/scaling"), OF_GPUS)
    assert found is not None
    assert [*found.batch_sizes] == ["32", "128", "512", "2,048", "8,192"]
    assert [(name, [cell.text for cell in cells]) for name, cells in found.rows] == [
        ("dp, dataloader", ["22", "37 ○", "59 ○", "40 ○", "55 ○"]),
        ("dp, images on the device", ["19", "20", "42", "97", "98"]),
        ("ddp, dataloader", ["71", "78 ○", "83 ○", "84 ○", "82 ○"]),
        ("ddp, images on the device", ["69", "73", "97", "99", "98"]),
    ]


@pytest.mark.parametrize("epoch_s", [1.0, 0.9])
def test_an_efficiency_that_cannot_be_is_blank_with_its_reason(epoch_s: float) -> None:
    specs = [make_spec(batch_size_per_gpu=size) for size in (32, 64)]
    several = [make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=size) for size in (32, 64)]
    records = [make_record(spec, (9, 2.0)) for spec in specs] + [make_record(spec, (9, epoch_s)) for spec in several]
    found = heat_map_of(tables_of(*records), OF_GPUS)
    assert found is not None
    ((_, cells),) = found.rows
    expected = ("100", "") if epoch_s == 1.0 else ("", "111% cannot be: noise, or a slow baseline")
    assert [(cell.text, cell.title if not cell.text else "") for cell in cells] == [expected] * 2


def test_what_no_change_helps_is_no_suggestion() -> None:
    tables = published_tables("h200x2/six-runs")
    assert "power" in {row["limit"] for row in tables["Q2"]}
    assert [one.change for one in suggestions_of(tables, OF_GPUS) if one.change.startswith("none")] == []
    assert suggestions_of(tables, OF_GPUS, "power") == []


def test_a_series_without_a_figure_has_no_row() -> None:
    """It had an empty row of DDP with evaluation, which has no configuration on one GPU beside it."""
    on_two = {"strategy": "ddp", "num_gpus": 2}
    records = [make_record(make_spec(batch_size_per_gpu=size, **axes)) for size in (32, 64) for axes in ({}, on_two)]
    found = heat_map_of(tables_of(*records, make_record(make_spec(**on_two, evaluate=True))), OF_GPUS)
    assert found is not None
    assert len(found.rows) == 1
