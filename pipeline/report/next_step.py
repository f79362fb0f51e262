"""One next step for a point: what most of its time is lost to, and what to change, by a table of rules.

A rule names a change only if no measurement of the experiment contradicts it: where the changed point was timed too,
it must be faster. All functions are pure. Shares are of a point's time.
"""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from pipeline.figures.epoch_figures import (
    MAX_DATA_SHARE,
    MIN_CLOCK_LOSS,
    clock_notes,
    compute_rate_figures,
    find_peak,
    is_power_limited,
    longest_data_share,
)
from pipeline.figures.exposed_communication import (
    PointsByTraining,
    busy_share,
    communications_of,
    exposed_time,
    group_by_training,
    is_within_noise,
    match_measured,
    median_step_time,
    profiled_transfer_s,
    training_key,
    untold_notes,
    whole_step,
    wrapper_time,
)
from pipeline.figures.intervals import Estimate, estimate, time_ratio_interval
from pipeline.figures.links import link_problems
from pipeline.figures.pooling import PooledPoint, group_pairs, median_window_s
from pipeline.figures.straggler import MIN_LATE_SHARE, find_late_rank
from pipeline.plan.axes import STRATEGY_AXES
from pipeline.plan.model_names import is_image_model
from pipeline.plan.spec import BASELINE_MAY_DIFFER, POOLED_AXES, Spec, alike_key
from pipeline.plan.strategies import STRATEGIES
from pipeline.report import claims
from pipeline.report.table import Column, Row, Rows, View, sort_rows

NOTHING_FOUND, AT_MOST = "none found", "at most"
ALIKE_MAY_DIFFER = ("epochs", "windows", *POOLED_AXES)
MIN_GAIN = 1.02  # of a changed point that was timed too, as a ratio of times
LOW_MFU = 0.5  # a step that is not compiled and reaches less of the GPU's peak may gain by fused kernels
MAX_CHANGES = 3  # of a next step: the first ones, in the order of the limit
MIN_BATCH_RATIO = 2  # of two batches from which the fixed cost of a step is taken


class Change(NamedTuple):
    """One thing to change: its words, the axis, the value there (None: a larger one), and axes that may change too.

    `is_guess`: it is named as "not measured here" where it was not, since it helps some models alone.
    """

    words: str
    axis: str
    value: str | bool | None = None
    others: tuple[str, ...] = ()
    is_guess: bool = False

    @property
    def option(self) -> str:
        """The value of --set that makes the change; "" if it depends on the point."""
        return self.words if self.words.startswith(f"{self.axis}=") else ""

    def rank(self, spec: Spec) -> int:
        """Return a number that is larger on a point with the change than on one without it."""
        value = getattr(spec, self.axis)
        return value or 0 if self.value is None else int(value == self.value)


class Rule(NamedTuple):
    """A limit, the share of time from which it counts, how that is measured, and the changes that help."""

    limit: str
    threshold: float
    measured_by: str
    changes: tuple[Change, ...] = ()
    otherwise: str = ""  # the next step of a rule without changes
    verdict: str = ""  # on an experiment that this limits in most configurations


WORKERS = Change("more loader workers", "num_workers")
GRAPH = Change("execution=graph", "execution", "graph")
COMPILE = Change("execution=compile", "execution", "compile")
COMPILED_GRAPH = Change("execution=compiled_graph", "execution", "compiled_graph")
LOCAL_BATCHNORM = Change("sync_batchnorm=false", "sync_batchnorm", False)
BATCH = Change("a larger batch", "batch_size_per_gpu")
COMPRESSION = Change("gradient_compression=bf16", "gradient_compression", "bf16")
DDP = Change("strategy=ddp", "strategy", "ddp", STRATEGY_AXES)
NEVER = Change("reshard=never", "reshard", "never")
GATHERS = Change("param_dtype=bf16", "param_dtype", "bf16", is_guess=True)
BLOCKS = Change("compile=blocks", "compile", "blocks", is_guess=True)

