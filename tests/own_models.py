"""Models of a user's own, written into files for tests: the smallest that works, and what is wrong with others."""

from pathlib import Path

SMALLEST = """
import torch
from torch import nn

from pipeline.workloads import Workload


class Tiny(Workload):
    unit = "atoms"

    def __init__(self, width: int = 4, bias: bool = True):
        self.width, self.bias, self.items_per_sample = width, bias, 3

    def build_model(self):
        return nn.Linear(self.width, 1, bias=self.bias)

    def synthetic_batch(self, size, device):
        return {"x": torch.randn(size, self.width, device=device), "y": torch.zeros(size, 1, device=device)}

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])
"""


def write_model(folder: Path, text: str = SMALLEST, name: str = "tiny.py") -> Path:
    """Write a file with a user's model, and its folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def with_change(old: str, new: str) -> str:
    """Return the smallest model with a change."""
    assert old in SMALLEST, old
    return SMALLEST.replace(old, new)
