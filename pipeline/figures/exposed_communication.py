"""Step times of a communication point by variant, their differences, and exposed communication.

A step's time is that of the slowest rank. Differences are taken round by round, because the variants of a round ran
right after each other; medians and intervals are over the rounds. A slower network is tried by delays: computation
hides a delay until it is too long, so the steps lie on a bend and not on a line. Pure functions of records; times in
seconds.
"""

import itertools
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from pipeline.figures import intervals
from pipeline.figures.epoch_figures import longest_data_share
from pipeline.figures.formulas import median_of_known
from pipeline.figures.intervals import Estimate, median_time
from pipeline.figures.notes import Note, NoteKind, make_note, text_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.figures.stopping_rule import difference_tolerance_s, is_difference_precise_enough, is_time_precise_enough
from pipeline.plan.spec import TRAINED_MAY_DIFFER, Key, Spec, alike_key
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.record import (
    Collective,
    Communication,
    DelayedSteps,
    GpuWindow,
    Profile,
    Record,
    TransferKind,
    VariantName,
)

TRACE_DIFFERS = "two methods differ: trace {traced_us:.0f} us exposed, step times {exposed_us:.0f}; the trace is "
TRACE_IS_NOISY = NoteKind(
    "trace_is_noisy",
    TRACE_DIFFERS + "noisy: in two profiles without communication kernels differ by {noise_us:.0f} us",
)
TRACE_COUNTS_SLOWED_KERNELS = NoteKind(
    "trace_counts_slowed_kernels",
    TRACE_DIFFERS + "too long: a slower kernel does not always make the step longer",
)
TRACE_SLOWS_HOST = NoteKind(
    "trace_slows_host",
    TRACE_DIFFERS + "too long: the profiler slows the host, and ranks that start apart wait inside the collectives",
)
TRACE_OMITS_HOST = NoteKind(
    "trace_omits_host",
    TRACE_DIFFERS + "too short: the device computes {busy:.0%} of the step, and the host's time to launch collectives "
    "is exposed too",
)
TRACE_OMITS_SLOWED_KERNELS = NoteKind(
    "trace_omits_slowed_kernels",
    TRACE_DIFFERS + "too short: kernels may run slower beside a collective, which it cannot show",
)
TRACE_OMITS_GAPS = NoteKind(
    "trace_omits_gaps",
    TRACE_DIFFERS + "too short: gaps between kernels may be longer, which it does not count",
)
EXPOSURE_IS_NOISE = NoteKind(
    "exposure_is_noise", "exposed communication is not larger than the noise: no hidden share is stated"
)
MEASURED_EXPOSURE_IS_NOISE = NoteKind(
    "measured_exposure_is_noise",
    "measured exposed communication is not larger than its noise, and at most {noise_s:.3g} s",
)
EXPOSURE_MAY_BE_ZERO = NoteKind(
    "exposure_may_be_zero", "0 lies inside the interval of exposed communication", badge="may be 0"
)
EXPOSURE_NEGATIVE = NoteKind(
    "exposure_negative", "the step was faster than the same step without its collectives; the records do not say why"
)
EXPOSURE_DRIFTED = NoteKind(
    "exposure_drifted",
    "exposed communication went from {before_us:.0f} to {after_us:.0f} us during the measurement",
    badge="drifted",
)
LAUNCH_EXPOSED = NoteKind(
    "launch_exposed", "more time is exposed than the transfer takes: the rest may be the host's time for launches"
)
NO_BUCKET_PROFILED = NoteKind("no_bucket_profiled", "the profile shows none of the collectives that the strategy calls")
OF_MEASURED_EXPOSURE = (
    *(TRACE_IS_NOISY, TRACE_COUNTS_SLOWED_KERNELS, TRACE_SLOWS_HOST),
    *(TRACE_OMITS_HOST, TRACE_OMITS_SLOWED_KERNELS, TRACE_OMITS_GAPS),
    *(EXPOSURE_IS_NOISE, EXPOSURE_MAY_BE_ZERO, EXPOSURE_NEGATIVE, EXPOSURE_DRIFTED),
    *(LAUNCH_EXPOSED, NO_BUCKET_PROFILED),
)

