"""The process group that counts, silences and delays: every collective, called both ways, on two processes."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from pipeline.communication.process_group import (
    DDP_MODULE,
    METHODS,
    Call,
    Controller,
    Mode,
    describe_call,
    install,
    measure_sleep,
)

DELAY_S = 0.05
NUM_STEPS = 5
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Case(NamedTuple):
    """A collective: `call` takes the rank's value and async_op, and returns the work and the tensors to look at.

    Values are of rank 0, which has [1, 2] and rank 1 [3, 4].
    """

    call: Callable[[Tensor, bool], tuple[Any, list[Tensor]]]
    real: list[float]
    silent: list[float]
    counted: tuple[str, int]


def on_output(call: Callable[..., Any], size: int) -> Callable[[Tensor, bool], tuple[Any, list[Tensor]]]:
    def run(own: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
        output = torch.full((size,), torch.nan, device=own.device)
        return call(output, own, async_op=async_op), [output]

    return run


def on_list(own: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    outputs = [torch.full((2,), torch.nan, device=own.device) for _ in range(2)]
    return dist.all_gather(outputs, own, async_op=async_op), outputs


def scatter_list(own: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    output = torch.full((1,), torch.nan, device=own.device)
    return dist.reduce_scatter(output, list(own.split(1)), async_op=async_op), [output]


def gather_on_first(own: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    outputs = [torch.full((2,), torch.nan, device=own.device) for _ in range(2)] if dist.get_rank() == 0 else None
    return dist.gather(own, outputs, async_op=async_op), outputs or [own]


def in_place(call: Callable[..., Any]) -> Callable[[Tensor, bool], tuple[Any, list[Tensor]]]:
    return lambda own, async_op: (call(own, async_op=async_op), [own])


def gather_in_place(own: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    """As FSDP does: the input is the rank's place in the output."""
    whole = torch.full((4,), torch.nan, device=own.device)
    place = whole[2 * dist.get_rank() :][:2].copy_(own)
    return dist.all_gather_into_tensor(whole, place, async_op=async_op), [whole]


