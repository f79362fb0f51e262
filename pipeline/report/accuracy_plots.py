"""The plots of Q4 and int8.

Final accuracy and time to target by batch size; accuracy by epoch, update and second. What each stage of int8 costs,
and what the scales cover of every layer's weights and activations.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.experiment.point_label import EFFORT_AXES, describe_axis
from pipeline.figures.pooling import group_pairs
from pipeline.report import plot_data
from pipeline.report.columns import GLOBAL_BATCH, MERIT, TEST_ACCURACY
from pipeline.report.definitions import STAGE_WORDS
from pipeline.report.plot_data import HistogramPanel, LinePanel, Plot, PlotSource, Point, Series, as_title
from pipeline.report.table import Column, Row
from pipeline.report.tables import TABLES
from pipeline.report.time_to_target_rows import format_target, main_study
from pipeline.system.errors import pluralize

Groups = Mapping[str, Sequence[Row]]
RemedySets = Sequence[tuple[str, ...]]

BATCH = GLOBAL_BATCH.key
TRAINING_ACCURACY = TABLES["Q4"].column("accuracy")
FINALS = [TABLES["time_to_target"].column(key) for key in ("final_test_accuracy", "final_merit")]
TIME_TO_TARGET = TABLES["time_to_target"].column("time_to_target_s")
FOLLOWS_FROM_BATCH = ("batch_size_per_gpu", "num_gpus", "strategy", "learning_rate")
MIN_EPOCHS = 3  # fewer do not show how accuracy develops
INFORMATIVE = 0.5  # of the best accuracy; a size that stays below it tells remedies hardly apart
WIDE_RANGE = 8  # the largest over the smallest end of a curve, from which the axis is logarithmic
TIMES = "time to the target"  # the panel of times, in the title
SEEDS_NOTE = (
    "Medians over the seeds. Bars: of six seeds or more the interval of the median, of two to five seeds the lowest "
    "and the highest. A point without a bar: one seed, or a seed missed the target. The axis of the {} does not begin "
    "at 0."
)
SOME_TIMES_NOTE = "Times are of one GPU model: seeds on another have none."

CHANGE = TABLES["int8"].column("accuracy_change")
STAGES = {"weights": "weights", **STAGE_WORDS}
GRANULARITIES = {"per_tensor": "One scale per tensor", "per_channel": "One scale per channel"}
HISTOGRAMS = {
    "weights": ("int8-weights", "Weights of every layer"),
    "before_relu": ("int8-before-relu", "Outputs of every layer before ReLU"),
    "after_relu": ("int8-after-relu", "Outputs of every layer after ReLU"),
}
SPACING = 0.05  # between the series of a stage: as wide as a marker, so that intervals do not hide each other
SMALL = 1 / 3  # of the largest change; series that stay below it have panels of their own


def final_accuracy_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q4: final accuracy and time to target against the batch size, a line for each set of remedies.

    All runs are of one study (main_study) and have the epochs of its baseline. Of equal global batches only the run on
    the fewest GPUs is shown. Times are compared on the baseline's number of GPUs.
    """
    study, baseline = main_study(source.tables["time_to_target"])
    if baseline is None or baseline["epochs"] < MIN_EPOCHS:
        return
    as_long = [row for row in study if row["epochs"] == baseline["epochs"]]
    final = first_known(FINALS, as_long)
    tested = [row for row in as_long if row[final.key] is not None]
    (groups, left_out), sets = remedy_groups(tested), remedy_sets(source.tables["Q4"])
    lines = plot_data.make_series(groups, BATCH, final, styles_of(groups, sets))
    what, heading = ("accuracy", TEST_ACCURACY.heading) if final is FINALS[0] else (MERIT.heading, MERIT.heading)
    accuracies = LinePanel(as_title(heading), GLOBAL_BATCH.heading, lines, y_covers=())
    panels = {f"{what} after {pluralize(baseline['epochs'], 'epoch')}": accuracies}
    if baseline["target_accuracy"] is not None or baseline["target_merit"] is not None:
        alike, _ = remedy_groups([row for row in tested if row["num_gpus"] == baseline["num_gpus"]])
        lines = plot_data.make_series(alike, BATCH, TIME_TO_TARGET, styles_of(alike, sets))
        title = f"Training time to {format_target(baseline)} [s]"
        panels[TIMES] = LinePanel(title, GLOBAL_BATCH.heading, lines)
    places = {what: {point.x for line in panel.series for point in line.points} for what, panel in panels.items()}
    panels = {what: panel for what, panel in panels.items() if len(places[what]) > 1}
    if panels:
        is_partial = TIMES in panels and any(row["num_timed"] < row["n"] for row in tested)
        note = " ".join(filter(None, (SEEDS_NOTE.format(what), SOME_TIMES_NOTE if is_partial else "", left_out)))
        title = as_title(f"{' and '.join(panels)}, by batch size")
        yield Plot("q4-batch-size", "Q4", title, tuple(panels.values()), note, is_main=False)


