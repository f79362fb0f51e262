"""The figures of the pages and the published tables are what the records give, and none is typed by hand."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import bench_gpu
import bench_memory
import bench_start
import bench_strategies
import bench_workloads
import pytest
import render_results
from factories import ROOT
from rendered import published_experiment

from pipeline.collect import address_of_words
from pipeline.report.draw import render_files
from pipeline.report.html import build_plots
from pipeline.report.markdown import render_experiment

PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md"]
TEMPLATES = sorted(render_results.TEMPLATES.glob("*.md.j2"))
MEASURED = re.compile(
    r"[-+]?\d[\d,]*\.\d+|\d[\d,]* (?:%|s|ms|us|GB/s|GiB|images/s|points|times|h|GPU-hours)(?![\w/])"
)  # a number with decimals, or one with a unit
COUNTED = re.compile(
    r"\d{1,3}(?:,\d{3})+|\d+ (?:to|of) \d+|\d+ (?:GB|MB|bytes|minutes|seconds|hours|epochs|updates|seeds|runs)\b"
)  # outside blocks also whole numbers: large ones, ranges, shares and counts
ALLOWED: dict[str, tuple[str, ...]] = {
    "README.md": ("Python 3.11", "5 GB of disk", "torch 2.9"),
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
    said = f"dry run of 1,000 configurations takes {dry_run}, and `collect` of 1,000 records {collect}."
    assert said in cluster_page()


PUBLISHED = ROOT / "published"
COLLECTED = sorted(str(path.parent.relative_to(PUBLISHED)) for path in PUBLISHED.glob("*/*/report.md"))
EXPERIMENTS = ["a40-ddp", "v100-dp", "dp-notebook", "dp-report", "dp-wandb", *COLLECTED]


GOLDEN = ("h200x2/communication-captured", "h100x2/q4-study")  # captured steps; every kind of cell
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
LEARNT = ("loss", "accuracy", "test_loss", "test_accuracy")


def rendered(name: str) -> tuple[str, str]:
    """The report of a published experiment, as it is in git and as its records give it now."""
    found = published_experiment(name)
    now = render_experiment(name, found.tables, found.collected, words=address_of_words(found.experiment))
    return (found.experiment.folder / "report.md").read_text(), now


@pytest.mark.parametrize("name", GOLDEN)
def test_the_golden_reports_are_what_their_records_give_text_for_text(name: str) -> None:
    published, now = rendered(name)
    assert now == published, "run python -m pipeline.collect outputs/"


def cells_of(report: str) -> list[list[str]]:
    """The cells of every table, a row a line of Markdown, with the headings of tables between them."""
    lines = [line for line in report.splitlines() if line.startswith(("|", "## "))]
    return [re.split(r"(?<!\\)\|", line) for line in lines if not line.startswith("|:") and "---" not in line]


def last_digit(number: str) -> float:
    """What one more in the last printed digit is worth."""
    return 10.0 ** -len(number.partition(".")[2])


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in GOLDEN])
def test_the_figures_of_the_other_reports_are_what_their_records_give(name: str) -> None:
    published, now = (cells_of(report) for report in rendered(name))
    assert [len(row) for row in now] == [len(row) for row in published]
    for cell, other in (pair for row, old in zip(now, published, strict=True) for pair in zip(row, old, strict=True)):
        numbers, others = NUMBER.findall(cell), NUMBER.findall(other)
        assert len(numbers) == len(others), (cell, other)
        for number, published_number in zip(numbers, others, strict=True):
            difference = abs(float(number.replace(",", "")) - float(published_number.replace(",", "")))
            assert difference <= 1.01 * last_digit(published_number), (cell, other)


BENCH_PAGE = "bench-gpu.md"
PRINTED = [
    path for path in sorted((ROOT / "published").glob("*/bench/*.json")) if (path.parents[1] / BENCH_PAGE).exists()
]


BENCHES: dict[str, ModuleType] = {"memory": bench_memory, "loops": bench_workloads}
BENCHES |= {"start": bench_start, "strategies": bench_strategies}


@pytest.mark.parametrize("path", PRINTED, ids=lambda path: path.stem)
def test_the_tables_of_a_benchmark_are_on_their_page(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = BENCHES.get(path.stem.split("-")[0], bench_gpu)
    monkeypatch.setattr(sys, "argv", [bench.__name__, "--print", str(path)])
    bench.main()
    assert capsys.readouterr().out.strip() in (path.parents[1] / BENCH_PAGE).read_text()


def test_the_plot_that_the_readme_shows_is_of_the_published_records() -> None:
    found = published_experiment("h100x2/captured")
    plots = {plot.name: plot for plot in build_plots(found.tables, found.collected.terms)}
    shown, drawn = (
        re.findall(r"<dc:(?:title|description)>([^<]*)<", svg.decode())
        for svg in ((ROOT / "docs/q2.svg").read_bytes(), render_files(plots["q2"], ["svg"])["svg"])
    )
    assert shown == drawn != []


def test_the_commit_stands_behind_the_first_mention_of_a_folder() -> None:
    said = render_results.state_commits("(`published/h100x2/q3`, n = 1), `published/h200x2/q4`; `published/h100x2/q3`")
    assert said == (
        "(`published/h100x2/q3`, commit 18d29ce, n = 1), `published/h200x2/q4`, commit d42222f; `published/h100x2/q3`"
    )
    with pytest.raises(ValueError, match="no longer bear out"):
        render_results.state_commits("`published/h100x2/nowhere`")


def test_every_measured_part_of_the_results_names_a_commit() -> None:
    blocks = re.findall(
        r"<!-- results: (\S+) -->(.*?)<!-- /results -->", (ROOT / "docs/results.md").read_text(), re.DOTALL
    )
    assert {name for name, text in blocks if "commit" not in text} == {"results-conditions", "results-published"}


@pytest.mark.parametrize(
    ("page", "others", "has"),
    [
        (
            "trust-narrow.md.j2",
            ("two-cores/", "h100/", "h100x2/q4-study", "h100x2/again"),
            lambda name: render_results.count_narrow(name)[1],
        ),
        ("trust-link-model.md.j2", ("two-cores/",), lambda name: render_results.rows(name, "prediction")),
    ],
    ids=["scaling with intervals", "sweeps"],
)
def test_trust_md_counts_every_published_experiment_of_its_kind(
    page: str, others: tuple[str, ...], has: Callable[[str], object]
) -> None:
    template = (render_results.TEMPLATES / page).read_text()
    counted = [name for name in EXPERIMENTS if not name.startswith(others) and has(name)]
    assert [name for name in counted if f'"{name}"' not in template] == []


@pytest.mark.parametrize("seed", [1, 2])
def test_both_models_warm_up_alike_at_8192(seed: int) -> None:
    """In the five epochs of warm-up runs of 30 and of 120 epochs have one rate, and later another."""
    found = []
    for num_epochs in (30, 120):
        wanted = {"reference_batch_size": 256, "epochs": num_epochs, "seed": seed}  # all four remedies at half the rate
        of_size = render_results.records("h100x2/q4-study", "single-1gpu-b8192-*")
        found += [record for record in of_size if wanted.items() <= record["spec"].items()]
    losses = [[epoch["loss"] for epoch in record["measurement"]["epochs"][:6]] for record in found]
    assert [render_results.gpu_of(record) for record in found] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert losses[0][:5] == losses[1][:5]
    assert losses[0][5] != losses[1][5]


def test_two_gpu_models_learn_the_same_to_the_last_bit() -> None:
    places = set()
    for again in render_results.records("h100x2/again"):
        (before,) = (one for one in render_results.records("h100x2/q4-study") if one["run_id"] == again["run_id"])
        epochs, epochs_before = (
            [[epoch[key] for key in LEARNT] for epoch in record["measurement"]["epochs"]] for record in (again, before)
        )
        assert epochs == epochs_before
        environments = [record["environment"] for record in (again, before)]
        places.add(tuple((place["gpus"][0]["name"], place["source_digest"][:12]) for place in environments))
    assert places == {(("NVIDIA H200", "a358d3c66021"), ("NVIDIA H100 80GB HBM3", "89ab72dc1480"))}
