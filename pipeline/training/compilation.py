"""Compilation of a model and its loss with torch.compile, and the options for it."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.data.images import IMAGE_SIZE_PX
from pipeline.experiment.spec import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, Execution, Spec
from pipeline.training.step import LossAndNumCorrect, cross_entropy

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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
    options = inductor_options(execution, model) if spec.device == "cuda" else {}
    return CompiledModel(
        cast(Callable[[Tensor], Tensor], torch.compile(model, dynamic=False, options=options)),
        cast(LossAndNumCorrect, torch.compile(cross_entropy, dynamic=False)),
    )


def is_each_weight_read_once(model: nn.Module) -> bool:
    """True if the weight of every convolution is a parameter that one forward pass reads at most once.

    The gradient of a weight that is read twice is a sum formed inside the backward pass.
    """
    convolutions = [module for module in model.modules() if isinstance(module, CONVOLUTIONS)]
    if not all(isinstance(module.weight, nn.Parameter) for module in convolutions):  # computed from other parameters
        return False
    num_reads: Counter[nn.Parameter] = Counter()
    hooks = [module.register_forward_hook(lambda read, *_: num_reads.update([read.weight])) for module in convolutions]
    is_training, device = model.training, next(model.parameters()).device
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=False):  # no tuning for this pass
        model.eval()(torch.zeros(1, 3, IMAGE_SIZE_PX, IMAGE_SIZE_PX, device=device))
    model.train(is_training)
    for hook in hooks:
        hook.remove()
    return max(num_reads.values(), default=0) <= 1


def inductor_options(execution: Execution, model: nn.Module) -> dict[str, Any]:
    """Return TorchInductor options that make a step faster on a GPU (docs/results.md has by how much).

    They combine small kernels into one. In a captured step, weight gradients also run beside the rest of the backward
    pass, and pointwise kernels are tuned on this GPU.
    """
    options: dict[str, Any] = {"combo_kernels": True}
    if execution in CAPTURED_EXECUTIONS:
        from pipeline.training import weight_gradient_overlap  # imports TorchInductor, which takes a second

        to_buckets = isinstance(model, DistributedDataParallel) and is_each_weight_read_once(model.module)
        overlap_pass = weight_gradient_overlap.OverlapWeightGradients(to_buckets)
        options |= weight_gradient_overlap.INDUCTOR_OPTIONS | {
            "post_grad_custom_post_pass": overlap_pass,
            "max_autotune_pointwise": True,
        }
    return options


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
