"""report.html of an experiment, the index over all experiments, and the plots as files.

A page is one file: no script, no remote asset, and a content policy that allows its own style sheet alone.
"""

import base64
import errno
import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import jinja2
import msgspec

from pipeline.experiment.learning_rate import peak_learning_rate
from pipeline.experiment.outcomes import CollectedOutcomes, PointOutcome
from pipeline.experiment.point_label import (
    describe_point,
    describe_training,
    format_figure,
    name_processors,
    varying_axes,
)
from pipeline.experiment.record import Record
from pipeline.report.answers import Answers
from pipeline.report.build_tables import Tables
from pipeline.report.display_cells import CELL_WORDS, DisplayTable
from pipeline.report.display_labels import remedies_of
from pipeline.report.display_tables import (
    MAX_ROWS,
    DisplayOptions,
    display_tables,
    processors_of,
)
from pipeline.report.plot_data import AxisValues, PlotSource, axis_values
from pipeline.report.plot_registry import build_plots
from pipeline.report.row_types import CostRow, Row
from pipeline.system import files
from pipeline.system.errors import pluralize

if TYPE_CHECKING:
    from pipeline.report.plots import RenderedPlot

REPORT_NAME = "report.html"
INDEX_NAME = "index.html"
PLOTS_FOLDER = "plots"
QUESTIONS = {
    "Q1": "Which batch size keeps one GPU busy, and where does its memory end?",
    "Q2": "How does training scale over GPUs?",
    "Q3": "Where does the time go, and how much of it is communication?",
    "Q4": "What does a large batch cost in accuracy, and which remedy mends it?",
    "int8": "What does quantization to int8 cost in accuracy, and which values do its scales cover?",
}
PLOT_FILES = ("q[1-4]*.svg", "int8*.svg")  # the plots in a folder that earlier runs wrote
ENVIRONMENT_FIELDS = {
    "CPU": "cpu",
    "torch": "torch",
    "CUDA": "cuda",
    "NCCL": "nccl",
    "driver": "driver",
    "Python": "python",
    "pipeline": "pipeline",
    "commit": "git_commit",
    "source": "source_digest",
    "stated by": "source",
}


class PageSource(NamedTuple):
    """The sources of the page of one experiment. `root` is the folder of the index; `logs` are by run id."""

    name: str
    folder: Path
    root: Path
    has_index: bool
    tables: Tables
    collected: CollectedOutcomes
    logs: Mapping[str, Path]
    answers: Answers = ()


class IndexEntry(NamedTuple):
    """One experiment on the index."""

    name: str
    href: str
    is_ingested: bool
    counts: str
    hardware: str
    questions: str
    answers: Answers


class Section(NamedTuple):
    """A question with its plots and tables."""

    question: str
    text: str
    figures: "list[RenderedPlot]"
    folded_figures: "list[RenderedPlot]"
    tables: list[DisplayTable]


class Fate(NamedTuple):
    """The fate of one point."""

    run_id: str
    label: str
    status: str
    reason: str
    records: list[tuple[str, str]]
    log: str


def write_report(source: PageSource) -> tuple[IndexEntry, ImportError | None]:
    """Write report.html and the plots beside the records. Return its entry on the index, and why plots are missing.

    Raises OSError.
    """
    plots, error = draw_plots(source)
    if error is None:
        write_plots(source.folder / PLOTS_FOLDER, {f"{drawn.plot.name}.svg": drawn.file for drawn in plots})
    sections = build_sections(source, plots)
    page = render_page(source, sections, has_plots=error is None)
    files.replace_file_atomically(source.folder / REPORT_NAME, page.encode())
    return index_entry(source, sections), error


def draw_plots(source: PageSource) -> "tuple[list[RenderedPlot], ImportError | None]":
    """Return the plots as SVG, and the error if matplotlib cannot be imported; without plots it is not imported."""
    wanted = build_plots(PlotSource(source.tables.flat(), source.collected.outcomes, processors_of(source.collected)))
    if not wanted:
        return [], None
    try:
        from pipeline.report.plots import render_plot
    except ImportError as error:
        return [], error
    return [render_plot(plot) for plot in wanted], None


