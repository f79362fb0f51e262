"""Every command says in one sentence what to install when a package is missing."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import Command, assert_refused, everything_in, succeeded, without_slurm
from factories import PLANNED, ROOT, make_experiment, make_record, make_spec, write_grid
from forked_command import HIDE

from pipeline.system.errors import DISTRIBUTIONS, INSTALL, import_error_as_command_error

NEEDED = {
    "submit": ("msgspec", "yaml", "filelock", "numpy", "PIL", "torch", "torchvision"),
    "launch": ("msgspec", "yaml", "filelock", "numpy", "PIL", "torch", "torchvision"),
    "status": ("msgspec", "filelock"),
    "collect": ("msgspec", "filelock", "pandas", "numpy"),
    "cancel": ("msgspec", "filelock"),
    "compare": ("msgspec", "filelock"),
    "export": ("msgspec", "filelock"),
    "proposal": ("msgspec", "filelock", "jinja2", "matplotlib", "tabulate"),
    "ingest": ("msgspec", "filelock"),
    "stage": ("filelock",),
    "selftest": ("msgspec", "numpy", "torch", "torchvision"),
    "jobfile": ("msgspec", "yaml", "jinja2"),
    "completion": ("msgspec", "yaml"),
}


def hiding(folder: Path, package: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a new Python that lacks the package."""
    (folder / "hide").mkdir()
    (folder / "hide" / "sitecustomize.py").write_text(HIDE)
    return {**env, "PYTHONPATH": os.pathsep.join([str(folder / "hide"), str(ROOT)]), "HIDDEN_PACKAGE": package}


def arguments_of(command: str, folder: Path) -> tuple[str | Path, ...]:
    """A command line that does its work where all packages are there."""
    grid = write_grid(folder, PLANNED)
    (folder / "timings.csv").write_text("")
    make_experiment(folder / "experiment", make_record())
    return {
        "submit": ("--grid", grid, "--outputs", folder / "out"),
        "launch": ("--grid", grid, "--index", "0", "--outputs", folder / "out"),
        "status": (folder / "experiment",),
        "collect": (folder / "experiment",),
        "cancel": (folder / "experiment",),
        "compare": (folder / "experiment", folder / "other"),
        "export": (folder / "experiment", "--to", "json"),
        "proposal": (folder / "experiment", "--samples", "1e9"),
        "ingest": (folder / "timings.csv", "--outputs", folder / "out"),
        "stage": ("--data", folder / "data"),
        "selftest": (),
        "jobfile": ("q4",),
        "completion": ("bash",),
    }[command]


def test_no_command_is_forgotten() -> None:
    modules = {path.stem for path in (ROOT / "pipeline").glob("*.py") if "run_command(main)" in path.read_text()}
    assert modules == {*NEEDED, "__main__"}, "python -m pipeline itself needs no package"


@pytest.mark.parametrize(
    ("command", "package"), [(command, package) for command, packages in NEEDED.items() for package in packages]
)
def test_a_command_whose_package_is_missing_says_what_to_install(
    pipeline: Command, tmp_path: Path, command: str, package: str
) -> None:
    arguments = arguments_of(command, tmp_path)
    env = {**without_slurm(tmp_path), "HIDDEN_PACKAGE": package}  # a fork of a Python that has it forgets it
    before = everything_in(tmp_path / "experiment")
    answer = pipeline(command, *arguments, env=env)
    assert_refused(answer, 2, package if (command, package) == ("collect", "numpy") else said_of(package), INSTALL)
    assert ((tmp_path / "out").exists(), everything_in(tmp_path / "experiment")) == (False, before)


def said_of(package: str) -> str:
    return f"needs the package {DISTRIBUTIONS.get(package, package)!r}; "


@pytest.mark.parametrize("package", ["torch", "submitit"])
def test_the_tables_need_neither_torch_nor_submitit(pipeline: Command, tmp_path: Path, package: str) -> None:
    arguments = arguments_of("collect", tmp_path)
    answer = pipeline("collect", *arguments, env=hiding(tmp_path, package, without_slurm(tmp_path)))
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize(("package", "has_page"), [("jinja2", False), ("matplotlib", True)])
def test_without_the_packages_of_the_page_collect_writes_the_tables_and_says_what_to_install(
    pipeline: Command, tmp_path: Path, package: str, has_page: bool
) -> None:
    for name in "ab":
        found = [make_record(make_spec(batch_size_per_gpu=size)) for size in (32, 64)]
        experiment = make_experiment(tmp_path / "outputs" / name, *found)
    (said,) = succeeded(
        pipeline("collect", tmp_path / "outputs", env=hiding(tmp_path, package, without_slurm(tmp_path)))
    ).stderr.splitlines()  # once, for both experiments
    assert (said_of(package) in said, said.endswith(INSTALL)) == (True, True)
    assert experiment.report.exists()
    page = experiment.folder / "report.html"
    assert (page.exists(), (experiment.folder / "plots").exists()) == (has_page, False)
    assert not has_page or "There are no plots" in page.read_text()


def test_a_submission_without_submitit_is_refused_before_anything_is_written(
    pipeline: Command, tmp_path: Path, on_slurm: Mapping[str, str]
) -> None:
    arguments = ("submit", "--grid", write_grid(tmp_path, PLANNED), "--outputs", tmp_path / "out")
    answer = pipeline(*arguments, env=hiding(tmp_path, "submitit", {**os.environ, **on_slurm}))
    assert_refused(answer, 2, said_of("submitit"), INSTALL)
    assert not (tmp_path / "out").exists()


def test_a_module_of_ours_that_is_absent_is_no_package_to_install() -> None:
    assert (
        import_error_as_command_error(ModuleNotFoundError("No module named 'pipeline.gone'", name="pipeline.gone"))
        is None
    )
    assert INSTALL in str(import_error_as_command_error(ImportError("libcudart.so.13: cannot open shared object file")))
