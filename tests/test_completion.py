"""The completion scripts, in the shells that read them."""

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Command, assert_refused, succeeded, without_slurm

from pipeline.__main__ import COMMANDS
from pipeline.experiment.grid import shipped_grids

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p ddpscale); function=${function#*-F }; ${function%% *}
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from conftest import run_command

    path = tmp_path_factory.mktemp("completion") / "ddpscale.bash"
    path.write_text(succeeded(run_command("completion", "bash")).stdout)
    return path


def offered(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last word, in this folder."""
    command = ["bash", "--norc", "-c", COMPLETE, "bash", str(script), "ddpscale", *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert answer.stderr == ""
    return {line.strip() for line in answer.stdout.splitlines() if line.strip()}


def test_bash_completes_commands_options_choices_and_grids(script: Path, tmp_path: Path) -> None:
    assert offered(script, tmp_path, "") >= set(COMMANDS)
    assert offered(script, tmp_path, "submit", "--par") == {"--partition"}
    assert offered(script, tmp_path, "submit", "--cluster", "") == {"auto", "slurm", "local"}
    assert "time_to_target" in offered(script, tmp_path, "collect", "--only", "t")


def test_in_a_folder_without_grids_the_shipped_ones_are_offered_and_in_another_its_files_too(
    script: Path, tmp_path: Path
) -> None:
    assert offered(script, tmp_path, "submit", "--grid", "") == set(shipped_grids())
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "notes.txt").touch()
    assert offered(script, tmp_path, "submit", "--grid", "") == {*shipped_grids(), "mine.yaml"}
    assert offered(script, tmp_path, "submit", "--grid", "sca") == {"scaling"}


def test_the_script_of_zsh_loads_and_names_every_command(pipeline: Command, tmp_path: Path) -> None:
    answer = pipeline("completion", "zsh")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("#compdef ddpscale")
    assert all(f"{name}) _arguments" in answer.stdout for name in COMMANDS)
    if zsh := shutil.which("zsh"):
        (tmp_path / "script").write_text(answer.stdout)
        load = f'autoload -U compinit; compinit -D; eval "$(<{tmp_path / "script"})"; print $_comps[ddpscale]'
        loaded = subprocess.run([zsh, "-f", "-c", load], capture_output=True, text=True, timeout=60)
        assert (loaded.returncode, loaded.stderr, loaded.stdout) == (0, "", "_shtab_ddpscale\n")


def test_without_shtab_a_sentence_says_what_to_install(pipeline: Command, tmp_path: Path) -> None:
    answer = pipeline("completion", "bash", env={**without_slurm(tmp_path), "HIDDEN_PACKAGE": "shtab"})
    assert_refused(answer, 2, "needs the package 'shtab'", "-e '.[shtab]'")


def test_a_shell_without_a_script_is_refused(pipeline: Command) -> None:
    assert_refused(pipeline("completion", "fish"), 2, "bash", "zsh")