DATAPARALLEL = Rule(
    "DataParallel",
    0,
    "the strategy is dp",
    (DDP,),
    verdict="DataParallel is the bottleneck: DDP trains the same model with a process for each $GPU.",
)
WAITING = Rule(
    "waiting for data",
    MAX_DATA_SHARE,
    "data time and batch wait over the epoch time",
    (Change("input=gpu", "input", "gpu", ("num_workers",)), WORKERS),
    verdict="Data loading is the bottleneck.",
)
POWER = Rule(
    "power",
    MIN_CLOCK_LOSS,
    "1 - clock over its maximum, where the power limit alone lowered it",
    (),
    "none, since the GPU is at its power limit",
    verdict="The $GPUs are at their power limit, so this is as fast as they get.",
)
NEEDLESS = Rule(
    "needless communication",
    0,
    "exposed communication over the step, where the collectives of a script are more than its parameters need",
    (),
    "see the note",
    verdict="The script sends what it need not.",
)
UNEXPLAINED = Rule(
    "several GPUs", 0.1, "1 - efficiency, where communication was not measured", (), "measure=communication"
)
WRAPPER = Rule(
    "the wrapper",
    0.1,
    "wrapper cost over the step",
    (GATHERS, NEVER, DDP, BATCH),
    verdict="The overhead of the strategy is the bottleneck.",
)
RULES = (
    DATAPARALLEL,
    NEEDLESS,
    WAITING,
    Rule(
        "launches",
        0.25,
        "in a profiled step the GPU neither computes nor waits for communication; else the fixed cost of an eager step",
        (GRAPH, BLOCKS, NEVER, BATCH),
        verdict="The host is the bottleneck: the $GPUs wait for kernel launches.",
    ),
    Rule(
        "a small batch",
        0.25,
        "the fixed cost of another step",
        (BATCH,),
        verdict="The batch is the bottleneck: it is too small to keep a $GPU busy.",
    ),
    WRAPPER,
    Rule(
        "a slow link",
        0.05,
        "exposed communication over the step, where the record names a faster way between the ranks",
        (),
        "NCCL_SOCKET_IFNAME of a faster interface, leave out NCCL_IB_DISABLE, or load nvidia_peermem",
        verdict="The ranks talk over a slower link than they could.",
    ),
    Rule(
        "communication",
        0.05,
        "exposed communication over the step",
        (BATCH, Change("more passes an update", "grad_accumulation", None, ("num_samples",)), COMPRESSION, GATHERS),
        verdict="Communication is the bottleneck.",
    ),
    Rule(
        "SyncBatchNorm",
        0.1,
        "collectives of batch statistics in profiled steps over the step, or what the step without them saves",
        (LOCAL_BATCHNORM,),
        verdict="SyncBatchNorm is the bottleneck.",
    ),
    Rule(
        "a late rank",
        MIN_LATE_SHARE,
        "the wait of the others for it in profiled all-reduces, over the step",
        (),
        "exclude its node, or look at its GPU",
        verdict="One rank is slower than the others, and they wait for it.",
    ),
    Rule("full memory", 0, "the allocator freed its cache and tried again", (), "a smaller batch, or more GPUs"),
    Rule(
        "low MFU",
        0,
        f"the step is not compiled, and has an MFU below {100 * LOW_MFU:.0f} % or was faster compiled",
        (COMPILE, COMPILED_GRAPH, BLOCKS),
    ),
    POWER,
    UNEXPLAINED,
)
"""DataParallel comes first. Of the others the largest share wins, then come those without a share, in this order, and
last what has no cure. docs/advice.md has this table.
"""
PLACES = {DATAPARALLEL: 0, POWER: 2, UNEXPLAINED: 3}  # 1: those between, by their share
OF_ONE_GPU = ("launches", "a small batch")  # their shares, where they follow from other points


