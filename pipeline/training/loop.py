"""The training loop of one rank.

An epoch is `spec.steps_per_epoch` steps: all samples of the rank's share, unless `max_steps` cuts it. A step is an
update of the parameters, and with `grad_accumulation` it takes several passes.
The clock (run_epoch) starts after the loader has begun the epoch and all ranks have met at a barrier. It stops when the
device has finished the last step. Then ranks exchange results and rank 0 evaluates: both are not timed. Epoch 1 is the
warm-up: it is recorded like every other epoch, but tables take times only from the `windows` epochs after it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from pipeline.data.batches import LoaderBatches, SyntheticBatches, TrainingBatches, batch_sizes, derive_seed
from pipeline.figures.stopping_rule import is_time_precise_enough
from pipeline.plan.axes import NUM_WARM_UP_EPOCHS, Execution
from pipeline.plan.model_names import own_class
from pipeline.plan.spec import Spec
from pipeline.records.record import (
    MAX_RANK_EPOCHS,
    MAX_STEP_TIMES,
    MODEL_ALONE,
    Better,
    DeviceMemory,
    Epoch,
    Measurement,
    RankEpoch,
)
from pipeline.system.errors import log_line
from pipeline.training import devices, process_group
from pipeline.training.check_workload import (
    CheckedBatches,
    check_count,
    check_weights,
    check_workload,
    num_items,
    synthetic_batch,
    text_of,
)
from pipeline.training.devices import AMPERE
from pipeline.training.execution import TrainingStep, choose_execution, execution_stream, prepare_step
from pipeline.training.flop_count import FlopCount, count_flops
from pipeline.training.process_group import CollectiveWatch, Rank
from pipeline.training.step import STEP_PARTS, PartTimesNs, StepTimer
from pipeline.training.torch_strategies import TORCH_STRATEGIES, optimizer_bytes
from pipeline.workloads.find import NO_SOURCES, Sources, build_workload
from pipeline.workloads.workload import (
    TEST_ACCURACY,
    Workload,
    WorkloadError,
    learning_rate_of,
    model_of,
)


class RankEpochSeries(NamedTuple):
    """Raw results of one rank's epoch; part times [num_steps][num_parts] in ns, loss and batch size of each pass."""

    times: RankEpoch
    parts_ns: list[list[int]]
    losses: list[float]
    sizes: list[int]
    num_correct: int | None  # None if the loss does not count them


class TrainedPoint(NamedTuple):
    """The measurement of a trained model, part times [num_ranks, num_steps, num_parts] of each epoch, and the model."""

    measurement: Measurement
    series: list[PartTimesNs]
    model: nn.Module


def build_batches(workload: Workload, spec: Spec, rank: Rank) -> TrainingBatches:
    """Return the training input that the spec names. Raises staging.DataNotStaged, WorkloadError."""
    if spec.input == "gpu":
        return workload.batches_on_device(rank)
    if spec.input == "dataloader":
        return CheckedBatches(LoaderBatches(spec, rank, workload.dataset(), workload.collate), workload, spec)
    torch.manual_seed(derive_seed(spec.seed, rank.rank))
    batch = synthetic_batch(workload, spec.batch_size_per_process, rank.device)
    return SyntheticBatches(spec, rank, batch)


