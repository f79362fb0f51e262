from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from communication_records import LARGE, US, five_times, measured, point, profile, steady
from factories import (
    assert_says,
    high,
    low,
    make_collective,
    make_communication,
    make_communication_record,
    make_record,
    make_spec,
)
from rendered_tables import build

from pipeline.analysis.advice import NOTHING_FOUND
from pipeline.analysis.intervals import Estimate
from pipeline.experiment.measurement import Communication, SplitPart, VariantName
from pipeline.experiment.record import Record
from pipeline.experiment.record_store import encode_record
from pipeline.tables.build_tables import flatten
from pipeline.tables.columns import Row
from pipeline.tables.communication_rows import split_exposed
from pipeline.tables.definitions import NEXT_STEP_KEYS

STEPS_S = 196 * 1_250 * US  # of an epoch with the steps of `measured`, and with waiting


def exposed_row(found: Communication, **spec: Any) -> Row:
    (row,) = build(make_communication_record(point(**spec), found))["communication"]
    return row


def test_five_step_times_and_their_differences_by_hand() -> None:
    row = exposed_row(measured())
    assert row["plain_step_time_s"] == pytest.approx(800 * US)
    assert row["ddp_one_step_time_s"] == pytest.approx(820 * US)
    assert row["no_sync_step_time_s"] == pytest.approx(1100 * US)  # 850 and a drift of 250 at the median
    assert row["no_op_hook_step_time_s"] == pytest.approx(1150 * US)
    assert row["step_time_s"] == pytest.approx(1190 * US)
    assert row["ddp_overhead_time_s"] == pytest.approx(50 * US)
    assert (row["status"], row["n"], row["num_windows"], row["note"]) == ("ok", 1, 6, None)


def test_the_spread_between_runs_of_a_step_and_of_its_exposed_communication() -> None:
    found = [steady(*[exposed_us] * 6) for exposed_us in (63, 148)]
    records = [make_communication_record(point(repeat=number), part) for number, part in enumerate(found)]
    (row,) = build(*records)["communication"]
    assert (row["run_spread_s"], row["exposed_comm_time_run_spread_s"]) == pytest.approx((85 * US, 85 * US))
    alone = exposed_row(found[0])
    assert (alone["run_spread_s"], alone["exposed_comm_time_run_spread_s"]) == (None, None)


def test_drift_cancels_in_exposed_communication_and_its_interval() -> None:
    row = exposed_row(measured())
    ends = (low(row["exposed_comm_time_s"]), row["exposed_comm_time_s"], high(row["exposed_comm_time_s"]))
    assert ends == (pytest.approx(38 * US), pytest.approx(40 * US), pytest.approx(42 * US))  # the drift is 500
    assert row["noise_floor_time_s"] == pytest.approx(3 * US)
    overhead = (low(row["ddp_overhead_time_s"]), high(row["ddp_overhead_time_s"]))
    assert overhead == (pytest.approx(50 * US), pytest.approx(50 * US))


def test_all_collectives_together_add_more_than_those_of_gradients() -> None:
    row = exposed_row(measured())
    ends = (low(row["collectives_time_s"]), row["collectives_time_s"], high(row["collectives_time_s"]))
    assert ends == (pytest.approx(68 * US), pytest.approx(70 * US), pytest.approx(72 * US))  # 30 for the buffers
    times = five_times()
    del times["no_collectives"]
    assert exposed_row(make_communication(times))["collectives_time_s"] is None, "as before schema 11"


def test_what_is_not_exposed_is_hidden() -> None:
    row = exposed_row(measured())
    assert row["comm_time_s"] == pytest.approx(100 * US)  # (80 + 20) us in both steps
    assert row["hidden_share"] == pytest.approx(0.6)  # 1 - 40/100
    assert row["collective_launch_time_s"] is None
    assert row["straggler_wait_time_s"] == pytest.approx(12.5 * US)  # of 5 + 5 and 10 + 5
    assert row["buffer_comm_time_s"] == pytest.approx(7 * US)
    assert row["traced_exposed_comm_time_s"] == pytest.approx(40 * US)


def test_where_more_is_exposed_than_the_link_takes_the_rest_is_the_hosts() -> None:
    row = exposed_row(measured(130, 130, 130, 130, 130, 130))
    assert row["collective_launch_time_s"] == pytest.approx(30 * US)  # 130 - 100
    assert row["hidden_share"] is None
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
    exposed = None if exposed_s is None else Estimate(exposed_s)
    found = split_exposed(exposed, comm_s, floor_s)
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
    found = split_exposed(Estimate(exposed_s, low_s, high_s), 1.0, None)
    hidden = found["hidden_share"]
    assert (low(hidden), hidden, high(hidden)) == pytest.approx(share)


