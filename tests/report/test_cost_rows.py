from typing import Any

import pytest
from factories import make_record, make_spec, with_measurement
from rendered_tables import assert_row, build, cells

from pipeline.figures.pooling import attempt_span
from pipeline.plan.spec import Spec
from pipeline.records.record import Communication, Environment, Failure, Record, StepSeries
from pipeline.report.cost import ENDINGS
from pipeline.report.table import Row

START = "2025-06-01T12:00:00Z"


def took(seconds: int, spec: Spec, *, allocated: int | None = None, **fields: Any) -> Record:
    """A record of an attempt of so many seconds; its timed epoch took one second."""
    ended_at = f"2025-06-01T{12 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}Z"
    environment = Environment(num_gpus_allocated=allocated)
    return make_record(spec, started_at=START, ended_at=ended_at, environment=environment, **fields)


def cost(*found: Record) -> dict[str, Row]:
    """The rows of the one device, by ending."""
    rows = build(*found)["cost"]
    assert len(rows) == len(ENDINGS)
    return {row["ending"]: row for row in rows}


def gpu_hours(*found: Record) -> dict[str, float | None]:
    return {ending: row["gpu_hours"] for ending, row in cost(*found).items() if row["n"]}


def test_every_attempt_costs_its_time_on_all_gpus_by_how_it_ended() -> None:
    four = make_spec(strategy="ddp", num_gpus=4)
    rows = cost(
        took(3600, make_spec(repeat=1), epoch_times_s=(2.0, 900.0)),  # 900 s of 3,600 s are timed
        took(900, four, status="oom"),
        took(1800, make_spec(repeat=2), status="failed", allocated=2),
        took(1800, make_spec(repeat=1), status="failed", attempt=1),  # the first attempt speaks for the point
    )
    hours = {"ok_timed": 0.25, "ok_other": 0.75, "oom": 1.0, "failed": 1.0, "superseded": 0.5}
    assert cells(rows.values(), "ending", "gpu_hours", "allocated_share", "n", "process_hours") == [
        (ending, pytest.approx(spent), pytest.approx(spent / 3.5), 1, None) for ending, spent in hours.items()
    ]


MEASURED = make_spec(strategy="ddp", num_gpus=2, input="synthetic", measure="communication")
SERIES = StepSeries(variant="ddp", window_times_ns=((10**9, 2 * 10**9), (3 * 10**9, 10**9)))


@pytest.mark.parametrize(
    ("found", "timed_hours", "other_hours"),
    [
        pytest.param(
            took(3600, make_spec(), epoch_times_s=(2.0, 1800.0), allocated=4),
            *(0.5, 3.5),
            id="GPUs that were allocated and not used are not timed",
        ),
        pytest.param(
            took(3600, make_spec(windows=3, epochs=5), epoch_times_s=(9, 360, 360, 360, 9)),
            *(0.3, 0.7),
            id="all timed windows count",
        ),
        pytest.param(
            took(1, make_spec(), epoch_times_s=(2.0, 1.5)),  # starts and ends are known to the second
            *(1 / 3600, 0.0),
            id="no more than the attempt took",
        ),
        pytest.param(
            took(3600, make_spec(windows=1, epochs=3, evaluate=True), epoch_times_s=(720, 360, 360)),
            *(0.4, 0.6),
            id="every epoch of a point that evaluates",
        ),
        pytest.param(took(36, make_spec(input="synthetic", max_steps=3)), *(0.0, 0.01), id="a probe is not timed"),
        pytest.param(
            with_measurement(
                took(36, MEASURED),
                epochs=(),
                communication=Communication(steps_per_window=1, series=(SERIES,)),
            ),
            *(2 * 5 / 3600, 0.02 - 2 * 5 / 3600),  # the slowest ranks: 2 s and 3 s, on two GPUs
            id="the series of a communication point",
        ),
    ],
)
def test_what_of_an_attempt_was_timed(found: Record, timed_hours: float, other_hours: float) -> None:
    assert gpu_hours(found) == pytest.approx({"ok_timed": timed_hours, "ok_other": other_hours})


def test_processes_on_the_cpu_are_no_gpus() -> None:
    spec = make_spec(device="cpu", strategy="ddp", num_gpus=2)
    assert_row(cost(took(3600, spec, status="failed"))["failed"], gpu_hours=None, process_hours=2.0)


def test_an_implied_oom_costs_nothing_and_is_counted_apart() -> None:
    failure = Failure(kind="implied_oom", message="not run")
    found = [took(36, make_spec(), status="oom"), make_record(make_spec(repeat=1), status="oom", failure=failure)]
    assert_row(cost(*found)["oom"], gpu_hours=0.01, n=1, note="1 more not run: a smaller batch ran out of memory")


def test_attempts_without_their_times_are_said_and_are_not_free() -> None:
    rows = cost(
        took(36, make_spec()), make_record(make_spec(repeat=1)), make_record(make_spec(repeat=2), status="failed")
    )
    assert_row(rows["ok_other"], n=2, note="1 without their times")
    assert_row(rows["failed"], gpu_hours=None, note="1 without their times")


@pytest.mark.parametrize("ended_at", [None, "2025-06-01T11:59:59Z"])
def test_times_that_say_nothing_are_unknown(ended_at: str | None) -> None:
    assert attempt_span(make_record(started_at=START, ended_at=ended_at)) is None


def test_what_was_measured_elsewhere_cost_nothing_here() -> None:
    assert build(make_record(measured=False))["cost"] == []
