"""The rows of the memory boundary: the largest batch that fits, its memory, and the search for it."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pipeline.experiment.axis_groups import POOLED_AXES, alike_key
from pipeline.experiment.measurement import MemorySearch
from pipeline.figures.formulas import GIB, state_bytes
from pipeline.figures.memory_trials import SAVING_UNCLEAR, bracket_tolerance, memory_points
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.plan.axes import STRATEGY_AXES
from pipeline.plan.strategies import STRATEGIES
from pipeline.report.definitions import MEMORY_BOUNDARY
from pipeline.report.table import Row, make_row

NOTHING_FAILED = NoteKind("nothing_failed", "nothing failed in {trials} trials")
NOT_NARROWED = NoteKind("not_narrowed", "not narrowed to 1 % in {trials} trials")
TRIAL_FAILED = NoteKind("trial_failed", "failed at {batch_size}: {reason}")
CONVOLUTIONS_SPLIT = NoteKind(
    "convolutions_split", "from {batch_size} on activations have more than 2^31 elements, and convolutions are split"
)

SAVED_MAY_DIFFER = ("strategy", "batch_size_per_gpu", *STRATEGY_AXES, *POOLED_AXES)
MAX_ELEMENTS = 2**31  # of an activation; a convolution over more elements is split
LARGEST_ACTIVATION = {"resnet18": 64 * 32 * 32}  # elements for each image
BATCH_SIZES = ("largest_batch_size_per_gpu", "smallest_failing_batch_size_per_gpu")
COUNTS = ("predicted_batch_size_per_gpu", "num_trials", "num_ooms")  # rounded down


class Line(NamedTuple):
    """The line of a search's trials in bytes: memory without samples, its standard error, and what a sample adds."""

    state_bytes: float
    error_bytes: float | None
    sample_bytes: float


def memory_rows(points: Sequence[PooledPoint]) -> list[Row]:
    """Return a row for each point's search, with what sharding saves against DDP's search of the same training."""
    rows = [(alike_key(point.spec, SAVED_MAY_DIFFER), point.spec.strategy, memory_row(point)) for point in points]
    by_training = {(strategy, key): row for key, strategy, row in rows}
    compared = (by_training.get((STRATEGIES[strategy].saves_against, key)) for key, strategy, _ in rows)
    return [with_saving(row, whole) if whole else row for (_, _, row), whole in zip(rows, compared, strict=True)]


def with_saving(row: Row, whole: Row) -> Row:
    """Return a row with what it saves against another, or with a note where that is less than two standard errors."""
    saved, by_formula = (difference(whole[key], row[key]) for key in ("state_gib", "state_formula_gib"))
    error = math.hypot(row["state_error_gib"] or 0, whole["state_error_gib"] or 0)
    is_clear = saved is None or abs(saved) >= 2 * error
    figures = {**row.figures, "saved_gib": saved if is_clear else None, "saved_formula_gib": by_formula}
    notes = row.notes if is_clear else (*row.notes, make_note(SAVING_UNCLEAR, error_gib=error))
    return msgspec.structs.replace(row, figures=figures, notes=notes)


def difference(one: float | None, other: float | None) -> float | None:
    """Return one figure less the other, None if one is missing."""
    return None if one is None or other is None else one - other


def memory_row(point: PooledPoint) -> Row:
    """Return the row of a point's search: medians over its repeats. Of the two batch sizes it has the smallest.

    A batch that one search found too large is not said to fit.
    """
    measured = [record.measurement for record in point.ok_records if record.measurement]
    found = [search for search in (one.memory_search for one in measured) if search is not None]
    by_search = [search_figures(search) for search in found]
    formulas_gib = [by_formula / GIB for one in measured if (by_formula := state_bytes(one, point.spec)) is not None]
    by_search += [{"state_formula_gib": value} for value in formulas_gib]
    known = group_pairs((key, value) for figures in by_search for key, value in figures.items() if value is not None)
    medians: dict[str, float] = {key: statistics.median(values) for key, values in known.items()}
    medians |= {key: int(medians[key]) for key in COUNTS if key in medians}
    medians |= {key: int(min(known[key])) for key in BATCH_SIZES if key in known}
    return make_row(MEMORY_BOUNDARY, point, memory_notes(point, found), **medians)


