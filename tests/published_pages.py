"""The pages of the project and the tables of its published records."""

import functools
from typing import Any

from conftest import ROOT

from pipeline.experiment.folder import Experiment
from pipeline.tables.collect_experiment import collect_experiment

README, RESULTS, TRUST, CLUSTER = (
    (ROOT / name).read_text() for name in ("README.md", "docs/results.md", "docs/trust.md", "docs/cluster.md")
)


def shown_rows(page: str, heading: str) -> list[list[str]]:
    """The body of the first table after a text."""
    lines = iter(page.split(heading, 1)[1].splitlines())
    next(line for line in lines if line.startswith("| ---"))
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@functools.cache
def tables_of(name: str) -> dict[str, Any]:
    """The tables of a published experiment, as collect writes them into tables.json."""
    return collect_experiment(Experiment(ROOT / "outputs" / name)).content


def missing_in(page: str, said: list[str]) -> list[str]:
    return [part for part in said if part not in " ".join(page.split())]
