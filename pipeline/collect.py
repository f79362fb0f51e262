"""Collect records into the tables of every experiment under a folder.

    python -m pipeline.collect
    python -m pipeline.collect outputs/
    python -m pipeline.collect outputs/scaling --full
    python -m pipeline.collect outputs/ --format json
    python -m pipeline.collect outputs/scaling --only Q2 --format csv --no-write

Without a folder it takes your newest experiment below outputs/.
Prints the answers and main tables of one experiment; of several a table for each question with a line an experiment.
--full prints every table in Markdown; other formats are one JSON object, one table as CSV, or the tables of the page in
LaTeX (booktabs). Writes report.md, report.html with plots/, tables.json and one CSV per table beside the records. A
folder of several experiments also gets index.html.
Exit codes: 0 success, also if you may not write beside the records; 1 with --strict: a configuration has no result, no
manifest says what is missing, or anyone may write to a folder; 2 the folder or an experiment cannot be read, or a write
failed; 3 no experiment in it.
An experiment that cannot be read is left out, and the others get their tables.
"""

import argparse
import contextlib
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from pipeline.figures.formulas import Link
from pipeline.records.folder import FOLDER_HELP, Experiment, folder_or_newest, require_experiments, warn_of_open_folders
from pipeline.report import terminal
from pipeline.report.collected import CollectedExperiment, collect_experiment, indented_json, one_csv, write_tables
from pipeline.report.display import MAX_WIDTH, ON_PAGE, DisplayOptions, display_tables
from pipeline.report.html import Pages
from pipeline.report.markdown import render_experiment, render_latex
from pipeline.report.questions import TABLES, answers_of
from pipeline.report.terminal import Summary, summarize
from pipeline.report.time_to_target import Targets
from pipeline.submission.read_progress import find_logs
from pipeline.system import errors
from pipeline.system.command_line import ABOVE_ZERO, build_parser, number
from pipeline.system.errors import CommandError, log_line

DEFECT = "a defect of the pipeline stopped its tables or plots"
MAX_ERROR_CHARS = 200  # of such an error's own text
WORDS = Path("docs") / "words.md"
PLOT_FORMATS = {"svg": ("svg",), "all": ("svg", "pdf", "png")}
MAX_PREDICTED_GPUS = 1_000_000
MAX_PEAK_TFLOPS = 1_000_000  # a number in FLOP/s is larger
LINK_FIGURE = number("finite and above 0", ABOVE_ZERO, sys.float_info.max, float)
FRACTION = number("a number above 0 and at most 1; write 88 % as 0.88", ABOVE_ZERO, 1, float)
PEAK = number(f"above 0 and at most {MAX_PEAK_TFLOPS:,}; 494 is 494 TFLOP/s", ABOVE_ZERO, MAX_PEAK_TFLOPS, float)
PREDICTED_GPUS = number(f"a number of GPUs from 2 to {MAX_PREDICTED_GPUS:,}, such as 1024", 2, MAX_PREDICTED_GPUS)


