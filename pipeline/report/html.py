"""report.html of an experiment, the index over all experiments, and the plots as files.

The first screen says what limits the experiment, its answers as tiles, its efficiency, and what to try next. A page is
one file: no remote asset, and a content policy that allows its own style sheet and script alone. Its links lead to
places on it, or hold a file.
"""

import base64
import errno
import hashlib
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from importlib import resources as package_files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from pipeline import __version__
from pipeline.figures.comparability import gpu_model
from pipeline.figures.epoch_figures import MAX_DATA_SHARE
from pipeline.figures.intervals import MIN_COVERAGE, min_values
from pipeline.figures.pooling import group_pairs
from pipeline.plan.point_label import (
    OF_GPUS,
    Terms,
    describe_axis,
    describe_number,
    describe_training,
    format_figure,
    in_terms,
    point_labels,
)
from pipeline.records.outcomes import CollectedOutcomes, PointOutcome
from pipeline.report.claims import Tile, is_fit_for_answer
from pipeline.report.collected import CollectedExperiment, csv_text
from pipeline.report.cost import ENDING_WORDS
from pipeline.report.display import MAX_ROWS, ON_PAGE, display_tables, status_of
from pipeline.report.int8 import int8_plots
from pipeline.report.link import bandwidth_plots
from pipeline.report.network import network_plots
from pipeline.report.next_step import LIMIT_WORDS, NEEDLESS, POWER, RULES, has_next_step, with_gains
from pipeline.report.plots import Plot, RenderedPlot, group_series, keep_curves
from pipeline.report.provenance import conditions_of, describe_setting, list_provenance
from pipeline.report.q1 import batch_size_plots
from pipeline.report.q2 import speedup_plots
from pipeline.report.q4 import accuracy_plots, final_accuracy_plots
from pipeline.report.questions import TOPICS, Answer, answers_of, not_asked
from pipeline.report.step_parts import step_plots
from pipeline.report.table import Row, Tables, name_texts
from pipeline.system import files
from pipeline.system.errors import pluralize, replace_control_characters
from pipeline.system.source_digest import DIGEST_AT_START

MAX_TILES = 7
MAX_SUGGESTIONS = 6
MIN_SHARE = 0.5  # of the configurations, from which one limit is the verdict on the experiment
VERDICTS = {rule.limit: rule.verdict for rule in RULES}
EFFICIENCY_SHADES = (
    (0.85, "good", "85 or more"),
    (0.7, "fair", "70 to 85"),
    (0.4, "poor", "40 to 70"),
    (0, "bad", "below 40"),
)
"""From which efficiency on a cell has which shade, and what the key of the table says of it."""
HOLLOW = "○"  # beside a figure that no answer uses


class Verdict(NamedTuple):
    """The cause that limits most configurations: what it is, in how many, and what to do."""

    headline: str
    text: str


class Suggestion(NamedTuple):
    """A change to try against a limit, with the gains that were measured, and for how many configurations."""

    num_configurations: int
    limit: str
    change: str
    command: str


class HeatCell(NamedTuple):
    """An efficiency in per cent with its shade; why there is none, or what to know of it, is its title."""

    text: str
    shade: str = ""
    title: str = ""
    flaws: tuple[str, ...] = ()  # why no answer uses it


EMPTY = HeatCell("")


class HeatMap(NamedTuple):
    """Efficiency on the most GPUs: a row for each series of configurations, a column for each batch size."""

    heading: str
    batch_sizes: Sequence[str]
    rows: Sequence[tuple[str, Sequence[HeatCell]]]
    note: str

    @property
    def is_shaded(self) -> bool:
        """True if a cell has a shade, so that the table needs a key."""
        return any(cell.shade for _, cells in self.rows for cell in cells)


