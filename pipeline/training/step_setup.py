"""Preparation of the training step before the clock starts: choice of the execution, compilation, capture."""

import contextlib
import copy
import importlib.util
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from pipeline.data.batch import Batch, first_samples, place_batch
from pipeline.data.batches import batch_sizes, memory_format
from pipeline.experiment.spec import Spec
from pipeline.plan.axes import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, Execution
from pipeline.training import cuda_graph, device_memory, process_group
from pipeline.training.check_workload import synthetic_batch
from pipeline.training.compilation import compile_model, num_compiled_graphs
from pipeline.training.cuda_graph import CapturedStep
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, TrainingStep, ignore_mark
from pipeline.training.strategies import torch_strategy
from pipeline.workloads.workload import Workload

EXECUTIONS_FASTEST_FIRST: tuple[Execution, ...] = ("compiled_graph", "graph", "compile", "eager")
"""The order in which `execution: auto` tries them, from `make bench-gpu` on an H200 (bf16, one GPU, B=32 to 2048)."""

COMPILE_WARM_UP_STEPS = 3
EXPECTED_WARNING = "The .grad attribute of a Tensor that is not a leaf"  # TorchDynamo reads .grad of outputs


class PreparedStep(NamedTuple):
    """A step that is ready to be timed; `compile_time_s` is None for an eager step, which needs no preparation."""

    step: TrainingStep
    compile_time_s: float | None = None
    captured_batch_sizes: tuple[int, ...] = ()


def choose_execution(spec: Spec, rank: Rank) -> Execution:
    """Return the execution that the spec names; for `auto` the fastest allowed one. All ranks return the same.

    Raises RuntimeError if the execution needs a compiler and a node has none.
    """
    if spec.execution == "eager":
        return "eager"
    can_compile = all(process_group.all_gather(has_compiler(rank.device.type), bool))
    if spec.execution == "auto":
        return fastest_execution(spec, can_compile)
    if spec.execution in COMPILED_EXECUTIONS and not can_compile:
        needs = "Triton and a C compiler" if spec.device == "cuda" else "a C++ compiler"
        raise RuntimeError(f"execution={spec.execution!r} needs {needs} on every node; install it, or use 'auto'.")
    return spec.execution


def fastest_execution(spec: Spec, can_compile: bool) -> Execution:
    """Return the fastest execution that the spec and the machine allow; on the CPU eager: others were not measured."""
    if spec.device == "cpu":
        return "eager"
    allowed = (execution for execution in EXECUTIONS_FASTEST_FIRST if spec.execution_problem(execution) is None)
    return next(execution for execution in allowed if can_compile or execution not in COMPILED_EXECUTIONS)


def has_compiler(device: str) -> bool:
    """True if torch.compile can build kernels: it needs Triton and a C compiler, on the CPU a C++ compiler."""
    if device == "cpu":
        return any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))
    c_compilers = (os.environ.get("CC", "gcc"), "gcc", "clang", "cc")
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, c_compilers))


def execution_stream(execution: Execution, rank: Rank) -> contextlib.AbstractContextManager[None]:
    """Return the stream context for all work of the execution, also for wrapping the model."""
    return cuda_graph.on_new_stream(rank) if execution in CAPTURED_EXECUTIONS else contextlib.nullcontext()


def prepare_step(
    execution: Execution,
    placed: nn.Module,
    workload: Workload,
    spec: Spec,
    rank: Rank,
    optimizer: torch.optim.Optimizer | None = None,
) -> PreparedStep:
    """Wrap the placed model, and prepare its step. All ranks must call it inside execution_stream(execution).

    Compiling and capturing train a few steps. After these steps the training state is restored. `optimizer` is that of
    the placed model, if it was made before.

    Raises RuntimeError if torch.compile finds nothing to compile.
    """
    model = torch_strategy(spec.strategy).wrap(placed, workload, spec, rank)
    is_captured = execution in CAPTURED_EXECUTIONS
    forward = compile_model(workload, model) if execution in COMPILED_EXECUTIONS else model
    step = EagerStep(model, workload, spec, rank, forward=forward, optimizer=optimizer)
    if execution == "eager":
        return PreparedStep(step)
    started = time.perf_counter()
    sizes = tuple(dict.fromkeys(batch_sizes(spec)))
    ready: TrainingStep = step
    step.begin_epoch()
    prepared = cuda_graph.prepare_capture(step) if is_captured else contextlib.nullcontext()
    with prepared, restore_training_state(step, rank, is_captured), warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPECTED_WARNING)
        example = place_batch(synthetic_batch(workload, sizes[0], rank.device), rank.device, memory_format(spec))
        if execution in COMPILED_EXECUTIONS:
            warm_up_compiled(step, example, sizes, spec, rank)
        if is_captured:
            ready = CapturedStep(step, example, sizes, spec, cuda_graph.graph_capturer())
        process_group.synchronize(rank)
    compile_time_s = max(process_group.all_gather(time.perf_counter() - started, float))
    return PreparedStep(ready, compile_time_s, sizes if is_captured else ())


def warm_up_compiled(step: EagerStep, example: Batch, sizes: Sequence[int], spec: Spec, rank: Rank) -> None:
    """Train a few steps of each batch size, in which the step is compiled. Raises RuntimeError if the model is not."""
    forward, num_graphs = step.forward, 0

    def counted(*inputs: Any, **keywords: Any) -> Any:
        nonlocal num_graphs
        num_before = num_compiled_graphs()
        outputs = forward(*inputs, **keywords)
        num_graphs += num_compiled_graphs() - num_before
        return outputs

    before_update, step.before_update = step.before_update, None  # a scheduler in it would go on
    step.forward = counted
    for size in sizes:
        for _ in range(COMPILE_WARM_UP_STEPS):
            step(first_samples(example, size), ignore_mark)
    step.forward, step.before_update = forward, before_update
    device_memory.reset_memory_statistics(spec, rank)  # cuDNN's trials of algorithms use more than a step
    if num_graphs == 0:
        raise RuntimeError(
            f"torch.compile found nothing to compile in model {spec.model!r} under strategy {spec.strategy!r}; "
            "give the model a forward of its own, or use execution: eager."
        )


@contextlib.contextmanager
def restore_training_state(step: EagerStep, rank: Rank, is_captured: bool = False) -> Iterator[None]:
    """Restore parameters, buffers, the optimizer and random state after the block, as if it had trained nothing.

    A graph reads tensors at fixed addresses: weights are restored in place, and the state of the optimizer of a
    captured step, which was empty, is set to 0. With momentum 0 the first update is then the same as without it
    (0 x momentum + gradient).
    """
    optimizer, scaler = step.optimizer, step.scaler
    untrained, scale = copy.deepcopy(optimizer.state_dict()), scaler.state_dict() if scaler else {}
    tensors = [*step.model.parameters(), *step.model.buffers()]
    saved = [tensor.detach().clone() for tensor in tensors]
    with torch.random.fork_rng(devices=[rank.device] if rank.device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        for state in optimizer.state.values() if is_captured else ():
            for value in state.values():
                value.zero_()
    if not is_captured:
        optimizer.load_state_dict(untrained)
    if scaler:
        scaler.load_state_dict(scale)


assert set(EXECUTIONS_FASTEST_FIRST) == set(get_args(Execution)), "auto must rank every execution"
