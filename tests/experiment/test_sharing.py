"""Which points share processes, and that sharing them changes no result but the time they take."""

import errno
import itertools
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from factories import ROOT, make_measurement, make_spec
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.analysis.formulas import GIB
from pipeline.experiment import record_store
from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import add_points
from pipeline.experiment.measurement import DeviceMemory
from pipeline.experiment.packing import (
    EarlierPoint,
    expected_memory_fraction,
    has_memory_headroom,
    may_share_processes,
    pack_elements,
    points_for_same_processes,
    process_layout,
)
from pipeline.experiment.record import Environment, Record
from pipeline.experiment.record_store import load_folder
from pipeline.experiment.spec import Spec
from pipeline.runner import launch_session
from pipeline.runner.failed_record import RankExit
from pipeline.runner.launch_options import LaunchOptions, launch_command
from pipeline.runner.launch_session import RANK_FILES_POLL_S, LaunchSession
from pipeline.runner.rank_files import PointResult, PointTask, RankError
from pipeline.training.device_memory import reset_memory_statistics
from pipeline.training.process_group import Rank

SMALL: dict[str, Any] = {"device": "cpu", "model": "lenet", "dataset": "synthetic", "precision": "fp32"}


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "synthetic", "max_steps": 3},  # looks for what fits
        {"input": "synthetic", "measure": "memory"},
        {"memory_limit_gib": 1.5},  # cannot be lifted again
        {"execution": "compile"},  # its compile time is a result
        {"execution": "graph"},
        {"execution": "auto"},
        {"strategy": "ddp", "num_gpus": 2, "input": "synthetic", "measure": "communication"},  # a profiler may stay
        {"strategy": "ddp", "num_gpus": 2, "num_nodes": 2},
    ],
)
def test_what_others_could_change_or_would_change_has_processes_of_its_own(fields: dict[str, Any]) -> None:
    point, plain = make_spec(**fields), make_spec(repeat=1)
    assert may_share_processes(plain)
    assert not may_share_processes(point)
    assert points_for_same_processes([point, plain]) == [point]
    assert points_for_same_processes([plain, point]) == [plain]


@pytest.mark.parametrize("fields", [{"strategy": "ddp"}, {"model": "lenet"}, {"input": "synthetic"}, {"device": "cpu"}])
def test_points_of_another_layout_of_processes_are_not_shared(fields: dict[str, Any]) -> None:
    assert points_for_same_processes([make_spec(), make_spec(batch_size_per_gpu=64, **fields)]) == [make_spec()]


@pytest.mark.parametrize("fields", [{"repeat": 1}, {"seed": 1}])
def test_a_repeat_is_in_new_processes(fields: dict[str, Any]) -> None:
    first, repeat = make_spec(), make_spec(**fields)
    other = make_spec(batch_size_per_gpu=64, **fields)
    assert points_for_same_processes([first, other, repeat]) == [first, other]


POINTS = [
    make_spec(strategy=strategy, num_gpus=1, batch_size_per_gpu=size, repeat=repeat, seed=repeat, execution=execution)
    for strategy in ("single", "ddp")
    for size in (32, 128)
    for repeat in (0, 1)
    for execution in ("eager", "graph")
]


@given(st.sets(st.sampled_from(POINTS), min_size=1))
def test_a_packed_element_starts_processes_at_most_once_for_each_layout_and_repeat(points: set[Spec]) -> None:
    (element,) = pack_elements(list(points), len(POINTS))
    starts: list[Sequence[Spec]] = []
    left = element
    while left:
        starts.append(points_for_same_processes(left))
        left = left[len(starts[-1]) :]
    assert [spec for shared in starts for spec in shared] == element
    groups = {(process_layout(spec), spec.repeat) for spec in points if may_share_processes(spec)}
    assert len(starts) <= len(groups) + sum(not may_share_processes(spec) for spec in points)


def memory(peak_gib: float, usable_gib: float | None) -> list[DeviceMemory]:
    usable = None if usable_gib is None else int(usable_gib * GIB)
    return [DeviceMemory(rank=0, device="cuda:0", peak_allocated_bytes=int(peak_gib * GIB), usable_bytes=usable)]


