"""One training step: an update of the parameters, with a mark at the end of each part.

With `grad_accumulation` an update takes several passes, each with a batch of its own; otherwise one.
"""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeline.data.batch import Batch, place_batch
from pipeline.data.batches import memory_format
from pipeline.experiment.spec import Spec
from pipeline.training.process_group import Rank
from pipeline.training.step_timer import STEP_PARTS
from pipeline.training.strategies import torch_strategy
from pipeline.training.strategies.strategy import SyncContext, bare_model, local_part
from pipeline.workloads.workload import Workload, WorkloadError, learning_rate_of, optimizer_of

NUM_CHECKED_UPDATES = 3  # not 1: a rule may skip updates; no more than there are before a capture, which cannot wait
AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

MarkPart = Callable[[str], None]
StepFunction = Callable[[], object]  # issues one training step, or other work that is timed or captured like one


def ignore_mark(part: str) -> None:
    """Do nothing: the mark of a step that is not timed part by part."""


class TrainingStep(Protocol):
    """A training step. It marks the end of each of its `parts` but `data`; `num_correct` counts over the epoch."""

    parts: tuple[str, ...]
    num_correct: Tensor  # on the device; float64 counts in floats, too, and shows a sum that is no count
    optimizer: torch.optim.Optimizer

    @property
    def counts_correct(self) -> bool:
        """True if the loss gives the number of correct predictions."""

    def begin_epoch(self) -> None:
        """Set the model to training mode and the count of correct predictions to 0."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next steps."""

    def __call__(self, batch: Batch, mark: MarkPart, is_last: bool = True) -> Tensor:
        """Run one pass, and after the last one of an update change the parameters, without waiting for the device.

        Return the loss, detached and on the device.
        """


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
    """A step whose operations the host issues one by one.

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
        strategy = torch_strategy(spec.strategy)
        self.optimizer = strategy.shard_optimizer(optimizer or optimizer_of(workload, bare_model(model)))
        self.rate = learning_rate_of(workload, 0)
        self.rate_is_on_device = False
        self.num_correct = torch.zeros((), dtype=torch.float64, device=rank.device)
        self.forward: Callable[..., Any] = ModelCall(model if forward is None else forward)
        self.counts_correct = False
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
        autocast_type = AUTOCAST_TYPES.get(str(spec.precision))
        self._autocast = torch.autocast(rank.device.type, autocast_type, enabled=autocast_type is not None)

    def begin_epoch(self) -> None:
        self.model.train()
        self.num_correct.zero_()
        self._is_first = True

    def put_rate_on_device(self) -> None:
        """Let the optimizer read the learning rate from device memory: a captured step then follows its changes."""
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
