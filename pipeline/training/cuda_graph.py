"""A whole training step as a CUDA graph: captured once for each batch size, then replayed with one launch.

Method: pytorch.org/docs/stable/notes/cuda.html, "Whole-network capture" and "Usage with DistributedDataParallel".
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.data.batch import Batch, copy_batch, first_samples, map_tensors, num_samples
from pipeline.experiment.spec import Spec
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, MarkPart, StepFunction, ignore_mark
from pipeline.training.step_timer import WHOLE_STEP
from pipeline.training.strategies import torch_strategy
from pipeline.workloads.workload import WorkloadError

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
            f"a captured step cannot restart {name}; use {', '.join(CAPTURED_OPTIMIZERS)}, or execution: compile"
        )
    if step.scaler is not None and not all(group.get("fused") for group in groups):
        raise WorkloadError("a captured step in fp16 needs a fused optimizer: others wait for the scale of the loss")
    for group in groups:
        if "capturable" in group:
            group["capturable"] = True
    if step.rate is not None and all(group.get("fused") or group.get("capturable") for group in groups):
        step.put_rate_on_device()
    before = settings_of(step)
    yield
    if settings_of(step) != before:
        raise WorkloadError(
            "before_update changes the settings of the optimizer, which a captured step would keep; give the rate of "
            "each update by learning_rate(update), or use execution: compile"
        )


def settings_of(step: EagerStep) -> list[dict[str, Any]]:
    """Return the settings of the optimizer's groups, without the rate on the device."""
    hidden = ("params", "lr") if step.rate_is_on_device else ("params",)
    return [{key: value for key, value in group.items() if key not in hidden} for group in step.optimizer.param_groups]


class CapturedGraph(NamedTuple):
    """A captured step for one batch size, and the tensors that every replay reads and writes."""

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

        replay = warm_up_and_capture(work, torch_strategy(spec.strategy).capture_warm_up_steps, capture)
        return CapturedGraph(batch, loss, replay)

    @property
    def counts_correct(self) -> bool:
        return self._step.counts_correct

    def begin_epoch(self) -> None:
        self._step.begin_epoch()

    def set_learning_rate(self, rate: float) -> None:
        if not self._step.rate_is_on_device and rate != self._step.rate:
            raise RuntimeError(
                f"the captured step has the learning rate {self._step.rate} and cannot take {rate}; "
                "set fused_optimizer: true."
            )
        self._step.set_learning_rate(rate)

    def __call__(self, batch: Batch, mark: MarkPart, is_last: bool = True) -> Tensor:
        assert is_last, "a captured step is a whole update"
        graph = self._graphs[num_samples(batch)]
        copy_batch(batch, graph.batch)
        graph.replay()
        mark("step")
        return graph.loss.clone()
