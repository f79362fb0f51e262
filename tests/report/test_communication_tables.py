"""What the rows of communication look like to people."""

from collections.abc import Sequence

import pytest
from factories import (
    NOISY,
    RESNET18_GRADIENT_BYTES,
    comm_point,
    make_communication,
    make_communication_record,
    make_record,
    make_spec,
    measured,
    windowed,
)
from rendered_tables import build, cells, report, table_of

from pipeline.records.record import SplitPart, SweptCollective, Transfer, VariantName


def test_the_measured_tables_for_people() -> None:
    transfers = (Transfer(kind="gradients", calls_per_step=3, bytes_per_step=float(RESNET18_GRADIENT_BYTES)),)
    text = report(
        make_communication_record(comm_point(), measured(transfers=transfers)),
        missing=[comm_point(num_gpus=4)],
    )
    five = cells(table_of(text, "Q3.1: the step times behind it"), "one GPU [ms]", "step [ms]", "note")
    assert five == [("0.800", "1.190", ""), ("missing", "", "1")]
    rows = table_of(text, "Q3.1: communication of one step, measured")
    columns = ("step [ms]", "exposed communication [us]", "hidden [%]", "noise [us]")
    assert cells(rows, *columns) == [("1.190", "40.0 (38.0 to 42.0)", "60.0", "3.0"), ("missing", "", "", "")]
    assert "launch [us]" not in rows[0], "no row has any"
    buckets = cells(table_of(text, "Q3.2: bandwidth"), "bus bandwidth [GB/s]", "of isolated [%]")
    assert (len(buckets), buckets[0]) == (2, ("325.0", "80.0"))
    assert cells(table_of(text, "Q3.2: the link's own limit"), "size [MB]", "time [us]") == [("26.00", "64.0")]
    ledger = table_of(text, "Q3: what travels")
    assert cells(ledger, "gradients [MB]", "by formula [MB]", "calls") == [("44.70", "44.70", "3"), ("missing", "", "")]
    assert not {"buffers [MB]", "parameters [MB]", "inputs [MB]"} & ledger[0].keys()


def test_a_sweep_names_its_collectives() -> None:
    sweep = tuple(SweptCollective(num_bytes=8, times_ns=(4,), operation=name) for name in ("all_reduce", "all_gather"))
    text = report(make_communication_record(comm_point("fsdp"), measured(sweep=sweep)))
    rows = table_of(text, "Q3.2: the link's own limit, isolated collectives")
    assert cells(rows, "operation") == [("all-gather",), ("all-reduce",)]


def test_a_point_is_beside_its_communication_whatever_the_length_of_its_epoch() -> None:
    specs = (make_spec(num_samples=480), make_spec(strategy="ddp", num_gpus=2, num_samples=480))
    epochs = [make_record(spec, (9, time_s)) for spec, time_s in zip(specs, (8, 5), strict=True)]
    (row,) = build(*epochs, make_communication_record(comm_point(), measured(40)))["Q3"]
    assert row["exposed_comm_time_s"] == pytest.approx(2 * 40e-6), "480 images are two steps of 2 x 128"


@pytest.mark.parametrize(
    ("exposed_us", "seconds", "shown", "of_step"),
    [
        (-2.0, None, r"\<0.000588", r"\<0.261"),  # 196 steps of 3 us, and 3 us of a step of 1,148
        (2.0, 0.000392, r"\<0.000588", r"\<0.26"),
        (10.0, 0.00196, "0.002", "0.9"),
        (-10.0, None, "not shown", "-0.9"),
    ],
)
def test_measured_communication_below_its_noise_is_printed_as_less_than_that(
    exposed_us: float, seconds: float | None, shown: str, of_step: str
) -> None:
    """The noise of a step is 3 us. A negative time is none: JSON has null, and the table of a step its difference."""
    epochs = [make_record(make_spec(), (9, 8)), make_record(make_spec(strategy="ddp", num_gpus=2), (9, 5))]
    record = make_communication_record(comm_point(), measured(*[exposed_us] * 6))
    (row,) = build(*epochs, record)["Q3"]
    assert row["exposed_comm_time_s"] == (None if seconds is None else pytest.approx(seconds))
    text = report(*epochs, record)
    (epoch,) = table_of(text, "Q3: computation against communication")
    (step,) = table_of(text, "Q3.1: communication of one step, measured")
    assert (epoch.get("exposed, measured [s]", "not shown"), step["of step [%]"]) == (shown, of_step)
    words = ("not larger than its noise of 0.000588 s", "DDP was faster than DDP with the no-op hook")
    assert [word in (row["note"] or "") for word in words] == [abs(exposed_us) <= 3, exposed_us == -10]


def test_a_subtraction_whose_interval_holds_0_is_printed_as_less_than_its_upper_end() -> None:
    """T(1) is 0.95 to 1.05 s and T(2) 0.4788 to 0.5292 s: T(2) - T(1)/2 is -0.0462 to 0.0542 s, 10.8 % of 0.504."""
    found = [windowed(NOISY, 128), windowed([0.504 * share for share in NOISY], 128, 2)]
    rows = table_of(report(*found), "Q3: computation against communication")
    assert cells(rows, "T(N) - T(1)/N [s]", "of the epoch [%]") == [(r"\<0.0542", r"\<10.8")]
    (row,) = build(*found)["Q3"]
    assert row["comm_time_subtraction_s"] == pytest.approx(0.004), "the difference itself is in JSON"


def test_a_table_in_which_no_point_has_a_result_still_says_every_state() -> None:
    text = report(
        make_record(comm_point(), status="oom", reason="out of GPU memory"),
        missing=[comm_point("dp")],
    )
    for heading, column, states in (
        ("Q3.1: the step times behind it", "one GPU [ms]", ["OOM"]),
        ("Q3.1: communication of one step", "step [ms]", ["OOM"]),
        ("Q3: what travels", "gradients [MB]", ["OOM", "missing"]),
        ("Q3: DataParallel's step", "step [ms]", ["missing"]),
    ):
        assert [row[column] for row in table_of(text, heading)] == states


def test_what_the_host_costs_is_a_column_where_a_row_has_it() -> None:
    found = [
        make_communication_record(comm_point(batch_size_per_gpu=32), measured(*[130] * 6)),
        make_communication_record(comm_point(), measured()),
    ]
    rows = table_of(report(*found), "Q3.1: communication of one step, measured")
    assert cells(rows, "hidden [%]", "launch [us]") == [("", "30.0"), ("60.0", "")]


def test_a_dataparallel_table_for_people() -> None:
    parts = tuple(SplitPart(part=part, times_ns=(150_000_000,)) for part in ("scatter", "replicate"))
    transfers = (
        Transfer(kind="parameters", calls_per_step=1, bytes_per_step=44_695_848.0),
        Transfer(kind="inputs", calls_per_step=1, bytes_per_step=1_572_864 / 2),
        Transfer(kind="outputs", calls_per_step=2, bytes_per_step=7.5),
    )
    times: dict[VariantName, Sequence[float]] = {"plain": [700.0] * 6, "dp": [31_000.0] * 6}
    text = report(
        make_communication_record(comm_point("dp"), make_communication(times, split=parts, transfers=transfers))
    )
    (row,) = table_of(text, "Q3: DataParallel's step")
    assert (row["step [ms]"], row["scatter [ms]"], row["sum of parts [ms]"]) == ("31.00", "150.0", "300.0")
    assert "gather [ms]" not in row
    assert cells(table_of(text, "Q3: what travels"), "parameters [MB]", "inputs [MB]") == [("44.70", "0.786")]
    assert "the step times behind it" not in text, "they are DDP's"
