"""What a GPU waits for data, as epochs by hand have it; and the peaks of GPUs by the names that drivers report."""

from typing import Any

import pytest
from factories import make_record, make_spec, with_rank_epochs
from rendered_tables import assert_row, build, cells, report, row_of, table_of

from pipeline.figures.epoch_figures import MAX_DATA_SHARE, Peak, find_peak
from pipeline.plan.spec import Spec
from pipeline.records.record import Record
from pipeline.report.q2 import usable_rows
from pipeline.report.table import Row


def waiting(*data_s: float, time_s: float = 1.0, **fields: Any) -> Record:
    """A record of epochs of that time, in which the ranks wait so long for their own batches."""
    spec = make_spec(strategy="ddp" if len(data_s) > 1 else "single", num_gpus=len(data_s), **fields)
    return with_rank_epochs(
        make_record(spec, (2 * time_s, time_s)),
        lambda rank: {
            "data_time_ns": round(data_s[rank.rank] * 1e9),
            "compute_time_ns": round((time_s - data_s[rank.rank]) * 1e9),
        },
    )


def row_on(num_gpus: int, *found: Record) -> Row:
    return row_of(build(*found)["Q2"], num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("fields", "total"),
    [({}, 2), ({"num_workers": 0}, 0), ({"num_workers": 3}, 3), ({"input": "gpu"}, None)],
    ids=["two", "none: the process loads", "three", "no loader"],
)
def test_the_workers_are_counted_over_all_processes(fields: dict[str, Any], total: int | None) -> None:
    one, two = waiting(0.05, **fields), waiting(0.05, 0.05, **fields)
    assert row_on(1, one)["num_workers_total"] == total
    assert row_on(2, one, two)["num_workers_total"] == (None if total is None else 2 * total)
    dp = make_record(make_spec(strategy="dp", num_gpus=2, **fields))
    assert row_on(2, one, dp)["num_workers_total"] == total  # one process


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("share", [MAX_DATA_SHARE, 0.29])
def test_a_row_that_waits_for_the_loader_is_marked(share: float, num_workers: int) -> None:
    (row,) = build(waiting(share, num_workers=num_workers))["Q1"]
    assert row["data_share"] == row["data_time_s"] / row["epoch_time_s"] == share
    assert row["is_loader_bound"] is (share > MAX_DATA_SHARE)
    said = "loader-bound: the GPU that waits longest waits for data in 29 % of the epoch"
    assert row["note"] == (None if share == MAX_DATA_SHARE else said)


def test_the_wait_for_the_batch_of_another_rank_is_split_from_the_compute_time() -> None:
    """The first rank is the slowest by the clock and has its batches; the second keeps it waiting."""
    row = row_on(2, waiting(0.05), waiting(0.05, 0.45))
    note = "loader-bound: the GPU that waits longest waits for data in 45 % of the epoch"
    assert_row(row, data_time_s=0.05, data_share=0.45, batch_wait_s=0.4, is_loader_bound=True, note=note)
    rows = [row_on(num_gpus, waiting(0.05), waiting(0.05, 0.05)) for num_gpus in (1, 2)]
    assert cells(rows, "batch_wait_s") == [(None,), (0,)]


def test_without_a_loader_no_row_is_loader_bound_and_without_parts_it_is_not_known() -> None:
    own = build(waiting(0.4, input="gpu"))["Q1"]  # the device's own augmentation
    assert cells(own, "data_share", "is_loader_bound", "note") == [(0.4, False, None)]
    unknown = build(without_parts(make_spec(execution="graph")))["Q1"]
    assert cells(unknown, "data_share", "is_loader_bound") == [(None, None)]


def without_parts(spec: Spec, time_s: float = 1.0) -> Record:
    return with_rank_epochs(make_record(spec, (2 * time_s, time_s)), lambda _: {"data_time_ns": None})


