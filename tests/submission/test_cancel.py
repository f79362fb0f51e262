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
from slurm_queue import UP, Env, fake_slurm, queued, states

from pipeline.launch import publish_manifest
from pipeline.records.folder import Experiment, SlurmArray, Submission, start_submission
from pipeline.records.store import publish_record
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


LAUNCH = "#!/bin/bash\nsrun .venv/bin/python -u -m pipeline.launch --grid q1\n"


def job(array: int, element: int, state: str, *, name: str = ARRAY, uid: int | None = None) -> str:
    return f"{array}|{element}|{state}|0:0|N/A|None|{os.getuid() if uid is None else uid}|{name}\n"


def slurm(folder: Path, *jobs: str, scancel: str = "") -> Mapping[str, str]:
    """A PATH with a Slurm that has these jobs and notes the arguments of every scancel."""
    scancel = f"echo $* >> {folder}/cancelled; {scancel}"
    script = f"[ $1 != write ] || exec /bin/cat {folder}/script"
    env = fake_slurm(folder, f"{script}; {UP}", squeue=f"/bin/cat {folder}/jobs", scancel=scancel)
    (folder / "jobs").write_text("".join(jobs))
    (folder / "script").write_text(LAUNCH)
    return env


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


ANOTHERS = os.getuid() + 1
EVERYTHING = {
    "7_0": f"cancelled x job 7_0 (running): {A}",
    "7_1": f"cancelled x job 7_1 (pending): {B}",
    "8": f"cancelled x job 8 (pending): {C}, {D}",
}


def not_ours(line: str, said: str, *more: str) -> tuple[list[str], list[str], list[str], str, dict[str, str]]:
    """A case: job 7 is not the manifest's, and is left alone with its point A."""
    lines = [EVERYTHING["8"]] if more else []
    return [line, *more], ["8"] * len(more), lines, said, {A: "lost" if more else "running"}


@pytest.mark.fault("F09")
@pytest.mark.fault("F44")
@pytest.mark.parametrize(
    ("jobs", "ids", "lines", "said", "after"),
    [
        # by array
        (
            [job(7, 0, "RUNNING"), job(7, 1, "PENDING"), PLAIN_8],
            *(["7", "8"], [*EVERYTHING.values()], "3 jobs cancelled", {}),
        ),
        # what has ended is left alone
        ([job(7, 0, "COMPLETED"), job(7, 1, "COMPLETING"), job(8, 0, "CANCELLED")], [], [], "", {}),
        # of another name or owner with the same id
        not_ours(
            job(7, 0, "RUNNING", name="my-thesis"),
            *(f"Job 7 is not cancelled: Slurm says that it is my-thesis of user {os.getuid()}, not the m", PLAIN_8),
        ),
        not_ours(
            job(7, 0, "RUNNING", uid=ANOTHERS),
            *(f"Job 7 is not cancelled: Slurm says that it is {ARRAY} of user {ANOTHERS}, not the man", PLAIN_8),
        ),
        # whose name or owner Slurm does not say
        *(
            not_ours(line, "Job 7 is not cancelled: ")
            for line in ("7|0|RUNNING\n", job(7, 0, "RUNNING", name=""), f"7|0|RUNNING|0:0|N/A|None||{ARRAY}\n")
        ),
    ],
)
def test_the_jobs_of_the_manifest_are_cancelled_and_no_other(
    pipeline: Command,
    experiment: Experiment,
    tmp_path: Path,
    jobs: list[str],
    ids: list[str],
    lines: list[str],
    said: str,
    after: dict[str, str],
) -> None:
    env = slurm(tmp_path / "bin", *jobs)
    answer = pipeline("cancel", tmp_path / "out", env=env)
    assert (answer.returncode, cancelled(tmp_path / "bin")) == (0, ids), answer.stderr
    assert answer.stdout.splitlines() == (lines or [NOTHING.strip()])
    assert said in answer.stderr
    found = states(pipeline, experiment.folder, env)
    assert {run_id: found[run_id]["state"] for run_id in after} == after


THESIS = f"7|N/A|RUNNING|0:0|N/A|None|{os.getuid()}|thesis\n"
OTHER_WORK = "Job 7 is not cancelled: its batch script does not run pipeline.launch"


@pytest.mark.fault("F44")
@pytest.mark.parametrize(
    ("recorded", "in_slurm", "script", "said"),
    [
        *(
            (one, job(7, 0, "RUNNING", name=other), LAUNCH, "")
            for one, other in {"x": "x", "my_run_2": "My run.2"}.items()
        ),
        *(("x", job(7, 0, "RUNNING", name=other), LAUNCH, "Job 7 is not cancelled") for other in ("my-thesis", "x-1")),
        # a stranger wrote the manifest, and the user copied it
        *(("thesis", THESIS, script, OTHER_WORK) for script in ("#!/bin/bash\nsrun python thesis.py\n", None)),
    ],
)
def test_a_job_of_plain_sbatch_has_the_name_that_its_launch_recorded_and_runs_a_launch(
    pipeline: Command, tmp_path: Path, recorded: str, in_slurm: str, script: str | None, said: str
) -> None:
    env = slurm(tmp_path / "bin", in_slurm)
    path = tmp_path / "bin" / "script"
    path.unlink() if script is None else path.write_text(script)
    made = of_sbatch(tmp_path / "x", recorded, is_array=in_slurm != THESIS)
    answer = pipeline("cancel", made.folder, env=env)
    assert (answer.returncode, cancelled(tmp_path / "bin")) == (0, [] if said else ["7"]), answer.stderr
    assert said in answer.stderr


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
    assert "3 configurations to run" in pipeline(*submit, "--dry-run", env=on_slurm).stdout
