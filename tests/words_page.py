"""Writes the end of docs/words.md: what each column of the tables means.

python tests/words_page.py docs/words.md
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.tables.columns import AXIS_HEADINGS, Column
from pipeline.tables.definitions import TABLES

NUM_RUNS = Column("n", "n", "Number of runs that the row pools.")
NOTE = Column("note", "", "Facts that a reader needs to judge the row.")
MARKER = "<!-- columns -->"  # what stands above it in the page is written by hand
INTRODUCTION = """
# The columns

Reports show a figure under a heading with its unit. CSV and JSON have it under its key, in the unit of the key: times
in seconds, fractions from 0 to 1 without a unit, sizes in bytes. `ddpscale collect outputs/ --columns all`
prints tables with every key. Times are medians over the timed windows, on the slowest rank. An empty cell means that
the figure is not known; the notes of the row say why.

Each row names its point by strategy, number of nodes and GPUs, batch size, precision and input, and by every other axis
in which a point of the experiment differs from its default; `repeat` and `seed` are pooled. A report says once what its
rows share. In a CSV file a list is JSON, a text that a spreadsheet would run begins with a quote, and control
characters are replaced; JSON has them as escapes. Reports round their decimal digits half up: 52.95 is 53.0.

`X_low` and `X_high` (of a time `X_low_s` and `X_high_s`) are the ends of the interval of X. Of an accuracy or a time to
target over two to five seeds they are the lowest and the highest. From here on the page is written by `make words`.
"""

AXIS_COLUMNS = (
    Column("strategy", "", "Parallel strategy."),
    Column("precision", "", "Number format of the computation."),
    Column("input", "", "Source of the training images."),
    Column("dataset", "", "Data set."),
    Column("model", "", "Model."),
    Column("remedies", "", "Remedies for training with large batches."),
    Column("learning_rate", "", "Learning rate; in the tables of Q4 the largest of the run, after scaling."),
    Column("schedule", "", "Learning rate after warm-up: constant or cosine."),
    Column("measure", "", "Kind of measurement: epochs, communication, memory or quantize."),
    Column("execution", "", "Launches of the host: operations, compiled kernels or one CUDA graph a step."),
    Column("layout", "", "Layout of images and weights in memory."),
    Column("device", "", "Device: cuda or cpu."),
    Column("max_steps", "", "Steps after which an epoch is cut off."),
    Column("memory_limit_gib", "", "Limit of the memory of each process."),
    Column("gpu", "", "Model of the GPUs (of Q4 that of the times): times and memory of two models are two rows."),
    Column("bucket_cap_mb", "", "Largest size of a bucket of gradients."),
    Column("static_graph", "", "DDP counts on the same graph in each step."),
    Column("gradient_compression", "", "Number format of gradients in DDP's all-reduces: none changes nothing."),
    Column("reshard", "", "What FSDP frees after the forward pass: blocks, always or never."),
    Column("grad_accumulation", "", "Passes of batch_size_per_gpu samples for each update."),
)
"""The axes that are not plain counts or switches; `Spec` documents all."""


def render_words(page: str) -> str:
    """Return the page with the columns of today below its marker."""
    headings: dict[str, list[str]] = defaultdict(list, {axis: [heading] for axis, heading in AXIS_HEADINGS.items()})
    figures: dict[str, Column] = {}
    for column in (NUM_RUNS, *(column for table in TABLES.values() for column in table.columns), NOTE):
        figures.setdefault(column.key, column)
        if column.heading and column.heading not in headings[column.key]:
            headings[column.key].append(column.heading)
    by_hand = page.partition(MARKER)[0] + MARKER
    parts = [by_hand, INTRODUCTION, "## Axes\n", *table_lines(AXIS_COLUMNS, headings), "\n## Figures\n"]
    return "\n".join([*parts, *table_lines(figures.values(), headings)]) + "\n"


def table_lines(columns: Iterable[Column], headings: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of one table."""
    lines = ["| key | unit | headings in reports | meaning |", "| :--- | :--- | :--- | :--- |"]
    for column in columns:
        shown = "; ".join(headings[column.key])
        meaning = column.meaning.replace("|", "\\|")
        lines.append(f"| `{column.key}` | {column.unit or '-'} | {shown or '-'} | {meaning} |")
    return lines


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(render_words(path.read_text()))
