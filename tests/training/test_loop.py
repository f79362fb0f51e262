"""Training: what an epoch does, counts and times, and known answers with large batches."""

import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from conftest import Command
from factories import LENET, make_measurement, make_record, make_spec, measurement_of
from image_steps import ALONE, batches_of, losses_of, step_of
from torch import nn

from pipeline.data import image_batches
from pipeline.data.images import Images, load_images
from pipeline.figures.formulas import GIB
from pipeline.figures.pooling import timed_epochs
from pipeline.plan.axes import Remedy
from pipeline.plan.spec import Spec, learning_rate_at, peak_learning_rate
from pipeline.records.record import MAX_STEP_TIMES, Epoch, Measurement, RankEpoch
from pipeline.records.store import encode_record, load_folder
from pipeline.training import devices, loop, process_group, torch_strategies
from pipeline.training.loop import (
    Evaluation,
    RankEpochSeries,
    drop_long_step_times,
    evaluate,
    global_flags,
    may_stop_now,
    refuse_changed_flags,
    run_epoch,
    set_precision,
    summarize_epoch,
    train_point,
)
from pipeline.training.step import STEP_PARTS, EagerStep, PartTimesNs, StepTimer, ignore_mark
from pipeline.training.torch_strategies import TORCH_STRATEGIES
from pipeline.workloads import image_classifiers
from pipeline.workloads.find import build_workload
from pipeline.workloads.image_classifiers import CifarClassifier, build_model
from pipeline.workloads.workload import WorkloadError

SMALL: dict[str, Any] = {
    **LENET,
    "num_samples": 320,
    "learning_rate": 0.01,
}


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """Restore torch's process-wide settings."""
    backends = torch.backends
    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark
    yield
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark = before


def train(**fields: Any) -> tuple[Measurement, list[PartTimesNs]]:
    return train_point(make_spec(**{**SMALL, **fields}), ALONE)[:2]


@pytest.fixture(scope="module")
def usual() -> tuple[Measurement, list[PartTimesNs]]:
    """Three epochs of the usual step, each with an evaluation."""
    return train(epochs=3, evaluate=True)


def test_axes_of_the_step_train_as_the_usual_one_does(usual: tuple[Measurement, object]) -> None:
    """Losses agree approximately: sums have another order, and `input: gpu` draws other crops."""
    changes: tuple[dict[str, Any], ...] = ({"layout": "channels_last"}, {"fused_optimizer": True}, {"input": "gpu"})
    for fields, accuracy in zip(changes, (1e-4, 1e-4, 0.05), strict=True):
        losses = losses_of(train(epochs=2, **fields)[0])
        assert losses == pytest.approx(losses_of(usual[0])[:2], rel=accuracy)


def test_channels_last_lays_out_images_and_weights_alike() -> None:
    """Every convolution of ResNet-18 sees inputs and weights with channels last."""
    spec = make_spec(**{**SMALL, "model": "resnet18", "layout": "channels_last"})
    seen: list[bool] = []
    model = TORCH_STRATEGIES[spec.strategy].place(build_model("resnet18", 10), build_workload(spec), spec, ALONE)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, inputs, output: seen.append(is_channels_last(inputs[0])))
    images, labels = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)
    step_of(spec, model)((images, labels), ignore_mark)
    assert seen == [True] * 20
    assert all(is_channels_last(weight) for weight in model.parameters() if weight.dim() == 4)


def is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def test_the_augmentation_on_the_device_lies_inside_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of one batch: 50 ms of augmentation appear in the data part of every step, and in the epoch's time."""
    crop_and_flip = image_batches.crop_and_flip

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(0.05)
        return crop_and_flip(*arguments)

    monkeypatch.setattr(image_batches, "crop_and_flip", slow)
    monkeypatch.setattr("pipeline.data.image_batches.AUGMENTATION_CHUNK_BYTES", 1)
    measurement, series = train(epochs=1, input="gpu")
    assert (series[0][0][:, STEP_PARTS.index("data")] >= 50_000_000).all()
    assert (measurement.epochs[0].ranks[0].epoch_time_ns or 0) >= 5 * 50_000_000


