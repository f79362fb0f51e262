"""A training script that knows nothing of this project: a GPT under DDP that times its own updates.

    torchrun --nproc-per-node 2 benchmarks/gpt_script.py --batch-size 24

Prints one JSON object after its last update: the median time of an update, in ms, and the peak memory, in GiB. The time
is that between CUDA events (on a CPU, between readings of the clock), and nothing waits within the loop.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP_UPDATES = 20
GPT2 = {"layers": 12, "width": 768, "heads": 12, "length": 1024, "vocabulary": 50304}
SMALL = {"layers": 2, "width": 128, "heads": 4, "length": 64, "vocabulary": 512}  # on a CPU


class Gpt(nn.Module):
    """Blocks of attention over what came before, between an embedding and a linear layer."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions
        logits: Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return logits


def main() -> None:
    """Train, then print the time of an update."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24, help="sequences of each process")
    parser.add_argument("--updates", type=int, default=100)
    arguments = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    torch.manual_seed(0)
    sizes = GPT2 if on_gpus else SMALL
    model = DistributedDataParallel(Gpt(**sizes).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(sizes["vocabulary"], (arguments.batch_size, sizes["length"] + 1), device=device)
    marks = []
    for _ in range(WARM_UP_UPDATES + arguments.updates + 1):
        marks.append(mark(on_gpus))
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpus):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if on_gpus:
        torch.cuda.synchronize()
    marks = marks[WARM_UP_UPDATES:]
    times_ms = [between_ms(start, end) for start, end in itertools.pairwise(marks)]
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpus else None
    if dist.get_rank() == 0:
        print(json.dumps({"update_ms": statistics.median(times_ms), "peak_gib": peak_gib}), flush=True)
    dist.destroy_process_group()


def mark(on_gpus: bool) -> Any:
    """Return the moment at which the device comes to here: an event, on a CPU a reading of the clock."""
    if not on_gpus:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(start: Any, end: Any) -> float:
    """Return the time from one moment to another."""
    return 1e3 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


if __name__ == "__main__":
    main()
