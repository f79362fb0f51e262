"""Which points are in one element and share processes, and that sharing changes no result but the time they take."""

import errno
import itertools
import os
import threading
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import run_program
from factories import (
    ROOT,
    assert_says,
    known,
    make_experiment,
    make_measurement,
    make_spec,
    measurement_of,
    raising,
    records_of,
)
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.figures.formulas import GIB
from pipeline.plan.grid import Grid
from pipeline.plan.resources import (
    Resources,
    may_share_processes,
    pack_elements,
    points_for_same_processes,
    process_layout,
)
from pipeline.plan.spec import Spec
from pipeline.records import store
from pipeline.records.folder import Experiment
from pipeline.records.record import MAX_STEP_TIMES, DeviceMemory, Environment, Measurement, Record
from pipeline.runner import launch_session
from pipeline.runner.failures import RankExit
from pipeline.runner.launch_options import LaunchOptions, launch_command
from pipeline.runner.rank_files import PointResult, PointTask, RankError, RankFiles
from pipeline.runner.rank_process import MAX_SHARED_MEMORY_FRACTION, EarlierPoint, expected_memory_fraction
from pipeline.submission.batch_script import SlurmOptions
from pipeline.submission.plan import NOT_PACKED, Cluster, PlannedArray, SubmitContext, plan_arrays
from pipeline.training.devices import reset_memory_statistics
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
    assert (may_share_processes(plain), may_share_processes(point)) == (True, False)
    assert points_for_same_processes([point, plain]) == [point]
    assert points_for_same_processes([plain, point]) == [plain]


@pytest.mark.parametrize(
    ("points", "num_shared"),
    [
        *(  # another layout of processes
            ([make_spec(), make_spec(batch_size_per_gpu=64, **fields)], 1)
            for fields in ({"strategy": "ddp"}, {"model": "lenet"}, {"input": "synthetic"}, {"device": "cpu"})
        ),
        *(  # a repeat
            ([make_spec(), make_spec(batch_size_per_gpu=64, **fields), make_spec(**fields)], 2)
            for fields in ({"repeat": 1}, {"seed": 1})
        ),
    ],
)
def test_a_point_of_another_layout_and_a_repeat_are_in_new_processes(points: list[Spec], num_shared: int) -> None:
    assert points_for_same_processes(points) == points[:num_shared]


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


@pytest.mark.parametrize(
    ("fields", "fraction"),
    [
        # the least bound of points that differ in batch alone: 12 of 100 GiB at 128 say at most 24 at 256
        ({"batch_size_per_gpu": 256}, 0.24),
        ({"batch_size_per_gpu": 64, "epochs": 7}, 0.12),
        # where no point is alike, the most of what all say
        ({"batch_size_per_gpu": 256, "precision": "fp32"}, 0.96),
    ],
)
def test_the_expected_memory_follows_from_the_points_before(fields: dict[str, Any], fraction: float) -> None:
    ended = [EarlierPoint(make_spec(batch_size_per_gpu=8), memory(3, 100)), EarlierPoint(make_spec(), memory(12, 100))]
    assert expected_memory_fraction(make_spec(**fields), ended) == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("batch_size", "usable_gib", "expected"), [(640, 100, True), (641, 100, False), (8192, None, True)]
)
def test_a_point_that_may_need_more_than_half_the_memory_does_not_follow(
    batch_size: int, usable_gib: float | None, expected: bool
) -> None:
    ended = [EarlierPoint(make_spec(), memory(10, usable_gib))]
    fraction = expected_memory_fraction(make_spec(batch_size_per_gpu=batch_size), ended)
    assert (fraction <= MAX_SHARED_MEMORY_FRACTION) is expected


def run(folder: Path, points: Sequence[Spec]) -> tuple[int, dict[str, Record]]:
    """Run the points in one array element; its exit code, and the records by run id."""
    experiment = make_experiment(folder / "x", missing=points)
    options = LaunchOptions(folder / "data")
    command = launch_command(experiment.manifest_path, [spec.run_id() for spec in points], options)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PIPELINE_CACHE": str(folder / "cache")}
    ended = run_program(*command, env=environ)
    return ended.returncode, {record.run_id: record for record in records_of(experiment)}