def train_point(spec: Spec, rank: Rank, sources: Sources = NO_SOURCES) -> TrainedPoint:
    """Train the model of a point. All ranks begin with equal weights.

    Training ends early when the epoch time is precise enough (may_stop_now). The measurement holds the epochs that ran.
    Raises staging.DataNotStaged, WorkloadError.
    """
    devices.set_memory_limit(spec, rank)
    execution = choose_execution(spec, rank)
    workload, model = build_model(spec, rank, sources, execution)
    set_precision(spec)
    watch = CollectiveWatch()
    with refuse_changed_flags():
        optimizer = check_workload(workload, model, spec, rank, watch if rank.world_size > 1 else nullcontext())
        check_evaluation(workload, model, spec, rank)
    batches = build_batches(workload, spec, rank)
    torch.manual_seed(derive_seed(spec.seed, rank.rank))  # each rank draws a different augmentation
    with execution_stream(execution, rank):
        ready = prepare_step(execution, model, workload, spec, rank, optimizer)
        with refuse_changed_flags():
            epochs, series = run_epochs(spec, rank, workload, batches, ready.step, model)
    measurement = build_measurement(
        workload,
        spec,
        rank,
        model,
        drop_long_step_times(epochs),
        execution_used=execution,
        compile_time_s=ready.compile_time_s,
        captured_batch_sizes=ready.captured_batch_sizes,
        optimizer_bytes=max(process_group.all_gather(optimizer_bytes(ready.step.optimizer), int)),
        own_collectives=watch.gather(),
    )
    return TrainedPoint(measurement, series, model)


def build_model(
    spec: Spec, rank: Rank, sources: Sources = NO_SOURCES, execution: Execution = "eager"
) -> tuple[Workload, nn.Module]:
    """Return the workload of a point, and its bare model on the device. Raises WorkloadError."""
    workload = build_workload(spec, sources, execution)
    set_precision(spec)  # after the user's modules were imported
    torch.manual_seed(spec.seed)
    try:
        model = model_of(workload)
        check_weights(model, spec)
        return workload, TORCH_STRATEGIES[spec.strategy].place(model, workload, spec, rank)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{MODEL_ALONE}: {error}") from error


def run_epochs(
    spec: Spec, rank: Rank, workload: Workload, batches: TrainingBatches, step: TrainingStep, model: nn.Module
) -> tuple[list[Epoch], list[PartTimesNs]]:
    """Run all epochs, or stop early (may_stop_now). Return the summaries, and part times as in TrainedPoint."""
    epochs: list[Epoch] = []
    series: list[PartTimesNs] = []
    for epoch_number in range(1, spec.epochs + 1):
        found = run_epoch(epoch_number, spec, rank, workload, batches, step)
        gathered = process_group.all_gather(found, RankEpochSeries)
        tested = Evaluation()
        if spec.evaluate:
            tested = process_group.on_first_rank(rank, lambda: evaluate(workload, model, rank), tested)
        epochs.append(summarize_epoch(epoch_number, spec, workload, gathered, tested))
        series.append(np.array([part.parts_ns for part in gathered], dtype=np.int64))
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
    workload: Workload,
    batches: TrainingBatches,
    step: TrainingStep,
) -> RankEpochSeries:
    """Run and time one epoch. Between start and stop nothing prints, synchronizes or reads a value from the device."""
    num_steps = spec.steps_per_epoch
    clock = StepTimer(num_steps, rank.device, step.parts, spec.grad_accumulation)
    losses: list[Tensor] = []
    step.begin_epoch()
    batch_iterator = iter(batches.epoch(epoch_number))  # starts the loader's workers, so before the clock
    process_group.barrier(rank)

    clock.start()
    for index in range(num_steps):
        rate = learning_rate_of(workload, (epoch_number - 1) * num_steps + index)
        if rate is not None:
            step.set_learning_rate(rate)
        for passes_left in reversed(range(spec.grad_accumulation)):
            losses.append(step(clock.take(batch_iterator), clock.mark, passes_left == 0))
    clock.stop()

    sizes = batch_sizes(spec)
    parts_ns = clock.parts_ns()
    times = sum_part_times(clock, parts_ns, rank, sum(sizes))
    return RankEpochSeries(
        times, parts_ns.tolist(), torch.stack(losses).tolist(), sizes, count_correct(step, sum(sizes), workload)
    )


def count_correct(step: TrainingStep, num_samples: int, workload: Workload) -> int | None:
    """Return the number of correct predictions of the epoch; None if the loss does not count them."""
    return check_count(float(step.num_correct), num_samples, workload) if step.counts_correct else None


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
        loader_wait_ns=clock.loader_wait_ns,
        num_samples=num_samples,
        started_unix_ns=clock.started_unix_ns,
    )


