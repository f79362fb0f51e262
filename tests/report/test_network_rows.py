"""The step on another link, predicted by delays, with figures worked by hand."""

import msgspec
import pytest
from factories import comm_point, make_collective, make_communication, make_communication_record
from rendered_tables import assert_row, build

from pipeline.records.record import DelayedSteps, Profile, Record, SweptCollective
from pipeline.report.network import BEYOND_THE_DELAYS, WORSE_THAN_NO_CHANGE

BUCKET = 1_000_000


def timed(num_nodes: int, step_us: float, alone_us: float | None = 100) -> Record:
    """Two GPUs whose step has two buckets; an isolated all-reduce of that size took so long."""
    swept = SweptCollective(
        num_bytes=BUCKET, operation="all_reduce", times_ns=(round(alone_us * 1e3),) if alone_us else ()
    )
    buckets = tuple(make_collective(BUCKET, *[(50.0, 50.0)] * 2) for _ in range(2))
    times = {"plain": [900.0] * 6, "no_op_hook": [950.0] * 6, "ddp": [step_us] * 6}
    found = make_communication(times, profile=Profile(num_steps=2, collectives=buckets), sweep=(swept,))
    return make_communication_record(comm_point(num_nodes=num_nodes), found)


def delayed() -> Record:
    """On one node a step of 1 ms; delays of 400 us add 100 us to it, delays of 800 us add 500."""
    usual = make_communication({"ddp": [1000.0] * 6, "ddp_again": [1000.0] * 6})
    delays = tuple(
        DelayedSteps(0.0, 1e-9, (added_us * 1000,) * 6, ((step_us * 10_000, step_us * 5_000),) * 6)
        for added_us, step_us in ((400, 1100), (800, 1500))
    )
    return make_communication_record(comm_point(measure="network"), msgspec.structs.replace(usual, delayed=delays))


def test_the_step_on_two_nodes_is_what_delays_as_long_as_its_collectives_add() -> None:
    (row,) = build(delayed(), timed(1, 1000), timed(2, 1250, alone_us=400))["other_link"]
    assert_row(
        row,
        num_nodes=2,
        from_num_nodes=1,
        from_num_gpus=2,
        longer_collectives_s=pytest.approx(600e-6),  # two of 400 in place of 100 us
        by_delays_step_time_s=pytest.approx(1300e-6),  # in the middle of 1100 and 1500
        prediction_error=pytest.approx(0.04),
        no_change_step_time_s=pytest.approx(1000e-6),
        no_change_error=pytest.approx(-0.2),
        measured_step_time_s=pytest.approx(1250e-6),
    )
    assert row.notes == ()


@pytest.mark.parametrize(
    ("step_us", "alone_us", "predicted_us", "notes"),
    [
        (1100, 400, 1300, [WORSE_THAN_NO_CHANGE]),
        (1900, 600, None, [BEYOND_THE_DELAYS]),
        (1900, 50, None, [BEYOND_THE_DELAYS]),
        (1900, None, None, []),
    ],
    ids=["worse", "a slower link", "a faster link", "not swept"],
)
def test_a_prediction_that_is_worse_or_not_possible_says_so(
    step_us: float, alone_us: float | None, predicted_us: float | None, notes: list[object]
) -> None:
    (row,) = build(delayed(), timed(1, 1000), timed(2, step_us, alone_us))["other_link"]
    expected = None if predicted_us is None else pytest.approx(predicted_us / 1e6)
    assert row["by_delays_step_time_s"] == expected
    assert [note.kind for note in row.notes] == notes


def test_without_the_link_of_the_delays_nothing_is_predicted() -> None:
    assert build(delayed(), timed(2, 1250, alone_us=400))["other_link"] == []
    assert build(timed(1, 1000), timed(2, 1250, alone_us=400))["other_link"] == []