def test_every_epoch_says_what_it_did_and_what_was_learnt(usual: tuple[Measurement, list[PartTimesNs]]) -> None:
    measurement, series = usual
    assert [(epoch.epoch, epoch.num_updates, epoch.num_samples) for epoch in measurement.epochs] == [
        (number, 5 * number, 320)  # 320 / 64 = 5 updates an epoch
        for number in (1, 2, 3)
    ]
    for epoch in measurement.epochs:
        assert None not in (epoch.loss, epoch.test_loss)
        assert epoch.accuracy in {count / 320 for count in range(321)}
        assert epoch.test_accuracy in {count / 64 for count in range(65)}  # one test image for five of training
    assert [[part.shape for part in parts] for parts in series] == [[(5, len(STEP_PARTS))]] * 3
    assert encode_record(make_record(make_spec(**SMALL, epochs=3, evaluate=True), measurement=measurement))


def test_the_parts_of_an_epoch_agree_with_its_wall_time_within_one_per_cent(
    usual: tuple[Measurement, list[PartTimesNs]],
) -> None:
    measurement, series = usual
    for epoch, parts in zip(measurement.epochs, series, strict=True):
        (rank,) = epoch.ranks
        total_ns, data_ns = parts[0].sum(), parts[0][:, STEP_PARTS.index("data")].sum()
        assert (rank.compute_time_ns, rank.data_time_ns) == (total_ns - data_ns, data_ns)
        assert sum(epoch.step_times_ns or ()) == total_ns == pytest.approx(rank.epoch_time_ns, rel=0.01)


def test_the_same_point_twice_learns_the_same(usual: tuple[Measurement, object]) -> None:
    again, other = (losses_of(train(epochs=1, seed=seed)[0]) for seed in (0, 1))
    assert again == losses_of(usual[0])[:1] != other


def test_a_loss_that_is_not_finite_is_a_result_with_the_update_where_it_happened() -> None:
    measurement, _ = train(learning_rate=1e9, epochs=2, evaluate=True)
    first, second = measurement.epochs
    assert (first.loss, second.loss, second.test_loss, second.diverged_at_update) == (None, None, None, 5)
    assert first.diverged_at_update in range(1, 5)  # the first loss is that of fresh weights
    assert encode_record(make_record(make_spec(**SMALL), measurement=measurement))


@pytest.mark.parametrize(
    ("fields", "num_updates", "num_samples"),
    [
        ({"max_steps": 2}, 2, 128),  # cut: 2 x 64
        ({"input": "synthetic"}, 5, 320),
        ({"input": "synthetic", "max_steps": 3, "num_samples": 10}, 3, 192),  # a probe: 3 x 64
    ],
)
def test_an_epoch_counts_the_samples_that_it_saw(fields: dict[str, Any], num_updates: int, num_samples: int) -> None:
    (epoch,) = train(epochs=1, **fields)[0].epochs
    assert (epoch.num_updates, epoch.num_samples, epoch.ranks[0].num_samples) == (num_updates, num_samples, num_samples)


def test_what_was_computed_in_is_recorded_and_not_what_was_asked_for() -> None:
    assert train(epochs=1, precision="tf32")[0].precision_used == "fp32"  # no CPU has TF32
    assert train(epochs=1, precision="bf16")[0].precision_used == "bf16"


@pytest.mark.parametrize(
    ("strategy", "precision", "allows_tf32"),
    [("single", "tf32", True), ("single", "fp32", False), ("dp", "bf16", True)],
)
def test_tf32_is_allowed_unless_fp32_is_asked_for_and_cudnn_does_not_tune_yet(
    strategy: str, precision: str, allows_tf32: bool
) -> None:
    set_precision(make_spec(strategy=strategy, precision=precision))
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark) == (
        allows_tf32,
        allows_tf32,
        False,
    )


