import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import CPU_SIZE, Command, run_command
from factories import ROOT, make_record, make_spec

from pipeline import records
from pipeline.experiment import Array, Experiment, add_points, start_submission
from pipeline.records import publish
from pipeline.schema import Environment, Gpu, Record
from pipeline.spec import Spec
from pipeline.staging import CIFAR10_FILES, CIFAR10_FOLDER

COMMANDS = ("submit", "status", "collect", "ingest", "stage", "launch")
Answer = subprocess.CompletedProcess[str]

# two epochs, and a probe that needs 0.8 GB for its images alone
TINY = """
name: tiny
base: {strategy: single, num_gpus: 1, device: cpu, model: lenet, dataset: synthetic, input: synthetic,
       precision: fp32, num_samples: 64}
points:
  - {batch_size_per_gpu: [8]}
  - {batch_size_per_gpu: [65536], epochs: [1], max_steps: [3], memory_limit_gib: [0.5]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""

# two points that no test runs
PLANNED = """
name: planned
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, num_samples: 64}
points:
  - {strategy: [single], num_gpus: [1], batch_size_per_gpu: [8, 16]}
"""


def without_slurm(folder: Path, **more: str) -> dict[str, str]:
    """An environment whose PATH has no Slurm."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "PIPELINE"))}
    return kept | {"PATH": str(folder)} | more


def check_refusal(answer: Answer, code: int, *words: str) -> None:
    """The exit code, nothing on stdout, and one sentence on stderr that has the words."""
    assert (answer.returncode, answer.stdout) == (code, ""), answer.stderr
    assert "Traceback" not in answer.stderr
    last = answer.stderr.strip().splitlines()[-1]
    assert "error: " in last
    assert all(word in last for word in words), last


def write_grid(folder: Path, text: str) -> Path:
    path = folder / "grid.yaml"
    path.write_text(text)
    return path


def planned_points() -> list[Spec]:
    axes = {"device": "cpu", "model": "lenet", "dataset": "synthetic", "input": "synthetic", "precision": "fp32"}
    return [make_spec(batch_size_per_gpu=size, num_samples=64, **axes) for size in (8, 16)]


def make_experiment(folder: Path, *found: Record, missing: Sequence[Spec] = ()) -> Experiment:
    """An experiment that expects the records' points and the missing ones."""
    experiment = Experiment(folder)
    experiment.create()
    with experiment.edit_manifest() as manifest:
        add_points(manifest, [*(record.spec for record in found), *missing])
    for number, record in enumerate(found):
        publish(record.__class__(**{**vars_of(record), "launch_id": str(number)}), experiment.records)
    return experiment


