"""Training epochs of several contenders by turns in one process, raw: what the GPU benchmark is made of.

Beside ours: a plain loop that a person would write instead, accelerate's, and Lightning's Trainer. Lightning and
accelerate are no dependencies of this project. Where one is absent, its row is left out by name.
"""

import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms

from pipeline.data.batches import TrainingBatches
from pipeline.data.image_batches import CHANNEL_MEANS, CHANNEL_STDS
from pipeline.data.images import Images, load_images
from pipeline.plan.axes import CAPTURED_EXECUTIONS
from pipeline.plan.spec import Spec
from pipeline.training import loop, process_group
from pipeline.training.execution import choose_execution, prepare_step
from pipeline.training.loop import build_batches, run_epoch, set_precision
from pipeline.training.torch_strategies import TORCH_STRATEGIES
from pipeline.workloads.find import Sources, build_workload
from pipeline.workloads.image_classifiers import build_model

NUM_WINDOWS = 6


class Window(NamedTuple):
    """One epoch: the slowest rank's wall time, and the mean loss over the steps of rank 0."""

    time_s: float
    loss: float


class Contender(NamedTuple):
    """A way to train for an epoch; `run` counts epochs from 1 and `spec` is what a point of ours would say."""

    name: str
    spec: Spec
    run: Callable[[int], Window]
    compile_time_s: float | None = None


class Row(msgspec.Struct):
    """The times of a contender: the windows after the first epoch, which warmed up."""

    section: str
    name: str
    spec: Spec
    windows_s: list[float]
    losses: list[float]
    compile_time_s: float | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.windows_s)


def ours(name: str, spec: Spec, rank: process_group.Rank, data: Path | None) -> Contender:
    """The tool's own training loop, as a point of that spec runs it, on a stream of its own where that is captured."""
    set_precision(spec)
    execution = choose_execution(spec, rank)
    workload, model = loop.build_model(spec, rank, Sources(data), execution)
    batches = build_batches(workload, spec, rank)
    stream = torch.cuda.Stream(rank.device) if execution in CAPTURED_EXECUTIONS else None  # entered in every epoch
    process_group.synchronize(rank)
    with torch.cuda.stream(stream):
        ready = prepare_step(execution, model, workload, spec, rank)
    is_tuned = torch.backends.cudnn.benchmark

    def run(number: int) -> Window:
        set_precision(spec)
        torch.backends.cudnn.benchmark = is_tuned
        with torch.cuda.stream(stream):
            series = run_epoch(number, spec, rank, workload, batches, ready.step)
        times_ns = process_group.all_gather(series.times.epoch_time_ns or 0, int)
        return Window(max(times_ns) / 1e9, statistics.fmean(series.losses))

    return Contender(name, spec, run, ready.compile_time_s)


def by_turns(section: str, contenders: Sequence[Contender], num_windows: int = NUM_WINDOWS) -> list[Row]:
    """An epoch of each to warm up, then one of each in turn, their order shuffled anew each round."""
    rows = {
        contender.name: Row(section, contender.name, contender.spec, [], [], contender.compile_time_s)
        for contender in contenders
    }
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for number in range(1, num_windows + 2):
        shuffle(order)
        for contender in order:
            window = contender.run(number)
            rows[contender.name].losses.append(window.loss)
            if number > 1:
                rows[contender.name].windows_s.append(window.time_s)
    return list(rows.values())


def by_hand(spec: Spec, rank: process_group.Rank, data: Path) -> Contender:
    """Return the usual loop over a DataLoader with the usual transforms. Only the model and decoded images are ours."""
    set_precision(spec)
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(CHANNEL_MEANS, CHANNEL_STDS),
        ]
    )
    images = InMemory(load_images(spec, "train", data), transform)
    loader = DataLoader(
        images, spec.batch_size_per_gpu, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True
    )
    model = build_model("resnet18", 10).to(rank.device)
    optimizer = build_sgd(model, spec)
    criterion = nn.CrossEntropyLoss()

    def run(number: int) -> Window:
        set_precision(spec)
        losses = []
        model.train()
        started_s = start(rank)
        for images, labels in loader:
            images, labels = images.to(rank.device, non_blocking=True), labels.to(rank.device, non_blocking=True)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return end(started_s, losses, rank)

    return Contender("by hand: DataLoader, 2 workers, eager, TF32", spec, run)