@pytest.mark.parametrize(("exposed_us", "is_noise"), [(2.9, True), (-2.9, True), (3.1, False), (-3.1, False)])
def test_exposed_communication_inside_the_noise_floor_is_said(exposed_us: float, is_noise: bool) -> None:
    row = exposed_row(measured(*[exposed_us] * 6, again_us=(-3, 1, 0, 0, -1, 2)))
    assert row["exposed_comm_time_s"] == pytest.approx(exposed_us * US)
    assert ("exposed communication is not larger than the noise" in (row["note"] or "")) == is_noise


def test_fewer_than_six_windows_give_no_interval_and_say_so() -> None:
    row = exposed_row(measured(38, 39, 40, 41, 42), windows=5)
    assert row["exposed_comm_time_s"] == pytest.approx(40 * US)
    ends = [end(row[key]) for key in ("exposed_comm_time_s", "ddp_overhead_time_s") for end in (low, high)]
    assert [*ends, row["noise_floor_time_s"]] == [None] * 5
    assert row["note"] == "an interval needs 6 windows, got 5"


def test_repeats_pool_their_rounds() -> None:
    found = [
        make_communication_record(point(repeat=number), measured(38 + number, 42 - number, 40)) for number in (0, 1)
    ]
    (row,) = build(*found)["communication"]
    assert (row["n"], row["num_windows"]) == (2, 6)
    assert (low(row["exposed_comm_time_s"]), high(row["exposed_comm_time_s"])) == (
        pytest.approx(38 * US),
        pytest.approx(42 * US),
    )


def test_a_trace_that_disagrees_is_said_with_a_reason() -> None:
    row = exposed_row(measured(profile=profile(traced_us=90)))
    said = "two methods differ: trace 90 us exposed, step times 40; the trace is too long: the profiler slows the host"
    assert row["traced_exposed_comm_time_s"] == pytest.approx(90 * US)
    assert row["note"].startswith(said)


def test_without_a_profile_the_reason_stands_in_every_row_that_lacks_it() -> None:
    limit = "the limit in pipeline.communication.profiling; raise it"
    note = f"rank 0: no profile: the trace of a rank is larger than 400 bytes, {limit}"
    tables = build(make_communication_record(point(), measured(profile=None, notes=(note,))))
    (row,), (ledger,) = tables["communication"], tables["transfers"]
    assert row["exposed_comm_time_s"] == pytest.approx(40 * US)
    lacking = ("comm_time_s", "hidden_share", "collective_launch_time_s", "straggler_wait_time_s", "buffer_comm_time_s")
    assert [row[name] for name in lacking] == [None] * 5
    assert (row["note"], ledger["note"]) == (note, note)
    assert ledger["gradients_bytes_per_step"] is None
    assert tables["bandwidth"] == []


def test_a_profile_without_gradients_gives_no_communication_time_rather_than_zero() -> None:
    collectives = (make_collective(LARGE, (80, 90), (100, 80), kind="batchnorm_statistics"),)
    other = msgspec.structs.replace(profile(), collectives=collectives, comm_ns=(0, 0), overlap_ns=(0, 0))
    row = exposed_row(measured(profile=other))
    lacking = ("comm_time_s", "hidden_share", "straggler_wait_time_s", "traced_exposed_comm_time_s")
    assert [row[name] for name in lacking] == [None] * 4
    assert_says(row["note"], "profile", "none of the collectives", "strategy")


@pytest.mark.parametrize("status", ["oom", "failed", "missing"])
@pytest.mark.parametrize(
    ("strategy", "tables"), [("ddp", ("communication", "transfers")), ("dp", ("transfers", "split"))]
)
def test_a_point_without_a_result_has_rows_with_nulls_its_state_and_a_reason(
    strategy: str, tables: tuple[str, ...], status: Any
) -> None:
    spec = point(strategy)
    found = [] if status == "missing" else [make_record(spec, status=status, reason="it ended badly")]
    built = build(*found, missing=[spec])
    for name in tables:
        (row,) = built[name]
        figures = [row[column] for column in row.figures if column.endswith(("_s", "_share", "_step", "_formula"))]
        assert figures == [None] * len(figures)
        assert (row["status"], row["n"]) == (status, 0)
        assert row["note"] == ("no record" if status == "missing" else "it ended badly")
    assert (built["bandwidth"], built["sweep"], built["prediction"]) == ([], [], [])
    assert len(built["oom"]) == (status == "oom")


