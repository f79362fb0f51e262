"""The rows of the memory boundary: the largest batch that fits, its memory, and the search for it."""

from collections.abc import Callable, Sequence

from pipeline.analysis import formulas
from pipeline.analysis.memory_trials import bracket_tolerance
from pipeline.analysis.notes import Note, make_note
from pipeline.analysis.pooling import PooledPoint
from pipeline.experiment.measurement import MemorySearch, MemoryTrial
from pipeline.experiment.record import Record
from pipeline.report.row_types import MemoryRow, make_row

MAX_ELEMENTS = 2**31  # in an activation; the convolution of a larger one is split
LARGEST_ACTIVATION = {"resnet18": 64 * 32 * 32}  # elements an image

SearchFigure = Callable[[MemorySearch], float | None]


def memory_row(point: PooledPoint, axes: Sequence[str]) -> MemoryRow:
    """Return the row of a point's search, medians over its repeats."""
    return make_row(
        MemoryRow,
        point,
        axes,
        largest_batch_size_per_gpu=as_count(median(point, lambda found: found.largest_fitting)),
        smallest_failing_batch_size_per_gpu=as_count(median(point, lambda found: found.smallest_failing)),
        peak_memory_gib=median(point, search_peak_memory_gib),
        head_room_gib=median(point, head_room_gib),
        predicted_batch_size_per_gpu=as_count(median(point, lambda found: found.predicted)),
        prediction_error=median(point, prediction_error),
        num_trials=as_count(median(point, lambda found: len(found.trials))),
        num_ooms=as_count(median(point, num_ooms)),
        search_time_s=median(point, search_time_s),
        notes=memory_notes(point),
    )


def search_of(record: Record) -> MemorySearch | None:
    """Return the result of a record's search, None if it has none."""
    return record.measurement.memory_search if record.measurement else None


def median(point: PooledPoint, figure: SearchFigure) -> float | None:
    """Return the median of a figure over the searches that have it."""
    return point.median(lambda record: figure(found) if (found := search_of(record)) else None)


def as_count(value: float | None) -> int | None:
    """Return a median as a whole number, rounded down: a smaller batch size is safe."""
    return None if value is None else int(value)


def largest_trial(found: MemorySearch) -> MemoryTrial:
    """Return the trial of the largest batch that fits."""
    return next(trial for trial in found.trials if trial.batch_size_per_gpu == found.largest_fitting)


def search_peak_memory_gib(found: MemorySearch) -> float | None:
    """Return the peak of the largest batch that fits, on its fullest device."""
    peak_bytes = largest_trial(found).peak_allocated_bytes
    return None if peak_bytes is None else peak_bytes / formulas.GIB


def head_room_gib(found: MemorySearch) -> float | None:
    """Return the usable memory of that device less the peak."""
    trial = largest_trial(found)
    if trial.peak_allocated_bytes is None or trial.usable_bytes is None:
        return None
    return (trial.usable_bytes - trial.peak_allocated_bytes) / formulas.GIB


def prediction_error(found: MemorySearch) -> float | None:
    """Return the relative error of the first prediction, positive if it was too large."""
    return None if found.predicted is None else found.predicted / found.largest_fitting - 1


def num_ooms(found: MemorySearch) -> int:
    """Return the number of trials that ran out of memory."""
    return sum(trial.is_oom for trial in found.trials)


def search_time_s(found: MemorySearch) -> float:
    """Return the time of all trials with the starts of their processes."""
    return sum(trial.time_ns for trial in found.trials) / 1e9


def memory_notes(point: PooledPoint) -> list[Note]:
    """Return the notes on a point's boundary."""
    notes = point.allocator_retry_notes
    searches = [found for record in point.ok_records if (found := search_of(record))]
    for found in searches:
        if found.smallest_failing is None:
            notes.append(make_note("nothing_failed", trials=len(found.trials)))
        elif found.smallest_failing - found.largest_fitting > bracket_tolerance(found.largest_fitting):
            notes.append(make_note("not_narrowed", trials=len(found.trials)))
        notes += [
            make_note("trial_failed", batch_size=trial.batch_size_per_gpu, reason=trial.reason)
            for trial in found.trials
            if trial.reason
        ]
    elements = LARGEST_ACTIVATION.get(str(point.spec.model))
    if elements and point.spec.device == "cuda":
        kink = MAX_ELEMENTS // elements
        if any(found.largest_fitting >= kink for found in searches):
            notes.append(make_note("convolutions_split", batch_size=kink))
    return notes