def first_known(columns: Sequence[Column], rows: Sequence[Row]) -> Column:
    """Return the first column of which a row has a value; without one the last."""
    return next((column for column in columns if any(row[column.key] is not None for row in rows)), columns[-1])


def remedy_sets(rows: Sequence[Row]) -> RemedySets:
    """Return the different sets of remedies, the smallest first."""
    return sorted({tuple(row["remedies"]) for row in rows}, key=lambda remedies: (len(remedies), remedies))


def remedy_groups(rows: Sequence[Row]) -> tuple[dict[str, list[Row]], str]:
    """Return the series by remedies, of each global batch the rows on the fewest GPUs, and of these the fewest nodes.

    The labels leave out what follows from the batch, unless rows would then share a place.
    """
    pairs = [((tuple(row["remedies"]), row[BATCH]), (row["num_gpus"], row["num_nodes"])) for row in rows]
    used = group_pairs(pairs)
    fewest = [row for row, (place, gpus) in zip(rows, pairs, strict=True) if gpus == min(used[place])]
    first = ("remedies",) if any(row["remedies"] for row in rows) else ()
    return plot_data.group_series(fewest, BATCH, first, (*FOLLOWS_FROM_BATCH, *EFFORT_AXES))


def accuracy_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield Q4 against time. With remedies there is a plot for each batch size, the largest first, else one plot.

    Runs longer than the shortest of their batch size have a plot of their own. All but one are folded up: the first
    whose best accuracy is not below INFORMATIVE of the best, since the lines of the others are flat.
    """
    rows = [row for row in source.tables["Q4"] if row["epoch"] is not None]
    column = first_known((TEST_ACCURACY, MERIT, TRAINING_ACCURACY), rows)
    known = [row for row in rows if row[column.key] is not None]
    curves = group_pairs((repr(row.axes), row) for row in known).values()
    rows = [row for curve in curves if len(curve) >= MIN_EPOCHS for row in curve]
    remedied = sorted({row[BATCH] for row in rows if row["remedies"]}, reverse=True)
    if rows and not remedied:
        groups, note = plot_data.group_series(rows, "epoch")
        panels = accuracy_panels(groups, column, remedy_sets(rows))
        what = MERIT.heading if column is MERIT else "accuracy"
        yield from time_first("q4", as_title(what), panels, note)
    shows_main = False
    sets, reference = remedy_sets(rows), baseline_curve(source, rows)
    best = max((row[column.key] for row in rows), default=0)
    for batch in remedied:
        by_length = group_pairs((int(row.axes.get("epochs", 0)), row) for row in rows if row[BATCH] == batch)
        shortest = by_length.pop(min(by_length))
        compared = [row for row in reference if row[BATCH] != batch]
        for own, longer in ((shortest, ""), ([row for length in by_length.values() for row in length], "longer")):
            if own:
                first = ("remedies", "epochs") if longer else ("remedies",)
                groups, left_out = plot_data.group_series(own, "epoch", first)
                name = "-".join(filter(None, ("q4", "" if batch == remedied[0] else str(batch), longer)))
                for_longer = " for longer" if longer else ""
                title = f"Accuracy with {batch:,} images a step{for_longer}"
                panels = accuracy_panels(groups, column, sets, compared)
                note = f"Medians over the seeds. {left_out}".rstrip()
                is_main = not shows_main and max(row[column.key] for row in own) >= INFORMATIVE * best
                shows_main |= is_main
                yield from time_first(name, title, panels, note, is_main)


def time_first(name: str, title: str, panels: Sequence[LinePanel], note: str, is_main: bool = True) -> Iterator[Plot]:
    """Yield the plot against time, and folded up that by epoch and update."""
    if panels:
        yield Plot(name, "Q4", f"{title} against time", tuple(panels[:1]), note, is_main)
        yield Plot(f"{name}-steps", "Q4", f"{title} by epoch and update", tuple(panels[1:]), note, is_main=False)


def baseline_curve(source: PlotSource, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the baseline (main_study), to compare larger batches with."""
    _, baseline = main_study(source.tables["time_to_target"])
    if baseline is None:
        return []
    axes = {axis: value for axis, value in baseline.axes.items() if axis != "gpu"}
    return [row for row in rows if axes | row.axes == row.axes | axes]


