from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from factories import (
    comm_point,
    high,
    known,
    low,
    make_communication_record,
    make_record,
    make_spec,
    measured,
    sentences,
    with_epochs,
)
from hypothesis import given
from hypothesis import strategies as st
from rendered import build, cells, row_of

from pipeline.figures.intervals import Interval
from pipeline.figures.pooling import (
    PooledPoint,
    attempt_key,
    count_neighbours,
    median_window_s,
    pool_outcomes,
    timed_epochs,
)
from pipeline.plan.grid import GridFile, expand_grid
from pipeline.plan.spec import Spec
from pipeline.records.outcomes import resolve_outcomes
from pipeline.records.record import Environment, Gpu, Record

POOLED_WINDOWS = "range within the windows of 2 repeats together: too narrow if repeats differ more than their windows"


def windowed(*times_s: float, **fields: Any) -> Record:
    """A record whose windows took those times, after a first epoch that warmed up, and before one that is none."""
    spec = make_spec(**{"windows": len(times_s), "epochs": len(times_s) + 2, **fields})
    return make_record(spec, (90.0, *times_s, 80.0))


def with_time(record: Record, number: int, time_s: float) -> Record:
    """The record with another time of one epoch, whose parts stay as they are."""
    return with_epochs(
        record,
        lambda epoch: {
            "ranks": tuple(
                msgspec.structs.replace(rank, epoch_time_ns=round(time_s * 1e9)) if epoch.epoch == number else rank
                for rank in epoch.ranks
            )
        },
    )


def pool(*found: Record, **missing: Any) -> PooledPoint:
    expected = [*(record.spec for record in found), *([make_spec(**missing)] if missing else [])]
    (point,) = pool_outcomes(resolve_outcomes(expected, found, []).outcomes)
    return point


@pytest.mark.parametrize(
    ("times_s", "median_s"), [((3.0,), 3.0), ((1.0, 5.0), 3.0), ((7.0, 1.0, 2.0), 2.0), ((4.0, 4.0, 1.0, 9.0), 4.0)]
)
def test_the_epoch_time_is_the_median_of_the_windows_and_of_no_other_epoch(
    times_s: Sequence[float], median_s: float
) -> None:
    point = pool(windowed(*times_s))
    assert (point.epoch_time, point.median(median_window_s("compute_time_ns"))) == (median_s, median_s * 0.9375)
    assert [epoch.epoch for epoch in timed_epochs(point.ok_records[0])] == list(range(2, 2 + len(times_s)))


def test_every_window_is_its_slowest_ranks() -> None:
    times_s = [(9.0, 9.0), (5.0, 1.0), (1.0, 4.0), (3.0, 1.0)]  # of each rank, by epoch
    record = with_epochs(
        make_record(make_spec(strategy="ddp", num_gpus=2, windows=3, epochs=4), (9.0, 1.0, 1.0, 1.0)),
        lambda epoch: {
            "ranks": tuple(
                msgspec.structs.replace(rank, epoch_time_ns=round(times_s[epoch.epoch - 1][rank.rank] * 1e9))
                for rank in epoch.ranks
            )
        },
    )
    assert pool(record).epoch_time == 4.0  # of 5, 4, 3: every window is slow on one rank alone


@pytest.mark.parametrize(
    ("found", "basis", "run_medians", "notes"),
    [
        ([make_record(make_spec(windows=20, epochs=21), (9, 1, 2, 3, 4, 5, 6))], "windows", (3.5,), []),
        # the windows reach from 0.5 to 9
        ([windowed(0.5, number, 9, repeat=number) for number in range(1, 7)], "repeats", (1, 2, 3, 4, 5, 6), []),
        ([windowed(1, 2, 3), windowed(4, 5, 6, repeat=1)], "windows", (2, 5), [POOLED_WINDOWS]),
    ],
    ids=["stopped early", "six repeats, each of which counts once", "the windows of two repeats"],
)
def test_the_interval_is_over_repeats_where_there_are_six_and_else_over_the_windows_that_were_run(
    found: list[Record], basis: str, run_medians: tuple[float, ...], notes: list[str]
) -> None:
    point = pool(*found)
    time = known(point.epoch_time)
    assert (point.status, point.notes, time) == ("ok", [], 3.5)
    assert (time.interval, time.basis, time.run_medians) == (Interval(1.0, 6.0, 0.96875), basis, run_medians)
    assert sentences(point.interval_notes) == notes


