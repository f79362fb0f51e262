"""One pass through a workload before the clock: what a step needs, and what would measure something else.

The pass leaves no trace: buffers and random state are restored, and gradients are dropped.
"""

import functools
import itertools
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import IterableDataset

from pipeline.data.batches import (
    Batch,
    TrainingBatches,
    batch_size_at,
    batch_sizes,
    memory_format,
    name_of,
    num_samples,
    pair_parts,
    parts_of,
    place_batch,
)
from pipeline.plan.spec import Spec
from pipeline.records.record import Better, short_text
from pipeline.system.errors import log_line, pluralize, shorten_list
from pipeline.training import devices, process_group
from pipeline.training.process_group import Rank
from pipeline.training.step import ModelCall, autocast_of
from pipeline.training.torch_strategies import TORCH_STRATEGIES
from pipeline.workloads.workload import Workload, WorkloadError, describe, learning_rate_of, optimizer_of

NUM_CHECKED_SAMPLES = 2  # not 1, since BatchNorm needs more than one value a channel
MAX_NAMED_PARAMETERS = 3
MAX_ITEMS = 2**40  # of a record
TEXT_EXAMPLES = {"unit": "tokens", "merit": "test loss", "better": "higher"}
MAX_NAMED_TENSORS = 6


Each = Callable[[], AbstractContextManager[object]]
"""Entered around each check, it may keep what the check refuses: then the others are made too."""


def check_workload(
    workload: Workload,
    model: nn.Module,
    spec: Spec,
    rank: Rank,
    watch: AbstractContextManager[object] = nullcontext(),  # noqa: B008  # it has no state
) -> torch.optim.Optimizer:
    """Make one pass as a step makes it, on the bare model, which lies on the device. Return the model's optimizer.

    `watch` is entered around the forward and the backward pass.
    Raises WorkloadError if the pass does not do what the point needs.
    """
    check_declarations(workload, spec)
    optimizer = check_pass(workload, model, spec, rank, watch)
    assert optimizer is not None, "nullcontext keeps no error"
    return optimizer


def check_pass(
    workload: Workload,
    model: nn.Module,
    spec: Spec,
    rank: Rank,
    watch: AbstractContextManager[object],
    each: Each = nullcontext,
) -> torch.optim.Optimizer | None:
    """Make the pass of check_workload. Return the model's optimizer; None if `each` kept why it is refused."""
    optimizer = None
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with each():
        if not trainable:
            raise WorkloadError("the model has no parameter that trains; set requires_grad")
    buffers = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    gpus = [rank.device] if rank.device.type == "cuda" else []
    # not compiled here: a batch of this size never comes again
    with torch.random.fork_rng(devices=gpus), torch.compiler.set_stance("force_eager"):
        with each():
            optimizer = optimizer_of(workload, model)
        batch = check_batches(workload, spec, rank, each)
        with each():
            if batch is not None and trainable:
                pass_batch(workload, model, batch, trainable, spec, rank, watch)
    model.zero_grad(set_to_none=True)
    restore_buffers(model, buffers)
    del batch
    with each():
        for update in range(spec.epochs * spec.steps_per_epoch):
            learning_rate_of(workload, update)
    devices.reset_memory_statistics(spec, rank)
    return optimizer


def check_batches(workload: Workload, spec: Spec, rank: Rank, each: Each = nullcontext) -> Batch | None:
    """Return a small batch on the device, of the data set if the point reads one; None if `each` kept a refusal."""
    count = min(NUM_CHECKED_SAMPLES, spec.batch_size_per_gpu, *batch_sizes(spec))
    batch = None
    with each():
        batch = synthetic_batch(workload, count, rank.device)
    if spec.input == "dataloader":
        with each():
            batch = loaded_batch(workload, count, spec)
    return batch if batch is None else place_batch(batch, rank.device, memory_format(spec))


