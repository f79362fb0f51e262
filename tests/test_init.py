"""init: a class that runs as it is, and no file of the user's replaced."""

from pathlib import Path

import pytest
from conftest import Command, assert_refused, run_here
from factories import assert_says

from pipeline.init import write_workload


def test_the_class_is_refused_by_nothing_and_its_next_command_plans_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("init", f"{tmp_path / 'mine.py'}:GPT") == 0
    check, submit = (line.partition(": ")[2].split() for line in capsys.readouterr().out.splitlines()[1:])
    assert_says((tmp_path / "mine.py").read_text(), "class GPT(Workload):", "def dataset(self)")
    assert check[:3] == ["python", "-m", "pipeline.check"]
    assert run_here("check", *check[3:]) == 0
    assert_says(capsys.readouterr().out, "Nothing is refused", "optimizer, dataset.")
    assert run_here("submit", *submit[3:], "--dry-run", "--cluster", "local", "--outputs", tmp_path) == 0
    assert_says(capsys.readouterr().out, "configurations to run")


def test_without_a_name_it_is_workload_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_workload("workload.py:Training") == Path("workload.py")
    assert "class Training(Workload):" in (tmp_path / "workload.py").read_text()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{folder}/mine.py:A", "mine.py exists; choose another name, or remove it."),
        ("mine", "'mine' names no file and class; write FILE.py:CLASS"),
        ("mine.py:", "names no file and class"),
        ("mine.py:a-b", "names no file and class"),
        ("mine.py:class", "names no file and class"),
        ("mine.py:nn", "names no file and class"),
        ("mine.txt:A", "names no file and class"),
        ("{folder}/torch.py:A", "torch.py has no name of its own for a module"),
        ("{folder}/my-model.py:A", "my-model.py has no name of its own"),
        ("{folder}/no/mine.py:A", "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(pipeline: Command, tmp_path: Path, model: str, said: str) -> None:
    (tmp_path / "mine.py").write_text("mine")
    assert_refused(pipeline("init", model.format(folder=tmp_path)), 2, said)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "mine"
