"""One training step: an update of the parameters from one batch, with a mark at the end of each part."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeline.data.batches import memory_format
from pipeline.experiment.learning_rate import learning_rate_at
from pipeline.experiment.spec import Spec
from pipeline.training.process_group import Rank
from pipeline.training.step_timer import STEP_PARTS

MarkPart = Callable[[str], None]
StepFunction = Callable[[], object]  # issues one training step, or other work that is timed or captured like one
LossAndNumCorrect = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def ignore_mark(part: str) -> None:
    """Do nothing: the mark of a step that is not timed part by part."""


class TrainingStep(Protocol):
    """A training step. It marks the end of each of its `parts` but `data`; `num_correct` counts over the epoch."""

    parts: tuple[str, ...]
    num_correct: Tensor  # int64, on the device

    def begin_epoch(self) -> None:
        """Set the model to training mode and the count of correct predictions to 0."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next steps."""

    def __call__(self, images: Tensor, labels: Tensor, mark: MarkPart) -> Tensor:
        """Update the parameters without waiting for the device. Return the loss, detached and on the device."""


class EagerStep:
    """A step whose operations the host issues one by one.

    `forward` replaces the model when it is called with the images. `compute_loss` maps outputs and labels to the loss
    and the number of correct predictions. `sync_context` is entered around forward and backward, as DDP's no_sync
    requires. `after_backward` runs between backward and optimizer. With `rate_on_device` a fused optimizer reads the
    learning rate from device memory, so that a captured step follows changes of the rate.
    """

    parts: tuple[str, ...] = STEP_PARTS

    def __init__(
        self,
        model: nn.Module,
        spec: Spec,
        rank: Rank,
        *,
        forward: Callable[[Tensor], Tensor] | None = None,
        compute_loss: LossAndNumCorrect | None = None,
        sync_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        after_backward: Callable[[], object] | None = None,
        rate_on_device: bool = False,
    ) -> None:
        self.model = model
        self.rate = learning_rate_at(spec, 0)
        self.rate_is_on_device = rate_on_device
        rate = torch.tensor(self.rate, device=rank.device) if rate_on_device else self.rate
        self.optimizer = torch.optim.SGD(
            parameter_groups(model, spec),
            lr=rate,  # on the device all groups share one tensor
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            nesterov=spec.nesterov,
            fused=True if spec.fused_optimizer else None,  # None: torch picks the implementation for the device
        )
        self.num_correct = torch.zeros((), dtype=torch.int64, device=rank.device)
        self._forward: Callable[[Tensor], Tensor] = model if forward is None else forward
        self._compute_loss = cross_entropy if compute_loss is None else compute_loss
        self._sync_context = sync_context
        self._after_backward = after_backward
        self._device = rank.device
        self._memory_format = memory_format(spec)
        self._autocast = torch.autocast(rank.device.type, torch.bfloat16, enabled=spec.precision == "bf16")

    def begin_epoch(self) -> None:
        self.model.train()
        self.num_correct.zero_()

    def set_learning_rate(self, rate: float) -> None:
        if rate == self.rate:
            return
        self.rate = rate
        for group in self.optimizer.param_groups:
            if self.rate_is_on_device:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def __call__(self, images: Tensor, labels: Tensor, mark: MarkPart) -> Tensor:
        images = images.to(self._device, non_blocking=True).contiguous(memory_format=self._memory_format)
        labels = labels.to(self._device, non_blocking=True)
        mark("copy")
        with self._sync_context():
            with self._autocast:
                loss, num_correct = self._compute_loss(self._forward(images), labels)
            self.num_correct += num_correct
            mark("forward")
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        if self._after_backward is not None:
            self._after_backward()
        mark("backward")
        self.optimizer.step()
        mark("optimizer")
        return loss.detach()


def cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of a batch and the number of correct predictions."""
    return nn.functional.cross_entropy(outputs, labels), (outputs.detach().argmax(1) == labels).sum()


def place_model(model: nn.Module, spec: Spec, rank: Rank) -> nn.Module:
    """Move the bare model to the rank's device, its weights in the memory layout of the spec."""
    placed: nn.Module = model.to(rank.device, memory_format=memory_format(spec))  # type: ignore[call-overload]
    return placed


def parameter_groups(model: nn.Module, spec: Spec) -> list[dict[str, Any]]:
    """Return the optimizer's groups: one, or with `no_bias_decay` another without decay for vectors.

    Every bias, and every scale and shift of a BatchNorm, is a vector; every other weight has more dimensions.
    """
    parameters = list(model.parameters())
    if "no_bias_decay" not in spec.remedies:
        return [{"params": parameters}]
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