class Evidence(NamedTuple):
    """The figures of a point by which rules choose. Times are of a sample, shares those of its limits in the time.

    `compute_time_s` is without the wait for data. `alone_time_s` is that of the bare model on one GPU with the same
    batch, if the point measured that too. `remedies` are next steps by limit, where records say more than the rule.
    `is_untold`: a measurement of communication gives no share here.
    """

    point: PooledPoint
    time_s: Estimate | None
    shares: Mapping[str, float]
    compute_time_s: float | None = None
    alone_time_s: float | None = None
    remedies: Mapping[str, str] = MappingProxyType({})
    is_untold: bool = False


class NextStep(str):
    """A next step in words, with the gain of each change: the ratio of times, None where it was not timed too."""

    gains: Mapping[Change, float | None]

    def __new__(cls, words: str, gains: Mapping[Change, float | None] = MappingProxyType({})) -> "NextStep":
        step = super().__new__(cls, words)
        step.gains = gains
        return step

    @property
    def plain(self) -> str:
        """The words without the gains."""
        return " or ".join(change.words for change in self.gains) or str(self)

    @property
    def sentence(self) -> str:
        """The words where no legend explains the gains."""
        return with_gains({change: [gain] if gain else [] for change, gain in self.gains.items()}) or str(self)


def with_gains(gains: Mapping[Change, Sequence[float]]) -> str:
    """Return changes in words, each with its measured ratios of times; "" without changes."""
    said = []
    for change, own in gains.items():
        ends = dict.fromkeys(f"{gain:.3g}" for gain in (min(own), max(own))) if own else ()
        how = f" (measured here: {' to '.join(ends)} times as fast)" if ends else ""
        said.append(change.words + (how or " (not measured here)" * any(gains.values())))
    return " or ".join(said)


class Advice(NamedTuple):
    """The next step of a point, and the limit that it is taken against, as columns; the share is None without one.

    `limit_share_is` "at most": it was measured on one GPU, so on several it is at most this.
    """

    next_step: NextStep
    limit: str | None = None
    limit_share: float | None = None
    limit_share_is: str | None = None


class Found:
    """The evidence of the points of an experiment, indexed: the next step of each needs a look-up, no pass over all."""

    def __init__(self, found: Sequence[Evidence]) -> None:
        changes = {change for rule in RULES for change in rule.changes}
        self._alike = {change: group_pairs((alike(change, own.point), own) for own in found) for change in changes}
        on_one = (own for own in reversed(found) if own.point.spec.num_gpus == 1 and own.time_s)
        self._on_one = {(own.point.gpu, alike_key(own.point.spec, BASELINE_MAY_DIFFER)): own for own in on_one}

    def made(self, change: Change, own: PooledPoint) -> list[Evidence]:
        """Return the points that have this change, and are alike but for that and their length."""
        others = self._alike[change].get(alike(change, own), [])
        return [other for other in others if change.rank(own.spec) < change.rank(other.point.spec)]

    def gain(self, change: Change, own: Evidence) -> Estimate | None:
        """Return the ratio of times to the fastest point with this change; None where none was timed too."""
        times_s = [other.time_s for other in self.made(change, own.point) if other.time_s is not None]
        if not own.time_s or not times_s:
            return None
        fastest_s = min(times_s)
        return estimate(own.time_s / fastest_s, time_ratio_interval(own.time_s, fastest_s))

    def baseline(self, own: PooledPoint) -> Evidence | None:
        """Return the first alike point on one GPU that has a time."""
        return self._on_one.get((own.gpu, alike_key(own.spec, BASELINE_MAY_DIFFER)))

    def larger_batch(self, own: PooledPoint, *, is_alone: bool = False) -> tuple[float, float] | None:
        """Return the ratio to the next batch that is at least twice as large, and the computation of a sample there.

        With `is_alone` that of the bare model on one GPU.
        """
        others = self._alike[BATCH].get(alike(BATCH, own), [])
        times_s = ((other.point.spec, other.alone_time_s if is_alone else other.compute_time_s) for other in others)
        ratios = ((spec.batch_size_per_gpu / own.spec.batch_size_per_gpu, time_s) for spec, time_s in times_s)
        return min(((ratio, time_s) for ratio, time_s in ratios if time_s and ratio >= MIN_BATCH_RATIO), default=None)


