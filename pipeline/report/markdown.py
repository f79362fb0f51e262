"""Reports in Markdown: each table with its common axes above, and its legend and provenance below."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tabulate

from pipeline.analysis.stopping_rule import MAX_TIME_HALF_WIDTH
from pipeline.experiment.outcomes import CollectedOutcomes
from pipeline.experiment.record import Environment, Record
from pipeline.experiment.spec import AXES
from pipeline.report.build_tables import Tables
from pipeline.report.columns import ALL_COLUMNS, NOT_STATED, Column
from pipeline.report.row_types import Q4Row, Row
from pipeline.report.table_definitions import TABLE_DEFINITIONS, TableDefinition
from pipeline.system.errors import pluralize

UNSAFE_CHARACTERS = re.compile(r"[|<>`\[\]\\]")
MAX_SHOWN_EPOCHS = 10  # of one point in the table of Q4
STATUS_WORDS = {"oom": "OOM", "failed": "failed", "missing": "missing", "rejected": "rejected"}
VERSIONS = {"torch": "torch", "NCCL": "nccl", "driver": "driver", "commit": "git_commit", "source": "source_digest"}


def render_experiment(name: str, tables: Tables, collected: CollectedOutcomes) -> str:
    """Return the report of one experiment."""
    source = render_provenance(outcome.record for outcome in collected.outcomes if outcome.record)
    parts = [f"# {escape_markdown(name)}", render_coverage(collected), *render_precision(tables)]
    for definition in TABLE_DEFINITIONS:
        rows = rows_of(definition, tables)
        if rows and (definition.table != "Q2" or any(row["num_gpus"] > 1 for row in rows)):
            parts.append(render_table(definition, rows, "" if definition.table == "cost" else source))
    if tables.oom:
        parts.append(render_oom(tables.oom))
    if collected.notes:
        parts.append("Files left out:\n\n" + "\n".join(f"- {escape_markdown(note)}" for note in collected.notes))
    return "\n\n".join(parts) + "\n"


def rows_of(definition: TableDefinition, tables: Tables) -> list[Row]:
    """Return the rows of one table. Rows of strong scaling are sorted by global batch, then by number of GPUs."""
    rows: list[Row] = getattr(tables, definition.table)
    if definition.scaling:
        rows = [row for row in rows if row["scaling"] == definition.scaling]
    if definition.scaling == "strong":
        rows.sort(key=lambda row: (row["global_batch_size"], row["num_gpus"]))
    if definition.table == "Q4":
        rows = shorten_long_runs(tables.Q4)
    return rows


def shorten_long_runs(rows: Sequence[Q4Row]) -> list[Row]:
    """Return the rows of Q4, of a run of more than MAX_SHOWN_EPOCHS epochs only its last."""
    shown: list[Row] = []
    run: list[Row] = []
    for row, following in itertools.zip_longest(rows, rows[1:]):
        run.append(row)
        if following is None or row.epoch is None or following.epoch != row.epoch + 1:
            shown += run if len(run) <= MAX_SHOWN_EPOCHS else run[-1:]
            run = []
    return shown


def render_coverage(collected: CollectedOutcomes) -> str:
    """Return the number of points in each status, and a line for each point without a result."""
    coverage = collected.coverage
    line = (
        f"{pluralize(coverage.expected, 'point')} expected: {coverage.ok} ok, {coverage.oom} OOM, "
        f"{coverage.failed} failed, {coverage.missing} missing, {coverage.rejected} rejected. "
        f"Files besides: {coverage.superseded} superseded, {coverage.duplicate} duplicate, {coverage.foreign} foreign."
    )
    gaps = [
        f"- {outcome.spec.run_id()}: {outcome.status}, {escape_markdown(outcome.reason)}"
        for outcome in collected.outcomes
        if outcome.status not in ("ok", "oom")
    ]
    return "\n\n".join([line, *(["\n".join(gaps)] if gaps else [])])


def render_precision(tables: Tables) -> list[str]:
    """Return a line that counts the points with a narrow interval; no line if no point has an interval."""
    weak = [row for row in tables.Q2 if row.scaling == "weak"]
    rows: tuple[Row, ...] = (*weak, *tables.communication, *tables.split)
    known = [row["noise_floor"] for row in rows if row["noise_floor"] is not None]
    if not known:
        return []
    narrow = sum(floor <= MAX_TIME_HALF_WIDTH for floor in known)
    limit = f"{100 * MAX_TIME_HALF_WIDTH:.0f} %"
    return [f"Intervals: {narrow} of {len(known)} points have a half-width of at most {limit} of their median."]


def render_table(definition: TableDefinition, rows: Sequence[Row], source: str) -> str:
    """Return one table with its heading, the axes that all rows share, its legend, and its provenance."""
    axes = [axis for axis in AXES if axis in rows[0].axes and axis not in (*definition.figures, *definition.hidden)]
    common = [axis for axis in axes if all(row[axis] == rows[0][axis] for row in rows)]
    varying = [axis for axis in axes if axis not in common]
    status_key = next((key for key in definition.figures if ALL_COLUMNS[key].has_status), None)
    header = [ALL_COLUMNS[key] for key in (*varying, *figures_to_show(definition, rows, status_key))]
    cells = [[format_cell(row, column.key, column.key == status_key) for column in header] for row in rows]
    table = tabulate.tabulate(
        cells,
        headers=[column.key for column in header],
        tablefmt="pipe",
        disable_numparse=True,
        colalign=[column.alignment for column in header],
    )
    said_once = ", ".join(f"{axis} {format_value(axis, rows[0][axis])}" for axis in common)
    legend = render_legend(definition, header)
    parts = (f"## {definition.heading}", said_once and f"All rows: {said_once}.", table, legend, source)
    return "\n\n".join(filter(None, parts))


def figures_to_show(definition: TableDefinition, rows: Sequence[Row], status_key: str | None) -> list[str]:
    """Return the keys of the columns to show beside the axes: figures, windows, runs and notes."""
    figures = [
        key
        for key in definition.figures
        if any(is_shown(row, key, definition) or (key == status_key and row["status"] in STATUS_WORDS) for row in rows)
    ]
    windows = ["num_windows"] if any(getattr(row, "num_windows", 0) > row.n for row in rows) else []
    return [*figures, *windows, *(key for key in ("n", "note") if any(row[key] not in (None, 1) for row in rows))]


def is_shown(row: Row, key: str, definition: TableDefinition) -> bool:
    """Return True if this row is a reason to show the column: it has a value, or its absence says something."""
    show, value = ALL_COLUMNS[key].show, row[key]
    if value is None:
        is_always = show == "always" and key not in definition.optional
        return is_always or (key == "loss" and row["diverged_at_update"] is not None)
    return bool(value) if show == "if_not_zero" else True


def render_legend(definition: TableDefinition, header: Sequence[Column]) -> str:
    """Return the table's own legend, then the meanings of the columns that are not self-explanatory."""
    meanings = [f"{column.key}: {column.meaning}" for column in header if column.is_explained]
    if any(column.key == "num_windows" for column in header):
        meanings.insert(0, f"Times are medians over num_windows {definition.windows}.")
    return " ".join(filter(None, (definition.legend, *meanings)))


