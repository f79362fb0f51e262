"""The training loop of one rank.

An epoch is `spec.steps_per_epoch` steps: one pass over the rank's share of the samples, unless `max_steps` cuts it.
The clock (run_epoch) starts after the loader has begun the epoch and all ranks have met at a barrier. It stops when the
device has finished the last step. Then ranks exchange results and rank 0 evaluates: both are not timed. Epoch 1 is the
warm-up: it is recorded like every other epoch, but tables take times only from the `windows` epochs after it.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from pipeline.analysis.stopping_rule import is_time_precise_enough
from pipeline.data.batches import CHANNEL_MEANS, CHANNEL_STDS, TrainingBatches, build_batches, derive_seed
from pipeline.data.images import Images, load_images
from pipeline.experiment.learning_rate import epoch_learning_rates, learning_rate_at
from pipeline.experiment.measurement import DeviceMemory, Epoch, Measurement, RankEpoch
from pipeline.experiment.record import MAX_RANK_EPOCHS, MAX_STEP_TIMES
from pipeline.experiment.spec import NUM_WARM_UP_EPOCHS, Spec
from pipeline.system.errors import log_line
from pipeline.training import device_memory, process_group
from pipeline.training.gpu_checks import AMPERE
from pipeline.training.models import build_model
from pipeline.training.process_group import Rank
from pipeline.training.step import TrainingStep
from pipeline.training.step_setup import choose_execution, execution_stream, prepare_step
from pipeline.training.step_timer import STEP_PARTS, PartTimesNs, StepTimer

MAX_EVALUATION_BATCH_SIZE = 1000


class RankEpochSeries(NamedTuple):
    """Raw results of one rank's epoch; part times [num_steps, num_parts] in ns, loss and batch size of each step."""

    times: RankEpoch
    parts_ns: PartTimesNs
    losses: list[float]
    sizes: list[int]
    num_correct: int


class TrainedPoint(NamedTuple):
    """The measurement of a trained model, part times in ns as [epoch][rank], and the model."""

    measurement: Measurement
    series: list[list[PartTimesNs]]
    model: nn.Module


def build_training_setup(spec: Spec, rank: Rank, data: Path | None) -> tuple[TrainingBatches, nn.Module]:
    """Build the batches and the model of a point. All ranks begin with equal weights. Raises staging.DataNotStaged."""
    set_precision(spec)
    torch.manual_seed(spec.seed)
    batches = build_batches(spec, rank.shard, data)
    bare_model = build_model(spec.model or "resnet18", batches.num_classes, "zero_gamma" in spec.remedies)
    torch.manual_seed(derive_seed(spec.seed, rank.rank))  # each rank draws a different augmentation
    return batches, bare_model


def train_point(spec: Spec, rank: Rank, data: Path | None) -> TrainedPoint:
    """Train the model of a point.

    Training ends early when the epoch time is precise enough (may_stop_now). The measurement holds the epochs that ran.
    """
    device_memory.set_memory_limit(spec, rank)
    batches, bare_model = build_training_setup(spec, rank, data)
    test_images = load_images(spec, "test", data) if spec.evaluate and rank.rank == 0 else None
    execution = choose_execution(spec, rank)
    with execution_stream(execution, rank):
        ready = prepare_step(execution, bare_model, spec, rank)
        epochs, series = run_epochs(spec, rank, batches, ready.step, bare_model, test_images)
    measurement = build_measurement(
        spec,
        rank,
        bare_model,
        drop_long_step_times(epochs),
        execution_used=execution,
        compile_time_s=ready.compile_time_s,
        captured_batch_sizes=ready.captured_batch_sizes,
    )
    return TrainedPoint(measurement, series, bare_model)


def run_epochs(
    spec: Spec,
    rank: Rank,
    batches: TrainingBatches,
    step: TrainingStep,
    bare_model: nn.Module,
    test_images: Images | None,
) -> tuple[list[Epoch], list[list[PartTimesNs]]]:
    """Run all epochs, or stop early (may_stop_now). Return the summaries, and part times in ns [epoch][rank]."""
    epochs: list[Epoch] = []
    series: list[list[PartTimesNs]] = []
    for epoch_number in range(1, spec.epochs + 1):
        gathered = process_group.all_gather(run_epoch(epoch_number, spec, rank, batches, step), RankEpochSeries)
        # an evaluation batch is at most as large as a training batch, so that training sets the peak memory
        batch_size = min(MAX_EVALUATION_BATCH_SIZE, spec.batch_size_per_gpu)
        tested = evaluate(bare_model, test_images, rank, batch_size) if test_images is not None else (None, None)
        epochs.append(summarize_epoch(epoch_number, spec, gathered, *tested))
        series.append([part.parts_ns for part in gathered])
        if rank.rank == 0:  # between two epochs no clock runs
            log_line(describe_epoch(epochs[-1], spec.epochs))
        if may_stop_now(spec, epochs):
            break
    return epochs, series


