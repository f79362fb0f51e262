"""The answers about accuracy: Q4, what a large batch costs and what mends it, and what int8 costs."""

from collections.abc import Sequence

from pipeline.analysis.intervals import min_values
from pipeline.report.answer_words import RUN, between, not_answered, percent
from pipeline.report.row_types import Int8Row, TimeToTargetRow
from pipeline.system.errors import pluralize

MIN_RUNS, MIN_EPOCHS = 3, 10  # below these an accuracy cannot tell a remedy from noise


def answer_large_batches(rows: Sequence[TimeToTargetRow]) -> str:
    """Return what large batches cost in test accuracy, what remedies mend of it, and what gets to the target soonest.

    Accuracies are compared at equal epochs, those of the smallest batch without remedies.
    """
    plain = sorted((row for row in rows if not row.remedies), key=lambda row: row.global_batch_size)
    if not plain:
        return not_answered("no test accuracy of a small and of a large batch was measured", "q4-study")
    small = plain[0]
    if small.final_test_accuracy is None:
        lacking = f"{small.global_batch_size:,} images a step without remedies, have no result"
        return f"Not answered yet: the runs to compare with, {lacking}; run the same submit command again."
    larger = [row for row in rows if row.epochs == small.epochs and row.global_batch_size > small.global_batch_size]
    learnt = [row for row in larger if row.final_test_accuracy is not None]
    large = max((row for row in learnt if not row.remedies), key=lambda row: row.global_batch_size, default=None)
    if large is None:
        return not_answered(f"no test accuracy of a large batch after {small.epochs} epochs", "q4-study")
    size = large.global_batch_size
    mended = [row for row in learnt if row.remedies and row.global_batch_size == size]
    if not mended:
        return not_answered(f"no run of {size:,} images a step tried a remedy for large batches", "q4-study")
    best = max(mended, key=accuracy_of)
    tried = sum(bool(row.remedies) and row.global_batch_size == size for row in larger)
    runs = min(row.n for row in (small, large, best))
    said = [
        f"{describe_cost(small, large)} {describe_mending(best, large, len(mended), tried)}",
        describe_largest_mended(learnt, small, large),
    ]
    is_few, is_short = runs < MIN_RUNS, large.epochs < MIN_EPOCHS
    if is_few or is_short:
        what = " and ".join([f"{large.epochs} epochs"] * is_short + [pluralize(runs, "run")] * is_few)
        said.append(f"But {what} cannot show whether a remedy helps: {RUN.format('q4-study')}.")
    else:
        said.append(describe_soonest(rows, small))
    return " ".join(filter(None, said))


def accuracy_of(row: TimeToTargetRow) -> float:
    """Return the final accuracy of a row, 0 if it has none."""
    return row.final_test_accuracy or 0.0


def describe_cost(small: TimeToTargetRow, large: TimeToTargetRow) -> str:
    """Return what the large batch costs against the small one, both without remedies."""
    loss = accuracy_of(small) - accuracy_of(large)
    change = f"{'cost' if loss >= 0 else 'gain'} {100 * abs(loss):.1f} points"
    return (
        f"After {large.epochs} epochs {large.global_batch_size:,} images a step {change} of test accuracy against "
        f"{small.global_batch_size:,}: {describe_accuracy(large)} instead of {describe_accuracy(small)}."
    )


def describe_mending(best: TimeToTargetRow, plain: TimeToTargetRow, num_known: int, num_tried: int) -> str:
    """Return what the best of the remedies gives beside the same batch without: `num_known` of `num_tried` have run."""
    remedy, is_better = name_remedies(best), accuracy_of(best) > accuracy_of(plain)
    mends = f"With {remedy} it is" if is_better else f"No remedy does better: the best, {remedy}, gives"
    if num_known < num_tried:
        have = "has a result" if num_known == 1 else "have a result, the best"
        mends = f"Of {num_tried} sets of remedies {num_known} {have}: {remedy} gives"
    runs = pluralize(min(best.n, plain.n), "run")
    return f"{mends} {describe_accuracy(best)}, n = {runs}.{describe_overlap(best, plain)}"


def describe_overlap(best: TimeToTargetRow, plain: TimeToTargetRow) -> str:
    """Return that the seeds cannot tell a better accuracy from the one without remedies; empty if they can."""
    if min(best.n, plain.n) < MIN_RUNS or not accuracy_of(best) > accuracy_of(plain):
        return ""
    if (best.final_test_accuracy_low or 0.0) > (plain.final_test_accuracy_high or 0.0):
        return ""
    ends = "intervals" if min(best.n, plain.n) >= min_values() else "ranges"
    return f" The {ends} with and without it overlap: these runs do not show that it helps."


