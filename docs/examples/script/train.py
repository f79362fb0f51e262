"""A training script that knows nothing of this project: a small network on random data, with DDP under torchrun.

python train.py --batch-size 64
torchrun --nproc-per-node 2 train.py --batch-size 64
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    is_distributed = "RANK" in os.environ
    device = torch.device("cpu")
    if is_distributed:
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    elif torch.cuda.is_available():
        device = torch.device("cuda")

    torch.manual_seed(0)
    width = arguments.width
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model: nn.Module = nn.Sequential(*layers).to(device)
    if is_distributed:
        model = DistributedDataParallel(model)
    data = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] | None = DistributedSampler(data) if is_distributed else None
    loader = DataLoader(data, arguments.batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(arguments.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
