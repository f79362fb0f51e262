"""`run`: a script that nobody changed is measured on CPU processes, and one that does something else is refused."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT, Command, run_program, without_slurm
from factories import measurement_of, records_of

from pipeline.records.folder import find_experiments
from pipeline.records.record import Record

SCRIPT = ROOT / "docs" / "examples" / "script" / "train.py"
SHORT = ("--updates", "6", "--warmup", "2", "--set", "windows=2", "epochs=3")
IGNORES = """
import torch
from torch import nn
data = torch.utils.data.TensorDataset(torch.randn(4096, 4))
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (batch,) in torch.utils.data.DataLoader(data, batch_size=12):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


def run_script(folder: Path, *words: str | Path) -> tuple[int, str, list[Record]]:
    """Run the command in a folder; return its exit code, all that it said, and the records."""
    command = [sys.executable, "-m", "pipeline.run", "--cluster", "local", *words]
    answer = run_program(*command, cwd=folder, env=without_slurm(folder, PYTHONPATH=str(ROOT)))
    found = [record for experiment in find_experiments(folder).values() for record in records_of(experiment)]
    return answer.returncode, answer.stdout + answer.stderr, found


@pytest.mark.training
def test_a_script_is_measured_unchanged_on_one_and_two_processes(tmp_path: Path) -> None:
    words = ("--num-gpus", "1,2", "--batch-size", "32", *SHORT, "--", SCRIPT, "--batch-size", "{batch_size_per_gpu}")
    code, said, records = run_script(tmp_path, *words)
    assert code == 0, said
    assert "train.py on 1 to 2 CPU processes" in said
    assert "samples/s" in said
    one, two = sorted(records, key=lambda record: record.spec.num_gpus)
    script = measurement_of(two).script
    assert script is not None
    assert (script.world_size, script.wrappers, script.batch_size) == (2, ("DistributedDataParallel",), 32)
    assert script.command[1:] == ("--batch-size", "32")
    epochs = measurement_of(two).epochs
    assert [len(epoch.ranks) for epoch in epochs] == [2, 2, 2]
    assert [epoch.num_samples for epoch in epochs[1:]] == [2 * 32 * 3] * 2
    assert all(rank.optimizer_ns and rank.data_time_ns for epoch in epochs for rank in epoch.ranks)
    alone = measurement_of(one).script
    assert alone is not None
    assert not alone.has_launcher_variables
    assert alone.num_warm_up_updates >= 4
    assert two.environment.model_digest


@pytest.mark.training
def test_a_script_that_ignores_the_batch_size_ends_with_both_numbers_before_the_others_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IGNORES)
    code, said, records = run_script(tmp_path, "--batch-size", "32,64", *SHORT, "--", "train.py")
    assert code == 1, said
    (record,) = records
    assert "asks for 32 samples an update on each GPU, and the loader of rank 0 gives 12" in record.reason
    assert "give batch_size_per_gpu=12" in record.reason


def test_a_dry_run_prints_the_commands_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IGNORES)
    code, said, records = run_script(
        tmp_path, "--batch-size", "8", "--dry-run", "-v", "--", "train.py", "--name", "a b"
    )
    assert (code, records) == (0, []), said
    assert "pipeline.launch --manifest" in said
    assert "1 point to run" in said
    assert not (tmp_path / "outputs").exists()


def test_without_a_script_or_a_batch_size_the_command_says_what_is_missing(pipeline: Command) -> None:
    assert "no script is given" in pipeline("run", "--batch-size", "4").stderr
    assert "give --batch-size" in pipeline("run", "--", "train.py").stderr
