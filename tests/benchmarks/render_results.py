"""Renders the measured figures of README.md and docs/ from the published records.

    python tests/benchmarks/render_results.py

A block stands in a page between the lines `<!-- results: NAME -->` and `<!-- /results -->`. Its template is
docs/templates/NAME.md.j2. The names that a template may use are the functions of `NAMES` and the filters of `FILTERS`.
"""

import functools
import json
import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

import jinja2

from pipeline.experiment.folder import Experiment
from pipeline.experiment.point_label import format_number
from pipeline.tables.collect_experiment import collect_experiment

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "docs" / "templates"
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->\n(.*?)<!-- /results -->\n", re.DOTALL)
MAX_WIDTH = 128  # characters of a line of a paragraph

Row = dict[str, Any]


@functools.cache
def tables_of(experiment: str) -> dict[str, list[Row]]:
    """Return the tables of an experiment below outputs/, as JSON has them."""
    content: dict[str, list[Row]] = collect_experiment(Experiment(ROOT / "outputs" / experiment)).content
    return content


def rows(experiment: str, table: str, **axes: Any) -> list[Row]:
    """Return the rows of a table with these values."""
    return [row for row in tables_of(experiment)[table] if all(row[key] == value for key, value in axes.items())]


def row(experiment: str, table: str, **axes: Any) -> Row:
    """Return the only row of a table with these values. Raises ValueError."""
    (found,) = rows(experiment, table, **axes)
    return found


@functools.cache
def load(path: str) -> Any:
    """Return a JSON file below outputs/, such as that of a benchmark or a self-test."""
    return json.loads((ROOT / "outputs" / path).read_text())


def bench(path: str, section: str, name: str) -> Row:
    """Return the only row of a benchmark's file with this section and name. Raises ValueError."""
    found: list[Row] = [row for row in load(path)["rows"] if (row["section"], row["name"]) == (section, name)]
    (only,) = found
    return only


def percent(fraction: float, decimals: int = 1) -> str:
    """Return a fraction in per cent."""
    return format_number(fraction, f".{decimals}%").replace("%", " %")


def fill(text: str) -> str:
    """Return paragraphs and list items on lines of at most MAX_WIDTH characters; tables stay as they are."""
    parts = []
    for part in re.split(r"\n(?=- )|\n\n", text.strip()):
        if part.startswith("|"):
            parts.append(part)
            continue
        indent = "  " if part.startswith("- ") else ""
        words = " ".join(part.split())
        parts.append(
            textwrap.fill(words, MAX_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        )
    return "\n\n".join(parts)


NAMES = {"rows": rows, "row": row, "load": load, "bench": bench, "median": statistics.median, "min": min, "max": max}
NAMES |= {"abs": abs, "len": len, "zip": zip, "sum": sum, "sorted": sorted}
FILTERS = {"number": format_number, "percent": percent, "fill": fill}


def render_block(name: str) -> str:
    """Return the text of a block. Raises jinja2.TemplateError."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # Markdown of our own records
    )
    environment.globals |= NAMES
    environment.filters |= FILTERS
    return environment.get_template(f"{name}.md.j2").render().strip() + "\n"


def render_page(text: str) -> str:
    """Return a page with its blocks rendered anew."""
    return BLOCK.sub(lambda match: f"<!-- results: {match[1]} -->\n{render_block(match[1])}<!-- /results -->\n", text)


def pages() -> list[Path]:
    """Return the pages that have blocks."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "outputs").glob("*/README.md"))]
    return [path for path in found if BLOCK.search(path.read_text())]


if __name__ == "__main__":
    for path in pages():
        path.write_text(render_page(path.read_text()))