@pytest.mark.parametrize(
    ("found", "missing", "notes"),
    [
        ([windowed(1.0)], {}, []),  # nobody asked for an interval
        ([windowed(*[1.0] * 5)], {}, ["an interval needs 6 windows or repeats, got 5"]),
        ([windowed(1.0), windowed(1.0, repeat=1)], {}, ["an interval needs 6 windows or repeats, got 2"]),
        ([make_record()], {"repeat": 1}, ["an interval needs 6 windows or repeats, got 1"]),
    ],
    ids=["one window", "five windows", "two repeats", "a repeat is missing"],
)
def test_fewer_than_six_values_have_no_interval_and_say_why_where_one_was_asked_for(
    found: list[Record], missing: dict[str, Any], notes: list[str]
) -> None:
    point = pool(*found, **missing)
    time = known(point.epoch_time)
    assert (time.interval, time.basis, time.relative_half_width) == (None, None, None)
    assert sentences(point.interval_notes) == notes


def test_a_point_without_a_time_says_nothing_of_intervals() -> None:
    point = pool(make_record(make_spec(windows=9, epochs=10), status="oom"))
    assert (point.epoch_time, point.interval_notes) == (None, [])


def test_windows_that_drift_are_not_alike_and_the_interval_says_so() -> None:
    (note,) = sentences(pool(windowed(*[1.0, 1.01, 1.02] * 2, *[1.1, 1.12, 1.13] * 2)).epoch_time_drift_notes)
    assert note.startswith("epoch_time_s drifted by +10.9 %")
    assert pool(windowed(*[1.0, 1.01, 1.13] * 2, *[1.1, 1.12, 1.02] * 2)).epoch_time_drift_notes == []
    together = pool(windowed(*[1.0] * 6, repeat=0), windowed(*[1.1] * 6, repeat=1))
    assert sentences(together.interval_notes) == [POOLED_WINDOWS], "another process may have another pace"


@given(st.lists(st.lists(st.floats(0.1, 10), min_size=6, max_size=30), min_size=2, max_size=5))
def test_the_epoch_time_lies_inside_its_interval_however_unequal_the_repeats(times_s: list[list[float]]) -> None:
    windows = max(map(len, times_s))
    spec = {"windows": windows, "epochs": windows + 1}
    found = [make_record(make_spec(repeat=number, **spec), (90.0, *part)) for number, part in enumerate(times_s)]
    time = pool(*found).epoch_time
    assert low(time) <= time <= high(time)


@pytest.mark.parametrize(
    ("epoch_time_s", "note"),
    [
        (2.0, None),
        (2.01, None),
        (2.1, "the parts of an epoch add up to 95.2 % of its time"),
        (1.6, "the parts of an epoch add up to 125.0 % of its time"),
        (1e-9, "the parts of an epoch add up to 200,000,000,000.0 % of its time"),
    ],
)
def test_parts_that_do_not_add_up_to_their_epoch_are_said(epoch_time_s: float, note: str | None) -> None:
    # the second window, 1.5 s of computing and 0.5 s of data, is given another time
    assert sentences(pool(with_time(windowed(3.0, 2.0), 3, epoch_time_s)).parts_notes) == ([note] if note else [])


def test_parts_that_miss_a_short_epoch_by_less_than_a_millisecond_are_no_finding() -> None:
    assert pool(with_time(windowed(0.01), 2, 0.0109)).parts_notes == []


def test_a_figure_of_a_point_is_the_median_over_its_records_and_leaves_out_those_without_it() -> None:
    point = pool(*(windowed(time_s, repeat=number) for number, time_s in enumerate((1.0, 2.0, 9.0))))
    assert point.median(lambda record: float(record.spec.repeat**2)) == 1.0  # of 0, 1, 4
    assert point.median(lambda record: None if record.spec.repeat == 0 else 10.0**record.spec.repeat) == 55.0
    assert point.median(lambda record: None) is None


QUIET = (2, 2, 2, 3, 2)
EVALUATED = (2, 2, 2, 9, 2)  # an evaluation in one update of each window makes all windows alike


