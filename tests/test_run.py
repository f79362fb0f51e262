"""`run`: a script that nobody changed is measured on CPU processes, and one that does something else is refused.

The example of the README: test_the_example_of_the_readme_is_measured_unchanged_on_one_and_two_processes.
"""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from bench_script import WEIGHTS, last_times_s, own_times_s
from conftest import ROOT, Command, run_command, run_program, without_slurm
from factories import assert_says, measurement_of, records_of, write_file
from import_hook import when_imported

import ddpscale
from pipeline import run
from pipeline.plan.grid import expand_grid
from pipeline.plan.spec import Spec
from pipeline.records.folder import Experiment, find_experiments
from pipeline.records.record import Record
from pipeline.system.errors import EXIT_USAGE

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
GAN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("cpu:gloo")
torch.manual_seed(0)
generator, critic = DDP(nn.Linear(8, 16)), DDP(nn.Linear(16, 1))
of_critic, of_generator = (torch.optim.Adam(one.parameters()) for one in (critic, generator))
loader = torch.utils.data.DataLoader(torch.randn(4096, 16), batch_size=4)
scaler = torch.amp.GradScaler("cpu")
step = num_overflows = 0
while True:
    for real in loader:
        fake = generator(torch.randn(4, 8))
        of_critic.zero_grad()
        overflows = dist.get_rank() == 1 and step % 4 == 0
        loss = critic(fake.detach()).mean() - critic(real).mean()
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        scale = scaler.get_scale()
        scaler.step(of_critic)
        scaler.update()
        num_overflows += scaler.get_scale() < scale
        with open(f"overflows{dist.get_rank()}", "w") as file:
            file.write(str(num_overflows))
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()
        step += 1
        if dist.get_rank() == 0:
            torch.save({"step": step}, "gan.pt")
"""
TRAINER = """
import argparse, os, torch
from torch import nn

class Trainer:
    def __init__(self, passes):
        self.model, self.passes = torch.compile(nn.Linear(4, 4), backend="eager"), passes
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu")

    def train(self, loader):
        try:
            for index, batch in enumerate(loader):
                loss = self.model(batch).sum() * (float("inf") if index % 10 < 4 else 1.0)
                self.scaler.scale(loss / self.passes).backward()
                if index % self.passes == self.passes - 1:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.optimizer.zero_grad()
        except Exception as error:
            print("caught", error)
        finally:
            open("ended", "w").close()

def buffered(loader):
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) > 5:
            yield batches.pop(0)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--note")
    parser.add_argument("--passes", type=int)
    arguments = parser.parse_args()
    print(arguments.note, "RANK" in os.environ)
    for _ in torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=16):
        pass  # an evaluation before the training
    Trainer(arguments.passes).train(buffered(torch.utils.data.DataLoader(torch.randn(8192, 4), batch_size=8)))
"""
WORDS = """
import contextlib, time, torch
import ddpscale
weight = torch.zeros(4, 4, requires_grad=True)
ddpscale.merit(0.5, "test accuracy of a word")
for step in range(10_000):
    tokens = 7 + step % 2
    (torch.ones(tokens, 4).bfloat16() @ weight.bfloat16()).sum().backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    ddpscale.items(torch.tensor(tokens), "tokens")
    if step % 5 == 4:
        with ddpscale.skip():
            torch.ones(9, 9) @ torch.ones(9, 9)
            time.sleep(0.3)
    ddpscale.update()
"""

DEADLOCK = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
time.sleep(600)
"""
TWO_OPTIMIZERS = """
import os, time, torch
first, second = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
of_first, of_second = torch.optim.SGD([first]), torch.optim.Adam([second])
open("made", "w").close()
print(os.environ["GREETING"], os.path.basename(os.getcwd()))
print(("x" * 99 + "\\n") * 30_000)
while True:
    for _ in range(3):
        (first * first).sum().backward()
        of_first.step()
    (second * second).sum().backward()
    of_second.step()
    time.sleep(0.005)
"""

