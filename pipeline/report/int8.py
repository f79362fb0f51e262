"""int8: what quantization costs in accuracy. Its tables, answer and plots."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pipeline.figures.intervals import NOMINAL, OF_FEWEST_VALUES, ends_of, estimate, median_interval, min_values
from pipeline.figures.notes import NoteKind, make_note, text_note
from pipeline.figures.pooling import PooledPoint, group_pairs
from pipeline.plan.point_label import describe_axis
from pipeline.records.record import Quantization, StageResult
from pipeline.report.claims import Tile, describe_own, figure_of, shown
from pipeline.report.plots import (
    REFERENCE,
    HistogramPanel,
    LinePanel,
    Plot,
    Point,
    Series,
    group_series,
    make_point,
)
from pipeline.report.table import (
    PLACE,
    TEST_ACCURACY,
    Column,
    Row,
    Table,
    Tables,
    View,
    make_row,
)
from pipeline.system.errors import pluralize

STAGE_WORDS = {"activations": "+ activations", "biases": "+ biases (all)"}
INT8 = Table(
    "int8",
    "int8",
    (
        *PLACE,
        Column(
            "stage",
            "stage",
            "Stage: fp32, then int8 weights, then int8 activations too, then int32 biases too.",
            is_set=True,
            words=STAGE_WORDS,
        ),
        Column(
            "scale_rule",
            "scale",
            "Magnitude that becomes 127: the largest, |mean| + 3 sigma, or the 99.9th percentile.",
            is_set=True,
        ),
        Column(
            "granularity",
            "one scale per",
            "Scales of the weights: one per tensor, or one per output channel.",
            is_set=True,
        ),
        TEST_ACCURACY._replace(interval="shown"),
        Column(
            "accuracy_change",
            "change [points]",
            "Accuracy minus fp32 of the same seed, median over seeds.",
            interval="shown",
        ),
        Column("agreement", "same class as fp32 [%]", "Share of test images that get the same class as in fp32."),
        Column("tie_share", "ties [%]", "Share of test images whose highest score several classes have."),
        Column("network_bytes", "size [MB]", "Bytes of weights, biases and scales."),
        Column("mean_accuracy_change", "", "Mean over seeds of accuracy minus fp32."),
    ),
    View(
        "int8: test accuracy after quantization",
        f"Medians over n seeds with their interval ({NOMINAL}, for {min_values()} seeds "
        f"{100 * OF_FEWEST_VALUES:.1f} %). Each stage includes those before it: weights in int8, activations in "
        "int8 with scales from training $images, biases in int32.",
        keys=("stage", "scale_rule", "granularity", "test_accuracy", "accuracy_change"),
        shows_n=True,
    ),
    View(
        "int8: agreement with fp32, and size",
        "Ties are test $images whose highest score several classes share. The size counts weights, biases and scales.",
        keys=("stage", "scale_rule", "granularity", "agreement", "tie_share", "network_bytes"),
        shows_n=True,
    ),
)

INT8_HISTOGRAMS = Table(
    "int8_histograms",
    "",
    (
        *PLACE,
        Column("seed", "", "Seed of the run."),
        Column("layer", "", "Layer of the network."),
        Column("tensor", "", "Values that the histogram counts: weights, or fp32 outputs before or after ReLU."),
        Column("low", "", "Smallest value, where the first bin begins."),
        Column("high", "", "Largest value, where the last bin ends."),
        Column("mean", "", "Mean of the values."),
        Column("sigma", "", "Standard deviation of the values."),
        Column("three_sigma_low", "", "Mean minus three sigma."),
        Column("three_sigma_high", "", "Mean plus three sigma."),
        Column("counts", "", "Number of values in each bin of equal width."),
    ),
)

TOO_FEW_SEEDS = NoteKind("too_few_seeds", "an interval needs {needed} seeds, got {found}")

NUM_SIGMAS = 3

TestedNetwork = tuple[Quantization, StageResult]  # one network of a seed, and the test of it


def int8_rows(point: PooledPoint) -> list[Row]:
    """Return a row for fp32 and for every stage and scale, pooled over seeds; one row for a point without a result."""
    pairs = [(quantization, result) for _, quantization in quantizations_of(point) for result in quantization.results]
    by_stage = group_pairs(((pair[1].stage, pair[1].scale_rule, pair[1].granularity), pair) for pair in pairs).values()
    return [int8_row(point, results) for results in by_stage] or [make_row(INT8, point)]


def quantizations_of(point: PooledPoint) -> list[tuple[int, Quantization]]:
    """Return the seed and the result of each run that has one, in the order of seeds."""
    records = sorted(point.ok_records, key=lambda record: (record.spec.seed, record.spec.repeat))
    measured = [(record.spec.seed, record.measurement) for record in records if record.measurement]
    return [(seed, found.quantization) for seed, found in measured if found.quantization]


def int8_row(point: PooledPoint, found: Sequence[TestedNetwork]) -> Row:
    """Return the row of one stage and scale: medians over seeds, with intervals over seeds if there are enough."""
    tested = [pair for pair in found if pair[1].num_correct is not None]
    shares = group_pairs(share for pair in tested for share in result_shares(*pair).items())
    _, result = found[0]
    notes = [text_note(problem) for problem in dict.fromkeys(other.problem for _, other in found) if problem]
    if 0 < len(tested) < min_values():
        notes.append(make_note(TOO_FEW_SEEDS, needed=min_values(), found=len(tested)))
    changes = shares.get("accuracy_change")
    return make_row(
        INT8,
        point,
        notes,
        n=len(tested),
        stage=result.stage,
        scale_rule=result.scale_rule,
        granularity=result.granularity,
        **{key: estimate(statistics.median(values), median_interval(values)) for key, values in shares.items()},
        mean_accuracy_change=statistics.fmean(changes) if changes else None,
        network_bytes=tested[0][1].num_bytes if tested else None,
    )


def result_shares(quantization: Quantization, result: StageResult) -> dict[str, float]:
    """Return the figures of one network as shares of the test images, by column, without those that are not known.

    The change is paired: each seed against its own network in fp32. fp32 itself has no change and no agreement.
    """
    counts = {"test_accuracy": result.num_correct, "tie_share": result.num_ties}
    fp32 = next((other.num_correct for other in quantization.results if other.stage == "fp32"), None)
    if result.stage != "fp32":
        counts["agreement"] = result.num_agreeing
        if result.num_correct is not None and fp32 is not None:
            counts["accuracy_change"] = result.num_correct - fp32
    return {key: count / quantization.num_test_samples for key, count in counts.items() if count is not None}


def int8_histogram_rows(point: PooledPoint) -> list[Row]:
    """Return the histograms of the first seed: those of several seeds have other bins.

    Each has the lines at the mean plus and minus three sigma.
    """
    rows = []
    for seed, quantization in quantizations_of(point)[:1]:
        for histogram in quantization.histograms:
            figures = msgspec.structs.asdict(histogram) | {"counts": list(histogram.counts)}
            low, high = (histogram.mean + sign * NUM_SIGMAS * histogram.sigma for sign in (-1, 1))
            figures |= {"three_sigma_low": low, "three_sigma_high": high}
            rows.append(make_row(INT8_HISTOGRAMS, point, n=1, seed=seed, **figures))
    return rows


def int8_claims(rows: Sequence[Row]) -> list[Tile]:
    """Return what int8 changes in accuracy and bytes: every tensor in int8, one scale a tensor by its largest value."""
    usual = ("biases", "largest_magnitude", "per_tensor")
    full = [row for row in rows if (row["stage"], row["scale_rule"], row["granularity"]) == usual]
    row = max(full, key=lambda row: (row["accuracy_change"] is not None, row.n), default=None)
    if row is None or row["accuracy_change"] is None:
        why = next((str(row["note"]).rstrip(".") for row in full if row["note"]), "").replace("`", "'")  # no command
        return [Tile(line=f"no network was quantized in full ({why})" if why else "no quantized network was tested")]
    before = next(other for other in rows if other["stage"] == "fp32" and other.axes == row.axes)
    change = row["accuracy_change"]
    low, high = ends_of(change)
    is_unclear = low is not None and high is not None and low <= 0 <= high
    which = f"{describe_own(row, full)}, " if len(full) > 1 else ""
    sizes = f"{row['network_bytes'] or 0:,} of {before['network_bytes'] or 0:,} bytes"
    rule = f"{GRANULARITIES[row['granularity']].lower()} by its {describe_axis('scale_rule', row['scale_rule'])}"
    num_tested = {found.num_test_samples for _, found in quantizations_of(row.point)} if row.point else set()
    tests = "".join(f"{number:,} test images, " for number in sorted(num_tested))
    tile = Tile(
        "Accuracy in int8",
        *figure_of(change.times(100), "+.2f", "points"),
        line=f"from {shown(before['test_accuracy'], '.1%')} in fp32",
        more=f"{which}{rule}, {tests}{sizes}, n = {pluralize(row.n, 'seed')}",
        badges=("no change shown",) if is_unclear else (),
    )
    return [tile]


CHANGE = INT8.column("accuracy_change")
STAGES = {"weights": "weights", **STAGE_WORDS}
GRANULARITIES = {"per_tensor": "One scale per tensor", "per_channel": "One scale per channel"}
HISTOGRAMS = {
    "weights": ("int8-weights", "Weights of every layer"),
    "before_relu": ("int8-before-relu", "Outputs of every layer before ReLU"),
    "after_relu": ("int8-after-relu", "Outputs of every layer after ReLU"),
}
SPACING = 0.05  # between the series of a stage: as wide as a marker, so that intervals do not hide each other
SMALL = 1 / 3  # of the largest change; series that stay below it have panels of their own


def int8_plots(tables: Tables) -> Iterator[Plot]:
    """Yield the change of accuracy by stage, and the histograms of one seed, by tensor."""
    rows = [row for row in tables["int8"] if row[CHANGE.key] is not None]
    if rows:
        yield change_plot(rows)
    yield from histogram_plots(tables["int8_histograms"])


def change_plot(rows: Sequence[Row]) -> Plot:
    """Return the change of test accuracy against fp32 by stage: a line for each scale rule, a panel a granularity.

    If one series hides how small the others are, these are shown again without it. All panels of a row have one range.
    """
    groups, left_out = group_series(rows, "stage", first=("scale_rule",), panel="granularity")
    lines: dict[str, list[Series]] = {granularity: [] for granularity in GRANULARITIES}
    for style, (label, of_label) in enumerate(groups.items()):
        shift = SPACING * (style - (len(groups) - 1) / 2)
        for granularity, own in lines.items():
            wanted = [row for row in of_label if row["granularity"] == granularity]
            places = [list(STAGES).index(row["stage"]) + shift for row in wanted]
            points = tuple(make_point(x, row, CHANGE) for x, row in zip(places, wanted, strict=True))
            own += [Series(label, points, style)] if points else []
    every = [line for own in lines.values() for line in own]
    reach = {label: max(map(abs, ends_of_changes(line for line in every if line.label == label))) for label in groups}
    small = [label for label in groups if reach[label] < SMALL * max(reach.values())]
    panels = [*change_panels(lines, [*groups], CHANGE.name), *change_panels(lines, small, "enlarged")]
    has_intervals = any(point.low is not None for line in every for point in line.points)
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
    covers = tuple(end for own in chosen.values() for end in ends_of_changes(own))
    reference = Series("fp32", (Point(-0.5, 0), Point(len(STAGES) - 0.5, 0)), REFERENCE)
    for granularity, own in chosen.items():
        if own:
            title = f"{GRANULARITIES[granularity]}: {CHANGE.heading.replace(CHANGE.name, name)}"
            yield LinePanel(title, "stage", (reference, *own), x_names=tuple(STAGES.values()), y_covers=covers)


def ends_of_changes(lines: Iterable[Series]) -> list[float]:
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
            shown = f"seed {own[0]['seed']}" + (
                f" of the first of {len(points)} configurations" if len(points) > 1 else ""
            )
            signs = "plus" if tensor == "after_relu" else "plus and minus"
            note = (
                f"Number of values in a bin, logarithmic; {shown}. Dashed: mean {signs} 3 sigma. Solid: the largest "
                "magnitude."
            )
            ends_in = with_relu if tensor == "before_relu" else {row["layer"] for row in own}
            yield Plot(name, "int8", title, tuple(histogram_panel(row, row["layer"] in ends_in) for row in own), note)


def histogram_panel(row: Row, has_relu: bool) -> HistogramPanel:
    """Return the panel of one row; of the last layer it says that no ReLU follows. After ReLU nothing is below 0."""
    title = f"{row['layer']}{'' if has_relu else ' (no ReLU)'}: {sum(row['counts']):,} values"
    ends = (row["three_sigma_low"], row["three_sigma_high"])[row["tensor"] == "after_relu" :]
    return HistogramPanel(title, row["low"], row["high"], tuple(row["counts"]), ends)
