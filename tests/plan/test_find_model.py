"""What the login node says of a model, without importing anything of the user's."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_root
from factories import (
    SMALLEST,
    make_script_spec,
    make_spec,
    own_point,
    with_change,
    write_file,
    write_model,
)

from pipeline.plan.find_model import check_models, find_code, find_lacking, source_digests, torchvision_models
from pipeline.plan.grid import expand_grid
from pipeline.plan.spec import Spec
from pipeline.system.errors import CommandError

GRID = """
name: own
base: {{device: cpu, model: "{model}", input: synthetic, precision: fp32, num_samples: 64{more}}}
points:
  - {{strategy: [single], num_gpus: [1], batch_size_per_gpu: [8]}}
"""


def grid_of(folder: Path, model: str, more: str = "") -> tuple[Spec, ...]:
    (folder / "grid.yaml").write_text(GRID.format(model=model, more=more))
    return expand_grid(str(folder / "grid.yaml")).points


def test_a_file_is_found_from_the_folder_of_the_grid_and_has_its_absolute_path(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    (spec,) = grid_of(tmp_path, "models/tiny.py:Tiny", ", model.width: 8, model.bias: false")
    assert (spec.model, spec.options) == (f"{tmp_path}/models/tiny.py:Tiny", ("bias=false", "width=8"))
    assert (spec.dataset, spec.reads_data) == (None, False)


def test_a_file_of_set_is_found_from_the_shells_folder_and_never_from_that_of_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "here", name="ours.py")
    write_model(tmp_path, name="tiny.py")
    grid_of(tmp_path, "tiny.py:Tiny")
    monkeypatch.chdir(tmp_path / "here")
    (spec,) = expand_grid("../grid.yaml", ["model=ours.py:Tiny"]).points
    assert spec.model == f"{tmp_path}/here/ours.py:Tiny"
    with pytest.raises(CommandError, match=rf"{tmp_path}/here/tiny\.py is no file"):
        expand_grid("../grid.yaml", ["model=tiny.py:Tiny"])
    of_example = expand_grid("own-model", ["model=../tiny.py:Tiny"]).points
    assert {spec.model for spec in of_example} == {f"{tmp_path}/tiny.py:Tiny"}


def test_set_and_the_grid_give_an_option_the_same_text(tmp_path: Path) -> None:
    write_model(tmp_path)
    (of_grid,) = grid_of(tmp_path, "tiny.py:Tiny", ", model.width: 1e3")
    (of_set,) = expand_grid(str(tmp_path / "grid.yaml"), ["model.width=1e3"]).points
    assert of_grid == of_set
    two = expand_grid(str(tmp_path / "grid.yaml"), ["model.width=4,8"]).points
    assert ([spec.options for spec in two], len({spec.run_id() for spec in two})) == ([("width=4",), ("width=8",)], 2)


def test_a_module_is_found_beside_the_grid(tmp_path: Path) -> None:
    write_model(tmp_path / "mine", name="models.py")
    (tmp_path / "mine" / "__init__.py").write_text("")
    (spec,) = grid_of(tmp_path, "mine.models:Tiny")
    assert (spec.model, [*source_digests([spec], tmp_path)]) == ("mine.models:Tiny", ["mine.models:Tiny"])
    assert "mine" not in sys.modules


def test_a_module_of_a_script_may_lie_in_a_folder_of_pythonpath(tmp_path: Path) -> None:
    write_file(tmp_path / "src" / "mine" / "train.py", "import torch")
    point = make_script_spec("PYTHONPATH=nowhere:src -m mine.train")
    check_models([point], tmp_path)
    assert find_code([point], tmp_path) == [tmp_path / "src" / "mine" / "train.py"]
    with pytest.raises(CommandError, match="there is no module 'mine' in "):
        check_models([make_script_spec("-m mine.train")], tmp_path)


WIDE = SMALLEST + "\n\nclass Wide(BASE): ..."


@pytest.mark.parametrize(
    ("model", "text", "more", "said"),
    [
        ("absent.py:Tiny", SMALLEST, "", "absent.py is no file; give the file of your model"),
        ("tiny.py:Tny", SMALLEST, "", "has no class 'Tny'; did you mean 'Tiny'?"),
        ("tiny.py:Tiny", "def (:", "", "tiny.py, line 1: invalid syntax; correct it."),
        ("tiny.py:Tiny", "x = 1\n", "", "has no class 'Tiny'; it has none; "),
        ("absent.models:Tiny", SMALLEST, "", "there is no module 'absent' in "),
        ("os.absent:Tiny", SMALLEST, "", "there is no module 'os.absent' in "),
        ("tiny.json:Tiny", SMALLEST, "", "there is no module 'tiny.json' in "),
        ("resnet81", SMALLEST, "", "unknown model 'resnet81'; did you mean 'resnet18'?"),
        ("resnet34", SMALLEST, "", "unknown model 'resnet34'; did you mean 'torchvision:resnet34'?"),
        ("torchvision:resnet51", SMALLEST, "", "'torchvision:resnet51'; did you mean 'torchvision:resnet50'?"),
        # options that the constructor lacks, also an inherited one
        ("tiny.py:Tiny", SMALLEST, "model.widht: 8", "tiny.py has no option 'widht'; did you mean 'width'?"),
        ("tiny.py:Wide", WIDE.replace("BASE", "Tiny"), "model.widht: 8", "has no option 'widht'; did you mean 'width'"),
        ("tiny.py:Wide", WIDE.replace("BASE", "Workload"), "model.width: 8", "has no option 'width'; it takes none"),
        # axes of image models
        (
            "tiny.py:Tiny",
            SMALLEST,
            "learning_rate: 0.2",
            "learning_rate=0.2 is an axis of image models and does nothing",
        ),
        ("tiny.py:Tiny", SMALLEST, "dataset: cifar10", "dataset='cifar10' is an axis of image models"),
        ("tiny.py:Tiny", SMALLEST, "remedies: [warmup]", "remedies=('warmup',) is an axis of image models"),
        ("tiny.py:Tiny", SMALLEST, "options: [width=4]", "unknown axis 'options'"),
        ("tiny.py:Tiny", SMALLEST, "model.1: 3", "unknown axis 'model.1'"),
    ],
)
def test_a_model_or_an_option_that_does_not_exist_is_refused_on_the_login_node(
    tmp_path: Path, model: str, text: str, more: str, said: str
) -> None:
    write_model(tmp_path, text)
    with pytest.raises(CommandError, match=re.escape(said)):
        grid_of(tmp_path, model, f", {more}" if more else "")


def test_a_constructor_that_takes_any_option_is_given_any(tmp_path: Path) -> None:
    write_model(tmp_path, with_change("bias: bool = True", "**more"))
    assert grid_of(tmp_path, "tiny.py:Tiny", ", model.anything: 8")


LOADED = "\n    def dataset(self):\n        return [0]\n"
LOADER, DATASET = {"input": "dataloader"}, "dataset() for input: dataloader, and Tiny of"


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        (SMALLEST, LOADER, DATASET),
        (SMALLEST, {"evaluate": True}, "evaluate() for evaluate: true, and Tiny of"),
        (SMALLEST + "\n    def evaluate(self, model, device): ...", {"evaluate": True}, "merit for evaluate: true"),
        (with_change("def loss", "def los"), {}, "loss(), and Tiny of"),
        (with_change("def synthetic_batch", "def batch"), {}, "synthetic_batch(), and Tiny of"),
        (with_change("width: int = 4", "width: int"), {}, "a value of model.width, for which Tiny of"),
        (with_change("class Tiny(Workload)", "class Tiny"), {}, "a Workload, and Tiny of"),
        (SMALLEST.replace("import Workload", "import Workload as Tin").replace("(Workload)", "(Tin)"), LOADER, DATASET),
        (SMALLEST.replace("Tiny", "Base") + "\n\nclass Tiny(Base): ...", {"input": "dataloader"}, "dataset() for"),
    ],
)
def test_what_a_class_lacks_for_a_point_is_told_from_its_file(
    tmp_path: Path, text: str, fields: dict[str, Any], said: str
) -> None:
    spec = own_point(f"{write_model(tmp_path, text)}:Tiny", **fields)
    ((run_id, found),) = find_lacking([spec], tmp_path).items()
    assert (run_id, found[: len(said)]) == (spec.run_id(), said)


@pytest.mark.parametrize(
    "text",
    [
        SMALLEST + LOADED,
        SMALLEST + "\n    dataset = make",
        SMALLEST + "\n    if True:\n        def dataset(self): ...",
        SMALLEST + "\n\nTiny.dataset = lambda self: [0]",
        SMALLEST + "\n\nsetattr(Tiny, 'data' + 'set', lambda self: [0])",
        SMALLEST + "\n\nTiny = with_data(Tiny)",
        SMALLEST + "\n\nadd_data(Tiny)",
        with_change("class Tiny", "@with_data\nclass Tiny"),
        with_change("self.width, self.bias", "self.dataset = make; self.width, self.bias"),
        with_change("(Workload)", "(mixins.Data, Workload)"),
        with_change("(Workload)", "(Data, Workload)"),
        with_change("(Workload)", "(Workload, metaclass=Meta)"),
        with_change("(Workload)", "(*bases)"),
        "class Tiny(Other): ...\nclass Other(Tiny): ...",
        "from other import Tiny",
        "from other import Base\nclass Tiny(Base): ...",
        "import other\nclass Tiny(other.Base): ...",
        "from pipeline import workloads\nclass Tiny(workloads.Workload): ...",
        "from pipeline.workloads.gpt import Gpt\nclass Tiny(Gpt): ...",
        "from pipeline.workloads import WorkloadError\nclass Tiny(WorkloadError): ...",
        SMALLEST + "\n    if True:\n        def __init__(self, depth): ...",
        SMALLEST + SMALLEST,  # bound twice
        SMALLEST.replace("Tiny", "Base") + LOADED + "\n\nclass Tiny(Base): ...",
    ],
)
def test_where_the_source_does_not_tell_the_ranks_will_see(tmp_path: Path, text: str) -> None:
    spec = own_point(f"{write_model(tmp_path, text)}:Tiny", input="dataloader")
    assert find_lacking([spec], tmp_path) == {}


def give_away(path: Path) -> None:
    os.chown(path, 65534, 65533)


UNTRUSTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file of another user": (give_away, r"tiny\.py belongs to another user \(65534\).*; copy it first"),
    "a file that anyone may write": (
        lambda path: path.chmod(0o646),
        r"tiny\.py can be changed by anyone.*; chmod o-w it",
    ),
    "a folder above": (lambda path: path.parent.parent.chmod(0o777), "lies below .*/above: anyone may write there"),
    "a folder of another user": (lambda path: give_away(path.parent), r"lies below .*/mal of another user \(65534\)"),
    "a helper of another user": (lambda path: give_away(path.with_name("helper.py")), r"helper\.py belongs to another"),
    "a package of another user": (
        lambda path: give_away(path.with_name("package") / "__init__.py"),
        r"package/__init__\.py belongs to another",
    ),
}


def write_with_helpers(folder: Path, lines: str = "import os, helper\nfrom package.part import WIDTH\n") -> Path:
    """A model, a module and a package beside it, which it imports."""
    write_model(folder, "WIDTH = 4\n", name="helper.py")
    write_model(folder / "package", "from . import part\n", name="__init__.py")
    write_model(folder / "package", "WIDTH = 4\n", name="part.py")
    write_model(folder, "raise RuntimeError\n", name="os.py")
    return write_model(folder, lines + SMALLEST)


@needs_root
@pytest.mark.fault("F56")
@pytest.mark.parametrize(("spoil", "said"), UNTRUSTED.values(), ids=UNTRUSTED)
def test_code_that_a_stranger_may_have_written_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    path = write_with_helpers(tmp_path / "above" / "mal")
    check_models([own_point(f"{path}:Tiny")], tmp_path)
    link = tmp_path / "linked.py"
    link.symlink_to(path)
    spoil(path)
    with pytest.raises(CommandError, match=said):
        check_models([own_point(f"{path}:Tiny")], tmp_path)
    if "helper" not in said and "package" not in said:
        with pytest.raises(CommandError, match=said.replace("tiny", "linked")):
            check_models([own_point(f"{link}:Tiny")], tmp_path)


@needs_root
@pytest.mark.parametrize("mode", [0o2775, 0o1777, 0o755])
def test_code_of_the_users_in_a_folder_of_the_group_or_with_a_sticky_bit_is_run(tmp_path: Path, mode: int) -> None:
    """As a prologue is. The folder of a colleague that the group may write counts as the group's."""
    path = write_with_helpers(tmp_path / "shared")
    path.chmod(0o664)
    if mode == 0o2775:
        os.chown(path.parent, 65534, os.getgid())
    path.parent.chmod(mode)
    own = [own_point(f"{path}:Tiny")]
    check_models(own, tmp_path)
    assert path in find_code(own, tmp_path)


