"""Rows as Markdown for people: what does not vary is said once above, where it comes from in a line below."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tabulate

from pipeline.cells import TIMED_EPOCH
from pipeline.outcomes import Collected
from pipeline.schema import Record
from pipeline.spec import AXES
from pipeline.tables import Row, Tables

NOT_STATED = "not stated"
ABSENT = "-"
AXES_WITH_ABSENCE = {"max_steps": "whole epoch", "memory_limit_gib": "none", "bucket_cap_mb": "default"}
ENERGY_FIGURES = ("energy_j", "energy_per_sample_j", "sm_clock_mhz")
ENERGY_LEGEND = " energy_j of all GPUs used, without the host; sm_clock_mhz of the slowest GPU."
WORDS = {"oom": "OOM", "failed": "failed", "missing": "missing", "rejected": "rejected"}


class Layout(NamedTuple):
    """A table of the report: its heading, its figures in order, and what the reader must know of them."""

    heading: str
    figures: tuple[str, ...]
    legend: str


LAYOUTS = {
    "Q1": Layout(
        "Q1: epoch time against batch size, one GPU",
        (
            *("epoch_time_s", "compute_time_s", "data_time_s", "throughput_samples_per_s", "peak_memory_gib"),
            *(*ENERGY_FIGURES, "host_cpu_share"),
        ),
        f"Epoch {TIMED_EPOCH} of each run; epoch_time_s with data loading, compute_time_s without; peak_memory_gib of "
        "the fullest GPU, on the CPU of the largest process.",
    ),
    "Q2": Layout(
        "Q2: speed-up against one GPU, per-GPU batch fixed (weak scaling)",
        ("epoch_time_s", "throughput_samples_per_s", "speedup", "parallel_efficiency", "baseline", *ENERGY_FIGURES),
        "speedup = T(1)/T(N) for an epoch of the same samples; parallel_efficiency = speedup/N. The global batch "
        "grows with N: this is not strong scaling.",
    ),
    "Q3": Layout(
        "Q3: computation against communication, estimated by subtraction",
        (
            "epoch_time_s",
            "compute_time_subtraction_s",
            "comm_time_subtraction_s",
            "steps_per_epoch",
            "ring_bytes_per_epoch",
            "bandwidth_subtraction_gb_s",
            "baseline",
        ),
        "compute = T(1)/N and comm = T(N) - T(1)/N, so every cost that does not divide by N counts as communication. "
        "Bytes and time are those of the whole epoch: steps x 2(N-1)/N x gradient bytes.",
    ),
    "Q4": Layout(
        "Q4: loss and accuracy by epoch",
        ("remedies", "epoch", "num_updates", "loss", "accuracy", "test_loss", "test_accuracy"),
        "loss and accuracy are of the training set as it was seen; num_updates counts from the start.",
    ),
}


def render_experiment(name: str, tables: Tables, collected: Collected) -> str:
    """The report of one experiment."""
    records = [outcome.record for outcome in collected.outcomes if outcome.record]
    parts = [f"# {escape(name)}", render_coverage(collected)]
    for key, layout in LAYOUTS.items():
        rows: list[Row] = getattr(tables, key)
        if rows and (key != "Q2" or any(row["num_gpus"] > 1 for row in rows)):
            parts.append(render_table(layout, rows, provenance(records)))
    if tables.oom:
        parts.append(render_oom(tables.oom))
    if collected.notes:
        parts.append("Files left out:\n\n" + "\n".join(f"- {escape(note)}" for note in collected.notes))
    return "\n\n".join(parts) + "\n"


def render_coverage(collected: Collected) -> str:
    """How many points came to what, and by name those without a result."""
    coverage = collected.coverage
    line = (
        f"{coverage.expected} points expected: {coverage.ok} ok, {coverage.oom} OOM, {coverage.failed} failed, "
        f"{coverage.missing} missing, {coverage.rejected} rejected. "
        f"Files besides: {coverage.superseded} superseded, {coverage.duplicate} duplicate, {coverage.foreign} foreign."
    )
    gaps = [
        f"- {outcome.spec.run_id()}: {outcome.status}, {escape(outcome.reason)}"
        for outcome in collected.outcomes
        if outcome.status not in ("ok", "oom")
    ]
    return "\n\n".join([line, *(["\n".join(gaps)] if gaps else [])])


def render_table(layout: Layout, rows: Sequence[Row], source: str) -> str:
    """Heading, what holds for all rows, the table, what the figures mean, and where they come from."""
    columns = [axis for axis in AXES if axis in rows[0] and axis not in layout.figures]
    common = [axis for axis in columns if all(row[axis] == rows[0][axis] for row in rows)]
    header = [axis for axis in columns if axis not in common]
    header += [figure for figure in layout.figures if any(is_worth_showing(row, figure) for row in rows)]
    header += [extra for extra in ("n", "note") if any(row[extra] not in (None, 1) for row in rows)]
    cells = [[format_cell(row, column) for column in header] for row in rows]
    said_once = f"All rows: {', '.join(f'{axis} {format_value(axis, rows[0][axis])}' for axis in common)}." * bool(
        common
    )
    table = tabulate.tabulate(cells, headers=header, tablefmt="pipe", disable_numparse=True, colalign=alignment(header))
    legend = layout.legend + ENERGY_LEGEND * ("energy_j" in header)
    return "\n\n".join(filter(None, (f"## {layout.heading}", said_once, table, legend, source)))


def is_worth_showing(row: Row, figure: str) -> bool:
    """Whether the row says something of the figure: a time that is absent and a loss that diverged do."""
    return row[figure] is not None or "time" in figure or (figure == "loss" and row["diverged_at_update"] is not None)


def alignment(header: Sequence[str]) -> list[str]:
    """Words to the left, figures to the right."""
    words = {"strategy", "precision", "input", "dataset", "model", "baseline", "remedies", "note"}
    return ["left" if column in words else "right" for column in header]


def render_oom(rows: Sequence[Row]) -> str:
    """Where memory ends."""
    lines = []
    for row in rows:
        probe = f", probe of {row['max_steps']} steps" if row["max_steps"] else ""
        where = f"{row['strategy']} on {row['num_gpus']}, batch_size_per_gpu {row['batch_size_per_gpu']}"
        lines.append(f"- {where}{probe}: OOM ({escape(row['reason'])})")
    return "\n\n".join(["## Out of memory", "\n".join(lines)])


def format_cell(row: Row, column: str) -> str:
    """A figure for people; where the point has none, its state stands in the first one."""
    value = row[column]
    if value is None and column in ("epoch_time_s", "epoch") and row["status"] in WORDS:
        return WORDS[row["status"]]
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
        return escape(" + ".join(value)) or "none"
    if isinstance(value, float):
        return next((form(value) for pattern, form in FORMATS if re.search(pattern, column)), f"{value:.6g}")
    return escape(str(value))


FORMATS: tuple[tuple[str, Callable[[float], str]], ...] = (
    (r"efficiency", lambda value: f"{100 * value:.1f} %"),
    (r"accuracy", lambda value: f"{100 * value:.2f} %"),
    (r"_per_s$", lambda value: f"{value:,.0f}"),
    (r"_gib$", lambda value: f"{value:.2f}"),
    (r"energy", lambda value: f"{value:.3g}" if value < 100 else f"{value:,.0f}"),
    (r"_mhz$", lambda value: f"{value:.0f}"),
    (r"_share$", lambda value: f"{100 * value:.1f} %"),
    (r"_gb_s$", lambda value: f"{value:.3g}"),
    (r"^speedup$", lambda value: f"{value:.3f}"),
    (r"_s$", lambda value: f"{value:.3f}" if value >= 0.1 else f"{value:.3g}"),
    (r"loss", lambda value: f"{value:.4f}"),
)


def escape(text: str) -> str:
    """Text that cannot break out of a Markdown cell or become HTML, a link or a terminal escape."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", printable) if re.search(r"[|<>`\[\]\\]", printable) else printable


