"""Steps and batches of image points on the CPU, for tests that look at one of them alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.data.batches import TrainingBatches
from pipeline.plan.spec import Spec
from pipeline.records.record import Measurement
from pipeline.training.loop import build_batches
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep
from pipeline.workloads.find import Sources, build_workload
from pipeline.workloads.image_classifiers import build_model

ALONE = Rank(0, 1, torch.device("cpu"))


def step_of(
    spec: Spec, model: nn.Module | None = None, kind: type[EagerStep] = EagerStep, rank: Rank = ALONE, **options: Any
) -> EagerStep:
    """Return the eager step of a point, of LeNet unless a model is given."""
    return kind(build_model("lenet", 10) if model is None else model, build_workload(spec), spec, rank, **options)


def batches_of(spec: Spec, rank: Rank = ALONE, data: Path | None = None) -> TrainingBatches:
    """Return the training batches of a point."""
    return build_batches(build_workload(spec, Sources(data)), spec, rank)


def losses_of(measurement: Measurement) -> list[float | None]:
    """Return the loss of every epoch."""
    return [epoch.loss for epoch in measurement.epochs]


class FakeDevice:
    """A GPU that takes the time that a test gives it: events read `now_ms`, and the host waits for nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.log: list[str] = []  # of events and waits
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.log.append("wait"))


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self, stream: str = "the current stream") -> None:
        assert stream == "the current stream"
        self.device.log.append("event")
        self.time_ms = self.device.now_ms

    def synchronize(self) -> None:
        self.device.log.append("wait")

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.time_ms - self.time_ms
