"""The rows of the memory boundary: the largest batch that fits, its memory, and the search for it."""

import statistics
from collections.abc import Sequence

from pipeline.analysis.formulas import GIB, state_bytes
from pipeline.analysis.memory_trials import bracket_tolerance, memory_points
from pipeline.analysis.notes import Note, make_note
from pipeline.analysis.pooling import PooledPoint, group_pairs
from pipeline.experiment.axis_groups import POOLED_AXES, STRATEGY_AXES, alike_key
from pipeline.experiment.measurement import MemorySearch
from pipeline.tables.columns import Row, make_row
from pipeline.tables.definitions import MEMORY_BOUNDARY

SAVED_MAY_DIFFER = ("strategy", "batch_size_per_gpu", *STRATEGY_AXES, *POOLED_AXES)
MAX_ELEMENTS = 2**31  # of an activation; a convolution over more elements is split
LARGEST_ACTIVATION = {"resnet18": 64 * 32 * 32}  # elements for each image
BATCH_SIZES = ("largest_batch_size_per_gpu", "smallest_failing_batch_size_per_gpu")
COUNTS = ("predicted_batch_size_per_gpu", "num_trials", "num_ooms")  # rounded down


def memory_rows(points: Sequence[PooledPoint]) -> list[Row]:
    """Return a row for each point's search, with what a strategy saves against DDP's search of the same training."""
    rows = [(point, memory_row(point)) for point in points]
    by_ddp = {alike_key(point.spec, SAVED_MAY_DIFFER): row for point, row in rows if point.spec.strategy == "ddp"}
    for point, row in rows:
        ddp = by_ddp.get(alike_key(point.spec, SAVED_MAY_DIFFER))
        for key in ("state", "state_formula"):
            ours, theirs = row[f"{key}_gib"], ddp[f"{key}_gib"] if ddp else None
            if point.spec.strategy in ("fsdp", "zero1") and ours is not None and theirs is not None:
                row.figures[f"{key.replace('state', 'saved')}_gib"] = theirs - ours
    return [row for _, row in rows]


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
    state_bytes_found, sample_bytes = line_through(search)
    return {
        "state_gib": None if state_bytes_found is None else state_bytes_found / GIB,
        "sample_memory_gib": None if sample_bytes is None else sample_bytes / GIB,
        "largest_batch_size_per_gpu": largest,
        "smallest_failing_batch_size_per_gpu": search.smallest_failing,
        "peak_memory_gib": None if peak_bytes is None else peak_bytes / GIB,
        "head_room_gib": None if room_bytes is None else room_bytes / GIB,
        "predicted_batch_size_per_gpu": predicted,
        "prediction_error": None if predicted is None else predicted / largest - 1,
        "num_trials": len(search.trials),
        "num_ooms": sum(trial.is_oom for trial in search.trials),
        "search_time_s": sum(trial.time_ns for trial in search.trials) / 1e9,
    }


def line_through(search: MemorySearch) -> tuple[float | None, float | None]:
    """Return the memory without samples and that of a sample, in bytes, by the line of the trials that fit."""
    points = memory_points(search.trials)
    if len({point.batch_size for point in points}) < 2:
        return None, None
    fit = statistics.linear_regression([point.batch_size for point in points], [point.peak_bytes for point in points])
    return fit.intercept, fit.slope


def memory_notes(point: PooledPoint, searches: Sequence[MemorySearch]) -> list[Note]:
    notes = [*point.allocator_retry_notes]
    for search in searches:
        num_trials, largest = len(search.trials), search.largest_fitting
        if search.smallest_failing is None:
            notes.append(make_note("nothing_failed", trials=num_trials))
        elif search.smallest_failing - largest > bracket_tolerance(largest):
            notes.append(make_note("not_narrowed", trials=num_trials))
        failed = [trial for trial in search.trials if trial.reason]
        notes += [
            make_note("trial_failed", batch_size=trial.batch_size_per_gpu, reason=trial.reason) for trial in failed
        ]
    elements = LARGEST_ACTIVATION.get(str(point.spec.model))
    if elements and point.spec.device == "cuda":
        first_split = MAX_ELEMENTS // elements
        if any(search.largest_fitting >= first_split for search in searches):
            notes.append(make_note("convolutions_split", batch_size=first_split))
    return notes
