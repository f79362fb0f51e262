"""What is used of submitit's inside. setup.cfg admits the versions that these tests were run with."""

import inspect
import os
from pathlib import Path

import pytest
import submitit
from factories import write_script

from pipeline.submission.slurm_submit import submit_array


def test_submitit_gives_our_script_to_sbatch_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = write_script(tmp_path / "bin" / "sbatch", f'cp "$1" {tmp_path}/sent', "echo Submitted batch job 7")
    (sbatch.parent / "srun").symlink_to("sbatch")
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    (tmp_path / "logs").mkdir()
    assert submit_array("x-0", "#!/bin/bash\nexec true\n", tmp_path / "logs") == "7"
    assert (tmp_path / "sent").read_text() == "#!/bin/bash\nexec true\n"
    assert list((tmp_path / "logs").iterdir()) == []


def test_the_two_methods_that_are_replaced_are_those_of_submitit() -> None:
    assert [*inspect.signature(submitit.SlurmExecutor._make_submission_file_text).parameters][1:] == ["command", "uid"]
    assert [*inspect.signature(submitit.SlurmExecutor._get_job_id_from_submission_command).parameters] == ["string"]