def epochs_of(*times_s: float, spec: Spec) -> list[Epoch]:
    return list(make_measurement(spec, times_s).epochs)


def test_windows_are_settled_by_the_slowest_rank_on_every_rank_alike() -> None:
    spec = make_spec(strategy="ddp", num_gpus=2, windows=20, epochs=21)
    steady = epochs_of(9.0, *[1.0] * 6, spec=spec)
    assert may_stop_now(spec, steady)
    assert not may_stop_now(spec, steady[:-1]), "the first epoch is no window, and five have no interval"
    for slow in (0, 1):  # whichever rank it is, and whichever rank asks
        ranks = list(steady[3].ranks)
        ranks[slow] = msgspec.structs.replace(ranks[slow], epoch_time_ns=1_100_000_000)
        longer = msgspec.structs.replace(steady[3], ranks=tuple(ranks))
        assert not may_stop_now(spec, [*steady[:3], longer, *steady[4:]])


@pytest.mark.parametrize(
    "fields",
    [
        {"windows": 20, "epochs": 22},  # the epoch after the windows was asked for, for what it learns
        {"windows": 1, "epochs": 21},
        {"windows": 20, "epochs": 21, "evaluate": True},
        {"windows": 20, "epochs": 21, "remedies": ("zero_gamma",)},
    ],
)
def test_a_point_that_asks_for_more_than_windows_runs_every_epoch(fields: dict[str, Any]) -> None:
    spec = make_spec(**fields)
    assert not may_stop_now(spec, epochs_of(*[1.0] * 12, spec=spec))


def test_a_settled_point_leaves_out_the_epochs_that_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.figures.stopping_rule.MAX_TIME_HALF_WIDTH", 100.0)  # a busy machine settles too
    fields = {"windows": 9, "epochs": 10, "num_samples": 64, "input": "synthetic"}
    measurement, series = train(**fields)
    # 1 + 6, never fewer
    assert ([epoch.epoch for epoch in measurement.epochs], len(series)) == ([1, 2, 3, 4, 5, 6, 7], 7)
    record = make_record(make_spec(**{**SMALL, **fields}), measurement=measurement)
    assert (record.status, [epoch.epoch for epoch in timed_epochs(record)]) == ("ok", [2, 3, 4, 5, 6, 7])
    assert encode_record(record)


def test_a_point_that_never_settles_runs_all_of_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.figures.stopping_rule.MAX_TIME_HALF_WIDTH", 0.0)
    measurement, _ = train(windows=8, epochs=9, num_samples=64, input="synthetic")
    assert len(measurement.epochs) == 9


def series_of(rank: int, losses: list[float], sizes: list[int], num_correct: int = 0) -> RankEpochSeries:
    parts_ns = [[rank + 1] * len(STEP_PARTS) for _ in losses]
    return RankEpochSeries(RankEpoch(rank=rank), parts_ns, losses, sizes, num_correct)


def test_the_loss_is_the_mean_over_samples_and_not_over_steps_or_ranks() -> None:
    spec = make_spec(strategy="ddp", num_gpus=2, num_samples=8, batch_size_per_gpu=3)
    ranks = [series_of(0, [1.0, 5.0], [3, 1], 1), series_of(1, [2.0, 6.0], [3, 1], 3)]
    epoch = summarize_epoch(2, spec, build_workload(spec), ranks, Evaluation())
    assert epoch.loss == (3 * 1 + 5 + 3 * 2 + 6) / 8 == 2.5
    assert (epoch.accuracy, epoch.num_updates, epoch.step_times_ns) == (0.5, 4, (5, 5))  # rank 0's steps