def alike(change: Change, point: PooledPoint) -> tuple[object, ...]:
    """Return the key of the points that differ in the axes of a change and in how long they ran alone."""
    return point.gpu, alike_key(point.spec, (*ALIKE_MAY_DIFFER, change.axis, *change.others))


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
    for rule in sorted(rules, key=lambda rule: (PLACES.get(rule, 1), -shares[rule.limit])):
        step = describe_changes(rule.changes, own, found) or NextStep(own.remedies.get(rule.limit, rule.otherwise))
        if step:
            is_derived = rule.limit in OF_ONE_GPU and rule.limit not in own.shares
            share = shares[rule.limit] or None
            if share and is_derived and own.point.spec.num_gpus > 1:
                return Advice(step, rule.limit, Estimate(share, noise=share), AT_MOST)  # shown as "<"
            return Advice(step, rule.limit, share)
    return Advice(NextStep(NOTHING_FOUND))


def describe_changes(changes: Sequence[Change], own: Evidence, found: Found) -> NextStep:
    """Return the changes that may help, with what they gain where that was measured; "" if none may.

    A change that was measured and is not shown to be faster, or that ran out of memory, is left out.
    """
    gains: dict[Change, float | None] = {}
    for change in changes:
        gain = found.gain(change, own)
        is_oom = any(other.point.status == "oom" for other in found.made(change, own.point))
        is_open = gain is None and not is_oom and is_possible(change, own.point)
        if is_open or is_faster(gain):
            gains[change] = gain
    gains = dict(itertools.islice(gains.items(), MAX_CHANGES))
    said = (f"({gain:.3g}x)" if gain else "(not measured here)" * change.is_guess for change, gain in gains.items())
    words = (f"{change.words} {how}".rstrip() for change, how in zip(gains, said, strict=True))
    return NextStep(" or ".join(words), gains)


def is_faster(gain: Estimate | None) -> bool:
    """True if a gain is at least MIN_GAIN and its interval lies above 1; without one it must exceed MAX_NOISE."""
    if gain is None or gain < MIN_GAIN:
        return False
    return gain > 1 + claims.MAX_NOISE if gain.low is None else gain.low > 1


def is_possible(change: Change, point: PooledPoint) -> bool:
    """True if the changed point would be a point that may be measured on this GPU."""
    if change is COMPRESSION and find_peak(point.gpu, "fp16") and not find_peak(point.gpu, "bf16"):
        return False  # before Ampere
    spec = point.spec
    if change is GATHERS and is_image_model(spec.model):
        return False  # most have BatchNorm
    if change is BLOCKS and spec.execution_problem("compile") is None:
        return False  # that compiles more
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
    if any(is_faster(found.gain(change, own)) for change in (COMPILE, COMPILED_GRAPH, BLOCKS)):
        shares["low MFU"] = 0.0
    if spec.num_gpus > 1:
        one = found.baseline(own.point)
        of_one = fixed_share(one or own._replace(compute_time_s=own.alone_time_s), found, is_alone=one is None)
        fixed = None if fixed is None or of_one is None else min(fixed, of_one)
        can_be_measured = "communication" not in own.shares and not own.is_untold
        if one and one.time_s and own.time_s and can_be_measured:
            shares["several GPUs"] = 1 - one.time_s / own.time_s / spec.num_gpus
    if fixed is not None and own.compute_time_s and own.time_s:
        fixed *= own.compute_time_s / own.time_s  # of a step without the wait for data
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


Advices = dict[int, dict[str, Any]]
"""The next step by the id of a pooled point, of those that have one, by column."""


