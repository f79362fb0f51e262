"""What ranks exchange: it arrives as it was sent, and nothing that arrives runs. Checks of their GPUs, by stand-ins."""

import math
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.nn.functional as dist_functions
from factories import assert_says, make_spec, raising
from forked_ranks import run_ranks
from port_attacker import Canary
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from pipeline.communication.profiling import RankTrace, TracedCollective
from pipeline.figures.formulas import GIB
from pipeline.records.record import DeviceMemory, RankEpoch
from pipeline.training import process_group
from pipeline.training.devices import (
    GpuProblem,
    bf16_problem,
    check_gpu_free,
    check_gpu_supported,
    has_kernels_for,
    kernel_problem,
    memory_of_others_bytes,
)
from pipeline.training.loop import RankEpochSeries


@pytest.mark.usefixtures("alone_in_a_group")
def test_values_arrive_as_they_were_sent() -> None:
    memory = [DeviceMemory(rank=0, device="cpu", peak_allocated_bytes=2**40, usable_bytes=None)]
    trace = RankTrace([TracedCollective("all_reduce", 516, 0.5, 3.0)], 3, 2, 1)
    sent_as: list[tuple[Any, Any]] = [
        (True, bool),
        (0.1 + 0.2, float),
        ({"ddp": 2**62}, dict[str, int]),
        (memory, list[DeviceMemory]),
        ((trace, None), tuple[RankTrace | None, str | None]),
        ((None, "rank 0: no profile"), tuple[RankTrace | None, str | None]),
    ]
    for sent, kind in sent_as:
        assert process_group.all_gather(sent, kind) == [sent]


@pytest.mark.usefixtures("alone_in_a_group")
def test_an_epoch_that_diverged_arrives_with_its_part_times() -> None:
    sent = RankEpochSeries(
        RankEpoch(rank=0, num_samples=5), [[0, 1], [2, 3], [4, 5]], [0.5, math.nan, math.inf], [2, 2, 1], 4
    )
    (found,) = process_group.all_gather(sent, RankEpochSeries)
    assert found._replace(losses=[]) == sent._replace(losses=[])
    assert found.losses == pytest.approx([0.5, math.nan, math.inf], nan_ok=True)


class GatheredGradient(torch.autograd.Function):
    """Nothing in the forward pass, an all-reduce of the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradients[0])
        return gradients[0]


def gather_in_autocast(x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        checkpoint(lambda y: torch.cat(dist_functions.all_gather(y @ y.T)), x, use_reentrant=False).sum().backward()


def summed(x: torch.Tensor) -> Any:
    assert dist.group.WORLD is not None
    return functional_collectives.all_reduce(x, "sum", dist.group.WORLD)


@torch.compile(backend="eager")
def compiled(x: torch.Tensor) -> Any:
    return summed(x) + 1


def called_in(module: str) -> Callable[[torch.Tensor], object]:
    """A function of this module of torch that calls a collective."""
    names: dict[str, Any] = {"__name__": module, "dist": dist}
    exec("def reduce(x):\n    dist.all_reduce(x.detach())", names)
    found: Callable[[torch.Tensor], object] = names["reduce"]
    return found


@pytest.mark.fault("F63")
@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda x: dist.all_reduce(x.detach(), async_op=True).wait(), {"all_reduce"}),
        (lambda x: dist.all_gather_into_tensor(torch.empty(4, 2), x.detach()), {"all_gather"}),
        (lambda x: dist.reduce_scatter_tensor(torch.empty(4, 2), x.detach()), {"reduce_scatter"}),
        (lambda x: dist.all_to_all_single(torch.empty(4, 2), x.detach()), {"all_to_all"}),
        (lambda x: dist.broadcast(x.detach(), 0, group=dist.new_group([0])), {"broadcast"}),
        (lambda x: dist.all_gather_object([None], 1), {"all_gather"}),
        (lambda x: dist.barrier(), {"barrier"}),
        (lambda x: summed(x) + 1, {"all_reduce"}),
        (lambda x: GatheredGradient.apply(x).sum().backward(), {"all_reduce"}),  # type: ignore[no-untyped-call]
        (gather_in_autocast, {"all_gather", "scatter"}),
        (compiled, {"all_reduce"}),
        (called_in("torch.distributed.fsdp._fully_shard._fsdp_collectives"), set()),
        (called_in("torch.nn.modules._functions"), {"all_reduce"}),  # a SyncBatchNorm of the model itself
        (lambda x: (x @ x.T).sum().backward(), set()),
    ],
)
def test_the_users_own_collectives_are_seen_wherever_they_run(call: Callable[[Any], object], found: set[str]) -> None:
    watch = process_group.CollectiveWatch()
    x = torch.ones(4, 2, requires_grad=True)
    with watch, torch.compiler.set_stance("force_eager"):
        call(x)
    assert watch.operations == found
    assert watch.gather() == tuple(sorted(found))
    assert dist.all_reduce(torch.ones(1)) is None
    assert watch.operations == found  # not what runs outside


@pytest.mark.fault("F63")
def test_the_collectives_of_an_operation_on_shards_are_seen() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    shards = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    with process_group.CollectiveWatch() as watch:
        shards.softmax(0)
    dist.destroy_process_group()
    assert watch.operations == {"all_gather"}


def gather_beside_an_attacker(rank: int, folder: str) -> None:
    """Gather a value from rank 1, which sends a pickle instead."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 0:
        with pytest.raises(msgspec.MsgspecError):
            process_group.all_gather(True, bool)
        Path(folder, "refused").touch()
    else:
        raw = torch.frombuffer(bytearray(Canary(Path(folder, "canary")).pickled()), dtype=torch.uint8)
        process_group.gather_tensors(torch.tensor([len(raw)]))
        process_group.gather_tensors(raw)
    dist.destroy_process_group()


