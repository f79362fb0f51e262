"""Compilation of a model with torch.compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipeline.workloads.workload import Workload, WorkloadError, describe


def compile_model(workload: Workload, model: nn.Module) -> Callable[..., Any]:
    """Return the compiled model. Earlier compiled code is dropped, so that two variants of a model share none.

    Under DDP the wrapper is compiled and not the module inside: TorchDynamo then splits the backward pass at DDP's
    buckets, and collectives overlap with it (pytorch.org/docs/stable/notes/ddp.html). Raises WorkloadError.
    """
    torch.compiler.reset()
    compiled: object = workload.compile(model)
    if not callable(compiled):
        raise WorkloadError(f"compile returns {describe(compiled)}; return the compiled model, as torch.compile(model)")
    return compiled


def num_compiled_graphs() -> int:
    """Return how many graphs TorchDynamo has traced in this process. It runs other code eagerly, without a warning."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])  # torch has no public name for it
