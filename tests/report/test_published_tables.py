"""The published tables are what their records give, and the docs count over all of them."""

import re
from collections.abc import Iterable

import pytest
from conftest import ROOT
from published_pages import TRUST, missing_in, shown_rows

from pipeline.analysis import ring_model
from pipeline.collect import address_of_words
from pipeline.experiment.folder import Experiment
from pipeline.pages.markdown import render_experiment
from pipeline.tables import prediction_rows
from pipeline.tables.collect_experiment import collect_experiment

PUBLISHED = ["a40-ddp", "v100-dp", "h200x2/q1", "h200x2/scaling", "h200x2/q4", "h200x4/scaling", "h200x4/q4"]
PUBLISHED += [f"h200x2/{name}" for name in ("communication", "batchnorm", "graph", "intervals", "memory")]
PUBLISHED += [f"h200x2/communication-{name}" for name in ("captured", "settled")]
PUBLISHED += [f"h200x4/{name}" for name in ("communication", "communication-captured", "batchnorm")]
PUBLISHED += [f"h200x2/{name}" for name in ("packed", "one-a-point")]
PUBLISHED += ["two-cores/quantize", "h100x2/q4-study", "h100x2/again"]


GOLDEN = ("h200x2/communication-captured", "h100x2/q4-study")  # captured steps; every kind of cell
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")


def rendered(name: str) -> tuple[str, str]:
    """The report of a published experiment, as it is in git and as its records give it now."""
    found = collect_experiment(Experiment(ROOT / "outputs" / name))
    words = address_of_words(found.experiment)
    now = render_experiment(name, found.tables, found.collected, words=words)
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


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in GOLDEN])
def test_the_figures_of_the_other_reports_are_what_their_records_give(name: str) -> None:
    published, now = (cells_of(report) for report in rendered(name))
    assert [len(row) for row in now] == [len(row) for row in published]
    rows = zip(now, published, strict=True)
    for cell, other in (pair for row, old in rows for pair in zip(row, old, strict=True)):
        numbers, others = NUMBER.findall(cell), NUMBER.findall(other)
        assert len(numbers) == len(others), (cell, other)
        for number, published_number in zip(numbers, others, strict=True):
            difference = abs(float(number.replace(",", "")) - float(published_number.replace(",", "")))
            assert difference <= 1.01 * last_digit(published_number), (cell, other)


NARROW = {
    "captured": ("h200x2/graph", "h200x2/communication-captured", "h200x4/communication-captured"),
    "epochs": ("h200x2/intervals", "h200x2/packed", "h200x2/one-a-point"),
    "communication": (
        *(f"h200x2/{name}" for name in ("communication", "communication-settled", "batchnorm")),
        *(f"h200x4/{name}" for name in ("communication", "batchnorm")),
    ),
}


WITH_INTERVAL = "Of the rows with an interval"  # how the line of a report begins


def narrow_points(names: Iterable[str]) -> str:
    """How many points of these experiments are known within 2 %, of how many, as their reports say it."""
    reports = [(ROOT / "outputs" / name / "report.md").read_text() for name in names]
    found = [re.search(rf"^{WITH_INTERVAL} (\d+) of (\d+) ", report, re.MULTILINE) for report in reports]
    pairs = [(int(match[1]), int(match[2])) for match in found if match]
    assert len(pairs) == len(reports)
    return " of ".join(str(sum(part)) for part in zip(*pairs, strict=True))


def test_how_many_published_points_are_known_within_2_per_cent_is_what_their_reports_say() -> None:
    counted = {kind: narrow_points(names) for kind, names in NARROW.items()}
    others = {name for name in PUBLISHED if not name.startswith("h100")}  # the table of trust.md is of H200s
    others -= {name for names in NARROW.values() for name in names}
    assert not any(f"\n{WITH_INTERVAL} " in (ROOT / "outputs" / name / "report.md").read_text() for name in others)
    assert [row[1] for row in shown_rows(TRUST, "a half-width of at most 2 %")] == list(counted.values())
    on_two = {kind: [name for name in names if name.startswith("h200x2/")] for kind, names in NARROW.items()}
    captured, epochs, communication = map(narrow_points, on_two.values())
    said = [f"{captured} captured, {epochs} eager epochs", f"{communication} eager communication points"]
    every = narrow_points(name for names in on_two.values() for name in names).replace(" of ", " of the ")
    said.append(f"{every} points with six windows or more")
    assert missing_in((ROOT / "outputs/h200x2/README.md").read_text(), said) == []


def worst_fit_errors(names: Iterable[str]) -> dict[tuple[str, int], float]:
    """The largest relative error of the link model, by experiment and number of GPUs of its sweep."""
    return {
        (name, row["from_num_gpus"]): row["fit_worst_error"]
        for name in names
        for row in collect_experiment(Experiment(ROOT / "outputs" / name)).tables["prediction"]
        if row["fit_worst_error"] is not None
    }


def test_how_well_the_link_model_fits_is_what_the_docs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in PUBLISHED if "communication" in name or "batchnorm" in name]
    of_large = worst_fit_errors(names)
    monkeypatch.setattr(ring_model, "fit_large_messages", lambda samples, least_bytes: ring_model.fit_link(samples))
    of_all = worst_fit_errors(names)
    low, high, lowest, highest = (100 * end(found.values()) for found in (of_large, of_all) for end in (min, max))
    said = [
        f"it is {low:.0f} to {high:.0f} % off in the eight published sweeps.",
        f"Fitted to all sizes it would be {lowest:.0f} to {highest:.0f} % off.",
        "It is fitted to messages from a quarter of the smallest bucket on;",
    ]
    assert prediction_rows.SIZES_BELOW_BUCKETS == 4
    assert len(of_large) == len(of_all) == 8
    assert missing_in(TRUST, said) == []