def describe_epoch(epoch: Epoch, num_epochs: int) -> str:
    """Return the epoch as a line of the log, from which `submit` reads its number and its time."""
    slowest = epoch.slowest_rank
    time_s = (slowest.epoch_time_ns if slowest else None) or 0
    loss = "diverged" if epoch.loss is None else f"loss {epoch.loss:.4g}"
    accuracies = {"accuracy": epoch.accuracy, "test accuracy": epoch.test_accuracy}
    shown = [f", {name} {value:.1%}" for name, value in accuracies.items() if value is not None]
    return f"epoch {epoch.epoch} of {num_epochs}: {time_s / 1e9:.4g} s, {loss}{''.join(shown)}"


def may_stop_now(spec: Spec, epochs: Sequence[Epoch]) -> bool:
    """True if the point may stop early and the time of the epochs after warm-up is precise enough by now."""
    slowest = [epoch.slowest_rank for epoch in epochs[NUM_WARM_UP_EPOCHS:]]
    times_ns = [rank.epoch_time_ns for rank in slowest if rank and rank.epoch_time_ns]
    return spec.may_stop_early and is_time_precise_enough(times_ns)


def run_epoch(
    epoch_number: int,
    spec: Spec,
    rank: Rank,
    batches: TrainingBatches,
    step: TrainingStep,
    clock_type: type[StepTimer] = StepTimer,
) -> RankEpochSeries:
    """Run and time one epoch. Between start and stop nothing prints, synchronizes or reads a value from the device."""
    num_steps = spec.steps_per_epoch
    clock = clock_type(num_steps, rank.device, step.parts)
    losses: list[Tensor] = []
    sizes: list[int] = []
    step.begin_epoch()
    batch_iterator = iter(batches.epoch(epoch_number))  # starts the loader's workers, so before the clock
    process_group.barrier(rank)

    clock.start()
    for index in range(num_steps):
        step.set_learning_rate(learning_rate_at(spec, (epoch_number - 1) * num_steps + index))
        images, labels = next(batch_iterator)
        clock.mark("data")
        losses.append(step(images, labels, clock.mark))
        sizes.append(len(labels))
    clock.stop()

    parts_ns = clock.parts_ns()
    times = sum_part_times(clock, parts_ns, rank, sum(sizes))
    return RankEpochSeries(times, parts_ns, torch.stack(losses).tolist(), sizes, int(step.num_correct))


def sum_part_times(clock: StepTimer, parts_ns: PartTimesNs, rank: Rank, num_samples: int) -> RankEpoch:
    """Return the total time of each part of an epoch; None for a part that the step does not time."""
    totals: dict[str, int] = dict(zip(clock.parts, parts_ns.sum(axis=0).tolist(), strict=True))
    return RankEpoch(
        rank=rank.rank,
        epoch_time_ns=clock.epoch_time_ns,
        compute_time_ns=sum(totals.values()) - totals["data"] if clock.parts == STEP_PARTS else None,
        data_time_ns=totals.get("data"),
        copy_ns=totals.get("copy"),
        forward_ns=totals.get("forward"),
        backward_ns=totals.get("backward"),
        optimizer_ns=totals.get("optimizer"),
        loader_wait_ns=clock.loader_wait_ns(),
        num_samples=num_samples,
        started_unix_ns=clock.started_unix_ns,
    )


def set_precision(spec: Spec) -> None:
    """Allow TF32 in convolutions and matrix products unless the point asks for fp32. Turn off cuDNN benchmark mode.

    In a bf16 point only the test pass computes in fp32: autocast holds for training alone.
    """
    allow_tf32 = spec.precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.backends.cudnn.benchmark = False


