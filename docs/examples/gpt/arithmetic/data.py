"""Sums of two numbers as lines of text, such as `47+85=132`, character by character."""

import torch
from torch.utils.data import Dataset

CHARACTERS = "\n0123456789+="
LENGTH = len("99+99=198\n")


def encode(text: str) -> torch.Tensor:
    return torch.tensor([CHARACTERS.index(character) for character in text.ljust(LENGTH, "\n")])


class Sums(Dataset):
    """All sums of two numbers below 100, in a fixed random order; one in ten is kept for the test."""

    def __init__(self, is_test: bool = False) -> None:
        order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0)).tolist()
        self.pairs = [divmod(number, 100) for number in (order[9_000:] if is_test else order[:9_000])]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first, second = self.pairs[index]
        line = encode(f"{first}+{second}={first + second}")
        return {"tokens": line[:-1], "next": line[1:]}