def provenance(records: Iterable[Record]) -> str:
    """Where the figures of a table come from; what differs between records is listed, never hidden."""
    found = [record for record in records if record.status == "ok"]
    if not found:
        return "From no record: nothing was measured."
    count = f"From {len(found)} record{'s' * (len(found) > 1)}"
    if not any(record.measured for record in found):
        sources = distinct(record.environment.source for record in found)
        gpus = distinct(gpu.name for record in found for gpu in record.environment.gpus)
        where = f"{count} stated elsewhere ({sources})"
        return f"{where}: GPU {gpus or NOT_STATED}, versions {NOT_STATED}. Medians over n runs."
    return f"{count} measured on {hardware(found)}; {software(found)}. Medians over n runs."


def hardware(found: Sequence[Record]) -> str:
    """GPUs or CPUs, and what they computed in."""
    gpus = distinct(gpu.name for record in found for gpu in record.environment.gpus)
    cpus = distinct(record.environment.cpu for record in found)
    used = distinct(record.measurement.precision_used for record in found if record.measurement)
    return f"{gpus or cpus or NOT_STATED}, computing in {used}"


def software(found: Sequence[Record]) -> str:
    """Versions and commit."""
    parts = []
    for label, field in (("torch", "torch"), ("NCCL", "nccl"), ("driver", "driver"), ("commit", "git_commit")):
        values = distinct(str(getattr(record.environment, field) or "")[:20] for record in found)
        if values:
            parts.append(f"{label} {values}")
    if any(record.environment.git_dirty for record in found):
        parts.append("with uncommitted changes")
    return ", ".join(parts) or "versions not stated"


def distinct(values: Iterable[str | None]) -> str:
    """The values that occur, once each; several are marked as mixed."""
    seen = sorted({value for value in values if value})
    text = escape(", ".join(seen))
    return f"{text} (mixed)" if len(seen) > 1 else text
