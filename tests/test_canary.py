"""No text of a command line runs as a command, and no module in the current folder is imported."""

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import ROOT, Command, plain_environment, run_here, run_program, succeeded
from factories import PLANNED, assert_says, make_experiment, make_record, only_record, write_file, write_grid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_profiles import SUPPRESSED, examples
from slurm_queue import MIXED, UP, Env, quick_points, write_commands

from pipeline.__main__ import COMMANDS
from pipeline.records.folder import Experiment
from pipeline.submission.slurm_submit import refuse_replaced_signs, refuse_unsafe_paths
from pipeline.system.errors import CommandError

HOSTILE = {
    "substitution": "x$(touch canary)",
    "backticks": "x`touch canary`",
    "single quote": "x'; touch canary; '",
    "double quote": 'x"; touch canary; "',
    "both quotes": "x'\"; touch canary; \"'",
    "backslash": "x\\''; touch canary; '",
    "separators": "x; touch canary & touch canary | touch canary #",
    "dashes": "--wrap=touch canary",
    "tilde": "~",
    "line break": "x'\ntouch canary\n'",
    "carriage return": "x\rtouch canary\r",
    "request": "x\n#SBATCH --wrap=id\ntouch canary\n",
}
WORKS = "x$(touch canary)`touch canary`'; touch canary; '\"; touch canary; \" & touch canary # ü=,*~"
# An sbatch that runs what it is given, at once, and a srun that notes its arguments.
SBATCH = 'SLURM_JOB_ID=7 /bin/bash "$1" >&2 || exit 1; echo Submitted batch job 7'
STUBS = {
    "scontrol": f"{UP}; echo 'MaxArraySize = 20'",
    "sinfo": 'case "$*" in *%l*) echo "main*|infinite";; *) echo "main*|8|12000|(null)|2";; esac',
    "squeue": "",
    "sbatch": SBATCH,
    "srun": 'printf "%s\\n" "$@" > "$(dirname "$0")/srun.arguments"',
}


@pytest.fixture
def stub_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, and a Slurm whose sbatch runs every script in it."""
    folder = tmp_path / "bin"
    write_commands(folder, STUBS)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Every option of the command that takes a value, by its own help."""
    assert run_here(command, "--help") == 0
    return sorted(set(re.findall(r"^  (--[a-z-]+) \S", capsys.readouterr().out, re.MULTILINE)))


@pytest.mark.fault("F36")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_control_character_in_any_argument_is_refused_by_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [(option, f"x{character}y") for option in options_of(command, capsys) for character in "\n\r\t\x1b\x7f"]
    for arguments in [*words, *((f"{option}={text}",) for option, text in words), ("x\ny",)]:
        assert run_here(command, *arguments) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert_says(said, "has a control character", arguments[0].partition("=")[0].splitlines()[0])


def submit(folder: Path, *changes: str) -> Sequence[str]:
    """A submission of one point to the stub, with the options at the end, which count."""
    grid = str(write_grid(folder, PLANNED))
    return ("--grid", grid, "--outputs", str(folder / "out"), "--set", "batch_size_per_gpu=8", *changes)


@pytest.mark.seconds
@pytest.mark.fault("F36")
@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_no_value_of_an_option_of_submit_runs(
    stub_slurm: Path, hostile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of("submit", capsys)
    assert {"--outputs", "--data", "--prologue", "--partition", "--constraint", "--time"} <= set(options)
    with contextlib.suppress(OSError):
        (stub_slurm / hostile).write_text("true\n")  # so that a prologue of that name is there
    codes = {}
    for option in options:
        own = stub_slurm / f"of{option}"  # an experiment of its own, so that there is a point to run
        own.mkdir()
        monkeypatch.chdir(own if option == "--outputs" else stub_slurm)
        codes[option] = run_here("submit", *submit(own, f"{option}={hostile}"))
        assert "Traceback" not in capsys.readouterr().err
    assert not list(stub_slurm.rglob("canary"))
    assert set(codes.values()) <= {0, 2, 3, 4}
    assert codes["--partition"] == 2
    assert (codes["--outputs"] == 0) == (re.search(r"[\n\r\\]", hostile) is None)
    assert (codes["--data"] == 0) == (re.search(r"[\n\r]", hostile) is None)


FOLDER_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40)


@given(FOLDER_NAMES.filter(lambda name: name not in (".", "..") and len(name.encode()) < 200))
@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[*SUPPRESSED, HealthCheck.function_scoped_fixture],
)
def test_a_folder_that_is_not_refused_is_the_folder_that_srun_gets(stub_slurm: Path, name: str) -> None:
    folder = stub_slurm / name
    try:
        refuse_unsafe_paths(Experiment(folder / "planned"))
        refuse_replaced_signs(Experiment(folder / "planned"))
    except CommandError:
        assert re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029%\\\\]", name)
        return
    (stub_slurm / "bin" / "srun.arguments").unlink(missing_ok=True)
    assert run_here("submit", *submit(stub_slurm, f"--outputs={folder}")) == 0
    arguments = (stub_slurm / "bin" / "srun.arguments").read_text().split("\n")
    assert arguments[arguments.index("--tasks") + 1].startswith(f"{folder}/planned/logs/")


