"""The plots of Q4: final accuracy and time to target by batch size; accuracy by epoch, update and second."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pipeline.experiment.point_label import describe_axis
from pipeline.report.plot_data import (
    MAX_SERIES,
    REFERENCE,
    LinePanel,
    Plot,
    PlotSource,
    Point,
    Scale,
    Series,
    axes_of,
    axis_values,
    evenly,
    group_series,
    join_notes,
    note_on_number,
)
from pipeline.report.row_types import Row, interval_keys
from pipeline.report.time_to_target_rows import format_target, main_study
from pipeline.system.errors import pluralize

RemedySets = Sequence[tuple[str, ...]]

MIN_EPOCHS = 3  # fewer do not show how accuracy develops
INFORMATIVE = 0.5  # of the best accuracy; a size that stays below it tells remedies hardly apart
WIDE_RANGE = 8  # the largest over the smallest end of a curve, from which the axis is logarithmic
SEEDS_NOTE = (
    "Medians over the seeds. Bars: of six seeds or more the interval of the median, of two to five seeds the lowest "
    "and the highest. A point without a bar: one seed, or a seed missed the target. The axis of "
    "accuracies does not begin at 0."
)

TIMES = "time to the target"  # the panel of times, in the title
SOME_TIMES_NOTE = "Times are of one GPU model: seeds on another have none."


def final_accuracy_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q4: final accuracy and time to target against the batch size, a line for each set of remedies.

    All runs are of one study (main_study) and have the epochs of its baseline. Of equal global batches only the run on
    the fewest GPUs is shown. Times are compared on the baseline's number of GPUs.
    """
    study, baseline = main_study(source.tables.time_to_target)
    if baseline is None or baseline["epochs"] < MIN_EPOCHS:
        return
    tested = [row for row in study if row["final_test_accuracy"] is not None and row["epochs"] == baseline["epochs"]]
    sets, groups = remedy_sets(source.tables.Q4), remedy_groups(tested)
    what = f"accuracy after {pluralize(baseline['epochs'], 'epoch')}"
    accuracies = batch_size_panel("Test accuracy [%]", groups, sets, "final_test_accuracy", 100)
    shown = {what: accuracies._replace(from_zero=False)}  # a point of accuracy counts
    if baseline["target_accuracy"] is not None:
        alike = remedy_groups([row for row in tested if row["num_gpus"] == baseline["num_gpus"]])
        title = f"Training time to {format_target(baseline['target_accuracy'])} [s]"
        shown[TIMES] = batch_size_panel(title, alike, sets, "time_to_target_s")
    shown = {what: panel for what, panel in shown.items() if len(places_of(panel)) > 1}
    if shown:
        is_partial = TIMES in shown and any(row["num_timed"] < row["n"] for row in tested)
        of_some = SOME_TIMES_NOTE if is_partial else ""
        note = join_notes(SEEDS_NOTE, of_some, note_on_number(len(groups), MAX_SERIES, "series"))
        title = f"{' and '.join(shown)}, by batch size"
        yield Plot("q4-batch-size", "Q4", title[0].upper() + title[1:], tuple(shown.values()), note)


def places_of(panel: LinePanel) -> set[float]:
    """Return the positions on the x axis that have a point."""
    return {point.x for line in panel.series for point in line.points}


def remedy_sets(rows: Sequence[Row]) -> RemedySets:
    """Return the different sets of remedies, the smallest first."""
    return sorted({tuple(row["remedies"]) for row in rows}, key=lambda remedies: (len(remedies), remedies))


