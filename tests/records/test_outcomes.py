"""What became of each point, and which out-of-memory another one implies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, succeeded
from factories import H200, known, make_record, make_spec, write_file
from hypothesis import given
from hypothesis import strategies as st

from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.folder import Experiment
from pipeline.records.outcomes import CollectedOutcomes, resolve_outcomes
from pipeline.records.record import Environment, Failure, Record, Status
from pipeline.records.store import find_implying_oom, implied_oom_record
from pipeline.report.markdown import render_experiment
from pipeline.report.questions import build_tables
from pipeline.runner.launch_options import LaunchOptions, Rerun, launch_command
from pipeline.system import host

POINTS = [make_spec(batch_size_per_gpu=2**power) for power in range(4)]
STRANGER = make_spec(batch_size_per_gpu=999)
BEST_FIRST: tuple[Status, ...] = ("ok", "oom", "failed")

Attempts = list[Status]
attempts_of_a_point = st.lists(st.sampled_from(BEST_FIRST), max_size=3)


def make_attempts(spec: Spec, statuses: Sequence[Status]) -> list[Record]:
    return [make_record(spec, status=status, attempt=attempt) for attempt, status in enumerate(statuses)]


def spoilt(spec: Spec) -> store.RejectedFile:
    return store.RejectedFile(Path(f"{spec.run_id()}.7.json"), spec.run_id(), "is truncated")


def resolve_folder(expected: Sequence[Spec], folder: Path) -> CollectedOutcomes:
    found, rejected = store.load_folder(folder)
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
    outcomes, coverage, notes, _ = resolve_outcomes(POINTS, found, [spoilt(POINTS[i]) for i in sorted(bad)])
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
    (outcome,), coverage, *_ = resolve_outcomes(POINTS[:1], make_attempts(POINTS[0], statuses), [])
    assert (outcome.status, outcome.record and outcome.record.attempt) == (status, attempt)
    assert coverage.superseded == len(statuses) - 1


@pytest.mark.fault("F22")
def test_files_count_as_duplicate_superseded_or_foreign_and_lose_nothing(tmp_path: Path) -> None:
    first = store.publish_record(make_record(POINTS[0], status="failed"), tmp_path)
    store.publish_record(make_record(POINTS[0], launch_id="again"), tmp_path)  # attempt 1: the first is superseded
    (tmp_path / "backup.json").write_bytes(first.read_bytes())  # a copy: duplicate
    (tmp_path / "notes.json").write_text("{}")  # junk: foreign
    store.publish_record(make_record(STRANGER), tmp_path)  # of another experiment: foreign
    (tmp_path / f"{POINTS[1].run_id()}.0.json").write_text('{"schema')  # its only record is invalid
    outcomes, coverage, notes, _ = resolve_folder(POINTS, tmp_path)
    assert [outcome.status for outcome in outcomes] == ["ok", "rejected", "missing", "missing"]
    assert (coverage.superseded, coverage.duplicate, coverage.foreign) == (1, 1, 2)
    assert len(notes) == 4
    for name in ("backup.json", "notes.json", f"{POINTS[1].run_id()}.0.json", STRANGER.run_id()):
        assert any(name in note for note in notes)


def test_a_copy_of_nothing_that_is_there_is_the_point_rejected(tmp_path: Path) -> None:
    path = store.publish_record(make_record(POINTS[0]), tmp_path)
    path.rename(tmp_path / f"{POINTS[0].run_id()}.3.json")  # says attempt 3, holds attempt 0
    (outcome,), coverage, *_ = resolve_folder(POINTS[:1], tmp_path)
    assert (outcome.status, "which its name does not say" in outcome.reason) == ("rejected", True)
    assert (coverage.rejected, coverage.duplicate, coverage.foreign) == (1, 0, 0)


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
def test_a_sound_file_is_not_to_be_thrown_away(file: store.RejectedFile, cure: str) -> None:
    (outcome,) = resolve_outcomes(POINTS[:1], [], [file]).outcomes
    assert outcome.reason == f"its only record ({file.path.name}) was not read: {cure}"
    assert outcome.may_hold_result == ("remove it" not in cure)


OOM_SIZES = (1024, 2048, 4096, 8192)


def oom(size: int, *, environment: Environment = H200, kind: Any = "cuda_oom", **fields: Any) -> Record:
    failure = Failure(kind=kind, message="rank 0: out")
    measured = fields.pop("measured", True)
    spec = make_spec(batch_size_per_gpu=size, **fields)
    return make_record(spec, status="oom", failure=failure, environment=environment, measured=measured)


def beside_a_neighbour(size: int, **fields: Any) -> Record:
    """A point that ran out of memory while another process held most of the GPU."""
    reason = "rank 0: another process held 118.5 GiB of GPU 0; run again on a free GPU"
    message = f"{reason}\nOutOfMemoryError: ..."
    failure = Failure(kind="gpu_shared", message=message, rank=0, memory_of_others_bytes=(127_238_406_144,))
    spec = make_spec(batch_size_per_gpu=size, **fields)
    return make_record(spec, status="failed", reason=reason, failure=failure, environment=H200)


def ok(size: int, **fields: Any) -> Record:
    return make_record(make_spec(batch_size_per_gpu=size), **fields)


H200_ALONE = frozenset({"NVIDIA H200"})
OTHER_RUNS: list[dict[str, Any]] = [{"seed": 1}, {"repeat": 1}]
ON_CPU: dict[str, Any] = {"device": "cpu", "memory_limit_gib": 8}


@pytest.mark.parametrize(
    ("found", "gpus", "fields", "implied_by"),
    [
        ([oom(2048), oom(1024), oom(512, num_samples=40_000)], H200_ALONE, {}, 1024),  # by the smallest
        *(([oom(size, repeat=1)], H200_ALONE, {}, None) for size in (4096, 8192)),  # the same and a larger one
        *(([oom(2048, **other)], H200_ALONE, {}, 2048) for other in OTHER_RUNS),
        *(
            ([oom(2048, **other)], H200_ALONE, {}, None)
            for other in (
                *({"precision": "bf16"}, {"memory_limit_gib": 8}, {"strategy": "ddp"}, {"model": "lenet"}),
                *({"epochs": 3}, {"input": "synthetic"}),
            )
        ),
        *(
            ([oom(2048)], frozenset(gpus), {}, None)  # unknown, another and mixed GPUs
            for gpus in ((), ("NVIDIA A40",), ("NVIDIA H200", "NVIDIA A40"))
        ),
        *(
            ([record], H200_ALONE, {}, None)  # only a measured OOM of the GPU's memory implies
            for record in (
                oom(2048, environment=Environment()),  # nothing says on which GPU
                oom(2048, kind="host_oom"),  # the host's memory is other jobs' too
                oom(2048, kind="stated_oom", measured=False),
                oom(2048, kind="implied_oom"),  # the chain ends at one that was measured
                ok(2048, status="failed", environment=H200),
                beside_a_neighbour(2048),
            )
        ),
        *(
            # nothing is implied past a batch that did fit
            ([make_record(make_spec(batch_size_per_gpu=fitted, repeat=1)), oom(1024), oom(2048)], H200_ALONE, {}, size)
            for fitted, size in {512: 1024, 1024: 2048, 2048: None, 8192: None}.items()
        ),
        ([oom(2048), ok(2048, launch_id="again")], H200_ALONE, {}, None),  # refuted by a later attempt
        *(
            # on the CPU only a stated limit is the same everywhere
            ([oom(2048, kind="host_oom", environment=Environment(), **fields)], frozenset(), fields, size)
            for fields, size in ((ON_CPU, 2048), (ON_CPU | {"memory_limit_gib": None}, None))
        ),
    ],
)
def test_the_oom_of_a_batch_is_implied_by_the_smallest_measured_one_alike(
    tmp_path: Path, found: list[Record], gpus: frozenset[str], fields: dict[str, Any], implied_by: int | None
) -> None:
    """A batch of 4096 runs where nothing implies its OOM."""
    for record in found:
        store.publish_record(record, tmp_path)
    spec = make_spec(**{"batch_size_per_gpu": 4096, **fields})
    points = {*(record.spec for record in found), *(make_spec(batch_size_per_gpu=size) for size in OOM_SIZES), spec}
    cause = find_implying_oom(spec, points, tmp_path, gpus)
    assert (cause and cause.spec.batch_size_per_gpu) == implied_by


def test_an_implied_oom_is_a_record_and_the_tables_name_what_implies_it(tmp_path: Path) -> None:
    cause = oom(2048)
    record = implied_oom_record(make_spec(batch_size_per_gpu=4096), cause, "launch")
    assert store.load_record(store.publish_record(record, tmp_path)) == record
    assert (record.status, record.failure and record.failure.kind) == ("oom", "implied_oom")
    assert (record.started_at, record.environment) == (None, Environment())  # it ran nowhere
    collected = resolve_outcomes([cause.spec, record.spec], [cause, record], [])
    tables = build_tables(collected.outcomes)
    said = f"implied by {cause.run_id}"
    assert [(row["status"], row["note"]) for row in tables["Q1"]] == [("oom", None), ("oom", said)]
    assert [row["reason"] for row in tables["oom"]] == ["", said]
    assert "1 more not run: a smaller batch ran out of memory" in render_experiment("x", tables, collected)
    assert collected.coverage.oom == 2


def test_the_names_of_gpus_are_read_from_the_kernel_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "NVIDIA_GPUS_PATH", tmp_path)
    assert host.gpu_names() == set()
    for number, name in enumerate(("NVIDIA H200", "NVIDIA H200", "NVIDIA A40")):
        write_file(tmp_path / f"0000:0{number}" / "information", f"Model: \t\t {name}\nIRQ:   \t\t 93\n")
    assert host.gpu_names() == {"NVIDIA H200", "NVIDIA A40"}


@pytest.mark.parametrize("rerun", [None, "failed", "oom", "all"])
def test_what_reruns_is_passed_to_every_launch(rerun: Rerun | None) -> None:
    command = launch_command(Path("manifest.json"), ["x"], LaunchOptions(Path("data"), rerun=rerun))
    assert command[-2:] == (["--rerun", rerun] if rerun else ["--data", str(Path("data").resolve())])


@pytest.mark.training
def test_launch_records_what_is_implied_without_running_it_unless_it_is_asked_to(
    pipeline: Command, tmp_path: Path
) -> None:
    axes: dict[str, Any] = {"device": "cpu", "model": "lenet", "dataset": "synthetic", "input": "synthetic"}
    axes |= {"num_samples": 64, "max_steps": 3, "epochs": 1, "memory_limit_gib": 8}
    small, large = (make_spec(batch_size_per_gpu=size, **axes) for size in (8, 16))
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    with experiment.edit_manifest() as manifest:
        manifest.points = [small, large]
    failure = Failure(kind="host_oom", message="rank 0: out")
    store.publish_record(make_record(small, status="oom", failure=failure), experiment.records_folder)
    launch = ("launch", "--manifest", experiment.manifest_path, "--run-id", large.run_id())
    answer = pipeline(*launch)
    assert (answer.returncode, f"oom: implied by {small.run_id()}" in answer.stderr) == (1, True)
    assert list(experiment.scratch_folder.iterdir()) == []
    succeeded(pipeline(*launch, "--rerun", "oom"))
    attempts = store.load_attempts(experiment.records_folder, {large.run_id()})
    assert [record.status for record in attempts] == ["oom", "ok"]


def test_a_record_that_cannot_be_read_implies_nothing_and_stops_no_point(tmp_path: Path) -> None:
    store.publish_record(oom(2048), tmp_path)
    cut = store.publish_record(oom(1024), tmp_path)
    cut.write_bytes(cut.read_bytes()[:100])
    spec = make_spec(batch_size_per_gpu=4096)
    cause = find_implying_oom(
        spec, [make_spec(batch_size_per_gpu=size) for size in OOM_SIZES], tmp_path, {"NVIDIA H200"}
    )
    assert known(cause).spec.batch_size_per_gpu == 2048