def tiles_of(answers: Sequence[Answer], said: Container[str] = ()) -> list[Tile]:
    """Return at most MAX_TILES tiles, in order: the first of each question goes before the second of another.

    What was not asked has none. A badge that the page has `said` is left out.
    """
    ranked = sorted((rank, place) for place, answer in enumerate(answers) for rank in range(len(answer.tiles)))
    found = [answers[place].tiles[rank] for place, rank in sorted((place, rank) for rank, place in ranked[:MAX_TILES])]
    return [tile._replace(badges=tuple(one for one in tile.badges if one not in said)) for tile in found]


def verdict_of(tables: Tables, terms: Terms) -> Verdict | None:
    """Return the limit of most configurations and its cure; None where no limit has most of them.

    What a script sends without need is said with its cure, and nobody knows if it slows anything.
    """
    timed = [row for row in tables["Q2"] if row["scaling"] == "weak" and row["epoch_time_s"]]
    rows = timed or [row for row in tables["communication"] if row["step_time_s"]]
    limits = Counter(row["limit"] for row in rows if row["limit"])
    limit, count = limits.most_common(1)[0] if limits else ("", 0)
    if not VERDICTS.get(limit) or count <= MIN_SHARE * len(rows):
        return None
    changes = [suggestion.change for suggestion in suggestions_of(tables, terms, limit)[:1]]
    number = f"{count} of {len(rows)} configurations"
    said = [f"It slows {number}.", *(f"Try {change}." for change in changes)]
    if limit == NEEDLESS.limit:
        said = [f"{number}: {change}." for change in changes]
    return Verdict(in_terms(VERDICTS[limit], terms), " ".join(said))


def suggestions_of(tables: Tables, terms: Terms, limit: str = "") -> list[Suggestion]:
    """Return what to try next, the most frequent first, of the rows with that limit or of all that can be changed."""
    rows = [*has_next_step(tables["Q2"]), *has_next_step(tables["communication"])]
    wanted = [row for row in rows if limit in ("", row["limit"]) and row["limit"] != POWER.limit]
    groups = group_pairs(((row["limit"], row["next_step"].plain), row["next_step"]) for row in wanted)
    found = []
    for (cause, plain), steps in groups.items():
        gains = {one: [gain for step in steps if (gain := step.gains[one])] for one in steps[0].gains}
        option = next((one.option for one in gains), "")
        against, words = in_terms(LIMIT_WORDS.get(cause, cause), terms), in_terms(with_gains(gains) or plain, terms)
        found.append(Suggestion(len(steps), against, words, f"--set {option} --merge" if option else ""))
    return sorted(found, key=lambda one: -one.num_configurations)[:MAX_SUGGESTIONS]


def heat_map_of(tables: Tables, terms: Terms) -> HeatMap | None:
    """Return the efficiency of weak scaling at the most GPUs by strategy and batch size; None without two cells.

    A strategy has a row for each value of the axes that tell its configurations apart, as the plot has a line. Of
    several configurations of one cell the most efficient is shown.
    """
    rows = [row for row in tables["Q2"] if row["scaling"] == "weak" and row["num_gpus"] > 1]
    known = [row for row in rows if row["parallel_efficiency"] is not None]
    fit = [row for row in known if is_fit_for_answer(row, "speedup")]
    most = max((row["num_gpus"] for row in fit or known), default=0)
    groups, note = group_series([row for row in rows if row["num_gpus"] == most], "batch_size_per_gpu", ("strategy",))
    cells = {
        label: {
            size: heat_cell(own) for size, own in group_pairs((row["batch_size_per_gpu"], row) for row in group).items()
        }
        for label, group in groups.items()
    }
    sizes = sorted({size for line in cells.values() for size, cell in line.items() if cell != EMPTY})
    lines = [
        (label, [line.get(size, EMPTY) for size in sizes])
        for label, line in cells.items()
        if {*line.values()} != {EMPTY}
    ]
    if sum(len(line) for line in cells.values()) < 2:
        return None
    if flaws := dict.fromkeys(flaw for _, line in lines for cell in line for flaw in cell.flaws):
        note += f" {HOLLOW} Not used in the answers above: {', '.join(flaws)}."
    heading = in_terms(f"Efficiency on {describe_axis('num_gpus', most)} [%]", terms)
    return HeatMap(heading, [f"{size:,}" for size in sizes], lines, note.strip())


