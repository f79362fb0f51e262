"""Time, speed-up and efficiency by GPUs and batch size, as published reports print them."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.experiment.point_label import EFFORT_AXES, format_number
from pipeline.report.display_cells import Cell, DisplayTable, decimals_of, status_of
from pipeline.report.display_labels import ReportWords, label_columns, naming_axes, shorten_labels
from pipeline.report.row_types import Row
from pipeline.report.table_definitions import EFFICIENCY, EPOCH_TIME, SPEEDUP, Figure, scaled

MAX_BATCH_SIZES = 7  # of one table by GPUs and batch size


def build_pivots(all_rows: Sequence[Row], is_stated: bool, words: ReportWords) -> list[DisplayTable]:
    """Return time, speed-up and efficiency of weak scaling by GPUs and batch size, as published reports print them.

    For a report that was ingested (`is_stated`) also T(2)/T(4) and N x T(1)/T(N), its own terms.
    """
    rows = scaled("weak", "batch_size_per_gpu")(all_rows)
    compared = {row["batch_size_per_gpu"] for row in rows if row["num_gpus"] > 1 and row["baseline"]}
    sizes = sorted(compared)
    if not 1 < len(sizes) <= 2 * MAX_BATCH_SIZES:
        return []
    figures = (EPOCH_TIME, SPEEDUP, EFFICIENCY)
    shown = [(figure, {id(row): figure.value(row) for row in rows}) for figure in figures]
    if is_stated:
        shown += [(Figure("N x T(1)/T(N)", "speedup"), {id(row): scaled_speedup(row) for row in rows})]
        shown += [(Figure("T(2)/T(4)", "speedup"), two_over_four(rows))]
    tables = []
    for figure, values in shown:
        is_known = any(value is not None for value in values.values())
        wanted = [row for row in rows if id(row) in values and (row["num_gpus"] > 1 or figure is EPOCH_TIME)]
        wanted = wanted if is_known else []
        for first in range(0, len(sizes), MAX_BATCH_SIZES):
            part = [row for row in wanted if row["batch_size_per_gpu"] in sizes[first : first + MAX_BATCH_SIZES]]
            if part:
                tables.append(pivot(figure, values, part, words))
    return tables


def scaled_speedup(row: Row) -> float | None:
    """Return N x T(1)/T(N)."""
    return row["num_gpus"] * row["speedup"] if row["speedup"] is not None else None


def two_over_four(rows: Sequence[Row]) -> dict[int, float | None]:
    """Return T(2)/T(4) of the rows on four GPUs that have one on two, by the row's id."""

    def key(row: Row, num_gpus: int) -> str:
        return repr(
            {axis: value for axis, value in row.axes.items() if axis not in EFFORT_AXES} | {"num_gpus": num_gpus}
        )

    times = {key(row, row["num_gpus"]): row["epoch_time_s"] for row in rows}
    found = {id(row): (times.get(key(row, 2)), row["epoch_time_s"]) for row in rows if row["num_gpus"] == 4}
    return {row: on_two / on_four for row, (on_two, on_four) in found.items() if on_two and on_four}


def pivot(figure: Figure, values: Mapping[int, float | None], rows: Sequence[Row], words: ReportWords) -> DisplayTable:
    """Return one figure by batch size (columns) and by all else that varies (rows). `values` are by row id."""
    points = [row.axes for row in rows]
    found = naming_axes(points, hidden=("batch_size_per_gpu",))
    varying = [axis for axis in points[0] if axis == "num_gpus" or axis in found]
    sizes = sorted({row["batch_size_per_gpu"] for row in rows})
    lines: dict[str, dict[int, str]] = {}
    first: dict[str, Mapping[str, Any]] = {}
    decimals = 3 if figure.key == "speedup" else decimals_of(figure, rows)
    for row, point in zip(rows, points, strict=True):
        name = repr([point[axis] for axis in varying])
        value = values[id(row)]
        known = "" if value is None else format_number(value, f",.{decimals}f")
        text = status_of(row) if row["epoch_time_s"] is None else known
        first.setdefault(name, point)
        lines.setdefault(name, {})[row["batch_size_per_gpu"]] = text
    named, configurations = shorten_labels(label_columns(list(first.values()), varying, words), words)
    named += [(Cell(f"{size:,}", True), [Cell(line.get(size, ""), True) for line in lines.values()]) for size in sizes]
    return DisplayTable(
        heading=words.name(f"Q2: {figure.heading} by GPUs and images per GPU (weak scaling)"),
        columns=[heading for heading, _ in named],
        rows=[list(cells) for cells in zip(*(cells for _, cells in named), strict=True)],
        footnotes=[],
        common="",
        legend=configurations,
        source="q2.csv",
        is_folded=False,
    )
