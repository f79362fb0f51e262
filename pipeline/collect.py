"""Collect records into the tables of every experiment under a folder.

    python -m pipeline.collect outputs/
    python -m pipeline.collect outputs/ --format json

Prints Markdown (or one JSON object) on stdout. Writes report.md, tables.json and one CSV per table beside the records.
Exit codes: 0 success, also if nobody may write beside the records; 1 under --strict: gaps, or a folder that anyone may
write; 2 the folder cannot be read, or a write failed; 3 no experiment in the folder.
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

NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS)  # another user's folder, or a read-only file system

if TYPE_CHECKING:
    from pipeline.analysis.ring_model import Link
    from pipeline.experiment.folder import Experiment
    from pipeline.experiment.outcomes import CollectedOutcomes
    from pipeline.experiment.spec import Spec
    from pipeline.report.build_tables import Tables

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins with one


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = build_parser("collect", __doc__)
    parser.add_argument("folder", type=Path, help="an experiment's folder, or one that holds experiments at any depth")
    parser.add_argument("--format", choices=("markdown", "json"), default="markdown", help="the format on stdout")
    parser.add_argument(
        "--strict", action="store_true", help="exit 1 if a point has no result, or if anyone may write to the folder"
    )
    parser.add_argument("--link-latency-us", type=float, help="predict for a link with this latency per hop")
    parser.add_argument("--link-gb-s", type=float, help="bandwidth of that link (default: the measured link)")
    return parser.parse_args()


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
        except CommandError as refusal:  # the other experiments still get their tables
            log_line(f"error: {refusal}")
            code = EXIT_USAGE
            continue
        report = render_experiment(name, tables, collected)
        shapes[name] = experiment_json(tables, collected)
        reports.append(report)
        if arguments.strict and collected.coverage.num_gaps:
            code = max(code, EXIT_GAPS)
        code = max(code, write_beside_records(name, experiment, report, tables, shapes[name]))
    if arguments.format == "json":
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode({"experiments": shapes}), indent=1) + b"\n")
    else:
        print("\n".join(reports), end="")
    return code


def write_beside_records(
    name: str, experiment: "Experiment", report: str, tables: "Tables", shape: dict[str, Any]
) -> int:
    """Write an experiment's files. Return the exit code: a folder that may not be written is no error."""
    try:
        write_files(experiment, report, tables, shape)
    except OSError as error:
        log_line(f"{name}: cannot write beside its records ({error.strerror}); its tables are only printed.")
        return EXIT_OK if error.errno in NO_WRITING else EXIT_USAGE
    return EXIT_OK


def collect_experiment(experiment: "Experiment", link: "Link | None" = None) -> "tuple[CollectedOutcomes, Tables]":
    """Return the outcomes and tables of one experiment. Without a manifest it expects the points with a record."""
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
    """Return the sort key of points without a grid: GPUs, strategy, batch size."""
    return spec.num_gpus, spec.strategy, spec.batch_size_per_gpu, spec.run_id()


def experiment_json(tables: "Tables", collected: "CollectedOutcomes") -> dict[str, Any]:
    """Return one experiment as `--format json` prints it."""
    import msgspec

    return {**tables.flat(), "coverage": msgspec.to_builtins(collected.coverage)}


def write_files(experiment: "Experiment", report: str, tables: "Tables", shape: dict[str, Any]) -> None:
    """Write report.md, tables.json and one CSV per table. Raises OSError."""
    import msgspec
    import pandas

    from pipeline.system import files

    files.replace_file_atomically(experiment.report, report.encode())
    files.replace_file_atomically(
        experiment.folder / "tables.json", msgspec.json.format(msgspec.json.encode(shape), indent=1) + b"\n"
    )
    for name in tables.__struct_fields__:
        rows = shape.get(name)
        path = experiment.folder / f"{name.lower()}.csv"
        if rows:
            inert = [{column: inert_cell(value) for column, value in row.items()} for row in rows]
            text = pandas.DataFrame(inert, dtype=object).to_csv(index=False, lineterminator="\n")
            files.replace_file_atomically(path, text.encode())
        else:
            path.unlink(missing_ok=True)


def inert_cell(value: Any) -> Any:
    """Return the value of a CSV cell. A quote before a formula makes a spreadsheet show it as text.

    Carriage returns become line feeds: the CSV writer does not quote them, and readers would start a new row.
    """
    if not isinstance(value, str):
        return value
    one_row = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{one_row}" if value.startswith(FORMULA_SIGNS) else one_row


if __name__ == "__main__":
    run_command(main)
