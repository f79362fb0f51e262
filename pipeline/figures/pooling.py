"""Pooled points: the outcomes that one table row shows, their epoch time and its interval; and when they ran.

An attempt has the times of its node's clock: how many ran beside it, and the hours that were timed. If that clock was
set during the experiment, a neighbour may be invented or missed. Neighbours therefore make only notes, and change no
figure; answers leave out a speed-up of a point, or against a baseline, that had some.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from pipeline.figures import comparability, formulas, intervals
from pipeline.figures.comparability import gpu_model, most_common
from pipeline.figures.intervals import Estimate
from pipeline.figures.links import link_notes
from pipeline.figures.notes import Note, NoteKind, make_note, text_note
from pipeline.plan.axes import AXIS_DEFAULTS, Device
from pipeline.plan.spec import FIRST_TIMED_EPOCH, POOLED_AXES, Spec, alike_key, without_repeat
from pipeline.records.outcomes import PointOutcome, units_by_model
from pipeline.records.record import Epoch, Measurement, RankEpoch, Record
from pipeline.system.host import parse_timestamp

AttemptKey = tuple[str, int]  # run id and number of the attempt


class Span(NamedTuple):
    """The time of an attempt in Unix seconds. Start is included, end is not."""

    start: float
    end: float


def attempt_span(record: Record) -> Span | None:
    """Return the time from launch to record; None if it lacks a start or an end, or if the end is before the start."""
    if record.started_at is None or record.ended_at is None:
        return None
    start, end = (parse_timestamp(text).timestamp() for text in (record.started_at, record.ended_at))
    return Span(start, end) if start <= end else None


def attempt_key(record: Record) -> AttemptKey:
    return record.run_id, record.attempt


def count_neighbours(attempts: Iterable[Record]) -> Counter[AttemptKey]:
    """Return attempt -> the number of attempts that ran on its node at the same time, without those that had none.

    Attempts of one launch are not counted: they ran one after another, even if their times overlap. An attempt on
    several machines gets the count of the machine with the most neighbours.
    """
    placed = [
        (record, span, machine)
        for record in attempts
        if (span := attempt_span(record)) and span.start < span.end
        # two machines with the same name have different boot ids
        for machine in record.environment.boot_ids or record.environment.nodes
    ]
    spans: dict[tuple[str, str | None], list[Span]] = defaultdict(list)  # of a machine, and of each launch on it
    for record, span, machine in placed:
        spans[machine, None].append(span)
        spans[machine, record.launch_id].append(span)
    overlapping = {group: count_overlapping(found) for group, found in spans.items()}
    counts: Counter[AttemptKey] = Counter()
    for record, span, machine in placed:
        count = overlapping[machine, None][span] - overlapping[machine, record.launch_id][span]
        counts[attempt_key(record)] = max(counts[attempt_key(record)], count)
    return +counts


def count_overlapping(spans: Sequence[Span]) -> dict[Span, int]:
    """Return span -> the number of spans that overlap it, itself included."""
    starts, ends = sorted(span.start for span in spans), sorted(span.end for span in spans)
    return {span: bisect_left(starts, span.end) - bisect_right(ends, span.start) for span in spans}


def timed_hours(record: Record) -> float:
    """Return the hours in timed windows (epochs or communication series) times the GPUs used.

    Of a point that evaluates every epoch counts, as it does in the time to a target accuracy.
    """
    spec = record.spec
    epochs = [epoch for epoch in record.epochs if spec.evaluate or epoch.epoch in spec.timed_epochs]
    series = record.communication.series if record.communication else ()
    timed_ns = sum(epoch.time_ns for epoch in epochs)
    timed_ns += sum(max(ranks) for variant in series for ranks in variant.window_times_ns)
    return timed_ns / 1e9 * spec.num_gpus / 3600


def hours_columns(device: Device, hours: float | None, suffix: str = "") -> dict[str, float | None]:
    """Return the hours in the column of the device: GPU-hours, or process-hours on the CPU."""
    return {
        f"gpu_hours{suffix}": hours if device == "cuda" else None,
        f"process_hours{suffix}": hours if device == "cpu" else None,
    }


REPEATS_NOT_OK = NoteKind(
    "repeats_not_ok",
    "{count} of {repeats} repeats: {statuses:list}",
    badge="{count} of {repeats} repeats without a result",
    word="repeats not ok",
)
SHARED_NODE = NoteKind(
    "shared_node",
    "other configurations of this experiment on its node meanwhile: {others}",
    badge="shared node",
    forbids=("speedup", "comm_time_subtraction_s", "exposed_comm_share"),
)
SHARED_CPUS = NoteKind(
    "shared_cpus",
    "each node has fewer CPUs than processes: {cpus} for {processes}",
    badge="shared CPUs",
    forbids=("speedup", "comm_time_subtraction_s", "exposed_comm_share"),
)
OTHER_SHARED_NODE = NoteKind(
    "other_shared_node",
    "{what}: other configurations of this experiment on its node meanwhile: {others}",
    badge="shared node",
)
PROBE_FITS = NoteKind("probe_fits", "probe of {steps} steps: it fits, and has no epoch time")
EPOCHS_CUT = NoteKind("epochs_cut", "epochs end after {steps} of {full} steps: no epoch time")
WHOLE_SECONDS = NoteKind("whole_seconds", "stated in whole seconds: rounding alone is {share:.1%}")
ONLY_WARM_UP = NoteKind("only_warm_up", "epoch 1 warms up and epoch 2 was not run: no epoch time")
TIMED_EPOCH_NOT_STATED = NoteKind("timed_epoch_not_stated", "the file does not state epoch 2")
LONG_UPDATES = NoteKind(
    "long_updates",
    "{count} of {updates} updates took over {factor:g} times the median, which adds {added:.0%} to the mean: a busy "
    "machine, work that comes every few updates, or an evaluation or a checkpoint, which ddpscale.skip() leaves out; "
    "a median of windows may have less of it",
    badge="long updates",
)
PARTS_DEVIATE = NoteKind("parts_deviate", "the parts of an epoch add up to {share:,.1%} of its time")
TOO_FEW_VALUES = NoteKind(
    "too_few_values", "an interval needs {needed} windows or repeats, got {found}", word="no interval"
)
ALLOCATOR_RETRY = NoteKind("allocator_retry", "memory was full once: the allocator freed its cache and tried again")
ALLOCATOR_RETRIES = NoteKind(
    "allocator_retries", "memory was full {count} times: the allocator freed its cache and tried again"
)
FP32_GATHERS = NoteKind(
    "fp32_gathers", "fp32 gathers: weights travel in fp32, and autocast casts them to bf16 later", badge="fp32 gathers"
)
OWN_COLLECTIVES = NoteKind(
    "own_collectives",
    "the model or its loss calls collectives itself ({names:list}), in every timed step, the "
    "reference too: no exposed communication, no cost of the wrapper and no advice are told from it",
    badge="own collectives",
)

MAX_PARTS_DEVIATION = 0.01  # of an epoch's time: the sum of its parts may differ from it by this share
LONG_UPDATE = 1.5  # times the median update of its run: more than the noise of a quiet machine
MIN_ADDED_TIME = 0.05  # by long updates, over the time of a run without what they take beyond the median
MIN_PARTS_DEVIATION_NS = 1_000_000  # a smaller difference is never reported
ALWAYS_SHOWN = ("strategy", "num_nodes", "num_gpus", "batch_size_per_gpu", "precision", "input")
STATUS_ORDER = ("ok", "oom", "failed", "rejected", "missing")

SomeKey = TypeVar("SomeKey")
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class PooledPoint:
    """The outcomes that differ only in repeat and seed. Figures are cached, since several tables show a point.

    Times and memory are of one GPU model: a point that ran on two is two pooled points. Accuracies pool all models.
    """

    spec: Spec  # with repeat and seed at 0
    outcomes: list[PointOutcome]
    axes: Sequence[str]  # that its rows show
    gpu: str  # the model; "" on a CPU, or if no record states it
    unit: str  # of the items that its samples consist of
    majority_source: str  # of the ok records of the experiment
    neighbours: Mapping[AttemptKey, int]  # their number, for each attempt of the experiment that had some
    is_rounded: bool  # others state all epoch times of the experiment in whole seconds

    @cached_property
    def status(self) -> str:
        """`ok` if any outcome is, else the first of oom, failed, rejected, missing that occurs."""
        present = {outcome.status for outcome in self.outcomes}
        return next(status for status in STATUS_ORDER if status in present)

    @cached_property
    def ok_records(self) -> list[Record]:
        """The records of the ok outcomes."""
        return [outcome.record for outcome in self.outcomes if outcome.record and outcome.status == "ok"]

    @cached_property
    def measurements(self) -> list[Measurement]:
        """The measurements of the ok records."""
        return [record.measurement for record in self.ok_records if record.measurement]

    @cached_property
    def num_samples(self) -> int | None:
        """The samples of an epoch; None if timings from elsewhere do not state them, and the spec has the default."""
        stated = [epoch for record in self.ok_records if not record.measured for epoch in record.epochs]
        is_unknown = any(epoch.num_samples is None for epoch in stated)
        return None if is_unknown else self.spec.num_samples

    @cached_property
    def items_per_sample(self) -> int | None:
        """The items of a sample, as the first ok record states them."""
        return self.measurements[0].items_per_sample if self.measurements else None

    @cached_property
    def own_collectives(self) -> list[str]:
        """The collectives that the user's code calls in every timed step, so that no difference shows them."""
        untold = [one for one in self.measurements if one.communication is None or not one.communication.counts_own]
        return sorted({name for measurement in untold for name in measurement.own_collectives})

    @property
    def own_collectives_notes(self) -> list[Note]:
        """A note if the user's code calls collectives in a step."""
        return [make_note(OWN_COLLECTIVES, names=self.own_collectives)] if self.own_collectives else []

    def difference_notes(self, what: str, other: "PooledPoint") -> list[Note]:
        """Return a note for every fact in which the environment of another point, called `what`, differs."""
        notes = comparability.environment_difference_notes(what, other.ok_records, self.ok_records)
        return notes + [make_note(OTHER_SHARED_NODE, what=what, **note.values) for note in other.shared_node_notes]

    @cached_property
    def num_neighbours(self) -> int:
        """Return the largest number, over the ok records, of other points that ran on their node at the same time."""
        return max((self.neighbours.get(attempt_key(record), 0) for record in self.ok_records), default=0)

    @property
    def shared_node_notes(self) -> list[Note]:
        """A note if other points ran on a node of this one at the same time."""
        return [make_note(SHARED_NODE, others=self.num_neighbours)] if self.num_neighbours else []

    @property
    def shared_cpus_notes(self) -> list[Note]:
        """A note if processes that compute on CPUs had to share them."""
        cpus = min((record.environment.num_cpus or math.inf for record in self.ok_records), default=math.inf)
        processes = self.spec.world_size // self.spec.num_nodes
        is_shared = self.spec.device == "cpu" and cpus < processes
        return [make_note(SHARED_CPUS, cpus=cpus, processes=processes)] if is_shared else []

    def median(self, value_of: Callable[[Record], float | None]) -> float | None:
        """Return the median of a value over the ok records that have it; None if none has it."""
        return formulas.median_of_known(map(value_of, self.ok_records))

    @cached_property
    def epoch_times_s(self) -> list[list[float]]:
        """The times of the timed epochs, for each repeat that has any."""
        return [values for record in self.ok_records if (values := window_values_s(record, "epoch_time_ns"))]

    @cached_property
    def epoch_time(self) -> Estimate | None:
        """The point's epoch time: the median of the repeats' medians; None if no repeat has one."""
        return intervals.median_time(self.epoch_times_s)

    @cached_property
    def steps_per_epoch(self) -> float:
        """The steps of a whole epoch; of a script by what its windows count, which it may name itself (items)."""
        pairs = ((record, epoch) for record in self.ok_records for epoch in timed_epochs(record))
        counts = [per_epoch(*pair) * pair[1].num_timed_updates for pair in pairs if pair[1].num_timed_updates]
        return statistics.median(counts) if counts else self.spec.full_steps_per_epoch

    @cached_property
    def long_update_notes(self) -> list[Note]:
        """A note if single updates of a script were so much longer than the others of their run that its time is."""
        runs = [updates for record in self.ok_records if (updates := single_updates_ns(record))]
        medians = [statistics.median(updates) for updates in runs]
        beyond_ns = [
            time_ns - median_ns
            for updates, median_ns in zip(runs, medians, strict=True)
            for time_ns in updates
            if time_ns > LONG_UPDATE * median_ns
        ]
        if not beyond_ns:
            return []
        added = sum(beyond_ns) / (sum(map(sum, runs)) - sum(beyond_ns))
        facts = {"count": len(beyond_ns), "updates": sum(map(len, runs)), "factor": LONG_UPDATE, "added": added}
        return [make_note(LONG_UPDATES, **facts)] if added > MIN_ADDED_TIME else []

    @cached_property
    def interval_notes(self) -> list[Note]:
        """A note if the epoch time's interval is over windows of several processes, or a note on why there is none."""
        time, num_windows = self.epoch_time, sum(map(len, self.epoch_times_s))
        if time is not None and not time.interval and (self.spec.windows > 1 or len(self.outcomes) > 1):
            return [make_note(TOO_FEW_VALUES, needed=intervals.min_values(), found=num_windows)]
        return intervals.pooled_notes(self.epoch_times_s, time.basis) if time is not None else []

    @cached_property
    def epoch_time_drift_notes(self) -> list[Note]:
        """A note if the epoch time drifted in windows that an interval is based on."""
        return intervals.drift_notes("epoch_time_s", self.epoch_times_s)

    @cached_property
    def notes(self) -> list[Note]:
        """Notes on missing figures, on missing repeats, and on environments that are mixed."""
        notes: list[Note] = []
        if self.status != "ok":
            notes += map(text_note, sorted({outcome.reason for outcome in self.outcomes if outcome.reason}))
        elif len(self.ok_records) < len(self.outcomes):
            others = [outcome.status for outcome in self.outcomes if outcome.status != "ok"]
            counts = {"count": len(others), "repeats": len(self.outcomes)}
            notes.append(make_note(REPEATS_NOT_OK, **counts, statuses=sorted(set(others))))
        if self.status == "ok" and self.spec.measure == "epochs" and self.epoch_time is None:
            notes.append(explain_no_epoch_time(self.spec))
        is_cast_later = self.spec.precision == "bf16" and self.spec.param_dtype == "fp32"
        if is_cast_later and self.spec.facts.shards_parameters and any(record.measured for record in self.ok_records):
            notes.append(make_note(FP32_GATHERS))
        return [
            *notes,
            *self.shared_node_notes,
            *self.shared_cpus_notes,
            *comparability.other_source_notes(self.ok_records, self.majority_source),
            *comparability.mixed_environment_notes(self.ok_records),
            *comparability.source_edited_notes(self.ok_records),
            *comparability.unlike_nodes_notes(self.ok_records),
            *comparability.shared_gpu_notes(self.ok_records),
            *link_notes(self.ok_records),
        ]

    @cached_property
    def parts_notes(self) -> list[Note]:
        """A note if computation and data loading of a timed epoch do not add up to its time."""
        slowest = [epoch.slowest_rank for record in self.ok_records for epoch in timed_epochs(record)]
        worst = max((parts_ratio(rank) for rank in slowest if rank), key=lambda ratio: abs(ratio - 1), default=1)
        return [make_note(PARTS_DEVIATE, share=worst)] if abs(worst - 1) > MAX_PARTS_DEVIATION else []

    @cached_property
    def rounding_notes(self) -> list[Note]:
        """A note if others state all epoch times in whole seconds: half a second of the time is their rounding."""
        times_s = [time_s for repeat in self.epoch_times_s for time_s in repeat]
        return [make_note(WHOLE_SECONDS, share=0.5 / min(times_s))] if self.is_rounded and times_s else []

    @cached_property
    def allocator_retry_notes(self) -> list[Note]:
        """A note if memory was so full that the allocator freed its cache and tried again, which costs time."""
        memory = [part for measurement in self.measurements for part in measurement.memory]
        retries = max((part.num_alloc_retries or 0 for part in memory), default=0)
        return [make_note(ALLOCATOR_RETRY if retries == 1 else ALLOCATOR_RETRIES, count=retries)] if retries else []


