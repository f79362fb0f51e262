"""The columns that name the rows of a table, labels for long names, and the words of one report."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.experiment.point_label import EFFORT_AXES, Processors, describe_point, name_processors, varying_axes
from pipeline.report.display_cells import Cell, format_axis
from pipeline.report.row_types import Row
from pipeline.report.table_definitions import TableDefinition

OWN_COLUMNS = {"strategy": "strategy", "num_gpus": "GPUs", "batch_size_per_gpu": "images per GPU"}
"""Axes that have a column if they vary; the others share one."""

MAX_LABEL = 44  # characters of a configuration in a cell
MAX_LABEL_BESIDE_OTHERS = 24  # the same where a table names some below it, since those need room for figures


Column = tuple[Cell, list[Cell]]  # its heading and its cells


class ReportWords(NamedTuple):
    """The words of one report: what its points ran on, and a label for each configuration that is too long."""

    processors: Processors
    labels: dict[str, str]

    def name(self, text: str) -> str:
        """Return a text about GPUs with the word for what the points ran on."""
        return name_processors(text, self.processors)

    def label(self, configuration: str) -> str:
        """Return the label of a configuration: c1, c2, ... The same one in every table of the report."""
        return self.labels.setdefault(configuration, f"c{len(self.labels) + 1}")

    def name_definition(self, definition: TableDefinition) -> TableDefinition:
        """Return the definition with its texts in these words."""
        figures = tuple(
            figure._replace(heading=self.name(figure.heading), remark=self.name(figure.remark))
            for figure in definition.figures
        )
        heading, legend = self.name(definition.heading), self.name(definition.legend)
        return definition._replace(heading=heading, legend=legend, figures=figures)


def naming_axes(points: Sequence[Mapping[str, Any]], hidden: Sequence[str]) -> list[str]:
    """Return the axes that name the points: those that vary, length and place of a run only where points need them."""
    every, plain = varying_axes(points), varying_axes(points, without=EFFORT_AXES)
    numbers = [len({repr([point[axis] for axis in axes]) for point in points}) for axes in (plain, every)]
    return [axis for axis in (plain if numbers[0] == numbers[1] else every) if axis not in hidden]


def without_strategy(points: Sequence[Mapping[str, Any]], varying: list[str]) -> tuple[list[str], str]:
    """Return the axes that name the points, and in words the strategies where the number of GPUs tells them.

    Tables with remedies lack room, so there the strategy loses its column if each number of GPUs has one strategy.
    """
    if not {"strategy", "num_gpus", "remedies"} <= {*varying}:
        return varying, ""
    names = {describe_point(point, ("strategy", "num_gpus")): point["num_gpus"] for point in points}
    is_told = len(names) == len({*names.values()})
    return ([axis for axis in varying if axis != "strategy"], " or ".join(names)) if is_told else (varying, "")


def label_columns(points: Sequence[Mapping[str, Any]], varying: Sequence[str], words: ReportWords) -> list[Column]:
    """Return the columns that name the points: strategy, GPUs and batch size, and one for all else that varies."""
    own = [axis for axis in OWN_COLUMNS if axis in varying]
    others = [axis for axis in varying if axis not in OWN_COLUMNS]
    columns: list[Column] = []
    for axis in own:
        is_number = axis != "strategy"
        cells = [Cell(format_axis(point[axis]), is_number) for point in points]
        columns.append((Cell(words.name(OWN_COLUMNS[axis]), is_number), cells))
    if others:
        heading = {"gpu": "GPU model"}.get(others[0], others[0]) if len(others) == 1 else "configuration"
        columns.append((Cell(heading), [Cell(words.name(describe_point(point, others))) for point in points]))
    return columns


def shorten_labels(columns: Sequence[Column], words: ReportWords) -> tuple[list[Column], str]:
    """Return the columns with labels for long configurations, if one is too long, and a sentence that explains them."""
    *others, (heading, cells) = columns or [(Cell(""), [])]
    if max((len(cell.text) for cell in cells), default=0) <= MAX_LABEL:
        return list(columns), ""
    long = {cell.text for cell in cells if len(cell.text) > MAX_LABEL_BESIDE_OTHERS}
    labels = [words.label(cell.text) if cell.text in long else cell.text for cell in cells]
    explained = "; ".join(f"{label} = {text}" for text, label in words.labels.items() if text in long)
    return [*others, (heading, [Cell(label) for label in labels])], f"Configurations: {explained}."


def full_columns(points: Sequence[Mapping[str, Any]], varying: Sequence[str]) -> list[Column]:
    """Return a column for each axis that varies, by its key."""
    return [(Cell(axis), [Cell(format_axis(point[axis])) for point in points]) for axis in varying]


def remedies_of(row: Row) -> dict[str, Any]:
    """Return the remedies as an axis, for the rows that have them as a figure."""
    return {"remedies": row["remedies"]} if "remedies" in type(row).__struct_fields__ else {}


def describe_common(points: Sequence[Mapping[str, Any]], varying: Sequence[str], hidden: Sequence[str]) -> str:
    """Return what all rows share, in words."""
    without = (*varying, *hidden, *(axis for axis in EFFORT_AXES if axis != "epochs"))
    same = (axis for axis, value in points[0].items() if axis not in without and value not in (False, []))
    return describe_point(points[0], [axis for axis in same if all(point[axis] == points[0][axis] for point in points)])
