"""What torch.compile makes of a model, and how it is told to."""

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
    """What a step calls instead of the model, and of the loss of its outputs."""

    forward: Callable[[Tensor], Tensor]
    score: LossAndNumCorrect


def compile_model(model: nn.Module, execution: Execution, spec: Spec) -> CompiledModel:
    """The model and its loss through torch.compile, anew: forms of one model would share what was compiled for one.

    DDP is compiled as it wraps the model, and not the model inside it: only so does TorchDynamo cut the backward
    pass at DDP's buckets, and collectives overlap with it (pytorch.org/docs/stable/notes/ddp.html). Each size of
    batch is compiled for itself, so that no step on the clock meets a new one.
    """
    torch.compiler.reset()
    options = inductor_options(execution, model) if spec.device == "cuda" else {}
    return CompiledModel(
        cast(Callable[[Tensor], Tensor], torch.compile(model, dynamic=False, options=options)),
        cast(LossAndNumCorrect, torch.compile(cross_entropy, dynamic=False)),
    )


def is_each_weight_read_once(model: nn.Module) -> bool:
    """Whether the weight of every convolution is a parameter that a forward pass reads once.

    Only then is its gradient accumulated nowhere but where it leaves the backward pass.
    """
    convolutions = [module for module in model.modules() if isinstance(module, CONVOLUTIONS)]
    if not all(isinstance(module.weight, nn.Parameter) for module in convolutions):  # computed of others
        return False
    num_reads: Counter[nn.Parameter] = Counter()
    hooks = [module.register_forward_hook(lambda read, *_: num_reads.update([read.weight])) for module in convolutions]
    is_training, device = model.training, next(model.parameters()).device
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=False):  # not tuned for it
        model.eval()(torch.zeros(1, 3, IMAGE_SIZE_PX, IMAGE_SIZE_PX, device=device))
    model.train(is_training)
    for hook in hooks:
        hook.remove()
    return max(num_reads.values(), default=0) <= 1


def inductor_options(execution: Execution, model: nn.Module) -> dict[str, Any]:
    """What makes the step faster on a GPU (README.md has by how much): many small kernels as one, and in a captured
    step the weight gradients beside the rest of the backward pass, and the pointwise kernels tuned on this GPU.
    """
    options: dict[str, Any] = {"combo_kernels": True}
    if execution in CAPTURED_EXECUTIONS:
        from pipeline.training import weight_gradient_overlap  # imports TorchInductor, which takes a second

        to_buckets = isinstance(model, DistributedDataParallel) and is_each_weight_read_once(model.module)
        aside = weight_gradient_overlap.OverlapWeightGradients(to_buckets)
        options |= weight_gradient_overlap.INDUCTOR_OPTIONS | {
            "post_grad_custom_post_pass": aside,
            "max_autotune_pointwise": True,
        }
    return options


def num_compiled_graphs() -> int:
    """How many graphs TorchDynamo has captured in this process; what it cannot trace it runs eagerly, with no word."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])  # torch has no public name for it


def set_cudnn_benchmark(execution: Execution) -> None:
    """Let cuDNN try all its algorithms for a compiled step, before the clock; else it goes by its rules, as by default.

    A step that is not compiled keeps PyTorch's default, which is what people run, and the only setting that is fair
    to DataParallel: it starts new threads each step, which do not keep the tuned plans (hundreds of milliseconds).
    """
    torch.backends.cudnn.benchmark = execution in COMPILED_EXECUTIONS
    torch.backends.cudnn.benchmark_limit = 0  # all of them: among the first ten is no faster one
