"""The claims of Q4 (what a large batch costs, what mends it, what is soonest at the target) and of int8."""

from collections.abc import Sequence
from typing import Any

from pipeline.experiment.axis_groups import TARGET_MAY_DIFFER
from pipeline.experiment.point_label import describe_axis, describe_point, format_number, varying_axes
from pipeline.figures.intervals import ends_of, min_values
from pipeline.plan.model_name import is_image_model
from pipeline.report.claims import (
    INT8_CHANGE,
    LARGE_BATCH,
    NOT_ANSWERED,
    OWN_ACCURACY,
    OWN_MERIT,
    TOO_FEW_RUNS,
    Claim,
    badges_of,
    describe_own,
    grid_command,
    no_result,
    not_answered,
)
from pipeline.report.definitions import NEVER_REACHED
from pipeline.report.epoch_rows import DIVERGED
from pipeline.report.table import Row
from pipeline.report.time_to_target_rows import final_of, main_study
from pipeline.system.errors import pluralize

MIN_RUNS, MIN_EPOCHS = 3, 10  # below these an accuracy cannot tell a remedy from noise


def large_batch_claims(all_rows: Sequence[Row]) -> list[Claim]:
    """Return what large batches cost in test accuracy, what remedies mend of it, and what gets to the target soonest.

    It is about one study (main_study). Accuracies are compared at the epochs of its baseline.
    """
    rows, small = main_study(all_rows)
    if small is None:
        return [not_answered("Q4", "no test accuracy of a small and of a large batch was measured", "q4-study")]
    batch = f"{small['global_batch_size']:,} images a step without remedies, the runs to compare with,"
    if small.has_note(DIVERGED):
        return [Claim("Q4", NOT_ANSWERED, {"why": f"{batch} diverged"})]
    if final_of(small) is None:
        return [no_result("Q4", batch, [small])]
    epochs = pluralize(small["epochs"], "epoch")
    as_long = [row for row in rows if row["epochs"] == small["epochs"]]
    larger = [row for row in as_long if row["global_batch_size"] > small["global_batch_size"]]
    large = large_batch(larger)
    if large is None:
        return [not_answered("Q4", f"no test accuracy of a larger batch after {epochs}", "q4-study")]
    if not is_image_model(small.axes.get("model")):
        return [own_model_claim(rows, small, large)]
    tried = rows_with_remedies(larger, large)
    known = [row for row in tried if row["final_test_accuracy"] is not None]
    if not known:
        what = "has a result with remedies" if tried else "tried a remedy"
        run = f"no run of {large['global_batch_size']:,} images a step for {epochs} {what}"
        return [not_answered("Q4", run, "q4-study", is_asked=bool(tried))]
    best = max(known, key=lambda row: (row.n >= MIN_RUNS, float(row["final_test_accuracy"])))
    axes = [axis for axis in varying_axes([row.axes for row in all_rows]) if axis not in TARGET_MAY_DIFFER]
    study = [describe_point(small.axes, axes)] if len(rows) < len(all_rows) else []
    runs = min(row.n for row in (small, large, best))
    values: dict[str, Any] = {
        "epochs": small["epochs"],
        "batch": large["global_batch_size"],
        "accuracy": large["final_test_accuracy"],
        "small_batch": small["global_batch_size"],
        "small_accuracy": small["final_test_accuracy"],
        "cost": 100 * (large["final_test_accuracy"] - small["final_test_accuracy"]),
        "unclear": unclear_words(small, large),
        "where": "".join(f", {condition}" for condition in (*study, f"n = {runs}")),
        # the rate may be the only thing in which two rows differ
        "remedies": f"{describe_axis('remedies', best['remedies'])} at rate {best['learning_rate']:.3g}",
        "mended": best["final_test_accuracy"],
        "mended_unclear": unclear_words(large, best),
        "num_sets": pluralize(len({tuple(row["remedies"]) for row in known}), "set"),
        "target": small["target_accuracy"],
        "soonest": describe_soonest(rows, small),
    }
    untimed = any(row["epochs_to_target"] is not None and row["time_to_target_s"] is None for row in rows)
    badges = badges_of(large, *(("other GPU",) if untimed else ()))
    is_few, is_short = runs < MIN_RUNS, small["epochs"] < MIN_EPOCHS
    if is_few or is_short:
        few = " and ".join([epochs] * is_short + [pluralize(runs, "run")] * is_few)
        return [Claim("Q4", TOO_FEW_RUNS, values | {"few": few}, badges, grid_command("q4-study"))]
    return [Claim("Q4", LARGE_BATCH, values, badges)]


def own_model_claim(rows: Sequence[Row], small: Row, large: Row) -> Claim:
    """Return what a larger batch costs a model of the user's, which has no remedies here."""
    values = {
        "epochs": small["epochs"],
        "batch": large["global_batch_size"],
        "final": final_of(large),
        "small_batch": small["global_batch_size"],
        "small_final": final_of(small),
        "where": f", n = {min(small.n, large.n)}",
        "unclear": unclear_words(small, large),
        "target": small["target_merit"] if small["target_accuracy"] is None else small["target_accuracy"],
        "soonest": describe_soonest(rows, small),
    }
    is_accuracy = small["final_merit"] is None
    return Claim("Q4", OWN_ACCURACY if is_accuracy else OWN_MERIT, values, badges_of(large))


