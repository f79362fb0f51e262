"""The rank of a script: scripts that it measures, and those that it cannot measure."""

import contextlib
import math
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_script
import pytest
from factories import assert_says, known, make_script_spec

from pipeline.records.record import Measurement
from pipeline.runner import script_blocks, script_process, script_rank
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.script_blocks import (
    ScriptProblem,
)
from pipeline.runner.script_rank import ScriptRank
from pipeline.system import host

TRAIN = """
import os, signal, torch
import torch.distributed as dist
import torch.multiprocessing as mp
if os.environ.get("WORLD_SIZE") == "2":
    dist.init_process_group("gloo")
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
num_updates = 0
def update():
    global num_updates
    num_updates += 1
    (weight * torch.ones(4)).sum().backward()
    if dist.is_initialized() and num_updates <= 10:  # in the warm-up; later ranks part ways
        dist.all_reduce(weight.grad)
    optimizer.step()
"""
TWO_PASSES = """
from torch.utils.checkpoint import checkpoint
while True:
    (weight * 2).sum().backward()
    checkpoint(torch.square, weight, use_reentrant=True).sum().backward()  # a pass within a pass
    optimizer.step(lambda: weight.sum().backward())  # and that of a line search
"""
IS_SECOND = 'os.environ["RANK"] == "1"'
WATCHDOG = (  # of torch 2.11
    b"[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=66, OpType=ALLREDUCE, NumelIn=262656, "
    b"NumelOut=262656, Timeout(ms)=30000) ran for 30073 milliseconds before timing out."
)
HANGS = f"""while True:
    if num_updates > 10:
        {IS_SECOND} or os.write(2, {WATCHDOG!r}); signal.pause()
    update()
"""