NO_OP: dict[VariantName, VariantName] = {one.name: one.no_op for one in STRATEGIES.values() if one.no_op is not None}
"""The step of each strategy, and the same step whose collectives return at once."""
CALLED: tuple[TransferKind, ...] = ("gradients", "parameters")
"""What travels in the collectives that a strategy calls; a step without them leaves these out, and no others."""


def whole_step(found: Sequence[Communication]) -> VariantName:
    """Return the variant that is the step of the strategy, with all its communication; "" if it was not run."""
    measured = {series.variant for part in found for series in part.series}
    return next((variant for variant in STRATEGIES if variant in measured), "")


def collectives_of_kinds(profile: Profile, kinds: Collection[TransferKind]) -> list[Collective]:
    """Return the collectives of these kinds."""
    return [collective for collective in profile.collectives if collective.kind in kinds]


def median_step_ns(collectives: Iterable[Collective], over_ranks: Callable[[tuple[int, ...]], float]) -> float:
    """Return the median over steps of the sum over collectives, each of which counts with `over_ranks` of its times."""
    by_step = zip(*(collective.durations_ns for collective in collectives), strict=True)
    return median_of_known(sum(map(over_ranks, step)) for step in by_step) or 0.0


def mean_wait_ns(ranks_ns: tuple[int, ...]) -> float:
    """Return the time that the mean rank takes beyond the shortest, which is the transfer's own time."""
    return statistics.fmean(ranks_ns) - min(ranks_ns)


class TracedExposure(NamedTuple):
    """Exposed communication of a step from the trace, in seconds; None if not traced or not recorded.

    `slowed_s` is the part due to compute kernels that reductions slow down, `noise_s` is the noise of `slowed_s`.
    """

    exposed_s: float | None = None
    slowed_s: float | None = None
    noise_s: float | None = None


def least_exposed_rank(profile: Profile) -> TracedExposure:
    """Return the exposed communication in a step of the rank that has the least; the other ranks wait for that rank.

    Exposed communication is the time of collectives that no compute kernel overlaps, plus the extra time of compute
    over a step without them. The step without them was profiled twice: the mean is used, and the difference is the
    noise. The result is usually larger than that of the step times, because it counts a collective in a gap between two
    kernels even if the gap would exist without it; longer gaps can hide from it. The extra time is missing where
    the step without them was not profiled.
    """
    if not any(profile.compute_ns):
        return TracedExposure()
    unit_ns = profile.num_steps * 1e9
    alone_ns = list(map(sub, profile.comm_ns, profile.overlap_ns))
    if not (profile.no_op_compute_ns and profile.no_op_again_compute_ns):
        return TracedExposure(min(alone_ns) / unit_ns)
    no_op_ns = list(zip(profile.no_op_compute_ns, profile.no_op_again_compute_ns, strict=True))
    slowed_ns = list(map(sub, profile.compute_ns, map(statistics.fmean, no_op_ns)))
    noise_ns = (abs(before - after) for before, after in no_op_ns)
    by_rank = zip(map(add, alone_ns, slowed_ns), slowed_ns, noise_ns, strict=True)
    return TracedExposure(*(time_ns / unit_ns for time_ns in min(by_rank)))


MIN_BUSY_FRACTION = 0.9  # of a step; a device that computes less than this waits for its host


def communications_of(records: Sequence[Record]) -> list[Communication]:
    """Return the communication measurements of the records that have one."""
    return [record.communication for record in records if record.communication]


def job_notes(found: Sequence[Communication]) -> list[Note]:
    """Return the notes that jobs made on parts that they could not measure, without repeats."""
    return [text_note(note) for note in dict.fromkeys(note for part in found for note in (*part.mistakes, *part.notes))]


def step_times_s(found: Communication, variant: VariantName) -> list[float]:
    """Return the slowest rank's step time in each window; empty if the variant was not run."""
    series = (one for one in found.series if one.variant == variant)
    return [time_s for one in series for time_s in slowest_times_s(found, one.window_times_ns)]