def test_samples_that_fill_the_shares_of_ddp_up_are_not_counted_twice() -> None:
    """10 samples over 4 ranks are 3 for each: the sampler repeats two."""
    spec = make_spec(strategy="ddp", num_gpus=4, num_samples=10, batch_size_per_gpu=3)
    ranks = [series_of(rank, [1.0], [3]) for rank in range(4)]
    assert summarize_epoch(1, spec, build_workload(spec), ranks, Evaluation()).num_samples == 10


@pytest.mark.parametrize(("num_correct", "accuracy"), [(32, 0.5), (4, None)])
def test_the_accuracy_of_several_items_a_sample_is_that_of_items_or_none(num_correct: int, accuracy: float) -> None:
    """4 correct of 4 samples with 16 tokens each may be one prediction a sample or one a token."""
    spec = make_spec(model="gpt", options=("length=16",), dataset=None, num_samples=4, batch_size_per_gpu=4)
    ranks = [series_of(0, [1.0], [4], num_correct)]
    assert summarize_epoch(1, spec, build_workload(spec), ranks, Evaluation()).accuracy == accuracy


def test_an_epoch_diverges_where_the_first_rank_does() -> None:
    spec = make_spec(strategy="ddp", num_gpus=2, num_samples=12, batch_size_per_gpu=2)
    ranks = [series_of(0, [1.0, 1.0, math.nan], [2] * 3), series_of(1, [1.0, math.inf, 1.0], [2] * 3)]
    epoch = summarize_epoch(3, spec, build_workload(spec), ranks, Evaluation())
    assert (epoch.loss, epoch.diverged_at_update) == (None, 7)  # two epochs of 3 updates, then the second


