from pathlib import Path
from typing import Any

import pytest
from conftest import Command, succeeded
from factories import assert_says, make_record, make_spec

from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.implied_oom import find_implying_oom, implied_oom_record
from pipeline.experiment.outcomes import resolve_outcomes
from pipeline.experiment.record import Environment, Failure, Gpu, Record
from pipeline.report.markdown import render_experiment
from pipeline.report.tables import build_tables
from pipeline.runner.launch_options import LaunchOptions, Rerun, launch_command
from pipeline.system import host

H200 = Environment(gpus=(Gpu(name="NVIDIA H200"),))
SIZES = (1024, 2048, 4096, 8192)


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
        record_store.publish_record(record, tmp_path)
    spec = make_spec(**{"batch_size_per_gpu": 4096, **fields})
    points = {*(record.spec for record in found), *(make_spec(batch_size_per_gpu=size) for size in SIZES), spec}
    cause = find_implying_oom(spec, points, tmp_path, gpus)
    assert (cause and cause.spec.batch_size_per_gpu) == implied_by


def test_an_implied_oom_is_a_record_and_the_tables_name_what_implies_it(tmp_path: Path) -> None:
    cause = oom(2048)
    record = implied_oom_record(make_spec(batch_size_per_gpu=4096), cause, "launch")
    assert record_store.load_record(record_store.publish_record(record, tmp_path)) == record
    assert (record.status, record.failure and record.failure.kind) == ("oom", "implied_oom")
    assert (record.started_at, record.environment) == (None, Environment())  # it ran nowhere
    collected = resolve_outcomes([cause.spec, record.spec], [cause, record], [])
    tables = build_tables(collected.outcomes)
    said = f"implied by {cause.run_id}"
    assert [(row["status"], row["note"]) for row in tables["Q1"]] == [("oom", None), ("oom", said)]
    assert [row["reason"] for row in tables["oom"]] == ["", said]
    assert f"4,096 per GPU: OOM ({said})" in render_experiment("x", tables, collected)
    assert collected.coverage.oom == 2


def test_a_point_beside_a_neighbour_is_no_oom_in_the_tables_and_its_reason_names_the_neighbour(tmp_path: Path) -> None:
    record = beside_a_neighbour(8192)
    assert record_store.load_record(record_store.publish_record(record, tmp_path)) == record
    collected = resolve_outcomes([record.spec], [record], [])
    tables = build_tables(collected.outcomes)
    assert (tables["oom"], collected.coverage.oom, collected.coverage.failed) == ([], 0, 1)
    reason = "another process held 118.5 GiB of GPU 0; run again on a free GPU"
    assert_says(render_experiment("x", tables, collected), reason, "0 OOM, 1 failed")


def test_the_names_of_gpus_are_read_from_the_kernel_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "NVIDIA_GPUS_PATH", tmp_path)
    assert host.gpu_names() == set()
    for number, name in enumerate(("NVIDIA H200", "NVIDIA H200", "NVIDIA A40")):
        (tmp_path / f"0000:0{number}").mkdir()
        (tmp_path / f"0000:0{number}" / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 93\n")
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
    record_store.publish_record(make_record(small, status="oom", failure=failure), experiment.records_folder)
    launch = ("launch", "--manifest", experiment.manifest_path, "--run-id", large.run_id())
    answer = pipeline(*launch)
    assert (answer.returncode, f"oom: implied by {small.run_id()}" in answer.stderr) == (1, True)
    assert not experiment.scratch_folder.exists()
    succeeded(pipeline(*launch, "--rerun", "oom"))
    attempts = record_store.load_attempts(experiment.records_folder, large.run_id())
    assert [record.status for record in attempts] == ["oom", "ok"]


def test_a_record_that_cannot_be_read_implies_nothing_and_stops_no_point(tmp_path: Path) -> None:
    record_store.publish_record(oom(2048), tmp_path)
    cut = record_store.publish_record(oom(1024), tmp_path)
    cut.write_bytes(cut.read_bytes()[:100])
    spec = make_spec(batch_size_per_gpu=4096)
    cause = find_implying_oom(spec, [make_spec(batch_size_per_gpu=size) for size in SIZES], tmp_path, {"NVIDIA H200"})
    assert cause is not None
    assert cause.spec.batch_size_per_gpu == 2048