def slowest_times_s(found: Communication, window_times_ns: Sequence[Sequence[int]]) -> list[float]:
    """Return the slowest rank's step time in each window."""
    return [max(ranks) / found.steps_per_window / 1e9 for ranks in window_times_ns]


def median_step_time(found: Sequence[Communication], variant: VariantName) -> Estimate | None:
    """Return the median step time of a variant."""
    return median_time([step_times_s(part, variant) for part in found])


def median_difference(found: Sequence[Communication], variant: VariantName, other: VariantName) -> Estimate | None:
    """Return the median of `step_time_differences_s` over the records that ran both variants."""
    return median_time([step_time_differences_s(part, variant, other) for part in found])


def step_time_differences_s(found: Communication, variant: VariantName, other: VariantName) -> list[float]:
    """Return the step time of one variant minus that of another for each round; empty if one was not run."""
    ones, others = step_times_s(found, variant), step_times_s(found, other)
    return [one - two for one, two in zip(ones, others, strict=True)] if ones and others else []


def exposed_time(found: Sequence[Communication]) -> tuple[Estimate | None, float | None]:
    """Return the exposed communication of a step and the bound of its A/A difference in s.

    Exposed communication is the step minus that without collectives: DDP minus the no-op hook. The A/A difference is
    the step minus an equal one. Its bound is None if there are too few rounds for an interval.
    """
    step = whole_step(found)
    if step not in NO_OP:
        return None, None
    exposed = median_difference(found, step, NO_OP[step])
    low, high = intervals.ends_of(median_difference(found, step, f"{step}_again"))
    return exposed, max(abs(low), abs(high)) if low is not None and high is not None else None


def exposed_share(found: Sequence[Communication]) -> Estimate | None:
    """Return exposed communication as a share of the step: each round of its own step, so it is at most 1."""
    step = whole_step(found)
    if step not in NO_OP:
        return None
    steps = ((step_times_s(part, step), step_times_s(part, NO_OP[step])) for part in found)
    return median_time([[1 - without / one for one, without in zip(*both, strict=False)] for both in steps])


def wrapper_time(found: Sequence[Communication]) -> Estimate | None:
    """Return the step without collectives minus that of the bare module, in s; None for DataParallel."""
    step = whole_step(found)
    return median_difference(found, NO_OP[step], "plain") if step in NO_OP else None


def is_communication_precise_enough(found: Communication) -> bool:
    """True once every step time, exposed communication and what each delay costs are precise enough to stop."""
    times_s = [step_times_s(found, series.variant) for series in found.series]
    step = whole_step([found])
    references: tuple[VariantName, ...] = ("no_op_hook", "no_op", "no_collectives")
    exposed_s = (step_time_differences_s(found, step, reference) for reference in references)
    delayed_s = (differences_s(found, delayed) for delayed in found.delayed)
    return all(map(is_time_precise_enough, times_s)) and all(
        is_difference_precise_enough(series_s) for series_s in filter(None, [*exposed_s, *delayed_s])
    )


def drifted_exposure_notes(found: Sequence[Communication]) -> list[Note]:
    """Return a note if exposed communication drifted during a measurement by more than its tolerance."""
    step = whole_step(found)
    apart = [intervals.drifted_halves(step_time_differences_s(part, step, NO_OP[step])) for part in found]
    changed = [halves for halves in apart if halves and abs(halves[1] - halves[0]) > difference_tolerance_s(halves[0])]
    if not changed:
        return []
    before_s, after_s = changed[0]
    return [make_note(EXPOSURE_DRIFTED, before_us=before_s * 1e6, after_us=after_s * 1e6)]


def is_within_noise(exposed: Estimate, aa_difference_s: float | None) -> bool:
    """True if exposed communication does not exceed the A/A difference."""
    return aa_difference_s is not None and abs(exposed) <= aa_difference_s


def profiled_transfer_s(
    found: Sequence[Communication], kinds: Sequence[TransferKind], waiting: bool = False
) -> float | None:
    """Return the transfer time of these kinds in a profiled step, or with `waiting` the wait of the mean rank."""
    over_ranks = mean_wait_ns if waiting else min
    profiles = [part.profile for part in found if part.profile and part.profile.collectives]
    median_ns = median_of_known(median_step_ns(collectives_of_kinds(one, kinds), over_ranks) for one in profiles)
    return None if median_ns is None else median_ns / 1e9


