"""What a real Slurm is asked for, what it may answer, and what the manifest keeps of it."""

import json
import os
import re
import shlex
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from conftest import CPU_SIZE, SMALL_GRID, Command, assert_refused, everything_in, succeeded, wait_for
from factories import (
    SUBMISSION,
    assert_says,
    make_experiment,
    make_spec,
    manifest_of,
    raising,
    write_file,
    write_grid,
    write_script,
)
from slurm_queue import MIXED, Env, array_of, quick_points, states, with_sbatch, write_commands

from pipeline.plan.resources import Resources, ResourceShape
from pipeline.records.folder import Experiment, SlurmArray, Submission, start_submission
from pipeline.runner.launch_options import LaunchOptions, digest, read_task_list
from pipeline.submission import plan, read_progress, slurm_queries, slurm_submit
from pipeline.submission.batch_script import SlurmOptions, build_request
from pipeline.submission.plan import PlannedArray, SubmitContext
from pipeline.submit import report_end
from pipeline.system.errors import EXIT_SCHEDULER, CommandError


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
    down = "PartitionDown: the partition is down; cancel it, and choose another with --partition"
    assert {(part["state"], part["reason"]) for part in found.values()} == {("pending", down)}
    assert len({part["job"] for part in found.values()}) == len(found) == 45
    again = pipeline(*submit, *points, env=on_slurm).stderr
    assert "0 configurations to run, 45 queued or running" in again
    assert again.endswith(" --watch\n"), "there is nothing to collect"
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
    for arguments in ((), ("--cluster", "slurm")):
        assert_refused(pipeline(*submit, *arguments, env=on_slurm), 4, "--cluster local")
    assert pipeline(*submit, "--dry-run", "--only", "x", env=on_slurm).returncode == 3
    assert_refused(pipeline(*submit, "--cluster", "local", env=on_slurm), 4, "may still be running")


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
    chapter = write_file(tmp_path / "home" / "thesis" / "chapter1.tex", "text")
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
    ("options", "asked", "memory"),
    [
        (("--gpu-type", "v100"), "gres:gpu:v100:2", "12000M"),
        (("--gpu-type", "v100", "--gres", "--mem", "0"), "gres:gpu:v100:2", "0"),
        (("--mem", "default"), "gres:gpu:2", "0"),  # this site gives all of a node
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_the_gpus_and_the_memory_of_a_request_are_what_slurm_takes(
    pipeline: Command,
    cluster: Cluster,
    on_slurm: Env,
    tmp_path: Path,
    options: tuple[str, ...],
    asked: str,
    memory: str,
) -> None:
    """The lines of the request: test_a_request_fits_the_nodes_and_what_the_site_asks_for."""
    sent = pipeline(*SUBMIT_TO_GPUS, "--outputs", tmp_path, "--partition", "down", *options, env=on_slurm)
    job = cluster.run("scontrol", "-o", "show", "job", array_of(sent)).stdout
    job = job.replace("gres/", "gres:")  # newer versions of Slurm have a slash
    assert {f"TresPerNode={asked}", f"MinMemoryNode={memory}"} <= {*job.split()}


def test_a_gpu_type_that_the_partition_lacks_is_refused_with_those_it_has(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    answer = pipeline(*SUBMIT_TO_GPUS, "--outputs", tmp_path, "--gpu-type", "a41", "--dry-run", env=on_slurm)
    assert_refused(answer, 4, "--gpu-type 'a41'", "choose one of a40, v100")
    assert not list(tmp_path.iterdir())


SHAPE = ResourceShape("cpu", 1, 1)
REQUEST = build_request(SHAPE, Resources(), SlurmOptions(), None, None)
POINTS = [make_spec(device="cpu", repeat=number) for number in range(3)]
REFUSED = CommandError("sbatch refused it.", EXIT_SCHEDULER)
UNCONFIRMED = slurm_submit.SubmissionUnconfirmed("Slurm does not say.", EXIT_SCHEDULER)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return make_experiment(tmp_path / "x", missing=POINTS)


def answers(*said: str | CommandError) -> Callable[..., str]:
    """A Slurm that says this of one array after the other: a job id, or an error."""
    rest = iter(said)

    def submit_array(*_: object) -> str:
        answer = next(rest)
        if isinstance(answer, CommandError):
            raise answer
        return answer

    return submit_array


def arrays_of(experiment: Experiment) -> list[SlurmArray]:
    return [array for _, array in manifest_of(experiment).arrays()]


@pytest.mark.fault("F07")
@pytest.mark.parametrize(
    ("second", "kept"),
    [
        (REFUSED, {0: "7"}),  # Slurm runs the first, so the manifest must name it
        (UNCONFIRMED, {0: "7", 1: None}),  # Slurm may run the second, so the next submit must look for it
    ],
    ids=["refused", "unconfirmed"],
)
def test_the_manifest_keeps_the_arrays_that_slurm_has_or_may_have(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, second: CommandError, kept: dict[int, str | None]
) -> None:
    """Three arrays of a point each. Slurm takes the first one."""
    monkeypatch.setattr(slurm_submit, "submit_array", answers("7", second))
    planned = [PlannedArray(SHAPE, REQUEST, [[spec]]) for spec in POINTS]
    with pytest.raises(CommandError, match=r"has taken 1 of 3 elements: sbatch|does not say"):
        slurm_submit.submit_arrays(experiment, planned, None, LaunchOptions(Path("data")))
    found = {array.elements[0][0]: array.job_id for array in arrays_of(experiment)}
    assert found == {POINTS[number].run_id(): job_id for number, job_id in kept.items()}


def test_a_submission_is_written_beside_the_others_and_in_place_of_itself(experiment: Experiment) -> None:
    for name, job_id in (("a", "1"), ("b", None), ("b", "2")):
        array = SlurmArray(f"x-{name * 8}-0", [["a-point"]], job_id)
        slurm_submit.write_submission(experiment, Submission(name * 32, "slurm", "2025-06-01T00:00:00Z", [array]))
    assert {array.job_name: array.job_id for array in arrays_of(experiment)} == {
        "x-aaaaaaaa-0": "1",
        "x-bbbbbbbb-0": "2",
    }


def submit_one(experiment: Experiment, monkeypatch: pytest.MonkeyPatch, sbatch: str, squeue: str = "") -> str | None:
    """Submit an array of two points to stand-ins for squeue, which prints its lines for the array's name, and sbatch.

    The latter refuses any script but ours.
    """
    folder = experiment.folder.parent / "bin"
    squeue = f"for word; do case $word in x-*-0) name=$word ;; esac; done\n{squeue or 'exit 0'}"
    sbatch = f'grep -q pipeline.launch "$1" || exit 1\n{sbatch}'
    write_commands(folder, {"sbatch": sbatch, "squeue": squeue, "srun": "exit 1"})
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    slurm_submit.submit_arrays(
        experiment, [PlannedArray(SHAPE, REQUEST, [[spec] for spec in POINTS[:2]])], None, LaunchOptions(Path("data"))
    )
    (array,) = arrays_of(experiment)
    return array.job_id


BANNER = "-- Welcome to Cluster3 --\n--> This is job 3 of the 50 that you may have queued...OK"
NAMED = f'echo "4711|PENDING|None|{os.getuid()}|$name"'


@pytest.mark.fault("F07")
@pytest.mark.parametrize(
    ("printed", "squeue"),
    [
        ("Submitted batch job 4711", "exit 1"),
        (f"{BANNER}\nSubmitted batch job 4711\n{BANNER}", "exit 1"),
        ("Submitted batch job 4711 on cluster c3", "exit 1"),
        ("job 5: checked\nSubmitted batch job 4711  \nSee job 6.", "exit 1"),
        (f"{BANNER}\n4711", NAMED),  # of a wrapper with --parsable
        ("4711;c3", NAMED),
        ("Submitted batch job 5\nSubmitted batch job 4711", NAMED),
        ("[wrapper] your job 5 is Submitted batch job 4711", NAMED),
        ("", NAMED),
    ],
)
def test_the_id_of_an_array_is_that_of_sbatchs_own_line_or_of_the_arrays_name(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, printed: str, squeue: str
) -> None:
    """submitit takes the first "job N": 3, of the banner."""
    assert submit_one(experiment, monkeypatch, f"printf '%s\\n' {shlex.quote(printed)}", squeue) == "4711"
    (tasks,) = experiment.folder.glob("logs/*/*")
    assert read_task_list(tasks, digest(tasks.read_bytes())).elements == [[spec] for spec in POINTS[:2]]


@pytest.mark.fault("F07")
def test_an_array_that_sbatch_neither_confirms_nor_slurm_knows_is_refused(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CommandError, match=r"of 2 elements: sbatch refused x-.*: it printed 'See job 6', which names"):
        submit_one(experiment, monkeypatch, "echo See job 6")
    assert (list(experiment.folder.glob("logs/*/*")), arrays_of(experiment)) == ([], [])


LIMIT = """echo 'sbatch: error: {}' >&2
echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, ...)' >&2
exit 1"""


@pytest.mark.fault("F07")
@pytest.mark.parametrize("name", ["QOSMaxSubmitJobPerUserLimit", "AssocMaxSubmitJobLimit", "AssocGrpSubmitJobsLimit"])
def test_a_limit_of_jobs_is_named_with_the_number_that_slurm_took_and_the_cure(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cure = r"submit again, or need fewer jobs with --points-per-element\.$"
    said = f"Slurm has taken 0 of 2 elements.*: {name}: Job violates accounting.*{cure}"
    with pytest.raises(CommandError, match=said):
        submit_one(experiment, monkeypatch, LIMIT.format(name))


@pytest.mark.fault("F07")
@pytest.mark.parametrize(
    ("files", "job_id", "kept"),
    [
        ([], None, {}),
        (["x-0.json"], None, {}),
        (["x-0.json", "x-1-7_1.log"], None, {"x-1-7_1.log": b"[]"}),
        *((["x-0.json", log], "7", {"x-0.json": b"[]", log: b"[]"}) for log in ("x-0-7_1.log", "x-0-7.log")),
    ],
)
def test_what_slurm_has_not_started_is_withdrawn_and_what_it_has_keeps_its_tasks(
    tmp_path: Path, files: list[str], job_id: str | None, kept: dict[str, bytes | None]
) -> None:
    for name in files:
        (tmp_path / name).write_text("[]")
    assert slurm_submit.withdraw_array("x-0", tmp_path) == job_id
    assert everything_in(tmp_path) == kept


@pytest.mark.fault("F34")
def test_the_tasks_are_out_of_reach_before_submit_looks_for_an_element_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element that begins after the look must find none: they are about to be removed."""
    (tasks := tmp_path / "x-0.json").write_text("[]")
    glob, in_reach = Path.glob, list[bool]()

    def look(folder: Path, pattern: str) -> Iterator[Path]:
        in_reach.append(tasks.exists())
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", look)
    assert slurm_submit.withdraw_array("x-0", tmp_path) is None
    assert in_reach == [False]


@pytest.mark.fault("F34")
def test_an_array_without_a_job_id_gets_that_of_its_name_or_is_withdrawn(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver leaves them that was killed while it called sbatch. The third one has begun, by its files."""
    submission = start_submission("a" * 32, "slurm")
    submission.arrays += [
        SlurmArray(submission.array_name("x", number), [[POINTS[number].run_id()]]) for number in range(3)
    ]
    slurm_submit.write_submission(experiment, submission)
    folder = experiment.log_folder(submission.id)
    folder.mkdir(parents=True)
    lists = [folder / f"{array.job_name}.json" for array in submission.arrays]
    for tasks in lists:
        tasks.write_text("[]")
    (folder / f"{submission.arrays[2].job_name}-9.log").touch()
    monkeypatch.setattr(slurm_queries, "find_jobs_named", lambda names, users: {submission.arrays[0].job_name: "7"})
    slurm_submit.recover_job_ids(experiment)
    kept = [(array.elements[0][0], array.job_id) for array in arrays_of(experiment)]
    assert kept == [(POINTS[0].run_id(), "7"), (POINTS[2].run_id(), "9")]
    assert [tasks.exists() for tasks in lists] == [True, False, True]
