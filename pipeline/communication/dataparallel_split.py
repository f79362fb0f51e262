"""The parts of a DataParallel step: the time of each, and the bytes that are moved between GPUs.

Method: the parts of torch.nn.parallel.DataParallel.forward are called one by one, with all devices synchronized after
each. Their sum is therefore longer than the step, which overlaps some of them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, comm

from pipeline.communication.profiling import mean_transfers
from pipeline.communication.step_variants import StepContext
from pipeline.experiment.measurement import SplitPart, Transfer, TransferKind
from pipeline.training.process_group import device_indices
from pipeline.training.step import MarkPart, StepFunction

DATA_PARALLEL_PARTS = ("scatter", "replicate", "parallel_forward", "gather", "backward", "optimizer")
STEPS_PER_WINDOW = 5
SPLIT_WARM_UP_STEPS = 3
TRANSFER_FUNCTIONS = ("broadcast_coalesced", "reduce_add_coalesced", "scatter", "gather")


def time_step_parts(model: DataParallel[nn.Module], context: StepContext) -> tuple[SplitPart, ...]:
    """Time each part of a step: the mean of each window, in ns."""
    optimizer = context.workload.optimizer(model.module)
    devices = device_indices(context.spec, context.rank)

    def time_parts(num_steps: int) -> dict[str, int]:
        totals_ns = dict.fromkeys(DATA_PARALLEL_PARTS, 0)
        for _ in range(num_steps):
            started_ns = time_when_idle_ns(devices)

            def mark(part: str) -> None:
                nonlocal started_ns
                ended_ns = time_when_idle_ns(devices)
                totals_ns[part] += ended_ns - started_ns
                started_ns = ended_ns

            run_step_in_parts(model, optimizer, context, mark)
        return totals_ns

    time_parts(SPLIT_WARM_UP_STEPS)
    windows = [time_parts(STEPS_PER_WINDOW) for _ in range(context.spec.windows)]
    return tuple(
        SplitPart(part=part, times_ns=tuple(window[part] // STEPS_PER_WINDOW for window in windows))
        for part in DATA_PARALLEL_PARTS
    )


def time_when_idle_ns(devices: Sequence[int]) -> int:
    for index in devices:
        torch.cuda.synchronize(index)
    return time.perf_counter_ns()


def run_step_in_parts(
    model: DataParallel[nn.Module], optimizer: torch.optim.Optimizer, context: StepContext, mark: MarkPart
) -> None:
    """Run one step. Mark the end of each part once it is issued."""

    def forward_in_parts(*arguments: Any) -> Any:
        inputs, keywords = model.scatter(arguments, {}, model.device_ids)
        mark("scatter")
        replicas = model.replicate(model.module, model.device_ids[: len(inputs)])
        mark("replicate")
        outputs = model.parallel_apply(replicas, inputs, keywords)
        mark("parallel_forward")
        gathered = model.gather(outputs, model.output_device)
        mark("gather")
        return gathered

    with torch.autocast("cuda", torch.bfloat16, enabled=context.spec.precision == "bf16"):
        found = context.workload.loss(forward_in_parts, context.batch)
    loss = found[0] if isinstance(found, tuple) else found
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    mark("backward")
    optimizer.step()
    mark("optimizer")


def count_data_parallel_transfers(step: StepFunction, num_steps: int) -> tuple[Transfer, ...]:
    """Count the transfers between GPUs in `num_steps` steps of DataParallel. Return the means per step.

    It counts every call of torch.nn.parallel to a transfer function of torch.nn.parallel.comm.
    """
    transfers: list[tuple[TransferKind, int]] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(comm, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            transfers.append(transfer_of_call(name, *arguments[:2]))
            return original(*arguments, **keywords)

        return call

    originals = {name: getattr(comm, name) for name in TRANSFER_FUNCTIONS}
    vars(comm).update({name: counted(name) for name in TRANSFER_FUNCTIONS})
    try:
        for _ in range(num_steps):
            step()
    finally:
        vars(comm).update(originals)
    return mean_transfers(transfers, num_steps)


def total_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def transfer_of_call(name: str, tensors: Any, devices: Any) -> tuple[TransferKind, int]:
    """Return the kind and the bytes of a call from its first two arguments. One device needs no transfer."""
    match name:
        case "broadcast_coalesced":
            kind: TransferKind = "parameters" if any(tensor.requires_grad for tensor in tensors) else "buffers"
            return kind, total_bytes(tensors) * (len(devices) - 1)
        case "reduce_add_coalesced":
            return "gradients", sum(map(total_bytes, tensors[1:]))
        case "scatter":  # images in the forward pass, [batch, channel, row, column], output gradients in the backward
            is_image = tensors.dim() == 4
            return "inputs" if is_image else "outputs", tensors.nbytes * (len(devices) - 1) // len(devices)
    return "outputs", total_bytes(tensors[1:])  # gather
