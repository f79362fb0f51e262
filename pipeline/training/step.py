"""One training step: an update of the parameters, with a mark at the end of each part; and the clock of an epoch.

With `grad_accumulation` an update takes several passes, each with a batch of its own; otherwise one.
The clock does not synchronize while it runs: CUDA events after the batch is ready, the copy to the GPU, forward,
backward and the optimizer are read when the epoch is over. On the CPU the same five marks come from perf_counter.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.data.batches import Batch, memory_format, place_batch
from pipeline.plan.spec import Spec
from pipeline.training.process_group import Rank
from pipeline.training.torch_strategies import TORCH_STRATEGIES, SyncContext, bare_model, local_part
from pipeline.workloads.workload import Workload, WorkloadError, learning_rate_of, optimizer_of

STEP_PARTS = ("data", "copy", "forward", "backward", "optimizer")
"""The parts of a step. A mark ends its part; `data` begins when the step before has ended."""

WHOLE_STEP = ("step",)
"""The one part of a step that cannot be marked inside (a CUDA graph); it begins when the step before has ended."""

PartTimesNs = npt.NDArray[np.int64]  # nanoseconds


class StepTimer:
    """A timer of one epoch: marks on the device's timeline, and wall time between synchronizations at start and stop.

    Use: start(), then for every step take() a batch and mark() each other part in its order, then stop(). A step of
    several passes has all parts but the last once for each pass. A step without parts has no marks.
    """

    def __init__(
        self, num_steps: int, device: torch.device, parts: tuple[str, ...] = STEP_PARTS, num_passes: int = 1
    ) -> None:
        self.parts = parts
        self._num_passes = num_passes
        self._device = device
        self._num_steps = num_steps
        marks_per_step = num_passes * (len(parts) - 1) + 1 if parts else 0
        num_marks = num_steps * marks_per_step + 1
        is_cpu = device.type == "cpu"
        self._marks: list[Any] = [0 if is_cpu else torch.cuda.Event(enable_timing=True) for _ in range(num_marks)]
        self.loader_wait_ns = 0  # of the host for batches, also while the device was busy
        self._next = 0
        self._started_ns = self._stopped_ns = 0
        self.started_unix_ns = 0  # the start in Unix time, to match telemetry samples

    def start(self) -> None:
        """Wait until the device is idle, then start the clock."""
        self._synchronize()
        self.started_unix_ns = time.time_ns()
        self._started_ns = time.perf_counter_ns()
        self._mark()

    def take(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch. The wait for it is the part `data`."""
        asked_ns = time.perf_counter_ns()
        batch = next(batches)
        self.loader_wait_ns += time.perf_counter_ns() - asked_ns
        self.mark("data")
        return batch

    def mark(self, part: str) -> None:
        """End a part of the current step, if it is one of `parts`."""
        if part in self.parts:
            self._mark()

    def stop(self) -> None:
        """Stop the clock when the device has done all its work."""
        self._synchronize()
        self._stopped_ns = time.perf_counter_ns()

    def _mark(self) -> None:
        if self._device.type == "cpu":
            self._marks[self._next] = time.perf_counter_ns()
        else:
            self._marks[self._next].record()
        self._next += 1

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def epoch_time_ns(self) -> int:
        """Wall time from start to stop; the device is idle at both."""
        return self._stopped_ns - self._started_ns

    def parts_ns(self) -> PartTimesNs:
        """Return the duration of each part of each step: [num_steps, len(parts)], in ns."""
        assert self._next == len(self._marks), "every part of every step needs one mark"
        if self._device.type == "cpu":
            marks = np.array(self._marks, dtype=np.int64)
            parts = marks[1:] - marks[:-1]
        else:  # from mark to mark: elapsed_time is a float32, too coarse for times since the start of a long epoch
            pairs = itertools.pairwise(self._marks)
            parts = np.array([round(start.elapsed_time(end) * 1e6) for start, end in pairs], dtype=np.int64)
        by_step = parts.reshape(self._num_steps, -1)
        in_passes = by_step[:, :-1].reshape(self._num_steps, self._num_passes, -1).sum(axis=1)
        return np.hstack([in_passes, by_step[:, -1:]])


NUM_CHECKED_UPDATES = 3  # not 1: a rule may skip updates; no more than there are before a capture, which cannot wait
AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(spec: Spec, rank: Rank) -> torch.autocast:
    """Return the context in which the loss is computed. It casts nothing where the parameters have the format."""
    autocast_type = AUTOCAST_TYPES.get(str(spec.precision)) if spec.param_dtype == "fp32" else None
    return torch.autocast(rank.device.type, autocast_type, enabled=autocast_type is not None)


MarkPart = Callable[[str], None]
StepFunction = Callable[[], object]  # issues one training step, or other work that is timed or captured like one


def ignore_mark(part: str) -> None:
    """Do nothing: the mark of a step that is not timed part by part."""


class NotInModelCall(WorkloadError, AttributeError):
    """A loss reads an attribute of the model. hasattr() is false, and getattr() gives its default."""


