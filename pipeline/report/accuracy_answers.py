"""The answer to Q4: what a large batch costs in accuracy, what mends it, and what is soonest at the target."""

import math
from collections.abc import Sequence

from pipeline.analysis.intervals import min_values
from pipeline.experiment.axis_groups import TARGET_MAY_DIFFER
from pipeline.experiment.point_label import (
    ALL_REMEDIES,
    describe_axis,
    describe_point,
    format_figure,
    format_number,
    varying_axes,
)
from pipeline.experiment.spec import REMEDIES
from pipeline.report.answer_words import (
    PART,
    RUN,
    between,
    not_answered,
    percent,
    submit_again,
    weakness_of,
)
from pipeline.report.row_types import NEVER_REACHED, TimeToTargetRow
from pipeline.report.time_to_target_rows import format_target, main_study
from pipeline.system.errors import pluralize

MAX_RIVALS = 2  # named in the answer
MIN_RUNS, MIN_EPOCHS = 3, 10  # below these an accuracy cannot tell a remedy from noise


def answer_large_batches(all_rows: Sequence[TimeToTargetRow]) -> str:
    """Return what large batches cost in test accuracy, what remedies mend of it, and what gets to the target soonest.

    It is about one study (main_study). Accuracies are compared at the epochs of its baseline.
    """
    rows, baseline = main_study(all_rows)
    if baseline is None:
        return not_answered("no test accuracy of a small and of a large batch was measured", "q4-study")
    named = ""
    if len(rows) < len(all_rows):
        axes = [axis for axis in varying_axes([row.axes for row in all_rows]) if axis not in TARGET_MAY_DIFFER]
        named = f" This is the study with {describe_point(baseline.axes, axes)}; the tables have the others."
    answer = answer_for_study(rows, baseline)
    return answer.replace(ALL_REMEDIES, f"{ALL_REMEDIES} ({', '.join(REMEDIES)})", 1) + named


def answer_for_study(rows: Sequence[TimeToTargetRow], small: TimeToTargetRow) -> str:
    """Return the answer of one study with the baseline `small`."""
    epochs = pluralize(small.epochs, "epoch")
    if small.final_test_accuracy is None or "diverged" in {note.kind for note in small.notes}:
        return describe_lost(small)
    larger = [row for row in rows if row.epochs == small.epochs and row.global_batch_size > small.global_batch_size]
    large = large_batch(larger)
    if large is None:
        return not_answered(f"no test accuracy of a larger batch after {epochs}", "q4-study")
    tried = rows_with_remedies(larger, large)
    known = [row for row in tried if row.final_test_accuracy is not None]
    if not known:
        what = "has a result with remedies" if tried else "tried a remedy"
        return not_answered(f"no run of {large.global_batch_size:,} images a step for {epochs} {what}", "q4-study")
    best = max(known, key=best_known)
    said = [describe_cost(small, large), describe_mending(best, large, num_sets(known), num_sets(tried))]
    runs = min(row.n for row in (small, large, best))
    is_few, is_short = runs < MIN_RUNS, large.epochs < MIN_EPOCHS
    if is_few or is_short:
        what = " and ".join([epochs] * is_short + [pluralize(runs, "run")] * is_few)
        return f"{PART.join(said)} But {what} cannot show whether a remedy helps: {RUN.format('q4-study')}."
    said += [
        describe_better_baseline(rows, small),
        describe_largest_mended(larger, small, large),
        describe_soonest(rows, small),
    ]
    return PART.join(filter(None, said))


def large_batch(larger: Sequence[TimeToTargetRow]) -> TimeToTargetRow | None:
    """Return the run without remedies to compare with: the largest batch that tried a remedy, else the largest."""
    with_remedies = {row.global_batch_size for row in larger if row.remedies}
    plain = [row for row in larger if not row.remedies and row.final_test_accuracy is not None]
    tried = [row for row in plain if row.global_batch_size in with_remedies]
    return max(tried or plain, key=largest_first, default=None)


def rows_with_remedies(larger: Sequence[TimeToTargetRow], large: TimeToTargetRow) -> list[TimeToTargetRow]:
    """Return the rows with remedies of the same batch, on the same number of GPUs if there are any."""
    of_size = [row for row in larger if row.remedies and row.global_batch_size == large.global_batch_size]
    return [row for row in of_size if placement(row) == placement(large)] or of_size