def pass_batch(
    workload: Workload,
    model: nn.Module,
    batch: Batch,
    trainable: list[nn.Parameter],
    spec: Spec,
    rank: Rank,
    watch: AbstractContextManager[object],
) -> None:
    """Make a forward and a backward pass. Raises WorkloadError unless they alone change gradients, and all of them."""
    model.train()
    with watch:
        loss = checked_loss(workload, model, batch, spec, rank)
        versions = [parameter._version for parameter in trainable]
        seen = {name: buffer._version for name, buffer in model.named_buffers()}
        loss.backward()
    if versions != [parameter._version for parameter in trainable]:
        raise WorkloadError("backward() changes weights, as in a hook that steps; leave that to optimizer(model)")
    changed = [name for name, buffer in model.named_buffers() if buffer._version != seen.get(name)]
    if changed and spec.activation_checkpointing != "none":
        raise WorkloadError(
            f"the backward pass runs the blocks again, and changes the buffer {changed[0]} again, as BatchNorm's "
            "statistics; leave out activation_checkpointing"
        )
    check_gradients(workload, model, spec, rank)


def check_weights(model: nn.Module, spec: Spec) -> None:
    """Raise WorkloadError for weights of another type than the row says.

    Autocast computes in bf16 from weights of float32 or bf16, and fp16's scaler needs those of float32. So does FSDP
    that gathers in bf16: its optimizer updates weights of float32.
    """
    is_bf16_allowed = spec.precision == "bf16" and spec.param_dtype == "fp32"
    allowed = {torch.float32, torch.complex64} | ({torch.bfloat16} if is_bf16_allowed else set())
    for name, tensor in model.named_parameters():
        is_number = tensor.is_floating_point() or tensor.is_complex()
        if is_number and tensor.dtype not in allowed:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise WorkloadError(
                f"{name} is {kind}, and not float32 (or bfloat16 with precision: bf16 and param_dtype: fp32); give "
                "that precision, or model.float() in build_model()"
            )


