"""Convert timings from elsewhere into records. Tables mark such records as not measured here.

    python -m pipeline.ingest FILE.csv --outputs outputs/NAME --gpu "NVIDIA A40"

`--help` lists the columns. Rows that differ only in epoch become one record. Ingesting the same file again changes
nothing.
Exit codes: 0 success, 2 the file or the folder is wrong.
"""

import argparse
import csv
import hashlib
import io
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from pipeline.experiment import record_store, spec
from pipeline.experiment.folder import Experiment, displayable_name, find_experiments
from pipeline.experiment.manifest import add_points
from pipeline.experiment.measurement import Epoch, Measurement, RankEpoch, UnitFraction
from pipeline.experiment.record import Environment, Failure, Gpu, Record
from pipeline.runner.launch_options import positive_integer
from pipeline.system import errors
from pipeline.system.command_line import build_parser
from pipeline.system.errors import CommandError, pluralize, replace_control_characters
from pipeline.system.files import UnreadableFile, read_bounded

MAX_CSV_BYTES = 16_000_000
COLUMNS_HELP = """columns of the file, in any order; an empty cell means not measured:
  strategy            single, dp or ddp, in lower or upper case
  num_gpus            GPUs in total
  batch_size_per_gpu  samples per GPU and step
  epoch_time_s        seconds of the epoch; empty if the point ran out of memory
optional columns:
  status              ok or oom, in lower or upper case (without the column: ok)
  epoch               number from 1 (empty, or without the column: 2, the first epoch after the warm-up)
  compute_time_s      seconds of the epoch without waiting for data
  loss                mean training loss of the epoch
  accuracy            training accuracy, as a fraction (0.509) or with a percent sign (50.9%)
  num_nodes, repeat   numbers (without the column: 1 node, repeat 0)
  precision           fp32, tf32, bf16 or fp16"""
MAX_COLUMN_CHARS = 40  # of a name that a message quotes
POINT_COLUMNS = ("strategy", "num_nodes", "num_gpus", "batch_size_per_gpu", "precision", "repeat")
CASE_INSENSITIVE_COLUMNS = ("strategy", "status", "precision")
REFUSED_CELLS = ("nan", "inf", "-inf", "+inf", "infinity", "-infinity", "null", "none")
NOT_A_NUMBER = "is not a number; leave the cell empty if it was not measured."
BYTES_PER_PARAMETER = 4  # gradients in fp32, as DistributedDataParallel sends them

WHOLE, SECONDS = "a whole number from 1 on", "seconds above 0"
WANTED = {
    **dict.fromkeys(("num_gpus", "batch_size_per_gpu", "num_nodes", "epoch"), WHOLE),
    **dict.fromkeys(("epoch_time_s", "compute_time_s"), SECONDS),
    "strategy": "single, dp or ddp",
    "loss": "a number",
    "accuracy": "a fraction from 0 to 1, or a percentage",
    "status": "ok or oom",
    "repeat": "a whole number from 0 on",
    "precision": "fp32, tf32, bf16 or fp16",
}
"""What a cell of a column holds."""

EpochNumber = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
PositiveSeconds = Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)]


class CsvRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the file. The header must name each column that has no default here. COLUMNS_HELP explains them all."""

    strategy: spec.Strategy
    num_gpus: spec.PositiveInt
    batch_size_per_gpu: spec.PositiveInt
    epoch_time_s: PositiveSeconds | None
    epoch: EpochNumber = spec.FIRST_TIMED_EPOCH
    compute_time_s: PositiveSeconds | None = None
    loss: float | None = None
    accuracy: UnitFraction | None = None
    status: Literal["ok", "oom"] = "ok"
    num_nodes: spec.PositiveInt = 1
    repeat: spec.NonNegativeInt = 0
    precision: spec.Precision | None = None


CSV_COLUMNS = {field.name: field for field in msgspec.structs.fields(CsvRow)}


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("ingest", __doc__)
    parser.epilog, parser.formatter_class = COLUMNS_HELP, argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="a CSV file with the columns below")
    parser.add_argument("--outputs", type=Path, required=True, help="the experiment's folder, such as outputs/a40-ddp")
    parser.add_argument("--gpu", help="the GPU's name (without it, tables show 'not stated')")
    samples = "samples an epoch (without it: no images/s, steps and updates)"
    parser.add_argument("--num-samples", type=positive_integer, help=samples)
    parameters = "trained parameters (without it: no bytes and no bandwidth)"
    parser.add_argument("--num-parameters", type=positive_integer, help=parameters)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        raw = read_bounded(arguments.file, MAX_CSV_BYTES, follow_links=True)
    except UnreadableFile as error:
        raise CommandError(f"{arguments.file} {error}; give a CSV file.") from error
    points = group_rows(read_rows(raw, arguments.file.name))
    gpus = (Gpu(name=arguments.gpu),) if arguments.gpu else ()
    environment = Environment(gpus=gpus, source=displayable_name(arguments.file.name))
    sizes = (arguments.num_samples, arguments.num_parameters)
    inputs = repr((raw, arguments.gpu, *sizes)).encode(errors="surrogateescape")  # all that determines the records
    launch_id = f"ingest-{hashlib.sha256(inputs).hexdigest()[:16]}"
    records = [build_ingested_record(rows, *sizes, launch_id, environment) for rows in points]
    num_new = publish_all(records, Experiment(arguments.outputs))
    new = errors.pluralize(num_new, "record")
    errors.log_line(f"{new} new, {len(records) - num_new} known, in {arguments.outputs}.")
    return errors.EXIT_OK


def read_rows(raw: bytes, name: str) -> list[CsvRow]:
    """Return all rows, strictly typed. Raises CommandError with the line and the column."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CommandError(f"{name} is not UTF-8 text; save it as CSV in UTF-8.") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [column.strip() for column in next(reader, [])]
        check_header(header, name)
        rows = [read_row(header, cells, f"{name} line {reader.line_num}") for cells in reader if cells]
    except csv.Error as error:
        raise CommandError(f"{name} line {reader.line_num} is not CSV: {error}.") from error
    if not rows:
        raise CommandError(f"{name} has no rows below its header; give at least one point.")
    return rows