@pytest.mark.parametrize(
    ("windows_ns", "said"),
    [
        ((QUIET, QUIET), []),
        ((QUIET, EVALUATED, QUIET), ["1 of 15 updates took over 1.5 times the median, which adds 22 % to the mean"]),
        ((EVALUATED,) * 3, ["3 of 15 updates took over 1.5 times the median, which adds 70 % to the mean"]),
        (((9,) * 5, QUIET, QUIET), ["5 of 15 updates took over 1.5 times the median, which adds 109 % to the mean"]),
        (((100,) * 19 + (160,),), []),  # 3 % of the time
    ],
)
def test_updates_of_a_script_that_hold_more_than_an_update_are_named(
    windows_ns: Sequence[Sequence[int]], said: Sequence[str]
) -> None:
    count = len(windows_ns)
    grid = [{"num_gpus": [1], "windows": [count], "epochs": [count + 1]}]
    (spec,) = expand_grid(GridFile("script", grid, base={"script": __file__, "device": "cpu"})).points
    steps = [tuple(EVALUATED), *map(tuple, windows_ns)]  # the first block is the warm-up
    script = make_record(spec, [sum(window) for window in steps])
    with_steps = with_epochs(script, lambda epoch: {"num_timed_updates": 5, "step_times_ns": steps[epoch.epoch - 1]})
    notes = sentences(pool(with_steps).long_update_notes)
    assert [note.partition(":")[0] for note in notes] == list(said)
    model = with_epochs(script, lambda epoch: {"step_times_ns": steps[epoch.epoch - 1]})
    assert pool(model).long_update_notes == [], "the epochs of a model hold nothing else"


BESIDE_ONE = "other configurations of this experiment on its node meanwhile: 1"
OTHERS = {size: make_spec(batch_size_per_gpu=size) for size in (32, 64, 128, 256)}
TWO_GPUS = make_spec(strategy="ddp", num_gpus=2)


def ran(spec: Spec, start: str, end: str, *, launch_id: str = "", **facts: Any) -> Record:
    """A record of an attempt from one time of an hour to another (mm:ss), on node a and in its own launch."""
    return between(make_record(spec, launch_id=launch_id or spec.run_id()), start, end, **facts)


def between(record: Record, start: str, end: str, **facts: Any) -> Record:
    times = {"started_at": f"2026-11-21T14:{start}Z", "ended_at": f"2026-11-21T14:{end}Z"}
    return msgspec.structs.replace(record, environment=Environment(**{"nodes": ("a",), **facts}), **times)


def neighbours(*found: Record) -> list[int]:
    counts = count_neighbours(found)
    return [counts[attempt_key(record)] for record in found]


def test_attempts_that_overlap_on_a_node_are_neighbours() -> None:
    found = [
        ran(OTHERS[32], "00:00", "01:00"),
        ran(OTHERS[64], "00:59", "02:00"),
        ran(OTHERS[128], "00:30", "03:00"),
        ran(OTHERS[256], "03:00", "04:00"),  # begins as the one before ends
    ]
    assert neighbours(*found) == [2, 2, 2, 0]
    elsewhere = [msgspec.structs.replace(found[0], environment=Environment(nodes=("b",))), *found[1:]]
    assert neighbours(*elsewhere) == [0, 1, 1, 0]


def test_an_attempt_on_two_nodes_is_beside_those_of_either() -> None:
    wide = ran(make_spec(strategy="ddp", num_gpus=2, num_nodes=2), "00:00", "01:00", nodes=("a", "b"))
    on_a, on_b = ran(OTHERS[32], "00:10", "00:20"), ran(OTHERS[64], "00:30", "00:40", nodes=("b",))
    assert neighbours(wide, on_a, on_b) == [1, 1, 1]


def test_machines_of_one_name_are_told_apart_by_their_boot() -> None:
    one, other = (ran(OTHERS[size], "00:00", "01:00", boot_ids=(boot,)) for size, boot in ((32, "x"), (64, "y")))
    assert neighbours(one, other) == [0, 0]
    of_slurm = ran(OTHERS[128], "00:00", "01:00", boot_ids=("x",), nodes=("a2",))  # two nodes that are one machine
    assert neighbours(one, of_slurm) == [1, 1]


