"""Compilation of a model and its loss with torch.compile, and the options for it."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from pipeline.experiment.spec import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, Execution, Spec
from pipeline.training.step import LossAndNumCorrect, cross_entropy


class CompiledModel(NamedTuple):
    """Compiled callables that a step uses in place of the model and of the loss function."""

    forward: Callable[[Tensor], Tensor]
    compute_loss: LossAndNumCorrect


def compile_model(model: nn.Module, execution: Execution, spec: Spec) -> CompiledModel:
    """Compile the model and its loss. Earlier compiled code is dropped, so that two variants of a model share none.

    Under DDP the wrapper is compiled and not the module inside: TorchDynamo then splits the backward pass at DDP's
    buckets, and collectives overlap with it (pytorch.org/docs/stable/notes/ddp.html). Shapes are static: each batch
    size is compiled before the clock starts.
    """
    torch.compiler.reset()
    options = inductor_options(execution) if spec.device == "cuda" else {}
    return CompiledModel(
        cast(Callable[[Tensor], Tensor], torch.compile(model, dynamic=False, options=options)),
        cast(LossAndNumCorrect, torch.compile(cross_entropy, dynamic=False)),
    )


def inductor_options(execution: Execution) -> dict[str, Any]:
    """Return TorchInductor options that make a step faster on a GPU (docs/results.md has by how much).

    They combine small kernels into one. For a captured step they also tune pointwise kernels on this GPU.
    """
    return {"combo_kernels": True, "max_autotune_pointwise": execution in CAPTURED_EXECUTIONS}


def num_compiled_graphs() -> int:
    """Return how many graphs TorchDynamo has traced in this process. It runs other code eagerly, without a warning."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])  # torch has no public name for it


def set_cudnn_benchmark(execution: Execution) -> None:
    """Let cuDNN benchmark its algorithms for a compiled step, before the clock starts.

    Other steps keep PyTorch's default (off), which most people run. It is also the only fair setting for DataParallel,
    which starts new threads each step: they do not keep the tuned plans, and tuning takes hundreds of milliseconds.
    """
    torch.backends.cudnn.benchmark = execution in COMPILED_EXECUTIONS
    torch.backends.cudnn.benchmark_limit = 0  # try all: none of the first ten (the default limit) is faster
