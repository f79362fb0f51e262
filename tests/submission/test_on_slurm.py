"""The pipeline on a real Slurm of two nodes on this machine: runs, faults, and variables that a shell passes on."""

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from conftest import CPU_SIZE, ROOT, Command, only_experiment, processes_with, succeeded, wait_for
from factories import (
    known,
    measurement_of,
    only_record,
    planted_point,
    records_of,
    with_change,
    write_grid,
    write_model,
    write_script,
)
from slurm_queue import MIXED, Env, array_of, queued, quick_paths, quick_points, records_in, states, with_sbatch

from pipeline.plan.grid import expand_grid
from pipeline.records.folder import Experiment
from pipeline.runner.launch_options import LaunchOptions, TaskList
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.system import host

LONG = """
name: long
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: ddp}
points:
  - {num_gpus: [2], num_nodes: [2], batch_size_per_gpu: [1], num_samples: [2000000]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def sleeping(grid: str, folder: Path) -> Path:
    """Write the grid with a model in place of LeNet that needs no core: each of its steps sleeps."""
    write_model(folder, "import time\n" + with_change("return nn.functional", "time.sleep(0.05); return nn.functional"))
    return write_grid(folder, grid.replace("model: lenet, dataset: synthetic", 'model: "tiny.py:Tiny"'))


def report_of(pipeline: Command, folder: Path) -> dict[str, Any]:
    """The tables of the only experiment in the folder."""
    return dict(only_experiment(pipeline("collect", folder, "--format", "json")))


ONE_OF_OWN = """
name: mixed
base: {device: cpu, input: synthetic, precision: fp32, num_samples: 64, strategy: ddp, batch_size_per_gpu: 8}
points:
  - {model: [lenet], dataset: [synthetic], num_gpus: [1, 2]}
  - {model: ["models/tiny.py:Tiny"], model.width: [6], num_gpus: [2], num_nodes: [2], epochs: [3]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def test_a_mixed_grid_runs_in_one_array_a_shape_and_is_never_submitted_twice(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    """On two nodes it is a model of a user's own: its file lies in the folder of the grid, with a module beside it."""
    out = tmp_path / "out put"  # a space, as people have them
    write_model(tmp_path / "models", with_change("import torch\n", "import sizes\nimport torch\n"))
    (tmp_path / "models" / "sizes.py").touch()
    submit = ("submit", "--grid", write_grid(tmp_path, ONE_OF_OWN), "--outputs", out)
    assert [line.split(": ")[1] for line in succeeded(pipeline(*submit, env=on_slurm)).stdout.splitlines()[:-1]] == [
        "1 element, 1 node x 1 CPU process",
        "1 element, 1 node x 2 CPU processes",
        "1 element, 2 nodes x 1 CPU process",
    ]
    again = pipeline(*submit, "--wait", env=on_slurm)  # while the first arrays wait or run
    assert "0 configurations to run, 3 queued or running" in again.stderr
    assert {part["state"] for part in states(pipeline, out, on_slurm).values()} == {"ok"}

    report = report_of(pipeline, out)
    assert report["coverage"]["ok"] == 3
    rows = {(row["num_nodes"], row["num_gpus"]): row for row in report["Q2"]}
    assert {*rows} == {(1, 1), (1, 2), (2, 2)}
    assert min(rows[1, num_gpus]["speedup"] for num_gpus in (1, 2)) > 0
    row = rows[2, 2]
    assert row["throughput_items_per_s"] == pytest.approx(3 * row["throughput_samples_per_s"])
    (two_nodes,) = (record for record in records_of(Experiment(out / "mixed")) if record.spec.num_nodes == 2)
    own, environment = measurement_of(two_nodes), two_nodes.environment
    assert environment.slurm["SLURM_JOB_ID"]
    assert (environment.nodes, environment.model_changed) == (("node1", "node2"), False)
    assert (own.num_parameters, own.unit, own.items_per_sample, len(own.epochs[1].ranks)) == (7, "atoms", 3, 2)

    next(out.glob("mixed/records/ddp-1proc*.json")).unlink()
    resumed = pipeline(*submit, "--partition", "down", env=on_slurm)
    assert "1 configuration to run, 2 recorded as ok" in resumed.stderr
    assert array_of(resumed)
    assert "array" not in succeeded(pipeline(*submit, env=on_slurm)).stdout
    assert len(json.loads((out / "mixed" / "manifest.json").read_text())["submissions"]) == 2


def test_an_element_of_several_points_that_is_cancelled_loses_the_running_one_and_a_resume_fills_the_gaps(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    changes = ("num_gpus=1", "num_nodes=1", "batch_size_per_gpu=8", "num_samples=64,67,2000000")
    quick = quick_points(tmp_path)
    submit = submit_of(tmp_path, "--points-per-element", "3", *quick, "--set", *changes, grid=LONG)
    plan = json.loads(pipeline(*submit, "--dry-run", "--json", env=on_slurm).stdout)
    ((order,),) = (array["elements"] for array in plan["arrays"])
    num_samples = {point["run_id"]: point["num_samples"] for point in plan["points"]}
    assert [num_samples[run_id] for run_id in order] == [64, 2_000_000, 67]  # as the seed draws them
    sent = pipeline(*submit, env=on_slurm)
    assert sent.stdout.splitlines()[0].endswith(": 1 element, 1 node x 1 CPU process, 3 configurations"), sent.stderr

    wait_for(lambda: list(tmp_path.glob(f"long/logs/*/{order[1]}.*/environment.json")), timeout_s=120)
    wait_for(lambda: list(tmp_path.glob(f"long/records/{order[0]}.*.json")), timeout_s=10)  # once its sampler has ended
    found = states(pipeline, tmp_path, on_slurm)
    assert [found[run_id]["state"] for run_id in order] == ["ok", "running", "pending"]
    assert "0 configurations to run, 2 queued or running, 1 recorded as ok" in pipeline(*submit, env=on_slurm).stderr

    cluster.run("scancel", found[order[1]]["job"])
    wait_for(lambda: not queued(cluster), timeout_s=30)
    found = states(pipeline, tmp_path, on_slurm)
    assert [found[run_id]["state"] for run_id in order] == ["ok", "cancelled", "missing"]
    resumed = json.loads(pipeline(*submit, "--dry-run", "--json", env=on_slurm).stdout)
    assert resumed["arrays"][0]["elements"] == [order[1:]]


def parent_of(pid: int) -> int:
    """The parent of a process; itself once it has ended."""
    _, parent, *_ = host.read_processes().get(pid, ["", str(pid)])
    return int(parent)


def workers_on(cluster: Cluster, node_rank: int) -> list[int]:
    """The processes of ranks on that node of a step: of this cluster, beside which others may run."""
    return processes_with(f"SLURM_NODEID={node_rank}", f"SLURM_CONF={cluster.env['SLURM_CONF']}", name="rank")


def submit_long(pipeline: Command, env: Env, folder: Path) -> tuple[str, str, Path, str, Path]:
    """Submit a point of hours on two nodes, wait until its ranks have met, and return the command."""
    submit = ("submit", "--grid", sleeping(LONG, folder), "--outputs", folder)
    succeeded(pipeline(*submit, env=env))
    wait_for(lambda: list(folder.glob("long/logs/*/*/environment.json")))
    return submit


@pytest.mark.fault("F16")
def test_a_rank_that_dies_on_the_second_node_ends_the_job_and_is_named(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = submit_long(pipeline, on_slurm, tmp_path)
    time.sleep(1)
    os.kill(workers_on(cluster, 1)[0], signal.SIGKILL)
    killed_s = time.monotonic()
    wait_for(lambda: not queued(cluster), timeout_s=30)
    assert time.monotonic() - killed_s < 15
    (record,) = records_in(tmp_path)
    assert (record["status"], record["failure"]["kind"], record["failure"]["rank"]) == ("failed", "signal", 1)
    assert "SIGKILL" in record["reason"]
    assert workers_on(cluster, 0) + workers_on(cluster, 1) == []
    assert "0 configurations to run, 1 recorded as failed" in pipeline(*submit, env=on_slurm).stderr


@pytest.mark.fault("F16")
def test_a_node_that_goes_is_named_by_the_others(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit_long(pipeline, on_slurm, tmp_path)
    cluster.kill_node("node2")
    own = processes_with("SLURM_NODEID=1", f"SLURM_CONF={cluster.env['SLURM_CONF']}")
    for pid in [
        *dict.fromkeys(parent_of(one) for one in own if parent_of(one) not in own),
        *own,
    ]:  # slurmstepd first
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: records_in(tmp_path), timeout_s=60)
    cluster.miss_node("node2")
    wait_for(lambda: not queued(cluster))
    (record,) = records_in(tmp_path)
    assert (record["status"], record["failure"]["kind"]) == ("failed", "collective")
    assert record["reason"].startswith("no word from node2: it may have gone; rank 0: lost the connection")


def test_the_grid_nodes_runs_on_one_and_two_nodes_and_says_what_the_second_brings(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    """With one process on each node, by the words that people give to the shipped grid."""
    size = ("model.layers=1", "model.width=16", "model.heads=2", "model.length=8", "model.vocabulary=64")
    changes = (
        "device=cpu",
        "num_nodes=1,2",
        "gpus_per_node=1",
        *size,
        "batch_size_per_gpu=8",
        "num_samples=64",
        "windows=1",
    )
    submit = ("submit", "--grid", "nodes", "--outputs", tmp_path, "--points-per-element", "2", "--keep-trace", "--wait")
    env = {**on_slurm, "PIPELINE_MASTER_ADDR": "@lo", "CUDA_VISIBLE_DEVICES": ""}
    timed = [spec for spec in expand_grid("nodes", changes).points if spec.measure != "network"]  # takes long
    only = [word for spec in timed for word in ("--only", spec.run_id())]
    succeeded(pipeline(*submit, *only, "--set", *changes, env=env))
    records = {
        (one.spec.measure, one.spec.strategy, one.spec.num_nodes): one
        for one in records_of(Experiment(tmp_path / "nodes"))
    }
    assert {*records} == {
        ("epochs", "single", 1),
        ("epochs", "ddp", 1),
        ("epochs", "ddp", 2),
        ("communication", "ddp", 2),
    }
    environment = records["epochs", "ddp", 2].environment
    assert ([one.rank for one in environment.bindings], environment.unlike_nodes) == ([0, 1], {})
    measured = measurement_of(records["communication", "ddp", 2])
    found = known(measured.communication)
    assert all(len(ranks) == 2 for series in found.series for ranks in series.window_times_ns)
    assert [transfer.bytes_per_step for transfer in found.transfers] == [measured.gradient_bytes]
    assert len(list(tmp_path.glob("nodes/traces/*/rank*.pt.trace.json.gz"))) == 2
    report = report_of(pipeline, tmp_path)
    (row,) = report["nodes"]
    assert (row["nodes"], row["scaling"]) == (2, "weak")
    assert row["node_speedup"] > 0
    (row,) = report["communication"]
    assert (row["num_nodes"], row["num_windows"], row["exposed_comm_time_s"] is None) == (2, 1, False)


def test_plain_sbatch_runs_q4_and_collect_finds_it(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    arguments = ("--outputs", str(tmp_path), "--set", *CPU_SIZE, "strategy=ddp", "num_gpus=1", "batch_size_per_gpu=8")
    request = ("--gpus-per-node=0", "--cpus-per-task=1", "--mem=3G", f"--output={tmp_path}/%a.log", "--job-name=My.Q4")
    sent = cluster.run("sbatch", *request, "--array=0,15", "jobs/q4.sbatch", *arguments, cwd=ROOT, env=on_slurm)
    array_id = sent.stdout.split()[-1]
    wait_for(lambda: (tmp_path / "q4" / "manifest.json").exists())
    (array,) = json.loads((tmp_path / "q4" / "manifest.json").read_text())["submissions"][0]["arrays"]
    assert (array["job_id"], array["job_name"]) == (array_id, "my_q4")
    assert "queued or running" in pipeline("submit", "--grid", "q4", *arguments, "--dry-run", env=on_slurm).stdout
    cluster.wait_idle(timeout_s=120)
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert "grid q4 has 5 configurations; element 15 has nothing to do." in logs["15.log"]
    record = only_record(Experiment(tmp_path / "q4"))
    # so `status` tells that this job began the point
    assert (record.environment.slurm["SLURM_ARRAY_JOB_ID"], record.launch_id.split("-")[0]) == (array_id, array_id)

    env = {**on_slurm, "PYTHONPATH": quick_paths(tmp_path)}
    cluster.run("sbatch", *request, "--array=0-1", "jobs/q4.sbatch", *arguments, cwd=ROOT, env=env)
    cluster.wait_idle(timeout_s=120)  # a second sbatch fills the gaps and leaves the rest alone
    assert {one.spec.remedies for one in records_of(Experiment(tmp_path / "q4"))} == {(), ("linear_scaling",)}
    coverage = report_of(pipeline, tmp_path)["coverage"]
    assert (len(list(tmp_path.glob("q4/records/*.json"))), coverage["expected"], coverage["ok"]) == (2, 5, 2), logs


@pytest.mark.fault("F43")
def test_nothing_runs_of_a_file_that_is_swapped_while_its_job_waits(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    """By a list of another model of the submitter's."""
    evil = TaskList([[planted_point(tmp_path)]], LaunchOptions(tmp_path)).encode()
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), "--outputs", tmp_path)
    succeeded(pipeline(*submit, "--partition", "down", "--set", "num_gpus=1", "num_nodes=1", env=on_slurm))
    (tasks,) = tmp_path.glob("mixed/logs/*/mixed-*.json")
    tasks.write_bytes(evil)
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    update = ("scontrol", "update", f"JobId={part['job']}", "Partition=main")
    wait_for(lambda: cluster.run(*update, check=False).returncode == 0)  # Slurm 26.05 refuses it while it schedules
    cluster.wait_idle(timeout_s=120)
    assert not (tmp_path / "mal" / "ran").exists()
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    assert part["state"] in ("failed", "settling")
    assert "was changed after submit" in Path(part["log"]).read_text()
    assert not list(tmp_path.glob("mixed/records/*.json"))


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
    wait_for(lambda: list(folder.glob("faults/logs/*/*/environment.json")))


def preempt(cluster: Cluster, job: str) -> None:
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")


def pass_limit(cluster: Cluster, job: str) -> None:
    cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now+1")


def lose_node(cluster: Cluster, job: str) -> None:
    node = cluster.run("squeue", "-h", "-o", "%N").stdout.strip()
    cluster.kill_node(node)
    cluster.miss_node(node)


@pytest.mark.parametrize(
    ("end_job", "state"),
    [
        pytest.param(preempt, "preempted", marks=pytest.mark.fault("F04")),
        pytest.param(pass_limit, "timeout", marks=pytest.mark.fault("F05")),
        pytest.param(lose_node, "node_fail", marks=pytest.mark.fault("F10")),
    ],
)
def test_a_point_whose_job_ends_without_a_record_has_the_state_of_its_job_and_can_be_submitted_again(
    pipeline: Command,
    cluster: Cluster,
    on_slurm: Env,
    tmp_path: Path,
    end_job: Callable[[Cluster, str], None],
    state: str,
) -> None:
    submit = submit_of(tmp_path, *quick_points(tmp_path), *MINUTES)
    job = array_of(pipeline(*submit, env=on_slurm))
    wait_until_training(tmp_path)
    end_job(cluster, job)
    wait_for(lambda: not queued(cluster))
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    assert (part["state"], records_in(tmp_path)) == (state, [])
    assert "1 configuration to run" in pipeline(*submit, "--dry-run", env=on_slurm).stdout


MIXED_ENDS = """
name: faults
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: ddp, num_gpus: 1}
points:
  - {num_samples: [64], batch_size_per_gpu: [1, 2, 3, 4]}
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
    assert (answer.returncode, "3 of 5 configurations have no result" in answer.stderr) == (1, True), answer.stderr
    found = {size_of[run_id]: part for run_id, part in states(pipeline, tmp_path, on_slurm).items()}
    assert {size: part["state"] for size, part in found.items()} == {
        **{1: "ok", 2: "failed", 3: "failed", 4: "lost", 65536: "oom"}
    }
    reasons = [found[size]["reason"] for size in (2, 4)]
    assert reasons == ["ended by signal 9 without a record; see its log", "exited 0 without a record"]
    strict = pipeline("collect", tmp_path, "--strict", "--format", "json")
    assert strict.returncode == 1
    tables = json.loads(strict.stdout)["experiments"]["faults"]
    assert [row["batch_size_per_gpu"] for row in tables["Q2"] if row["epoch_time_s"]] == [1]
    assert [row["batch_size_per_gpu"] for row in tables["oom"]] == [65536]


@pytest.mark.fault("F12")
def test_both_attempts_of_a_requeued_job_are_in_its_log_and_the_point_has_one_record(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    """The pipeline asks for no requeue; an administrator may."""
    attempt = "${SLURM_RESTART_COUNT:-0}"
    begins = (f"echo attempt {attempt} begins >&2", f"touch {tmp_path}/begun{attempt}")
    holding = quick_points(tmp_path, *begins, f"until test -e {tmp_path}/go; do sleep 0.1; done")
    job = array_of(pipeline(*submit_of(tmp_path, *holding), env=on_slurm))
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
    assert (record["status"], record["launch_id"].split("-")[2]) == ("ok", "1")
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
    submit = submit_of(tmp_path, *quick_points(tmp_path), "--wait")
    with (tmp_path / "quick" / "sitecustomize.py").open("a") as file:
        file.write(HOLD.format(folder=str(tmp_path)))
    driver = threading.Thread(target=lambda: ended.append(pipeline(*submit, env=on_slurm).returncode))
    driver.start()
    wait_for((tmp_path / "begun").exists)
    cluster.end_controller()
    assert {part["state"] for part in states(pipeline, tmp_path, on_slurm).values()} == {"unknown"}
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
    job = array_of(pipeline(*submit_of(tmp_path, "--set", "num_gpus=2", "num_samples=5000"), env=on_slurm))
    wait_until_training(tmp_path)
    cluster.run("scancel", "--signal=USR2", job)
    cluster.wait_idle(timeout_s=120)
    assert [record["status"] for record in records_in(tmp_path)] == ["ok"]


@pytest.mark.fault("F29")
def test_an_interrupt_between_two_arrays_keeps_the_first_and_the_next_driver_submits_the_rest(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    """Two shapes are two arrays. The second sbatch takes nothing, and its driver is interrupted."""
    quick = quick_points(tmp_path)
    submit = submit_of(tmp_path, "--wait", *quick, "--set", "num_gpus=1,2", "batch_size_per_gpu=4")
    count = f"echo called >> {tmp_path}/calls; test $(wc -l < {tmp_path}/calls) -lt 2"
    env = with_sbatch(tmp_path, on_slurm, f'{count} && exec {{real}} "$@"; kill -INT $PPID; exec sleep 60')
    interrupted = pipeline(*submit, env=env)
    assert (interrupted.returncode, "Traceback" in interrupted.stderr) == (128 + signal.SIGINT, False)
    assert len(re.findall(r"^array \d+:", succeeded(pipeline(*submit, env=on_slurm)).stdout, re.MULTILINE)) == 1
    assert [record["status"] for record in records_in(tmp_path)] == ["ok"] * 2


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


ANSWERS = {
    "SQUEUE_PARTITION": "high",
    "SQUEUE_USERS": "nobody",
    "SQUEUE_ACCOUNT": "none",
    "SQUEUE_NAMES": "none",
    "SQUEUE_QOS": "none",
    "SQUEUE_LICENSES": "none",
    "SQUEUE_FORMAT": "%i",
    "SACCT_FORMAT": "State",
    "SINFO_PARTITION": "high",
    "SINFO_FORMAT": "%P",
    "SCONTROL_ALL": "1",
    "SLURM_TIME_FORMAT": "%s",
    "SLURM_CLUSTERS": "elsewhere",
}
STEP = {
    "SLURM_MEM_PER_CPU": "200",
    "SLURM_GPUS": "1",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_TIMELIMIT": "1",
    "SRUN_EXPORT_ENV": "NONE",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "3",
}
REQUEST = {
    "SLURM_ARRAY_JOB_ID": "1",
    "SLURM_ARRAY_TASK_ID": "7",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_PARTITION": "down",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_REQUEUE": "1",
    "SBATCH_JOB_NAME": "other",
    "SBATCH_EXPORT": "NONE",
    "PIPELINE_LAUNCH_ID": "an-outer-job",
}
SALLOC = ("salloc", "--mem-per-cpu=200M", "--gpus=1", "--ntasks=2")
TWO_POINTS = ("num_gpus=1", "num_nodes=1", "batch_size_per_gpu=4,8")
# what differs between two jobs of the same request
OWN = (
    "Time|^LastSchedEval$|^Scheduler$|Id$|^JobName$|^Std|^Command$|^AllocNode|^Priority$|NodeList$|^BatchHost$|^Nodes$"
)


def request_of(cluster: Cluster, array: str) -> list[dict[str, str]]:
    """What Slurm holds of every element of an array, but for what differs between two of the same request."""
    answer = cluster.run("scontrol", "--oneliner", "show", "job", array).stdout
    elements = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in answer.splitlines()]
    return [
        {key: value for key, value in element.items() if key == "TimeLimit" or not re.search(OWN, key)}
        for element in sorted(elements, key=lambda element: int(element["ArrayTaskId"]))
    ]


@pytest.mark.fault("F33")
def test_what_is_set_for_slurms_commands_changes_no_state_and_runs_nothing_twice(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    changes = ("num_gpus=1", "num_nodes=1", "num_samples=2000000")
    submit = submit_of(tmp_path, *quick_points(tmp_path), "--set", *changes, grid=MIXED)
    assert pipeline(*submit, env=on_slurm).returncode == 0
    wait_for(lambda: list(tmp_path.glob("mixed/logs/*/*/environment.json")))
    for names in (("SQUEUE_PARTITION",), ("SQUEUE_USERS",), ANSWERS):
        (part,) = states(pipeline, tmp_path, {**on_slurm, **{name: ANSWERS[name] for name in names}}).values()
        assert part["state"] == "running", names
    again = succeeded(pipeline(*submit, env={**on_slurm, **ANSWERS}))
    assert ("0 configurations to run, 1 queued or running" in again.stderr, "array" in again.stdout) == (True, False)
    assert all(again.stderr.count(f"{name},") + again.stderr.count(f"{name};") == 1 for name in ANSWERS)


@pytest.mark.fault("F13")
def test_the_drivers_jobs_are_the_same_whatever_the_shell_has_set(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    set_aside = STEP | {name: value for name, value in REQUEST.items() if name != "PIPELINE_LAUNCH_ID"}
    found: dict[str, list[dict[str, str]]] = {}
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), "--set", *TWO_POINTS, "--wait")
    ends = ("--prologue", write_script(tmp_path / "prologue.sh", "exit 0"))  # nothing runs where nothing is set
    for name, changes, more in (("clean", {}, ends), ("set", STEP | REQUEST, quick_points(tmp_path))):
        answer = pipeline(*submit, *more, "--outputs", tmp_path / name, env={**on_slurm, **changes})
        found[name] = request_of(cluster, array_of(answer))
        notices = [line for line in answer.stderr.splitlines() if "set aside" in line]
        assert len(notices) == (name == "set")
    assert [record["status"] for record in records_in(tmp_path / "set")] == ["ok", "ok"]
    assert [dict(set(a.items()) ^ set(b.items())) for a, b in zip(*found.values(), strict=True)] == [{}, {}]
    assert (len(found["clean"]), found["clean"][0]["Partition"]) == (2, "main")
    assert not any("set aside" in log.read_text() for log in tmp_path.glob("*/mixed/logs/*/*.log"))
    assert sorted(re.findall(r"[A-Z_]{4,}", notices[0])) == sorted(set_aside)
    assert not any("an-outer-job" in str(record["launch_id"]) for record in records_in(tmp_path / "set"))


@pytest.mark.fault("F13")
@pytest.mark.parametrize("changes", [{}, STEP], ids=["salloc", "variables"])
def test_a_plain_sbatch_inside_an_allocation_cleans_its_own(
    cluster: Cluster, on_slurm: Env, tmp_path: Path, changes: Mapping[str, str]
) -> None:
    arguments = ("--outputs", str(tmp_path), "--set", *CPU_SIZE, "strategy=ddp", "num_gpus=1", "batch_size_per_gpu=8")
    request = ("--gpus-per-node=0", "--cpus-per-task=1", "--mem=3G", f"--output={tmp_path}/%a.log", "--array=0")
    sbatch = ("sbatch", *request, "jobs/q4.sbatch", *arguments)
    env = {**on_slurm, **changes} if changes else {**on_slurm, "PYTHONPATH": quick_paths(tmp_path)}
    cluster.run(*(() if changes else SALLOC), *sbatch, cwd=ROOT, env=env)
    cluster.wait_idle(timeout_s=120)
    log = (tmp_path / "0.log").read_text()
    assert [record["status"] for record in records_in(tmp_path)] == ["ok"], log
    (notice,) = [line for line in log.splitlines() if "set aside" in line]
    assert set(re.findall(r"[A-Z_]{4,}", notice)) == set(changes or ("SLURM_MEM_PER_CPU", "SLURM_GPUS"))


@pytest.mark.fault("F53")
def test_on_two_nodes_a_folder_that_is_swapped_between_launchers_and_ranks_decides_nothing(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    """The planted one has the same names, and tells the ranks of both nodes to run another model of the submitter's."""
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), "--outputs", tmp_path)
    succeeded(pipeline(*submit, "--set", "num_gpus=2", "num_nodes=2", env=on_slurm))
    (tasks,) = tmp_path.glob("mixed/logs/*/mixed-*.json")
    samplers = wait_for(lambda: len(found := [*tasks.parent.glob("*.*/samples.*.part")]) == 2 and found)
    planted = RankFiles(tmp_path / "planted" / samplers[0].parent.name)  # both launchers are at work
    planted.write_point(PointTask(planted_point(tmp_path), None))
    tasks.parent.rename(tmp_path / "away")
    planted.folder.parent.rename(tasks.parent)
    cluster.wait_idle(timeout_s=120)
    assert not (tmp_path / "mal" / "ran").exists()
    record = only_record(Experiment(tmp_path / "mixed"))
    assert (record.status, record.environment.nodes) == ("ok", ("node1", "node2")), record.reason


# as people write it for srun, with a task for each rank: this project starts one launcher on each node
FOR_SRUN = """
import os, torch
import torch.distributed as dist
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "node1", str(10_000 + int(os.environ["SLURM_JOB_ID"]) % 20_000)
dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    (weight + int(os.environ["SLURM_LOCALID"])).sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
"""
OF_SCRIPT = """
name: srun
base: {script: SCRIPT, device: cpu, strategy: ddp, updates: 60}
points: [{num_gpus: [4], num_nodes: [2]}]
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def test_a_script_for_srun_is_measured_unchanged_on_two_nodes(pipeline: Command, on_slurm: Env, tmp_path: Path) -> None:
    script = write_model(tmp_path, FOR_SRUN, "train.py")
    grid = write_grid(tmp_path, OF_SCRIPT.replace("SCRIPT", str(script)))
    succeeded(pipeline("submit", "--grid", grid, "--outputs", tmp_path, "--wait", env=on_slurm))
    record = only_record(Experiment(tmp_path / "srun"))
    assert [rank.rank for rank in measurement_of(record).epochs[0].ranks] == [0, 1, 2, 3]