class Rank(ScriptRank):
    """A rank in a process of several."""

    def environment(self) -> dict[str, str]:
        return super().environment() | {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a script. Limits are short, and what still runs at the end of a test is killed."""
    monkeypatch.setattr(script_rank, "TICK_S", 0.2)
    yield tmp_path
    kill_scripts()


def kill_scripts() -> None:
    for pid in host.children_of(os.getpid()):
        with contextlib.suppress(OSError):
            if b"script_probe.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    while forked_script.started:
        forked_script.started.pop().kill()


def run_ranks(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, world_size: int = 1, **axes: Any) -> list[Any]:
    """Run a script on these ranks; return of each the problem or the measurement. The first problem ends the others."""
    (folder / "train.py").write_text(text)
    if text.startswith(TRAIN):
        monkeypatch.setattr(script_process, "subprocess", forked_script)
    shape: dict[str, Any] = {"strategy": "ddp" if world_size > 1 else "single", "num_gpus": world_size}
    short = {"warmup_updates": 5, "updates": 6, "windows": 2, "epochs": 3, "batch_size_per_gpu": 1, "device": "cpu"}
    spec = make_script_spec(str(folder / "train.py"), **{**shape, **short, **axes})
    ranks = []
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(Rank(PointTask(spec, None, str(folder)), RankFiles(folder), folder / "store"))
    found: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            ranks[rank].run()
            found[rank] = ranks[rank].measurement() if rank == 0 else None
        except ScriptProblem as problem:
            found[rank] = problem
            kill_scripts()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def measured(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, **shape: Any) -> Measurement:
    """Run a script that is measured. Return the measurement."""
    found = run_ranks(folder, text, monkeypatch, **shape)[0]
    assert isinstance(found, Measurement), found
    return found


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("import nowhere", "exception", "ModuleNotFoundError: No module named 'nowhere' (at train.py:1 in <module>)"),
        ("input('which one? ')", "exception", "EOFError: EOF when reading a line (at train.py:1"),
        (r"raise ValueError('\033[1mno data\033[0m')", "exception", "ValueError: no data (at train.py:1"),
        (r"print('\033[32mno data\033[0m')", "exit", 'ended and never imported torch; its last line is "no data"'),
        ("import sys; sys.exit('no data')", "exit", "exited with 1 after 0 updates: no data"),
        ("import os; os._exit(0)", "exit", "left its process (os._exit or exec, exit code 0) before it was measured"),
        ("import os; os.kill(os.getpid(), 9)", "signal", "killed by SIGKILL, often for want of host memory; lower"),
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\nbytes(2**33)",
            "host_oom",
            "MemoryError",
        ),
        (
            "while True:\n    pass",
            "timeout",
            "a block of updates has not ended in 2 s, after 0 blocks: rank 0 is at train.py:",
        ),
    ],
)
def test_a_script_that_ends_or_never_steps_is_told_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: str, words: str
) -> None:
    monkeypatch.setattr(script_rank, "BLOCK_LIMIT_S", 2)
    (problem,) = run_ranks(folder, text, monkeypatch)
    assert (problem.kind, words in str(problem)) == (kind, True), problem


def test_a_kill_that_the_control_group_counts_is_out_of_host_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "num_oom_kills", iter([3, 4]).__next__)
    (problem,) = run_ranks(folder, "import os; os.kill(os.getpid(), 9)", monkeypatch)
    assert (problem.kind, "SIGKILL: its memory limit is reached; lower" in str(problem)) == ("host_oom", True)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nfor _ in range(7): update()",
            "ended after 7 updates, too few to time; give the script more data or epochs",
        ),
        (
            "mp.start_processes(lambda _: [update() for _ in range(90)], start_method='fork')",
            "no optimizer of torch made a step in its process; train in the process that is started",
        ),
        ("weight.requires_grad_(False).sub_(0.1)", "and call ddpscale.update() after one that no optimizer"),
        (TWO_PASSES, "asks for 1 passes an update on each GPU, and the script makes 2; give --grad-accumulation 2"),
        *(
            (f"import ddpscale\nwhile True: update(), ddpscale.items({count})", f"items() has counted {words}")
            for count, words in (("0", "0"), ("-1", "-"), ("float('nan')", "nan"), ("torch.tensor(torch.inf)", "inf"))
        ),
    ],
)
@pytest.mark.training
def test_a_script_that_trains_too_little_or_elsewhere_is_told_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, words: str
) -> None:
    (problem,) = run_ranks(folder, TRAIN + lines, monkeypatch)
    assert words in str(problem)


TWO_LOADERS = """
from torch.utils.data import DataLoader
labelled, unlabelled = (iter(DataLoader(torch.zeros(100_000), size)) for size in (8, 24))
while True: next(labelled), next(unlabelled), update()
"""


@pytest.mark.training
def test_of_two_loaders_the_one_that_gives_last_counts_and_a_refusal_names_the_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = run_ranks(folder, TRAIN + TWO_LOADERS, monkeypatch, batch_size_per_gpu=8)
    assert_says(str(problem), "gives 24", "another loader gives batches of 8, and the last one before the step counts")


@pytest.mark.training
@pytest.mark.parametrize(
    ("start", "is_tried_again"),
    [
        ("raise KeyError('LOCAL_RANK')", True),
        ("raise RuntimeError('Using fsdp only works in distributed training.')", True),  # a Trainer
        ("raise ValueError('Default process group has not been initialized')", True),
        ("int(os.environ.get('LOCAL_RANK'))", True),
        ("raise SystemExit('please start this with torchrun')", True),
        ("raise RuntimeError('no data')", False),
    ],
)
def test_one_process_that_fails_for_want_of_the_variables_of_torchrun_starts_again_with_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start: str, is_tried_again: bool
) -> None:
    lines = f"if 'TORCHELASTIC_USE_AGENT_STORE' not in os.environ:\n    {start}\nwhile True: update()"
    (found,) = run_ranks(folder, TRAIN + lines, monkeypatch)
    assert isinstance(found, Measurement) is is_tried_again, found
    if isinstance(found, Measurement):
        assert known(found.script).has_launcher_variables


@pytest.mark.training
@pytest.mark.parametrize(
    "test",
    [
        "for batch in test: evaluate(batch)",
        "for batch in DataLoader(data, batch_size=1): evaluate(batch)",  # a loader that is made anew
        "with torch.no_grad():\n            for batch in train: evaluate(batch)",
        "with torch.inference_mode():\n            for batch in train: evaluate(batch)",
    ],
)
def test_an_evaluation_on_the_data_of_the_training_counts_neither_as_samples_nor_as_flops(
    folder: Path, monkeypatch: pytest.MonkeyPatch, test: str
) -> None:
    lines = f"""
from torch.utils.data import DataLoader
data = torch.randn(8, 4)
train, test = (DataLoader(data, batch_size=size) for size in (1, 16))
@torch.no_grad()
def evaluate(batch):
    batch.double() @ torch.ones(4, 9, dtype=torch.double)
while True:
    for batch in train:
        (batch @ torch.ones(4, 3)).sum()
        update()
        {test}
"""
    found = measured(folder, TRAIN + lines, monkeypatch, batch_size_per_gpu=1)
    script = known(found.script)
    assert (script.batch_size, script.batches_per_update) == (1, 1.0)
    assert (found.flops_per_sample, found.precision_used) == (2 * 4 * 3, "fp32")
    assert {epoch.num_samples == epoch.num_timed_updates for epoch in found.epochs} == {True}


@pytest.mark.training
def test_optimizers_that_a_script_makes_anew_are_no_part_of_its_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As meta learning does in each update, and cross-validation seldom."""
    lines = """
while True:
    for _ in range(3):
        inner = torch.optim.Adam([torch.zeros(7, requires_grad=True)])
        inner.step()
    update()
"""
    found = measured(folder, TRAIN + lines, monkeypatch, update_by="SGD")
    assert (found.num_parameters, found.gradient_bytes) == (4, 16)


@pytest.mark.training
def test_a_merit_that_is_no_number_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that diverges says one. Its times are measured."""
    lines = "import ddpscale\nwhile True: update(), ddpscale.merit(float('nan'), 'accuracy')"
    found = measured(folder, TRAIN + lines, monkeypatch)
    assert found.merit == "accuracy"
    assert {epoch.merit for epoch in found.epochs} == {None}


LONG = {"updates": 600, "windows": 20, "epochs": 21}


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of five updates, however long one takes, and times that are never precise enough."""
    monkeypatch.setattr(script_blocks, "LONG_UPDATE", math.inf)
    monkeypatch.setattr(script_blocks, "WINDOW_S", 0.0)
    monkeypatch.setattr(script_rank, "is_time_precise_enough", lambda _: False)


def test_windows_begin_a_random_number_of_updates_apart_and_are_longer_where_updates_are_uneven() -> None:
    rank = ScriptRank.__new__(ScriptRank)
    rank.spec, rank.random, rank.is_uneven = (
        make_script_spec(updates=600, windows=20, epochs=21),
        random.Random(0),
        False,
    )
    blocks = [rank.timed_block(50e6, "real") for _ in range(50)]
    assert ({block["lead_in"] for block in blocks}, {block["updates"] for block in blocks}) == ({2, 3, 4, 5}, {5})
    rank.is_uneven = True
    assert [rank.timed_block(1e6 * time_ms, "real")["updates"] for time_ms in (1, 10, 25, 50)] == [100, 33, 33, 20]
    longer = []
    for usual in (100, 25, 10, 5):
        rank.block = {"updates": usual}
        longer.append(rank.has_longer_windows())
    assert longer == [False, False, True, True], "else they need not begin anew"


@pytest.mark.training
def test_work_of_every_few_updates_has_its_share_of_the_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of five updates, with two between them, would hold one in each or none at all."""
    monkeypatch.setattr(script_blocks, "WINDOW_S", 0.0)
    text = TRAIN + "import time\nwhile True: time.sleep(0.06 if num_updates % 7 == 0 else 0.01), update()"
    found = measured(folder, text, monkeypatch, **{**LONG, "windows": 6, "epochs": 7})
    assert [epoch.num_timed_updates for epoch in found.epochs[1:]] == [20] * 6
    assert min(epoch.time_ns for epoch in found.epochs[1:]) >= (18 * 0.01 + 2 * 0.06) * 1e9  # two of 14, at least


@pytest.mark.usefixtures("short_windows")
@pytest.mark.training
def test_a_script_that_ends_after_six_windows_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(folder, TRAIN + "for _ in range(90): update()", monkeypatch, world_size=2, **LONG)
    timed = found.epochs[1:]
    assert (6 <= len(timed) < 20, {epoch.num_timed_updates for epoch in timed}) == (True, {5})


@pytest.mark.usefixtures("short_windows")
@pytest.mark.training
def test_of_a_script_that_ends_the_rounds_count_that_are_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"measure": "communication", **LONG}
    monkeypatch.setattr(script_rank, "is_communication_precise_enough", lambda _: False)
    text = TRAIN + "for number in range(180): update(), torch.save(weight, f'{number}.pt')"
    found = measured(folder, text, monkeypatch, world_size=2, **axes)
    assert found.communication
    assert [len(series.window_times_ns) for series in found.communication.series] == [6, 6, 6]
    (note,) = [note for note in found.communication.notes if "not saved" in note]
    numbers = [int(number) for number in re.findall(r"torch\.save (\d+)\.pt \(1\)", note)]
    assert numbers == [*range(numbers[0], numbers[0] + 4)], "the first four, in their order"
    assert re.search(r" and 1\d\d more$", note)


@pytest.mark.training
def test_a_checkpoint_that_was_not_written_is_named_where_the_script_needs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        TRAIN + f"while True: update(), {IS_SECOND} or [torch.save(weight, 'new.pt'), os.replace('new.pt', 'old.pt')]"
    )
    problem = run_ranks(folder, text, monkeypatch, world_size=2, measure="communication")[0]
    words = "updates; while its collectives are silent torch.save new.pt writes nothing: turn checkpoints off"
    assert (problem.kind, words in str(problem)) == ("exception", True), problem


@pytest.mark.usefixtures("short_windows")
@pytest.mark.training
def test_a_script_that_makes_too_few_updates_is_measured_with_those_that_the_error_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TRAIN + "for _ in range(46): update()"
    (problem,) = run_ranks(folder, text, monkeypatch, **LONG)
    cure = re.search(r"more data or epochs, or measure less: --updates (\d+)", str(problem))
    assert cure, problem
    measured(folder, text, monkeypatch, **{**LONG, "updates": int(cure[1])})


@pytest.mark.parametrize(
    ("text", "rank", "limit_s", "words"),
    [
        (
            TRAIN
            + f"for step in range(99):\n    if step == 16 and {IS_SECOND}: raise ValueError('no sample')\n    update()",
            1,
            300,
            "ValueError: no sample (at train.py:18 in <module>), after 16 updates",
        ),
        (
            f"{TRAIN}while True:\n    if num_updates > 10 and {IS_SECOND}: signal.pause()\n    update()",
            0,
            4,
            "rank 1 has made fewer updates than the others for 4 s: let all ranks step alike; rank 1 is at train.py:18",
        ),
        (
            TRAIN + HANGS,
            0,
            300,
            "has not ended in 30 s, the time limit of its group: rank 0 is at train.py:19, rank 1 is at train.py:19",
        ),
        (
            f"{TRAIN}for _ in range(90): update()\nif {IS_SECOND}: signal.pause()",
            0,
            2,
            "rank 1 has not ended 2 s after rank 0; let all ranks step alike",
        ),
        (  # they have a process group, as a Trainer has on CPUs, and never use it
            TRAIN.replace("dist.all_reduce(weight.grad)", "pass") + "while True: update()",
            0,
            300,
            "the 2 ranks exchange nothing in 5 updates: if each trains a model of its own, wrap it",
        ),
    ],
)
@pytest.mark.usefixtures("short_windows")
@pytest.mark.training
def test_a_rank_that_does_something_else_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, rank: int, limit_s: int, words: str
) -> None:
    monkeypatch.setattr(script_rank, "STALL_LIMIT_S", limit_s)
    problem = run_ranks(folder, text, monkeypatch, world_size=2, **LONG)[rank]
    assert words in str(problem), problem


@pytest.mark.training
@pytest.mark.parametrize("way", ["a variable", "an argument"])
def test_ranks_may_meet_at_a_port_of_the_scripts_own(folder: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """As in scripts for srun. torchrun's ranks would wait there for ever, since each takes the agent for the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "a variable": f"os.environ['MASTER_PORT'] = '{port}'\n    dist.init_process_group('gloo')",
        "an argument": f"dist.init_process_group('gloo', init_method='tcp://localhost:{port}', world_size=2, "
        "rank=int(os.environ['RANK']))",
    }
    text = TRAIN.replace('dist.init_process_group("gloo")', own[way]) + "while True: update()"
    found = measured(folder, text, monkeypatch, world_size=2)
    assert known(found.script).world_size == 2