class ModelCall:
    """The model as a loss sees it: it can be called, and nothing else, whatever wraps, shards or compiles it."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        return self._model(*inputs, **keywords)

    def __getattr__(self, name: str) -> Any:
        raise NotInModelCall(
            f"the loss reads model.{name}, and can only call the model, which may be wrapped, sharded or compiled; "
            "keep what it needs in self, as in build_model() or optimizer(model)"
        )


def gradient_norm(optimizer: torch.optim.Optimizer) -> float:
    """Return the sum of the norms of the gradients of an optimizer on this rank, 0 without any. It waits for them."""
    found = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return sum(float(local_part(gradient).norm()) for gradient in found if gradient is not None)


class EagerStep:
    """A training step whose operations the host issues one by one. It marks the end of each of its `parts` but `data`.

    The loss calls `forward` in place of the model, if it is given. `sync_context` is entered around forward and
    backward, as DDP's no_sync requires. `after_backward` runs between the last backward pass and the optimizer. In fp16
    the loss is scaled (torch.amp.GradScaler). `optimizer` is the user's, if it was made before.
    """

    parts: tuple[str, ...] = STEP_PARTS

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        spec: Spec,
        rank: Rank,
        *,
        forward: Callable[..., Any] | None = None,
        sync_context: SyncContext | None = None,
        after_backward: Callable[[], object] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model = model
        strategy = TORCH_STRATEGIES[spec.strategy]
        self.optimizer = strategy.shard_optimizer(optimizer or optimizer_of(workload, bare_model(model)))
        self.rate: float | None = None
        self.rate_is_on_device = False
        if (rate := learning_rate_of(workload, 0)) is not None:
            self.set_learning_rate(rate)
        # over the epoch; float64 counts in floats, too, and shows a sum that is no count
        self.num_correct = torch.zeros((), dtype=torch.float64, device=rank.device)
        self.forward: Callable[..., Any] = ModelCall(model if forward is None else forward)
        self.counts_correct = False  # True once the loss gives the number of correct predictions
        self._loss = workload.loss
        is_overridden = type(workload).before_update is not Workload.before_update
        self.before_update = workload.before_update if is_overridden else None
        self.scaler = torch.GradScaler(rank.device.type) if spec.precision == "fp16" else None
        self._num_passes = spec.grad_accumulation
        sync_if_last = partial(strategy.sync_if_last, model)
        self._sync_context = sync_context or (sync_if_last if self._num_passes > 1 else contextlib.nullcontext)
        self._is_first = True  # pass of an update
        self._num_to_check = NUM_CHECKED_UPDATES
        self._after_backward = after_backward
        self._device = rank.device
        self._memory_format = memory_format(spec)
        self._autocast = autocast_of(spec, rank)

    def begin_epoch(self) -> None:
        """Set the model to training mode and the count of correct predictions to 0."""
        self.model.train()
        self.num_correct.zero_()
        self._is_first = True

    def put_rate_on_device(self) -> None:
        """Let the optimizer read the learning rate from device memory: a CUDA-graph step then follows its changes."""
        shared = torch.tensor(self.rate, device=self._device)
        for group in self.optimizer.param_groups:
            group["lr"] = shared
        self.rate_is_on_device = True

    def set_learning_rate(self, rate: float) -> None:
        if rate == self.rate:
            return
        self.rate = rate
        for group in self.optimizer.param_groups:
            if self.rate_is_on_device:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def __call__(self, batch: Batch, mark: MarkPart, is_last: bool = True) -> Tensor:
        """Run one pass, and after the last one of an update change the parameters, without waiting for the device.

        Return the loss, detached and on the device.
        """
        batch = place_batch(batch, self._device, self._memory_format)
        mark("copy")
        with self._sync_context(is_last):
            with self._autocast:
                found = self._loss(self.forward, batch)
            loss, num_correct = found if isinstance(found, tuple) else (found, None)
            if num_correct is not None:
                self.num_correct += num_correct.detach()
                self.counts_correct = True
            mark("forward")
            if self._is_first:
                self.optimizer.zero_grad(set_to_none=True)
            mean = loss if self._num_passes == 1 else loss / self._num_passes
            (mean if self.scaler is None else self.scaler.scale(mean)).backward()
        self._is_first = is_last
        if is_last and self._after_backward is not None:
            self._after_backward()
        mark("backward")
        if is_last:
            self._update()
            mark("optimizer")
        return loss.detach()

    def _call_before_update(self, before_update: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
        """Call the user's before_update(). Raises WorkloadError if it drops the gradients of all first updates."""
        is_checked = self._num_to_check > 0 and 0 < gradient_norm(self.optimizer) < math.inf
        before_update(bare_model(self.model), self.optimizer)
        if not is_checked or gradient_norm(self.optimizer) != 0:
            self._num_to_check = 0
            return
        self._num_to_check -= 1
        if self._num_to_check == 0:
            raise WorkloadError(
                "before_update() leaves no gradient, so updates change nothing; leave out its zero_grad(): each step "
                "begins with one"
            )

    def _update(self) -> None:
        if self.before_update is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self._call_before_update(self.before_update)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
