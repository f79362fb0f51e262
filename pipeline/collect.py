"""Collect records into the tables of every experiment under a folder.

    python -m pipeline.collect outputs/
    python -m pipeline.collect outputs/ --format json

Prints Markdown (or one JSON object) on stdout, and writes report.md, tables.json and a CSV a table beside the
records. Exit codes: 0 fine, also where nothing may be written beside the records; 1 gaps or a folder that anyone may
write under --strict; 2 the folder cannot be read, or a write failed; 3 no experiment in it.
"""

import argparse
import errno
import gc
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.system.command_line import build_parser
from pipeline.system.errors import (
    EXIT_GAPS,
    EXIT_NOTHING_FOUND,
    EXIT_OK,
    EXIT_USAGE,
    CommandError,
    log_line,
    run_command,
)

NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS)  # another's folder, or one that is mounted to be read

if TYPE_CHECKING:
    from pipeline.analysis.ring_model import Link
    from pipeline.experiment.folder import Experiment
    from pipeline.experiment.outcomes import CollectedOutcomes
    from pipeline.experiment.spec import Spec
    from pipeline.report.build_tables import Tables

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = build_parser("collect", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    parser.add_argument("--format", choices=("markdown", "json"), default="markdown", help="what stdout carries")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a point has no result, or anyone may write")
    parser.add_argument("--link-latency-us", type=float, help="predict for a link of this latency a hop")
    parser.add_argument("--link-gb-s", type=float, help="and this bandwidth (default: the link that was measured)")
    return parser.parse_args()


def read_link_options(arguments: argparse.Namespace) -> "Link | None":
    """The link that predictions are made for; None is the measured one. Raises CommandError for half a link."""
    from pipeline.analysis.ring_model import Link

    latency_us, bandwidth_gb_s = arguments.link_latency_us, arguments.link_gb_s
    if latency_us is None and bandwidth_gb_s is None:
        return None
    if not all(figure is not None and 0 < figure < math.inf for figure in (latency_us, bandwidth_gb_s)):
        raise CommandError(
            "a link is --link-latency-us and --link-gb-s together, both finite and above 0; give both or neither."
        )
    return Link(latency_us / 1e6, bandwidth_gb_s * 1e9)


def main() -> int:
    """Print and write the tables."""
    arguments = parse_arguments()
    gc.disable()  # what is read is held to the end: looking for garbage among 100,000 records finds none
    # after the command line is read: --help need not wait for pandas
    import msgspec

    from pipeline.experiment.folder import find_experiments, warn_of_open_folders
    from pipeline.report.markdown import render_experiment

    link = read_link_options(arguments)
    left_out: list[OSError] = []
    found = find_experiments(arguments.folder, left_out.append)
    if not found:
        raise CommandError(
            f"no experiment under {arguments.folder}; run pipeline.submit or pipeline.ingest first.", EXIT_NOTHING_FOUND
        )
    code, shapes, reports = EXIT_USAGE if left_out else EXIT_OK, {}, []
    if warn_of_open_folders(found.values()) and arguments.strict:
        code = max(code, EXIT_GAPS)
    for name, experiment in found.items():
        try:
            collected, tables = collect_experiment(experiment, link)
        except CommandError as refusal:  # the other experiments are still worth their tables
            log_line(f"error: {refusal}")
            code = EXIT_USAGE
            continue
        report = render_experiment(name, tables, collected)
        shapes[name] = experiment_json(tables, collected)
        reports.append(report)
        if arguments.strict and collected.coverage.num_gaps:
            code = max(code, EXIT_GAPS)
        try:
            write_files(experiment, report, tables, shapes[name])
        except OSError as error:
            log_line(f"{name}: cannot write beside its records ({error.strerror}); its tables are printed alone.")
            code = code if error.errno in NO_WRITING else EXIT_USAGE
    if arguments.format == "json":
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode({"experiments": shapes}), indent=1) + b"\n")
    else:
        print("\n".join(reports), end="")
    return code


def collect_experiment(experiment: "Experiment", link: "Link | None" = None) -> "tuple[CollectedOutcomes, Tables]":
    """The outcomes and the tables of one experiment. Without a manifest the points with a record are expected."""
    from pipeline.experiment import record_store
    from pipeline.experiment.outcomes import resolve_outcomes
    from pipeline.report.build_tables import build_tables

    manifest = experiment.read_manifest()
    try:
        found, rejected = record_store.load_folder(experiment.records_folder, for_tables=True)
    except OSError as error:
        raise CommandError(
            f"cannot read {experiment.records_folder}: {error.strerror}; mend its permissions."
        ) from error
    expected = manifest.points if manifest else sorted({record.spec for record in found}, key=default_point_order)
    collected = resolve_outcomes(expected, found, rejected)
    return collected, build_tables(collected.outcomes, link)


def default_point_order(spec: "Spec") -> tuple[int, str, int, str]:
    """Where a point stands when no grid says: by GPUs, strategy and batch."""
    return spec.num_gpus, spec.strategy, spec.batch_size_per_gpu, spec.run_id()


def experiment_json(tables: "Tables", collected: "CollectedOutcomes") -> dict[str, Any]:
    """One experiment of `--format json`."""
    import msgspec

    return {**msgspec.to_builtins(tables), "coverage": msgspec.to_builtins(collected.coverage)}


def write_files(experiment: "Experiment", report: str, tables: "Tables", shape: dict[str, Any]) -> None:
    """report.md, tables.json and a CSV a table. Raises OSError."""
    import msgspec
    import pandas

    from pipeline.system import files

    files.replace_file_atomically(experiment.report, report.encode())
    files.replace_file_atomically(
        experiment.folder / "tables.json", msgspec.json.format(msgspec.json.encode(shape), indent=1) + b"\n"
    )
    for name in tables.__struct_fields__:
        rows = getattr(tables, name)
        path = experiment.folder / f"{name.lower()}.csv"
        if rows:
            inert = [{column: inert_cell(value) for column, value in row.items()} for row in rows]
            text = pandas.DataFrame(inert, dtype=object).to_csv(index=False, lineterminator="\n")
            files.replace_file_atomically(path, text.encode())
        else:
            path.unlink(missing_ok=True)


def inert_cell(value: Any) -> Any:
    """The value of a CSV cell; text that a spreadsheet would run as a formula is marked as text by a quote.

    A carriage return, which the writer does not quote, would begin a row of its own: it becomes a line break.
    """
    if not isinstance(value, str):
        return value
    return "'" * value.startswith(FORMULA_SIGNS) + value.replace("\r\n", "\n").replace("\r", "\n")


if __name__ == "__main__":
    run_command(main)
