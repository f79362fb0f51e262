"""Figures from the trials of a memory search: the batch size to try next, and the largest one that fits.

Two small trials give a line of peak memory against batch size. The prediction is the batch size at which the line
meets the usable memory. One trial just below and one just above verify it. If they contradict it, the next trials move
away in steps that double, and finally bisect. If the peaks give no line, as those of a small process on a CPU, they
bisect at once. The number of trials is limited. Batch sizes are per GPU.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.records.record import MemorySearch, MemoryTrial, bracket_of

TOLERANCE_DIVISOR = 100  # the final bracket is at most 1/100 of the largest batch that fits
MIN_PEAK_GAP_FRACTION = 0.1  # of the usable memory; two peaks that are closer give no reliable line
NEARBY_FRACTION = 0.1  # of a batch size; trials within this distance count as one series of steps
MAX_GROWTH_FACTOR = 64  # from one trial to the next
SHRINK_FACTOR = 4
MAX_EXTRAPOLATED_TRIALS = 6  # counted from the first trial that fits; later trials ignore the line
MAX_TRIALS = 30
MAX_BATCH_SIZE = 2**40  # the limit in Spec


def is_last_trial_near_oom(trials: Sequence[MemoryTrial]) -> bool:
    """True if the batch of the last trial is at least 90 % of the smallest one that ran out of memory."""
    smallest = min((trial.batch_size_per_gpu for trial in trials if trial.is_oom), default=math.inf)
    return trials[-1].batch_size_per_gpu >= (1 - NEARBY_FRACTION) * smallest


def bracket_tolerance(batch_size: int) -> int:
    """Return the allowed width of a bracket above this batch size: 1 %, at least one sample."""
    return max(1, batch_size // TOLERANCE_DIVISOR)


def next_batch_size(trials: Sequence[MemoryTrial], first: int) -> int | None:
    """Return the batch size of the next trial, which was never tried before; None if the search has ended."""
    fits, fails = bracket_of(trials)
    if len(trials) >= MAX_TRIALS or fails == 1:
        return None
    if fits is None:
        return first if fails is None else max(1, fails // SHRINK_FACTOR)
    if fails is None:
        return min(next_size_above(trials, fits), MAX_BATCH_SIZE) if fits < MAX_BATCH_SIZE else None
    if fails - fits <= bracket_tolerance(fits):
        return None
    return min(max(next_size_between(trials, fits, fails), fits + 1), fails - 1)


def next_size_above(trials: Sequence[MemoryTrial], fits: int) -> int:
    """Return the next batch size while nothing has failed: the line's target, or a doubling step from 1 %."""
    num_near = sum(trial.batch_size_per_gpu >= fits * (1 - NEARBY_FRACTION) for trial in trials)
    min_size = fits + (bracket_tolerance(fits) << num_near - 1)
    return min(max(extrapolated_target(trials), min_size), MAX_GROWTH_FACTOR * fits)


def next_size_between(trials: Sequence[MemoryTrial], fits: int, fails: int) -> int:
    """Return the next batch size inside a bracket: the line's target, a doubling step below `fails`, or the middle.

    The middle is geometric, because a bracket without a line may be wide.
    """
    middle, step = math.isqrt(fits * fails), bracket_tolerance(int(fails * (1 - NEARBY_FRACTION)))
    first_fitting = next(number for number, trial in enumerate(trials) if trial.fits)
    target = extrapolated_target(trials) if len(trials) - first_fitting < MAX_EXTRAPOLATED_TRIALS else fails
    if target <= fits:
        return min(middle, fits + bracket_tolerance(fits))
    if target <= fails - step:
        return target
    if fails - fits <= NEARBY_FRACTION * fails or predict_boundary(trials) is None:
        return middle
    failing = (trial.batch_size_per_gpu for trial in trials if not trial.fits)
    next_failing = min((size for size in failing if size > fails), default=fails)
    return max(middle, fails - max(step, 2 * (next_failing - fails)))


def extrapolated_target(trials: Sequence[MemoryTrial]) -> int:
    """Return the batch size to try next by the line: half a bracket below the prediction of the line."""
    target = predict_boundary(trials) or size_for_line(trials)
    # if this trial fits and a trial 1 % above fails, the two bracket the prediction
    return target - bracket_tolerance(target - bracket_tolerance(target)) // 2


def predict_boundary(trials: Sequence[MemoryTrial]) -> int | None:
    """Return the batch size at which the line through two fitting trials meets the usable memory.

    Uses the largest trial that fits and the next one with a peak far enough below. None without two such trials.
    """
    known = memory_points(trials)
    if not known:
        return None
    largest = known[0]
    max_peak_bytes = largest.peak_bytes - MIN_PEAK_GAP_FRACTION * largest.usable_bytes
    other = next((point for point in known if point.peak_bytes <= max_peak_bytes), None)
    return extrapolate(other, largest, largest.usable_bytes) if other else None


def size_for_line(trials: Sequence[MemoryTrial]) -> int:
    """Return the batch size of a trial that gives the line its second point; 0 without trials.

    The trial should use half the free memory, or all of it if little is free. The batch size is estimated by a line
    through the smallest and the largest trial that fit. With one trial the line starts at 0 bytes for 0 samples: it is
    too steep, and the batch size too small.
    """
    known = memory_points(trials)
    if not known:
        return 0
    largest = known[0]
    room_bytes = largest.usable_bytes - largest.peak_bytes
    has_much_room = room_bytes >= 2 * MIN_PEAK_GAP_FRACTION * largest.usable_bytes
    target_bytes = largest.peak_bytes + (room_bytes / 2 if has_much_room else room_bytes)
    other = known[-1] if len(known) > 1 else MemoryPoint(0, 0, 0)
    return extrapolate(other, largest, target_bytes) or MAX_GROWTH_FACTOR * largest.batch_size


class MemoryPoint(NamedTuple):
    batch_size: int
    peak_bytes: int
    usable_bytes: int


def memory_points(trials: Sequence[MemoryTrial]) -> list[MemoryPoint]:
    """Return the trials that fit and have a known peak, the largest batch first."""
    known = (
        MemoryPoint(trial.batch_size_per_gpu, trial.peak_allocated_bytes, trial.usable_bytes)
        for trial in trials
        if trial.fits and trial.peak_allocated_bytes is not None and trial.usable_bytes
    )
    return sorted(known, reverse=True)


def extrapolate(one: MemoryPoint, other: MemoryPoint, target_bytes: float) -> int | None:
    """Return the batch size at which the line through both points reaches `target_bytes`; None if it does not rise."""
    rise_bytes = other.peak_bytes - one.peak_bytes
    if rise_bytes <= 0:
        return None
    size = other.batch_size + (target_bytes - other.peak_bytes) * (other.batch_size - one.batch_size) / rise_bytes
    return max(1, int(size))


def search_result(trials: Sequence[MemoryTrial]) -> MemorySearch | None:
    """Return the result of the search; None if nothing fits."""
    bracket = bracket_of(trials)
    if bracket.fits is None:
        return None
    predictions = (predict_boundary(trials[:count]) for count in range(len(trials)))  # before each trial
    return MemorySearch(
        trials=tuple(trials),
        predicted=next(filter(None, predictions), None),
        largest_fitting=bracket.fits,
        smallest_failing=bracket.fails,
    )
