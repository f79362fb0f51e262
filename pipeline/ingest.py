"""Convert timings from elsewhere into records. Tables mark such records as not measured here.

    python -m pipeline.ingest FILE.csv --outputs outputs/NAME --gpu "NVIDIA A40"

`--help` lists the columns. The table may come from pandas, Excel or R, or be one in Markdown. Rows that differ only in
epoch become one record. Ingesting the same file again changes nothing.
Exit codes: 0 success, 2 the file or the folder is wrong.
"""

import argparse
import csv
import io
import itertools
import math
import operator
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from pipeline.figures.pooling import group_pairs
from pipeline.plan import axes, spec
from pipeline.plan.point_label import point_labels
from pipeline.plan.strategies import STRATEGIES, StrategyName
from pipeline.records import store
from pipeline.records.folder import Experiment, add_points, displayable_name, find_experiments
from pipeline.records.record import Environment, Epoch, Failure, Gpu, Measurement, RankEpoch, Record, UnitFraction
from pipeline.submission.plan import command
from pipeline.system import errors
from pipeline.system.command_line import build_parser, positive_integer
from pipeline.system.errors import CommandError, pluralize, replace_control_characters
from pipeline.system.files import UnreadableFile, read_bounded

MAX_CSV_BYTES = 16_000_000
STRATEGY_CELLS = ", ".join([*STRATEGIES][:-1]) + f" or {[*STRATEGIES][-1]}"
COLUMNS_HELP = f"""columns of the file, in any order; an empty cell means not measured:
  strategy            {STRATEGY_CELLS}, or the name of torch's class
  num_gpus            GPUs in total
  batch_size_per_gpu  samples per GPU and step
  epoch_time_s        seconds of the epoch; empty, or OOM, if the configuration ran out of memory
optional columns:
  status              ok or oom, in lower or upper case (without the column: ok)
  epoch               number from 1 (empty, or without the column: 2, the first epoch after the warm-up)
  compute_time_s      seconds of the epoch without waiting for data
  loss                mean training loss of the epoch
  accuracy            training accuracy, as a fraction (0.509) or with a percent sign (50.9%)
  num_nodes, repeat   numbers (without the column: 1 node, repeat 0)
  precision           fp32, tf32, bf16 or fp16
Common other names are known, such as "GPUs" and "Epoch time (s)". Cells are separated by a comma, a semicolon, a tab, a
bar or spaces. Numbers may have a decimal comma. Lines that begin with # are comments."""
MAX_COLUMN_CHARS = 40  # of a name that a message quotes
MAX_LISTED = 3  # configurations in a notice
POINT_COLUMNS = ("strategy", "num_nodes", "num_gpus", "batch_size_per_gpu", "precision", "repeat")
WHOLE_COLUMNS = ("num_gpus", "batch_size_per_gpu", "num_nodes", "epoch", "repeat")
MEASURED_COLUMNS = ("epoch_time_s", "compute_time_s", "loss", "accuracy")
BYTES_PER_PARAMETER = 4  # gradients in fp32, as DistributedDataParallel sends them

