"""Write docs/schema: JSON Schema of a record and of tables.json. `make schema` calls it.

python benchmarks/schema_files.py docs/schema
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
from words_page import NOTE, NUM_RUNS

from pipeline.plan.axes import AXES
from pipeline.records.outcomes import Coverage
from pipeline.records.record import SCHEMA_VERSION, Operation, Record
from pipeline.report.collected import indented_json
from pipeline.report.questions import LEFT_OUT_IF_EMPTY, TABLES
from pipeline.report.table import Column, Table

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NUMBER_OR_NULL: dict[str, Any] = {"type": ["number", "null"]}
ANY: dict[str, Any] = {"type": ["number", "string", "boolean", "array", "null"]}


def schema_files() -> dict[str, bytes]:
    """Return the text of each file by its name."""
    return {"record.json": indented_json(record_schema()), "tables.json": indented_json(tables_schema())}


def record_schema() -> dict[str, Any]:
    """Return the schema of records/*.json, from the types that read them; it has the axes of a row of tables.json."""
    title = f"A record of one attempt at a configuration, schema version {SCHEMA_VERSION}"
    schema = {"$schema": DIALECT, "title": title, **msgspec.json.schema(Record)}
    schema["$defs"]["AxesOfRow"] = {
        "description": "The axes of a configuration that a row shows. One of which the row has several is null.",
        "properties": {
            axis: {"anyOf": [{"$ref": f"#/$defs/Spec/properties/{axis}"}, {"type": "null"}]} for axis in AXES
        },
    }
    return dict(plain(schema))


def tables_schema() -> dict[str, Any]:
    """Return the schema of tables.json, from the declarations of the columns."""
    (coverage,), definitions = msgspec.json.schema_components((Coverage,), ref_template="#/$defs/{name}")
    tables = {table.name: {"type": "array", "items": row_schema(table)} for table in TABLES.values()}
    axes = {
        "$ref": "record.json#/$defs/AxesOfRow",
        "properties": {
            "gpu": {"description": "GPU model; null on a CPU, or if not stated.", "type": ["string", "null"]},
            "unit": {"description": "What samples consist of.", "type": ["string", "null"]},
            "operation": {"description": "Of a row of sweeps: the collective.", "enum": list(get_args(Operation))},
        },
    }
    return {
        "$schema": DIALECT,
        "title": "The tables of an experiment",
        "description": "Rows by table, and the number of configurations by what became of them.",
        "type": "object",
        "properties": {**tables, "coverage": coverage},
        "required": [*(name for name in tables if name not in LEFT_OUT_IF_EMPTY), "coverage"],
        "additionalProperties": False,
        "$defs": {**definitions, "axes": axes},
    }


def row_schema(table: Table) -> dict[str, Any]:
    """Return the schema of a row: the axes of its point, its figures, the number of runs, and the note."""
    columns = {key: schema for column in table.columns for key, schema in column_schemas(column).items()}
    columns["n"] = {"description": NUM_RUNS.meaning, "type": "integer"}
    columns["note"] = {"description": NOTE.meaning, "type": ["string", "null"]}
    return {
        "type": "object",
        "$ref": "#/$defs/axes",
        "properties": columns,
        "required": list(columns),
        "unevaluatedProperties": False,
    }


def column_schemas(column: Column) -> dict[str, dict[str, Any]]:
    """Return the schema of a figure, and of the ends of its interval. A figure without a unit may be a word."""
    unit = f" In {column.unit}." if column.unit else ""
    figure, *ends = column.keys
    found = {figure: {"description": column.meaning + unit, **(NUMBER_OR_NULL if column.unit else ANY)}}
    for key, end in zip(ends, ("lower", "upper"), strict=False):
        found[key] = {"description": f"The {end} end of the interval of {figure}; null without one.", **NUMBER_OR_NULL}
    return found


def with_anchors(pattern: str) -> str:
    return re.sub(r"\\Z$", "$", re.sub(r"^\\A", "^", pattern))


PLAIN = {"pattern": with_anchors, "description": inspect.cleandoc}


def plain(schema: Any) -> Any:
    r"""Return the schema with `^` and `$` in its patterns, and descriptions without indentation.

    JSON Schema knows no `\A` and `\Z`. Python 3.13 removes the indentation of a docstring itself.
    """
    if isinstance(schema, dict):
        return {
            key: PLAIN[key](value) if key in PLAIN and isinstance(value, str) else plain(value)
            for key, value in schema.items()
        }
    return [plain(value) for value in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schema_files().items():
        (folder / name).write_bytes(text)
