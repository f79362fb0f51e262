import os

import pytest

from pipeline.submission.slurm_queries import clean_environment, run_slurm

COMMANDS = ("SBATCH", "SRUN", "SALLOC", "SQUEUE", "SACCT", "SINFO", "SCONTROL", "SCANCEL", "SLURM", "SLURMD")
REMOVED = [*(f"{command}_X" for command in COMMANDS), "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"]
KEPT = ["SLURM_CONF", "SLURM_JWT", "SBATCHES", "NCCL_DEBUG"]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*REMOVED, *KEPT):
        monkeypatch.setenv(name, "set")


def test_variables_of_slurm_commands_and_ranks_are_hidden_for_a_while() -> None:
    with clean_environment():
        assert [name for name in (*REMOVED, *KEPT) if name in os.environ] == KEPT
    assert all(os.environ[name] == "set" for name in (*REMOVED, *KEPT))


def test_a_slurm_command_does_not_get_them() -> None:
    found = run_slurm("env").stdout.splitlines()
    assert [name for name in (*REMOVED, *KEPT) if f"{name}=set" in found] == KEPT