@pytest.mark.training
@pytest.mark.fault("F42")
def test_a_pickle_from_another_rank_is_refused_and_does_not_run(tmp_path: Path) -> None:
    run_ranks(gather_beside_an_attacker, (str(tmp_path),), 2)
    assert ((tmp_path / "refused").exists(), (tmp_path / "canary").exists()) == (True, False)


def wait_for_a_long_evaluation(rank: int, folder: str) -> None:
    process_group.COLLECTIVE_TIMEOUT_S = 2
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    own = process_group.join_process_group(make_spec(strategy="ddp", num_gpus=2, device="cpu"), Path(folder, "store"))

    def evaluate() -> str:
        time.sleep(4)
        return "tested"

    found = process_group.on_first_rank(own, evaluate, "waited")
    process_group.barrier(own)
    Path(folder, f"rank{rank}").write_text(found)
    dist.destroy_process_group()


@pytest.mark.training
def test_the_other_ranks_wait_for_the_first_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    run_ranks(wait_for_a_long_evaluation, (str(tmp_path),), 2)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["tested", "waited"]


TORCH_2_11 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # of its wheel for CUDA 13.0
V100, A40, L4, H100 = (7, 0), (8, 6), (8, 9), (9, 0)
UUID = "aaaaaaaa-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_70", V100, True),
        ("sm_75", V100, False),  # a later minor version
        ("sm_80", L4, True),  # an earlier minor version of the same major
        ("sm_90", A40, False),
        ("sm_80", H100, False),  # another major
        ("sm_100", (10, 0), True),
        ("sm_120", (12, 1), True),
        ("sm_90a", H100, True),
        ("sm_100a", (10, 3), False),  # that model alone
        ("sm_100f", (10, 3), True),  # its family
        ("compute_90", (10, 0), True),  # compiled for the GPU when it is loaded
        ("compute_90", A40, False),
        ("gfx90a", H100, False),
    ],
)
def test_what_code_for_an_architecture_runs_on(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert has_kernels_for(arch, capability) == runs


def test_a_torch_without_kernels_for_the_gpu_says_how_to_install_another() -> None:
    volta = kernel_problem("Tesla V100-SXM2-32GB", V100, TORCH_2_11)
    assert_says(volta, "no kernels for sm_70 (Tesla V100-SXM2-32GB)", "install with -c constraints-volta.txt")
    pascal = kernel_problem("Tesla P100", (6, 0), TORCH_2_11)
    assert_says(pascal, "no kernels for sm_60 (Tesla P100)", "install")
    assert "volta" not in str(pascal)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), A40, L4, H100, (10, 0), (12, 0)])
def test_the_pinned_torch_runs_on_later_gpus(capability: tuple[int, int]) -> None:
    assert kernel_problem("a GPU", capability, TORCH_2_11) is None


NO_BF16 = "bf16 needs compute capability 8.0 or later; Tesla V100 has 7.0"


@pytest.mark.parametrize(
    ("capability", "precision", "said"),
    [
        (V100, "compressed", f"{NO_BF16}; leave out gradient_compression"),
        (H100, "compressed", None),
        (V100, "reduced", f"{NO_BF16}; leave out reduce_dtype"),
        (V100, "gathered", f"{NO_BF16}; use precision=fp32"),
        (V100, "bf16", "bf16 needs compute capability 8.0 or later; Tesla V100 has 7.0; use precision=fp32"),
        ((7, 5), "bf16", "bf16 needs compute capability 8.0 or later; Tesla V100 has 7.5; use precision=fp32"),
        ((8, 0), "bf16", None),
        (H100, "bf16", None),
        (V100, "tf32", None),  # computed in fp32, and recorded so
        (V100, "fp32", None),
    ],
)
def test_bf16_is_refused_where_it_would_be_emulated(
    capability: tuple[int, int], precision: str, said: str | None
) -> None:
    sent: dict[str, dict[str, Any]] = {
        "compressed": {"strategy": "ddp", "num_gpus": 2, "gradient_compression": "bf16"},
        "reduced": {"strategy": "fsdp", "num_gpus": 2, "reduce_dtype": "bf16"},
        "gathered": {"strategy": "fsdp", "num_gpus": 2, "param_dtype": "bf16", "precision": "bf16"},
    }
    spec = make_spec(**sent.get(precision, {"precision": precision}))
    assert bf16_problem("Tesla V100", capability, spec) == said


