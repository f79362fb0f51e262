"""The columns that name the rows of a table, labels for long names, and what all rows share."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.experiment.point_label import ALL_REMEDIES, EFFORT_AXES, describe_point
from pipeline.experiment.spec import REMEDIES
from pipeline.pages.cells import Cell, CellColumn, format_value
from pipeline.tables.columns import AXIS_HEADINGS
from pipeline.tables.row import Row

MAX_LABEL = 44  # characters of a configuration in a cell
MAX_LABEL_BESIDE_OTHERS = 24  # the same where a table names some below it, since those need room for figures

Axes = Mapping[str, Any]


def named_axes(row: Row) -> dict[str, Any]:
    """Return the axes of a row, with the remedies where they are a figure."""
    return row.axes | ({"remedies": row["remedies"]} if "remedies" in row.figures else {})


def name_columns(
    points: Sequence[Axes], varying: Sequence[str], labels: dict[str, str]
) -> tuple[list[CellColumn], str]:
    """Return the columns that name the points, and what explains their labels.

    Strategy, GPUs and batch size have a column each; all else that varies shares one. Where that is too long it gets
    the labels c1, c2, ... which `labels` keeps for the next tables of the report.
    """
    own = [axis for axis in AXIS_HEADINGS if axis in varying]
    explained = []
    if {"strategy", "num_gpus", "remedies"} <= {*varying}:  # such a table lacks room: the number of GPUs may tell it
        places = {describe_point(point, ("strategy", "num_gpus")): point["num_gpus"] for point in points}
        if len(places) == len({*places.values()}):
            own.remove("strategy")
            explained.append(f"Strategies: {', '.join(places)}.")
    others = [axis for axis in varying if axis not in AXIS_HEADINGS]
    columns = [
        CellColumn(
            Cell(AXIS_HEADINGS[axis], axis != "strategy"),
            [Cell(format_value(point[axis]), axis != "strategy") for point in points],
        )
        for axis in own
    ]
    if not others:
        return columns, " ".join(explained)
    heading = {"gpu": "GPU model"}.get(others[0], others[0]) if len(others) == 1 else "configuration"
    names = [describe_point(point, others) for point in points]
    if max(map(len, names)) > MAX_LABEL:
        long = [name for name in dict.fromkeys(names) if len(name) > MAX_LABEL_BESIDE_OTHERS]
        for name in long:
            labels.setdefault(name, f"c{len(labels) + 1}")
        said = "; ".join(f"{label} = {name}" for name, label in labels.items() if name in long)
        explained.append(f"Configurations: {said}.")
        names = [labels[name] if name in long else name for name in names]
    if any(ALL_REMEDIES in text for text in (*names, *explained)):
        explained.append(f"All remedies: {', '.join(REMEDIES)}.")
    return [*columns, CellColumn(Cell(heading), list(map(Cell, names)))], " ".join(explained)


def describe_common(points: Sequence[Axes], varying: Sequence[str], hidden: Sequence[str]) -> str:
    """Return what all rows share, in words."""
    without = (*varying, *hidden, *(axis for axis in EFFORT_AXES if axis != "epochs"))
    same = (axis for axis, value in points[0].items() if axis not in without and value not in (False, []))
    return describe_point(points[0], [axis for axis in same if all(point[axis] == points[0][axis] for point in points)])