def advise_all(
    points: Sequence[PooledPoint], measured: Sequence[PooledPoint], peak_tflops: float | None = None
) -> Advices:
    """Return the next step of points with epochs, and of points that measured communication."""
    by_training = group_by_training(measured)
    groups = (
        [epoch_evidence(point, by_training, peak_tflops) for point in points],
        [step_evidence(point, by_training) for point in measured],
    )
    indexed = [(group, Found(group)) for group in groups]
    advices = [(own.point, advise(own, found)) for group, found in indexed for own in group]
    return {id(point): advice._asdict() for point, advice in advices if advice is not None}


def epoch_evidence(point: PooledPoint, measured: PointsByTraining, peak_tflops: float | None = None) -> Evidence:
    """Return what is known of the epochs of a point, with the shares of the point that measured its communication."""
    time_s, match = point.epoch_time, match_measured(point, measured)
    if not time_s:
        return Evidence(point, None, {})
    num_samples, shares, step = point.spec.num_samples, dict[str, float](), Evidence(point, None, {})
    untold = untold_notes(point, measured)
    if match and not untold:
        step = step_evidence(match, measured)
        of_epoch = (step.time_s or 0.0) * point.spec.global_batch_size * point.steps_per_epoch / time_s
        shares = {limit: share * of_epoch for limit, share in step.shares.items()}
    compute_s, remedies = point.median(median_window_s("compute_time_ns")), dict(step.remedies)
    if point.spec.input == "dataloader" or point.spec.script:
        shares[WAITING.limit] = longest_data_share(point) or 0.0
    if point.spec.script:
        remedies[WAITING.limit] = "more workers in the script's DataLoader"
    if compute_s is None and point.spec.input != "dataloader":
        compute_s = time_s
    mfu = compute_rate_figures(point, peak_tflops).get("mfu")
    if mfu is not None and mfu < LOW_MFU and point.spec.execution in ("eager", "graph"):
        shares["low MFU"] = 0.0
    per_sample_s = None if compute_s is None else compute_s / num_samples
    shares |= other_limits(point)
    return Evidence(point, time_s.over(num_samples), shares, per_sample_s, remedies=remedies, is_untold=bool(untold))


def step_evidence(point: PooledPoint, measured: PointsByTraining) -> Evidence:
    """Return what is known of the steps of a communication point, beside all of them."""
    found = communications_of(point.ok_records)
    step = median_step_time(found, whole_step(found))
    if not step:
        return Evidence(point, None, {})
    if point.own_collectives:
        return Evidence(point, step.over(point.spec.global_batch_size), other_limits(point))
    shares, remedies = dict[str, float](), dict[str, str]()
    exposed, noise_s = exposed_time(found)
    if exposed is not None:
        shares["communication"] = 0.0 if is_within_noise(exposed, noise_s) else max(exposed / step, 0.0)
    problems = [problem for record in point.ok_records for problem in link_problems(record.environment)]
    if problems and "communication" in shares:
        shares["a slow link"], remedies["a slow link"] = shares["communication"], problems[0].cure
    if point.spec.sync_batchnorm:
        shares["SyncBatchNorm"] = statistics_share(point, measured, step)
    busy = busy_share(found, step)
    if busy is not None and not point.spec.is_captured:
        waits = shares.get("communication", 0.0) + shares.get("SyncBatchNorm", 0.0)
        shares["launches"] = max(1 - busy - waits, 0.0)
    wrapper = wrapper_time(found)
    if wrapper is not None:
        shares["the wrapper"] = wrapper / step - shares.get("SyncBatchNorm", 0.0)
    late = find_late_rank(point.ok_records)
    if late is not None:
        shares["a late rank"], remedies["a late rank"] = late.wait_s / step, late.remedy
    samples, plain = point.spec.global_batch_size, median_step_time(found, "plain")
    alone_s = plain * point.spec.num_gpus / samples if plain else None
    if mistakes := [mistake for part in found for mistake in part.mistakes]:
        shares[NEEDLESS.limit], remedies[NEEDLESS.limit] = shares.get("communication", 0.0), mistakes[0]
    return Evidence(point, step.over(samples), shares | other_limits(point), step / samples, alone_s, remedies)