def test_the_files_that_will_run_are_those_of_the_models_and_of_what_they_import_beside_them(tmp_path: Path) -> None:
    path = write_with_helpers(tmp_path)
    names = ["helper.py", "package/__init__.py", "package/part.py", "tiny.py"]
    assert find_code([own_point(f"{path}:Tiny")], Path("/")) == [tmp_path / name for name in names]
    assert find_code([own_point("tiny:Tiny")], tmp_path) == [tmp_path / name for name in names]
    assert find_code([own_point("package.part:WIDTH")], tmp_path) == [tmp_path / "package" / "part.py"]
    assert find_code([make_spec(), make_spec(model="gpt", dataset=None, input="synthetic")], tmp_path) == []


def test_a_class_that_the_file_imports_or_makes_is_left_to_the_ranks(tmp_path: Path) -> None:
    """Nothing of the user's is imported: these files could not be."""
    for text in ("from elsewhere import Tiny\n", "Tiny = make()\n", "from elsewhere import *\n"):
        path = write_model(tmp_path, text)
        check_models([own_point(f"{path}:Tiny")], tmp_path)
    write_model(tmp_path, "Other = 1\n")
    with pytest.raises(CommandError):
        check_models([own_point(f"{path}:Tiny")], tmp_path)


def test_the_models_of_torchvision_are_those_of_the_installed_one() -> None:
    models = {"resnet50", "vit_b_16", "inception_v3"}
    others = {"fasterrcnn_resnet50_fpn", "raft_large", "handle_legacy_interface"}
    assert {name.removeprefix("torchvision:") for name in torchvision_models()} & (models | others) == models