def describe_largest_mended(learnt: Sequence[TimeToTargetRow], small: TimeToTargetRow, largest: TimeToTargetRow) -> str:
    """Return the largest batch that a remedy brings to the target; empty if it is the largest of all.

    The largest batch may be too large for any remedy, so its figures alone do not tell if one ever helps.
    """
    target = small.target_accuracy or 0.0
    mended = [row for row in learnt if row.remedies and accuracy_of(row) >= target]
    if not mended:
        return f"No remedy that ran brings a larger batch to the target of {percent(target, 1)}."
    best = max(mended, key=lambda row: (row.global_batch_size, accuracy_of(row)))
    size = best.global_batch_size
    if size == largest.global_batch_size:
        return ""
    said = f"The largest batch that remedies bring to the target of {percent(target, 1)} is {size:,}:"
    given = f"{name_remedies(best)} gives {describe_accuracy(best)}"
    alike = (row for row in learnt if (row.global_batch_size, row["num_gpus"]) == (size, best["num_gpus"]))
    plain = next((row for row in alike if not row.remedies), None)
    if plain is None:
        return f"{said} {given}, n = {pluralize(best.n, 'run')}."
    runs = pluralize(min(best.n, plain.n), "run")
    without = f"without remedies it is {describe_accuracy(plain)}, n = {runs}."
    return f"{said} {given}, {without}{describe_overlap(best, plain)}"


def describe_soonest(rows: Sequence[TimeToTargetRow], small: TimeToTargetRow) -> str:
    """Return which run gets to the target soonest in seconds and in GPU-seconds, beside the small batch's time."""
    first = {word: row for row in rows for word in (row.soonest or "").split(" and ") if word}
    if not first:
        return ""
    soonest, cheapest = first["seconds"], first["GPU-seconds"]
    target = percent(small.target_accuracy, 1)
    if soonest is small:
        run = describe_run(small, cheapest)
        said = f"No run reaches {target} sooner than {run}: {describe_time(small)} of training."
    else:
        rival = describe_time(small) if small.time_to_target_s is not None else "no time: it never gets there"
        said = (
            f"Soonest at {target} is {describe_run(soonest, small)}: {describe_time(soonest)} of training, "
            f"where {describe_run(small, soonest)} takes {rival}."
        )
    if cheapest is soonest:
        return said
    return f"{said} In GPU-seconds it is {describe_run(cheapest, soonest)}: {cheapest.gpu_time_to_target_s or 0.0:.3g}."


def describe_run(row: TimeToTargetRow, beside: TimeToTargetRow) -> str:
    """Return a row in words: its batch and remedies, and GPUs and epochs where they differ from those of `beside`."""
    gpus = f" on {pluralize(row['num_gpus'], 'GPU')}" if row["num_gpus"] != beside["num_gpus"] else ""
    epochs = f" for {row.epochs} epochs" if row.epochs != beside.epochs else ""
    remedies = f"with {name_remedies(row)}" if row.remedies else "without remedies"
    return f"{row.global_batch_size:,} images a step{gpus}{epochs} {remedies}"


def describe_time(row: TimeToTargetRow) -> str:
    """Return the time to the target with its interval, of two to five seeds with the lowest and the highest."""
    low, high = row.time_to_target_low_s, row.time_to_target_high_s
    ends = "" if low is None or high is None else f"{low:.3g} to {high:.3g} s, "
    return f"{row.time_to_target_s or 0.0:.3g} s ({ends}n = {pluralize(row.n, 'run')})"


def name_remedies(row: TimeToTargetRow) -> str:
    """Return the remedies of a row in words."""
    return " + ".join(row.remedies)


def describe_accuracy(row: TimeToTargetRow) -> str:
    """Return the final accuracy in words: with its interval, of two to five seeds with the lowest and the highest."""
    median, low, high = (row[f"final_test_accuracy{end}"] for end in ("", "_low", "_high"))
    if low is None or high is None:
        return percent(median, 1)
    if row.n >= min_values():
        return f"{percent(median, 1)} (interval {between(low, high)})"
    return f"{percent(median, 1)} (lowest {100 * low:.1f}, highest {percent(high, 1)})"


def answer_int8(rows: Sequence[Int8Row]) -> str:
    """Return what int8 changes in accuracy and bytes: every tensor in int8, one scale a tensor by its largest value."""
    usual = ("largest_magnitude", "per_tensor")
    full = [row for row in rows if row.stage == "biases" and (row.scale_rule, row.granularity) == usual]
    before = [row for row in rows if row.stage == "fp32"]
    change = full[0].accuracy_change if full else None
    if change is None or not before:
        why = next((str(row["note"]).rstrip(".") for row in full if row["note"]), "")
        if why:
            return f"Not answered here: no network was quantized in full ({why})."
        return "Not answered here: no quantized network was tested; run `python -m pipeline.status` for the reasons."
    row, low, high = full[0], full[0].accuracy_change_low, full[0].accuracy_change_high
    ends = f"interval {100 * low:+.2f} to {100 * high:+.2f}, " if low is not None and high is not None else ""
    unclear = (
        " 0 lies inside the interval: a change is neither shown nor excluded."
        if ends and (low or 0) <= 0 <= (high or 0)
        else ""
    )
    return (
        f"With the whole network in int8 test accuracy changes by {100 * change:+.2f} points ({ends}from "
        f"{percent(before[0].test_accuracy, 1)} in fp32, n = {pluralize(row.n, 'seed')}).{unclear} The network "
        f"takes {row.network_bytes or 0:,} of {before[0].network_bytes or 0:,} bytes."
    )