def traced_exposure(found: Sequence[Communication]) -> TracedExposure:
    """Return exposed communication from the traces: medians over those with `slowed_s`, or over all if none has it."""
    known = [least_exposed_rank(part.profile) for part in found if part.profile and part.profile.collectives]
    whole = [traced for traced in known if traced.slowed_s is not None]
    return TracedExposure(*map(median_of_known, zip(*(whole or known), strict=True)))


def busy_share(found: Sequence[Communication], step_s: float) -> float | None:
    """Return the profiled compute time as a share of a timed step; None if it was not traced."""
    profiles = [part.profile for part in found if part.profile and any(part.profile.compute_ns)]
    return median_of_known(statistics.fmean(part.compute_ns) / part.num_steps / 1e9 / step_s for part in profiles)


def explain_trace_disagreement(exposed_s: float, traced: TracedExposure, busy: float | None) -> Note | None:
    """Explain why trace and step times disagree on exposed communication; None if they agree within tolerance."""
    if traced.exposed_s is None:
        return None
    if abs(exposed_s - traced.exposed_s) <= difference_tolerance_s(max(exposed_s, traced.exposed_s)):
        return None
    times_us = {"traced_us": traced.exposed_s * 1e6, "exposed_us": exposed_s * 1e6}
    if traced.noise_s is not None and traced.noise_s > difference_tolerance_s(exposed_s):
        return make_note(TRACE_IS_NOISY, **times_us, noise_us=traced.noise_s * 1e6)
    if traced.slowed_s is not None and traced.exposed_s - traced.slowed_s <= exposed_s < traced.exposed_s:
        return make_note(TRACE_COUNTS_SLOWED_KERNELS, **times_us)
    if traced.exposed_s > exposed_s:
        return make_note(TRACE_SLOWS_HOST, **times_us)
    if busy is not None and busy < MIN_BUSY_FRACTION:
        return make_note(TRACE_OMITS_HOST, **times_us, busy=busy)
    if traced.slowed_s is None:
        return make_note(TRACE_OMITS_SLOWED_KERNELS, **times_us)
    return make_note(TRACE_OMITS_GAPS, **times_us)


STEP_DIFFERS = NoteKind(
    "step_differs",
    "the step that measured communication takes {measured_ms:.3g} ms, that of the epochs "
    "{epochs_ms:.3g} ms{without_wait}: no share of the epochs and no advice on them is told from it",
)
TrainingKey = tuple[str, Key]
PointsByTraining = Mapping[TrainingKey, Sequence[PooledPoint]]
MAX_STEP_DEVIATION = 0.1  # of the step of the epochs; beyond it the step that measured communication is another one


def num_rounds(found: Sequence[Communication]) -> int:
    """Return the number of rounds in all records. Each round has one window of every variant."""
    return sum(len(part.series[0].window_times_ns) for part in found if part.series)


def training_key(gpu: str, spec: Spec) -> TrainingKey:
    """Return what points share that differ only in how they were measured, on one GPU model."""
    return gpu, alike_key(spec, TRAINED_MAY_DIFFER)


def group_by_training(points: Sequence[PooledPoint]) -> PointsByTraining:
    """Return the points that differ only in how they were measured, by what they share."""
    return group_pairs((training_key(point.gpu, point.spec), point) for point in points)


def match_measured(point: PooledPoint, measured: PointsByTraining) -> PooledPoint | None:
    """Return the point on the same GPU model that measured the communication of a point, with the most rounds."""
    matches = measured.get(training_key(point.gpu, point.spec), [])
    return max(matches, key=lambda other: num_rounds(communications_of(other.ok_records)), default=None)


