import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from factories import make_record, make_spec

from pipeline.estimate import Estimate, estimate_points, refuse_above
from pipeline.exits import Refusal
from pipeline.experiment import Experiment
from pipeline.records import publish
from pipeline.schema import Record
from pipeline.spec import Spec

LIMIT_MIN = 30
START, HALF_AN_HOUR = "2025-06-01T12:00:00Z", "2025-06-01T12:30:00Z"


def took_half_an_hour(spec: Spec, **fields: Any) -> Record:
    """1,800 s, of which its two epochs trained 600 s each: 600 s were start-up."""
    return make_record(spec, (600, 600), started_at=START, ended_at=HALF_AN_HOUR, **fields)


def estimate(tmp_path: Path, points: list[Spec], *found: Record, limit_min: int | None = LIMIT_MIN) -> Estimate:
    """The estimate of points of one device, where another experiment in the folder has those records."""
    experiment = Experiment(tmp_path / "deep" / "earlier")
    experiment.create()
    for record in found:
        publish(record, experiment.records)
    (only,) = estimate_points(points, tmp_path, limit_min)
    return only


def test_a_point_takes_what_one_like_it_took_on_each_of_its_gpus(tmp_path: Path) -> None:
    four = make_spec(strategy="ddp", num_gpus=4)
    found = estimate(tmp_path, [make_spec(repeat=1), four], took_half_an_hour(make_spec()), took_half_an_hour(four))
    assert found == Estimate("cuda", 2, 2, 0.5 + 4 * 0.5, 0.0)


@pytest.mark.parametrize(
    ("fields", "hours"),
    [
        ({"epochs": 5}, (600 + 5 * 600) / 3600),
        ({"num_samples": 25_000}, (600 + 2 * 300) / 3600),
        ({"max_steps": 39}, (600 + 2 * 600 * 39 * 128 / 50_000) / 3600),  # 39 steps of 128 samples of 50,000
        ({"learning_rate": 0.4, "seed": 3}, 0.5),
    ],
    ids=lambda value: str(value),
)
def test_training_is_scaled_to_the_points_samples_and_start_up_is_not(
    tmp_path: Path, fields: dict[str, Any], hours: float
) -> None:
    found = estimate(tmp_path, [make_spec(**fields)], took_half_an_hour(make_spec()))
    assert found.hours == pytest.approx(hours)


def test_the_nearest_batch_size_tells_and_of_several_records_the_median(tmp_path: Path) -> None:
    near = [make_record(make_spec(repeat=i), (0.001, 0.001), started_at=START, ended_at=end) for i, end in ENDS]
    far = took_half_an_hour(make_spec(batch_size_per_gpu=8192))
    assert estimate(tmp_path, [make_spec(batch_size_per_gpu=512)], far, *near).hours == pytest.approx(20 / 3600)


ENDS = list(enumerate(f"2025-06-01T12:00:{second}Z" for second in (10, 20, 50)))


