"""The package: its wheel, what make does, and the pins of constraints.txt and constraints-volta.txt."""

import ast
import configparser
import functools
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import assert_refused, plain_environment, run_program, succeeded, without_make
from factories import ROOT, assert_says, records_of, write_script
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.plan.strategies import STRATEGIES
from pipeline.records.folder import Experiment

SOURCES = (
    *("pipeline", "ddpscale.py", "templates", "setup.cfg", "pyproject.toml", "LICENSE", "README.md"),
    "constraints.txt",
)
NO_NETWORK = ("No matching distribution", "Could not find a version", "Connection", "Temporary failure")


def shell_lines(marker: str, page: str = "README.md") -> list[str]:
    """The commands of the first shell block that a page has after this comment, without their own comments."""
    after = (ROOT / page).read_text().split(f"<!-- run: {marker}", 1)[1]
    block = re.search(r"```(?:ba)?sh\n(.*?)```", after, re.DOTALL)
    assert block is not None
    return [line.split(" #")[0].strip() for line in block[1].splitlines() if line.strip()]


def copy_sources(to: Path, *more: str) -> Path:
    """Copy what a wheel is built of, and more; return the folder."""
    for name in filter(lambda name: (ROOT / name).exists(), (*SOURCES, *more)):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)
    return to


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as docs/cluster.md brings it to a cluster without a network: a wheel, installed from its folder."""
    source = tmp_path_factory.mktemp("source")
    copy_sources(source)
    target = tmp_path_factory.mktemp("unpacked")
    for marker, env in (("these lines, by", {}), ("these lines too", {"PIP_TARGET": str(target)})):
        command = shell_lines(marker, "docs/cluster.md")[0].replace("python ", f"{shlex.quote(sys.executable)} ", 1)
        env = {**os.environ, "PIP_NO_DEPS": "1", **env}  # the dependencies are gigabytes
        answer = subprocess.run(command, shell=True, cwd=source, env=env, capture_output=True, text=True, timeout=300)
        said = answer.stdout + answer.stderr
        if answer.returncode and any(phrase in said for phrase in NO_NETWORK):
            pytest.skip("the build backend is absent and cannot be fetched")
        assert answer.returncode == 0, said
    return target


BUILD = "from setuptools.build_meta import build_sdist; build_sdist('dist')"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    copy_sources(folder / "source", "MANIFEST.in", "constraints-volta.txt")
    succeeded(run_program(sys.executable, "-c", BUILD, cwd=folder / "source"))
    (archive,) = (folder / "source/dist").iterdir()
    shutil.unpack_archive(archive, folder, filter="data")
    (root,) = folder.glob("ddpscale-*")
    return root


@pytest.mark.seconds
def test_an_sdist_holds_what_a_wheel_does(sdist: Path, unpacked: Path) -> None:
    wheel = {path.relative_to(unpacked) for path in unpacked.rglob("*.*") if path.is_file()}
    own = {path for path in wheel if path.parts[0] in ("pipeline", "ddpscale.py") and path.suffix != ".pyc"}
    assert len(own) > 90
    assert {str(path) for path in own if not (sdist / path).is_file()} == set()
    assert (sdist / "constraints.txt").is_file(), "the lines that install name it"


@pytest.mark.seconds
def test_the_line_for_tables_alone_installs_what_they_need_in_a_fresh_environment(sdist: Path, tmp_path: Path) -> None:
    """With packages from the network, all but torch, torchvision and submitit."""
    (line,) = shell_lines("tables")
    packages = {*line.partition("constraints.txt ")[2].partition(" && ")[0].split()}
    required = {requirement.name for requirement in requirements_of_setup_cfg(extras=())}
    assert packages == required - {"torch", "torchvision", "submitit"}

    succeeded(run_program(sys.executable, "-m", "venv", tmp_path / "venv"))
    path = f"{tmp_path / 'venv/bin'}:{os.environ['PATH']}"
    env = plain_environment("PYTHONPATH", PATH=path, PIP_COMPILE="0")  # of PIP_NO_COMPILE pip takes the opposite
    installed = run_program("bash", "-c", line, cwd=sdist, env=env)
    if installed.returncode and any(phrase in installed.stderr for phrase in NO_NETWORK):
        pytest.skip("the packages cannot be fetched")
    succeeded(installed)
    folder = tmp_path / "outputs/smoke"
    shutil.copytree(ROOT / "published/two-cores/smoke", folder)
    for words in (("collect",), ("status",), ("export", "--to", "json")):
        assert succeeded(run_program("ddpscale", *words, "outputs/smoke", cwd=tmp_path, env=env)).stdout
    assert "<svg" in (folder / "report.html").read_text()
    load = "import ddpscale; print(len(ddpscale.load('outputs/smoke').configurations))"
    assert succeeded(run_program("python", "-c", load, cwd=tmp_path, env=env)).stdout == "8\n"
    assert_refused(run_program("ddpscale", "selftest", cwd=tmp_path, env=env), 2, "needs the package 'torch'")


def run_outside(unpacked: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the wheel's code, from a folder that is no checkout."""
    env = plain_environment(PYTHONPATH=str(unpacked), PYTHONSAFEPATH="1", PATH=str(folder))
    return run_program(sys.executable, "-m", *arguments, cwd=folder, env=env)


