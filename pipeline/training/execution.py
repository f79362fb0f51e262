"""Executions of a training step: eager, compiled, and as a CUDA graph that is captured once for each batch size.

Method of the graph: pytorch.org/docs/stable/notes/cuda.html, "Whole-network capture" and "Usage with
DistributedDataParallel".
"""

import contextlib
import copy
import importlib.util
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from pipeline.data.batches import (
    Batch,
    batch_sizes,
    copy_batch,
    first_samples,
    map_tensors,
    memory_format,
    num_samples,
    place_batch,
)
from pipeline.plan.axes import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, Execution
from pipeline.plan.spec import Spec
from pipeline.training import devices, process_group
from pipeline.training.check_workload import synthetic_batch
from pipeline.training.process_group import Rank
from pipeline.training.step import WHOLE_STEP, EagerStep, MarkPart, StepFunction, ignore_mark
from pipeline.training.torch_strategies import TORCH_STRATEGIES, own_optimizer
from pipeline.workloads.workload import Workload, WorkloadError, describe

CAPTURED_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adamax", "RMSprop")  # whose state begins at zero

GraphCapturer = Callable[[StepFunction], StepFunction]


@contextlib.contextmanager
def on_new_stream(rank: Rank) -> Iterator[None]:
    """Issue all work of the block on a stream of its own, since the default stream cannot be captured.

    The model must be wrapped in DDP inside the block too: DDP keeps the nodes that accumulate gradients, and they keep
    the stream on which they were made. Warm-up, capture and replay then need no synchronization between them.
    """
    outside, stream = torch.cuda.current_stream(rank.device), torch.cuda.Stream(rank.device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        yield
    outside.wait_stream(stream)


def graph_capturer() -> GraphCapturer:
    """Return a function that captures CUDA graphs on the current stream. All its graphs share one memory pool.

    Sharing is safe, since no data passes from one replay to the next through the pool: weights, momentum, loss, count
    and batch were allocated before, and gradients are made anew in each step. Calls that are unsafe during capture are
    errors in this thread only, because NCCL's watchdog queries its events from another.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(work: StepFunction) -> StepFunction:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return capture


def warm_up_and_capture(work: StepFunction, num_warm_up_steps: int, capture: GraphCapturer) -> StepFunction:
    """Run the work `num_warm_up_steps` times, then capture it (which runs nothing). Return the replay."""
    for _ in range(num_warm_up_steps):
        work()
    return capture(work)


@contextlib.contextmanager
def prepare_capture(step: EagerStep) -> Iterator[None]:
    """Prepare the optimizer of a step that the block warms up and captures.

    Optimizers that have the option `capturable` get it, and read the learning rate from the device if a schedule sets
    it. Raises WorkloadError for what a graph cannot do.
    """
    groups = step.optimizer.param_groups
    name = type(step.optimizer).__name__
    starts_at_zero = not any(group.get("dampening") for group in groups) and not step.optimizer.state
    if name not in CAPTURED_OPTIMIZERS or not starts_at_zero:
        raise WorkloadError(
            f"a CUDA-graph step cannot restart {name}; use {', '.join(CAPTURED_OPTIMIZERS)}, or execution: compile"
        )
    if step.scaler is not None and not all(group.get("fused") for group in groups):
        raise WorkloadError("a CUDA-graph step in fp16 needs a fused optimizer: others wait for the scale of the loss")
    for group in groups:
        if "capturable" in group:
            group["capturable"] = True
    if step.rate is not None and all(group.get("fused") or group.get("capturable") for group in groups):
        step.put_rate_on_device()
    before = settings_of(step)
    yield
    if settings_of(step) != before:
        raise WorkloadError(
            "before_update changes the settings of the optimizer, which a CUDA-graph step would keep; give the rate of "
            "each update by learning_rate(update), or use execution: compile"
        )


def settings_of(step: EagerStep) -> list[dict[str, Any]]:
    """Return the settings of the optimizer's groups, without the rate on the device."""
    hidden = ("params", "lr") if step.rate_is_on_device else ("params",)
    return [{key: value for key, value in group.items() if key not in hidden} for group in step.optimizer.param_groups]


class CapturedGraph(NamedTuple):
    """A CUDA-graph step for one batch size, and the tensors that every replay reads and writes."""

    batch: Batch
    loss: Tensor
    replay: StepFunction


class CapturedStep:
    """A step that replays a CUDA graph. Each batch size has its own graph, as the last batch of an epoch is smaller.

    The host copies a batch and launches once, so the parts of a step cannot be marked. The learning rate is fixed in
    the graph unless the optimizer reads it from the device (`fused_optimizer`).
    """

    parts: tuple[str, ...] = WHOLE_STEP

    def __init__(
        self, step: EagerStep, example: Batch, sizes: Sequence[int], spec: Spec, capture: GraphCapturer
    ) -> None:
        self.num_correct, self.optimizer = step.num_correct, step.optimizer
        self._step = step
        self._graphs = {size: self._capture(example, size, spec, capture) for size in sizes}

    def _capture(self, example: Batch, size: int, spec: Spec, capture: GraphCapturer) -> CapturedGraph:
        is_whole = size == num_samples(example)  # no second copy of the largest batch in memory
        batch = example if is_whole else map_tensors(torch.clone, first_samples(example, size))
        loss = torch.zeros((), device=self.num_correct.device)

        def work() -> None:
            loss.copy_(self._step(batch, ignore_mark))

        replay = warm_up_and_capture(work, TORCH_STRATEGIES[spec.strategy].capture_warm_up_steps, capture)
        return CapturedGraph(batch, loss, replay)

    @property
    def counts_correct(self) -> bool:
        return self._step.counts_correct

    def begin_epoch(self) -> None:
        self._step.begin_epoch()

    def set_learning_rate(self, rate: float) -> None:
        if not self._step.rate_is_on_device and rate != self._step.rate:
            raise RuntimeError(
                f"the CUDA-graph step has the learning rate {self._step.rate} and cannot take {rate}; "
                "set fused_optimizer: true."
            )
        self._step.set_learning_rate(rate)

    def __call__(self, batch: Batch, mark: MarkPart, is_last: bool = True) -> Tensor:
        assert is_last, "a CUDA-graph step is a whole update"
        graph = self._graphs[num_samples(batch)]
        copy_batch(batch, graph.batch)
        graph.replay()
        mark("step")
        return graph.loss.clone()


TrainingStep = EagerStep | CapturedStep


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
    if spec.execution == "eager" and spec.compile == "none":
        return "eager"
    can_compile = all(process_group.all_gather(has_compiler(rank.device.type), bool))
    if not can_compile and (spec.execution in COMPILED_EXECUTIONS or spec.compile != "none"):
        needs = "Triton and a C compiler" if spec.device == "cuda" else "a C++ compiler"
        stated = f"compile={spec.compile!r}" if spec.compile != "none" else f"execution={spec.execution!r}"
        raise RuntimeError(f"{stated} needs {needs} on every node; install it, or use execution: auto alone.")
    return fastest_execution(spec, can_compile) if spec.execution == "auto" else spec.execution


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
    return on_new_stream(rank) if execution in CAPTURED_EXECUTIONS else contextlib.nullcontext()


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
    model = TORCH_STRATEGIES[spec.strategy].wrap(placed, workload, spec, rank)
    is_captured = execution in CAPTURED_EXECUTIONS
    forward = compile_model(workload, model) if execution in COMPILED_EXECUTIONS else model
    step = EagerStep(model, workload, spec, rank, forward=forward, optimizer=optimizer)
    is_compiled = execution in COMPILED_EXECUTIONS or spec.compile != "none"
    if not is_compiled and not is_captured:
        return PreparedStep(step)
    started = time.perf_counter()
    sizes = tuple(dict.fromkeys(batch_sizes(spec)))
    ready: TrainingStep = step
    step.begin_epoch()
    prepared = prepare_capture(step) if is_captured else contextlib.nullcontext()
    with prepared, restore_training_state(step, rank, is_captured), warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPECTED_WARNING)
        example = place_batch(synthetic_batch(workload, sizes[0], rank.device), rank.device, memory_format(spec))
        if is_compiled:
            warm_up_compiled(step, example, sizes, spec, rank)
        if is_captured:
            ready = CapturedStep(step, example, sizes, spec, graph_capturer())
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
    devices.reset_memory_statistics(spec, rank)  # cuDNN's trials of algorithms use more than a step
    if num_graphs == 0:
        raise RuntimeError(
            f"torch.compile found nothing to compile in model {spec.model!r} under strategy {spec.strategy!r}; "
            "give the model a forward of its own, or compile nothing."
        )


@contextlib.contextmanager
def restore_training_state(step: EagerStep, rank: Rank, is_captured: bool = False) -> Iterator[None]:
    """Restore parameters, buffers, the optimizer and random state after the block, as if it had trained nothing.

    A graph reads tensors at fixed addresses: weights are restored in place, and the state of the optimizer of a
    CUDA-graph step, which was empty, is set to 0. With momentum 0 the first update is then the same as without it
    (0 x momentum + gradient).
    """
    optimizer, scaler = own_optimizer(step.optimizer), step.scaler
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
