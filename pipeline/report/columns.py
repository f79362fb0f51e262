"""Columns: the key, unit and meaning of each, for words.md and for tables with every column.

The fields of the classes in `row_types` declare them. `table_definitions` chooses the figures of a table for people.
"""

from collections.abc import Iterator
from typing import NamedTuple, get_type_hints

from pipeline.report.row_types import Row, Unit, interval_keys

NOT_STATED = "not stated"


class Column(NamedTuple):
    """One column of JSON and CSV."""

    key: str
    meaning: str
    unit: str = ""
    is_end: bool = False  # of an interval


def row_classes(base: type[Row] = Row) -> Iterator[type[Row]]:
    """Yield a class of rows and those that inherit from it, in the order of their definition."""
    yield base
    for row_class in base.__subclasses__():
        yield from row_classes(row_class)


def declared_columns() -> dict[str, Column]:
    """Return every figure by key: the fields that state a meaning, and the ends of their intervals."""
    columns = {"note": Column("note", "Facts that a reader needs to judge the row.")}
    for row_class in row_classes():
        hints = get_type_hints(row_class, include_extras=True)
        for key, hint in hints.items():
            metadata = getattr(hint, "__metadata__", ())
            unit = "".join(part for part in metadata if isinstance(part, Unit))
            for meaning in (part for part in metadata if not isinstance(part, Unit)):
                columns[key] = Column(key, meaning, unit)
                for end in (end for end in interval_keys(key) if end in hints):
                    columns.setdefault(end, Column(end, f"End of the interval of {key}.", unit, is_end=True))
    return columns


COLUMNS = declared_columns()
"""All columns except the axes, by key."""

AXIS_COLUMNS = (
    Column("strategy", "Parallel strategy."),
    Column("precision", "Number format of the computation."),
    Column("input", "Source of the training images."),
    Column("dataset", "Data set."),
    Column("model", "Model."),
    Column("remedies", "Remedies for training with large batches."),
    Column("learning_rate", "Learning rate; in the tables of Q4 the largest of the run, after scaling."),
    Column("schedule", "Learning rate after warm-up: constant or cosine."),
    Column("measure", "Kind of measurement: epochs, communication, memory or quantize."),
    Column("execution", "Launches of the host: operations, compiled kernels or one CUDA graph a step."),
    Column("layout", "Layout of images and weights in memory."),
    Column("device", "Device: cuda or cpu."),
    Column("max_steps", "Steps after which an epoch is cut off."),
    Column("memory_limit_gib", "Limit of the memory of each process.", "GiB"),
    Column("gpu", "Model of the GPUs (of Q4 that of the times): times and memory of two models are two rows."),
    Column("bucket_cap_mb", "Largest size of a bucket of gradients.", "MiB"),
)
"""The axes that are not plain counts or switches; `Spec` documents all."""