def restore_buffers(model: nn.Module, before: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Give each buffer the tensor and the values that it had before; those that came since are None again."""
    for name in [name for name, _ in model.named_buffers()]:
        place, _, key = name.rpartition(".")
        original, value = before.get(name, (None, None))
        if original is not None and value is not None:
            with torch.no_grad():
                original.copy_(value)
        model.get_submodule(place)._buffers[key] = original


def check_declarations(workload: Workload, spec: Spec, each: Each = nullcontext) -> None:
    """Raise WorkloadError for what the class itself leaves out."""
    with each():
        num_items(workload)
    with each():
        text_of(workload, "unit")
    with each():
        text_of(workload, "merit")
    for refusal in refused_declarations(workload, spec):
        with each():
            raise WorkloadError(refusal)


def refused_declarations(workload: Workload, spec: Spec) -> Iterator[str]:
    if workload.better not in get_args(Better):
        yield f"better={reprlib.repr(workload.better)} must be {' or '.join(map(repr, get_args(Better)))}"
    if spec.evaluate and type(workload).evaluate is Workload.evaluate:
        yield f"{type(workload).__name__} has no evaluate(); add one, or leave out evaluate: true"
    if spec.evaluate and not workload.merit:
        yield "evaluate() returns a figure without a name; set merit, as in merit = 'test loss'"
    if workload.find_unused_parameters and spec.static_graph:
        yield "static_graph=true does not work with find_unused_parameters; leave one out"
    if TORCH_STRATEGIES[spec.strategy].waits_for_all_gradients and spec.is_captured and workload.find_unused_parameters:
        yield "find_unused_parameters does not work in a CUDA graph; use execution: eager or compile"


def num_items(workload: Workload) -> int:
    """Return the items of a sample as a number of Python. Raises WorkloadError."""
    number = 0.0
    with suppress(TypeError, ValueError, RuntimeError):
        number = float(workload.items_per_sample)
    if not 1 <= number <= MAX_ITEMS or number != int(number):
        raise WorkloadError(
            f"items_per_sample={reprlib.repr(workload.items_per_sample)} must be a whole number of at least 1"
        )
    return int(number)


def text_of(workload: Workload, name: Literal["unit", "merit", "better"]) -> str:
    """Return an attribute as a record can hold it. Raises WorkloadError."""
    text = getattr(workload, name)
    if not isinstance(text, str) or not (text or name == "merit") or short_text(text) != text:
        raise WorkloadError(f"{name}={reprlib.repr(text)} must be a short text, as in {name} = {TEXT_EXAMPLES[name]!r}")
    return str.__str__(text)  # not of a class of NumPy


def check_count(found: float, num_samples: int, workload: Workload) -> int:
    """Return a number of correct predictions. Raises WorkloadError for one that these samples cannot have."""
    items = num_items(workload)
    if not 0 <= found <= num_samples * items or found != int(found):
        raise WorkloadError(
            f"loss counts {found:g} correct predictions in {pluralize(num_samples, 'sample')} of "
            f"{pluralize(items, 'item')}; return their number, of at most one for each item (items_per_sample)"
        )
    return int(found)


def synthetic_batch(workload: Workload, size: int, device: torch.device) -> Batch:
    """Return a synthetic batch. Raises WorkloadError unless it is of tensors of `size` samples."""
    batch = workload.synthetic_batch(size, device)
    check_parts(batch, "synthetic_batch")
    for _, tensor in parts_of(batch):
        if tensor.shape[:1] != (size,):
            shape = tuple(tensor.shape)
            raise WorkloadError(f"synthetic_batch({size}) returns a tensor of shape {shape}; give it {size} rows")
    return batch


def check_parts(batch: Batch, where: str) -> None:
    """Raise WorkloadError unless a batch holds tensors and nothing else."""
    parts = list(parts_of(batch))
    if not parts:
        raise WorkloadError(f"{where} returns {describe(batch)}, which holds no tensor; a batch has at least one")
    for path, part in parts:
        if not isinstance(part, Tensor):
            raise WorkloadError(
                f"{where} gives {describe(part)}{name_of(path)}; a batch holds tensors in tuples, lists and dicts: "
                "make it a tensor, leave it out, or build it from tensors in loss()"
            )


class CheckedBatches:
    """The batches of a data set, each with the rows that its step counts, and alike to synthetic ones."""

    def __init__(self, batches: TrainingBatches, workload: Workload, spec: Spec) -> None:
        self._batches = batches
        self._spec = spec
        with torch.random.fork_rng(devices=[]):
            self._example = synthetic_batch(workload, NUM_CHECKED_SAMPLES, torch.device("cpu"))

    def epoch(self, epoch: int) -> Iterator[Batch]:
        return map(functools.partial(self._check, epoch), itertools.count(), self._batches.epoch(epoch))

    def _check(self, epoch: int, index: int, batch: Batch) -> Batch:
        """Return the batch. It costs microseconds: the host knows shapes without waiting for the device."""
        size = batch_size_at(index, self._spec)
        for path, part, expected in pair_parts(batch, self._example):
            if not is_alike(part, expected) or len(part) != size:
                rows = f"{pluralize(len(part), 'row')} of " if isinstance(part, Tensor) and part.ndim else ""
                raise WorkloadError(
                    f"batch {index + 1} of epoch {epoch} has {rows}{describe_form(part)}{name_of(path)}, and not "
                    f"{pluralize(size, 'row')} of {describe_form(expected)}; pad or cut all samples to one shape, and "
                    "keep each"
                )
        return batch


def is_alike(one: object, other: object) -> bool:
    """True for two tensors of samples that have one type and shape, whatever their number."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one.dtype == other.dtype and one.ndim == other.ndim and one.shape[1:] == other.shape[1:]


def checked_loss(workload: Workload, model: nn.Module, batch: Batch, spec: Spec, rank: Rank) -> Tensor:
    """Return the loss of a batch. Raises WorkloadError unless it is a finite scalar, of one call of the model."""
    num_calls = 0

    def counted(*inputs: Any, **keywords: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return model(*inputs, **keywords)

    with refuse_scaling(), autocast_of(spec, rank):
        found: Any = workload.loss(ModelCall(counted), batch)
    loss, num_correct = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loss, Tensor) or not isinstance(num_correct, Tensor | None):
        cure = "return a tensor, or that and the number of correct predictions, a tensor as of (a == b).sum()"
        raise WorkloadError(f"loss returns {describe(found)}; {cure}")
    if loss.ndim:
        raise WorkloadError(f"loss returns a tensor of shape {tuple(loss.shape)}; return its mean")
    if num_calls != 1:
        how_often = "does not call the model" if num_calls == 0 else f"calls the model {num_calls} times"
        raise WorkloadError(f"the loss {how_often}; call it once: DDP and the measurement count on one call a step")
    if not torch.isfinite(loss):
        raise WorkloadError(
            f"the loss of a random batch is {float(loss.detach())}; check the model and synthetic_batch"
        )
    if num_correct is not None:
        if num_correct.ndim or num_correct.dtype in (torch.float16, torch.bfloat16) or num_correct.is_complex():
            form = describe_form(num_correct[None])
            raise WorkloadError(
                f"loss counts correct predictions as {form}; return one whole number, as (a == b).sum()"
            )
        check_count(float(num_correct), num_samples(batch), workload)
    return loss


@contextmanager
def refuse_scaling() -> Iterator[None]:
    """Raise WorkloadError if the loss is scaled inside: the record would state the scaled one as the loss."""
    scale = GradScaler.scale

    def refuse(scaler: GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise WorkloadError("the loss is scaled by a GradScaler; return it as it is: precision: fp16 scales it")
        return scale(scaler, outputs)

    GradScaler.scale = refuse  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        GradScaler.scale = scale  # type: ignore[method-assign]


def check_gradients(workload: Workload, model: nn.Module, spec: Spec, rank: Rank) -> None:
    """Name the parameters without a gradient. Raises WorkloadError if DDP would wait for them."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    unused = [name for name, parameter in trained if parameter.grad is None]
    if not unused:
        return
    named = shorten_list(unused, MAX_NAMED_PARAMETERS)
    if TORCH_STRATEGIES[spec.strategy].waits_for_all_gradients and not workload.find_unused_parameters:
        cure = "freeze them, or set find_unused_parameters = True in the workload"
        raise WorkloadError(f"the loss gives no gradient to {named}, for which DDP would wait; {cure}")
    if rank.rank == 0:
        log_line(f"Notice: the loss gives no gradient to {named}.")


def loaded_batch(workload: Workload, count: int, spec: Spec) -> Batch:
    """Return the first samples of the data set as a batch. Random state stays as it is.

    Raises WorkloadError unless the data set is long enough, alike on all ranks, and alike to synthetic batches.
    """
    dataset = workload.dataset()
    if isinstance(dataset, IterableDataset):
        raise WorkloadError("dataset() returns an IterableDataset, which ranks cannot share; give it a __getitem__")
    if not hasattr(dataset, "__getitem__") or (isinstance(dataset, dict) and 0 not in dataset):
        raise WorkloadError(f"dataset returns {describe(dataset)}; return one Dataset, with __getitem__ and __len__")
    lengths = process_group.all_gather(len(dataset), int)  # type: ignore[arg-type]
    if len(set(lengths)) > 1:
        raise WorkloadError(f"the data set has {lengths} samples, by rank; give each rank the same one")
    if lengths[0] < spec.num_samples:
        raise WorkloadError(
            f"the data set has {lengths[0]} samples and the configuration needs {spec.num_samples}; lower num_samples"
        )
    with torch.random.fork_rng(devices=[]):
        samples = [dataset[index] for index in range(count)]
        loaded = workload.collate(samples)
        synthetic = synthetic_batch(workload, count, torch.device("cpu"))
    check_parts(loaded, "the data set")
    for path, ours, theirs in pair_parts(synthetic, loaded):
        if not is_alike(ours, theirs):
            raise WorkloadError(
                f"synthetic_batch gives {describe_form(ours)}{name_of(path)} and the data set "
                f"{describe_form(theirs)}; make them alike"
            )
        if len(theirs) != count:
            raise WorkloadError(
                f"collate makes a batch of {len(theirs)} from {count} samples{name_of(path)}; keep each of them"
            )
    return loaded


def describe_form(batch: Batch) -> str:
    """Return the types and shapes of the tensors of a batch as they lie in it, without the number of samples."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape[1:])}"
    if isinstance(batch, dict):
        forms = [f"{key!r}: {describe_form(part)}" for key, part in batch.items()]
        return f"{{{shorten_list(forms, MAX_NAMED_TENSORS)}}}"
    if isinstance(batch, list | tuple):
        return f"[{shorten_list(list(map(describe_form, batch)), MAX_NAMED_TENSORS)}]"
    return describe(batch)
