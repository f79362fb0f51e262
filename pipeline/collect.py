"""Collect records into the tables of every experiment under a folder.

    python -m pipeline.collect outputs/
    python -m pipeline.collect outputs/ --format json
    python -m pipeline.collect outputs/scaling --only Q2 --format csv --no-write

Prints the answers, then the tables, as Markdown (or one JSON object, or one table as CSV) on stdout. Writes
report.md, report.html with plots/, tables.json and one CSV per table beside the records, and index.html into a folder
of several experiments.
Exit codes: 0 success, also if nobody may write beside the records; 1 under --strict: gaps, or a folder that anyone may
write; 2 the folder cannot be read, or a write failed; 3 no experiment in the folder.
"""

import argparse
import errno
import gc
import math
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pipeline.system import errors, files
from pipeline.system.command_line import build_parser
from pipeline.system.errors import CommandError, import_error_as_command_error, log_line

if TYPE_CHECKING:
    from pipeline.analysis.ring_model import Link
    from pipeline.experiment.folder import Experiment
    from pipeline.experiment.outcomes import CollectedOutcomes
    from pipeline.report.answers import Answers
    from pipeline.report.bandwidth_rows import MeasuredLinks
    from pipeline.report.build_tables import Tables
    from pipeline.report.display_tables import DisplayOptions
    from pipeline.report.html_page import IndexEntry

NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS)  # another user's folder, or a read-only file system
REPORT_PAGE = "report.html"
WORDS = Path("docs") / "words.md"
TABLE_NAMES = (
    *("Q1", "Q2", "Q3", "Q4", "oom", "communication", "bandwidth", "sweep", "transfers", "split", "prediction"),
    *("memory", "cost", "time_to_target", "int8", "int8_histograms"),
)  # the fields of Tables, which --help need not import
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins with one


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("collect", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    formats = "the format on stdout; csv is of one table, which --only names"
    parser.add_argument("--format", choices=("markdown", "csv", "json"), default="markdown", help=formats)
    parser.add_argument("--only", choices=TABLE_NAMES, default="", help="print this table alone")
    parser.add_argument("--columns", choices=("few", "all"), default="few", help="all: wide tables, with every column")
    parser.add_argument("--no-write", action="store_true", help="print, and write no file")
    strict = "exit 1 if a point has no result, or if anyone may write to the folder"
    parser.add_argument("--strict", action="store_true", help=strict)
    parser.add_argument("--link-latency-us", type=float, help="predict for a link with this latency per hop")
    parser.add_argument("--link-gb-s", type=float, help="bandwidth of that link (default: the measured link)")
    target = "test accuracy to reach, as a fraction (default: 0.02 below the baseline's final one)"
    parser.add_argument("--target-accuracy", type=float, metavar="FRACTION", help=target)
    arguments = parser.parse_args()
    if arguments.target_accuracy is not None and not 0 < arguments.target_accuracy <= 1:
        parser.error("--target-accuracy must be above 0 and at most 1; write 88 % as 0.88")
    if arguments.format == "csv" and not arguments.only:
        parser.error("--format csv prints one table; name it with --only")
    return arguments


def read_link_options(arguments: argparse.Namespace) -> "Link | None":
    """Return the given link, or None for the measured link. Raises CommandError if only one option is valid."""
    from pipeline.analysis.ring_model import Link

    latency_us, bandwidth_gb_s = arguments.link_latency_us, arguments.link_gb_s
    if latency_us is None and bandwidth_gb_s is None:
        return None
    if not all(figure is not None and 0 < figure < math.inf for figure in (latency_us, bandwidth_gb_s)):
        raise CommandError(
            "--link-latency-us and --link-gb-s belong together and must be finite and above 0; give both or neither."
        )
    return Link(latency_us / 1e6, bandwidth_gb_s * 1e9)


def main() -> int:
    """Print and write the tables. Return the exit code."""
    arguments = parse_arguments()
    gc.disable()  # all records are kept to the end, so a search for garbage finds none and costs time
    # imported here so that --help does not wait for pandas
    import msgspec

    from pipeline.experiment.folder import find_experiments, warn_of_open_folders
    from pipeline.report.answers import answer_questions
    from pipeline.report.display_tables import DisplayOptions, workers_of
    from pipeline.report.markdown import render_experiment, render_overview

    link = read_link_options(arguments)
    left_out: list[OSError] = []
    found = find_experiments(arguments.folder, left_out.append)
    if not found:
        problem = f"no experiment under {arguments.folder}; run pipeline.submit or pipeline.ingest first."
        raise CommandError(problem, errors.EXIT_NOTHING_FOUND)
    links_by_folder: dict[Path, MeasuredLinks] = {}
    code = errors.EXIT_USAGE if left_out else errors.EXIT_OK
    content_by_name: dict[str, dict[str, Any]] = {}
    answers_by_name: dict[str, Answers] = {}
    reports = []
    pages = Pages(arguments.folder, len(found) > 1)
    if warn_of_open_folders(found.values()) and arguments.strict:
        code = max(code, errors.EXIT_GAPS)
    for name, experiment in found.items():
        try:
            collected, tables = collect_experiment(experiment, link, links_by_folder, arguments.target_accuracy)
        except CommandError as refusal:  # the other experiments still get their tables
            log_line(f"error: {refusal}")
            code = errors.EXIT_USAGE
            continue
        answers_by_name[name] = answer_questions(tables, workers_of(collected))
        content_by_name[name] = {**tables.flat(), "coverage": msgspec.to_builtins(collected.coverage)}
        if arguments.strict and collected.coverage.num_gaps:
            code = max(code, errors.EXIT_GAPS)
        report = render_experiment(name, tables, collected, words=address_of_words(experiment))
        options = display_options(arguments)
        is_own_view = arguments.format == "markdown" and options != DisplayOptions()
        reports.append(render_experiment(name, tables, collected, options) if is_own_view else report)
        if arguments.no_write:
            continue
        try:
            write_files(experiment, report, content_by_name[name], tables.__struct_fields__)
            pages.write(name, experiment, tables, collected, answers_by_name[name])
        except OSError as error:
            log_line(f"{name}: cannot write beside its records ({error.strerror}); its tables are only printed.")
            code = max(code, errors.EXIT_OK if error.errno in NO_WRITING else errors.EXIT_USAGE)
    code = max(code, pages.write_index())
    overview = [render_overview(answers_by_name)] if len(reports) > 1 and not arguments.only else []
    if arguments.format == "json":
        sys.stdout.buffer.write(indented_json({"experiments": select_tables(content_by_name, arguments.only)}))
    elif arguments.format == "csv":
        sys.stdout.buffer.write(one_csv(content_by_name, arguments.only).encode(errors="backslashreplace"))
    else:
        print("\n".join([*overview, *reports]), end="")
    return code


def display_options(arguments: argparse.Namespace) -> "DisplayOptions":
    """Return how to print tables: a terminal narrower than the report gets fewer columns."""
    from pipeline.report.display_tables import MAX_WIDTH, DisplayOptions

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else MAX_WIDTH
    return DisplayOptions(min(columns or MAX_WIDTH, MAX_WIDTH), arguments.only, arguments.columns == "all")


def select_tables(content_by_name: Mapping[str, dict[str, Any]], only: str) -> dict[str, dict[str, Any]]:
    """Return all tables, or only one, by experiment."""
    return {name: {only: content[only]} if only else content for name, content in content_by_name.items()}


def one_csv(content_by_name: Mapping[str, dict[str, Any]], table: str) -> str:
    """Return the rows of one table as CSV, of several experiments with the name of each in front."""
    is_one = len(content_by_name) == 1
    rows = [
        row if is_one else {"experiment": name, **row}
        for name, content in content_by_name.items()
        for row in content[table]
    ]
    return csv_text(rows) if rows else ""


def address_of_words(experiment: "Experiment") -> str:
    """Return the address of docs/words.md from the experiment's report; empty outside the pipeline's own repository."""
    root = Path(__file__).parents[1]
    if not experiment.folder.resolve().is_relative_to(root) or not (root / WORDS).exists():
        return ""
    return quote(os.path.relpath(root / WORDS, experiment.folder.resolve()))


class Pages:
    """Writes report.html of each experiment, and the index at the end. Says once what package is missing."""

    def __init__(self, root: Path, has_index: bool) -> None:
        self.root, self.has_index = root, has_index
        self.entries: list[IndexEntry] = []
        self.problems: set[str] = set()

    def write(
        self,
        name: str,
        experiment: "Experiment",
        tables: "Tables",
        collected: "CollectedOutcomes",
        answers: "Answers",
    ) -> None:
        """Write the page of one experiment. Raises OSError."""
        try:
            from pipeline.report.html_page import PageSource, write_report
        except ImportError as error:
            self.report_missing_package(f"no {REPORT_PAGE}", error)
            return
        from pipeline.submission.read_progress import find_logs

        manifest = experiment.read_manifest()
        logs = find_logs(experiment, manifest) if manifest else {}
        source = PageSource(name, experiment.folder, self.root, self.has_index, tables, collected, logs, answers)
        entry, failed_import = write_report(source)
        self.entries.append(entry)
        if failed_import:
            self.report_missing_package(f"no plots in {REPORT_PAGE}", failed_import)

    def report_missing_package(self, what: str, error: ImportError) -> None:
        """Log what is missing and what to install, once for all experiments: the tables need neither."""
        refusal = import_error_as_command_error(error)
        if refusal is None:
            raise error
        sentence = f"{what}: it {refusal}"
        if sentence not in self.problems:
            log_line(sentence)
        self.problems.add(sentence)

    def write_index(self) -> int:
        """Write the index if several experiments were found. Return the exit code."""
        if not self.has_index or not self.entries:
            return errors.EXIT_OK
        from pipeline.report.html_page import write_index

        try:
            write_index(self.root, self.entries)
        except OSError as error:
            log_line(f"cannot write the index of all experiments into {self.root} ({error.strerror}); it is left out.")
            return errors.EXIT_OK if error.errno in NO_WRITING else errors.EXIT_USAGE
        return errors.EXIT_OK


def collect_experiment(
    experiment: "Experiment",
    link: "Link | None" = None,
    links_by_folder: "dict[Path, MeasuredLinks] | None" = None,
    target_accuracy: float | None = None,
) -> "tuple[CollectedOutcomes, Tables]":
    """Return the outcomes and tables of one experiment. Raises CommandError.

    `links_by_folder` keeps what was read of sibling experiments, for the next call.
    """
    from pipeline.experiment.outcomes import collect_outcomes
    from pipeline.report.bandwidth_rows import is_swept
    from pipeline.report.build_tables import build_tables

    collected = collect_outcomes(experiment)
    expected = [outcome.spec for outcome in collected.outcomes]
    sibling_links: MeasuredLinks = {}
    if any(spec.num_gpus > 1 and spec.is_whole_epoch for spec in expected) and not any(map(is_swept, expected)):
        sibling_links = find_sibling_links(experiment, {} if links_by_folder is None else links_by_folder)
    return collected, build_tables(collected.outcomes, link, sibling_links, target_accuracy)


def find_sibling_links(experiment: "Experiment", links_by_folder: "dict[Path, MeasuredLinks]") -> "MeasuredLinks":
    """Return the fastest link that experiments in the same folder measured on each kind of place.

    Siblings without a manifest, and those that cannot be read, are left out.
    """
    from pipeline.experiment import folder, record_store
    from pipeline.report.bandwidth_rows import is_swept, measured_links

    links: MeasuredLinks = {}
    own = experiment.folder.resolve()
    try:
        siblings = [path for path in sorted(own.parent.iterdir()) if path != own and folder.is_experiment(path)]
    except OSError:  # a folder that may be entered and not listed
        siblings = []
    for path in siblings:
        if path not in links_by_folder:
            sibling = folder.Experiment(path)
            try:
                manifest = sibling.read_manifest()
                swept = {spec.run_id() for spec in manifest.points if is_swept(spec)} if manifest else set()
                found, _ = record_store.load_folder(sibling.records_folder, for_tables=True) if swept else ([], [])
            except (CommandError, OSError):
                found, swept = [], set()
            links_by_folder[path] = measured_links(record for record in found if record.run_id in swept)
        for key, gb_s in links_by_folder[path].items():
            links[key] = max(gb_s, links.get(key, 0.0))
    return links


def indented_json(value: object) -> bytes:
    """Return the value as JSON, one space a level."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def write_files(experiment: "Experiment", report: str, content: dict[str, Any], tables: Iterable[str]) -> None:
    """Write report.md, tables.json with the content, and a CSV for each of the tables that has rows. Raises OSError."""
    texts = {name: csv_text(content[name]) if content.get(name) else "" for name in tables}
    files.replace_file_atomically(experiment.report, report.encode())
    files.replace_file_atomically(experiment.folder / "tables.json", indented_json(content))
    for name, text in texts.items():
        path = experiment.folder / f"{name.lower()}.csv"
        if text:
            files.replace_file_atomically(path, text.encode())
        else:
            path.unlink(missing_ok=True)


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with a header."""
    import pandas

    inert = [{column: inert_cell(value) for column, value in row.items()} for row in rows]
    text: str = pandas.DataFrame(inert, dtype=object).to_csv(index=False, lineterminator="\n")
    return text


def inert_cell(value: Any) -> Any:
    """Return the value of a CSV cell. A quote before a formula makes a spreadsheet show it as text.

    Carriage returns become line feeds: the CSV writer does not quote them, and readers would start a new row.
    """
    if not isinstance(value, str):
        return value
    one_row = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{one_row}" if value.startswith(FORMULA_SIGNS) else one_row


if __name__ == "__main__":
    errors.run_command(main)
