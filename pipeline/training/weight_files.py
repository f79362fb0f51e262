"""Weight files: the fp32 tensors of a model as .npz, by their names in the model. They load without pickle."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn


class UnusableWeights(Exception):
    """A file does not hold the weights of the model. The message says why, and what to do."""


def save_weights(model: nn.Module, path: Path) -> str:
    """Write the model's weights, and return the SHA-256 of the file."""
    np.savez(path, **{name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()})
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_weights(model: nn.Module, path: Path, sha256: str | None = None) -> None:
    """Load a weight file into the model. With `sha256` it must have that digest. Raises UnusableWeights."""
    cure = "give the .weights.npz beside the record of this model"
    try:
        if sha256 is not None and (found := file_sha256(path)) != sha256:
            raise UnusableWeights(f"{path} has the SHA-256 {found}, and its record says {sha256}; {cure}.")
        with path.open("rb") as file:  # NumPy would not close a file that it cannot read
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise UnusableWeights(f"{path} is one array and not a file of weights; {cure}.")
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise UnusableWeights(f"{path} cannot be read as weights ({error}); {cure}.") from error
    except (ValueError, TypeError) as error:  # pickled objects, or a type that torch does not know
        if isinstance(error, UnusableWeights):
            raise
        raise UnusableWeights(f"{path} is not a file of weights; {cure}.") from error
    expected = model.state_dict()
    different = sorted(set(tensors) ^ set(expected))
    if different:
        raise UnusableWeights(f"{path}: {', '.join(different)} is in the file or in the model alone; {cure}.")
    for name, tensor in expected.items():
        if (tensors[name].shape, tensors[name].dtype) != (tensor.shape, tensor.dtype):
            raise UnusableWeights(
                f"{path}: {name} is {tensors[name].dtype} {list(tensors[name].shape)}, and the model needs "
                f"{tensor.dtype} {list(tensor.shape)}; {cure}."
            )
    model.load_state_dict(tensors)
