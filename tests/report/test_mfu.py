"""TFLOP/s of a GPU and MFU in tables and plots, worked by hand from FLOPs, samples and times."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from factories import (
    NOISY,
    ends,
    make_experiment,
    make_record,
    make_spec,
    resolved,
    timed,
    windowed,
    with_measurement,
)
from rendered_tables import assert_row, build, cells, report, row_of, table_of

from pipeline.records.record import Environment, Gpu, Record
from pipeline.report.html import build_plots
from pipeline.report.plots import Plot
from pipeline.report.questions import build_tables

FLOPS = 2_000_000_000  # of a sample: 50,000 samples in 1 s are 100 TFLOP/s
NAMES = {"TFLOP/s per GPU", "MFU [%]"}


def counted(record: Record, **fields: Any) -> Record:
    """The record with a count of its FLOPs."""
    return with_measurement(record, **{"flops_per_sample": FLOPS, "precision_used": "tf32", **fields})


def plots(*found: Record, peak_tflops: float | None = None) -> dict[str, Plot]:
    outcomes = resolved(*found).outcomes
    shown = build_plots(build_tables(outcomes, peak_tflops=peak_tflops), outcomes)
    return {plot.name: plot for plot in shown}


def test_a_rate_is_flops_times_samples_over_time_and_mfu_its_share_of_the_data_sheets_peak() -> None:
    (row,) = build(counted(timed(2.0, 128)))["Q1"]
    rate = {"flops_per_sample": FLOPS, "tflops_per_gpu": 50, "mfu": 50 / 494}
    assert_row(row, "MFU is of 494 TFLOP/s in tf32 (data sheet)", **rate, peak_tflops=494, peak_source="data sheet")


def test_the_ends_of_the_rate_come_from_those_of_the_time() -> None:
    (row,) = build(counted(windowed(NOISY, 128)))["Q1"]
    assert ends(row["tflops_per_gpu"])[::2] == pytest.approx((100 / 1.05, 100 / 0.95))
    assert ends(row["mfu"], 1 / 494)[::2] == pytest.approx((100 / 1.05, 100 / 0.95))


def test_on_several_gpus_the_rate_is_that_of_one() -> None:
    rows = build(counted(timed(2.0, 128)), counted(timed(1.25, 128, num_gpus=2)))["Q2"]
    assert_row(row_of(rows, num_gpus=2), tflops_per_gpu=40, mfu=40 / 494)


def test_the_report_shows_the_rate_and_says_what_mfu_is_of() -> None:
    text = report(counted(timed(2.0, 128)), counted(timed(1.0, 256)))
    assert cells(table_of(text, "Q1"), "TFLOP/s per GPU", "MFU [%]") == [("50.00", "10.1"), ("100.00", "20.2")]
    assert "MFU is of 494 TFLOP/s in tf32 (data sheet)" in " ".join(text.split())


def test_a_record_without_a_count_has_empty_cells_and_no_columns() -> None:
    record = timed(2.0, 128)
    keys = ("flops_per_sample", "tflops_per_gpu", "mfu", "peak_tflops", "peak_source", "note")
    assert cells(build(record, peak_tflops=100.0)["Q1"], *keys) == [(None,) * 6]
    assert [NAMES & {*table_of(report(one), "Q1")[0]} for one in (record, counted(record))] == [set(), NAMES]


@pytest.mark.parametrize("gpu", ["NVIDIA GeForce RTX 3090", ""])
def test_an_unknown_gpu_and_a_cpu_have_no_mfu_unless_their_peak_is_stated(gpu: str) -> None:
    environment = Environment(gpus=(Gpu(name=gpu),)) if gpu else Environment()
    record = counted(make_record(make_spec(), (9.0, 2.0), environment=environment))
    (unknown,), (stated,) = build(record)["Q1"], build(record, peak_tflops=200.0)["Q1"]
    assert_row(unknown, tflops_per_gpu=50, mfu=None, peak_source=None)
    said = f"no MFU: no peak of {gpu} in tf32 is known; collect --peak-tflops states one"
    assert (said in str(unknown["note"])) is bool(gpu)
    assert_row(stated, "MFU is of 200 TFLOP/s in tf32 (stated)", mfu=0.25, peak_tflops=200, peak_source="stated")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"flops_note": "FLOPs without mylib::op"}, "FLOPs without mylib::op"),
        ({"flops_per_sample": None, "flops_note": "FLOPs not counted: no"}, "FLOPs not counted: no"),
    ],
)
def test_what_the_count_lacks_is_a_note(fields: dict[str, Any], said: str) -> None:
    (row,) = build(counted(timed(2.0, 128), **fields))["Q1"]
    assert (said in str(row["note"]), row["mfu"] is None) == (True, "flops_per_sample" in fields)


def test_collect_takes_the_peak_that_is_stated(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", counted(timed(2.0, 128)))
    command = ("collect", tmp_path / "x", "--no-write", "--only", "Q1", "--format", "json")
    for options, expected in (((), 50 / 494), (("--peak-tflops", "200"), 0.25)):
        (found,) = json.loads(pipeline(*command, *options).stdout)["experiments"].values()
        assert [row["mfu"] for row in found["Q1"]] == [pytest.approx(expected)]
