"""The site of the docs: its links, its pages, and a broken link that ends the build."""

import importlib.util
from pathlib import Path

import docs_site
import pytest
from factories import ROOT


@pytest.mark.parametrize(
    ("page", "link", "placed"),
    [
        ("README.md", "[a](docs/trust.md#two)", "[a](trust.md#two)"),
        ("README.md", "![p](docs/q2.svg)", "![p](q2.svg)"),
        ("docs/recipes/ci.md", "[a](../../README.md)", "[a](../index.md)"),
        ("docs/trust.md", "[`a`](../tests/conftest.py)", "`a`"),
        ("docs/trust.md", "[a](https://example.org/x.md), [b](#here)", "[a](https://example.org/x.md), [b](#here)"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site_or_becomes_text(page: str, link: str, placed: str) -> None:
    assert docs_site.place_links(link, ROOT / page) == placed


@pytest.mark.seconds
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="the extra docs is not installed")
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_two_pages(folder: Path) -> None:
        (folder / "pages").mkdir(parents=True)
        (folder / "pages/index.md").write_text("# A\n\n[b](b.md#there)\n")
        (folder / "pages/b.md").write_text(f"# B\n\n## {heading}\n")
        (folder / "zensical.toml").write_text(docs_site.CONFIG.format(nav='["index.md", "b.md"]'))

    monkeypatch.setattr(docs_site, "write_pages", write_two_pages)
    codes = []
    for heading in ("there", "elsewhere"):
        codes.append(docs_site.build_site(tmp_path / heading) == 0)
    assert codes == [True, False]