def render_oom(rows: Sequence[Row]) -> str:
    """Return the list of points that ran out of memory."""
    lines = []
    for row in rows:
        probe = f", probe of {row['max_steps']} steps" if row["max_steps"] else ""
        where = f"{row['strategy']} on {row['num_gpus']}, batch_size_per_gpu {row['batch_size_per_gpu']}"
        lines.append(f"- {where}{probe}: OOM ({escape_markdown(row['reason'])})")
    return "\n\n".join(["## Out of memory", "\n".join(lines)])


def format_cell(row: Row, key: str, holds_status: bool) -> str:
    """Return the text of a cell. Without a value it is the reason: the status, a loss that diverged, not stated."""
    value = row[key]
    if value is not None:
        return format_value(key, value)
    if holds_status and row["status"] in STATUS_WORDS:
        return STATUS_WORDS[row["status"]]
    if key == "loss" and row["diverged_at_update"] is not None:
        return f"diverged at update {row['diverged_at_update']}"
    if any(note.kind == "not_stated" and key in note.values["figures"] for note in row.notes):
        return NOT_STATED
    return format_value(key, value)


def format_value(key: str, value: Any) -> str:
    """Return a value in the format of its column."""
    column = ALL_COLUMNS[key]
    if value is None:
        return column.absent
    if isinstance(value, list):
        return escape_markdown(" + ".join(value)) or "none"
    return column.format(value) if isinstance(value, float) else escape_markdown(str(value))


def escape_markdown(text: str) -> str:
    """Return text that cannot break out of a Markdown cell or become HTML, a link or a terminal escape."""
    printable = text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", printable) if UNSAFE_CHARACTERS.search(printable) else printable


def render_provenance(records: Iterable[Record]) -> str:
    """Return the provenance of a table: hardware, precision and versions, with all values that occur."""
    found = [record for record in records if record.status == "ok"]
    if not found:
        return "From no record: nothing was measured."
    count = f"From {pluralize(len(found), 'record')}"
    places = list({id(record.environment): record.environment for record in found}.values())  # repeats share one
    gpus = distinct(gpu.name for place in places for gpu in place.gpus)
    if not any(record.measured for record in found):
        where = f"{count} stated elsewhere ({distinct(place.source for place in places)})"
        return f"{where}: GPU {gpus or NOT_STATED}, versions {NOT_STATED}. Medians over n runs."
    hardware = gpus or distinct(place.cpu for place in places) or NOT_STATED
    precisions = distinct(record.measurement.precision_used for record in found if record.measurement)
    computing = f", computing in {precisions}" if precisions else ""
    return f"{count} measured on {hardware}{computing}; {software(places)}. Medians over n runs."


def software(places: Sequence[Environment]) -> str:
    """Return versions, commit and digest of the source."""
    parts = []
    for label, field in VERSIONS.items():
        length = 12 if field == "source_digest" else 20
        values = distinct(str(getattr(place, field) or "")[:length] for place in places)
        unstated = sum(getattr(place, field) is None and place.source_digest is None for place in places)
        if values and field == "git_commit" and unstated:
            values += f" (not stated by {unstated} of {len(places)} records)"
        if values:
            parts.append(f"{label} {values}")
    if any(place.git_dirty for place in places):
        parts.append("with uncommitted changes")
    if any(place.source_changed for place in places):
        parts.append("edited after it was imported")
    return ", ".join(parts) or "versions not stated"


def distinct(values: Iterable[str | None]) -> str:
    """Return the values that occur, once each; several are marked as mixed."""
    seen = sorted({value for value in values if value})
    text = escape_markdown(", ".join(seen))
    return f"{text} (mixed)" if len(seen) > 1 else text
