"""What a dry run prints of the arrays that a submission would make."""

import json
from pathlib import Path

from conftest import Command, without_slurm


def test_a_dry_run_shows_the_batch_script_of_every_array(pipeline: Command, tmp_path: Path) -> None:
    arguments = ("--grid", "scaling", "--dry-run", "--cluster", "slurm", "--partition", "a100", "--max-parallel", "3")
    text = pipeline("submit", *arguments, "--time", "01:00:00", env=without_slurm(tmp_path)).stdout
    for line in (
        "--partition=a100",
        "--array=0-4%3",
        "--array=0-9%3",
        "--time=60",
        "--no-requeue",
        "--gpus-per-node=4",
    ):
        assert f"#SBATCH {line}\n" in text
    assert text.count("#!/bin/bash") == text.count("--kill-on-bad-exit=1") == 3


def test_a_dry_run_shows_which_points_share_an_element_and_their_limit(pipeline: Command, tmp_path: Path) -> None:
    arguments = ("submit", "--grid", "scaling", "--dry-run", "--cluster", "slurm", "--points-per-element", "4")
    plan = json.loads(pipeline(*arguments, "--json", env=without_slurm(tmp_path)).stdout)
    assert [[len(element) for element in array["elements"]] for array in plan["arrays"]] == [
        [4, 1],
        [4, 4, 4, 2],
        [4, 4, 2],
    ]
    text = pipeline(*arguments, env=without_slurm(tmp_path)).stdout
    assert text.count("limit 4 x 20 = 80 min") == text.count("#SBATCH --time=80\n") == 3
    assert f"  one after another: {', '.join(plan['arrays'][0]['elements'][0])}\n" in text
    assert "--run-id '$RUN_ID_4' --data" in text
    assert text.count("--point-limit-s 1200\n") == 3  # 20 minutes
    alone = pipeline(*arguments[:-1], "1", env=without_slurm(tmp_path)).stdout
    assert "--point-limit-s" not in alone


def test_a_dry_run_shows_the_lanes_of_one_gpu_points_and_leaves_other_shapes_alone(
    pipeline: Command, tmp_path: Path
) -> None:
    arguments = ("submit", "--grid", "scaling", "--dry-run", "--cluster", "slurm", "--points-per-element", "4")
    plain = json.loads(pipeline(*arguments, "--json", env=without_slurm(tmp_path)).stdout)
    plan = json.loads(pipeline(*arguments, "--side-by-side", "2", "--json", env=without_slurm(tmp_path)).stdout)
    one_gpu, last_point, *others = plan["arrays"]
    assert [array["elements"] for array in others] == [array["elements"] for array in plain["arrays"][1:]]
    assert [array["resources"] for array in others] == [array["resources"] for array in plain["arrays"][1:]]
    assert (one_gpu["num_lanes"], len(one_gpu["elements"][0])) == (2, 4)
    assert (last_point["num_lanes"], len(last_point["elements"][0])) == (1, 1)  # which has nothing beside it
    assert "--gpus-per-node=1\n" in last_point["sbatch"]
    assert "--gpus-per-node=2\n" in one_gpu["sbatch"]
    assert "--lanes 2 " in one_gpu["sbatch"]
    text = pipeline(*arguments, "--side-by-side", "2", env=without_slurm(tmp_path)).stdout
    assert f"  in 2 lanes: {', '.join(one_gpu['elements'][0])}\n" in text
    assert text.count("up to 4 points in 2 lanes an element, limit 6 x 20 = 120 min with the proof\n") == 1
    assert "at most" not in text  # where the proof fails a point of one GPU holds two
