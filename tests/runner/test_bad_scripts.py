"""Scripts that cannot be measured, each with the sentence that says why. Ranks are threads, their scripts processes."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_script
import pytest
from factories import make_spec

from pipeline.records.record import Measurement
from pipeline.runner import script_blocks, script_process, script_rank
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.script_blocks import ScriptProblem
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
IS_SECOND = 'os.environ["RANK"] == "1"'


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
    unstated = dict.fromkeys(("precision", "input", "num_workers", "dataset"))
    short = {"warmup_updates": 5, "updates": 6, "windows": 2, "epochs": 3, "batch_size_per_gpu": 1, "device": "cpu"}
    given = {**shape, **short, **unstated, **axes}
    spec = make_spec(script=str(folder / "train.py"), model="train.py", **given)
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


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("import nowhere", "exception", "ModuleNotFoundError: No module named 'nowhere' (at train.py:1 in <module>)"),
        ("input('which one? ')", "exception", "EOFError: EOF when reading a line (at train.py:1"),
        (r"raise ValueError('\033[1mno data\033[0m')", "exception", "ValueError: no data (at train.py:1"),
        (r"print('\033[32mno data\033[0m')", "exit", 'ended and never imported torch; its last line is "no data"'),
        ("import sys; sys.exit('no data')", "exit", "exited with 1 after 0 updates: no data"),
        ("import os; os._exit(0)", "exit", "left its process (os._exit or exec) before it was measured"),
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
            "mp.start_processes(lambda _: update(), start_method='fork')",
            "no optimizer of torch made a step in its process; train in the process that is started",
        ),
        ("weight.requires_grad_(False).sub_(0.1)", "and call ddpscale.update() after an update that no optimizer"),
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


@pytest.mark.training
def test_a_merit_that_is_no_number_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that diverges says one. Its times are measured."""
    lines = "import ddpscale\nwhile True: update(), ddpscale.merit(float('nan'), 'accuracy')"
    (found,) = run_ranks(folder, TRAIN + lines, monkeypatch)
    assert isinstance(found, Measurement), found
    assert found.merit == "accuracy"
    assert {epoch.merit for epoch in found.epochs} == {None}


LONG = {"updates": 600, "windows": 20, "epochs": 21}


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of five updates, and times that are never precise enough."""
    monkeypatch.setattr(script_blocks, "WINDOW_S", 0.0)
    monkeypatch.setattr(script_rank, "is_time_precise_enough", lambda _: False)


@pytest.mark.usefixtures("short_windows")
@pytest.mark.training
def test_a_script_that_ends_after_six_windows_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = run_ranks(folder, TRAIN + "for _ in range(90): update()", monkeypatch, world_size=2, **LONG)
    assert isinstance(found, Measurement), found
    timed = found.epochs[1:]
    assert (6 <= len(timed) < 20, {epoch.num_timed_updates for epoch in timed}) == (True, {5})


@pytest.mark.usefixtures("short_windows")
@pytest.mark.training
def test_of_a_script_that_ends_the_rounds_count_that_are_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"measure": "communication", **LONG}
    monkeypatch.setattr(script_rank, "is_communication_precise_enough", lambda _: False)
    found, _ = run_ranks(folder, TRAIN + "for _ in range(155): update()", monkeypatch, world_size=2, **axes)
    assert isinstance(found, Measurement), found
    assert found.communication
    assert [len(series.window_times_ns) for series in found.communication.series] == [6, 6, 6]


@pytest.mark.usefixtures("short_windows")
@pytest.mark.training
def test_a_script_that_makes_too_few_updates_is_measured_with_those_that_the_error_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TRAIN + "for _ in range(46): update()"
    (problem,) = run_ranks(folder, text, monkeypatch, **LONG)
    cure = re.search(r"more data or epochs, or measure less: --updates (\d+)", str(problem))
    assert cure, problem
    (found,) = run_ranks(folder, text, monkeypatch, **{**LONG, "updates": int(cure[1])})
    assert isinstance(found, Measurement), found


@pytest.mark.usefixtures("short_windows")
@pytest.mark.training
def test_a_rank_that_does_not_end_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_rank, "STALL_LIMIT_S", 2)
    text = TRAIN + f"for _ in range(90): update()\nif {IS_SECOND}: signal.pause()"
    problem = run_ranks(folder, text, monkeypatch, world_size=2, **LONG)[0]
    assert "rank 1 has not ended 2 s after rank 0; let all ranks step alike" in str(problem), problem


@pytest.mark.training
def test_ranks_that_train_alone_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a process group, as a Trainer has on CPUs, and never use it."""
    alone = TRAIN.replace("dist.all_reduce(weight.grad)", "pass")
    problem = run_ranks(folder, alone + "while True: update()", monkeypatch, world_size=2)[0]
    assert "the 2 ranks exchange nothing in 5 updates: each trains a model of its own" in str(problem), problem


@pytest.mark.parametrize(
    ("lines", "rank", "limit_s", "words"),
    [
        (
            f"for step in range(99):\n    if step == 16 and {IS_SECOND}: raise ValueError('no sample')\n    update()",
            1,
            300,
            "ValueError: no sample (at train.py:18 in <module>), after 16 updates",
        ),
        (
            f"while True:\n    if num_updates > 10 and {IS_SECOND}: signal.pause()\n    update()",
            0,
            4,
            "rank 1 has made fewer updates than the others for 4 s: let all ranks step alike; rank 1 is at train.py:18",
        ),
    ],
)
@pytest.mark.training
def test_a_rank_that_does_something_else_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, rank: int, limit_s: int, words: str
) -> None:
    monkeypatch.setattr(script_rank, "STALL_LIMIT_S", limit_s)
    problem = run_ranks(folder, TRAIN + lines, monkeypatch, world_size=2)[rank]
    assert (problem.kind, words in str(problem)) == ("exception", True), problem


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
    (found,) = run_ranks(folder, TRAIN + lines, monkeypatch)
    assert isinstance(found, Measurement), found
    assert (found.epochs[-1].num_updates or 0) > 11