def search_figures(search: MemorySearch) -> dict[str, float | None]:
    """Return the figures of one search by column. Memory is that of the fullest device in the largest trial that fits.

    Head room is the device's usable memory less the peak. The prediction error is positive if the prediction was too
    large. The time includes the starts of the processes.
    """
    largest, predicted = search.largest_fitting, search.predicted
    trial = next(trial for trial in search.trials if trial.batch_size_per_gpu == largest)
    peak_bytes, usable_bytes = trial.peak_allocated_bytes, trial.usable_bytes
    room_bytes = None if peak_bytes is None or usable_bytes is None else usable_bytes - peak_bytes
    line = line_through(search)
    return {
        "state_gib": line and line.state_bytes / GIB,
        "state_error_gib": None if line is None or line.error_bytes is None else line.error_bytes / GIB,
        "sample_memory_gib": line and line.sample_bytes / GIB,
        "largest_batch_size_per_gpu": largest,
        "smallest_failing_batch_size_per_gpu": search.smallest_failing,
        "peak_memory_gib": None if peak_bytes is None else peak_bytes / GIB,
        "reserved_memory_gib": None if trial.peak_reserved_bytes is None else trial.peak_reserved_bytes / GIB,
        "head_room_gib": None if room_bytes is None else room_bytes / GIB,
        "predicted_batch_size_per_gpu": predicted,
        "prediction_error": None if predicted is None else predicted / largest - 1,
        "num_trials": len(search.trials),
        "num_ooms": sum(trial.is_oom for trial in search.trials),
        "search_time_s": sum(trial.time_ns for trial in search.trials) / 1e9,
    }


def line_through(search: MemorySearch) -> Line | None:
    """Return the line of the trials that fit; None for less than two batch sizes, no error for less than three trials.

    The error is that of the intercept in a linear regression (Draper and Smith, Applied Regression Analysis, ch. 1).
    """
    points = memory_points(search.trials)
    sizes, peaks = [point.batch_size for point in points], [point.peak_bytes for point in points]
    if len(set(sizes)) < 2:
        return None
    fit = statistics.linear_regression(sizes, peaks)
    if len(sizes) < 3:
        return Line(fit.intercept, None, fit.slope)
    mean = statistics.fmean(sizes)
    scatter = math.dist(peaks, [fit.intercept + fit.slope * size for size in sizes]) / math.sqrt(len(sizes) - 2)
    spread = sum((size - mean) ** 2 for size in sizes)
    return Line(fit.intercept, scatter * math.sqrt(1 / len(sizes) + mean**2 / spread), fit.slope)


def memory_notes(point: PooledPoint, searches: Sequence[MemorySearch]) -> list[Note]:
    notes = [*point.allocator_retry_notes]
    for search in searches:
        num_trials, largest = len(search.trials), search.largest_fitting
        if search.smallest_failing is None:
            notes.append(make_note(NOTHING_FAILED, trials=num_trials))
        elif search.smallest_failing - largest > bracket_tolerance(largest):
            notes.append(make_note(NOT_NARROWED, trials=num_trials))
        failed = [trial for trial in search.trials if trial.reason]
        notes += [make_note(TRIAL_FAILED, batch_size=trial.batch_size_per_gpu, reason=trial.reason) for trial in failed]
    elements = LARGEST_ACTIVATION.get(str(point.spec.model))
    if elements and point.spec.device == "cuda":
        first_split = MAX_ELEMENTS // elements
        if any(search.largest_fitting >= first_split for search in searches):
            notes.append(make_note(CONVOLUTIONS_SPLIT, batch_size=first_split))
    return notes
