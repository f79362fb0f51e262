"""Builds the site from README.md and docs/ by Zensical: the pages and the order of docs/README.md.

python benchmarks/docs_site.py build/site

A link to a page of the site leads there; one to another file of the repository becomes its text.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs" / "README.md"
SECTION = re.compile(r"^## (.*)\n\n((?:- .*\n)+)", re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
PLACES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Where the pages beside docs/ stand on the site; those of docs/ keep their path in it."""
CONFIG = """
[project]
site_name = "ddpscale"
site_description = "How does your training scale?"
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
nav = {nav}

[project.theme]
features = ["navigation.sections", "navigation.tabs", "navigation.top", "search.highlight", "content.code.copy"]

[[project.theme.palette]]
media = "(prefers-color-scheme)"
"""


def place_of(path: Path) -> str | None:
    """Return where a file of the repository stands on the site; None if it is not there."""
    name = os.path.relpath(path, ROOT)
    if name in PLACES:
        return PLACES[name]
    is_shown = path.is_file() and path.is_relative_to(ROOT / "docs") and path != LIST
    return os.path.relpath(path, ROOT / "docs").replace("README.md", "index.md") if is_shown else None


def place_links(text: str, page: Path) -> str:
    """Return the text of a page with its links as they lead on the site."""
    own = place_of(page)
    assert own is not None

    def place(match: re.Match[str]) -> str:
        is_image, words, target, anchor = match.groups()
        place = place_of(Path(os.path.normpath(page.parent / target)))
        if place is None:
            return words
        return f"{is_image}[{words}]({os.path.relpath(place, Path(own).parent)}{anchor or ''})"

    return LINK.sub(place, text)


def listed_pages() -> dict[str, list[tuple[str, Path]]]:
    """Return the title and path of each page of each section of docs/README.md."""
    return {
        section: [(title, Path(os.path.normpath(LIST.parent / target))) for _, title, target, _ in LINK.findall(lines)]
        for section, lines in SECTION.findall(LIST.read_text())
    }


def write_pages(folder: Path) -> None:
    """Write the pages, what they show, and the configuration."""
    sections = listed_pages()
    shutil.copytree(ROOT / "docs", folder / "pages", ignore=shutil.ignore_patterns("*.md", "templates", "__pycache__"))
    for _, path in (page for pages in sections.values() for page in pages):
        written = folder / "pages" / str(place_of(path))
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(place_links(path.read_text(), path))
    parts = []
    for section, pages in sections.items():
        entries = [f"{{{json.dumps(title)} = {json.dumps(place_of(path))}}}" for title, path in pages]
        parts.append(f"{{{json.dumps(section)} = [{', '.join(entries)}]}}")
    (folder / "zensical.toml").write_text(CONFIG.format(nav=f"[{', '.join(parts)}]"))


def build_site(folder: Path) -> int:
    """Build `site/index.html` in a new folder. Returns an exit code, 1 with a link that leads nowhere."""
    shutil.rmtree(folder, ignore_errors=True)
    write_pages(folder)
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(build_site(Path(sys.argv[1])))
