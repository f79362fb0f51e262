"""One turn of a training loop in a process of its own: as a person writes it, or as a workload of this project.

    python benchmarks/plain_loop.py resnet50 plain compile

Prints one JSON object: the seconds of each timed window, the peak memory, and the loss. Both sides train on one
synthetic batch that lies on the device, in bf16 (on a CPU in fp32 and small).
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.plan.spec import Spec
from pipeline.training.loop import train_point
from pipeline.training.process_group import Rank
from pipeline.workloads import Workload

HERE = Path(__file__).resolve()
NUM_WINDOWS = 5
STEPS = {"cuda": 15, "cpu": 3}  # of a window; before the first one as many warm up, in which the model is compiled
RESNET50 = {"cuda": (256, 224), "cpu": (4, 64)}  # images a step, and their size
GPT2 = {"cuda": (16, 1024, {}), "cpu": (2, 64, {"layers": 2, "width": 128, "heads": 4})}  # sequences, tokens, sizes


class Resnet50(Workload):
    """ResNet-50 with the optimizer and loss of most scripts."""

    unit = "images"

    def __init__(self, image_size_px: int = 224) -> None:
        self.image_size_px = image_size_px

    def build_model(self) -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.resnet50()
        return model

    def synthetic_batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, 3, self.image_size_px, self.image_size_px, device=device)
        return images, torch.randint(1000, (size,), device=device)

    def loss(self, model: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)


class Gpt2(Workload):
    """GPT-2 of transformers, from its configuration alone: 124 million parameters."""

    unit = "tokens"

    def __init__(self, length: int = 1024, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        self.items_per_sample = length
        self.sizes = {"n_positions": length, "n_layer": layers, "n_embd": width, "n_head": heads}

    def build_model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        model: nn.Module = GPT2LMHeadModel(GPT2Config(**self.sizes))
        return model

    def synthetic_batch(self, size: int, device: torch.device) -> Tensor:
        return torch.randint(50257, (size, self.items_per_sample), device=device)

    def loss(self, model: Callable[..., Any], batch: Tensor) -> Tensor:
        found: Tensor = model(input_ids=batch, labels=batch).loss
        return found

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4)


WORKLOADS: dict[str, type[Resnet50] | type[Gpt2]] = {"resnet50": Resnet50, "gpt2": Gpt2}


def sizes_of(name: str, device: torch.device) -> tuple[int, dict[str, int]]:
    """Return the batch size, and what the workload is made with."""
    if name == "resnet50":
        size, image_size_px = RESNET50[device.type]
        return size, {"image_size_px": image_size_px}
    size, length, sizes = GPT2[device.type]
    return size, {"length": length, **sizes}


def run_plain(name: str, execution: str, device: torch.device) -> dict[str, Any]:
    """Time windows of the loop that a person writes, after one that warms up."""
    torch.manual_seed(0)
    size, sizes = sizes_of(name, device)
    workload = WORKLOADS[name](**sizes)
    model = workload.build_model().to(device)
    batch: Any = workload.synthetic_batch(size, device)
    if name == "resnet50":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = (batch[0].to(memory_format=torch.channels_last), batch[1])
    optimizer = workload.optimizer(model)
    forward = torch.compile(model) if execution == "compile" else model

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss: Tensor = workload.loss(forward, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    windows_s = []
    for window in range(NUM_WINDOWS + 1):
        synchronize(device)
        started_s = time.perf_counter()
        losses = [step() for _ in range(STEPS[device.type])]
        synchronize(device)
        if window:
            windows_s.append(time.perf_counter() - started_s)
        elif device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"windows_s": windows_s, "batch_size": size, "peak_bytes": memory, "loss": float(losses[-1])}


def run_workload(name: str, execution: str, device: torch.device) -> dict[str, Any]:
    """Train a point with the same step, and return the same figures from its measurement."""
    size, sizes = sizes_of(name, device)
    spec = Spec(
        strategy="single",
        num_gpus=1,
        batch_size_per_gpu=size,
        num_samples=size * STEPS[device.type],
        device=device.type,  # type: ignore[arg-type]
        model=f"{HERE}:{WORKLOADS[name].__name__}",
        options=tuple(f"{key}={value}" for key, value in sizes.items()),
        dataset=None,
        input="synthetic",
        precision="bf16" if device.type == "cuda" else "fp32",
        layout="channels_last" if name == "resnet50" else "contiguous",
        execution=execution,  # type: ignore[arg-type]
        epochs=NUM_WINDOWS + 1,
        windows=NUM_WINDOWS,
    )
    found = train_point(spec, Rank(0, 1, device)).measurement
    windows_s = [epoch.time_ns / 1e9 for epoch in found.epochs[1:]]
    memory = found.memory[0].peak_allocated_bytes if device.type == "cuda" else None
    return {"windows_s": windows_s, "batch_size": size, "peak_bytes": memory, "loss": found.epochs[-1].loss}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    name, side, execution = sys.argv[1:4]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    run = {"plain": run_plain, "workload": run_workload}[side]
    model = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    turn = {"name": name, "side": side, "execution": execution, "device": model}
    print(json.dumps(turn | run(name, execution, device)))