def write_plots(folder: Path, pictures: Mapping[str, bytes]) -> None:
    """Write the plots, and remove those of an earlier run. Raises OSError, also if the folder is a link."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link", str(folder))
    if pictures:
        folder.mkdir(exist_ok=True)
    for name, picture in pictures.items():
        files.replace_file_atomically(folder / name, picture)
    for path in itertools.chain.from_iterable(map(folder.glob, PLOT_FILES)):
        if path.name not in pictures:
            path.unlink()


def build_sections(source: PageSource, figures: "Sequence[RenderedPlot]") -> list[Section]:
    """Return each question that has plots or tables, with them."""
    links = RecordLinks(source.collected.outcomes)
    tables: dict[str, list[DisplayTable]] = defaultdict(list)
    for question, table in display_tables(source.tables, source.collected, DisplayOptions(link_of=links.of)):
        tables[question].append(table)
    sections = [
        Section(
            question,
            name_processors(text, processors_of(source.collected)),
            [figure for figure in figures if figure.plot.question == question and figure.plot.is_main],
            [figure for figure in figures if figure.plot.question == question and not figure.plot.is_main],
            tables[question],
        )
        for question, text in QUESTIONS.items()
    ]
    return [section for section in sections if section.tables or section.figures]


class RecordLinks:
    """Finds the record that a table row stands for: the point with the row's axes.

    The learning rate of a row is that of its point, or its peak where remedies change it.
    """

    def __init__(self, outcomes: Sequence[PointOutcome]) -> None:
        self.outcomes = outcomes
        self.found: dict[tuple[str, ...], dict[AxisValues, list[PointOutcome]]] = {}

    def of(self, row: Row) -> str:
        """Return the address of the row's record; of several, that of the point on this page. Empty: there is none."""
        wanted = {"remedies": []} | row.axes | remedies_of(row)
        axes = tuple(wanted)
        if axes not in self.found:
            self.found[axes] = defaultdict(list)
            for outcome in self.outcomes:
                peak = msgspec.structs.replace(outcome.spec, learning_rate=peak_learning_rate(outcome.spec))
                for values in {axis_values(outcome, axes), axis_values(outcome._replace(spec=peak), axes)}:
                    self.found[axes][values].append(outcome)
        matches = self.found[axes].get(axis_values(wanted, axes), [])
        records = [outcome.record for outcome in matches if outcome.record]
        if len(records) == 1:
            return record_address(records[0])
        return f"#{matches[0].spec.run_id()}" if matches else ""


def address_of(path: Path, folder: Path) -> str:
    """Return the address of a file, relative to a page in the folder. Names need not be UTF-8."""
    return quote(os.fsencode(path.relative_to(folder)))


def record_address(record: Record) -> str:
    """Return the address of a record, relative to the page."""
    return quote(f"records/{record.run_id}.{record.attempt}.json")


def build_fates(source: PageSource) -> list[Fate]:
    """Return what became of every point, with links to its records and log. Of very many points the first ok ones."""
    outcomes = source.collected.outcomes
    if len(outcomes) > MAX_ROWS:
        ok = [outcome for outcome in outcomes if outcome.status == "ok"]
        outcomes = [*(outcome for outcome in outcomes if outcome.status != "ok"), *ok[:MAX_ROWS]]
    specs = [msgspec.structs.asdict(outcome.spec) for outcome in outcomes]
    axes = list(dict.fromkeys(["strategy", "num_gpus", "batch_size_per_gpu", *varying_axes(specs)]))
    fates = []
    for outcome, spec in zip(outcomes, specs, strict=True):
        run_id = outcome.spec.run_id()
        attempts = [*outcome.superseded, *([outcome.record] if outcome.record else [])]
        names = [f"attempt {record.attempt}" for record in attempts] if len(attempts) > 1 else ["record"]
        records = [(name, record_address(record)) for name, record in zip(names, attempts, strict=False)]
        log = source.logs.get(run_id)
        address = address_of(log, source.folder) if log and log.is_relative_to(source.folder) else ""
        fates.append(Fate(run_id, describe_point(spec, axes), outcome.status, outcome.reason, records, address))
    return fates


def build_provenance(outcomes: Iterable[PointOutcome]) -> dict[str, str]:
    """Return hardware, versions and source of the ok records, with all values that occur."""
    records = [outcome.record for outcome in outcomes if outcome.record and outcome.status == "ok"]
    places = list({id(record.environment): record.environment for record in records}.values())
    used = (record.measurement.precision_used for record in records if record.measurement)
    stated = {"training": describe_training([record.spec for record in records])}
    stated |= {"GPU": distinct(gpu.name for place in places for gpu in place.gpus), "precision": distinct(used)}
    stated |= {
        label: distinct(getattr(place, field) for place in places) for label, field in ENVIRONMENT_FIELDS.items()
    }
    if any(place.git_dirty for place in places):
        stated["commit"] += " with uncommitted changes"
    return {label: value for label, value in stated.items() if value}