def statistics_share(point: PooledPoint, measured: PointsByTraining, step_s: float) -> float:
    """Return the share of SyncBatchNorm in a step: its collectives in the profile, or what the step without it saves.

    The larger counts. A collective takes as long as the mean rank is in it; the profile does not see what each of them
    costs the host. They hide behind nothing: the next layer needs their result.
    """
    found = communications_of(point.ok_records)
    parts_s = (profiled_transfer_s(found, ["batchnorm_statistics"], waiting) for waiting in (False, True))
    in_profile_s = sum(part_s or 0.0 for part_s in parts_s)
    local = training_key(point.gpu, msgspec.structs.replace(point.spec, sync_batchnorm=False))
    key = alike(LOCAL_BATCHNORM, point)
    without = (other for other in measured.get(local, []) if alike(LOCAL_BATCHNORM, other) == key)
    others = (communications_of(other.ok_records) for other in without)
    steps_s = (median_step_time(other, whole_step(other)) for other in others)
    saved_s = max((step_s - other_s for other_s in steps_s if other_s), default=0.0)
    return min(max(in_profile_s, saved_s) / step_s, 1.0)


def other_limits(point: PooledPoint) -> dict[str, float]:
    """Return the limits of a point that have no share, each as 0, and how far the power limit lowers its clock."""
    holds = {
        "DataParallel": STRATEGIES[point.spec.strategy].uses_threads and point.spec.num_gpus > 1,
        "full memory": bool(point.allocator_retry_notes),
    }
    shares = {limit: 0.0 for limit, is_so in holds.items() if is_so}
    for note in filter(is_power_limited, clock_notes(point)):
        shares["power"] = note.values["below"]
    return shares


LIMIT_WORDS = {
    UNEXPLAINED.limit: "what several $GPUs cost, not measured",
    WRAPPER.limit: "the strategy's overhead",
    "launches": "kernel launches",
    "a late rank": "a straggler",
}
NEXT_STEP = (
    Column(
        "next_step",
        "next step",
        "What to change first, by the rules of docs/advice.md; no measured pair contradicts it.",
    ),
    Column("limit", "limit", "What the next step is against, by the order in docs/advice.md.", words=LIMIT_WORDS),
    Column(
        "limit_share",
        "of its time [%]",
        "Share of the limit; empty where the rule has none; of power how far its clock is below the highest.",
        remark="< is at most: measured on one $GPU.",
    ),
    Column(
        "limit_share_is",
        "",
        "`at most` where the share was measured on one GPU: on several it is at most this.",
    ),
)
"""Shown in a view of their own."""
NEXT_STEP_KEYS = tuple(column.key for column in NEXT_STEP if column.heading)


def has_next_step(rows: Rows) -> Rows:
    """Return the rows of which a next step was found in order, each point once."""
    return sort_rows([row for row in rows if row["next_step"] not in (None, NOTHING_FOUND)])


ADVICE = (
    "By the rules of docs/advice.md, which found none for configurations that are not listed; (2x): measured here to "
    "be twice as fast. A larger batch changes the training: what it learns is a question of its own (Q4)."
)


def next_step_view(heading: str) -> View:
    """Return the view of the rows that have a next step."""
    return View(heading, ADVICE, has_next_step, NEXT_STEP_KEYS, hidden_notes=None, is_of_next_steps=True)


def limit_words(row: Row) -> str | None:
    """Return what limits a point, with its share; None if no rule names it."""
    share = row["limit_share"]
    limit: str | None = LIMIT_WORDS.get(row["limit"], row["limit"])
    if limit is None or share is None:
        return limit
    if limit == POWER.limit:
        return f"{limit}, {claims.clock_words(share)}"
    at_most = row["limit_share_is"]
    return f"{limit}, {at_most + ' ' if at_most else ''}{100 * min(share, 1):.0f} % of its time"
