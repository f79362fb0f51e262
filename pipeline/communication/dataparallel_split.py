"""DataParallel's step taken apart: what scattering, replicating, gathering and reducing cost, and what they move.

Method: the parts of torch.nn.parallel.DataParallel.forward called one by one, every device synchronized after
each; the parts therefore sum to more than the step, which overlaps some of them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, comm

from pipeline.data.batches import Batch
from pipeline.experiment.measurement import SplitPart, Transfer, TransferKind
from pipeline.experiment.spec import Spec
from pipeline.training.process_group import Rank, device_indices

DATA_PARALLEL_PARTS = ("scatter", "replicate", "parallel_forward", "gather", "backward", "optimizer")
STEPS_PER_WINDOW = 5
SPLIT_WARM_UP_STEPS = 3


def split_steps(model: DataParallel[nn.Module], spec: Spec, batch: Batch, rank: Rank) -> tuple[SplitPart, ...]:
    """The mean time of each part of a step, by window."""
    optimizer = torch.optim.SGD(model.parameters(), lr=spec.learning_rate, momentum=spec.momentum)
    windows: dict[str, list[int]] = {part: [] for part in DATA_PARALLEL_PARTS}
    split_window(model, optimizer, spec, batch, rank, SPLIT_WARM_UP_STEPS)
    for _ in range(spec.windows):
        for part, time_ns in split_window(model, optimizer, spec, batch, rank, STEPS_PER_WINDOW).items():
            windows[part].append(time_ns // STEPS_PER_WINDOW)
    return tuple(SplitPart(part=part, times_ns=tuple(times_ns)) for part, times_ns in windows.items())


def split_window(
    model: DataParallel[nn.Module],
    optimizer: torch.optim.Optimizer,
    spec: Spec,
    batch: Batch,
    rank: Rank,
    num_steps: int,
) -> dict[str, int]:
    """The time of each part over so many steps, in ns."""
    totals = dict.fromkeys(DATA_PARALLEL_PARTS, 0)
    devices = device_indices(spec, rank)
    for _ in range(num_steps):
        synchronize_all(devices)
        ended_ns = time.perf_counter_ns()
        for part in split_step(model, optimizer, spec, batch):
            synchronize_all(devices)
            totals[part] -= ended_ns - (ended_ns := time.perf_counter_ns())
    return totals


def synchronize_all(devices: Sequence[int]) -> None:
    """Wait for each of the devices."""
    for index in devices:
        torch.cuda.synchronize(index)


def split_step(
    model: DataParallel[nn.Module], optimizer: torch.optim.Optimizer, spec: Spec, batch: Batch
) -> Iterator[str]:
    """One step; yields the name of each part once it is issued."""
    images, labels = batch
    with torch.autocast("cuda", torch.bfloat16, enabled=spec.precision == "bf16"):
        inputs, keywords = model.scatter((images,), {}, model.device_ids)
        yield "scatter"
        replicas = model.replicate(model.module, model.device_ids[: len(inputs)])
        yield "replicate"
        outputs = model.parallel_apply(replicas, inputs, keywords)
        yield "parallel_forward"
        gathered = model.gather(outputs, model.output_device)
        yield "gather"
        loss = nn.functional.cross_entropy(gathered, labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    yield "backward"
    optimizer.step()
    yield "optimizer"


class TransferCounter:
    """Calls and bytes by kind, between devices."""

    def __init__(self) -> None:
        self.calls: dict[TransferKind, int] = {}
        self.num_bytes: dict[TransferKind, int] = {}

    def add(self, kind: TransferKind, num_bytes: int) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.num_bytes[kind] = self.num_bytes.get(kind, 0) + num_bytes

    def transfers(self, num_steps: int) -> tuple[Transfer, ...]:
        """The means of a step."""
        return tuple(
            Transfer(kind=kind, calls_per_step=calls / num_steps, bytes_per_step=self.num_bytes[kind] / num_steps)
            for kind, calls in self.calls.items()
        )


def count_data_parallel(step: Callable[[], None], num_steps: int) -> tuple[Transfer, ...]:
    """What so many steps of DataParallel hand from GPU to GPU, counted where torch.nn.parallel calls for it."""
    ledger = TransferCounter()
    with counting_transfers(ledger):
        for _ in range(num_steps):
            step()
    return ledger.transfers(num_steps)


@contextlib.contextmanager
def counting_transfers(ledger: TransferCounter) -> Iterator[None]:
    """Count every transfer that torch.nn.parallel asks of torch.nn.parallel.comm."""
    originals = {name: getattr(comm, name) for name in TRANSFER_COUNTERS}

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            ledger.add(*TRANSFER_COUNTERS[name](*arguments, **keywords))
            return originals[name](*arguments, **keywords)

        return call

    with contextlib.ExitStack() as patches:
        for name in TRANSFER_COUNTERS:
            patches.enter_context(mock.patch.object(comm, name, counted(name)))
        yield


def total_bytes(tensors: Any) -> int:
    """The bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def count_broadcast(tensors: Any, devices: Any, *_: Any, **__: Any) -> tuple[TransferKind, int]:
    """Every tensor to every device but the first, which has it."""
    kind: TransferKind = "parameters" if any(tensor.requires_grad for tensor in tensors) else "buffers"
    return kind, total_bytes(tensors) * (len(devices) - 1)


def count_reduce(inputs: Any, destination: Any = None, *_: Any, **__: Any) -> tuple[TransferKind, int]:
    """The gradients of every device but the one that sums them."""
    return "gradients", sum(total_bytes(tensors) for tensors in inputs[1:])


def count_scatter(tensor: Tensor, devices: Any = None, *_: Any, **__: Any) -> tuple[TransferKind, int]:
    """Images going out in forward, gradients of outputs in backward: all but the first device's share."""
    kind: TransferKind = "inputs" if tensor.dim() == len(("batch", "channel", "row", "column")) else "outputs"
    return kind, total_bytes([tensor]) * (len(devices) - 1) // len(devices)


def count_gather(tensors: Any, *_: Any, **__: Any) -> tuple[TransferKind, int]:
    """Outputs of every device but the first."""
    return "outputs", total_bytes(tensors[1:])


TRANSFER_COUNTERS: dict[str, Callable[..., tuple[TransferKind, int]]] = {
    "broadcast_coalesced": count_broadcast,
    "reduce_add_coalesced": count_reduce,
    "scatter": count_scatter,
    "gather": count_gather,
}
