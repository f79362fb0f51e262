"""Rows as Markdown for people: what does not vary is said once above, where it comes from in a line below."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tabulate

from pipeline.analysis.stopping_rule import MAX_TIME_HALF_WIDTH
from pipeline.experiment.outcomes import CollectedOutcomes
from pipeline.experiment.record import Environment, Record
from pipeline.experiment.spec import AXES
from pipeline.report.build_tables import Tables
from pipeline.report.rows import Row
from pipeline.report.table_definitions import LEGENDS, TABLE_DEFINITIONS, TableDefinition
from pipeline.system.errors import pluralize

NOT_STATED = "not stated"
ABSENT = "-"
LARGE_LOSS = 1e5  # its digits say nothing
AXES_WITH_ABSENCE = {"max_steps": "whole epoch", "memory_limit_gib": "none", "bucket_cap_mb": "default"}
COLUMN_HEADINGS = {"noise_floor": "interval"}  # of columns, where a person reads another word than a script
SHOWN_IF_ABSENT = re.compile(r"^(epoch|compute|data)_time_s$|_subtraction_s$")
UNSAFE_CHARACTERS = re.compile(r"[|<>`\[\]\\]")
RARE_TRANSFER = re.compile(r"^(batchnorm_statistics|parameters|inputs|outputs)_\w+_per_step$")
STATE_COLUMNS = (
    *("epoch_time_s", "epoch", "plain_step_time_s", "step_time_s", "gradients_calls_per_step", "time_s"),
    "largest_batch_size_per_gpu",
)
STATUS_WORDS = {"oom": "OOM", "failed": "failed", "missing": "missing", "rejected": "rejected"}


def render_experiment(name: str, tables: Tables, collected: CollectedOutcomes) -> str:
    """The report of one experiment."""
    source = render_provenance(outcome.record for outcome in collected.outcomes if outcome.record)
    parts = [f"# {escape_markdown(name)}", render_coverage(collected), *render_precision(tables)]
    for layout in TABLE_DEFINITIONS:
        rows = rows_of(layout, tables)
        if rows and (layout.table != "Q2" or any(row["num_gpus"] > 1 for row in rows)):
            parts.append(render_table(layout, rows, "" if layout.table == "cost" else source))
    if tables.oom:
        parts.append(render_oom(tables.oom))
    if collected.notes:
        parts.append("Files left out:\n\n" + "\n".join(f"- {escape_markdown(note)}" for note in collected.notes))
    return "\n\n".join(parts) + "\n"


def rows_of(layout: TableDefinition, tables: Tables) -> list[Row]:
    """The rows of one table for people; under strong scaling those of one global batch stand together, by N."""
    rows: list[Row] = getattr(tables, layout.table)
    if layout.scaling:
        rows = [row for row in rows if row["scaling"] == layout.scaling]
    if layout.scaling == "strong":
        rows.sort(key=lambda row: (row["global_batch_size"], row["num_gpus"]))
    return rows


def render_coverage(collected: CollectedOutcomes) -> str:
    """How many points came to what, and by name those without a result."""
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
    """How many points have an interval that is narrow enough; nothing where no point has one."""
    timed = [row for row in (*tables.Q2, *tables.communication, *tables.split) if row.get("scaling") != "strong"]
    floors = [row["noise_floor"] for row in timed if row["noise_floor"] is not None]
    narrow = sum(floor <= MAX_TIME_HALF_WIDTH for floor in floors)
    within = f"±{100 * MAX_TIME_HALF_WIDTH:.0f} %"
    return [f"Intervals: {narrow} of {len(floors)} points lie within {within} of their median."] * bool(floors)


def render_table(layout: TableDefinition, rows: Sequence[Row], source: str) -> str:
    """Heading, what holds for all rows, the table, what the figures mean, and where they come from."""
    columns = [axis for axis in AXES if axis in rows[0] and axis not in (*layout.figures, *layout.hidden)]
    common = [axis for axis in columns if all(row[axis] == rows[0][axis] for row in rows)]
    header = [axis for axis in columns if axis not in common]
    state = next((figure for figure in layout.figures if figure in STATE_COLUMNS), None)
    header += [
        figure
        for figure in layout.figures
        if any(is_worth_showing(row, figure) or (figure == state and row["status"] in STATUS_WORDS) for row in rows)
    ]
    header += ["num_windows"] * any(row.get("num_windows", 0) > row["n"] for row in rows)
    header += [extra for extra in ("n", "note") if any(row[extra] not in (None, 1) for row in rows)]
    cells = [[format_cell(row, column, column == state) for column in header] for row in rows]
    said_once = f"All rows: {', '.join(f'{axis} {format_value(axis, rows[0][axis])}' for axis in common)}." * bool(
        common
    )
    names = [COLUMN_HEADINGS.get(column, column) for column in header]
    table = tabulate.tabulate(cells, headers=names, tablefmt="pipe", disable_numparse=True, colalign=alignment(header))
    legend = " ".join(
        [layout.legend, *(text.format(windows=layout.windows) for column, text in LEGENDS.items() if column in header)]
    )
    return "\n\n".join(filter(None, (f"## {layout.heading}", said_once, table, legend, source)))


def is_worth_showing(row: Row, figure: str) -> bool:
    """Whether the row says something of the figure: a time that is absent and a loss that diverged do."""
    if RARE_TRANSFER.search(figure) and not row[figure]:
        return False
    if row[figure] is not None or (SHOWN_IF_ABSENT.search(figure) and "step_time_s" not in row):
        return True
    return figure == "loss" and row["diverged_at_update"] is not None


def alignment(header: Sequence[str]) -> list[str]:
    """Words to the left, figures to the right."""
    words = {"strategy", "precision", "input", "dataset", "model", "baseline", "remedies", "interval_over"}
    words |= {"ending", "note"}
    return ["left" if column in words else "right" for column in header]


def render_oom(rows: Sequence[Row]) -> str:
    """Where memory ends."""
    lines = []
    for row in rows:
        probe = f", probe of {row['max_steps']} steps" if row["max_steps"] else ""
        where = f"{row['strategy']} on {row['num_gpus']}, batch_size_per_gpu {row['batch_size_per_gpu']}"
        lines.append(f"- {where}{probe}: OOM ({escape_markdown(row['reason'])})")
    return "\n\n".join(["## Out of memory", "\n".join(lines)])


def format_cell(row: Row, column: str, holds_state: bool) -> str:
    """A figure for people; where the point has none, its state stands in the one that holds it."""
    value = row[column]
    if value is None and holds_state and row["status"] in STATUS_WORDS:
        return STATUS_WORDS[row["status"]]
    if value is None and column == "loss" and row.get("diverged_at_update") is not None:
        return f"diverged at update {row['diverged_at_update']}"
    if value is None and re.search(rf"{NOT_STATED}: [^;]*\b{column}\b", row["note"] or ""):
        return NOT_STATED
    return format_value(column, value)


def format_value(column: str, value: Any) -> str:
    """A value of a column; the formats follow the units in the names."""
    if value is None:
        missing = NOT_STATED if column in AXES else ABSENT
        return "" if column == "note" else AXES_WITH_ABSENCE.get(column, missing)
    if isinstance(value, list):
        return escape_markdown(" + ".join(value)) or "none"
    if isinstance(value, float):
        return format_of(column)(value)
    return escape_markdown(str(value))


@functools.cache  # a column has as many cells as there are points
def format_of(column: str) -> Callable[[float], str]:
    """How a column's numbers are written."""
    return next((form for pattern, form in FORMATS if re.search(pattern, column)), lambda value: f"{value:.6g}")


