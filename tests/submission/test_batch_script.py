"""The shell lines of a batch script do what they say, also in a folder where somebody else may write."""

import os
import subprocess
from pathlib import Path

import pytest

from pipeline.submission import batch_script
from pipeline.submission.batch_script import Prologue, link_line, prologue_lines, setup_lines, start_lines

HOSTILE_NAME = "it's two words $(touch canary) `touch canary`; touch canary"
ENV = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}


def run_lines(folder: Path, *lines: str, locale: str = "C.UTF-8") -> subprocess.CompletedProcess[bytes]:
    """The lines as a job's shell runs them."""
    script = "\n".join([*start_lines(), *lines]) + "\n"
    return subprocess.run(
        ["bash"], input=script.encode(), cwd=folder, env=ENV | {"LC_ALL": locale}, capture_output=True
    )


@pytest.fixture
def prologue(tmp_path: Path) -> Prologue:
    """A prologue with a byte that is not UTF-8, a test that is false as its last line, and line breaks at its end."""
    path = tmp_path / HOSTILE_NAME / "prologue.sh"
    path.parent.mkdir()
    text = b"export WORD='caf\xe9'\nexport COUNT=$((COUNT + 1))\n[ -n \"${UNSET:-}\" ] && export OTHER=1\n\n\n"
    path.write_bytes(text)
    return Prologue(path, text)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_prologue_is_sourced_once_byte_by_byte(tmp_path: Path, prologue: Prologue, locale: str) -> None:
    after = 'printf "%s %s %s" "$WORD" "$COUNT" "${prologue-unset}"'
    done = run_lines(tmp_path, "export COUNT=0", *prologue_lines(prologue), after, locale=locale)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf\xe9 1 unset", b"")
    assert not (tmp_path / "canary").exists()


MODULE = 'module() { ls /absent 2>/dev/null; local found=$?; [ "$1" != broken ]; }\n'


@pytest.mark.parametrize(
    "text",
    [
        "if grep -q absent /dev/null; then echo no; fi",
        "grep -q absent /dev/null || true",
        "! grep -q absent /dev/null",
        '[ -n "${UNSET:-}" ] && export OTHER=1; :',
        "yes | head -1 >/dev/null",  # the pipe ends `yes` by a signal: as in the user's shell the last command counts
        "false | true",
        MODULE + "module load cuda",  # a command inside it fails
        "set -E\n" + MODULE + "module load cuda",
        "source ./site.sh",
        "set -E; source ./site.sh",
        "x=$UNSET",
        "false || export OTHER=1",
        "return 0; false",
    ],
)
def test_a_prologue_whose_own_lines_succeed_lets_the_job_go_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "site.sh").write_text("false\ngrep -q absent /dev/null\nfalse | true\n")
    path = tmp_path / "prologue.sh"
    path.write_text(text)
    after = 'echo "went on $-" $(set -o | grep pipefail) ${prologue_depth-}; trap -p ERR'
    done = run_lines(tmp_path, *prologue_lines(Prologue(path, text.encode())), after)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    went, on, flags, *options = done.stdout.decode().split()
    assert (went, on, {"e", "u"} < set(flags), options) == ("went", "on", True, ["pipefail", "on"])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("false\ntouch canary", "false"),
        (MODULE + "module load cuda\nmodule broken\ntouch canary", '[ "$1" != broken ] (line 3)'),
        ("source ./ends_false.sh\ntouch canary", "source ./ends_false.sh"),
        ("source ./absent.sh\ntouch canary", "source ./absent.sh"),
        ("WORD=$(grep absent /dev/null)\ntouch canary", "WORD=$(grep absent /dev/null)"),
        ("for word in a b; do ls /absent; done\ntouch canary", "ls /absent"),
        ("eval false\ntouch canary", "false"),
        ("(exit 3)\ntouch canary", "( exit 3 )"),
        ("true | false\ntouch canary", "false"),
        ("return 3\ntouch canary", ""),
    ],
)
def test_a_line_of_the_prologue_itself_that_fails_ends_the_job_and_is_named(
    tmp_path: Path, text: str, line: str
) -> None:
    (tmp_path / "ends_false.sh").write_text("true\nfalse\n")
    path = tmp_path / "prologue.sh"
    path.write_text(text)
    done = run_lines(tmp_path, *prologue_lines(Prologue(path, text.encode())), "touch canary")
    assert (done.returncode, f"the prologue failed: {line}" in done.stderr.decode()) == (1, True)
    assert not (tmp_path / "canary").exists()


@pytest.mark.fault("F43")
@pytest.mark.parametrize("added", [b"touch canary\n", b"#", b"\0"])
def test_nothing_of_a_prologue_that_was_changed_after_submit_runs(
    tmp_path: Path, prologue: Prologue, added: bytes
) -> None:
    lines = prologue_lines(prologue)
    prologue.path.write_bytes(prologue.text + added if added != b"\0" else b"\0touch canary\n" + prologue.text)
    done = run_lines(tmp_path, *lines, "touch canary")
    assert (done.returncode, b"prologue.sh was changed after submit read it; submit again" in done.stderr) == (1, True)
    prologue.path.unlink()
    assert run_lines(tmp_path, *lines, "touch canary").returncode != 0
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(("is_array", "name"), [(True, "7_1_elements.json"), (False, "7_elements.json")])
def test_an_element_has_its_own_link_to_the_commands_unless_submit_has_withdrawn_them(
    tmp_path: Path, is_array: bool, name: str
) -> None:
    commands = tmp_path / "elements.json"
    commands.write_text("[]")
    line = link_line(commands, is_array)
    for _ in range(2):  # also of an element that Slurm has queued again
        assert run_lines(tmp_path, line).returncode == 0
    assert os.path.samefile(tmp_path / name, commands)
    (tmp_path / name).unlink()
    commands.unlink()
    assert (run_lines(tmp_path, line, "touch canary").returncode != 0, os.listdir(tmp_path)) == (True, [])


@pytest.mark.fault("F43")
def test_where_the_commands_are_copied_the_copy_is_not_written_through_a_link(tmp_path: Path) -> None:
    commands, own = tmp_path / "elements.json", tmp_path / "profile"
    commands.write_text("[]")
    own.write_text("mine")
    (tmp_path / "7_elements.json").symlink_to(own)
    line = link_line(commands, is_array=False).replace("ln -f", "false")  # as on a file system without links
    assert run_lines(tmp_path, line).returncode == 0
    assert (own.read_text(), (tmp_path / "7_elements.json").read_text()) == ("mine", "[]")


@pytest.mark.fault("F36")
def test_the_folder_of_the_pipeline_reaches_pythonpath_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_script, "PYTHONPATH_ROOT", Path("/x") / HOSTILE_NAME)
    done = run_lines(tmp_path, "export PYTHONPATH=mine", *setup_lines("name", None), 'printf %s "$PYTHONPATH"')
    assert (done.stdout.decode(), done.stderr) == (f"/x/{HOSTILE_NAME}:mine", b"")
    assert list(tmp_path.iterdir()) == []
