"""An array element runs the command that `submit` wrote for it, and nothing that somebody else has put in its place."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import pytest

from pipeline.runner import array_element
from pipeline.system.errors import CommandError

COMMANDS = [["/bin/echo", "first"], ["/bin/echo", "second", "\udcff"]]  # a path need not be UTF-8
RAW = array_element.encode_commands(COMMANDS)
SHA256 = hashlib.sha256(RAW).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "7_1_elements.json").write_bytes(RAW)
    return tmp_path / "7_1_elements.json"


@pytest.mark.parametrize("index", [0, 1])
def test_an_element_runs_the_command_of_its_index_and_ignores_what_submitit_adds(
    file: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: became.append((path, command)))
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
    monkeypatch.setattr(sys, "argv", ["", SHA256, str(file), "-u", "-m", "submitit.core._submit", str(file.parent)])
    array_element.main()
    assert became == [("/bin/echo", COMMANDS[index])]


def test_the_only_element_is_a_job_without_an_array(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    raw = array_element.encode_commands(COMMANDS[:1])
    file.write_bytes(raw)
    assert array_element.read_command(file, hashlib.sha256(raw).hexdigest()) == COMMANDS[0]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("2", r"SLURM_ARRAY_TASK_ID=2, but the elements of this array are 0 to 1; submit again"),
        ("-1", r"SLURM_ARRAY_TASK_ID='-1' is no number of Slurm's; leave it to Slurm, and submit again"),
        ("1x", "SLURM_ARRAY_TASK_ID='1x' is no number"),
        ("9" * 5000, "SLURM_ARRAY_TASK_ID='9{100}' is no number"),
        ("", "SLURM_ARRAY_TASK_ID='' is no number"),
        (None, "SLURM_ARRAY_TASK_ID='' is no number"),
    ],
)
def test_an_index_that_is_none_of_the_array_is_refused_in_a_sentence(
    file: Path, monkeypatch: pytest.MonkeyPatch, index: str | None, said: str
) -> None:
    if index is None:
        monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    else:
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", index)
    with pytest.raises(CommandError, match=said):
        array_element.read_command(file, SHA256)


@pytest.mark.fault("F43")
@pytest.mark.parametrize("raw", [RAW + b"\n", RAW.replace(b"first", b"fiRst"), json.dumps([["/bin/rm"]]).encode(), b""])
def test_a_file_that_was_changed_is_refused_by_its_digest(file: Path, raw: bytes) -> None:
    file.write_bytes(raw)
    with pytest.raises(CommandError, match=r"elements\.json was changed after submit wrote it; .* submit again"):
        array_element.read_command(file, SHA256)


@pytest.mark.fault("F43")
@pytest.mark.parametrize("kind", ["link", "fifo", "huge"])
def test_what_is_no_file_of_a_usual_size_is_refused_at_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file.rename(file.with_name("same bytes"))
    if kind == "link":
        file.symlink_to("same bytes")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        monkeypatch.setattr(array_element, "MAX_FILE_BYTES", len(RAW) - 1)
        file.write_bytes(RAW)
    said = {"link": "is a link", "fifo": "is not a regular file", "huge": "bytes, more than"}[kind]
    with pytest.raises(CommandError, match=said):
        array_element.read_command(file, SHA256)


def test_an_element_waits_for_a_file_that_the_file_system_shows_late(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.rename(file.with_name("hidden"))
    waits: list[float] = []

    def show_after_three_looks(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            file.with_name("hidden").rename(file)

    monkeypatch.setattr(time, "sleep", show_after_three_looks)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert array_element.read_command(file, SHA256) == COMMANDS[0]
    assert len(waits) == 3
    file.unlink()
    monkeypatch.setattr(array_element, "VISIBLE_LIMIT_S", 0)
    with pytest.raises(CommandError, match="cannot be read: No such file or directory"):
        array_element.read_command(file, SHA256)
