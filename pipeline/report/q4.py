"""Q4, accuracy: what a large batch costs in accuracy, and what recovers it. Its table, answer and plots."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.figures import formulas
from pipeline.figures.comparability import gpu_model
from pipeline.figures.intervals import ends_of
from pipeline.figures.notes import NoteKind, make_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.figures.time_to_target import states_every_time, training_times_s
from pipeline.plan.model_names import is_image_model
from pipeline.plan.point_label import NAMED_LAST, describe_axis, describe_point, varying_axes
from pipeline.plan.spec import TARGET_MAY_DIFFER, peak_learning_rate
from pipeline.records.record import Epoch, Record
from pipeline.report.claims import (
    Tile,
    badges_of,
    figure_of,
    grid_command,
    no_result,
    not_answered,
    shown,
)
from pipeline.report.plots import (
    MAX_SERIES,
    REFERENCE,
    LinePanel,
    Plot,
    Scale,
    as_title,
    group_series,
    make_series,
)
from pipeline.report.table import (
    FIGURES_NOT_STATED,
    GLOBAL_BATCH,
    LEARNING_RATE,
    MERIT,
    PLACE,
    REMEDIES,
    TEST_ACCURACY,
    Column,
    Row,
    Rows,
    Table,
    Tables,
    View,
    make_row,
    sort_rows,
)
from pipeline.report.time_to_target import (
    DIVERGED,
    NEVER_REACHED,
    TIME_TO_TARGET,
    describe_run,
    final_of,
    format_target,
    main_study,
)
from pipeline.system.errors import pluralize


def first_and_last_epochs(rows: Rows) -> Rows:
    """Return the rows of each point's first and last epoch, in order; none if the points were timed alone.

    Without a test, a remedy or a loss that diverged, a loss of the first epochs answers nothing.
    """
    if not any(map(is_about_learning, rows)):
        return []
    by_point = group_pairs((repr((row.axes, row["remedies"])), row) for row in sort_rows(rows))
    return [row for own in by_point.values() for row in own[:1] + own[1:][-1:]]


def is_about_learning(row: Row) -> bool:
    """True if the row has a test, remedies or a loss that diverged, or if it was stated elsewhere, without a rate."""
    tested = any(row[key] is not None for key in ("test_accuracy", "merit", "test_loss"))
    return tested or bool(row["remedies"]) or row["diverged_at_update"] is not None or row.has_note(FIGURES_NOT_STATED)


EPOCH = Column("epoch", "epoch", "The epoch, counted from 1.", is_set=True)

Q4 = Table(
    "Q4",
    "Q4",
    (
        *PLACE,
        REMEDIES,
        EPOCH,
        Column("loss", "loss", "Mean loss of the training samples, measured during training.", decimals=4),
        TEST_ACCURACY,
        Column(
            "accuracy",
            "training accuracy [%]",
            "Accuracy on the training samples, measured during training.",
            decimals=2,
        ),
        MERIT,
        Column("num_updates", "updates", "Updates of the weights since the start."),
        Column("test_loss", "test loss", "Loss over the test set.", decimals=4),
        LEARNING_RATE._replace(heading=""),
        Column("training_time_s", "", "Sum of epoch_time_s since the start, without evaluation."),
        Column("diverged_at_update", "", "First update whose loss was not finite."),
    ),
    View(
        "Q4: first and last epoch",
        "Loss and other figures of training are those during the epoch, of $augmented where they were measured here.",
        first_and_last_epochs,
        hidden_axes=("gpu",),
    ),
)
TEST_LOSS_NOT_FINITE = NoteKind("test_loss_not_finite", "the test loss is not finite in {count} of {repeats}")


def q4_rows(point: PooledPoint) -> list[Row]:
    """Return a row for every epoch with a loss. A point that has remedies but no loss has one row without figures.

    Losses and accuracies pool all GPU models. Training times are those on the model of most records.
    """
    stated = [record for record in point.ok_records if states_every_time(record)]
    timed = [record for record in stated if gpu_model(record) in ("", point.gpu)]
    times_s = {id(record): training_times_s(record) for record in timed}
    found = [(record, epoch) for record in point.ok_records for epoch in learnt_epochs(record)]
    repeats = group_pairs((epoch.epoch, epoch) for _, epoch in found)
    ends_s = group_pairs((e.epoch, times_s[id(r)][e.epoch - 1]) for r, e in found if id(r) in times_s)
    rows = [q4_row(point, repeats[number], ends_s.get(number, ())) for number in sorted(repeats)]
    if not rows and point.spec.remedies:
        rows.append(make_row(Q4, point, remedies=list(point.spec.remedies)))
    return rows


def learnt_epochs(record: Record) -> list[Epoch]:
    epochs = () if record.spec.is_probe else record.epochs
    return [epoch for epoch in epochs if epoch.loss is not None or epoch.diverged_at_update is not None]


def q4_row(point: PooledPoint, epochs: Sequence[Epoch], times_s: Sequence[float]) -> Row:
    """Return the medians over the repeats of one epoch. A loss that diverged is None, with its update.

    `times_s` are the training seconds up to its end, of the repeats on the model `point.gpu` that state them.
    """
    diverged = [epoch.diverged_at_update for epoch in epochs if epoch.diverged_at_update is not None]
    is_of_images = is_image_model(point.spec.model)  # evaluate() of another model need not return a loss
    has_rate = is_of_images and any(record.measured for record in point.ok_records)
    untold = sum(is_of_images and epoch.test_accuracy is not None and epoch.test_loss is None for epoch in epochs)
    notes = []
    if diverged:
        notes.append(make_note(DIVERGED, count=len(diverged), repeats=len(epochs)))
    if untold:
        notes.append(make_note(TEST_LOSS_NOT_FINITE, count=untold, repeats=len(epochs)))
    learnt = ("loss", "accuracy", "test_loss", "test_accuracy", "merit")
    return make_row(
        Q4,
        point,
        n=len(epochs),
        remedies=list(point.spec.remedies),
        epoch=epochs[0].epoch,
        num_updates=epochs[0].num_updates,
        training_time_s=formulas.median_of_known(times_s),
        learning_rate=peak_learning_rate(point.spec) if has_rate else None,
        **{key: formulas.median_of_known(getattr(epoch, key) for epoch in epochs) for key in learnt},
        diverged_at_update=min(diverged, default=None),
        notes=notes,
    )


MIN_RUNS, MIN_EPOCHS_TO_TELL = 3, 10  # below these an accuracy cannot tell a remedy from noise


def large_batch_claims(all_rows: Sequence[Row]) -> list[Tile]:
    """Return what large batches cost in test accuracy, what remedies recover, and what gets to the target soonest.

    It is about one study (main_study). Accuracies are compared at the epochs of its baseline.
    """
    rows, small = main_study(all_rows)
    if small is None:
        return [not_answered("no test accuracy of a small and of a large batch was measured", "q4-study")]
    batch = f"{small['global_batch_size']:,} $images a step without remedies, the runs to compare with,"
    if small.has_note(DIVERGED):
        return [Tile(line=f"{batch} diverged")]
    if final_of(small) is None and small.status == "ok":
        return [Tile(line=f"{batch} have no final figure: evaluate() returned no finite number")]
    if final_of(small) is None:
        return [no_result(batch, [small])]
    epochs = pluralize(small["epochs"], "epoch")
    as_long = [row for row in rows if row["epochs"] == small["epochs"]]
    larger = [row for row in as_long if row["global_batch_size"] > small["global_batch_size"]]
    large = large_batch(larger)
    if large is None:
        return [not_answered(f"no test accuracy of a larger batch after {epochs}", "q4-study")]
    if not is_image_model(small.axes.get("model")):
        tile = accuracy_tile(small, large)._replace(more=f"{epochs}, n = {min(small.n, large.n)}")
        return [tile, *soonest_claims(rows, small)]  # there are no remedies for it here
    tried = rows_with_remedies(larger, large)
    known = [row for row in tried if row["final_test_accuracy"] is not None]
    if not known:
        what = "has a result with remedies" if tried else "tried a remedy"
        run = f"no run of {large['global_batch_size']:,} $images a step for {epochs} {what}"
        return [not_answered(run, "q4-study", is_asked=bool(tried))]
    best = max(known, key=lambda row: (row.n >= MIN_RUNS, float(row["final_test_accuracy"])))
    axes = [axis for axis in varying_axes([row.axes for row in all_rows]) if axis not in TARGET_MAY_DIFFER]
    study = [describe_point(small.axes, axes)] if len(rows) < len(all_rows) else []
    runs = min(row.n for row in (small, large, best))
    is_few, is_short = runs < MIN_RUNS, small["epochs"] < MIN_EPOCHS_TO_TELL
    few = " and ".join([epochs] * is_short + [pluralize(runs, "run")] * is_few)
    untimed = any(row["epochs_to_target"] is not None and row["time_to_target_s"] is None for row in rows)
    # the rate may be the only thing in which two rows differ
    remedies = f"{describe_axis('remedies', best['remedies'])} (rate {best['learning_rate']:.3g})"
    num_sets = pluralize(len({tuple(row["remedies"]) for row in known}), "set")
    recovered = f"{shown(best['final_test_accuracy'], '.1%')} with {remedies}, the best of {num_sets}"
    tile = accuracy_tile(small, large)._replace(
        more=f"{recovered}{unclear_words(large, best)}; {', '.join((epochs, *study, f'n = {runs}'))}",
        warning=f"{few} cannot show whether a remedy helps" if few else "",
        badges=badges_of(large, *(("other $GPU",) if untimed else ())),
        command=grid_command("q4-study") if few else "",
    )
    return [tile, *soonest_claims(rows, small)]


def accuracy_tile(small: Row, large: Row) -> Tile:
    """Return what the large batch reaches beside the small one: an accuracy, or another merit."""
    what, form = ("Accuracy", ".1%") if small["final_merit"] is None else ("$Merit", "digits")
    of_small = f"{shown(final_of(small), form)} at {small['global_batch_size']:,}{unclear_words(small, large)}"
    label = f"{what} at batch {large['global_batch_size']:,}"
    return Tile(label, *figure_of(final_of(large), form), of_small, badges=badges_of(large))


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
    is_known = min(before.n, after.n) >= MIN_RUNS and None not in (*lows, *highs)
    return " (no difference is shown)" if is_known and max(lows) <= min(highs) else ""


def soonest_claims(rows: Sequence[Row], small: Row) -> list[Tile]:
    """Return which run gets to the target in the fewest seconds, or that none does."""
    reached = [row["reached"] for row in rows]
    if {*reached} - {None, NEVER_REACHED}:
        return target_claims(rows, small, "Soonest", "time_to_target_s", "s")
    unknown = reached.count(None)
    but = f"; {pluralize(unknown, 'configuration')} without a result" if unknown else ""
    return [Tile(f"Soonest at {format_target(small)}", line=f"no run reaches it{but}")]


def target_claims(rows: Sequence[Row], small: Row, label: str, key: str, unit: str) -> list[Tile]:
    """Return which run of a study reaches the target first by a column, beside the small batch.

    Nothing where it is not known, or where the first epoch reaches it: that tells no trainings apart. Runs whose
    interval meets that of the first are counted.
    """
    known = sorted((row for row in rows if row[key] is not None), key=lambda row: float(row[key]))
    if all(row["epochs_to_target"] == 1 for row in known):
        return []
    first = known[0]
    missed = first["reached"] != f"{first.n} of {first.n}"  # the interval has no end if a seed missed the target
    end = float("inf") if missed else ends_of(first[key])[1] or first[key]
    rivals = sum((ends_of(row[key])[0] or row[key]) <= end for row in known[1:])
    beside = [f"{first['reached']} runs reach it"] if missed else []
    if first is not small and small[key] is not None:
        beside.append(f"{small['global_batch_size']:,} $images take {shown(small[key], 'digits')} {unit}")
    beside += [f"{rivals} more may be as good"] if rivals else []
    more = "; ".join([*beside, f"n = {first['num_timed']}"])
    figure = figure_of(first[key], "digits", unit)
    return [Tile(f"{label} at {format_target(small)}", *figure, line=describe_run(first, rows), more=more)]


Groups = Mapping[str, Sequence[Row]]
RemedySets = Sequence[tuple[str, ...]]

BATCH = GLOBAL_BATCH.key
TRAINING_ACCURACY = Q4.column("accuracy")
FINALS = [TIME_TO_TARGET.column(key) for key in ("final_test_accuracy", "final_merit")]
TARGET_TIME = TIME_TO_TARGET.column("time_to_target_s")
FOLLOWS_FROM_BATCH = ("batch_size_per_gpu", "num_gpus", "strategy", "learning_rate")
MIN_EPOCHS = 3  # fewer do not show how accuracy develops
INFORMATIVE = 0.5  # of the best accuracy; a size that stays below it tells remedies hardly apart
WIDE_RANGE = 8  # the largest over the smallest end of a curve, from which the axis is logarithmic
TIMES = "time to the target"  # the panel of times, in the title
SEEDS_NOTE = (
    "Medians over the seeds. Bars: of six seeds or more the interval of the median, of two to five seeds the lowest "
    "and the highest. A marker without a bar: one seed, or a seed missed the target. The axis of the {} does not begin "
    "at 0."
)
SOME_TIMES_NOTE = "Times are of one $GPU model: seeds on another have none."


def final_accuracy_plots(tables: Tables) -> Iterator[Plot]:
    """Yield Q4: final accuracy and time to target against the batch size, a line for each set of remedies.

    All runs are of one study (main_study) and have the epochs of its baseline. Of equal global batches only the run on
    the fewest GPUs is shown. Times are compared on the baseline's number of GPUs.
    """
    study, baseline = main_study(tables["time_to_target"])
    if baseline is None or baseline["epochs"] < MIN_EPOCHS:
        return
    as_long = [row for row in study if row["epochs"] == baseline["epochs"]]
    final = first_known(FINALS, as_long)
    tested = [row for row in as_long if row[final.key] is not None]
    (groups, left_out), sets = remedy_groups(tested), remedy_sets(tables["Q4"])
    lines = make_series(groups, BATCH, final, styles_of(groups, sets))
    what, heading = ("accuracy", TEST_ACCURACY.heading) if final is FINALS[0] else (MERIT.heading, MERIT.heading)
    accuracies = LinePanel(as_title(heading), GLOBAL_BATCH.heading, lines, y_covers=())
    panels = {f"{what} after {pluralize(baseline['epochs'], 'epoch')}": accuracies}
    if baseline["target_accuracy"] is not None or baseline["target_merit"] is not None:
        alike, _ = remedy_groups([row for row in tested if row["num_gpus"] == baseline["num_gpus"]])
        lines = make_series(alike, BATCH, TARGET_TIME, styles_of(alike, sets))
        title = f"Training time to {format_target(baseline)} [s]"
        panels[TIMES] = LinePanel(title, GLOBAL_BATCH.heading, lines)
    panels = {what: panel for what, panel in panels.items() if panel.is_curve}
    is_partial = TIMES in panels and any(row["num_timed"] < row["n"] for row in tested)
    note = " ".join(filter(None, (SEEDS_NOTE.format(what), SOME_TIMES_NOTE if is_partial else "", left_out)))
    title = as_title(f"{' and '.join(panels)}, by batch size")
    yield Plot("q4-batch-size", "Q4", title, tuple(panels.values()), note)


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
    return group_series(fewest, BATCH, first, (*FOLLOWS_FROM_BATCH, *NAMED_LAST))


def accuracy_plots(tables: Tables) -> Iterator[Plot]:
    """Yield Q4 during training. With remedies it is of one batch size, beside the baseline.

    That is the largest whose best accuracy is not below INFORMATIVE of the best, since the lines of the others are
    flat; of it the shortest runs are shown.
    """
    rows = [row for row in tables["Q4"] if row["epoch"] is not None]
    column = first_known((TEST_ACCURACY, MERIT, TRAINING_ACCURACY), rows)
    known = [row for row in rows if row[column.key] is not None]
    curves = group_pairs((repr(row.axes), row) for row in known).values()
    rows = [row for curve in curves if len(curve) >= MIN_EPOCHS for row in curve]
    if not rows:
        return
    sizes, best = {row[BATCH] for row in rows if row["remedies"]}, max(row[column.key] for row in rows)
    told = {row[BATCH] for row in rows if row[BATCH] in sizes and row[column.key] >= INFORMATIVE * best}
    batch = max(told or sizes, default=None)
    title = f"{as_title(MERIT.heading if column is MERIT else 'accuracy')} of training"
    shown, compared, first = rows, list[Row](), tuple[str, ...]()
    if batch:
        own = group_pairs((int(row.axes.get("epochs", 0)), row) for row in rows if row[BATCH] == batch)
        shown, first = own[min(own)], ("remedies",)
        compared = [row for row in baseline_curve(tables, rows) if row[BATCH] != batch]
        title = f"Accuracy with {batch:,} $images a step"
    groups, left_out = group_series(shown, "epoch", first)
    note = f"Medians over the seeds. {left_out}" if batch else left_out
    yield Plot("q4", "Q4", title, (accuracy_panel(groups, column, remedy_sets(rows), compared),), note.rstrip())


def baseline_curve(tables: Tables, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the baseline (main_study), to compare larger batches with."""
    _, baseline = main_study(tables["time_to_target"])
    if baseline is None:
        return []
    axes = {axis: value for axis, value in baseline.axes.items() if axis != "gpu"}
    return [row for row in rows if axes | row.axes == row.axes | axes]


