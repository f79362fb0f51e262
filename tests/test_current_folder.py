"""Modules in the current folder are not imported: neither by the commands nor by what they start."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT, plain_environment, run_program, succeeded
from factories import make_experiment, make_record, only_record, write_grid
from slurm_queue import Env

from pipeline.records.folder import Experiment

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
    (folder / "pipeline").mkdir()
    (folder / "pipeline" / "__init__.py").write_text(CANARY)


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