@pytest.mark.seconds
def test_a_wheel_holds_the_grids_the_templates_and_every_module(unpacked: Path) -> None:
    wanted = {path.relative_to(ROOT / "pipeline") for path in (ROOT / "pipeline").rglob("*.py")}
    wanted |= {Path("templates", path.relative_to(ROOT / "templates")) for path in (ROOT / "templates").rglob("*.*")}
    assert len(wanted) > 90
    wanted.add(Path("py.typed"))
    assert {str(name) for name in wanted if not (unpacked / "pipeline" / name).is_file()} == set()
    assert not list(unpacked.glob("tests*"))


@pytest.mark.seconds
def test_a_wheel_works_outside_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    dry_run = ("pipeline.submit", "--grid", "scaling", "--dry-run", "--json")
    plan = json.loads(succeeded(run_outside(unpacked, tmp_path, *dry_run)).stdout)
    assert len(plan["points"]) == 58  # twice 5 on one GPU, 2 strategies x 2 sizes x 5, 4 for strong scaling
    assert all(f"PYTHONPATH={unpacked}" in array["sbatch"] for array in plan["arrays"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.seconds
def test_the_installed_command_runs_where_another_package_is_called_pipeline(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").touch()
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{unpacked}"}
    called = functools.partial(run_program, sys.executable, unpacked / "ddpscale.py", cwd=tmp_path, env=env)
    assert "13 configurations to run" in succeeded(called("submit", "--grid", "own-model", "--dry-run")).stdout
    assert called("collcet").stderr == "error: unknown command 'collcet'; did you mean 'collect'?\n"
    assert called("status", "--help").stdout.startswith("usage: ddpscale status")


@pytest.mark.seconds
@pytest.mark.training
def test_a_repository_of_its_own_measures_its_training_with_the_installed_command(
    unpacked: Path, tmp_path: Path
) -> None:
    """The example of docs/workloads.md as its users have it, with a smaller model and shorter epochs."""
    repository = tmp_path / "sums"
    shutil.copytree(ROOT / "docs/examples/gpt", repository, ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    env = plain_environment(PYTHONPATH=str(unpacked), TEST_FOLDER=str(tmp_path))
    run = functools.partial(run_program, sys.executable, unpacked / "ddpscale.py", cwd=repository, env=env)
    sizes = ("batch_size_per_gpu=32", "num_samples=512", "model.layers=1", "epochs=7", "windows=6")
    submit = ("submit", "--grid", "grid.yaml", "--cluster", "local", "--points-per-element", "4")
    done = succeeded(run(*submit, "--set", *sizes))
    assert done.stderr.endswith("Next: ddpscale collect outputs/arithmetic\n")
    succeeded(run("collect", "outputs/arithmetic"))

    environments = [record.environment for record in records_of(Experiment(repository / "outputs/arithmetic"))]
    # no commit: the code is the wheel's, which is no checkout
    assert [(part.model_changed, part.git_commit) for part in environments] == [(False, None)] * 4
    tables = json.loads((repository / "outputs/arithmetic/tables.json").read_text())
    assert (tables["coverage"]["expected"], tables["coverage"]["ok"]) == (4, 4)
    (parallel,) = (row for row in tables["Q2"] if row["num_gpus"] == 2)
    assert parallel["speedup"] > 0
    assert (parallel["unit"], parallel["options"]) == ("tokens", ["layers=1"])
    assert max(row["test_accuracy"] or 0 for row in tables["Q4"]) > 0.1, "a guess is right in one of 13 characters"

    report = (repository / "outputs/arithmetic/report.md").read_text()
    q2 = "## Q2: weak scaling, speed-up against one process with the per-process batch fixed"
    assert_says(
        report, "tokens/s", "sums/workload.py:Arithmetic", q2, "**Q3** Exposed communication: ", "on 2 processes"
    )
    assert not re.search(r"\bimages?\b|\bGPUs?\b", report)


@pytest.mark.parametrize(("target", "count"), [("bench", 2), ("bench-gpu", 3)])
def test_make_runs_benchmarks_that_import_helpers_of_the_tests(tmp_path: Path, target: str, count: int) -> None:
    """Programs are stand-ins that print their command and where they would import from."""
    for name in ("python", "torchrun"):
        write_script(tmp_path / "bin" / name, f'echo "{name} $* $PYTHONPATH"')
    time.sleep(0.01)
    for stamp in (".installed-constraints.txt", ".installed-constraints.txt-test"):  # newer than what they are made of
        (tmp_path / stamp).touch()
    env = {**without_make(), "PYTHONPATH": "the/users"}
    ran = succeeded(run_program("make", "--silent", target, f"VENV={tmp_path}", env=env)).stdout.splitlines()
    assert [line for line in ran if not line.endswith(" tests:the/users")] == []
    scripts = [word for line in ran for word in line.split() if word.endswith(".py")]
    assert len(scripts) == len(ran) == count
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


OUTER_MAKES: dict[str, dict[str, str]] = {
    "no make": {},
    "make -w check": {"MAKEFLAGS": "w -j2 --jobserver-auth=3,4", "MFLAGS": "-w -j2", "MAKELEVEL": "2"},
    "make check CONSTRAINTS=constraints-volta.txt": {
        "MAKEFLAGS": " -- CONSTRAINTS=constraints-volta.txt",
        "MAKEOVERRIDES": "${-*-command-variables-*-}",
        "MAKELEVEL": "1",
        "CONSTRAINTS": "constraints-volta.txt",
    },
    "make check PYTHON=python2 VENV=x": {"MAKEFLAGS": " -- PYTHON=python2 VENV=x", "PYTHON": "python2", "VENV": "x"},
}


@pytest.mark.parametrize("outer", OUTER_MAKES.values(), ids=OUTER_MAKES)
def test_make_installs_by_the_constraints_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: dict[str, str]
) -> None:
    """Programs are stand-ins. What was installed by other constraints before does not count.

    The tests run under a make themselves: what it hands on changes nothing here.
    """
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    write_script(tmp_path / "bin/python", 'echo "$*"')

    for more, constraints in (((), ".txt"), (("CONSTRAINTS=constraints-volta.txt",), "-volta.txt")) * 2:
        make = ("make", "--silent", "run", f"VENV={tmp_path}", *more)
        installed, *_ = succeeded(run_program(*make, env=without_make())).stdout.splitlines()
        assert installed == f"-m pip install --quiet --constraint constraints{constraints} --editable ."
        again, *_ = succeeded(run_program(*make, env=without_make())).stdout.splitlines()
        assert again.startswith("-m pipeline.submit")


FILES = ("constraints.txt", "constraints-volta.txt")
EXTRAS = ("telemetry", "terminal", "docs", "test")
# torch asks for it by its version or that of Python; an environment that is older than its pin keeps the one of venv
OFTEN_DIFFERS = {"setuptools"}
OF_TORCH = re.compile(r"torch|torchvision|cuda-\w+|nvidia-(?!ml-py).*")


def pins_of(name: str) -> dict[str, str]:
    """Package -> version of a constraints file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), "a pin is name==version"
    found = {str(canonicalize_name(package)): version for package, version in pairs}
    assert len(found) == len(lines), "a package is pinned once"
    return found


def requirements_of_setup_cfg(extras: Sequence[str] = EXTRAS) -> list[Requirement]:
    """What the pipeline and its extras require."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    texts = [parser["options"]["install_requires"], *(parser["options.extras_require"][extra] for extra in extras)]
    return [Requirement(line) for text in texts for line in text.split("\n") if line]


def installed_below(requirements: list[Requirement]) -> Iterator[tuple[str, str]]:
    """Each installed package that the requirements reach, with its version."""
    todo, seen = list(requirements), set()
    while todo:
        requirement = todo.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed, or a package of another platform
        yield str(key[0]), distribution.version.partition("+")[0]
        for text in distribution.requires or ():
            further = Requirement(text)
            asked = [{"extra": extra} for extra in ("", *requirement.extras)]
            if further.marker is None or any(map(further.marker.evaluate, asked)):
                todo.append(further)


def test_every_installed_package_that_the_pipeline_reaches_is_pinned() -> None:
    found = dict(installed_below(requirements_of_setup_cfg()))
    name = next((name for name in FILES if pins_of(name)["torch"] == found["torch"]), None)
    if name is None:
        pytest.skip(f"this environment was installed by no constraints file: torch {found['torch']}")
    assert {"msgspec", "sympy", "pluggy"} <= found.keys()  # required, by torch, by pytest
    pins = pins_of(name)
    wrong = [f"{package}=={version}" for package, version in found.items() if pins.get(package) != version]
    assert [pin for pin in wrong if pin.partition("==")[0] not in OFTEN_DIFFERS] == [], f"pin these in {name}"


def test_the_constraints_for_volta_differ_in_torch_and_its_cuda_alone() -> None:
    usual, for_volta = map(pins_of, FILES)
    differing = {package for package, _ in usual.items() ^ for_volta.items()}
    assert {package for package in differing if not OF_TORCH.fullmatch(package)} == set()
    assert (for_volta["torch"], for_volta["torchvision"]) == ("2.10.0", "0.25.0")


STRATEGY_FILES = ("plan/strategies.py", "training/torch_strategies.py")
DOCUMENTED = {"_asdict", "_replace", "_exit", "_getframe"}  # by Python


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield private names that are imported, or read from something other than `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found = [node.attr]
        else:
            continue
        yield from (name for name in found if re.match("_[^_]", name) and name not in DOCUMENTED)


def test_the_private_names_of_torch_are_those_that_are_in_use() -> None:
    sources = {path: path.read_text() for path in (ROOT / "pipeline").rglob("*.py")}
    used = {
        (name, str(path.relative_to(ROOT / "pipeline")))
        for path, text in sources.items()
        if "torch" in text
        for name in private_names(ast.parse(text))
    }
    section = (
        (ROOT / "docs/architecture.md").read_text().partition("## Private names of torch\n")[2].partition("\n## ")[0]
    )
    listed = set()
    for item in section.split("\n- ")[1:]:
        quoted = re.findall(r"`([\w./]+)`", item.partition(")")[0])
        files = {text for text in quoted if text.endswith(".py")}
        parts = {part for text in quoted for part in text.split(".") if part.startswith("_")}
        listed |= set(itertools.product(parts, files))
    assert used == listed


def test_no_module_asks_for_the_name_of_a_strategy() -> None:
    """Each asks for its facts, in plan/strategies.py, or for what torch does, in training/torch_strategies.py."""
    names = set(STRATEGIES) - {"single"}
    compared = {
        f"{place}:{node.lineno}"
        for path in (ROOT / "pipeline").rglob("*.py")
        if not (place := str(path.relative_to(ROOT / "pipeline"))).startswith(STRATEGY_FILES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.MatchValue)
        and any(isinstance(part, ast.Constant) and part.value in names for part in ast.walk(node))
    }
    assert compared == set()
