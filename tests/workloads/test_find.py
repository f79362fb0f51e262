"""The workload that a rank builds from the name of a model, and what is said of the user's code, also by a launch."""

import os
import py_compile
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, needs_root, run_program, succeeded
from factories import (
    SMALLEST,
    assert_says,
    failure_of,
    known,
    make_experiment,
    measurement_of,
    own_point,
    with_change,
    write_model,
)

import ddpscale
import pipeline
from pipeline.plan.find_model import source_digests
from pipeline.plan.resources import points_for_same_processes
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, start_submission
from pipeline.records.record import Record
from pipeline.records.store import load_folder
from pipeline.report.collected import collect_experiment
from pipeline.runner.launch_options import LaunchOptions, launch_command
from pipeline.system import files
from pipeline.workloads import user_code
from pipeline.workloads.find import Sources, build_workload
from pipeline.workloads.workload import Workload, WorkloadError


@pytest.fixture(autouse=True)
def modules_and_path() -> Iterator[None]:
    """Forget what a test imports."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.path[:] = path


def built(model: str, *options: str, modules: Path | None = None) -> Any:
    return build_workload(own_point(model, options=options), Sources(modules=modules))


def test_the_options_of_a_point_are_converted_by_the_annotations_of_the_constructor(tmp_path: Path) -> None:
    path = write_model(tmp_path, with_change("width: int = 4", "width: int = 4, rate: float | None = 0.1, kind='a'"))
    found = built(f"{path}:Tiny", "width=8", "bias=false", "rate=none", "kind=7")
    assert (found.width, found.bias) == (8, False)
    assert isinstance(found, Workload)


def test_a_file_finds_what_lies_beside_it_and_a_module_what_lies_beside_the_grid(tmp_path: Path) -> None:
    (tmp_path / "sizes_of_test.py").write_text("WIDTH = 6\n")
    text = with_change("from torch import nn", "from torch import nn\nfrom sizes_of_test import WIDTH")
    path = write_model(tmp_path, text.replace("width: int = 4", "width: int = WIDTH"), name="tiny_a.py")
    assert built(f"{path}:Tiny").width == 6
    write_model(tmp_path / "mine_of_test", text, name="models.py")
    assert built("mine_of_test.models:Tiny", modules=tmp_path).width == 4


@pytest.mark.parametrize("name", ["msgspec", "tabnanny"])  # nothing imports the second one earlier
def test_what_is_installed_wins_over_what_lies_beside_a_model(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    text = with_change("from torch import nn", f"from torch import nn\nimport {name}")
    assert built(f"{write_model(tmp_path, text, name='tiny_b.py')}:Tiny").width == 4


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("raise ValueError('no')\n", (), r"cannot be imported: ValueError: no \(at tiny_c.py:1 in <module>\)"),
        (
            "import sys\nsys.exit(3)\n",
            (),
            r"sys.exit\(3\); put what a script does under if .* \(at tiny_c.py:2 in <module>\)",
        ),
        (
            "import not_a_package\n",
            (),
            r"No module named 'not_a_package'; install it for \S+ \(at tiny_c.py:1 in <module>\)",
        ),
        ("def (:\n", (), r"cannot be imported: SyntaxError: .* \(at tiny_c.py:1\)"),
        (SMALLEST.replace("Tiny", "Tinny"), (), "has no attribute 'Tiny'"),
        (with_change("(Workload)", ""), (), r"Tiny of .* is no Workload; write class Tiny\(Workload\)"),
        ("Tiny = 3\n", (), "is no Workload"),
        (with_change("    def loss", "    def lose"), (), "Tiny cannot be built: TypeError: .* abstract method '?loss"),
        (SMALLEST, ("width=four",), "model.width=four is no value of Tiny's width: Expected `int`"),
        (SMALLEST, ("depth=4",), "Tiny cannot be built: TypeError: .*unexpected keyword argument 'depth'"),
        (
            with_change("        self.width,", "        1 / 0\n        self.width,"),
            (),
            r"Tiny cannot be built: ZeroDivisionError: .* \(at tiny_c.py:12 in __init__\)",
        ),
    ],
)
def test_what_is_wrong_with_a_model_is_one_sentence_with_its_line(
    tmp_path: Path, text: str, options: tuple[str, ...], said: str
) -> None:
    path = write_model(tmp_path, text, name="tiny_c.py")
    with pytest.raises(WorkloadError, match=said):
        built(f"{path}:Tiny", *options)


@pytest.mark.parametrize("name", ["torch.py", "random.py", "wave.py"])
def test_a_file_with_the_name_of_another_module_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkloadError, match=r"has the name of another module, \w+; rename the file"):
        built(f"{write_model(tmp_path, name=name)}:Tiny")


def test_a_folder_that_others_may_write_is_refused_by_the_rank_too(tmp_path: Path) -> None:
    path = write_model(tmp_path / "open", name="tiny_d.py")
    path.parent.chmod(0o777)
    with pytest.raises(WorkloadError, match="anyone may write there"):
        built(f"{path}:Tiny")


LATE = """
    def helper(self):
        import late_helper
        return late_helper.WIDTH