def test_the_answer_of_q2_leaves_out_rows_of_which_nobody_knows_whether_they_are_loader_bound() -> None:
    known = [waiting(0.05), waiting(0.05, 0.05, time_s=0.6)]
    unknown = [
        without_parts(make_spec(execution="graph", batch_size_per_gpu=64)),
        without_parts(make_spec(execution="graph", batch_size_per_gpu=64, strategy="ddp", num_gpus=2), 0.6),
    ]
    rows = [row for row in build(*known, *unknown)["Q2"] if row["scaling"] == "weak"]
    assert {row["batch_size_per_gpu"]: row["speedup"] for row in rows if row["num_gpus"] == 2} == {
        128: pytest.approx(1 / 0.6),
        64: pytest.approx(1 / 0.6),
    }
    assert [row["batch_size_per_gpu"] for row in usable_rows(rows)] == [128]


def test_the_answer_of_q2_leaves_out_rows_that_are_loader_bound_or_have_such_a_baseline() -> None:
    free = [waiting(0.05, batch_size_per_gpu=32), waiting(0.05, 0.05, time_s=0.6, batch_size_per_gpu=32)]
    slow_point = [waiting(0.05, batch_size_per_gpu=64), waiting(0.3, 0.3, time_s=0.6, batch_size_per_gpu=64)]
    slow_baseline = [waiting(0.4, batch_size_per_gpu=512), waiting(0.05, 0.05, time_s=0.6, batch_size_per_gpu=512)]
    rows = [row for row in build(*free, *slow_point, *slow_baseline)["Q2"] if row["scaling"] == "weak"]
    assert [(row["num_gpus"], row["batch_size_per_gpu"]) for row in usable_rows(rows)] == [(2, 32)]
    assert {row["batch_size_per_gpu"]: row["note"] for row in rows if row["num_gpus"] == 2} == {
        32: None,
        64: "loader-bound: the GPU that waits longest waits for data in 50 % of the epoch",
        512: "baseline: loader-bound: the GPU that waits longest waits for data in 40 % of the epoch",
    }


def test_the_report_shows_the_workers_and_the_share_in_q1_and_q2() -> None:
    text = report(waiting(0.05), waiting(0.25, 0.05))
    assert cells(table_of(text, "Q1"), "workers", "waiting [%]") == [("2", "5.0")]
    assert cells(table_of(text, "Q2: weak")[-1:], "workers", "waiting [%]") == [("4", "25.0")]


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla V100-PCIE-16GB", "fp32", 14),
        ("NVIDIA A40", "bf16", 149.7),
        ("A40", "tf32", 74.8),
        ("NVIDIA A40", "fp32", 37.4),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "fp16", 312),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 PCIe", "tf32", 378),
        ("NVIDIA H100 PCIe", "fp32", 51),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "tf32", 494),
        ("NVIDIA H200", "tf32", 494),
        ("NVIDIA H200", "fp32", 67),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "bf16", 121),  # 242 with sparsity
        ("NVIDIA L4", "tf32", 60),
        ("NVIDIA L40S", "fp16", 362.05),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),  # products that accumulate in fp32
        ("NVIDIA B200", "bf16", 2250),  # 4,500 with sparsity
        ("NVIDIA B200", "tf32", 1100),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_in_the_precision_that_computes(
    gpu: str, precision: str, tflops: float
) -> None:
    assert find_peak(gpu, precision) == Peak(tflops, "data sheet")


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [
        ("Tesla V100-SXM2-32GB", "bf16"),  # it computes bf16 without its tensor cores
        ("Tesla V100-SXM2-32GB", "tf32"),
        ("Tesla V100S-PCIE-32GB", "fp16"),
        ("NVIDIA V100", "fp16"),  # of which kind?
        ("NVIDIA H100 NVL", "bf16"),
        ("NVIDIA H200 NVL", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA A400", "bf16"),
        ("NVIDIA A40 and NVIDIA H200", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("Tesla T4", "bf16"),
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA H200", ""),
        ("", "fp32"),
    ],
)
def test_an_unknown_gpu_or_precision_has_a_peak_only_if_it_is_stated(gpu: str, precision: str) -> None:
    assert (find_peak(gpu, precision), find_peak(gpu, precision, 165.2)) == (None, Peak(165.2, "stated"))


def test_a_stated_peak_replaces_that_of_the_data_sheet() -> None:
    assert find_peak("NVIDIA H200", "tf32", 400.0) == Peak(400.0, "stated")