class InMemory(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images in memory that are transformed one at a time, as in torchvision's CIFAR-10."""

    def __init__(self, images: Images, transform: Callable[[Any], Tensor]) -> None:
        self._images = images
        self._transform = transform

    def __len__(self) -> int:
        return len(self._images.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._images.pixels[index])), int(self._images.labels[index])


class Batches:
    """The batches of one epoch of this project, as an iterable that trainers take."""

    def __init__(self, spec: Spec, rank: process_group.Rank, data: Path) -> None:
        self._batches: TrainingBatches = build_batches(build_workload(spec, Sources(data)), spec, rank)
        self._num_steps = spec.steps_per_epoch
        self.epoch = 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches.epoch(self.epoch)

    def __len__(self) -> int:
        return self._num_steps


def accelerated(spec: Spec, rank: process_group.Rank, data: Path) -> Contender:
    """Return the loop of accelerate's documentation over batches of this project. Raises ImportError."""
    from accelerate import Accelerator

    set_precision(spec)
    accelerator = Accelerator(mixed_precision="bf16" if spec.precision == "bf16" else "no")
    batches = Batches(spec, rank, data)
    torch.manual_seed(spec.seed)
    bare = TORCH_STRATEGIES[spec.strategy].place(build_model("resnet18", 10), build_workload(spec), spec, rank)
    model, optimizer = accelerator.prepare(bare, build_sgd(bare, spec))

    def run(number: int) -> Window:
        set_precision(spec)
        losses = []
        model.train()
        batches.epoch = number
        iterator = iter(batches)
        started_s = start(rank)
        for images, labels in iterator:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        return end(started_s, losses, rank)

    return Contender("accelerate", spec, run)


def lightning(spec: Spec, rank: process_group.Rank, data: Path) -> Contender:
    """Return Lightning's Trainer without extras (barebones) over batches of this project. Raises ImportError."""
    import lightning

    set_precision(spec)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    batches = Batches(spec, rank, data)
    torch.manual_seed(spec.seed)
    bare = TORCH_STRATEGIES[spec.strategy].place(build_model("resnet18", 10), build_workload(spec), spec, rank)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        """The model with the clock of an epoch."""

        def __init__(self) -> None:
            super().__init__()
            self.model = bare
            self.losses: list[Tensor] = []
            self.window: Window | None = None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_sgd(self.model, spec)

        def on_train_epoch_start(self) -> None:
            self.losses = []
            self.started_s = start(rank)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            images, labels = batch
            loss = nn.functional.cross_entropy(self.model(images), labels)
            self.losses.append(loss.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            self.window = end(self.started_s, self.losses, rank)

    module = Module()

    def run(number: int) -> Window:
        set_precision(spec)
        batches.epoch = number
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                accelerator="gpu" if rank.device.type == "cuda" else "cpu",
                devices=1,
                max_epochs=1,
                precision="bf16-mixed" if spec.precision == "bf16" else "32-true",
                barebones=True,
            )
            trainer.fit(module, batches)
        assert module.window is not None, "an epoch ends with a window"
        return module.window

    return Contender("Lightning's Trainer", spec, run)


def build_sgd(model: nn.Module, spec: Spec) -> torch.optim.SGD:
    """Return the optimizer of the training step, fused where the spec says so."""
    return torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, fused=True if spec.fused_optimizer else None
    )


def start(rank: process_group.Rank) -> float:
    """Wait for the device. Return the time in seconds."""
    process_group.synchronize(rank)
    return time.perf_counter()


def end(started_s: float, losses: list[Tensor], rank: process_group.Rank) -> Window:
    """Wait for the device. Return the window that ends now."""
    process_group.synchronize(rank)
    return Window(time.perf_counter() - started_s, statistics.fmean(torch.stack(losses).float().tolist()))
