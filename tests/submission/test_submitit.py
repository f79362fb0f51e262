"""What is used of submitit's inside. setup.cfg admits the versions that these tests were run with."""

import contextlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import submitit
from conftest import wait_for
from factories import make_spec
from submitit.core import utils
from submitit.slurm import slurm

from pipeline.experiment.resources import Resources, ResourceShape
from pipeline.submission.batch_script import submitit_parameters
from pipeline.submission.slurm_request import SlurmOptions, build_request
from pipeline.submission.slurm_submit import PICKLE

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


def test_a_pickle_of_a_delayed_submission_is_what_a_job_loads_by_its_id(executor: submitit.SlurmExecutor) -> None:
    """Both names are made by the `ln` line of the batch script, in place of submitit after sbatch has returned."""
    folder = Path(executor.folder)
    assert executor.submit(os.getpid).paths.submitted_pickle == folder / "7_submitted.pkl"
    assert utils.JobPaths(folder, "7_2").submitted_pickle == folder / "7_2_submitted.pkl"
    utils.DelayedSubmission(make_spec, "x").dump(folder / PICKLE)
    delayed = utils.DelayedSubmission.load(folder / PICKLE)
    assert (delayed.function, delayed.args) == (make_spec, ("x",))


def test_a_job_waits_for_its_pickle(tmp_path: Path) -> None:
    """A file system may show the link late; and `submit` itself renames a pickle over it while the job may begin."""
    job = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    job |= {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "here"}
    command = [sys.executable, "-u", "-m", "submitit.core._submit", str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, **job}, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("Loading pickle" in line for line in process.stdout)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
            utils.DelayedSubmission(os.getpid).dump(tmp_path / PICKLE)
            (tmp_path / "7_submitted.pkl").hardlink_to(tmp_path / PICKLE)
            assert wait_for(lambda: process.poll() is not None, timeout_s=20)
            assert process.returncode == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
