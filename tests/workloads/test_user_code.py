"""What a record and an error say of the user's own code."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import run_program, succeeded
from factories import write_model

import pipeline
from pipeline.workloads import user_code
from pipeline.workloads.find import import_file
from pipeline.workloads.workload import WorkloadError


def test_the_users_files_are_those_of_no_package_and_of_python() -> None:
    assert user_code.is_user_file(__file__)
    for path in (torch.__file__, pipeline.__file__, subprocess.__file__, "<string>", None, pytest.__file__):
        assert not user_code.is_user_file(path)


def raised(action: str) -> BaseException:
    try:
        exec(compile(action, "/home/somebody/gpt.py", "exec"), {"torch": torch})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_has_its_innermost_place_in_the_users_code_first() -> None:
    error = raised("def loss():\n    torch.zeros(2) @ torch.zeros(3)\nloss()\n")
    first, *others = user_code.describe_user_error(error, f"{type(error).__name__}: {error}").splitlines()
    assert first.startswith("RuntimeError: inconsistent tensor size")
    assert first.endswith("(at gpt.py:2 in loss)")
    assert others[:2] == ["at gpt.py:2 in loss", "at gpt.py:3 in <module>"]


def test_an_error_of_a_loaders_worker_has_its_place_too() -> None:
    """torch puts the traceback of the worker into the text of the error."""
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "{torch.__file__}", line 5, in _worker_loop\n    data = fetch()\n'
        '  File "/home/somebody/data.py", line 17, in __getitem__\n    raise ValueError("sample 17")\n'
        "ValueError: sample 17\n"
    )
    said = user_code.describe_user_error(ValueError(text), f"ValueError: {text}")
    expected = "ValueError: sample 17 (in a worker of the data loader) (at data.py:17 in __getitem__)"
    assert said.splitlines()[0] == expected


def test_the_cure_of_a_workers_error_stays_in_the_first_line() -> None:
    text = (
        f"OSError: Caught OSError in DataLoader worker process 0.; raise it\n{user_code.WORKER_TRACEBACK}:\nOSError: no"
    )
    assert user_code.with_worker_error_first(text) == f"OSError: no; raise it (in a worker of the data loader)\n{text}"


def test_our_own_sentence_from_a_worker_comes_first_and_as_it_is() -> None:
    name = f"{WorkloadError.__module__}.{WorkloadError.__qualname__}"
    text = f"Caught WorkloadError in DataLoader worker process 0.\n{user_code.WORKER_TRACEBACK}:\n{name}: pad"
    assert user_code.with_worker_error_first(text) == f"pad (in a worker of the data loader)\n{text}"


def test_a_step_that_asserts_a_closure_has_a_cure() -> None:
    text = "AssertionError: Sharpness Aware Minimization requires closure, but it was not provided"
    assert "return one that needs none, such as AdamW" in user_code.describe_user_error(AssertionError(text), text)


def commit_in(folder: Path, *paths: str) -> str:
    """Commit the paths in the repository of the folder, which is made if there is none; return the commit."""
    git = ("git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x")
    for words in (("init", "-q"), ("add", *paths), ("commit", "-qm", "x")):
        succeeded(run_program(*git, *words))
    return run_program(*git, "rev-parse", "HEAD").stdout.strip()


def source_of(module: str) -> user_code.UserSource:
    found = user_code.describe_source(module)
    assert found is not None
    return found


def test_the_source_of_a_model_is_its_digest_and_the_commit_of_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path, "X = 1\n", name="model_in_git.py")
    monkeypatch.setattr(user_code, "user_modules", lambda: {"model_in_git": path})
    monkeypatch.delitem(sys.modules, "model_in_git", raising=False)
    outside = source_of("model_in_git")
    assert (outside.commit, outside.is_dirty) == (None, None)
    (tmp_path / "other.py").write_text("")
    commit_in(tmp_path, "other.py")
    assert source_of("model_in_git").is_dirty, "the commit lacks the file"
    commit = commit_in(tmp_path, ".")
    clean = source_of("model_in_git")
    assert (clean.digest, clean.commit, clean.is_dirty) == (outside.digest, commit, False)
    (tmp_path / "other.py").write_text("changed")
    assert source_of("model_in_git") == clean, "another file of the repository was not imported"
    path.write_text("X = 2\n")
    changed = source_of("model_in_git")
    assert (changed.is_dirty, changed.digest == clean.digest) == (True, False)


def test_every_imported_module_of_the_users_counts(tmp_path: Path) -> None:
    path = write_model(tmp_path, "X = 1\n", name="imported_by_this_test.py")
    try:
        import_file(path)
        assert user_code.user_modules()["imported_by_this_test"] == path
    finally:
        sys.modules.pop("imported_by_this_test", None)
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("name", ["a_model_outside", "z_model_outside"])  # before and behind `torch.classes`
def test_a_model_outside_any_repository_has_no_commit_whatever_else_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not that of the script that runs, of a module of the user's in a repository, or of the working directory."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder, module in ((inside, "__mp_main__"), (inside, "m_helper"), (outside, name)):
        path = write_model(folder, "X = 1\n", name=f"{module}.py")
        found = types.ModuleType(module)
        found.__file__ = str(path)
        monkeypatch.setitem(sys.modules, module, found)
    commit = commit_in(inside, ".")
    monkeypatch.chdir(inside)
    monkeypatch.setitem(user_code.imported, path, b"edited since")  # the file outside
    source = source_of(name)
    assert (source.commit, source.is_dirty) == (None, None)
    assert not {"__mp_main__", "torch.classes", "torch.ops"} & set(user_code.user_modules())
    helper = source_of("m_helper")
    assert (helper.commit, helper.is_dirty) == (commit, False)


@pytest.mark.parametrize(
    ("torchs", "cure"),
    [
        ("Expected more than 1 value per channel when training", "choose num_samples so that the last batch has more"),
        ("Expected to mark a variable ready only once. This error", "give static_graph: true"),
        ("FSDP does not support deepcopy. Please use state dict", "or use strategy: ddp"),
        ("Attempted unscale_ but _scale is None.  This may", "precision: fp16 scales the loss"),
    ],
)
def test_what_torch_says_in_its_own_words_gets_our_cure_and_the_users_line_first(torchs: str, cure: str) -> None:
    error = raised(f"raise ValueError({torchs!r})")
    first, second, *_ = user_code.describe_user_error(error, f"ValueError: {error}").splitlines()
    assert (cure in first, second) == (True, f"ValueError: {torchs}")
    assert first.endswith("(at gpt.py:1 in <module>)")