def test_a_rank_is_refused_before_it_touches_a_gpu_that_cannot_run_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: TORCH_2_11)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["NVIDIA A40", "Tesla V100"].__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [A40, V100].__getitem__)
    check_gpu_supported(make_spec(), [0])
    check_gpu_supported(make_spec(device="cpu", precision="bf16"), [])
    assert kernel_problem("AMD Instinct", H100, []) is None, "a torch that names no architecture is not judged"
    with pytest.raises(GpuProblem, match=r"no kernels for sm_70 \(Tesla V100\)") as refused:
        check_gpu_supported(make_spec(), [0, 1])
    assert refused.value.kind == "unsupported_gpu"


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({0: int(118.5 * GIB)}, "another process holds 118.5 GiB of GPU 0; run again on a free GPU"),
        (
            {0: 0, 1: 2 * GIB, 2: 3 * GIB},
            "another process holds 2.0 GiB of GPU 1, 3.0 GiB of GPU 2; run again on a free GPU",
        ),
        ({0: GIB}, None),  # not more than that
        ({0: 0}, None),
        ({0: None}, None),  # not known
        ({}, None),
    ],
)
def test_more_than_a_gib_of_others_is_a_neighbour(others: dict[int, int | None], said: str | None) -> None:
    with pytest.raises(GpuProblem, match=f"^{re.escape(said)}") if said else nullcontext() as found:
        check_gpu_free(others)
    assert found is None or found.value.kind == "gpu_shared"


class MadeUpNvmlError(Exception):
    pass


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, *, used_gib: float, reserved_gib: float) -> None:
    """Simulate an 80 GiB card: all processes hold `used_gib`, torch in this one `reserved_gib`."""
    facts = SimpleNamespace(uuid=UUID, total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (80 * GIB - int(used_gib * GIB), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: int(reserved_gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)


def pretend_driver(monkeypatch: pytest.MonkeyPatch, processes: dict[int, int | None] | None) -> None:
    """Simulate pynvml with those processes on the card of that UUID; None: no card."""

    def find(uuid: str) -> str:
        if processes is None or uuid != f"GPU-{UUID}":
            raise MadeUpNvmlError("Not Found")
        return uuid

    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError, nvml.nvmlInit, nvml.nvmlDeviceGetHandleByUUID = MadeUpNvmlError, lambda: None, find
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in (processes or {}).items()
    ]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_what_the_driver_does_not_count_as_this_process_is_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, used_gib=79, reserved_gib=4)
    pretend_driver(monkeypatch, {os.getpid(): 9 * GIB, 1: 70 * GIB})  # 4 of torch, 5 of NCCL and CUDA
    assert memory_of_others_bytes(make_spec(), 0) == 70 * GIB


@pytest.mark.parametrize("processes", [None, {}, {1: 70 * GIB}, {os.getpid(): None}])
@pytest.mark.parametrize(("num_gpus", "expected_gib"), [(1, 74), (2, 73)])
def test_where_the_driver_does_not_know_this_process_its_own_use_is_estimated(
    monkeypatch: pytest.MonkeyPatch, processes: dict[int, int | None] | None, num_gpus: int, expected_gib: int
) -> None:
    """79 GiB less 4 of torch, less 1 of a context, less 1 of NCCL if there are several GPUs."""
    pretend_gpu(monkeypatch, used_gib=79, reserved_gib=4)
    pretend_driver(monkeypatch, processes)
    assert memory_of_others_bytes(make_spec(strategy="ddp", num_gpus=num_gpus), 0) == expected_gib * GIB


def test_without_the_drivers_library_it_is_estimated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, used_gib=79, reserved_gib=78.5)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert memory_of_others_bytes(make_spec(), 0) == 0


@pytest.mark.parametrize(
    ("text", "expected"), [("CUDA error: out of memory", 80 * GIB), ("CUDA error: invalid device ordinal", None)]
)
def test_a_gpu_without_room_for_a_context_is_all_others(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: int | None
) -> None:
    pretend_gpu(monkeypatch, used_gib=0, reserved_gib=0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", raising(RuntimeError(text)))
    assert memory_of_others_bytes(make_spec(), 0) == expected