def check_header(header: list[str], name: str) -> None:
    missing = [column for column, field in CSV_COLUMNS.items() if field.required and column not in header]
    counts = Counter(header)
    unknown = [column for column in counts if column not in CSV_COLUMNS]
    twice = sorted(column for column, count in counts.items() if count > 1)
    for problem, columns in (("lacks", missing), ("has the unknown", unknown), ("repeats", twice)):
        if columns:
            listed = errors.shorten_list([column[:MAX_COLUMN_CHARS] for column in columns], 5)
            raise CommandError(f"the header of {name} {problem} {listed}; the columns are {', '.join(CSV_COLUMNS)}.")


def read_row(header: list[str], cells: list[str], where: str) -> CsvRow:
    """Return one row. An empty cell becomes None or the column's default, but a cell of `status` must not be empty.

    Raises CommandError.
    """
    if len(cells) != len(header):
        problem = f"{len(cells)} cells for {len(header)} columns"
        raise CommandError(f"{where} has {problem}; leave a cell empty if its value is unknown.")
    values: dict[str, str | None] = {}
    for column, cell in zip(header, (cell.strip() for cell in cells), strict=True):
        if cell.lower() in REFUSED_CELLS:
            raise CommandError(f"{where}: {column}={cell!r} {NOT_A_NUMBER}")
        if column in CASE_INSENSITIVE_COLUMNS:
            cell = cell.lower()
        if column == "accuracy" and cell:
            cell = read_fraction(cell, where)
        if cell or CSV_COLUMNS[column].required or column == "status":
            values[column] = cell or None
    try:
        row = msgspec.convert(values, CsvRow, strict=False)
    except msgspec.ValidationError as error:
        column = str(error).rpartition("`$.")[2].removesuffix("`")
        cell = (values[column] or "")[:MAX_COLUMN_CHARS]
        raise CommandError(f"{where}: {column}={cell!r} must be {WANTED[column]}.") from error
    check_row(row, where)
    return row


def read_fraction(cell: str, where: str) -> str:
    """Return an accuracy as a fraction: `50.9%` is 0.509. Raises CommandError for a number above 1 without a `%`."""
    number = cell.removesuffix("%").strip()
    try:
        value = float(number)
    except ValueError:
        return cell  # read_row then refuses it, because it is not a number
    if number != cell:
        return repr(value / 100)
    if 1 < value <= 100:
        cure = f"write a fraction ({value / 100:g}) or add the percent sign ({cell}%)"
        raise CommandError(f"{where}: accuracy={cell} is above 1; {cure}.")
    return cell


def check_row(row: CsvRow, where: str) -> None:
    """Raise CommandError for a row that contradicts itself."""
    if row.loss is not None and not math.isfinite(row.loss):
        raise CommandError(f"{where}: loss={row.loss} {NOT_A_NUMBER}")
    if row.status == "oom" and (row.epoch_time_s or row.compute_time_s or row.loss is not None):
        raise CommandError(f"{where} has status oom and a measurement; empty the measured cells, or write status ok.")
    if row.compute_time_s and row.epoch_time_s and row.compute_time_s > row.epoch_time_s:
        raise CommandError(f"{where}: compute_time_s is longer than epoch_time_s, which includes it; correct the row.")


def group_rows(rows: Iterable[CsvRow]) -> list[list[CsvRow]]:
    """Return the rows of each point, sorted by epoch.

    Raises CommandError if a point has two rows for one epoch, or both a row with ok and a row with oom.
    """
    points: dict[tuple[Any, ...], list[CsvRow]] = {}
    for row in rows:
        points.setdefault(operator.attrgetter(*POINT_COLUMNS)(row), []).append(row)
    for group in points.values():
        where = f"{group[0].strategy} on {group[0].num_gpus}, batch_size_per_gpu {group[0].batch_size_per_gpu}"
        if len({row.status for row in group}) > 1:
            raise CommandError(f"{where} is both ok and oom; remove the wrong rows.")
        if len({row.epoch for row in group}) < len(group):
            cure = "remove one, or number the repeats in a column `repeat`"
            raise CommandError(f"{where} has two rows for one epoch; {cure}.")
        group.sort(key=lambda row: row.epoch)
    return list(points.values())


