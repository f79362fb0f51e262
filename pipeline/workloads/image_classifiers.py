"""Image classifiers trained by SGD: ResNet-18 and LeNet on CIFAR-10 and like images, and the models of torchvision.

Those of CIFAR-10 take an image folder or synthetic images of 32 x 32 pixels, too. Those of torchvision take the input
size of their published weights.
"""

import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from pipeline.data import staging
from pipeline.data.batches import Rank, TrainingBatches
from pipeline.data.image_batches import (
    CHANNEL_MEANS,
    CHANNEL_STDS,
    AugmentedImages,
    DeviceAugmentedBatches,
    image_dtype,
)
from pipeline.data.images import IMAGE_SIZE_PX, NUM_SYNTHETIC_CLASSES, Images, load_images
from pipeline.plan.axes import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, Execution
from pipeline.plan.model_names import TORCHVISION
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


def build_model(name: str, num_classes: int, zero_gamma: bool = False) -> nn.Module:
    """Build the model of that name. `zero_gamma` zeroes the last BatchNorm gamma of each residual block."""
    builder = cast(Callable[[int, bool], nn.Module], getattr(sys.modules[__name__], name))
    return builder(num_classes, zero_gamma)


def resnet18(num_classes: int, zero_gamma: bool) -> nn.Module:
    """Build ResNet-18 (He et al. 2016) with the CIFAR stem: 3x3 convolution of stride 1, no max-pool.

    It has 11,173,962 parameters with ten classes.
    """
    model = torchvision.models.resnet18(num_classes=num_classes, zero_init_residual=zero_gamma)
    model.conv1 = Stem(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return cast(nn.Module, model)


def lenet(num_classes: int, zero_gamma: bool) -> nn.Module:
    """Build LeNet-5 (LeCun et al. 1998) for three channels, with ReLU and max-pool, for quick tests (no gamma)."""
    return Sequential(
        nn.Conv2d(3, 6, kernel_size=5),  # [batch, 6, 28, 28]
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),  # [batch, 16, 10, 10]
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),  # [batch, 400]
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


class Sequential(nn.Sequential):
    """torch's Sequential with its own forward: under DDP, torch.compile skips a forward that belongs to torch."""

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = super().forward(images)  # type: ignore[no-untyped-call]
        return outputs


class Stem(nn.Conv2d):
    """A convolution of stride 1 over few channels. Compiled for a GPU it is a product of patches and weight.

    For 3 channels cuDNN would pad and copy the input, or use kernels without tensor cores.
    """

    def forward(self, images: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and images.is_cuda:
            return im2col_convolution(images, self.weight, int(self.padding[0]))
        return super().forward(images)


def im2col_convolution(images: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Convolve with stride 1 and without bias as one matrix product. The output is channels last in memory.

    The rows of both matrices are padded to a multiple of 8, as tensor cores require.
    """
    height, width = weight.shape[2:]
    padded = nn.functional.pad(images, (padding,) * 4)
    patches = padded.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5).flatten(3)
    missing = (0, -patches.shape[3] % 8)
    products = nn.functional.linear(nn.functional.pad(patches, missing), nn.functional.pad(weight.flatten(1), missing))
    return products.permute(0, 3, 1, 2)


MAX_EVALUATION_BATCH_SIZE = 1000


class CifarClassifier(ImageClassifier):
    """A small network, whose compiled step is tuned: its loss is compiled too."""

    def __init__(self, spec: Spec, data: Path | None = None, execution: Execution = "eager") -> None:
        super().__init__(spec, data, execution)
        is_compiled = execution in COMPILED_EXECUTIONS
        self._cross_entropy = torch.compile(cross_entropy, dynamic=False) if is_compiled else cross_entropy

    @cached_property
    def _training_images(self) -> Images:
        return load_images(self._spec, "train", self._data)

    @cached_property
    def _test_images(self) -> Images:
        return load_images(self._spec, "test", self._data)

    @property
    def _num_classes(self) -> int:
        return NUM_SYNTHETIC_CLASSES if self._spec.input == "synthetic" else self._training_images.num_classes

    def build_model(self) -> nn.Module:
        return build_model(self._spec.model or "resnet18", self._num_classes, "zero_gamma" in self._spec.remedies)

    def synthetic_batch(self, size: int, device: torch.device) -> ImageBatch:
        """Return noise that is brighter the higher the label, in the type of the batches that the point trains on."""
        labels = torch.randint(self._num_classes, (size,), device=device)
        images = torch.randn((size, 3, IMAGE_SIZE_PX, IMAGE_SIZE_PX), device=device)
        images += (labels / self._num_classes).view(-1, 1, 1, 1)
        return images.to(image_dtype(self._spec)), labels

    def loss(self, model: Callable[..., Any], batch: ImageBatch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return self._cross_entropy(model(images), labels)

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """Return the compiled model. On a GPU it has options that make a step faster (docs/results.md has by how much).

        TorchInductor combines small kernels into one, and for a CUDA-graph step tunes pointwise kernels on this GPU.
        cuDNN benchmarks all its algorithms: none of the first ten, its default limit, is the fastest.
        """
        torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0
        options = {"combo_kernels": True, "max_autotune_pointwise": self._execution in CAPTURED_EXECUTIONS}
        on_gpu = {"options": cast(Any, options)} if self._spec.device == "cuda" else {}
        return torch.compile(model, dynamic=False, **on_gpu)

    def dataset(self) -> Dataset[Any]:
        return AugmentedImages(self._training_images)

    def batches_on_device(self, rank: Rank) -> TrainingBatches:
        return DeviceAugmentedBatches(self._spec, rank, self._training_images)

    def evaluate(self, model: nn.Module, device: torch.device) -> tuple[float, float]:
        """Return accuracy and mean loss over the test set, computed in fp32 or TF32 (set_precision).

        A batch is at most as large as in training, so that training sets the peak memory.
        """
        images, size = self._test_images, min(MAX_EVALUATION_BATCH_SIZE, self._spec.batch_size_per_gpu)
        mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (CHANNEL_MEANS, CHANNEL_STDS))
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        num_correct = torch.zeros((), dtype=torch.int64, device=device)
        for start in range(0, len(images.labels), size):
            pixels = np.array(images.pixels[start : start + size])  # a copy, since the memory map is read-only
            batch = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
            labels = torch.from_numpy(images.labels[start : start + size]).to(device)
            outputs = model((batch.float() / 255 - mean) / std)
            loss_sum += nn.functional.cross_entropy(outputs, labels, reduction="sum")
            num_correct += (outputs.argmax(1) == labels).sum()
        return int(num_correct) / len(images.labels), float(loss_sum) / len(images.labels)