def write_images(folder: Path, count: int) -> None:
    """A folder of so many black images, by turns of two classes."""
    for split in ("train", "test"):
        for number in range(count):
            path = folder / split / ("night", "coal")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32)).save(path)


@pytest.mark.training
def test_points_of_one_element_share_processes_and_learn_what_they_learn_alone(tmp_path: Path) -> None:
    points = [make_spec(**SMALL, batch_size_per_gpu=size, num_samples=512) for size in (512, 64)]
    points += [make_spec(**SMALL, batch_size_per_gpu=128, num_samples=512, input="synthetic")]
    code, shared = run(tmp_path / "shared", points)
    assert (code, len({record.launch_id for record in shared.values()})) == (0, 1)
    assert [measurement_of(shared[spec.run_id()]).num_points_before for spec in points] == [0, 1, 2]
    _, alone = run(tmp_path / "alone", points[1:2])
    own, other = (measurement_of(found[points[1].run_id()]) for found in (shared, alone))
    assert [epoch.loss for epoch in own.epochs] == [epoch.loss for epoch in other.epochs]
    assert own.memory[0].peak_allocated_bytes == pytest.approx(other.memory[0].peak_allocated_bytes, rel=0.1)


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
    assert (code, [record.status for record in records]) == (1, ["ok", "ok", "failed", "ok"])
    assert "has 8 training images and the configuration needs 9" in records[2].reason
    assert [m and m.num_points_before for m in (record.measurement for record in records)] == [0, 1, None, 0]
    assert [record.launch_id == records[0].launch_id for record in records] == [True, True, True, False]
    times = [(record.started_at or "", record.ended_at or "") for record in records]
    assert all(ended == begun for (_, ended), (begun, _) in itertools.pairwise(times[:3]))


SIZES = {size: make_spec(batch_size_per_gpu=size) for size in (32, 64, 128, 256)}


def make_launch(folder: Path, *measured: Measurement) -> launch_session.LaunchSession:
    """A launch of these sizes, at least two of them, whose ranks have left those measurements."""
    points = list(SIZES.values())[: max(2, len(measured))]
    experiment = Experiment(folder)  # without a manifest
    experiment.create()
    launch = launch_session.LaunchSession(experiment, experiment.scratch_folder, "launch", points)
    for spec, rank_files, measurement in zip(points, launch.rank_files_by_point, measured, strict=False):
        rank_files.write_point(PointTask(spec, None))
        rank_files.write_result(PointResult(measurement, Environment()))
    return launch


def publish(launch: launch_session.LaunchSession) -> None:
    with launch.publish_while_running():
        pass
    launch.publish_finished({})


