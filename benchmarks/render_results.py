"""Renders the measured figures of README.md, docs/ and published/ from the published records.

    python benchmarks/render_results.py

A block stands in a page between the lines `<!-- results: NAME -->` and `<!-- /results -->`. Its template is
docs/templates/NAME.md.j2. The names that a template may use are the functions of `NAMES` and the filters of `FILTERS`.
"""

import functools
import json
import math
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from pipeline.figures.formulas import SweepSample, fit_link
from pipeline.figures.intervals import median_interval
from pipeline.figures.stopping_rule import MAX_TIME_HALF_WIDTH
from pipeline.plan.axes import REMEDIES
from pipeline.plan.point_label import format_number
from pipeline.records.folder import Experiment
from pipeline.report.collected import collect_experiment
from pipeline.report.time_to_target import Targets

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "published"
TEMPLATES = ROOT / "docs" / "templates"
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->\n(.*?)<!-- /results -->\n", re.DOTALL)
MAX_WIDTH = 128  # characters of a line of a paragraph
WORDS = (
    *("no", "one", "two", "three", "four", "five", "six", "seven", "eight"),
    *("nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"),
)

Row = dict[str, Any]


# What the records say.


@functools.cache
def tables_of(experiment: str, target_accuracy: float | None = None) -> dict[str, list[Row]]:
    """Return the tables of an experiment below published/, as JSON has them."""
    found = collect_experiment(Experiment(PUBLISHED / experiment), targets=Targets(target_accuracy))
    content: dict[str, list[Row]] = found.content
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
    """Return a JSON file below published/, such as that of a benchmark or a self-test."""
    return json.loads((PUBLISHED / path).read_text())


@functools.cache
def records(experiment: str, run_ids: str = "*") -> list[Row]:
    """Return the records of an experiment whose run ids match a pattern such as `ddp-*-b32-*`."""
    paths = sorted((PUBLISHED / experiment / "records").glob(f"{run_ids}.json"))
    return [json.loads(path.read_text()) for path in paths]


def text_of(path: str) -> str:
    """Return the text of a file below published/, such as what a benchmark printed."""
    return (PUBLISHED / path).read_text()


SERIES = re.compile(r" +(.+?) +(-?[\d.]+) \((-?[\d.]+) to (-?[\d.]+)\) ms, n = \d+")
SERIES_OF = re.compile(r"(?:link: (.+)\n+)?(\w+), \d+ sequences a process\n((?: .*\n)+)")


def readings(path: str) -> dict[str, dict[str, Row]]:
    """Return the series of a file of bench_process_group.py by link, else by strategy: in ms, with their ends."""
    return {
        link or strategy: {
            name: {"ms": float(middle), "ms_low": float(low), "ms_high": float(high)}
            for name, middle, low, high in SERIES.findall(lines)
        }
        for link, strategy, lines in SERIES_OF.findall(text_of(path))
    }


def bench(path: str, section: str, name: str) -> Row:
    """Return the only row of a benchmark's file with this section and name. Raises ValueError."""
    found: list[Row] = [row for row in load(path)["rows"] if (row["section"], row["name"]) == (section, name)]
    (only,) = found
    return only


def interval_of(row: Row, figure: str) -> tuple[float, float]:
    """Return the ends of a figure's interval."""
    stem, unit = (figure[:-2], "_s") if figure.endswith("_s") else (figure, "")
    return row[f"{stem}_low{unit}"], row[f"{stem}_high{unit}"]


def require(is_so: Any) -> None:
    """Raise ValueError if the records do not bear out what a template says in words."""
    if not is_so:
        raise ValueError("the records no longer bear out a sentence of this template.")


# The commit beside each folder that a block cites.

CITED = re.compile(r"`published/([\w-]+/[^`\s]+)`")
EARLIER_COMMITS = {  # of folders whose records state none, or one with changes; published/*/README.md say more
    "h200x2/q4": ("d42222f",),
    **dict.fromkeys(("h200x2/communication", "h200x2/batchnorm", "h200x2/graph"), ("8d2f077",)),
    "h200x2/intervals": ("8d2f077", "16d6604"),
    "h200x2/memory": ("f68863e", "74b359d"),
    "h100x2/q4-study": ("536faaf", "463a0fd"),
    "h200/bench": ("2a8a93c",),
    "h200/bench/step-before-*": ("58b8ca2",),
    **dict.fromkeys(("h200/bench/by-hand.json", "h200/bench/trainers-compiled"), ("2a8a93c",)),
    "h200x2/bench/input.json": ("b173664",),
    "h200x2/bench": ("5f91704", "3688478"),
    "h200x2/bench/memory.json": ("91fd088",),
    "h200x2/bench/trainers-*": ("f68863e", "74b359d", "b9f9cf3"),
    "h200x4/bench": ("b5eba00",),
}


