"""Writes the end of docs/words.md, what each column of the tables means, and the table of every axis in docs/grids.md.

python benchmarks/words_page.py docs
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from pipeline.plan.axes import AXIS_DEFAULTS, DECLARED
from pipeline.plan.point_label import in_terms
from pipeline.report.questions import TABLES
from pipeline.report.table import AXIS_HEADINGS, Column

NUM_RUNS = Column("n", "n", "Number of runs that the row pools.")
NOTE = Column("note", "", "Facts that a reader needs to judge the row.")
MARKER = "<!-- columns -->"  # what stands above it in the page is written by hand
INTRODUCTION = """
# The columns

Reports show a figure under a heading with its unit. CSV and JSON have it under its key, in the unit of the key: times
in seconds, fractions from 0 to 1 without a unit, sizes in bytes. The CSV files and tables.json beside the records
have every key. Times are medians over the timed windows, on the slowest rank. An empty cell means that
the figure is not known; the notes of the row say why.

Each row names its configuration by strategy, number of nodes and GPUs, batch size, precision and input, and by every
other axis in which a configuration of the experiment differs from its default; `repeat` and `seed` are pooled. A report
says once what its rows share. [grids.md](grids.md#every-axis) says what each axis means. In the tables of Q4 the
learning rate is the largest of the run, after scaling. `gpu` is the model of the GPUs (of Q4 that of the times): times
and memory of two models are two rows.

In a CSV file a list is JSON, a text that a spreadsheet would run begins with a quote, and control characters are
replaced; JSON has them as escapes. Reports round their decimal digits half up: 52.95 is 53.0.

`X_low` and `X_high` (of a time `X_low_s` and `X_high_s`) are the ends of the interval of X. Of an accuracy or a time to
target over two to five seeds they are the lowest and the highest. From here on the page is written by `make words`.
"""

AXES_TABLE = re.compile(r"(?<=<!-- axes: written by `make words` -->\n\n).*(?=\n\n<!-- end of axes -->)", re.DOTALL)


def render_words(page: str) -> str:
    """Return the page with the columns of today below its marker."""
    headings: dict[str, list[str]] = defaultdict(
        list, {axis: [in_terms(heading)] for axis, heading in AXIS_HEADINGS.items()}
    )
    figures: dict[str, Column] = {}
    for column in (NUM_RUNS, *(column for table in TABLES.values() for column in table.columns), NOTE):
        figures.setdefault(column.key, column)
        if column.heading and in_terms(column.heading) not in headings[column.key]:
            headings[column.key].append(in_terms(column.heading))
    by_hand = page.partition(MARKER)[0] + MARKER
    return "\n".join([by_hand, INTRODUCTION, *table_lines(figures.values(), headings)]) + "\n"


def render_axes(page: str) -> str:
    """Return the page with the table of every axis between its markers."""
    lines = ["| axis | default | meaning | example |", "| --- | --- | --- | --- |"]
    for name, axis in DECLARED.items():
        meaning = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", axis.meaning)
        lines.append(f"| `{name}` | {shown_default(name)} | {meaning} | `{axis.example}` |")
    return AXES_TABLE.sub(lambda _: "\n".join(lines), page)


def shown_default(axis: str) -> str:
    """Return the default value as --set takes it."""
    default = AXIS_DEFAULTS[axis]
    if default is msgspec.NODEFAULT:
        return "required"
    return "none" if default in (None, ()) else f"`{str(default).lower()}`"


def table_lines(columns: Iterable[Column], headings: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of one table."""
    lines = ["| key | unit | headings in reports | meaning |", "| :--- | :--- | :--- | :--- |"]
    for column in columns:
        shown = "; ".join(headings[column.key])
        meaning = column.meaning.replace("|", "\\|")
        lines.append(f"| `{column.key}` | {column.unit or '-'} | {shown or '-'} | {meaning} |")
    return lines


if __name__ == "__main__":
    for name, render in (("words.md", render_words), ("grids.md", render_axes)):
        path = Path(sys.argv[1]) / name
        path.write_text(render(path.read_text()))
