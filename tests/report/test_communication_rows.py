from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from factories import (
    LARGE,
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
    make_record,
    make_spec,
    measured,
    profile,
    steady,
    with_measurement,
)
from rendered_tables import assert_row, build, cells

from pipeline.figures.intervals import Estimate
from pipeline.records.record import Communication, Record, SplitPart, VariantName
from pipeline.records.store import encode_record
from pipeline.report.next_step import NEXT_STEP_KEYS, NOTHING_FOUND
from pipeline.report.q3 import split_exposed
from pipeline.report.questions import flatten
from pipeline.report.table import Row

STEPS_S = 196 * 1_250 * US  # of an epoch with the steps of `measured`, and with waiting


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
    ("exposed_s", "comm_s", "floor_s", "hidden", "launch_s"),
    [
        (0.25, 1.0, None, 0.75, None),
        (0.25, 1.0, 0.2, 0.75, None),
        (0.25, 1.0, 0.9, None, None),  # noise has no share
        (0.25, 1.0, 1.0, None, None),
        (-0.5, 1.0, 2.0, None, None),
        (1.5, 1.0, 2.0, None, None),
        (2.5, 1.0, 2.0, None, 1.5),
        (1.0, 1.0, None, 0.0, None),
        (0.0, 1.0, None, 1.0, None),
        (-0.1, 1.0, 0.2, None, None),
        (-0.1, 1.0, None, None, None),  # below 0, and not known to be noise
        (-0.3, 1.0, 0.2, None, None),
        (1.5, 1.0, None, None, 0.5),
        (None, 1.0, 0.1, None, None),
        (0.5, None, 0.1, None, None),
    ],
)
def test_exposed_communication_is_split_at_what_the_link_takes(
    exposed_s: float | None, comm_s: float | None, floor_s: float | None, hidden: float | None, launch_s: float | None
) -> None:
    found = split_exposed(None if exposed_s is None else Estimate(exposed_s), comm_s, floor_s)
    assert (found["hidden_share"], found["collective_launch_time_s"]) == (hidden, launch_s)
    assert low(found["hidden_share"]) is high(found["hidden_share"]) is None  # no interval


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


def test_repeats_pool_their_rounds() -> None:
    found = [
        make_communication_record(comm_point(repeat=number), measured(38 + number, 42 - number, 40))
        for number in (0, 1)
    ]
    (row,) = build(*found)["communication"]
    assert_row(row, n=2, num_windows=6)
    assert ends(row["exposed_comm_time_s"], US) == pytest.approx((38, 40, 42))


def test_a_trace_that_disagrees_is_said_with_a_reason() -> None:
    row = exposed_row(measured(profile=profile(traced_us=90)))
    said = "two methods differ: trace 90 us exposed, step times 40; the trace is too long: the profiler slows the host"
    assert row["traced_exposed_comm_time_s"] == pytest.approx(90 * US)
    assert row["note"].startswith(said)


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


def test_a_record_of_communication_survives_its_file() -> None:
    record = make_communication_record(comm_point(), measured())
    assert msgspec.json.decode(encode_record(record), type=Record) == record


def test_measured_points_do_not_change_the_tables_of_epochs() -> None:
    epochs = [make_record(ONE_GPU, (9, 8)), make_record(TWO_GPUS, (9, STEPS_S))]
    plain, both = (
        [
            {key: value for key, value in row.items() if key not in NEXT_STEP_KEYS}  # advice may use both
            for name in ("Q1", "Q2", "Q4")
            for row in flatten(build(*epochs, *more))[name]
        ]
        for more in ((), [make_communication_record(comm_point(), measured())])
    )
    assert [before.items() <= row.items() for before, row in zip(plain, both, strict=True)] == [True] * len(plain)


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
    for step in ([], [make_communication_record(comm_point(), measured())]):
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
        assert_says(row["note"], "takes 1.19 ms, that of the epochs 19.1 ms without", "no share and no advice")


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
    assert (row["limit"] == "the wrapper", "no share and no advice" not in (row["note"] or "")) == (is_told, is_told)


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


def test_communication_that_makes_a_step_faster_is_not_called_hidden() -> None:
    row = exposed_row(measured(*[-200.0] * 6, again_us=[0] * 6))
    assert_row(
        row,
        "DDP was faster than DDP with the no-op hook; the records do not say why",
        exposed_comm_time_s=-200 * US,
        hidden_share=None,
    )


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
