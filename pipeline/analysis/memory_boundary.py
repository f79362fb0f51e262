"""The memory boundary: which batch size a search tries next, decided from its trials alone.

Two small runs give a line of peak memory against batch size; where it meets the usable memory is the prediction.
A trial just below it and one just above that verify it. Where they contradict it, the search steps away from what
it knows in doubling steps, and halves the bracket in the end: it narrows with every trial, and their number is
capped. All batch sizes are samples a GPU.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.experiment.measurement import MemorySearch, MemoryTrial

TOLERANCE_DIVISOR = 100  # the bracket is at most 1/100 of the largest batch that fits
MIN_PEAK_GAP_FRACTION = 0.1  # of the usable memory: runs whose peaks are closer give no line worth following
NEARBY_FRACTION = 0.1  # of a batch size: trials that near are steps away from the same one
MAX_GROWTH_FACTOR = 64  # from one trial to the next
SHRINK_FACTOR = 4
MAX_EXTRAPOLATED_TRIALS = 6  # from the first that fits on: later ones step down into the bracket or halve it
MAX_TRIALS = 30
MAX_BATCH_SIZE = 2**40  # of a Spec


class Bracket(NamedTuple):
    """The largest batch that fits and the smallest that does not; None where no trial said."""

    fits: int | None
    fails: int | None


def bracket_of(trials: Sequence[MemoryTrial]) -> Bracket:
    """What the trials enclose. One that fits above one that failed was luck: what is below all failures holds."""
    fails = min(failing_batch_sizes(trials), default=None)
    fitting = (trial.batch_size_per_gpu for trial in trials if trial.fits)
    return Bracket(max((size for size in fitting if fails is None or size < fails), default=None), fails)


def failing_batch_sizes(trials: Sequence[MemoryTrial]) -> list[int]:
    """The batch sizes that did not fit."""
    return [trial.batch_size_per_gpu for trial in trials if not trial.fits]


def is_last_trial_near_oom(trials: Sequence[MemoryTrial]) -> bool:
    """Whether the last trial was less than a tenth below one that ran out of memory."""
    smallest = min((trial.batch_size_per_gpu for trial in trials if trial.is_oom), default=math.inf)
    return trials[-1].batch_size_per_gpu >= (1 - NEARBY_FRACTION) * smallest


def bracket_tolerance(batch_size: int) -> int:
    """How wide a bracket above this batch size may be: 1 %, and one sample where that is less."""
    return max(1, batch_size // TOLERANCE_DIVISOR)


def is_bracket_narrow_enough(bracket: Bracket) -> bool:
    """Whether the bracket is narrow enough, or not even one sample fits."""
    if bracket.fails is None:
        return False
    return (
        bracket.fails == 1 if bracket.fits is None else bracket.fails - bracket.fits <= bracket_tolerance(bracket.fits)
    )


def next_batch_size(trials: Sequence[MemoryTrial], first: int) -> int | None:
    """The batch size of the next trial, never one that was tried; None where the search has ended."""
    bracket = bracket_of(trials)
    if is_bracket_narrow_enough(bracket) or len(trials) >= MAX_TRIALS:
        return None
    fits, fails = bracket
    if fits is None:
        return first if fails is None else max(1, fails // SHRINK_FACTOR)
    if fails is None:
        return min(next_size_above(trials, fits), MAX_BATCH_SIZE) if fits < MAX_BATCH_SIZE else None
    return min(max(next_size_between(trials, fits, fails), fits + 1), fails - 1)


def next_size_above(trials: Sequence[MemoryTrial], fits: int) -> int:
    """Where nothing failed yet: where the line points to, at least a step of 1 %, doubled with each step."""
    num_near = sum(trial.batch_size_per_gpu >= fits * (1 - NEARBY_FRACTION) for trial in trials)
    return min(
        max(extrapolated_target(trials), fits + (bracket_tolerance(fits) << num_near - 1)), MAX_GROWTH_FACTOR * fits
    )


def next_size_between(trials: Sequence[MemoryTrial], fits: int, fails: int) -> int:
    """Inside a bracket: where the line points to, else a doubling step down from what failed, else the middle."""
    middle, step = (fits + fails) // 2, bracket_tolerance(int(fails * (1 - NEARBY_FRACTION)))
    first_fitting = next(number for number, trial in enumerate(trials) if trial.fits)
    target = extrapolated_target(trials) if len(trials) - first_fitting < MAX_EXTRAPOLATED_TRIALS else fails
    if target <= fits:
        return min(middle, fits + bracket_tolerance(fits))
    if target <= fails - step:
        return target
    if fails - fits <= NEARBY_FRACTION * fails:
        return middle
    above_it = min((size for size in failing_batch_sizes(trials) if size > fails), default=fails)
    return max(middle, fails - max(step, 2 * (above_it - fails)))


def extrapolated_target(trials: Sequence[MemoryTrial]) -> int:
    """The batch size to try by the line: half a bracket below its prediction, so that a step of 1 % goes past it."""
    target = predict_boundary(trials) or second_line_point(trials)
    return target - bracket_tolerance(target - bracket_tolerance(target)) // 2


def predict_boundary(trials: Sequence[MemoryTrial]) -> int | None:
    """The batch size at which the line through two fitting trials meets the usable memory.

    The largest that fits, and the next one that lies far enough below. None where there are no such two.
    """
    known = sorted(memory_points(trials), reverse=True)
    if not known:
        return None
    largest = known[0]
    far = [
        point
        for point in known
        if largest.peak_bytes - point.peak_bytes >= MIN_PEAK_GAP_FRACTION * largest.usable_bytes
    ]
    return extrapolate(far[0], largest, largest.usable_bytes) if far else None


def second_line_point(trials: Sequence[MemoryTrial]) -> int:
    """The batch size of a small run that gives a line: half of what is left by then, or all where that is little.

    By the line through what fits, or through nothing at no samples: more than that never takes less memory.
    """
    known = sorted(memory_points(trials), reverse=True)
    if not known:
        return 0
    largest = known[0]
    room_bytes = largest.usable_bytes - largest.peak_bytes
    target_bytes = largest.peak_bytes + (
        room_bytes / 2 if room_bytes >= 2 * MIN_PEAK_GAP_FRACTION * largest.usable_bytes else room_bytes
    )
    other = known[-1] if len(known) > 1 else MemoryPoint(0, 0, 0)
    return extrapolate(other, largest, target_bytes) or MAX_GROWTH_FACTOR * largest.batch_size


class MemoryPoint(NamedTuple):
    """A trial that fits, as the line sees it."""

    batch_size: int
    peak_bytes: int
    usable_bytes: int


def memory_points(trials: Sequence[MemoryTrial]) -> list[MemoryPoint]:
    """The trials that fit and say how much memory they took."""
    return [
        MemoryPoint(trial.batch_size_per_gpu, trial.peak_allocated_bytes, trial.usable_bytes)
        for trial in trials
        if trial.fits and trial.peak_allocated_bytes is not None and trial.usable_bytes
    ]


def extrapolate(one: MemoryPoint, other: MemoryPoint, target_bytes: float) -> int | None:
    """Where the line through both reaches so many bytes; None where it does not rise."""
    rise_bytes = other.peak_bytes - one.peak_bytes
    if rise_bytes <= 0:
        return None
    size = other.batch_size + (target_bytes - other.peak_bytes) * (other.batch_size - one.batch_size) / rise_bytes
    return max(1, int(size))


def first_prediction(trials: Sequence[MemoryTrial]) -> int | None:
    """What the first line through two trials predicted, of those that a later trial could follow; None without one."""
    for count in range(len(trials)):
        predicted = predict_boundary(trials[:count])
        if predicted is not None:
            return predicted
    return None


def search_result(trials: Sequence[MemoryTrial]) -> MemorySearch | None:
    """What the search found; None where nothing fits."""
    bracket = bracket_of(trials)
    if bracket.fits is None:
        return None
    return MemorySearch(
        trials=tuple(trials),
        predicted=first_prediction(trials),
        largest_fitting=bracket.fits,
        smallest_failing=bracket.fails,
    )
