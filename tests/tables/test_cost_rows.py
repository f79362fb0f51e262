import re
from typing import Any

import msgspec
import pytest
from factories import make_measurement, make_record, make_spec

from pipeline.analysis.attempts import attempt_span
from pipeline.experiment.measurement import Communication, StepSeries
from pipeline.experiment.outcomes import resolve_outcomes
from pipeline.experiment.record import Environment, Failure, Record
from pipeline.experiment.spec import Spec
from pipeline.pages.markdown import render_experiment
from pipeline.tables.build_tables import build_tables
from pipeline.tables.columns import Row
from pipeline.tables.cost_rows import ENDINGS

START = "2025-06-01T12:00:00Z"


def took(seconds: int, spec: Spec, *, allocated: int | None = None, **fields: Any) -> Record:
    """A record of an attempt of so many seconds; its timed epoch took one second."""
    ended_at = f"2025-06-01T{12 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}Z"
    environment = Environment(num_gpus_allocated=allocated)
    return make_record(spec, started_at=START, ended_at=ended_at, environment=environment, **fields)


def cost(*found: Record) -> dict[str, Row]:
    """The rows of the one device, by ending."""
    rows = build_tables(resolve_outcomes(list(dict.fromkeys(record.spec for record in found)), found, []).outcomes)[
        "cost"
    ]
    assert len(rows) == len(ENDINGS)
    return {row["ending"]: row for row in rows}


def test_every_attempt_costs_its_time_on_all_gpus_by_how_it_ended() -> None:
    four = make_spec(strategy="ddp", num_gpus=4)
    found = [
        took(3600, make_spec(repeat=1), epoch_times_s=(2.0, 900.0)),  # 900 s of 3,600 s are timed
        took(900, four, status="oom"),
        took(1800, make_spec(repeat=2), status="failed", allocated=2),
        took(1800, make_spec(repeat=1), status="failed", attempt=1),  # the first attempt speaks for the point
    ]
    rows = cost(*found)
    hours = {"ok_timed": 0.25, "ok_other": 0.75, "oom": 1.0, "failed": 1.0, "superseded": 0.5}
    assert {ending: row["gpu_hours"] for ending, row in rows.items()} == pytest.approx(hours)
    assert [row["allocated_share"] for row in rows.values()] == pytest.approx([h / 3.5 for h in hours.values()])
    assert [row["n"] for row in rows.values()] == [1, 1, 1, 1, 1]
    assert {row["process_hours"] for row in rows.values()} == {None}


def test_gpus_that_were_allocated_and_not_used_are_not_timed() -> None:
    rows = cost(took(3600, make_spec(), epoch_times_s=(2.0, 1800.0), allocated=4))
    assert (rows["ok_timed"]["gpu_hours"], rows["ok_other"]["gpu_hours"]) == (0.5, 3.5)


def test_all_timed_windows_count_and_no_more_than_the_attempt_took() -> None:
    spec = make_spec(windows=3, epochs=5)
    assert cost(took(3600, spec, epoch_times_s=(9, 360, 360, 360, 9)))["ok_timed"]["gpu_hours"] == pytest.approx(0.3)
    rows = cost(took(1, make_spec(), epoch_times_s=(2.0, 1.5)))  # starts and ends are known to the second
    assert (rows["ok_timed"]["allocated_share"], rows["ok_other"]["gpu_hours"]) == (1.0, 0.0)


def test_every_epoch_of_a_point_that_evaluates_counts() -> None:
    spec = make_spec(windows=1, epochs=3, evaluate=True)
    assert cost(took(3600, spec, epoch_times_s=(720, 360, 360)))["ok_timed"]["gpu_hours"] == pytest.approx(0.4)


def test_a_probe_is_not_timed_and_the_series_of_a_communication_point_are() -> None:
    probe = make_spec(input="synthetic", max_steps=3)
    assert cost(took(36, probe))["ok_timed"]["gpu_hours"] == 0.0
    spec = make_spec(strategy="ddp", num_gpus=2, input="synthetic", measure="communication")
    series = StepSeries(variant="ddp", window_times_ns=((10**9, 2 * 10**9), (3 * 10**9, 10**9)))
    communication = Communication(steps_per_window=1, series=(series,))
    measurement = msgspec.structs.replace(make_measurement(spec), epochs=(), communication=communication)
    rows = cost(took(36, spec, measurement=measurement))
    assert rows["ok_timed"]["gpu_hours"] == pytest.approx(2 * 5 / 3600)  # the slowest ranks: 2 s and 3 s, on two GPUs


def test_processes_on_the_cpu_are_no_gpus() -> None:
    spec = make_spec(device="cpu", strategy="ddp", num_gpus=2)
    row = cost(took(3600, spec, status="failed"))["failed"]
    assert (row["gpu_hours"], row["process_hours"]) == (None, 2.0)


def test_an_implied_oom_costs_nothing_and_is_counted_apart() -> None:
    failure = Failure(kind="implied_oom", message="not run")
    found = [took(36, make_spec(), status="oom"), make_record(make_spec(repeat=1), status="oom", failure=failure)]
    row = cost(*found)["oom"]
    assert (row["gpu_hours"], row["n"], row["note"]) == (0.01, 1, "1 more not run: a smaller batch ran out of memory")


def test_attempts_without_their_times_are_said_and_are_not_free() -> None:
    found = [took(36, make_spec()), make_record(make_spec(repeat=1))]
    found += [make_record(make_spec(repeat=2), status="failed")]
    rows = cost(*found)
    assert (rows["ok_other"]["n"], rows["ok_other"]["note"]) == (2, "1 without their times")
    assert (rows["failed"]["gpu_hours"], rows["failed"]["note"]) == (None, "1 without their times")


@pytest.mark.parametrize("ended_at", [None, "2025-06-01T11:59:59Z"])
def test_times_that_say_nothing_are_unknown(ended_at: str | None) -> None:
    assert attempt_span(make_record(started_at=START, ended_at=ended_at)) is None


def test_what_was_measured_elsewhere_cost_nothing_here() -> None:
    outcomes = resolve_outcomes([make_spec()], [make_record(measured=False)], []).outcomes
    assert build_tables(outcomes)["cost"] == []


def test_the_report_shows_the_cost_and_the_share_that_was_timed() -> None:
    record = took(3600, make_spec(), epoch_times_s=(2.0, 900.0))
    collected = resolve_outcomes([record.spec], [record], [])
    text = render_experiment("x", build_tables(collected.outcomes), collected)
    section = text.partition("## Cost")[2]
    assert re.search(r"\| ok: timed +\| +0.250 \| +25.0 \| +1 \|", section)
    assert "process-hours" not in section
    assert "Medians" not in section