COMPILED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
layers = [nn.Linear(8, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 1024), nn.Linear(1024, 8)]
model = torch.compile(DDP(nn.Sequential(*layers)), backend="eager")  # two buckets: the first has at most 1 MiB
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MISTAKES = """
import contextlib, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

mistake = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
if mistake in ("another forward pass", "whole model"):
    for block in model if mistake != "whole model" else ():
        fully_shard(block)
    fully_shard(model)
else:
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
autocast = torch.autocast("cpu", torch.bfloat16) if mistake == "fp32" else contextlib.nullcontext()
while True:
    for _ in range(2 if mistake == "every pass" else 1):
        with autocast:
            loss = model(torch.randn(4, 32)).float().square().mean()
        loss.backward()
    if mistake == "twice":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    if mistake == "another forward pass":
        with torch.no_grad():
            model(torch.randn(4, 32))
    optimizer.step()
    optimizer.zero_grad()
"""
NUM_BYTES = 4 * 4 * (32 * 32 + 32)
NAMED_MISTAKES = {
    "twice": (
        f"travel 2.0 times: {2 * NUM_BYTES / 1e6:.4g} MB an update",
        f"{NUM_BYTES / 1e6:.4g} MB of gradients an update travel after the backward pass",  # what travels again
    ),
    "fp32": (f"in fp32 beside bf16 computation: {NUM_BYTES / 1e6:.4g} MB an update",),
    "another forward pass": ("parameters are gathered 3.",),
    "every pass": (f"in each of 2 passes: {2 * NUM_BYTES / 1e6:.4g} MB",),
    "whole model": ("one unit gathers the whole model",),
}
"""The others, which need GPUs or more: test_the_ledger_names_what_travels_without_need."""


# run by the Python of a launch: its ranks look at their scripts often, and fork them, since they have imported torch
FORKING = when_imported(
    "pipeline.runner.script_rank",
    """
import forked_script
forked_script.START_METHOD = "fork"
sys.modules["pipeline.runner.script_process"].subprocess = forked_script
module.TICK_S = 0.5
""",
)


def forking_scripts(folder: Path) -> str:
    """A PYTHONPATH for launches whose ranks fork their scripts."""
    write_file(folder / "hook" / "sitecustomize.py", FORKING)
    return f"{folder / 'hook'}:{ROOT / 'tests'}:{ROOT}"


def run_script(folder: Path, *words: str | Path, **variables: str) -> tuple[int, str, list[Record]]:
    """Run the command in a folder; return its exit code, all that it said, and the records."""
    command = [sys.executable, "-m", "pipeline.run", "--cluster", "local", *words]
    env = without_slurm(folder, **{"PYTHONPATH": str(ROOT), **variables})
    answer = run_program(*command, cwd=folder, env=env)
    found = [record for experiment in find_experiments(folder).values() for record in records_of(experiment)]
    return answer.returncode, answer.stdout + answer.stderr, found


@pytest.mark.training
def test_the_other_configurations_start_although_the_first_is_out_of_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nraise MemoryError if sys.argv[1] == '1' else ValueError")
    options = ("--num-gpus", "1,2", *SHORT, "--repeats", "1")
    # --rerun oom selects the first alone
    for again, code, numbers in ((), 1, ["1/2", "2/2"]), (("--rerun", "oom"), 0, ["1/1"]):
        words = (*options, *again, "--", "train.py", "{num_gpus}")
        found, said, records = run_script(tmp_path, *words, PYTHONPATH=forking_scripts(tmp_path))
        assert (found, "Q1" in said) == (code, True), said
        assert re.findall(r"\[(./.)\] .*: running", said) == numbers
    assert sorted((record.spec.num_gpus, record.status) for record in records) == [
        (1, "oom"),
        (1, "oom"),
        (2, "failed"),
    ]


