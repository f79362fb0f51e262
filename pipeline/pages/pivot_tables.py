"""Time, speed-up and efficiency by GPUs and batch size, as published reports print them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.experiment.point_label import EFFORT_AXES, Processors, distinguishing_axes, format_number
from pipeline.pages.cells import Cell, CellColumn, DisplayTable, decimals_of, lay_out, status_of
from pipeline.pages.row_names import name_columns
from pipeline.tables.columns import Column
from pipeline.tables.definitions import EFFICIENCY, EPOCH_TIME, SPEEDUP
from pipeline.tables.row import Row

MAX_BATCH_SIZES = 7  # of one table by GPUs and batch size
N_TIMES_SPEEDUP = SPEEDUP._replace(heading="N x T(1)/T(N)")
TWO_OVER_FOUR = SPEEDUP._replace(heading="T(2)/T(4)")


def build_pivots(
    rows: Sequence[Row], is_stated: bool, processors: Processors, labels: dict[str, str]
) -> Iterator[DisplayTable]:
    """Yield time, speed-up and efficiency of rows of weak scaling by GPUs and batch size.

    For a report that was ingested (`is_stated`) also N x T(1)/T(N) and T(2)/T(4), its own terms.
    """
    sizes = sorted({row["batch_size_per_gpu"] for row in rows if row["num_gpus"] > 1 and row["baseline"]})
    if not 1 < len(sizes) <= 2 * MAX_BATCH_SIZES:
        return
    several = [row for row in rows if row["num_gpus"] > 1]
    times, speedups = ({id(row): row[key] for row in rows} for key in ("epoch_time_s", "speedup"))
    pivots = [(EPOCH_TIME, rows, times), (SPEEDUP, several, speedups)]
    pivots.append((EFFICIENCY, several, {id(row): row["parallel_efficiency"] for row in rows}))
    if is_stated:
        scaled = {id(row): row["speedup"] and row["num_gpus"] * row["speedup"] for row in rows}
        on_four = [row for row in rows if row["num_gpus"] == 4]
        pivots += [(N_TIMES_SPEEDUP, several, scaled), (TWO_OVER_FOUR, on_four, two_over_four(rows))]
    for column, wanted, values in pivots:
        for first in range(0, len(sizes), MAX_BATCH_SIZES):
            shown = sizes[first : first + MAX_BATCH_SIZES]
            part = [row for row in wanted if row["batch_size_per_gpu"] in shown]
            if part and any(value is not None for value in values.values()):
                yield pivot(column, values, part, processors, labels)


def two_over_four(rows: Sequence[Row]) -> dict[int, float | None]:
    """Return T(2)/T(4) of the rows on four GPUs that have one on two, by the row's id."""

    def key(row: Row, num_gpus: int) -> str:
        axes = {axis: value for axis, value in row.axes.items() if axis not in EFFORT_AXES}
        return repr(axes | {"num_gpus": num_gpus})

    times = {key(row, row["num_gpus"]): row["epoch_time_s"] for row in rows}
    found = {id(row): (times.get(key(row, 2)), row["epoch_time_s"]) for row in rows if row["num_gpus"] == 4}
    return {row: on_two / on_four for row, (on_two, on_four) in found.items() if on_two and on_four}


def pivot(
    column: Column,
    values: Mapping[int, float | None],
    rows: Sequence[Row],
    processors: Processors,
    labels: dict[str, str],
) -> DisplayTable:
    """Return one figure by batch size (columns) and by all else that varies (rows). `values` are by row id."""
    found = distinguishing_axes([row.axes for row in rows], known=("batch_size_per_gpu",))
    varying = [axis for axis in rows[0].axes if axis == "num_gpus" or axis in found]
    decimals = 3 if column.key == "speedup" else decimals_of(column, rows)
    lines: dict[str, dict[int, str]] = {}
    points: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        name, value = repr([row[axis] for axis in varying]), values.get(id(row))
        known = "" if value is None else format_number(column.factor * value, f",.{decimals}f")
        points.setdefault(name, row.axes)
        text = status_of(row) if row["epoch_time_s"] is None else known
        lines.setdefault(name, {})[row["batch_size_per_gpu"]] = text
    columns, configurations = name_columns(list(points.values()), varying, labels)
    for size in sorted({row["batch_size_per_gpu"] for row in rows}):
        cells = [Cell(line.get(size, ""), True) for line in lines.values()]
        columns.append(CellColumn(Cell(f"{size:,}", True), cells))
    heading = f"Q2: {column.heading} by GPUs and images per GPU (weak scaling)"
    return lay_out(columns, heading, "Q2", processors, legend=configurations)
