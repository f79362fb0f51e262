"""The rows of the memory boundary: the largest batch that fits, what it takes, and how the search came to it.

Keys are the JSON contract; a figure that cannot be computed is None and the row's `note` says why.
"""

from collections.abc import Callable, Sequence

from pipeline.analysis import formulas
from pipeline.analysis.memory_boundary import bracket_tolerance
from pipeline.analysis.pooling import PooledPoint
from pipeline.experiment.measurement import MemorySearch, MemoryTrial
from pipeline.experiment.record import Record
from pipeline.report.rows import Row, start_row

MAX_ELEMENTS = 2**31  # of an activation whose convolution is not split
LARGEST_ACTIVATION = {"resnet18": 64 * 32 * 32}  # elements an image

SearchFigure = Callable[[MemorySearch], float | None]


def memory_row(cell: PooledPoint, axes: Sequence[str]) -> Row:
    """One search; the medians of several repeats."""
    return start_row(
        cell,
        axes,
        largest_batch_size_per_gpu=whole(median(cell, lambda found: found.largest_fitting)),
        smallest_failing_batch_size_per_gpu=whole(median(cell, lambda found: found.smallest_failing)),
        peak_memory_gib=median(cell, search_peak_memory_gib),
        head_room_gib=median(cell, head_room_gib),
        predicted_batch_size_per_gpu=whole(median(cell, lambda found: found.predicted)),
        prediction_error=median(cell, prediction_error),
        num_trials=whole(median(cell, lambda found: len(found.trials))),
        num_ooms=whole(median(cell, num_ooms)),
        search_time_s=median(cell, search_time_s),
        notes=memory_notes(cell),
    )


def search_of(record: Record) -> MemorySearch | None:
    """What the record's search found."""
    return record.measurement.memory_search if record.measurement else None


def median(cell: PooledPoint, figure: SearchFigure) -> float | None:
    """The median of a figure over the searches that have it."""
    return cell.median(lambda record: figure(found) if (found := search_of(record)) else None)


def whole(value: float | None) -> int | None:
    """A count; the median of an even number of repeats may lie between two, and the smaller is on the safe side."""
    return None if value is None else int(value)


def largest_trial(found: MemorySearch) -> MemoryTrial:
    """The trial of the largest batch that fits."""
    return next(trial for trial in found.trials if trial.batch_size_per_gpu == found.largest_fitting)


def search_peak_memory_gib(found: MemorySearch) -> float | None:
    """The peak of the largest batch that fits, on its fullest device."""
    peak_bytes = largest_trial(found).peak_allocated_bytes
    return None if peak_bytes is None else peak_bytes / formulas.GIB


def head_room_gib(found: MemorySearch) -> float | None:
    """What of that device's usable memory the peak leaves."""
    trial = largest_trial(found)
    if trial.peak_allocated_bytes is None or trial.usable_bytes is None:
        return None
    return (trial.usable_bytes - trial.peak_allocated_bytes) / formulas.GIB


def prediction_error(found: MemorySearch) -> float | None:
    """How far the first prediction was above the largest batch that fits, a fraction of that."""
    return None if found.predicted is None else found.predicted / found.largest_fitting - 1


def num_ooms(found: MemorySearch) -> int:
    """The trials that ran out of memory."""
    return sum(trial.is_oom for trial in found.trials)


def search_time_s(found: MemorySearch) -> float:
    """All trials, the starts of their processes included."""
    return sum(trial.time_ns for trial in found.trials) / 1e9


def memory_notes(cell: PooledPoint) -> list[str]:
    """What the reader must know of the boundary."""
    notes = cell.allocator_retry_notes
    searches = [found for record in cell.ok_records if (found := search_of(record))]
    for found in searches:
        if found.smallest_failing is None:
            notes.append(f"nothing failed in {len(found.trials)} trials")
        elif found.smallest_failing - found.largest_fitting > bracket_tolerance(found.largest_fitting):
            notes.append(f"not narrowed to 1 % in {len(found.trials)} trials")
        notes += [f"failed at {trial.batch_size_per_gpu}: {trial.reason}" for trial in found.trials if trial.reason]
    elements = LARGEST_ACTIVATION.get(str(cell.spec.model))
    if elements and cell.spec.device == "cuda":
        kink = MAX_ELEMENTS // elements
        if any(found.largest_fitting >= kink for found in searches):
            notes.append(f"from {kink} on activations pass 2^31 elements and convolutions are split")
    return notes
