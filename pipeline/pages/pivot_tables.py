"""Time, speed-up and efficiency by GPUs and batch size, as published reports print them."""

from collections.abc import Iterator, Sequence

from pipeline.experiment.point_label import EFFORT_AXES, distinguishing_axes, format_number
from pipeline.pages.cells import Axes, DisplayColumn, DisplayTable, decimals_of, name_columns, status_of
from pipeline.tables.columns import Column, Row
from pipeline.tables.definitions import EFFICIENCY, EPOCH_TIME, SPEEDUP

MAX_BATCH_SIZES = 7  # of one table by GPUs and batch size
N_TIMES_SPEEDUP = SPEEDUP._replace(heading="N x T(1)/T(N)")
TWO_OVER_FOUR = SPEEDUP._replace(heading="T(2)/T(4)")


def build_pivots(rows: Sequence[Row], is_stated: bool, labels: dict[str, str]) -> Iterator[DisplayTable]:
    """Yield time, speed-up and efficiency of rows of weak scaling by GPUs and batch size.

    For a report that was ingested (`is_stated`) also N x T(1)/T(N) and T(2)/T(4), its own terms.
    """
    sizes = sorted({row["batch_size_per_gpu"] for row in rows if row["num_gpus"] > 1 and row["baseline"]})
    if not 1 < len(sizes) <= 2 * MAX_BATCH_SIZES:
        return
    pivots = [(column, [(row, row[column.key]) for row in rows]) for column in (EPOCH_TIME, SPEEDUP, EFFICIENCY)]
    if is_stated:
        scaled = [(row, row["speedup"] and row["num_gpus"] * row["speedup"]) for row in rows]
        pivots += [(N_TIMES_SPEEDUP, scaled), (TWO_OVER_FOUR, two_over_four(rows))]
    for column, values in pivots:
        if all(value is None for _, value in values):
            continue
        wanted = [pair for pair in values if column is EPOCH_TIME or pair[0]["num_gpus"] > 1]
        for first in range(0, len(sizes), MAX_BATCH_SIZES):
            shown = sizes[first : first + MAX_BATCH_SIZES]
            if part := [pair for pair in wanted if pair[0]["batch_size_per_gpu"] in shown]:
                yield pivot(column, part, labels)


def two_over_four(rows: Sequence[Row]) -> list[tuple[Row, float | None]]:
    """Return T(2)/T(4) of the rows on four GPUs; None without a row on two."""

    def key(row: Row) -> str:
        axes = {axis: value for axis, value in row.axes.items() if axis not in EFFORT_AXES}
        return repr(axes | {"num_gpus": 2})

    on_two = {key(row): row["epoch_time_s"] for row in rows if row["num_gpus"] == 2}
    on_four = [(row, on_two.get(key(row)), row["epoch_time_s"]) for row in rows if row["num_gpus"] == 4]
    return [(row, two_s / four_s if two_s and four_s else None) for row, two_s, four_s in on_four]


def pivot(column: Column, values: Sequence[tuple[Row, float | None]], labels: dict[str, str]) -> DisplayTable:
    """Return one figure by batch size (columns) and by all else that varies (rows)."""
    rows = [row for row, _ in values]
    found = distinguishing_axes([row.axes for row in rows], known=("batch_size_per_gpu",))
    varying = [axis for axis in rows[0].axes if axis == "num_gpus" or axis in found]
    decimals = 3 if column.key == "speedup" else decimals_of(column, rows)
    points: dict[str, Axes] = {}
    lines: dict[str, dict[int, str]] = {}
    for row, value in values:
        name = repr([row[axis] for axis in varying])
        known = "" if value is None else format_number(column.factor * value, f",.{decimals}f")
        text = status_of(row) if row["epoch_time_s"] is None else known
        points.setdefault(name, row.axes)
        lines.setdefault(name, {})[row["batch_size_per_gpu"]] = text
    columns, configurations = name_columns(list(points.values()), varying, labels)
    for size in sorted({row["batch_size_per_gpu"] for row in rows}):
        columns.append(DisplayColumn(f"{size:,}", [line.get(size, "") for line in lines.values()]))
    heading = f"Q2: {column.heading} by GPUs and images per GPU (weak scaling)"
    return DisplayTable(heading, columns, legend=configurations, source="q2.csv")