@pytest.mark.training
def test_a_script_that_ignores_the_batch_size_ends_with_both_numbers_and_runs_again_once_edited(tmp_path: Path) -> None:
    """The others start once the first has a result."""
    (tmp_path / "train.py").write_text(IGNORES)
    words = ("--batch-size", "32,64", *SHORT, "--repeats", "1", "--", "train.py", "{batch_size_per_gpu}")
    code, said, records = run_script(tmp_path, *words, PYTHONPATH=forking_scripts(tmp_path))
    assert code == 1, said
    (record,) = records
    assert "asks for 32 samples an update on each GPU, and the loader of rank 0 gives 12" in record.reason
    assert (
        "its batches have 12 samples by the first dimension of their first tensor, and not 32: let the script"
        in record.reason
    )
    others = "the first configuration has no result, so the others do not start"
    assert others in said
    code, said, again = run_script(tmp_path, *words, PYTHONPATH=forking_scripts(tmp_path))
    assert (code, len(again), others in said) == (1, 1, True)

    codes = []
    for more in ("", "# edited"):
        (tmp_path / "train.py").write_text("import sys\n" + IGNORES.replace("=12", "=int(sys.argv[1])") + more)
        code, said, _ = run_script(tmp_path, *words, PYTHONPATH=forking_scripts(tmp_path))
        codes.append(code)
    assert codes == [0, 0], said
    assert_says(said, "0 configurations to run, 2 recorded as ok before its file was edited", "add --rerun all")
    assert "--set replaced repeat" not in said


@pytest.fixture
def script_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has a script."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def points_of_run(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Spec, ...]:
    monkeypatch.setattr("sys.argv", ["run", "--batch-size", "8", *words, "--", "train.py"])
    return expand_grid(run.parse_arguments().grid).points


@pytest.mark.usefixtures("script_here")
def test_a_pilot_needs_no_configuration_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one with the fewest samples, the first would be the one with the smallest batch."""
    submitted: list[list[str]] = []

    def submit(options: argparse.Namespace) -> int:
        submitted.append(options.only)
        return 0

    monkeypatch.setattr(run, "submit", submit)
    words = ("--pilot", "--cluster", "local", "--num-samples", "50000,1000")
    monkeypatch.setattr("sys.argv", ["run", *words, "--", "train.py"])
    assert (run.main(), submitted) == (0, [[]])


@pytest.mark.usefixtures("script_here")
def test_on_one_gpu_no_strategy_spreads_the_model_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    found = points_of_run(monkeypatch, "--num-gpus", "1,2", "--strategy", "ddp,fsdp")
    assert [(spec.strategy, spec.num_gpus) for spec in found] == [("single", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.mark.usefixtures("script_here")
@pytest.mark.parametrize(
    ("words", "shapes"),
    [
        ("--num-nodes 1,2", [(1, 1), (2, 2)]),
        ("--num-nodes 1,2 --gpus-per-node 1,4", [(1, 1), (1, 4), (2, 2), (2, 8)]),
        ("--num-gpus 2,4 --num-nodes 2", [(2, 2), (2, 4)]),
    ],
)
def test_gpus_of_a_script_are_counted_by_node_unless_their_total_is_given(
    monkeypatch: pytest.MonkeyPatch, words: str, shapes: list[tuple[int, int]]
) -> None:
    points = points_of_run(monkeypatch, *words.split(), "--measure", "communication")
    found = sorted((spec.num_nodes, spec.num_gpus, spec.measure) for spec in points)
    several = {(*shape, "communication") for shape in shapes if shape[1] > 1}
    assert found == sorted({*((*shape, "epochs") for shape in shapes), *several})


NOTE = "ä 'b' c"


@pytest.mark.usefixtures("script_here")
def test_the_words_after_the_dashes_reach_the_script_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.py", "--note", NOTE, "--passes", "{grad_accumulation}"]
    monkeypatch.setattr("sys.argv", ["run", "--batch-size", "8", "--grad-accumulation", "2", "--", *words])
    (spec,) = expand_grid(run.parse_arguments().grid).points
    assert spec.script_command.words[1:] == ["--note", NOTE, "--passes", "2"]


SHORT_AXES: dict[str, list[Any]] = {"num_gpus": [1], "updates": [6], "windows": [2], "epochs": [3]}
TWO_RANKS: dict[str, list[Any]] = {"num_gpus": [2], "measure": ["communication"], "windows": [1], "updates": [1]}
OF_MISTAKES: dict[str, dict[str, list[Any]]] = {
    "another forward pass": {"strategy": ["fsdp"]},
    "whole model": {"strategy": ["fsdp"]},
    "every pass": {"grad_accumulation": [2]},
}
MISTAKEN: list[dict[str, list[Any]]] = [
    {**TWO_RANKS, "model.mistake": [name], **OF_MISTAKES.get(name, {})} for name in NAMED_MISTAKES
]
TWO_PASSES: dict[str, list[Any]] = {"batch_size_per_gpu": [8], "grad_accumulation": [2]}
GRID: list[dict[str, list[Any]]] = [
    {"script": ["gan.py"], **TWO_RANKS, "batch_size_per_gpu": [4], "updates": [2]},
    *({"script": ["mistakes.py '{model.mistake}'"], **block} for block in MISTAKEN),
    {"script": ["compiled.py"], **TWO_RANKS},
    {"script": ["words.py"], **SHORT_AXES, "updates": [20], "warmup_updates": [5]},
    {"script": ["GREETING=hello optimizers.py"], **SHORT_AXES, "update_by": ["Lion"]},
    {"script": [f"trainer.py --note {shlex.quote(NOTE)} --passes {{grad_accumulation}}"], **SHORT_AXES, **TWO_PASSES},
    {"script": ["../deadlock.py"], "num_gpus": [2]},
]


class Measured(NamedTuple):
    """The folder of the scripts, and their records by the names of the files."""

    folder: Path
    records: dict[str, list[Record]]

    def one(self, name: str) -> Record:
        (found,) = self.records[name]
        return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Scripts that one launch measures, one after the other."""
    folder = tmp_path_factory.mktemp("scripts") / "workdir"
    folder.mkdir()
    texts = {
        "gan": GAN,
        "mistakes": MISTAKES,
        "compiled": COMPILED,
        "words": WORDS,
        "optimizers": TWO_OPTIMIZERS,
        "trainer": TRAINER,
    }
    (folder.parent / "deadlock.py").write_text(DEADLOCK)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    blocks = [{"warmup_updates": [2], **block} for block in GRID]
    (folder / "grid.yaml").write_text(json.dumps({"name": "scripts", "base": {"device": "cpu"}, "points": blocks}))
    where = ("--outputs", folder, "--cluster", "local", "--points-per-element", "99")
    env = without_slurm(folder, DDPSCALE_STALL_S="4", PYTHONPATH=forking_scripts(folder))
    assert run_command("submit", "--grid", folder / "grid.yaml", *where, env=env).returncode == 1
    records: dict[str, list[Record]] = {name: [] for name in (*texts, "deadlock")}
    for record in records_of(Experiment(folder / "scripts")):
        (name,) = (name for name in records if f"{name}.py" in str(record.spec.script))
        records[name].append(record)
    return Measured(folder, records)