def vars_of(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def everything_in(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


Make = Callable[[Path], object]
FOLDERS: dict[str, tuple[Make, int]] = {
    "absent": (lambda path: None, 2),
    "a file": (lambda path: path.write_text("mine"), 2),
    "a loop": (lambda path: path.symlink_to(path), 2),
    "empty": (lambda path: path.mkdir(), 3),
    "of other things": (lambda path: (path / "deep" / "down").mkdir(parents=True), 3),
}


@pytest.mark.parametrize("command", ["collect", "status"])
@pytest.mark.parametrize(("make", "code"), FOLDERS.values(), ids=FOLDERS.keys())
def test_a_folder_that_cannot_be_read_is_2_and_one_with_no_experiment_3(
    pipeline: Command, tmp_path: Path, command: str, make: Make, code: int
) -> None:
    make(tmp_path / "given")
    check_refusal(pipeline(command, tmp_path / "given"), code, str(tmp_path / "given"))


@pytest.mark.parametrize("command", ["collect", "status"])
def test_a_folder_that_may_not_be_read_is_2(pipeline: Command, tmp_path: Path, command: str) -> None:
    (tmp_path / "given").mkdir(mode=0)
    if os.access(tmp_path / "given", os.R_OK):
        pytest.skip("root reads every folder")
    check_refusal(pipeline(command, tmp_path / "given"), 2, "Permission denied")


def test_records_without_a_manifest_are_tables_to_collect_and_nothing_to_status(
    pipeline: Command, tmp_path: Path
) -> None:
    make_experiment(tmp_path / "x", make_record()).manifest.unlink()
    check_refusal(pipeline("status", tmp_path), 3, "manifest")
    answer = pipeline("collect", tmp_path, "--format", "json")
    assert json.loads(answer.stdout)["experiments"]["x"]["coverage"]["expected"] == 1


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"schema_version": 9}'])
@pytest.mark.parametrize("command", ["collect", "status"])
def test_a_manifest_that_is_none_is_2_and_named(pipeline: Command, tmp_path: Path, command: str, raw: bytes) -> None:
    make_experiment(tmp_path / "x", make_record()).manifest.write_bytes(raw)
    check_refusal(pipeline(command, tmp_path), 2, "manifest.json")


@pytest.mark.parametrize("command", ["collect", "status"])
@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("oom", 0), ("failed", 1), ("rejected", 1), ("missing", 1)])
def test_strict_is_1_where_a_point_has_no_result(
    pipeline: Command, tmp_path: Path, command: str, status: Any, code: int
) -> None:
    spec = make_spec(batch_size_per_gpu=64)
    found = [make_record()] + ([make_record(spec, status=status)] if status in ("ok", "oom", "failed") else [])
    experiment = make_experiment(tmp_path / "x", *found, missing=[spec])
    if status == "rejected":
        (experiment.records / f"{spec.run_id()}.0.json").write_text("{")
    answer = pipeline(command, tmp_path, "--strict")
    assert (answer.returncode, answer.stderr) == (code, "")


@pytest.mark.parametrize("command", ["collect", "status"])
def test_without_strict_gaps_are_0_and_the_answer_is_the_same(pipeline: Command, tmp_path: Path, command: str) -> None:
    make_experiment(tmp_path / "x", make_record(), missing=[make_spec(batch_size_per_gpu=64)])
    lenient, strict = pipeline(command, tmp_path), pipeline(command, tmp_path, "--strict")
    assert (lenient.returncode, strict.returncode) == (0, 1)
    assert lenient.stdout == strict.stdout != ""