def heat_cell(rows: Sequence[Row]) -> HeatCell:
    """Return the cell of some configurations: the best efficiency that can be, or why there is none."""
    known = [row for row in rows if row["parallel_efficiency"] is not None]
    if not known:
        return HeatCell(status_of(rows[0]))
    row = max(known, key=lambda row: (is_fit_for_answer(row, "speedup"), float(row["parallel_efficiency"])))
    efficiency = float(row["parallel_efficiency"])
    if efficiency > 1 and not is_fit_for_answer(row, "speedup"):
        return HeatCell("", "", f"{efficiency:.0%} cannot be: noise, or a slow baseline")
    text = f"{100 * efficiency:.0f}"
    if not is_fit_for_answer(row, "speedup"):
        return HeatCell(f"{text} {HOLLOW}", "", row["note"], tuple(row.flaws_of("speedup")))
    shade = next(shade for least, shade, _ in EFFICIENCY_SHADES if efficiency >= least)
    return HeatCell(text, "" if efficiency > 1 else shade, row["note"] or "")  # above 1 it may be noise


REPORT_NAME = "report.html"
INDEX_NAME = "index.html"
PLOTS_FOLDER = "plots"
HERO_PLOTS = ("q4-batch-size", "q2", "q2-strong", "q3-communication", "q1", "int8")
"""The plots of the first screen: the first one that there is."""

VERSIONS = ("torch", "CUDA", "NCCL", "driver")
GLOSSARY = (
    ("configuration", "One value of each axis of the grid. A run is one measurement of it."),
    ("weak scaling", "Every $GPU keeps its batch size, so N $GPUs train on N times as many samples a step."),
    ("strong scaling", "The global batch size stays the same, so each of N $GPUs gets 1/N of it."),
    ("speed-up", "The time of an epoch on one $GPU over that on N $GPUs, for the same samples."),
    ("efficiency", "Speed-up divided by the number of $GPUs."),
    (
        "exposed communication",
        "The part of communication that computation does not hide: the step less the same step without it.",
    ),
    ("loader-bound", f"A $GPU waits for the DataLoader in more than {100 * MAX_DATA_SHARE:.0f} % of the epoch."),
    ("straggler", "A rank for which the others wait in most steps."),
    (
        "bus bandwidth",
        "The bytes of a collective over its time, scaled as nccl-tests does, so that it compares with the link.",
    ),
    ("MFU", "Model FLOPs utilization: the model's FLOPs a second over the peak of the $GPU."),
    (
        "interval",
        f"Of {min_values()} runs or more it holds the median of all runs with at least {100 * MIN_COVERAGE:.0f} %. "
        "Of fewer it is the range within them, and the next run may lie outside.",
    ),
    ("one run", "The figure is of a single run, so nothing is known of how much runs differ."),
)
MAX_LINK_BYTES = 200_000  # of a CSV file that the page holds
MAX_PAGE_BYTES = 100_000_000  # of a page that an earlier run wrote
PLOT_FILE = re.compile(r"(q[1-4]|int8).*\.(svg|pdf|png)")  # a plot that this or an earlier run wrote