@pytest.mark.parametrize(
    "fields",
    [{"precision": "bf16"}, {"model": "lenet"}, {"strategy": "ddp"}, {"strategy": "ddp", "num_gpus": 2}],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_another_kind_of_point_tells_nothing_and_counts_at_its_limit(tmp_path: Path, fields: dict[str, Any]) -> None:
    spec = make_spec(**fields)
    found = estimate(tmp_path, [spec], took_half_an_hour(make_spec()))
    assert found == Estimate("cuda", 1, 0, None, 0.5 * spec.num_gpus)


@pytest.mark.parametrize(
    "record",
    [
        make_record(started_at=None),
        make_record(status="oom", started_at=START, ended_at=HALF_AN_HOUR),
        make_record(measured=False, started_at=START, ended_at=HALF_AN_HOUR),
    ],
    ids=["no times", "oom", "elsewhere"],
)
def test_a_record_that_did_not_run_to_its_end_here_tells_nothing(tmp_path: Path, record: Record) -> None:
    assert estimate(tmp_path, [make_spec()], record).hours is None


def test_where_there_is_no_folder_nothing_is_known_and_it_is_said(tmp_path: Path) -> None:
    (found,) = estimate_points([make_spec(), make_spec(repeat=1)], tmp_path / "absent", None)
    assert found == Estimate("cuda", 2, 0, None, None)
    assert found.sentence() == "GPU-hours unknown: no earlier record is like any of the 2 points"


def test_the_devices_are_apart_and_named_for_what_they_hold(tmp_path: Path) -> None:
    gpu, cpu = estimate_points([make_spec(), make_spec(device="cpu")], tmp_path, LIMIT_MIN)
    assert (gpu.as_row()["gpu_hours_at_limit"], gpu.as_row()["process_hours_at_limit"]) == (0.5, None)
    assert (cpu.as_row()["gpu_hours_at_limit"], cpu.as_row()["process_hours_at_limit"]) == (None, 0.5)
    assert "process-hours" in cpu.sentence()
    assert estimate_points([], tmp_path, LIMIT_MIN) == []


@pytest.mark.parametrize(("max_gpu_hours", "is_refused"), [(0.99, True), (1.0, False), (2.0, False)])
def test_more_than_allowed_is_refused_and_points_without_an_earlier_one_count_at_their_limit(
    max_gpu_hours: float, is_refused: bool
) -> None:
    mixed = [Estimate("cuda", 3, 2, 0.5, 0.5), Estimate("cpu", 1, 1, 100.0, 0.0)]
    if not is_refused:
        refuse_above(mixed, max_gpu_hours)
        return
    with pytest.raises(Refusal, match=r"may take 1 GPU-hours, more than --max-gpu-hours 0\.99") as refusal:
        refuse_above(mixed, max_gpu_hours)
    assert refusal.value.code == 2


def test_where_nothing_ends_a_point_that_nothing_tells_of_the_limit_cannot_be_kept() -> None:
    with pytest.raises(Refusal, match="1 of 3 points have no earlier record like them and nothing limits their time"):
        refuse_above([Estimate("cuda", 3, 2, 0.5, None)], 1000)
    refuse_above([Estimate("cpu", 3, 2, 0.5, None)], 0)  # no GPU


GRID = """
name: planned
base: {model: resnet18, dataset: synthetic, input: synthetic, precision: tf32}
points:
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [8, 16], device: [cuda, cpu]}
resources: {time: "00:30:00"}
"""


@pytest.mark.parametrize(("max_gpu_hours", "is_refused"), [("1", False), ("0.9", True)])
def test_a_dry_run_says_what_the_points_may_take_and_what_would_be_refused(
    pipeline: Command, tmp_path: Path, max_gpu_hours: str, is_refused: bool
) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    experiment = Experiment(tmp_path / "out" / "earlier")
    experiment.create()
    spec = make_spec(dataset="synthetic", input="synthetic", batch_size_per_gpu=8)
    publish(took_half_an_hour(spec), experiment.records)
    arguments = ("--grid", tmp_path / "grid.yaml", "--outputs", tmp_path / "out", "--cluster", "slurm", "--dry-run")
    answer = pipeline("submit", *arguments, "--json", "--max-gpu-hours", max_gpu_hours)
    assert answer.returncode == 0, answer.stderr
    gpu, cpu = json.loads(answer.stdout)["cost"]
    assert (gpu["num_points"], gpu["num_estimated"], gpu["gpu_hours"], gpu["process_hours"]) == (2, 2, 1.0, None)
    assert (cpu["num_points"], cpu["num_estimated"], cpu["process_hours"]) == (2, 0, None)
    assert cpu["process_hours_at_limit"] == 1.0
    assert ("Would be refused" in answer.stderr) is is_refused
    text = pipeline("submit", *arguments).stdout
    assert "GPU-hours: about 1 for 2 of 2 points, by earlier records\n" in text


def test_a_submission_that_may_take_more_is_2_and_nothing_is_written(pipeline: Command, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    folder = tmp_path / "bin"
    folder.mkdir()
    answers = {"scontrol": "echo 'Slurmctld(primary) at here is UP'", "sbatch": f"touch {folder}/called"}
    for name, line in {**answers, "sinfo": "echo 'main*|64|512000|gpu:8|4'", "squeue": ""}.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    arguments = ("--grid", tmp_path / "grid.yaml", "--outputs", tmp_path / "out", "--max-gpu-hours", "0.5")
    answer = pipeline("submit", *arguments, env=env)
    assert (answer.returncode, answer.stdout) == (2, ""), answer.stderr
    assert "may take 1 GPU-hours, more than --max-gpu-hours 0.5" in answer.stderr
    assert not (tmp_path / "out").exists()
    assert not (folder / "called").exists()