def large_batch(larger: Sequence[Row]) -> Row | None:
    """Return the run without remedies to compare with: the largest batch that tried a remedy, else the largest."""
    with_remedies = {row["global_batch_size"] for row in larger if row["remedies"]}
    plain = [row for row in larger if not row["remedies"] and final_of(row) is not None]
    tried = [row for row in plain if row["global_batch_size"] in with_remedies]
    return max(
        tried or plain,
        key=lambda row: (row["global_batch_size"], -row["num_gpus"], final_of(row)),
        default=None,
    )


def rows_with_remedies(larger: Sequence[Row], large: Row) -> list[Row]:
    """Return the rows with remedies of the same batch, on the same number of GPUs if there are any."""
    of_size = [row for row in larger if row["remedies"] and row["global_batch_size"] == large["global_batch_size"]]
    return [row for row in of_size if row["num_gpus"] == large["num_gpus"]] or of_size


def unclear_words(before: Row, after: Row) -> str:
    """Return that two finals are not told apart, if their intervals (of fewer seeds: their ranges) overlap."""
    lows, highs = zip(*(ends_of(final_of(row)) for row in (before, after)), strict=True)
    runs = min(before.n, after.n)
    if runs < MIN_RUNS or None in (*lows, *highs) or max(lows) > min(highs):
        return ""
    what = "intervals" if runs >= min_values() else "ranges"
    return f" (their {what} overlap: no difference is shown)"


def describe_soonest(rows: Sequence[Row], small: Row) -> str | None:
    """Return which run gets to the target soonest, beside the small batch's time; None if nothing is known of it.

    Runs whose interval meets that of the soonest may be as soon: they are counted.
    """
    first = next((row for row in rows if "seconds" in (row["soonest"] or "").split(" and ")), None)
    if first is None:
        never = all(row["reached"] in (None, NEVER_REACHED) for row in rows)
        return "is no run: none reaches it" if never else "is not known: no row has a time on the baseline's GPU model"
    missed = first["reached"] != f"{first.n} of {first.n}"  # the interval has no end if a seed missed the target
    end_s = float("inf") if missed else ends_of(first["time_to_target_s"])[1] or first["time_to_target_s"]
    timed = [row for row in rows if row["time_to_target_s"] is not None and row is not first]
    rivals = sum((ends_of(row["time_to_target_s"])[0] or row["time_to_target_s"]) <= end_s for row in timed)
    shown = f"; {rivals} more may be as soon" if rivals else ""
    reached = f", {first['reached']} runs reach it" if missed else ""
    tried, beside = any(row["remedies"] for row in rows), ""
    if first is not small and small["time_to_target_s"] is not None:
        beside = f"; {small['global_batch_size']:,}{' without remedies' * tried} take {seconds(small)}"
    remedies = ", without remedies" if tried else ""
    if first["remedies"]:
        remedies = f", {describe_axis('remedies', first['remedies'])}"
    gpus = f" on {pluralize(first['num_gpus'], 'GPU')}" if first["num_gpus"] != small["num_gpus"] else ""
    which = f"{first['global_batch_size']:,} images a step{gpus}{remedies}"
    return f"is {which}: {seconds(first)} of training{reached}{beside}{shown}"


def seconds(row: Row) -> str:
    """Return the training time to the target with its ends."""
    low, high = ends_of(row["time_to_target_s"])
    ends = "" if low is None or high is None else f" ({format_number(low, ',.1f')} to {format_number(high, ',.1f')} s)"
    return f"{format_number(row['time_to_target_s'], ',.1f')} s{ends}"


def int8_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return what int8 changes in accuracy and bytes: every tensor in int8, one scale a tensor by its largest value."""
    usual = ("biases", "largest_magnitude", "per_tensor")
    full = [row for row in rows if (row["stage"], row["scale_rule"], row["granularity"]) == usual]
    row = max(full, key=lambda row: (row["accuracy_change"] is not None, row.n), default=None)
    before = next((other for other in rows if row and other["stage"] == "fp32" and other.axes == row.axes), None)
    if row is None or row["accuracy_change"] is None or before is None:
        why = next((str(row["note"]).rstrip(".") for row in full if row["note"]), "").replace("`", "'")  # no command
        problem = f"no network was quantized in full ({why})" if why else "no quantized network was tested"
        return [Claim("int8", NOT_ANSWERED, {"why": problem})]
    change = row["accuracy_change"]
    low, high = ends_of(change)
    is_unclear = low is not None and high is not None and low <= 0 <= high
    values = {
        "which": f" ({describe_own(row, full)})" if len(full) > 1 else "",
        "change": change.times(100),
        "fp32": float(before["test_accuracy"]),
        "seeds": f"n = {pluralize(row.n, 'seed')}",
        "num_bytes": row["network_bytes"] or 0,
        "num_bytes_fp32": before["network_bytes"] or 0,
    }
    return [Claim("int8", INT8_CHANGE, values, ("no change shown",) if is_unclear else ())]