class Pages:
    """Writes report.html of each experiment, and the index at the end."""

    def __init__(
        self,
        root: Path,
        has_index: bool,
        title: str = "",
        author: str = "",
        formats: Sequence[str] = ("svg",),
    ) -> None:
        self.root, self.has_index, self.formats = root, has_index, formats  # of the plots as files
        self.head = {"own_title": title, "author": author}
        self.entries: list[dict[str, Any]] = []
        self.written: dict[str, Path] = {}  # by the name of the experiment

    def write(self, name: str, found: CollectedExperiment, logs: Mapping[str, Path]) -> None:
        """Write the page and the plots of one experiment, unless they are those of equal inputs. Raises OSError.

        `logs` are by run id. Plots take nine tenths of the time of `collect`.
        """
        folder, collected = found.experiment.folder, found.collected
        plots = build_plots(found.tables, collected.terms)
        said = describe_experiment(name, found) | self.head
        said["inputs_digest"] = digest_inputs(name, found, logs, self.head)
        files_of_plots = [f"{plot.name}.{suffix}" for plot in plots for suffix in self.formats]
        if not is_current(folder, files_of_plots, said["inputs_digest"]):
            drawn = write_plots(folder / PLOTS_FOLDER, plots, self.formats)
            hero = next((part for name in HERO_PLOTS for part in drawn if part.plot.name == name), None)
            sections = build_sections(found, said["answers"], [part for part in drawn if part is not hero])
            fates, glossary = list_fates(collected.outcomes, folder, logs), name_texts(GLOSSARY, collected.terms)
            parts = {"sections": sections, "hero": hero, "fates": fates, "glossary": glossary}
            page = render_template("report.html.j2", said, **parts, shades=EFFICIENCY_SHADES)
            files.replace_file_atomically(folder / REPORT_NAME, page.encode())
        self.written[name] = folder / REPORT_NAME
        manifest = found.experiment.read_manifest()
        times = [one.submitted_at for one in manifest.submissions] if manifest else []
        latest = max([*times, *(record.started_at or "" for record in collected.records)], default="")
        self.entries.append(said | {"href": address_of(folder / REPORT_NAME, self.root), "latest": latest})

    @property
    def front(self) -> Path | None:
        """The page to open first: the index, or the page of the only experiment; None if no page was written."""
        return self.root / (INDEX_NAME if self.has_index else REPORT_NAME) if self.entries else None

    def write_index(self) -> None:
        """Write the index if several experiments were found. Raises OSError."""
        if self.has_index and self.entries:
            entries = sorted(self.entries, key=lambda entry: str(entry["latest"]), reverse=True)
            answered = {answer.question for entry in entries for answer in entry["answers"] if answer.is_answered}
            topics = {question: topic for question, topic in TOPICS.items() if question in answered}
            count = pluralize(len(entries), "experiment")
            said = {"title": "Experiments", "count": count, "entries": entries, "topics": topics}
            files.update_file(self.root / INDEX_NAME, render_template("index.html.j2", said).encode())


def digest_inputs(name: str, found: CollectedExperiment, logs: Mapping[str, Path], head: Mapping[str, str]) -> str:
    """Return the SHA-256 of what a page is made of: head, code, templates, tables, outcomes with records, logs."""
    folder = package_files.files("pipeline") / "templates"
    templates = {entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.is_file()}
    outcomes = [(part.status, part.reason, part.record, part.superseded) for part in found.collected.outcomes]
    paths = {run_id: os.fsencode(path) for run_id, path in logs.items()}
    inputs = (name, head, DIGEST_AT_START, templates, found.content, outcomes, found.collected.notes, paths)
    return hashlib.sha256(msgspec.json.encode(inputs)).hexdigest()


def is_current(folder: Path, plots: Iterable[str], inputs_digest: str) -> bool:
    """True if the page, which is written after its plots, was made of these inputs, and every plot's file is there."""
    try:
        page = files.read_bounded(folder / REPORT_NAME, MAX_PAGE_BYTES)
    except files.UnreadableFile:
        return False
    return f'content="{inputs_digest}"'.encode() in page and all(
        (folder / PLOTS_FOLDER / plot).is_file() for plot in plots
    )


def build_plots(tables: Tables, terms: Terms = OF_GPUS) -> list[Plot]:
    """Return every plot for which there are values, in the order of the questions. Those of a new kind belong here."""
    found = (
        *(*batch_size_plots(tables), *speedup_plots(tables), *step_plots(tables)),
        *(*network_plots(tables), *bandwidth_plots(tables)),
        *(*accuracy_plots(tables), *final_accuracy_plots(tables), *int8_plots(tables)),
    )
    return [name_texts(plot, terms) for plot in map(keep_curves, found) if plot.panels]