def test_communication_points_are_in_no_table_of_epochs() -> None:
    found = [make_communication_record(point(num_gpus=n), measured()) for n in (2, 4)]
    dp = make_communication({"plain": [700.0] * 6, "dp": [31_000.0] * 6})
    tables = build(*found, make_communication_record(point("dp"), dp), missing=[point(num_gpus=8)])
    assert not any((tables["Q1"], tables["Q2"], tables["Q3"], tables["Q4"], tables["oom"]))
    assert [row["num_gpus"] for row in tables["communication"]] == [2, 4, 8]
    assert [(row["strategy"], row["num_gpus"]) for row in tables["transfers"]] == [
        ("ddp", 2),
        ("ddp", 4),
        ("dp", 2),
        ("ddp", 8),
    ]
    assert [row["strategy"] for row in tables["split"]] == ["dp"]


def test_the_parts_of_dataparallel_by_hand() -> None:
    parts = (
        SplitPart(part="scatter", times_ns=(1_000_000, 3_000_000, 2_000_000)),
        SplitPart(part="replicate", times_ns=(20_000_000,)),
        SplitPart(part="backward", times_ns=(9_000_000, 11_000_000)),
    )
    found = make_communication({"plain": [700.0] * 6, "dp": [31_000.0] * 6, "dp_again": [31_000.0] * 6}, split=parts)
    (row,) = build(make_communication_record(point("dp"), found))["split"]
    assert (row["plain_step_time_s"], row["step_time_s"]) == (pytest.approx(700 * US), pytest.approx(0.031))
    assert (row["scatter_time_s"], row["replicate_time_s"], row["backward_time_s"]) == (0.002, 0.02, 0.01)
    assert row["gather_time_s"] is None
    assert row["parts_time_s"] == pytest.approx(0.032)


def test_a_record_of_communication_survives_its_file() -> None:
    record = make_communication_record(point(), measured())
    assert msgspec.json.decode(encode_record(record), type=Record) == record


def test_measured_points_do_not_change_the_tables_of_epochs() -> None:
    epochs = [make_record(make_spec(), (9, 8)), make_record(make_spec(strategy="ddp", num_gpus=2), (9, STEPS_S))]
    plain, both = build(*epochs), build(*epochs, make_communication_record(point(), measured()))
    for name in ("Q1", "Q2", "Q4"):
        old, new = flatten(plain)[name], flatten(both)[name]
        kept = [{key: row[key] for key in row if key not in NEXT_STEP_KEYS} for row in old]  # advice may use both
        assert [{key: row[key] for key in before} for before, row in zip(kept, new, strict=True)] == kept


def with_own(record: Record, *names: str) -> Record:
    """The record of a model that calls these collectives itself."""
    return msgspec.structs.replace(
        record,
        measurement=msgspec.structs.replace(record.measurement, own_collectives=names),  # type: ignore[type-var]
    )


@pytest.mark.fault("F63")
@pytest.mark.parametrize("in_epochs", [True, False], ids=["seen in both", "seen in the step alone"])
def test_a_collective_of_the_users_own_leaves_no_figure_of_communication_and_no_advice(in_epochs: bool) -> None:
    """The wrapper takes 100 us of a step of 1,190 and communication 40: both are limits."""
    single, double = make_record(make_spec(), (9, 0.2)), make_record(make_spec(strategy="ddp", num_gpus=2), (9, 0.245))
    step = make_communication_record(point(), measured(profile=profile()))
    told = build(single, double, step)
    assert told["communication"][0]["limit"] == told["Q2"][1]["limit"] == "the wrapper"
    assert told["Q3"][0]["exposed_comm_time_s"] is not None
    assert told["prediction"]
    found = build(
        single, with_own(double, "all_gather") if in_epochs else double, with_own(step, "all_gather", "scatter")
    )
    (row,), (of_epoch,), of_speedup = found["communication"], found["Q3"], found["Q2"][1]
    assert row["step_time_s"] == pytest.approx(1190 * US)
    assert row["plain_step_time_s"] == pytest.approx(800 * US)
    keys = {key for key, value in told["communication"][0].figures.items() if value is not None and "comm_" in key}
    keys |= {"exposed_comm_share", "hidden_share", "wrapper_time_s", "ddp_overhead_time_s", "collectives_time_s"}
    assert {key: row[key] for key in keys} == dict.fromkeys(keys)
    assert (of_epoch["exposed_comm_time_s"], found["prediction"]) == (None, [])
    assert told["Q3"][0]["bandwidth_subtraction_gb_s"] is not None
    assert of_epoch["bandwidth_subtraction_gb_s"] is None
    assert {one["next_step"] for one in (row, of_speedup)} == {NOTHING_FOUND}
    for one in (row, of_epoch, of_speedup):
        assert_says(one["note"], "calls collectives itself (all_gather", "in every timed step")


