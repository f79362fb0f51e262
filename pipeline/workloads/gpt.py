"""A small decoder in the manner of GPT-2 (Radford et al. 2019), with sizes by options and synthetic text."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline.workloads.workload import Workload

NUM_SEQUENCES = 100_000  # of the data set; a point takes its num_samples
NUM_TEST_SEQUENCES = 200
NOISE = 0.1  # share of tokens that do not follow the rule


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)  # [batch, heads, ...]
        hidden = hidden + self.merge(attended.transpose(1, 2).reshape(batch, length, width))
        merged: Tensor = hidden + self.feed_forward(self.norm2(hidden))
        return merged


class Decoder(nn.Module):
    """Tokens [batch, length] to scores [batch, length, vocabulary]. Embedding and output share their weights."""

    def __init__(self, layers: int, heads: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.linear(self.norm(hidden), self.tokens.weight)


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences in which most tokens follow from the one before by a rule that a model can learn."""

    def __init__(self, first: int, count: int, length: int, vocabulary: int) -> None:
        self.first, self.count, self.length, self.vocabulary = first, count, length, vocabulary

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        drawn = torch.randint(self.vocabulary, (self.length + 1,), generator=generator)
        is_free = torch.rand(self.length + 1, generator=generator) < NOISE
        is_free[0] = True
        places = torch.arange(self.length + 1)
        last_free = torch.where(is_free, places, 0).cummax(0).values
        tokens = (drawn[last_free] + 3 * (places - last_free)) % self.vocabulary  # the next token is this one plus 3
        return {"tokens": tokens[:-1], "next": tokens[1:]}


class Gpt(Workload):
    """The decoder as a language model; a sample is a sequence of `length` tokens."""

    unit = "tokens"
    merit = "test loss"
    better = "lower"

    def __init__(
        self,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        length: int = 128,
        vocabulary: int = 512,
        rate: float = 6e-4,
    ) -> None:
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.layers, self.heads, self.width, self.vocabulary, self.rate = layers, heads, width, vocabulary, rate
        self.items_per_sample = length

    def build_model(self) -> nn.Module:
        return Decoder(self.layers, self.heads, self.width, self.items_per_sample, self.vocabulary)

    def synthetic_batch(self, size: int, device: torch.device) -> dict[str, Tensor]:
        tokens = torch.randint(self.vocabulary, (size, self.items_per_sample + 1), device=device)
        return {"tokens": tokens[:, :-1].contiguous(), "next": tokens[:, 1:].contiguous()}

    def loss(self, model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["next"].flatten())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1)

    def dataset(self) -> Dataset[Any]:
        return Sequences(0, NUM_SEQUENCES, self.items_per_sample, self.vocabulary)

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        test = Sequences(NUM_SEQUENCES, NUM_TEST_SEQUENCES, self.items_per_sample, self.vocabulary)
        losses = []
        for first in range(0, NUM_TEST_SEQUENCES, 50):
            batch = self.collate([test[index] for index in range(first, first + 50)])
            losses.append(float(self.loss(model, {name: tensor.to(device) for name, tensor in batch.items()})))
        return sum(losses) / len(losses)

    def shard_units(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Decoder)
        return list(model.blocks)
