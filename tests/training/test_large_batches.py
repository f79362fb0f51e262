"""Known answers of training with large batches: equal global batches, and labels that cannot be learnt."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from factories import LENET, make_spec, measurement_of
from image_steps import ALONE
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from pipeline.data.images import Images, load_images
from pipeline.experiment.learning_rate import learning_rate_at, peak_learning_rate
from pipeline.experiment.measurement import Epoch
from pipeline.experiment.record_store import load_folder
from pipeline.experiment.spec import Spec
from pipeline.plan.axes import Remedy
from pipeline.training import loop
from pipeline.training.process_group import Rank
from pipeline.training.step import EagerStep, ignore_mark
from pipeline.training.strategies import torch_strategy
from pipeline.workloads import cifar_classifier
from pipeline.workloads.cifar_classifier import build_model
from pipeline.workloads.find import build_workload

GLOBAL_BATCH_SIZE = 32
ALL: tuple[Remedy, ...] = ("linear_scaling", "warmup", "zero_gamma", "no_bias_decay")


def gradients_of_share(rank: int, world_size: int, folder: str) -> None:
    """Train one step on this rank's share of a fixed global batch, and save the gradients of rank 0."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{world_size}", rank=rank, world_size=world_size
    )
    share = GLOBAL_BATCH_SIZE // world_size
    spec = make_spec(**{**LENET, "strategy": "ddp", "num_gpus": world_size, "batch_size_per_gpu": share})
    torch.manual_seed(0)
    place = Rank(rank, world_size, torch.device("cpu"))
    workload = build_workload(spec)
    model = torch_strategy(spec.strategy).wrap(build_model("lenet", 10), workload, spec, place)
    images = torch.randn(GLOBAL_BATCH_SIZE, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(GLOBAL_BATCH_SIZE) % 10
    mine = slice(rank * share, (rank + 1) * share)
    EagerStep(model, workload, spec, place)((images[mine], labels[mine]), ignore_mark)
    if rank == 0:
        torch.save([parameter.grad for parameter in model.parameters()], f"{folder}/gradients-{world_size}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.training
def test_equal_global_batches_give_equal_gradients_on_one_and_two_processes(tmp_path: Path) -> None:
    """LeNet has no BatchNorm, so the mean over two halves is the mean over the batch, to rounding."""
    found: list[list[Tensor]] = []
    for world_size in (1, 2):
        spawn(gradients_of_share, (world_size, str(tmp_path)), world_size)
        found.append(torch.load(tmp_path / f"gradients-{world_size}.pt"))
    assert len(found[0]) == len(found[1]) == 10
    for one, two in zip(*found, strict=True):
        assert float(one.abs().max()) > 1e-4
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-7)


def train(spec: Spec) -> Epoch:
    """Return the last epoch."""
    return loop.train_point(spec, ALONE).measurement.epochs[-1]


@pytest.mark.training
@pytest.mark.parametrize("remedies", [(), ("linear_scaling", "warmup"), ALL], ids=len)
def test_shuffled_labels_are_not_learnt_with_any_remedy(
    remedies: tuple[Remedy, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess has the loss ln 10. Images of a class look alike, so chance may put a whole class right: 10 points."""
    fields: dict[str, Any] = {**LENET, "input": "gpu", "num_samples": 2500, "batch_size_per_gpu": 50, "epochs": 4}
    fields |= {"evaluate": True, "schedule": "cosine", "nesterov": True, "learning_rate": 0.01, "warmup_epochs": 1}
    spec = make_spec(**fields, remedies=remedies, reference_batch_size=25)
    assert (train(spec).test_accuracy or 0) > 0.9

    def shuffled(spec: Spec, split: str, root: Path | None) -> Images:
        images = load_images(spec, split, root)
        if split == "test":
            return images
        return Images(images.pixels, np.random.default_rng(0).permutation(images.labels), images.num_classes)

    monkeypatch.setattr(cifar_classifier, "load_images", shuffled)
    last = train(spec)
    assert (last.test_loss or 0) > math.log(10) - 0.02
    assert (last.test_accuracy or 1) < 0.35
    assert (last.accuracy or 1) < 0.2


TINY = ["device=cpu", "strategy=single", "num_gpus=1", "model=lenet", "dataset=synthetic", "num_samples=640"]
TINY += ["precision=fp32", "layout=contiguous", "execution=eager", "epochs=2", "warmup_epochs=1", "seed=0"]
TINY += ["batch_size_per_gpu=16,64", "reference_batch_size=16", "learning_rate=0.02"]


@pytest.mark.training
def test_the_study_runs_in_small_on_a_cpu(pipeline: Command, tmp_path: Path) -> None:
    where = ("--cluster", "local", "--outputs", str(tmp_path), "--points-per-element", "6")
    assert pipeline("submit", "--grid", "q4-study", *where, "--set", *TINY).returncode == 0
    collected = pipeline("collect", tmp_path, "--format", "json", "--target-accuracy", "0.05")
    tables = json.loads(collected.stdout)["experiments"]["q4-study"]
    rows = tables["time_to_target"]
    assert [(row["global_batch_size"], len(row["remedies"])) for row in rows] == [
        (size, num_remedies) for size in (16, 64) for num_remedies in (0, 2, 4)
    ]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.02, 0.02, 0.02, 0.02, 0.08, 0.08])
    assert all(row["reached"] == "1 of 1" and row["target_efficiency"] > 0 for row in rows)
    assert sum(row["soonest"] is not None for row in rows) == 1
    assert [row["epoch"] for row in tables["Q4"]] == [1, 2] * 6
    (found, _) = load_folder(tmp_path / "q4-study" / "records")
    for record in found:
        first, second = measurement_of(record).epochs
        assert max(first.peak_learning_rate or 0, second.peak_learning_rate or 0) == peak_learning_rate(record.spec)
        assert second.first_learning_rate == learning_rate_at(record.spec, record.spec.steps_per_epoch)