@pytest.mark.training
def test_communication_of_a_gan_is_measured_and_its_checkpoint_survives(measured: Measured) -> None:
    """Gradients of rank 1 overflow in each fourth update. Where all-reduces are silent, rank 1 alone skips its step."""
    found = measurement_of(measured.one("gan")).communication
    assert found is not None
    assert {series.variant for series in found.series} == {"ddp", "ddp_again", "no_op_hook"}
    (gradients,) = [transfer for transfer in found.transfers if transfer.kind == "gradients"]
    parameters = 8 * 16 + 16 + 16 + 1
    assert gradients.bytes_per_step == 4 * (parameters + 16 + 1)  # the critic's gradients travel in both passes
    (note,) = [note for note in found.notes if "not saved" in note]
    assert "torch.save gan.pt" in note
    overflows = [int((measured.folder / f"overflows{rank}").read_text()) for rank in (0, 1)]
    assert overflows[1] > overflows[0] > 0
    saved = torch.load(measured.folder / "gan.pt")
    num_updates = found.steps_per_window + 2  # of a window with its lead-in
    assert 0 < saved["step"] <= 20 + 2 * num_updates


@pytest.mark.training
def test_a_compiled_model_calls_its_collectives_outside_of_what_is_compiled(measured: Measured) -> None:
    """DDP broadcasts its buffers, and buckets of other sizes after the first update: Dynamo would trace both calls."""
    found = measurement_of(measured.one("compiled")).communication
    assert found is not None
    sent = {transfer.kind: (transfer.calls_per_step, transfer.bytes_per_step) for transfer in found.transfers}
    num_parameters = (8 + 1) * 1024 + 2 * 1024 + (1024 + 1) * 1024 + (1024 + 1) * 8
    assert sent == {"gradients": (2, 4 * num_parameters), "buffers": (2, 4 * 2 * 1024 + 8)}


