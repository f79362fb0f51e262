"""The command of a script: its words, its placeholders, and the points that a grid makes of it."""

from pathlib import Path

import pytest

from pipeline.plan.grid import GridFile, expand_grid
from pipeline.plan.script import fill_command, place_script, placeholders_of, read_command, script_name
from pipeline.plan.spec import Spec
from pipeline.system.errors import CommandError

TRAIN = "import torch\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, which is the current one."""
    (tmp_path / "train it.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def points_of(script: str, **block: object) -> tuple[Spec, ...]:
    lists = {"num_gpus": [1, 2], "batch_size_per_gpu": [8], **{axis: [value] for axis, value in block.items()}}
    return expand_grid(GridFile("script", [lists], base={"script": script, "device": "cpu"})).points


def test_several_batch_sizes_of_a_script_that_is_not_told_which_are_refused(folder: Path) -> None:
    with pytest.raises(CommandError, match=r"not told which batch size \(8, 16\); write \{batch_size_per_gpu\}"):
        expand_grid(
            GridFile("script", [{"num_gpus": [1], "batch_size_per_gpu": [8, 16]}], base={"script": "'train it.py'"})
        )


def test_a_script_may_divide_its_batch_by_the_gpus_itself(folder: Path) -> None:
    blocks = [{"num_gpus": [1], "batch_size_per_gpu": [16]}, {"num_gpus": [2], "batch_size_per_gpu": [8]}]
    points = expand_grid(GridFile("script", blocks, base={"script": "'train it.py'"})).points
    assert [spec.batch_size_per_gpu for spec in points] == [16, 8]


def test_placeholders_are_filled_word_by_word_and_other_braces_stay() -> None:
    command = """train.py --b={batch_size_per_gpu} '{"lr": 0.1}' {{num_gpus}} 'a b' {}"""
    assert [*placeholders_of(command)] == ["batch_size_per_gpu"]
    filled = fill_command(command, {"batch_size_per_gpu": 8, "num_gpus": 2})
    assert filled == ({}, ["train.py", "--b=8", '{"lr": 0.1}', "{num_gpus}", "a b", "{}"])


def test_variables_before_a_script_are_those_of_its_environment(folder: Path) -> None:
    assert read_command("A=1 B='x y' train.py C=2") == ({"A": "1", "B": "x y"}, ["train.py", "C=2"])
    (spec, _) = points_of("NCCL_ALGO={model.algo} 'train it.py'", **{"model.algo": "Ring"})
    assert spec.script_command == ({"NCCL_ALGO": "Ring"}, [str(folder / "train it.py")])
    assert spec.model == "train it.py"


@pytest.mark.parametrize(
    ("command", "name"), [("src/train.py --x", "train.py"), ("-m package.train --x", "package.train")]
)
def test_the_name_of_a_script_is_that_of_its_file_or_module(command: str, name: str) -> None:
    assert script_name(command) == name


@pytest.mark.parametrize("command", ["", "-m", "torchrun train.py", "train.py 'open"])
def test_a_command_that_is_no_script_is_refused(command: str) -> None:
    with pytest.raises(ValueError, match="script"):
        read_command(command)


def test_a_grid_of_a_script_states_only_what_a_script_has(folder: Path) -> None:
    one, two = points_of("'train it.py' --batch {global_batch_size}")
    assert (one.strategy, two.strategy, one.model) == ("single", "ddp", "train it.py")
    assert (one.precision, one.input, one.num_workers, one.dataset, one.epochs) == (None, None, None, None, 21)
    assert two.script_command.words == [str(folder / "train it.py"), "--batch", "16"]
    assert place_script(str(two.script), Path("/elsewhere")) == two.script


@pytest.mark.parametrize(
    ("script", "block", "words"),
    [
        ("absent.py", {}, "absent.py is no file"),
        (
            "'train it.py' {batch_size}",
            {},
            "{batch_size}; use {batch_size_per_gpu}, {global_batch_size}",
        ),
        ("'train it.py'", {"model.size": 4}, "model.size fills no placeholder"),
        ("'train it.py'", {"evaluate": True}, "evaluate=True does nothing for a script"),
        ("'train it.py'", {"precision": "bf16"}, "write {precision} into script"),
        ("'train it.py'", {"model": "lenet"}, "leave model out"),
    ],
)
def test_what_a_script_cannot_have_is_refused(folder: Path, script: str, block: dict[str, object], words: str) -> None:
    with pytest.raises(CommandError) as refused:
        points_of(script, **block)
    assert words in str(refused.value)


def test_a_script_that_is_not_python_is_refused_with_its_line(folder: Path) -> None:
    (folder / "broken.py").write_text("import torch\nfor\n")
    with pytest.raises(CommandError, match=r"broken\.py, line 2"):
        points_of("broken.py")


def test_axes_of_scripts_are_refused_without_one() -> None:
    with pytest.raises(ValueError, match="updates=5 is an axis of scripts"):
        Spec(strategy="single", num_gpus=1, batch_size_per_gpu=8, updates=5)
