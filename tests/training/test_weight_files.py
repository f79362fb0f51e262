import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.training.quantize_point import UnusableWeights, load_weights, save_weights
from pipeline.workloads.cifar_classifier import build_model


def make_model(seed: int, num_classes: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("lenet", num_classes)


def test_saved_weights_come_back_bit_by_bit(tmp_path: Path) -> None:
    model, other = make_model(0), make_model(1)
    path = tmp_path / "weights.npz"
    sha256 = save_weights(model, path)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    load_weights(other, path, sha256)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_weights_of_another_digest_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    sha256 = save_weights(make_model(0), path)
    save_weights(make_model(1), path)
    with pytest.raises(UnusableWeights, match=f"its record says {sha256}; give the .weights.npz"):
        load_weights(make_model(2), path, sha256)


def write_pickle(path: Path) -> None:
    np.savez(path, **{"0.weight": np.array([{"code": "runs"}], dtype=object)})  # type: ignore[arg-type]


def write_words(path: Path) -> None:
    np.savez(path, **{name: np.array(["a"]) for name in make_model(0).state_dict()})  # type: ignore[arg-type]


def write_one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda path: path.write_text("not weights"), "is not a file of weights"),
        (lambda path: path.write_bytes(b""), "cannot be read as weights"),
        (lambda path: path.write_bytes(b"PK\x03\x04 cut off"), "cannot be read as weights"),
        (lambda path: None, "cannot be read as weights"),
        (write_pickle, "is not a file of weights; give"),
        (write_words, "is not a file of weights"),
        (write_one_array, "is one array and not a file of weights"),
        (lambda path: np.savez(path, first=np.zeros(3)), r"0.bias, 0.weight, .*, first is in the file or in the model"),
        (
            lambda path: save_weights(make_model(0, num_classes=3), path),
            r"11.weight is torch.float32 \[3, 84\].*\[10,",
        ),
        (lambda path: save_weights(make_model(0).double(), path), "torch.float64 .* and the model needs torch.float32"),
    ],
)
def test_a_file_of_other_things_is_refused_in_one_sentence(
    tmp_path: Path, write: Callable[[Path], object], why: str
) -> None:
    path = tmp_path / "weights.npz"
    write(path)
    model = make_model(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UnusableWeights, match=why) as refusal:
        load_weights(model, path)
    cure = r"; give the \.weights\.npz beside the record of this model\.$"
    assert re.search(f"{re.escape(str(path))}.*{cure}", str(refusal.value), re.DOTALL)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
