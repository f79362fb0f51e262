"""One next step for a point: what most of its time is lost to, and what to change, by a table of rules.

A rule names a change only if no measurement of the experiment contradicts it: where the changed point was timed too,
it must be faster. All functions are pure. Shares are of a point's time.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pipeline.experiment.axis_groups import BASELINE_MAY_DIFFER, POOLED_AXES, alike_key
from pipeline.experiment.spec import Spec
from pipeline.figures.compute_rate import find_peak
from pipeline.figures.energy import MIN_CLOCK_LOSS
from pipeline.figures.intervals import Estimate
from pipeline.figures.late_rank import MIN_LATE_SHARE
from pipeline.figures.loader import MAX_DATA_SHARE
from pipeline.figures.pooling import PooledPoint
from pipeline.plan.axes import STRATEGY_AXES
from pipeline.plan.strategies import STRATEGIES

NOTHING_FOUND, AT_MOST = "none found", "at most"
EFFORT_AXES = ("epochs", "windows", *POOLED_AXES)
MIN_GAIN = 1.02  # of a changed point that was timed too, as a ratio of times
LOW_MFU = 0.5  # a step that is not compiled and reaches less of the GPU's peak may gain by fused kernels
MIN_BATCH_RATIO = 2  # of two batches from which the fixed cost of a step is taken


class Change(NamedTuple):
    """One thing to change: its words, the axis, the value there (None: a larger one), and axes that may change too."""

    words: str
    axis: str
    value: str | bool | None = None
    others: tuple[str, ...] = ()

    def rank(self, spec: Spec) -> int:
        """Return a number that is larger on a point with the change than on one without it."""
        value = getattr(spec, self.axis)
        return value or 0 if self.value is None else int(value == self.value)

    def is_made(self, own: Spec, other: Spec) -> bool:
        """True if the second point has the change and the first does not."""
        return self.rank(own) < self.rank(other)


class Rule(NamedTuple):
    """A limit, the share of time from which it counts, how that is measured, and the changes that help."""

    limit: str
    threshold: float
    measured_by: str
    changes: tuple[Change, ...] = ()
    otherwise: str = ""  # the next step of a rule without changes


INPUT = Change("input=gpu", "input", "gpu", ("num_workers",))
WORKERS = Change("more loader workers", "num_workers")
GRAPH = Change("execution=graph", "execution", "graph")
COMPILE = Change("execution=compile", "execution", "compile")
COMPILED_GRAPH = Change("execution=compiled_graph", "execution", "compiled_graph")
LOCAL_BATCHNORM = Change("sync_batchnorm=false", "sync_batchnorm", False)
BATCH = Change("a larger batch", "batch_size_per_gpu")
ACCUMULATION = Change("grad_accumulation=2", "grad_accumulation", None, ("num_samples",))
COMPRESSION = Change("gradient_compression=bf16", "gradient_compression", "bf16")
DDP = Change("strategy=ddp", "strategy", "ddp", STRATEGY_AXES)
NEVER = Change("reshard=never", "reshard", "never")

DATAPARALLEL = Rule("DataParallel", 0, "the strategy is dp", (DDP,))
WAITING = Rule("waiting for data", MAX_DATA_SHARE, "data time and batch wait over the epoch time", (INPUT, WORKERS))
POWER = Rule(
    "power",
    MIN_CLOCK_LOSS,
    "1 - clock over its maximum, where the power limit alone lowered it",
    (),
    "none, since the GPU is at its power limit",
)
UNEXPLAINED = Rule(
    "several GPUs", 0.1, "1 - efficiency, where communication was not measured", (), "measure=communication"
)
RULES = (
    DATAPARALLEL,
    WAITING,
    Rule(
        "launches",
        0.25,
        "in a profiled step the GPU neither computes nor waits for communication; else the fixed cost of an eager step",
        (GRAPH, NEVER, BATCH),
    ),
    Rule("a small batch", 0.25, "the fixed cost of another step", (BATCH,)),
    Rule("the wrapper", 0.1, "wrapper cost over the step", (NEVER, DDP, BATCH)),
    Rule("communication", 0.05, "exposed communication over the step", (BATCH, ACCUMULATION, COMPRESSION)),
    Rule(
        "SyncBatchNorm",
        0.1,
        "collectives of batch statistics in profiled steps over the step, or what the step without them saves",
        (LOCAL_BATCHNORM,),
    ),
    Rule(
        "a late rank",
        MIN_LATE_SHARE,
        "the wait of the others for it in profiled all-reduces, over the step",
        (),
        "{late_rank}",
    ),
    Rule("full memory", 0, "the allocator freed its cache and tried again", (), "a smaller batch, or more GPUs"),
    Rule(
        "low MFU",
        0,
        f"the step is not compiled, and has an MFU below {100 * LOW_MFU:.0f} % or was faster compiled",
        (COMPILE, COMPILED_GRAPH),
    ),
    POWER,
    UNEXPLAINED,
)
"""DataParallel comes first, then waiting for data: a faster step would only wait longer. Of the others the largest
share wins, then come those without a share, in this order, and last what has no cure. docs/advice.md has this table.
"""
PLACES = {DATAPARALLEL: 0, WAITING: 1, POWER: 3, UNEXPLAINED: 4}  # 2: those between, by their share
OF_ONE_GPU = ("launches", "a small batch")  # their shares, where they follow from other points


class Evidence(NamedTuple):
    """The figures of a point by which rules choose. Times are of a sample, shares those of its limits in the time.

    `compute_time_s` is without the wait for data. `alone_time_s` is that of the bare model on one GPU with the same
    batch, if the point measured that too. `late_rank` is what to do about a late rank.
    `is_untold`: a measurement of communication gives no share here.
    """

    point: PooledPoint
    time_s: float | None
    shares: Mapping[str, float]
    compute_time_s: float | None = None
    alone_time_s: float | None = None
    late_rank: str = ""
    is_untold: bool = False


class Advice(NamedTuple):
    """The next step of a point, and the limit that it is taken against, as columns; the share is None without one.

    `limit_share_is` "at most": it was measured on one GPU, so on several it is at most this.
    """

    next_step: str
    limit: str | None = None
    limit_share: float | None = None
    limit_share_is: str | None = None


class Tried(NamedTuple):
    """What is known of the points with one change: the shortest time, and if one of them ran out of memory."""

    time_s: float | None = None
    is_oom: bool = False

    def beside(self, other: "Tried") -> "Tried":
        """Return what is known of the points of both."""
        times_s = [time_s for time_s in (self.time_s, other.time_s) if time_s is not None]
        return Tried(min(times_s, default=None), self.is_oom or other.is_oom)


class Found:
    """The evidence of the points of an experiment, indexed: the next step of each needs a look-up, no pass over all."""

    def __init__(self, found: Sequence[Evidence]) -> None:
        changes = {BATCH: None} | {change: None for rule in RULES for change in rule.changes}
        self._tried = {change: index_change(change, found) for change in changes}
        on_one = (own for own in reversed(found) if own.point.spec.num_gpus == 1 and own.time_s)
        self._on_one = {(own.point.gpu, alike_key(own.point.spec, BASELINE_MAY_DIFFER)): own for own in on_one}
        self._batch_times = index_batches(found)
        self._batch_times_alone = index_batches([own._replace(compute_time_s=own.alone_time_s) for own in found])

    def tried(self, change: Change, own: PooledPoint) -> Tried:
        """Return what is known of the points that have this change, and are alike but for that and their length."""
        ranks, results = self._tried[change].get(alike(change, own), NO_RESULTS)
        place = bisect.bisect_right(ranks, change.rank(own.spec))
        return results[place] if place < len(ranks) else Tried()

    def baseline(self, own: PooledPoint) -> Evidence | None:
        """Return the first alike point on one GPU that has a time."""
        return self._on_one.get((own.gpu, alike_key(own.spec, BASELINE_MAY_DIFFER)))

    def larger_batch(self, own: PooledPoint, *, is_alone: bool = False) -> tuple[float, float] | None:
        """Return the ratio to the next batch that is at least twice as large, and the computation of a sample there.

        With `is_alone` that of the bare model on one GPU.
        """
        sizes, times_s = (self._batch_times_alone if is_alone else self._batch_times).get(alike(BATCH, own), NO_TIMES)
        place = bisect.bisect_left(sizes, MIN_BATCH_RATIO * own.spec.batch_size_per_gpu)
        return (sizes[place] / own.spec.batch_size_per_gpu, times_s[place]) if place < len(sizes) else None


NO_RESULTS: tuple[list[int], list[Tried]] = [], []
NO_TIMES: tuple[list[int], list[float]] = [], []


def alike(change: Change, point: PooledPoint) -> tuple[object, ...]:
    """Return the key of the points that differ in the axes of a change and in how long they ran alone."""
    return point.gpu, alike_key(point.spec, (*EFFORT_AXES, change.axis, *change.others))


def index_change(change: Change, found: Sequence[Evidence]) -> dict[object, tuple[list[int], list[Tried]]]:
    """Return, by the key of `alike`, the ranks of a change in rising order, and what is known from each of them on."""
    groups: dict[object, dict[int, Tried]] = {}
    for own in found:
        by_rank, rank = groups.setdefault(alike(change, own.point), {}), change.rank(own.point.spec)
        by_rank[rank] = by_rank.get(rank, Tried()).beside(Tried(own.time_s, own.point.status == "oom"))
    index = {}
    for key, by_rank in groups.items():
        ranks = sorted(by_rank)
        from_last = itertools.accumulate((by_rank[rank] for rank in reversed(ranks)), Tried.beside)
        index[key] = ranks, [*from_last][::-1]
    return index


def index_batches(found: Sequence[Evidence]) -> dict[object, tuple[list[int], list[float]]]:
    """Return, by the key of `alike`, the batch sizes in rising order, and the computation of a sample at each."""
    groups: dict[object, dict[int, float]] = {}
    for own in found:
        if own.compute_time_s is not None:
            times_s, size = groups.setdefault(alike(BATCH, own.point), {}), own.point.spec.batch_size_per_gpu
            times_s[size] = min(own.compute_time_s, times_s.get(size, own.compute_time_s))
    return {key: (sorted(times_s), [times_s[size] for size in sorted(times_s)]) for key, times_s in groups.items()}


def advise(own: Evidence, found: Found) -> Advice | None:
    """Return the next step of a point beside all points of its experiment.

    None if it has no time. Of a point that was measured elsewhere the strategy alone is known to be changeable.
    """
    if own.time_s is None:
        return None
    shares = {**derived_shares(own, found), **own.shares}
    rules = [rule for rule in RULES if rule.limit in shares and shares[rule.limit] >= rule.threshold]
    if not any(record.measured for record in own.point.ok_records):
        rules = [rule for rule in rules if rule is DATAPARALLEL]
        if not rules:
            return None
    for rule in sorted(rules, key=lambda rule: (PLACES.get(rule, 2), -shares[rule.limit])):
        if step := describe_changes(rule.changes, own, found) or rule.otherwise.format(late_rank=own.late_rank):
            is_derived = rule.limit in OF_ONE_GPU and rule.limit not in own.shares
            share = shares[rule.limit] or None
            if share and is_derived and own.point.spec.num_gpus > 1:
                return Advice(step, rule.limit, Estimate(share, noise=share), AT_MOST)  # shown as "<"
            return Advice(step, rule.limit, share)
    return Advice(NOTHING_FOUND)


def describe_changes(changes: Sequence[Change], own: Evidence, found: Found) -> str:
    """Return the changes that may help, with what they gain where that was measured; "" if none may.

    A change that was measured to gain less than MIN_GAIN, or that ran out of memory, is left out.
    """
    said = []
    for change in changes:
        tried = found.tried(change, own.point)
        if tried.time_s is not None and own.time_s:
            if (gain := own.time_s / tried.time_s) >= MIN_GAIN:
                said.append(f"{change.words} ({gain:.3g}x)")
        elif is_possible(change, own.point) and not tried.is_oom:
            said.append(change.words)
    return " or ".join(said)


def is_measured_faster(change: Change, own: Evidence, found: Found) -> bool:
    """True if the changed point was timed too, and is faster."""
    time_s = found.tried(change, own.point).time_s
    return bool(own.time_s and time_s and own.time_s / time_s >= MIN_GAIN)


def is_changed_by(change: Change, own: PooledPoint, other: PooledPoint) -> bool:
    """True if another point differs from a point in this change alone, and in how long it ran."""
    return alike(change, own) == alike(change, other) and change.is_made(own.spec, other.spec)


def is_possible(change: Change, point: PooledPoint) -> bool:
    """True if the changed point would be a point that may be measured on this GPU."""
    if change is COMPRESSION and find_peak(point.gpu, "fp16") and not find_peak(point.gpu, "bf16"):
        return False  # before Ampere
    spec = point.spec
    if getattr(spec, change.axis) == change.value or (change is COMPILE and spec.is_captured):
        return False
    value = change.value if change.value is not None else 2 * (getattr(spec, change.axis) or 1)
    samples = {"num_samples": 4 * spec.global_batch_size}  # a multiple of the changed update
    try:
        Spec(**{**msgspec.structs.asdict(spec), **samples, change.axis: value})
    except ValueError:
        return False
    return True


def derived_shares(own: Evidence, found: Found) -> dict[str, float]:
    """Return the shares that follow from other points: the fixed cost of a step, and what several GPUs cost.

    The fixed cost would not grow with the batch: launches, the optimizer, kernels too small for the GPU. On several
    GPUs it would hold communication too, so it is at most the share on one GPU. DataParallel has none of the two.
    """
    spec = own.point.spec
    if STRATEGIES[spec.strategy].uses_threads:
        return {}
    shares, fixed = {}, fixed_share(own, found)
    if any(is_measured_faster(change, own, found) for change in (COMPILE, COMPILED_GRAPH)):
        shares["low MFU"] = 0.0
    if spec.num_gpus > 1:
        one = found.baseline(own.point)
        of_one = fixed_share(one or own._replace(compute_time_s=own.alone_time_s), found, is_alone=one is None)
        fixed = None if fixed is None or of_one is None else min(fixed, of_one)
        can_be_measured = "communication" not in own.shares and not own.is_untold
        if one and one.time_s and own.time_s and can_be_measured:
            shares["several GPUs"] = 1 - one.time_s / own.time_s / spec.num_gpus
    if fixed is not None:
        shares["launches" if is_possible(GRAPH, own.point) and not spec.is_captured else "a small batch"] = fixed
    return shares


def fixed_share(own: Evidence, found: Found, *, is_alone: bool = False) -> float | None:
    """Return the fixed share of a step, by a line through it and the next batch that is at least twice as large."""
    known = found.larger_batch(own.point, is_alone=is_alone)
    if known is None or not own.compute_time_s:
        return None
    ratio, time_s = known
    growth = (ratio * time_s / own.compute_time_s - 1) / (ratio - 1)  # of the step, for as many samples again
    return min(max(1 - growth, 0.0), 1.0)
