"""One GPU: the bare model, without a wrapper."""

from pipeline.training.torch_strategies.base import TorchStrategy

STRATEGY = TorchStrategy()