class Printed(NamedTuple):
    """One experiment for stdout. `content` holds the rows of its tables and the coverage, for JSON and CSV."""

    name: str
    content: dict[str, Any]
    text: str
    summary: Summary


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = build_parser("collect", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", help=FOLDER_HELP)
    formats = "the format on stdout; csv prints one table, which --only names; latex needs booktabs"
    parser.add_argument("--format", choices=("markdown", "csv", "json", "latex"), default="markdown", help=formats)
    parser.add_argument("--only", choices=[*TABLES], type=parse_table, default="", help="print this table alone")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--full", action="store_true", help="print every table, as report.md has them")
    amount.add_argument("--brief", action="store_true", help="print few lines: short answers, one table")
    parser.add_argument("--no-write", action="store_true", help="only print; write no file")
    parser.add_argument("--title", default="", help="heading of the page (default: what was measured)")
    parser.add_argument("--author", default="", help="who stands below the heading of the page")
    also = "all: the folder plots/ has each plot as PDF and PNG too, which takes twice as long"
    parser.add_argument("--plots", choices=[*PLOT_FORMATS], default="svg", help=also)
    strict = "exit 1 if a configuration has no result or that is unknown, or if anyone may write to the folder"
    parser.add_argument("--strict", action="store_true", help=strict)
    parser.add_argument("--link-latency-us", type=LINK_FIGURE, help="predict for a link with this latency per hop")
    parser.add_argument("--link-gb-s", type=LINK_FIGURE, help="bandwidth of that link (default: the measured link)")
    predicting = "predict the step up to this many GPUs (default: twice the most that were measured)"
    parser.add_argument("--predict-to", type=PREDICTED_GPUS, metavar="N", help=predicting)
    target = "test accuracy to reach, as a fraction (default: the baseline's final test accuracy - 0.02)"
    parser.add_argument("--target-accuracy", type=FRACTION, metavar="FRACTION", help=target)
    merit = "value to reach of an own model's figure of merit (default: 2 %% worse than the baseline's)"
    parser.add_argument("--target-merit", type=float, metavar="NUMBER", help=merit)
    peak = "peak of one GPU in the precision that computes, for MFU (default: the data sheet's, if it is known)"
    parser.add_argument("--peak-tflops", type=PEAK, metavar="TFLOP/S", help=peak)
    arguments = parser.parse_args(words)
    if arguments.format == "csv" and not arguments.only:
        parser.error("--format csv prints one table; name it with --only")
    return arguments


def parse_table(text: str) -> str:
    """Return the name of the table in the case that it has: q2 is Q2."""
    return next((name for name in TABLES if name.lower() == text.lower()), text)


def read_link_options(arguments: argparse.Namespace) -> Link | None:
    """Return the link of the two options; None without them. Raises CommandError for one alone."""
    latency_us, bandwidth_gb_s = arguments.link_latency_us, arguments.link_gb_s
    if latency_us is None and bandwidth_gb_s is None:
        return None
    if latency_us is None or bandwidth_gb_s is None:
        raise CommandError("--link-latency-us and --link-gb-s belong together; give both or neither.")
    return Link(latency_us / 1e6, bandwidth_gb_s * 1e9)


def main(words: Sequence[str] | None = None) -> int:
    """Collect what the words of a command line ask for; without them those of this process."""
    arguments = parse_arguments(words)
    if not arguments.no_write:
        errors.require_packages("jinja2", "matplotlib")
    arguments.folder = folder_or_newest(arguments.folder)
    link, options = read_link_options(arguments), display_options(arguments)
    targets = Targets(arguments.target_accuracy, arguments.target_merit)
    codes = [errors.EXIT_OK]
    experiments = find_all(arguments, codes)
    if arguments.title and len(experiments) > 1:
        raise CommandError(f"--title is of one experiment, and {len(experiments)} were found; name the folder of one.")
    pages = Pages(
        arguments.folder, len(experiments) > 1, arguments.title, arguments.author, PLOT_FORMATS[arguments.plots]
    )
    printed: list[Printed] = []
    for name, experiment in experiments.items():
        with go_on_after_defect(name, codes):
            found = collect_experiment(experiment, link, targets, arguments.predict_to, arguments.peak_tflops)
            if arguments.strict and found.collected.coverage.num_gaps:
                codes.append(errors.EXIT_GAPS)
            words = address_of_words(experiment)
            report = render_experiment(name, found.tables, found.collected, words=words)
            if not arguments.no_write:
                write_files(name, found, report, pages, codes)
            answers = answers_of(found.tables, found.collected.terms)
            page = pages.written.get(name)
            summary = summarize(name, found, answers, page)
            if arguments.format == "latex":
                shown = [table for _, table in display_tables(found.tables, found.collected, options)]
                text = render_latex(name, shown)
            elif arguments.format != "markdown" or (len(experiments) > 1 and not has_tables(arguments)):
                text = ""
            elif has_tables(arguments):
                text = render_experiment(name, found.tables, found.collected, options, words)
            else:
                render = terminal.render_brief if arguments.brief else terminal.render_experiment
                text = render(name, found, answers, page, options.max_width)
            printed.append(Printed(name, found.content, text, summary))
    with errors.go_on_unwritten(
        f"cannot write the index of all experiments into {pages.root}", "it is left out", codes
    ):
        pages.write_index()
    print_tables(printed, arguments, pages.front, options.max_width)
    return max(codes)


@contextlib.contextmanager
def go_on_after_defect(name: str, codes: list[int]) -> Iterator[None]:
    """Log any error of one experiment and append its exit code: the other experiments still get their tables.

    Records come from others: one that passes every check may still break a figure or a plot. That is a defect of the
    pipeline. The sentence names its place, the exit code is not 0, and no test passes with this sentence on stderr (see
    run_command in conftest.py).
    """
    with errors.go_on_after_error(name, codes):
        try:
            yield
        except (CommandError, OSError, ImportError):  # a package that is missing here is missing for all experiments
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}"
            said = " ".join(str(error).split())[:MAX_ERROR_CHARS]
            log_line(f"error: {name}: {DEFECT} ({where}: {said}); report it with the records.")
            codes.append(errors.EXIT_USAGE)