def styles_of(groups: Groups, sets: RemedySets) -> dict[str, int]:
    """Return the style of each label: that of its remedies in every plot; a second line of the same has a free one."""
    if len(sets) > plot_data.MAX_SERIES:
        sets = remedy_sets([rows[0] for rows in groups.values()])
    free = [*range(len(sets), plot_data.MAX_SERIES), *range(len(sets))]
    styles: dict[str, int] = {}
    for label in sorted(groups, key=lambda label: (groups[label][0]["num_gpus"], len(label))):  # the plainest first
        own = sets.index(tuple(groups[label][0]["remedies"]))
        styles[label] = next(style for style in (own, *free) if style not in styles.values())
    return styles


def accuracy_panels(
    groups: Groups, column: Column, sets: RemedySets, reference: Sequence[Row] = ()
) -> tuple[LinePanel, ...]:
    """Return accuracy by second, by epoch and by update; `reference` is a curve to compare with."""
    styles, compared = styles_of(groups, sets), {}
    if reference:
        batch = describe_axis(BATCH, reference[0][BATCH]).removesuffix(" in all")
        compared = {f"{batch} images, no remedies": reference}
    panels = []
    for key, x_label in (("training_time_s", "seconds of training"), ("epoch", "epoch"), ("num_updates", "updates")):
        lines = plot_data.make_series(groups, key, column, styles)
        lines += plot_data.make_series(compared, key, column, dict.fromkeys(compared, plot_data.REFERENCE))
        ends = [line.points[-1].x for line in lines]
        if key != "epoch" and ends and max(ends) > WIDE_RANGE * min(ends):
            panels.append(LinePanel(as_title(column.heading), x_label, lines, "log10"))
        elif lines:
            panels.append(LinePanel(as_title(column.heading), x_label, lines, "linear"))
    return tuple(panels)


def int8_plots(source: PlotSource) -> Iterator[Plot]:
    """Yield the change of accuracy by stage, and the histograms of one seed, by tensor."""
    rows = [row for row in source.tables["int8"] if row[CHANGE.key] is not None]
    if rows:
        yield change_plot(rows)
    yield from histogram_plots(source.tables["int8_histograms"])


