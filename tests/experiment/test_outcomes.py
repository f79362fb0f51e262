from collections.abc import Sequence
from pathlib import Path

import pytest
from factories import make_record, make_spec
from hypothesis import given
from hypothesis import strategies as st

from pipeline.experiment import record_store
from pipeline.experiment.outcomes import CollectedOutcomes, resolve_outcomes
from pipeline.experiment.record import Record, Status
from pipeline.experiment.spec import Spec

POINTS = [make_spec(batch_size_per_gpu=2**power) for power in range(4)]
STRANGER = make_spec(batch_size_per_gpu=999)
BEST_FIRST: tuple[Status, ...] = ("ok", "oom", "failed")

Attempts = list[Status]
attempts_of_a_point = st.lists(st.sampled_from(BEST_FIRST), max_size=3)


def make_attempts(spec: Spec, statuses: Sequence[Status]) -> list[Record]:
    return [make_record(spec, status=status, attempt=attempt) for attempt, status in enumerate(statuses)]


def spoilt(spec: Spec) -> record_store.RejectedFile:
    return record_store.RejectedFile(Path(f"{spec.run_id()}.7.json"), spec.run_id(), "is truncated")


def resolve_folder(expected: Sequence[Spec], folder: Path) -> CollectedOutcomes:
    found, rejected = record_store.load_folder(folder)
    return resolve_outcomes(expected, found, rejected)


@given(
    st.lists(attempts_of_a_point, min_size=4, max_size=4),
    st.sets(st.integers(0, 3)),
    attempts_of_a_point,
    st.booleans(),
)
def test_every_point_is_in_exactly_one_state_and_every_record_counts_once(
    statuses: list[Attempts], bad: set[int], strange: Attempts, newest_first: bool
) -> None:
    found = [record for spec, parts in zip(POINTS, statuses, strict=True) for record in make_attempts(spec, parts)]
    found += make_attempts(STRANGER, strange)
    found.sort(key=lambda record: record.attempt, reverse=newest_first)
    outcomes, coverage, notes = resolve_outcomes(POINTS, found, [spoilt(POINTS[i]) for i in sorted(bad)])
    by_rule = [
        next((status for status in BEST_FIRST if status in parts), "rejected" if i in bad else "missing")
        for i, parts in enumerate(statuses)
    ]
    assert [(outcome.spec, outcome.status) for outcome in outcomes] == list(zip(POINTS, by_rule, strict=True))
    parts = (coverage.ok, coverage.oom, coverage.failed, coverage.missing, coverage.rejected)
    assert parts == tuple(by_rule.count(word) for word in ("ok", "oom", "failed", "missing", "rejected"))
    assert coverage.expected == sum(parts) == 4
    assert coverage.ok + coverage.oom + coverage.failed + coverage.superseded + coverage.foreign == len(found)
    assert (coverage.foreign, len(notes)) == (len(strange), len(bad) + len(strange))


@pytest.mark.fault("F22")
@pytest.mark.parametrize(
    ("statuses", "status", "attempt"),
    [
        (["ok", "oom", "failed"], "ok", 0),
        (["ok", "failed", "ok"], "ok", 2),
        (["oom", "failed"], "oom", 0),
        (["failed", "oom", "oom"], "oom", 2),
        (["failed", "failed"], "failed", 1),
    ],
)
def test_the_latest_ok_speaks_for_a_point_else_the_latest_oom_else_the_latest_failed(
    statuses: Attempts, status: Status, attempt: int
) -> None:
    (outcome,), coverage, _ = resolve_outcomes(POINTS[:1], make_attempts(POINTS[0], statuses), [])
    assert (outcome.status, outcome.record and outcome.record.attempt) == (status, attempt)
    assert coverage.superseded == len(statuses) - 1


def test_an_oom_is_a_result_and_the_rest_are_gaps() -> None:
    found = [make_record(spec, status=status) for spec, status in zip(POINTS, BEST_FIRST, strict=False)]
    coverage = resolve_outcomes([*POINTS, STRANGER], found, [spoilt(STRANGER)]).coverage
    assert coverage.num_gaps == 3  # failed, missing and rejected; not ok, not oom


@pytest.mark.fault("F22")
def test_files_count_as_duplicate_superseded_or_foreign_and_lose_nothing(tmp_path: Path) -> None:
    first = record_store.publish_record(make_record(POINTS[0], status="failed"), tmp_path)
    record_store.publish_record(
        make_record(POINTS[0], launch_id="again"), tmp_path
    )  # attempt 1: the first is superseded
    (tmp_path / "backup.json").write_bytes(first.read_bytes())  # a copy: duplicate
    (tmp_path / "notes.json").write_text("{}")  # junk: foreign
    record_store.publish_record(make_record(STRANGER), tmp_path)  # of another experiment: foreign
    (tmp_path / f"{POINTS[1].run_id()}.0.json").write_text('{"schema')  # its only record is invalid
    outcomes, coverage, notes = resolve_folder(POINTS, tmp_path)
    assert [outcome.status for outcome in outcomes] == ["ok", "rejected", "missing", "missing"]
    assert (coverage.superseded, coverage.duplicate, coverage.foreign) == (1, 1, 2)
    assert len(notes) == 4
    for name in ("backup.json", "notes.json", f"{POINTS[1].run_id()}.0.json", STRANGER.run_id()):
        assert any(name in note for note in notes)


def test_a_copy_of_nothing_that_is_there_is_the_point_rejected(tmp_path: Path) -> None:
    path = record_store.publish_record(make_record(POINTS[0]), tmp_path)
    path.rename(tmp_path / f"{POINTS[0].run_id()}.3.json")  # says attempt 3, holds attempt 0
    (outcome,), coverage, _ = resolve_folder(POINTS[:1], tmp_path)
    assert (outcome.status, "which its name does not say" in outcome.reason) == ("rejected", True)
    assert (coverage.rejected, coverage.duplicate, coverage.foreign) == (1, 0, 0)


def test_a_failure_keeps_its_reason_and_a_missing_point_says_that_it_has_no_record() -> None:
    found = [make_record(POINTS[0], status="failed", reason="rank 1 exited with 3")]
    assert [outcome.reason for outcome in resolve_outcomes(POINTS[:2], found, []).outcomes] == [
        "rank 1 exited with 3",
        "no record",
    ]


@pytest.mark.parametrize(
    ("file", "cure"),
    [
        (spoilt(POINTS[0]), "is truncated; remove it and submit again"),
        (spoilt(POINTS[0])._replace(of_other_version=True), "is truncated"),
        (
            spoilt(POINTS[0])._replace(reason="cannot be read: Permission denied"),
            "cannot be read: Permission denied; make it readable",
        ),
        (
            spoilt(POINTS[0])._replace(copy_of=(POINTS[0].run_id(), 2)),
            f"is truncated; rename it to {POINTS[0].run_id()}.2.json",
        ),
    ],
)
def test_a_sound_file_is_not_to_be_thrown_away(file: record_store.RejectedFile, cure: str) -> None:
    (outcome,) = resolve_outcomes(POINTS[:1], [], [file]).outcomes
    assert outcome.reason == f"its only record was not read: {cure}"
    assert outcome.may_hold_result == ("remove it" not in cure)
