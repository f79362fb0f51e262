"""The measured figures of the pages are rendered from the published records, and none stands outside a block."""

import re
from pathlib import Path

import pytest
import render_results
from factories import ROOT

PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md"]
MEASURED = re.compile(
    r"[-+]?\d[\d,]*\.\d+|\d[\d,]* (?:%|s|ms|us|GB/s|GiB|images/s|points|times|h|GPU-hours)(?![\w/])"
)  # a number with decimals, or one with a unit
ALLOWED: dict[str, tuple[str, ...]] = {"README.md": (), "docs/results.md": ()}
"""Definitions, versions, commands and sizes asked for, which no run measured."""


@pytest.mark.parametrize("page", render_results.pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_figures_of_a_page_are_those_of_the_records(page: Path) -> None:
    assert page.read_text() == render_results.render_page(page.read_text()), "run make results"


def figures_outside(text: str) -> list[str]:
    """The figures of a page that no block renders; code is exempt."""
    prose = re.sub(
        r"```.*?```|`[^`]*`|^    .*$", "", render_results.BLOCK.sub("", text), flags=re.DOTALL | re.MULTILINE
    )
    return MEASURED.findall(prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_figure_stands_outside_a_block(page: Path) -> None:
    text = page.read_text()
    for allowed in ALLOWED[str(page.relative_to(ROOT))]:
        assert allowed in text, "an entry of the list that nothing needs"
        text = text.replace(allowed, "")
    assert figures_outside(text) == []


def test_every_template_is_used() -> None:
    used = {match[1] for page in render_results.pages() for match in render_results.BLOCK.finditer(page.read_text())}
    assert used == {path.name.removesuffix(".md.j2") for path in render_results.TEMPLATES.glob("*.md.j2")}
