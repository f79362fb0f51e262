"""What the rank of a script makes of the reports of its probe: the check, the length of a block, and the ledger."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import make_spec

from pipeline.plan.spec import Spec
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
    without_left_out,
)
from pipeline.runner.script_probe import ImportWatch

MODEL_BYTES = 4_000_000
SEEN: dict[str, Any] = {
    "world_size": 2,
    "wrappers": ["DistributedDataParallel"],
    "gradient_bytes": MODEL_BYTES,
    "autocast": None,
    "backend": "nccl",
    "collectives": 10,
    "parameter_type": "float32",
}

FSDP = {"wrappers": ["FSDPModule"]}
SCATTER = CountedCall("reduce_scatter", MODEL_BYTES, "", True, 10)


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
        (TAKES_SIZE, [(16, 20)], {}, ("8 samples", "gives 32", "its batches have 16 samples, and not 8")),
        ({}, [(16, 20)], {}, ("gives 32", "--batch-size 16 --grad-accumulation 2")),
        (TAKES_SIZE, [(12, 10)], {}, ("gives 12", "let the script use its argument")),
        ({}, [(3, 1), (8, 9)], {}, ()),  # a smaller last batch is no other batch
        ({}, [], {}, ()),  # a script without a loader is trusted
        ({}, [(3, 10)], {}, ("gives 3",)),
        *(({"batch_size_per_gpu": size}, [(size, 11)], {}, ()) for size in (3, 8, 32, 100, 128)),  # one batch ahead
        *(({"batch_size_per_gpu": size}, [(size, 12)], {}, ("gives",)) for size in (3, 8, 32, 100, 128)),
        ({}, [(8, 10)], {"world_size": 1}, ("2 processes, and the script trains in 1;", "write {num_gpus} there")),
        ({}, [(8, 10)], FSDP, ("strategy=ddp, and the script uses FSDPModule; give --strategy fsdp",)),
        # two trainings side by side are no training on two ranks: their speed-up would be near two
        ({}, [(8, 10)], {"wrappers": [], "collectives": 0}, NO_EXCHANGE),
        ({}, [(8, 10)], {"collectives": 0}, NO_EXCHANGE),
        ({}, [(8, 10)], {"wrappers": [], "collectives": None}, ()),  # the group does not number them
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


def test_where_the_script_names_its_items_their_batches_are_not_checked() -> None:
    with pytest.raises(ScriptProblem):
        check_observed(spec_of(), block_of([(1, 10)]))
    check_observed(spec_of(), msgspec.structs.replace(block_of([(1, 10)]), items=4096.0))


def test_batches_of_a_step_that_is_left_out_are_not_of_the_others() -> None:
    """The loader gave a batch to each of ten steps; one step is left out."""
    (block,) = without_left_out([msgspec.structs.replace(block_of([(8, 10)]), left_out=[2])])
    assert (len(block.steps), batch_of(block)) == (9, (8, 1.0))


def test_flops_are_of_the_samples_of_the_update_that_was_counted() -> None:
    """A timed block may have the smaller batches of the end of the data."""
    counted = msgspec.structs.replace(block_of([(8, 9), (4, 1)]), flops=(6400, None, [], [(8, 1)]))
    assert flops_of(spec_of(), counted).per_sample == 800
    assert flops_of(spec_of(), msgspec.structs.replace(counted, flops=(6400, 64.0, [], [(8, 1)]))).per_sample == 100
    assert flops_of(spec_of(), msgspec.structs.replace(counted, flops=(6400, None, [], []))).per_sample == 800


@pytest.mark.parametrize(
    ("update_ns", "updates", "length"), [(25e6, 600, 10), (1e9, 600, 5), (1e6, 600, 100), (1e9, 6, 1)]
)
def test_a_block_fills_a_window_with_at_most_the_updates_that_the_point_allows(
    update_ns: float, updates: int, length: int
) -> None:
    assert num_timed_updates(spec_of(updates=updates), update_ns) == length


def test_a_watched_module_may_be_searched_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "watched_here.py").write_text("value = 1")
    seen: list[Any] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [ImportWatch({"watched_here": seen.append}), *sys.meta_path])
    assert importlib.util.find_spec("watched_here")
    assert seen == []
    module = importlib.import_module("watched_here")
    assert (seen, module.value) == ([module], 1)


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
            {"autocast": "bfloat16"},
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
