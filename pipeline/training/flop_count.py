"""FLOPs of one sample: the forward and backward pass of a workload, if it can be where nothing is computed.

Convolutions, matrix products and attention count, with two FLOPs for a multiplication with its addition. What a
checkpoint computes again in the backward pass does not count.
"""

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.data.batches import Batch, map_tensors
from pipeline.records.record import short_text
from pipeline.system.errors import redact_credentials, shorten_list
from pipeline.training.flop_counter import COLLECTIVE_NAMESPACES, FlopCounter
from pipeline.training.process_group import Rank
from pipeline.training.step import ModelCall
from pipeline.workloads.workload import Workload, model_of

META, CPU = torch.device("meta"), torch.device("cpu")
NUM_SAMPLES = 2  # where the meta device fails; not 1, since BatchNorm needs more than one value a channel
MAX_NAMED_OPERATIONS = 5


class FlopCount(NamedTuple):
    """The FLOPs of a sample, and a note on what they lack, or why they are None."""

    per_sample: int | None = None
    note: str | None = None


def count_flops(workload: Workload, batch_size: int, rank: Rank) -> FlopCount:
    """Return the FLOPs of a sample in a batch of this size. No error of the user's code gets through.

    They are counted on the meta device; where that fails with fake tensors, and then in a real pass, of two samples.
    What the user compiles runs eagerly. Without the stance TorchDynamo would skip it here, and in later points too.
    """
    few = min(NUM_SAMPLES, batch_size)
    ways: dict[str, tuple[int, Callable[[FlopCounter], None]]] = {
        "": (batch_size, partial(run_on_meta, workload, batch_size)),
        "FLOPs counted with fake tensors": (few, partial(run_on_fake_tensors, workload, few)),
        "FLOPs counted in a real pass": (few, partial(run_on_device, workload, few, rank.device)),
    }
    devices = [rank.device] if rank.device.type == "cuda" else []
    what = ""
    for way, (num_samples, run) in ways.items():
        counter = FlopCounter(COLLECTIVE_NAMESPACES)
        try:
            with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
                run(counter)
        except (Exception, SystemExit) as error:
            what = redact_credentials(" ".join(f"{type(error).__name__}: {error}".split()))
            continue
        return flops_of_sample(counter.flops / num_samples, counter.without_formula, way)
    return FlopCount(None, short_text(f"FLOPs not counted: the model does not run a second time ({what})"))


def flops_of_sample(flops: float, without_formula: Iterable[str], way: str = "") -> FlopCount:
    """Return a count with a note on what it lacks, and on the way in which it was made."""
    without, per_sample = shorten_list(sorted(without_formula), MAX_NAMED_OPERATIONS), round(flops)
    if per_sample == 0:
        seen = f" in {without}" * bool(without)
        return FlopCount(None, short_text(f"FLOPs not counted: torch knows of no matrix product or convolution{seen}"))
    notes = [way, f"FLOPs without {without}" if without else ""]
    return FlopCount(per_sample, short_text("; ".join(filter(None, notes))) or None)


def run_on_meta(workload: Workload, batch_size: int, counter: FlopCounter) -> None:
    """Run a pass on the meta device. A model that needs values when it is built is built on the CPU."""
    model = None
    with contextlib.suppress(Exception), counter, META:
        model = model_of(workload)
    model = (model or build_counted(workload, counter)).to(META).float().train()
    counter.forget()
    with META:
        keep_for_loss(workload, model)
        batch = map_tensors(partial(as_float, device=META), workload.synthetic_batch(batch_size, META))
        run_pass(workload, model, batch, counter)


def run_on_fake_tensors(workload: Workload, batch_size: int, counter: FlopCounter) -> None:
    """Run a pass on fake tensors, which have a device and no values."""
    from torch._subclasses import FakeTensorMode  # here, since importing it takes time

    model = build_counted(workload, counter).float().train()
    batch = workload.synthetic_batch(batch_size, CPU)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for module in model.modules():
        tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for kept in tensors:
            kept.update({name: mode.from_tensor(tensor) for name, tensor in kept.items() if tensor is not None})
    with mode:
        keep_for_loss(workload, model)
        run_pass(workload, model, map_tensors(lambda tensor: mode.from_tensor(as_float(tensor, CPU)), batch), counter)


def run_on_device(workload: Workload, batch_size: int, device: torch.device, counter: FlopCounter) -> None:
    """Run a pass that computes."""
    model = build_counted(workload, counter).to(device).float().train()
    keep_for_loss(workload, model)
    batch = map_tensors(partial(as_float, device=device), workload.synthetic_batch(batch_size, device))
    run_pass(workload, model, batch, counter)


def build_counted(workload: Workload, counter: FlopCounter) -> nn.Module:
    """Return a new model, built inside the counter, which lets no collective through, and forget what was counted."""
    with counter:
        model = model_of(workload)
    counter.forget()
    return model


def keep_for_loss(workload: Workload, model: nn.Module) -> None:
    """Let the workload keep what its loss may need of the model. A fused optimizer takes no such parameters."""
    with contextlib.suppress(Exception):
        workload.optimizer(model)


def as_float(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, numbers in fp32: the meta device has no autocast."""
    return tensor.to(device, torch.float32 if tensor.is_floating_point() else None)


def run_pass(workload: Workload, model: nn.Module, batch: Batch, counter: FlopCounter) -> None:
    """Run the forward and the backward pass inside the counter."""
    with counter:
        found = workload.loss(ModelCall(model), batch)
        loss = found[0] if isinstance(found, tuple) else found
        loss.backward()
