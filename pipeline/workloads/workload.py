"""The protocol of what is trained: a model, its batches, its loss and its optimizer."""

import abc
import math
import reprlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pipeline.data.batches import Batch
from pipeline.records.record import TEST_ACCURACY as TEST_ACCURACY
from pipeline.records.record import Better

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from pipeline.data.batches import Rank, TrainingBatches


class WorkloadError(Exception):
    """A workload does not do what the point needs. The message names the reason and the cure."""


class Workload(abc.ABC):
    """A model and how it is trained. Options of a grid, such as `model.layers: 4`, are arguments of the constructor.

    `unit` names what people count (tokens, images); a sample has `items_per_sample` of them.
    `find_unused_parameters` is DDP's option for parameters that get no gradient in some steps.
    `merit` names the figure that `evaluate` returns; `better` says if it is to rise or to fall. A share of correct
    answers is best named TEST_ACCURACY.

    Each model is made by build_model(), then optimizer() gets it, and only then loss() and before_update() do.
    """

    unit: str = "samples"
    items_per_sample: int = 1
    find_unused_parameters: ClassVar[bool] = False
    merit: ClassVar[str] = ""
    better: ClassVar[Better] = "higher"

    @abc.abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model on the CPU. All ranks call it with the same random seed."""

    @abc.abstractmethod
    def synthetic_batch(self, size: int, device: torch.device) -> Batch:
        """Return a batch of random samples on the device, alike in shapes and types to those of `dataset`."""

    @abc.abstractmethod
    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """Return the mean loss of a batch, or that and the number of its correct predictions. Call the model once.

        The number is the sum of a tensor, with at most one prediction for each item.
        """

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """Return the compiled model. Each batch size is compiled before the clock starts, with static shapes."""
        return torch.compile(model, dynamic=False)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer: AdamW by default."""
        return torch.optim.AdamW(model.parameters())

    def learning_rate(self, update: int) -> float | None:
        """Return the learning rate of an update, counted from 0; None leaves it to the optimizer."""
        return None

    def before_update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  # optional
        """Do what the training does between backward pass and update: clip gradients, step a scheduler."""

    def dataset(self) -> "Dataset[Any]":
        """Return the training set, of equal length on every rank."""
        raise WorkloadError(f"{type(self).__name__} has no dataset(); add one, or use input: synthetic")

    def collate(self, samples: list[Any]) -> Batch:
        """Return the batch of these samples of the data set: torch's default. Raises WorkloadError."""
        from torch.utils.data import default_collate

        try:
            return default_collate(samples)
        except KeyError as error:
            raise WorkloadError(f"a sample has no {error}, and the first one has; give all the same keys") from error

    def evaluate(self, model: nn.Module, device: torch.device) -> float | tuple[float, float]:
        """Return the figure of merit over the test set, or that and the test loss. Only rank 0 calls it."""
        raise WorkloadError(f"{type(self).__name__} has no evaluate()")

    def shard_units(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the modules that FSDP shards one by one, such as the blocks of a transformer."""
        return ()

    def batches_on_device(self, rank: "Rank") -> "TrainingBatches":
        """Return the batches of `input: gpu`, which lie on the device."""
        raise WorkloadError(f"{type(self).__name__} has no batches on the device; use input: dataloader or synthetic")


def describe(value: object) -> str:
    """Return a value in a few words, for an error."""
    return f"a {type(value).__name__}" if value is not None else "None"


def model_of(workload: Workload) -> nn.Module:
    """Return a new model of the workload. Raises WorkloadError unless it is a bare module."""
    model: object = workload.build_model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"build_model returns {describe(model)}; return the model, a torch.nn.Module")
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise WorkloadError(f"build_model returns {describe(model)}; return the model inside: strategy wraps it")
    return model


def optimizer_of(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a bare model. Raises WorkloadError unless its step() alone updates that model."""
    found: object = workload.optimizer(model)
    if not isinstance(found, torch.optim.Optimizer):
        raise WorkloadError(
            f"optimizer returns {describe(found)}; return one torch.optim.Optimizer, and keep others and "
            "schedulers in self: before_update() may step them"
        )
    known = set(model.parameters())
    if not any(parameter in known for group in found.param_groups for parameter in group["params"]):
        raise WorkloadError(
            f"optimizer returns {describe(found)} of other parameters; build it from those of the model that it gets"
        )
    return found


def learning_rate_of(workload: Workload, update: int) -> float | None:
    """Return the learning rate of an update as a float of Python, or None. Raises WorkloadError."""
    rate = workload.learning_rate(update)
    if rate is None:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(number := float(rate)):
            return number
    raise WorkloadError(f"learning_rate({update}) returns {reprlib.repr(rate)}; return a finite number, or None")