def pool_outcomes(outcomes: Sequence[PointOutcome], *, by_gpu: bool = True) -> list[PooledPoint]:
    """Pool the outcomes that differ only in repeat and seed, in the order in which they first occur.

    With `by_gpu` the outcomes of a point on two GPU models are two pools. Times and memory need it, accuracies do not.
    """
    ok_records = [outcome.record for outcome in outcomes if outcome.record and outcome.status == "ok"]
    models = Counter(filter(None, map(gpu_of_result, outcomes)))
    only_model = most_common(models) if len(models) == 1 else ""
    source = comparability.majority_source(ok_records)
    pools = group_pairs((alike_key(outcome.spec, POOLED_AXES), outcome) for outcome in outcomes).values()
    axes, units = axes_to_show([pool[0].spec for pool in pools]), units_by_model(outcomes)
    attempts = [record for outcome in outcomes for record in (outcome.record, *outcome.superseded) if record]
    common = (source, count_neighbours(attempts), is_in_whole_seconds(ok_records))
    return [
        PooledPoint(without_repeat(spec := pool[0].spec), part, axes, gpu or only_model, units[spec.model], *common)
        for pool in pools
        for gpu, part in split_by_gpu(pool, by_gpu).items()
    ]


def is_in_whole_seconds(records: Iterable[Record]) -> bool:
    """True if others measured the records and state all epoch times in whole seconds."""
    stated = (record for record in records if not record.measured)
    times_s = [time_s for record in stated for time_s in window_values_s(record, "epoch_time_ns")]
    return bool(times_s) and all(time_s.is_integer() for time_s in times_s)