def test_step_times_leave_the_record_where_they_would_make_it_unreadable() -> None:
    (epoch,) = make_measurement(make_spec(), (1.0,), step_times_ns=(1,) * (MAX_STEP_TIMES // 2 + 1)).epochs
    long = [epoch, epoch]
    assert drop_long_step_times(long[:1])[0].step_times_ns is not None
    assert [epoch.step_times_ns for epoch in drop_long_step_times(long)] == [None, None]


def classifier_of(images: Images) -> CifarClassifier:
    """An image classifier that is tested on these images."""
    workload = CifarClassifier(make_spec(**{**SMALL, "batch_size_per_gpu": 1000, "num_samples": 1000}))
    workload.__dict__["_test_images"] = images  # the cached property
    return workload


class SaysClassZero(nn.Module):
    """A model that is certain of class 0, in evaluation mode only."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert not self.training
        return torch.tensor([[100.0, 0.0]]).expand(len(images), 2)


def test_evaluation_is_the_mean_over_the_whole_test_set_in_evaluation_mode() -> None:
    labels = np.array([0] * 900 + [1] * 300)  # more than one batch of evaluation; a loss of 0 and of 100
    images = Images(np.zeros((1200, 1, 1, 3), dtype=np.uint8), labels, 2)
    accuracy, loss = evaluate(classifier_of(images), SaysClassZero(), ALONE)
    assert (loss, accuracy) == (25.0, 0.75)


class SeesColours(nn.Module):
    """A model that notes the colour of the first pixel."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.colour = images[0, :, 0, 0].tolist()
        return torch.zeros(len(images), 2)


def test_evaluation_shows_the_model_images_that_are_normalised_as_in_training() -> None:
    """Red is 1, 0, 0. The means are 0.4914, 0.4822 and 0.4465, the standard deviations 0.2023, 0.1994 and 0.2010."""
    red = np.array([255, 0, 0], dtype=np.uint8).reshape(1, 1, 1, 3)
    model = SeesColours()
    evaluate(classifier_of(Images(red, np.array([0]), 2)), model, ALONE)
    assert model.colour == pytest.approx([0.5086 / 0.2023, -0.4822 / 0.1994, -0.4465 / 0.2010])


def test_a_measurement_says_the_size_of_its_model(usual: tuple[Measurement, object]) -> None:
    """LeNet: 6x75+6, 16x150+16, 400x120+120, 120x84+84, 84x10+10 parameters of 4 bytes."""
    measurement, _ = usual
    num_parameters = 456 + 2416 + 48_120 + 10_164 + 850
    assert (measurement.num_parameters, measurement.gradient_bytes) == (num_parameters, 4 * num_parameters)
    (memory,) = measurement.memory
    assert (memory.device, memory.peak_allocated_bytes > 2**20) == ("cpu", True)


def test_the_memory_limit_of_a_cpu_counts_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts on top of what the process has before: a batch of 24 MiB does not raise it."""
    limits: list[int] = []
    monkeypatch.setattr("resource.setrlimit", lambda _, both: limits.append(both[0]))
    before_bytes = devices.process_memory_bytes("VmData")
    train(batch_size_per_gpu=2048, input="synthetic", max_steps=1, epochs=1, memory_limit_gib=4.0)
    (limit_bytes,) = limits
    assert limit_bytes - before_bytes == pytest.approx(4 * GIB, abs=10 * 2**20)


def test_training_goes_on_in_training_mode_after_an_evaluation() -> None:
    spec = make_spec(**SMALL)
    norm = nn.BatchNorm1d(3 * 32 * 32)
    model = nn.Sequential(nn.Flatten(), norm, nn.Linear(3 * 32 * 32, 10))
    workload = build_workload(spec)
    evaluate(workload, model, ALONE)
    run_epoch(1, spec, ALONE, workload, batches_of(spec), step_of(spec, model))
    assert norm.num_batches_tracked == spec.steps_per_epoch


@pytest.mark.usefixtures("alone_in_a_group")
def test_ddp_is_wrapped_as_the_spec_says() -> None:
    fields = {"broadcast_buffers": False, "bucket_cap_mb": 100.0, "gradient_as_bucket_view": True}
    spec = make_spec(**{**SMALL, "strategy": "ddp", **fields})
    model = TORCH_STRATEGIES[spec.strategy].wrap(build_model("lenet", 10), build_workload(spec), spec, ALONE)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert (model.broadcast_buffers, model.bucket_bytes_cap, model.gradient_as_bucket_view) == (
        False,
        100 * 2**20,
        True,
    )
    model(torch.zeros(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad._base is not None for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.fault("F63")
@pytest.mark.usefixtures("alone_in_a_group")
def test_a_measurement_names_the_collectives_of_the_loss_and_not_those_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rank = make_spec(**{**SMALL, "strategy": "ddp", "num_gpus": 2, "epochs": 1}), ALONE._replace(world_size=2)
    assert train_point(spec, rank).measurement.own_collectives == ()
    plain = CifarClassifier.loss

    def loss(self: CifarClassifier, model: Any, batch: Any) -> Any:
        torch.distributed.all_reduce(torch.ones(1))
        return plain(self, model, batch)

    monkeypatch.setattr(CifarClassifier, "loss", loss)
    assert train_point(spec, rank).measurement.own_collectives == ("all_reduce",)


def test_the_threads_of_data_parallel_compute_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel starts a thread for each replica, in which autocast has its default type: fp16 on GPUs."""

    class AutocastType(nn.Module):
        def forward(self) -> torch.dtype:
            return torch.get_autocast_dtype("cuda")

    monkeypatch.setattr(torch_strategies, "DataParallel", lambda module, device_ids: module)
    spec = make_spec(strategy="dp", num_gpus=2, precision="bf16")
    replica = (
        TORCH_STRATEGIES["dp"].wrap(AutocastType(), build_workload(spec), spec, ALONE)._replicate_for_data_parallel()
    )
    with ThreadPoolExecutor() as threads:
        assert (threads.submit(torch.get_autocast_dtype, "cuda").result(), threads.submit(replica).result()) == (
            torch.float16,
            torch.bfloat16,
        )


def test_the_clock_of_an_epoch_starts_once_every_rank_is_ready_and_stops_after_the_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def note(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def noted(*arguments: Any) -> Any:
            done.append(name)
            return call(*arguments)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in ((process_group, "barrier"), (StepTimer, "start"), (EagerStep, "__call__"), (StepTimer, "stop")):
        note(owner, name)
    train(epochs=1)
    assert done == ["barrier", "start", *["__call__"] * 5, "stop"]


@pytest.mark.fault("F60")
def test_flags_that_user_code_set_are_undone_and_those_set_in_a_step_are_refused() -> None:
    spec = make_spec(precision="fp32")
    set_precision(spec)
    usual = global_flags()

    def change() -> None:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.autograd.set_detect_anomaly(True)
        torch.set_default_dtype(torch.float64)
        torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True

    said = r"the model's code sets torch\.backends\.cuda\.matmul\.allow_tf32 to True"
    try:
        with pytest.raises(WorkloadError, match=said), refuse_changed_flags():
            change()
    finally:
        set_precision(spec)
    with refuse_changed_flags():
        assert global_flags() == usual


@pytest.mark.fault("F60")
@pytest.mark.parametrize("num_calls", [1, 6], ids=["in the check pass", "in an epoch"])
def test_a_loss_that_sets_a_flag_is_refused(num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count(1)
    plain = CifarClassifier.loss

    def loss(*arguments: Any) -> Any:
        torch.autograd.set_detect_anomaly(next(calls) >= num_calls)
        return plain(*arguments)

    monkeypatch.setattr(CifarClassifier, "loss", loss)
    try:
        with pytest.raises(WorkloadError, match=r"the model's code sets torch\.autograd\.set_detect_anomaly"):
            train(epochs=1)
    finally:
        torch.autograd.set_detect_anomaly(False)


def test_tf32_that_was_allowed_the_new_way_is_undone_too() -> None:
    try:
        setattr(torch.backends, "fp32_precision", "tf32")  # noqa: B010
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    finally:
        set_precision(make_spec(precision="fp32"))
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, False)


ALL: tuple[Remedy, ...] = ("linear_scaling", "warmup", "zero_gamma", "no_bias_decay")


def last_epoch(spec: Spec) -> Epoch:
    """Return the last epoch."""
    return loop.train_point(spec, ALONE).measurement.epochs[-1]


@pytest.mark.training
@pytest.mark.parametrize("remedies", [(), ALL], ids=len)
def test_shuffled_labels_are_not_learnt_with_any_remedy(
    remedies: tuple[Remedy, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess has the loss ln 10. Images of a class look alike, so chance may put a whole class right: 10 points."""
    fields: dict[str, Any] = {**LENET, "input": "gpu", "num_samples": 2500, "batch_size_per_gpu": 50, "epochs": 4}
    fields |= {"evaluate": True, "schedule": "cosine", "nesterov": True, "learning_rate": 0.01, "warmup_epochs": 1}
    spec = make_spec(**fields, remedies=remedies, reference_batch_size=25)
    assert (last_epoch(spec).test_accuracy or 0) > 0.9

    def shuffled(spec: Spec, split: str, root: Path | None) -> Images:
        images = load_images(spec, split, root)
        if split == "test":
            return images
        return Images(images.pixels, np.random.default_rng(0).permutation(images.labels), images.num_classes)

    monkeypatch.setattr(image_classifiers, "load_images", shuffled)
    last = last_epoch(spec)
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
    (found, _) = load_folder(tmp_path / "q4-study" / "records")
    rates = [(record.spec.global_batch_size, peak_learning_rate(record.spec)) for record in found]
    assert sorted(rates) == [(16, 0.02)] * 3 + [(64, 0.02)] + [(64, pytest.approx(0.08))] * 2
    for record in found:
        first, second = measurement_of(record).epochs
        assert max(first.peak_learning_rate or 0, second.peak_learning_rate or 0) == peak_learning_rate(record.spec)
        assert second.first_learning_rate == learning_rate_at(record.spec, record.spec.steps_per_epoch)
        assert None not in (second.loss, second.test_accuracy)
