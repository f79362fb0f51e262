"""Q1, batch size: the batch that keeps one GPU busy. Its table, answer and plot."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.figures.epoch_figures import compute_rate_notes, energy_notes, host_cpu_share_of, time_figures, time_notes
from pipeline.figures.pooling import PooledPoint
from pipeline.report.claims import (
    NO_RESULT,
    Tile,
    badges_of,
    differing_axes,
    grid_command,
    name_ties,
    no_result,
    not_answered,
    not_told_apart,
    time_words,
    where_of,
    without_evaluation,
)
from pipeline.report.memory import memory_claims
from pipeline.report.plots import LinePanel, Plot, Series, as_title, group_series, make_series
from pipeline.report.step_parts import BATCH
from pipeline.report.table import (
    COMPUTE,
    COMPUTE_RATE,
    ENERGY,
    EPOCH_TIME,
    FLOPS,
    GLOBAL_BATCH,
    INTERVAL,
    MEMORY,
    MFU,
    PLACE,
    RUN_SPREAD,
    SAMPLE_ENERGY,
    SAMPLE_THROUGHPUT,
    THROUGHPUT,
    TIMING,
    UPDATE_TIME,
    WAITING,
    WORKERS,
    Column,
    Row,
    Table,
    Tables,
    View,
    make_row,
)
from pipeline.system.errors import pluralize

Q1 = Table(
    "Q1",
    "Q1",
    (
        *PLACE,
        EPOCH_TIME._replace(interval="kept"),
        UPDATE_TIME,
        COMPUTE,
        WAITING,
        THROUGHPUT,
        COMPUTE_RATE,
        MFU,
        MEMORY,
        INTERVAL,
        WORKERS,
        RUN_SPREAD,
        ENERGY,
        SAMPLE_THROUGHPUT,
        SAMPLE_ENERGY,
        *FLOPS,
        *TIMING,
        Column("host_cpu_share", "", "Busy share of the CPUs of the busiest node, cut to 0 to 1."),
    ),
    View(
        "Q1: epoch time against batch size, one $GPU",
        "Times are medians over the timed epochs; waiting is the share of the epoch in which the $GPU has no data.",
    ),
)


def q1_row(point: PooledPoint, peak_tflops: float | None = None) -> Row:
    """Return a row of Q1: epoch time against batch size, on one GPU. `peak_tflops` is its peak, if it is stated."""
    notes = [*time_notes(point), *energy_notes(point), *point.allocator_retry_notes]
    return make_row(
        Q1,
        point,
        [*notes, *compute_rate_notes(point, peak_tflops)],
        **time_figures(point, peak_tflops),
        host_cpu_share=point.median(host_cpu_share_of),
    )


def batch_size_claims(tables: Tables) -> list[Tile]:
    """Return the batch size with the highest throughput on one GPU, and the first that runs out of memory."""
    rows, memory = tables["Q1"], memory_claims(tables)
    timed = without_evaluation([row for row in rows if row["epoch_time_s"]])
    lost = [row for row in rows if row.status in NO_RESULT]
    if not timed:
        speed = not_answered("no epoch was timed on one $GPU", "q1")
        return [*memory, no_result("configurations on one $GPU", lost) if lost else speed]
    best = max(timed, key=lambda row: (row["throughput_items_per_s"] or 0.0, -row["epoch_time_s"]))
    sizes, throughput = {row[BATCH] for row in timed}, best["throughput_items_per_s"]
    alike = [row for row in timed if row[BATCH] != best[BATCH] and not differing_axes(row, best)]
    ties = list({row[BATCH]: row for row in reversed(not_told_apart(best, alike))}.values())[::-1]
    rivals = name_ties(best, ties, lambda row: f"{row[BATCH]:,}")
    unclear = ("configurations without a result",) if {row[BATCH] for row in lost} - sizes else ()
    apart = f", {rivals}" if rivals else ""
    number, _, unit = pluralize(best[BATCH], "$image").partition(" ")
    tile = Tile(
        f"{'Best batch' if len(sizes) > 1 else 'Only batch tried'}, one $GPU",
        number,
        unit + " a pass" * (best.axes.get("grad_accumulation", 1) > 1),
        line="$items/s not stated" if throughput is None else f"{throughput:,.0f} $items/s",
        more=time_words(best["epoch_time_s"], best["update_time_s"])
        + where_of(best, timed, "batch_size_per_gpu")
        + apart,
        badges=badges_of(best, *unclear),
        command="" if memory or best.axes.get("script") else grid_command("memory"),
    )
    return [tile, *memory]


def batch_size_plots(tables: Tables) -> Iterator[Plot]:
    """Yield Q1: time, throughput and memory against batch size on one GPU."""
    rows = tables["Q1"]
    fitting = [row for row in rows if row.status == "ok"]
    largest = max((row[BATCH] for row in fitting), default=0)
    oom_from = min((row[BATCH] for row in rows if row.status == "oom" and row[BATCH] > largest), default=None)
    groups, note = group_series(fitting, BATCH)
    shown = [
        (EPOCH_TIME.heading, make_series(groups, BATCH, EPOCH_TIME)),
        *throughput_lines(groups),
        (MEMORY.heading, make_series(groups, BATCH, MEMORY)),
    ]
    accumulates = any(row.axes.get("grad_accumulation", 1) > 1 for row in fitting)
    heading = "$images a pass" if accumulates else GLOBAL_BATCH.heading
    panels = tuple(LinePanel(as_title(title), heading, lines, oom_from=oom_from) for title, lines in shown if lines)
    yield Plot("q1", "Q1", "One $GPU: time, throughput and memory against batch size", panels, note)


def throughput_lines(groups: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, tuple[Series, ...]]]:
    """Yield the heading and the lines of throughput for each unit apart."""
    units = dict.fromkeys(row["unit"] for rows in groups.values() for row in rows)
    for unit in units:
        own = {label: [row for row in rows if row["unit"] == unit] for label, rows in groups.items()}
        heading = THROUGHPUT.heading if len(units) == 1 else f"{unit} a second"
        yield heading, make_series(own, BATCH, THROUGHPUT)
