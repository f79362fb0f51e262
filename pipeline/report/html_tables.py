"""The tables of the page: at most ten columns each, one unit a column, notes as numbered footnotes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.experiment.point_label import EFFORT_AXES, describe_point, format_figure, varying_axes
from pipeline.report.note_texts import render_note
from pipeline.report.plot_data import note_on_number
from pipeline.report.row_types import Row

STATUS_WORDS = {"oom": "out of memory", "failed": "failed", "missing": "missing", "rejected": "rejected"}
OWN_COLUMNS = {"strategy": "strategy", "num_gpus": "GPUs", "batch_size_per_gpu": "images per GPU"}
"""Axes that have a column if they vary; the others share one."""

STATED_KEYS = ("global_batch_size", "num_gpus", "from_num_gpus", "bucket", "num_bytes", "epoch", "num_updates")
MAX_ROWS_UNFOLDED = 40
MAX_ROWS = 10_000  # a page with more is slow; the CSV files have all


class Figure(NamedTuple):
    """A column of numbers: its heading with the unit, its key, and the factor or the other key for that unit.

    `low` and `high` are the keys of an interval that stands behind the number.
    """

    heading: str
    key: str
    factor: float = 1
    over: str = ""
    low: str = ""
    high: str = ""

    def value(self, row: Row, key: str = "") -> float | None:
        """Return the number in the unit of the column; None if it is not known."""
        value, divisor = row[key or self.key], row[self.over] if self.over else 1
        return self.factor * value / divisor if value is not None and divisor else None


class Cell(NamedTuple):
    """A cell: its text, the address that it links to, and the numbers of its footnotes."""

    text: str
    is_number: bool = False
    href: str = ""
    footnotes: tuple[int, ...] = ()


class PageTable(NamedTuple):
    """A table as the page shows it. `common` is what all rows share, `source` the CSV file with every column."""

    heading: str
    columns: list[Cell]
    rows: list[list[Cell]]
    footnotes: list[str]
    common: str
    legend: str
    source: str
    is_folded: bool


class TableLayout(NamedTuple):
    """A table to show. `choose` leaves rows out or sorts them; the first figure says what became of the point."""

    table: str  # the field of `Tables`
    question: str
    heading: str
    figures: tuple[Figure, ...]
    legend: str = ""
    choose: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    hidden: tuple[str, ...] = ()  # axes that say nothing here
    is_folded: bool = False


def scaled(scaling: str, batch: str) -> Callable[[Sequence[Row]], Sequence[Row]]:
    """Return the choice of the rows of one kind of scaling, by batch size and GPUs; none if all are baselines."""

    def choose(rows: Sequence[Row]) -> Sequence[Row]:
        chosen = [row for row in rows if row["scaling"] == scaling]
        in_order = sorted(chosen, key=lambda row: (row["strategy"] != "single", row["strategy"], row["num_gpus"]))
        in_order.sort(key=lambda row: row[batch])
        return in_order if any(row["num_gpus"] > 1 for row in chosen) else []

    return choose


def last_epochs(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the row of each point's last epoch."""
    return list({repr((row.axes, row["remedies"])): row for row in rows}.values())


TIMES = (Figure("epoch time [s]", "epoch_time_s"), Figure("interval [± %]", "noise_floor", 100))
SPEEDUP = (
    *TIMES,
    Figure("images/s", "throughput_samples_per_s"),
    Figure("speed-up", "speedup", low="speedup_low", high="speedup_high"),
    Figure("efficiency [%]", "parallel_efficiency", 100),
)

