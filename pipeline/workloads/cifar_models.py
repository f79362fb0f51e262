"""The models: one function each, named like its value of the `model` axis.

Each takes `num_classes` and `zero_gamma` and returns a module for images of shape [batch, 3, 32, 32].
"""

import sys
from collections.abc import Callable
from typing import cast

import torch
import torchvision
from torch import Tensor, nn


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
