"""The pipeline on a real Slurm: two nodes on this machine, brought up for these tests."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from conftest import CPU_SIZE, ROOT, Command, processes_with, succeeded, wait_for
from factories import (
    LENET,
    SMALLEST,
    make_spec,
    measurement_of,
    records_of,
    with_change,
    write_grid,
    write_model,
)
from slurm_queue import MIXED, Env, array_of, queued, records_in, states

from pipeline.experiment.folder import Experiment
from pipeline.experiment.spec import Spec
from pipeline.runner.launch_options import LaunchOptions
from pipeline.runner.task_list import TaskList

LONG = """
name: long
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: ddp}
points:
  - {num_gpus: [2], num_nodes: [2], batch_size_per_gpu: [1], num_samples: [2000000]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def report_of(pipeline: Command, folder: Path) -> dict[str, Any]:
    """The tables of the only experiment in the folder."""
    (report,) = json.loads(pipeline("collect", folder, "--format", "json").stdout)["experiments"].values()
    assert isinstance(report, dict)
    return report


def test_a_mixed_grid_runs_in_one_array_a_shape_and_is_never_submitted_twice(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    out = tmp_path / "out put"  # a space, as people have them
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), "--outputs", out)
    assert [line.split(": ")[1] for line in succeeded(pipeline(*submit, env=on_slurm)).stdout.splitlines()[:-1]] == [
        "1 element, 1 node x 1 CPU process",
        "1 element, 1 node x 2 CPU processes",
        "1 element, 2 nodes x 1 CPU process",
    ]
    again = pipeline(*submit, "--wait", env=on_slurm)  # while the first arrays wait or run
    assert "0 points to run, 3 queued or running" in again.stderr
    assert {part["state"] for part in states(pipeline, out, on_slurm).values()} == {"ok"}

    report = report_of(pipeline, out)
    assert report["coverage"]["ok"] == 3
    assert [(row["num_nodes"], row["num_gpus"]) for row in report["Q2"]] == [(1, 1), (1, 2), (2, 2)]
    assert all(row["speedup"] > 0 for row in report["Q2"])
    (two_nodes,) = (record for record in records_of(Experiment(out / "mixed")) if record.spec.num_nodes == 2)
    assert two_nodes.environment.slurm["SLURM_JOB_ID"]
    assert (two_nodes.environment.nodes, len(measurement_of(two_nodes).epochs[1].ranks)) == (("node1", "node2"), 2)

    next(out.glob("mixed/records/ddp-1proc*.json")).unlink()
    resumed = pipeline(*submit, "--wait", env=on_slurm)
    assert "1 point to run, 2 recorded as ok" in resumed.stderr
    assert array_of(resumed)
    assert "array" not in succeeded(pipeline(*submit, env=on_slurm)).stdout
    assert len(json.loads((out / "mixed" / "manifest.json").read_text())["submissions"]) == 2