def write_plots(folder: Path, plots: Sequence[Plot], formats: Sequence[str]) -> list[RenderedPlot]:
    """Write the plots, remove those of an earlier run, and return them. Raises OSError, also if the folder is a link.

    Without plots matplotlib is not imported.
    """
    drawn, written = [], {}
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link", str(folder))
    if plots:
        from pipeline.report.draw import render_files, render_plot

        files.make_folder(folder)
        drawn = [render_plot(plot) for plot in plots]
        found = ((plot.name, render_files(plot, formats)) for plot in plots)
        written = {f"{name}.{suffix}": content for name, own in found for suffix, content in own.items()}
    for name, content in written.items():
        files.replace_file_atomically(folder / name, content)
    for path in folder.glob("*.*"):
        if PLOT_FILE.fullmatch(path.name) and path.name not in written:
            path.unlink()
    return drawn


def build_sections(
    found: CollectedExperiment, asked: Sequence[Answer], drawn: Sequence[RenderedPlot]
) -> list[dict[str, Any]]:
    """Return the questions that were asked and have plots or tables, with them.

    Of timings measured elsewhere, and of an experiment that quantizes, every question with plots or tables is shown.
    """
    options = ON_PAGE._replace(link_of=link_of)
    tables = group_pairs(display_tables(found.tables, found.collected, options))
    figures = group_pairs((rendered.plot.question, rendered) for rendered in drawn)
    answers = {answer.question: answer for answer in asked}
    shows_all = "int8" in answers or not all(record.measured for record in found.collected.records)
    sections = []
    for question in (question for question in TOPICS if question in tables or question in figures):
        answer, own_tables, own_figures = answers.get(question), tables.get(question, []), figures.get(question, [])
        counts = [(len(own_figures), "plot"), (sum(len(table.rows) for table in own_tables), "row")]
        section = {
            "question": question,
            "topic": answer.topic if answer else TOPICS[question],
            "size": ", ".join(pluralize(count, what) for count, what in counts if count),
            "figures": own_figures,
            "tables": own_tables,
            "files": data_links(found, [table.source for table in own_tables]),
        }
        sections += [section] if answer or shows_all else []
    return sections


def facts_of(collected: CollectedOutcomes) -> dict[str, str]:
    """Return the conditions that a reader asks for first, by name."""
    stated = list_provenance(collected.records)
    said = {
        "training": describe_training([outcome.spec for outcome in collected.outcomes]),
        **conditions_of(collected.outcomes),
        **{label: stated.get(label) for label in VERSIONS},
    }
    return {label: value.removeprefix(f"{label} ") for label, value in said.items() if value}  # "input not stated"


