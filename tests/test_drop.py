"""What `drop` takes out of an experiment, what it leaves, and what it refuses."""

import os
import shutil
from pathlib import Path

import pytest
from conftest import Command, Words, assert_refused, succeeded, without_slurm
from factories import (
    SUBMISSION,
    make_experiment,
    make_record,
    make_spec,
    manifest_of,
    planned_points,
    records_of,
    write_file,
)
from slurm_queue import UP, fake_slurm

from pipeline.plan.grid import matches, parse_overrides
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, SlurmArray, Submission, find_experiments

SMALL, LARGE, OTHER = (make_spec(batch_size_per_gpu=size, seed=seed) for size, seed in ((8, 0), (16, 0), (16, 1)))


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Three points with records; of LARGE there is all that a point may leave."""
    made = make_experiment(tmp_path / "out" / "mine", *map(make_record, (SMALL, LARGE, OTHER)))
    (made.records_folder / f"{LARGE.run_id()}.0.steps.npz").write_text("steps")
    (made.records_folder / f".claim-{LARGE.run_id()}.0.json").touch()
    for folder in (made.traces / f"{LARGE.run_id()}.0", made.scratch_folder / f"{LARGE.run_id()}.here-1"):
        write_file(folder / "file", "kept")
    return made


def contents(folder: Path) -> dict[str, bytes]:
    """The files below the folder, by their names relative to it, without the locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_dropped_point_is_no_longer_expected_and_all_that_it_left_is_kept(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    before = contents(experiment.folder)
    mine = {name for name in before if LARGE.run_id() in name}
    assert len(mine) == 5
    answer = succeeded(
        pipeline("drop", experiment.folder, "--only", "batch_size_per_gpu=16", "seed=0", env=without_slurm(tmp_path))
    )
    assert answer.stdout == f"dropped {LARGE.run_id()}\n"
    assert manifest_of(experiment).points == [SMALL, OTHER]
    assert [record.spec for record in records_of(experiment)] == sorted((SMALL, OTHER), key=Spec.run_id)
    after = contents(experiment.folder)
    assert {name: after[f"dropped/1/{name}"] for name in mine} == {name: before[name] for name in mine}
    assert len(after) == len(before)
    assert list(find_experiments(experiment.folder.parent)) == ["mine"]
    collected = pipeline("collect", experiment.folder, "--strict", env=without_slurm(tmp_path))
    assert (collected.returncode, "belongs to no configuration" in collected.stdout) == (0, False)


def test_a_point_that_is_measured_and_dropped_again_overwrites_nothing(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    drop = ("drop", experiment.folder, "--only", LARGE.run_id())
    succeeded(pipeline(*drop, env=without_slurm(tmp_path)))
    make_experiment(experiment.folder, make_record(LARGE, (3.0, 3.0)))
    succeeded(pipeline(*drop, env=without_slurm(tmp_path)))
    first, second = (experiment.dropped / number / "records" / f"{LARGE.run_id()}.0.json" for number in "12")
    assert first.read_bytes() != second.read_bytes()


def test_the_same_submission_expects_a_dropped_point_again_and_takes_its_record_back(
    pipeline: Command, tmp_path: Path, submit_planned: Words
) -> None:
    points = planned_points()
    experiment = make_experiment(tmp_path / "planned", *map(make_record, points))
    succeeded(pipeline("drop", experiment.folder, "--only", points[1].run_id(), env=without_slurm(tmp_path)))
    planned = pipeline(*submit_planned, "--dry-run", env=without_slurm(tmp_path)).stdout
    assert planned.startswith("1 configuration to run, 1 recorded as ok, local")
    shutil.copytree(experiment.dropped / "1", experiment.folder, dirs_exist_ok=True)
    back = pipeline(*submit_planned, "--dry-run", env=without_slurm(tmp_path)).stdout
    assert back.startswith("0 configurations to run, 2 recorded as ok, local")


@pytest.mark.parametrize(
    ("only", "code", "words"),
    [
        (("batch_size=8",), 2, ("--only names an unknown axis", "did you mean 'batch_size_per_gpu'")),
        (("batch_size_per_gpu=many",), 2, ("--only 'batch_size_per_gpu=many'",)),
        (("batch_size_per_gpu=64",), 3, ("--only selects no configuration",)),
        (("batch_size_per_gpu=8", "seed=1"), 3, ("--only selects no configuration",)),
        (("batch_size_per_gpu=16", SMALL.run_id()), 3, ("--only selects no configuration",)),
        (("ddp-9gpu-b1-0123456789abcdef",), 3, ("'ddp-9gpu-b1-0123456789abcdef', which is no expected configuration",)),
    ],
)
def test_what_selects_nothing_is_refused_and_changes_nothing(
    pipeline: Command, experiment: Experiment, tmp_path: Path, only: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    before = contents(experiment.folder)
    assert_refused(pipeline("drop", experiment.folder, "--only", *only, env=without_slurm(tmp_path)), code, *words)
    assert contents(experiment.folder) == before


def test_a_folder_of_several_experiments_or_of_none_is_refused(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    several = pipeline("drop", experiment.folder.parent, "--only", "seed=0", env=without_slurm(tmp_path))
    assert_refused(several, 3, "no manifest in", "one experiment")
    assert_refused(pipeline("drop", tmp_path / "absent", "--only", "seed=0"), 2, "cannot read")
    assert_refused(pipeline("drop", experiment.folder), 2, "--only")


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("RUNNING", 2, (f"{SMALL.run_id()} is running", f"--only {SMALL.run_id()}")),
        ("PENDING", 2, (f"{SMALL.run_id()} is pending",)),
        (None, 4, (f"the state of {SMALL.run_id()} cannot be read", "when Slurm answers")),
    ],
)
def test_a_point_that_runs_or_may_run_is_refused_and_another_is_dropped(
    pipeline: Command, tmp_path: Path, state: str | None, code: int, words: tuple[str, ...]
) -> None:
    name = f"mine-{SUBMISSION[:8]}-0"
    submission = Submission(
        SUBMISSION, "slurm", "2025-06-01T00:00:00Z", [SlurmArray(name, [[SMALL.run_id()]], "7", is_array=False)]
    )
    experiment = make_experiment(
        tmp_path / "out" / "mine", make_record(LARGE), missing=[SMALL], submissions=[submission]
    )
    line = f"7|N/A|{state}|0:0|N/A|None|{os.getuid()}|{name}"
    env = fake_slurm(tmp_path / "bin", UP if state else "exit 1", squeue=f"echo '{line}'")
    before = contents(experiment.folder)
    assert_refused(pipeline("drop", experiment.folder, "--only", "seed=0", env=env), code, *words)
    assert contents(experiment.folder) == before
    succeeded(pipeline("drop", experiment.folder, "--only", LARGE.run_id(), env=env))
    assert manifest_of(experiment).points == [SMALL]


REMEDIED = make_spec(batch_size_per_gpu=8, epochs=5, remedies=("linear_scaling", "warmup"))
WITH_OPTIONS = make_spec(model="gpt", dataset=None, options=("layers=4", "causal=true"), input="synthetic")


@pytest.mark.parametrize(
    ("spec", "words", "is_matched"),
    [
        (REMEDIED, ["batch_size_per_gpu=4,8"], True),
        (REMEDIED, ["remedies=warmup+linear_scaling"], True),
        (REMEDIED, ["remedies=none,warmup"], False),
        (REMEDIED, ["max_steps=none", "strategy=ddp"], False),
        (REMEDIED, ["max_steps=none", "strategy=single"], True),
        (REMEDIED, ["model.layers=4"], False),
        (WITH_OPTIONS, ["model.layers=4", "model.causal=true"], True),  # by their text
        (WITH_OPTIONS, ["model.layers=8"], False),
    ],
)
def test_a_point_matches_one_of_the_values_of_each_axis(spec: Spec, words: list[str], is_matched: bool) -> None:
    assert matches(spec, parse_overrides(words)) is is_matched