def remedy_groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by remedies, one row for each global batch: that on the fewest GPUs.

    The labels leave out what follows from the batch, unless rows would then share a place.
    """
    follows = ("batch_size_per_gpu", "num_gpus", "strategy", "learning_rate")
    for num_left_out in range(len(follows), 0, -1):
        found = group_series(rows, "global_batch_size", follows[:num_left_out], first=("remedies",))
        groups = {label: fewest_gpus(own) for label, own in found.items()}
        if all(len(own) == len({row["global_batch_size"] for row in own}) for own in groups.values()):
            break
    return groups


def fewest_gpus(rows: Sequence[Row]) -> list[Row]:
    """Return the rows on the fewest GPUs, and of these on the fewest nodes, of each global batch."""
    places: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        places.setdefault(row["global_batch_size"], []).append(gpus_and_nodes(row))
    return [row for row in rows if gpus_and_nodes(row) == min(places[row["global_batch_size"]])]


def gpus_and_nodes(row: Row) -> tuple[int, int]:
    """Return the numbers of GPUs and of nodes of a row."""
    return row["num_gpus"], row["num_nodes"]


def batch_size_panel(
    title: str, groups: Mapping[str, Sequence[Row]], sets: RemedySets, key: str, scale: float = 1
) -> LinePanel:
    """Return the panel of a figure against the global batch size; the figure is multiplied by `scale`."""
    low, high = interval_keys(key)
    lines = []
    for label, style in styles_of(groups, sets).items():
        points = [
            Point(row["global_batch_size"], scale * row[key], *ends_of(row[low], row[high], scale))
            for row in groups[label]
            if row[key] is not None
        ]
        lines += [Series(label, tuple(sorted(points, key=lambda point: point.x)), style)] if points else []
    return LinePanel(title, "images a step", tuple(lines))


def ends_of(low: float | None, high: float | None, scale: float) -> tuple[float | None, float | None]:
    """Return both ends of an interval, scaled; none if one is not known."""
    return (None, None) if low is None or high is None else (scale * low, scale * high)


def accuracy_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q4 by epoch. With remedies there is a plot for each batch size, the largest first, else one plot.

    Runs longer than the shortest of their batch size have a plot of their own. Folded up is a size whose best accuracy
    is below INFORMATIVE of the best: its lines are flat.
    """
    rows = [row for row in source.tables.Q4 if row["epoch"] is not None]
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
    best = max(row[accuracy] for row in rows)
    sets, reference = remedy_sets(rows), baseline_curve(source, rows)
    smallest = min((row["global_batch_size"] for row in reference), default=0)
    for index, batch in enumerate(remedied):
        all_own = [row for row in rows if row["global_batch_size"] == batch]
        shortest = min(epochs_of(row) for row in all_own)
        for is_longer in (False, True):
            own = [row for row in all_own if (epochs_of(row) > shortest) == is_longer]
            if not own:
                continue
            lengths = ("epochs",) if len(set(map(epochs_of, own))) > 1 or is_longer else ()
            groups = group_series(own, "epoch", first=("remedies", *lengths))
            compared = [] if batch == smallest else reference
            left_out = note_on_number(len(groups), MAX_SERIES, "series")
            note = join_notes("Medians over the seeds.", left_out)
            longer = " for longer" if is_longer else ""
            title = f"Accuracy with {batch:,} images a step{longer}, by epoch, update and second"
            panels = accuracy_panels(groups, accuracy, sets, compared)
            is_main = max(row[accuracy] for row in own) >= INFORMATIVE * best
            name = f"q4-{batch}" if index else "q4"
            yield Plot(f"{name}-longer" if is_longer else name, "Q4", title, panels, note, is_main)


def epochs_of(row: Row) -> int:
    """Return the epochs of a row's run; rows of Q4 state them only where the points differ in them."""
    return int(row.axes.get("epochs", 0))


def baseline_curve(source: PlotSource, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the baseline (main_study), to compare larger batches with."""
    _, baseline = main_study(source.tables.time_to_target)
    if baseline is None:
        return []
    stated = [axis for axis in axes_of(rows) if axis in baseline.axes]
    return [row for row in rows if axis_values(row, stated) == axis_values(baseline, stated)]


def styles_of(groups: Mapping[str, Sequence[Row]], sets: RemedySets) -> dict[str, int]:
    """Return the style of each label: that of its remedies in every plot; a second line of the same has a free one."""
    labels = evenly(list(groups), MAX_SERIES)
    if len(sets) > MAX_SERIES:
        sets = remedy_sets([groups[label][0] for label in labels])
    styles: dict[str, int] = {}
    for label in sorted(labels, key=lambda label: (groups[label][0]["num_gpus"], len(label))):  # the plainest first
        remedies = tuple(groups[label][0]["remedies"])
        wanted = [sets.index(remedies)] if remedies in sets else []
        order = [*wanted, *range(len(sets), MAX_SERIES), *range(len(sets))]
        styles[label] = next(style for style in order if style not in styles.values())
    return {label: styles[label] for label in labels}


def accuracy_panels(
    groups: Mapping[str, Sequence[Row]],
    accuracy: str,
    sets: RemedySets = (),
    reference: Sequence[Row] = (),
) -> tuple[LinePanel, ...]:
    """Return accuracy by epoch, by update and by second; `reference` is a curve to compare with."""
    named = [(label, groups[label], style) for label, style in styles_of(groups, sets).items()]
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
        scale: tuple[str, Scale] = (f"{x_label}, logarithmic", "log10") if is_wide else (x_label, "linear")
        panels += [LinePanel(title, scale[0], tuple(lines), scale[1])] if lines else []
    return tuple(panels)