def hardware_of(outcomes: Iterable[PointOutcome]) -> str:
    """Return the models of the GPUs that the records name, or of the CPUs if there are none."""
    places = [outcome.record.environment for outcome in outcomes if outcome.record]
    return distinct(gpu.name for place in places for gpu in place.gpus) or distinct(place.cpu for place in places)


def distinct(values: Iterable[Any]) -> str:
    """Return the values that occur, once each."""
    return ", ".join(sorted({str(value) for value in values if value}))


def describe_counts(collected: CollectedOutcomes) -> str:
    """Return the number of points in each state that occurs."""
    coverage = collected.coverage
    counts = {"ok": coverage.ok, "out of memory": coverage.oom, "failed": coverage.failed}
    counts |= {"missing": coverage.missing, "rejected": coverage.rejected}
    stated = ", ".join(f"{number:,} {word}" for word, number in counts.items() if number)
    return f"{pluralize(coverage.expected, 'point')}: {stated}" if coverage.expected else "no points"


def describe_cost(rows: Iterable[CostRow]) -> list[str]:
    """Return the hours of the attempts by how they ended; what took no time is left out."""
    hours = (
        (row, row.gpu_hours, "GPU hours") if row.gpu_hours else (row, row.process_hours, "process hours")
        for row in rows
    )
    return [
        f"{format_figure(number)} {unit} ({CELL_WORDS['ending'].get(row.ending, row.ending)})"
        for row, number, unit in hours
        if number
    ]


def index_entry(source: PageSource, sections: Sequence[Section]) -> IndexEntry:
    """Return the experiment's entry on the index."""
    outcomes = source.collected.outcomes
    return IndexEntry(
        name=source.name,
        href=address_of(source.folder / REPORT_NAME, source.root),
        is_ingested=any(outcome.record and not outcome.record.measured for outcome in outcomes),
        counts=describe_counts(source.collected),
        hardware=hardware_of(outcomes),
        questions=", ".join(section.question for section in sections),
        answers=source.answers,
    )


def render_page(source: PageSource, sections: Sequence[Section], has_plots: bool) -> str:
    """Return report.html."""
    home = "../" * len(source.folder.relative_to(source.root).parts) + INDEX_NAME
    return render_template(
        "report.html.j2",
        title=source.name,
        home=home if source.has_index else "",
        answers=source.answers,
        counts=describe_counts(source.collected),
        sections=sections,
        unanswered=unanswered_questions(source.tables, sections),
        has_plots=has_plots,
        fates=build_fates(source),
        left_out=source.collected.notes,
        provenance=build_provenance(source.collected.outcomes),
        hardware=hardware_of(source.collected.outcomes),
        training=describe_training([outcome.spec for outcome in source.collected.outcomes]),
        cost=describe_cost(source.tables.cost),
    )


def unanswered_questions(tables: Tables, sections: Sequence[Section]) -> list[str]:
    """Return the questions without a section. An experiment that quantizes has one question, another has the rest."""
    answered = {section.question for section in sections}
    return [name for name in QUESTIONS if (name == "int8") == bool(tables.int8) and name not in answered]


def write_index(folder: Path, entries: Sequence[IndexEntry]) -> None:
    """Write the index over all experiments. Raises OSError."""
    page = render_template(
        "index.html.j2", title="Experiments", count=pluralize(len(entries), "experiment"), entries=entries
    )
    files.replace_file_atomically(folder / INDEX_NAME, page.encode())


def render_template(name: str, **values: Any) -> str:
    """Return a page from its template: all text is escaped, and the content policy allows the style sheet by digest."""
    folder = package_files.files("pipeline") / "templates"
    style = (folder / "report.css").read_text()
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda template: (folder / template).read_text()),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template(name).render(style=style, style_digest=digest, **values)


def printable(value: Any) -> Any:
    """Return text without control and direction characters: a name could hide what stands beside it."""
    if type(value) is not str or value.isprintable():
        return value
    return "".join(char if char.isprintable() or char == "\n" else " " for char in value)
