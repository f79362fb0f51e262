"""The strategies in torch, one file each. Their facts without torch are in plan/strategies.py."""

import importlib

from pipeline.training.torch_strategies.base import TorchStrategy


def torch_strategy(name: str) -> TorchStrategy:
    """Return the strategy of that name, `STRATEGY` of its file."""
    strategy: TorchStrategy = importlib.import_module(f"{__name__}.{name}").STRATEGY
    return strategy
