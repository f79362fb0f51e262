"""`pipeline.cancel`: what it asks Slurm to cancel, what it refuses, and once a real Slurm that cancels it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from cluster import Cluster
from conftest import Command, assert_refused, wait_for, without_slurm
from factories import ARRAY, SUBMISSION, make_experiment, make_record, make_spec, write_grid
from slurm_queue import Env, queued, states, write_commands

from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import SlurmArray, Submission

SPECS = [make_spec(batch_size_per_gpu=size) for size in (8, 16, 32, 64)]
A, B, C, D = (spec.run_id() for spec in SPECS)

LONG = """
name: long
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, num_samples: 2000000}
points:
  - {strategy: [ddp], num_gpus: [1], batch_size_per_gpu: [1, 2, 4]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def job(array: int, element: int, state: str) -> str:
    return f"{array}|{element}|{state}|0:0|N/A|None|{ARRAY}\n"


def slurm(folder: Path, *jobs: str, scancel: str = "") -> Mapping[str, str]:
    """A PATH with a Slurm that has these jobs and notes the arguments of every scancel."""
    lines = {
        "scontrol": "echo 'Slurmctld(primary) at here is UP'",
        "squeue": f"/bin/cat {folder}/jobs",
        "scancel": f"echo $* >> {folder}/cancelled; {scancel}",
        "sbatch": "",
    }
    write_commands(folder, lines)
    (folder / "jobs").write_text("".join(jobs))
    return without_slurm(folder)


def cancelled(folder: Path) -> list[str]:
    notes = folder / "cancelled"
    return sorted(notes.read_text().split()) if notes.exists() else []


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Array 7 with a point an element (A, B), array 8 with an element of two points (C, D)."""
    made = make_experiment(tmp_path / "out" / "x", missing=SPECS)
    arrays = [SlurmArray(ARRAY, [[A], [B]], "7"), SlurmArray("x-5ab0ab1e-1", [[C, D]], "8", is_array=False)]
    with made.edit_manifest() as manifest:
        manifest.submissions.append(Submission(SUBMISSION, "slurm", "2025-06-01", arrays))
    return made


PLAIN_8 = "8|N/A|PENDING|0:0|N/A|Priority|x-5ab0ab1e-1\n"


def test_everything_is_cancelled_by_array_and_each_job_has_a_line(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    env = slurm(tmp_path / "bin", job(7, 0, "RUNNING"), job(7, 1, "PENDING"), PLAIN_8)
    answer = pipeline("cancel", tmp_path / "out", env=env)
    assert answer.returncode == 0, answer.stderr
    assert cancelled(tmp_path / "bin") == ["7", "8"]
    assert answer.stdout.splitlines() == [
        f"cancelled x job 7_0 (running): {A}",
        f"cancelled x job 7_1 (pending): {B}",
        f"cancelled x job 8 (pending): {C}, {D}",
    ]
    assert "3 jobs cancelled" in answer.stderr


def test_jobs_that_have_ended_are_left_alone(pipeline: Command, experiment: Experiment, tmp_path: Path) -> None:
    env = slurm(tmp_path / "bin", job(7, 0, "COMPLETED"), job(7, 1, "COMPLETING"), job(8, 0, "CANCELLED"))
    answer = pipeline("cancel", experiment.folder, env=env)
    assert (answer.returncode, answer.stdout) == (0, "Nothing is queued or running in Slurm.\n")
    assert cancelled(tmp_path / "bin") == []


def test_a_job_of_another_name_with_the_same_id_is_left_alone(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    of_another = job(7, 0, "RUNNING").replace(ARRAY, "my-thesis")
    env = slurm(tmp_path / "bin", of_another, PLAIN_8)
    answer = pipeline("cancel", experiment.folder, env=env)
    assert (answer.returncode, answer.stdout) == (0, f"cancelled x job 8 (pending): {C}, {D}\n"), answer.stderr
    assert cancelled(tmp_path / "bin") == ["8"]
    found = states(pipeline, experiment.folder, env)
    assert [found[run_id]["state"] for run_id in (A, B, C)] == ["lost", "lost", "pending"]


def test_a_job_of_plain_sbatch_may_have_any_name(pipeline: Command, tmp_path: Path) -> None:
    made = make_experiment(tmp_path / "x", missing=SPECS[:1])
    with made.edit_manifest() as manifest:
        manifest.submissions.append(Submission("sbatch-7", "sbatch", "2025-06-01", [SlurmArray("x", [[A]], "7")]))
    env = slurm(tmp_path / "bin", job(7, 0, "RUNNING").replace(ARRAY, "my-name"))
    answer = pipeline("cancel", made.folder, env=env)
    assert (answer.returncode, answer.stdout) == (0, f"cancelled x job 7_0 (running): {A}\n"), answer.stderr


def test_only_cancels_the_job_of_its_point(pipeline: Command, experiment: Experiment, tmp_path: Path) -> None:
    env = slurm(tmp_path / "bin", job(7, 0, "RUNNING"), job(7, 1, "PENDING"), PLAIN_8)
    answer = pipeline("cancel", experiment.folder, "--only", B, env=env)
    assert (answer.returncode, answer.stdout) == (0, f"cancelled x job 7_1 (pending): {B}\n")
    assert cancelled(tmp_path / "bin") == ["7_1"]


def test_a_job_of_several_points_is_cancelled_only_if_all_are_named(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    env = slurm(tmp_path / "bin", PLAIN_8)
    assert_refused(pipeline("cancel", experiment.folder, "--only", C, env=env), 2, "job 8", f"--only {D}")
    assert cancelled(tmp_path / "bin") == []
    answer = pipeline("cancel", experiment.folder, "--only", C, "--only", D, env=env)
    assert (answer.returncode, cancelled(tmp_path / "bin")) == (0, ["8"])


def test_a_point_that_its_job_has_measured_need_not_be_named(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    make_experiment(tmp_path / "made", make_record(SPECS[2]))
    (record,) = (tmp_path / "made" / "records").iterdir()
    text = record.read_text().replace('"launch_id": "0"', '"launch_id": "5ab0ab1e-8"')
    assert "5ab0ab1e-8" in text
    (experiment.records_folder / record.name).write_text(text)
    env = slurm(tmp_path / "bin", PLAIN_8.replace("PENDING", "RUNNING"))
    answer = pipeline("cancel", experiment.folder, "--only", D, env=env)
    assert (answer.returncode, answer.stdout) == (0, f"cancelled x job 8 (running): {D}\n"), answer.stderr


def test_what_cannot_be_cancelled_is_one_sentence(pipeline: Command, experiment: Experiment, tmp_path: Path) -> None:
    env = slurm(tmp_path / "bin", job(7, 0, "RUNNING"), scancel="echo 'scancel: error: Access denied' >&2; exit 1")
    arguments = ("cancel", experiment.folder)
    assert_refused(pipeline(*arguments, env=env), 4, "scancel failed", "Access denied")
    assert_refused(pipeline(*arguments, "--only", "ddp-2gpu-b8-0", env=env), 3, "ddp-2gpu-b8-0")
    assert_refused(pipeline(*arguments, env=without_slurm(tmp_path)), 4, "Slurm is absent")
    with experiment.submission_lock():
        assert_refused(pipeline(*arguments, env=env), 2, "another process holds the submit lock")
    assert_refused(pipeline("cancel", tmp_path / "absent", env=env), 2, "cannot read")
    assert_refused(pipeline("cancel", tmp_path / "bin", env=env), 3, "no manifest")


def test_an_experiment_that_is_locked_or_invalid_does_not_save_the_others(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    locked = make_experiment(tmp_path / "out" / "a-locked", missing=SPECS[:1])
    invalid = make_experiment(tmp_path / "out" / "b-invalid")
    invalid.manifest_path.write_text("{")
    env = slurm(tmp_path / "bin", PLAIN_8)
    with locked.submission_lock():
        answer = pipeline("cancel", tmp_path / "out", env=env)
    assert (answer.returncode, answer.stdout) == (2, f"cancelled x job 8 (pending): {C}, {D}\n"), answer.stderr
    assert "another process holds the submit lock" in answer.stderr
    assert "not a valid manifest" in answer.stderr
    assert cancelled(tmp_path / "bin") == ["8"]
    assert_refused(pipeline("cancel", invalid.folder, env=env), 2, "not a valid manifest")


def test_an_experiment_that_was_never_in_slurm_needs_none(pipeline: Command, tmp_path: Path) -> None:
    made = make_experiment(tmp_path / "x", make_record())
    answer = pipeline("cancel", made.folder, env=without_slurm(tmp_path))
    assert (answer.returncode, answer.stdout) == (0, "Nothing is queued or running in Slurm.\n")


def test_a_real_slurm_cancels_one_point_then_the_others_and_then_has_nothing_left(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = ("submit", "--grid", write_grid(tmp_path, LONG), "--outputs", tmp_path, "--max-parallel", "1")
    sent = pipeline(*submit, env=on_slurm)
    assert sent.returncode == 0, sent.stderr
    wait_for(lambda: "running" in {part["state"] for part in states(pipeline, tmp_path, on_slurm).values()})
    found = states(pipeline, tmp_path, on_slurm)
    waiting = next(run_id for run_id, part in found.items() if part["state"] == "pending")
    env = {**on_slurm, "SCANCEL_STATE": "SUSPENDED"}  # with it scancel would leave them alone
    one = pipeline("cancel", tmp_path, "--only", waiting, env=env)
    assert (one.returncode, one.stdout) == (0, f"cancelled long job {found[waiting]['job']} (pending): {waiting}\n")
    assert len(queued(cluster)) == 2

    others = pipeline("cancel", tmp_path, env=env)
    assert (others.returncode, others.stdout.count("cancelled long job")) == (0, 2)
    wait_for(lambda: not queued(cluster), timeout_s=60)
    after = {run_id: part["state"] for run_id, part in states(pipeline, tmp_path, on_slurm).items()}
    assert after.pop(waiting) in ("cancelled", "lost")  # Slurm forgets an element that is cancelled alone and waits
    assert list(after.values()) == ["cancelled", "cancelled"]
    nothing = pipeline("cancel", tmp_path, env=env)
    assert (nothing.returncode, nothing.stdout) == (0, "Nothing is queued or running in Slurm.\n")
    again = pipeline(*submit, "--dry-run", env=on_slurm)
    assert "3 points to run" in again.stdout + again.stderr
