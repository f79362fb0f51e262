"""Transfers of DataParallel, counted at torch's functions: stand-ins replace these, since they need GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from factories import make_spec
from image_steps import ALONE
from torch import Tensor
from torch.nn.parallel import comm

from pipeline.communication import measure_point
from pipeline.communication.measure_point import (
    TRANSFER_FUNCTIONS,
    count_data_parallel_transfers,
    time_step_parts,
)
from pipeline.communication.step_variants import StepContext
from pipeline.training.step import EagerStep
from pipeline.workloads.find import build_workload


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRANSFER_FUNCTIONS:
        monkeypatch.setattr(comm, name, lambda *_, **__: "moved")


def test_every_transfer_of_a_step_is_counted_by_kind_and_still_made() -> None:
    weights = [torch.zeros(10, requires_grad=True), torch.zeros(5, requires_grad=True)]
    buffers = [torch.zeros(3), torch.zeros(1, dtype=torch.int64)]
    images, outputs, devices = torch.zeros(8, 3, 4, 4), torch.zeros(2, 10), [0, 1, 2, 3]
    answers: list[Any] = []

    def step() -> None:
        answers.extend(
            [
                comm.scatter(images, devices, None, 0, None),
                comm.broadcast_coalesced(weights, devices),
                comm.broadcast_coalesced(buffers, devices),
                comm.gather([outputs] * 4, 0, 0),
                comm.scatter(torch.zeros(8, 10), devices, None, 0, None),
                comm.reduce_add_coalesced([weights] * 4, 0),
            ]
        )

    counted = {part.kind: (part.calls_per_step, part.bytes_per_step) for part in count_data_parallel_transfers(step, 2)}
    assert counted == {
        "inputs": (1, 8 * 3 * 4 * 4 * 4 * 3 / 4),
        "parameters": (1, 15 * 4 * 3),
        "buffers": (1, (3 * 4 + 8) * 3),
        "outputs": (2, 3 * 2 * 10 * 4 + 8 * 10 * 4 * 3 / 4),
        "gradients": (1, 15 * 4 * 3),
    }
    assert answers == ["moved"] * 12


def test_torchs_functions_are_put_back() -> None:
    before = {name: getattr(comm, name) for name in TRANSFER_FUNCTIONS}
    with pytest.raises(ZeroDivisionError):
        count_data_parallel_transfers(lambda: 1 / 0, 1)
    assert {name: getattr(comm, name) for name in TRANSFER_FUNCTIONS} == before
    assert isinstance(torch.zeros(1), Tensor)


def test_the_split_trains_with_the_optimizer_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(strategy="dp", num_gpus=2, measure="communication", input="synthetic", fused_optimizer=True)
    model, seen = torch.nn.DataParallel(torch.nn.Linear(2, 2)), []

    def run_step(_: object, optimizer: torch.optim.Optimizer, __: object, mark: Callable[[str], None]) -> None:
        seen.append(optimizer.defaults)
        for part in measure_point.DATA_PARALLEL_PARTS:
            mark(part)

    monkeypatch.setattr(measure_point, "run_step_in_parts", run_step)
    monkeypatch.setattr(measure_point, "time_when_idle_ns", lambda _: 0)
    context = StepContext(spec, ALONE, build_workload(spec), None, None)
    time_step_parts(model, context)  # type: ignore[arg-type]
    assert seen[0]["weight_decay"] == spec.weight_decay > 0
    assert seen[0] == EagerStep(model, context.workload, spec, ALONE).optimizer.defaults
