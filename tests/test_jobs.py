import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import Command, assert_refused, run_program, succeeded, without_slurm
from factories import ROOT, assert_says

from pipeline.jobfile import render_job
from pipeline.plan.grid import expand_grid, load_grid_file

JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.sbatch"))


def text_of(name: str) -> str:
    return (ROOT / "jobs" / f"{name}.sbatch").read_text()


def options_of(name: str) -> dict[str, str]:
    """The #SBATCH lines: long name -> value."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text_of(name), re.MULTILINE)
    assert len(lines) == text_of(name).count("#SBATCH"), "a line that Slurm would not read"
    return dict(lines)


def test_each_of_the_four_questions_the_study_and_int8_have_a_job_file() -> None:
    assert JOBS == ["q1", "q2", "q3", "q4", "q4-study", "quantize"]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_file_is_what_its_grid_renders(name: str) -> None:
    assert text_of(name) == render_job(name)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_asks_for_the_largest_shape_of_its_grid_has_an_element_a_point_and_is_not_requeued(name: str) -> None:
    points, asked = expand_grid(name).points, load_grid_file(name).resources
    num_gpus = max(spec.num_gpus for spec in points)
    options = options_of(name)
    assert options.pop("gpus-per-node", None) == (None if name == "quantize" else str(num_gpus))  # which needs no GPU
    own = {"job-name", "output"}
    assert {option: value for option, value in options.items() if option not in own} == {
        **{"array": f"0-{len(points) - 1}", "nodes": "1", "ntasks-per-node": "1"},
        **{
            "cpus-per-task": str(asked.cpus_per_gpu * num_gpus),
            "mem": f"{asked.mem_per_gpu_gib * num_gpus * 1024:.0f}M",
        },
        **{"time": str(asked.time_min()), "no-requeue": "", "open-mode": "append"},
    }


@pytest.mark.parametrize("name", JOBS)
def test_a_job_whose_smaller_points_hold_more_gpus_than_they_use_says_so(name: str) -> None:
    num_gpus = [spec.gpus_per_node for spec in expand_grid(name).points]
    assert {"q4": {1, 4}, "q1": {1}}.get(name, {*num_gpus}) == {*num_gpus}, "some job is wasteful and some is not"
    held = f"holds {max(num_gpus)} GPUs a node for every configuration, also for those that use {min(num_gpus)}"
    cure = f"ddpscale submit --grid {name}` asks for one array a shape"
    comment = " ".join(line.removeprefix("# ") for line in text_of(name).splitlines() if line.startswith("# "))
    assert [words in comment for words in (held, cure)] == [min(num_gpus) < max(num_gpus)] * 2


@pytest.mark.parametrize("name", JOBS)
def test_a_job_ends_with_its_first_dead_rank_and_hands_its_cpus_to_srun_and_every_argument_to_launch_quoted(
    name: str,
) -> None:
    assert_says(
        text_of(name),
        "set -euo pipefail",
        '--cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"',
        "--kill-on-bad-exit=1",
        "${PIPELINE_PYTHON:-.venv/bin/python}",
        f'-m pipeline.launch \\\n    --grid {name} --index "${{SLURM_ARRAY_TASK_ID:-0}}" "$@"\n',
    )


@pytest.mark.parametrize("name", JOBS)
def test_shellcheck_finds_nothing_in_a_job(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    answer = run_program("shellcheck", ROOT / "jobs" / f"{name}.sbatch")
    assert answer.returncode == 0, answer.stdout


def test_the_command_prints_the_job_file_and_refuses_a_grid_that_is_not_shipped(pipeline: Command) -> None:
    assert pipeline("jobfile", "q4").stdout == text_of("q4")
    assert_refused(pipeline("jobfile", "q9"), 2, "unknown grid 'q9'")


def grid_of_job(text: str) -> str:
    """What the script's shell hands to launch as the grid."""
    words = shlex.split(text[text.index("exec srun") :].replace("\\\n", " "))
    return words[words.index("--grid") + 1]


@pytest.mark.parametrize("name", ["mine.yaml", "it's $(touch canary); mine.yaml"])
def test_the_job_of_a_grid_elsewhere_names_its_path(pipeline: Command, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text((ROOT / "templates/grids/q4.yaml").read_text().replace("name: q4", "name: mine"))
    text = pipeline("jobfile", path).stdout
    assert ("#SBATCH --job-name=mine\n" in text, grid_of_job(text)) == (True, str(path))
    assert "canary" not in succeeded(run_program("bash", "-n", input=text)).stderr
    assert len(load_grid_file(grid_of_job(text)).points) == len(load_grid_file("q4").points)


def test_the_job_of_a_grid_of_the_repository_names_it_from_the_root(pipeline: Command) -> None:
    path = ROOT / "templates/grids/q4.yaml"
    for given in (str(path), os.path.relpath(path, ROOT)):
        assert grid_of_job(pipeline("jobfile", given).stdout) == "./templates/grids/q4.yaml"


def test_a_job_requests_what_a_submitted_array_does(pipeline: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nbase: {device: cpu, dataset: synthetic, input: synthetic, batch_size_per_gpu: 8}\n"
        "points:\n  - {strategy: [ddp], num_gpus: [2]}\n"
        'resources: {cpus_per_gpu: 3, mem_per_gpu_gib: 1.5, time: "00:02:00"}\n'
    )
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", pipeline("jobfile", path).stdout, re.MULTILINE))
    submit = ("submit", "--grid", path, "--dry-run", "--json", "--cluster", "slurm", "--outputs", tmp_path)
    (array,) = json.loads(pipeline(*submit, env=without_slurm(tmp_path)).stdout)["arrays"]
    own = {"job-name": "mine", "array": "0-0", "output": "outputs/%x-%A_%a-%N.log"}
    assert options == array["resources"] | own
    assert "gpus-per-node" not in options


def test_a_description_stays_a_comment_and_a_path_of_several_lines_is_refused(
    pipeline: Command, tmp_path: Path
) -> None:
    text = (ROOT / "templates/grids/q4.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(
        re.sub(r"^description: .*$", r'description: "a\\n#SBATCH --wrap=id\\ntouch canary"', text, flags=re.M)
    )
    assert "\n# a #SBATCH --wrap=id touch canary\n" in pipeline("jobfile", path).stdout
    for name, reason in (("two\nlines.yaml", "has a control character"), ("zero\u200bwidth.yaml", "cannot be printed")):
        shutil.copy(path, tmp_path / name)
        assert_refused(pipeline("jobfile", tmp_path / name), 2, reason)
