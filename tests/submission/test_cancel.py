"""`pipeline.cancel`: what it asks Slurm to cancel, what it refuses, and once a real Slurm that cancels it."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from cluster import Cluster
from conftest import Command, assert_refused, succeeded, wait_for, without_slurm
from factories import (
    ARRAY,
    SUBMISSION,
    assert_says,
    make_experiment,
    make_record,
    make_spec,
    manifest_of,
    write_grid,
)
from slurm_queue import Env, queued, states, write_commands

from pipeline.experiment.folder import Experiment
from pipeline.experiment.manifest import Backend, SlurmArray, Submission, start_submission
from pipeline.experiment.record_store import publish_record
from pipeline.launch import publish_manifest
from pipeline.submission.read_progress import read_progress

SPECS = [make_spec(batch_size_per_gpu=size) for size in (8, 16, 32, 64)]
A, B, C, D = (spec.run_id() for spec in SPECS)

LONG = """
name: long
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, num_samples: 2000000}
points:
  - {strategy: [ddp], num_gpus: [1], batch_size_per_gpu: [1, 2, 4]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def job(array: int, element: int, state: str, *, name: str = ARRAY, uid: int | None = None) -> str:
    return f"{array}|{element}|{state}|0:0|N/A|None|{os.getuid() if uid is None else uid}|{name}\n"


def slurm(folder: Path, *jobs: str, scancel: str = "") -> Mapping[str, str]:
    """A PATH with a Slurm that has these jobs and notes the arguments of every scancel."""
    up = "echo 'Slurmctld(primary) at here is UP'"
    lines = {"scontrol": f"[ $1 != write ] || exec /bin/cat {folder}/script; {up}", "squeue": f"/bin/cat {folder}/jobs"}
    write_commands(folder, {**lines, "scancel": f"echo $* >> {folder}/cancelled; {scancel}", "sbatch": ""})
    (folder / "jobs").write_text("".join(jobs))
    (folder / "script").write_text("#!/bin/bash\nsrun .venv/bin/python -u -m pipeline.launch --grid q1\n")
    return without_slurm(folder)


def of_sbatch(folder: Path, name: str, *, is_array: bool = True) -> Experiment:
    """The point A in job 7, which has this name and was started by a plain sbatch."""
    array = SlurmArray(name, [[A]], "7", is_array=is_array)
    submission = Submission("sbatch-7", "sbatch", "2025-06-01T00:00:00Z", [array])
    return make_experiment(folder, missing=SPECS[:1], submissions=[submission])


def here(folder: Path, pid: int, host: str | None = None) -> Experiment:
    """The point A, which a process on this machine runs, or on another one."""
    submission = start_submission(SUBMISSION, "local")
    submission.pid, submission.host = pid, host or submission.host
    return make_experiment(folder, missing=SPECS[:1], submissions=[submission])


def cancelled(folder: Path) -> list[str]:
    notes = folder / "cancelled"
    return sorted(notes.read_text().split()) if notes.exists() else []


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Array 7 with a point an element (A, B), array 8 with an element of two points (C, D)."""
    arrays = [SlurmArray(ARRAY, [[A], [B]], "7"), SlurmArray("x-5ab0ab1e-1", [[C, D]], "8", is_array=False)]
    submission = Submission(SUBMISSION, "slurm", "2025-06-01T00:00:00Z", arrays)
    return make_experiment(tmp_path / "out" / "x", missing=SPECS, submissions=[submission])


NOTHING = "Nothing is queued or running in Slurm.\n"
PLAIN_8 = f"8|N/A|PENDING|0:0|N/A|Priority|{os.getuid()}|x-5ab0ab1e-1\n"


def test_everything_is_cancelled_by_array_and_each_job_has_a_line(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    env = slurm(tmp_path / "bin", job(7, 0, "RUNNING"), job(7, 1, "PENDING"), PLAIN_8)
    answer = pipeline("cancel", tmp_path / "out", env=env)
    assert (answer.returncode, cancelled(tmp_path / "bin")) == (0, ["7", "8"]), answer.stderr
    assert answer.stdout.splitlines() == [
        f"cancelled x job 7_0 (running): {A}",
        f"cancelled x job 7_1 (pending): {B}",
        f"cancelled x job 8 (pending): {C}, {D}",
    ]
    assert "3 jobs cancelled" in answer.stderr


def test_jobs_that_have_ended_are_left_alone(pipeline: Command, experiment: Experiment, tmp_path: Path) -> None:
    env = slurm(tmp_path / "bin", job(7, 0, "COMPLETED"), job(7, 1, "COMPLETING"), job(8, 0, "CANCELLED"))
    answer = pipeline("cancel", experiment.folder, env=env)
    assert (answer.returncode, answer.stdout) == (0, NOTHING)
    assert cancelled(tmp_path / "bin") == []


ANOTHERS = os.getuid() + 1
NOT_THE_MANIFESTS = {
    "another name": (job(7, 0, "RUNNING", name="my-thesis"), f"my-thesis of user {os.getuid()}"),
    "another owner": (job(7, 0, "RUNNING", uid=ANOTHERS), f"{ARRAY} of user {ANOTHERS}"),
}


@pytest.mark.fault("F09")
@pytest.mark.fault("F44")
@pytest.mark.parametrize(("line", "said"), NOT_THE_MANIFESTS.values(), ids=NOT_THE_MANIFESTS)
def test_a_job_of_another_name_or_owner_with_the_same_id_is_named_and_left_alone(
    pipeline: Command, experiment: Experiment, tmp_path: Path, line: str, said: str
) -> None:
    env = slurm(tmp_path / "bin", line, PLAIN_8)
    answer = pipeline("cancel", experiment.folder, env=env)
    assert (answer.returncode, answer.stdout) == (0, f"cancelled x job 8 (pending): {C}, {D}\n"), answer.stderr
    assert f"Job 7 is not cancelled: Slurm says that it is {said}, not the manifest's" in answer.stderr
    assert cancelled(tmp_path / "bin") == ["8"]
    found = states(pipeline, experiment.folder, env)
    assert [found[run_id]["state"] for run_id in (A, B, C)] == ["lost", "lost", "pending"]


@pytest.mark.fault("F44")
@pytest.mark.parametrize(
    "line", ["7|0|RUNNING\n", job(7, 0, "RUNNING", name=""), f"7|0|RUNNING|0:0|N/A|None||{ARRAY}\n"]
)
def test_a_job_whose_name_or_owner_slurm_does_not_say_is_not_cancelled_and_its_point_is_not_lost(
    pipeline: Command, experiment: Experiment, tmp_path: Path, line: str
) -> None:
    env = slurm(tmp_path / "bin", line)
    answer = pipeline("cancel", experiment.folder, env=env)
    assert (answer.returncode, cancelled(tmp_path / "bin")) == (0, [])
    assert answer.stderr.startswith("Job 7 is not cancelled: ")
    assert states(pipeline, experiment.folder, env)[A]["state"] == "running"


@pytest.mark.fault("F44")
@pytest.mark.parametrize(
    ("recorded", "in_slurm", "is_ours"),
    [("x", "x", True), ("my_run_2", "My run.2", True), ("x", "my-thesis", False), ("x", "x-1", False)],
)
def test_a_job_of_plain_sbatch_has_the_name_that_its_launch_recorded(
    pipeline: Command, tmp_path: Path, recorded: str, in_slurm: str, is_ours: bool
) -> None:
    env = slurm(tmp_path / "bin", job(7, 0, "RUNNING", name=in_slurm))
    answer = pipeline("cancel", of_sbatch(tmp_path / "x", recorded).folder, env=env)
    assert (answer.returncode, cancelled(tmp_path / "bin")) == (0, ["7"] if is_ours else []), answer.stderr
    assert ("Job 7 is not cancelled" in answer.stderr) != is_ours


@pytest.mark.fault("F44")
@pytest.mark.parametrize("script", ["#!/bin/bash\nsrun python thesis.py\n", None], ids=["other work", "unreadable"])
def test_a_job_of_plain_sbatch_with_the_manifests_name_and_another_script_lives(
    pipeline: Command, tmp_path: Path, script: str | None
) -> None:
    """A stranger wrote the manifest, and the user copied it."""
    made = of_sbatch(tmp_path / "x", "thesis", is_array=False)
    env = slurm(tmp_path / "bin", f"7|N/A|RUNNING|0:0|N/A|None|{os.getuid()}|thesis\n")
    (tmp_path / "bin" / "script").unlink() if script is None else (tmp_path / "bin" / "script").write_text(script)
    answer = pipeline("cancel", made.folder, env=env)
    assert (answer.returncode, cancelled(tmp_path / "bin")) == (0, []), answer.stderr
    assert_says(answer.stderr, "Job 7 is not cancelled: its batch script does not run pipeline.launch", "use scancel 7")


def test_a_launch_records_the_name_that_its_job_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = make_experiment(tmp_path / "q4")
    monkeypatch.setenv("SLURM_JOB_NAME", "My run.2")
    publish_manifest(experiment, "q4", SPECS[:1], "7")
    monkeypatch.delenv("SLURM_JOB_NAME")
    publish_manifest(experiment, "q4", SPECS[:1], "8")
    assert [array.job_name for _, array in manifest_of(experiment).arrays()] == ["my_run_2", "q4"]


def test_a_reader_sees_the_jobs_of_the_manifests_owner(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may read a colleague's experiment gets its states; the jobs are the colleague's."""
    env = slurm(tmp_path / "bin", job(7, 0, "RUNNING"), job(7, 1, "RUNNING", uid=os.getuid() + 2))
    monkeypatch.setenv("PATH", env["PATH"])
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: experiment.manifest_path.stat().st_uid + 1)
    assert [point.state.word for point in read_progress(experiment, manifest_of(experiment))][:2] == ["running", "lost"]