def set_precision(spec: Spec) -> None:
    """Allow TF32 in convolutions and matrix products unless the point asks for fp32. Undo other flags of user code.

    cuDNN does not tune, anomaly mode and deterministic algorithms are off, and new tensors are float32 on the CPU.
    In a bf16 point only the test pass computes in fp32: autocast holds for training alone.
    """
    allow_tf32 = spec.precision != "fp32"
    for part in (torch.backends, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn):  # type: ignore[attr-defined]
        setattr(part, "fp32_precision", "none")  # noqa: B010  # not in the types
    torch.set_float32_matmul_precision("highest")  # the CPU's too
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def global_flags() -> dict[str, object]:
    """Return the flags of torch that change what a step computes or how fast, by the names that set them."""
    flags: dict[str, Callable[[], object]] = {
        "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision,
        "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
        "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled,
        "torch.set_default_dtype": torch.get_default_dtype,
        "torch.set_default_device": lambda: torch.empty(0).device,  # torch 2.9 cannot say that none is set
        "torch.set_num_threads": torch.get_num_threads,
    }
    return {name: read_flag(read) for name, read in flags.items()}


def read_flag(read: Callable[[], object]) -> object:
    """Return a flag of torch; "mixed" where the old and the new way of setting it were mixed, which torch refuses."""
    try:
        return read()
    except RuntimeError:
        return "mixed"


@contextmanager
def refuse_changed_flags() -> Iterator[None]:
    """Raise WorkloadError for a flag that the user's code changes inside."""
    before = global_flags()
    yield
    for name, value in global_flags().items():
        if value != before[name]:
            raise WorkloadError(
                f"the model's code sets {name} to {value} in a step, and the record would say {before[name]}; "
                "leave it out, and choose precision in the grid"
            )


def precision_used(spec: Spec, rank: Rank) -> str:
    """Return the precision that the device computes in. TF32 becomes fp32 on GPUs before Ampere and on the CPU."""
    has_tf32 = rank.device.type == "cuda" and torch.cuda.get_device_capability(rank.device) >= AMPERE
    return "fp32" if spec.precision == "tf32" and not has_tf32 else str(spec.precision)


class Evaluation(NamedTuple):
    """The figure of merit over the test set, and the mean loss; None if not measured, or if a loss is not finite."""

    merit: float | None = None
    loss: float | None = None


@torch.no_grad()
def evaluate(workload: Workload, model: nn.Module, rank: Rank) -> Evaluation:
    """Return the evaluation of a model. Runs on rank 0 only, outside the timed part."""
    model.eval()
    found = workload.evaluate(model, rank.device)
    figure, test_loss = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    try:
        merit, loss = finite_or_none(figure), finite_or_none(test_loss)
    except (TypeError, ValueError, OverflowError) as error:
        raise WorkloadError(
            f"evaluate returns a {type(figure).__name__}; return a number, or that and the test loss"
        ) from error
    if workload.merit == TEST_ACCURACY and merit is not None and not 0 <= merit <= 1:
        raise WorkloadError(f"evaluate returns a {TEST_ACCURACY} of {merit:g}; return a share from 0 to 1")
    return Evaluation(merit, loss)


def check_evaluation(workload: Workload, model: nn.Module, spec: Spec, rank: Rank) -> Evaluation | None:
    """Return what a user's evaluate() says of the new model; None on other ranks, and where nothing is evaluated.

    It leaves the random state as it is.
    Raises WorkloadError if it does not return what a record holds.
    """

    def evaluate_once() -> Evaluation:
        with torch.random.fork_rng(devices=[rank.device] if rank.device.type == "cuda" else []):
            tested = evaluate(workload, model, rank)
        model.train()
        devices.reset_memory_statistics(spec, rank)
        return tested

    if not spec.evaluate or own_class(spec.model) is None:
        return None
    return process_group.on_first_rank(rank, evaluate_once, None)


