"""The training of this repository as ddpscale measures it."""

import torch
from arithmetic.data import CHARACTERS, LENGTH, Sums
from arithmetic.model import Decoder
from torch import nn

from pipeline.workloads import Workload


class Arithmetic(Workload):
    unit = "tokens"
    merit = "test accuracy"

    def __init__(self, layers: int = 2, width: int = 64, rate: float = 3e-3):
        self.layers, self.width, self.rate = layers, width, rate
        self.items_per_sample = LENGTH - 1

    def build_model(self):
        return Decoder(self.layers, self.width, len(CHARACTERS), LENGTH)

    def synthetic_batch(self, size, device):
        tokens = torch.randint(len(CHARACTERS), (size, LENGTH), device=device)
        return {"tokens": tokens[:, :-1], "next": tokens[:, 1:]}

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["next"].flatten())

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.01)

    def before_update(self, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def dataset(self):
        return Sums()

    def evaluate(self, model, device):
        """Share of the characters after the equals sign that are right."""
        test = Sums(is_test=True)
        batch = self.collate([test[index] for index in range(len(test))])
        expected = batch["next"]
        is_answer = (batch["tokens"] == CHARACTERS.index("=")).cumsum(1) > 0
        found = model(batch["tokens"].to(device)).argmax(-1).cpu()
        return float((found == expected)[is_answer].float().mean())