def test_only_cancels_the_job_of_its_point_and_one_of_several_points_if_all_are_named(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    env = slurm(tmp_path / "bin", job(7, 0, "RUNNING"), job(7, 1, "PENDING"), PLAIN_8)
    assert_refused(pipeline("cancel", experiment.folder, "--only", C, env=env), 2, "job 8", f"--only {D}")
    answer = pipeline("cancel", experiment.folder, "--only", B, env=env)
    assert (answer.returncode, answer.stdout) == (0, f"cancelled x job 7_1 (pending): {B}\n")
    assert cancelled(tmp_path / "bin") == ["7_1"]
    answer = pipeline("cancel", experiment.folder, "--only", C, "--only", D, env=env)
    assert (answer.returncode, cancelled(tmp_path / "bin")) == (0, ["7_1", "8"])


def test_a_point_that_its_job_has_measured_need_not_be_named(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    publish_record(make_record(SPECS[2], launch_id="5ab0ab1e-8"), experiment.records_folder)
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


def test_only_the_process_that_the_manifest_names_and_that_holds_the_lock_is_ended(
    pipeline: Command, tmp_path: Path
) -> None:
    """The manifest names a process of other work; another holds the lock."""
    with subprocess.Popen(["sleep", "60"]) as other:
        experiment = here(tmp_path / "out" / "a", other.pid)
        with experiment.submission_lock():
            assert_refused(pipeline("cancel", experiment.folder), 2, "another process holds the submit lock")
        assert other.poll() is None
        other.kill()


def test_a_driver_on_another_machine_is_named(pipeline: Command, tmp_path: Path) -> None:
    answer = pipeline("cancel", here(tmp_path / "out" / "a", 4711, "elsewhere").folder)
    assert (answer.returncode, "a ran on elsewhere; if process 4711 runs there still" in answer.stderr) == (0, True)


def test_an_experiment_that_is_locked_or_invalid_does_not_save_the_others(
    pipeline: Command, experiment: Experiment, tmp_path: Path
) -> None:
    locked, invalid = (
        make_experiment(tmp_path / "out" / name, missing=SPECS[:1]) for name in ("a-locked", "b-invalid")
    )
    invalid.manifest_path.write_text("{")
    env = slurm(tmp_path / "bin", PLAIN_8)
    with locked.submission_lock():
        answer = pipeline("cancel", tmp_path / "out", env=env)
    assert (answer.returncode, answer.stdout) == (2, f"cancelled x job 8 (pending): {C}, {D}\n"), answer.stderr
    assert_says(answer.stderr, "another process holds the submit lock", "not a valid manifest")
    assert cancelled(tmp_path / "bin") == ["8"]
    assert_refused(pipeline("cancel", invalid.folder, env=env), 2, "not a valid manifest")


def test_an_experiment_that_was_never_in_slurm_needs_none(pipeline: Command, tmp_path: Path) -> None:
    answer = pipeline("cancel", make_experiment(tmp_path / "x", make_record()).folder, env=without_slurm(tmp_path))
    assert (answer.returncode, answer.stdout) == (0, NOTHING)


@pytest.mark.fault("F44")
@pytest.mark.parametrize("backend", ["sbatch", "slurm"])
def test_on_slurm_a_job_that_is_not_the_experiments_lives(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path, backend: Backend
) -> None:
    """One job has another name; the other has the name that the manifest says, and another owner."""
    name = {"sbatch": "x", "slurm": ARRAY}[backend]
    sleep = ("sbatch", "--parsable", "--mem=1G", "--output=/dev/null", "--chdir=/", "--wrap", "sleep 300")
    thesis = cluster.run(*sleep, "--job-name=thesis").stdout.strip()
    of_nobody = cluster.run(*sleep, f"--job-name={name}", "--uid=nobody").stdout.strip()
    arrays = [SlurmArray(name, [[point]], number, is_array=False) for point, number in ((A, thesis), (B, of_nobody))]
    submission = Submission(SUBMISSION, backend, "2025-06-01T00:00:00Z", arrays)
    made = make_experiment(tmp_path / "x", missing=SPECS[:2], submissions=[submission])
    answer = pipeline("cancel", made.folder, env=on_slurm)
    assert (answer.returncode, answer.stdout) == (0, NOTHING)
    for number, said in {thesis: "thesis of user 0", of_nobody: f"{name} of user 65534"}.items():
        assert f"Job {number} is not cancelled: Slurm says that it is {said}" in answer.stderr
    assert sorted(queued(cluster)) == sorted([of_nobody, thesis])
    assert [part["job"] for part in states(pipeline, made.folder, on_slurm).values()] == [None, None]
    cluster.run("scancel", of_nobody, thesis)


def test_a_real_slurm_cancels_one_point_then_the_others_and_then_has_nothing_left(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = ("submit", "--grid", write_grid(tmp_path, LONG), "--outputs", tmp_path, "--max-parallel", "1")
    succeeded(pipeline(*submit, env=on_slurm))
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
    assert (nothing.returncode, nothing.stdout) == (0, NOTHING)
    assert "3 points to run" in pipeline(*submit, "--dry-run", env=on_slurm).stdout
