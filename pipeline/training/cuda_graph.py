"""A whole training step as a CUDA graph: recorded once for each size of batch, then replayed in one launch.

Method: pytorch.org/docs/stable/notes/cuda.html, "Whole-network capture" and "Usage with DistributedDataParallel".
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.data.batches import Batch, image_dtype, memory_format
from pipeline.data.images import IMAGE_SIZE_PX
from pipeline.experiment.spec import COMPILED_EXECUTIONS, Execution, Spec
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, MarkPart, ignore_mark
from pipeline.training.step_timer import WHOLE_STEP

CAPTURE_WARM_UP_STEPS = 3
# DDP rebuilds its buckets after the first step, and synchronizes for its own log in each of the first ten
DDP_CAPTURE_WARM_UP_STEPS = 11

Work = Callable[[], object]
Replay = Callable[[], object]
GraphCapturer = Callable[[Work], Replay]


def num_capture_warm_up_steps(spec: Spec) -> int:
    """How many steps must have run before one can be captured."""
    return DDP_CAPTURE_WARM_UP_STEPS if spec.strategy == "ddp" else CAPTURE_WARM_UP_STEPS


def new_stream(execution: Execution, rank: Rank) -> torch.cuda.Stream:
    """A stream for a captured step: of high priority where weight gradients run beside it, which nothing waits for."""
    return torch.cuda.Stream(rank.device, priority=-1 if execution in COMPILED_EXECUTIONS else 0)


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream, rank: Rank) -> Iterator[None]:
    """Everything inside is issued on that one stream: the default one cannot be captured.

    DDP must be wrapped in here too, or on a stream that joins this one (prepare.bucketing): it keeps the nodes that
    accumulate gradients, and these keep the stream on which they were made. Warm-up, capture and replay then need no
    waiting for each other.
    """
    outside = torch.cuda.current_stream(rank.device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        yield
    outside.wait_stream(stream)


def graph_capturer() -> GraphCapturer:
    """A recorder of CUDA graphs on the current stream, which share one pool of memory.

    They may share it because nothing passes from one replay to the next through it: what outlives a step
    (weights, momentum, loss, count, the batch) was allocated before, and gradients are made anew in each.
    Unsafe calls are errors in this thread alone: NCCL's watchdog asks after its events in another.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(work: Work) -> Replay:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return record


def warm_up_and_capture(work: Work, num_warm_up_steps: int, record: GraphCapturer) -> Replay:
    """Run the work so many times, then record it; recording runs nothing on the device."""
    for _ in range(num_warm_up_steps):
        work()
    return record(work)


class CapturedGraph(NamedTuple):
    """The step for one size of batch, and the tensors that it reads and writes wherever it is replayed."""

    images: Tensor
    labels: Tensor
    loss: Tensor
    replay: Replay


class CapturedStep:
    """A step replayed from its graph, one for each size: the epoch's last, smaller batch has its own.

    The host hands over a batch and launches once; where the parts inside end cannot be marked. The learning rate
    is part of the graph unless the optimizer reads it from the device (`fused_optimizer`).
    """

    parts: tuple[str, ...] = WHOLE_STEP

    def __init__(self, step: EagerStep, sizes: Sequence[int], spec: Spec, rank: Rank, record: GraphCapturer) -> None:
        self.num_correct = step.num_correct
        self._step = step
        self._recorded = {size: self._record(size, spec, rank, record) for size in sizes}

    def _record(self, size: int, spec: Spec, rank: Rank, record: GraphCapturer) -> CapturedGraph:
        images, labels = blank_batch(size, spec, rank)
        loss = torch.zeros((), device=rank.device)

        def work() -> None:
            loss.copy_(self._step(images, labels, ignore_mark))

        return CapturedGraph(images, labels, loss, warm_up_and_capture(work, num_capture_warm_up_steps(spec), record))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of batch that were captured."""
        return tuple(self._recorded)

    def begin_epoch(self) -> None:
        self._step.begin_epoch()

    def set_learning_rate(self, rate: float) -> None:
        if not self._step.rate_is_on_device and rate != self._step.rate:
            raise RuntimeError(f"the captured step has the learning rate {self._step.rate} and cannot take {rate}")
        self._step.set_learning_rate(rate)

    def __call__(self, images: Tensor, labels: Tensor, mark: MarkPart) -> Tensor:
        recorded = self._recorded[len(labels)]
        recorded.images.copy_(images, non_blocking=True)
        recorded.labels.copy_(labels, non_blocking=True)
        recorded.replay()
        mark("step")
        return recorded.loss.clone()


def blank_batch(size: int, spec: Spec, rank: Rank) -> Batch:
    """A batch of that size as the step meets it, of black images."""
    shape = (size, 3, IMAGE_SIZE_PX, IMAGE_SIZE_PX)
    images = torch.empty(shape, dtype=image_dtype(spec), device=rank.device, memory_format=memory_format(spec))
    return images.zero_(), torch.zeros(size, dtype=torch.int64, device=rank.device)
