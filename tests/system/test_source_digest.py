"""A record names the code that ran, which its process imported, whatever was edited since."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, plain_environment, run_program, succeeded, wait_for
from factories import write_file

from pipeline.records.record import Environment
from pipeline.runner.launch_session import mark_source_changed
from pipeline.system import source_digest

GRID = """
name: two
base: {device: cpu, model: lenet, dataset: synthetic, input: synthetic, precision: fp32, strategy: single, num_gpus: 1}
points:
  - {num_samples: [4096], batch_size_per_gpu: [16]}
  - {num_samples: [256], batch_size_per_gpu: [64]}
"""
EDIT = "\n# edited\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the project without .git, with a grid of two points that one process runs."""
    shutil.copytree(ROOT / "pipeline", tmp_path / "tree" / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tree" / "grid.yaml").write_text(GRID)
    return tmp_path / "tree"


def git(tree: Path, *arguments: str) -> str:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")
    return succeeded(run_program("git", "-C", tree, *who, *arguments)).stdout.strip()


def commit(tree: Path) -> str:
    """Commit the tree as it is; the commit."""
    if not (tree / ".git").exists():
        git(tree, "init", "--quiet")
    git(tree, "add", "pipeline")
    git(tree, "commit", "--quiet", "--message", "x")
    return git(tree, "rev-parse", "HEAD")


def digest_of(tree: Path) -> str:
    """The digest by its definition: names and bytes of the package's Python files, each with its length before it."""
    names = sorted(str(path.relative_to(tree / "pipeline")) for path in (tree / "pipeline").rglob("*.py"))
    found = hashlib.sha256()
    for part in (part for name in names for part in (name.encode(), (tree / "pipeline" / name).read_bytes())):
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def run(tree: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"pipeline.{name}", *arguments]
    env = plain_environment("PYTHONPATH", OMP_NUM_THREADS="1")
    return subprocess.Popen(command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def submit(tree: Path, *more: str) -> subprocess.Popen[str]:
    """The driver, which runs both points in one element."""
    fixed = ("--grid", "grid.yaml", "--cluster", "local", "--outputs", "out", "--points-per-element", "2")
    return run(tree, "submit", *fixed, *more)


def first_point_runs(tree: Path) -> bool:
    return bool(list(tree.glob("out/two/logs/scratch/*/environment.json")))


def edit(tree: Path) -> None:
    with (tree / "pipeline" / "training" / "loop.py").open("a") as file:
        file.write(EDIT)


@pytest.mark.fault("F26")
@pytest.mark.training
def test_a_submission_runs_the_code_of_its_start_and_rows_of_several_sources_are_marked(tree: Path) -> None:
    """The source is edited before the second submission, and again while its first point runs, with its grid.

    Without git: test_a_checkout_is_dirty_once_a_tracked_file_of_the_pipeline_is_edited.
    """
    head, first = commit(tree), digest_of(tree)
    submit(tree, "--set", "num_samples=256", "batch_size_per_gpu=16,32").communicate(timeout=200)
    edit(tree)
    second = digest_of(tree)
    driver = submit(tree, "--set", "num_samples=4096", "batch_size_per_gpu=64,128", "--merge")
    wait_for(lambda: first_point_runs(tree))
    edit(tree)
    assert len(list(tree.glob("out/two/records/*.json"))) == 2, "edited while the first point ran"
    (tree / "grid.yaml").write_text("name: two\npoints: []\n")
    _, said = driver.communicate(timeout=200)
    assert driver.returncode == 0, said
    found = [json.loads(path.read_text()) for path in tree.glob("out/two/records/*.json")]
    keys = ("source_digest", "source_changed", "git_commit", "git_dirty")
    seen = {record["spec"]["batch_size_per_gpu"]: [record["environment"][key] for key in keys] for record in found}
    before, after = [first, False, head, False], [second, True, head, True]
    assert seen == {16: before, 32: before, 64: after, 128: after}
    assert sorted(record["measurement"]["num_points_before"] for record in found) == [0, 0, 1, 1], "each ran two"
    shown, said = run(tree, "collect", "out", "--format", "json").communicate(timeout=60)
    notes = {row["batch_size_per_gpu"]: row["note"] for row in json.loads(shown)["experiments"]["two"]["Q1"]}
    assert f"source {second[:12]}, other configurations of this experiment {first[:12]}" in notes[64]
    assert "source" not in (notes[32] or ""), "of two the first is the usual one"


def test_a_digest_tells_names_and_bytes_apart(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        shutil.rmtree(tmp_path / "pipeline", ignore_errors=True)
        for name, text in files.items():
            write_file(tmp_path / "pipeline" / f"{name.replace('__', '/')}.py", text)
        (tmp_path / "pipeline" / "notes.txt").write_text("no code")
        assert source_digest.digest_source(tmp_path / "pipeline") == digest_of(tmp_path)
        return source_digest.digest_source(tmp_path / "pipeline")

    found = [digest(a="x"), digest(a="y"), digest(b="x"), digest(a="x", b=""), digest(inner__a="x"), digest(a="xb")]
    assert len(set(found)) == len(found)


def test_a_process_that_imported_another_source_than_its_ranks_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch began before an edit and its ranks after it."""
    now = source_digest.digest_source()
    said = [
        Environment(source_digest=now),
        Environment(source_digest=now, source_changed=True),
        Environment(source_digest="another"),
        Environment(),  # no rank came to say what it imported
    ]
    assert [mark_source_changed(environment).source_changed for environment in said] == [False, True, True, None]
    monkeypatch.setattr(source_digest, "DIGEST_AT_START", "another")
    assert mark_source_changed(Environment(source_digest=now)).source_changed is True


def test_a_checkout_is_dirty_once_a_tracked_file_of_the_pipeline_is_edited(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_COMMIT", raising=False)
    assert source_digest.git_state(tree) == (None, None)
    monkeypatch.setenv("PIPELINE_COMMIT", "given")
    assert source_digest.git_state(tree) == ("given", None)
    head = commit(tree)
    (tree / "pipeline" / "untracked.py").write_text("")
    assert source_digest.git_state(tree) == (head, False)
    (tree / "pipeline" / "submit.py").write_text("")
    assert source_digest.git_state(tree) == (head, True)