def commits_of(path: str) -> Sequence[str]:
    """Return the commits that measured what lies below published/ under that path, that of most records first."""
    ran = [record for record in records(path) if "implied" not in str(record.get("reason"))]
    stated = Counter(str(record["environment"].get("git_commit"))[:7] for record in ran)
    return EARLIER_COMMITS.get(path) or [commit for commit, _ in stated.most_common()]


def commit_words(*paths: str) -> str:
    """Return "commit a", or "commits a and b" of several. Raises ValueError if none is known."""
    commits = list(dict.fromkeys(commit for path in paths for commit in commits_of(path)))
    require(commits and "None" not in commits)
    return f"{'commit' if len(commits) == 1 else 'commits'} {enumerate_in_words(commits)}"


def state_commits(text: str) -> str:
    """Return the text with the commit behind its first mention of each folder."""
    stated = set()

    def state(match: re.Match[str]) -> str:
        is_new = match[1] not in stated
        stated.add(match[1])
        return f"{match[0]}, {commit_words(match[1])}" if is_new else match[0]

    return CITED.sub(state, text)


# Figures that no table holds.


def epoch_times_s(record: Row) -> list[float]:
    """Return the time of each epoch of a record: that of the slowest rank."""
    return [max(rank["epoch_time_ns"] for rank in epoch["ranks"]) / 1e9 for epoch in record["measurement"]["epochs"]]


def epoch_autocorrelations(experiment: str) -> list[float]:
    """Return for each record how alike an epoch's time is to the next: the autocorrelation of the timed epochs."""
    timed = [epoch_times_s(record)[1:] for record in records(experiment) if record["measurement"]]
    found = []
    for times in timed:
        apart = [time - statistics.fmean(times) for time in times]
        found.append(sum(one * other for one, other in pairwise(apart)) / sum(one**2 for one in apart))
    return found


def duration_s(record: Row) -> float:
    """Return the time from the start of a record's point to its end."""
    began, ended = (datetime.fromisoformat(record[key]) for key in ("started_at", "ended_at"))
    return (ended - began).total_seconds()


def gpu_of(record: Row) -> str:
    """Return the model of a record's first GPU."""
    return str(record["environment"]["gpus"][0]["name"])


def study(num_images: int, remedies: str, epochs: int = 30, num_gpus: int = 1, reference: int = 128) -> Row:
    """Return a row of the study of Q4. Remedies: "", "linear_scaling+warmup" or "all four"; half the rate: 256."""
    names = [*REMEDIES] if remedies == "all four" else [name for name in remedies.split("+") if name]
    axes = {"global_batch_size": num_images, "remedies": names, "epochs": epochs, "num_gpus": num_gpus}
    return row("h100x2/q4-study", "time_to_target", **axes, reference_batch_size=reference)


def count_narrow(*experiments: str) -> tuple[int, int]:
    """Return how many epoch and step times are known within 2 %, and of how many with an interval."""
    found = [
        row["noise_floor"]
        for name in experiments
        for row in (*rows(name, "Q2", scaling="weak"), *rows(name, "communication"), *rows(name, "split"))
    ]
    known = [floor for floor in found if floor is not None]
    return sum(floor <= MAX_TIME_HALF_WIDTH for floor in known), len(known)


def link_fit_errors(*experiments: str) -> list[tuple[float, float]]:
    """Return the largest error of the model of each link: fitted to large messages as published, and to all sizes."""
    errors = {}
    for name in experiments:
        for predicted in rows(name, "prediction"):
            swept = rows(name, "sweep", num_gpus=predicted["from_num_gpus"])
            captured = [row for row in swept if row["execution"] == "graph"] or swept
            fit = fit_link([SweepSample(row["num_gpus"], row["num_bytes"], row["time_s"]) for row in captured])
            assert fit is not None
            errors[name, predicted["from_num_gpus"]] = (predicted["fit_worst_error"], fit.worst_error)
    return list(errors.values())


@functools.cache
def known_links() -> dict[str, list[Row]]:
    """Return what the tool read of links of known rate: `readings`, `growth` and `predictions`."""
    import bench_link_of_known_rate as bench_link  # these import torch
    from link_rank import LinkReading

    path = PUBLISHED / "two-cores" / "link-of-known-rate.json"
    readings = msgspec.json.decode(path.read_bytes(), type=list[LinkReading])
    known = [reading for reading in readings if reading.rate_bits_per_s in bench_link.RATES]
    of_ranks = [[one for one in known if one.spec.num_gpus == number] for number in bench_link.NUM_RANKS]
    of_rates = [[one for one in readings if one.rate_bits_per_s == rate] for rate in bench_link.ALL_RATES]
    return {
        "readings": [bench_link.reading_row(reading) for reading in readings],
        "growth": [bench_link.growth_row(found) for found in of_ranks],
        "predictions": [bench_link.prediction_row(found) for found in of_rates],
    }


