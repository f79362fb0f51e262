"""What the rows of communication look like to people."""

from collections.abc import Sequence

from communication_records import measured, point
from factories import (
    RESNET18_GRADIENT_BYTES,
    make_communication,
    make_communication_record,
    make_record,
)
from rendered_tables import report, table_of

from pipeline.experiment.measurement import SplitPart, Transfer, VariantName


def test_the_measured_tables_for_people() -> None:
    transfers = (Transfer(kind="gradients", calls_per_step=3, bytes_per_step=float(RESNET18_GRADIENT_BYTES)),)
    found = measured(transfers=transfers)
    text = report(make_communication_record(point(), found), missing=[point(num_gpus=4)])
    first, absent = table_of(text, "Q3.1: five step times")
    assert (first["plain_step_time_s"], first["step_time_s"]) == ("800.0 us", "1,190.0 us")
    assert (absent["plain_step_time_s"], absent["step_time_s"], absent["note"]) == ("missing", "-", "no record")
    first, absent = table_of(text, "Q3.1: communication of one step, measured")
    assert (first["exposed_comm_time_s"], first["exposed_comm_time_low_s"]) == ("40.0 us", "38.0 us")
    assert (first["hidden_share"], first["noise_floor_time_s"]) == ("60.0 %", "3.0 us")
    assert (absent["step_time_s"], absent["hidden_share"]) == ("missing", "-")
    assert "collective_launch_time_s" not in first, "no row has any"
    (bucket, _) = table_of(text, "Q3.2: bandwidth")
    assert (bucket["busbw_gb_s"], bucket["peak_busbw_gb_s"], bucket["link_share"]) == ("325", "406", "80.0 %")
    (size,) = table_of(text, "Q3.2: the link's own limit")
    assert (size["num_bytes"], size["time_s"], size["num_windows"]) == ("26000000", "64.0 us", "3")
    first, absent = table_of(text, "Q3: what travels")
    assert first["gradients_bytes_per_step"] == first["gradients_bytes_formula"] == "44,695,848"
    assert (first["gradients_calls_per_step"], first["buffers_bytes_per_step"]) == ("3", "0")
    assert absent["gradients_calls_per_step"] == "missing"
    assert not {"epoch_time_s", "test_accuracy", "parameters_bytes_per_step", "inputs_bytes_per_step"} & first.keys()


def test_windows_of_steps_are_not_called_epochs() -> None:
    text = report(make_communication_record(point(), measured()))
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    assert "medians over num_windows windows of steps." in sections["Q3.1: five step times"]
    assert "medians over num_windows windows of steps." in sections["Q3.1: communication of one step, measured"]
    assert "medians over num_windows windows of calls." in sections["Q3.2: the link's own limit, isolated all-reduces"]
    assert "timed epochs" not in text


def test_a_table_in_which_no_point_has_a_result_still_says_every_state() -> None:
    text = report(make_record(point(), status="oom", reason="out of GPU memory"), missing=[point("dp")])
    (five,) = table_of(text, "Q3.1: five step times")
    (one,) = table_of(text, "Q3.1: communication of one step")
    ledger = table_of(text, "Q3: what travels")
    (split,) = table_of(text, "Q3: DataParallel's step")
    assert (five["plain_step_time_s"], one["step_time_s"], split["plain_step_time_s"]) == ("OOM", "OOM", "missing")
    assert [row["gradients_calls_per_step"] for row in ledger] == ["OOM", "missing"]


def test_what_the_host_costs_is_a_column_where_a_row_has_it() -> None:
    found = [
        make_communication_record(point(batch_size_per_gpu=32), measured(*[130] * 6)),
        make_communication_record(point(), measured()),
    ]
    host, link = table_of(report(*found), "Q3.1: communication of one step, measured")
    assert (host["hidden_share"], host["collective_launch_time_s"]) == ("-", "30.0 us")
    assert (link["hidden_share"], link["collective_launch_time_s"]) == ("60.0 %", "-")


def test_a_dataparallel_table_for_people() -> None:
    parts = tuple(SplitPart(part=part, times_ns=(150_000_000,)) for part in ("scatter", "replicate"))
    transfers = (
        Transfer(kind="parameters", calls_per_step=1, bytes_per_step=44_695_848.0),
        Transfer(kind="inputs", calls_per_step=1, bytes_per_step=1_572_864 / 2),
        Transfer(kind="outputs", calls_per_step=2, bytes_per_step=7.5),
    )
    times: dict[VariantName, Sequence[float]] = {"plain": [700.0] * 6, "dp": [31_000.0] * 6}
    found = make_communication(times, split=parts, transfers=transfers)
    text = report(make_communication_record(point("dp"), found))
    (row,) = table_of(text, "Q3: DataParallel's step")
    assert (row["plain_step_time_s"], row["step_time_s"]) == ("700.0 us", "31,000.0 us")
    assert (row["scatter_time_s"], row["parts_time_s"]) == ("0.150", "0.300")
    assert "gather_time_s" not in row
    (row,) = table_of(text, "Q3: what travels")
    assert (row["parameters_bytes_per_step"], row["inputs_bytes_per_step"]) == ("44,695,848", "786,432")
    assert row["outputs_bytes_per_step"] == "7.5"
    assert "five step times" not in text, "they are DDP's"
