"""Faults of jobs, nodes and the controller of a real Slurm, and of the driver beside it."""

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
from cluster import Cluster
from conftest import Command, succeeded, wait_for, workers_of
from factories import write_grid, write_script
from slurm_queue import Env, array_of, queued, records_in, states, with_sbatch

GRID = """
name: faults
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: ddp, num_gpus: 1}
points:
  - {num_samples: [64], batch_size_per_gpu: [8]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""
MINUTES = ("--set", "batch_size_per_gpu=1", "num_samples=200000")


def submit_of(folder: Path, *more: str, grid: str = GRID) -> tuple[str, ...]:
    """The driver for the grid, whose outputs lie in the folder."""
    return ("submit", "--grid", str(write_grid(folder, grid)), "--outputs", str(folder), *more)


def wait_until_training(folder: Path) -> None:
    wait_for(lambda: list(folder.glob("faults/logs/scratch/*/environment.json")))


def stop_training(folder: Path) -> None:
    """Stop the ranks whose environment names this folder: they need no core while a test waits for Slurm."""
    for rank in wait_for(lambda: workers_of(folder)):
        os.kill(rank, signal.SIGSTOP)


def holding_prologue(folder: Path) -> Path:
    """Lines that say that an attempt begins, and hold its job until there is a file `go`."""
    attempt = "${SLURM_RESTART_COUNT:-0}"
    lines = (f"echo attempt {attempt} begins >&2", f"touch {folder}/begun{attempt}")
    return write_script(folder / "prologue.sh", *lines, f"until test -e {folder}/go; do sleep 0.1; done")


@pytest.mark.fault("F04")
def test_a_point_whose_job_is_preempted_is_preempted_and_can_be_submitted_again(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = submit_of(tmp_path, *MINUTES)
    assert pipeline(*submit, env=on_slurm).returncode == 0
    wait_until_training(tmp_path)
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_for(lambda: not queued(cluster), timeout_s=60)
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    assert (part["state"], records_in(tmp_path)) == ("preempted", [])
    assert "1 point to run" in pipeline(*submit, "--dry-run", env=on_slurm).stdout


@pytest.mark.fault("F05")
def test_a_job_past_its_limit_is_a_timeout_and_a_short_one_beside_it_is_not_ended(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    """Both have a limit of a minute. That of the long one is brought forward. Slurm continues what it is to end."""
    submit = submit_of(tmp_path, "--time", "00:01:00", "--set", "batch_size_per_gpu=1", "num_samples=64,200000")
    assert pipeline(*submit, env={**on_slurm, "TEST_FOLDER": str(tmp_path)}).returncode == 0
    wait_for(lambda: records_in(tmp_path))
    stop_training(tmp_path)
    (long,) = (part["job"] for part in states(pipeline, tmp_path, on_slurm).values() if part["state"] == "running")
    cluster.run("scontrol", "update", f"JobId={long}", "EndTime=now+1")
    answer = pipeline(*submit, "--wait", env=on_slurm)
    assert (answer.returncode, "0 points to run" in answer.stderr) == (1, True), answer.stderr
    assert sorted(part["state"] for part in states(pipeline, tmp_path, on_slurm).values()) == ["ok", "timeout"]
    tables = json.loads(pipeline("collect", tmp_path, "--format", "json").stdout)["experiments"]["faults"]
    timed = {row["epoch_time_s"] is not None for row in tables["Q2"]}
    assert (tables["coverage"]["ok"], tables["coverage"]["missing"], timed) == (1, 1, {True, False})


@pytest.mark.fault("F10")
def test_a_point_on_a_node_that_fails_is_node_fail_and_has_one_attempt(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = submit_of(tmp_path, *MINUTES)
    assert pipeline(*submit, env={**on_slurm, "TEST_FOLDER": str(tmp_path)}).returncode == 0
    wait_until_training(tmp_path)
    stop_training(tmp_path)
    node = cluster.run("squeue", "-h", "-o", "%N").stdout.strip()
    cluster.kill_node(node)
    try:
        wait_for(lambda: not queued(cluster), timeout_s=90)
        (part,) = states(pipeline, tmp_path, on_slurm).values()
        assert (part["state"], records_in(tmp_path)) == ("node_fail", [])
        assert "1 point to run" in pipeline(*submit, "--dry-run", env=on_slurm).stdout
    finally:
        cluster.kill_steps()  # which live on without their slurmd
        cluster.start_node(node)


MIXED_ENDS = """
name: faults
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: ddp, num_gpus: 1}
points:
  - {num_samples: [64], batch_size_per_gpu: [1, 2, 3, 4, 5]}
  - {batch_size_per_gpu: [65536], epochs: [1], max_steps: [3], memory_limit_gib: [0.5]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""
# what the element does that runs the point of that batch size; the one of 65,536 runs out of the memory that it may use
FAULTS = {
    2: "kill -KILL $$",
    3: "export GLOO_SOCKET_IFNAME=absent",  # its rank raises
    4: "exit 0",
}


@pytest.mark.fault("F02")
@pytest.mark.fault("F11")
def test_each_point_of_an_array_ends_as_it_did_and_only_those_without_a_result_are_gaps(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    submit = submit_of(tmp_path, grid=MIXED_ENDS)
    plan = json.loads(pipeline(*submit, "--dry-run", "--json", env=on_slurm).stdout)
    size_of = {point["run_id"]: point["batch_size_per_gpu"] for point in plan["points"]}
    ((array),) = plan["arrays"]
    cases = [f"{index}) {FAULTS.get(size_of[run_id], 'true')};;" for index, (run_id,) in enumerate(array["elements"])]
    prologue = write_script(tmp_path / "prologue.sh", "case $SLURM_ARRAY_TASK_ID in", *cases, "esac")
    answer = pipeline(*submit, "--prologue", prologue, "--wait", env=on_slurm)
    assert (answer.returncode, "3 of 6 points have no result" in answer.stderr) == (1, True), answer.stderr
    found = {size_of[run_id]: part for run_id, part in states(pipeline, tmp_path, on_slurm).items()}
    assert {size: part["state"] for size, part in found.items()} == {
        **{1: "ok", 2: "failed", 3: "failed", 4: "lost", 5: "ok", 65536: "oom"}
    }
    reasons = [found[size]["reason"] for size in (2, 4)]
    assert reasons == ["ended by signal 9 without a record; see its log", "exited 0 without a record"]
    strict = pipeline("collect", tmp_path, "--strict", "--format", "json")
    assert strict.returncode == 1
    tables = json.loads(strict.stdout)["experiments"]["faults"]
    assert [row["batch_size_per_gpu"] for row in tables["Q2"] if row["epoch_time_s"]] == [1, 5]
    assert [row["batch_size_per_gpu"] for row in tables["oom"]] == [65536]


@pytest.mark.fault("F12")
def test_both_attempts_of_a_requeued_job_are_in_its_log_and_the_point_has_one_record(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    """The pipeline asks for no requeue; an administrator may."""
    job = array_of(pipeline(*submit_of(tmp_path, "--prologue", str(holding_prologue(tmp_path))), env=on_slurm))
    wait_for((tmp_path / "begun0").exists)
    cluster.run("scontrol", "update", f"JobId={job}", "Requeue=1")
    cluster.run("scontrol", "requeue", job)
    wait_for(lambda: f"{job} BeginTime" in cluster.run("squeue", "-h", "-o", "%i %r").stdout)  # in two minutes
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    assert part["state"] == "pending"
    # slurmd takes a credential made in the second in which it revoked the last one for that one
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    wait_for((tmp_path / "begun1").exists)
    (tmp_path / "go").touch()
    cluster.wait_idle(timeout_s=120)
    (record,) = records_in(tmp_path)
    assert (record["status"], record["launch_id"].rpartition("-")[2]) == ("ok", "1")
    assert re.findall(r"attempt (\d) begins", Path(part["log"]).read_text()) == ["0", "1"]


# run by the first Python of a step: it holds the step. A controller that came back gave a job no step for two minutes
HOLD = """
import os, pathlib, time
folder = pathlib.Path({folder!r})
if "SLURM_STEP_ID" in os.environ:
    (folder / "begun").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)
"""


@pytest.mark.fault("F25")
def test_a_controller_that_is_gone_for_a_while_costs_no_point_and_no_wait(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    ended: list[int] = []
    (tmp_path / "sitecustomize.py").write_text(HOLD.format(folder=str(tmp_path)))
    prologue = write_script(tmp_path / "prologue.sh", f"export PYTHONPATH={tmp_path}:$PYTHONPATH")
    submit = submit_of(tmp_path, "--prologue", str(prologue), "--wait")
    driver = threading.Thread(target=lambda: ended.append(pipeline(*submit, env=on_slurm).returncode))
    driver.start()
    wait_for((tmp_path / "begun").exists)
    cluster.end_controller()
    try:
        assert {part["state"] for part in states(pipeline, tmp_path, on_slurm).values()} == {"unknown"}
    finally:
        cluster.start_controller()
    (tmp_path / "go").touch()
    driver.join(120)
    assert ended == [0]
    assert [record["status"] for record in records_in(tmp_path)] == ["ok"]


@pytest.mark.fault("F28")
def test_a_signal_that_slurm_sends_to_every_process_of_a_step_ends_no_rank(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    """A rank without a handler would die of USR2."""
    job = array_of(pipeline(*submit_of(tmp_path, "--set", "num_gpus=2", "num_samples=10000"), env=on_slurm))
    wait_until_training(tmp_path)
    cluster.run("scancel", "--signal=USR2", job)
    cluster.wait_idle(timeout_s=120)
    assert [record["status"] for record in records_in(tmp_path)] == ["ok"]


@pytest.mark.fault("F29")
def test_an_interrupt_between_two_arrays_keeps_the_first_and_the_next_driver_submits_the_rest(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    """Three shapes are three arrays. The second sbatch takes nothing, and its driver is interrupted."""
    submit = submit_of(tmp_path, "--wait", "--set", "num_gpus=1,2,4", "batch_size_per_gpu=4")
    count = f"echo called >> {tmp_path}/calls; test $(wc -l < {tmp_path}/calls) -lt 2"
    env = with_sbatch(tmp_path, on_slurm, f'{count} && exec {{real}} "$@"; kill -INT $PPID; exec sleep 60')
    interrupted = pipeline(*submit, env=env)
    assert (interrupted.returncode, "Traceback" in interrupted.stderr) == (128 + signal.SIGINT, False)
    assert len(re.findall(r"^array \d+:", succeeded(pipeline(*submit, env=on_slurm)).stdout, re.MULTILINE)) == 2
    assert [record["status"] for record in records_in(tmp_path)] == ["ok"] * 3


@pytest.mark.fault("F31")
def test_a_point_that_takes_more_memory_than_its_job_has_is_out_of_host_memory(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    """200 MB are less than torch takes."""
    small = GRID.replace("mem_per_gpu_gib: 3", "mem_per_gpu_gib: 0.2")
    answer = pipeline(*submit_of(tmp_path, "--wait", *MINUTES, grid=small), env=on_slurm)
    assert answer.returncode == 1, answer.stderr
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    assert (part["state"], "raise mem_per_gpu_gib" in part["reason"]) == ("host_oom", True)
