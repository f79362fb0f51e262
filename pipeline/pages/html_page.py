"""report.html of an experiment, the index over all experiments, and the plots as files.

A page is one file: no script, no remote asset, and a content policy that allows its own style sheet alone.
"""

import base64
import errno
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from pipeline.answers.questions import answer_questions, answered_claims, next_command, render_answer
from pipeline.experiment.outcomes import CollectedOutcomes
from pipeline.experiment.point_label import describe_training, format_figure, name_processors
from pipeline.pages.cells import DisplayTable
from pipeline.pages.display_tables import DisplayOptions, display_tables
from pipeline.pages.plot_data import PlotSource
from pipeline.pages.plot_registry import build_plots
from pipeline.pages.point_fates import RecordLinks, address_of, build_fates
from pipeline.pages.provenance import hardware_of, list_provenance
from pipeline.system import files
from pipeline.system.errors import pluralize, replace_control_characters
from pipeline.tables.build_tables import Tables
from pipeline.tables.definitions import ENDING_WORDS
from pipeline.tables.row import Row

if TYPE_CHECKING:
    from pipeline.pages.plots import RenderedPlot

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


class PageSource(NamedTuple):
    """The sources of the page of one experiment. `root` is the folder of the index; `logs` are by run id."""

    name: str
    folder: Path
    root: Path
    has_index: bool
    tables: Tables
    collected: CollectedOutcomes
    logs: Mapping[str, Path]


class IndexEntry(NamedTuple):
    """One experiment on the index."""

    name: str
    href: str
    is_ingested: bool
    counts: str
    hardware: str
    questions: str
    answers: Sequence[tuple[str, str]]


class Section(NamedTuple):
    """A question with its plots and tables."""

    question: str
    text: str
    figures: "list[RenderedPlot]"
    folded_figures: "list[RenderedPlot]"
    tables: list[DisplayTable]


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
    wanted = build_plots(PlotSource(source.tables, source.collected.outcomes, source.collected.processors))
    if not wanted:
        return [], None
    try:
        from pipeline.pages.plots import render_plot
    except ImportError as error:
        return [], error
    return [render_plot(plot) for plot in wanted], None


def write_plots(folder: Path, pictures: Mapping[str, bytes]) -> None:
    """Write the plots, and remove those of an earlier run. Raises OSError, also if the folder is a link."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link", str(folder))
    if pictures:
        files.make_folder(folder)
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
            name_processors(text, source.collected.processors),
            [figure for figure in figures if figure.plot.question == question and figure.plot.is_main],
            [figure for figure in figures if figure.plot.question == question and not figure.plot.is_main],
            tables[question],
        )
        for question, text in QUESTIONS.items()
    ]
    return [section for section in sections if section.tables or section.figures]


def describe_counts(collected: CollectedOutcomes) -> str:
    """Return the number of points in each state that occurs."""
    coverage = collected.coverage
    counts = {"ok": coverage.ok, "out of memory": coverage.oom, "failed": coverage.failed}
    counts |= {"missing": coverage.missing, "rejected": coverage.rejected}
    stated = ", ".join(f"{number:,} {word}" for word, number in counts.items() if number)
    return f"{pluralize(coverage.expected, 'point')}: {stated}" if coverage.expected else "no points"


def describe_cost(rows: Iterable[Row]) -> list[str]:
    """Return the hours of the attempts by how they ended; what took no time is left out."""
    hours = (
        (row, row["gpu_hours"], "GPU hours") if row["gpu_hours"] else (row, row["process_hours"], "process hours")
        for row in rows
    )
    return [
        f"{format_figure(number)} {unit} ({ENDING_WORDS.get(row['ending'], row['ending'])})"
        for row, number, unit in hours
        if number
    ]


def index_entry(source: PageSource, sections: Sequence[Section]) -> IndexEntry:
    """Return the experiment's entry on the index."""
    records = source.collected.records
    return IndexEntry(
        name=source.name,
        href=address_of(source.folder / REPORT_NAME, source.root),
        is_ingested=any(not record.measured for record in records),
        counts=describe_counts(source.collected),
        hardware=hardware_of(records),
        questions=", ".join(section.question for section in sections),
        answers=[
            (question, " ".join(render_answer(answered, source.collected.processors)))
            for question, claims in answer_questions(source.tables).items()
            if (answered := answered_claims(claims))
        ],
    )


def render_page(source: PageSource, sections: Sequence[Section], has_plots: bool) -> str:
    """Return report.html."""
    home = "../" * len(source.folder.relative_to(source.root).parts) + INDEX_NAME
    return render_template(
        "report.html.j2",
        title=source.name,
        home=home if source.has_index else "",
        answers=[
            (question, render_answer(claims, source.collected.processors), next_command(claims))
            for question, claims in answer_questions(source.tables).items()
        ],
        counts=describe_counts(source.collected),
        sections=sections,
        has_plots=has_plots,
        fates=build_fates(source.collected.outcomes, source.folder, source.logs),
        left_out=source.collected.notes,
        provenance=list_provenance(source.collected.records),
        hardware=hardware_of(source.collected.records),
        training=describe_training([outcome.spec for outcome in source.collected.outcomes]),
        cost=describe_cost(source.tables["cost"]),
    )


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
    return replace_control_characters(value, by=" ") if type(value) is str else value