def describe_lost(small: TimeToTargetRow) -> str:
    """Return that the baseline has no accuracy to compare with."""
    what = f"{small.global_batch_size:,} images a step without remedies, the runs to compare with,"
    if small.final_test_accuracy is not None:
        return f"Not answered here: {what} diverged."
    if small.status in ("missing", "failed"):
        return f"Not answered yet: {what} have no result; {submit_again([small])}."
    return f"Not answered here: {what} have no result ({small.status})."


def largest_first(row: TimeToTargetRow) -> tuple[int, int, float]:
    """Return the sort key of a large batch: the largest, on the fewest GPUs, the most accurate."""
    return row.global_batch_size, -row["num_gpus"], accuracy_of(row)


def best_known(row: TimeToTargetRow) -> tuple[bool, float]:
    """Return the sort key of a row with remedies: MIN_RUNS or more first, then the most accurate."""
    return row.n >= MIN_RUNS, accuracy_of(row)


def accuracy_of(row: TimeToTargetRow) -> float:
    """Return the final accuracy of a row, 0 if it has none."""
    return row.final_test_accuracy or 0.0


def placement(row: TimeToTargetRow) -> tuple[int, int]:
    """Return the global batch and the number of GPUs of a row."""
    return row.global_batch_size, row["num_gpus"]


def num_sets(rows: Sequence[TimeToTargetRow]) -> int:
    """Return the number of different sets of remedies."""
    return len({tuple(row.remedies) for row in rows})


def describe_cost(small: TimeToTargetRow, large: TimeToTargetRow) -> str:
    """Return what the large batch costs against the small one, both without remedies."""
    loss = accuracy_of(small) - accuracy_of(large)
    change = f"{'cost' if loss >= 0 else 'gain'} {percent(abs(loss), 1).removesuffix(' %')} points"
    unclear = overlapping_ends(small, large)
    return (
        f"After {pluralize(large.epochs, 'epoch')} {large.global_batch_size:,} images a step {change} of test accuracy "
        f"against {small.global_batch_size:,}: {describe_accuracy(large)} instead of {describe_accuracy(small)}."
        f"{f' The {unclear} overlap: no difference is shown.' if unclear else ''}"
    )


def describe_mending(best: TimeToTargetRow, plain: TimeToTargetRow, num_known: int, num_tried: int) -> str:
    """Return what the best remedies give beside the same batch without: `num_known` of `num_tried` sets have run."""
    remedy = name_remedies(best)
    if "linear_scaling" in best.remedies and best.learning_rate is not None:
        remedy += f" at rate {best.learning_rate:g}"
    is_better = accuracy_of(best) > accuracy_of(plain)
    mends = f"With {remedy} it is" if is_better else f"No remedy does better: the best, {remedy}, gives"
    if num_known < num_tried:
        have = "has a result" if num_known == 1 else "have a result, the best"
        mends = f"Of {num_tried} sets of remedies {num_known} {have}: {remedy} gives"
    runs = pluralize(min(best.n, plain.n), "run")
    return f"{mends} {describe_accuracy(best)}, n = {runs}.{describe_overlap(best, plain)}"


def describe_overlap(best: TimeToTargetRow, plain: TimeToTargetRow) -> str:
    """Return that the seeds cannot tell a better accuracy from the one without remedies; empty if they can."""
    ends = overlapping_ends(best, plain) if accuracy_of(best) > accuracy_of(plain) else ""
    return f" The {ends} with and without it overlap: these runs do not show that it helps." if ends else ""


def overlapping_ends(row: TimeToTargetRow, other: TimeToTargetRow) -> str:
    """Return `intervals`, or `ranges` of fewer seeds, if those of two accuracies overlap; else an empty text."""
    if min(row.n, other.n) < MIN_RUNS:
        return ""
    lows, highs = ([part[f"final_test_accuracy_{end}"] or 0.0 for part in (row, other)] for end in ("low", "high"))
    if max(lows) > min(highs):
        return ""
    return "intervals" if min(row.n, other.n) >= min_values() else "ranges"


