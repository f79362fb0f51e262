"""What is used of submitit's inside. setup.cfg admits the versions that these tests were run with."""

import inspect
import os
from pathlib import Path

import pytest
import submitit
from submitit.slurm import slurm

from pipeline.experiment.resources import Resources, ResourceShape
from pipeline.submission.batch_script import submitit_parameters
from pipeline.submission.slurm_request import SlurmOptions, build_request

NAMED = SlurmOptions("main", "account", "qos", "constraint", exclusive=True, gpu_type="a40")
REQUEST = build_request(ResourceShape("cuda", 1, 4), Resources(), NAMED, None, None)


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> submitit.SlurmExecutor:
    """submitit's executor with our parameters; its sbatch takes every job as 7."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    (sbatch.parent / "srun").symlink_to("sbatch")
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    found = submitit.SlurmExecutor(tmp_path / "array")
    found.update_parameters(**submitit_parameters("name", REQUEST, 3, ["true"]))
    return found


def test_submitit_takes_every_parameter_that_a_request_becomes() -> None:
    known = set(inspect.signature(slurm._make_sbatch_string).parameters)
    gres = build_request(ResourceShape("cuda", 1, 4), Resources(), SlurmOptions(gres=True), None, None)
    for request in (REQUEST, gres):
        assert set(submitit_parameters("name", request, 3, [])) <= known


def test_map_count_makes_an_array_of_one_submission(executor: submitit.SlurmExecutor) -> None:
    executor.parameters["map_count"] = 3
    executor.submit(os.getpid)
    assert "#SBATCH --array=0-2%3\n" in (Path(executor.folder) / "7_submission.sh").read_text()


def test_the_command_of_an_element_is_ours_before_arguments_of_submitits(
    executor: submitit.SlurmExecutor,
) -> None:
    """pipeline.runner.array_element has no use for them; a job loads no pickle."""
    executor.python = "our command"
    executor.submit(int)
    *_, line = (Path(executor.folder) / "7_submission.sh").read_text().rstrip().splitlines()
    assert line.endswith(f" our command -u -m submitit.core._submit {executor.folder}")
    assert list(inspect.signature(submitit.SlurmExecutor).parameters)[-1] == "python"


def test_a_folder_whose_job_has_an_id_has_a_file_that_begins_with_it(executor: submitit.SlurmExecutor) -> None:
    """By such a file `submit` tells an array that Slurm has taken from one that it can withdraw."""
    assert executor.submit(int).job_id == "7"
    assert sorted(path.name for path in Path(executor.folder).glob("[0-9]*_*")) == [
        "7_submission.sh",
        "7_submitted.pkl",
    ]
