"""The pipeline on a real Slurm: two nodes on this machine, brought up for these tests."""

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from conftest import CPU_SIZE, ROOT, Command, wait_for
from factories import LENET, make_spec, plant_proof

from pipeline.experiment import Experiment

Env = Mapping[str, str]

MIXED = """
name: mixed
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, num_samples: 64, strategy: ddp}
points:
  - {num_gpus: [1, 2], batch_size_per_gpu: [8]}
  - {num_gpus: [2], num_nodes: [2], batch_size_per_gpu: [8]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""

LONG = """
name: long
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: ddp}
points:
  - {num_gpus: [2], num_nodes: [2], batch_size_per_gpu: [1], num_samples: [2000000]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""

COMMUNICATION = """
name: comm
base: {device: cpu, model: lenet, input: synthetic, precision: fp32, strategy: ddp, measure: communication}
points:
  - {num_gpus: [2], num_nodes: [2], batch_size_per_gpu: [8], windows: [6], max_steps: [3]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""


def write_grid(folder: Path, text: str) -> Path:
    path = folder / "grid.yaml"
    path.write_text(text)
    return path


def with_sbatch(folder: Path, env: Env, script: str) -> Env:
    """The environment with an sbatch of our own, whose script may call the {real} one."""
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    shim = folder / "bin" / "sbatch"
    shim.parent.mkdir()
    shim.write_text(f"#!/bin/sh\n{script.format(real=real)}\n")
    shim.chmod(0o755)
    return {**env, "PATH": f"{shim.parent}:{env['PATH']}"}


def states(pipeline: Command, folder: Path, env: Env) -> dict[str, dict[str, Any]]:
    answer = pipeline("status", folder, "--json", env=env)
    assert answer.returncode == 0, answer.stderr
    return {part["run_id"]: part for parts in json.loads(answer.stdout)["experiments"].values() for part in parts}


def queued(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "-h", "-r", "-o", "%i").stdout.split()


def test_a_mixed_grid_runs_in_one_array_a_shape_and_is_never_submitted_twice(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    grid = write_grid(tmp_path, MIXED)
    out = tmp_path / "out put"  # a space, as people have them
    submit = ("submit", "--grid", grid, "--outputs", out)
    first = pipeline(*submit, env=on_slurm)
    assert first.returncode == 0, first.stderr
    assert [line.split(": ")[1] for line in first.stdout.splitlines()[:-1]] == [
        "1 element, 1 node x 1 CPU process",
        "1 element, 1 node x 2 CPU processes",
        "1 element, 2 nodes x 1 CPU process",
    ]
    again = pipeline(*submit, "--wait", env=on_slurm)  # while the first arrays wait or run
    assert "0 points to run, 3 queued or running" in again.stderr
    assert {part["state"] for part in states(pipeline, out, on_slurm).values()} == {"ok"}

    report = json.loads(pipeline("collect", out, "--format", "json").stdout)["experiments"]["mixed"]
    assert report["coverage"]["ok"] == 3
    assert [(row["num_nodes"], row["num_gpus"]) for row in report["Q2"]] == [(1, 1), (1, 2), (2, 2)]
    assert all(row["speedup"] > 0 for row in report["Q2"])
    two_nodes = json.loads(next(out.glob("mixed/records/ddp-2proc*json")).read_text())
    assert two_nodes["environment"]["slurm"]["SLURM_JOB_ID"]

    next(out.glob("mixed/records/ddp-1proc*.json")).unlink()
    resumed = pipeline(*submit, "--wait", env=on_slurm)
    assert "1 point to run, 2 recorded as ok" in resumed.stderr
    assert len([line for line in resumed.stdout.splitlines() if line.startswith("array")]) == 1
    done = pipeline(*submit, env=on_slurm)
    assert (done.returncode, done.stdout.count("array")) == (0, 0)
    manifest = json.loads((out / "mixed" / "manifest.json").read_text())
    assert len(manifest["submissions"]) == 2


def test_an_element_of_several_points_that_is_cancelled_loses_the_running_one_and_a_resume_fills_the_gaps(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    changes = ("num_gpus=1", "num_nodes=1", "batch_size_per_gpu=8", "num_samples=64,67,2000000")
    grid = write_grid(tmp_path, LONG)
    submit = ("submit", "--grid", grid, "--outputs", tmp_path, "--points-per-element", "3", "--set", *changes)
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
    again = pipeline(*submit, env=on_slurm)
    assert "0 points to run, 2 queued or running, 1 recorded as ok" in again.stderr

    cluster.run("scancel", found[order[1]]["job"])
    wait_for(lambda: not queued(cluster), timeout_s=30)
    found = states(pipeline, tmp_path, on_slurm)
    assert [found[run_id]["state"] for run_id in order] == ["ok", "cancelled", "missing"]
    resumed = json.loads(pipeline(*submit, "--dry-run", "--json", env=on_slurm).stdout)
    assert resumed["arrays"][0]["elements"] == [order[1:]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two lanes need two CPUs")
def test_a_point_in_a_lane_is_not_submitted_again_while_later_ones_of_another_lane_end(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    changes = ("num_gpus=1", "num_nodes=1", "batch_size_per_gpu=8", "num_samples=64,67,2000000")
    submit = ("submit", "--grid", write_grid(tmp_path, LONG), "--outputs", tmp_path, "--set", *changes)
    lanes = ("--points-per-element", "3", "--side-by-side", "2")
    plan = json.loads(pipeline(*submit, *lanes, "--dry-run", "--json", env=on_slurm).stdout)
    first, long, last = plan["arrays"][0]["elements"][0]  # as the test above has them
    experiment = Experiment(tmp_path / "long")
    experiment.create()
    small = LENET | {"batch_size_per_gpu": 8, "num_workers": 2}
    plant_proof(experiment, make_spec(**small, strategy="ddp", input="synthetic"), "node1", "node2")
    sent = pipeline(*submit, *lanes, env=on_slurm)
    assert sent.stdout.splitlines()[0].endswith(": 1 element, 1 node x 1 CPU process, 3 points, 2 lanes"), sent.stderr

    wait_for(lambda: list(tmp_path.glob(f"long/records/{last}.0.json")), timeout_s=120)
    found = states(pipeline, tmp_path, on_slurm)
    assert [found[run_id]["state"] for run_id in (first, long, last)] == ["ok", "running", "ok"]
    assert "0 points to run, 1 queued or running, 2 recorded as ok" in pipeline(*submit, env=on_slurm).stderr
    job = cluster.run("scontrol", "show", "job", found[long]["job"]).stdout
    assert "CPUs/Task=2" in job

    cluster.run("scancel", found[long]["job"])
    wait_for(lambda: not queued(cluster), timeout_s=30)
    found = states(pipeline, tmp_path, on_slurm)
    assert [found[run_id]["state"] for run_id in (first, long, last)] == ["ok", "cancelled", "ok"]
    assert not list(workers_on(0))


def test_both_nodes_of_a_two_node_point_are_in_its_record(pipeline: Command, on_slurm: Env, tmp_path: Path) -> None:
    grid = write_grid(tmp_path, MIXED)
    run_id = next(
        point["run_id"]
        for point in json.loads(pipeline("submit", "--grid", grid, "--dry-run", "--json").stdout)["points"]
        if point.get("num_nodes") == 2
    )
    pipeline("submit", "--grid", grid, "--outputs", tmp_path, "--only", run_id, "--wait", env=on_slurm)
    record = json.loads(next(tmp_path.glob(f"mixed/records/{run_id}.0.json")).read_text())
    assert record["environment"]["nodes"] == ["node1", "node2"]
    assert len(record["measurement"]["epochs"][1]["ranks"]) == 2


def test_communication_is_measured_over_two_nodes(pipeline: Command, on_slurm: Env, tmp_path: Path) -> None:
    grid = write_grid(tmp_path, COMMUNICATION)
    done = pipeline("submit", "--grid", grid, "--outputs", tmp_path, "--keep-trace", "--wait", env=on_slurm)
    assert done.returncode == 0, done.stderr
    record = json.loads(next(tmp_path.glob("comm/records/*.json")).read_text())
    assert record["status"] == "ok", record["reason"]
    assert record["environment"]["nodes"] == ["node1", "node2"]
    found = record["measurement"]["communication"]
    assert all(len(ranks) == 2 for series in found["series"] for ranks in series["window_times_ns"])
    assert [transfer["bytes_per_step"] for transfer in found["transfers"]] == [record["measurement"]["gradient_bytes"]]
    assert len(list(tmp_path.glob("comm/traces/*/rank*.pt.trace.json.gz"))) == 2
    row = json.loads(pipeline("collect", tmp_path, "--format", "json").stdout)["experiments"]["comm"]["communication"][
        0
    ]
    assert (row["num_nodes"], row["num_windows"]) == (2, 6)
    assert row["exposed_comm_time_low_s"] <= row["exposed_comm_time_s"] <= row["exposed_comm_time_high_s"]


def workers_on(node_rank: int) -> Iterator[int]:
    """The processes of ranks on that node of a step."""
    for entry in Path("/proc").iterdir():
        try:
            is_rank = entry.name.isdecimal() and (entry / "comm").read_text().startswith("rank")
            if is_rank and f"SLURM_NODEID={node_rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue


def test_a_rank_that_dies_on_the_second_node_ends_the_job_and_is_named(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    grid = write_grid(tmp_path, LONG)
    assert pipeline("submit", "--grid", grid, "--outputs", tmp_path, env=on_slurm).returncode == 0
    wait_for(lambda: list(tmp_path.glob("long/logs/scratch/*/environment.json")))  # both ranks have met
    time.sleep(1)
    os.kill(next(workers_on(1)), signal.SIGKILL)
    killed_s = time.monotonic()
    wait_for(lambda: not queued(cluster), timeout_s=30)
    assert time.monotonic() - killed_s < 15
    (record,) = [json.loads(path.read_text()) for path in tmp_path.glob("long/records/*.json")]
    assert (record["status"], record["failure"]["kind"], record["failure"]["rank"]) == ("failed", "signal", 1)
    assert "SIGKILL" in record["reason"]
    assert not list(workers_on(0))
    assert not list(workers_on(1))
    resumed = pipeline("submit", "--grid", grid, "--outputs", tmp_path, env=on_slurm)
    assert "0 points to run, 1 recorded as failed" in resumed.stderr


def test_plain_sbatch_runs_q4_and_collect_finds_it(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    arguments = ("--outputs", str(tmp_path), "--set", *CPU_SIZE, "strategy=ddp", "num_gpus=1", "batch_size_per_gpu=8")
    request = ("--gpus-per-node=0", "--cpus-per-task=1", "--mem=3G", f"--output={tmp_path}/%a.log")
    sent = cluster.run("sbatch", *request, "--array=0-1,15", "jobs/q4.sbatch", *arguments, cwd=ROOT, env=on_slurm)
    array_id = sent.stdout.split()[-1]
    wait_for(lambda: (tmp_path / "q4" / "manifest.json").exists())
    driver = pipeline("submit", "--grid", "q4", *arguments, "--dry-run", env=on_slurm)
    assert "queued or running" in driver.stdout
    cluster.wait_idle(timeout_s=120)
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert "grid q4 has 5 points; element 15 has nothing to do." in logs["15.log"]
    report = json.loads(pipeline("collect", tmp_path, "--format", "json").stdout)["experiments"]["q4"]
    assert (report["coverage"]["expected"], report["coverage"]["ok"]) == (5, 2), logs
    assert [row["remedies"] for row in report["Q4"] if row["epoch"] == 5] == [[], ["linear_scaling"]]
    assert all(0 <= row["test_accuracy"] <= 1 for row in report["Q4"] if row["epoch"])
    record = json.loads(next(tmp_path.glob("q4/records/*.json")).read_text())
    assert record["environment"]["slurm"]["SLURM_ARRAY_JOB_ID"] == array_id

    cluster.run("sbatch", *request, "--array=0-2", "jobs/q4.sbatch", *arguments, cwd=ROOT, env=on_slurm)
    cluster.wait_idle(timeout_s=120)  # a second sbatch fills the gaps and leaves the rest alone
    assert len(list(tmp_path.glob("q4/records/*.json"))) == 3


def test_arrays_are_cut_to_the_sites_limit_and_a_down_partition_is_named(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    sizes = ",".join(str(size) for size in range(1, 46))
    submit = ("submit", "--grid", "smoke", "--outputs", tmp_path, "--partition", "down", "--set", *CPU_SIZE)
    points = ("strategy=ddp", "num_gpus=1", "max_steps=null", "epochs=2", f"batch_size_per_gpu={sizes}")
    sent = pipeline(*submit, *points, "--max-parallel", "3", env=on_slurm)
    assert [line.split(": ")[1].split(",")[0] for line in sent.stdout.splitlines()[:-1]] == [
        "20 elements",
        "20 elements",
        "5 elements",
    ]
    found = states(pipeline, tmp_path, on_slurm)
    assert len(found) == 45
    assert {part["state"] for part in found.values()} == {"pending"}
    assert all(part["reason"].startswith("PartitionDown: the partition is down") for part in found.values())
    assert len({part["job"] for part in found.values()}) == 45
    assert "0 points to run, 45 queued or running" in pipeline(*submit, *points, env=on_slurm).stderr
    cluster.run("scancel", next(iter(found.values()))["job"])
    after = states(pipeline, tmp_path, on_slurm)
    assert (
        sorted(part["state"] for part in after.values()) == ["lost"] + ["pending"] * 44
    )  # without accounting, a waiting element that is cancelled is forgotten
    assert "1 point to run, 44 queued or running" in pipeline(*submit, *points, env=on_slurm).stderr


def test_what_no_node_has_is_refused_by_name_before_anything_is_submitted(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = ("submit", "--grid", "scaling", "--outputs", tmp_path, "--set", "dataset=synthetic", "strategy=ddp")
    refused = pipeline(*submit, "num_gpus=1,8", "batch_size_per_gpu=32", env=on_slurm)
    assert refused.returncode == 2
    assert "needs 8 GPUs a node and the largest node has 4: ddp-8gpu-b32-" in refused.stderr
    assert "--skip-unsatisfiable" in refused.stderr
    assert not queued(cluster)
    assert not list(tmp_path.iterdir())


def test_a_partition_that_does_not_exist_is_refused(pipeline: Command, on_slurm: Env, tmp_path: Path) -> None:
    answer = pipeline("submit", "--grid", "smoke", "--outputs", tmp_path, "--partition", "nowhere", env=on_slurm)
    assert answer.returncode == 4
    assert "choose --partition from down, high, main" in answer.stderr


def test_exclusive_points_are_never_side_by_side_on_a_node(pipeline: Command, on_slurm: Env, tmp_path: Path) -> None:
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), "--outputs", tmp_path, "--exclusive")
    changes = ("--set", "num_gpus=1", "num_nodes=1", "batch_size_per_gpu=4,8,16,32")
    (array,) = json.loads(pipeline(*submit, *changes, "--dry-run", "--json", env=on_slurm).stdout)["arrays"]
    answer = pipeline(*submit, *changes, "--wait", env=on_slurm)
    assert answer.returncode == 0, answer.stderr
    (script,) = tmp_path.glob("mixed/logs/*/*/*submission.sh")
    assert all("#SBATCH --exclusive" in text.splitlines() for text in (array["sbatch"], script.read_text()))
    busy: dict[str, list[tuple[str, str]]] = {}
    for path in tmp_path.glob("mixed/records/*.json"):
        record = json.loads(path.read_text())
        busy.setdefault(record["environment"]["nodes"][0], []).append((record["started_at"], record["ended_at"]))
    assert sum(len(spans) for spans in busy.values()) == 4
    for spans in busy.values():
        assert all(ended <= begun for (_, ended), (begun, _) in itertools.pairwise(sorted(spans)))


@pytest.mark.parametrize("option", ["--partition=a b", "--account=$(touch x)", "--qos=-x", "--constraint=a\nb"])
def test_site_options_that_could_be_more_than_a_name_are_refused(
    pipeline: Command, on_slurm: Env, tmp_path: Path, option: str
) -> None:
    answer = pipeline("submit", "--grid", "smoke", "--outputs", tmp_path, option, env=on_slurm)
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1 or "\n" in option


def test_the_dry_run_says_what_submitit_writes(pipeline: Command, on_slurm: Env, tmp_path: Path) -> None:
    prologue = tmp_path / "prologue.sh"
    prologue.write_text('export FROM_PROLOGUE=yes\n[ -n "${UNSET:-}" ] && export OTHER=1\n')  # a test that is false
    submit = ("submit", "--grid", "smoke", "--outputs", tmp_path / "out", "--partition", "down", "--set", "device=cpu")
    plan = json.loads(pipeline(*submit, "--dry-run", "--json", env=on_slurm).stdout)
    assert not (tmp_path / "out").exists()
    assert pipeline(*submit, "--prologue", prologue, env=on_slurm).returncode == 0
    written = sorted((tmp_path / "out").glob("smoke/logs/*/*/*submission.sh"))
    assert len(written) == len(plan["arrays"]) == 2
    for script, array in zip(written, plan["arrays"], strict=True):
        lines = script.read_text().splitlines()
        promised = [line for line in array["sbatch"].splitlines() if line.startswith("#SBATCH")]
        assert [line for line in promised if line not in lines and "job-name" not in line] == []
        assert any("--kill-on-bad-exit=1" in line for line in lines)
        assert any(line.startswith("source ") and "prologue.sh;" in line for line in lines)
    assert oct(script.parent.stat().st_mode)[-3:] == "700"


def test_a_controller_that_does_not_answer_ends_with_4_and_never_trains_here(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    changes = (*CPU_SIZE, "max_steps=null", "epochs=2", "batch_size_per_gpu=8")
    submit = ("submit", "--grid", "smoke", "--outputs", tmp_path, "--set", *changes)
    sent = pipeline(*submit, "--partition", "down", env=on_slurm)
    assert sent.returncode == 0, sent.stderr
    cluster.stop_controller()
    try:
        for arguments in ((), ("--cluster", "slurm")):
            answer = pipeline(*submit, *arguments, env=on_slurm)
            assert answer.returncode == 4
            assert "--cluster local" in answer.stderr
        assert pipeline(*submit, "--dry-run", "--only", "x", env=on_slurm).returncode == 3
        assert {part["state"] for part in states(pipeline, tmp_path, on_slurm).values()} == {"unknown"}
        local = pipeline(*submit, "--cluster", "local", env=on_slurm)
        assert local.returncode == 4
        assert "may still be running" in local.stderr
    finally:
        cluster.start_controller()


def test_a_configuration_that_is_absent_is_not_taken_for_no_slurm(
    pipeline: Command, cluster: Cluster, tmp_path: Path
) -> None:
    env = {**cluster.env, "SLURM_CONF": str(tmp_path / "nowhere.conf")}
    started_s = time.monotonic()
    answer = pipeline("submit", "--grid", "smoke", "--outputs", tmp_path, env=env)
    assert answer.returncode == 4
    assert time.monotonic() - started_s < 5


def test_a_refused_array_leaves_nothing_behind(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = ("submit", "--grid", "smoke", "--outputs", tmp_path, "--set", "device=cpu", "--account", "x", "--qos", "y")
    env = with_sbatch(tmp_path, on_slurm, "echo 'sbatch: error: Invalid qos specification' >&2; exit 1")
    answer = pipeline(*submit, env=env)
    assert answer.returncode == 4
    assert "Invalid qos specification" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not list(tmp_path.glob("smoke/logs/*/*"))
    manifest = json.loads((tmp_path / "smoke" / "manifest.json").read_text())
    assert [array for submission in manifest["submissions"] for array in submission["arrays"]] == []


def test_an_array_that_sbatch_took_and_then_failed_is_not_submitted_twice(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    ending = "{real} \"$@\" >/dev/null; echo 'sbatch: error: Socket timed out' >&2; exit 1"
    env = with_sbatch(tmp_path, on_slurm, ending)
    submit = ("submit", "--grid", "smoke", "--outputs", tmp_path, "--partition", "down", "--set", "device=cpu")
    answer = pipeline(*submit, env=env)
    assert answer.returncode == 0, answer.stderr
    assert len(queued(cluster)) == 5
    assert "0 points to run, 5 queued or running" in pipeline(*submit, env=on_slurm).stderr


@pytest.mark.parametrize(
    "ending", ['exec {real} "$@"', '{real} "$@" >/dev/null; exit 1'], ids=["taken", "taken, said not"]
)
def test_an_array_is_one_sbatch_and_every_element_runs_its_own_point(
    pipeline: Command, on_slurm: Env, tmp_path: Path, ending: str
) -> None:
    env = with_sbatch(tmp_path, on_slurm, f"echo called >> {tmp_path}/calls\n{ending}")
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), "--outputs", tmp_path, "--wait")
    answer = pipeline(*submit, "--set", "num_gpus=1", "num_nodes=1", "batch_size_per_gpu=4,8,16", env=env)
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "calls").read_text().split() == ["called"]
    assert [part["state"] for part in states(pipeline, tmp_path, on_slurm).values()] == ["ok"] * 3


def test_an_array_whose_driver_died_before_it_was_named_is_found_again(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = ("submit", "--grid", "smoke", "--outputs", tmp_path, "--partition", "down", "--set", "device=cpu")
    assert pipeline(*submit, env=on_slurm).returncode == 0
    path = tmp_path / "smoke" / "manifest.json"
    manifest = json.loads(path.read_text())
    first, second = manifest["submissions"][0]["arrays"]
    number = first["job_id"]
    first["job_id"] = None  # as it stands between the announcement and the naming
    second["job_id"], second["job_name"] = None, "never-submitted"
    path.write_text(json.dumps(manifest))
    words = [part["state"] for part in states(pipeline, tmp_path, on_slurm).values()]
    assert sorted(words) == ["missing", "missing", "pending", "pending", "pending"]
    again = pipeline(*submit, env=on_slurm)
    assert "2 points to run, 3 queued or running" in again.stderr
    (kept, *_) = json.loads(path.read_text())["submissions"][0]["arrays"]
    assert kept["job_id"] == number


def test_a_prologue_that_fails_ends_the_job_and_is_named(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    prologue = tmp_path / "prologue.sh"
    prologue.write_text("module load nothing-of-the-kind 2>/dev/null\nexport AFTER=1\n")  # not its last line
    grid = write_grid(tmp_path, MIXED)
    submit = ("submit", "--grid", grid, "--outputs", tmp_path, "--prologue", prologue, "--wait", "--set", "num_gpus=2")
    answer = pipeline(*submit, env=on_slurm)
    found = states(pipeline, tmp_path, on_slurm)
    assert answer.returncode == 1
    assert f"{len(found)} of {len(found)} points that ran left no result" in answer.stderr
    assert {part["state"] for part in found.values()} == {"failed"}
    assert all(
        "the prologue failed: module load nothing-of-the-kind" in Path(part["log"]).read_text()
        for part in found.values()
    )


def test_a_job_that_is_cancelled_while_it_runs_is_cancelled_and_is_submitted_again(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    grid = write_grid(tmp_path, LONG)
    submit = ("submit", "--grid", grid, "--outputs", tmp_path)
    assert pipeline(*submit, env=on_slurm).returncode == 0
    wait_for(lambda: list(tmp_path.glob("long/logs/scratch/*/environment.json")))
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    assert part["state"] == "running"
    cluster.run("scancel", part["job"])
    wait_for(lambda: not queued(cluster), timeout_s=30)
    (part,) = states(pipeline, tmp_path, on_slurm).values()
    assert part["state"] == "cancelled"
    assert not list(tmp_path.glob("long/records/*.json"))
    assert "1 point to run" in pipeline(*submit, "--dry-run", env=on_slurm).stdout
    wait_for(lambda: not list(workers_on(0)) and not list(workers_on(1)), timeout_s=10)