"""


@needs_root
@pytest.mark.fault("F56")
@pytest.mark.parametrize("owner", [0, 65534])
def test_what_the_users_code_imports_later_is_checked_too(tmp_path: Path, owner: int) -> None:
    """It appeared after the point was submitted."""
    found = built(f"{write_model(tmp_path, SMALLEST + LATE, name='tiny_e.py')}:Tiny")
    os.chown(write_model(tmp_path, "WIDTH = 5\n", name="late_helper.py"), owner, -1)
    if owner == 0:
        assert found.helper() == 5
    else:
        with pytest.raises(WorkloadError, match=r"late_helper\.py belongs to another user \(65534\)"):
            found.helper()


def test_the_bytecode_beside_a_model_is_not_run(tmp_path: Path) -> None:
    """Whoever may write into its folder could have compiled something else."""
    path = write_model(tmp_path, with_change("width: int = 4", "width: int = 7"), name="tiny_f.py")
    cached = Path(py_compile.compile(str(path), doraise=True) or "")
    status = path.stat()
    path.write_text(path.read_text().replace("= 7", "= 4"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached.is_file()
    assert built(f"{path}:Tiny").width == 4


def test_the_source_of_a_point_is_what_was_imported_whatever_becomes_of_the_files(tmp_path: Path) -> None:
    write_model(tmp_path, "WIDTH = 4\n", name="sizes_g.py")
    path = write_model(tmp_path, "import sizes_g\n" + SMALLEST, name="tiny_g.py")
    digest = user_code.file_sha256(path)
    built(f"{path}:Tiny")
    before = user_code.describe_source("tiny_g")
    path.write_text("edited\n")
    (tmp_path / "sizes_g.py").unlink()
    assert (user_code.describe_source("tiny_g"), user_code.file_sha256(path)) == (before, digest)


def test_a_model_that_this_version_lacks_is_named() -> None:
    with pytest.raises(WorkloadError, match="this version has no model 'resnet34'"):
        built("resnet34")


def test_none_is_a_text_where_the_option_is_one_and_else_no_value(tmp_path: Path) -> None:
    options = "width: int = 4, norm: str = 'layer', rate: float | None = 0.1, first=None, kind: str | None = 'a'"
    assert built(
        f"{write_model(tmp_path, KEEPS.format(options=options))}:Kept",
        "norm=none",
        "rate=none",
        "first=none",
        "kind=none",
    ).kept == {"width": 4, "norm": "none", "rate": None, "first": None, "kind": None}


def test_only_the_types_of_the_given_options_are_looked_at(tmp_path: Path) -> None:
    path = write_model(tmp_path, KEEPS.format(options="width: int = 4, policy: 'Policy | None' = None"))
    assert built(f"{path}:Kept", "width=8").kept == {"width": 8, "policy": None}
    with pytest.raises(WorkloadError, match="Kept cannot be built: NameError: name 'Policy' is not defined"):
        built(f"{path}:Kept", "policy=a")


KEEPS = """
from typing import TYPE_CHECKING
from pipeline.workloads import Workload
if TYPE_CHECKING:
    from nowhere import Policy

class Kept(Workload):
    def __init__(self, {options}):
        self.kept = {{name: value for name, value in locals().items() if name not in ("self", "__class__")}}
    def build_model(self): ...
    def synthetic_batch(self, size, device): ...
    def loss(self, model, batch): ...
