"""What is checked in the reports of a script's ranks, and what the record gets from them."""

import contextlib
from typing import Any

import msgspec
import pytest
from factories import assert_says, make_script_spec

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
    samples_of,
    takes_a_batch_a_pass,
    transfers_of,
    with_fed_ranks,
    without_left_out,
    without_read_ahead,
)

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
    "repeats_passes": False,
    "optimizers": ["AdamW"],
    "is_compiled": False,
    "replays_graphs": False,
}

FSDP = {"wrappers": ["FSDPModule"]}
SCATTER = CountedCall("reduce_scatter", MODEL_BYTES, "", True, 10)
ONCE = CountedCall("all_reduce", MODEL_BYTES, "", True, 10)


def spec_of(command: str = "train.py", **fields: Any) -> Spec:
    shape = {"strategy": "ddp", "num_gpus": 2, "batch_size_per_gpu": 8, "epochs": 21, "windows": 20}
    return make_script_spec(command, **{**shape, **fields})


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


@pytest.mark.parametrize(
    ("sizes", "passes", "counted"),
    [
        ([(8, 12)], 10, [(8, 10)]),  # two ahead
        ([(8, 8)], 10, [(8, 10)]),  # at the end of an epoch
        ([(8, 10), (3, 1)], 10, [(8, 9), (3, 1)]),
        ([(8, 20)], 10, None),  # two batches a pass
        ([(8, 13)], 10, None),
        ([(8, 9)], 2, None),
        ([(8, 12)], 11, None),  # another number of passes than the configuration says
        ([], 10, None),
    ],
)
def test_what_a_loader_has_read_ahead_is_no_part_of_an_update(
    sizes: list[tuple[int, int]], passes: int, counted: list[tuple[int, int]] | None
) -> None:
    block = msgspec.structs.replace(block_of(sizes), passes=passes)
    assert takes_a_batch_a_pass(spec_of(), block) == (counted is not None)
    if counted is not None:
        assert without_read_ahead(block).sizes == counted
    short = msgspec.structs.replace(block_of([(8, 7)]), passes=5, steps=[1_000_000] * 5)
    assert not takes_a_batch_a_pass(spec_of(), short)
    assert without_read_ahead(msgspec.structs.replace(block_of([(3, 5), (8, 5)]), passes=12)).sizes == [(3, 5), (8, 7)]


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
        ({"batch_size_per_gpu": 32}, [(30, 10)], {}, ("gives 30",)),  # another batch is none that is fetched ahead
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
    assert [samples_of(block, False) for block in blocks] == [samples, samples]
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
    """Also one that stays real, as the backward pass of an all-gather on gloo."""
    scatter = CountedCall("scatter", 500_000, "the receiver has no value of its own", True, 20)
    transfers, notes = transfers_of(
        block_of([(8, 10)], [ONCE, CountedCall("all_to_all", 500_000, "", True, 20), scatter])
    )
    assert [transfer.kind for transfer in transfers] == ["gradients"]
    counted = [f"{name} of 1 MB an update is counted in no column" for name in ("all_to_all", "scatter")]
    assert notes[1:] == counted


def test_the_ledger_says_where_updates_do_not_exchange_alike() -> None:
    """As in local SGD, whose ranks meet in each fourth update."""
    transfers, notes = transfers_of(block_of([(8, 10)], [CountedCall("all_reduce", MODEL_BYTES, "", False, 3)]))
    assert [transfer.calls_per_step for transfer in transfers] == [0.3]
    assert_says(notes[0], "counted in 10 updates, which do not call the same", "--warmup")


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
    assert notes == ["all_reduce stays real: a single number; exposed communication is without it"]
    assert [*find_mistakes(spec_of(), block, transfers)] == []


@pytest.mark.parametrize(
    ("calls", "seen"),
    [
        # gradients of 8 bits, which the host may read
        ([CountedCall("all_gather", MODEL_BYTES // 4, "integers, which the host may read", True, 10)], {}),
        ([CountedCall("send", MODEL_BYTES, "only the sender has the value", False, 10)], {}),
        # a matrix of correlations in the forward pass, beside the gradients
        ([ONCE, CountedCall("all_reduce", 3 * MODEL_BYTES, "", False, 10)], {}),
        # the passes of a closure, as of L-BFGS
        ([CountedCall("all_reduce", MODEL_BYTES, "", True, 40)], {"repeats_passes": True}),
        # HSDP, over two groups of two
        ([SCATTER, CountedCall("all_reduce", MODEL_BYTES // 2, "", True, 10)], FSDP),
    ],
)
def test_the_ledger_calls_nothing_a_mistake_that_is_none(calls: list[CountedCall], seen: dict[str, Any]) -> None:
    block = block_of([(8, 10)], calls, **seen)
    assert [*find_mistakes(spec_of(), block, transfers_of(block)[0])] == []
