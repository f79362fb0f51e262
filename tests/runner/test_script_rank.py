"""The rank of a script: what it makes of the reports of its probe, and scripts that it cannot measure."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_script
import msgspec
import pytest
from factories import make_spec

from pipeline.plan.spec import Spec
from pipeline.records.record import Measurement
from pipeline.runner import script_blocks, script_process, script_rank
from pipeline.runner.rank_files import PointTask, RankFiles
from pipeline.runner.script_blocks import (
    Block,
    CountedCall,
    ScriptProblem,
    batch_of,
    check_observed,
    find_mistakes,
    flops_of,
    num_timed_updates,
    transfers_of,
    with_fed_ranks,
    without_left_out,
)
from pipeline.runner.script_rank import ScriptRank
from pipeline.system import host

MODEL_BYTES = 4_000_000
SEEN: dict[str, Any] = {
    "world_size": 2,
    "wrappers": ["DistributedDataParallel"],
    "gradient_bytes": MODEL_BYTES,
    "autocast": None,
    "backend": "nccl",
    "collectives": 10,
    "parameter_type": "float32",
    "number_type": "float32",
    "optimizers": ["AdamW"],
}

FSDP = {"wrappers": ["FSDPModule"]}
SCATTER = CountedCall("reduce_scatter", MODEL_BYTES, "", True, 10)
ONCE = CountedCall("all_reduce", MODEL_BYTES, "", True, 10)


def spec_of(command: str = "train.py", **fields: Any) -> Spec:
    unstated = dict.fromkeys(("precision", "input", "num_workers", "dataset"))
    shape = {"strategy": "ddp", "num_gpus": 2, "batch_size_per_gpu": 8, "model": "train.py", **unstated}
    return make_spec(script=command, epochs=21, windows=20, **{**shape, **fields})


def block_of(sizes: list[tuple[int, int]], calls: list[CountedCall] | None = None, **seen: Any) -> Block:
    """A block of ten updates of 1 ms."""
    fields: dict[str, Any] = {"time": 10_000_000, "steps": [1_000_000] * 10, "optimizer": 0, "wait": 0, "data": 0}
    fields |= {
        "started": 1,
        "updates": 10,
        "passes": 0,
        "all_passes": 10,
        "items": None,
        "unit": "",
        "left_out": [],
        "merit": None,
        "activity": [],
        "flops": None,
    }
    return Block(sizes=sizes, calls=calls or [], skipped=[], seen=SEEN | seen, memory={}, **fields)


TAKES_SIZE = {"command": "train.py {batch_size_per_gpu}"}
ALONE = {"num_gpus": 1, "strategy": "single"}
NO_EXCHANGE = ("the 2 ranks exchange nothing in 10 updates", "ACCELERATE_USE_CPU")


@pytest.mark.parametrize(
    ("fields", "sizes", "seen", "words"),
    [
        (TAKES_SIZE, [(4, 10)], {}, ("8 samples", "gives 4", "write {global_batch_size}")),
        (TAKES_SIZE, [(8, 40)], {}, ("8 samples", "gives 32", "--grad-accumulation 4")),
        (TAKES_SIZE, [(16, 20)], {}, ("gives 32", "their first tensor, and not 8", "ddpscale.items()")),
        (TAKES_SIZE, [(8, 5)], {}, ("gives 4", "let each update take as many batches, or call ddpscale.i")),
        ({}, [(16, 20)], {}, ("gives 32", "--batch-size 16 --grad-accumulation 2")),
        (TAKES_SIZE, [(12, 10)], {}, ("gives 12", "let the script use its argument")),
        ({}, [(3, 1), (8, 9)], {}, ()),  # a smaller last batch is no other batch
        ({}, [(3, 10)], {}, ("gives 3",)),
        *(({"batch_size_per_gpu": size}, [(size, 11)], {}, ()) for size in (3, 8, 32, 100, 128)),  # one batch ahead
        *(({"batch_size_per_gpu": size}, [(size, 12)], {}, ("gives",)) for size in (3, 8, 32, 100, 128)),
        ({}, [(8, 10)], {"world_size": 1}, ("2 processes, and the script trains in 1;", "write {num_gpus} there")),
        ({}, [(8, 10)], FSDP, ("strategy=ddp, and the script uses FSDPModule; give --strategy fsdp",)),
        # two trainings side by side are no training on two ranks: their speed-up would be near two
        ({}, [(8, 10)], {"wrappers": [], "collectives": 0}, NO_EXCHANGE),
        ({}, [(8, 10)], {"collectives": 0}, NO_EXCHANGE),
        ({}, [(8, 10)], {"wrappers": [], "collectives": None}, ()),  # the group does not number them
        ({"strategy": "zero1"}, [(8, 10)], {}, ("strategy=zero1", "uses DistributedDataParallel; give --strategy ddp")),
        ({"strategy": "zero1"}, [(8, 10)], {"optimizers": ["ZeroRedundancyOptimizer"]}, ()),
        (
            {},
            [(8, 10)],
            {"wrappers": ["DTensor"]},
            ("uses DTensor; only data parallelism is measured: leave the script out",),
        ),
        (ALONE, [(8, 10)], {"world_size": 1, "wrappers": [], "collectives": 0}, ()),
    ],
)
def test_a_script_that_does_something_else_than_its_configuration_is_refused_with_a_cure(
    fields: dict[str, Any], sizes: list[tuple[int, int]], seen: dict[str, Any], words: tuple[str, ...]
) -> None:
    said = ""
    try:
        check_observed(spec_of(**fields), block_of(sizes, **seen))
    except ScriptProblem as refused:
        said = str(refused)
    assert (bool(said), [word for word in words if word not in said]) == (bool(words), []), said


@pytest.mark.parametrize(
    ("asked", "passes", "words"),
    [
        (1, 10, ""),
        (4, 40, ""),
        (4, 0, ""),  # none was seen, so none is counted
        (4, 20, "asks for 4 passes an update on each GPU, and the script makes 2; it divides"),
        (1, 400, "asks for 1 passes an update on each GPU, and the script makes 40; give --grad-accumulation 40"),
    ],
)
def test_without_a_loader_the_passes_of_an_update_are_those_of_the_configuration(
    asked: int, passes: int, words: str
) -> None:
    """On two ranks nanoGPT makes half of the passes that it is given."""
    block = msgspec.structs.replace(block_of([]), passes=passes, wait=None)
    with pytest.raises(ScriptProblem, match=words) if words else contextlib.nullcontext():
        check_observed(spec_of(grad_accumulation=asked), block)
    check_observed(spec_of(grad_accumulation=asked), msgspec.structs.replace(block, items=64.0))
    check_observed(spec_of(grad_accumulation=1), msgspec.structs.replace(block, sizes=[(8, 10)]))


def test_batches_of_a_loader_that_have_no_size_are_counted_by_the_script() -> None:
    with pytest.raises(ScriptProblem, match="have no size that can be read"):
        check_observed(spec_of(), block_of([]))
    check_observed(spec_of(), msgspec.structs.replace(block_of([]), items=80.0))
    check_observed(spec_of(batch_size_per_gpu=1), block_of([]))


def test_where_the_script_names_its_items_their_batches_are_not_checked() -> None:
    with pytest.raises(ScriptProblem):
        check_observed(spec_of(), block_of([(1, 10)]))
    check_observed(spec_of(), msgspec.structs.replace(block_of([(1, 10)]), items=4096.0))


@pytest.mark.parametrize(
    ("batch", "num_batches", "said"),
    [(8, 20, ""), (16, 10, ""), (8, 10, "8 samples an update on each GPU, and the loader of rank 0 gives 4")],
)
def test_the_batches_of_a_loader_that_feeds_two_ranks_are_divided_among_them(
    batch: int, num_batches: int, said: str
) -> None:
    """With dispatch_batches the loader of rank 0 gives two batches an update, with split_batches one for two ranks."""
    per_update = num_batches // 10
    fed = msgspec.structs.replace(block_of([(batch, num_batches)]), passes=10)
    fed = msgspec.structs.replace(fed, flops=(6400, None, [], [(batch, per_update)], 1))
    blocks = with_fed_ranks([fed, block_of([])])
    with pytest.raises(ScriptProblem, match=said) if said else contextlib.nullcontext():
        check_observed(spec_of(**TAKES_SIZE), blocks[0])
    samples = batch * num_batches // 2
    assert [script_blocks.samples_of(block, False) for block in blocks] == [samples, samples]
    assert flops_of(spec_of(), blocks[0]).per_sample == 6400 * 10 // samples
    assert [batch_of(block)[1] for block in blocks] == [1.0, 1.0]
    assert with_fed_ranks([fed, fed]) == [fed, fed]


def test_batches_of_a_step_that_is_left_out_are_not_of_the_others() -> None:
    """The loader gave a batch to each of ten steps; one step is left out."""
    (block,) = without_left_out([msgspec.structs.replace(block_of([(8, 10)]), left_out=[2])])
    assert (len(block.steps), batch_of(block)) == (9, (8, 1.0))


def test_flops_are_of_the_samples_of_the_update_that_was_counted() -> None:
    """A timed block may have the smaller batches of the end of the data."""
    counted = msgspec.structs.replace(block_of([(8, 9), (4, 1)]), flops=(6400, None, [], [(8, 1)], 1))
    assert flops_of(spec_of(), counted).per_sample == 800
    assert flops_of(spec_of(), msgspec.structs.replace(counted, flops=(6400, 64.0, [], [(8, 1)], 1))).per_sample == 100
    assert flops_of(spec_of(), msgspec.structs.replace(counted, flops=(6400, None, [], [], 1))).per_sample == 800


@pytest.mark.parametrize(("all_passes", "is_counted"), [(10, True), (11, True), (12, False), (20, False)])
def test_flops_of_an_update_that_is_unlike_the_others_are_not_those_of_a_sample(
    all_passes: int, is_counted: bool
) -> None:
    """Ten updates of a critic, each with one pass; every fifth has one of the generator beside it."""
    block = msgspec.structs.replace(block_of([(8, 10)]), all_passes=all_passes, flops=(6400, None, [], [(8, 1)], 1))
    found = flops_of(spec_of(), block)
    said = "FLOPs not counted: the update that was counted makes 1 passes, and the mean one"
    assert (found.per_sample, said in (found.note or "")) == ((800, False) if is_counted else (None, True))


@pytest.mark.parametrize(
    ("update_ns", "updates", "length"), [(25e6, 600, 10), (1e9, 600, 5), (1e6, 600, 100), (1e9, 6, 1)]
)
def test_a_block_fills_a_window_with_at_most_the_updates_that_the_point_allows(
    update_ns: float, updates: int, length: int
) -> None:
    assert num_timed_updates(spec_of(updates=updates), update_ns) == length


def test_a_step_that_one_rank_leaves_out_counts_on_none() -> None:
    first, second = block_of([(8, 10)]), block_of([(8, 10)])
    slow = msgspec.structs.replace(second, steps=[1_000_000] * 9 + [500_000_000], left_out=[9])
    left = without_left_out([first, slow])
    assert [(block.time, len(block.steps), block.share) for block in left] == [(9_000_000, 9, 0.9)] * 2


@pytest.mark.parametrize(
    ("calls", "fields", "seen", "words"),
    [
        (
            [CountedCall("all_reduce", MODEL_BYTES, "", True, 40)],
            {"grad_accumulation": 4},
            {},
            "in each of 4 passes: 16 MB",
        ),
        ([CountedCall("all_reduce", MODEL_BYTES, "", True, 20)], {}, {}, "travel 2.0 times: 8 MB"),
        (
            [CountedCall("all_reduce", MODEL_BYTES, "", True, 10)],
            {},
            {"number_type": "bfloat16"},
            "fp32 beside bf16 computation: 4 MB",
        ),
        (
            [CountedCall("all_reduce", MODEL_BYTES, "", False, 10)],
            {},
            {},
            "4 MB of gradients an update travel after the",
        ),
        (
            [CountedCall("all_reduce", MODEL_BYTES, "", True, 10)],
            {"device": "cuda"},
            {"backend": "gloo"},
            "sockets of Gloo",
        ),
        ([], {}, {}, "none of 4 MB of gradients travel"),
        (
            [SCATTER, CountedCall("all_gather", MODEL_BYTES, "", True, 20)],
            {},
            FSDP,
            "one unit gathers the whole model, 8 MB",
        ),
        (
            [SCATTER, CountedCall("all_gather", MODEL_BYTES // 10, "", True, 400)],
            {},
            FSDP,
            "gathered 4.0 times an update",
        ),
    ],
)
def test_the_ledger_names_what_travels_without_need(
    calls: list[CountedCall], fields: dict[str, Any], seen: dict[str, Any], words: str
) -> None:
    spec = spec_of(**fields)
    block = block_of([(8, 10 * spec.grad_accumulation)], calls, **seen)
    (note,) = find_mistakes(spec, block, transfers_of(block)[0])
    assert words in note


def test_the_ledger_names_collectives_that_no_strategy_calls() -> None:
    transfers, notes = transfers_of(block_of([(8, 10)], [ONCE, CountedCall("all_to_all", 500_000, "", True, 20)]))
    assert [transfer.kind for transfer in transfers] == ["gradients"]
    assert notes == ["all_to_all of 1 MB an update is counted in no column"]


def test_the_ledger_is_silent_where_gradients_travel_once_and_names_what_stays_real() -> None:
    block = block_of(
        [(8, 10)],
        [
            CountedCall("all_reduce", MODEL_BYTES, "", True, 10),
            CountedCall("all_reduce", 4, "a single number", True, 10),
        ],
    )
    transfers, notes = transfers_of(block)
    assert [transfer.bytes_per_step for transfer in transfers] == [MODEL_BYTES]
    assert notes == ["all_reduce stays real: a single number"]
    assert [*find_mistakes(spec_of(), block, transfers)] == []


@pytest.mark.parametrize(
    ("calls", "seen"),
    [
        # gradients of 8 bits, which the host may read
        ([CountedCall("all_gather", MODEL_BYTES // 4, "integers, which the host may read", True, 10)], {}),
        ([CountedCall("send", MODEL_BYTES, "only the sender has the value", False, 10)], {}),
        # a matrix of correlations in the forward pass, beside the gradients
        ([ONCE, CountedCall("all_reduce", 3 * MODEL_BYTES, "", False, 10)], {}),
        # HSDP, over two groups of two
        ([SCATTER, CountedCall("all_reduce", MODEL_BYTES // 2, "", True, 10)], FSDP),
    ],
)
def test_the_ledger_calls_nothing_a_mistake_that_is_none(calls: list[CountedCall], seen: dict[str, Any]) -> None:
    block = block_of([(8, 10)], calls, **seen)
    assert [*find_mistakes(spec_of(), block, transfers_of(block)[0])] == []


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
        {IS_SECOND} or os.write(2, {WATCHDOG!r})
        signal.pause()
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
        assert found.script is not None
        assert found.script.has_launcher_variables


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
    (found,) = run_ranks(folder, TRAIN + lines, monkeypatch, batch_size_per_gpu=1)
    assert isinstance(found, Measurement), found
    assert found.script is not None
    assert (found.script.batch_size, found.script.batches_per_update) == (1, 1.0)
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
    (found,) = run_ranks(folder, TRAIN + lines, monkeypatch, update_by="SGD")
    assert isinstance(found, Measurement), found
    assert (found.num_parameters, found.gradient_bytes) == (4, 16)


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
    text = TRAIN + "for number in range(155): update(), torch.save(weight, f'{number}.pt')"
    found, _ = run_ranks(folder, text, monkeypatch, world_size=2, **axes)
    assert isinstance(found, Measurement), found
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
    words = "updates without torch.save new.pt: silent updates write no weights; turn checkpoints off"
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
    (found,) = run_ranks(folder, text, monkeypatch, **{**LONG, "updates": int(cure[1])})
    assert isinstance(found, Measurement), found


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
            "ALLREDUCE has not ended in 30 s, the time limit of its group: rank 0 is at train.py:20, rank 1 is at",
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
            "the 2 ranks exchange nothing in 5 updates: each trains a model of its own",
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
    own.spec = spec_of(device=device, num_gpus=shape[0], num_nodes=shape[1])
    own.host, own.port, own.has_launcher_variables = "127.0.0.1", 1, True
    assert own.environment()["CUDA_VISIBLE_DEVICES"] == expected
