"""The shell lines of a batch script do what they say, also in a folder where somebody else may write."""

import os
import subprocess
from pathlib import Path

import pytest
from factories import make_experiment, write_script

from pipeline.records.folder import SlurmArray, start_submission
from pipeline.submission import batch_script
from pipeline.submission.batch_script import render_array, render_script
from pipeline.submission.sbatch_options import SlurmRequest

HOSTILE_NAME = "it's two words $(touch canary) `touch canary`; touch canary"
ENV = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "PYTHONPATH": "mine"}


def run_script(
    folder: Path, prologue: str | None, srun: str, locale: str = "C.UTF-8"
) -> subprocess.CompletedProcess[bytes]:
    """The script with this prologue as a job's shell runs it, where `srun` is a script of these lines."""
    write_script(folder / "bin" / "srun", srun)
    names = {"launch_id": "sent", "root": "/x", "python": "python", "source": "--grid q4"}
    return subprocess.run(
        ["bash"],
        input=render_script({}, **names, prologue=prologue).encode(),
        cwd=folder,
        env=ENV | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "LC_ALL": locale},
        capture_output=True,
    )


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_prologue_is_sourced_once_byte_by_byte(tmp_path: Path, locale: str) -> None:
    """It has quotes, a test that is false as its last line, and line breaks at its end."""
    text = "export WORD='caf\u00e9 \\'\nexport COUNT=$((COUNT + 1))\n[ -n \"${UNSET:-}\" ] && export OTHER=1\n\n\n"
    done = run_script(tmp_path, text, 'printf "%s %s %s" "$WORD" "$COUNT" "$PYTHONSAFEPATH"', locale)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "caf\u00e9 \\ 1 1", b"")


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
    done = run_script(tmp_path, text, 'echo "went on" "${prologue_depth-}"')
    assert (done.returncode, done.stderr.decode(), done.stdout) == (0, "", b"went on \n")


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
    done = run_script(tmp_path, text, "touch canary")
    assert (done.returncode, f"the prologue failed: {line}" in done.stderr.decode()) == (1, True)
    assert not (tmp_path / "canary").exists()


@pytest.mark.fault("F43")
def test_the_script_holds_the_prologue_and_the_digest_of_the_task_list(tmp_path: Path) -> None:
    """Slurm keeps its own copy of both, whatever becomes of the folder."""
    experiment = make_experiment(tmp_path / "x")
    request, submission = SlurmRequest({"nodes": "1"}, 2, ()), start_submission("a" * 32, "slurm")
    array = SlurmArray("x-aaaaaaaa-0", [["p"], ["q"], ["r"]])
    script = render_array(experiment, submission, array, request, "5ha", "module load cuda\n")
    list_of_array = f"{tmp_path}/x/logs/{'a' * 32}/x-aaaaaaaa-0.json"
    assert "#SBATCH --array=0-2%2\n" in script
    assert "'module load cuda\n')" in script
    assert f"-m pipeline.launch \\\n    --tasks {list_of_array} --sha256 5ha --index " in script


@pytest.mark.fault("F36")
def test_the_folder_of_the_pipeline_reaches_pythonpath_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_script, "PYTHONPATH_ROOT", Path("/x") / HOSTILE_NAME)
    experiment = make_experiment(tmp_path / "x")
    submission, array = start_submission("a" * 32, "slurm"), SlurmArray("x-aaaaaaaa-0", [["p"]], is_array=False)
    script = render_array(experiment, submission, array, SlurmRequest({}, None, ()), "5ha", None)
    write_script(tmp_path / "bin" / "srun", 'printf %s "$PYTHONPATH"')
    env = ENV | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script.encode(), cwd=tmp_path, env=env, capture_output=True)
    assert (done.stdout.decode(), done.stderr) == (f"/x/{HOSTILE_NAME}:mine", b"")
    assert not (tmp_path / "canary").exists()


def test_a_job_file_that_bash_runs_says_that_sbatch_must(tmp_path: Path) -> None:
    job_file = Path(batch_script.__file__).parents[2] / "jobs" / "q4.sbatch"
    done = subprocess.run(
        ["bash", job_file], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("SLURM_ARRAY_JOB_ID: submit this file with sbatch\n")
