"""The plots of Q4: final accuracy and time to target by batch size; accuracy by epoch, update and second."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pipeline.experiment.point_label import describe_axis
from pipeline.report.plot_data import (
    MAX_SERIES,
    REFERENCE,
    FlatRow,
    LinePanel,
    Plot,
    PlotSource,
    Point,
    Series,
    axes_of,
    axis_values,
    evenly,
    group_series,
    note_on_number,
)
from pipeline.report.row_types import interval_keys

MIN_EPOCHS = 3  # fewer do not show how accuracy develops
INFORMATIVE = 0.5  # of the best accuracy; a size that stays below it tells remedies hardly apart
WIDE_RANGE = 8  # the largest over the smallest end of a curve, from which the axis is logarithmic


SEEDS_NOTE = "Bars: of six seeds or more the interval of the median, of two to five seeds the lowest and the highest."


def final_accuracy_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q4: final accuracy and time to target against the batch size, a line for each set of remedies.

    All runs have the epochs of the smallest batch without remedies, and of equal global batches the fewest GPUs.
    """
    tested = [row for row in source.rows["time_to_target"] if row["final_test_accuracy"] is not None]
    plain = [row for row in tested if not row["remedies"]]
    if not plain:
        return
    small = min(plain, key=baseline_order)
    rows = [row for row in tested if row["epochs"] == small["epochs"] >= MIN_EPOCHS]
    if len({row["global_batch_size"] for row in rows}) < 2:
        return
    placed = ("strategy", "num_gpus", "batch_size_per_gpu", "learning_rate")  # they follow the batch size
    groups = group_series(rows, "global_batch_size", without=placed, first=("remedies",))
    panels = [batch_size_panel("Test accuracy [%]", groups, "final_test_accuracy", 100)]
    if any(row["time_to_target_s"] is not None for row in rows):
        title = f"Training time to {100 * small['target_accuracy']:.1f} % [s]"
        panels.append(batch_size_panel(title, groups, "time_to_target_s"))
    title = f"Accuracy after {small['epochs']} epochs and time to the target, by batch size"
    yield Plot("q4-batch-size", "Q4", title, tuple(panels), SEEDS_NOTE)


def batch_size_panel(title: str, groups: Mapping[str, Sequence[FlatRow]], key: str, scale: float = 1) -> LinePanel:
    """Return a figure x `scale` against the global batch size, of equal batches the one on the fewest GPUs."""
    low, high = interval_keys(key)
    lines = []
    for style, label in enumerate(evenly(list(groups), MAX_SERIES)):
        fewest_last = sorted(groups[label], key=lambda row: -row["num_gpus"])
        known = {row["global_batch_size"]: row for row in fewest_last if row[key] is not None}
        points = [
            Point(size, scale * row[key], *ends_of(row[low], row[high], scale)) for size, row in sorted(known.items())
        ]
        lines += [Series(label, tuple(points), style)] if points else []
    return LinePanel(title, "images a step", tuple(lines))


def ends_of(low: float | None, high: float | None, scale: float) -> tuple[float | None, float | None]:
    """Return both ends of an interval, scaled; none if one is not known."""
    return (None, None) if low is None or high is None else (scale * low, scale * high)


def baseline_order(row: FlatRow) -> tuple[int, int, int]:
    """Return the sort key of a row without remedies; the first of a study is its baseline.

    Rows of Q4 state their epochs only where the points differ in them.
    """
    return row["global_batch_size"], row["num_gpus"], row.get("epochs", 0)


def accuracy_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q4 by epoch. With remedies there is a plot for each batch size, the largest first, else one plot.

    Folded up is a size whose best accuracy is below INFORMATIVE of the best: its lines are flat.
    """
    rows = [row for row in source.rows["Q4"] if row["epoch"] is not None]
    accuracy = "test_accuracy" if any(row["test_accuracy"] is not None for row in rows) else "accuracy"
    rows = [row for row in rows if row[accuracy] is not None]
    axes = axes_of(rows)
    num_epochs = Counter(axis_values(row, axes) for row in rows)
    rows = [row for row in rows if num_epochs[axis_values(row, axes)] >= MIN_EPOCHS]
    if not rows:
        return
    remedied = sorted({row["global_batch_size"] for row in rows if row["remedies"]}, reverse=True)
    if not remedied:
        groups = group_series(rows, "epoch")
        note = note_on_number(len(groups), MAX_SERIES, "series")
        yield Plot("q4", "Q4", "Accuracy by epoch, update and second", accuracy_panels(groups, accuracy), note)
    plain = [row for row in rows if not row["remedies"]]
    small = min(map(baseline_order, plain), default=None)
    best = max(row[accuracy] for row in rows)
    for index, batch in enumerate(remedied):
        own = [row for row in rows if row["global_batch_size"] == batch]
        lengths = ("epochs",) if len({row.get("epochs") for row in own}) > 1 else ()
        groups = group_series(own, "epoch", first=("remedies", *lengths))
        groups = {
            label.replace("no remedies", f"{batch:,} images, no remedies"): rows for label, rows in groups.items()
        }
        note = note_on_number(len(groups), MAX_SERIES, "series")
        title = f"Accuracy with {batch:,} images a step, by epoch, update and second"
        reference = [row for row in plain if baseline_order(row) == small] if small and batch > small[0] else []
        panels = accuracy_panels(groups, accuracy, reference)
        is_main = max(row[accuracy] for row in own) >= INFORMATIVE * best
        yield Plot(f"q4-{batch}" if index else "q4", "Q4", title, panels, note, is_main)


def accuracy_panels(
    groups: Mapping[str, Sequence[FlatRow]], accuracy: str, reference: Sequence[FlatRow] = ()
) -> tuple[LinePanel, ...]:
    """Return accuracy by epoch, by update and by second; `reference` is a curve to compare with."""
    named = [(label, groups[label], style) for style, label in enumerate(evenly(list(groups), MAX_SERIES))]
    if reference:
        batch = describe_axis("global_batch_size", reference[0]["global_batch_size"]).removesuffix(" in all")
        named.append((f"{batch} images, no remedies", reference, REFERENCE))
    title = "Test accuracy [%]" if accuracy == "test_accuracy" else "Training accuracy [%]"
    panels = []
    for key, x_label in (("epoch", "epoch"), ("num_updates", "updates"), ("training_time_s", "seconds of training")):
        lines = []
        for label, rows, style in named:
            points = sorted(Point(row[key], 100 * row[accuracy]) for row in rows if row[key])
            lines += [Series(label, tuple(points), style)] if points else []
        ends = [line.points[-1].x for line in lines]
        is_wide = key != "epoch" and ends and max(ends) > WIDE_RANGE * min(ends)
        panels += [LinePanel(title, x_label, tuple(lines), "log10" if is_wide else "linear")] if lines else []
    return tuple(panels)
