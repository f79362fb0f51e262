"""Lanes: how points and a node are divided, and what really runs at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import wait_for
from factories import LENET, ROOT, make_experiment, make_spec, plant_proof
from hypothesis import given
from hypothesis import strategies as st
from test_local import workers_of

from pipeline import here, lanes
from pipeline.command import LaunchOptions, launch_command
from pipeline.experiment import Experiment
from pipeline.lanes import Lane, deal, divide_node, run_at_once
from pipeline.proof import read_proofs
from pipeline.records import read_folder
from pipeline.schema import Record
from pipeline.spec import Spec

TWO_CPUS = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two lanes need two CPUs")


@given(st.lists(st.text(), unique=True), st.integers(1, 9))
def test_every_point_is_in_one_lane_in_its_order_and_lanes_are_as_long_as_the_others(
    run_ids: list[str], num_lanes: int
) -> None:
    dealt = deal(run_ids, num_lanes)
    assert sorted(run_id for own in dealt for run_id in own) == sorted(run_ids)
    assert all([run_id for run_id in run_ids if run_id in own] == own for own in dealt)
    lengths = [len(own) for own in dealt]
    assert len(lengths) == min(num_lanes, len(run_ids))
    assert not lengths or max(lengths) - 1 <= min(lengths)


def test_points_are_dealt_in_turn() -> None:
    assert deal(["a", "b", "c", "d", "e"], 2) == [["a", "c", "e"], ["b", "d"]]


def test_hardware_threads_of_a_core_are_in_one_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SYS_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 64, 65, 66, 67, 9})
    for first in range(4):
        for cpu in (first, first + 64):
            (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
            (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{first},{first + 64}\n")
    cpus = [lane.cpus for lane in divide_node(2, "cpu")]
    assert cpus == [{0, 64, 1, 65}, {2, 66, 3, 67}]  # 9 CPUs: four each; of 9 the kernel says nothing


def test_each_lane_has_a_gpu_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(lanes, "visible_gpus", lambda: ["3", "GPU-5", "7"])
    assert [lane.gpu for lane in divide_node(2, "cuda")] == ["3", "GPU-5"]
    assert [lane.gpu for lane in divide_node(2, "cpu")] == [None, None]


@pytest.mark.parametrize(("num_lanes", "device"), [(4, "cuda"), (5, "cpu")])
def test_with_fewer_gpus_or_cpus_than_lanes_there_are_none(
    monkeypatch: pytest.MonkeyPatch, num_lanes: int, device: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(lanes, "visible_gpus", lambda: ["0", "1", "2"])
    assert divide_node(num_lanes, device) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "found"), [(None, ["0", "1", "2"]), ("2, GPU-a", ["2", "GPU-a"]), ("", []), ("-1", []), ("0,1,2,3", 3)]
)
def test_visible_gpus_are_named_as_the_mask_names_them(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, found: list[str] | int
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: [Path(f"/dev/nvidia{number}") for number in range(3)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    seen = here.visible_gpus()
    assert (len(seen) if isinstance(found, int) else seen) == found
    assert here.num_visible_gpus() == len(seen)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time\n{code}"]


def own_lanes(*gpus: str | None) -> list[Lane]:
    cpus = sorted(os.sched_getaffinity(0))
    return [Lane(frozenset({cpus[place % len(cpus)]}), gpu) for place, gpu in enumerate(gpus)]


def test_a_lane_sees_its_own_cpus_and_gpu_alone(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    found = own_lanes("GPU-a", None)
    say = python("print(sorted(os.sched_getaffinity(0)), os.environ.get('CUDA_VISIBLE_DEVICES'))")
    assert run_at_once([say, say], found) == [0, 0]
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    expected = [f"{sorted(lane.cpus)} {lane.gpu or mask}" for lane in found]
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(expected)
    assert os.sched_getaffinity(0) == before


def test_every_lane_is_waited_for_and_its_exit_code_is_told() -> None:
    codes = run_at_once(
        [python("time.sleep(0.3); sys.exit(1)"), python("os.kill(os.getpid(), 9)"), python("")],
        own_lanes(None, None, None),
    )
    assert codes == [1, 128 + 9, 0]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def start_element(experiment: Experiment, *points: Spec) -> subprocess.Popen[str]:
    """An element of two lanes, as Slurm would run it on this machine."""
    options = LaunchOptions(experiment.folder / "data", lanes=2)
    command = launch_command(experiment.manifest, [spec.run_id() for spec in points], options)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PIPELINE_LAUNCH_ID": "5ub0ab1e-7-0"}
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


def run_element(experiment: Experiment, *points: Spec) -> tuple[int, str, list[Record]]:
    """The exit code, the log and the records of an element of two lanes."""
    process = start_element(experiment, *points)
    _, said = process.communicate(timeout=300)
    found, rejected = read_folder(experiment.records)
    assert rejected == []
    return process.returncode, said, found


def num_at_once(found: list[Record]) -> int:
    """How many of the points were under way at one moment."""
    starts = [record.started_at or "" for record in found]
    return max(sum((r.started_at or "") <= start < (r.ended_at or "") for r in found) for start in starts)


POINTS = [make_spec(**LENET, num_samples=256, repeat=repeat) for repeat in range(2)]


@TWO_CPUS
def test_where_it_is_proven_points_run_at_once_and_one_that_fails_takes_none_with_it(tmp_path: Path) -> None:
    bad = make_spec(**LENET | {"dataset": "imagefolder"}, num_samples=256, epochs=1)  # there is no such folder
    experiment = make_experiment(tmp_path / "x", missing=[*POINTS, bad])
    plant_proof(experiment, POINTS[0], here.node_name())
    code, said, found = run_element(experiment, POINTS[0], POINTS[1], bad)
    assert code == 1, said  # the worst of the lanes'
    assert "proven, points run side by side" in said
    assert "proving it" not in said
    assert sorted(record.status for record in found) == ["failed", "ok", "ok"]
    assert {(record.attempt, record.launch_id) for record in found} == {(0, "5ub0ab1e-7-0")}
    measured = [record for record in found if record.status == "ok"]
    assert num_at_once(measured) == 2
    assert {record.environment.num_cpus for record in measured} == {len(os.sched_getaffinity(0)) // 2}


@TWO_CPUS
def test_a_proof_is_made_first_and_none_of_it_is_a_record(tmp_path: Path) -> None:
    larger = make_spec(**LENET | {"batch_size_per_gpu": 128}, num_samples=256)
    experiment = make_experiment(tmp_path / "x", missing=[larger, *POINTS])
    code, said, found = run_element(experiment, larger, POINTS[0])
    assert code == 0, said
    (proof,) = read_proofs(experiment)
    assert f"proving it with {POINTS[0].run_id()}, alone and in 2 lanes" in said  # 64 is smaller than 128
    assert f"side by side: {proof.sentence()}.\n" in said
    assert (proof.spec, proof.num_lanes, len(proof.solo_time_s), len(proof.packed_time_s)) == (POINTS[0], 2, 1, 2)
    assert {(record.run_id, record.attempt) for record in found} == {(spec.run_id(), 0) for spec in (larger, POINTS[0])}
    assert num_at_once(found) == (2 if proof.is_proven else 1)
    # also where the points ran one after another, a point had what it has in a lane
    assert {record.environment.num_cpus for record in found} == {len(os.sched_getaffinity(0)) // 2}
    assert not list(experiment.scratch.glob("proof*"))


@TWO_CPUS
def test_a_sigterm_ends_every_lane_and_no_record_is_written(tmp_path: Path) -> None:
    points = [make_spec(**LENET | {"batch_size_per_gpu": 1}, num_samples=1_000_000, repeat=n) for n in range(2)]
    experiment = make_experiment(tmp_path / "x", missing=points)
    plant_proof(experiment, points[0], here.node_name())
    process = start_element(experiment, *points)
    wait_for(lambda: len(list(experiment.scratch.glob("*/environment.json"))) == 2)
    process.send_signal(signal.SIGUSR2)  # Slurm's warning
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert said.count("ended by SIGTERM, no record is written") == 2
    wait_for(lambda: not workers_of(tmp_path), timeout_s=10)
    assert not list(experiment.records.iterdir())
