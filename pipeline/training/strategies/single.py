"""One GPU: the bare model, without a wrapper."""

from pipeline.training.strategies.base import TorchStrategy

STRATEGY = TorchStrategy()