@pytest.mark.fault("F36")
def test_paths_with_quotes_spaces_and_substitutions_work_on_slurm(
    pipeline: Command, on_slurm: Env, tmp_path: Path
) -> None:
    prologue = tmp_path / f"{WORKS}.sh"
    prologue.write_text(Path(quick_points(tmp_path)[1]).read_text())
    places = ("--outputs", tmp_path / WORKS / "out", "--data", tmp_path / WORKS / "data", "--prologue", prologue)
    submit = ("submit", "--grid", write_grid(tmp_path, MIXED), *places, "--wait")
    succeeded(pipeline(*submit, "--set", "num_gpus=1", "num_nodes=1", env=on_slurm))
    folder = tmp_path / WORKS / "out" / "mixed"
    assert (len(list(folder.glob("records/*.json"))), len(list(folder.glob("logs/*/*.log")))) == (1, 1)
    assert not list(tmp_path.rglob("canary"))


def test_a_path_that_no_batch_script_holds_is_refused_before_anything_is_written(
    stub_slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stub_slurm / "x'\ntouch canary\n'"
    here.mkdir()
    monkeypatch.chdir(here)
    for outputs, words in (("out", "control character"), ("a%j", "'%'"), ("a\\b", "'\\\\'")):
        if outputs != "out":
            monkeypatch.chdir(stub_slurm)
        for more in ((), ("--dry-run",)):
            assert run_here("submit", *submit(stub_slurm, f"--outputs={outputs}", *more)) == 2
            assert words in capsys.readouterr().err
    assert [*stub_slurm.rglob("canary"), *stub_slurm.rglob("logs")] == []


TINY = """
name: tiny
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: single, num_gpus: 1}
points:
  - {num_samples: [64], batch_size_per_gpu: [8]}
resources: {cpus_per_gpu: 1, mem_per_gpu_gib: 3, time: "00:10:00"}
"""
INSTALLED = ("msgspec", "torch", "numpy", "yaml", "pandas", "jinja2", "filelock", "submitit", "argparse", "random")
TRIED = ("msvcrt", "pyarrow", "numexpr", "pynvml", "cupy")  # packages import them if they are there
MODULES = (*INSTALLED, *TRIED)
CANARY = """
import pathlib, sys
with open(pathlib.Path(__file__).with_name("canary"), "a") as file:
    print(sys.argv, __file__, file=file)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of modules that note who imports them."""
    found = tmp_path / "x"
    found.mkdir()
    for name in MODULES:
        (found / f"{name}.py").write_text(CANARY)
    return found


def shadow_package(folder: Path) -> None:
    """Put a package into the folder that Python takes for this one if it looks there first."""
    write_file(folder / "pipeline" / "__init__.py", CANARY)


def importers(folder: Path) -> list[str]:
    """Return a line for each import of a module of the folder."""
    return [line for path in folder.rglob("canary") for line in path.read_text().splitlines()]


def run_in(folder: Path, *words: str | Path, env: Env | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in the folder. PYTHONPATH has this checkout."""
    env = {**(plain_environment() if env is None else env), "PYTHONPATH": str(ROOT)}
    return run_program(sys.executable, *words, cwd=folder, env=env)


@pytest.mark.seconds
@pytest.mark.fault("F49")
def test_what_commands_import_late_does_not_come_from_the_current_folder(folder: Path, tmp_path: Path) -> None:
    experiment = make_experiment(tmp_path / "experiment", make_record())
    write_grid(tmp_path, TINY)
    dry_run = ("submit", "--grid", tmp_path / "grid.yaml", "--dry-run", "--cluster", "local")
    for name, *words in (dry_run, ("collect", experiment.folder), ("jobfile", "q4")):
        answer = run_in(folder, "-m", f"pipeline.{name}", *words)
        assert (answer.returncode, importers(folder)) == (0, []), answer.stderr


@pytest.mark.fault("F49")
@pytest.mark.training
@pytest.mark.parametrize("way", ["a local submission", "a job file"])
def test_the_processes_of_a_point_import_nothing_from_the_current_folder(
    folder: Path, tmp_path: Path, way: str
) -> None:
    grid = ("--grid", write_grid(tmp_path, TINY), "--outputs", tmp_path)
    if way == "a job file":
        answer = run_in(folder, "-u", "-m", "pipeline.launch", *grid, "--index", "0")
    else:
        shadow_package(folder)
        answer = run_in(folder, "-P", "-m", "pipeline.submit", *grid, "--cluster", "local")
    assert (answer.returncode, importers(folder)) == (0, []), answer.stderr
    assert only_record(Experiment(tmp_path / "tiny")).status == "ok"


@pytest.mark.fault("F49")
def test_a_job_of_slurm_imports_nothing_from_the_folder_of_its_submission(
    folder: Path, tmp_path: Path, on_slurm: Env
) -> None:
    shadow_package(folder)
    grid = ("--grid", write_grid(tmp_path, TINY), "--outputs", tmp_path)
    answer = run_in(folder, "-P", "-m", "pipeline.submit", *grid, "--wait", env=on_slurm)
    assert (answer.returncode, importers(folder)) == (0, []), answer.stderr


@pytest.mark.fault("F49")
@pytest.mark.training
def test_a_checkout_that_is_not_installed_works_in_its_root(tmp_path: Path) -> None:
    """Without the module site no installed package of this project is found."""
    words = ("--grid", write_grid(tmp_path, TINY), "--outputs", tmp_path, "--index", "0")
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    answer = succeeded(run_program(sys.executable, "-S", "-m", "pipeline.launch", *words, env=env))
    assert "No module named" not in answer.stderr
    assert only_record(Experiment(tmp_path / "tiny")).telemetry is not None
