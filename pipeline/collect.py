"""Collect records into the tables of every experiment under a folder.

    python -m pipeline.collect outputs/
    python -m pipeline.collect outputs/ --format json
    python -m pipeline.collect outputs/scaling --only Q2 --format csv --no-write

Prints the answers, then the tables, as Markdown (or one JSON object, or one table as CSV) on stdout. Writes
report.md, report.html with plots/, tables.json and one CSV per table beside the records. A folder of several
experiments also gets index.html.
Exit codes: 0 success, also if you may not write beside the records; 1 with --strict: a point has no result, or anyone
may write to a folder; 2 the folder or an experiment cannot be read, or a write failed; 3 no experiment in the folder.
An experiment that cannot be read is left out, and the others get their tables.
"""

import argparse
import contextlib
import errno
import gc
import math
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from pipeline.system import errors
from pipeline.system.command_line import build_parser
from pipeline.system.errors import CommandError, log_line
from pipeline.tables.definitions import TABLES

if TYPE_CHECKING:
    from pipeline.analysis.ring_model import Link
    from pipeline.answers.questions import Answer
    from pipeline.experiment.folder import Experiment
    from pipeline.pages.display_tables import DisplayOptions
    from pipeline.pages.html_page import Pages
    from pipeline.tables.bandwidth_rows import MeasuredLinks
    from pipeline.tables.collect_experiment import CollectedExperiment

NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS)  # another user's folder, or a read-only file system
DEFECT = "a defect of the pipeline stopped its tables or plots"
MAX_ERROR_CHARS = 200  # of such an error's own text
WORDS = Path("docs") / "words.md"
MAX_PREDICTED_GPUS = 1_000_000


