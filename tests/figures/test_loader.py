from typing import Any

import pytest
from factories import make_record, make_spec, with_rank_epochs
from rendered_tables import assert_row, build, cells, report, row_of, table_of

from pipeline.figures.loader import MAX_DATA_SHARE
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