FORMATS: tuple[tuple[str, Callable[[float], str]], ...] = (
    (r"^noise_floor$", lambda value: f"±{100 * value:.1f} %"),
    (r"serial_fraction", lambda value: f"{value:.3f}"),
    (r"efficiency", lambda value: f"{100 * value:.1f} %"),
    (r"accuracy", lambda value: f"{100 * value:.2f} %"),
    (r"_per_s$", lambda value: f"{value:,.0f}"),
    (r"_gib$", lambda value: f"{value:.2f}"),
    (r"energy|_hours", lambda value: f"{value:.3g}" if value < 100 else f"{value:,.0f}"),
    (r"_mhz$", lambda value: f"{value:.0f}"),
    (r"_share$", lambda value: f"{100 * value:.1f} %"),
    (r"_gb_s$", lambda value: f"{value:.3g}"),
    (r"^speedup$", lambda value: f"{value:.3f}"),
    (r"_error$", lambda value: f"{100 * value:+.1f} %"),
    (r"_(calls|bytes)_", lambda value: f"{value:,.6g}" if value < 1000 else f"{value:,.0f}"),
    (r"_us$", lambda value: f"{value:.2f}"),
    (r"_s$", lambda value: f"{value:.3f}" if abs(value) >= 0.1 else f"{1e6 * value:,.1f} us"),
    (r"loss", lambda value: f"{value:.4f}" if abs(value) < LARGE_LOSS else f"{value:.1e}"),
)


def escape_markdown(text: str) -> str:
    """Text that cannot break out of a Markdown cell or become HTML, a link or a terminal escape."""
    printable = text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", printable) if UNSAFE_CHARACTERS.search(printable) else printable


def render_provenance(records: Iterable[Record]) -> str:
    """Where the figures of a table come from; what differs between records is listed, never hidden."""
    found = [record for record in records if record.status == "ok"]
    if not found:
        return "From no record: nothing was measured."
    count = f"From {len(found)} record{'s' * (len(found) > 1)}"
    places = list({id(record.environment): record.environment for record in found}.values())  # repeats share one
    if not any(record.measured for record in found):
        sources = distinct(place.source for place in places)
        gpus = distinct(gpu.name for place in places for gpu in place.gpus)
        where = f"{count} stated elsewhere ({sources})"
        return f"{where}: GPU {gpus or NOT_STATED}, versions {NOT_STATED}. Medians over n runs."
    precisions = distinct(record.measurement.precision_used for record in found if record.measurement)
    computing = f", computing in {precisions}" if precisions else ""
    return f"{count} measured on {hardware(places)}{computing}; {software(places)}. Medians over n runs."


def hardware(places: Sequence[Environment]) -> str:
    """GPUs or CPUs."""
    gpus = distinct(gpu.name for place in places for gpu in place.gpus)
    cpus = distinct(place.cpu for place in places)
    return gpus or cpus or NOT_STATED


def software(places: Sequence[Environment]) -> str:
    """Versions and commit; the source's digest stands in where there is no commit."""
    parts = []
    fields = {"torch": "torch", "NCCL": "nccl", "driver": "driver", "commit": "git_commit", "source": "source_digest"}
    for label, field in fields.items():
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
    """The values that occur, once each; several are marked as mixed."""
    seen = sorted({value for value in values if value})
    text = escape_markdown(", ".join(seen))
    return f"{text} (mixed)" if len(seen) > 1 else text