def describe_better_baseline(rows: Sequence[TimeToTargetRow], small: TimeToTargetRow) -> str:
    """Return what remedies give the small batch itself; empty if the seeds do not show that they help it.

    The large batch is then further behind than describe_cost and describe_mending say.
    """
    same = ("global_batch_size", "num_gpus", "epochs", "learning_rate")
    tried = [row for row in rows if row.remedies and row.n >= MIN_RUNS]
    alike = [row for row in tried if all(row[key] == small[key] for key in same)]
    best = max(alike, key=accuracy_of, default=None)
    if best is None or accuracy_of(best) <= accuracy_of(small) or overlapping_ends(best, small):
        return ""
    return (
        f"{small.global_batch_size:,} images a step reach more with {name_remedies(best)}: {describe_accuracy(best)}, "
        f"n = {pluralize(min(best.n, small.n), 'run')}."
    )


def describe_largest_mended(larger: Sequence[TimeToTargetRow], small: TimeToTargetRow, large: TimeToTargetRow) -> str:
    """Return the largest batch that remedies keep at the target; empty if it is the largest of all, `large`.

    The largest batch may be too large for any remedy, so its figures alone do not tell if one ever helps. What counts
    is the low end of the interval, of MIN_RUNS runs or more.
    """
    target = small.target_accuracy
    if target is None:
        return ""
    known = [row for row in larger if row.remedies and row.n >= MIN_RUNS]
    mended = [row for row in known if (row.final_test_accuracy_low or 0.0) >= target]
    least = f"at {format_target(target)} or above after {pluralize(small.epochs, 'epoch')}"
    if not mended:
        return f"With remedies no larger batch of {MIN_RUNS} runs or more is {least} in all of its interval."
    best = max(mended, key=lambda row: (row.global_batch_size, accuracy_of(row)))
    if best.global_batch_size == large.global_batch_size:
        return ""
    learnt = [row for row in larger if not row.remedies and row.final_test_accuracy is not None]
    plain = next((row for row in learnt if placement(row) == placement(best)), None)
    without = "" if plain is None else f", without remedies {describe_accuracy(plain)}"
    runs = pluralize(best.n if plain is None else min(best.n, plain.n), "run")
    return (
        f"With remedies the largest batch that is {least} is {best.global_batch_size:,}: with {name_remedies(best)} "
        f"{describe_accuracy(best)}{without}, n = {runs}.{'' if plain is None else describe_overlap(best, plain)}"
    )


def describe_soonest(rows: Sequence[TimeToTargetRow], small: TimeToTargetRow) -> str:
    """Return which run gets to the target soonest in seconds and in GPU-seconds, beside the small batch's time.

    Rows that reach it on another GPU model have no time to compare. They are counted.
    """
    if small.target_accuracy is None:
        return ""
    target = format_target(small.target_accuracy)
    untimed = [row for row in rows if row.epochs_to_target is not None and row.time_to_target_s is None]
    reach = "row reaches" if len(untimed) == 1 else "rows reach"
    left_out = f" {len(untimed)} {reach} it on another GPU model, whose time does not compare." if untimed else ""
    first = {word: row for row in rows for word in (row.soonest or "").split(" and ") if word}
    if first:
        return describe_first(rows, small, first["seconds"], first["GPU-seconds"], target) + left_out
    if untimed:
        return f"No time to {target} is known.{left_out}"
    never = all(row.reached in (None, NEVER_REACHED) for row in rows)
    return f"No run reaches {target}." if never else f"In no row half of the runs reach {target}."


def describe_first(
    rows: Sequence[TimeToTargetRow],
    small: TimeToTargetRow,
    soonest: TimeToTargetRow,
    cheapest: TimeToTargetRow,
    target: str,
) -> str:
    """Return the soonest run in seconds and in GPU-seconds, beside the small batch and the rivals."""
    if soonest is small:
        said = f"No run is known to reach {target} sooner than {describe_run(small, cheapest)}: {describe_time(small)}."
    else:
        rival = describe_run(small, soonest)
        reach = f"{rival} reach it in {describe_time(small)}" if small.time_to_target_s is not None else ""
        said = (
            f"By the median the soonest at {target} is {describe_run(soonest, small)}: {describe_time(soonest)}; "
            f"{reach or f'{describe_reached(small)} of {rival} reach it'}."
        )
    said += describe_rivals(rows, soonest)
    if cheapest is soonest:
        return said
    gpu_time_s = format_figure(cheapest.gpu_time_to_target_s or 0.0)
    return f"{said} In GPU-seconds it is {describe_run(cheapest, soonest)}: {gpu_time_s} GPU-s."


