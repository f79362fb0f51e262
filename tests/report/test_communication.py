"""Q3: rows, claims and tables: what is measured, what subtraction says, and what is noise."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from factories import (
    LARGE,
    NOISY,
    US,
    assert_says,
    comm_point,
    ends,
    five_times,
    high,
    low,
    make_collective,
    make_communication,
    make_communication_record,
    make_measurement,
    make_record,
    make_script_spec,
    make_spec,
    measured,
    profile,
    steady,
    timed,
    windowed,
    with_epochs,
    with_measurement,
    with_rank_epochs,
)
from rendered import assert_row, build, cells, claims_of, report, table_of

from pipeline.figures.intervals import Estimate
from pipeline.plan.point_label import OF_GPUS
from pipeline.records.record import Communication, Record, SplitPart, VariantName
from pipeline.report.claims import Tile, is_fit_for_answer
from pipeline.report.next_step import NOTHING_FOUND
from pipeline.report.q3 import split_exposed
from pipeline.report.table import Row


def q3(*found: Record) -> Tile:
    (claim,) = claims_of(*found)["Q3"]
    return claim


@pytest.mark.parametrize(
    ("exposed_us", "computed_in", "share"),
    [
        ((20_000,) * 6, "tf32", 20 / 21.15),  # of the step; 391 of them take 7.82 of 8.5 s
        ((22_000,) * 6, "tf32", None),  # 8.6 s: no part of an epoch of 8.5 s
        ((23_000,) * 6, "tf32", None),  # of a step that differs
        ((20_000,) * 6, "fp32", None),  # of an epoch in another precision than the step
    ],
)
def test_a_measured_share_is_never_above_1_and_of_the_same_training(
    exposed_us: tuple[float, ...], computed_in: str, share: float | None
) -> None:
    """An epoch of DDP takes 8.5 s. Communication was measured apart, with 391 steps an epoch."""
    ddp = make_record(make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=64), (9, 8.5))
    claim = q3(
        timed(10.2, 64),
        with_measurement(with_rank_epochs(ddp, lambda _: {"data_time_ns": 0}), precision_used=computed_in),
        make_communication_record(comm_point(batch_size_per_gpu=64), measured(*exposed_us)),
    )
    by_subtraction = "Subtraction gives 40.0 % of the epoch, ddp, 64 per GPU"
    said = f"{by_subtraction} ({100 * share:.1f} % measured): one $GPU has a cost" if share else ""
    assert claim.warning.startswith(said)
    assert ("Subtraction" in claim.warning) is (share is not None)


@pytest.mark.fault("F63")
@pytest.mark.parametrize("in_step", [True, False], ids=["step", "epochs"])
@pytest.mark.parametrize("one_gpu_s", [12, 20], ids=["subtracted", "nothing to subtract"])
def test_collectives_of_the_users_own_are_said_and_not_to_be_measured_again(one_gpu_s: float, in_step: bool) -> None:
    step = make_communication_record(comm_point(), measured()) if in_step else timed(10, 128, 2)
    records = [timed(one_gpu_s, 128), *([timed(10, 128, 2)] if in_step else [])]
    claim = q3(*records, with_measurement(step, own_collectives=("all_gather",)))
    assert (claim.is_answer, claim.command) == (one_gpu_s == 12, "")
    assert "the model or its loss calls collectives itself, in every measured step" in claim.in_words_of(OF_GPUS).text


def test_what_only_waiting_rows_subtract_is_no_answer() -> None:
    specs = [make_spec(), make_spec(strategy="ddp", num_gpus=2)]
    found = [make_record(spec, measurement=make_measurement(spec, (9, 5), compute_share=0.5)) for spec in specs]
    (row,) = build(*found)["Q3"]
    assert row["comm_time_subtraction_s"] is not None
    assert (row["ring_bytes_per_epoch"] is None, row["bandwidth_subtraction_gb_s"]) == (False, None)
    claim = q3(*found)
    assert not claim.is_answer
    assert claim.command.endswith("--grid communication")


@pytest.mark.parametrize(("two_gpus_s", "is_said"), [(0.504, False), (0.9, True)])
def test_subtraction_inside_its_noise_is_no_answer(two_gpus_s: float, is_said: bool) -> None:
    found = [windowed(NOISY, 128), windowed([two_gpus_s * share for share in NOISY], 128, 2)]
    (row,) = build(*found)["Q3"]
    time_s = row["comm_time_subtraction_s"]
    assert (time_s.low, time_s.high) == pytest.approx((two_gpus_s * 0.95 - 1.05 / 2, two_gpus_s * 1.05 - 0.95 / 2))
    assert (time_s.noise is None, row["comm_share_subtraction"].noise is None) == (is_said, is_said)
    assert is_fit_for_answer(row, "comm_time_subtraction_s") is is_said
    assert q3(*found).is_answer is is_said


def test_the_row_of_a_subtraction_is_named_with_its_gpus() -> None:
    assert q3(timed(10, 128), timed(6, 128, 2), timed(4, 128, 4)).more.startswith("ddp 4 GPUs, 128 per")


def on_two_cpus(num_processes: int, *exposed_us: float) -> Record:
    point = comm_point(num_gpus=num_processes, device="cpu", precision="fp32")
    found = make_communication_record(point, measured(*exposed_us))
    return msgspec.structs.replace(found, environment=msgspec.structs.replace(found.environment, num_cpus=2))


def test_a_share_of_processes_that_share_cpus_is_no_answer() -> None:
    two, four = on_two_cpus(2, *[100] * 6), on_two_cpus(4, *[400] * 6)
    both, alone = q3(two, four), q3(four)
    assert (both.line, both.warning) == ("on 2 $GPUs", "1 of 2 measured shares left out: 1 with shared CPUs")
    assert alone.line == "no measured share can be used: 1 with shared CPUs"
    assert not alone.is_answer
    by_subtraction = q3(timed(10, 128), timed(8, 128, 2), four)
    assert (by_subtraction.label, by_subtraction.figure) == ("Communication, by subtraction", "38")
    assert by_subtraction.warning.endswith(
        "does not shrink with N; 1 of 1 measured shares left out: 1 with shared CPUs"
    )


def test_exposed_communication_that_may_be_none_is_said() -> None:
    claim = q3(make_communication_record(comm_point(), measured(-30, 10, 30, 40, 60, 90)))
    assert (claim.more.startswith("35 us of "), "may be 0" in claim.badges) == (True, True)


def test_ddp_faster_than_without_all_reduces_is_not_called_noise() -> None:
    claim = q3(make_communication_record(comm_point(), measured(-61, -61, -61, -61, -61, -61)))
    assert (claim.figure, claim.line, "noise" in claim.warning) == ("", "none shown on 2 $GPUs", False)
    assert claim.warning.startswith("1 of 1 show a step faster than without its collectives")


ONE_GPU, TWO_GPUS = make_spec(), make_spec(strategy="ddp", num_gpus=2)


def exposed_row(found: Communication, **spec: Any) -> Row:
    (row,) = build(make_communication_record(comm_point(**spec), found))["communication"]
    return row


def test_the_figures_of_a_step_by_hand() -> None:
    """Rounds drift by up to 500 us, and no difference does."""
    row = exposed_row(measured())
    assert_row(
        row,
        plain_step_time_s=800 * US,
        ddp_one_step_time_s=820 * US,
        no_sync_step_time_s=1100 * US,  # 850 and a drift of 250 at the median
        no_op_hook_step_time_s=1150 * US,
        step_time_s=1190 * US,
        noise_floor_time_s=3 * US,
        comm_time_s=100 * US,  # (80 + 20) us in both steps
        hidden_share=0.6,  # 1 - 40/100
        collective_launch_time_s=None,
        straggler_wait_time_s=12.5 * US,  # of 5 + 5 and 10 + 5
        buffer_comm_time_s=7 * US,
        traced_exposed_comm_time_s=40 * US,
        **{"status": "ok", "n": 1, "num_windows": 6, "note": None},
    )
    assert ends(row["ddp_overhead_time_s"], US) == pytest.approx((50, 50, 50))
    assert ends(row["exposed_comm_time_s"], US) == pytest.approx((38, 40, 42))
    assert ends(row["collectives_time_s"], US) == pytest.approx((68, 70, 72))  # 30 for the buffers
    times = five_times()
    del times["no_collectives"]
    assert exposed_row(make_communication(times))["collectives_time_s"] is None


def test_the_spread_between_runs_of_a_step_and_of_its_exposed_communication() -> None:
    records = [
        make_communication_record(comm_point(repeat=number), steady(*[exposed_us] * 6))
        for number, exposed_us in enumerate((63, 148))
    ]
    for found, spread_s in ((records, 85 * US), (records[:1], None)):
        (row,) = build(*found)["communication"]
        assert_row(row, run_spread_s=spread_s, exposed_comm_time_run_spread_s=spread_s)


def test_where_more_is_exposed_than_the_link_takes_the_rest_is_the_hosts() -> None:
    row = exposed_row(measured(130, 130, 130, 130, 130, 130))
    assert_row(row, collective_launch_time_s=30 * US, hidden_share=None)  # 130 - 100
    assert_says(row["note"], "more time is exposed than the transfer takes", "host")


@pytest.mark.parametrize(
    ("exposed_s", "comm_s", "floor_s", "hidden"),
    [
        (0.25, 1.0, None, 0.75),
        (0.25, 1.0, 0.2, 0.75),
        (0.25, 1.0, 0.9, None),  # noise has no share
        (0.25, 1.0, 1.0, None),
        (-0.5, 1.0, 2.0, None),
        (1.5, 1.0, 2.0, None),
        (2.5, 1.0, 2.0, None),
        (1.0, 1.0, None, 0.0),
        (0.0, 1.0, None, 1.0),
        (-0.1, 1.0, 0.2, None),
        (-0.1, 1.0, None, None),  # below 0, and not known to be noise
        (-0.3, 1.0, 0.2, None),
        (1.5, 1.0, None, None),
        (None, 1.0, 0.1, None),
        (0.5, None, 0.1, None),
    ],
)
def test_exposed_communication_is_split_at_what_the_link_takes(
    exposed_s: float | None, comm_s: float | None, floor_s: float | None, hidden: float | None
) -> None:
    found = split_exposed(None if exposed_s is None else Estimate(exposed_s), comm_s, floor_s)
    assert (found["hidden_share"], found["collective_launch_time_s"]) == (hidden, None)  # of no interval
    assert low(found["hidden_share"]) is high(found["hidden_share"]) is None


@pytest.mark.parametrize(("low_s", "launch_s"), [(0.9, None), (1.0, None), (1.1, 0.5)])
def test_a_launch_time_is_stated_only_where_more_is_surely_exposed_than_the_link_takes(
    low_s: float, launch_s: float | None
) -> None:
    assert split_exposed(Estimate(1.5, low_s, 2.0), 1.0, None) == {
        "hidden_share": None,
        "collective_launch_time_s": launch_s,
    }


@pytest.mark.parametrize(
    ("low_s", "exposed_s", "high_s", "share"),
    [
        (0.2, 0.25, 0.4, (0.6, 0.75, 0.8)),
        (-0.1, 0.25, 1.5, (0.0, 0.75, 1.0)),  # cut to what a share may be
        (1.2, 1.5, 1.8, (None, None, None)),
    ],
)
def test_the_hidden_share_has_the_interval_of_exposed_communication(
    low_s: float, exposed_s: float, high_s: float, share: tuple[float | None, ...]
) -> None:
    hidden = split_exposed(Estimate(exposed_s, low_s, high_s), 1.0, None)["hidden_share"]
    assert (low(hidden), hidden, high(hidden)) == pytest.approx(share)


@pytest.mark.parametrize(("exposed_us", "is_noise"), [(2.9, True), (-2.9, True), (3.1, False), (-3.1, False)])
def test_exposed_communication_inside_the_noise_floor_is_said(exposed_us: float, is_noise: bool) -> None:
    row = exposed_row(measured(*[exposed_us] * 6, again_us=(-3, 1, 0, 0, -1, 2)))
    assert row["exposed_comm_time_s"] == pytest.approx(exposed_us * US)
    assert ("exposed communication is not larger than the noise" in (row["note"] or "")) == is_noise


def test_fewer_than_six_windows_give_no_interval_and_say_so() -> None:
    row = exposed_row(measured(38, 39, 40, 41, 42), windows=5)
    assert ends(row["exposed_comm_time_s"], US) == (None, pytest.approx(40), None)
    assert (low(row["ddp_overhead_time_s"]), high(row["ddp_overhead_time_s"])) == (None, None)
    assert_row(row, noise_floor_time_s=None, note="an interval needs 6 windows, got 5")


def test_without_a_profile_the_reason_stands_in_every_row_that_lacks_it() -> None:
    limit = "the limit in pipeline.communication.profiling; raise it"
    note = f"rank 0: no profile: the trace of a rank is larger than 400 bytes, {limit}"
    tables = build(make_communication_record(comm_point(), measured(profile=None, notes=(note,))))
    (row,), (ledger,) = tables["communication"], tables["transfers"]
    lacking = ("comm_time_s", "hidden_share", "collective_launch_time_s", "straggler_wait_time_s", "buffer_comm_time_s")
    assert_row(row, exposed_comm_time_s=40 * US, note=note, **dict.fromkeys(lacking))
    assert_row(ledger, gradients_bytes_per_step=None, note=note)
    assert tables["bandwidth"] == []


def test_a_profile_without_gradients_gives_no_communication_time_rather_than_zero() -> None:
    collectives = (make_collective(LARGE, (80, 90), (100, 80), kind="batchnorm_statistics"),)
    other = msgspec.structs.replace(profile(), collectives=collectives, comm_ns=(0, 0), overlap_ns=(0, 0))
    row = exposed_row(measured(profile=other))
    lacking = ("comm_time_s", "hidden_share", "straggler_wait_time_s", "traced_exposed_comm_time_s")
    assert_row(row, "profile", "none of the collectives", "strategy", **dict.fromkeys(lacking))


@pytest.mark.parametrize("status", ["oom", "failed", "missing"])
@pytest.mark.parametrize(
    ("strategy", "tables"), [("ddp", ("communication", "transfers")), ("dp", ("transfers", "split"))]
)
def test_a_point_without_a_result_has_rows_with_nulls_its_state_and_a_reason(
    strategy: str, tables: tuple[str, ...], status: Any
) -> None:
    spec = comm_point(strategy)
    found = [] if status == "missing" else [make_record(spec, status=status, reason="it ended badly")]
    built = build(*found, missing=[spec])
    note = "no record" if status == "missing" else "it ended badly"
    for (row,) in (built[name] for name in tables):
        figures = [row[column] for column in row.figures if column.endswith(("_s", "_share", "_step", "_formula"))]
        assert figures == [None] * len(figures)
        assert_row(row, status=status, n=0, note=note)
    assert (built["bandwidth"], built["sweep"], built["prediction"], len(built["oom"])) == ([], [], [], status == "oom")


def test_communication_points_are_in_no_table_of_epochs() -> None:
    found = [make_communication_record(comm_point(num_gpus=n), measured()) for n in (2, 4)]
    dp = make_communication({"plain": [700.0] * 6, "dp": [31_000.0] * 6})
    tables = build(*found, make_communication_record(comm_point("dp"), dp), missing=[comm_point(num_gpus=8)])
    assert not any(tables[name] for name in ("Q1", "Q2", "Q3", "Q4", "oom"))
    assert {name: cells(tables[name], "strategy", "num_gpus") for name in ("communication", "transfers", "split")} == {
        "communication": [("ddp", 2), ("ddp", 4), ("ddp", 8)],
        "transfers": [("ddp", 2), ("ddp", 4), ("dp", 2), ("ddp", 8)],
        "split": [("dp", 2)],
    }


def test_the_parts_of_dataparallel_by_hand() -> None:
    parts = (
        SplitPart(part="scatter", times_ns=(1_000_000, 3_000_000, 2_000_000)),
        SplitPart(part="replicate", times_ns=(20_000_000,)),
        SplitPart(part="backward", times_ns=(9_000_000, 11_000_000)),
    )
    found = make_communication({"plain": [700.0] * 6, "dp": [31_000.0] * 6, "dp_again": [31_000.0] * 6}, split=parts)
    (row,) = build(make_communication_record(comm_point("dp"), found))["split"]
    parts_s = {"scatter_time_s": 0.002, "replicate_time_s": 0.02, "backward_time_s": 0.01, "gather_time_s": None}
    assert_row(row, plain_step_time_s=700 * US, step_time_s=0.031, parts_time_s=0.032, **parts_s)


def with_own(record: Record, *names: str) -> Record:
    return with_measurement(record, own_collectives=names)


@pytest.mark.fault("F63")
@pytest.mark.parametrize("in_epochs", [True, False], ids=["seen in both", "seen in the step alone"])
def test_a_collective_of_the_users_own_leaves_no_figure_of_communication_and_no_advice(in_epochs: bool) -> None:
    """The wrapper takes 100 us of a step of 1,190 and communication 40: both are limits."""
    single, double = make_record(ONE_GPU, (9, 0.2)), make_record(TWO_GPUS, (9, 0.245))
    step = make_communication_record(comm_point(), measured(profile=profile()))
    told = build(single, double, step)
    assert told["communication"][0]["limit"] == told["Q2"][1]["limit"] == "the wrapper"
    assert None not in cells(told["Q3"], "exposed_comm_time_s", "bandwidth_subtraction_gb_s")[0]
    assert told["prediction"]
    found = build(
        single, with_own(double, "all_gather") if in_epochs else double, with_own(step, "all_gather", "scatter")
    )
    (row,), (of_epoch,), of_speedup = found["communication"], found["Q3"], found["Q2"][1]
    keys = {key for key, value in told["communication"][0].figures.items() if value is not None and "comm_" in key}
    keys |= {"exposed_comm_share", "hidden_share", "wrapper_time_s", "ddp_overhead_time_s", "collectives_time_s"}
    assert_row(row, **dict.fromkeys(keys), step_time_s=1190 * US, plain_step_time_s=800 * US)
    assert_row(of_epoch, exposed_comm_time_s=None, bandwidth_subtraction_gb_s=None)
    assert (row["next_step"], of_speedup["next_step"], found["prediction"]) == (NOTHING_FOUND, NOTHING_FOUND, [])
    for one in (row, of_epoch, of_speedup):
        assert_says(one["note"], "calls collectives itself (all_gather", "in every timed step")


@pytest.mark.fault("F63")
@pytest.mark.parametrize("in_epochs", [True, False], ids=["seen in both", "seen in the step alone"])
def test_collectives_of_the_users_own_that_the_reference_leaves_out_count_as_communication(in_epochs: bool) -> None:
    single, double = make_record(ONE_GPU, (9, 0.2)), make_record(TWO_GPUS, (9, 0.245))
    step = make_communication_record(comm_point(), measured(profile=profile()))
    told = build(single, double, step)
    counted = make_communication_record(comm_point(), measured(profile=profile(), counts_own=True))
    found = build(single, with_own(double, "all_gather") if in_epochs else double, with_own(counted, "all_gather"))
    for name in ("communication", "Q3"):
        assert cells(found[name], "exposed_comm_time_s") == cells(told[name], "exposed_comm_time_s")
        assert None not in cells(found[name], "exposed_comm_time_s")[0]


@pytest.mark.fault("F63")
def test_a_collective_that_the_epochs_alone_record_leaves_them_no_share_either() -> None:
    single, double = make_record(ONE_GPU, (9, 0.2)), make_record(TWO_GPUS, (9, 0.245))
    assert build(single, double)["Q2"][1]["limit"] == "several GPUs"
    of_step = [make_communication_record(comm_point(), measured()), make_record(comm_point(), status="failed")]
    for step in ([], *([one] for one in of_step)):
        found = build(single, with_own(double, "all_gather"), *step)
        assert (found["Q3"][0]["exposed_comm_time_s"], found["Q2"][1]["next_step"]) == (None, NOTHING_FOUND)
        assert_says(found["Q3"][0]["note"], "calls collectives itself (all_gather)")


@pytest.mark.fault("F64")
def test_a_step_unlike_that_of_the_epochs_gives_them_no_share_and_no_advice() -> None:
    """Epochs take 4 s of 196 steps, 19.1 ms each without the wait for data; the measured step takes 1.19 ms."""
    step = make_communication_record(comm_point(), measured())
    found = build(make_record(ONE_GPU, (9, 6)), make_record(TWO_GPUS, (9, 4)), step)
    assert found["communication"][0]["limit"] == "the wrapper"  # a share of its own step
    assert_row(found["Q2"][1], next_step=NOTHING_FOUND, limit_share=None)
    for row in (found["Q2"][1], found["Q3"][0]):
        assert_says(
            row["note"], "takes 1.19 ms, that of the epochs 19.1 ms without", "no share of the epochs and no advice"
        )


@pytest.mark.fault("F64")
@pytest.mark.parametrize(
    ("steps", "ratio", "is_told"),
    [
        *((196, 0.88, False), (196, 0.92, True), (196, 1.08, True), (196, 1.12, False)),
        *((2.5, 0.92, True), (3, 0.92, True), (3, 0.88, False), (2.5, 1.08, True), (2.5, 1.12, False)),
    ],
)
def test_a_share_holds_for_a_step_that_differs_by_at_most_a_tenth(steps: float, ratio: float, is_told: bool) -> None:
    """An epoch of 640 samples has three steps. The last one has half a batch, and takes half the time of one or all."""
    epoch_s = steps * 1_190 * US / ratio / 0.9375  # of which data takes the rest
    size: dict[str, Any] = {} if steps == 196 else {"num_samples": 640}
    specs = [msgspec.structs.replace(spec, **size) for spec in (ONE_GPU, TWO_GPUS)]
    epochs = [make_record(spec, (9, time_s)) for spec, time_s in zip(specs, (1, epoch_s), strict=True)]
    row = build(*epochs, make_communication_record(comm_point(**size), measured()))["Q2"][1]
    assert (row["limit"] == "the wrapper", "no share of the epochs" not in (row["note"] or "")) == (is_told, is_told)


@pytest.mark.fault("F64")
@pytest.mark.parametrize("items_per_sample", [1, 1000], ids=["samples", "tokens that the script names"])
@pytest.mark.parametrize(("updates_ms", "said"), [(1.19, ""), (2.38, "takes 1.19 ms, that of the epochs 2.38 ms: no")])
def test_the_updates_of_a_script_wait_for_data_also_where_their_communication_is_measured(
    updates_ms: float, said: str, items_per_sample: int
) -> None:
    """Windows of ten updates. An epoch of 50,000 tokens has a thousandth of the updates of one of 50,000 samples."""
    timed, step = (
        make_script_spec(strategy="ddp", num_gpus=2, measure=measure) for measure in ("epochs", "communication")
    )
    items = timed.global_batch_size * items_per_sample
    waiting = make_record(timed, measurement=make_measurement(timed, (9, updates_ms / 100), compute_share=0.5))
    windows = with_epochs(waiting, lambda _: {"num_timed_updates": 10, "num_samples": 10 * items})
    found = build(windows, make_communication_record(step, measured()))
    (row,), (exposed,) = found["Q3"], found["communication"]
    assert said in row["note"]
    assert ("no share of the epochs" in row["note"]) is bool(said)
    steps = timed.num_samples / items
    assert row["exposed_comm_time_s"] == pytest.approx(steps * exposed["exposed_comm_time_s"])
    assert row["steps_per_epoch"] == pytest.approx(steps)


def in_repeats(exposed_us: Sequence[float]) -> list[Record]:
    """A repeat for each value, which its rounds hold within a microsecond."""
    return [
        make_communication_record(
            comm_point(repeat=number),
            measured(*[value - 1, value, value, value, value, value + 1]),
        )
        for number, value in enumerate(exposed_us)
    ]


def test_an_interval_is_over_repeats_where_there_are_six_and_each_counts_once() -> None:
    (row,) = build(*in_repeats([100, 200, 200, 200, 200, 300]))["communication"]
    assert ends(row["exposed_comm_time_s"], US) == pytest.approx((100, 200, 300))
    assert (row["interval_over"], row["num_windows"]) == ("repeats", 36)
    (row,) = build(*in_repeats([100, 200]))["communication"]
    assert row["interval_over"] == "windows"
    assert row["note"].startswith("range within the windows of 2 repeats together")


@pytest.mark.parametrize(
    ("later_us", "said"),
    [
        (100.0, None),
        (50.0, "exposed communication went from 100 to 50 us during the measurement"),
        (81.0, None),  # it need not be known to 20 us
    ],
)
def test_exposed_communication_that_changes_while_measured_is_said(later_us: float, said: str | None) -> None:
    notes = (exposed_row(steady(*[100.0] * 6, *[later_us] * 6))["note"] or "").split("; ")
    assert [note for note in notes if "exposed communication" in note] == ([said] if said else [])


def test_a_dataparallel_step_that_drifts_is_said() -> None:
    times: dict[VariantName, Sequence[float]] = {"plain": [700.0] * 12, "dp": [1000.0] * 6 + [1500.0] * 6}
    (row,) = build(make_communication_record(comm_point("dp"), make_communication(times)))["split"]
    assert row["note"].startswith("step_time_s drifted by +50.0 %")


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
    words = (
        "not larger than its noise, and at most 0.000588 s",
        "the step was faster than the same step without its collectives",
    )
    assert [word in (row["note"] or "") for word in words] == [abs(exposed_us) <= 3, exposed_us == -10]


def test_a_subtraction_whose_interval_holds_0_is_printed_as_less_than_its_upper_end() -> None:
    """T(1) is 0.95 to 1.05 s and T(2) 0.4788 to 0.5292 s.

    T(2) - T(1)/2 is -0.0462 to 0.0542 s, and 1 - 0.475/0.5292 is 10.2 %.
    """
    found = [windowed(NOISY, 128), windowed([0.504 * share for share in NOISY], 128, 2)]
    rows = table_of(report(*found), "Q3: computation against communication")
    assert cells(rows, "T(N) - T(1)/N [s]", "of the epoch [%]") == [(r"\<0.0542", r"\<10.2")]
    (row,) = build(*found)["Q3"]
    assert row["comm_time_subtraction_s"] == pytest.approx(0.004), "the difference itself is in JSON"
    assert row["bandwidth_subtraction_gb_s"] is None, "what noise hides has none"


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
