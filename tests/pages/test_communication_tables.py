"""What the rows of communication look like to people."""

from collections.abc import Sequence

import pytest
from communication_records import measured, point
from factories import (
    RESNET18_GRADIENT_BYTES,
    make_communication,
    make_communication_record,
    make_record,
    make_spec,
)
from rendered_tables import build, report, table_of

from pipeline.experiment.measurement import SplitPart, SweptCollective, Transfer, VariantName


def test_the_measured_tables_for_people() -> None:
    transfers = (Transfer(kind="gradients", calls_per_step=3, bytes_per_step=float(RESNET18_GRADIENT_BYTES)),)
    text = report(make_communication_record(point(), measured(transfers=transfers)), missing=[point(num_gpus=4)])
    first, absent = table_of(text, "Q3.1: five step times")
    assert (first["one GPU [ms]"], first["step [ms]"]) == ("0.800", "1.190")
    assert (absent["one GPU [ms]"], absent["step [ms]"], absent["note"]) == ("missing", "", "1")
    first, absent = table_of(text, "Q3.1: communication of one step, measured")
    assert first["exposed communication [us]"] == "40.0 (38.0 to 42.0)"
    assert (first["hidden [%]"], first["noise [us]"]) == ("60.0", "3.0")
    assert (absent["step [ms]"], absent["hidden [%]"]) == ("missing", "")
    assert "launch [us]" not in first, "no row has any"
    (bucket, _) = table_of(text, "Q3.2: bandwidth")
    assert (bucket["bus bandwidth [GB/s]"], bucket["of isolated [%]"]) == ("325.0", "80.0")
    (size,) = table_of(text, "Q3.2: the link's own limit")
    assert (size["size [MB]"], size["time [us]"]) == ("26.00", "64.0")
    first, absent = table_of(text, "Q3: what travels")
    assert first["gradients [MB]"] == first["by formula [MB]"] == "44.70"
    assert first["calls"] == "3"
    assert absent["gradients [MB]"] == "missing"
    assert not {"buffers [MB]", "parameters [MB]", "inputs [MB]"} & first.keys()


def test_a_sweep_names_its_collectives() -> None:
    sweep = [
        SweptCollective(num_bytes=8, times_ns=(4,), operation=operation) for operation in ("all_reduce", "all_gather")
    ]
    text = report(make_communication_record(point("fsdp"), measured(sweep=tuple(sweep))))
    rows = table_of(text, "Q3.2: the link's own limit, isolated collectives")
    assert [row["operation"] for row in rows] == ["all-gather", "all-reduce"]


def test_a_point_is_beside_its_communication_whatever_the_length_of_its_epoch() -> None:
    epochs = [make_record(make_spec(num_samples=480), (9, 8))]
    epochs += [make_record(make_spec(strategy="ddp", num_gpus=2, num_samples=480), (9, 5))]
    (row,) = build(*epochs, make_communication_record(point(), measured(40)))["Q3"]
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
    record = make_communication_record(point(), measured(*[exposed_us] * 6))
    (row,) = build(*epochs, record)["Q3"]
    assert row["exposed_comm_time_s"] == (None if seconds is None else pytest.approx(seconds))
    text = report(*epochs, record)
    (cells,) = table_of(text, "Q3: computation against communication")
    assert cells.get("exposed, measured [s]", "not shown") == shown
    (step,) = table_of(text, "Q3.1: communication of one step, measured")
    assert step["of step [%]"] == of_step
    is_noise = abs(exposed_us) <= 3
    assert ("not larger than its noise of 0.000588 s" in (row["note"] or "")) is is_noise
    assert ("DDP was faster than DDP with the no-op hook" in (row["note"] or "")) is (exposed_us == -10)


def test_a_subtraction_whose_interval_holds_0_is_printed_as_less_than_its_upper_end() -> None:
    """T(1) is 0.95 to 1.05 s and T(2) 0.4788 to 0.5292 s: T(2) - T(1)/2 is -0.0462 to 0.0542 s, 10.8 % of 0.504."""
    one_s = (0.95, 0.97, 0.99, 1.01, 1.03, 1.05)
    specs = (make_spec(windows=6, epochs=7), make_spec(strategy="ddp", num_gpus=2, windows=6, epochs=7))
    found = [make_record(specs[0], (9, *one_s)), make_record(specs[1], (9, *[0.504 * share for share in one_s]))]
    (cells,) = table_of(report(*found), "Q3: computation against communication")
    assert (cells["T(N) - T(1)/N [s]"], cells["of the epoch [%]"]) == (r"\<0.0542", r"\<10.8")
    (row,) = build(*found)["Q3"]
    assert row["comm_time_subtraction_s"] == pytest.approx(0.004), "the difference itself is in JSON"


def test_a_table_in_which_no_point_has_a_result_still_says_every_state() -> None:
    text = report(make_record(point(), status="oom", reason="out of GPU memory"), missing=[point("dp")])
    (five,) = table_of(text, "Q3.1: five step times")
    (one,) = table_of(text, "Q3.1: communication of one step")
    ledger = table_of(text, "Q3: what travels")
    (split,) = table_of(text, "Q3: DataParallel's step")
    assert (five["one GPU [ms]"], one["step [ms]"], split["step [ms]"]) == ("OOM", "OOM", "missing")
    assert [row["gradients [MB]"] for row in ledger] == ["OOM", "missing"]


def test_what_the_host_costs_is_a_column_where_a_row_has_it() -> None:
    found = [
        make_communication_record(point(batch_size_per_gpu=32), measured(*[130] * 6)),
        make_communication_record(point(), measured()),
    ]
    host, link = table_of(report(*found), "Q3.1: communication of one step, measured")
    assert (host["hidden [%]"], host["launch [us]"]) == ("", "30.0")
    assert (link["hidden [%]"], link["launch [us]"]) == ("60.0", "")


def test_a_dataparallel_table_for_people() -> None:
    parts = tuple(SplitPart(part=part, times_ns=(150_000_000,)) for part in ("scatter", "replicate"))
    transfers = (
        Transfer(kind="parameters", calls_per_step=1, bytes_per_step=44_695_848.0),
        Transfer(kind="inputs", calls_per_step=1, bytes_per_step=1_572_864 / 2),
        Transfer(kind="outputs", calls_per_step=2, bytes_per_step=7.5),
    )
    times: dict[VariantName, Sequence[float]] = {"plain": [700.0] * 6, "dp": [31_000.0] * 6}
    text = report(make_communication_record(point("dp"), make_communication(times, split=parts, transfers=transfers)))
    (row,) = table_of(text, "Q3: DataParallel's step")
    assert (row["step [ms]"], row["scatter [ms]"], row["sum of parts [ms]"]) == ("31.00", "150.0", "300.0")
    assert "gather [ms]" not in row
    (row,) = table_of(text, "Q3: what travels")
    assert (row["parameters [MB]"], row["inputs [MB]"]) == ("44.70", "0.786")
    assert "five step times" not in text, "they are DDP's"