def test_the_least_bound_of_points_that_differ_in_batch_alone_holds() -> None:
    """12 GiB of 100 at 128 say at most 24 at 256, whatever 3 GiB at 8 would allow."""
    ended = [EarlierPoint(make_spec(batch_size_per_gpu=8), memory(3, 100)), EarlierPoint(make_spec(), memory(12, 100))]
    assert expected_memory_fraction(make_spec(batch_size_per_gpu=256), ended) == pytest.approx(0.24)
    assert expected_memory_fraction(make_spec(batch_size_per_gpu=64, epochs=7), ended) == pytest.approx(0.12)


def test_where_no_point_is_alike_the_most_of_what_all_say_holds() -> None:
    ended = [EarlierPoint(make_spec(batch_size_per_gpu=8), memory(3, 100)), EarlierPoint(make_spec(), memory(12, 100))]
    assert expected_memory_fraction(make_spec(batch_size_per_gpu=256, precision="fp32"), ended) == pytest.approx(0.96)


@pytest.mark.parametrize(
    ("batch_size", "usable_gib", "expected"), [(640, 100, True), (641, 100, False), (8192, None, True)]
)
def test_a_point_that_may_need_more_than_half_the_memory_does_not_follow(
    batch_size: int, usable_gib: float | None, expected: bool
) -> None:
    assert (
        has_memory_headroom(
            make_spec(batch_size_per_gpu=batch_size), [EarlierPoint(make_spec(), memory(10, usable_gib))]
        )
        is expected
    )


def run(folder: Path, points: Sequence[Spec]) -> tuple[int, dict[str, Record]]:
    """Run the points in one array element; its exit code, and the records by run id."""
    experiment = Experiment(folder / "x")
    experiment.create()
    with experiment.edit_manifest() as manifest:
        add_points(manifest, points)
    command = launch_command(
        experiment.manifest_path, [spec.run_id() for spec in points], LaunchOptions(folder / "data")
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PIPELINE_CACHE": str(folder / "cache")}
    ended = subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    found, rejected = load_folder(experiment.records_folder)
    assert rejected == [], ended.stderr
    return ended.returncode, {record.run_id: record for record in found}


def write_images(folder: Path, count: int) -> None:
    """A folder of so many black images, by turns of two classes."""
    for split in ("train", "test"):
        for number in range(count):
            path = folder / split / ("night", "coal")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32)).save(path)


def losses(record: Record) -> list[float | None]:
    assert record.measurement is not None
    return [epoch.loss for epoch in record.measurement.epochs]