def finite_or_none(value: Any) -> float | None:
    """Return the value as a record can hold it. Raises TypeError, ValueError or OverflowError if it is no number."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


def summarize_epoch(
    epoch_number: int, spec: Spec, workload: Workload, ranks: list[RankEpochSeries], tested: Evaluation
) -> Epoch:
    """Return the epoch with every rank's times, and the loss and accuracy over all samples of all ranks."""
    num_seen = sum(sum(part.sizes) for part in ranks)
    loss = sum(loss * size for part in ranks for loss, size in zip(part.losses, part.sizes, strict=True)) / num_seen
    num_passes = spec.grad_accumulation
    diverged = [
        index // num_passes for part in ranks for index, loss in enumerate(part.losses) if not math.isfinite(loss)
    ]
    updates_before = (epoch_number - 1) * spec.steps_per_epoch
    counts = [part.num_correct for part in ranks if part.num_correct is not None]
    updates = range(updates_before, updates_before + spec.steps_per_epoch)
    rates = [rate for update in updates if (rate := learning_rate_of(workload, update)) is not None]
    num_predictions = num_seen * num_items(workload)
    if num_predictions > num_seen and sum(counts) <= num_seen:  # they may be one a sample, or one an item
        counts = []
    is_accuracy = workload.merit == TEST_ACCURACY
    return Epoch(
        epoch=epoch_number,
        ranks=tuple(part.times for part in ranks),
        num_updates=updates_before + spec.steps_per_epoch,
        num_samples=spec.num_samples if spec.is_whole_epoch else num_seen,
        loss=None if diverged else loss,
        accuracy=sum(counts) / num_predictions if counts else None,
        test_loss=tested.loss,
        test_accuracy=tested.merit if is_accuracy else None,
        merit=None if is_accuracy else tested.merit,
        diverged_at_update=updates_before + min(diverged) if diverged else None,
        first_learning_rate=rates[0] if rates else None,
        peak_learning_rate=max(rates, default=None),
        step_times_ns=tuple(map(sum, ranks[0].parts_ns)),
    )


def drop_long_step_times(epochs: list[Epoch]) -> tuple[Epoch, ...]:
    """Return the epochs, without step times if the record would be too long. steps.npz always has them."""
    num_rank_epochs = sum(len(epoch.ranks) for epoch in epochs)
    if sum(len(epoch.step_times_ns or ()) for epoch in epochs) <= MAX_STEP_TIMES and num_rank_epochs <= MAX_RANK_EPOCHS:
        return tuple(epochs)
    return tuple(msgspec.structs.replace(epoch, step_times_ns=None) for epoch in epochs)


def build_measurement(
    workload: Workload, spec: Spec, rank: Rank, model: nn.Module, epochs: tuple[Epoch, ...], **fields: Any
) -> Measurement:
    """Build a measurement with the memory of every rank and the size of the model. All ranks must call it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    memory = process_group.all_gather(devices.read_peak_memory(spec, rank), list[DeviceMemory])
    is_counted = rank.rank == 0 and spec.is_whole_epoch  # after the memory is read
    flops = count_flops(workload, spec.batch_size_per_gpu, rank) if is_counted else FlopCount()
    return Measurement(
        epochs=epochs,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        gradient_bytes=sum(parameter.nbytes for parameter in parameters),
        memory=tuple(itertools.chain(*memory)),
        precision_used=precision_used(spec, rank),
        cudnn_benchmark=torch.backends.cudnn.benchmark if spec.device == "cuda" else None,
        num_threads=torch.get_num_threads(),
        unit=text_of(workload, "unit"),
        items_per_sample=num_items(workload),
        merit=text_of(workload, "merit") or None,
        better=cast(Better, text_of(workload, "better")),
        sharding=TORCH_STRATEGIES[spec.strategy].describe_sharding(workload, model, spec),
        flops_per_sample=flops.per_sample,
        flops_note=flops.note,
        **fields,
    )
