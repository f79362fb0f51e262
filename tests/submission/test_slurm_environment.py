"""Variables that a shell or an outer job passes on change neither what Slurm answers nor the jobs."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from cluster import Cluster
from conftest import CPU_SIZE, ROOT, Command, succeeded, wait_for
from factories import write_grid
from slurm_queue import MIXED, Env, array_of, records_in, states

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
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), "--outputs", tmp_path, "--set", *changes)
    assert pipeline(*submit, env=on_slurm).returncode == 0
    wait_for(lambda: list(tmp_path.glob("mixed/logs/scratch/*/environment.json")))
    for names in (("SQUEUE_PARTITION",), ("SQUEUE_USERS",), ANSWERS):
        (part,) = states(pipeline, tmp_path, {**on_slurm, **{name: ANSWERS[name] for name in names}}).values()
        assert part["state"] == "running", names
    again = succeeded(pipeline(*submit, env={**on_slurm, **ANSWERS}))
    assert ("0 points to run, 1 queued or running" in again.stderr, "array" in again.stdout) == (True, False)
    assert all(again.stderr.count(f"{name},") + again.stderr.count(f"{name};") == 1 for name in ANSWERS)


@pytest.mark.fault("F13")
def test_the_drivers_jobs_are_the_same_whatever_the_shell_has_set(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    set_aside = STEP | {name: value for name, value in REQUEST.items() if name != "PIPELINE_LAUNCH_ID"}
    found: dict[str, list[dict[str, str]]] = {}
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), "--set", *TWO_POINTS, "--wait")
    for name, changes in {"clean": {}, "set": STEP | REQUEST}.items():
        answer = succeeded(pipeline(*submit, "--outputs", tmp_path / name, env={**on_slurm, **changes}))
        assert [record["status"] for record in records_in(tmp_path / name)] == ["ok", "ok"]
        found[name] = request_of(cluster, array_of(answer))
        notices = [line for line in answer.stderr.splitlines() if "set aside" in line]
        assert len(notices) == (name == "set")
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
    cluster.run(*(() if changes else SALLOC), *sbatch, cwd=ROOT, env={**on_slurm, **changes})
    cluster.wait_idle(timeout_s=120)
    log = (tmp_path / "0.log").read_text()
    assert [record["status"] for record in records_in(tmp_path)] == ["ok"], log
    (notice,) = [line for line in log.splitlines() if "set aside" in line]
    assert set(re.findall(r"[A-Z_]{4,}", notice)) == set(changes or ("SLURM_MEM_PER_CPU", "SLURM_GPUS"))