def test_what_collect_prints_is_what_it_writes(pipeline: Command, tmp_path: Path) -> None:
    oom = make_record(make_spec(batch_size_per_gpu=64), status="oom", reason='out of, "memory"\nindeed')
    scaled = make_record(make_spec(strategy="ddp", num_gpus=2), (2, 0.7))
    experiment = make_experiment(tmp_path / "a" / "x", make_record(loss=1.5), oom, scaled)
    (experiment.folder / "oom.csv").write_text("stale")
    markdown, shape = pipeline("collect", tmp_path), pipeline("collect", tmp_path, "--format", "json")
    assert (markdown.stderr, shape.stderr) == ("", "")
    assert experiment.report.read_text() == markdown.stdout
    printed = json.loads(shape.stdout)["experiments"]["a/x"]
    assert json.loads((experiment.folder / "tables.json").read_text()) == printed
    measured = {"communication", "bandwidth", "sweep", "transfers", "split", "prediction", "memory"}
    assert set(printed) == {"Q1", "Q2", "Q3", "Q4", "oom", "coverage", "cost", *measured}
    assert all(printed[table] == [] for table in measured)
    for name, num_rows in (("Q1", 2), ("Q2", 3), ("Q3", 1), ("Q4", 2), ("oom", 1)):
        with (experiment.folder / f"{name.lower()}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        as_text = [{key: "" if value is None else str(value) for key, value in row.items()} for row in printed[name]]
        assert rows == as_text
        assert len(rows) == num_rows


def test_a_table_without_rows_leaves_no_stale_file(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record())
    (experiment.folder / "oom.csv").write_text("stale")
    pipeline("collect", tmp_path)
    assert not (experiment.folder / "oom.csv").exists()


def test_collecting_again_changes_no_byte(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", make_record(loss=1.5), missing=[make_spec(batch_size_per_gpu=2)])
    pipeline("collect", tmp_path)
    before = everything_in(tmp_path)
    pipeline("collect", tmp_path)
    assert everything_in(tmp_path) == before


def test_an_experiment_given_by_itself_has_its_own_name(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "a" / "x", make_record())
    answers = [pipeline("collect", folder, "--format", "json") for folder in (tmp_path, tmp_path / "a" / "x")]
    assert [list(json.loads(answer.stdout)["experiments"]) for answer in answers] == [["a/x"], ["x"]]


def test_files_that_cannot_be_written_beside_the_records_are_2_and_the_tables_are_printed(
    pipeline: Command, tmp_path: Path
) -> None:
    experiment = make_experiment(tmp_path / "x", make_record())
    experiment.report.mkdir()
    answer = pipeline("collect", tmp_path)
    assert answer.returncode == 2
    assert "# x" in answer.stdout
    assert "Traceback" not in answer.stderr


def test_junk_among_the_records_is_named_and_nothing_else_is_lost(pipeline: Command, tmp_path: Path) -> None:
    spoilt = make_record(make_spec(batch_size_per_gpu=64))
    experiment = make_experiment(tmp_path / "x", make_record(), spoilt)
    path = experiment.records / f"{spoilt.run_id}.0.json"
    path.write_bytes(path.read_bytes()[:100])
    (experiment.records / "foreign.json").write_text('{"hello": [1, 2, 3]}')
    (experiment.records / "deep.json").write_text("[" * 100_000)
    (experiment.records / "binary.json").write_bytes(bytes(range(256)))
    (experiment.records / "folder.json").mkdir()
    (experiment.records / "link.json").symlink_to(experiment.manifest)
    os.mkfifo(experiment.records / "fifo.json")
    answer = pipeline("collect", tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    for name in (path.name, "foreign.json", "deep.json", "binary.json", "folder.json", "link.json", "fifo.json"):
        assert f"records/{name}" in answer.stdout.replace("\\", "")
    assert "2 points expected: 1 ok, 0 OOM, 0 failed, 0 missing, 1 rejected" in answer.stdout
    assert "6 foreign" in answer.stdout


def test_a_record_whose_epoch_took_no_time_ends_in_no_traceback(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "x", make_record())
    (path,) = experiment.records.iterdir()
    path.write_text(path.read_text().replace('"epoch_time_ns": 1000000000', '"epoch_time_ns": 0'))
    answer = pipeline("collect", tmp_path, "--format", "json")
    assert (answer.returncode, "Traceback" in answer.stderr) == (0, False)
    assert [row["throughput_samples_per_s"] for row in json.loads(answer.stdout)["experiments"]["x"]["Q1"]] == [None]


@pytest.mark.parametrize("arguments", [("collect",), ("collect", "--format", "json"), ("status",)], ids=" ".join)
def test_a_folder_whose_name_is_not_utf8_ends_in_no_traceback(
    pipeline: Command, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    make_experiment(tmp_path / "x", make_record()).folder.rename(tmp_path / os.fsdecode(b"x\xff"))
    answer = pipeline(*arguments, tmp_path)
    assert "Traceback" not in answer.stderr
    assert answer.returncode in (0, 2)


@pytest.mark.parametrize("command", ["collect", "status"])
def test_a_terminal_escape_in_a_record_or_a_folders_name_does_not_reach_the_terminal(
    pipeline: Command, tmp_path: Path, command: str
) -> None:
    record = make_record(status="failed", reason="\x1b[2Jgone\x07")
    make_experiment(tmp_path / "x\x1b[31m", record)
    answer = pipeline(command, tmp_path)
    assert "gone" in answer.stdout
    assert "\x1b" not in answer.stdout
    assert "\x07" not in answer.stdout


def test_a_gpu_with_a_name_that_stdout_cannot_encode_ends_in_no_traceback(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "x", make_record(environment=Environment(gpus=(Gpu(name="Größe\u200b"),))))
    answer = pipeline("collect", tmp_path, env=without_slurm(tmp_path, PYTHONIOENCODING="ascii"))
    assert (answer.returncode, "Traceback" in answer.stderr) == (0, False)


@pytest.mark.parametrize(
    "arguments", [("collect",), ("collect", "--format", "json"), ("status",), ("status", "--json")], ids=" ".join
)
def test_a_broken_pipe_is_quiet(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    make_experiment(tmp_path / "x", make_record())
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head` does once it has its lines
    command = [sys.executable, "-m", f"pipeline.{arguments[0]}", str(tmp_path), *arguments[1:]]
    answer = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (answer.returncode, answer.stderr) == (141, "")


BAD_USAGE: dict[str, tuple[tuple[str, ...], int, str]] = {
    "unknown grid": (("--grid", "q9"), 2, "unknown grid 'q9'"),
    "absent grid": (("--grid", "absent/grid.yaml"), 2, "absent/grid.yaml"),
    "unknown axis": (("--set", "batch_size=8"), 2, "batch_size"),
    "unknown value": (("--set", "strategy=fsdp"), 2, "choose from single, dp, ddp"),
    "text for a count": (("--set", "num_gpus=two"), 2, "num_gpus"),
    "no value": (("--set", "num_gpus="), 2, "axis=value"),
    "axis twice": (("--set", "epochs=2", "epochs=3"), 2, "twice"),
    "beyond the shard": (("--set", "batch_size_per_gpu=1000000000000"), 2, "shard"),
    "bad time": (("--time", "soon"), 2, "--time"),
    "no time": (("--time", "00:00:00"), 2, "--time"),
    "injection": (("--partition", "a\n#SBATCH --wrap=id"), 2, "--partition"),
    "json alone": (("--json",), 2, "--dry-run"),
    "no parallelism": (("--max-parallel", "0"), 2, "--max-parallel"),
    "no points an element": (("--points-per-element", "0"), 2, "--points-per-element"),
    "no GPU-hours": (("--max-gpu-hours", "nan"), 2, "--max-gpu-hours"),
    "bad cluster": (("--cluster", "cloud"), 2, "--cluster"),
    "bad rerun": (("--rerun", "missing"), 2, "--rerun"),
    "unknown option": (("--gpus", "4"), 2, "--gpus"),
    "absent prologue": (("--prologue", "absent.sh", "--set", "device=cpu"), 2, "absent.sh"),
    "unknown point": (("--only", "ddp-9gpu-b1-0123456789abcdef", "--set", "device=cpu"), 3, "ddp-9gpu"),
}


@pytest.mark.parametrize(("arguments", "code", "word"), BAD_USAGE.values(), ids=BAD_USAGE.keys())
def test_a_bad_command_line_says_what_is_wrong_and_submits_nothing(
    pipeline: Command, tmp_path: Path, arguments: tuple[str, ...], code: int, word: str
) -> None:
    grid = write_grid(tmp_path, PLANNED)
    arguments = arguments if "--grid" in arguments else ("--grid", str(grid), *arguments)
    answer = pipeline("submit", *arguments, "--outputs", tmp_path / "out", env=without_slurm(tmp_path))
    check_refusal(answer, code, word)
    assert not list(tmp_path.glob("out/*/manifest.json"))


def test_a_grid_of_zero_points_is_2(pipeline: Command, tmp_path: Path) -> None:
    grid = write_grid(tmp_path, PLANNED.replace("[8, 16]", "[]"))
    check_refusal(pipeline("submit", "--grid", grid, "--dry-run"), 2, "no points")


def test_more_gpus_than_the_machine_has_are_2_and_the_points_are_named(pipeline: Command, tmp_path: Path) -> None:
    env = without_slurm(tmp_path, CUDA_VISIBLE_DEVICES="")
    arguments = ("submit", "--grid", "scaling", "--outputs", tmp_path / "out")
    check_refusal(pipeline(*arguments, env=env), 2, "29 of 29 points cannot run here", "--skip-unsatisfiable")
    check_refusal(pipeline(*arguments, "--skip-unsatisfiable", env=env), 2, "none of the points")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["absent", "empty", "a file", "a class without images"])
def test_a_data_folder_that_lacks_images_is_2_before_anything_runs(
    pipeline: Command, tmp_path: Path, given: str
) -> None:
    text = PLANNED.replace("dataset: synthetic", "dataset: imagefolder").replace(
        "input: synthetic", "input: dataloader"
    )
    grid = write_grid(tmp_path, text)
    if given == "a file":
        (tmp_path / "data").write_text("mine")
    elif given == "a class without images":
        (tmp_path / "data" / "train" / "cat").mkdir(parents=True)
    elif given == "empty":
        (tmp_path / "data").mkdir()
    answer = pipeline("submit", "--grid", grid, "--data", tmp_path / "data", "--outputs", tmp_path / "out")
    check_refusal(answer, 2, str(tmp_path / "data"))
    assert not list(tmp_path.glob("out/*/manifest.json"))


def test_outputs_that_are_a_file_are_2(pipeline: Command, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    grid = write_grid(tmp_path, PLANNED)
    check_refusal(pipeline("submit", "--grid", grid, "--outputs", tmp_path / "out", env=without_slurm(tmp_path)), 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--index", "0"),
        ("--grid", "q4"),
        ("--grid", "q4", "--index", "-1"),
        ("--manifest", "absent.json", "--run-id", "x"),
    ],
    ids=" ".join,
)
def test_launch_refuses_what_names_no_point(pipeline: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    check_refusal(pipeline("launch", *arguments, "--outputs", tmp_path / "out"), 2)


def test_launch_refuses_a_run_id_that_the_manifest_does_not_hold(pipeline: Command, tmp_path: Path) -> None:
    manifest = make_experiment(tmp_path / "x", missing=[make_spec()]).manifest
    for chosen in (("--run-id", "ddp-9gpu-b1-0123456789abcdef"), ()):
        check_refusal(pipeline("launch", "--manifest", manifest, *chosen), 2, str(manifest))


def test_an_index_past_the_grid_has_nothing_to_do_and_is_0(pipeline: Command, tmp_path: Path) -> None:
    grid = write_grid(tmp_path, PLANNED)
    answer = pipeline("launch", "--grid", grid, "--index", "2", "--outputs", tmp_path / "out")
    assert (answer.returncode, answer.stdout) == (0, "")
    assert "has 2 points; element 2 has nothing to do" in answer.stderr
    assert Experiment(tmp_path / "out" / "planned").read_manifest() is not None


def test_stage_says_that_the_data_is_there_and_refuses_a_folder_that_others_can_write(
    pipeline: Command, tmp_path: Path
) -> None:
    (tmp_path / "data" / CIFAR10_FOLDER).mkdir(parents=True)
    for name in CIFAR10_FILES:
        (tmp_path / "data" / CIFAR10_FOLDER / name).touch(mode=0o644)
    answer = pipeline("stage", "--data", tmp_path / "data")
    assert (answer.returncode, answer.stdout) == (0, "")
    assert "was there already" in answer.stderr
    (tmp_path / "data").chmod(0o777)
    check_refusal(pipeline("stage", "--data", tmp_path / "data"), 2, "chmod go-w")


def test_stage_refuses_a_file(pipeline: Command, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("mine")
    check_refusal(pipeline("stage", "--data", tmp_path / "data"), 2, str(tmp_path / "data"))


def fake_slurm(folder: Path, ping: str) -> Mapping[str, str]:
    """A PATH with a Slurm that notes every sbatch and whose controller says that to a ping."""
    folder.mkdir()
    for name, line in (("scontrol", ping), ("sbatch", "/bin/touch " + str(folder / "sbatch.was.called")), ("srun", "")):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return without_slurm(folder)


NO_CONFIGURATION = "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"
DEAD = "echo 'Slurmctld(primary) at here is DOWN'; exit 1"


@pytest.mark.parametrize("cluster", ["auto", "slurm"])
def test_a_controller_that_does_not_answer_is_4_and_nothing_runs_here(
    pipeline: Command, tmp_path: Path, cluster: str
) -> None:
    env = fake_slurm(tmp_path / "bin", DEAD)
    grid = write_grid(tmp_path, PLANNED)
    answer = pipeline("submit", "--grid", grid, "--cluster", cluster, "--outputs", tmp_path / "out", env=env)
    check_refusal(answer, 4, "--cluster local")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "bin" / "sbatch.was.called").exists()


def test_slurms_commands_without_a_configuration_are_no_slurm(pipeline: Command, tmp_path: Path) -> None:
    env = fake_slurm(tmp_path / "bin", NO_CONFIGURATION)
    grid = write_grid(tmp_path, PLANNED)
    dry_run = pipeline("submit", "--grid", grid, "--dry-run", "--json", "--outputs", tmp_path / "out", env=env)
    assert json.loads(dry_run.stdout)["place"] == "local"
    assert "No Slurm here" in dry_run.stderr
    answer = pipeline("submit", "--grid", grid, "--cluster", "slurm", "--outputs", tmp_path / "out", env=env)
    check_refusal(answer, 4, "--cluster local")


@pytest.mark.parametrize("ping", [None, NO_CONFIGURATION, DEAD], ids=["no Slurm", "no configuration", "dead"])
@pytest.mark.parametrize("cluster", ["auto", "slurm", "local"])
def test_a_dry_run_works_anywhere_and_writes_nothing(
    pipeline: Command, tmp_path: Path, ping: str | None, cluster: str
) -> None:
    env = without_slurm(tmp_path) if ping is None else fake_slurm(tmp_path / "bin", ping)
    before = everything_in(tmp_path)
    arguments = ("--grid", "scaling", "--dry-run", "--json", "--cluster", cluster, "--outputs", tmp_path / "out")
    answer = pipeline("submit", *arguments, env={**env, "CUDA_VISIBLE_DEVICES": ""})
    assert answer.returncode == 0, answer.stderr
    plan = json.loads(answer.stdout)
    assert [len(array["elements"]) for array in plan["arrays"]] == [5, 14, 10]  # 1, 2 and 4 GPUs
    assert len(plan["points"]) == 29
    assert everything_in(tmp_path) == before


def test_a_dry_run_shows_the_batch_script_of_every_array(pipeline: Command, tmp_path: Path) -> None:
    arguments = ("--grid", "scaling", "--dry-run", "--cluster", "slurm", "--partition", "a100", "--max-parallel", "3")
    text = pipeline("submit", *arguments, "--time", "01:00:00", env=without_slurm(tmp_path)).stdout
    for line in (
        "--partition=a100",
        "--array=0-4%3",
        "--array=0-9%3",
        "--time=60",
        "--no-requeue",
        "--gpus-per-node=4",
    ):
        assert f"#SBATCH {line}\n" in text
    assert text.count("#!/bin/bash") == text.count("--kill-on-bad-exit=1") == 3


def test_a_dry_run_shows_which_points_share_an_element_and_their_limit(pipeline: Command, tmp_path: Path) -> None:
    arguments = ("submit", "--grid", "scaling", "--dry-run", "--cluster", "slurm", "--points-per-element", "4")
    plan = json.loads(pipeline(*arguments, "--json", env=without_slurm(tmp_path)).stdout)
    assert [[len(element) for element in array["elements"]] for array in plan["arrays"]] == [
        [4, 1],
        [4, 4, 4, 2],
        [4, 4, 2],
    ]
    text = pipeline(*arguments, env=without_slurm(tmp_path)).stdout
    assert text.count("limit 4 x 20 = 80 min") == text.count("#SBATCH --time=80\n") == 3
    assert f"  one after another: {', '.join(plan['arrays'][0]['elements'][0])}\n" in text
    assert "--run-id '$RUN_ID_4' --data" in text


def test_a_dry_run_works_where_earlier_jobs_cannot_be_asked_for(pipeline: Command, tmp_path: Path) -> None:
    points = planned_points()
    experiment = make_experiment(tmp_path / "out" / "planned", make_record(points[0]), missing=points)
    submission = start_submission("s" * 8, "slurm")
    submission.arrays.append(Array("x-0", [[spec.run_id()] for spec in points], job_id="7"))
    with experiment.edit_manifest() as manifest:
        manifest.submissions.append(submission)
    grid = write_grid(tmp_path, PLANNED)
    arguments = ("submit", "--grid", grid, "--outputs", tmp_path / "out")
    check_refusal(pipeline(*arguments, env=without_slurm(tmp_path)), 4, points[1].run_id())
    assert pipeline(*arguments, "--dry-run", env=without_slurm(tmp_path)).returncode == 0


@pytest.fixture
def measured(tmp_path: Path) -> tuple[str | Path, ...]:
    """What names the planned grid to submit; its points are recorded as oom and failed."""
    oom, failed = planned_points()
    found = [make_record(oom, status="oom"), make_record(failed, status="failed")]
    make_experiment(tmp_path / "out" / "planned", *found)
    return ("--grid", write_grid(tmp_path, PLANNED), "--outputs", tmp_path / "out", "--cluster", "local")


@pytest.mark.parametrize(
    ("rerun", "sizes"),
    [((), []), (("--rerun", "oom"), [8]), (("--rerun", "failed"), [16]), (("--rerun", "all"), [8, 16])],
)
def test_only_what_lacks_a_record_runs_and_rerun_names_what_runs_again(
    pipeline: Command, measured: tuple[str | Path, ...], rerun: tuple[str, ...], sizes: list[int]
) -> None:
    plan = json.loads(pipeline("submit", *measured, *rerun, "--dry-run", "--json").stdout)
    assert [point["batch_size_per_gpu"] for point in plan["points"]] == sizes
    assert sum(plan["skipped"].values()) == 2 - len(sizes)


def test_everything_measured_already_is_0_and_nothing_runs(
    pipeline: Command, measured: tuple[str | Path, ...], tmp_path: Path
) -> None:
    before = sorted(path.name for path in tmp_path.rglob("*.json"))
    answer = pipeline("submit", *measured)
    assert answer.returncode == 0, answer.stderr
    assert "0 points to run, 1 recorded as failed, 1 recorded as oom" in answer.stderr
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == before


def test_a_rerun_that_selects_nothing_is_3(pipeline: Command, tmp_path: Path) -> None:
    make_experiment(tmp_path / "out" / "planned", *map(make_record, planned_points()))
    grid = write_grid(tmp_path, PLANNED)
    arguments = ("submit", "--grid", grid, "--outputs", tmp_path / "out", "--cluster", "local")
    for rerun in ("failed", "oom"):
        check_refusal(pipeline(*arguments, "--rerun", rerun), 3, "--rerun")
    assert pipeline(*arguments, "--only", planned_points()[0].run_id()).returncode == 0  # it is there, and measured


def test_a_second_driver_is_refused_while_the_first_is_at_work(pipeline: Command, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "out" / "planned")
    grid = write_grid(tmp_path, PLANNED)
    with experiment.submission_lock():
        answer = pipeline("submit", "--grid", grid, "--outputs", tmp_path / "out", "--cluster", "local")
    check_refusal(answer, 2, "another submit is at work")
    assert list(experiment.records.iterdir()) == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """The tiny grid after a real run on this machine, and what submit said."""
    folder = tmp_path_factory.mktemp("tiny")
    write_grid(folder, TINY)
    return folder, run_command(*submit_tiny(folder))


def submit_tiny(folder: Path) -> tuple[str, ...]:
    return ("submit", "--grid", str(folder / "grid.yaml"), "--outputs", str(folder / "out"), "--cluster", "local")


def test_a_grid_runs_to_its_end_on_this_machine(tiny: tuple[Path, Answer]) -> None:
    folder, answer = tiny
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"folder {folder / 'out' / 'tiny'}\n"
    assert "Traceback" not in answer.stderr
    found, rejected = records.read_folder(folder / "out" / "tiny" / "records")
    assert {(record.spec.batch_size_per_gpu, record.status) for record in found} == {(8, "ok"), (65_536, "oom")}
    assert rejected == []


def test_a_probe_that_really_ran_out_of_memory_is_a_cell_and_no_gap(
    pipeline: Command, tiny: tuple[Path, Answer]
) -> None:
    folder, _ = tiny
    answer = pipeline("collect", folder / "out", "--format", "json", "--strict")
    assert (answer.returncode, answer.stderr) == (0, "")
    tables = json.loads(answer.stdout)["experiments"]["tiny"]
    measured, probe = tables["Q1"]
    assert measured["epoch_time_s"] > measured["compute_time_s"] > 0
    assert (probe["batch_size_per_gpu"], probe["status"], probe["epoch_time_s"]) == (65_536, "oom", None)
    assert [row["batch_size_per_gpu"] for row in tables["oom"]] == [65_536]
    assert [row["num_updates"] for row in tables["Q4"]] == [8, 16]  # 64 samples at 8: 8 steps


def test_the_same_command_again_runs_nothing_and_is_0(pipeline: Command, tiny: tuple[Path, Answer]) -> None:
    folder, _ = tiny
    before = sorted((folder / "out" / "tiny" / "records").iterdir())
    answer = pipeline(*submit_tiny(folder))
    assert answer.returncode == 0, answer.stderr
    assert "0 points to run" in answer.stderr
    assert sorted((folder / "out" / "tiny" / "records").iterdir()) == before


def test_status_says_one_state_a_point(pipeline: Command, tiny: tuple[Path, Answer]) -> None:
    folder, _ = tiny
    states = json.loads(pipeline("status", folder / "out", "--json").stdout)["experiments"]["tiny"]
    assert [part["state"] for part in states] == ["ok", "oom"]
    assert all(Path(part["log"]).is_file() for part in states)


def test_rerun_oom_is_a_second_attempt_and_keeps_the_first(pipeline: Command, tiny: tuple[Path, Answer]) -> None:
    folder, _ = tiny
    answer = pipeline(*submit_tiny(folder), "--rerun", "oom")
    assert answer.returncode == 0, answer.stderr
    found, _ = records.read_folder(folder / "out" / "tiny" / "records")
    attempts = [(record.spec.batch_size_per_gpu, record.attempt, record.status) for record in found]
    assert sorted(attempts) == [(8, 0, "ok"), (65_536, 0, "oom"), (65_536, 1, "oom")]


SEE_IMPORTS = """
import runpy, sys
command, *sys.argv[1:] = sys.argv[1:]
try:
    runpy.run_module(f"pipeline.{command}", run_name="__main__")
except SystemExit as exit:
    assert exit.code == 0, exit.code
finally:
    print("imported", *{name.split(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def imports_of(folder: Path, *arguments: str | Path) -> set[str]:
    """The top-level packages that a command imports."""
    command = [sys.executable, "-c", SEE_IMPORTS, *map(str, arguments)]
    answer = subprocess.run(
        command, cwd=ROOT, env=without_slurm(folder), capture_output=True, text=True, timeout=60, check=True
    )
    return set(answer.stderr.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("command", ["collect", "status", "ingest", "submit"])
def test_a_command_for_a_laptop_or_a_login_node_imports_neither_torch_nor_submitit_nor_a_pickler(
    tmp_path: Path, command: str
) -> None:
    make_experiment(tmp_path / "x", make_record())
    arguments = {
        "collect": (tmp_path,),
        "status": (tmp_path,),
        "ingest": (ROOT / "tests" / "data" / "v100-dp.csv", "--outputs", tmp_path / "y"),
        "submit": ("--grid", "smoke", "--dry-run", "--set", *CPU_SIZE),
    }[command]
    imported = imports_of(tmp_path, command, *arguments)
    assert "pipeline" in imported
    assert not imported & {"torch", "torchvision", "submitit", "cloudpickle", "joblib"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_at_once(tmp_path: Path, command: str) -> None:
    assert not imports_of(tmp_path, command, "--help") & {"torch", "submitit", "pandas", "numpy", "tabulate"}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_argument_or_an_unknown_one_is_usage(pipeline: Command, command: str) -> None:
    check_refusal(pipeline(command, "--no-such-option"), 2)


def test_options_of_slurm_that_change_nothing_here_are_named(pipeline: Command, tmp_path: Path) -> None:
    submit = ("submit", "--grid", "smoke", "--outputs", tmp_path, "--cluster", "local", "--dry-run")
    said = pipeline(*submit, "--set", "device=cpu", "--exclusive", "--partition", "gpu").stderr
    assert "Notice: without Slurm --partition, --exclusive changes nothing." in said
    assert "changes nothing" not in pipeline(*submit, "--set", "device=cpu").stderr
