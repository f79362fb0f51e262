"""HSDP: fully_shard over a mesh of two dimensions. Copies of the model lie along one, their shards along the other."""

from pipeline.training.torch_strategies.fsdp import STRATEGY as STRATEGY
