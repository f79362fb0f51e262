"""The memory boundary: the largest batch that fits, what sharding saves, and what ran out of memory."""

import math
import statistics
from collections.abc import Sequence

import msgspec

from pipeline.figures.formulas import GIB, state_bytes
from pipeline.figures.memory_trials import bracket_tolerance, memory_points
from pipeline.figures.notes import Note, NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.plan.axes import NUM_TRIAL_STEPS, STRATEGY_AXES
from pipeline.plan.spec import POOLED_AXES, alike_key
from pipeline.plan.strategies import STRATEGIES
from pipeline.records.record import MemorySearch
from pipeline.report.claims import (
    Tile,
    badges_of,
    describe_own,
    differing_axes,
    grid_command,
    where_of,
)
from pipeline.report.table import (
    MEMORY,
    PLACE,
    PREDICTION_ERROR,
    Column,
    Row,
    Table,
    Tables,
    View,
    make_row,
    sort_rows,
)

SAVING_UNCLEAR = NoteKind(
    "saving_unclear", "peaks lie too far from a line to tell what is saved (standard error {error_gib:.2g} GiB)"
)

MEMORY_BOUNDARY = Table(
    "memory",
    "Q1",
    (
        *PLACE,
        Column("largest_batch_size_per_gpu", "largest that fits", "Largest batch size per GPU that fits."),
        Column(
            "smallest_failing_batch_size_per_gpu",
            "smallest that fails",
            "Smallest batch size per GPU that failed, for any reason.",
        ),
        MEMORY._replace(heading="peak [GiB]"),
        Column(
            "reserved_memory_gib",
            "reserved [GiB]",
            "Fullest GPU: the most that torch's allocator held; beyond the peak it is fragments and cache.",
        ),
        Column("head_room_gib", "free memory [GiB]", "Fullest GPU: usable memory minus peak."),
        Column("predicted_batch_size_per_gpu", "first prediction", "First prediction, from a line through two trials."),
        Column("num_trials", "trials", "Trials of the search."),
        Column("search_time_s", "search [s]", "Time of all trials, including process start."),
        PREDICTION_ERROR._replace(heading=""),
        Column("num_ooms", "", "Trials that ran out of memory; the note lists other failures."),
        Column(
            "state_gib",
            "without samples [GiB]",
            "Peak without samples: where the line through the trials begins.",
        ),
        Column("state_error_gib", "", "The standard error of state_gib."),
        Column("sample_memory_gib", "a sample [MiB]", "What a sample adds: the slope of that line."),
        Column(
            "state_formula_gib",
            "by formula [GiB]",
            "Weights, gradients and the optimizer's state.",
        ),
        Column(
            "saved_gib",
            "saved [GiB]",
            "state_gib of DDP minus state_gib; not stated below twice its standard error.",
        ),
        Column("saved_formula_gib", "saved, by formula [GiB]", "The same by the formulas."),
    ),
    View(
        "The memory boundary",
        f"$Images per $GPU, within 1 %: {NUM_TRIAL_STEPS} full steps of synthetic $images, each trial in new "
        "processes.",
        hidden_axes=("batch_size_per_gpu",),
        hidden_notes=(SAVING_UNCLEAR,),
        keys=(
            *("largest_batch_size_per_gpu", "smallest_failing_batch_size_per_gpu", "peak_memory_gib"),
            *("reserved_memory_gib", "head_room_gib"),
            *("predicted_batch_size_per_gpu", "num_trials", "search_time_s"),
        ),
    ),
    View(
        "What sharding saves",
        "A line through the trials that fit: memory without samples, and what a sample adds. Saved: against DDP.",
        lambda rows: sort_rows(rows) if any(STRATEGIES[row["strategy"]].saves_against for row in rows) else [],
        keys=(
            "largest_batch_size_per_gpu",
            "sample_memory_gib",
            "state_gib",
            "state_formula_gib",
            "saved_gib",
            "saved_formula_gib",
        ),
        hidden_axes=("batch_size_per_gpu",),
    ),
)