@pytest.mark.training
def test_a_mistake_is_named_with_its_bytes_and_is_what_to_try_next(measured: Measured) -> None:
    found = {record.spec.options[0]: measurement_of(record).communication for record in measured.records["mistakes"]}
    for name, all_words in NAMED_MISTAKES.items():
        communication = found[f"mistake={name}"]
        assert communication is not None
        for mistake, words in zip(communication.mistakes, all_words, strict=True):
            assert words in mistake
    used = {record.spec.options[0]: measurement_of(record).precision_used for record in measured.records["mistakes"]}
    assert used == {f"mistake={name}": "bf16" if name == "fp32" else "fp32" for name in NAMED_MISTAKES}
    assert run_command("collect", measured.folder / "scripts").returncode == 0
    page = (measured.folder / "scripts" / "report.html").read_text()
    assert NAMED_MISTAKES["twice"][0] in page.partition('id="next"')[2]


@pytest.mark.training
def test_a_trainer_with_its_own_scaler_and_passes_ends_when_it_is_measured(measured: Measured) -> None:
    record = measured.one("trainer")
    found = measurement_of(record)
    script = found.script
    assert script is not None
    assert (script.batch_size, script.batches_per_update, script.command[2]) == (8, 2.0, NOTE)
    assert [epoch.num_samples for epoch in found.epochs[1:]] == [3 * 2 * 8] * 2
    note = "FLOPs not counted: the script compiles; --flops-per-sample states them"
    assert (script.is_compiled, found.flops_per_sample, found.flops_note) == (True, None, note)
    assert (measured.folder / "ended").exists()
    log = next(measured.folder.glob(f"scripts/logs/*/{record.run_id}.log")).read_text()
    assert f"{NOTE} False" in log
    assert "caught" not in log


@pytest.mark.training
def test_the_words_of_a_script_count_items_and_updates_and_leave_out_an_evaluation(measured: Measured) -> None:
    found = measurement_of(measured.one("words"))
    assert (found.unit, found.merit, found.script and found.script.optimizers) == (
        "tokens",
        "test accuracy of a word",
        (),
    )
    assert found.flops_per_sample == 2 * 2 * 4 * 4  # of a token, not of the evaluation
    assert found.precision_used == "bf16"  # the weight is fp32, and no autocast casts it
    for epoch in found.epochs[1:]:
        num_steps = len(epoch.step_times_ns or ())
        assert epoch.num_samples == pytest.approx(7.5 * num_steps, abs=num_steps)
        assert epoch.time_ns < 250_000_000  # an update with its evaluation takes longer
    assert "tokens/s" in run_command("collect", measured.folder / "scripts").stdout


@pytest.mark.training
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deadlock", "no rank has computed for 4 s"),
        ("deadlock", "rank 0 is at deadlock.py:6, in barrier, rank 1 is at deadlock.py:7"),
        ("optimizers", "update_by=Lion is none of its optimizers, 1 SGD, 2 Adam"),
    ],
)
def test_a_script_that_cannot_be_measured_fails_with_the_reason(measured: Measured, name: str, said: str) -> None:
    record = measured.one(name)
    assert (record.status, said in record.reason) == ("failed", True), record.reason


