"""Steps and batches of image points on the CPU, for tests that look at one of them alone."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.data.batches import TrainingBatches
from pipeline.experiment.spec import Spec
from pipeline.training.loop import build_batches
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep
from pipeline.workloads.cifar_classifier import build_model
from pipeline.workloads.find import Sources, build_workload

ALONE = Rank(0, 1, torch.device("cpu"))


def step_of(
    spec: Spec, model: nn.Module | None = None, kind: type[EagerStep] = EagerStep, rank: Rank = ALONE, **options: Any
) -> EagerStep:
    """Return the eager step of a point, of LeNet unless a model is given."""
    return kind(build_model("lenet", 10) if model is None else model, build_workload(spec), spec, rank, **options)


def batches_of(spec: Spec, rank: Rank = ALONE, data: Path | None = None) -> TrainingBatches:
    """Return the training batches of a point."""
    return build_batches(build_workload(spec, Sources(data)), spec, rank)