def has_tables(arguments: argparse.Namespace) -> bool:
    """True if whole tables are asked for."""
    return bool(arguments.full or arguments.only)


def find_all(arguments: argparse.Namespace, codes: list[int]) -> dict[str, Experiment]:
    """Return the experiments by name, and append exit codes. Raises CommandError if there is none."""
    found = require_experiments(arguments.folder, lambda _: codes.append(errors.EXIT_USAGE))
    if warn_of_open_folders(found.values()) and arguments.strict:
        codes.append(errors.EXIT_GAPS)
    for name, experiment in found.items() if arguments.strict else ():
        if not experiment.manifest_path.exists():
            log_line(f"error: without manifest.json nobody knows what {name} lacks; put it beside records/.")
            codes.append(errors.EXIT_GAPS)
    return found


def display_options(arguments: argparse.Namespace) -> DisplayOptions:
    """Return how to print tables: LaTeX as the page has them; a narrow terminal gets fewer columns than the report."""
    if arguments.format == "latex":
        return ON_PAGE._replace(only=arguments.only)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else MAX_WIDTH
    return DisplayOptions(min(columns, MAX_WIDTH), arguments.only)


def address_of_words(experiment: Experiment) -> str:
    """Return the relative link from the experiment's report to docs/words.md; "" outside the pipeline's repository."""
    root = Path(__file__).parents[1]
    if not experiment.folder.resolve().is_relative_to(root) or not (root / WORDS).exists():
        return ""
    return quote(os.path.relpath(root / WORDS, experiment.folder.resolve()))


def write_files(name: str, found: CollectedExperiment, report: str, pages: Pages, codes: list[int]) -> None:
    with errors.go_on_unwritten(f"{name}: cannot write beside its records", "its tables are only printed", codes):
        write_tables(found, report)
        manifest = found.experiment.read_manifest()
        pages.write(name, found, find_logs(found.experiment, manifest) if manifest else {})


def print_tables(printed: Sequence[Printed], arguments: argparse.Namespace, front: Path | None, width: int) -> None:
    only = arguments.only
    if arguments.format == "json":
        shown = {part.name: {only: part.content.get(only, [])} if only else part.content for part in printed}
        sys.stdout.buffer.write(indented_json({"experiments": shown}))
    elif arguments.format == "csv":
        text = one_csv({part.name: part.content.get(only, []) for part in printed})
        sys.stdout.buffer.write(text.encode(errors="backslashreplace"))
    elif printed:
        texts = [part.text for part in printed if part.text]
        overview = terminal.render_overview([part.summary for part in printed], front, width)
        errors.print_text("\n".join(texts) if texts else overview, end="")


if __name__ == "__main__":
    errors.run_command(main)