TABLE_LAYOUTS = (
    TableLayout(
        "Q1",
        "Q1",
        "Epoch time against batch size, one GPU",
        (
            *TIMES,
            Figure("computing [s]", "compute_time_s"),
            Figure("waiting for data [%]", "data_time_s", 100, over="epoch_time_s"),
            Figure("images/s", "throughput_samples_per_s"),
            Figure("peak memory [GiB]", "peak_memory_gib"),
            Figure("energy [mJ/image]", "energy_per_sample_j", 1000),
        ),
    ),
    TableLayout(
        "memory",
        "Q1",
        "The memory boundary",
        (
            Figure("largest batch that fits", "largest_batch_size_per_gpu"),
            Figure("smallest that fails", "smallest_failing_batch_size_per_gpu"),
            Figure("peak memory [GiB]", "peak_memory_gib"),
            Figure("head room [GiB]", "head_room_gib"),
            Figure("trials", "num_trials"),
            Figure("search [s]", "search_time_s"),
        ),
        "Images per GPU, known within 1 %.",
        hidden=("batch_size_per_gpu",),
    ),
    TableLayout(
        *("Q2", "Q2", "Weak scaling: images per GPU fixed", SPEEDUP),
        "Speed-up over the same number of images on one GPU; efficiency is speed-up over the number of GPUs.",
        scaled("weak", "batch_size_per_gpu"),
    ),
    TableLayout(
        *("Q2", "Q2", "Strong scaling: images in all fixed"),
        (Figure("images in all", "global_batch_size"), *SPEEDUP),
        choose=scaled("strong", "global_batch_size"),
        hidden=("batch_size_per_gpu",),
    ),
    TableLayout(
        "communication",
        "Q3",
        "Communication of one step, measured",
        (
            Figure("step [ms]", "step_time_s", 1e3),
            Figure(
                "exposed [us]",
                "exposed_comm_time_s",
                1e6,
                low="exposed_comm_time_low_s",
                high="exposed_comm_time_high_s",
            ),
            Figure("of the step [%]", "exposed_comm_time_s", 100, over="step_time_s"),
            Figure("all-reduce [us]", "comm_time_s", 1e6),
            Figure("hidden [%]", "hidden_share", 100),
            Figure("DDP's overhead [us]", "ddp_overhead_time_s", 1e6),
        ),
        "Exposed communication is not hidden behind computation: DDP's step less the same step without communication.",
    ),
    TableLayout(
        "Q3",
        "Q3",
        "Computation against communication, estimated by subtraction",
        (
            Figure("epoch time [s]", "epoch_time_s"),
            Figure("T(1)/N [s]", "compute_time_subtraction_s"),
            Figure("T(N) - T(1)/N [s]", "comm_time_subtraction_s"),
            Figure("of the epoch [%]", "comm_time_subtraction_s", 100, over="epoch_time_s"),
            Figure("measured, exposed [s]", "exposed_comm_time_s"),
        ),
        "Subtraction counts every cost that does not divide by N as communication, waiting for data included.",
    ),
    TableLayout(
        "bandwidth",
        "Q3",
        "Bandwidth of DDP's buckets",
        (
            Figure("bucket", "bucket"),
            Figure("size [MB]", "num_bytes", 1e-6),
            Figure("time [us]", "comm_time_s", 1e6),
            Figure("bus bandwidth [GB/s]", "busbw_gb_s"),
            Figure("isolated [GB/s]", "peak_busbw_gb_s"),
            Figure("of isolated [%]", "link_share", 100),
        ),
        is_folded=True,
    ),
    TableLayout(
        "sweep",
        "Q3",
        "Isolated all-reduces",
        (
            Figure("size [MB]", "num_bytes", 1e-6),
            Figure("time [us]", "time_s", 1e6),
            Figure("algorithm bandwidth [GB/s]", "algbw_gb_s"),
            Figure("bus bandwidth [GB/s]", "busbw_gb_s"),
        ),
        is_folded=True,
    ),
    TableLayout(
        "transfers",
        "Q3",
        "What travels in a step, counted",
        (
            Figure("gradients [MB]", "gradients_bytes_per_step", 1e-6),
            Figure("calls", "gradients_calls_per_step"),
            Figure("by formula [MB]", "gradients_bytes_formula", 1e-6),
            Figure("buffers [kB]", "buffers_bytes_per_step", 1e-3),
            Figure("batch norm [kB]", "batchnorm_statistics_bytes_per_step", 1e-3),
            Figure("parameters [MB]", "parameters_bytes_per_step", 1e-6),
            Figure("inputs [MB]", "inputs_bytes_per_step", 1e-6),
        ),
        is_folded=True,
    ),
    TableLayout(
        "split",
        "Q3",
        "DataParallel's step, part by part",
        (
            Figure("step [ms]", "step_time_s", 1e3),
            *(
                Figure(f"{part} [ms]", f"{part.replace(' ', '_')}_time_s", 1e3)
                for part in ("scatter", "replicate", "parallel forward", "gather", "backward", "optimizer")
            ),
        ),
        "Every device is synchronized after each part, so the parts sum to more than the step.",
        is_folded=True,
    ),
    TableLayout(
        "prediction",
        "Q3",
        "Prediction: weak scaling on more GPUs",
        (
            Figure("GPUs", "num_gpus"),
            Figure("measured on", "from_num_gpus"),
            Figure("step at most [ms]", "predicted_step_time_s", 1e3),
            Figure("step at least [ms]", "predicted_step_time_low_s", 1e3),
            Figure("efficiency at least [%]", "predicted_parallel_efficiency", 100),
            Figure("at most [%]", "predicted_parallel_efficiency_high", 100),
            Figure("measured step [ms]", "measured_step_time_s", 1e3),
        ),
        "Not measured: one ring over equal links, fitted to the all-reduces above.",
        hidden=("num_gpus",),
        is_folded=True,
    ),
    TableLayout(
        "Q4",
        "Q4",
        "Accuracy after the last epoch",
        (
            Figure("epochs", "epoch"),
            Figure("updates", "num_updates"),
            Figure("training loss", "loss"),
            Figure("training accuracy [%]", "accuracy", 100),
            Figure("test accuracy [%]", "test_accuracy", 100),
        ),
        choose=last_epochs,
    ),
)
"""Every table of the page, in its order."""


