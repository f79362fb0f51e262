"""The probe in the process of a script: what it counts, what it sees, and what it waits for."""

import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from factories import raising, write_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipeline.communication.process_group import Call
from pipeline.runner.script_probe import (
    MAX_OTHER_STEPS,
    ImportWatch,
    NoUpdate,
    Probe,
    instances_of,
    is_wrapper,
    num_shards,
    run_script,
    sharded_types,
    size_of,
)


def probe_with(**fields: Any) -> Any:
    """A probe that has these attributes alone, as if it had not begun."""
    probe = Probe.__new__(Probe)
    vars(probe).update(fields)
    return probe


def test_a_script_that_has_made_no_optimizer_of_torch_ends_after_1000_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for objects, ends in (([optimizer], contextlib.nullcontext()), ([], pytest.raises(NoUpdate))):
        monkeypatch.setattr(gc, "get_referrers", lambda *_, objects=objects: objects)
        probe = probe_with(torch=torch, counted=None, capturing=None, num_passes_since_step=0, num_all_passes=0)
        with ends:
            for _ in range(1100):
                probe.count_pass()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by torch.compile
def test_a_search_for_wrappers_leaves_the_tuples_of_other_threads_alone() -> None:
    """The thread that pins memory builds tuples from generators. Nothing else may hold one that is not complete."""
    stop, errors, interval = threading.Event(), list[SystemError](), sys.getswitchinterval()

    def build_tuples() -> None:
        while not stop.is_set():
            try:
                tuple(number for number in range(100))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build_tuples)
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    compiled = torch.compile(nn.Linear(1, 1))
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        found = [instances_of(nn.Module, is_wrapper) for _ in range(20)]
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert all({id(wrapped), id(compiled)} <= set(map(id, some)) for some in found)
    assert errors == []


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


def test_a_script_may_wait_for_an_asynchronous_save_that_is_skipped() -> None:
    probe = probe_with(is_silenced=True, skipped=Counter())
    saved = probe.save(lambda *_, **__: pytest.fail("it saves"), "async_save", ({},), {"checkpoint_id": "steps/3"})
    assert (saved.result(0), probe.skipped) == (None, {"async_save 3": 1})


@pytest.mark.parametrize(
    ("is_convolution", "capability", "matmul", "conv", "expected"),
    [
        (True, (9, 0), "none", "tf32", "tf32"),  # as torch begins
        (False, (9, 0), "none", "tf32", "float32"),
        (False, (9, 0), "tf32", "ieee", "tf32"),
        (True, (7, 0), "none", "tf32", "float32"),  # a V100 has no TF32
    ],
)
def test_fp32_is_tf32_where_the_gpu_rounds_to_it(
    is_convolution: bool, capability: tuple[int, int], matmul: str, conv: str, expected: str
) -> None:
    named = SimpleNamespace
    backends = named(cuda=named(matmul=named(fp32_precision=matmul)), cudnn=named(conv=named(fp32_precision=conv)))
    probe = probe_with(
        torch=named(cuda=named(get_device_capability=lambda device: capability), backends=backends),
        device=0,
        flops_by_type=Counter({("float32", is_convolution): 2, ("bfloat16", False): 1}),
        flops=[3, None, [], [], 1],
    )
    assert probe.number_type("float64") == expected
    probe.flops_by_type = Counter()
    assert probe.number_type("float64") == "float64"
    probe.flops = None  # a script that compiles may cast fp32 parameters
    assert [probe.number_type(name) for name in ("bfloat16", "float32")] == ["bfloat16", ""]


