"""One GPU: the bare model, without a wrapper."""

from pipeline.training.strategies.strategy import TorchStrategy

STRATEGY = TorchStrategy()