def untold_notes(point: PooledPoint, measured: PointsByTraining) -> list[Note]:
    """Return why no share is told of the epochs of a point from the one that measured its communication, if so.

    The user's code calls collectives, or the measured step is longer or shorter than that of the epochs by more than
    MAX_STEP_DEVIATION. Neither step contains the wait for data; of a script both contain it.
    """
    match = match_measured(point, measured)
    found = communications_of(match.ok_records) if match else []
    counts_own = found and all(part.counts_own for part in found)
    own = [] if counts_own else point.own_collectives_notes or (match.own_collectives_notes if match else [])
    if own or not found or not point.epoch_time or not point.spec.is_whole_epoch:
        return own
    step_s = median_step_time(found, whole_step(found))
    waiting = 0.0 if point.spec.script else longest_data_share(point) or 0.0
    steps_s = point.epoch_time * max(1 - waiting, 0.0)
    epochs_s = most_s = steps_s / point.steps_per_epoch
    if not point.spec.script:  # a smaller last batch may cost less
        most_s = steps_s / (point.spec.num_samples / point.spec.global_batch_size)
    if step_s is None or (1 - MAX_STEP_DEVIATION) * epochs_s <= step_s <= (1 + MAX_STEP_DEVIATION) * most_s:
        return []
    without_wait = " without the wait for data" if waiting else ""
    return [make_note(STEP_DIFFERS, measured_ms=step_s * 1e3, epochs_ms=epochs_s * 1e3, without_wait=without_wait)]


class DelayedStep(NamedTuple):
    """The step with one delay. `added_s` is the sum of its delays, `longer_s` what the step takes longer for them."""

    latency_s: float
    s_per_byte: float
    added_s: float
    step_s: Estimate
    longer_s: Estimate

    @property
    def hidden_share(self) -> Estimate:
        """The share of the delays that does not make the step longer, cut to 0 to 1."""
        ends = (self.longer_s, self.longer_s.high, self.longer_s.low)
        share, low, high = (None if end is None else min(max(1 - end / self.added_s, 0.0), 1.0) for end in ends)
        assert share is not None, "only the ends may be missing"
        return Estimate(share, low, high)


def differences_s(found: Communication, delayed: DelayedSteps) -> list[float]:
    """Return the delayed step minus the mean of both steps without delays, for each round."""
    step = whole_step([found])
    slow_s = slowest_times_s(found, delayed.window_times_ns)
    usual = zip(step_times_s(found, step), step_times_s(found, f"{step}_again"), strict=True)
    return [slow - statistics.fmean(two) for slow, two in zip(slow_s, usual, strict=True)]


def delayed_steps(found: Sequence[Communication]) -> Iterator[DelayedStep]:
    """Yield the step with each delay, in the order of the run. Delays of repeats, which each chooses, are pooled."""
    by_place = group_pairs((place, (part, one)) for part in found for place, one in enumerate(part.delayed))
    for pairs in by_place.values():
        step = median_time([slowest_times_s(part, one.window_times_ns) for part, one in pairs])
        longer = median_time([differences_s(part, one) for part, one in pairs])
        added_s = statistics.median(ns for _, one in pairs for ns in one.delays_ns) / 1e9
        latency_s = statistics.median(one.latency_s for _, one in pairs)
        if step is not None and longer is not None and added_s:
            yield DelayedStep(latency_s, statistics.median(one.s_per_byte for _, one in pairs), added_s, step, longer)


def delay_costs_s(found: Sequence[Communication], added_s: float) -> float | None:
    """Return what the step takes longer if its collectives take `added_s` longer in all; None if none was as long.

    Between two measured delays that grow with the bytes it lies on the line between them.
    """
    costs = {step.added_s: float(step.longer_s) for step in delayed_steps(found) if not step.latency_s}
    for (low_s, low_cost_s), (high_s, high_cost_s) in itertools.pairwise(sorted({0.0: 0.0, **costs}.items())):
        if low_s <= added_s <= high_s:
            return low_cost_s + (high_cost_s - low_cost_s) * (added_s - low_s) / (high_s - low_s)
    return None


def beside_others(windows: Sequence[GpuWindow], rank: int, field: str) -> tuple[float | None, float | None]:
    """Return the median of a value of a rank's GPU, and of the other GPUs; None if it is not known."""
    pairs = [(getattr(window, field), window.gpu == rank) for window in windows]
    own, others = (median_of_known(value for value, is_own in pairs if is_own is side) for side in (True, False))
    return own, others