@pytest.mark.training
def test_points_of_one_element_share_processes_and_learn_what_they_learn_alone(tmp_path: Path) -> None:
    points = [make_spec(**SMALL, batch_size_per_gpu=size, num_samples=2048) for size in (512, 64)]
    points += [make_spec(**SMALL, batch_size_per_gpu=128, num_samples=2048, input="synthetic")]
    code, shared = run(tmp_path / "shared", points)
    assert code == 0
    assert [shared[spec.run_id()].launch_id for spec in points] == [shared[points[0].run_id()].launch_id] * 3
    before = [m.num_points_before for spec in points if (m := shared[spec.run_id()].measurement)]
    assert before == [0, 1, 2]
    _, alone = run(tmp_path / "alone", points[1:2])
    own, other = shared[points[1].run_id()], alone[points[1].run_id()]
    assert losses(own) == losses(other)
    assert own.measurement is not None
    assert other.measurement is not None
    peaks = [part.memory[0].peak_allocated_bytes for part in (own.measurement, other.measurement)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


@pytest.mark.fault("F17")
@pytest.mark.training
def test_a_point_that_fails_takes_none_with_it_and_the_rest_runs_in_new_processes(tmp_path: Path) -> None:
    write_images(tmp_path / "data", 8)
    points = [
        make_spec(
            **SMALL | {"dataset": "imagefolder"}, strategy="ddp", num_gpus=2, batch_size_per_gpu=size, num_samples=count
        )
        for size, count in ((1, 8), (2, 8), (3, 9), (4, 8))
    ]
    code, found = run(tmp_path, points)
    records = [found[spec.run_id()] for spec in points]
    assert code == 1
    assert [record.status for record in records] == ["ok", "ok", "failed", "ok"]
    assert "has 8 training images and the point needs 9" in records[2].reason
    assert [m and m.num_points_before for m in (record.measurement for record in records)] == [0, 1, None, 0]
    assert len({record.launch_id for record in records[:3]}) == 1
    assert records[3].launch_id != records[0].launch_id
    times = [(record.started_at or "", record.ended_at or "") for record in records]
    assert all(ended == begun for (_, ended), (begun, _) in itertools.pairwise(times[:3]))


def test_an_ok_point_stays_ok_where_the_next_one_fails_before_anybody_looked(tmp_path: Path) -> None:
    """The next point begins and fails, and the ranks have ended, all between two looks at its folder."""
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    points = [make_spec(batch_size_per_gpu=size) for size in (32, 64)]
    launch = LaunchSession(experiment, "launch", points)
    launch.rank_files_by_point[0].write_point(PointTask(points[0], None))
    launch.rank_files_by_point[0].write_result(PointResult(make_measurement(points[0]), Environment()))
    with launch.publish_while_running():
        time.sleep(RANK_FILES_POLL_S / 4)  # it has looked, and waits
        launch.rank_files_by_point[1].write_error(RankError("exception", "no data", 0, "node", 1))
    launch.publish_finished({0: RankExit(1, 0.0)})
    first, second = launch.published
    assert first is not None
    assert second is not None
    assert (first.status, second.status, second.reason) == ("ok", "failed", "rank 0: no data")
    assert first.ended_at == second.started_at
    assert first.telemetry is not None
    assert not any("ended early" in note for note in first.telemetry.notes)


@pytest.mark.fault("F59")
def test_a_result_that_no_record_holds_costs_its_point_alone(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    points = [make_spec(batch_size_per_gpu=size) for size in (32, 64, 128)]
    launch = LaunchSession(experiment, "launch", points)
    wrong = make_measurement(points[0])
    epochs = tuple(msgspec.structs.replace(epoch, accuracy=2.7) for epoch in wrong.epochs)
    results = [
        msgspec.structs.replace(wrong, epochs=epochs),  # outside of the schema
        msgspec.structs.replace(wrong, epochs=wrong.epochs[:1]),  # not of this spec
        make_measurement(points[2]),
    ]
    for spec, rank_files, measurement in zip(points, launch.rank_files_by_point, results, strict=True):
        rank_files.write_point(PointTask(spec, None))
        rank_files.write_result(PointResult(measurement, Environment()))
    with launch.publish_while_running():
        pass
    launch.publish_finished({})
    found, _ = load_folder(experiment.records_folder)
    by_size = {record.spec.batch_size_per_gpu: record for record in found}
    assert [by_size[size].status for size in (32, 64, 128)] == ["failed", "failed", "ok"]
    assert "measurement.epochs[0].accuracy" in by_size[32].reason
    assert "epochs" in by_size[64].reason


@pytest.mark.fault("F20")
@pytest.mark.parametrize(("num_errors", "statuses"), [(3, ["ok", "ok"]), (4, ["failed", "ok"])])
def test_a_write_error_is_tried_again_and_costs_at_most_its_own_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_errors: int, statuses: list[str]
) -> None:
    errors = [OSError(errno.ESTALE, "Stale file handle")] * num_errors
    publish = record_store.publish_record

    def publish_or_fail(record: Record, folder: Path) -> Path:
        if errors:
            raise errors.pop()
        return publish(record, folder)

    monkeypatch.setattr(record_store, "publish_record", publish_or_fail)
    monkeypatch.setattr(launch_session, "PUBLISH_WAITS_S", (0, 0, 0))
    experiment = Experiment(tmp_path / "x")
    experiment.create()
    points = [make_spec(batch_size_per_gpu=size) for size in (32, 64)]
    launch = LaunchSession(experiment, "launch", points)
    for spec, rank_files in zip(points, launch.rank_files_by_point, strict=True):
        rank_files.write_point(PointTask(spec, None))
        rank_files.write_result(PointResult(make_measurement(spec), Environment()))
    with launch.publish_while_running():
        pass
    launch.publish_finished({})
    assert [record.status for record in launch.published if record is not None] == statuses
    found, _ = load_folder(experiment.records_folder)
    assert len(found) == statuses.count("ok")
    if "failed" in statuses:
        assert launch.rank_files_by_point[0].read_result() is not None  # a person may still want it


def test_a_process_whose_peak_memory_cannot_be_reset_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError("read-only /proc")

    spec = make_spec(device="cpu")
    rank = Rank(0, 1, torch.device("cpu"))
    assert reset_memory_statistics(spec, rank)
    monkeypatch.setattr(Path, "write_text", refuse)
    assert not reset_memory_statistics(spec, rank)