OOM = Table(
    "oom",
    "",
    (
        *PLACE,
        Column("reason", "", "Why the configuration ran out of memory."),
        Column("max_steps", "", "Steps after which an epoch is cut off."),
    ),
)

NOTHING_FAILED = NoteKind("nothing_failed", "nothing failed in {trials} trials")
SEARCHES_DIFFER = NoteKind(
    "searches_differ", "the searches found {low} to {high}", badge="searches found {low} to {high}"
)
NOT_NARROWED = NoteKind("not_narrowed", "not narrowed to 1 % in {trials} trials")
TRIAL_FAILED = NoteKind("trial_failed", "failed at {batch_size}: {reason}")
CONVOLUTIONS_SPLIT = NoteKind(
    "convolutions_split", "from {batch_size} on activations have more than 2^31 elements, and convolutions are split"
)

SAVED_MAY_DIFFER = ("strategy", "batch_size_per_gpu", *STRATEGY_AXES, *POOLED_AXES)
FIRST_SPLIT = 2**31 // (64 * 32 * 32)  # images of ResNet-18: beyond 2^31 elements convolutions are split
OF_SMALLEST = (
    "largest_batch_size_per_gpu",
    "smallest_failing_batch_size_per_gpu",
    "peak_memory_gib",
    "reserved_memory_gib",
    "head_room_gib",
    "predicted_batch_size_per_gpu",
    "prediction_error",
)
"""The figures that a row has of one search, so that they belong together."""
COUNTS = ("num_trials", "num_ooms")  # rounded down


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
    """Return the row of a point's search: of several the one with the smallest result, with medians of all else.

    A batch that one search found too large is not said to fit.
    """
    found = [one.memory_search for one in point.measurements if one.memory_search]
    smallest = min(found, key=lambda search: search.largest_fitting, default=None)
    by_search = [search_figures(search) for search in found]
    by_formula = (state_bytes(one, point.spec) for one in point.measurements)
    by_search += [{"state_formula_gib": value / GIB} for value in by_formula if value is not None]
    known = group_pairs((key, value) for figures in by_search for key, value in figures.items() if value is not None)
    medians: dict[str, float] = {key: statistics.median(values) for key, values in known.items()}
    medians |= {key: int(medians[key]) for key in COUNTS if key in medians}
    of_one = search_figures(smallest) if smallest else {}
    of_smallest = {key: value for key, value in of_one.items() if key in OF_SMALLEST}
    return make_row(MEMORY_BOUNDARY, point, memory_notes(point, found), **{**medians, **of_smallest})


