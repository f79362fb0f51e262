"""What each strategy does with a model: one file a strategy. What is known of it without torch: plan/strategies.py."""

import importlib

from pipeline.training.strategies.strategy import TorchStrategy


def torch_strategy(name: str) -> TorchStrategy:
    """Return what the strategy of that name does with torch: `STRATEGY` of its file."""
    strategy: TorchStrategy = importlib.import_module(f"{__name__}.{name}").STRATEGY
    return strategy