@pytest.mark.usefixtures("alone_in_a_group")
def test_the_type_that_fsdp_casts_parameters_to_is_seen() -> None:
    mesh = init_device_mesh("cpu", (1,))
    plain, halved = fully_shard(nn.Linear(2, 2), mesh=mesh), nn.Linear(2, 2)
    fully_shard(halved, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    first = FullyShardedDataParallel(
        nn.Linear(2, 2),
        sharding_strategy=ShardingStrategy.NO_SHARD,  # with one rank
        mixed_precision=MixedPrecision(torch.float16),
        device_id=torch.device("cpu"),
    )
    assert sharded_types([plain, nn.Linear(2, 2)]) == {}
    assert sharded_types([plain, halved]) == {"bfloat16": 1}
    assert sharded_types([first]) == {"float16": 1}
    assert (num_shards([first, plain]), num_shards([])) == (1, 1)
    sharded: Any = first
    sharded.sharding_strategy, sharded.world_size = ShardingStrategy.FULL_SHARD, 2
    assert num_shards([plain, sharded]) == 2


class Subclass(torch.optim.SGD):
    """An optimizer of the user's, whose step calls that of torch."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class FailsTwice(Subclass):
    num_failures = 0

    def step(self, closure: Any = None) -> Any:
        self.num_failures += 1
        if self.num_failures > 2:
            return super().step(closure)
        raise ValueError


def test_a_step_within_a_step_of_the_same_optimizer_is_one_and_a_failed_one_is_forgotten() -> None:
    ended: list[Any] = []
    probe = probe_with(
        steps=[],
        has_new_batch=False,
        num_closure_passes=0,
        num_passes_since_step=0,
        repeats_passes=False,
        optimizers={},
        optimizer_names=[],
        counted=None,
        capturing=None,
        num_steps=0,
        mark=lambda: None,
        end_update=ended.append,
    )
    weight = torch.zeros(1, requires_grad=True)
    failing, inner = FailsTwice([weight]), Subclass([weight])
    plain = torch.optim.SGD([weight])  # whose step torch wraps, too
    hooks = (register_optimizer_step_pre_hook(probe.before_step), register_optimizer_step_post_hook(probe.after_step))
    try:
        for optimizer in (inner, plain, failing, failing, failing):
            with contextlib.suppress(ValueError):
                optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    assert ended == [inner, plain, failing]
    assert probe.num_steps == 3


def make_counting_probe() -> Any:
    """A probe in the middle of a long warm-up."""
    counts = ("num_updates", "num_passes", "num_passes_since_step", "num_all_passes", "num_replayed")
    return probe_with(
        **dict.fromkeys(counts, 0),
        **dict.fromkeys(("counted", "update_by", "counter", "capturing")),
        optimizers=weakref.WeakKeyDictionary(),
        optimizer_names=[],
        num_others=Counter(),
        captures=weakref.WeakKeyDictionary(),
        is_child=False,
        fetched={},
        sources=[],
        source=(),
        sizes=Counter(),
        left=1000,
        block={"updates": 5},
        mark=lambda: 0,
        count_flops=lambda: None,
    )


def new_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)])


def test_of_many_optimizers_that_step_in_turn_one_counts() -> None:
    probe, optimizers = make_counting_probe(), [new_optimizer() for _ in range(MAX_OTHER_STEPS + 20)]
    for _ in range(10):
        for optimizer in optimizers:
            probe.end_update(optimizer)
    assert probe.num_updates == 10
    later = new_optimizer()
    for _ in range(MAX_OTHER_STEPS + 5):
        probe.end_update(later)  # and the first does not step any more
    assert probe.num_updates == 15


def test_an_optimizer_that_is_gone_is_replaced_at_once_and_a_forked_child_counts_nothing() -> None:
    probe = make_counting_probe()
    for _ in range(3):  # folds
        optimizer = new_optimizer()
        for _ in range(4):
            probe.end_update(optimizer)
        del optimizer
        gc.collect()
    assert (probe.num_updates, len(probe.optimizers), probe.optimizer_names) == (12, 0, ["SGD"] * 3)
    probe.leave_child()
    probe.end_update(new_optimizer())
    assert probe.num_updates == 12


def make_capturing_probe(controller: Any = None) -> Any:
    """A counting probe of a script whose group numbers its collectives: 7 have been called, 9 after a capture."""
    probe, numbers = make_counting_probe(), itertools.chain([7], itertools.repeat(9))
    vars(probe).update(torch=torch, steps=[], is_skipping=False, controller=controller)
    probe.num_collectives = lambda: next(numbers)
    return probe


def test_a_replay_of_a_cuda_graph_makes_what_was_captured_and_the_capture_itself_nothing() -> None:
    probe, optimizer, graph = make_capturing_probe(), new_optimizer(), nn.Module()
    probe.begin_capture(lambda _: None, graph)
    for _ in range(3):  # more than one step of an optimizer are one update
        probe.pass_back(lambda: None)
        probe.end_update(optimizer)
    probe.end_capture(lambda _: None, graph)
    assert (probe.num_updates, probe.num_all_passes, probe.num_replayed) == (0, 0, 0)
    for captured in (graph, graph, nn.Module()):
        probe.replay(lambda _: None, captured)
    assert (probe.num_updates, probe.num_passes, probe.num_all_passes, probe.num_replayed) == (2, 6, 6, 4)


def test_a_script_whose_capture_fails_goes_on_by_its_steps() -> None:
    probe, optimizer, graph = make_capturing_probe(), new_optimizer(), nn.Module()
    probe.begin_capture(lambda _: None, graph)
    probe.end_update(optimizer)
    with pytest.raises(RuntimeError, match="capture failed"):
        probe.end_capture(raising(RuntimeError("capture failed")), graph)
    probe.end_update(optimizer)
    assert (probe.num_updates, len(probe.captures)) == (1, 0)


@pytest.mark.parametrize("counts", [None, Counter({Call("broadcast", 8, num_ranks=2): 1})], ids=["timed", "warm-up"])
def test_a_cuda_graph_with_collectives_is_refused_where_they_are_silenced_in_each_block(counts: Any) -> None:
    controller = SimpleNamespace(counts=counts)
    probe, graph = make_capturing_probe(controller), nn.Module()
    probe.begin_capture(lambda _: None, graph)
    probe.end_capture(lambda _: None, graph)  # there are none in it
    probe.begin_capture(lambda _: None, graph)
    controller.counts[Call("all_reduce", 8, num_ranks=2)] += 1
    with pytest.raises(RuntimeError, match="has captured collectives, and nothing can silence them"):
        probe.end_capture(lambda _: None, graph)
    assert controller.counts is counts


def test_what_a_group_of_one_rank_exchanges_does_not_travel() -> None:
    alone, both = (Call("all_reduce", 8, num_ranks=num_ranks) for num_ranks in (1, 2))
    probe = probe_with(controller=SimpleNamespace(counts=Counter({alone: 3, both: 4})))
    assert probe.calls() == {both: 4}


def test_a_linked_script_finds_the_modules_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "real" / "train.py", "import beside_it")
    write_file(tmp_path / "real" / "beside_it.py", "")
    (tmp_path / "link.py").symlink_to("real/train.py")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", [])
    run_script([str(tmp_path / "link.py")])
    assert sys.modules.pop("beside_it").__file__ == str(tmp_path / "real" / "beside_it.py")


@dataclasses.dataclass(slots=True)
class Ragged:
    name: str
    tokens: torch.Tensor


class Stated:
    """A batch of a class of its own, as of SpeechBrain."""

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ({"group": (Ragged("x", torch.zeros(3, 2)), torch.zeros(4))}, 3),
        (torch.tensor(1.0), None),
        ([np.zeros((3, 2)), np.zeros(4)], 3),
        (nn.utils.rnn.pack_sequence([torch.zeros(5), torch.zeros(2), torch.zeros(1)]), 3),
        (SimpleNamespace(num_graphs=3, x=torch.zeros(12, 8)), 3),  # as a batch of torch_geometric
        (["one", "two", "three"], 3),
        (("label", torch.zeros(3)), 3),
        (object(), None),
        (Stated(), 3),
    ],
)
def test_a_batch_has_the_size_of_its_first_tensor_or_array_or_what_it_states(batch: Any, size: int | None) -> None:
    assert size_of(batch, torch.Tensor) == size


BOXES = torch.zeros(28, 4)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ({"boxes": BOXES, "images": torch.zeros(8, 3, 4, 4)}, 8),  # as of YOLO
        (([torch.zeros(3, 4, 4)] * 8, [{"boxes": BOXES}] * 8), 8),  # tuple(zip(*samples)), as of torchvision
        ([{"boxes": BOXES}] * 8, 8),  # the samples as they are
        ({"boxes": BOXES}, 28),
        ((BOXES,) * 8, 28),  # parts of a batch
        ({"x": torch.zeros(8, 2), "scale": np.array(0.5), "raw": [[1] * 10] * 8}, 8),
        ({"scale": np.array(0.5), "boxes": BOXES}, 28),
        ((0, torch.zeros(8, 2), torch.zeros(8), 1.0), 8),
        ({"none": [None] * 200, "x": torch.zeros(8, 2)}, 8),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),  # the last of an epoch
    ],
)
def test_a_batch_of_parts_of_samples_has_the_size_that_the_loader_was_asked_for(batch: Any, size: int) -> None:
    assert size_of(batch, torch.Tensor, 8) == size


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_has_a_size_and_no_shape() -> None:
    assert size_of(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5)]), torch.Tensor) == 2


def make_waiting_probe() -> Any:
    return probe_with(
        **dict.fromkeys(("wait_ns", "num_all_passes", "num_passes_before"), 0),
        torch=torch,
        mark=time.perf_counter_ns,
        is_skipping=False,
        fetched={},
        waits=[],
        sources=[],
        source=(),
        counter=None,
    )


def test_the_training_waits_for_no_loader_of_another_thread() -> None:
    """A queue of the user's stands between them."""
    probe, iterator = make_waiting_probe(), SimpleNamespace(_dataset=None, _index_sampler=None)
    thread = threading.Thread(target=probe.next_batch, args=(lambda _: torch.zeros(2), iterator))
    thread.start()
    thread.join()
    assert (probe.wait_ns, probe.waits, [*probe.fetched.values()]) == (0, [], [{2: 1}])
    probe.next_batch(lambda _: torch.zeros(2), iterator)
    assert (probe.wait_ns > 0, len(probe.waits), [*probe.fetched.values()]) == (True, 1, [{2: 2}])


def test_the_start_of_an_epochs_workers_and_their_end_are_waits() -> None:
    probe, loader = make_waiting_probe(), iter(())
    assert probe.begin_epoch(lambda _: loader, None) is loader
    with pytest.raises(StopIteration):
        probe.next_batch(next, loader)
    assert len(probe.waits) == 2