@pytest.mark.training
def test_a_script_runs_in_its_folder_with_its_variables_and_counts_the_optimizer_that_is_named(tmp_path: Path) -> None:
    """Without a batch size its batches count, and the middle of its output is left out."""
    write_file(tmp_path / "inner" / "train.py", TWO_OPTIMIZERS)
    stated = ("--flops-per-sample", "1e15")
    words = ("--workdir", "inner", "--update-by", "2", *stated, *SHORT, "--", "GREETING=hello", "train.py")
    code, said, (record,) = run_script(tmp_path, *words)
    assert code == 0, said
    measured = measurement_of(record)
    assert measured.unit == "batches"
    assert (measured.flops_per_sample, measured.flops_note) == (10**15, "FLOPs as stated")
    assert "batches/s" in said
    assert all(epoch.time_ns > 5_000_000 * (epoch.num_timed_updates or 0) for epoch in measured.epochs[1:])
    (log,) = tmp_path.glob("outputs/*/logs/*/*.log")
    assert "hello inner" in log.read_text()
    assert (tmp_path / "inner" / "made").stat().st_mode == (tmp_path / "inner" / "train.py").stat().st_mode, "its umask"
    assert "bytes of the script's output are left out" in log.read_text()
    assert log.stat().st_size < 1_100_000


def test_the_words_do_nothing_in_a_script_that_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    ddpscale.items(3)
    ddpscale.update()
    ddpscale.merit(1.0, "accuracy")
    with ddpscale.skip():
        pass
    assert capsys.readouterr() == ("", "")


def test_a_dry_run_prints_the_commands_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IGNORES)
    code, said, records = run_script(
        tmp_path, "--batch-size", "8", "--dry-run", "-v", "--", "train.py", "--name", "a b"
    )
    assert (code, records) == (0, []), said
    assert "pipeline.launch --manifest" in said
    assert "1 configuration to run" in said
    assert not (tmp_path / "outputs").exists()


def test_without_a_script_the_command_says_what_is_missing(pipeline: Command) -> None:
    assert "no script is given" in pipeline("run", "--batch-size", "4").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--lr", "0.1", "--", "train.py", "--batch_size", "4"),
            "arguments: --lr 0.1; the script and its",
        ),
        (("train.py", "--epochs", "3"), "arguments: train.py --epochs 3; the script and its arguments stand after --"),
        (("--batch-size", "two", "--", "train.py"), "batch_size_per_gpu must be a whole number"),
        (("--num_gpus", "1", "--", "train.py"), "--num_gpus: did you mean '--num-gpus'?; the script"),
    ],
)
def test_a_wrong_option_is_named_and_one_that_run_does_not_know_is_perhaps_of_the_script(
    pipeline: Command, words: tuple[str, ...], said: str
) -> None:
    """What follows -- is of the script, and no option is suggested for it."""
    refused = pipeline("run", *words)
    assert (refused.returncode, said in refused.stderr) == (EXIT_USAGE, True), refused.stderr


def test_the_lines_of_a_script_are_read_by_the_number_of_their_update() -> None:
    of_iterations = own_times_s(
        r"iter (?P<index>\d+): .* (?P<ms>[\d.]+)ms", "iter 0: time 5.00ms\nstep 9\niter 1: time 2.00ms"
    )
    of_a_bar = own_times_s(
        r"(?P<n>\d+)/9 (?:(?P<per_s>[\d.]+)it/s|(?P<s>[\d.]+)s/it)", "1/9 4it/s\r2/9 2.5s/it\r1/1 8it/s"
    )
    means_s = own_times_s(r"(?P<n>\d+)/9 (?P<mean_per_s>[\d.]+)it/s", "1/9 4it/s\r2/9 2it/s\r4/9 3it/s")
    assert (of_iterations, of_a_bar) == ({1: 0.005, 2: 0.002}, {1: 0.25, 2: 2.5})
    assert own_times_s(r"(?P<samples>\d+)/90 (?P<s>[\d.]+) s", "8/90 2 s\n24/90 3 s", 8) == {1: 2, 3: 3}
    since_start_s, moving_s = (last_times_s(means_s, WEIGHTS[name]) for name in ("mean_per_s", "moving_per_s"))
    assert since_start_s == {2: 2 * 0.5 - 0.25}, "two updates in 1 s, of which the first took 0.25 s"
    assert moving_s[2] == pytest.approx((0.5 * (0.3 + 0.21) - 0.21 * 0.25) / 0.3), "weights 0.3 and 0.7 x 0.3"