def build_ingested_record(
    rows: list[CsvRow],
    stated_samples: int | None,
    num_parameters: int | None,
    launch_id: str,
    environment: Environment,
) -> Record:
    """Return the record of one point. What neither the file nor an option states is None. Raises CommandError.

    Only the samples of the spec have a default, because run ids do not change: no figure uses it.
    """
    first = rows[0]
    num_samples = spec.CIFAR10_SAMPLES if stated_samples is None else stated_samples
    share = math.ceil(num_samples / max(1, first.num_gpus))
    if first.batch_size_per_gpu > share:
        raise CommandError(
            f"{first.strategy} on {pluralize(first.num_gpus, 'GPU')} states batch_size_per_gpu "
            f"{first.batch_size_per_gpu:,}, but a GPU has {share:,} of the {num_samples:,} samples"
            f"{'' if stated_samples else ' of the default'}, so the batch is never full; leave the row out, or give "
            "--num-samples."
        )
    try:
        point = spec.Spec(
            **{column: getattr(first, column) for column in POINT_COLUMNS},
            num_samples=num_samples,
            epochs=max(spec.FIRST_TIMED_EPOCH, *(row.epoch for row in rows)),
            model=None,
            dataset=None,
            input=None,
            num_workers=None,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    if first.status == "oom":
        failure = Failure(kind="stated_oom", message="stated as out of memory")
        outcome: dict[str, Any] = {"reason": failure.message, "failure": failure}
    else:
        gradient_bytes = None if num_parameters is None else num_parameters * BYTES_PER_PARAMETER
        epochs = tuple(build_epochs(rows, point, stated_samples))
        outcome = {"measurement": Measurement(epochs, num_parameters, gradient_bytes)}
    return record_store.new_record(point, first.status, launch_id, measured=False, environment=environment, **outcome)


def build_epochs(rows: list[CsvRow], point: spec.Spec, stated_samples: int | None) -> Iterator[Epoch]:
    """Yield the epochs of one point. The times of rank 0 stand for all ranks."""
    for row in rows:
        rank = RankEpoch(0, nanoseconds(row.epoch_time_s), nanoseconds(row.compute_time_s))
        yield Epoch(
            epoch=row.epoch,
            ranks=(rank,),
            num_updates=None if stated_samples is None else row.epoch * point.full_steps_per_epoch,
            num_samples=stated_samples,
            loss=row.loss,
            accuracy=row.accuracy,
        )


def nanoseconds(time_s: float | None) -> int | None:
    return None if time_s is None else round(time_s * 1e9)


def publish_all(records: list[Record], experiment: Experiment) -> int:
    """Publish the new records and return their number.

    Raises CommandError if a record could not be loaded again, or if the folder has records measured here: then no
    record is written. Raises it also if a write fails.
    """
    for record in records:
        try:
            record_store.encode_record(record)
        except (ValueError, TypeError) as error:  # also for a name that is not UTF-8
            raise CommandError(f"{replace_control_characters(str(error))}; correct the file or the option.") from error
    refuse_parent_folder(experiment.folder)
    experiment.create()
    known, _ = record_store.load_folder(experiment.records_folder)
    if any(record.measured for record in known):
        raise CommandError(f"{experiment.folder} has points measured here; give the file a folder of its own.")
    published = {comparable_content(record) for record in known}
    new = [record for record in records if comparable_content(record) not in published]
    with experiment.edit_manifest() as manifest:
        add_points(manifest, [record.spec for record in records])
    try:
        for record in new:
            record_store.publish_record(record, experiment.records_folder)
    except OSError as error:
        problem = f"cannot write to {experiment.records_folder}: {error.strerror}"
        raise CommandError(f"{problem}; choose another folder with --outputs.") from error
    return len(new)


def refuse_parent_folder(folder: Path) -> None:
    """Raise CommandError for a folder that contains experiments: such a folder cannot be an experiment itself."""
    found = find_experiments(folder) if folder.is_dir() else {}
    names = [name for name, experiment in found.items() if experiment.folder != folder]
    if names:
        problem = f"{folder} holds experiments ({errors.shorten_list(names, 3)})"
        raise CommandError(f"{problem}; give the file a folder of its own, such as --outputs {folder / 'NAME'}.")


def comparable_content(record: Record) -> bytes:
    """Return the record as JSON, without the fields that differ when the same file is read again."""
    return msgspec.json.encode(msgspec.structs.replace(record, attempt=0, launch_id="", started_at=None, ended_at=None))


if __name__ == "__main__":
    errors.run_command(main)