def scatter_from_first(own: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    output = torch.full((2,), torch.nan, device=own.device)
    parts = [own, own + 1] if dist.get_rank() == 0 else None
    return dist.scatter(output, parts, async_op=async_op), [output]


CASES = {
    "all_reduce": Case(in_place(dist.all_reduce), [4, 6], [1, 2], ("all_reduce", 8)),
    "broadcast": Case(in_place(lambda own, **how: dist.broadcast(own, 1, **how)), [3, 4], [1, 2], ("broadcast", 8)),
    "reduce": Case(in_place(lambda own, **how: dist.reduce(own, 0, **how)), [4, 6], [1, 2], ("reduce", 8)),
    "gather into": Case(on_output(dist.all_gather_into_tensor, 4), [1, 2, 3, 4], [1, 2, 1, 2], ("all_gather", 16)),
    "gather in place": Case(gather_in_place, [1, 2, 3, 4], [1, 2, 1, 2], ("all_gather", 16)),
    "gather into a list": Case(on_list, [1, 2, 3, 4], [1, 2, 1, 2], ("all_gather", 16)),
    "scatter": Case(on_output(dist.reduce_scatter_tensor, 1), [4], [1], ("reduce_scatter", 8)),
    "scatter a list": Case(scatter_list, [4], [1], ("reduce_scatter", 8)),
    "all to all": Case(on_output(dist.all_to_all_single, 2), [1, 3], [1, 2], ("all_to_all", 8)),
    "gather on one": Case(gather_on_first, [1, 2, 3, 4], [1, 2, 1, 2], ("gather", 8)),
}
REAL_CASES = {  # they stay real
    "integers": Case(in_place(lambda own, **how: dist.all_reduce(own.int(), **how)), [1, 2], [1, 2], ("all_reduce", 8)),
    "a number": Case(in_place(lambda own, **how: dist.all_reduce(own[:1], **how)), [4, 2], [4, 2], ("all_reduce", 4)),
    "from one": Case(scatter_from_first, [1, 2], [1, 2], ("scatter", 16)),
    "barrier": Case(in_place(lambda own, **how: dist.barrier(**how)), [1, 2], [1, 2], ("barrier", 0)),
}
ALL_CASES = CASES | REAL_CASES
MODES: tuple[Mode, ...] = ("real", "silent", "delay")


def run_on_rank(rank: int, folder: str, device_type: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        measure_sleep(10**9)()  # half a second: the clock of an idle GPU is lower, and rises while it works
    dist.init_process_group(BACKENDS[device_type], init_method=f"file://{folder}/store", rank=rank, world_size=2)
    controller = install()
    assert install() is controller
    found = {
        "backend": {"asked": BACKENDS[device_type], "told": dist.get_backend()},
        "cases": {name: run_case(case, controller, rank, device) for name, case in ALL_CASES.items()},
        "objects": exchange_objects(controller, rank),
        "training": train(controller, rank, device),
        "mesh": gather_in_mesh(controller, device),
        "two_streams_s": call_on_two_streams(controller, device),
        "failed": fail_late(controller, device),
    }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_case(case: Case, controller: Controller, rank: int, device: torch.device) -> dict[str, Any]:
    found = {}
    for mode in MODES:
        for is_async in (False, True):
            own = torch.tensor([1.0, 2.0], device=device) + 2 * rank
            dist.barrier()
            synchronize(device)
            with controller.counting() as calls, controller.in_mode(mode, DELAY_S):
                started = time.perf_counter()
                work, tensors = case.call(own, is_async)
                issued = time.perf_counter()
                if work is not None:
                    work.wait()
            synchronize(device)
            ended = time.perf_counter()
            found[f"{mode} {'async' if is_async else 'sync'}"] = {
                "values": torch.cat([tensor.flatten() for tensor in tensors]).tolist(),
                "issued_s": issued - started,
                "time_s": ended - started,
                "delayed_s": controller.delayed_s(),
                "calls": [tuple(call) for call in calls.elements()],
            }
    return found


def exchange_objects(controller: Controller, rank: int) -> list[Any]:
    """Exchange objects while other collectives are silent: their sizes and bytes are integers."""
    objects: list[Any] = [None, None]
    with controller.in_mode("silent"):
        dist.all_gather_object(objects, {"rank": rank})
    return objects


def train(controller: Controller, rank: int, device: torch.device) -> dict[str, Any]:
    """Train BatchNorm under DDP, with its buffers: their integers are silent too."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device))
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)).to(device)
    for _ in range(2):
        model(batch).square().sum().backward()
    found: dict[str, Any] = {}
    for mode in MODES:
        controller.delayed_s()
        times_s = []
        for _ in range(NUM_STEPS):  # others may wait for a busy machine
            with controller.counting() as calls, controller.in_mode(mode, DELAY_S):
                started = time.perf_counter()
                model(batch).square().sum().backward()
                synchronize(device)
                times_s.append(time.perf_counter() - started)
        found[mode] = {"calls": [tuple(call) for call in calls.elements()], "time_s": min(times_s)}
    with controller.in_mode("silent"):
        silent = gradients_of(model, batch)
    return found | {"silent": found["silent"] | {"gradients": silent}, "alone": gradients_of(model.module, batch)}


def gradients_of(model: nn.Module, batch: Tensor) -> list[float]:
    model.zero_grad()
    model(batch).square().sum().backward()
    found = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    values: list[float] = found.tolist()
    return values


def gather_in_mesh(controller: Controller, device: torch.device) -> list[float]:
    """Gather in the sub-group of a mesh, silently."""
    mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("replicate", "shard"))
    output = torch.full((4,), torch.nan, device=device)
    with controller.in_mode("silent"):
        dist.all_gather_into_tensor(output, torch.tensor([1.0, 2.0], device=device), group=mesh.get_group("shard"))
    values: list[float] = output.tolist()
    return values


def call_on_two_streams(controller: Controller, device: torch.device) -> float:
    """Return the time of two delayed calls that do not wait for each other: of two streams, or asynchronous ones."""
    streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else [None, None]
    dist.barrier()
    synchronize(device)
    with controller.in_mode("delay", DELAY_S):
        started, works = time.perf_counter(), []
        for stream in streams:
            with torch.cuda.stream(stream):
                works.append(dist.all_reduce(torch.ones(2, device=device), async_op=stream is None))
        for work in works:
            if work is not None:
                work.wait()
        synchronize(device)
    return time.perf_counter() - started


def fail_late(controller: Controller, device: torch.device) -> str:
    """Wait for a delayed collective that fails, since its output has the wrong size."""
    with controller.in_mode("delay", 0.0):
        try:
            work = dist.all_gather_into_tensor(
                torch.empty(3, device=device), torch.empty(2, device=device), async_op=True
            )
            work.wait()
        except (RuntimeError, ValueError) as error:
            return str(error)
    return ""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs for two ranks")
    folder = tmp_path_factory.mktemp("group")
    run_ranks(run_on_rank, (str(folder), request.param), 2)
    return json.loads((folder / "found.json").read_text())


pytestmark = pytest.mark.training


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("name", ALL_CASES)
def test_a_collective_has_its_values_in_each_mode(found: Any, name: str, way: str) -> None:
    case, values = ALL_CASES[name], found["cases"][name]
    assert values[f"real {way}"]["values"] == case.real
    assert values[f"silent {way}"]["values"] == case.silent
    assert values[f"delay {way}"]["values"] == case.real


@pytest.mark.parametrize("name", ALL_CASES)
def test_a_collective_is_counted_in_each_mode(found: Any, name: str) -> None:
    for one in found["cases"][name].values():
        ((collective, num_bytes, stays_real, caller, in_backward, num_ranks),) = one["calls"]
        assert (caller, in_backward, num_ranks) == (__name__, False, 2)
        assert (collective, num_bytes) == ALL_CASES[name].counted
        assert bool(stays_real) == (name in REAL_CASES)


@pytest.mark.parametrize("name", [name for name in ALL_CASES if name != "barrier"])
def test_a_delay_is_as_long_as_asked_and_an_asynchronous_call_returns_before_it(found: Any, name: str) -> None:
    for way in ("sync", "async"):
        delayed = found["cases"][name][f"delay {way}"]
        assert 0.97 * DELAY_S <= delayed["delayed_s"] < delayed["time_s"]
        assert found["cases"][name][f"real {way}"]["delayed_s"] == 0.0
    if name != "a number":
        assert found["cases"][name]["delay async"]["issued_s"] < DELAY_S / 2


def test_a_barrier_is_not_delayed(found: Any) -> None:
    assert found["cases"]["barrier"]["delay sync"]["delayed_s"] == 0.0


def test_objects_arrive_while_collectives_are_silent(found: Any) -> None:
    assert found["objects"] == [{"rank": 0}, {"rank": 1}]


def test_all_that_ddp_sends_is_silent_also_integer_buffers(found: Any) -> None:
    calls = [Call(*call) for call in found["training"]["silent"]["calls"]]
    gradients = 4 * (4 * 4 + 4 + 4 + 4)
    assert calls[-1].caller in ("torch.autograd.graph", "")
    assert sorted(calls) == [
        Call(
            "all_reduce", gradients, "", calls[-1].caller, in_backward=True, num_ranks=2
        ),  # the reducer, in a thread of autograd on GPUs
        Call("broadcast", 8, caller=DDP_MODULE, num_ranks=2),  # the number of batches, an integer
        Call("broadcast", 32, caller=DDP_MODULE, num_ranks=2),
    ]
    assert sorted(found["training"]["real"]["calls"]) == sorted(found["training"]["silent"]["calls"])


def test_silent_ddp_divides_its_own_gradients_by_the_number_of_ranks(found: Any) -> None:
    alone = found["training"]["alone"]
    assert max(map(abs, alone)) > 0.1
    assert found["training"]["silent"]["gradients"] == pytest.approx([gradient / 2 for gradient in alone], abs=1e-6)


def test_every_delay_of_a_step_appears(found: Any) -> None:
    delayed, real = found["training"]["delay"], found["training"]["real"]
    added = delayed["time_s"] - real["time_s"]
    assert added == pytest.approx(DELAY_S * len(delayed["calls"]), rel=0.2)


def test_delays_of_a_group_follow_each_other_also_on_two_streams(found: Any) -> None:
    assert found["two_streams_s"] >= 2 * 0.97 * DELAY_S


def test_the_group_of_a_mesh_is_measured_too(found: Any) -> None:
    assert found["mesh"] == [1, 2, 1, 2]


def test_an_error_of_a_delayed_collective_is_raised_where_it_is_waited_for(found: Any) -> None:
    assert "size" in found["failed"]


def test_the_backend_keeps_its_name(found: Any) -> None:
    assert found["backend"]["told"] == found["backend"]["asked"]


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2)])
def test_a_gather_of_parts_that_differ_stays_real_on_every_rank(sizes: tuple[int, int]) -> None:
    outputs = [torch.empty(size) for size in sizes]
    for own in outputs:
        call = describe_call(*METHODS["allgather"], ([outputs], [own]))
        assert bool(call.stays_real) == (sizes == (2, 3))


def test_a_sparse_gradient_has_the_bytes_of_its_indices_and_values() -> None:
    rows = nn.Embedding(1000, 4, sparse=True)
    rows(torch.tensor([0, 5, 7])).sum().backward()
    gradient = rows.weight.grad
    assert describe_call(*METHODS["allreduce"], ([gradient],)).num_bytes == 3 * 8 + 3 * 4 * 4
