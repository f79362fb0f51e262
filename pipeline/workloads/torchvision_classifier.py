"""The classification models of torchvision, with the input size of their published weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from pipeline.data import staging
from pipeline.plan.axes import Execution
from pipeline.plan.model_names import TORCHVISION
from pipeline.plan.spec import Spec
from pipeline.workloads.image_classifier import ImageBatch, ImageClassifier, cross_entropy

NUM_CLASSES = 1000
AUXILIARY_WEIGHTS = {"inception_v3": 0.4, "googlenet": 0.3}  # of their auxiliary heads: Szegedy et al. 2016, 2015


class TorchvisionClassifier(ImageClassifier):
    """A model of torchvision, trained by SGD on an image folder, decoded by the loader, or on synthetic images."""

    def __init__(self, spec: Spec, data: Path | None = None, execution: Execution = "eager") -> None:
        super().__init__(spec, data, execution)
        self.name = str(spec.model).removeprefix(TORCHVISION)
        self._preset = torchvision.models.get_model_weights(self.name).DEFAULT.transforms()
        (self.image_size_px,) = self._preset.crop_size

    def build_model(self) -> nn.Module:
        sized = {"image_size": self.image_size_px} if self.name.startswith("vit_") else {}
        unused = {"init_weights": True} if self.name in AUXILIARY_WEIGHTS else {}
        model: nn.Module = torchvision.models.get_model(self.name, num_classes=NUM_CLASSES, **sized, **unused)
        return model

    def synthetic_batch(self, size: int, device: torch.device) -> ImageBatch:
        labels = torch.randint(NUM_CLASSES, (size,), device=device)
        return torch.randn((size, 3, self.image_size_px, self.image_size_px), device=device), labels

    def loss(self, model: Callable[..., Any], batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Return the loss, with that of auxiliary heads, and the number of correct predictions."""
        images, labels = batch
        outputs = model(images)
        if isinstance(outputs, Tensor):
            return cross_entropy(outputs, labels)
        scores, *auxiliary = outputs
        loss, num_correct = cross_entropy(scores, labels)
        others = [nn.functional.cross_entropy(other, labels) for other in auxiliary]
        return loss + AUXILIARY_WEIGHTS[self.name] * torch.stack(others).sum(), num_correct

    def dataset(self) -> Dataset[Any]:
        augmented = [transforms.RandomResizedCrop(self.image_size_px), transforms.RandomHorizontalFlip()]
        normalized = [transforms.ToTensor(), transforms.Normalize(self._preset.mean, self._preset.std)]
        return self._images("train", transforms.Compose([*augmented, *normalized]))

    def evaluate(self, model: nn.Module, device: torch.device) -> tuple[float, float]:
        """Return accuracy and mean loss over the test images, prepared as for the published weights."""
        loss_sum, num_correct, count = 0.0, 0, 0
        for images, labels in DataLoader(self._images("test", self._preset), self._spec.batch_size_per_gpu):
            outputs, labels = model(images.to(device)), labels.to(device)
            loss_sum += float(nn.functional.cross_entropy(outputs, labels, reduction="sum"))
            num_correct += int((outputs.argmax(1) == labels).sum())
            count += len(labels)
        return num_correct / count, loss_sum / count

    def _images(self, split: str, transform: Callable[[Any], Any]) -> Dataset[Any]:
        root = staging.require_folder(self._data)
        staging.require_image_folder(root)
        found: Dataset[Any] = datasets.ImageFolder(str(root / split), transform)
        return found
