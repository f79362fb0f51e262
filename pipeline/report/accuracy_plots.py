"""The plots of Q4: accuracy by epoch, update and second, for each remedy."""

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

MIN_EPOCHS = 3  # fewer do not show how accuracy develops
INFORMATIVE = 0.5  # of the best accuracy; a size that stays below it tells remedies hardly apart
WIDE_RANGE = 8  # the largest over the smallest end of a curve, from which the axis is logarithmic


def accuracy_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q4. With remedies there is a plot for each batch size, the largest first, else one plot.

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
    smallest = min((row["global_batch_size"] for row in plain), default=0)
    reference = [row for row in plain if row["global_batch_size"] == smallest < min(remedied, default=0)]
    best = max(row[accuracy] for row in rows)
    for index, batch in enumerate(remedied):
        own = [row for row in rows if row["global_batch_size"] == batch]
        groups = group_series(own, "epoch", first=("remedies",))
        groups = {
            label.replace("no remedies", f"{batch:,} images, no remedies"): rows for label, rows in groups.items()
        }
        note = note_on_number(len(groups), MAX_SERIES, "series")
        title = f"Accuracy with {batch:,} images a step, by epoch, update and second"
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
