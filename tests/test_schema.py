"""docs/schema: the files are current, and the published records and their tables are valid."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from factories import ROOT
from referencing import Registry
from rendered_tables import PUBLISHED, published_experiment
from schema_files import schema_files

from pipeline.report.collected import indented_json

SCHEMAS = ROOT / "docs" / "schema"
RECORDS = sorted((ROOT / "published").rglob("records/*.json"))
MAX_RECORDS = 40  # of an interpreted validator; each experiment gives at least one


def validator(name: str) -> Any:
    """Return a validator with this schema, which may refer to the others by their names."""
    schemas = {path.name: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    return jsonschema.Draft202012Validator(schemas[name], registry=Registry().with_contents(schemas.items()))


@pytest.mark.parametrize("name", ["record.json", "tables.json"])
def test_the_files_are_those_of_today(name: str) -> None:
    assert (SCHEMAS / name).read_bytes() == schema_files()[name], "run make schema"
    jsonschema.Draft202012Validator.check_schema(json.loads((SCHEMAS / name).read_text()))


def test_the_schema_has_no_pattern_that_python_alone_reads() -> None:
    for name in schema_files():
        assert re.findall(r"\\\\[AZ]", (SCHEMAS / name).read_text()) == []


def sampled_records() -> list[Path]:
    """One record of each experiment, and others at random."""
    by_folder = {path.parent: path for path in RECORDS}
    rest = sorted(set(RECORDS) - {*by_folder.values()})
    return [*by_folder.values(), *random.Random(0).sample(rest, max(0, MAX_RECORDS - len(by_folder)))]


def test_published_records_are_valid() -> None:
    records = validator("record.json")
    for path in sampled_records():
        records.validate(json.loads(path.read_bytes()))


def test_the_tables_of_published_experiments_are_valid() -> None:
    tables = validator("tables.json")
    for name in PUBLISHED[::3]:  # of an interpreted validator
        tables.validate(json.loads(indented_json(published_experiment(name).content)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.update(attempt="first"),
        lambda record: record["spec"].update(strategy="fsdp2"),
        lambda record: record.pop("status"),
    ],
    ids=["a type", "an axis", "no status"],
)
def test_a_damaged_record_is_not_valid(damage: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(RECORDS[0].read_bytes())
    assert validator("record.json").is_valid(record)
    damage(record)
    assert not validator("record.json").is_valid(record)


def test_a_figure_that_no_column_declares_is_not_valid() -> None:
    content = json.loads(indented_json(published_experiment("a40-ddp").content))
    assert validator("tables.json").is_valid(content)
    content["Q1"][0]["epoch_time_ms"] = 1.0
    assert not validator("tables.json").is_valid(content)