"""


def test_the_users_files_are_those_of_no_package_and_of_python() -> None:
    assert files.is_user_file(__file__)
    for module in (torch, pipeline, ddpscale, subprocess, pytest):
        assert not files.is_user_file(module.__file__)
    assert not files.is_user_file("<string>")
    assert not files.is_user_file(None)


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


OURS = f"{WorkloadError.__module__}.{WorkloadError.__qualname__}"


@pytest.mark.parametrize(
    ("caught", "raised", "first"),
    [
        ("OSError: Caught OSError in DataLoader worker process 0.; raise it", "OSError: no", "OSError: no; raise it"),
        ("Caught WorkloadError in DataLoader worker process 0.", f"{OURS}: pad", "pad"),
    ],
    ids=["with the cure", "our own sentence, as it is"],
)
def test_the_error_of_a_worker_comes_first(caught: str, raised: str, first: str) -> None:
    text = f"{caught}\n{user_code.WORKER_TRACEBACK}:\n{raised}"
    assert user_code.with_worker_error_first(text) == f"{first} (in a worker of the data loader)\n{text}"


def commit_in(folder: Path, *paths: str) -> str:
    """Commit the paths in the repository of the folder, which is made if there is none; return the commit."""
    git = ("git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x")
    for words in (("init", "-q"), ("add", *paths), ("commit", "-qm", "x")):
        succeeded(run_program(*git, *words))
    return run_program(*git, "rev-parse", "HEAD").stdout.strip()


def source_of(module: str) -> user_code.UserSource:
    return known(user_code.describe_source(module))


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
        ("Sharpness Aware Minimization requires closure, but it was not provided", "that needs none, such as AdamW"),
        ("LBFGS.step() missing 1 required positional argument: 'closure'", "return one that needs none, such as AdamW"),
    ],
)
def test_what_torch_says_in_its_own_words_gets_our_cure_and_the_users_line_first(torchs: str, cure: str) -> None:
    error = raised(f"raise ValueError({torchs!r})")
    first, second, *_ = user_code.describe_user_error(error, f"ValueError: {error}").splitlines()
    assert (cure in first, second) == (True, f"ValueError: {torchs}")
    assert first.endswith("(at gpt.py:1 in <module>)")


DATA = """
    def dataset(self):
        return Samples()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 17:
            raise ValueError("sample 17 is torn")
        return {"x": torch.zeros(4), "y": torch.zeros(1)}
"""


SMALL = {"batch_size_per_gpu": 8, "num_samples": 64, "epochs": 3}


def launch(experiment: Experiment, *points: Spec) -> dict[Spec, Record]:
    """Run the points in one launch, as an array element does, and return their records."""
    command = launch_command(experiment.manifest_path, [spec.run_id() for spec in points], LaunchOptions(ROOT))
    done = subprocess.run(command, cwd=experiment.folder, capture_output=True, text=True, timeout=300)
    assert done.stdout == "", "what a user prints is no data of the command"
    found, rejected = load_folder(experiment.records_folder)
    assert rejected == [], done.stderr
    return {record.spec: record for record in found}


@pytest.mark.training
def test_two_files_of_one_name_are_two_models_and_one_that_was_edited_is_noted(tmp_path: Path) -> None:
    """One also prints, as it is imported and in its loss."""
    loud = with_change("return nn.functional", "print('loss'); return nn.functional") + "\nprint('imported')\n"
    first = own_point(f"{write_model(tmp_path / 'first', loud)}:Tiny", **SMALL)
    wider = write_model(tmp_path / "second", with_change("width: int = 4", "width: int = 6"))
    second = own_point(f"{wider}:Tiny", **SMALL)
    assert points_for_same_processes([first, second]) == [first]
    experiment = make_experiment(tmp_path / "x", missing=[first, second])
    with experiment.edit_manifest() as manifest:
        submission = start_submission("0" * 32, "local")
        submission.sources = source_digests([first, second], tmp_path)
        manifest.submissions.append(submission)
    write_model(tmp_path / "second", with_change("width: int = 4", "width: int = 7"))
    with experiment.edit_manifest() as manifest:
        later = start_submission("1" * 32, "slurm")
        later.sources = source_digests([first, second], tmp_path)
        manifest.submissions.append(later)
    found = launch(experiment, first, second)
    assert [(record.status, record.reason) for record in found.values()] == [("ok", ""), ("ok", "")]
    assert [measurement_of(found[spec]).num_parameters for spec in (first, second)] == [5, 8]
    environments = [found[spec].environment for spec in (first, second)]
    assert [part.model_changed for part in environments] == [False, True]
    assert environments[0].model_digest != environments[1].model_digest
    assert {
        row.axes["model"]: "model_edited" in [note.kind.name for note in row.notes]
        for row in collect_experiment(experiment).tables["Q1"]
    } == {str(first.model): False, str(second.model): True}


@pytest.mark.training
def test_a_data_set_that_raises_at_a_sample_fails_its_point_with_the_users_line(tmp_path: Path) -> None:
    path = write_model(tmp_path, SMALLEST + DATA)
    line = path.read_text().splitlines().index('            raise ValueError("sample 17 is torn")') + 1
    points = [own_point(f"{path}:Tiny", **SMALL, input="dataloader", num_workers=num_workers) for num_workers in (0, 1)]
    found = launch(make_experiment(tmp_path / "x", missing=points), *points)
    for record in (found[spec] for spec in points):
        failure = failure_of(record)
        assert (record.status, failure.kind, failure.rank) == ("failed", "exception", 0)
        raised = f"(at tiny.py:{line} in __getitem__)"
        assert_says(record.reason.splitlines()[0], "ValueError: sample 17 is torn", raised)