SEPARATORS = (",", ";", "\t", "|", " ")
MAX_LINES_TO_HEADER = 50
COLUMN_NAMES = {
    "strategy": ("method", "parallelism"),
    "num_gpus": ("gpus", "n_gpus", "ngpus", "number_of_gpus", "gpu_count", "world_size"),
    "batch_size_per_gpu": ("batch_size", "batch", "bs", "batch_per_gpu", "per_gpu_batch_size", "local_batch_size"),
    "epoch_time_s": ("epoch_time", "time_per_epoch", "time"),
    "compute_time_s": ("compute_time", "computation_time"),
    "loss": ("train_loss", "training_loss"),
    "accuracy": ("acc", "train_acc", "train_accuracy", "training_accuracy"),
    "num_nodes": ("nodes", "n_nodes", "number_of_nodes"),
}
"""Other names of a column, in the words that `split_name` returns."""
INDEX_NAME = re.compile(r"|index|unnamed_\d+|row|id|row_?names?|x")  # of a first column: pandas, R
STRATEGY_NAMES = {alias: one.name for one in STRATEGIES.values() for alias in (*one.aliases, one.name)}
"""The names of a strategy, without what is not a letter or a digit, and without the module of torch."""
SECONDS_IN = {**dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0), "ms": 1e-3, "min": 60.0}
UNITS = {"epoch_time_s": SECONDS_IN, "compute_time_s": SECONDS_IN, "accuracy": {"%": 0.01, "percent": 0.01}}
"""Units of a column, in its name or behind a number, and what the number is multiplied by."""
UNIT_IN_BRACKETS = re.compile(r"([^(\[]+)[(\[]([^)\]]*)[)\]]\s*")
BLANK_CELLS = ("na", "nan", "n/a", "#n/a", "<na>", "null", "none", "-", "\N{EN DASH}", "\N{EM DASH}")
OOM_CELL = re.compile(r"\boom\b|out[ -]?of[ -]?memory")
NUMBER = re.compile(r"([+-]?)([\d.,]*\d)(e[+-]?\d+)?", re.ASCII)
THOUSANDS_SPACE = re.compile(r"(?<=\d)[ \u00a0\u2009\u202f'\u2019](?=\d{3}(?!\d))")
NOT_A_NUMBER = "is not a number; leave the cell empty if it was not measured."

WHOLE = "a whole number from 1 on"
WANTED = {
    **dict.fromkeys(("num_gpus", "batch_size_per_gpu", "num_nodes"), WHOLE),
    **dict.fromkeys(("epoch_time_s", "compute_time_s"), "seconds above 0; leave the cell empty if it was not measured"),
    "epoch": f"{WHOLE}; add 1 to all epochs if the first one is 0",
    "strategy": STRATEGY_CELLS,
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
    """A row of the file. The header must name each column that has no default here. COLUMNS_HELP explains them all.

    `where` is no column: the file and the line, for messages.
    """

    strategy: StrategyName
    num_gpus: axes.PositiveInt
    batch_size_per_gpu: axes.PositiveInt
    epoch_time_s: PositiveSeconds | None
    epoch: EpochNumber = spec.FIRST_TIMED_EPOCH
    compute_time_s: PositiveSeconds | None = None
    loss: float | None = None
    accuracy: UnitFraction | None = None
    status: Literal["ok", "oom"] = "ok"
    num_nodes: axes.PositiveInt = 1
    repeat: axes.NonNegativeInt = 0
    precision: axes.Precision | None = None
    where: str = ""


CSV_COLUMNS = {field.name: field for field in msgspec.structs.fields(CsvRow) if field.name != "where"}
COLUMN_OF_NAME = {
    name: column for column in CSV_COLUMNS for name in (column.removesuffix("_s"), *COLUMN_NAMES.get(column, ()))
}


class Line(NamedTuple):
    """A row of the file: its place, for messages, and its cells by column."""

    where: str
    cells: dict[str, str]


def parse_arguments() -> argparse.Namespace:
    parser = build_parser("ingest", __doc__)
    parser.epilog, parser.formatter_class = COLUMNS_HELP, argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="a table as text (CSV) with the columns below")
    parser.add_argument("--outputs", type=Path, required=True, help="the experiment's folder, such as outputs/a40-ddp")
    parser.add_argument("--gpu", type=str.strip, help="the GPU's name (without it, tables show 'not stated')")
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
    if untimed := sum(rows[-1].status == "ok" and rows[-1].epoch < spec.FIRST_TIMED_EPOCH for rows in points):
        what = f"{pluralize(untimed, 'configuration')} of {len(points):,} with epoch 1 alone, the warm-up"
        cure = "leave the column `epoch` out if these times are after the warm-up"
        errors.log_line(f"Notice: {arguments.file.name} has {what}, so the epoch time is not stated; {cure}.")
    gpus = (Gpu(name=arguments.gpu),) if arguments.gpu else ()
    environment = Environment(gpus=gpus, source=displayable_name(arguments.file.name))
    sizes = (arguments.num_samples, arguments.num_parameters)
    launch_id = f"ingest-{secrets.token_hex(8)}"
    records = [build_ingested_record(rows, *sizes, launch_id, environment) for rows in points]
    experiment = Experiment(arguments.outputs)
    num_new = publish_all(records, experiment)
    known = f"{len(records) - num_new} known, in {experiment.folder}"
    errors.log_line(f"{errors.pluralize(num_new, 'record')} new, {known}.")
    name_points_of_other_files(experiment, {record.run_id for record in records}, environment.source)
    return errors.EXIT_OK