class Printed(NamedTuple):
    """One experiment for stdout. `content` holds the rows of its tables and the coverage, for JSON and CSV."""

    name: str
    title: str
    answers: "list[Answer]"
    content: dict[str, Any]
    report: str


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("collect", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    formats = "the format on stdout; csv prints one table, which --only names"
    parser.add_argument("--format", choices=("markdown", "csv", "json"), default="markdown", help=formats)
    parser.add_argument("--only", choices=[*TABLES], default="", help="print this table alone")
    parser.add_argument("--columns", choices=("few", "all"), default="few", help="all: wide tables, with every column")
    parser.add_argument("--no-write", action="store_true", help="only print; write no file")
    strict = "exit 1 if a point has no result, or if anyone may write to the folder"
    parser.add_argument("--strict", action="store_true", help=strict)
    parser.add_argument("--link-latency-us", type=float, help="predict for a link with this latency per hop")
    parser.add_argument("--link-gb-s", type=float, help="bandwidth of that link (default: the measured link)")
    predicting = "predict the step up to this many GPUs (default: twice the most that were measured)"
    parser.add_argument("--predict-to", type=parse_num_gpus, metavar="N", help=predicting)
    target = "test accuracy to reach, as a fraction (default: the baseline's final test accuracy - 0.02)"
    parser.add_argument("--target-accuracy", type=parse_fraction, metavar="FRACTION", help=target)
    arguments = parser.parse_args()
    if arguments.format == "csv" and not arguments.only:
        parser.error("--format csv prints one table; name it with --only")
    return arguments


def parse_fraction(text: str) -> float:
    """Return a number above 0 and at most 1. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be a number above 0 and at most 1; write 88 % as 0.88")
    return value


def parse_num_gpus(text: str) -> int:
    """Return a number of GPUs from 2 to MAX_PREDICTED_GPUS. Raises ArgumentTypeError."""
    if not text.isdecimal() or not 2 <= int(text[:20]) <= MAX_PREDICTED_GPUS:
        raise argparse.ArgumentTypeError(f"must be a number of GPUs from 2 to {MAX_PREDICTED_GPUS:,}, such as 1024")
    return int(text)


def read_link_options(arguments: argparse.Namespace) -> "Link | None":
    """Return the link of the two options; None without them. Raises CommandError for one alone, or for a bad value."""
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
    gc.disable()  # records form no reference cycles, so the garbage collector would find nothing and cost time
    # imported after the command line is parsed, so that --help answers at once
    from pipeline.answers.questions import answers_of
    from pipeline.pages.display_tables import DisplayOptions
    from pipeline.pages.html_page import Pages
    from pipeline.pages.markdown import name_source, render_experiment
    from pipeline.tables.collect_experiment import collect_experiment

    link, options = read_link_options(arguments), display_options(arguments)
    experiments, code = find_all(arguments)
    codes = [code]
    pages = Pages(arguments.folder, len(experiments) > 1)
    links_by_folder: dict[Path, MeasuredLinks] = {}
    printed: list[Printed] = []
    for name, experiment in experiments.items():
        with go_on_after_error(name, codes):
            found = collect_experiment(
                experiment, link, links_by_folder, arguments.target_accuracy, arguments.predict_to
            )
            if arguments.strict and found.collected.coverage.num_gaps:
                codes.append(errors.EXIT_GAPS)
            words = address_of_words(experiment)
            report = render_experiment(name, found.tables, found.collected, words=words)
            is_custom_view = arguments.format == "markdown" and options != DisplayOptions()
            shown = render_experiment(name, found.tables, found.collected, options, words) if is_custom_view else report
            title = name_source(name, found.collected)
            answers = answers_of(found.tables, found.collected.processors)
            printed.append(Printed(name, title, answers, found.content, shown))
            if not arguments.no_write:
                codes.append(write_files(name, found, report, pages))
    codes.append(write_index(pages))
    if pages.front and sys.stderr.isatty():
        log_line(f"Report: {pages.front}")
    print_tables(printed, arguments)
    return max(codes)


@contextlib.contextmanager
def go_on_after_error(name: str, codes: list[int]) -> Iterator[None]:
    """Log an error of one experiment and append its exit code: the other experiments still get their tables."""
    try:
        yield
    except CommandError as refusal:
        log_line(f"error: {refusal}")
        codes.append(refusal.code)
    except OSError as error:
        log_line(f"error: {name}: {errors.describe_os_error(error)}; it is left out.")
        codes.append(errors.EXIT_USAGE)
    except ImportError:  # a package that is missing here is missing for every experiment
        raise
    except Exception as error:
        # Records come from others: one that passes every check may still break a figure or a plot. That is a defect of
        # the pipeline, which must not cost the other experiments their tables. The sentence names its place, the exit
        # code is not 0, and no test passes with this sentence on stderr (see run_command in conftest.py).
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}"
        said = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        log_line(f"error: {name}: {DEFECT} ({where}: {said}); report it with the records.")
        codes.append(errors.EXIT_USAGE)


def find_all(arguments: argparse.Namespace) -> "tuple[dict[str, Experiment], int]":
    """Return the experiments by name, and the exit code so far. Raises CommandError if there is none."""
    from pipeline.experiment.folder import find_experiments, warn_of_open_folders

    left_out: list[OSError] = []
    found = find_experiments(arguments.folder, left_out.append)
    if not found:
        problem = f"no experiment under {arguments.folder}; run pipeline.submit or pipeline.ingest first."
        raise CommandError(problem, errors.EXIT_NOTHING_FOUND)
    is_open = warn_of_open_folders(found.values()) and arguments.strict
    return found, errors.EXIT_USAGE if left_out else errors.EXIT_GAPS if is_open else errors.EXIT_OK


def display_options(arguments: argparse.Namespace) -> "DisplayOptions":
    """Return how to print tables: a terminal narrower than the report gets fewer columns."""
    from pipeline.pages.display_tables import MAX_WIDTH, DisplayOptions

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else MAX_WIDTH
    return DisplayOptions(min(columns or MAX_WIDTH, MAX_WIDTH), arguments.only, arguments.columns == "all")


def address_of_words(experiment: "Experiment") -> str:
    """Return the relative link from the experiment's report to docs/words.md; "" outside the pipeline's repository."""
    root = Path(__file__).parents[1]
    if not experiment.folder.resolve().is_relative_to(root) or not (root / WORDS).exists():
        return ""
    return quote(os.path.relpath(root / WORDS, experiment.folder.resolve()))


def write_files(name: str, found: "CollectedExperiment", report: str, pages: "Pages") -> int:
    """Write the report, the tables and the page beside the records. Return the exit code."""
    from pipeline.submission.read_progress import find_logs
    from pipeline.tables.table_files import write_tables

    try:
        write_tables(found, report)
        manifest = found.experiment.read_manifest()
        pages.write(name, found, find_logs(found.experiment, manifest) if manifest else {})
    except OSError as error:
        log_line(f"{name}: cannot write beside its records ({error.strerror}); its tables are only printed.")
        return exit_code_of(error)
    return errors.EXIT_OK


def write_index(pages: "Pages") -> int:
    """Write the index of several experiments. Return the exit code."""
    try:
        pages.write_index()
    except OSError as error:
        log_line(f"cannot write the index of all experiments into {pages.root} ({error.strerror}); it is left out.")
        return exit_code_of(error)
    return errors.EXIT_OK


def exit_code_of(error: OSError) -> int:
    """Return the exit code after a write that failed: 0 if this user may not write there, which is no failure."""
    return errors.EXIT_OK if error.errno in NO_WRITING else errors.EXIT_USAGE


def print_tables(printed: Sequence[Printed], arguments: argparse.Namespace) -> None:
    """Print the tables of all experiments, or the one that `--only` names."""
    from pipeline.pages.markdown import render_overview
    from pipeline.tables.table_files import indented_json, one_csv

    only = arguments.only
    if arguments.format == "json":
        shown = {part.name: {only: part.content.get(only, [])} if only else part.content for part in printed}
        sys.stdout.buffer.write(indented_json({"experiments": shown}))
    elif arguments.format == "csv":
        text = one_csv({part.name: part.content.get(only, []) for part in printed})
        sys.stdout.buffer.write(text.encode(errors="backslashreplace"))
    else:
        reports = [part.report for part in printed]
        if len(printed) > 1 and not only:
            reports.insert(0, render_overview({part.title: part.answers for part in printed}))
        errors.print_text("\n".join(reports), end="")


if __name__ == "__main__":
    errors.run_command(main)
