"""One update of the parameters from one batch, with a mark where each of its parts ends."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeline.data.batches import memory_format
from pipeline.experiment.spec import REFERENCE_GLOBAL_BATCH_SIZE, Spec
from pipeline.training.process_group import Rank
from pipeline.training.step_timer import STEP_PARTS

MarkPart = Callable[[str], None]
LossAndNumCorrect = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def ignore_mark(part: str) -> None:
    """The mark of a step that no clock runs beside."""


class TrainingStep(Protocol):
    """A training step. `parts` are those that it marks after `data`; `num_correct` counts over the epoch."""

    parts: tuple[str, ...]
    num_correct: Tensor  # int64, on the device

    def begin_epoch(self) -> None:
        """Put the model into training mode and the count of correct answers to 0."""

    def set_learning_rate(self, rate: float) -> None:
        """The rate of the steps that follow."""

    def __call__(self, images: Tensor, labels: Tensor, mark: MarkPart) -> Tensor:
        """One update; returns the loss, on the device and detached. Nothing here waits for the device."""


class EagerStep:
    """Every operation issued by the host, one after another.

    `forward` is what is called with the images where that is not the model itself, and `score` what makes loss and
    correct answers of its outputs; `without_communication` is a context around forward and backward, and `after_backward` runs between
    backward and optimizer. `rate_on_device` lets a fused optimizer read the learning rate from the device's memory,
    where a captured step finds a new one.
    """

    parts: tuple[str, ...] = STEP_PARTS

    def __init__(
        self,
        model: nn.Module,
        spec: Spec,
        rank: Rank,
        *,
        forward: Callable[[Tensor], Tensor] | None = None,
        score: LossAndNumCorrect | None = None,
        without_communication: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        after_backward: Callable[[], object] | None = None,
        rate_on_device: bool = False,
    ) -> None:
        self.model = model
        self.rate = learning_rate_at(spec, 0)
        self.rate_is_on_device = rate_on_device
        rate = torch.tensor(self.rate, device=rank.device) if rate_on_device else self.rate
        self.optimizer = build_optimizer(model, spec, rate)
        self.num_correct = torch.zeros((), dtype=torch.int64, device=rank.device)
        self._forward: Callable[[Tensor], Tensor] = model if forward is None else forward
        self._score = cross_entropy if score is None else score
        self._without_communication = without_communication
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
        with self._without_communication():
            with self._autocast:
                loss, num_correct = self._score(self._forward(images), labels)
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
    """The mean loss of a batch, and how many of its answers are correct."""
    return nn.functional.cross_entropy(outputs, labels), (outputs.detach().argmax(1) == labels).sum()


def place_model(model: nn.Module, spec: Spec, rank: Rank) -> nn.Module:
    """The model on the rank's device, its weights laid out as the spec says; before any wrapping."""
    placed: nn.Module = model.to(rank.device, memory_format=memory_format(spec))  # type: ignore[call-overload]
    return placed


def build_optimizer(model: nn.Module, spec: Spec, rate: float | Tensor) -> torch.optim.SGD:
    """SGD as the spec sets it; where it is not fused, in the form that torch picks for the device."""
    return torch.optim.SGD(
        model.parameters(),
        lr=rate,
        momentum=spec.momentum,
        weight_decay=spec.weight_decay,
        fused=True if spec.fused_optimizer else None,
    )


def learning_rate_at(spec: Spec, update: int) -> float:
    """The rate of an update from 0: linear scaling and gradual warm-up (Goyal et al. 2017).

    x global_batch_size/128 with linear scaling, ramped up over the warm-up's updates.
    """
    rate = spec.learning_rate
    if "linear_scaling" in spec.remedies:
        rate *= spec.global_batch_size / REFERENCE_GLOBAL_BATCH_SIZE
    if "warmup" in spec.remedies:
        rate *= min(1.0, (update + 1) / (spec.warmup_epochs * spec.steps_per_epoch))
    return rate
