from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from factories import high, low, make_record, make_spec, sentences, with_epochs
from hypothesis import given
from hypothesis import strategies as st

from pipeline.figures.intervals import Interval, interval_by_repeat
from pipeline.figures.pooling import (
    PooledPoint,
    median_window_s,
    pool_outcomes,
    timed_epochs,
)
from pipeline.plan.grid import GridFile, expand_grid
from pipeline.records.outcomes import resolve_outcomes
from pipeline.records.record import Record

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


def told(point: PooledPoint) -> tuple[Any, ...]:
    """The epoch time with its interval, what that is over, and the medians of the runs."""
    time = point.epoch_time
    assert time is not None
    return time, time.interval, time.basis, time.run_medians


def test_a_point_that_stopped_early_reports_the_windows_that_were_run() -> None:
    point = pool(make_record(make_spec(windows=20, epochs=21), (9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)))
    assert (point.status, point.notes, point.epoch_time) == ("ok", [], 3.5)
    assert told(point) == (3.5, Interval(1.0, 6.0, 0.96875), "windows", (3.5,))


def test_the_interval_is_over_repeats_where_there_are_six_and_each_counts_once() -> None:
    # medians 1 to 6, though the windows reach from 0.5 to 9
    point = pool(*(windowed(0.5, number, 9.0, repeat=number) for number in range(1, 7)))
    assert told(point) == (3.5, Interval(1.0, 6.0, 0.96875), "repeats", (1, 2, 3, 4, 5, 6))
    assert point.interval_notes == []


def test_else_it_is_over_the_windows_of_all_repeats_and_says_so() -> None:
    point = pool(windowed(1.0, 2.0, 3.0), windowed(4.0, 5.0, 6.0, repeat=1))
    assert told(point) == (3.5, Interval(1.0, 6.0, 0.96875), "windows", (2.0, 5.0))
    assert sentences(point.interval_notes) == [POOLED_WINDOWS]


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
    time = point.epoch_time
    assert time is not None
    assert (time.interval, time.basis, time.relative_half_width) == (None, None, None)
    assert sentences(point.interval_notes) == notes


def test_a_point_without_a_time_says_nothing_of_intervals() -> None:
    point = pool(make_record(make_spec(windows=9, epochs=10), status="oom"))
    assert (point.epoch_time, point.epoch_time, point.interval_notes) == (None, None, [])


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


def test_an_interval_is_widened_to_reach_the_median_of_unequal_repeats() -> None:
    many, *few = [1.0] * 17, [5.0], [5.0]  # of 19 values the fifth smallest and largest are 1
    interval, over = interval_by_repeat([many, *few])
    assert interval is not None
    assert (interval.low, interval.high, over) == (1.0, 5.0, "windows")


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


@pytest.mark.parametrize(("times_s", "said"), [((2.0, 2.0, 3.0), []), ((2.0, 2.0, 2.0, 3.1, 9.0), ["2 of 5 windows"])])
def test_windows_of_a_script_that_hold_more_than_its_updates_are_named(
    times_s: Sequence[float], said: Sequence[str]
) -> None:
    grid = [{"num_gpus": [1], "windows": [len(times_s)], "epochs": [len(times_s) + 2]}]
    (spec,) = expand_grid(GridFile("script", grid, base={"script": __file__, "device": "cpu"})).points
    script = make_record(spec, (90.0, *times_s, 80.0))
    point = pool(with_epochs(script, lambda epoch: {"num_timed_updates": 5}))
    notes = sentences(point.long_window_notes)
    assert [sentence[: len(said[0])] for sentence in notes] == list(said)
    assert pool(windowed(*times_s)).long_window_notes == [], "the epochs of a model hold nothing else"
