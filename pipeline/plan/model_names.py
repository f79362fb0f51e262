"""The name of a point's model: a built-in one, one of torchvision, or a class of the user's own.

resnet18, lenet, gpt      built in
torchvision:resnet50      a classification model of torchvision
package.module:Class      a class of an importable module
gpt.py:Class              a class of a file; grids hold its absolute path
"""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

CIFAR_MODELS = ("resnet18", "lenet")  # each is a function of the same name in pipeline.workloads.image_classifiers
BUILT_IN_MODELS = (*CIFAR_MODELS, "gpt")
TORCHVISION = "torchvision:"


class ClassPlace(NamedTuple):
    """The place of a user's class: a dotted module, or a file that ends in .py.

    `path` has more folders in which a module may lie, of the variable PYTHONPATH.
    """

    module: str
    name: str
    path: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        return self.module.endswith(".py")

    @property
    def import_name(self) -> str:
        """The name of the module once it is imported."""
        return Path(self.module).stem if self.is_file else self.module


def is_image_model(model: str | None) -> bool:
    """True for a model that this project trains as an image classifier; also where the model is not stated."""
    return model is None or model in CIFAR_MODELS or model.startswith(TORCHVISION)


def own_class(model: str | None) -> ClassPlace | None:
    """Return the place of a user's class; None for other models."""
    if model is None or ":" not in model or model.startswith(TORCHVISION):
        return None
    module, _, name = model.rpartition(":")
    return ClassPlace(module, name)


def short_model_name(model: str, beside: Collection[str | None] = ()) -> str:
    """Return the name for people: that of a file with its last folder, or as many as tell it from those `beside`."""
    place = own_class(model)
    if place is None or not place.is_file:
        return model
    parts = Path(place.module).parts
    others = [Path(other.module).parts for name in {*beside} - {model} if (other := own_class(name))]
    num_parts = next((n for n in range(2, len(parts)) if all(other[-n:] != parts[-n:] for other in others)), len(parts))
    return f"{'/'.join(parts[-num_parts:])}:{place.name}"