# How a figure is written.


def percent(fraction: float, spec: str = ".1") -> str:
    """Return a fraction in per cent."""
    return format_number(fraction, f"{spec}%").replace("%", " %")


def in_us(time_s: float, spec: str = ".1f") -> str:
    """Return a time in microseconds, without the unit."""
    return format_number(1e6 * time_s, spec)


def span(values: Sequence[float], spec: str, scale: float = 1) -> str:
    """Return the smallest and the largest of the values, times a scale."""
    scaled = [scale * value for value in values]
    return f"{format_number(min(scaled), spec)} to {format_number(max(scaled), spec)}"


def interval(row: Row, figure: str, spec: str, scale: float = 1) -> str:
    """Return the interval of a figure."""
    return span(interval_of(row, figure), spec, scale)


def with_interval(row: Row, figure: str, spec: str, scale: float = 1, unit: str = "") -> str:
    """Return a figure with its unit, and its interval in brackets."""
    return f"{format_number(scale * row[figure], spec)}{unit} ({interval(row, figure, spec, scale)})"


def longer(one: Row, other: Row) -> float:
    """Return how much longer a benchmark's row takes than another, by the medians, as a fraction."""
    return float(statistics.median(one["windows_s"]) / statistics.median(other["windows_s"])) - 1


def loop_ratios(path: str, name: str, execution: str) -> list[float]:
    """Return how long the workload took for each turn of its plain loop, from a file of bench_workloads.py."""
    turns = [turn for turn in load(path)["turns"] if (turn["name"], turn["execution"]) == (name, execution)]
    times = (
        [statistics.median(turn["windows_s"]) for turn in turns if turn["side"] == side]
        for side in ("workload", "plain")
    )
    return [ours / plain for ours, plain in zip(*times, strict=False)]


def in_words(count: float) -> str:
    """Return a rounded count up to sixteen in words."""
    return WORDS[round(count)]


def enumerate_in_words(parts: Sequence[Any]) -> str:
    """Return the parts with commas, and `and` before the last."""
    *first, last = map(str, parts)
    return f"{', '.join(first)} and {last}" if first else last


def round_up(value: float) -> str:
    """Return a positive number rounded up to the first decimal."""
    return format_number(math.ceil(10 * value) / 10, ".1f")


def wrap(text: str) -> str:
    """Return a text with paragraphs and list items on lines of at most MAX_WIDTH; tables and code stay as they are."""
    wrapped = re.sub(r"\n\s*\n", "\n\n", text.strip())
    return "".join(wrap_part(part) for part in re.split(r"(\n\n|\n(?=- |\|)|```.*?```)", wrapped, flags=re.DOTALL))


def wrap_part(text: str) -> str:
    """Return one paragraph, list item, row of a table or block of code.

    No line of a paragraph begins with a sign: Markdown would see a list.
    """
    if text.isspace() or text.startswith("```"):
        return text
    words = " ".join(text.split())
    if words.startswith("|"):
        return words
    whole = re.sub(r" (?=%|[-+*=#>] )", "\0", words)
    indent = "  " if words.startswith("- ") else ""
    return textwrap.fill(
        whole, MAX_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).replace("\0", " ")


# Blocks and pages.

NAMES = {
    function.__name__: function
    for function in (
        *(tables_of, rows, row, load, records, bench, require, epoch_times_s, duration_s),
        *(study, count_narrow, link_fit_errors, known_links, text_of, readings, median_interval),
        *(commits_of, epoch_autocorrelations),
        *(span, interval, with_interval, longer, loop_ratios, re.findall, zip),
    )
}
FILTERS = {"number": format_number, "percent": percent, "us": in_us, "span": span, "in_words": in_words}
FILTERS |= {"enumerate": enumerate_in_words, "round_up": round_up, "gpu_of": gpu_of, "median": statistics.median}


def render_block(name: str) -> str:
    """Return the text of a block. Raises jinja2.TemplateError, and ValueError where the records say something else."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        extensions=["jinja2.ext.do"],
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # Markdown of our own records
    )
    environment.globals |= NAMES
    environment.filters |= FILTERS
    return wrap(state_commits(environment.get_template(f"{name}.md.j2").render())) + "\n"


def render_page(text: str) -> str:
    """Return a page with its blocks rendered anew."""
    return BLOCK.sub(lambda match: f"<!-- results: {match[1]} -->\n{render_block(match[1])}<!-- /results -->\n", text)


def pages() -> list[Path]:
    """Return the pages that have blocks."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted(PUBLISHED.glob("*/README.md"))]
    return [path for path in found if BLOCK.search(path.read_text())]


if __name__ == "__main__":
    sys.path.append(str(ROOT / "tests"))  # a benchmark uses helpers of the tests
    for path in pages():
        path.write_text(render_page(path.read_text()))
