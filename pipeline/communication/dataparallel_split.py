"""The parts of a DataParallel step: the time of each, and the bytes that are moved between GPUs.

Method: the parts of torch.nn.parallel.DataParallel.forward are called one by one, with all devices synchronized after
each. Their sum is therefore longer than the step, which overlaps some of them.
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
from pipeline.training.step import StepFunction

DATA_PARALLEL_PARTS = ("scatter", "replicate", "parallel_forward", "gather", "backward", "optimizer")
STEPS_PER_WINDOW = 5
SPLIT_WARM_UP_STEPS = 3


def time_step_parts(model: DataParallel[nn.Module], spec: Spec, batch: Batch, rank: Rank) -> tuple[SplitPart, ...]:
    """Time each part of a step: the mean of each window, in ns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=spec.learning_rate, momentum=spec.momentum)
    windows: dict[str, list[int]] = {part: [] for part in DATA_PARALLEL_PARTS}
    time_window_parts(model, optimizer, spec, batch, rank, SPLIT_WARM_UP_STEPS)
    for _ in range(spec.windows):
        for part, time_ns in time_window_parts(model, optimizer, spec, batch, rank, STEPS_PER_WINDOW).items():
            windows[part].append(time_ns // STEPS_PER_WINDOW)
    return tuple(SplitPart(part=part, times_ns=tuple(times_ns)) for part, times_ns in windows.items())


def time_window_parts(
    model: DataParallel[nn.Module],
    optimizer: torch.optim.Optimizer,
    spec: Spec,
    batch: Batch,
    rank: Rank,
    num_steps: int,
) -> dict[str, int]:
    """Return the time of each part, summed over `num_steps` steps, in ns."""
    totals = dict.fromkeys(DATA_PARALLEL_PARTS, 0)
    devices = device_indices(spec, rank)
    for _ in range(num_steps):
        synchronize_all(devices)
        ended_ns = time.perf_counter_ns()
        for part in run_step_in_parts(model, optimizer, spec, batch):
            synchronize_all(devices)
            totals[part] -= ended_ns - (ended_ns := time.perf_counter_ns())
    return totals


def synchronize_all(devices: Sequence[int]) -> None:
    """Wait for each device."""
    for index in devices:
        torch.cuda.synchronize(index)


def run_step_in_parts(
    model: DataParallel[nn.Module], optimizer: torch.optim.Optimizer, spec: Spec, batch: Batch
) -> Iterator[str]:
    """Run one step. Yield the name of each part once it is issued."""
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
    """A counter of calls and bytes between devices, by kind of transfer."""

    def __init__(self) -> None:
        self.calls: dict[TransferKind, int] = {}
        self.num_bytes: dict[TransferKind, int] = {}

    def add(self, kind: TransferKind, num_bytes: int) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.num_bytes[kind] = self.num_bytes.get(kind, 0) + num_bytes

    def transfers(self, num_steps: int) -> tuple[Transfer, ...]:
        """Return the means per step."""
        return tuple(
            Transfer(kind=kind, calls_per_step=calls / num_steps, bytes_per_step=self.num_bytes[kind] / num_steps)
            for kind, calls in self.calls.items()
        )


def count_data_parallel_transfers(step: StepFunction, num_steps: int) -> tuple[Transfer, ...]:
    """Count the transfers between GPUs in `num_steps` steps of DataParallel. Return the means per step."""
    counter = TransferCounter()
    with counting_transfers(counter):
        for _ in range(num_steps):
            step()
    return counter.transfers(num_steps)


@contextlib.contextmanager
def counting_transfers(counter: TransferCounter) -> Iterator[None]:
    """Count every call of torch.nn.parallel to a transfer function of torch.nn.parallel.comm."""
    originals = {name: getattr(comm, name) for name in TRANSFER_COUNTERS}

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            counter.add(*TRANSFER_COUNTERS[name](*arguments, **keywords))
            return originals[name](*arguments, **keywords)

        return call

    with contextlib.ExitStack() as patches:
        for name in TRANSFER_COUNTERS:
            patches.enter_context(mock.patch.object(comm, name, counted(name)))
        yield


def total_bytes(tensors: Any) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def count_broadcast(tensors: Any, devices: Any, *_: Any, **__: Any) -> tuple[TransferKind, int]:
    """Count a broadcast: every tensor goes to every device but the first, which has it."""
    kind: TransferKind = "parameters" if any(tensor.requires_grad for tensor in tensors) else "buffers"
    return kind, total_bytes(tensors) * (len(devices) - 1)


def count_reduce(inputs: Any, destination: Any = None, *_: Any, **__: Any) -> tuple[TransferKind, int]:
    """Count a reduction: gradients come from every device but the one that sums them."""
    return "gradients", sum(total_bytes(tensors) for tensors in inputs[1:])


def count_scatter(tensor: Tensor, devices: Any = None, *_: Any, **__: Any) -> tuple[TransferKind, int]:
    """Count a scatter of images (forward) or output gradients (backward): all but the first device's share."""
    kind: TransferKind = "inputs" if tensor.dim() == len(("batch", "channel", "row", "column")) else "outputs"
    return kind, total_bytes([tensor]) * (len(devices) - 1) // len(devices)


def count_gather(tensors: Any, *_: Any, **__: Any) -> tuple[TransferKind, int]:
    """Count a gather: outputs come from every device but the first."""
    return "outputs", total_bytes(tensors[1:])


TRANSFER_COUNTERS: dict[str, Callable[..., tuple[TransferKind, int]]] = {
    "broadcast_coalesced": count_broadcast,
    "reduce_add_coalesced": count_reduce,
    "scatter": count_scatter,
    "gather": count_gather,
}