def gpu_of_result(outcome: PointOutcome) -> str:
    """Return the GPU model on which a point is ok or ran out of memory; "" if it is neither, or states none."""
    return gpu_model(outcome.record) if outcome.record and outcome.status in ("ok", "oom") else ""


def split_by_gpu(pool: Sequence[PointOutcome], by_gpu: bool) -> dict[str, list[PointOutcome]]:
    """Return the outcomes of a point by GPU model, the most common first; all by that model without `by_gpu`.

    An outcome without a result, or without a model, stands with the most common one.
    """
    models = Counter(filter(None, map(gpu_of_result, pool)))
    first = most_common(models)
    groups: dict[str, list[PointOutcome]] = {model: [] for model, _ in models.most_common()} if by_gpu else {}
    for part in pool:
        groups.setdefault((gpu_of_result(part) or first) if by_gpu else first, []).append(part)
    return groups


def axes_to_show(specs: Sequence[Spec]) -> list[str]:
    """Return the axes of every row: those always shown, then the others in which a point differs from the default."""
    unusual = [axis for axis, default in AXIS_DEFAULTS.items() if any(getattr(spec, axis) != default for spec in specs)]
    return [*ALWAYS_SHOWN, *(axis for axis in unusual if axis not in (*ALWAYS_SHOWN, *POOLED_AXES))]