def precision_used(spec: Spec, rank: Rank) -> str:
    """Return the precision that the device computes in. TF32 becomes fp32 on GPUs before Ampere and on the CPU."""
    has_tf32 = rank.device.type == "cuda" and torch.cuda.get_device_capability(rank.device) >= AMPERE
    return "fp32" if spec.precision == "tf32" and not has_tf32 else str(spec.precision)


@torch.no_grad()
def evaluate(model: nn.Module, images: Images, rank: Rank, batch_size: int) -> tuple[float | None, float]:
    """Return the mean loss (None if not finite) and the accuracy (a fraction) over the test set.

    Runs on rank 0 only, outside the timed part, in fp32 or TF32 (set_precision).
    """
    model.eval()
    mean, std = (torch.tensor(values, device=rank.device).view(1, 3, 1, 1) for values in (CHANNEL_MEANS, CHANNEL_STDS))
    loss_sum = torch.zeros((), dtype=torch.float64, device=rank.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=rank.device)
    for start in range(0, len(images.labels), batch_size):
        pixels = np.array(images.pixels[start : start + batch_size])  # a copy, since the memory map is read-only
        batch = torch.from_numpy(pixels).to(rank.device).permute(0, 3, 1, 2)
        labels = torch.from_numpy(images.labels[start : start + batch_size]).to(rank.device)
        outputs = model((batch.float() / 255 - mean) / std)
        loss_sum += nn.functional.cross_entropy(outputs, labels, reduction="sum")
        num_correct += (outputs.argmax(1) == labels).sum()
    loss = float(loss_sum) / len(images.labels)
    return loss if math.isfinite(loss) else None, int(num_correct) / len(images.labels)


def summarize_epoch(
    epoch_number: int, spec: Spec, ranks: list[RankEpochSeries], test_loss: float | None, test_accuracy: float | None
) -> Epoch:
    """Return the epoch with every rank's times, and the loss and accuracy over all samples of all ranks."""
    num_seen = sum(sum(part.sizes) for part in ranks)
    loss = sum(loss * size for part in ranks for loss, size in zip(part.losses, part.sizes, strict=True)) / num_seen
    diverged = [index for part in ranks for index, loss in enumerate(part.losses) if not math.isfinite(loss)]
    updates_before = (epoch_number - 1) * spec.steps_per_epoch
    first_rate, peak_rate = epoch_learning_rates(spec, epoch_number)
    return Epoch(
        epoch=epoch_number,
        ranks=tuple(part.times for part in ranks),
        num_updates=updates_before + spec.steps_per_epoch,
        num_samples=spec.num_samples if spec.is_whole_epoch else num_seen,
        loss=None if diverged else loss,
        accuracy=sum(part.num_correct for part in ranks) / num_seen,
        test_loss=test_loss,
        test_accuracy=test_accuracy,
        diverged_at_update=updates_before + min(diverged) if diverged else None,
        first_learning_rate=first_rate,
        peak_learning_rate=peak_rate,
        step_times_ns=tuple(int(total) for total in ranks[0].parts_ns.sum(axis=1)),
    )


def drop_long_step_times(epochs: list[Epoch]) -> tuple[Epoch, ...]:
    """Return the epochs, without step times if the record would be too long. steps.npz always has them."""
    num_rank_epochs = sum(len(epoch.ranks) for epoch in epochs)
    if sum(len(epoch.step_times_ns or ()) for epoch in epochs) <= MAX_STEP_TIMES and num_rank_epochs <= MAX_RANK_EPOCHS:
        return tuple(epochs)
    return tuple(msgspec.structs.replace(epoch, step_times_ns=None) for epoch in epochs)


def build_measurement(
    spec: Spec, rank: Rank, model: nn.Module, epochs: tuple[Epoch, ...], **fields: Any
) -> Measurement:
    """Build a measurement with the memory of every rank and the size of the model. All ranks must call it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    memory = process_group.all_gather(device_memory.read_peak_memory(spec, rank), list[DeviceMemory])
    return Measurement(
        epochs=epochs,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        gradient_bytes=sum(parameter.nbytes for parameter in parameters),
        memory=tuple(itertools.chain(*memory)),
        precision_used=precision_used(spec, rank),
        cudnn_benchmark=torch.backends.cudnn.benchmark if spec.device == "cuda" else None,
        num_threads=torch.get_num_threads(),
        **fields,
    )