def change_plot(rows: Sequence[Row]) -> Plot:
    """Return the change of test accuracy against fp32 by stage: a line for each scale rule, a panel a granularity.

    If one series hides how small the others are, these are shown again without it. All panels of a row have one range.
    """
    groups, left_out = plot_data.group_series(rows, "stage", first=("scale_rule",), panel="granularity")
    lines: dict[str, list[Series]] = {granularity: [] for granularity in GRANULARITIES}
    for style, (label, of_label) in enumerate(groups.items()):
        shift = SPACING * (style - (len(groups) - 1) / 2)
        for granularity, own in lines.items():
            wanted = [row for row in of_label if row["granularity"] == granularity]
            places = [list(STAGES).index(row["stage"]) + shift for row in wanted]
            points = tuple(plot_data.make_point(x, row, CHANGE) for x, row in zip(places, wanted, strict=True))
            own += [Series(label, points, style)] if points else []
    every = [line for own in lines.values() for line in own]
    reach = {label: max(map(abs, ends_of(line for line in every if line.label == label))) for label in groups}
    small = [label for label in groups if reach[label] < SMALL * max(reach.values())]
    panels = [*change_panels(lines, [*groups], CHANGE.name), *change_panels(lines, small, "enlarged")]
    has_intervals = any(point.low is not None and point.high is not None for line in every for point in line.points)
    note = (
        f"Median over {pluralize(max(row['n'] for row in rows), 'seed')}{' with its interval' * has_intervals}, each "
        "against its own network in fp32. Each stage includes those before it."
    )
    note += f" Enlarged: only {', '.join(small)}." if small else ""
    title = "Change of test accuracy in int8, by stage"
    return Plot("int8", "int8", title, tuple(panels), f"{note} {left_out}".rstrip())


def change_panels(lines: Mapping[str, Sequence[Series]], labels: Sequence[str], name: str) -> Iterator[LinePanel]:
    """Yield a panel for each granularity with the series of these labels, all with the same range."""
    chosen = {granularity: [line for line in own if line.label in labels] for granularity, own in lines.items()}
    covers = tuple(end for own in chosen.values() for end in ends_of(own))
    reference = Series("fp32", (Point(-0.5, 0), Point(len(STAGES) - 0.5, 0)), plot_data.REFERENCE)
    for granularity, own in chosen.items():
        if own:
            title = f"{GRANULARITIES[granularity]}: {CHANGE.heading.replace(CHANGE.name, name)}"
            yield LinePanel(title, "stage", (reference, *own), x_names=tuple(STAGES.values()), y_covers=covers)


def ends_of(lines: Iterable[Series]) -> list[float]:
    """Return the values of the series, and the ends of their intervals."""
    points = [point for line in lines for point in line.points]
    return [value for point in points for value in (point.y, point.low, point.high) if value is not None]


def histogram_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Yield a plot for each kind of tensor, with a panel a layer; of several points the first counts."""
    points = group_pairs((repr(row.axes), row) for row in rows)
    rows = next(iter(points.values()), [])
    with_relu = {row["layer"] for row in rows if row["tensor"] == "after_relu"}
    for tensor, (name, title) in HISTOGRAMS.items():
        own = [row for row in rows if row["tensor"] == tensor]
        if own:
            shown = f"seed {own[0]['seed']}" + (f" of the first of {len(points)} points" if len(points) > 1 else "")
            signs = "plus" if tensor == "after_relu" else "plus and minus"
            note = f"Number of values in a bin, logarithmic; {shown}. Dashed: mean {signs} 3 sigma. Solid: the "
            note += "largest magnitude."
            ends_in = with_relu if tensor == "before_relu" else {row["layer"] for row in own}
            yield Plot(name, "int8", title, tuple(histogram_panel(row, row["layer"] in ends_in) for row in own), note)


def histogram_panel(row: Row, has_relu: bool) -> HistogramPanel:
    """Return the panel of one row; of the last layer it says that no ReLU follows. After ReLU nothing is below 0."""
    title = f"{row['layer']}{'' if has_relu else ' (no ReLU)'}: {sum(row['counts']):,} values"
    ends = (row["three_sigma_low"], row["three_sigma_high"])[row["tensor"] == "after_relu" :]
    return HistogramPanel(title, row["low"], row["high"], tuple(row["counts"]), ends)