@pytest.mark.training
def test_two_trainings_one_after_the_other_and_a_compiled_optimizer_are_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second training begins in the timed part. Its optimizer counts after 50 steps. A bad end harms nothing."""
    lines = (
        "for _ in range(11): update()\n"
        "os.chdir('/')\n"
        "optimizer = torch.optim.Adam([weight])\n"
        "optimizer.step = torch.compile(optimizer.step, backend='eager')\n"
        "try:\n    while True: update()\n"
        "finally: os._exit(3)"
    )
    found = measured(folder, TRAIN + lines, monkeypatch)
    assert (found.epochs[-1].num_updates or 0) > 11


@pytest.mark.training
def test_a_timed_block_in_which_something_is_compiled_is_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by the smaller last batch of an epoch. The warm-up ends after ten updates."""
    lines = (
        "doubled = torch.compile(lambda rows: rows * 2, backend='eager', dynamic=False)\n"
        "while True:\n"
        "    update()\n"
        "    doubled(torch.ones(3 if num_updates == 12 else 2))\n"
    )
    found = measured(folder, TRAIN + lines, monkeypatch)
    assert capfd.readouterr().err.count("compiled in a timed block") == 1
    assert len(found.epochs) == 3


def test_on_slurm_a_script_finds_its_rank_where_srun_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun has started the launcher, as the only task of its node."""
    ranks = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    for name, value in {**ranks, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_NPROCS", raising=False)
    own = ScriptRank.__new__(ScriptRank)
    own.spec = make_script_spec(strategy="ddp", device="cpu", num_gpus=8, num_nodes=2)
    own.host, own.port, own.has_launcher_variables = "node1", 1, True
    found = own.environment()
    assert [found[f"SLURM_{name}"] for name in ("PROCID", "LOCALID", "NTASKS")] == ["5", "1", "8"]
    assert "SLURM_NPROCS" not in found


@pytest.mark.parametrize(
    ("device", "shape", "mask", "expected"),
    [
        ("cuda", (1, 1), None, "0"),
        ("cuda", (4, 2), None, "0,1"),
        ("cuda", (2, 1), "3,1,0", "3,1"),
        ("cuda", (2, 1), "GPU-a", "GPU-a"),
        ("cpu", (2, 1), "0,1", ""),
    ],
)
def test_a_script_sees_the_gpus_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch, device: str, shape: tuple[int, int], mask: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    own = ScriptRank.__new__(ScriptRank)
    own.spec = make_script_spec(strategy="ddp", device=device, num_gpus=shape[0], num_nodes=shape[1])
    own.host, own.port, own.has_launcher_variables = "127.0.0.1", 1, True
    assert own.environment()["CUDA_VISIBLE_DEVICES"] == expected