def styles_of(groups: Groups, sets: RemedySets) -> dict[str, int]:
    """Return the style of each label: that of its remedies in every plot; a second line of the same has a free one."""
    if len(sets) > MAX_SERIES:
        sets = remedy_sets([rows[0] for rows in groups.values()])
    free = [*range(len(sets), MAX_SERIES), *range(len(sets))]
    styles: dict[str, int] = {}
    for label in sorted(groups, key=lambda label: (groups[label][0]["num_gpus"], len(label))):  # the plainest first
        own = sets.index(tuple(groups[label][0]["remedies"]))
        styles[label] = next(style for style in (own, *free) if style not in styles.values())
    return styles


def accuracy_panel(groups: Groups, column: Column, sets: RemedySets, reference: Sequence[Row]) -> LinePanel:
    """Return accuracy by second, or by epoch where no time is known; `reference` is a curve to compare with."""
    styles, compared = styles_of(groups, sets), {}
    if reference:
        batch = describe_axis(BATCH, reference[0][BATCH]).removesuffix(" in all")
        compared = {f"{batch} $images, no remedies": reference}
    is_timed = any(row["training_time_s"] is not None for rows in groups.values() for row in rows)
    key, x_label = ("training_time_s", "seconds of training") if is_timed else ("epoch", "epoch")
    lines = (
        *make_series(groups, key, column, styles),
        *make_series(compared, key, column, dict.fromkeys(compared, REFERENCE)),
    )
    ends = [line.points[-1].x for line in lines]
    scale: Scale = "log10" if is_timed and max(ends) > WIDE_RANGE * min(ends) else "linear"
    return LinePanel(as_title(column.heading), x_label, lines, scale)