def test_an_element_of_several_points_that_is_cancelled_loses_the_running_one_and_a_resume_fills_the_gaps(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    changes = ("num_gpus=1", "num_nodes=1", "batch_size_per_gpu=8", "num_samples=64,67,2000000")
    grid = ("--grid", write_grid(tmp_path, LONG))
    submit = ("submit", *grid, "--outputs", tmp_path, "--points-per-element", "3", "--set", *changes)
    plan = json.loads(pipeline(*submit, "--dry-run", "--json", env=on_slurm).stdout)
    ((order,),) = (array["elements"] for array in plan["arrays"])
    num_samples = {point["run_id"]: point["num_samples"] for point in plan["points"]}
    assert [num_samples[run_id] for run_id in order] == [64, 2_000_000, 67]  # as the seed draws them
    sent = pipeline(*submit, env=on_slurm)
    assert sent.stdout.splitlines()[0].endswith(": 1 element, 1 node x 1 CPU process, 3 points"), sent.stderr

    wait_for(lambda: list(tmp_path.glob(f"long/logs/scratch/{order[1]}.*/environment.json")), timeout_s=120)
    wait_for(lambda: list(tmp_path.glob(f"long/records/{order[0]}.*.json")), timeout_s=10)  # once its sampler has ended
    found = states(pipeline, tmp_path, on_slurm)
    assert [found[run_id]["state"] for run_id in order] == ["ok", "running", "pending"]
    assert "0 points to run, 2 queued or running, 1 recorded as ok" in pipeline(*submit, env=on_slurm).stderr

    cluster.run("scancel", found[order[1]]["job"])
    wait_for(lambda: not queued(cluster), timeout_s=30)
    found = states(pipeline, tmp_path, on_slurm)
    assert [found[run_id]["state"] for run_id in order] == ["ok", "cancelled", "missing"]
    resumed = json.loads(pipeline(*submit, "--dry-run", "--json", env=on_slurm).stdout)
    assert resumed["arrays"][0]["elements"] == [order[1:]]


TWO_NODES = """
name: two
base: {device: cpu, input: synthetic, precision: fp32, strategy: ddp, num_gpus: 2, num_nodes: 2, batch_size_per_gpu: 8}
points:
  - {model: [lenet], measure: [communication], windows: [6], max_steps: [3]}
  - {model: ["models/tiny.py:Tiny"], num_samples: [64], epochs: [3], model.width: [6]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def test_communication_and_a_model_of_a_users_own_are_measured_over_two_nodes(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    """The model's file lies in the folder of the grid, with a module beside it."""
    write_model(tmp_path / "repository" / "models", with_change("import torch\n", "import sizes\nimport torch\n"))
    (tmp_path / "repository" / "models" / "sizes.py").touch()
    grid = write_grid(tmp_path / "repository", TWO_NODES)
    succeeded(pipeline("submit", "--grid", grid, "--outputs", tmp_path, "--keep-trace", "--wait", env=on_slurm))
    records = {record.spec.measure: record for record in records_of(Experiment(tmp_path / "two"))}
    places = [(one.environment.nodes, one.environment.model_changed) for one in records.values()]
    assert sorted(places, key=str) == [(("node1", "node2"), False), (("node1", "node2"), None)]
    measured, own = (measurement_of(records[name]) for name in ("communication", "epochs"))
    found = measured.communication
    assert found is not None
    assert all(len(ranks) == 2 for series in found.series for ranks in series.window_times_ns)
    assert [transfer.bytes_per_step for transfer in found.transfers] == [measured.gradient_bytes]
    assert len(list(tmp_path.glob("two/traces/*/rank*.pt.trace.json.gz"))) == 2
    assert (own.num_parameters, own.unit, own.items_per_sample) == (7, "atoms", 3)
    report = report_of(pipeline, tmp_path)
    (row,) = report["communication"]
    assert (row["num_nodes"], row["num_windows"]) == (2, 6)
    assert row["exposed_comm_time_low_s"] <= row["exposed_comm_time_s"] <= row["exposed_comm_time_high_s"]
    (row,) = report["Q2"]
    assert row["throughput_items_per_s"] == pytest.approx(3 * row["throughput_samples_per_s"])


def workers_on(cluster: Cluster, node_rank: int) -> list[int]:
    """The processes of ranks on that node of a step: of this cluster, beside which others may run."""
    return processes_with(f"SLURM_NODEID={node_rank}", f"SLURM_CONF={cluster.env['SLURM_CONF']}", name="rank")


@pytest.mark.fault("F16")
def test_a_rank_that_dies_on_the_second_node_ends_the_job_and_is_named(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = ("submit", "--grid", write_grid(tmp_path, LONG), "--outputs", tmp_path)
    succeeded(pipeline(*submit, env=on_slurm))
    wait_for(lambda: list(tmp_path.glob("long/logs/scratch/*/environment.json")))  # both ranks have met
    time.sleep(1)
    os.kill(workers_on(cluster, 1)[0], signal.SIGKILL)
    killed_s = time.monotonic()
    wait_for(lambda: not queued(cluster), timeout_s=30)
    assert time.monotonic() - killed_s < 15
    (record,) = records_in(tmp_path)
    assert (record["status"], record["failure"]["kind"], record["failure"]["rank"]) == ("failed", "signal", 1)
    assert "SIGKILL" in record["reason"]
    assert workers_on(cluster, 0) + workers_on(cluster, 1) == []
    assert "0 points to run, 1 recorded as failed" in pipeline(*submit, env=on_slurm).stderr


def test_plain_sbatch_runs_q4_and_collect_finds_it(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    arguments = ("--outputs", str(tmp_path), "--set", *CPU_SIZE, "strategy=ddp", "num_gpus=1", "batch_size_per_gpu=8")
    request = ("--gpus-per-node=0", "--cpus-per-task=1", "--mem=3G", f"--output={tmp_path}/%a.log", "--job-name=My.Q4")
    sent = cluster.run("sbatch", *request, "--array=0-1,15", "jobs/q4.sbatch", *arguments, cwd=ROOT, env=on_slurm)
    array_id = sent.stdout.split()[-1]
    wait_for(lambda: (tmp_path / "q4" / "manifest.json").exists())
    (array,) = json.loads((tmp_path / "q4" / "manifest.json").read_text())["submissions"][0]["arrays"]
    assert (array["job_id"], array["job_name"]) == (array_id, "my_q4")
    assert "queued or running" in pipeline("submit", "--grid", "q4", *arguments, "--dry-run", env=on_slurm).stdout
    cluster.wait_idle(timeout_s=120)
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert "grid q4 has 5 points; element 15 has nothing to do." in logs["15.log"]
    report = report_of(pipeline, tmp_path)
    assert (report["coverage"]["expected"], report["coverage"]["ok"]) == (5, 2), logs
    assert [row["remedies"] for row in report["Q4"] if row["epoch"] == 5] == [[], ["linear_scaling"]]
    assert all(0 <= row["test_accuracy"] <= 1 for row in report["Q4"] if row["epoch"])
    record, _ = records_of(Experiment(tmp_path / "q4"))
    # so `status` tells that this job began the point
    assert (record.environment.slurm["SLURM_ARRAY_JOB_ID"], record.launch_id.split("-")[0]) == (array_id, array_id)

    cluster.run("sbatch", *request, "--array=0-2", "jobs/q4.sbatch", *arguments, cwd=ROOT, env=on_slurm)
    cluster.wait_idle(timeout_s=120)  # a second sbatch fills the gaps and leaves the rest alone
    assert len(list(tmp_path.glob("q4/records/*.json"))) == 3


PLANTED = """
import pathlib

pathlib.Path(__file__).with_name("ran").touch()
"""


def own_point(folder: Path) -> Spec:
    """A point of a model of the submitter's whose import leaves a file."""
    model = f"{write_model(folder / 'mal', SMALLEST + PLANTED)}:Tiny"
    return make_spec(**{**LENET, "model": model, "dataset": None}, input="synthetic")


@pytest.mark.fault("F43")
@pytest.mark.parametrize("swapped", ["tasks", "folder"])
def test_nothing_runs_of_a_file_that_is_swapped_while_its_job_waits(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path, swapped: str
) -> None:
    """By a list of another model of the submitter's, alone or with the folder around it."""
    evil = TaskList([[own_point(tmp_path)]], LaunchOptions(tmp_path)).encode()
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), "--outputs", tmp_path)
    succeeded(pipeline(*submit, "--partition", "down", "--set", "num_gpus=1", "num_nodes=1", env=on_slurm))
    (tasks,) = tmp_path.glob("mixed/logs/*/mixed-*.json")
    if swapped == "folder":
        tasks.parent.rename(tmp_path / "away")
        tasks.parent.mkdir(mode=0o700)
    tasks.write_bytes(evil)
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    cluster.run("scontrol", "update", f"JobId={part['job']}", "Partition=main")
    cluster.wait_idle(timeout_s=120)
    assert not (tmp_path / "mal" / "ran").exists()
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    assert part["state"] in ("failed", "settling")
    assert "was changed after submit" in Path(part["log"]).read_text()
    assert not list(tmp_path.glob("mixed/records/*.json"))