def build_table(layout: TableLayout, all_rows: Sequence[Row], link_of: Callable[[Row], str]) -> PageTable | None:
    """Return one table, None if it has no rows. `link_of` gives the address of a row's record."""
    chosen = layout.choose(all_rows)
    rows = chosen[:MAX_ROWS]
    if not rows:
        return None
    points = [row.axes | remedies_of(row) for row in rows]
    varying = varying_axes(points, without=(*layout.hidden, *EFFORT_AXES))
    own = [axis for axis in OWN_COLUMNS if axis in varying]
    others = [axis for axis in varying if axis not in OWN_COLUMNS]
    figures = [figure for figure in layout.figures if any(figure.value(row) is not None for row in rows)]
    figures = figures or list(layout.figures[:1])
    columns = [Cell(OWN_COLUMNS[axis], is_number=axis != "strategy") for axis in own]
    columns += [Cell("configuration")] if others else []
    columns += [Cell(figure.heading, is_number=True) for figure in figures]
    has_repeats = any(row.n > 1 for row in rows)
    columns += [Cell("n", is_number=True)] if has_repeats else []
    decimals = {figure: decimals_of(figure, rows) for figure in figures}
    numbers: dict[str, int] = {}
    lines = []
    for row, point in zip(rows, points, strict=True):
        cells = [Cell(format_axis(point[axis]), axis != "strategy") for axis in own]
        cells += [Cell(describe_point(point, others))] if others else []
        notes = tuple(numbers.setdefault(render_note(note), len(numbers) + 1) for note in row.notes)
        main = main_figure(figures)
        for figure in figures:
            text = format_cell(figure, row, decimals[figure])
            if figure is main:
                cells.append(Cell(text or status_of(row), True, link_of(row), notes))
            else:
                cells.append(Cell(text, True))
        lines.append([*cells, *([Cell(f"{row.n}", True)] if has_repeats else [])])
    return PageTable(
        heading=layout.heading,
        columns=columns,
        rows=lines,
        footnotes=list(numbers),
        common=describe_common(points, varying, layout.hidden),
        legend=" ".join(filter(None, (layout.legend, note_on_number(len(chosen), MAX_ROWS, "rows")))),
        source=f"{layout.table.lower()}.csv",
        is_folded=layout.is_folded or len(lines) > MAX_ROWS_UNFOLDED,
    )


def remedies_of(row: Row) -> dict[str, Any]:
    """Return the remedies as an axis, for the rows that have them as a figure."""
    return {"remedies": row["remedies"]} if "remedies" in type(row).__struct_fields__ else {}


def main_figure(figures: Sequence[Figure]) -> Figure:
    """Return the figure that links to the record: the first that was measured."""
    return next((figure for figure in figures if figure.key not in STATED_KEYS), figures[0])


def status_of(row: Row) -> str:
    """Return why a row has no main figure: its status, or that training diverged."""
    status = getattr(row, "status", "ok")
    if getattr(row, "diverged_at_update", None) is not None:
        return f"diverged at update {row['diverged_at_update']}"
    return STATUS_WORDS.get(status, "not stated")


def describe_common(points: Sequence[Mapping[str, Any]], varying: Sequence[str], hidden: Sequence[str]) -> str:
    """Return what all rows share, in words; what is not stated is left out."""
    without = (*varying, *hidden, *EFFORT_AXES)
    shared = [axis for axis, value in points[0].items() if axis not in without and value not in (None, False, [])]
    return describe_point(points[0], shared)


def format_axis(value: Any) -> str:
    """Return an axis's value in its own column."""
    return f"{value:,}" if isinstance(value, int) else "not stated" if value is None else str(value)


def decimals_of(figure: Figure, rows: Sequence[Row]) -> int:
    """Return the decimals of a column: three digits of its smallest value, but few; none for counts."""
    values = [abs(value) for row in rows if (value := figure.value(row))]
    if all(value == int(value) for value in values):
        return 0
    most = (2 if min(values) >= 0.1 else 3) - ("%" in figure.heading)
    return min(max(2 - math.floor(math.log10(min(values))), 0), most)


def format_cell(figure: Figure, row: Row, decimals: int) -> str:
    """Return the number, with its interval if the figure has one; empty if it is not known."""
    value = figure.value(row)
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    text = f"{value:,.{decimals}f}" if abs(value) < 1e9 else format_figure(value)
    low, high = (figure.value(row, key) if key else None for key in (figure.low, figure.high))
    return text if low is None or high is None else f"{text} ({low:,.{decimals}f} to {high:,.{decimals}f})"