def group_pairs(pairs: Iterable[tuple[SomeKey, Value]]) -> dict[SomeKey, list[Value]]:
    """Return the values of every key, keys in the order in which they first occur."""
    groups: dict[SomeKey, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def timed_epochs(record: Record) -> list[Epoch]:
    """Return the record's timed epochs (`Spec.timed_epochs`); fewer if the point stopped early."""
    numbers = record.spec.timed_epochs
    return [epoch for epoch in record.epochs if epoch.epoch in numbers]


def per_epoch(record: Record, epoch: Epoch) -> float:
    """Return the factor from what was measured in a timed epoch to a whole one: a script times fewer samples, or more.

    It is 1 where the epoch has as many samples as its point says, and where it does not state them.
    """
    return record.spec.num_samples / (epoch.num_samples or record.spec.num_samples)


def update_times_s(record: Record) -> list[float]:
    """Return the mean time of an update in each timed window of a script, on the slowest rank; empty of a model."""
    return [epoch.time_ns / epoch.num_timed_updates / 1e9 for epoch in timed_epochs(record) if epoch.num_timed_updates]


def single_updates_ns(record: Record) -> list[int]:
    """Return the time of each timed update of a script, on its first rank; empty of a model."""
    return [
        time_ns for epoch in timed_epochs(record) if epoch.num_timed_updates for time_ns in epoch.step_times_ns or ()
    ]


def window_values_s(record: Record, field: str) -> list[float]:
    """Return a value for each timed epoch: the slowest rank's time in `field` for a whole epoch, in seconds."""
    values = [(epoch, getattr(rank, field)) for epoch in timed_epochs(record) if (rank := epoch.slowest_rank)]
    return [value / 1e9 * per_epoch(record, epoch) for epoch, value in values if value is not None]


def median_window_s(field: str) -> Callable[[Record], float | None]:
    """Return a function that returns the median of `window_values_s` of a record."""
    return lambda record: formulas.median_of_known(window_values_s(record, field))


def explain_no_epoch_time(spec: Spec) -> Note:
    if spec.is_probe:
        return make_note(PROBE_FITS, steps=spec.steps_per_epoch)
    if not spec.is_whole_epoch:
        return make_note(EPOCHS_CUT, steps=spec.steps_per_epoch, full=spec.full_steps_per_epoch)
    if spec.epochs < FIRST_TIMED_EPOCH:
        return make_note(ONLY_WARM_UP)
    return make_note(TIMED_EPOCH_NOT_STATED)


def record_peak_memory_gib(record: Record) -> float | None:
    """Return the peak memory of the fullest device, in GiB."""
    memory = record.measurement.memory if record.measurement else ()
    return max(part.peak_allocated_bytes for part in memory) / formulas.GIB if memory else None


def parts_ratio(rank: RankEpoch) -> float:
    """Return (compute time + data time) / epoch time.

    It is 1 if one of the three times is not stated, or if the sum differs from the epoch time by 1 ms or less.
    """
    time_ns, compute_ns, data_ns = rank.epoch_time_ns, rank.compute_time_ns, rank.data_time_ns
    if not time_ns or compute_ns is None or data_ns is None:
        return 1.0
    parts_ns = compute_ns + data_ns
    return parts_ns / time_ns if abs(parts_ns - time_ns) > MIN_PARTS_DEVIATION_NS else 1.0
