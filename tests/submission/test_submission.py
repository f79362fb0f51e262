"""What a real Slurm is asked for, and what it may answer: limits, refusals, a controller that is gone."""

import json
import re
import shutil
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from conftest import CPU_SIZE, SMALL_GRID, Command, assert_refused, succeeded, wait_for
from factories import SUBMISSION, assert_says, make_experiment, make_spec, raising, write_grid, write_script
from slurm_queue import MIXED, Env, array_of, quick_points, states, with_sbatch

from pipeline.records.folder import Experiment
from pipeline.submission import plan, read_progress, slurm_queries, slurm_submit
from pipeline.submission.plan import SubmitContext
from pipeline.submit import report_end
from pipeline.system.errors import CommandError


@pytest.mark.fault("F06")
@pytest.mark.fault("F07")
def test_arrays_are_cut_to_the_sites_limit_and_a_down_partition_is_named(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    sizes = ",".join(str(size) for size in range(1, 46))
    submit = ("submit", "--grid", SMALL_GRID, "--outputs", tmp_path, "--partition", "down", "--set", *CPU_SIZE)
    points = ("strategy=ddp", "num_gpus=1", "max_steps=null", "epochs=2", f"batch_size_per_gpu={sizes}")
    sent = pipeline(*submit, *points, "--max-parallel", "3", env=on_slurm)
    assert re.findall(r"^array \d+: (\d+) elements", sent.stdout, re.MULTILINE) == ["20", "20", "5"]
    found = states(pipeline, tmp_path, on_slurm)
    down = "PartitionDown: the partition is down; choose another with --partition"
    assert {(part["state"], part["reason"]) for part in found.values()} == {("pending", down)}
    assert len({part["job"] for part in found.values()}) == len(found) == 45
    assert "0 configurations to run, 45 queued or running" in pipeline(*submit, *points, env=on_slurm).stderr
    cluster.run("scancel", next(iter(found.values()))["job"])
    assert (
        sorted(part["state"] for part in states(pipeline, tmp_path, on_slurm).values()) == ["lost"] + ["pending"] * 44
    )  # without accounting, a waiting element that is cancelled is forgotten
    assert "1 configuration to run, 44 queued or running" in pipeline(*submit, *points, env=on_slurm).stderr


@pytest.mark.parametrize("options", [(), ("--points-per-element", "2", "--max-parallel", "1", "--exclusive")])
def test_the_dry_run_shows_the_script_that_sbatch_gets(
    pipeline: Command, on_slurm: Env, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Zeros stand for the random digits of the submission."""
    prologue = tmp_path / "prologue.sh"
    prologue.write_text('export FROM_PROLOGUE=yes\n[ -n "${UNSET:-}" ] && export OTHER=1\n')  # a test that is false
    grid = ("--grid", SMALL_GRID, "--outputs", tmp_path / "out", "--partition", "down", "--set", "device=cpu")
    arguments: tuple[str | Path, ...] = (*grid, "--prologue", prologue, *options)
    plan = json.loads(pipeline("submit", *arguments, "--dry-run", "--json", env=on_slurm).stdout)
    assert not (tmp_path / "out").exists()
    env = with_sbatch(tmp_path, on_slurm, f'cat "$1" >> {tmp_path}/sent; exec {{real}} "$@"')
    assert pipeline("submit", *arguments, env=env).returncode == 0
    (submission,) = json.loads((tmp_path / "out/small/manifest.json").read_text())["submissions"]
    assert [array["elements"] for array in submission["arrays"]] == [array["elements"] for array in plan["arrays"]]
    shown = "".join(array["sbatch"] for array in plan["arrays"])
    number = submission["id"]
    assert shown.replace("0" * 32, number).replace("0" * 8, number[:8]) == (tmp_path / "sent").read_text()
    assert shown.count("#!/bin/bash") == 2
    assert oct((tmp_path / "out/small/logs" / number).stat().st_mode)[-3:] == "700"


@pytest.mark.fault("F25")
def test_a_controller_that_does_not_answer_ends_with_4_and_never_trains_here(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    changes = (*CPU_SIZE, "max_steps=null", "epochs=2", "batch_size_per_gpu=8")
    submit = ("submit", "--grid", SMALL_GRID, "--outputs", tmp_path, "--set", *changes)
    succeeded(pipeline(*submit, "--partition", "down", env=on_slurm))
    cluster.end_controller()
    try:
        for arguments in ((), ("--cluster", "slurm")):
            assert_refused(pipeline(*submit, *arguments, env=on_slurm), 4, "--cluster local")
        assert pipeline(*submit, "--dry-run", "--only", "x", env=on_slurm).returncode == 3
        assert {part["state"] for part in states(pipeline, tmp_path, on_slurm).values()} == {"unknown"}
        assert_refused(pipeline(*submit, "--cluster", "local", env=on_slurm), 4, "may still be running")
    finally:
        cluster.start_controller()


ONE_NODE = ("num_gpus=1", "num_nodes=1", "batch_size_per_gpu=4,8")
TWO_NODES = ("num_gpus=2", "num_nodes=2", "batch_size_per_gpu=8")


def submit_quick(folder: Path) -> tuple[str, ...]:
    """A submission up to its changes, whose points have a result at once."""
    grid = str(write_grid(folder, MIXED))
    return ("submit", "--grid", grid, "--outputs", str(folder), "--wait", *quick_points(folder), "--set")


@pytest.mark.fault("F25")
def test_an_array_that_sbatch_took_and_says_it_did_not_is_one_sbatch_and_every_element_runs_its_own_point(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    """One that it says it took: test_the_files_and_calls_of_two_points."""
    env = with_sbatch(tmp_path, on_slurm, f'echo called >> {tmp_path}/calls\n{{real}} "$@" >/dev/null; exit 1')
    succeeded(pipeline(*submit_quick(tmp_path), *ONE_NODE, env=env))
    assert (tmp_path / "calls").read_text().split() == ["called"]
    assert [part["state"] for part in states(pipeline, tmp_path, on_slurm).values()] == ["ok"] * 2


@pytest.mark.fault("F34")
@pytest.mark.parametrize("changes", [ONE_NODE, TWO_NODES], ids=["an array", "a job over two nodes"])
def test_an_array_whose_driver_was_killed_once_sbatch_had_taken_it_runs_to_its_end_and_once(
    pipeline: Command, on_slurm: Env, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    submit = submit_quick(tmp_path)
    killing = with_sbatch(tmp_path, on_slurm, '{real} "$@"; kill -KILL $PPID')
    assert pipeline(*submit, *changes, env=killing).returncode == -signal.SIGKILL
    assert "0 configurations to run" in succeeded(pipeline(*submit, *changes, env=on_slurm)).stderr
    found = states(pipeline, tmp_path, on_slurm)
    assert {part["state"] for part in found.values()} == {"ok"}, found
    records = sorted(path.name for path in tmp_path.glob("mixed/records/*.json"))
    assert records == sorted(f"{run_id}.0.json" for run_id in found)


@pytest.mark.fault("F37")
def test_an_array_that_slurm_said_nothing_of_stays_announced_and_is_found_by_the_next_driver(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    submit = (*submit_quick(tmp_path), *ONE_NODE)
    env = with_sbatch(tmp_path, on_slurm, f'{{real}} "$@" >/dev/null; touch {tmp_path}/taken; exit 1')
    asked = f'exec {shutil.which("squeue")} "$@"'
    write_script(tmp_path / "bin" / "squeue", f"test -e {tmp_path}/taken && exit 1", asked)
    assert_refused(pipeline(*submit, env=env), 4, "submit again")
    (array,) = json.loads((tmp_path / "mixed" / "manifest.json").read_text())["submissions"][0]["arrays"]
    assert (array["job_id"], len(array["elements"])) == (None, 2)
    assert "0 configurations to run" in succeeded(pipeline(*submit, env=on_slurm)).stderr
    assert_each_ran_once(tmp_path, 2)


@pytest.mark.fault("F34")
def test_an_array_that_sbatch_submits_after_its_driver_was_killed_and_replaced_runs_nothing(
    pipeline: Command, cluster: Cluster, on_slurm: Env, tmp_path: Path
) -> None:
    submit = (*submit_quick(tmp_path), *ONE_NODE)
    wait = f"until test -e {tmp_path}/go; do sleep 0.1; done"
    late = f'cp "$1" {tmp_path}/late.sh; kill -KILL $PPID; {wait}; {{real}} {tmp_path}/late.sh; touch {tmp_path}/sent'
    assert pipeline(*submit, env=with_sbatch(tmp_path, on_slurm, late)).returncode == -signal.SIGKILL
    assert "2 configurations to run" in succeeded(pipeline(*submit, env=on_slurm)).stderr
    (tmp_path / "go").touch()
    wait_for((tmp_path / "sent").exists)
    cluster.wait_idle(timeout_s=60)
    assert_each_ran_once(tmp_path, 2)


def assert_each_ran_once(outputs: Path, num_points: int) -> None:
    """Every point has one attempt, and it ended ok."""
    records = [json.loads(path.read_text()) for path in outputs.glob("mixed/records/*.json")]
    assert [(record["attempt"], record["status"]) for record in records] == [(0, "ok")] * num_points


@pytest.mark.fault("F41")
@pytest.mark.parametrize("parts", [("{0}/home", "thesis"), ("../..", "home"), (SUBMISSION, "../../../home/thesis")])
def test_what_a_manifest_names_outside_the_logs_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, str]
) -> None:
    """The array has no job id, and Slurm does not know its name, as if `submit` had died before sbatch."""
    chapter = tmp_path / "home" / "thesis" / "chapter1.tex"
    chapter.parent.mkdir(parents=True)
    chapter.write_text("text")
    experiment = make_experiment(tmp_path / "x", missing=[make_spec()])
    manifest = json.loads(experiment.manifest_path.read_text())
    array = {"job_name": parts[1], "elements": [["a"]]}
    hostile = {"id": parts[0].format(tmp_path), "backend": "slurm", "submitted_at": "", "arrays": [array]}
    experiment.manifest_path.write_text(json.dumps(manifest | {"submissions": [hostile]}))
    monkeypatch.setattr(slurm_queries, "find_jobs_named", lambda _: {})
    with pytest.raises(CommandError, match="is not a valid manifest"):
        slurm_submit.recover_job_ids(experiment)
    assert chapter.read_text() == "text"


def test_an_interrupted_wait_says_that_the_jobs_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(read_progress, "wait_until_finished", raising(KeyboardInterrupt()))
    unused: Any = None
    context = SubmitContext(Namespace(wait=True), Experiment(tmp_path / "x"), unused, plan.Cluster("slurm"))
    assert report_end(context, []) == 128 + signal.SIGINT
    (said,) = capsys.readouterr().err.splitlines()
    see, end = (f"python -m pipeline.{name} {tmp_path / 'x'}" for name in ("status", "cancel"))
    assert_says(said, f"interrupted; the jobs run on: see {see}", f"or end them with {end}")


GPU_CHANGES = ("--set", "strategy=ddp", "num_gpus=2", "batch_size_per_gpu=8", "dataset=synthetic", "input=synthetic")
SUBMIT_TO_GPUS = ("submit", "--grid", "scaling", *GPU_CHANGES)


@pytest.mark.parametrize(
    ("options", "lines", "asked", "memory"),
    [
        (("--gpu-type", "v100"), ["--gpus-per-node=v100:2"], "gres:gpu:v100:2", "12000M"),
        (("--gpu-type", "v100", "--gres", "--mem", "0"), ["--gres=gpu:v100:2", "--mem=0"], "gres:gpu:v100:2", "0"),
        (("--mem", "default"), ["--gpus-per-node=2"], "gres:gpu:2", "0"),  # this site gives all of a node
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_what_the_dry_run_promises_is_written_and_is_what_slurm_takes(
    pipeline: Command,
    cluster: Cluster,
    on_slurm: Env,
    tmp_path: Path,
    options: tuple[str, ...],
    lines: list[str],
    asked: str,
    memory: str,
) -> None:
    submit: tuple[str | Path, ...] = ("--outputs", tmp_path, "--partition", "down", *options)
    (array,) = json.loads(pipeline(*SUBMIT_TO_GPUS, *submit, "--dry-run", "--json", env=on_slurm).stdout)["arrays"]
    sent = succeeded(pipeline(*SUBMIT_TO_GPUS, *submit, env=on_slurm))
    script = cluster.run("scontrol", "write", "batch_script", array_of(sent), "-").stdout
    asking = re.compile(r"^#SBATCH --(?:gpus|gres|mem).*", re.MULTILINE)
    written = asking.findall(script)
    assert written == asking.findall(array["sbatch"])
    assert {f"#SBATCH {line}" for line in lines} <= set(written)
    assert any("--mem" in line for line in written) is ("default" not in options)
    job = cluster.run("scontrol", "-o", "show", "job", array_of(sent)).stdout
    assert {f"TresPerNode={asked}", f"MinMemoryNode={memory}"} <= {*job.split()}


def test_a_gpu_type_that_the_partition_lacks_is_refused_with_those_it_has(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    answer = pipeline(*SUBMIT_TO_GPUS, "--outputs", tmp_path, "--gpu-type", "a41", "--dry-run", env=on_slurm)
    assert_refused(answer, 4, "--gpu-type 'a41'", "choose one of a40, v100")
    assert not list(tmp_path.iterdir())
