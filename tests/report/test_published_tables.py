"""The published tables and plots are what their records give, and the records bear out what the docs claim of them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import bench_gpu
import bench_memory
import bench_start
import bench_strategies
import bench_workloads
import pytest
import render_results
from conftest import ROOT
from rendered_tables import published_experiment

from pipeline.collect import address_of_words
from pipeline.report.draw import render_files
from pipeline.report.html import build_plots
from pipeline.report.markdown import render_experiment

PUBLISHED = ROOT / "published"
MEASURED = sorted(str(path.parent.relative_to(PUBLISHED)) for path in PUBLISHED.glob("*/*/report.md"))
EXPERIMENTS = ["a40-ddp", "v100-dp", "dp-notebook", "dp-report", "dp-wandb", *MEASURED]


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


@pytest.mark.seconds
def test_what_a_user_measured_in_a_clone_changes_no_test(tmp_path: Path) -> None:
    """Tests that read every published experiment, in a copy of the checkout with three experiments in outputs/."""
    others = shutil.ignore_patterns(".*", "outputs", "__pycache__", "*.svg", "report.html")
    checkout = Path(shutil.copytree(ROOT, tmp_path / "checkout", ignore=others, symlinks=True))
    for name in ("mine", "deep/q1", "h200x2/scaling"):
        shutil.copytree(PUBLISHED / "h200x2" / "q1", checkout / "outputs" / name)
    readers = ("tests/submission/test_gpu_hours_estimate.py",)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "published or pairs", *readers]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, " passed" in done.stdout) == (0, True), done.stdout + done.stderr


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


def test_trust_md_counts_every_published_experiment_of_scaling_that_has_intervals() -> None:
    template = (render_results.TEMPLATES / "trust-narrow.md.j2").read_text()
    counted = [
        name
        for name in EXPERIMENTS
        if not name.startswith(("h100/", "h100x2/q4-study", "h100x2/again", "two-cores/"))
        and render_results.count_narrow(name)[1]
    ]
    assert [name for name in counted if f'"{name}"' not in template] == []


def test_trust_md_counts_every_published_sweep() -> None:
    template = (render_results.TEMPLATES / "trust-link-model.md.j2").read_text()
    swept = [
        name for name in EXPERIMENTS if not name.startswith("two-cores/") and render_results.rows(name, "prediction")
    ]
    assert [name for name in swept if f'"{name}"' not in template] == []


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