def name_points_of_other_files(experiment: Experiment, run_ids: Collection[str], source: str | None) -> None:
    """Name the points that this file does not have: a file that was corrected may have lost them."""
    manifest = experiment.read_manifest()
    labels = point_labels(manifest.points if manifest else [])
    if others := [run_id for run_id in labels if run_id not in run_ids]:
        listed = errors.shorten_list([f'"{labels[run_id]}"' for run_id in others], MAX_LISTED)
        cure = f"take out what is wrong: {command('drop', experiment.folder)} --only {' '.join(others)}"
        if len(others) > MAX_LISTED:
            cure = "if they are wrong, ingest your files into a new folder."
        what = f"{pluralize(len(others), 'configuration')} of an earlier file, not in {source}"
        errors.log_line(f"Notice: {experiment.folder} has {what} ({listed}); {cure}")


def read_rows(raw: bytes, name: str) -> list[CsvRow]:
    """Return all rows, strictly typed. Raises CommandError with the line and the column."""
    try:  # Excel writes "Unicode text" as UTF-16
        text = raw.decode("utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise CommandError(f"{name} is not UTF-8 text; save it as CSV in UTF-8.") from error
    lines, factors, separator = read_table(list(io.StringIO(text, newline="")), name)
    if not lines:
        raise CommandError(f"{name} has no rows below its header; give at least one configuration.")
    decimal = find_decimal_mark(lines, separator)
    return [read_row(line, factors, decimal) for line in lines]


def read_table(text: list[str], name: str) -> tuple[list[Line], dict[str, float], str]:
    """Return the rows below the header, the factor of each column that has a unit, and the separator.

    Leaves out comments, titles, empty rows, the rules of Markdown, repeated headers and the index. Raises CommandError.
    """
    place, separator = find_header(text)
    lines = ["\n" if is_comment(line) and number != place else line for number, line in enumerate(text, 1)]
    rows = parse_rows(lines, separator, name)
    while rows and rows[0][0] < place and not any(map(NUMBER.fullmatch, rows[0][1])):
        rows.pop(0)  # a title, or Excel's `sep=;`
    (number, header), *below = rows or [(1, [])]
    header, below = drop_index(header, [row for row in below if row[1] != header])  # appended with its header
    columns, factors = read_header(header, f"{name} line {number}")
    places = ((f"{name} line {number}", cells) for number, cells in below)
    return [Line(where, name_cells(columns, cells, where)) for where, cells in places], factors, separator


def find_header(lines: list[str]) -> tuple[int, str]:
    """Return the number of the line that names the most columns, and the separator with which it does."""
    found = [
        (count_columns(line, separator), not is_comment(line), -number, -rank)
        for number, line in enumerate(lines[:MAX_LINES_TO_HEADER], 1)
        for rank, separator in enumerate(SEPARATORS)
    ]
    most, _, number, rank = max(found, default=(0, False, -1, 0))
    return (-number, SEPARATORS[-rank]) if most else (0, ",")


def count_columns(line: str, separator: str) -> int:
    try:
        cells = next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
    except csv.Error:
        return 0
    return len({split_name(cell)[0] for cell in cells[:1000]} & CSV_COLUMNS.keys())


def is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def parse_rows(lines: list[str], separator: str, name: str) -> list[tuple[int, list[str]]]:
    """Return the cells of each row that is neither empty nor a rule, with its line. Raises CommandError."""
    if separator == " ":  # columns padded with spaces, as R and pandas print them
        lines = [f"{line.strip()}\n" for line in lines]
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    try:
        rows = [
            (reader.line_num, [cell.strip(" \t*`" if separator == "|" else None) for cell in cells]) for cells in reader
        ]
    except csv.Error as error:
        cure = "check its quotation marks"
        raise CommandError(f"{name} line {reader.line_num} is not CSV: {error}; {cure}.") from error
    return [row for row in rows if set("".join(row[1])) - set("-=+:| ")]


def drop_index(header: list[str], rows: list[tuple[int, list[str]]]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return header and rows without columns that are empty, and without the row numbers before the first column."""
    names = [split_name(cell)[0] for cell in header]
    if rows and "strategy" in names and all(len(cells) == len(header) + 1 for _, cells in rows):
        place = names.index("strategy")  # R names the rows, but not their column
        if all(read_strategy(cells[place]) not in STRATEGIES for _, cells in rows):
            header = ["", *header]
    dropped: set[int] = set()
    for place, cell in enumerate(header):
        is_index = len(dropped) == place and INDEX_NAME.fullmatch(split_name(cell)[0])
        is_empty = not cell and all(cells[place : place + 1] in ([], [""]) for _, cells in rows)
        if is_index or is_empty:
            dropped.add(place)
    kept = [(number, [cell for place, cell in enumerate(cells) if place not in dropped]) for number, cells in rows]
    return [cell for place, cell in enumerate(header) if place not in dropped], kept


def split_name(cell: str) -> tuple[str, str]:
    """Return the column that a name of the header means, and its unit: `Epoch time [ms]` is (epoch_time_s, ms).

    A name that means none is returned in lower case, its words joined by `_`.
    """
    words = re.findall(r"[a-z0-9]+|%", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cell).lower())
    key = "_".join(words)
    if key in COLUMN_OF_NAME:
        return COLUMN_OF_NAME[key], ""
    column = COLUMN_OF_NAME.get("_".join(words[:-1]), "")
    return (column, words[-1]) if words and words[-1] in UNITS.get(column, ()) else (key, "")


def read_header(header: list[str], where: str) -> tuple[list[str], dict[str, float]]:
    """Return the columns in order, and the factor of each column that has a unit. Raises CommandError."""
    named = [split_name(cell) for cell in header]
    columns = [column for column, _ in named]
    counts = Counter(columns)
    missing = [column for column, field in CSV_COLUMNS.items() if field.required and column not in counts]
    unknown = [
        cell or "column without a name"
        for cell, column in zip(header, columns, strict=True)
        if column not in CSV_COLUMNS
    ]
    twice = sorted(column for column, count in counts.items() if count > 1 and column in CSV_COLUMNS)
    whole_batch = [cell for cell in unknown if re.search("(global|total|effective).*batch", cell.lower())]
    if whole_batch:
        problem = f"the header has {whole_batch[0][:MAX_COLUMN_CHARS]!r}, of all GPUs"
        raise CommandError(f"{where}: {problem}; divide it by num_gpus and name it batch_size_per_gpu.")
    for match in filter(None, map(UNIT_IN_BRACKETS.fullmatch, unknown)):
        if known := UNITS.get(column := split_name(match[1])[0]):
            problem = f"{match[2][:MAX_COLUMN_CHARS]!r} of the header is no unit of {column}"
            raise CommandError(f"{where}: {problem}; use {', '.join(known)}, or leave the brackets out.")
    for problem, names in (("lacks", missing), ("has the unknown", unknown), ("repeats", twice)):
        if names:
            listed = errors.shorten_list([name[:MAX_COLUMN_CHARS] for name in names], 5)
            raise CommandError(f"{where}: the header {problem} {listed}; the columns are {', '.join(CSV_COLUMNS)}.")
    renamed = [
        f"{cell} as {column}"
        for cell, (column, unit) in zip(header, named, strict=True)
        if "_".join(re.findall("[a-z0-9]+", cell.lower())) != column and not unit
    ]
    if renamed:
        errors.log_line(f"{where}: read {', '.join(renamed)}; rename a column that means something else.")
    return columns, {column: UNITS[column][unit] for column, unit in named if unit}


def name_cells(columns: list[str], cells: list[str], where: str) -> dict[str, str]:
    """Return the cells by column; empty ones, and words for none such as NA, are "". Raises CommandError."""
    if len(cells) != len(columns):
        more = "put a cell that has the separator in it, such as 22,3, in quotation marks"
        cure = more if len(cells) > len(columns) else "leave a cell empty if its value is unknown"
        raise CommandError(f"{where} has {len(cells)} cells for {len(columns)} columns; {cure}.")
    return {column: "" if cell.lower() in BLANK_CELLS else cell for column, cell in zip(columns, cells, strict=True)}


def read_strategy(cell: str) -> str:
    """Return the strategy that a cell means: `nn.DataParallel` is dp. Other text is returned in lower case."""
    letters = "".join(re.findall("[a-z0-9]", cell.lower().rpartition(".")[2]))
    return STRATEGY_NAMES.get(letters, cell.lower())


class DecimalMark(NamedTuple):
    """The decimal mark of a file, and which of its columns show it: a single `1,234` does not."""

    mark: str
    in_whole_numbers: bool
    in_fractions: bool


def find_decimal_mark(lines: list[Line], separator: str) -> DecimalMark:
    """Return the decimal mark that the numbers of a file show; a point if none does. Raises CommandError if both do.

    Semicolons between the cells show a comma, if no number shows a point: Excel and R write them for that.
    """
    seen: dict[str, str] = {}
    kinds = set()
    for line in lines:
        for column, cell in line.cells.items():
            body, _ = split_unit(column, cell)
            if (match := NUMBER.fullmatch(body)) and (mark := shown_mark(match[2], column)):
                seen.setdefault(mark, f"{line.where} ({column}={cell!r})")
                kinds.add(column in WHOLE_COLUMNS)
    if len(seen) > 1:
        both = f"{seen[',']} has a decimal comma and {seen['.'].partition(' ')[2]} a decimal point"
        raise CommandError(f"{both}; write all numbers of the file with a point.")
    if not seen and separator == ";":
        return DecimalMark(",", in_whole_numbers=True, in_fractions=True)
    return DecimalMark(next(iter(seen), "."), True in kinds, False in kinds)


def split_unit(column: str, cell: str) -> tuple[str, str]:
    """Return the number of a cell in lower case, without spaces between thousands, and its unit."""
    cell = THOUSANDS_SPACE.sub("", cell.lower())
    match = re.fullmatch(r"(.*\d)\s*([a-z]+|%)", cell)
    return (match[1], match[2]) if match and match[2] in UNITS.get(column, ()) else (cell, "")


def shown_mark(number: str, column: str) -> str | None:
    """Return the decimal mark that digits and marks show; None if there is no mark, or one before three digits."""
    marks: list[str] = re.findall("[.,]", number)
    if not marks:
        return None
    other = {".": ",", ",": "."}[marks[-1]]
    if len(marks) > 1:
        return marks[-1] if other in marks else other
    before, _, after = number.partition(marks[0])
    if len(after) != 3 or not 1 <= len(before) <= 3 or before.startswith("0"):
        return marks[0]
    return other if column in WHOLE_COLUMNS and after != "000" else None


def read_number(column: str, cell: str, where: str, decimal: DecimalMark, factor: float) -> str:
    """Return the number of a cell as Python writes it, in the column's unit; what is none as it stands.

    Raises CommandError for a number that can be read in two ways.
    """
    body, unit = split_unit(column, cell)
    match = NUMBER.fullmatch(body)
    if match is None:
        return cell
    sign, number, exponent = match.groups(default="")
    is_shown = decimal.in_fractions or (column in WHOLE_COLUMNS and decimal.in_whole_numbers)
    thousands = {".": ",", ",": "."}[decimal.mark]
    if thousands in number and not is_shown and shown_mark(number, column) is None:
        readings = f"{number.replace(thousands, '')} or {number.replace(thousands, '.')}"
        raise CommandError(f"{where}: {column}={cell!r} can be {readings}; write it without a separator of thousands.")
    if re.fullmatch(rf"\d{{1,3}}(\{thousands}\d{{3}})+(\{decimal.mark}\d*)?", number):
        number = number.replace(thousands, "")
    text = f"{sign}{number.replace(decimal.mark, '.')}{exponent}"
    try:
        value = float(text)
    except ValueError:  # 1,2,3
        return cell
    if column in WHOLE_COLUMNS:
        return str(int(value)) if not text.isdigit() and value.is_integer() and abs(value) < 2**53 else text
    factor = UNITS[column][unit] if unit else factor
    if column == "accuracy" and factor == 1 and 1 < value <= 100:
        cure = f"write a fraction ({value / 100:g}) or add the percent sign ({cell}%)"
        raise CommandError(f"{where}: accuracy={cell} is above 1; {cure}.")
    return text if factor == 1 else repr(value * factor)


def read_row(line: Line, factors: dict[str, float], decimal: DecimalMark) -> CsvRow:
    """Return one row. An empty cell becomes None or the column's default, but a cell of `status` must not be empty.

    Raises CommandError.
    """
    values: dict[str, str | None] = {"where": line.where}
    for column, cell in line.cells.items():
        if column in ("strategy", "status", "precision"):
            read = read_strategy(cell) if column == "strategy" else cell.lower()
        else:
            read = read_number(column, cell, line.where, decimal, factors.get(column, 1))
        if read or CSV_COLUMNS[column].required or column == "status":
            values[column] = read or None
    told = [column for column in (*MEASURED_COLUMNS, "status") if OOM_CELL.search((values.get(column) or "").lower())]
    if told:
        if values.get("status") == "ok":
            raise CommandError(f"{line.where}: {told[0]}={line.cells[told[0]]!r} contradicts status ok; correct one.")
        values |= {"status": "oom"} | {column: None for column in told if column != "status"}
    try:
        row = msgspec.convert(values, CsvRow, strict=False)
    except msgspec.ValidationError as error:
        column = str(error).rpartition("`$.")[2].removesuffix("`")
        cell = line.cells[column][:MAX_COLUMN_CHARS]
        raise CommandError(f"{line.where}: {column}={cell!r} must be {WANTED[column]}.") from error
    check_row(row, line.where)
    return row


def check_row(row: CsvRow, where: str) -> None:
    """Raise CommandError for a row that contradicts itself."""
    if row.loss is not None and not math.isfinite(row.loss):
        raise CommandError(f"{where}: loss={row.loss} {NOT_A_NUMBER}")
    measured = [column for column in MEASURED_COLUMNS if getattr(row, column) is not None]
    if row.status == "ok" and not measured:
        cure = "leave the row out, or write status oom if it ran out of memory"
        raise CommandError(f"{where} has no time, no loss and no accuracy; {cure}.")
    if row.status == "oom" and measured:
        raise CommandError(f"{where} has status oom and a measurement; empty the measured cells, or write status ok.")
    if row.compute_time_s and row.epoch_time_s and row.compute_time_s > row.epoch_time_s:
        raise CommandError(f"{where}: compute_time_s is longer than epoch_time_s, which includes it; correct the row.")


def group_rows(rows: Iterable[CsvRow]) -> list[list[CsvRow]]:
    """Return the rows of each point, sorted by epoch.

    Raises CommandError if a point has two rows for one epoch, or both a row with ok and a row with oom.
    """
    points = group_pairs((operator.attrgetter(*POINT_COLUMNS)(row), row) for row in rows)
    for group in points.values():
        where = f"{group[0].strategy} on {group[0].num_gpus}, batch_size_per_gpu {group[0].batch_size_per_gpu}"
        if len({row.status for row in group}) > 1:
            raise CommandError(f"{group[-1].where}: {where} is both ok and oom; remove the wrong rows.")
        if len({row.epoch for row in group}) < len(group):
            cure = "remove one, or number the repeats in a column `repeat`"
            raise CommandError(f"{group[-1].where}: {where} has two rows for one epoch; {cure}.")
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
    num_samples = axes.CIFAR10_SAMPLES if stated_samples is None else stated_samples
    share = math.ceil(num_samples / first.num_gpus)
    if first.batch_size_per_gpu > share:
        raise CommandError(
            f"{first.where}: {first.strategy} on {pluralize(first.num_gpus, 'GPU')} states batch_size_per_gpu "
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
        raise CommandError(f"{first.where}: {error}") from error
    if first.status == "oom":
        failure = Failure(kind="stated_oom", message="stated as out of memory")
        outcome: dict[str, Any] = {"reason": failure.message, "failure": failure}
    else:
        gradient_bytes = None if num_parameters is None else num_parameters * BYTES_PER_PARAMETER
        epochs = tuple(build_epochs(rows, point, stated_samples))
        outcome = {"measurement": Measurement(epochs, num_parameters, gradient_bytes)}
    return store.new_record(point, first.status, launch_id, measured=False, environment=environment, **outcome)


def build_epochs(rows: list[CsvRow], point: spec.Spec, stated_samples: int | None) -> Iterator[Epoch]:
    """Yield the epochs of one point. The times of rank 0 stand for all ranks."""
    for row in rows:
        epoch_ns, compute_ns = nanoseconds(row.epoch_time_s), nanoseconds(row.compute_time_s)
        waited_ns = None if epoch_ns is None or compute_ns is None else epoch_ns - compute_ns
        yield Epoch(
            epoch=row.epoch,
            ranks=(RankEpoch(0, epoch_ns, compute_ns, data_time_ns=waited_ns),),
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
            store.encode_record(record)
        except (ValueError, TypeError) as error:  # also for a name that is not UTF-8
            raise CommandError(f"{replace_control_characters(str(error))}; correct the file or the option.") from error
    refuse_parent_folder(experiment.folder)
    experiment.create()
    known, _ = store.load_folder(experiment.records_folder)
    store.refuse_other_origin(known, experiment.folder, measured=False)
    by_point = itertools.groupby(known, key=lambda record: record.run_id)
    latest = {run_id: comparable_content(store.choose_attempt([*attempts])) for run_id, attempts in by_point}
    new = [record for record in records if comparable_content(record) != latest.get(record.run_id)]
    with experiment.edit_manifest() as manifest:
        add_points(manifest, [record.spec for record in records])
    try:
        for record in new:
            store.publish_record(record, experiment.records_folder)
    except OSError as error:
        raise experiment.unwritable(error) from error
    return len(new)


def refuse_parent_folder(folder: Path) -> None:
    """Raise CommandError for a folder that contains experiments: such a folder cannot be an experiment itself."""
    found = find_experiments(folder) if folder.is_dir() else {}
    names = [name for name, experiment in found.items() if experiment.folder != folder]
    if names:
        problem = f"{folder} holds experiments ({errors.shorten_list(names, 3)})"
        raise CommandError(f"{problem}; give the file a folder of its own, such as --outputs {folder / 'NAME'}.")


def comparable_content(record: Record) -> bytes:
    """Return the record as JSON, without the fields that differ when the same rows are read again."""
    environment = msgspec.structs.replace(record.environment, source=None)
    same = msgspec.structs.replace(record, attempt=0, launch_id="", started_at=None, ended_at=None)
    return msgspec.json.encode(msgspec.structs.replace(same, environment=environment))


if __name__ == "__main__":
    errors.run_command(main)
