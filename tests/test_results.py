"""The measured figures of the pages are rendered from the published records, and none is typed by hand."""

import re
from pathlib import Path

import pytest
import render_results
from factories import ROOT

PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md"]
TEMPLATES = sorted(render_results.TEMPLATES.glob("*.md.j2"))
MEASURED = re.compile(
    r"[-+]?\d[\d,]*\.\d+|\d[\d,]* (?:%|s|ms|us|GB/s|GiB|images/s|points|times|h|GPU-hours)(?![\w/])"
)  # a number with decimals, or one with a unit
COUNTED = re.compile(
    r"\d{1,3}(?:,\d{3})+|\d+ (?:to|of) \d+|\d+ (?:GB|MB|bytes|minutes|seconds|hours|epochs|updates|seeds|runs)\b"
)  # outside blocks also whole numbers: large ones, ranges, shares and counts
ALLOWED: dict[str, tuple[str, ...]] = {
    "README.md": ("Python 3.11", "5 GB of disk", "torch 2.8"),
    "docs/templates/five-reports.md.j2": (  # what the reports print
        "communication takes 0.130 and 0.219 s",
        "19.704 s for one GPU, its table used 19.764 s",
        "0.010 GB/s at 32 per GPU on two GPUs, 0.9 GB/s elsewhere",
        "on four GPUs communication takes 1.00 s",
        "0.306 GB/s there",
        "15.51 s with two workers",
        "Against 15.51 s it would be",
        "computation takes 15.27 s and communication 21.65 s",
        "and of 48, 192 and 768 GB/s",
    ),
    "docs/templates/h200x2-narrow.md.j2": ("at most 2 %",),
    "docs/templates/int8-mistakes.md.j2": (  # what the two reports say of themselves
        "where the report has 35.61 %",
        "(the report: 33.53 %)",
        "The first report gained 3.09 points",
    ),
    "docs/templates/results-memory.md.j2": ("finds the largest batch that fits, to 1 %",),
    "docs/templates/trust-link.md.j2": ("0.5 and 2 Gbit/s",),
    "docs/templates/trust-narrow.md.j2": ("times within 2 %", "known within 2 %"),
}
"""Definitions, versions, sizes and options that were asked for, and figures of other reports: no run measured them."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.seconds
@pytest.mark.parametrize("page", render_results.pages(), ids=name_of)
def test_the_figures_of_a_page_are_those_of_the_records(page: Path) -> None:
    assert page.read_text() == render_results.render_page(page.read_text()), "run make results"


def prose_of(path: Path) -> str:
    """The text of a page or a template without code and without what is rendered."""
    text = render_results.BLOCK.sub("", path.read_text())
    code = r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}" if path in TEMPLATES else r"```.*?```|^    .*?$"
    return " ".join(re.sub(rf"{code}|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE).split())


@pytest.mark.parametrize("path", [*PAGES, *TEMPLATES], ids=name_of)
def test_no_figure_is_typed_by_hand(path: Path) -> None:
    prose = prose_of(path)
    for allowed in ALLOWED.get(name_of(path), ()):
        assert allowed in prose, "an entry of the list that nothing needs"
        prose = prose.replace(allowed, "")
    assert MEASURED.findall(prose) == []
    assert path in TEMPLATES or COUNTED.findall(prose) == []


def test_every_template_is_used_once() -> None:
    used = [match[1] for page in render_results.pages() for match in render_results.BLOCK.finditer(page.read_text())]
    assert sorted(used) == sorted(path.name.removesuffix(".md.j2") for path in TEMPLATES)


def test_no_line_of_a_paragraph_begins_with_a_sign_that_begins_a_list() -> None:
    lines = render_results.wrap(f"{'word ' * 25}ab + last\n\n| a |  |\n| b |").splitlines()
    assert lines[1:] == ["ab + last", "", "| a | |", "| b |"]


def test_a_sentence_that_the_records_do_not_bear_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="no longer"):
        render_results.require(0)


# Pages without blocks.


@pytest.mark.parametrize("machine", ["h200x2", "h200x4"])
def test_the_page_of_a_machine_names_each_folder(machine: str) -> None:
    folder = ROOT / "published" / machine
    page = (folder / "README.md").read_text()
    assert [path.name for path in folder.iterdir() if path.is_dir() and f"`{path.name}`" not in page] == []


def cluster_page() -> str:
    return " ".join((ROOT / "docs" / "cluster.md").read_text().split())


def test_the_cost_of_packing_in_cluster_md_is_the_published_one() -> None:
    gpu_s, start_ups_s = [], []
    for name in ("packed", "one-a-point"):
        gpu_s.append(3600 * sum(row["gpu_hours"] for row in render_results.rows(f"h200x2/{name}", "cost")))
        found = [
            render_results.duration_s(record) - sum(render_results.epoch_times_s(record))
            for record in render_results.records(f"h200x2/{name}")
            if bool(record["measurement"]["num_points_before"]) == (name == "packed")
        ]
        start_ups_s.append(f"{render_results.span(found, '.1f')} s")
    timed = render_results.row("h200x2/intervals", "cost", ending="ok_timed")["allocated_share"]
    said = [f"took {gpu_s[0]:.0f} GPU-seconds in two elements and {gpu_s[1]:.0f} in eight", *start_ups_s]
    said.append(f"{100 * timed:.1f} % of the GPU time that was allocated is timed windows")
    assert [part for part in said if part not in cluster_page()] == []


def test_the_tools_own_speed_in_cluster_md_is_the_published_one() -> None:
    text = (ROOT / "published/two-cores/bench.txt").read_text()
    dry_run, collect = (re.findall(rf"{what} +(\S+ s)", text)[0] for what in ("1000 points", "1000 records"))
    said = f"dry run of 1,000 points takes {dry_run}, and `collect` of 1,000 records {collect}."
    assert said in cluster_page()
