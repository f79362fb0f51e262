"""Image classifiers trained by SGD: what those of CIFAR-10 and those of torchvision share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.plan.axes import Execution
from pipeline.plan.spec import Spec, learning_rate_at
from pipeline.workloads.workload import TEST_ACCURACY, Workload

ImageBatch = tuple[Tensor, Tensor]  # images [batch, 3, height, width], labels [batch] int64


class ImageClassifier(Workload):
    """A classifier of images. The axes of the point say how it is trained, and `data` is the folder of its images."""

    unit = "images"
    merit = TEST_ACCURACY

    def __init__(self, spec: Spec, data: Path | None = None, execution: Execution = "eager") -> None:
        self._spec, self._data, self._execution = spec, data, execution

    def loss(self, model: Callable[..., Any], batch: ImageBatch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return cross_entropy(model(images), labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        spec = self._spec
        return torch.optim.SGD(
            parameter_groups(model, spec),
            lr=self.learning_rate(0),
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            nesterov=spec.nesterov,
            fused=True if spec.fused_optimizer else None,  # None: torch picks the implementation for the device
        )

    def learning_rate(self, update: int) -> float:
        return learning_rate_at(self._spec, update)


def cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of a batch and the number of correct predictions."""
    return nn.functional.cross_entropy(outputs, labels), (outputs.detach().argmax(1) == labels).sum()


def parameter_groups(model: nn.Module, spec: Spec) -> list[dict[str, Any]]:
    """Return the optimizer's groups: one, or with `no_bias_decay` another without decay for vectors.

    Every bias, and every scale and shift of a BatchNorm, is a vector; every other weight has more dimensions.
    """
    parameters = list(model.parameters())
    if "no_bias_decay" not in spec.remedies:
        return [{"params": parameters}]
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
