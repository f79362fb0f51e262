"""The report of each rank on a block of updates of a script: what is checked in it, and what the record gets from it.

Pure functions of blocks.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from pipeline.figures.pooling import LONG_UPDATE
from pipeline.figures.stopping_rule import MAX_STEPS, MIN_STEPS, WINDOW_S
from pipeline.plan.spec import MIN_WINDOWS_FOR_INTERVAL, Spec
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.record import DeviceMemory, Epoch, FailureKind, RankEpoch, Transfer, TransferKind
from pipeline.system.errors import shorten_list
from pipeline.training.flop_count import FlopCount, flops_of_sample

KINDS: dict[str, TransferKind] = {
    "all_reduce": "gradients",
    "reduce": "gradients",
    "reduce_scatter": "gradients",
    "all_gather": "parameters",
    "broadcast": "buffers",
}
"""What a collective of a script carries, as the strategies use it."""
MAX_SIZE_DIFFERENCE = 0.01  # of the samples of an update: what a smaller last batch may change
MAX_PASSES_DIFFERENCE = 0.1  # of the passes of an update whose FLOPs are those of the others
MIN_LATE_BYTES_RATIO = 0.5  # of gradients: what a script averages beside them is less
MIN_EXCHANGED_RATIO = 0.01  # likewise: the losses and metrics of ranks that train alone are less
MAX_BYTES_RATIO = 1.2  # of what travels over what is needed: padding and buffers take less
MAX_OTHER_SIZES = 3
MAX_READ_AHEAD = 2  # batches
LONGER = 4  # so many times are windows longer where updates are uneven
SAY_ITEMS = "call ddpscale.items() with the samples of an update"
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
WRAPPERS = {name: facts.wrappers for name, facts in STRATEGIES.items() if facts.is_distributed}
SHARDING_WRAPPERS = {name for facts in STRATEGIES.values() if facts.shards_parameters for name in facts.wrappers}


class ScriptProblem(Exception):
    """The script did not do what the point needs. The message says what, with the cure."""

    def __init__(self, text: str, kind: FailureKind = "exception") -> None:
        super().__init__(text)
        self.kind = kind


class CountedCall(msgspec.Struct, frozen=True, array_like=True):
    """A collective, its bytes, why it stays real, if it is called in a backward pass, and the number of such calls."""

    collective: str
    num_bytes: int
    stays_real: str
    in_backward: bool
    count: int


class Block(msgspec.Struct, frozen=True):
    """The report of one rank on one block: times in ns, `sizes` as pairs of batch size and number of batches."""

    time: int
    steps: list[int]
    optimizer: int | None  # None where no step was seen
    wait: int | None
    data: int | None
    sizes: Sequence[tuple[int, float]]
    passes: int  # backward ones
    all_passes: int  # also those of other optimizers
    started: int
    updates: int  # from the start of the script
    activity: list[int]
    items: float | None  # that the script has named, with their unit
    unit: str
    left_out: list[int]  # indices of steps
    merit: tuple[float | None, str, str] | None  # value, name, and which is better
    calls: list[CountedCall]  # of a warm-up block
    flops: tuple[int, float | None, list[str], list[tuple[int, float]], int] | None
    """Of an update: their number, its items, operations without a formula, its batches as in `sizes`, its passes."""
    skipped: list[tuple[str, int]]  # saves
    seen: dict[str, Any]
    memory: dict[str, Any]
    other_sizes: Sequence[int] = ()  # of batches of a second loader
    share: float = 1.0  # of the steps, that counts


class Timed(NamedTuple):
    """A block with the reports of all ranks, in their order."""

    ranks: list[Block]

    @property
    def time_ns(self) -> int:
        return max(block.time for block in self.ranks)

    @property
    def update_ns(self) -> float:
        """The time of an update on the slowest rank."""
        return self.time_ns / len(self.ranks[0].steps)


def without_left_out(ranks: list[Block]) -> list[Block]:
    """Return the reports without the steps that any rank leaves out, since the others wait for it; not without all."""
    left_out = set().union(*(block.left_out for block in ranks))
    kept = [index for index in range(len(ranks[0].steps)) if index not in left_out]
    if not kept or len(kept) == len(ranks[0].steps):
        return ranks
    return [
        msgspec.structs.replace(block, time=sum(steps), steps=steps, share=len(kept) / len(block.steps))
        for block in ranks
        for steps in [[block.steps[index] for index in kept]]
    ]


def with_fed_ranks(ranks: list[Block]) -> list[Block]:
    """Return the reports. Where some ranks alone have a loader, each rank gets its share of the batches.

    With `dispatch_batches` of accelerate rank 0 loads for all.
    """
    loading = [block for block in ranks if block.sizes]
    if not loading or len(loading) == len(ranks):
        return ranks
    first = loading[0]
    sizes = divide_batches(first.sizes, len(ranks), max(first.passes, len(first.steps)))
    flops = first.flops
    if flops is not None:
        counted, items, without_formula, counted_sizes, passes = flops
        flops = (counted, items, without_formula, divide_batches(counted_sizes, len(ranks), passes), passes)
    return [msgspec.structs.replace(block, sizes=sizes, flops=flops) for block in ranks]


def takes_a_batch_a_pass(spec: Spec, block: Block) -> bool:
    """True if each backward pass of an update takes a batch, of which a loader may have fetched a few ahead."""
    ahead = abs(sum(count for _, count in block.sizes) - block.passes)
    is_regular = block.passes == len(block.steps) * spec.grad_accumulation
    return bool(block.sizes) and is_regular and ahead <= min(MAX_READ_AHEAD, block.passes / 5)


def without_read_ahead(block: Block) -> Block:
    """Return the report with a batch of the most frequent size more or less, as many as its backward passes took.

    A loader that reads ahead (of accelerate, or in a thread) fetches more at the start of an epoch, fewer at its end.
    """
    counts = dict(block.sizes)
    size = max(counts, key=lambda one: (counts[one], one), default=0)
    missing = block.passes - sum(counts.values())
    counts[size] = counts.get(size, 0) + missing
    return msgspec.structs.replace(block, sizes=[*counts.items()]) if size and counts[size] > 0 else block


def has_long_updates(block: Timed) -> bool:
    """True if an update took far longer than most: work of every few updates belongs to the time, as its share."""
    steps = block.ranks[0].steps
    return max(steps) > LONG_UPDATE * statistics.median(steps)


def divide_batches(sizes: Sequence[tuple[int, float]], num_ranks: int, num_passes: int) -> list[tuple[int, float]]:
    """Return what one rank gets of batches: some of them, or a part of each where they are too few for all ranks."""
    if sum(count for _, count in sizes) < num_ranks * num_passes:
        return [(size // num_ranks, count) for size, count in sizes]
    return [(size, count / num_ranks) for size, count in sizes]


def num_timed_updates(spec: Spec, update_ns: float) -> int:
    """Return the updates of a timed block: as many as fill a window, of those that the point allows."""
    wanted = min(MAX_STEPS, max(MIN_STEPS, math.ceil(WINDOW_S / update_ns * 1e9)))
    return max(1, min(wanted, spec.updates // min(MIN_WINDOWS_FOR_INTERVAL, spec.windows)))


def num_uneven_updates(spec: Spec, usual: int) -> int:
    """Return the updates of a timed block if some are far longer than others: more than usual, if so many are left.

    So what comes every few updates comes several times in a block. Six such blocks take a third of the updates.
    """
    return max(usual, min(LONGER * usual, spec.updates // 3 // min(MIN_WINDOWS_FOR_INTERVAL, spec.windows)))


def batch_of(block: Block) -> tuple[int | None, float | None]:
    """Return the most frequent batch size of a loader, and the batches an update; None without a loader."""
    if not block.sizes:
        return None, None
    size, _ = max(block.sizes, key=lambda pair: pair[1])
    return size, sum(count for _, count in block.sizes) * block.share / len(block.steps)


def check_observed(spec: Spec, block: Block) -> None:
    """Raise ScriptProblem if the script does something else than the point asks for."""
    seen, (size, batches) = block.seen, batch_of(block)
    if seen["world_size"] != spec.world_size:
        raise ScriptProblem(
            f"the configuration has {spec.world_size} processes, and the script trains in {seen['world_size']}; "
            "let it call init_process_group() with the variables of torchrun; if it has an argument for that number, "
            "write {num_gpus} there"
        )
    is_checked = block.items is None and not spec.counts_batches  # else the script says what it trains on
    if size is not None and batches is not None and is_checked:
        asked, found = spec.batch_size_per_gpu * spec.grad_accumulation, size * batches
        one_ahead = 0 if asked % size else size / len(block.steps)  # a loader may fetch a batch before it is asked
        if abs(found - asked) > max(MAX_SIZE_DIFFERENCE * asked, one_ahead) * (1 + 1e-9):
            how = f"batches of {size}, {batches:.3g} an update"
            raise ScriptProblem(
                f"the configuration asks for {asked} samples an update on each GPU, and the loader of rank 0 gives "
                f"{found:.4g} ({how}); {cure_of_batch(spec, block, size, batches)}"
            )
    if size is None and is_checked and block.wait is not None:
        raise ScriptProblem(
            "the batches of the loader have no size that can be read, since they hold no tensor and no array; call "
            "ddpscale.items() with the samples of each, or leave --batch-size out to count batches"
        )
    passes = block.passes * block.share / len(block.steps)
    if size is None and block.items is None and passes and round(passes) != spec.grad_accumulation:
        raise ScriptProblem(
            f"the configuration asks for {spec.grad_accumulation} passes an update on each GPU, and the script makes "
            f"{passes:.3g}; {cure_of_passes(spec, round(passes))}"
        )
    if spec.world_size > 1 and seen["collectives"] == 0:
        raise ScriptProblem(
            f"the {spec.world_size} ranks exchange nothing in {len(block.steps)} updates: if each trains a model of "
            "its own, wrap it in DistributedDataParallel (a Trainer without GPUs needs ACCELERATE_USE_CPU=true before "
            "the script); if they meet more seldom, give --warmup (in a grid warmup_updates) more "
            "updates than lie between"
        )
    wrappers = seen["wrappers"]
    if spec.is_distributed and wrappers and not {*wrappers, *seen["optimizers"]} & {*WRAPPERS[spec.strategy]}:
        others = [name for name, classes in WRAPPERS.items() if set(classes) & set(wrappers)]
        cure = f"give --strategy {others[0]}" if others else "only data parallelism is measured: leave the script out"
        raise ScriptProblem(
            f"the configuration says strategy={spec.strategy}, and the script uses {', '.join(wrappers)}; {cure}"
        )


def cure_of_batch(spec: Spec, block: Block, size: int, batches: float) -> str:
    """Return what may be wrong with a script whose updates on a GPU take so many batches of that size."""
    asked = spec.batch_size_per_gpu * spec.grad_accumulation
    if block.other_sizes:
        others = shorten_list([*map(str, block.other_sizes)], MAX_OTHER_SIZES)
        return f"another loader gives batches of {others}, and the last one before the step counts; {SAY_ITEMS}"
    passes = round(batches)
    is_share = math.isclose(size * batches * spec.num_gpus, asked, rel_tol=MAX_SIZE_DIFFERENCE)
    if spec.num_gpus > 1 and is_share and size < spec.batch_size_per_gpu:
        return "its batch size is that of all GPUs together: write {global_batch_size} in place of {batch_size_per_gpu}"
    if size == spec.batch_size_per_gpu and not math.isclose(passes, batches, rel_tol=MAX_SIZE_DIFFERENCE):
        return f"let each update take as many batches, or {SAY_ITEMS}"
    if "batch_size_per_gpu" not in (spec.script or "") and "global_batch_size" not in (spec.script or ""):
        given = f"--batch-size {size}" + f" --grad-accumulation {passes}" * (passes > 1)
        return f"write {{batch_size_per_gpu}} into script, or give what it takes: {given}"
    if size != spec.batch_size_per_gpu:
        return (
            f"its batches have {size} samples by the first dimension of their first tensor, and not "
            f"{spec.batch_size_per_gpu}: let the script use its argument, or {SAY_ITEMS}"
        )
    return f"give --grad-accumulation {passes} (in a grid grad_accumulation) if it makes so many passes an update"


def cure_of_passes(spec: Spec, passes: int) -> str:
    """Return what may be wrong with a script without a loader that makes so many backward passes an update."""
    if spec.num_gpus > 1 and passes * spec.num_gpus == spec.grad_accumulation:
        return "it divides their number among the GPUs: let it be {global_grad_accumulation}"
    return (
        f"give --grad-accumulation {passes} (in a grid grad_accumulation) if each pass has samples of its own; if "
        f"several see the same (a GAN, SAM), let --update-by name the optimizer that counts, or {SAY_ITEMS}"
    )


def transfers_of(block: Block) -> tuple[list[Transfer], list[str]]:
    """Return what a rank sends in an update, and notes on what stays real when others are silent."""
    calls: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    real: dict[str, str] = {}
    others: Counter[str] = Counter()  # bytes of what no strategy calls
    for call in block.calls:
        if call.stays_real:
            real[call.collective] = call.stays_real
        if call.collective not in KINDS:
            others[call.collective] += call.num_bytes * call.count
        elif not call.stays_real:
            calls[KINDS[call.collective]] += call.count
            num_bytes[KINDS[call.collective]] += call.num_bytes * call.count
    updates = len(block.steps)
    transfers = [
        Transfer(kind=kind, calls_per_step=calls[kind] / updates, bytes_per_step=num_bytes[kind] / updates)
        for kind in dict.fromkeys(KINDS.values())
        if calls[kind]
    ]
    notes = [f"{name} stays real: {why}; exposed communication is without it" for name, why in real.items()]
    if any(count % updates for count in calls.values()):
        cure = "a larger --warmup (in a grid warmup_updates) counts more of them"
        notes.append(f"collectives are counted in {updates} updates, which do not call the same; {cure}")
    sent = [f"{name} of {count / updates / 1e6:.4g} MB an update" for name, count in others.items() if count]
    return transfers, [*notes, *(f"{one} is counted in no column" for one in sent)]


def find_mistakes(spec: Spec, block: Block, transfers: Sequence[Transfer]) -> Iterator[str]:
    """Yield what travels in an update without need, or does not, with its bytes, and the cure."""
    needed, seen = block.seen["gradient_bytes"], block.seen
    parameters = next((transfer for transfer in transfers if transfer.kind == "parameters"), None)
    _, batches = batch_of(block)
    passes = spec.grad_accumulation if batches is None else round(batches)
    if not needed:
        return
    within, late = gradients_sent(block, needed * max(1, passes))
    if within + late:
        ratio = (within + late) / needed
        sent = f"{(within + late) / 1e6:.4g} MB an update, of {needed / 1e6:.4g} MB of gradients"
        if passes > 1 and round(ratio) == passes:
            yield f"gradients travel in each of {passes} passes: {sent}; enter no_sync() in all passes but the last"
        elif ratio > MAX_BYTES_RATIO and not seen["repeats_passes"]:
            yield (
                f"gradients travel {ratio:.1f} times: {sent}; see what reduces them twice, or has gradients and no "
                "optimizer"
            )
        elif seen["number_type"] == "bfloat16" and seen["parameter_type"] == "float32" and ratio > 1 / MAX_BYTES_RATIO:
            yield f"gradients travel in fp32 beside bf16 computation: {sent}; sent in bf16 they are half of it"
        if late:
            yield (
                f"{late / 1e6:.4g} MB of gradients an update travel after the backward pass, where nothing hides "
                "them; let DistributedDataParallel send them"
            )
        if spec.device == "cuda" and seen["backend"] == "gloo":
            yield f"gradients of GPUs travel through sockets of Gloo: {sent}; call init_process_group('nccl')"
    elif spec.num_gpus > 1 and bytes_per_update(block, block.calls) < MIN_EXCHANGED_RATIO * needed:
        yield (
            f"none of {needed / 1e6:.4g} MB of gradients travel: each rank trains a model of its own; wrap it in "
            "DistributedDataParallel"
        )
    if not parameters or not set(seen["wrappers"]) & SHARDING_WRAPPERS:
        return
    if parameters.calls_per_step <= 2 * passes:
        yield (
            f"one unit gathers the whole model, {parameters.bytes_per_step / 1e6:.4g} MB an update in "
            f"{parameters.calls_per_step:.3g} calls, which nothing hides; shard its blocks one by one, too"
        )
    elif parameters.bytes_per_step > 2 * MAX_BYTES_RATIO * needed * passes:
        yield (
            f"parameters are gathered {parameters.bytes_per_step / needed:.1f} times an update, "
            f"{parameters.bytes_per_step / 1e6:.4g} MB; twice a pass is enough"
        )


def gradients_sent(block: Block, most: float) -> tuple[float, float]:
    """Return the bytes of gradients that travel in an update within the backward pass, and after it.

    Groups of shards scatter them and then reduce their parts: the larger counts. Other tensors are reduced in the
    forward pass, too; outside the backward pass, what is much less or more than `most` is no gradient.
    """
    reduced = [call for call in block.calls if KINDS.get(call.collective) == "gradients" and not call.stays_real]
    within = [call for call in reduced if call.in_backward]
    names = {call.collective for call in within}
    of_each = [bytes_per_update(block, [call for call in within if call.collective == name]) for name in names]
    late = bytes_per_update(block, [call for call in reduced if not call.in_backward])
    is_late = MIN_LATE_BYTES_RATIO * block.seen["gradient_bytes"] < late <= MAX_BYTES_RATIO * most
    return max(of_each, default=0.0), late if is_late else 0.0


def bytes_per_update(block: Block, calls: Iterable[CountedCall]) -> float:
    return sum(call.num_bytes * call.count for call in calls) / len(block.steps)


def flops_of(spec: Spec, block: Block) -> FlopCount:
    """Return the FLOPs of a sample: as stated, else those of one update in the warm-up."""
    if spec.stated_flops_per_sample is not None:
        return FlopCount(round(spec.stated_flops_per_sample), "FLOPs as stated")
    if block.flops is None:
        causes = {"is_compiled": "the script compiles", "replays_graphs": "the script replays CUDA graphs"}
        why = next((words for key, words in causes.items() if block.seen[key]), "the script has modes of its own")
        return FlopCount(None, f"FLOPs not counted: {why}; --flops-per-sample states them")
    flops, items, without_formula, sizes, passes = block.flops
    mean_passes = block.all_passes * block.share / len(block.steps)
    if abs(passes - mean_passes) > MAX_PASSES_DIFFERENCE * mean_passes:
        why = f"the update that was counted makes {passes} passes, and the mean one {mean_passes:.3g}"
        return FlopCount(None, f"FLOPs not counted: {why}; --flops-per-sample states them")
    samples = items or num_samples_in(sizes, spec.counts_batches) or spec.global_batch_size / spec.num_gpus
    return flops_of_sample(flops / samples, without_formula)


def build_epoch(number: int, block: Timed, spec: Spec) -> Epoch:
    """Return a block as an epoch of the record."""
    asked = len(block.ranks[0].steps) * spec.global_batch_size
    samples = [samples_of(part, spec.counts_batches) for part in block.ranks]
    known = [count for count in samples if count is not None]
    merit = block.ranks[0].merit
    return Epoch(
        epoch=number,
        ranks=tuple(build_rank(rank, part, samples[rank]) for rank, part in enumerate(block.ranks)),
        num_updates=block.ranks[0].updates,
        num_timed_updates=len(block.ranks[0].steps),
        num_samples=sum(known) if len(known) == len(block.ranks) else asked,
        step_times_ns=tuple(block.ranks[0].steps),
        merit=merit[0] if merit else None,
    )


def samples_of(block: Block, counts_batches: bool) -> int | None:
    """Return what a rank has trained on in the steps that count: as the script says, else by its loader."""
    counted = num_samples_in(block.sizes, counts_batches) if block.items is None else block.items
    return round(counted * block.share) or None


def num_samples_in(sizes: Sequence[tuple[int, float]], counts_batches: bool) -> float:
    """Return the samples of batches, given as sizes and their numbers; or the number of batches."""
    return sum((1 if counts_batches else size) * count for size, count in sizes)


def build_rank(rank: int, block: Block, num_samples: int | None) -> RankEpoch:
    return RankEpoch(
        rank=rank,
        epoch_time_ns=block.time,
        compute_time_ns=None if block.data is None else max(0, round(block.time - block.data * block.share)),
        optimizer_ns=None if block.optimizer is None else round(block.optimizer * block.share),
        data_time_ns=None if block.data is None else round(block.data * block.share),
        loader_wait_ns=None if block.wait is None else round(block.wait * block.share),
        num_samples=num_samples,
        started_unix_ns=block.started,
    )


def build_memory(rank: int, found: dict[str, Any]) -> DeviceMemory:
    return DeviceMemory(
        rank=rank,
        device=found["device"],
        peak_allocated_bytes=found["allocated"],
        usable_bytes=found.get("usable"),
        peak_reserved_bytes=found.get("reserved"),
        num_alloc_retries=found.get("retries"),
    )


def precision_of(number_type: str) -> str | None:
    """Return the precision as a record names it, from the type of numbers that the script is seen to compute in."""
    return PRECISIONS.get(number_type, number_type) or None
