"""What a dry run prints of the arrays that a submission would make."""

import json
import shlex
from pathlib import Path

import pytest
from conftest import Command, without_slurm
from factories import (
    PLANNED,
    ROOT,
    SMALLEST,
    assert_says,
    write_grid,
    write_model,
)

from pipeline.plan.grid import expand_grid
from pipeline.plan.resources import pack_elements


def test_a_dry_run_shows_the_batch_script_of_every_array(pipeline: Command, tmp_path: Path) -> None:
    arguments = ("--grid", "scaling", "--dry-run", "--cluster", "slurm", "--partition", "a100", "--max-parallel", "3")
    text = pipeline("submit", *arguments, "-v", "--time", "01:00:00", env=without_slurm(tmp_path)).stdout
    arrays = ("array=0-9%3", "array=0-19%3")
    options = ("partition=a100", *arrays, "time=60", "no-requeue", "gpus-per-node=4")
    assert_says(text, *(f"#SBATCH --{option}\n" for option in options))
    assert text.count("#!/bin/bash") == text.count("--kill-on-bad-exit=1") == 3


@pytest.mark.parametrize(
    ("cluster", "arrays"),
    [("slurm", ["array 0: 10 elements", "array 1: 28 elements", "array 2: 20 elements"]), ("local", [])],
)
def test_a_dry_run_is_the_points_by_shape_the_hours_and_the_arrays_and_no_line_a_point(
    pipeline: Command, tmp_path: Path, cluster: str, arrays: list[str]
) -> None:
    arguments = ("submit", "--grid", "scaling", "--dry-run", "--cluster", cluster, "--outputs", tmp_path)
    env = without_slurm(tmp_path, CUDA_VISIBLE_DEVICES="")
    first, *lines = pipeline(*arguments, env=env).stdout.splitlines()
    assert first == f"58 configurations to run, {cluster}, into {tmp_path / 'scaling'}"
    assert lines[:3] == ["  10 on 1 node x 1 GPU", "  28 on 1 node x 2 GPUs", "  20 on 1 node x 4 GPUs"]
    assert [line.partition(":")[0] for line in lines[3:5]] == ["GPU-hours unknown", "time of 58 configurations unknown"]
    assert lines[5:-1] == arrays
    long = pipeline(*arguments, "-v", env=env).stdout.splitlines()
    assert long[:6] == [first, *lines[:5]]
    plan = json.loads(pipeline(*arguments, "--json", env=env).stdout)
    assert [line.split()[0] for line in long[7 : 7 + 58]] == [point["run_id"] for point in plan["points"]]


def test_a_dry_run_names_every_file_whose_code_will_run(pipeline: Command, tmp_path: Path) -> None:
    write_model(tmp_path, "WIDTH = 4\n", name="sizes.py")
    write_model(tmp_path / "mal", "import sizes\n" + SMALLEST)
    write_model(tmp_path / "mal", "WIDTH = 4\n", name="sizes.py")
    prologue = write_model(tmp_path, "module load cuda\n", name="site.sh")
    text = PLANNED.replace("dataset: synthetic, ", "").replace("model: lenet", 'model: "../mal/tiny.py:Tiny"')
    (tmp_path / "grids").mkdir()
    grid = write_grid(tmp_path / "grids", text)
    command = ("submit", "--grid", grid, "--dry-run", "--cluster", "slurm", "--prologue", prologue)
    said = pipeline(*command, env=without_slurm(tmp_path)).stdout.splitlines()
    files = [str(path) for path in (prologue, tmp_path / "mal" / "sizes.py", tmp_path / "mal" / "tiny.py")]
    assert [line for line in said if line.startswith("runs the code of")] == [
        f"runs the code of {path}" for path in files
    ]
    assert json.loads(pipeline(*command, "--json", env=without_slurm(tmp_path)).stdout)["code"] == files


def test_a_dry_run_shows_which_points_share_an_element_and_their_limit(pipeline: Command, tmp_path: Path) -> None:
    arguments = ("submit", "--grid", "scaling", "--dry-run", "--cluster", "slurm", "--points-per-element", "4")
    plan = json.loads(pipeline(*arguments, "--json", env=without_slurm(tmp_path)).stdout)
    assert [[len(element) for element in array["elements"]] for array in plan["arrays"]] == [
        [4, 4, 2],
        [4] * 7,
        [4] * 5,
    ]
    text = pipeline(*arguments, "-v", env=without_slurm(tmp_path)).stdout
    assert text.count("limit 4 x 20 = 80 min") == text.count("#SBATCH --time=80\n") == 3
    assert f"  one after another: {', '.join(plan['arrays'][0]['elements'][0])}\n" in text
    assert text.count(" --tasks ") == text.count(" --sha256 ") == 3


def test_repeats_are_added_to_any_grid_and_the_first_is_the_point_itself(pipeline: Command, tmp_path: Path) -> None:
    arguments = ("submit", "--grid", "smoke", "--dry-run", "--json", "--outputs", tmp_path)
    once, thrice = (
        json.loads(pipeline(*arguments, *more, env=without_slurm(tmp_path)).stdout)["points"]
        for more in ((), ("--repeats", "3"))
    )
    ids = {point["run_id"] for point in thrice}
    assert len(ids) == len(thrice) == 3 * len(once)
    assert {point["run_id"] for point in once} < ids


def test_without_slurm_a_dry_run_shows_the_commands_that_would_run(pipeline: Command, tmp_path: Path) -> None:
    grid = ("submit", "--grid", "smoke", "--set", "device=cpu", "--outputs", tmp_path, "--cluster", "local")
    answer = pipeline(*grid, "--dry-run", "-v")
    assert "#SBATCH" not in answer.stdout
    plan = json.loads(pipeline(*grid, "--dry-run", "--json").stdout)
    commands = [line for line in answer.stdout.splitlines() if " -m pipeline.launch " in line]
    assert commands == plan["commands"]
    ran = [element[0].run_id() for element in pack_elements(expand_grid("smoke", ["device=cpu"]).points, 1)]
    assert [shlex.split(line)[-3:] for line in commands] == [[run_id, "--data", str(ROOT / "data")] for run_id in ran]
    assert sorted(ran) == sorted(point["run_id"] for point in plan["points"])
    assert "Next: the same command without --dry-run" in answer.stderr