def test_points_of_one_launch_do_not_overlap_also_if_the_clock_ran_backward_between_them() -> None:
    first = ran(OTHERS[32], "00:00", "01:00", launch_id="packed")
    after = ran(OTHERS[64], "01:00", "02:00", launch_id="packed")
    set_back = ran(OTHERS[128], "00:30", "01:30", launch_id="packed")
    assert neighbours(first, after, set_back) == [0, 0, 0]
    assert neighbours(first, after, set_back, ran(OTHERS[256], "00:00", "00:10")) == [1, 0, 0, 1]


@pytest.mark.fault("F23")
def test_an_attempt_without_times_or_whose_clock_ran_backward_has_no_neighbours() -> None:
    beside = ran(OTHERS[32], "00:00", "30:00")
    backward = ran(OTHERS[64], "20:00", "10:00")
    timeless = msgspec.structs.replace(ran(OTHERS[128], "00:00", "01:00"), started_at=None)
    assert neighbours(beside, backward, timeless) == [0, 0, 0]


def test_rows_of_neighbours_and_rows_that_compare_with_them_say_so_and_keep_their_figures() -> None:
    alone, two = ran(OTHERS[128], "00:00", "01:00"), ran(TWO_GPUS, "05:00", "06:00")
    beside = ran(OTHERS[32], "00:30", "01:30")
    quiet, noted = (build(alone, two, *more) for more in ((), (beside,)))
    assert cells([*quiet["Q1"], *quiet["Q2"]], "note") == [(None,)] * 3
    assert cells(noted["Q1"], "note") == [(BESIDE_ONE,)] * 2
    noted_two, quiet_two = (row_of(tables["Q2"], num_gpus=2) for tables in (noted, quiet))
    assert (noted_two["note"], noted_two["speedup"]) == (f"baseline: {BESIDE_ONE}", quiet_two["speedup"])
    assert cells(noted["Q3"], "note") == [(f"baseline: {BESIDE_ONE}",)]


def test_measured_communication_beside_another_point_is_said_in_q3() -> None:
    record = make_communication_record(comm_point("ddp", 2), measured(), launch_id="c")
    found = [ran(OTHERS[128], "00:00", "01:00"), ran(TWO_GPUS, "05:00", "06:00")]
    tables = build(*found, between(record, "10:00", "11:00"), ran(OTHERS[32], "10:30", "11:30"))
    assert f"measured communication: {BESIDE_ONE}" in tables["Q3"][0]["note"]
    assert BESIDE_ONE in tables["communication"][0]["note"]


def test_a_superseded_attempt_is_a_neighbour_too() -> None:
    retried = [
        between(make_record(OTHERS[32], status="failed", launch_id="f"), "00:00", "01:00"),
        between(make_record(OTHERS[32], attempt=1, launch_id="g"), "10:00", "11:00"),
    ]
    tables = build(*retried, ran(OTHERS[64], "00:30", "00:40"))
    assert {row["batch_size_per_gpu"]: row["note"] for row in tables["Q1"]} == {32: None, 64: BESIDE_ONE}


def on(spec: Spec, *uuids: str | None, name: str = "NVIDIA H200") -> Record:
    return ran(spec, "00:00", "01:00", launch_id="one", gpus=tuple(Gpu(name=name, uuid=uuid) for uuid in uuids))


@pytest.mark.parametrize(
    ("one", "two", "note"),
    [
        (
            on(OTHERS[128], "x"),
            on(TWO_GPUS, "y", "z"),
            "baseline ran on another GPU of the same model",
        ),
        (
            on(OTHERS[128], "x", name="NVIDIA A40"),
            on(TWO_GPUS, "y", "z"),
            "no baseline: the experiment has no configuration on 1 GPU with these axes",
        ),
        (on(OTHERS[128], "y"), on(TWO_GPUS, "y", "z"), None),
        (on(OTHERS[128], None), on(TWO_GPUS, "y", "z"), None),
        (on(OTHERS[128], "x"), on(TWO_GPUS, None, None), None),
    ],
    ids=["another GPU", "another model", "one of the two", "the baseline's is not known", "the point's are not known"],
)
def test_a_baseline_on_another_gpu_is_marked_as_far_as_uuids_are_known(
    one: Record, two: Record, note: str | None
) -> None:
    assert row_of(build(one, two)["Q2"], num_gpus=2)["note"] == note
