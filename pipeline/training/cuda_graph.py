"""A whole training step as a CUDA graph: captured once for each batch size, then replayed with one launch.

Method: pytorch.org/docs/stable/notes/cuda.html, "Whole-network capture" and "Usage with DistributedDataParallel".
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.data.batches import Batch, image_dtype, memory_format
from pipeline.data.images import IMAGE_SIZE_PX
from pipeline.experiment.spec import Spec
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, MarkPart, StepFunction, ignore_mark
from pipeline.training.step_timer import WHOLE_STEP

CAPTURE_WARM_UP_STEPS = 3
# DDP rebuilds its buckets after the first step, and synchronizes for its log in each of the first ten steps
DDP_CAPTURE_WARM_UP_STEPS = 11

GraphCapturer = Callable[[StepFunction], StepFunction]


def num_capture_warm_up_steps(spec: Spec) -> int:
    return DDP_CAPTURE_WARM_UP_STEPS if spec.strategy == "ddp" else CAPTURE_WARM_UP_STEPS


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


class CapturedGraph(NamedTuple):
    """A captured step for one batch size, and the tensors that every replay reads and writes."""

    images: Tensor
    labels: Tensor
    loss: Tensor
    replay: StepFunction


class CapturedStep:
    """A step that replays a CUDA graph. Each batch size has its own graph, as the last batch of an epoch is smaller.

    The host copies a batch and launches once, so the parts of a step cannot be marked. The learning rate is fixed in
    the graph unless the optimizer reads it from the device (`fused_optimizer`).
    """

    parts: tuple[str, ...] = WHOLE_STEP

    def __init__(self, step: EagerStep, sizes: Sequence[int], spec: Spec, rank: Rank, capture: GraphCapturer) -> None:
        self.num_correct = step.num_correct
        self._step = step
        self._graphs = {size: self._capture(size, spec, rank, capture) for size in sizes}

    def _capture(self, size: int, spec: Spec, rank: Rank, capture: GraphCapturer) -> CapturedGraph:
        images, labels = blank_batch(size, spec, rank)
        loss = torch.zeros((), device=rank.device)

        def work() -> None:
            loss.copy_(self._step(images, labels, ignore_mark))

        replay = warm_up_and_capture(work, num_capture_warm_up_steps(spec), capture)
        return CapturedGraph(images, labels, loss, replay)

    def begin_epoch(self) -> None:
        self._step.begin_epoch()

    def set_learning_rate(self, rate: float) -> None:
        if not self._step.rate_is_on_device and rate != self._step.rate:
            raise RuntimeError(
                f"the captured step has the learning rate {self._step.rate} and cannot take {rate}; "
                "set fused_optimizer: true."
            )
        self._step.set_learning_rate(rate)

    def __call__(self, images: Tensor, labels: Tensor, mark: MarkPart) -> Tensor:
        graph = self._graphs[len(labels)]
        graph.images.copy_(images, non_blocking=True)
        graph.labels.copy_(labels, non_blocking=True)
        graph.replay()
        mark("step")
        return graph.loss.clone()


def blank_batch(size: int, spec: Spec, rank: Rank) -> Batch:
    """Return a batch of black images in the type and layout of training batches."""
    shape = (size, 3, IMAGE_SIZE_PX, IMAGE_SIZE_PX)
    images = torch.empty(shape, dtype=image_dtype(spec), device=rank.device, memory_format=memory_format(spec))
    return images.zero_(), torch.zeros(size, dtype=torch.int64, device=rank.device)