def data_links(found: CollectedExperiment, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the name of each table's CSV file and a link that holds it; no link to more than MAX_LINK_BYTES."""
    texts = {f"{name.lower()}.csv": csv_text(found.content[name]).encode() for name in dict.fromkeys(names)}
    links = {name: data_link("text/csv", text) for name, text in texts.items() if len(text) <= MAX_LINK_BYTES}
    return [(name, links.get(name, "")) for name in texts]


def data_link(kind: str, content: bytes) -> str:
    """Return an address that holds the content itself."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def describe_experiment(name: str, found: CollectedExperiment) -> dict[str, Any]:
    """Return what report.html says of an experiment beside its plots, tables and points. The index has a part of it."""
    collected = found.collected
    answers, setting = answers_of(found.tables, collected.terms), describe_setting(collected.records)
    return {
        "title": name,
        "is_ingested": any(not record.measured for record in collected.records),
        "counts": describe_counts(collected),
        "training": describe_training([outcome.spec for outcome in collected.outcomes]),
        "setting": setting,
        "conditions": [*conditions_of(collected.outcomes).values()],
        "answers": [answer for answer in answers if answer.tiles],
        "tiles": tiles_of(answers, ["one run"] if "one run each" in setting else []),
        "verdict": verdict_of(found.tables, collected.terms),
        "suggestions": suggestions_of(found.tables, collected.terms),
        "heat_map": heat_map_of(found.tables, collected.terms),
        "not_asked": not_asked(answers),
        "left_out": collected.notes,
        "provenance": list_provenance(collected.records),
        "facts": facts_of(collected),
        "processor": in_terms("$GPU", collected.terms),
        "version": __version__,
        "cost": describe_cost(found.tables["cost"]),
    }


def describe_counts(collected: CollectedOutcomes) -> str:
    """Return the number of configurations in each state that occurs."""
    coverage = collected.coverage
    counts = {
        **{"ok": coverage.ok, "out of memory": coverage.oom, "failed": coverage.failed},
        **{"missing": coverage.missing, "rejected": coverage.rejected},
    }
    stated = ", ".join(f"{number:,} {word}" for word, number in counts.items() if number)
    number = describe_number([outcome.spec for outcome in collected.outcomes])
    return f"{number}: {stated}" if coverage.expected else "no configurations"


def describe_cost(rows: Iterable[Row]) -> list[str]:
    """Return the hours of the attempts by how they ended; what took no time is left out."""
    found = []
    for row in rows:
        if hours := row["gpu_hours"] or row["process_hours"]:
            unit = "GPU hours" if row["gpu_hours"] else "process hours"
            found.append(f"{format_figure(hours)} {unit} ({ENDING_WORDS.get(row['ending'], row['ending'])})")
    return found


def render_template(name: str, said: Mapping[str, Any], **values: Any) -> str:
    """Return a page from its template: text is escaped, and the content policy allows style and script by digest."""
    import jinja2

    folder = package_files.files("pipeline") / "templates"
    texts = {"style": (folder / "report.css").read_text("utf-8")}
    if name in ("report.html.j2", "compare.html.j2"):
        texts["script"] = (folder / "report.js").read_text("utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda template: (folder / template).read_text("utf-8")),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"data_link": data_link, "pluralize": pluralize, "sha256": sha256_of, "slug": slug_of}
    return environment.get_template(name).render(said, **texts, **values)


def sha256_of(text: str) -> str:
    """Return the SHA-256 of a text as a content policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def slug_of(heading: str) -> str:
    """Return the id of a heading."""
    return "-".join(re.findall(r"\w+", heading.lower()))


def printable(value: Any) -> Any:
    """Return text without control and direction characters: a name could hide what stands beside it."""
    return replace_control_characters(value, by=" ") if type(value) is str else value


def list_fates(outcomes: Sequence[PointOutcome], folder: Path, logs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the fate of at most MAX_ROWS points, those that are not ok first, with the paths of its records and log.

    Paths are in `folder`. A record that a later attempt replaced comes first.
    """
    fates, labels = [], point_labels([outcome.spec for outcome in outcomes])
    for outcome in sorted(outcomes, key=lambda outcome: outcome.status == "ok")[:MAX_ROWS]:
        run_id = outcome.spec.run_id()
        log = logs.get(run_id)
        attempts = [*outcome.superseded, *([outcome.record] if outcome.record else [])]
        fates.append(
            {
                "run_id": run_id,
                "label": labels[run_id],
                "status": outcome.status,
                "reason": outcome.reason,
                "records": [f"records/{record.run_id}.{record.attempt}.json" for record in attempts],
                "log": os.fsencode(log.relative_to(folder)).decode(errors="replace")
                if log and log.is_relative_to(folder)
                else "",
            }
        )
    return fates


def link_of(row: Row) -> str:
    """Return the address on the page of the first run of a row on its GPU model; "" of a row of several points."""
    runs = row.point.outcomes if row.point else []
    own = [run for run in runs if run.record and gpu_model(run.record) == row.axes["gpu"]] or runs
    return f"#{own[0].spec.run_id()}" if own else ""


def address_of(path: Path, folder: Path) -> str:
    """Return the address of a file, relative to a page in the folder. Names need not be UTF-8."""
    return quote(os.fsencode(path.relative_to(folder)))