def describe_rivals(rows: Sequence[TimeToTargetRow], soonest: TimeToTargetRow) -> str:
    """Return the runs whose interval meets that of the soonest, the first two by name: they may be as soon.

    If a seed of the soonest missed the target, its interval has no end.
    """
    end = soonest.time_to_target_high_s or soonest.time_to_target_s or 0.0
    end = math.inf if missed_by_some(soonest) else end
    timed = [(row.time_to_target_s, row) for row in rows if row.time_to_target_s is not None and row is not soonest]
    met = [(time_s, row) for time_s, row in timed if (row.time_to_target_low_s or time_s) <= end]
    met.sort(key=lambda pair: pair[0])
    names = [f"{describe_run(row, soonest)} ({format_number(time_s, ',.1f')} s)" for time_s, row in met]
    more = [f"{len(names) - MAX_RIVALS} more"] if len(names) > MAX_RIVALS else []
    return f" It is not shown to be sooner than {' or '.join([*names[:MAX_RIVALS], *more])}." if names else ""


def describe_reached(row: TimeToTargetRow) -> str:
    """Return how many runs of a row reach the target."""
    return "no runs" if row.reached == NEVER_REACHED else f"{row.reached} runs"


def missed_by_some(row: TimeToTargetRow) -> bool:
    """True if a seed of the row did not reach the target."""
    return row.reached != f"{row.n} of {row.n}"


def describe_run(row: TimeToTargetRow, beside: TimeToTargetRow) -> str:
    """Return a row in words: its batch and remedies, and what else differs from `beside`.

    The learning rate differs by linear scaling too, so it is named only where batch and remedies are equal.
    """
    gpus = f" on {pluralize(row['num_gpus'], 'GPU')}" if row["num_gpus"] != beside["num_gpus"] else ""
    epochs = f" for {pluralize(row.epochs, 'epoch')}" if row.epochs != beside.epochs else ""
    remedies = f"with {name_remedies(row)}" if row.remedies else "without remedies"
    alike = (row.global_batch_size, row.remedies) == (beside.global_batch_size, beside.remedies)
    rate = f", learning rate {row.learning_rate:g}" if alike and row.learning_rate != beside.learning_rate else ""
    return f"{row.global_batch_size:,} images a step{gpus}{epochs} {remedies}{rate}"


def describe_time(row: TimeToTargetRow) -> str:
    """Return the training time to the target with its ends (as in describe_accuracy), n, and what weakens it."""
    low, high, time_s = row.time_to_target_low_s, row.time_to_target_high_s, row.time_to_target_s
    ends = "" if low is None or high is None else f"{format_number(low, ',.1f')} to {format_number(high, ',.1f')} s"
    reached = f"reached by {describe_reached(row)}" if missed_by_some(row) else ""
    weak = dict.fromkeys(map(weakness_of, row.notes))
    runs = pluralize(row.n, "run")
    runs = f"n = {runs}" if row.num_timed == row.n else f"time of {row.num_timed} of {runs}"
    details = ", ".join(filter(None, [ends, runs, reached, *weak]))
    return f"{format_number(time_s or 0.0, ',.1f')} s of training ({details})"


def name_remedies(row: TimeToTargetRow) -> str:
    """Return the remedies of a row in words."""
    return describe_axis("remedies", row.remedies)


def describe_accuracy(row: TimeToTargetRow) -> str:
    """Return the final accuracy in words: with its interval, of two to five seeds with the lowest and the highest."""
    median, low, high = (row[f"final_test_accuracy{end}"] for end in ("", "_low", "_high"))
    if low is None or high is None:
        return percent(median, 1)
    if row.n >= min_values():
        return f"{percent(median, 1)} (interval {between(low, high)})"
    return f"{percent(median, 1)} (lowest {percent(low, 1).removesuffix(' %')}, highest {percent(high, 1)})"