def test_an_ok_point_stays_ok_where_the_next_one_fails_before_anybody_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next point begins and fails, and the ranks have ended, all between two looks at its folder."""
    looked, has_started = threading.Event(), RankFiles.has_started

    def look(rank_files: RankFiles) -> bool:
        found = has_started(rank_files)
        looked.set()
        return found

    monkeypatch.setattr(RankFiles, "has_started", look)
    monkeypatch.setattr(launch_session, "RANK_FILES_POLL_S", 60)
    launch = make_launch(tmp_path / "x", make_measurement(SIZES[32]))
    with launch.publish_while_running():
        assert looked.wait(60)
        launch.rank_files_by_point[1].write_error(RankError("exception", "no data", 0, "node", 1))
    launch.publish_finished({0: RankExit(1, 0.0)})
    first, second = (record for record in launch.published if record is not None)
    assert (first.status, second.status, second.reason) == ("ok", "failed", "rank 0: no data")
    assert first.ended_at == second.started_at
    assert first.telemetry is not None
    assert not any("ended early" in note for note in first.telemetry.notes)


@pytest.mark.fault("F59")
def test_a_result_that_no_record_holds_costs_its_point_alone(tmp_path: Path) -> None:
    wrong = make_measurement(SIZES[32])
    epochs = tuple(msgspec.structs.replace(epoch, accuracy=2.7) for epoch in wrong.epochs)
    of_no_schema = msgspec.structs.replace(wrong, epochs=epochs)
    of_no_spec = msgspec.structs.replace(wrong, epochs=wrong.epochs[:1])
    too_large = make_measurement(SIZES[128], step_times_ns=(10**18,) * MAX_STEP_TIMES)
    launch = make_launch(tmp_path / "x", of_no_schema, of_no_spec, too_large, make_measurement(SIZES[256]))
    publish(launch)
    found = {record.spec.batch_size_per_gpu: record for record in records_of(Experiment(tmp_path / "x"))}
    assert [found[size].status for size in SIZES] == ["failed", "failed", "failed", "ok"]
    assert [known(record).status for record in launch.published] == ["failed", "failed", "failed", "ok"]
    for size, said in ((32, "measurement.epochs[0].accuracy"), (64, "epochs"), (128, "bytes, more than")):
        assert_says(found[size].reason, "the result could not be published", said)


@pytest.mark.fault("F20")
@pytest.mark.parametrize(("num_errors", "statuses"), [(3, ["ok", "ok"]), (4, ["failed", "ok"])])
def test_a_write_error_is_tried_again_and_costs_at_most_its_own_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_errors: int, statuses: list[str]
) -> None:
    errors = [OSError(errno.ESTALE, "Stale file handle")] * num_errors
    publish_record = store.publish_record

    def publish_or_fail(record: Record, folder: Path) -> Path:
        if errors:
            raise errors.pop()
        return publish_record(record, folder)

    monkeypatch.setattr(store, "publish_record", publish_or_fail)
    monkeypatch.setattr(launch_session, "PUBLISH_WAITS_S", (0, 0, 0))
    launch = make_launch(tmp_path / "x", *map(make_measurement, list(SIZES.values())[:2]))
    publish(launch)
    assert [record.status for record in launch.published if record is not None] == statuses
    assert len(store.load_folder(tmp_path / "x" / "records")[0]) == statuses.count("ok")
    if "failed" in statuses:
        assert launch.rank_files_by_point[0].read_result() is not None  # a person may still want it


def test_a_process_whose_peak_memory_cannot_be_reset_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rank = make_spec(device="cpu"), Rank(0, 1, torch.device("cpu"))
    assert reset_memory_statistics(spec, rank)
    monkeypatch.setattr(Path, "write_text", raising(PermissionError("read-only /proc")))
    assert not reset_memory_statistics(spec, rank)


PACKED_SIZES = [2**power for power in range(3, 13)]
PACKED = [make_spec(batch_size_per_gpu=size) for size in PACKED_SIZES]
PROBES = [make_spec(batch_size_per_gpu=size, input="synthetic", max_steps=3) for size in (65_536, 16_384, 32_768)]


def arrays_of(points: Sequence[Spec], points_per_element: int, cluster: Cluster) -> list[PlannedArray]:
    options = Namespace(points_per_element=points_per_element, slurm_options=SlurmOptions(), max_parallel=None)
    context = SubmitContext(options, Experiment(Path("x")), Grid("x", tuple(points), Resources()), cluster)
    return plan_arrays(context, points)


def sizes_of(element: Sequence[Spec]) -> list[int]:
    return [spec.batch_size_per_gpu for spec in element]


@given(st.integers(1, 12), st.sets(st.sampled_from([*PACKED, *PROBES]), min_size=1))
def test_every_point_is_in_one_element_and_elements_are_full_but_the_last(most: int, points: set[Spec]) -> None:
    elements = pack_elements(sorted(points, key=Spec.run_id), most)
    assert {spec for element in elements for spec in element} == points
    assert sum(len(element) for element in elements) == len(points)
    assert all(len(element) == most for element in elements[:-1])
    assert 1 <= len(elements[-1]) <= most


def test_points_that_are_alone_in_their_job_keep_the_order_of_the_grid() -> None:
    points = [*PROBES, *PACKED]
    assert [array.elements for array in arrays_of(points, 1, Cluster("slurm"))] == [[[spec] for spec in points]]


def runs_of(points: Sequence[Spec], points_per_element: int) -> list[tuple[str, int, int]]:
    """The points in the order in which this machine runs them: strategy, batch size per GPU and repeat."""
    ordered = [spec for element in pack_elements(points, points_per_element) for spec in element]
    return [(spec.strategy, spec.batch_size_per_gpu, spec.repeat) for spec in ordered]


@pytest.mark.parametrize("points_per_element", [1, 4, 7])
def test_a_baseline_runs_right_before_its_points_and_every_repeat_begins_anew(points_per_element: int) -> None:
    """With two batch sizes and two repeats: baseline and point of each batch size, then all of them again."""
    points = [
        make_spec(strategy=strategy, num_gpus=num_gpus, batch_size_per_gpu=size, repeat=repeat, memory_limit_gib=1)
        for strategy, num_gpus in (("single", 1), ("ddp", 2))
        for size in (32, 128)
        for repeat in (0, 1)
    ]
    ran = runs_of(points, points_per_element)
    assert [repeat for _, _, repeat in ran] == [0] * 4 + [1] * 4
    assert [strategy for strategy, _, _ in ran] == ["single", "ddp"] * 4
    assert [size for _, size, _ in ran[::2]] == [size for _, size, _ in ran[1::2]]
    assert {size for _, size, _ in ran[:4]} == {32, 128}


def test_points_that_share_processes_stay_one_block_and_that_of_the_baselines_is_next_to_it() -> None:
    two = [make_spec(strategy="ddp", num_gpus=2, batch_size_per_gpu=size) for size in PACKED_SIZES]
    ran = runs_of([*two, *PACKED], 20)
    assert [strategy for strategy, _, _ in ran] == ["single"] * 10 + ["ddp"] * 10
    assert (
        runs_of([*two, *PACKED], 1) != ran
    )  # each has its own processes, so the points of a batch size are neighbours
    assert [strategy for strategy, _, _ in runs_of([*two, *PACKED], 1)] == ["single", "ddp"] * 10


def test_packed_points_are_in_an_order_that_follows_no_axis_and_is_the_same_again() -> None:
    (element,) = pack_elements(PACKED, 10)
    assert sizes_of(element) not in (PACKED_SIZES, PACKED_SIZES[::-1])
    assert pack_elements(PACKED[::-1], 10) == [element]  # whatever order the grid has
    assert pack_elements([spec for spec in PACKED if spec != element[3]], 10) == [
        [spec for spec in element if spec != element[3]]
    ]  # a resumed grid keeps the order


def test_probes_come_last_and_by_batch_size_so_that_the_first_oom_stands_before_the_larger() -> None:
    (element,) = pack_elements([*PROBES, *PACKED], 13)
    assert sizes_of(element[-3:]) == [16_384, 32_768, 65_536]


TWO_GPUS = [make_spec(strategy="ddp", num_gpus=2, repeat=repeat) for repeat in range(3)]
TWO_NODES = [make_spec(strategy="ddp", num_gpus=2, num_nodes=2, repeat=repeat) for repeat in range(2)]
IN_SEQUENCE = "1 node x 1 GPU: up to 4 configurations in sequence per element, limit 4 x 20 = 80 min"
REDUCED = IN_SEQUENCE + ", reduced to {} min, the limit of the partition"


@pytest.mark.parametrize(
    ("points", "partition_limit_min", "arrays", "notices"),
    [
        # at most two elements an array; minutes: 4 x 20, and 3 x 20 for the pair of GPUs
        ([*PACKED, *TWO_GPUS], None, [([4, 4], "80"), ([2], "80"), ([3], "60")], [IN_SEQUENCE]),
        (PACKED, 80, [([4, 4], "80"), ([2], "80")], [IN_SEQUENCE]),
        *(  # never below the limit of one point
            (PACKED, limit_min, [([4, 4], cut), ([2], cut)], [REDUCED.format(cut)])
            for limit_min, cut in ((79, "79"), (60, "60"), (5, "20"))
        ),
        (TWO_NODES, None, [([1, 1], "20")], [f"2 nodes x 1 GPU: one configuration per element, {NOT_PACKED}"]),
        *((PACKED[:1], limit_min, [([1], "20")], []) for limit_min in (None, 60)),
    ],
)
def test_elements_hold_points_of_one_shape_within_the_limits_of_the_site(
    points: list[Spec], partition_limit_min: int | None, arrays: list[tuple[list[int], str]], notices: list[str]
) -> None:
    planned = arrays_of(points, 4, Cluster("slurm", None, 2, partition_limit_min=partition_limit_min))
    assert [([*map(len, array.elements)], array.request.options["time"]) for array in planned] == arrays
    request, alone = planned[0].request, arrays_of(points, 1, Cluster("slurm"))[0].request
    assert [*request.notices] == notices
    assert request.options == alone.options | {"time": request.options["time"]}