def search_figures(search: MemorySearch) -> dict[str, float | None]:
    """Return the figures of one search by column. Memory is that of the fullest device in the largest trial that fits.

    Head room is the device's usable memory less the peak. The prediction error is positive if the prediction was too
    large. The time includes the starts of the processes.
    """
    largest, predicted = search.largest_fitting, search.predicted
    trial = next(trial for trial in search.trials if trial.batch_size_per_gpu == largest)
    peak_bytes, usable_bytes = trial.peak_allocated_bytes, trial.usable_bytes
    room_bytes = None if peak_bytes is None or usable_bytes is None else usable_bytes - peak_bytes
    return {
        **line_figures(search),
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


def line_figures(search: MemorySearch) -> dict[str, float]:
    """Return the line of the trials that fit: memory without samples, its standard error, and what a sample adds.

    It needs two batch sizes, and the error three trials. The error is that of the intercept in a linear regression
    (Draper and Smith, Applied Regression Analysis, ch. 1).
    """
    points = memory_points(search.trials)
    sizes, peaks = [point.batch_size for point in points], [point.peak_bytes for point in points]
    if len(set(sizes)) < 2:
        return {}
    fit = statistics.linear_regression(sizes, peaks)
    found = {"state_gib": fit.intercept / GIB, "sample_memory_gib": fit.slope / GIB}
    if len(sizes) > 2:
        mean = statistics.fmean(sizes)
        scatter = math.dist(peaks, [fit.intercept + fit.slope * size for size in sizes]) / math.sqrt(len(sizes) - 2)
        spread = sum((size - mean) ** 2 for size in sizes)
        found["state_error_gib"] = scatter * math.sqrt(1 / len(sizes) + mean**2 / spread) / GIB
    return found


def memory_notes(point: PooledPoint, searches: Sequence[MemorySearch]) -> list[Note]:
    notes, results = [*point.allocator_retry_notes], {search.largest_fitting for search in searches}
    if len(results) > 1:
        notes.append(make_note(SEARCHES_DIFFER, low=min(results), high=max(results)))
    for search in searches:
        num_trials, largest = len(search.trials), search.largest_fitting
        if search.smallest_failing is None:
            notes.append(make_note(NOTHING_FAILED, trials=num_trials))
        elif search.smallest_failing - largest > bracket_tolerance(largest):
            notes.append(make_note(NOT_NARROWED, trials=num_trials))
        failed = [trial for trial in search.trials if trial.reason]
        notes += [make_note(TRIAL_FAILED, batch_size=trial.batch_size_per_gpu, reason=trial.reason) for trial in failed]
    is_split = any(search.largest_fitting >= FIRST_SPLIT for search in searches)
    if is_split and point.spec.model == "resnet18" and point.spec.device == "cuda":
        notes.append(make_note(CONVOLUTIONS_SPLIT, batch_size=FIRST_SPLIT))
    return notes


def oom_row(point: PooledPoint) -> Row:
    """Return the row of a point that ran out of memory."""
    records = [outcome.record for outcome in point.outcomes if outcome.record and outcome.status == "oom"]
    reason = "; ".join(sorted({record.reason for record in records}))
    return make_row(OOM, point, status="oom", n=len(records), reason=reason, max_steps=point.spec.max_steps)


def ran_out(row: Row) -> bool:
    """True if a run of the row's point ran out of memory, also if others did not."""
    return row.point is not None and any(outcome.status == "oom" for outcome in row.point.outcomes)


ALL_FIT = "the largest that was tried; more may fit"
LARGEST_FITTING = Tile("Largest batch that fits", unit="$images", line=ALL_FIT)


def memory_claims(tables: Tables) -> list[Tile]:
    """Return the largest batch size that fits one GPU, or each of several if one was not tried; none for a single size.

    Where no search was made, and nothing ran out of memory, the claim has the grid that searches.
    """
    searched = [row for row in tables["memory"] if row["largest_batch_size_per_gpu"] is not None]
    alone = [row for row in searched if row["num_gpus"] == 1]
    if searched:
        best = alone[0] if alone else max(searched, key=lambda row: int(row["largest_batch_size_per_gpu"]))
        fails = best["smallest_failing_batch_size_per_gpu"]
        each = "" if alone else f"on each of {best['num_gpus']} $GPUs"
        where = each + where_of(best, alone or searched, "batch_size_per_gpu")
        largest = LARGEST_FITTING._replace(figure=f"{best['largest_batch_size_per_gpu']:,}", badges=badges_of(best))
        said = ALL_FIT if fails is None else f"{fails:,} do not fit"
        return [largest._replace(line=said, more=where.removeprefix(", "))]
    lost = [row for row in tables["Q1"] if ran_out(row)]
    fitting = [row for row in tables["Q1"] if row.status == "ok" and not ran_out(row)]
    if lost:
        first = min(lost, key=lambda row: int(row["batch_size_per_gpu"]))
        size = first["batch_size_per_gpu"]
        alike = [row["batch_size_per_gpu"] for row in fitting if not differing_axes(row, first)]
        smaller = max((other for other in alike if other < size), default=None)
        named = describe_own(first, tables["Q1"], "batch_size_per_gpu")
        if smaller is None:
            fails = f"{size:,}, the smallest size tried, runs out of memory"
            return [LARGEST_FITTING._replace(unit="", line=fails, more=named)]
        fits = f"of those tried; {size:,} runs out of memory"
        return [LARGEST_FITTING._replace(figure=f"{smaller:,}", line=fits, more=named)]
    sizes = {row["batch_size_per_gpu"] for row in fitting}
    command = "" if any(row.axes.get("script") for row in fitting) else grid_command("memory")
    return [LARGEST_FITTING._replace(figure=f"{max(sizes):,}", command=command)] if len(sizes) > 1 else []