@pytest.mark.fault("F63")
def test_a_collective_that_the_epochs_alone_record_leaves_them_no_share_either() -> None:
    single, double = make_record(make_spec(), (9, 0.2)), make_record(make_spec(strategy="ddp", num_gpus=2), (9, 0.245))
    assert build(single, double)["Q2"][1]["limit"] == "several GPUs"
    for step in ([], [make_communication_record(point(), measured())]):
        found = build(single, with_own(double, "all_gather"), *step)
        assert (found["Q3"][0]["exposed_comm_time_s"], found["Q2"][1]["next_step"]) == (None, NOTHING_FOUND)
        assert_says(found["Q3"][0]["note"], "calls collectives itself (all_gather)")


@pytest.mark.fault("F64")
def test_a_step_unlike_that_of_the_epochs_gives_them_no_share_and_no_advice() -> None:
    """Epochs take 4 s of 196 steps, 19.1 ms each without the wait for data; the measured step takes 1.19 ms."""
    single, double = make_record(make_spec(), (9, 6)), make_record(make_spec(strategy="ddp", num_gpus=2), (9, 4))
    found = build(single, double, make_communication_record(point(), measured()))
    assert found["communication"][0]["limit"] == "the wrapper"  # a share of its own step
    assert (found["Q2"][1]["next_step"], found["Q2"][1]["limit_share"]) == (NOTHING_FOUND, None)
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
    single = make_record(make_spec(**size), (9, 1))
    double = make_record(make_spec(strategy="ddp", num_gpus=2, **size), (9, epoch_s))
    row = build(single, double, make_communication_record(point(**size), measured()))["Q2"][1]
    assert (row["limit"] == "the wrapper") is is_told
    assert ("no share and no advice" in (row["note"] or "")) is not is_told


def in_repeats(exposed_us: Sequence[float]) -> list[Record]:
    """A repeat for each value, which its rounds hold within a microsecond."""
    return [
        make_communication_record(point(repeat=number), measured(*[value - 1, value, value, value, value, value + 1]))
        for number, value in enumerate(exposed_us)
    ]


def test_an_interval_is_over_repeats_where_there_are_six_and_each_counts_once() -> None:
    (row,) = build(*in_repeats([100, 200, 200, 200, 200, 300]))["communication"]
    figures = (row["exposed_comm_time_s"], low(row["exposed_comm_time_s"]), high(row["exposed_comm_time_s"]))
    assert figures == pytest.approx((200 * US, 100 * US, 300 * US))
    assert (row["interval_over"], row["num_windows"]) == ("repeats", 36)
    (row,) = build(*in_repeats([100, 200]))["communication"]
    assert row["interval_over"] == "windows"
    assert row["note"].startswith("range within the windows of 2 repeats together")


def test_communication_that_makes_a_step_faster_is_not_called_hidden() -> None:
    row = exposed_row(measured(*[-200.0] * 6, again_us=[0] * 6))
    assert (row["exposed_comm_time_s"], row["hidden_share"]) == (pytest.approx(-200 * US), None)
    assert "DDP was faster than DDP with the no-op hook; the records do not say why" in row["note"]


def test_exposed_communication_that_changes_while_measured_is_said() -> None:
    assert exposed_row(steady(*[100.0] * 12))["note"] is None
    note = exposed_row(steady(*[100.0] * 6, *[50.0] * 6))["note"]
    assert note.endswith("; exposed communication went from 100 to 50 us during the measurement")
    near = exposed_row(steady(*[100.0] * 6, *[81.0] * 6))["note"]
    assert "exposed communication" not in (near or ""), "it need not be known to 20 us"


def test_a_dataparallel_step_that_drifts_is_said() -> None:
    times: dict[VariantName, Sequence[float]] = {"plain": [700.0] * 12, "dp": [1000.0] * 6 + [1500.0] * 6}
    (row,) = build(make_communication_record(point("dp"), make_communication(times)))["split"]
    assert row["note"].startswith("step_time_s drifted by +50.0 %")
