"""The probe in the process of a script: what it counts, what it sees, and what it waits for."""

import contextlib
import dataclasses
import importlib.util
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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

from pipeline.runner.script_probe import ImportWatch, Probe, num_shards, sharded_types, size_of


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
    probe = Probe.__new__(Probe)
    probe.is_silenced, probe.skipped = True, Counter()
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
    probe: Any = Probe.__new__(Probe)
    probe.torch = named(cuda=named(get_device_capability=lambda device: capability), backends=backends)
    probe.device, probe.flops_by_type = 0, Counter({("float32", is_convolution): 2, ("bfloat16", False): 1})
    assert probe.number_type("float64") == expected
    probe.flops_by_type = Counter()
    assert probe.number_type("float64") == "float64"


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
    probe: Any = Probe.__new__(Probe)
    probe.steps, probe.optimizers, probe.counted, probe.num_steps = [], {}, None, 0
    ended: list[Any] = []
    probe.mark, probe.end_update = (lambda: None), ended.append
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


@dataclasses.dataclass(slots=True)
class Ragged:
    name: str
    tokens: torch.Tensor


def test_a_batch_of_a_dataclass_has_the_size_of_its_first_tensor() -> None:
    batch = {"group": (Ragged("x", torch.zeros(3, 2)), torch.zeros(4))}
    assert size_of(batch, torch.Tensor) == 3


def make_waiting_probe() -> Any:
    probe: Any = Probe.__new__(Probe)
    probe.torch, probe.mark, probe.is_skipping, probe.fetched = torch, time.perf_counter_ns, False, {}
    probe.wait_ns, probe.waits = 0, []
    return probe


def test_the_training_waits_for_no_loader_of_another_thread() -> None:
    """A queue of the user's stands between them."""
    probe, iterator = make_waiting_probe(), SimpleNamespace(_index_sampler=None)
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
